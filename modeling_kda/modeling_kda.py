"""The model: embeddings, blocks of a mixer and an MLP, and the heads. One class for every stage of the lineage."""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask, create_masks_for_generate
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import can_return_tuple, is_torchdynamo_compiling
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention_residual import AttentionResidual, build_residual
from .cache_kda import KDACache, LengthAtCall, adopt_cache, raise_rollback
from .call_inputs import check_ids, read_inputs
from .configuration_kda import KDAConfig
from .decoder_layer import KDADecoderLayer
from .latent_mixer import LatentMixer
from .layers import Decay, HedgehogFeatureMap, RMSNorm, ShortConvolution, build_norm
from .moe import Experts, Router
from .softmax_mixer import SoftmaxMixer
from .stages import STAGES

# what transformers does not know how to initialise
OWN_INIT = (AttentionResidual, Decay, Experts, HedgehogFeatureMap, RMSNorm, Router, ShortConvolution)


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
    # searched for anywhere in a name: "decay" would also catch the projections
    _keep_in_fp32_modules_strict = ["A_log", "dt_bias", "router"]
    _can_record_outputs = {
        "hidden_states": KDADecoderLayer,
        "attentions": [SoftmaxMixer, LatentMixer],
        "router_logits": OutputRecorder(Router, index=0),
    }

    def __init__(self, config: KDAConfig):
        super().__init__(config)
        if config.keep_in_fp32:
            self._keep_in_fp32_modules_strict = [*self._keep_in_fp32_modules_strict, *config.keep_in_fp32]

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, OWN_INIT):
            module.reset_parameters()

    @classmethod
    def _can_set_experts_implementation(cls):
        # transformers looks for a decorator in this file; our experts call its implementations themselves
        return True

    @classmethod
    def prepare_distribute_model(cls, distributed_config, *args, **kwargs):
        given = isinstance(distributed_config, dict)
        pp_size = distributed_config.get("pp_size") if given else getattr(distributed_config, "pp_size", None)
        if (pp_size or 1) > 1:
            raise ValueError(
                f"pp_size must be 1, got {pp_size}: every pipeline stage would add the learned positions again, lose "
                "count of the tokens in the cache, and miss the blocks that attention residuals read; shard with "
                "tp_size or fsdp_size"
            )
        return super().prepare_distribute_model(distributed_config, *args, **kwargs)


class KDAModel(KDAPreTrainedModel):
    """The blocks without a head. See [`KDAConfig`] for what can be built."""

    def __init__(self, config: KDAConfig):
        super().__init__(config)
        # fields may have been assigned since the config was made
        config.check()
        # without padding_idx: GPT-2 pads with its end of text, whose embedding must be learned
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.position_embedding == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.layers = nn.ModuleList(KDADecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.output_residual = build_residual(config)
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
    ) -> MoeModelOutputWithPast:
        r"""
        Args:
            input_ids: [B, T] token ids; or give `inputs_embeds`, [B, T, D].
            attention_mask: [B, S] with 0 on padding, anywhere in the past and present tokens (S = past + T); or a
                causal [B, 1, T, S] mask, bool or additive; or a dict with one mask per entry of `config.layer_types`
                (learned positions then need `position_ids`); or None.
            position_ids: [B, T]. Where they do not go up by one, a new packed document starts, as everywhere in
                transformers; documents never see each other. `cu_seq_lens_q` [N+1] (for one row) or `seq_idx` [B, T]
                say the same.
            cache: what earlier calls returned, or a new `KDACache`, `DynamicCache` or `StaticCache`.
            use_cache: whether to make and return a cache; ignored in training mode and for packed rows.

        Raises: ValueError for inputs that contradict each other or that a recurrent layer cannot honour.
        """
        if kwargs.get("is_causal") is False and "linear_attention" in self.config.layer_types:
            raise ValueError(
                "is_causal=False needs softmax or mla in every layer, because recurrent layers read from left to "
                f"right; got stages {self.config.stages}"
            )
        inputs_embeds = self._embed(input_ids, inputs_embeds)
        if cache is not None:
            cache = adopt_cache(cache, self.config, inputs_embeds.shape[0])
        documents = kwargs.pop("seq_idx", None), [kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")]
        # in training the default use_cache=True would only cost memory; who wants a cache there passes one
        makes_cache = bool(use_cache) and cache is None and not self.training
        inputs = read_inputs(inputs_embeds, attention_mask, position_ids, *documents, cache, makes_cache, self.config)
        if makes_cache and not inputs.packed:
            cache = KDACache(self.config)
        masks = self._masks(inputs, inputs_embeds, cache)

        hidden_states = self.dropout(self._add_positions(inputs_embeds, inputs.positions))
        bank = []
        for layer, kind in zip(self.layers, self.config.layer_types, strict=False):
            # the bank is not a list here: reentrant checkpointing follows gradients of tensors by position only
            hidden_states = layer(hidden_states, masks[kind], *bank, cache=cache, position_ids=inputs.runs, **kwargs)
            if self.output_residual is not None:
                hidden_states, *finished = hidden_states
                bank += finished
        if self.output_residual is not None:
            hidden_states = self.output_residual([*bank, hidden_states])
        return MoeModelOutputWithPast(last_hidden_state=self.norm(hidden_states), cache=cache)

    def _embed(self, input_ids, inputs_embeds):
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of input_ids and inputs_embeds must be given")
        if inputs_embeds is not None:
            return inputs_embeds
        check_ids(input_ids, self.config.vocab_size)
        return self.embed_tokens(input_ids)

    def _masks(self, inputs, inputs_embeds, cache):
        """What each kind of layer takes: recurrent ones the `TokenLayout`, all others a mask."""
        masks = {"linear_attention": inputs.layout, "full_attention": None}
        if isinstance(inputs.mask, dict):
            masks["full_attention"] = inputs.mask.get("full_attention")
        elif "full_attention" in self.config.layer_types:
            masks["full_attention"] = create_causal_mask(
                config=self.config,
                inputs_embeds=inputs_embeds,
                attention_mask=inputs.mask,
                cache=None if cache is None else LengthAtCall(cache),
                position_ids=inputs.runs,
                # a static cache has more keys than tokens; transformers sees to that only while it may be compiled
                allow_is_causal_skip=cache is None or cache.get_max_length() == -1,
            )
        return masks

    def _add_positions(self, embeds, position_ids):
        if self.config.position_embedding == "none":
            return embeds
        limit = self.config.max_position_embeddings
        if not is_torchdynamo_compiling():
            first, last = (int(x) for x in position_ids.aminmax())
            if first < 0 or last >= limit:
                raise ValueError(
                    f"this model has learned positions for max_position_embeddings={limit} tokens, got position "
                    f"{first if first < 0 else last}; shorten the input, or use a model with position_embedding='none'"
                )
        return embeds + self.embed_positions(position_ids)


class KDAForCausalLM(KDAPreTrainedModel, GenerationMixin):
    """The language model: `KDAModel` and a linear head, tied to the embedding by default."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
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
    ) -> MoeCausalLMOutputWithPast:
        r"""
        Args (the others as in [`KDAModel`]):
            labels: [B, T] token ids, shifted inside; -100 is ignored.
            logits_to_keep: only the last n positions, or the positions in a tensor.

        Returns: loss (if labels were given), logits [B, T', V], cache, and what `output_hidden_states`,
            `output_attentions` and `output_router_logits` ([B * T, E] per layer with experts) asked for.
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
        return MoeCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
        )

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        cache = model_kwargs.get("cache")
        if cache is None:
            return
        # before generate asks the cache to record its past
        adopt_cache(cache, self.config)
        if generation_config.is_assistant:
            raise_rollback(cache, generation_config.max_new_tokens or 0)
        past, positions = int(cache.get_seq_length()), model_kwargs.get("position_ids")
        if past and positions is not None and positions.shape[-1] <= past:
            raise ValueError(
                f"generate needs all tokens, those in the cache and at least one more: the cache has {past}, got "
                f"{positions.shape[-1]}; to go on from a cache that covers the prompt, take the last token back with "
                "crop(-1), which needs KDACache(config, max_rollback=1)"
            )

    def _get_static_cache_init_shape(self):
        # latent layers keep other shapes than keys of all heads; every layer finds its own out when it is first used
        latent = any(STAGES[stage].mixer == "latent" for stage in self.config.stages)
        return None if latent else super()._get_static_cache_init_shape()

    @staticmethod
    def create_masks_for_generate(*, inputs_embeds, attention_mask, cache=None, **kwargs):
        cache = None if cache is None else LengthAtCall(cache)
        masks = create_masks_for_generate(
            inputs_embeds=inputs_embeds, attention_mask=attention_mask, cache=cache, **kwargs
        )
        if attention_mask is not None and attention_mask.dim() == 2 and "linear_attention" in masks:
            # transformers takes a single token for real; in a prompt read in parts it may be padding
            real = attention_mask[:, -inputs_embeds.shape[1] :]
            masks["linear_attention"] = None if real.all() else real
        return masks

    def init_continuous_batching(self, *args, **kwargs):
        raise ValueError(
            "continuous batching is not supported: its pages hold keys and values, and recurrent layers keep a state; "
            "call generate with a padded batch"
        )

    def _get_candidate_generator(self, *args, **kwargs):
        generator = super()._get_candidate_generator(*args, **kwargs)
        drafted = [getattr(generator, name, None) or 0 for name in ("num_assistant_tokens", "num_output_tokens")]
        raise_rollback(kwargs["model_kwargs"]["cache"], max(drafted))
        return generator


class KDAForSequenceClassification(GenericForSequenceClassification, KDAPreTrainedModel):
    """A linear score on the last token that is not `config.pad_token_id`."""

    def __init__(self, config: KDAConfig):
        # not the generic one: it builds the base model through AutoModel, which fails for code loaded from the Hub
        KDAPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = KDAModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


__all__ = ["KDAForCausalLM", "KDAForSequenceClassification", "KDAModel", "KDAPreTrainedModel"]
