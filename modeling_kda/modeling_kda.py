"""The model: embeddings, blocks of a mixer and an MLP, and the heads. One class for every stage of the lineage."""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GenericForSequenceClassification, GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import can_return_tuple, is_torchdynamo_compiling
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .cache_kda import KDACache, adopt_cache
from .configuration_kda import KDAConfig
from .layers import MLP, Decay, HedgehogFeatureMap, RMSNorm, ShortConvolution, build_norm
from .recurrent_mixer import RecurrentMixer
from .softmax_mixer import SoftmaxMixer
from .stages import STAGES
from .token_layout import (
    TokenLayout,
    documents_from_cu_seqlens,
    documents_from_positions,
    first_of_run,
    isolate_padding,
)

MIXERS = {"softmax": SoftmaxMixer, "recurrent": RecurrentMixer}


class KDADecoderLayer(GradientCheckpointingLayer):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: KDAConfig, layer_idx: int):
        super().__init__()
        self.mixer_norm = build_norm(config)
        self.mixer = MIXERS[STAGES[config.stages[layer_idx]].mixer](config, layer_idx)
        self.mlp_norm = build_norm(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(self, hidden_states, mask=None, cache: Cache | None = None, **kwargs):
        """hidden_states: [B, T, D]; mask: what this layer's mixer takes. Returns [B, T, D]."""
        mixed, _ = self.mixer(self.mixer_norm(hidden_states), mask, cache=cache, **kwargs)
        hidden_states = hidden_states + self.dropout(mixed)
        return hidden_states + self.dropout(self.mlp(self.mlp_norm(hidden_states)))


class KDAPreTrainedModel(PreTrainedModel):
    config: KDAConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["KDADecoderLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    # the cache can take recurrent layers back, so assisted generation is not refused
    _is_stateful = False
    _keep_in_fp32_modules_strict = ["decay"]
    _can_record_outputs = {"hidden_states": KDADecoderLayer, "attentions": SoftmaxMixer}

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, Decay | HedgehogFeatureMap | RMSNorm | ShortConvolution):
            module.reset_parameters()


class KDAModel(KDAPreTrainedModel):
    """The blocks without a head. See [`KDAConfig`] for what can be built."""

    def __init__(self, config: KDAConfig):
        super().__init__(config)
        # fields may have been assigned since the config was made
        config.check()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        if config.position_embedding == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.layers = nn.ModuleList(KDADecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = build_norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        r"""
        Args:
            input_ids: [B, T] token ids; or give `inputs_embeds`, [B, T, D].
            attention_mask: [B, S] with 0 on padding, anywhere in the past and present tokens (S = past + T); or a
                causal [B, 1, T, S] mask; or a dict with one mask per entry of `config.layer_types`; or None.
            position_ids: [B, T]. A row in which they start again holds several packed documents, which never see each
                other; `cu_seq_lens_q` [N+1] or `seq_idx` [B, T] say the same.
            cache: what earlier calls returned, or a new `KDACache`, `DynamicCache` or `StaticCache`.
            use_cache: whether to make and return a cache; ignored in training mode and for packed rows.

        Raises: ValueError for inputs that contradict each other or that a recurrent layer cannot honour.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of input_ids and inputs_embeds must be given")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        B, T = inputs_embeds.shape[:2]
        documents = kwargs.pop("seq_idx", None), kwargs.get("cu_seq_lens_q")
        past = 0 if cache is None else adopt_cache(cache, self.config).get_seq_length()
        real = _real_tokens(attention_mask, T, past)
        document = _find_documents((B, T), position_ids, *documents, real=real, cache=cache)
        if document is None:
            # in training the default use_cache=True would only cost memory; who wants a cache there passes one
            if use_cache and cache is None and not self.training:
                cache = KDACache(self.config)
            if position_ids is None:
                position_ids = _count_positions(attention_mask, B, T, past, inputs_embeds.device)
            layout = None if real is None else TokenLayout.padded(real)
        else:
            cache, attention_mask = None, None
            layout = TokenLayout.packed(document, real)
            position_ids = layout.age
        masks = self._masks(attention_mask, inputs_embeds, position_ids, cache, layout)

        hidden_states = self.dropout(self._add_positions(inputs_embeds, position_ids))
        for layer, kind in zip(self.layers, self.config.layer_types, strict=True):
            hidden_states = layer(hidden_states, masks[kind], cache=cache, position_ids=position_ids, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), cache=cache)

    def _masks(self, attention_mask, inputs_embeds, position_ids, cache, layout):
        """What each kind of layer takes: a mask for softmax layers, the `TokenLayout` for recurrent ones."""
        masks = {"linear_attention": layout, "full_attention": None}
        if "full_attention" not in self.config.layer_types:
            return masks
        if isinstance(attention_mask, dict):
            masks["full_attention"] = attention_mask.get("full_attention")
            return masks
        if attention_mask is not None and attention_mask.dim() == 4 and "linear_attention" in self.config.layer_types:
            _check_causal(attention_mask, layout)
        masks["full_attention"] = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            cache=cache,
            position_ids=position_ids,
        )
        return masks

    def _add_positions(self, embeds, position_ids):
        if self.config.position_embedding == "none":
            return embeds
        limit = self.config.max_position_embeddings
        if not is_torchdynamo_compiling() and position_ids.numel() and (last := int(position_ids.max())) >= limit:
            raise ValueError(
                f"this model has learned positions for max_position_embeddings={limit} tokens, got position {last}; "
                "shorten the input, or use a model with position_embedding='none'"
            )
        return embeds + self.embed_positions(position_ids)


class KDAForCausalLM(KDAPreTrainedModel, GenerationMixin):
    """The language model: `KDAModel` and a linear head, tied to the embedding by default."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: KDAConfig):
        super().__init__(config)
        self.model = KDAModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        r"""
        Args (the others as in [`KDAModel`]):
            labels: [B, T] token ids, shifted inside; -100 is ignored.
            logits_to_keep: only the last n positions, or the positions in a tensor.

        Returns: loss (if labels were given), logits [B, T', V], cache, and what `output_hidden_states` and
            `output_attentions` asked for.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        # before generate asks the cache to record its past
        if model_kwargs.get("cache") is not None:
            adopt_cache(model_kwargs["cache"], self.config)


class KDAForSequenceClassification(GenericForSequenceClassification, KDAPreTrainedModel):
    """A linear score on the last token that is not `config.pad_token_id`."""

    def __init__(self, config: KDAConfig):
        # not the generic one: it builds the base model through AutoModel, which fails for code loaded from the Hub
        KDAPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = KDAModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


def _real_tokens(attention_mask, T, past):
    """[B, T] bool, False where this call's tokens are padding; None if all are real."""
    if isinstance(attention_mask, dict):
        real = attention_mask.get("linear_attention")
    elif attention_mask is not None and attention_mask.dim() == 4:
        allowed = attention_mask if attention_mask.dtype == torch.bool else attention_mask >= 0
        real = allowed[:, 0].any(-2)[:, -T:]
    else:
        real = attention_mask
    if real is None:
        return None
    if not is_torchdynamo_compiling() and real.shape[-1] < T:
        raise ValueError(
            f"attention_mask must cover the {past} tokens in the cache and the {T} new ones, "
            f"got {real.shape[-1]} columns"
        )
    real = real[:, -T:] != 0
    return None if not is_torchdynamo_compiling() and real.all() else real


def _find_documents(shape, position_ids, seq_idx, cu_seqlens, *, real, cache):
    """[B, T] document numbers if rows are packed, else None."""
    by_position = None
    if position_ids is not None and cache is None and not is_torchdynamo_compiling():
        by_position = documents_from_positions(position_ids.expand(shape), real)
    if cu_seqlens is not None:
        document = documents_from_cu_seqlens(cu_seqlens, shape)
    elif seq_idx is not None:
        document = seq_idx.expand(shape)
    elif by_position is not None and bool(by_position[:, -1:].any()):
        document = by_position
    else:
        return None
    if cache is not None:
        raise ValueError("packed rows and a cache cannot be combined: call with use_cache=False and without a cache")
    if by_position is not None and by_position is not document:
        _check_agreement(document, by_position)
    return document if real is None else isolate_padding(document, real)


def _check_agreement(document, by_position):
    """Within a document, position ids must count up; where they do not, the two inputs contradict each other."""
    inside = ~first_of_run(document)
    if (first_of_run(by_position) & inside).any():
        raise ValueError(
            "position_ids start again inside a document that cu_seq_lens_q or seq_idx holds together; "
            "pass boundaries that agree, or only one of the two"
        )


def _count_positions(attention_mask, B, T, past, device):
    """[B, T] position of each token among the real tokens of its row."""
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
        return (attention_mask.long().cumsum(-1) - 1).clamp_min(0)[:, -T:].to(device)
    return (torch.arange(T, device=device) + past).expand(B, T)


def _check_causal(mask, layout):
    """A recurrent layer can honour a 4-D mask only if it says: every real token before me, and me."""
    allowed = (mask if mask.dtype == torch.bool else mask >= 0)[:, 0]
    T, S = allowed.shape[-2:]
    causal = torch.ones(T, S, dtype=torch.bool, device=mask.device).tril(S - T)
    expected = causal & allowed.any(-2, keepdim=True)
    wrong = allowed != expected
    if layout is not None and layout.real is not None:
        wrong = wrong & layout.real[..., None]
    if wrong.any():
        raise ValueError(
            "a 4-D attention_mask must be causal with padding for models with recurrent layers, got another pattern; "
            "for packed documents pass position_ids that start again, cu_seq_lens_q or seq_idx"
        )


__all__ = ["KDAForCausalLM", "KDAForSequenceClassification", "KDAModel", "KDAPreTrainedModel"]
