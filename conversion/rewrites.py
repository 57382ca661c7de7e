"""Rewrites that change a model's tensors but not what it computes: each is an identity, tested to rounding.

They act on the tensors of one layer by their names below `model.layers.{i}.` (`mixer.q_proj.weight`, ...), return a
new dict and leave the given one alone. All sums are done in fp64 and stored in the dtype that came in.
"""

import torch

QKV = ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj")


def fold_attention_biases(layer: dict) -> dict:
    """Without key and value bias. Only exact for mixers whose weights sum to one: softmax and normalised linear
    attention.

    A key bias adds the same number to every score of a query; a value bias passes unchanged through an average, so it
    moves behind `o_proj`. Delta-rule layers and Mamba-2 need both where they are.
    """
    o_weight, o_bias, v_bias = (
        _wide(layer[f"mixer.{name}"]) for name in ("o_proj.weight", "o_proj.bias", "v_proj.bias")
    )
    return layer | {
        "mixer.k_proj.bias": torch.zeros_like(layer["mixer.k_proj.bias"]),
        "mixer.v_proj.bias": torch.zeros_like(layer["mixer.v_proj.bias"]),
        "mixer.o_proj.bias": _like(o_bias + o_weight @ v_bias, layer["mixer.o_proj.bias"]),
    }


def fold_norms(layer: dict) -> dict:
    """Gain and bias of both norms moved into the projections that read them; the norms keep gain 1 and bias 0."""
    folded = dict(layer)
    for norm, readers in (("mixer_norm", QKV), ("mlp_norm", ("mlp.up_proj",))):
        gain, shift = _wide(layer[f"{norm}.weight"]), _wide(layer[f"{norm}.bias"])
        for reader in readers:
            weight, bias = layer[f"{reader}.weight"], layer[f"{reader}.bias"]
            folded[f"{reader}.weight"] = _like(_wide(weight) * gain, weight)
            folded[f"{reader}.bias"] = _like(_wide(bias) + _wide(weight) @ shift, bias)
        folded[f"{norm}.weight"] = torch.ones_like(layer[f"{norm}.weight"])
        folded[f"{norm}.bias"] = torch.zeros_like(layer[f"{norm}.bias"])
    return folded


def layernorm_to_rmsnorm(tensors: dict, num_layers: int) -> tuple[dict, torch.Tensor]:
    """A whole softmax-stage model with LayerNorm as one with RMSNorm and an untied head.

    Everything written to the residual stream is centred, so its mean is zero and both norms are the same. What remains
    of the last norm's bias is one number per token, which an RMSNorm without bias cannot carry.

    Args:
        tensors: the state dict of a softmax-stage `KDAForCausalLM` with LayerNorm.
        num_layers: how many layers it has.

    Returns:
        The state dict for `norm="rmsnorm", tie_word_embeddings=False`, and [V] numbers to add to its logits.
    """
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    rewritten = {
        "model.embed_tokens.weight": _centred(tensors["model.embed_tokens.weight"], -1),
        "model.embed_positions.weight": _centred(tensors["model.embed_positions.weight"], -1),
        "model.norm.weight": tensors["model.norm.weight"],
        "lm_head.weight": head.clone(),
    }
    for i in range(num_layers):
        prefix = f"model.layers.{i}."
        layer = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        layer = fold_norms(layer)
        for writer in ("mixer.o_proj", "mlp.down_proj"):
            layer[f"{writer}.weight"] = _centred(layer[f"{writer}.weight"], 0)
            layer[f"{writer}.bias"] = _centred(layer[f"{writer}.bias"], 0)
        rewritten.update({prefix + name: t for name, t in layer.items() if not name.endswith("norm.bias")})
    return rewritten, _like(_wide(head) @ _wide(tensors["model.norm.bias"]), head)


def rescale_queries_and_keys(layer: dict, factors: torch.Tensor) -> dict:
    """Queries of head h times `factors[h]`, keys divided by it: every score stays. factors: [H], none of them 0."""
    return _scale_heads(_scale_heads(layer, "mixer.q_proj", factors), "mixer.k_proj", 1 / _wide(factors))


def scale_queries(layer: dict, factors: torch.Tensor) -> dict:
    """Queries of head h times `factors[h]`: one half of `rescale_queries_and_keys`, no identity by itself."""
    return _scale_heads(layer, "mixer.q_proj", factors)


def scale_keys(layer: dict, factors: torch.Tensor) -> dict:
    """Keys of head h times `factors[h]`: one half of `rescale_queries_and_keys`, no identity by itself."""
    return _scale_heads(layer, "mixer.k_proj", factors)


def scale_values(layer: dict, factors: torch.Tensor) -> dict:
    """Values of head h times `factors[h]`. Before a norm per head this changes only what its epsilon sees."""
    return _scale_heads(layer, "mixer.v_proj", factors)


def scale_head_outputs(layer: dict, factors: torch.Tensor) -> dict:
    """What head h writes times `factors[h]`: the columns of `o_proj` that read it. factors: [H] for H equal heads.

    With a sigmoid output gate at one half a factor of 2 restores the ungated output exactly (a power of two).
    """
    weight = layer["mixer.o_proj.weight"]
    columns = _wide(factors).repeat_interleave(weight.shape[1] // len(factors))
    return layer | {"mixer.o_proj.weight": _like(_wide(weight) * columns, weight)}


def morph(old, new, amount: float):
    """(1 - amount) * old + amount * new, exactly old at 0 and exactly new at 1."""
    if amount in (0, 1):
        return new if amount else old
    return (1 - amount) * old + amount * new


def _scale_heads(layer, projection, factors):
    """The outputs of a projection times one factor per head, weight and bias."""
    scaled = dict(layer)
    for name in (f"{projection}.weight", f"{projection}.bias"):
        if name in layer:
            tensor = layer[name]
            rows = _wide(factors).repeat_interleave(tensor.shape[0] // len(factors))
            scaled[name] = _like(_wide(tensor) * rows.view(-1, *[1] * (tensor.dim() - 1)), tensor)
    return scaled


def _centred(tensor, dim):
    wide = _wide(tensor)
    return _like(wide - wide.mean(dim, keepdim=True), tensor)


def _wide(tensor):
    return tensor.double()


def _like(tensor, model):
    return tensor.to(model.dtype)
