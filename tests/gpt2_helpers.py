"""Random GPT-2 models whose every tensor matters, folders made of them, and the tolerances of the exact identities."""

import json

import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

from modeling_kda import KDAConfig, KDAForCausalLM
from modeling_kda.conversion.gpt2_weights import config_fields, to_softmax_stage

SMALL = {"vocab_size": 97, "n_positions": 48, "n_embd": 64, "n_layer": 4, "n_head": 4}
# largest difference of logits of order one that an exact rewrite may cause, by rounding alone
IDENTITY = {torch.float64: 1e-12, torch.float32: 2e-4}
# two forms of one recurrence
RECURRENCE = {torch.float64: 1e-13, torch.float32: 1e-5}
# a norm's epsilon seen through a factor on its input
NORM_EPSILON = 1e-6


def random_gpt2(seed=0, dtype=torch.float32, **fields):
    """A GPT2LMHeadModel in eval mode with random biases and gains: nothing is zero, one or symmetric."""
    torch.manual_seed(seed)
    config = GPT2Config(**{**SMALL, "bos_token_id": 0, "eos_token_id": 0, **fields})
    model = GPT2LMHeadModel(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if ".ln_" in name or "ln_f" in name:
                parameter.copy_(0.3 * noise + (1.0 if name.endswith("weight") else 0.0))
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise * (0.5 if "wte" in name or "wpe" in name else parameter.shape[0] ** -0.5))
    return model.to(dtype)


def random_ids(model, length=24, batch=2, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (batch, length), generator=generator)


def gpt2_config_dict(model):
    """What `config.json` of this model holds."""
    return json.loads(model.config.to_json_string(use_diff=False))


def save_gpt2(folder, model, *, tensors=None, config=None, kind="safetensors"):
    """A model folder written by hand, so that names and files are exactly those of the test.

    Args:
        tensors: what to store instead of the model's state dict.
        config: fields to change in `config.json`.
        kind: `safetensors` or `bin`; with `-sharded` appended, two shards and an index.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(gpt2_config_dict(model) | (config or {})))
    if tensors is None:
        tensors = {name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}
    tensors = {name: t.detach().clone().contiguous() for name, t in tensors.items()}
    stem, suffix = ("model", "safetensors") if kind.startswith("safetensors") else ("pytorch_model", "bin")
    save = save_file if suffix == "safetensors" else torch.save
    if not kind.endswith("-sharded"):
        save(tensors, folder / f"{stem}.{suffix}")
        return folder
    names = list(tensors)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"{stem}-{i + 1:05d}-of-00002.{suffix}"
        save({name: tensors[name] for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    return folder


def softmax_model(gpt2, state_dict=None):
    """Our softmax stage with the tensors of a GPT-2, or with those given in its place."""
    config = gpt2_config_dict(gpt2)
    tensors = to_softmax_stage(gpt2.state_dict() if state_dict is None else state_dict, config)
    fields = config_fields(config) | {"tie_word_embeddings": "lm_head.weight" not in tensors}
    model = KDAForCausalLM(KDAConfig(stages="softmax", **fields)).to(gpt2.dtype).eval()
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert unexpected == []
    assert missing == (["lm_head.weight"] if fields["tie_word_embeddings"] else [])
    return model


def largest_difference(a, b):
    return (a.double() - b.double()).abs().max().item()


def logits_and_gradient(model, ids):
    """Logits, and the gradient of a fixed sum of them with respect to the input embeddings."""
    table = model.get_input_embeddings().weight
    embeds = table[ids].detach().requires_grad_()
    logits = model(inputs_embeds=embeds).logits
    generator = torch.Generator().manual_seed(3)
    direction = torch.randn(logits.shape, generator=generator).to(logits.dtype)
    (gradient,) = torch.autograd.grad((logits * direction).mean(), embeds)
    return logits.detach(), gradient
