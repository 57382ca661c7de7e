"""What the tests with several processes share."""

import torch
from helpers import assert_same
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from modeling_kda import KDAForCausalLM

# gradients of two halves added instead of one sum
GRADIENT = 1e-4


def step_in_shards(source, target, plan, ids, *, new_tokens):
    """Loaded in shards by transformers itself: one step, a text, and a folder saved from the shards."""
    model = KDAForCausalLM.from_pretrained(source, distributed_config=DistributedConfig(**plan))
    output = model(ids, labels=ids)
    output.loss.backward()
    grads = {name: whole(p.grad) for name, p in model.named_parameters()}
    with torch.no_grad():
        text = model.generate(ids, max_new_tokens=new_tokens, do_sample=False)
    model.save_pretrained(target)
    sharded = {name for name, p in model.named_parameters() if isinstance(p, DTensor)}
    return {"logits": whole(output.logits.detach()), "grads": grads, "text": text, "sharded": sharded}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same_gradients(grads, model):
    """Every gradient of the model is there, up to what another order of sums makes of it.

    What all keys share has no gradient in a softmax layer, only rounding: there the largest gradient is the measure.
    """
    stages = model.config.stages
    shared = {f"model.layers.{i}.mixer.k_proj.bias" for i, stage in enumerate(stages) if stage == "softmax"}
    largest = max(p.grad.abs().max() for p in model.parameters())
    for name, p in model.named_parameters():
        if name in shared:
            assert (grads[name] - p.grad).abs().max() <= GRADIENT * largest, name
        else:
            assert_same(grads[name], p.grad, GRADIENT)
