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
from .ops import asks_for_kernels, fall_back

try:
    from .triton_residual import MAX_SOURCES, triton_mixture, unsupported
except ImportError:
    triton_mixture = None


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
        direction = self.norm(self.query)
        mix = find_kernel(sources, direction) or mix_sources
        # equal weights, times the number of sources, are 1: the mixture is then the sum
        return mix(sources, direction, eps=self.norm.eps, factor=float(len(sources)) if self.scaled else 1.0)


class KeyNorm(RMSNorm):
    """The norm of the sources, of which only the weight is needed, and where the query is:

    query . RMSNorm(x) = (query * weight) . x / sqrt(mean(x^2) + eps)
    """

    def forward(self, query):
        """query: [D] -> [D], in fp32 at least."""
        return at_least_fp32(self.weight) * at_least_fp32(query)


def mix_sources(sources, direction, *, eps, factor=1.0):
    """factor * sum_j softmax_j(direction . source_j / sqrt(mean(source_j^2) + eps)) source_j, in fp32 at least.

    Args: sources: N tensors [..., D] of one dtype. direction: [D], in fp32 at least.

    Returns: [..., D], of that dtype.
    """
    scores = []
    for x in sources:
        # neither this nor the product below makes a copy in fp32 that the backward pass would keep
        length = torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))
        scores.append((x * direction).sum(-1) * torch.rsqrt(length.square() / x.shape[-1] + eps))
    weights = torch.stack(scores).softmax(0) * factor
    mixed = sum(weight[..., None] * x for weight, x in zip(weights, sources, strict=True))
    return mixed.to(sources[0].dtype)


def find_kernel(sources, direction):
    """The Triton function for this mixture, or None where PyTorch has to do it; why is said once."""
    if not asks_for_kernels(direction):
        return None
    reason = "triton is not installed (pip install triton)"
    if triton_mixture is not None:
        reason = unsupported(sources, direction)
        if len(sources) > MAX_SOURCES and reason is not None:
            # the full form of a deep model: expected, and no choice of a backend changes it
            return None
    return triton_mixture if reason is None else fall_back("mixture of attention residuals", reason)
