"""The configuration of fla's `kda` (flash-linear-attention), from and to ours."""

from modeling_kda.configuration_kda import KDAConfig

from .kimi_config import OPTIONAL, build_config, dtype_name, plain_fields, read_field


def from_fla_config(config: dict, *, gate_bias: bool = False) -> KDAConfig:
    """Our configuration for the `config.json` of fla's `kda`.

    Args:
        config: as a dict.
        gate_bias: whether the output gates of the checkpoint have biases that are not zero. Our gates have biases
            only together with the other projections (`attention_bias`), whose biases then are zero.

    Raises: ValueError for a model of another kind, a field that is missing, or a value that has no counterpart.
    """
    if config.get("model_type") != "kda":
        raise ValueError(f"model_type must be 'kda', got {config.get('model_type')!r}")
    for name, allowed in {"attn": (None,), "allow_neg_eigval": (False,), "hidden_act": ("swish", "silu")}.items():
        if config.get(name, allowed[0]) not in allowed:
            raise ValueError(f"{name}={config[name]!r} of fla's kda has no counterpart here, only {allowed[0]!r}")
    heads, head_dim = read_field(config, "num_heads"), read_field(config, "head_dim")
    value_head_dim = int(head_dim * config.get("expand_v", 1.0))
    # safe_gate says which kernel may run; the gate has its bounded form wherever there is a bound
    bound, block = config.get("lower_bound"), config.get("attnres_block_size")
    fields = {
        "stages": "kda",
        "num_attention_heads": heads,
        "num_value_heads": config.get("num_v_heads") or heads,
        "head_dim": head_dim,
        "value_head_dim": value_head_dim,
        "decay_rank": value_head_dim,
        "output_gate": "low_rank",
        "intermediate_size": config.get("intermediate_size") or _fla_width(config),
        "hidden_act": "silu",
        "mlp_gated": True,
        "attention_bias": gate_bias,
        "mlp_bias": False,
        "norm": "rmsnorm",
        "norm_eps": read_field(config, "norm_eps"),
        "position_embedding": "none",
        "max_position_embeddings": config.get("max_position_embeddings", 2048),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "short_conv_kernel_size": config.get("conv_size", 4) if config.get("use_short_conv", True) else 0,
        "short_conv_activation": "silu",
        "decay_gate": "softplus" if bound is None else "lower_bound",
        **({} if bound is None else {"decay_lower_bound": float(bound)}),
    }
    if block is not None:
        whole = {"attention_residual": "full"}
        layers = {"attention_residual": "block", "attention_residual_block_size": block // 2}
        fields |= whole if block == 1 else layers
    return build_config(plain_fields(config, config) | fields)


def to_fla_config(config: KDAConfig) -> dict:
    """The `config.json` of the same model for fla's `kda`; it must be one that `check_expressible` lets pass."""
    # fla counts mixers and MLPs, we count decoder layers
    blocks = {"none": None, "full": 1, "block": 2 * config.attention_residual_block_size}
    bounded = config.decay_gate == "lower_bound"
    return {
        "architectures": ["KDAForCausalLM"],
        "model_type": "kda",
        **{name: getattr(config, name) for name in ("vocab_size", "hidden_size", "num_hidden_layers")},
        **{name: getattr(config, name) for name in ("intermediate_size", "max_position_embeddings")},
        **{name: getattr(config, name) for name in OPTIONAL if name != "attention_dropout"},
        "attn": None,
        "attn_mode": "chunk",
        "num_heads": config.num_attention_heads,
        "num_v_heads": config.num_value_heads,
        "head_dim": config.head_dim,
        "expand_v": config.value_head_dim / config.head_dim,
        "use_short_conv": config.short_conv_kernel_size > 0,
        "conv_size": config.short_conv_kernel_size or 4,
        "allow_neg_eigval": False,
        # the kernels' shorter path holds for bounds down to -5
        "safe_gate": bounded and config.decay_lower_bound >= -5,
        "lower_bound": config.decay_lower_bound if bounded else None,
        "hidden_act": "swish",
        "norm_eps": config.norm_eps,
        "attnres_block_size": blocks[config.attention_residual],
        "tie_word_embeddings": config.tie_word_embeddings,
        "dtype": dtype_name(config),
    }


def _fla_width(config):
    """The width of fla's MLP where the configuration leaves it to hidden_ratio."""
    ratio = config.get("hidden_ratio") or 4
    return 256 * ((int(config["hidden_size"] * ratio * 2 / 3) + 255) // 256)
