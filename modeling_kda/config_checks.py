"""What a `KDAConfig` may hold: the words, the limits and what must fit together."""

from dataclasses import fields
from math import isfinite

from transformers.activations import ACT2FN

from .stages import STAGES

CHOICES = {
    "norm": ("layernorm", "rmsnorm"),
    "position_embedding": ("learned", "none"),
    "short_conv_activation": (None, "silu", "relu"),
    "output_gate": ("none", "low_rank", "full"),
    "decay_gate": ("softplus", "lower_bound"),
    "feature_map": ("elu", "hedgehog"),
    "attention_residual": ("none", "full", "block"),
}
AT_LEAST_ONE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "value_head_dim",
    "num_value_heads",
    "intermediate_size",
    "output_gate_rank",
    "decay_rank",
    "max_position_embeddings",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "v_head_dim",
    "num_experts_per_token",
    "moe_intermediate_size",
    "routed_expert_hidden_size",
    "attention_residual_block_size",
)
NOT_NEGATIVE = (
    "short_conv_kernel_size",
    "max_rollback",
    "norm_eps",
    "initializer_range",
    "qk_rope_head_dim",
    "latent_norm_eps",
    "num_experts",
    "num_shared_experts",
    "shared_intermediate_size",
    "first_k_dense_replace",
)
POSITIVE = ("routed_scaling_factor", "situ_beta", "situ_linear_beta")


class ConfigChecks:
    """The checks of `KDAConfig`. Each is also run by transformers, on saving, because of its name."""

    def check(self):
        """All that is checked here.

        Raises: ValueError, which names the field.
        """
        self.validate_stages()
        self.validate_choices()
        self.validate_sizes()
        self.validate_ranges()

    def validate_stages(self):
        """`stages` must name one stage of the lineage per layer."""
        unknown = sorted(set(self.stages) - set(STAGES))
        if unknown:
            raise ValueError(f"stages must come from {list(STAGES)}, got {unknown}")
        if len(self.stages) != self.num_hidden_layers:
            raise ValueError(
                f"stages must have one entry per layer, num_hidden_layers={self.num_hidden_layers}, "
                f"got {len(self.stages)}; give one name for all layers or {self.num_hidden_layers} names"
            )

    def validate_layer_type(self):
        """Nothing to check: `layer_types` is derived."""

    def validate_choices(self):
        """Fields that are one of a few words."""
        for field, allowed in CHOICES.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field} must be one of {list(allowed)}, got {getattr(self, field)!r}")
        if self.hidden_act == "situ" and not self.mlp_gated:
            raise ValueError("hidden_act='situ' needs mlp_gated=True, got mlp_gated=False")
        if self.hidden_act != "situ" and self.hidden_act not in ACT2FN:
            raise ValueError(
                f"hidden_act must be 'situ' or a name from transformers.activations, got {self.hidden_act!r}"
            )

    def validate_sizes(self):
        """Sizes that must be positive, and those that must fit together."""
        for field in AT_LEAST_ONE:
            if getattr(self, field) is not None and getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        if self.num_value_heads % self.num_attention_heads:
            raise ValueError(
                f"num_value_heads must be a multiple of num_attention_heads={self.num_attention_heads}, "
                f"got {self.num_value_heads}"
            )
        if 0 < self.num_experts < self.num_experts_per_token:
            raise ValueError(
                f"num_experts_per_token must be at most num_experts={self.num_experts}, "
                f"got {self.num_experts_per_token}"
            )

    def validate_ranges(self):
        """Numbers with a lower or an upper limit; JSON can hold NaN, which passes every comparison below."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not isfinite(value):
                raise ValueError(f"{field.name} must be a finite number, got {value}")
        for field in NOT_NEGATIVE:
            if getattr(self, field) < 0:
                raise ValueError(f"{field} must not be negative, got {getattr(self, field)}")
        for field in POSITIVE:
            if getattr(self, field) is not None and getattr(self, field) <= 0:
                raise ValueError(f"{field} must be positive, got {getattr(self, field)}")
        for field in ("attention_dropout", "hidden_dropout"):
            if not 0 <= getattr(self, field) <= 1:
                raise ValueError(f"{field} must be between 0 and 1, got {getattr(self, field)}")
        if self.decay_lower_bound >= 0:
            raise ValueError(f"decay_lower_bound must be negative, got {self.decay_lower_bound}")
        if "" in (self.keep_in_fp32 or []):
            raise ValueError("keep_in_fp32 must hold parts of names, got an empty one, which is part of every name")
