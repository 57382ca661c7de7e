"""Attention over depth: each mixer and MLP reads a learned mixture of what earlier layers made (arXiv 2603.15031).

A source is the embedding, the sum of what the mixers and MLPs of one finished block added, or the sum so far of the
current block. Blocks of one mixer or MLP are the full form, blocks of several layers the form of Kimi K3:

    score_j = query . RMSNorm(source_j)        p = softmax over the sources        input = sum_j p_j source_j

The query does not depend on the input. A fresh one is zero, and all sources then weigh the same.
"""

import torch
from torch import nn
from transformers import initialization as init

from .layers import RMSNorm, at_least_fp32


def build_residual(config):
    """The mixture in front of one mixer, one MLP or the last norm; None where residuals are plain sums."""
    return None if config.attention_residual == "none" else AttentionResidual(config)


def opens_block(config, sublayer: int) -> bool:
    """Whether a new block starts with the output of this mixer or MLP, counted through: 0, 1 are those of layer 0."""
    if config.attention_residual == "none":
        return False
    sublayers = 1 if config.attention_residual == "full" else 2 * config.attention_residual_block_size
    return sublayer % sublayers == 0


class AttentionResidual(nn.Module):
    """sum_j p_j source_j, with weights p from the normed sources and values that are not normed."""

    def __init__(self, config):
        super().__init__()
        self.norm = KeyNorm(config.hidden_size, config.norm_eps)
        self.query = nn.Parameter(torch.empty(config.hidden_size))
        self.scaled = config.residual_scale
        self.reset_parameters()

    def reset_parameters(self):
        init.zeros_(self.query)

    def forward(self, sources):
        """Args: sources: N tensors [B, T, D] of one dtype.

        Returns: [B, T, D], of that dtype. A single source comes back as it is.
        """
        weights = torch.stack([self.norm(source, self.query) for source in sources]).softmax(0)
        if self.scaled:
            # equal weights are 1 now, and the mixture is the sum
            weights = weights * len(sources)
        mixed = sum(weight[..., None] * source for weight, source in zip(weights, sources, strict=True))
        return mixed.to(sources[0].dtype)


class KeyNorm(RMSNorm):
    """query . RMSNorm(x), without keeping the normed x: every source is scored many times."""

    def forward(self, x, query):
        """x: [B, T, D]; query: [D]. Returns [B, T] in fp32 at least."""
        direction = at_least_fp32(self.weight) * at_least_fp32(query)
        length = torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))
        return (x * direction).sum(-1) * torch.rsqrt(length.square() / x.shape[-1] + self.eps)
