"""The parameters that a stage has and softmax attention has not, and what they are before any training.

Every one of them starts neutral, so that a converted layer is the teacher's queries, keys and values and one
recurrence: short convolutions pass the current token, the output gate is constant. What is not neutral is what
`HeadSettings` says of each head: how long it remembers, how strongly it writes, how sharply it looks.
"""

import math
from dataclasses import dataclass, replace

import torch

from modeling_kda.configuration_kda import KDAConfig
from modeling_kda.layers import inverse_softplus

from .rewrites import scale_keys, scale_queries

# groups of new parameters per stage; a group that the config switches off is empty
NEW_PARAMETERS = {
    "softmax": (),
    "linear": ("short_conv", "feature_map", "output_norm", "output_gate"),
    "delta": ("short_conv", "beta", "output_norm", "output_gate"),
    "ssd": ("short_conv", "step", "output_norm", "output_gate"),
    "gated_delta": ("short_conv", "beta", "head_decay", "output_norm", "output_gate"),
    "kda": ("short_conv", "beta", "channel_decay", "output_norm", "output_gate"),
}


@dataclass(frozen=True)
class HeadSettings:
    """What a head of a new mixer starts from, each [H], fp64.

    Attributes:
        half_lives: tokens after which a head has forgotten half of what it held (stages with a decay).
        betas: the write strength of every token (stages with a learned one).
        sharpness: factor on the arguments of the feature maps (stage `linear`).
        query_norms, key_norms: root mean square length of the teacher's queries and keys (stage `ssd`).
    """

    half_lives: torch.Tensor
    betas: torch.Tensor
    sharpness: torch.Tensor
    query_norms: torch.Tensor
    key_norms: torch.Tensor

    @classmethod
    def default(cls, num_heads: int) -> "HeadSettings":
        """What is used when nothing was measured: half-lives from 2 to 32 in equal ratios, write strength one half."""
        half_lives = torch.logspace(1, 5, num_heads, base=2, dtype=torch.float64)
        ones = torch.ones(num_heads, dtype=torch.float64)
        return cls(half_lives, ones / 2, ones, ones, ones)

    def replace(self, **fields) -> "HeadSettings":
        return replace(self, **fields)


def new_parameters(
    stage: str, config: KDAConfig, settings: HeadSettings, *, channel_spread: float, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """The new parameters of one layer by their names below the layer, fp32.

    Args:
        stage: a name from `NEW_PARAMETERS`.
        config: of the student.
        settings: of its heads.
        channel_spread: for `kda`, half-lives of a head's channels run from h / spread to h * spread.
        generator: for the inner factors of low-rank projections. Their outer factors are zero, so both can learn.
    """
    makers = {
        "short_conv": lambda: _short_conv(config),
        "feature_map": lambda: _feature_map(config, settings),
        "beta": lambda: _beta(config, settings),
        "step": lambda: _head_decay(config, decay_bias(settings.half_lives)),
        "head_decay": lambda: _head_decay(config, decay_bias(settings.half_lives, decay_bound(config))),
        "channel_decay": lambda: _channel_decay(config, settings, channel_spread, generator),
        "output_norm": lambda: _output_norm(config),
        "output_gate": lambda: _output_gate(config, generator),
    }
    parameters = {}
    for group in NEW_PARAMETERS[stage]:
        parameters.update(makers[group]())
    return parameters


def fit_queries_and_keys(layer: dict, stage: str, config: KDAConfig, settings: HeadSettings) -> dict:
    """The teacher's queries and keys on the scale that a stage expects.

    Mamba-2 has no unit-length keys: without a scale its sum over tokens explodes. The ELU feature map has no weights
    that could make it sharper, so its arguments are scaled instead. Other stages take queries and keys as they are.
    """
    if stage == "ssd":
        return scale_keys(scale_queries(layer, 1 / settings.query_norms), 1 / settings.key_norms)
    if stage == "linear" and config.feature_map == "elu":
        return scale_keys(scale_queries(layer, settings.sharpness), settings.sharpness)
    return layer


def decay_bias(half_lives: torch.Tensor, lower_bound: float | None = None) -> torch.Tensor:
    """dt_bias for which log_decay = -ln 2 / half_life, with A_log = 0 and a decay projection of zero.

    Args:
        half_lives: any shape, tokens.
        lower_bound: of the bounded form, None for the softplus form.
    """
    rate = math.log(2) / half_lives.double()
    if lower_bound is None:
        return inverse_softplus(rate)
    return torch.logit(rate / -lower_bound)


def decay_bound(config: KDAConfig) -> float | None:
    """The bound of the decay of delta-rule layers, None in the softplus form."""
    return config.decay_lower_bound if config.decay_gate == "lower_bound" else None


def channel_half_lives(half_lives: torch.Tensor, channels: int, spread: float) -> torch.Tensor:
    """[H, K] half-lives from h / spread to h * spread in equal ratios; h itself in every channel for a spread of 1."""
    exponents = torch.linspace(-1, 1, channels, dtype=torch.float64) if channels > 1 else torch.zeros(1).double()
    return half_lives.double()[:, None] * spread**exponents


def _short_conv(config):
    """The current token passes unchanged: only the last tap is one."""
    if not config.short_conv_kernel_size:
        return {}
    keys = config.num_attention_heads * config.head_dim
    values = config.num_value_heads * config.value_head_dim
    taps = {}
    for part, channels in (("q", keys), ("k", keys), ("v", values)):
        weight = torch.zeros(channels, 1, config.short_conv_kernel_size)
        weight[:, :, -1] = 1
        taps[f"mixer.{part}_conv1d.weight"] = weight
    return taps


def _feature_map(config, settings):
    if config.feature_map != "hedgehog":
        return {}
    identity = torch.eye(config.head_dim) * settings.sharpness.float()[:, None, None]
    return {f"mixer.{part}_feature_map.weight": identity.clone() for part in "qk"}


def _beta(config, settings):
    """The same write strength for every token; one half where there is no bias to say another."""
    beta = _zero_linear("mixer.beta_proj", config.num_value_heads, config.hidden_size, config.attention_bias)
    if config.attention_bias:
        beta["mixer.beta_proj.bias"] = torch.logit(settings.betas).float()
    return beta


def _head_decay(config, bias):
    return {
        "mixer.decay_proj.weight": torch.zeros(config.num_value_heads, config.hidden_size),
        "mixer.decay.A_log": torch.zeros(config.num_value_heads),
        "mixer.decay.dt_bias": bias.float(),
    }


def _channel_decay(config, settings, spread, generator):
    half_lives = channel_half_lives(settings.half_lives, config.head_dim, spread)
    channels = config.num_value_heads * config.head_dim
    return {
        "mixer.decay_a_proj.weight": _random(config.decay_rank, config.hidden_size, generator),
        "mixer.decay_b_proj.weight": torch.zeros(channels, config.decay_rank),
        "mixer.decay.A_log": torch.zeros(config.num_value_heads),
        "mixer.decay.dt_bias": decay_bias(half_lives, decay_bound(config)).flatten().float(),
    }


def _output_norm(config):
    return {"mixer.o_norm.weight": torch.ones(config.value_head_dim)} if config.output_norm else {}


def _output_gate(config, generator):
    """Logits of zero: a gate of one half, which the factor on `o_proj` makes up for."""
    values = config.num_value_heads * config.value_head_dim
    if config.output_gate == "none":
        return {}
    if config.output_gate == "full":
        return _zero_linear("mixer.output_gate_proj", values, config.hidden_size, config.attention_bias)
    inner = {"mixer.output_gate_a_proj.weight": _random(config.output_gate_rank, config.hidden_size, generator)}
    return inner | _zero_linear("mixer.output_gate_b_proj", values, config.output_gate_rank, config.attention_bias)


def _zero_linear(name, outputs, inputs, bias):
    weight = {f"{name}.weight": torch.zeros(outputs, inputs)}
    return weight | ({f"{name}.bias": torch.zeros(outputs)} if bias else {})


def _random(rows, columns, generator):
    """Rows that keep the scale of a normalised input."""
    return torch.randn(rows, columns, generator=generator) * columns**-0.5
