"""The configuration of every model of the lineage, from GPT-2 (all ``softmax``) to Kimi Linear and Kimi K3."""

from dataclasses import fields
from difflib import get_close_matches

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.utils import logging

from .config_checks import ConfigChecks
from .presets import KIMI_K3, KIMI_LINEAR_48B, with_stages
from .stages import STAGES

logger = logging.get_logger(__name__)

AUTO_MAP = {
    "AutoConfig": "configuration_kda.KDAConfig",
    "AutoModel": "modeling_kda.KDAModel",
    "AutoModelForCausalLM": "modeling_kda.KDAForCausalLM",
    "AutoModelForSequenceClassification": "modeling_kda.KDAForSequenceClassification",
}


@strict
class KDAConfig(ConfigChecks, PreTrainedConfig):
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
        hidden_act: activation of the MLP: a name transformers knows, or `"situ"` (Kimi K3, gated MLPs only).
        mlp_gated: `True` for a gated MLP (SwiGLU with `hidden_act="silu"`).
        situ_beta: bound of the gate branch of `"situ"`.
        situ_linear_beta: bound of its up branch; `None` leaves that branch linear.
        attention_bias: biases on the projections of the mixers.
        mlp_bias: biases in the MLP.
        norm: `"layernorm"` or `"rmsnorm"`.
        norm_eps: epsilon of all norms.
        position_embedding: `"learned"` (GPT-2) or `"none"`.
        max_position_embeddings: number of learned positions; with `"none"` only a hint about the training length.
        tie_word_embeddings: whether the head shares the input embedding.
        attention_dropout: dropout on the attention weights of `softmax` and `mla` layers, in training.
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
        q_lora_rank: `mla` layers: rank of the queries; `None` for a direct `q_proj`.
        kv_lora_rank: `mla` layers: size R of the latent that stands for keys and values; `hidden_size` if not given
            (then nothing is lost).
        qk_nope_head_dim: `mla` layers: query and key channels per head; `head_dim` if not given.
        qk_rope_head_dim: `mla` layers: further key channels that all heads share. Kimi keeps their old name: they are
            never rotated.
        v_head_dim: `mla` layers: value channels per head; `head_dim` if not given.
        latent_norm: `mla` layers: RMSNorm on the latents (of keys and values, and of queries with `q_lora_rank`).
        latent_norm_eps: its epsilon; Kimi has another one here than in `norm_eps`.
        mla_output_gate: `mla` layers: a full sigmoid gate on the heads' outputs (Kimi K3).
        num_experts: routed experts E per layer; 0 for a dense MLP everywhere.
        num_experts_per_token: experts that each token goes to.
        num_shared_experts: experts that every token goes to, built as one MLP; 0 for none.
        shared_intermediate_size: width of that MLP; `num_shared_experts * moe_intermediate_size` if not given.
        moe_intermediate_size: width of one routed expert; `intermediate_size` if not given.
        first_k_dense_replace: so many first layers keep a dense MLP.
        moe_renormalize: whether the weights of a token's experts are divided by their sum.
        routed_scaling_factor: factor on the sum over the routed experts.
        routed_expert_hidden_size: size of the latent that routed experts read and write (Kimi K3); `None`: they read
            and write `hidden_size`.
        latent_moe_use_norm: RMSNorm on the sum over latent experts.
        attention_residual: `"none"`: x + f(norm(x)); `"block"` (Kimi K3) or `"full"`: the input of each mixer and MLP
            is a learned mixture of the embedding and what earlier blocks of layers (`"full"`: all earlier mixers and
            MLPs) added.
        attention_residual_block_size: decoder layers per block.
        residual_scale: multiplies each mixture by the number of its sources: with fresh queries, which weigh all
            sources alike, the model then computes exactly the plain residual sum.
        max_rollback: how many tokens a cache that records its past can take back from recurrent layers with `crop`.
        keep_in_fp32: parts of the names of further parameters that stay fp32 in models of a lower dtype, such as
            `["conv1d", "o_norm"]`; their modules must hold nothing else. Decays and routers always do.
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
        "num_experts_per_tok": "num_experts_per_token",
        "num_local_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "norm_topk_prob": "moe_renormalize",
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
    situ_beta: float = 4.0
    situ_linear_beta: float | None = 25.0
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int = 0
    v_head_dim: int | None = None
    latent_norm: bool = True
    latent_norm_eps: float = 1e-6
    mla_output_gate: bool = False
    num_experts: int = 0
    num_experts_per_token: int = 8
    num_shared_experts: int = 1
    shared_intermediate_size: int | None = None
    moe_intermediate_size: int | None = None
    first_k_dense_replace: int = 1
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    routed_expert_hidden_size: int | None = None
    latent_moe_use_norm: bool = True
    attention_residual: str = "none"
    attention_residual_block_size: int = 12
    residual_scale: bool = False
    max_rollback: int = 64
    keep_in_fp32: list[str] | None = None
    initializer_range: float = 0.02
    use_cache: bool = True
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256
    pad_token_id: int | None = None
    auto_map: dict | None = None

    @classmethod
    def kimi_linear_48b(cls, **overrides):
        """Kimi-Linear-48B-A3B: 27 layers, 49.1 billion parameters, 3.1 billion per token.

        Args: overrides: fields with other values, such as smaller sizes; the stages follow `num_hidden_layers`.
        """
        return cls(**with_stages(KIMI_LINEAR_48B, overrides))

    @classmethod
    def kimi_k3(cls, **overrides):
        """The text model of Kimi K3: 93 layers, 2.78 trillion parameters, 104 billion per token.

        Args: overrides: as in `kimi_linear_48b`.
        """
        return cls(**with_stages(KIMI_K3, overrides))

    def __post_init__(self, **kwargs):
        # derived from `stages`: a stored copy could disagree
        layer_types = kwargs.pop("layer_types", None)
        self._accept_aliases(kwargs)
        one_for_all = isinstance(self.stages, str)
        self.stages = [self.stages] * self.num_hidden_layers if one_for_all else list(self.stages)
        self._derive_sizes()
        self.base_model_tp_plan = self._tensor_parallel_plan()
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

    def _derive_sizes(self):
        if self.head_dim is None:
            self.head_dim = self._derived_head_dim()
        self._fill("value_head_dim", self.head_dim)
        self._fill("num_value_heads", self.num_attention_heads)
        self._fill("intermediate_size", 4 * self.hidden_size)
        self._fill("output_gate_rank", self.value_head_dim)
        self._fill("decay_rank", self.head_dim)
        self._fill("kv_lora_rank", self.hidden_size)
        self._fill("qk_nope_head_dim", self.head_dim)
        self._fill("v_head_dim", self.head_dim)
        self._fill("moe_intermediate_size", self.intermediate_size)
        self._fill("shared_intermediate_size", self.num_shared_experts * self.moe_intermediate_size)

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

    def uses_experts(self, layer_idx: int) -> bool:
        """Whether the layer has a mixture of experts in the place of its MLP."""
        return self.num_experts > 0 and layer_idx >= self.first_k_dense_replace

    def _tensor_parallel_plan(self):
        """Rules for the modules there are only: a rule that matches none makes loading print a warning."""
        # q, k and v are gathered again: the recurrence of a layer runs whole on every rank
        plan = {
            "embed_tokens": "embedding_rowwise",
            "layers.*.mixer.q_proj": "colwise_gather_output",
            "layers.*.mixer.k_proj": "colwise_gather_output",
            "layers.*.mixer.v_proj": "colwise_gather_output",
            "layers.*.mixer.o_proj": "rowwise_split_input",
        }
        latent = {STAGES[stage].mixer == "latent" for stage in self.stages if stage in STAGES}
        if latent == {True}:
            del plan["layers.*.mixer.k_proj"], plan["layers.*.mixer.v_proj"]
            if self.q_lora_rank:
                del plan["layers.*.mixer.q_proj"]
        # what expands latents stays whole: decoding reads its matrix itself
        if True in latent and self.q_lora_rank:
            plan["layers.*.mixer.q_b_proj"] = "colwise_gather_output"
        if True in latent and self.mla_output_gate:
            plan["layers.*.mixer.gate_proj"] = "colwise_gather_output"
        experts = {self.uses_experts(i) for i in range(self.num_hidden_layers)}
        mlps = ["mlp"] * (False in experts)
        mlps += ["mlp.shared_experts"] * (True in experts and self.shared_intermediate_size > 0)
        for mlp in mlps:
            if self.mlp_gated:
                plan[f"layers.*.{mlp}.gate_proj"] = "colwise"
            plan[f"layers.*.{mlp}.up_proj"] = "colwise"
            plan[f"layers.*.{mlp}.down_proj"] = "rowwise"
        # other experts stay whole: every rank would add their biases
        if True in experts and self.mlp_gated and not self.mlp_bias:
            plan["layers.*.mlp.experts"] = "moe_tp_experts"
            plan["layers.*.mlp.experts.gate_up_proj"] = "packed_colwise"
            plan["layers.*.mlp.experts.down_proj"] = "rowwise"
        return plan

    @property
    def base_model_ep_plan(self):
        """Where experts are spread over ranks, each goes to one rank with all that it has."""
        if not self.num_experts:
            return None
        kinds = ("proj", "bias") if self.mlp_bias else ("proj",)
        names = [f"{name}_{kind}" for name in ("gate_up" if self.mlp_gated else "up", "down") for kind in kinds]
        experts = "layers.*.mlp.experts"
        return {experts: "ep_dispatch_experts", **{f"{experts}.{name}": "grouped_gemm" for name in names}}


__all__ = ["KDAConfig"]
