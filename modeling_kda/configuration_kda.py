"""The configuration of every model of the lineage, from GPT-2 (all ``softmax``) to a Kimi-Linear-like hybrid."""

from dataclasses import fields
from difflib import get_close_matches

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.utils import logging

from .stages import STAGES

logger = logging.get_logger(__name__)

AUTO_MAP = {
    "AutoConfig": "configuration_kda.KDAConfig",
    "AutoModel": "modeling_kda.KDAModel",
    "AutoModelForCausalLM": "modeling_kda.KDAForCausalLM",
    "AutoModelForSequenceClassification": "modeling_kda.KDAForSequenceClassification",
}


@strict
class KDAConfig(PreTrainedConfig):
    r"""Configuration of [`KDAModel`] and its heads, keyword only. The defaults are GPT-2 small with KDA mixers.

    Args:
        vocab_size: number of tokens.
        hidden_size: width D of the residual stream.
        num_hidden_layers: number of blocks.
        num_attention_heads: heads H of queries and keys, in every layer.
        stages: the mixer of each layer: one name from `STAGES` for all layers, or a list with one name per layer
            (that is how hybrids are made). Always a list after initialisation.
        head_dim: key channels K per head; `hidden_size // num_attention_heads` if not given.
        value_head_dim: value channels V per head of the recurrent layers; `head_dim` if not given.
        num_value_heads: value heads of the recurrent layers, a multiple of `num_attention_heads` (value head h reads
            query and key head `h // (num_value_heads // num_attention_heads)`); `num_attention_heads` if not given.
        intermediate_size: width of the MLP; `4 * hidden_size` if not given.
        hidden_act: activation of the MLP, a name transformers knows.
        mlp_gated: `True` for a gated MLP (SwiGLU with `hidden_act="silu"`).
        attention_bias: biases on the projections of the mixers.
        mlp_bias: biases in the MLP.
        norm: `"layernorm"` or `"rmsnorm"`.
        norm_eps: epsilon of all norms.
        position_embedding: `"learned"` (GPT-2) or `"none"`.
        max_position_embeddings: number of learned positions; with `"none"` only a hint about the training length.
        tie_word_embeddings: whether the head shares the input embedding.
        attention_dropout: dropout on the attention weights of softmax layers, in training.
        hidden_dropout: dropout on the embeddings and on what mixers and MLPs add, in training.
        short_conv_kernel_size: taps W of the causal convolution on q, k and v of recurrent layers; 0 for none.
        short_conv_activation: `None`, `"silu"` or `"relu"`, applied after the convolution.
        output_gate: `"none"`, `"low_rank"` (Kimi Linear) or `"full"` (Kimi K3) sigmoid gate on the mixer's output.
        output_gate_rank: rank of the low-rank gate; `value_head_dim` if not given.
        output_norm: whether recurrent layers normalise each head's output (RMSNorm) before the gate.
        decay_gate: `"softplus"`: log_decay = -exp(A_log) softplus(x + dt_bias), or `"lower_bound"`: log_decay =
            decay_lower_bound * sigmoid(exp(A_log) (x + dt_bias)); for `gated_delta` and `kda`.
        decay_lower_bound: the bound of the second form, negative.
        decay_rank: rank of the projection behind the per-channel decay of `kda`; `head_dim` if not given.
        feature_map: `"elu"` (elu + 1) or `"hedgehog"` (learned), for `linear`.
        max_rollback: how many tokens a cache that records its past can take back from recurrent layers with `crop`.
        initializer_range: standard deviation of freshly initialised matrices.

    Raises:
        ValueError: for a value that is not allowed; the message names the field.
        huggingface_hub.errors.StrictDataclassFieldValidationError: for a wrong type.
    """

    model_type = "kda_hybrid"
    keys_to_ignore_at_inference = ["cache"]
    attribute_map = {
        "num_key_value_heads": "num_attention_heads",
        "layer_norm_epsilon": "norm_eps",
        "n_positions": "max_position_embeddings",
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
    }
    # q, k and v are gathered again: the recurrence of a layer runs whole on every rank
    base_model_tp_plan = {
        "embed_tokens": "embedding_rowwise",
        "layers.*.mixer.q_proj": "colwise_gather_output",
        "layers.*.mixer.k_proj": "colwise_gather_output",
        "layers.*.mixer.v_proj": "colwise_gather_output",
        "layers.*.mixer.o_proj": "rowwise_split_input",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }

    vocab_size: int = 50257
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    stages: str | list[str] = "kda"
    head_dim: int | None = None
    value_head_dim: int | None = None
    num_value_heads: int | None = None
    intermediate_size: int | None = None
    hidden_act: str = "gelu_new"
    mlp_gated: bool = False
    attention_bias: bool = True
    mlp_bias: bool = True
    norm: str = "layernorm"
    norm_eps: float = 1e-5
    position_embedding: str = "learned"
    max_position_embeddings: int = 1024
    tie_word_embeddings: bool = True
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    short_conv_kernel_size: int = 4
    short_conv_activation: str | None = None
    output_gate: str = "low_rank"
    output_gate_rank: int | None = None
    output_norm: bool = True
    decay_gate: str = "softplus"
    decay_lower_bound: float = -5.0
    decay_rank: int | None = None
    feature_map: str = "elu"
    max_rollback: int = 64
    initializer_range: float = 0.02
    use_cache: bool = True
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256
    pad_token_id: int | None = None
    auto_map: dict | None = None

    def __post_init__(self, **kwargs):
        # derived from `stages`: a stored copy could disagree
        layer_types = kwargs.pop("layer_types", None)
        self._accept_aliases(kwargs)
        one_for_all = isinstance(self.stages, str)
        self.stages = [self.stages] * self.num_hidden_layers if one_for_all else list(self.stages)
        if self.head_dim is None:
            self.head_dim = self._derived_head_dim()
        self._fill("value_head_dim", self.head_dim)
        self._fill("num_value_heads", self.num_attention_heads)
        self._fill("intermediate_size", 4 * self.hidden_size)
        self._fill("output_gate_rank", self.value_head_dim)
        self._fill("decay_rank", self.head_dim)
        if self.mlp_gated:
            # not in the class: a rule that matches no module makes loading print a warning
            self.base_model_tp_plan = {**self.base_model_tp_plan, "layers.*.mlp.gate_proj": "colwise"}
        # a new dict each time: saving writes into it
        self.auto_map = {**AUTO_MAP, **(self.auto_map or {})}
        # here too, so that a wrong value is a plain ValueError before anything reads it
        self.check()
        self._warn_of_likely_typos(kwargs)
        super().__post_init__(**kwargs)
        if layer_types is not None and list(layer_types) != self.layer_types:
            raise ValueError(
                f"layer_types follow from stages and would be {self.layer_types}, got {list(layer_types)}; "
                "set stages and leave layer_types out"
            )

    def _accept_aliases(self, kwargs):
        """Set what was given under another name now, before other fields are derived from it."""
        key_value_heads = kwargs.pop("num_key_value_heads", None)
        for alias, name in self.attribute_map.items():
            if alias in kwargs:
                setattr(self, name, kwargs.pop(alias))
        if key_value_heads not in (None, self.num_attention_heads):
            raise ValueError(
                f"num_key_value_heads must equal num_attention_heads={self.num_attention_heads}, got "
                f"{key_value_heads}; recurrent layers can have more value heads, see num_value_heads"
            )

    def _fill(self, field, default):
        if getattr(self, field) is None:
            setattr(self, field, default)

    def _derived_head_dim(self):
        if self.num_attention_heads < 1 or self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_attention_heads={self.num_attention_heads}, "
                f"got {self.hidden_size}; or give head_dim"
            )
        return self.hidden_size // self.num_attention_heads

    def _warn_of_likely_typos(self, kwargs):
        """transformers keeps unknown names as attributes, where a misspelt field would do nothing, silently."""
        known = [field.name for field in fields(self)]
        for name in kwargs:
            similar = get_close_matches(name, known, n=1, cutoff=0.8)
            if similar and not hasattr(PreTrainedConfig, name):
                logger.warning(f"KDAConfig has no field {name!r}, it has no effect; did you mean {similar[0]!r}?")

    @property
    def layer_types(self) -> list[str]:
        """transformers' word for each layer, derived from `stages`."""
        # generation that exits early lowers num_hidden_layers for a while
        return [STAGES[stage].layer_type for stage in self.stages[: self.num_hidden_layers]]

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
        choices = {
            "norm": ("layernorm", "rmsnorm"),
            "position_embedding": ("learned", "none"),
            "short_conv_activation": (None, "silu", "relu"),
            "output_gate": ("none", "low_rank", "full"),
            "decay_gate": ("softplus", "lower_bound"),
            "feature_map": ("elu", "hedgehog"),
        }
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field} must be one of {list(allowed)}, got {getattr(self, field)!r}")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act must be a name from transformers.activations, got {self.hidden_act!r}")

    def validate_sizes(self):
        """Sizes that must be positive, and those that must fit together."""
        for field in (
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
        ):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        if self.num_value_heads % self.num_attention_heads:
            raise ValueError(
                f"num_value_heads must be a multiple of num_attention_heads={self.num_attention_heads}, "
                f"got {self.num_value_heads}"
            )

    def validate_ranges(self):
        """Numbers with a lower or an upper limit."""
        for field in ("short_conv_kernel_size", "max_rollback", "norm_eps", "initializer_range"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} must not be negative, got {getattr(self, field)}")
        for field in ("attention_dropout", "hidden_dropout"):
            if not 0 <= getattr(self, field) <= 1:
                raise ValueError(f"{field} must be between 0 and 1, got {getattr(self, field)}")
        if self.decay_lower_bound >= 0:
            raise ValueError(f"decay_lower_bound must be negative, got {self.decay_lower_bound}")


__all__ = ["KDAConfig"]
