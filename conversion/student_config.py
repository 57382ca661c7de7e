"""The configuration of a student: its source's, with other stages and the choices that are free."""

from huggingface_hub.errors import StrictDataclassError

from modeling_kda.configuration_kda import KDAConfig
from modeling_kda.stages import STAGES

from .expert_conversion import expert_fields

# Fields that are a choice, by the part of the model that they belong to; all others follow from the source. Once a
# source has a part, its choices are made
RECURRENT = (
    "short_conv_kernel_size",
    "short_conv_activation",
    "output_gate",
    "output_gate_rank",
    "output_norm",
    "decay_gate",
    "decay_lower_bound",
    "feature_map",
)
CHANNEL_DECAY = ("decay_rank",)
LATENT = ("kv_lora_rank", "qk_rope_head_dim")
EXPERTS = (
    "num_experts",
    "num_experts_per_token",
    "moe_intermediate_size",
    "first_k_dense_replace",
    "routed_expert_hidden_size",
    "latent_moe_use_norm",
)
RESIDUAL = ("attention_residual", "attention_residual_block_size", "residual_scale")
FREE = ("mla_output_gate", "max_rollback")
CHOICES = RECURRENT + CHANNEL_DECAY + LATENT + EXPERTS + RESIDUAL + FREE


def student_config(
    source: KDAConfig, stages: str | list[str], overrides: dict, experts: str | None = None
) -> KDAConfig:
    """The source's configuration with other stages and choices.

    Args:
        source: the configuration of a softmax model, or of any model of ours.
        stages: a stage for all layers, or a list with one per layer.
        overrides: fields from `CHOICES`.
        experts: how MLPs become experts, a kind of `expert_conversion.py`; None keeps them.

    Raises: ValueError for fields that are not a choice, or that the source has already settled.
    """
    _check_choices(source, overrides, experts)
    fields = source.to_dict()
    if "mla" not in source.stages:
        # no norm on the latent can be an identity
        fields |= {"latent_norm": False}
    if source.attention_residual == "none" != overrides.get("attention_residual", "none"):
        # the 12 layers of Kimi K3's blocks would be one block of GPT-2: four blocks, unless another size is asked for
        size = max(1, source.num_hidden_layers // 4)
        fields |= {"residual_scale": True, "attention_residual_block_size": size}
    if experts is not None:
        fields |= expert_fields(source, experts, {name: overrides[name] for name in EXPERTS if name in overrides})
    stages = stages if isinstance(stages, str) else list(stages)
    try:
        config = KDAConfig.from_dict(fields | overrides | {"stages": stages})
    except StrictDataclassError as error:
        raise ValueError(" ".join(str(error).split())) from error
    _check_heads(source, config)
    _check_effect(config, overrides)
    return config


def check_set(overrides: dict):
    """Raises: ValueError for fields that are not a choice."""
    unknown = sorted(set(overrides) - set(CHOICES))
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)} cannot be set, only {', '.join(CHOICES)}; everything else follows from the source"
        )


def _check_choices(source, overrides, experts):
    check_set(overrides)
    if experts is None and not source.num_experts and set(overrides) & set(EXPERTS):
        given = ", ".join(name for name in overrides if name in EXPERTS)
        raise ValueError(
            f"{given} cannot be set without experts (on the command line --experts), which says how MLPs become "
            "experts: partition, copies or latent"
        )
    kinds = {STAGES[stage].mixer for stage in source.stages}
    for part, settled, names in (
        ("recurrent layers", "recurrent" in kinds, RECURRENT),
        ("kda layers", "kda" in source.stages, CHANNEL_DECAY),
        ("mla layers", "latent" in kinds, (*LATENT, *["mla_output_gate"] * source.mla_output_gate)),
        ("experts", source.num_experts > 0, EXPERTS),
        ("attention residuals", source.attention_residual != "none", RESIDUAL),
    ):
        changed = [name for name in overrides if name in names and overrides[name] != getattr(source, name)]
        if settled and changed:
            raise ValueError(
                f"{', '.join(changed)} cannot be changed: the source has {part} that were built without; drop it"
            )


def _check_effect(config, overrides):
    """Raises: ValueError for a choice about something that the model does not have."""
    kinds = {STAGES[stage].mixer for stage in config.stages}
    for part, has, names in (
        ("recurrent layers", "recurrent" in kinds, RECURRENT),
        ("kda layers", "kda" in config.stages, CHANNEL_DECAY),
        ("mla layers", "latent" in kinds, (*LATENT, "mla_output_gate")),
        ("attention residuals", config.attention_residual != "none", RESIDUAL[1:]),
    ):
        idle = [name for name in overrides if name in names]
        if idle and not has:
            raise ValueError(f"{', '.join(idle)} would have no effect: the model will have no {part}; drop it")


def _check_heads(source, config):
    heads = (config.num_attention_heads, config.head_dim)
    replaced = {new for old, new in zip(source.stages, config.stages, strict=True) if old == "softmax" != new}
    if replaced - {"mla"} and (config.num_value_heads, config.value_head_dim) != heads:
        raise ValueError(
            f"softmax layers have {heads[0]} value heads of {heads[1]} channels, but the configuration asks for "
            f"{config.num_value_heads} of {config.value_head_dim} in recurrent layers; they must be equal"
        )
    if "mla" in replaced and (config.qk_nope_head_dim, config.v_head_dim) != (heads[1], heads[1]):
        raise ValueError(
            f"softmax layers have heads of {heads[1]} channels, but the configuration asks for "
            f"qk_nope_head_dim={config.qk_nope_head_dim} and v_head_dim={config.v_head_dim}; they must be equal"
        )
