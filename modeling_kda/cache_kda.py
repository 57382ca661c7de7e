"""What generation carries from call to call, per layer: keys and values, latents, or a conv window and a state.

Softmax and latent layers use transformers' own cache layers, recurrent layers the `RecurrentLayer` of
`recurrent_cache.py`. It is put into whatever cache `generate`, an assistant or the user made (`adopt_cache`);
`KDACache` is the ready-made one.
"""

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, LinearAttentionLayer
from transformers.utils import logging

from .recurrent_cache import CountingRecurrentLayer, RecurrentLayer
from .stages import STAGES

logger = logging.get_logger(__name__)


class KDACache(DynamicCache):
    """A cache for any mix of stages.

    Args:
        config: the model's `KDAConfig`.
        max_rollback: how many tokens `crop` can take back from recurrent layers. 0 (the default) records nothing until
            `activate_past_recording` is called (assisted generation does so), then `config.max_rollback` holds.
    """

    def __init__(self, config, max_rollback: int = 0):
        if max_rollback < 0:
            raise ValueError(f"max_rollback must not be negative, got {max_rollback}")
        super().__init__(config=config)
        adopt_cache(self, config)
        if max_rollback:
            raise_rollback(self, max_rollback, exactly=True)
            self.activate_past_recording()

    def crop(self, tokens_to_remove: int):
        """Take the last `-tokens_to_remove` tokens back; all layers or none.

        Raises: ValueError if they were not recorded, or are not there, or for a positive number.
        """
        length = self.get_seq_length()
        if tokens_to_remove > 0 or -tokens_to_remove > length:
            raise ValueError(
                f"crop takes the number of tokens to remove as a negative number, 0 to -{length}, "
                f"got {tokens_to_remove}"
            )
        if tokens_to_remove == -length:
            self.reset()
            return
        for layer in self.layers:
            if isinstance(layer, RecurrentLayer):
                layer.check_recorded(-tokens_to_remove)
        super().crop(tokens_to_remove)


def adopt_cache(cache, config, batch_size=None):
    """Put a `RecurrentLayer` in the place of each linear-attention layer of `cache` that transformers made, in place.

    Layers of ours are left alone, so this may be called at every forward.

    Raises: ValueError if the cache is not made for this model, or holds another number of rows than `batch_size`.
    """
    if not isinstance(cache, Cache) or not hasattr(cache, "layers"):
        raise ValueError(f"cache must be a Cache such as KDACache(config), got {type(cache).__name__}")
    if not cache.layers and getattr(cache, "layer_class_to_replicate", None) is not None:
        # a cache made without a config does not know yet what its layers are
        cache.layers = [
            DynamicLayer() if kind == "full_attention" else LinearAttentionLayer() for kind in config.layer_types
        ]
        cache.layer_class_to_replicate = None
    if len(cache.layers) != config.num_hidden_layers:
        raise ValueError(
            f"the cache must have one layer per layer of the model, {config.num_hidden_layers}, "
            f"got {len(cache.layers)}; make it with KDACache(config)"
        )
    for i, layer in enumerate(cache.layers):
        _check_layer(layer, i, config)
        _check_rows(layer, batch_size, STAGES[config.stages[i]].mixer, config)
    # without a softmax layer nobody else counts the tokens
    counts = [not any(kind == "full_attention" for kind in config.layer_types)] + [False] * len(cache.layers)
    for i, layer in enumerate(cache.layers):
        if type(layer) is LinearAttentionLayer:
            kind = CountingRecurrentLayer if counts[i] else RecurrentLayer
            cache.layers[i] = kind(STAGES[config.stages[i]].erase, config.max_rollback, layer.record_past)
            cache.layers[i].in_static_cache = not isinstance(cache, DynamicCache)
    _keep_a_lone_layer(cache, config)
    return cache


def _keep_a_lone_layer(cache, config):
    """Stop an offloading cache from offloading its only layer of keys and values.

    transformers fetches the next such layer while this one is used. Where the next one is this one, it would be read
    before it has arrived (seen on an H200 as wrong logits).
    """
    if getattr(cache, "offloading", False) and config.layer_types.count("full_attention") == 1:
        logger.warning_once(
            "the cache stays on the GPU: a model with one layer of attention has nothing to fetch ahead"
        )
        cache.offloading = False


class LengthAtCall:
    """A cache whose length stays what it was, for a mask that is looked at when the new tokens are in the cache.

    transformers' static layers count in place, and the mask of flex attention is a function that holds their counter.
    """

    def __init__(self, cache):
        self._cache = cache

    def __getattr__(self, name):
        return getattr(self._cache, name)

    def get_query_offset(self, layer_idx=0):
        offset = self._cache.get_query_offset(layer_idx)
        return offset.clone() if isinstance(offset, torch.Tensor) else offset


def raise_rollback(cache, max_rollback, *, exactly=False):
    """Let every recurrent layer of `cache` take back at least (or exactly) so many tokens."""
    for layer in cache.layers:
        if isinstance(layer, RecurrentLayer):
            layer.max_rollback = max_rollback if exactly else max(layer.max_rollback, max_rollback)


def _check_layer(layer, i, config):
    """Raises: ValueError if layer i of a cache cannot serve layer i of the model."""
    stage = STAGES[config.stages[i]]
    if isinstance(layer, RecurrentLayer):
        fits = stage.mixer == "recurrent" and layer.erase == stage.erase
    elif isinstance(layer, LinearAttentionLayer):
        fits = stage.mixer == "recurrent" and not any(layer.has_previous_state.values())
    else:
        fits = stage.mixer != "recurrent"
    if not fits:
        raise ValueError(
            f"the cache was made for another model: its layer {i} is a {type(layer).__name__} and cannot serve the "
            f"stage {config.stages[i]}; make the cache with KDACache(config). Methods that write keys and values into "
            "the cache, such as prefix tuning, need softmax layers only"
        )


def _check_rows(layer, batch_size, mixer, config):
    """Raises: ValueError if the cache was filled with another number of rows, or keys (or latents) of another size."""
    recurrent = isinstance(layer, RecurrentLayer)
    held = layer.read()[1] if recurrent else getattr(layer, "keys", None)
    # empty layers hold None or an empty vector, quantized ones other things than tensors
    if batch_size is None or not isinstance(held, torch.Tensor) or held.dim() != 4:
        return
    rows, heads, _, size = held.shape
    if mixer == "latent":
        kind, fits = "latents", heads == 1 and size == config.kv_lora_rank
        wanted = f"kv_lora_rank={config.kv_lora_rank}"
    else:
        kind, fits, wanted = "keys", recurrent or size == config.head_dim, f"head_dim={config.head_dim}"
    if rows != batch_size or not fits:
        raise ValueError(
            f"the cache holds {rows} rows{'' if recurrent else f' of {kind} of size {size}'}, got a batch of "
            f"{batch_size} and {wanted}; make a new cache, or call batch_repeat_interleave or batch_select_indices"
        )
