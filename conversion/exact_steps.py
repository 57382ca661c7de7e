"""Steps up the lineage between recurrent stages that keep what a layer computes."""

import torch

from modeling_kda.configuration_kda import KDAConfig

from .initialisation import decay_bias, decay_bound

# decays exp(-g) with g = ln 2 / this: after T tokens a state is off by about g * T, 7e-4 after 1,000
PRACTICALLY_FOREVER = 1e6


def steps_between(source: str, target: str) -> list:
    """The functions `(layer, config, generator) -> layer` that lead from one stage to a later one, none if they are
    equal.

    Raises: ValueError if no exact way is known.
    """
    steps, stage = [], source
    while stage != target:
        if stage not in NEXT:
            exact = ", ".join(f"{before} -> {after}" for before, (after, _) in NEXT.items())
            raise ValueError(
                f"a {source} layer cannot become a {target} layer: only softmax layers can become any stage, "
                f"and exact steps exist for {exact}; start from the softmax model"
            )
        stage, step = NEXT[stage]
        steps.append(step)
    return steps


def never_forget(layer: dict, config: KDAConfig, generator: torch.Generator) -> dict:
    """delta -> gated_delta: a decay so slow that a context does not notice. It cannot be exactly one, and must not be:
    a decay at its limit has no gradient."""
    heads = config.num_value_heads
    half_lives = torch.full((heads,), PRACTICALLY_FOREVER, dtype=torch.float64)
    return layer | {
        "mixer.decay_proj.weight": layer["mixer.q_proj.weight"].new_zeros(heads, config.hidden_size),
        "mixer.decay.A_log": torch.zeros(heads),
        "mixer.decay.dt_bias": decay_bias(half_lives, decay_bound(config)).float(),
    }


def decay_per_channel(layer: dict, config: KDAConfig, generator: torch.Generator) -> dict:
    """gated_delta -> kda: every channel of a head decays as the head did, exactly.

    The first rows of the inner projection are the heads' decay projection and the outer one picks for each channel the
    row of its head. The other inner rows are random: the outer projection can learn to use them.
    """
    heads, channels, rank = config.num_value_heads, config.head_dim, config.decay_rank
    if heads > rank:
        raise ValueError(f"decay_rank must be at least the number of value heads, {heads}, got {rank}; set decay_rank")
    layer = dict(layer)
    per_head = layer.pop("mixer.decay_proj.weight")
    inner = torch.randn(rank, config.hidden_size, generator=generator) * config.hidden_size**-0.5
    inner[:heads] = per_head
    selector = torch.eye(heads, rank).repeat_interleave(channels, 0)
    return layer | {
        "mixer.decay_a_proj.weight": inner.to(per_head.dtype),
        "mixer.decay_b_proj.weight": selector.to(per_head.dtype),
        "mixer.decay.dt_bias": layer["mixer.decay.dt_bias"].repeat_interleave(channels),
    }


NEXT = {"delta": ("gated_delta", never_forget), "gated_delta": ("kda", decay_per_channel)}
