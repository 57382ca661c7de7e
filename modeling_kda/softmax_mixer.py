"""Attention that keeps every key and value: GPT-2's own, through transformers' attention interface."""

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class SoftmaxMixer(nn.Module):
    """y = o_proj(softmax(q k^T K^-0.5 + causal mask) v), heads of K channels, without position encoding of its own."""

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.scaling = config.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        inner = config.num_attention_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, inner, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, inner, bias=config.attention_bias)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=config.attention_bias)

    def forward(self, hidden_states, mask=None, cache=None, **kwargs):
        """Args:
            hidden_states: [B, T, D].
            mask: what the attention implementation in use wants: None, [B, 1, T, S] or a block mask.
            cache: a transformers `Cache` or None.

        Returns: [B, T, D], and the attention weights [B, H, T, S] where the implementation gives them.
        """
        B, T, _ = hidden_states.shape
        shape = (B, T, -1, self.head_dim)
        q = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        k = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        o, weights = attend(
            self,
            q,
            k,
            v,
            mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(o.reshape(B, T, -1)), weights


def eager_attention(module, q, k, v, mask, scaling, dropout=0.0, **kwargs):
    """The definition, and the only implementation that returns its weights.

    q, k, v: [B, H, T or S, K]; mask: additive, or bool and True where a key may be seen, or None.
    """
    scores = q @ k.transpose(2, 3) * scaling
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ v).transpose(1, 2).contiguous(), weights
