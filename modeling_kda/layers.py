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
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32 at least; see `gated_norm`."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.reset_parameters()

    def reset_parameters(self):
        init.ones_(self.weight)

    def forward(self, x, gate=None, *, run=None):
        """x: [..., V]; gate: logits, as many as x has elements, or None; run: a faster `gated_norm`.

        The function comes to the weight because sharding and offloading bring weights in for `forward` only.
        """
        run = gated_norm if run is None else run
        return run(x, self.weight, gate, eps=self.eps)


def gated_norm(o, weight=None, gate=None, *, eps=0.0):
    """RMSNorm(o) * weight * sigmoid(gate) over the last dimension, computed in fp32 at least.

    Args: o: [..., V]. weight: [V], or None for no norm. gate: logits, as many as o has elements and in the same order
        (for example [B, T, HV V]), or None for no gate.

    Returns: shaped as o, in o's dtype.
    """
    y = at_least_fp32(o)
    if weight is not None:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight
    if gate is not None:
        y = y * at_least_fp32(gate).sigmoid().view(y.shape)
    return y.to(o.dtype)


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
        """x: [..., size] -> [..., size]."""
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
        """gate, up: [..., I] -> [..., I]."""
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
        self.activation = activation
        self.reset_parameters()

    def reset_parameters(self):
        bound = self.weight.shape[-1] ** -0.5
        init.uniform_(self.weight, -bound, bound)

    def forward(self, x, window=None, age=None, *, run=None):
        """Arguments and result of `short_convolution`; run: a faster one (why it comes here: see `RMSNorm`)."""
        run = short_convolution if run is None else run
        return run(x, self.weight, window, age=age, activation=self.activation)


def short_convolution(x, weight, window=None, *, age=None, activation=None):
    """y_t = act(sum_j weight[:, 0, W-1-j] x_{t-j}) over 0 <= j < W, computed in fp32 at least.

    Args:
        x: [B, T, C]. weight: [C, 1, W], the last tap for the current token.
        window: [B, W-1, C], the inputs before x, or None for zeros.
        age: [B, T] index of each token in its own sequence, or None when every tap is allowed.
        activation: a name transformers knows, or None.

    Returns: [B, T, C] in x's dtype.
    """
    (_, T, _), taps, dtype = x.shape, weight.shape[-1], x.dtype
    weight = at_least_fp32(weight[:, 0])
    x = F.pad(x, (0, 0, taps - 1, 0)) if window is None else torch.cat([window, x], 1)
    y = x[:, taps - 1 :] * weight[:, -1]
    for back in range(1, taps):
        past = x[:, taps - 1 - back :][:, :T]
        if age is not None:
            past = past.masked_fill((age < back)[..., None], 0.0)
        y = y + past * weight[:, taps - 1 - back]
    return (ACT2FN[activation](y) if activation else y).to(dtype)


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

    def forward(self, x, *, run=None):
        """x: the logits, [B, T, H, 1 or K] -> what `decay_gate(x, A_log, dt_bias, lower_bound)` returns, or `run` in
        its place, which may do more with them (why it comes here: see `RMSNorm`)."""
        run = decay_gate if run is None else run
        return run(x, self.A_log, self.dt_bias, self.lower_bound)


def decay_gate(x, A_log, dt_bias, lower_bound=None):
    """The log-decays of logits, -exp(A_log) softplus(x + dt_bias) or lower_bound * sigmoid(exp(A_log) (x + dt_bias)).

    Args: x: [B, T, H, 1 or K]. A_log: [H]. dt_bias: [H] or [H K]. lower_bound: None for the softplus form.

    Returns: log_decay <= 0, and the step size softplus(x + dt_bias), which Mamba-2 also writes with (None in the
        bounded form). Both have the shape of x and are fp32 at least.
    """
    rate, x = A_log.exp()[:, None], at_least_fp32(x) + dt_bias.view(x.shape[-2:])
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(rate * x), None
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
