"""One layer: a mixer, an MLP or experts, and how what they add reaches the layers after it."""

from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.deprecation import deprecate_kwarg

from .attention_residual import build_residual, opens_block
from .configuration_kda import KDAConfig
from .latent_mixer import LatentMixer
from .layers import MLP, build_norm
from .moe import MoE
from .recurrent_mixer import RecurrentMixer
from .softmax_mixer import SoftmaxMixer
from .stages import STAGES

MIXERS = {"softmax": SoftmaxMixer, "latent": LatentMixer, "recurrent": RecurrentMixer}


class KDADecoderLayer(GradientCheckpointingLayer):
    """x + mixer(norm(x)), then x + mlp(norm(x)); with attention residuals, both read a mixture of what came before."""

    def __init__(self, config: KDAConfig, layer_idx: int):
        super().__init__()
        self.mixer_residual = build_residual(config)
        self.mixer_norm = build_norm(config)
        self.mixer = MIXERS[STAGES[config.stages[layer_idx]].mixer](config, layer_idx)
        self.mlp_residual = build_residual(config)
        self.mlp_norm = build_norm(config)
        self.mlp = MoE(config) if config.uses_experts(layer_idx) else MLP(config)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.mixer_opens_block = opens_block(config, 2 * layer_idx)
        self.mlp_opens_block = opens_block(config, 2 * layer_idx + 1)

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(self, hidden_states, mask=None, *bank, cache: Cache | None = None, **kwargs):
        """Args:
            hidden_states: [B, T, D]; with attention residuals the sum so far of the current block.
            mask: what this layer's mixer takes.
            bank: with attention residuals, the finished blocks, each [B, T, D].
            cache: a transformers `Cache` with a layer of the mixer's kind at this place, or None.

        Returns: [B, T, D]. With attention residuals a tuple of it and the blocks that this layer finished.
        """
        if self.mixer_residual is not None:
            return self._read_mixtures(hidden_states, mask, bank, cache=cache, **kwargs)
        hidden_states = hidden_states + self._mix(hidden_states, mask, cache=cache, **kwargs)
        return hidden_states + self._feed(hidden_states)

    def _read_mixtures(self, block, mask, bank, **kwargs):
        added = self._mix(self.mixer_residual([*bank, block]), mask, **kwargs)
        block, *finished = _add(block, added, self.mixer_opens_block)
        added = self._feed(self.mlp_residual([*bank, *finished, block]))
        block, *more = _add(block, added, self.mlp_opens_block)
        return block, *finished, *more

    def _mix(self, hidden_states, mask, **kwargs):
        return self.dropout(self.mixer(self.mixer_norm(hidden_states), mask, **kwargs)[0])

    def _feed(self, hidden_states):
        return self.dropout(self.mlp(self.mlp_norm(hidden_states)))


def _add(block, added, opens_block):
    """The current block after `added`, and the block that it finishes if it opens a new one."""
    if opens_block:
        # blocks keep one dtype, as a plain sum does: under autocast what a matrix gives has another
        return added.to(block.dtype), block
    return (block + added,)
