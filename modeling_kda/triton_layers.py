"""The layers around the recurrence as Triton kernels, forward and backward: short convolution and gated norm.

    z_t = sum_j weight[W-1-j] x_{t-j},  y = act(z)        causal and depthwise, over 0 <= j < W, j <= age_t
        dx_t = sum_j weight[W-1-j] dz_{t+j},  dweight[W-1-j] = sum_t dz_{t+j} x_t,  dz = dy act'(z), z computed again

    y = o r weight s,  r = 1 / sqrt(mean(o^2) + eps),  s = sigmoid(gate)
        do = r c - o r^3 mean(c o),  c = dy weight s,  dgate = dy o r weight s (1 - s),  dweight = sum dy o r s

Everything is computed in fp32 and rounded once. Sums over tokens are added in a fixed order, so gradients are
deterministic. B batch, T time, C channels, W taps, V value channels.
"""

import re

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError as e:
    raise ImportError(
        "the Triton kernels need the package triton (pip install triton); the PyTorch path works without it"
    ) from e

from .triton_launch import (
    ACTIVATIONS,
    MAX_TAPS,
    choose,
    eager_function,
    on_device,
    strides,
    unfit_tensors,
    unit_stride,
)

MAX_NORM_SIZE = 4096
# measured on an H200: channels and tokens of one program
FORWARD_RUN = {"BC": 128, "RUN": 32, "num_warps": 1}
BACKWARD_RUN = {"BC": 128, "RUN": 64, "num_warps": 1}
# elements of one tile of rows of the norm, and the most programs of its backward, each with a share of dweight
NORM_TILE, NORM_WARPS, NORM_PROGRAMS = 1024, 2, 4096
# one name for each copy of this file in a process (the installed package, code from a Hub repository)
NAMESPACE = re.sub(r"\W", "_", __name__)


def triton_short_convolution(x, weight, window=None, *, age=None, activation=None):
    """Causal depthwise convolution over time, then the activation; differentiable in x, weight and window.

    Args:
        x: [B, T, C], bf16, fp16 or fp32; may be a view whose channels are contiguous.
        weight: [C, 1, W], W from 2 to 4, the last tap for the current token.
        window: [B, W-1, C], the inputs before x, or None for zeros.
        age: [B, T] integers, index of each token in its own document, or None when every tap is allowed.
        activation: None, "silu" or "relu".

    Returns: y [B, T, C] in x's dtype, and the window for the next call [B, W-1, C] (it may share memory with x).

    Raises: ValueError for what `unsupported_convolution` names.
    """
    reason = unsupported_convolution(x, weight, window, age=age, activation=activation)
    if reason:
        raise ValueError(reason)
    y = run_short_convolution(x, weight, window, age=age, activation=activation)
    before = weight.shape[-1] - 1
    if x.shape[1] >= before:
        return y, x[:, x.shape[1] - before :]
    window = x.new_zeros(x.shape[0], before, x.shape[2]) if window is None else window.to(x.dtype)
    return y, torch.cat([window, x], 1)[:, x.shape[1] :]


def run_short_convolution(x, weight, window=None, *, age=None, activation=None):
    """y alone, without checks: for callers that have asked `unsupported_convolution`."""
    run = choose(short_convolution_op, eager_convolution, _convolve, x, weight, window)
    return run(x, weight, window, age, ACTIVATIONS[activation])


def unsupported_convolution(x, weight, window=None, *, age=None, activation=None):
    """None, or one line that says which argument of `triton_short_convolution` does not fit."""
    given = {"x": x, "weight": weight, "window": window}
    reason = unfit_tensors({name: tensor for name, tensor in given.items() if tensor is not None}, backward=True)
    if reason:
        return reason
    if x.dim() != 3 or weight.dim() != 3 or weight.shape[:2] != (x.shape[2], 1):
        return f"x must be [B, T, C] and weight [C, 1, W], got {list(x.shape)} and {list(weight.shape)}"
    (B, T, C), taps = x.shape, weight.shape[-1]
    if not 2 <= taps <= MAX_TAPS:
        return f"the convolution kernel takes 2 to {MAX_TAPS} taps, got {taps}"
    if activation not in ACTIVATIONS:
        return f"the activation must be one of {list(ACTIVATIONS)}, got {activation!r}"
    if window is not None and window.shape != (B, taps - 1, C):
        return f"window must be [B, W-1, C] = {[B, taps - 1, C]}, got {list(window.shape)}"
    if age is not None and (age.shape != (B, T) or age.is_floating_point() or age.device != x.device):
        return f"age must be integers [B, T] = {[B, T]} on {x.device}, got {list(age.shape)} {age.dtype} {age.device}"
    if B > 65535:
        return f"the convolution kernel takes at most 65535 rows, got {B}"
    return None


def _convolve(x: Tensor, weight: Tensor, window: Tensor | None, age: Tensor | None, activation: int) -> Tensor:
    x, weight, window, age = unit_stride(x), weight.contiguous(), unit_stride(window), unit_stride(age)
    B, T, C = x.shape
    y = x.new_empty(B, T, C)
    if y.numel() == 0:
        return y
    with on_device(x):
        blocks = triton.cdiv(T, FORWARD_RUN["RUN"]), triton.cdiv(C, FORWARD_RUN["BC"])
        short_convolution_kernel[(*blocks, B)](
            x, weight, window, age, y, T, C, *strides(x, 2), *strides(window, 2), *strides(age, 1),
            TAPS=weight.shape[-1], ACTIVATION=activation, HAS_WINDOW=window is not None, HAS_AGE=age is not None,
            **FORWARD_RUN,
        )  # fmt: skip
    return y


def _convolve_backward(
    dy: Tensor, x: Tensor, weight: Tensor, window: Tensor | None, age: Tensor | None, activation: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and window (empty where there is none)."""
    x, weight, window, age = unit_stride(x), weight.contiguous(), unit_stride(window), unit_stride(age)
    (B, T, C), taps, dy = x.shape, weight.shape[-1], unit_stride(dy)
    dx = x.new_empty(B, T, C)
    dwindow = x.new_empty(0) if window is None else window.new_zeros(B, taps - 1, C)
    blocks = triton.cdiv(T, BACKWARD_RUN["RUN"])
    shares = x.new_empty(B, blocks, taps, C, dtype=torch.float32)
    if shares.numel():
        with on_device(x):
            short_convolution_backward_kernel[(blocks, triton.cdiv(C, BACKWARD_RUN["BC"]), B)](
                x, weight, window, age, dy, dx, None if window is None else dwindow, shares, T, C,
                *strides(x, 2), *strides(window, 2), *strides(age, 1), *strides(dy, 2),
                TAPS=taps, ACTIVATION=activation, HAS_WINDOW=window is not None, HAS_AGE=age is not None,
                **BACKWARD_RUN,
            )  # fmt: skip
    dweight = shares.sum((0, 1)).t()[:, None].to(weight.dtype)
    return dx, dweight.contiguous(), dwindow


short_convolution_op = torch.library.custom_op(f"{NAMESPACE}::short_convolution", _convolve, mutates_args=())
short_convolution_backward_op = torch.library.custom_op(
    f"{NAMESPACE}::short_convolution_backward", _convolve_backward, mutates_args=()
)


@short_convolution_op.register_fake
def _(x, weight, window, age, activation):
    return x.new_empty(x.shape)


@short_convolution_backward_op.register_fake
def _(dy, x, weight, window, age, activation):
    dwindow = x.new_empty(0) if window is None else window.new_empty(window.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dwindow


def _save_convolution(ctx, inputs, output):
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _differentiate_convolution(ctx, dy, run=short_convolution_backward_op):
    *gradients, dwindow = run(dy, *ctx.saved_tensors, ctx.activation)
    return *gradients, dwindow if ctx.needs_input_grad[2] else None, None, None


short_convolution_op.register_autograd(_differentiate_convolution, setup_context=_save_convolution)


eager_convolution = eager_function(_convolve, _convolve_backward, _save_convolution, _differentiate_convolution)


@triton.jit(do_not_specialize=["T"])
def short_convolution_kernel(
    x, weight, window, age, y,                                               # tensors
    T, C, s_xb, s_xt, s_wb, s_wt, s_ab,                                      # sizes and strides
    TAPS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_AGE: tl.constexpr,
    BC: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """One program: RUN tokens of BC channels, one after the other, so that every input is read once."""
    i_t, i_c, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_c = i_c * BC + tl.arange(0, BC)
    m_c = o_c < C
    p_x, p_w, p_a = x + i_b * s_xb + o_c, window, age
    p_y = y + i_b * T * C + o_c
    if HAS_WINDOW:
        p_w = window + i_b * s_wb + o_c
    if HAS_AGE:
        p_a = age + i_b * s_ab
    w0, w1, w2, w3 = taps_of(weight, o_c, m_c, TAPS)
    t_0 = i_t * RUN
    x1, x2, x3 = inputs_before(p_x, p_w, t_0, m_c, s_xt, s_wt, TAPS, HAS_WINDOW)
    for t in range(t_0, tl.minimum(t_0 + RUN, T), 4):
        # four reads in flight
        a0 = row(p_x, t, s_xt, m_c, T)
        a1 = row(p_x, t + 1, s_xt, m_c, T)
        a2 = row(p_x, t + 2, s_xt, m_c, T)
        a3 = row(p_x, t + 3, s_xt, m_c, T)
        for i in tl.static_range(4):
            b_x = (a0 if i == 0 else a1 if i == 1 else a2 if i == 2 else a3).to(tl.float32)
            b_age = age_of(p_a, t + i, T, TAPS, HAS_AGE)
            b_z = preactivation(b_x, x1, x2, x3, w0, w1, w2, w3, b_age, TAPS)
            if ACTIVATION == 1:
                b_z = b_z * tl.sigmoid(b_z)
            elif ACTIVATION == 2:
                b_z = tl.maximum(b_z, 0.0)
            p_row = p_y + tl.cast(t + i, tl.int64) * C
            tl.store(p_row, b_z.to(y.dtype.element_ty), mask=between(m_c, t + i, 0, T))
            x1, x2, x3 = b_x, x1, x2


@triton.jit(do_not_specialize=["T"])
def short_convolution_backward_kernel(
    x, weight, window, age, dy, dx, dwindow, shares,                         # tensors
    T, C, s_xb, s_xt, s_wb, s_wt, s_ab, s_yb, s_yt,                          # sizes and strides
    TAPS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_AGE: tl.constexpr,
    BC: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """One program: the gradients of RUN inputs of BC channels (the first also of the window), a share of dweight.

    An input is done when the last output that it reaches has been seen: d1, d2, d3 are the unfinished sums of the
    inputs one, two and three tokens back.
    """
    i_t, i_c, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_c = i_c * BC + tl.arange(0, BC)
    m_c = o_c < C
    p_x, p_w, p_a = x + i_b * s_xb + o_c, window, age
    p_dy, p_dx, p_dw = dy + i_b * s_yb + o_c, dx + i_b * T * C + o_c, dwindow
    if HAS_WINDOW:
        p_w = window + i_b * s_wb + o_c
        p_dw = dwindow + i_b * (TAPS - 1) * C + o_c
    if HAS_AGE:
        p_a = age + i_b * s_ab
    w0, w1, w2, w3 = taps_of(weight, o_c, m_c, TAPS)
    t_0 = i_t * RUN
    x1, x2, x3 = inputs_before(p_x, p_w, t_0, m_c, s_xt, s_wt, TAPS, HAS_WINDOW)
    d1 = tl.zeros([BC], tl.float32)
    d2 = tl.zeros([BC], tl.float32)
    d3 = tl.zeros([BC], tl.float32)
    g0 = tl.zeros([BC], tl.float32)
    g1 = tl.zeros([BC], tl.float32)
    g2 = tl.zeros([BC], tl.float32)
    g3 = tl.zeros([BC], tl.float32)
    t_end = tl.minimum(t_0 + RUN, T)
    for t in range(t_0, t_end + TAPS - 1, 4):
        a0 = row(p_x, t, s_xt, m_c, T)
        a1 = row(p_x, t + 1, s_xt, m_c, T)
        a2 = row(p_x, t + 2, s_xt, m_c, T)
        a3 = row(p_x, t + 3, s_xt, m_c, T)
        e0 = row(p_dy, t, s_yt, m_c, T)
        e1 = row(p_dy, t + 1, s_yt, m_c, T)
        e2 = row(p_dy, t + 2, s_yt, m_c, T)
        e3 = row(p_dy, t + 3, s_yt, m_c, T)
        for i in tl.static_range(4):
            b_x = (a0 if i == 0 else a1 if i == 1 else a2 if i == 2 else a3).to(tl.float32)
            b_dz = (e0 if i == 0 else e1 if i == 1 else e2 if i == 2 else e3).to(tl.float32)
            b_age = age_of(p_a, t + i, T, TAPS, HAS_AGE)
            if ACTIVATION > 0:
                b_z = preactivation(b_x, x1, x2, x3, w0, w1, w2, w3, b_age, TAPS)
                if ACTIVATION == 1:
                    b_s = tl.sigmoid(b_z)
                    b_dz *= b_s * (1.0 + b_z * (1.0 - b_s))
                else:
                    b_dz = tl.where(b_z > 0.0, b_dz, 0.0)
            dz1 = tl.where(b_age >= 1, b_dz, 0.0)
            dz2 = tl.where(b_age >= 2, b_dz, 0.0)
            dz3 = tl.where(b_age >= 3, b_dz, 0.0)
            # outputs of the next run belong to its share
            own = t + i < t_end
            g0 += tl.where(own, b_dz * b_x, 0.0)
            g1 += tl.where(own, dz1 * x1, 0.0)
            if TAPS > 2:
                g2 += tl.where(own, dz2 * x2, 0.0)
            if TAPS > 3:
                g3 += tl.where(own, dz3 * x3, 0.0)
            if TAPS == 2:
                b_dx, d1 = d1 + w1 * dz1, w0 * b_dz
            elif TAPS == 3:
                b_dx, d2, d1 = d2 + w2 * dz2, d1 + w1 * dz1, w0 * b_dz
            else:
                b_dx, d3, d2, d1 = d3 + w3 * dz3, d2 + w2 * dz2, d1 + w1 * dz1, w0 * b_dz
            x1, x2, x3 = b_x, x1, x2
            # inputs before this run are those of the run before, or of the window
            t_x = t + i - (TAPS - 1)
            p_row = p_dx + tl.cast(t_x, tl.int64) * C
            tl.store(p_row, b_dx.to(dx.dtype.element_ty), mask=between(m_c, t_x, t_0, t_end))
            if HAS_WINDOW:
                m_w = between(m_c, t_x, 1 - TAPS, 0)
                tl.store(p_dw + (t_x + TAPS - 1) * C, b_dx.to(dwindow.dtype.element_ty), mask=m_w)
    p_share = shares + (i_b * tl.num_programs(0) + i_t) * TAPS * C + o_c
    tl.store(p_share + (TAPS - 1) * C, g0, mask=m_c)
    tl.store(p_share + (TAPS - 2) * C, g1, mask=m_c)
    if TAPS > 2:
        tl.store(p_share + (TAPS - 3) * C, g2, mask=m_c)
    if TAPS > 3:
        tl.store(p_share + (TAPS - 4) * C, g3, mask=m_c)


@triton.jit
def row(p, t, s_t, mask, T):
    """One token of BC channels, zeros after the last."""
    return tl.load(p + tl.cast(t, tl.int64) * s_t, mask=between(mask, t, 0, T), other=0.0)


@triton.jit
def between(mask, t, low, high):
    """`mask` if low <= t < high for the scalar t, else nothing."""
    b_t = tl.zeros(mask.shape, tl.int32) + t
    return mask & (b_t >= low) & (b_t < high)


@triton.jit
def taps_of(weight, o_c, m_c, TAPS: tl.constexpr):
    """The weights of the current token and of the ones before; taps that do not exist are not used."""
    p = weight + o_c * TAPS
    w0 = tl.load(p + (TAPS - 1), mask=m_c, other=0.0).to(tl.float32)
    w1 = tl.load(p + (TAPS - 2), mask=m_c, other=0.0).to(tl.float32)
    w2, w3 = w1, w1
    if TAPS > 2:
        w2 = tl.load(p + (TAPS - 3), mask=m_c, other=0.0).to(tl.float32)
    if TAPS > 3:
        w3 = tl.load(p + (TAPS - 4), mask=m_c, other=0.0).to(tl.float32)
    return w0, w1, w2, w3


@triton.jit
def inputs_before(p_x, p_w, t, m_c, s_xt, s_wt, TAPS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """The inputs at t-1, t-2 and t-3: from x, from the window, or zeros."""
    x1 = input_at(p_x, p_w, t - 1, m_c, s_xt, s_wt, TAPS, HAS_WINDOW)
    x2, x3 = x1, x1
    if TAPS > 2:
        x2 = input_at(p_x, p_w, t - 2, m_c, s_xt, s_wt, TAPS, HAS_WINDOW)
    if TAPS > 3:
        x3 = input_at(p_x, p_w, t - 3, m_c, s_xt, s_wt, TAPS, HAS_WINDOW)
    return x1, x2, x3


@triton.jit
def input_at(p_x, p_w, t, mask, s_xt, s_wt, TAPS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """One token, which may lie in the window (negative)."""
    b_x = tl.load(p_x + tl.cast(t, tl.int64) * s_xt, mask=between(mask, t, 0, t + 1), other=0.0).to(tl.float32)
    if HAS_WINDOW:
        p_w += (t + TAPS - 1) * s_wt
        b_x += tl.load(p_w, mask=between(mask, t, 1 - TAPS, 0), other=0.0).to(tl.float32)
    return b_x


@triton.jit
def age_of(p_a, t, T, TAPS: tl.constexpr, HAS_AGE: tl.constexpr):
    """Index of a token in its document; far enough from its start when there are no documents."""
    b_age = TAPS
    if HAS_AGE:
        b_age = tl.load(p_a + t, mask=t < T, other=0)
    return b_age


@triton.jit
def preactivation(x0, x1, x2, x3, w0, w1, w2, w3, b_age, TAPS: tl.constexpr):
    b_z = x0 * w0 + tl.where(b_age >= 1, x1, 0.0) * w1
    if TAPS > 2:
        b_z += tl.where(b_age >= 2, x2, 0.0) * w2
    if TAPS > 3:
        b_z += tl.where(b_age >= 3, x3, 0.0) * w3
    return b_z


def triton_gated_norm(o, weight, gate=None, *, eps):
    """RMSNorm(o) * weight * sigmoid(gate) over the last dimension; differentiable in all three.

    Args:
        o: [..., V], bf16, fp16 or fp32, V at most 4096. weight: [V].
        gate: logits with as many elements as o, in the same order (for example [B, T, HV V]), or None for no gate.

    Returns: y, shaped as o, in o's dtype.

    Raises: ValueError for what `unsupported_norm` names.
    """
    reason = unsupported_norm(o, weight, gate)
    if reason:
        raise ValueError(reason)
    return run_gated_norm(o, weight, gate, eps=eps)


def run_gated_norm(o, weight, gate=None, *, eps):
    """`triton_gated_norm` without checks: for callers that have asked `unsupported_norm`."""
    run = choose(gated_norm_op, eager_norm, _gated_norm, o, weight, gate)
    return run(o, weight, gate, float(eps))


def unsupported_norm(o, weight, gate=None):
    """None, or one line that says which argument of `triton_gated_norm` does not fit."""
    given = {"o": o, "weight": weight, "gate": gate}
    reason = unfit_tensors({name: tensor for name, tensor in given.items() if tensor is not None}, backward=True)
    if reason:
        return reason
    if weight.shape != o.shape[-1:]:
        return f"weight must be [V] = {list(o.shape[-1:])}, got {list(weight.shape)}"
    if o.shape[-1] > MAX_NORM_SIZE:
        return f"the norm kernel takes at most {MAX_NORM_SIZE} channels, got {o.shape[-1]}"
    if gate is not None and gate.numel() != o.numel():
        return f"gate must have one logit for each of the {o.numel()} elements of o, got {gate.numel()}"
    return None


def _gated_norm(o: Tensor, weight: Tensor, gate: Tensor | None, eps: float) -> Tensor:
    o, weight, gate = o.contiguous(), weight.contiguous(), None if gate is None else gate.contiguous()
    y = o.new_empty(o.shape)
    N, V, BN, BV = _norm_tile(o)
    if N:
        with on_device(o):
            gated_norm_kernel[(triton.cdiv(N, BN),)](
                o, weight, gate, y, eps, N, V=V, BN=BN, BV=BV, HAS_GATE=gate is not None, num_warps=NORM_WARPS
            )
    return y


def _gated_norm_backward(
    dy: Tensor, o: Tensor, weight: Tensor, gate: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of o, weight and gate (empty where there is none); the norm is computed again."""
    o, weight, dy = o.contiguous(), weight.contiguous(), dy.contiguous()
    gate = None if gate is None else gate.contiguous()
    do = o.new_empty(o.shape)
    dgate = o.new_empty(0) if gate is None else gate.new_empty(gate.shape)
    N, V, BN, BV = _norm_tile(o)
    tiles = triton.cdiv(triton.cdiv(N, BN), NORM_PROGRAMS)
    programs = triton.cdiv(N, BN * tiles) if N else 0
    shares = o.new_empty(programs, V, dtype=torch.float32)
    if N:
        with on_device(o):
            gated_norm_backward_kernel[(programs,)](
                o, weight, gate, dy, do, None if gate is None else dgate, shares, eps, N, tiles,
                V=V, BN=BN, BV=BV, HAS_GATE=gate is not None, num_warps=NORM_WARPS,
            )  # fmt: skip
    return do, shares.sum(0).to(weight.dtype), dgate


gated_norm_op = torch.library.custom_op(f"{NAMESPACE}::gated_norm", _gated_norm, mutates_args=())
gated_norm_backward_op = torch.library.custom_op(
    f"{NAMESPACE}::gated_norm_backward", _gated_norm_backward, mutates_args=()
)


@gated_norm_op.register_fake
def _(o, weight, gate, eps):
    return o.new_empty(o.shape)


@gated_norm_backward_op.register_fake
def _(dy, o, weight, gate, eps):
    dgate = o.new_empty(0) if gate is None else gate.new_empty(gate.shape)
    return o.new_empty(o.shape), weight.new_empty(weight.shape), dgate


def _save_norm(ctx, inputs, output):
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _differentiate_norm(ctx, dy, run=gated_norm_backward_op):
    *gradients, dgate = run(dy, *ctx.saved_tensors, ctx.eps)
    return *gradients, dgate if ctx.needs_input_grad[2] else None, None


gated_norm_op.register_autograd(_differentiate_norm, setup_context=_save_norm)


eager_norm = eager_function(_gated_norm, _gated_norm_backward, _save_norm, _differentiate_norm)


@triton.jit(do_not_specialize=["N"])
def gated_norm_kernel(
    o, weight, gate, y, eps, N, V: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr, HAS_GATE: tl.constexpr
):
    """One program: BN rows."""
    # torch.compile hands numbers over in fp64
    eps = tl.cast(eps, tl.float32)
    o_n, o_v = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN), tl.arange(0, BV)
    m_v = o_v < V
    mask = (o_n < N)[:, None] & m_v[None, :]
    o_y = o_n[:, None] * V + o_v[None, :]
    b_o = tl.load(o + o_y, mask=mask, other=0.0).to(tl.float32)
    b_y = b_o * tl.load(weight + o_v, mask=m_v, other=0.0).to(tl.float32)[None, :]
    # before the sum, so that the read does not wait for it
    if HAS_GATE:
        b_y *= tl.sigmoid(tl.load(gate + o_y, mask=mask, other=0.0).to(tl.float32))
    b_y *= tl.rsqrt(tl.sum(b_o * b_o, 1) / V + eps)[:, None]
    tl.store(y + o_y, b_y.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["N", "tiles"])
def gated_norm_backward_kernel(
    o, weight, gate, dy, do, dgate, shares, eps, N, tiles,
    V: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """One program: `tiles` times BN rows, and their share of dweight."""
    eps = tl.cast(eps, tl.float32)
    i_p = tl.program_id(0).to(tl.int64)
    o_v = tl.arange(0, BV)
    m_v = o_v < V
    b_weight = tl.load(weight + o_v, mask=m_v, other=0.0).to(tl.float32)[None, :]
    b_dw = tl.zeros([BN, BV], tl.float32)
    for i_tile in range(tiles):
        o_n = (i_p * tiles + i_tile) * BN + tl.arange(0, BN)
        mask = (o_n < N)[:, None] & m_v[None, :]
        o_y = o_n[:, None] * V + o_v[None, :]
        b_o = tl.load(o + o_y, mask=mask, other=0.0).to(tl.float32)
        b_c = tl.load(dy + o_y, mask=mask, other=0.0).to(tl.float32)
        if HAS_GATE:
            b_s = tl.sigmoid(tl.load(gate + o_y, mask=mask, other=0.0).to(tl.float32))
        b_r = tl.rsqrt(tl.sum(b_o * b_o, 1) / V + eps)[:, None]
        b_x = b_o * b_r
        if HAS_GATE:
            b_dgate = b_c * b_x * b_weight * b_s * (1.0 - b_s)
            tl.store(dgate + o_y, b_dgate.to(dgate.dtype.element_ty), mask=mask)
            b_c *= b_s
        b_dw += b_c * b_x
        b_c *= b_weight
        b_do = b_r * (b_c - b_x * (tl.sum(b_c * b_x, 1) / V)[:, None])
        tl.store(do + o_y, b_do.to(do.dtype.element_ty), mask=mask)
    tl.store(shares + i_p * V + o_v, tl.sum(b_dw, 0), mask=m_v)


def _norm_tile(o):
    """N rows of V channels, and the tile (BN, BV)."""
    V = o.shape[-1]
    BV = triton.next_power_of_2(V)
    return o.numel() // max(V, 1), V, max(1, NORM_TILE // BV), BV
