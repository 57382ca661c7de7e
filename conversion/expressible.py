"""What the formats of other projects cannot hold, found before anything is written."""

from modeling_kda.configuration_kda import KDAConfig

from .kimi_config import LATENT_NORM_EPS

# what the formats are called in messages
TITLES = {
    "kimi_linear": "transformers' kimi_linear",
    "moonshot": "Moonshot's checkpoints",
    "fla": "fla's kda",
}


def check_expressible(config: KDAConfig, to: str):
    """Whether a model can be written in a format without changing what it computes.

    Dropout on hidden states and the limit of rollbacks have no place elsewhere and are left out: neither changes what
    the model computes after training. Biases are looked at when they are read: those that are zero can be left out.

    Args:
        config: of the model.
        to: "kimi_linear" (transformers), "moonshot" (released checkpoints) or "fla".

    Raises: ValueError that names the first layer with something in it that the format has no place for.
    """
    for layer, what in _obstacles(config, to):
        raise ValueError(f"layer {layer} cannot be written for {TITLES[to]}: {what}")


def _obstacles(config, to):
    """(layer, what is in the way), from the first layer up."""
    for layer, stage in enumerate(config.stages):
        if config.norm != "rmsnorm":
            yield layer, f"its norms must be RMSNorm, got norm={config.norm!r}"
        if layer == 0:
            yield from ((0, what) for what in _around_the_layers(config, to))
        if stage == "kda":
            yield from ((layer, what) for what in _kda_obstacles(config, to))
        elif stage == "mla" and to != "fla":
            yield from ((layer, what) for what in _mla_obstacles(config, to))
        else:
            known = "kda" if to == "fla" else "kda or mla"
            yield layer, f"its stage must be {known}, got {stage!r}"
        yield from ((layer, what) for what in _mlp_obstacles(config, to, config.uses_experts(layer)))


def _around_the_layers(config, to):
    if config.position_embedding != "none":
        yield f"its input must have no positions added, got position_embedding={config.position_embedding!r}"
    allowed = {"kimi_linear": ("none",), "moonshot": ("none", "block"), "fla": ("none", "block", "full")}[to]
    if config.attention_residual not in allowed:
        yield f"attention_residual must be {_either(allowed)}, got {config.attention_residual!r}"
    if config.attention_residual != "none" and config.residual_scale:
        yield "mixtures of attention residuals must not be scaled, got residual_scale=True"


def _kda_obstacles(config, to):
    # fla has ranks and value heads of their own size, and takes the size of a value head for both ranks
    rank = config.value_head_dim if to == "fla" else config.head_dim
    gates = ("low_rank", "full") if to == "moonshot" else ("low_rank",)
    if config.short_conv_kernel_size == 0 and to != "fla":
        yield "its mixer must have a short convolution, got short_conv_kernel_size=0"
    if config.short_conv_kernel_size and config.short_conv_activation != "silu":
        yield f"its short convolution must end in SiLU, got short_conv_activation={config.short_conv_activation!r}"
    if config.decay_gate != "softplus" and to == "kimi_linear":
        yield f"its decay gate must be softplus, got decay_gate={config.decay_gate!r}"
    if config.decay_rank != rank:
        yield f"its decay must have the rank {rank}, got decay_rank={config.decay_rank}"
    if config.output_gate not in gates:
        yield f"its output gate must be {_either(gates)}, got output_gate={config.output_gate!r}"
    if config.output_gate == "low_rank" and config.output_gate_rank != rank:
        yield f"its output gate must have the rank {rank}, got output_gate_rank={config.output_gate_rank}"
    if not config.output_norm:
        yield "its outputs must be normalised, got output_norm=False"
    if to != "fla" and (config.num_value_heads, config.value_head_dim) != (
        config.num_attention_heads,
        config.head_dim,
    ):
        yield (
            f"its value heads must be {config.num_attention_heads} of {config.head_dim} channels as its keys, got "
            f"{config.num_value_heads} of {config.value_head_dim}"
        )


def _mla_obstacles(config, to):
    if not config.latent_norm:
        yield "its latents must be normalised, got latent_norm=False"
    elif config.latent_norm_eps != LATENT_NORM_EPS:
        yield f"the norm of its latents must have an epsilon of {LATENT_NORM_EPS}, got {config.latent_norm_eps}"
    if config.mla_output_gate and to != "moonshot":
        yield "its attention must have no output gate, got mla_output_gate=True"


def _mlp_obstacles(config, to, experts):
    if not config.mlp_gated:
        yield "its MLP must be gated, got mlp_gated=False"
    allowed = ("silu", "situ") if to == "moonshot" else ("silu",)
    if config.hidden_act not in allowed and not (config.hidden_act == "swish" and "silu" in allowed):
        yield f"the activation of its MLP must be {_either(allowed)}, got hidden_act={config.hidden_act!r}"
    if not experts:
        return
    if to == "fla":
        yield f"its MLP must be dense, got num_experts={config.num_experts}"
    if config.routed_expert_hidden_size is not None and to != "moonshot":
        yield (
            "its experts must read the full width, got latent experts, "
            f"routed_expert_hidden_size={config.routed_expert_hidden_size}"
        )
    if to == "kimi_linear" and config.num_experts < 2:
        # its router looks at the two best of every group of experts
        yield f"it must have two experts at least, got num_experts={config.num_experts}"
    shared = config.num_shared_experts * config.moe_intermediate_size
    if config.shared_intermediate_size != shared:
        yield (
            f"its shared expert must be {shared} wide (num_shared_experts * moe_intermediate_size), got "
            f"shared_intermediate_size={config.shared_intermediate_size}"
        )


def _either(words):
    return " or ".join(repr(word) for word in words)
