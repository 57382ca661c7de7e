"""Multi-head latent attention (MLA): softmax attention whose past is one small latent per token.

    c = norm(W_c x), k_r = W_r x     the latent, and a key part that all heads share: these are cached, nothing else
    [k_n | v] = W_kv c               per head
    weights = softmax([q_n | q_r] [k_n | k_r]^T (nope + rope)^-0.5 + causal mask);  o = weights v

W_kv = [W_k ; W_v] is linear, so that it can be absorbed: q_n^T (W_k c) = (W_k^T q_n)^T c and weights (W_v c) =
W_v (weights c). Then every head reads the latents themselves, as multi-query attention with one key of R + rope
channels, and the past is never expanded. The form with fewer multiplications runs (`absorbing_is_cheaper`).

There is no position encoding: the part named rope is not rotated.

B batch, T new tokens, S tokens seen, H heads, R latent channels, V value channels per head.
DeepSeek-V2, arXiv 2405.04434; without rotation in Kimi Linear, arXiv 2510.26692.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .layers import RMSNorm
from .ops import asks_for_kernels, fall_back
from .softmax_mixer import eager_attention
from .tracing import numbers_are_hidden

try:
    from .triton_latent import launch_latent_attention, unsupported
except ImportError:
    launch_latent_attention = None

# the most tokens that the kernel takes
MAX_TOKENS = 16
# scores of the absorbed form that are in memory at a time, in PyTorch
MAX_SCORES = 1 << 27


class LatentMixer(nn.Module):
    """y = o_proj(o * sigmoid(gate_proj(x))), the gate where `config.mla_output_gate` asks for it."""

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        D, H, R = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
        self.nope, self.rope, self.v_head_dim = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.kv_lora_rank, self.q_lora_rank = R, config.q_lora_rank
        self.scaling = (self.nope + self.rope) ** -0.5
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(D, H * (self.nope + self.rope), bias=config.attention_bias)
        else:
            self.q_a_proj = nn.Linear(D, config.q_lora_rank, bias=False)
            self.q_norm = _latent_norm(config, config.q_lora_rank)
            outputs = H * (self.nope + self.rope)
            self.q_b_proj = nn.Linear(config.q_lora_rank, outputs, bias=config.attention_bias)
        self.kv_a_proj = nn.Linear(D, R + self.rope, bias=False)
        self.kv_norm = _latent_norm(config, R)
        self.kv_b_proj = nn.Linear(R, H * (self.nope + self.v_head_dim), bias=False)
        if config.mla_output_gate:
            self.gate_proj = nn.Linear(D, H * self.v_head_dim, bias=False)
        self.o_proj = nn.Linear(H * self.v_head_dim, D, bias=config.attention_bias)

    def forward(self, hidden_states, mask=None, cache=None, **kwargs):
        """Args:
            hidden_states: [B, T, D].
            mask: what the attention implementation in use wants: None, [B, 1, T, S], [B, S] or a block mask.
            cache: a transformers `Cache` or None. Its layer here holds the latents [B, 1, S, R] in the place of keys
                and the shared keys [B, 1, S, rope] in the place of values.

        Returns: [B, T, D], and the attention weights [B, H, T, S] where the implementation gives them.
        """
        B, T, _ = hidden_states.shape
        q = self._queries(hidden_states)
        latent, shared = self._latents(hidden_states)
        seen = None
        if cache is not None:
            latent, shared, mask, seen = self._remember(cache, latent, shared, mask)
        if self._absorbs(T, latent.shape[2], cache):
            o, weights = self._attend_absorbed(q, latent[:, 0], shared[:, 0], mask, seen, **kwargs)
        else:
            o, weights = self._attend_expanded(q, latent, shared, mask, seen, **kwargs)
        o = o.reshape(B, T, -1)
        if self.config.mla_output_gate:
            o = o * self.gate_proj(hidden_states).sigmoid()
        return self.o_proj(o), weights

    def _queries(self, x):
        """[B, T, D] -> [B, H, T, nope + rope]."""
        q = self.q_proj(x) if self.q_lora_rank is None else self.q_b_proj(self.q_norm(self.q_a_proj(x)))
        return q.view(*x.shape[:2], -1, self.nope + self.rope).transpose(1, 2)

    def _latents(self, x):
        """[B, T, D] -> latents [B, 1, T, R], shared keys [B, 1, T, rope]."""
        latent, shared = self.kv_a_proj(x).split([self.kv_lora_rank, self.rope], -1)
        return self.kv_norm(latent)[:, None], shared[:, None]

    def _remember(self, cache, latent, shared, mask):
        """Write to the cache and read all of it. Returns latents, shared keys, the mask, and how many tokens a static
        cache, which has room for more, holds now: a tensor, or None.
        """
        T, layer = latent.shape[2], cache.layers[self.layer_idx]
        # a prompt for a long static cache must not be compared with the empty rest of it
        counted = T > 1 and not numbers_are_hidden() and not isinstance(mask, BlockMask)
        length = int(layer.get_seq_length()) + T if counted else None
        latent, shared = cache.update(latent, shared, self.layer_idx)
        seen = getattr(layer, "cumulative_length", None)
        if length is not None and length < latent.shape[2]:
            latent, shared, seen = latent[:, :, :length], shared[:, :, :length], None
            mask = mask if mask is None else mask[..., :length]
        return latent, shared, mask, seen if isinstance(seen, torch.Tensor) else None

    def _absorbs(self, T, S, cache):
        name = self.config._attn_implementation or "eager"
        # other implementations were registered by someone who wants to see all heads
        known = name in ("eager", "sdpa", "flex_attention") or "flash" in name
        if cache is None or not known or (self.training and self.attention_dropout):
            return False
        return T < S and absorbing_is_cheaper(T, S, self.kv_lora_rank, self.nope + self.v_head_dim)

    def _attend_expanded(self, q, latent, shared, mask, seen=None, **kwargs):
        """q: [B, H, T, nope + rope]; latent: [B, 1, S, R]; shared: [B, 1, S, rope]; seen: as from `_remember`.

        Returns: [B, T, H, V], and weights or None.
        """
        B, H, T, _ = q.shape
        kv = self.kv_b_proj(latent[:, 0]).view(B, -1, H, self.nope + self.v_head_dim).transpose(1, 2)
        k, v = kv.split([self.nope, self.v_head_dim], -1)
        if self.rope:
            k = torch.cat([k, shared.expand(-1, H, -1, -1)], -1)
        name = self.config._attn_implementation
        if name != "eager":
            # many kernels want values of the width of the keys; zeros change neither scores nor outputs
            width = max(k.shape[-1], self.v_head_dim)
            q, k, v = (F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in (q, k, v))
        if mask is None and name == "sdpa" and 1 < T < k.shape[2] and _is_causal(self, kwargs):
            # without a mask it takes the new tokens for the first ones
            mask = _visible(None, T, k.shape[2], q.device, seen)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention)
        dropout = self.attention_dropout if self.training else 0.0
        o, weights = attend(self, q, k, v, mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return o[..., : self.v_head_dim], weights

    def _attend_absorbed(self, q, latent, shared, mask, seen, **kwargs):
        """q: [B, H, T, nope + rope]; latent: [B, S, R]; shared: [B, S, rope]; seen: how many of them are tokens.

        Returns: [B, T, H, V], and weights with eager attention, else None.
        """
        B, H, T, _ = q.shape
        key_up, value_up = self._up_weights(H, latent).split([self.nope, self.v_head_dim], 1)
        q_latent, q_shared = _per_head(q[..., : self.nope], key_up), q[..., self.nope :]
        eager, causal = self.config._attn_implementation in (None, "eager"), _is_causal(self, kwargs)
        visible = None if mask is None else _visible(mask, T, latent.shape[1], q.device, seen, causal)
        kernel = None if eager else find_kernel(q_latent, q_shared, latent, shared, visible)
        if kernel is not None:
            queries, weights = (q_latent.transpose(1, 2), q_shared.transpose(1, 2)), None
            o = kernel(*queries, latent, shared, visible, seen, causal=causal, scale=self.scaling).transpose(1, 2)
        else:
            if mask is None:
                visible = _visible(None, T, latent.shape[1], q.device, seen, causal)
            queries = q_latent * self.scaling, q_shared * self.scaling
            o, weights = _multi_query(*queries, latent, shared, visible, whole=eager)
        return _per_head(o, value_up.transpose(1, 2)).transpose(1, 2), weights if eager else None

    def _up_weights(self, H, like):
        """The matrices of `kv_b_proj`, [H, nope + V, R]. like: a tensor of the dtype and on the device of the call."""
        proj = self.kv_b_proj
        plain = type(proj) is nn.Linear and type(proj.weight) is nn.Parameter
        if plain and not (proj._forward_hooks or proj._forward_pre_hooks or "forward" in vars(proj)):
            weight = proj.weight
        else:
            # quantized, adapted, sharded or offloaded: only a call gives what it computes
            weight = proj(torch.eye(self.kv_lora_rank, dtype=like.dtype, device=like.device)).T
        return weight.unflatten(0, (H, self.nope + self.v_head_dim))


def absorbing_is_cheaper(T, S, R, expanded):
    """Whether T tokens need fewer multiplications against S latents of R channels than against heads made of them.

    expanded: nope + V, what a latent is expanded to per head. Per head, expanding costs S R expanded and then
    T S (expanded + rope); absorbing costs T R expanded and then T S (2 R + rope). In Kimi's sizes, up to 170 tokens.
    """
    return T * (S * (2 * R - expanded) + R * expanded) < S * R * expanded


def find_kernel(q_latent, q_shared, latent, shared, visible):
    """The Triton function for this call of a few tokens, or None where PyTorch has to do it; why is said once."""
    if not asks_for_kernels(latent) or q_latent.shape[2] > MAX_TOKENS:
        # of many tokens, a part of a prompt, matrix products make enough
        return None
    reason = "triton is not installed (pip install triton)"
    if launch_latent_attention is not None:
        reason = unsupported(q_latent.transpose(1, 2), q_shared.transpose(1, 2), latent, shared, visible)
    return launch_latent_attention if reason is None else fall_back("decoding of latent attention", reason)


def _multi_query(q_latent, q_shared, latent, shared, visible, whole):
    """Attention of every head to the same latents, which are read where they are.

    q_latent: [B, H, T, R] and q_shared: [B, H, T, rope], scaled; latent: [B, S, R]; shared: [B, S, rope];
    visible: from `_visible`; whole: do not split T, however many scores there are.

    Returns: [B, H, T, R], and the weights [B, H, T, S] of the last split.
    """
    B, H, T, R = q_latent.shape
    rows = T if whole or T == 1 else max(1, MAX_SCORES // (B * H * latent.shape[1]))
    outputs = []
    for first in range(0, T, rows):
        part = slice(first, first + rows)
        scores = q_latent[:, :, part].flatten(1, 2) @ latent.transpose(1, 2)
        if shared.shape[-1]:
            scores = torch.baddbmm(scores, q_shared[:, :, part].flatten(1, 2), shared.transpose(1, 2))
        scores = scores.unflatten(1, (H, -1))
        if visible is not None and visible.dtype == torch.bool:
            scores = scores.masked_fill(~visible[:, :, part], torch.finfo(scores.dtype).min)
        elif visible is not None:
            scores = scores + visible[:, :, part]
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(latent.dtype)
        outputs.append((weights.flatten(1, 2) @ latent).unflatten(1, (H, -1)))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2), weights


def _visible(mask, T, S, device, seen, causal=True):
    """What T new tokens may see of S keys: None (all), or [B or 1, H or 1, T, S], bool or additive.

    mask: as in `LatentMixer.forward`; without one, or with one for keys only, the new tokens are the last of `seen`
    (a tensor) or else of S.
    """
    if isinstance(mask, BlockMask):
        return create_mask(mask.mask_mod, mask.shape[0], mask.shape[1], T, S, device=device)
    if mask is not None and mask.dim() == 4:
        return mask
    if mask is not None:
        mask = F.pad(mask != 0, (0, S - mask.shape[1]))[:, None, None]
        mask = mask.expand(-1, -1, T, -1)
    if seen is None and (T == 1 or not causal):
        return mask
    keys, end = torch.arange(S, device=device), S if seen is None else seen
    last = torch.arange(1 - T, 1, device=device)[:, None] if causal else torch.zeros(T, 1, dtype=int, device=device)
    order = (keys < end + last)[None, None]
    return order if mask is None else order & mask


def _per_head(x, weight):
    """x: [B, H, T, I], weight: [H, I, O] -> [B, H, T, O], without a copy of the weights per row."""
    B, H, T, _ = x.shape
    return torch.bmm(x.transpose(0, 1).reshape(H, B * T, -1), weight).unflatten(1, (B, T)).transpose(0, 1)


def _is_causal(module, kwargs):
    asked = kwargs.get("is_causal")
    return module.is_causal if asked is None else asked


def _latent_norm(config, size):
    return RMSNorm(size, eps=config.latent_norm_eps) if config.latent_norm else nn.Identity()
