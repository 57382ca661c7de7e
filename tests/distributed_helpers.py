"""What the tests with several processes share."""

import torch
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from modeling_kda import KDAForCausalLM


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
