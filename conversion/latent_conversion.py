"""A softmax layer as latent attention (MLA): one latent per token, from which all heads' keys and values are made.

With a latent as wide as the layer's input nothing is lost. A smaller one loses what matters least: which that is, is
measured on what enters the layer (its covariance), on what reads the keys (the queries), and on what reads the values
(the output projection), where a decomposition of the weights alone would take every direction of the input for equally
frequent.
"""

from dataclasses import dataclass

import torch

from modeling_kda.configuration_kda import KDAConfig

from .rewrites import scale_head_outputs, scale_queries

# Of how much keys count against values once both have the norm one, and what share of the mean variance is added to
# every direction. On the shipped teacher and text it had not seen, with a latent of 32 (of 128) channels: KL from the
# teacher 0.585 with 1, 0.510 with 3, 0.511 with 4; plain decomposition of the weights 1.14
KEY_WEIGHT = 3.0
SHRINKAGE = 0.1
READER_SHRINKAGE = 1e-3


def is_exact(config: KDAConfig) -> bool:
    """Whether softmax layers become the `mla` layers of this configuration without a loss."""
    return config.kv_lora_rank == config.hidden_size


@dataclass(frozen=True)
class InputStatistics:
    """What enters a softmax mixer, and what reads its keys. All fp64.

    Attributes:
        mean: [D], of the inputs; zero if nothing can make up for a constant error.
        covariance: [D, D], of the inputs around that mean.
        queries: [H, K, K], second moments of each head's queries.
    """

    mean: torch.Tensor
    covariance: torch.Tensor
    queries: torch.Tensor


@torch.no_grad()
def measure_inputs(layer: dict, inputs: torch.Tensor, num_heads: int) -> InputStatistics:
    """Statistics of a softmax layer. inputs: [N, T, D], of its mixer."""
    x = inputs.flatten(0, 1).double()
    q = x @ layer["mixer.q_proj.weight"].to(x).T
    if "mixer.q_proj.bias" in layer:
        q = q + layer["mixer.q_proj.bias"].to(x)
    q = q.unflatten(-1, (num_heads, -1)).transpose(0, 1)  # [H, N * T, K]
    # a constant error of keys is invisible to softmax, one of values can be taken back by a bias
    mean = x.mean(0) if "mixer.o_proj.bias" in layer else torch.zeros_like(x[0])
    centred = x - mean
    moments = (mean, centred.T @ centred / len(x), q.transpose(1, 2) @ q / len(x))
    return InputStatistics(*(moment.cpu() for moment in moments))


def softmax_to_latent(
    layer: dict, config: KDAConfig, statistics: InputStatistics | None, generator: torch.Generator
) -> tuple[dict, float]:
    """The tensors of a softmax layer as those of an `mla` layer.

    The key bias adds the same to all scores of a query and is dropped, the value bias passes through an average
    unchanged and moves into that of `o_proj`. The output gate starts at one half, with `o_proj` doubled; queries do
    not look at the shared key yet. All this is exact; see `nearest_latent` for the latent.

    Args:
        layer: the tensors by their names below the layer.
        config: of the new model: heads as wide as those of the layer, no norm on the latent.
        statistics: of the layer; None to decompose the weights alone.
        generator: for the shared key.

    Returns: the tensors, and the share of the keys' and values' energy that the latent keeps.
    """
    heads, rope = config.num_attention_heads, config.qk_rope_head_dim
    k, v, o = (layer[f"mixer.{name}_proj.weight"].double() for name in "kvo")
    down, up_k, up_v, energy = nearest_latent(k, v, o, config.kv_lora_rank, statistics)
    new = {name: t for name, t in layer.items() if not name.startswith(("mixer.k_proj.", "mixer.v_proj."))}
    if "mixer.o_proj.bias" in layer:
        constant = layer["mixer.v_proj.bias"].double()
        if statistics is not None:
            constant = constant + (v - up_v @ down) @ statistics.mean
        new["mixer.o_proj.bias"] = layer["mixer.o_proj.bias"].double() + o @ constant
    up = [x.unflatten(0, (heads, -1)) for x in (up_k, up_v)]
    new["mixer.kv_b_proj.weight"] = torch.cat(up, 1).flatten(0, 1)
    if rope:
        down = torch.cat([down, torch.randn(rope, down.shape[1], generator=generator) * down.shape[1] ** -0.5])
        new = _blind_to_the_shared_key(new, heads, rope)
    new["mixer.kv_a_proj.weight"] = down
    if config.mla_output_gate:
        new = add_output_gate(new, heads)
    dtype = layer["mixer.q_proj.weight"].dtype
    return {name: tensor.to(layer[name].dtype if name in layer else dtype) for name, tensor in new.items()}, energy


def nearest_latent(keys, values, readers, rank: int, statistics: InputStatistics | None):
    """Factors of [keys; values] through `rank` channels.

    At the full rank, the latent is the input itself, and the weights stay as they are in every dtype. Below it, it is
    the best for the inputs of `statistics` with errors counted where they act: those of keys as the queries read them,
    those of values as `readers` does, and both parts scaled to fixed shares, because their norms say nothing about
    their importance (in GPT-2's first layer keys have 4 times the norm of values, in its last two thirds of it).

    Args:
        keys, values: [H * K, D] and [H * V, D].
        readers: [D, H * V], what reads the heads.
        rank: of the latent.
        statistics: None for a plain decomposition of the weights.

    Returns: down [rank, D], up_k [H * K, rank], up_v [H * V, rank], and the share of the energy that is kept.

    Raises: ValueError for a rank above that of the weights.
    """
    weights = torch.cat([keys, values])
    if rank == weights.shape[1]:
        return torch.eye(rank, dtype=keys.dtype), keys, values, 1.0
    if rank > min(weights.shape):
        raise ValueError(
            f"kv_lora_rank must be at most {weights.shape[1]}, the width of the model (then nothing is lost), or "
            f"{weights.shape[0]}, the width of all keys and values, got {rank}"
        )
    rows, columns = torch.eye(len(weights)).to(keys), torch.eye(weights.shape[1]).to(keys)
    if statistics is not None:
        columns = _root(statistics.covariance, SHRINKAGE)
        roots = [_root(moment, READER_SHRINKAGE).T for moment in (*statistics.queries, readers.T @ readers)]
        rows = torch.block_diag(*roots)
        seen_keys, seen_values = (rows @ weights @ columns).split([len(keys), len(values)])
        rows[: len(keys)] *= KEY_WEIGHT / seen_keys.norm()
        rows[len(keys) :] /= seen_values.norm()
    u, s, _ = torch.linalg.svd(rows @ weights @ columns, full_matrices=False)
    energy = (s[:rank].square().sum() / s.square().sum()).item()
    u, s = u[:, :rank], s[:rank].clamp_min(1e-9 * s[0])
    scale = s.sqrt()
    up = torch.linalg.solve(rows, u * scale)
    return (u.T @ rows @ weights) / scale[:, None], up[: len(keys)], up[len(keys) :], energy


def add_output_gate(layer: dict, num_heads: int) -> dict:
    """An `mla` layer with an output gate that is one half everywhere, and a doubled `o_proj`: bit for bit the same."""
    o = layer["mixer.o_proj.weight"]
    gated = scale_head_outputs(layer, torch.full((num_heads,), 2.0))
    return gated | {"mixer.gate_proj.weight": o.new_zeros(o.shape[::-1])}


def _blind_to_the_shared_key(layer, heads, rope):
    """Zero queries for the shared key; the others on the scale that the wider heads take away."""
    channels = layer["mixer.q_proj.weight"].shape[0] // heads
    layer = scale_queries(layer, torch.full((heads,), ((channels + rope) / channels) ** 0.5, dtype=torch.float64))
    for name in ("mixer.q_proj.weight", "mixer.q_proj.bias"):
        if name in layer:
            q = layer[name].unflatten(0, (heads, channels))
            layer[name] = torch.cat([q, q.new_zeros(heads, rope, *q.shape[2:])], 1).flatten(0, 1)
    return layer


def _root(moment, shrinkage):
    """L with L L^T = the second moment, shrunk towards a multiple of the identity."""
    added = shrinkage * moment.diagonal().mean() + 1e-12
    return torch.linalg.cholesky(moment + added * torch.eye(len(moment)).to(moment))
