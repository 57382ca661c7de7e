"""The small layers around the mixers: norms, the MLP, the short convolution, the feature map and the decay gate."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN


def build_norm(config):
    """The norm of the residual stream that `config.norm` names."""
    return {"layernorm": nn.LayerNorm, "rmsnorm": RMSNorm}[config.norm](config.hidden_size, eps=config.norm_eps)


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32 at least."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.reset_parameters()

    def reset_parameters(self):
        init.ones_(self.weight)

    def forward(self, x):
        y = at_least_fp32(x)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * self.weight).to(x.dtype)


class MLP(nn.Module):
    """down(act(up(x))), or down(act(gate(x)) * up(x)) when gated (SwiGLU; with `"situ"` see `SiTU`).

    Args: size: input and output channels, `config.hidden_size` if not given; inner: width,
        `config.intermediate_size` if not given.
    """

    def __init__(self, config, size: int | None = None, inner: int | None = None):
        super().__init__()
        size, inner, bias = size or config.hidden_size, inner or config.intermediate_size, config.mlp_bias
        if config.mlp_gated:
            self.gate_proj = nn.Linear(size, inner, bias=bias)
        self.up_proj = nn.Linear(size, inner, bias=bias)
        self.down_proj = nn.Linear(inner, size, bias=bias)
        self.act = build_activation(config)
        self.gated = config.mlp_gated

    def forward(self, x):
        return self.down_proj(
            self.act(self.gate_proj(x), self.up_proj(x)) if self.gated else self.act(self.up_proj(x))
        )


def build_activation(config):
    """What stands between the matrices of an MLP or an expert: act(gate, up) if `config.mlp_gated`, else act(up)."""
    if config.hidden_act == "situ":
        return SiTU(config.situ_beta, config.situ_linear_beta)
    act = ACT2FN[config.hidden_act]
    return GatedActivation(act) if config.mlp_gated else act


class GatedActivation(nn.Module):
    """act(gate) * up, elementwise."""

    def __init__(self, act):
        super().__init__()
        self.act = act

    def forward(self, gate, up):
        return self.act(gate) * up


class SiTU(nn.Module):
    """[beta tanh(gate / beta) sigmoid(gate)] * [linear_beta tanh(up / linear_beta)], in fp32 at least: SwiGLU whose
    branches are both bounded (Kimi K3). `linear_beta=None` leaves the second branch linear.
    """

    def __init__(self, beta: float, linear_beta: float | None):
        super().__init__()
        self.beta, self.linear_beta = beta, linear_beta

    def forward(self, gate, up):
        """gate, up: [..., I] -> [..., I], in the dtype of `up`."""
        a, b = at_least_fp32(gate), at_least_fp32(up)
        if self.linear_beta is not None:
            b = self.linear_beta * torch.tanh(b / self.linear_beta)
        return (self.beta * torch.tanh(a / self.beta) * torch.sigmoid(a) * b).to(up.dtype)


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over time: y_t = sum_j weight[:, 0, W-1-j] x_{t-j}, then an optional activation.

    The last tap belongs to the current token. Its weight has the shape [C, 1, W] of the released checkpoints.
    """

    def __init__(self, channels: int, kernel_size: int, activation: str | None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size))
        self.act = ACT2FN[activation] if activation else nn.Identity()
        self.reset_parameters()

    def reset_parameters(self):
        bound = self.weight.shape[-1] ** -0.5
        init.uniform_(self.weight, -bound, bound)

    def forward(self, x, age):
        """Args:
            x: [B, W-1 + T, C], the last W-1 inputs before this call followed by this call's T inputs.
            age: [B, T] index of each token in its own sequence, or None when every tap is allowed.

        Returns: [B, T, C].
        """
        taps = self.weight.shape[-1]
        length = x.shape[1] - (taps - 1)
        weight = at_least_fp32(self.weight[:, 0])
        y = x[:, taps - 1 :] * weight[:, -1]
        for back in range(1, taps):
            past = x[:, taps - 1 - back :][:, :length]
            if age is not None:
                past = past.masked_fill((age < back)[..., None], 0.0)
            y = y + past * weight[:, taps - 1 - back]
        return self.act(y).to(x.dtype)


class HedgehogFeatureMap(nn.Module):
    """phi(x) = softmax([W x, -W x]) per head: 2K positive features (Hedgehog, arXiv 2402.04347)."""

    def __init__(self, num_heads: int, head_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, head_dim, head_dim))
        self.reset_parameters()

    def reset_parameters(self):
        """W = I: the features then compare q and k channel by channel."""
        init.copy_(self.weight, torch.eye(self.weight.shape[-1], device=self.weight.device).expand_as(self.weight))

    def forward(self, x):
        """x: [B, T, H, K] -> [B, T, H, 2K], in fp32 at least."""
        y = torch.einsum("bthk,hjk->bthj", x, self.weight)
        return at_least_fp32(torch.cat([y, -y], dim=-1)).softmax(-1)


class EluFeatureMap(nn.Module):
    """phi(x) = elu(x) + 1 (Katharopoulos et al., arXiv 2006.16236)."""

    def forward(self, x):
        """x: [B, T, H, K] -> [B, T, H, K], in fp32 at least."""
        return F.elu(at_least_fp32(x)) + 1


class Decay(nn.Module):
    """The forget gate of one layer. It holds A_log and dt_bias and nothing else, so that both can stay fp32 whatever
    dtype the rest is loaded in, and so that FSDP2 can give them a group of their own.
    """

    def __init__(self, num_heads: int, channels: int, lower_bound: float | None):
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(num_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(num_heads * channels, dtype=torch.float32))
        self.lower_bound = lower_bound
        self.reset_parameters()

    def reset_parameters(self):
        """Steps from 0.001 to 0.1. Softplus form: rates from 1 to 16, as Mamba-2 and Kimi Linear start. Bounded form:
        slopes of 1, as Kimi K3 starts; slopes like those rates would leave most channels without any decay."""
        if self.lower_bound is None:
            init.copy_(self.A_log, torch.empty_like(self.A_log).uniform_(1.0, 16.0).log())
        else:
            init.zeros_(self.A_log)
        step = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        init.copy_(self.dt_bias, inverse_softplus(step))

    def forward(self, x):
        """x: [B, T, H, 1 or K] -> log_decay <= 0 and the step size softplus(x + dt_bias), which Mamba-2 also writes
        with (None in the bounded form). Both have the shape of x and are fp32 at least.

        One call gives both: sharding and offloading bring parameters in for `forward` and for nothing else.
        """
        rate, x = self.A_log.exp()[:, None], at_least_fp32(x) + self.dt_bias.view(x.shape[-2:])
        if self.lower_bound is not None:
            return self.lower_bound * torch.sigmoid(rate * x), None
        step = F.softplus(x)
        return -rate * step, step


def inverse_softplus(y):
    """x with softplus(x) = y, for y > 0, without overflow or cancellation."""
    return y + torch.log(-torch.expm1(-y))


def l2norm(x, eps: float = 1e-6):
    """x / sqrt(sum(x^2) + eps) over the last dimension, in fp32 at least."""
    x = at_least_fp32(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def at_least_fp32(x):
    """x in fp32, or in fp64 if it is fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
