"""The mixture of attention residuals as Triton kernels, forward and backward: every source is read from memory once.

    s_j = (x_j . u) r_j,   r_j = 1 / sqrt(mean(x_j^2) + eps),   p = softmax over the N sources,   y = c sum_j p_j x_j
        ds_j = c p_j (dy . x_j - sum_i p_i dy . x_i)
        dx_j = c p_j dy + ds_j r_j u - ds_j s_j r_j^2 x_j / D,   du = sum over tokens and j of ds_j r_j x_j

The forward pass reads a token twice, the second time from the cache. The backward pass first finds three factors of
every source and token, p, r ds and r^2 s ds / D, and then goes over the channels. Everything is computed in fp32 and
rounded once. Sums over tokens are added in a fixed order, so gradients are deterministic.

R tokens (batch times time), N sources, D channels.
"""

import re

import torch
from torch import Tensor

from .triton_launch import choose, on_device, unfit_tensors

try:
    import triton
    import triton.language as tl
except ImportError as e:
    raise ImportError(
        "the Triton kernels need the package triton (pip install triton); the PyTorch path works without it"
    ) from e

MAX_SOURCES = 12
# a program holds a whole token
MAX_SIZE = 8192
# channels and tokens of one program of the backward pass; each has a share of du
CHANNELS, TOKENS = 512, 64
# one name for each copy of this file in a process (the installed package, code from a Hub repository)
NAMESPACE = re.sub(r"\W", "_", __name__)


def triton_mixture(sources, direction, *, eps, factor=1.0):
    """c sum_j softmax_j(direction . RMSNorm(source_j)) source_j; differentiable in sources and direction.

    Args:
        sources: 1 to 12 tensors [..., D], of one shape and dtype: bf16, fp16 or fp32; D at most 8192.
        direction: fp32 [D]. eps: of the norm. factor: c.

    Returns: a tensor like the sources.

    Raises: ValueError for what `unsupported` names.
    """
    reason = unsupported(sources, direction)
    if reason:
        raise ValueError(reason)
    run = choose(mixture_op, mixture_op, _mix, *sources, direction)
    return run(list(sources), direction, float(eps), float(factor))[0]


def unsupported(sources, direction):
    """None, or one line that says which argument of `triton_mixture` does not fit."""
    given = {"direction": direction, **{f"sources[{j}]": x for j, x in enumerate(sources)}}
    reason = unfit_tensors(given, backward=True)
    if reason:
        return reason
    if not 1 <= len(sources) <= MAX_SOURCES:
        return f"the mixture kernel takes 1 to {MAX_SOURCES} sources, got {len(sources)}"
    shape, dtype = sources[0].shape, sources[0].dtype
    if any(x.shape != shape or x.dtype != dtype for x in sources):
        return f"sources must have one shape and dtype, got {[(list(x.shape), str(x.dtype)) for x in sources]}"
    if shape[-1] > MAX_SIZE:
        return f"the mixture kernel takes at most {MAX_SIZE} channels, got {shape[-1]}"
    if direction.dtype != torch.float32 or direction.shape != shape[-1:]:
        return f"direction must be fp32 [D] = [{shape[-1]}], got {direction.dtype} {list(direction.shape)}"
    return None


def _mix(sources: list[Tensor], direction: Tensor, eps: float, factor: float) -> tuple[Tensor, Tensor]:
    """The mixture, and the weights p [R, N] in fp32."""
    sources, direction = [x.contiguous() for x in sources], direction.contiguous()
    mixed, (R, options) = torch.empty_like(sources[0]), _layout(sources)
    weights = mixed.new_empty(R, len(sources), dtype=torch.float32)
    if R:
        with on_device(mixed):
            mixture_kernel[(R,)](tuple(sources), direction, mixed, weights, eps, factor, **options)
    return mixed, weights


def _mix_backward(
    dy: Tensor, sources: list[Tensor], direction: Tensor, weights: Tensor, eps: float, factor: float
) -> tuple[Tensor, Tensor]:
    """The gradients of all sources, [N, ...], and of the direction."""
    sources, direction, dy = [x.contiguous() for x in sources], direction.contiguous(), dy.contiguous()
    dx, (R, options) = dy.new_empty(len(sources), *dy.shape), _layout(sources)
    N, D, tokens = options["N"], options["D"], triton.cdiv(R, TOKENS)
    shares = dy.new_empty(tokens, D, dtype=torch.float32)
    if R:
        factors = dy.new_empty(R, N, 3, dtype=torch.float32)
        with on_device(dy):
            mixture_factors_kernel[(R,)](tuple(sources), direction, weights, dy, factors, eps, factor, **options)
            mixture_backward_kernel[(tokens, triton.cdiv(D, CHANNELS))](
                tuple(sources), direction, factors, dy, dx, shares, factor, R,
                D=D, N=N, BC=CHANNELS, RUN=TOKENS, num_warps=2,
            )  # fmt: skip
    return dx, shares.sum(0)


def _layout(sources):
    """R, and the sizes and blocks of the kernels that hold whole tokens."""
    D = sources[0].shape[-1]
    BD = triton.next_power_of_2(D)
    blocks = {"BD": BD, "BN": triton.next_power_of_2(len(sources)), "num_warps": min(max(BD // 512, 1), 16)}
    return sources[0].numel() // D, {"D": D, "N": len(sources), **blocks}


mixture_op = torch.library.custom_op(f"{NAMESPACE}::mixture", _mix, mutates_args=())
mixture_backward_op = torch.library.custom_op(f"{NAMESPACE}::mixture_backward", _mix_backward, mutates_args=())


@mixture_op.register_fake
def _(sources, direction, eps, factor):
    x = sources[0]
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(
        x.numel() // x.shape[-1], len(sources), dtype=torch.float32
    )


@mixture_backward_op.register_fake
def _(dy, sources, direction, weights, eps, factor):
    return dy.new_empty(len(sources), *dy.shape), direction.new_empty(direction.shape)


def _save(ctx, inputs, output):
    sources, direction, ctx.eps, ctx.factor = inputs
    ctx.save_for_backward(*sources, direction, output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dy, _):
    *sources, direction, weights = ctx.saved_tensors
    if dy is None:
        return [None] * len(sources), None, None, None
    dx, du = mixture_backward_op(dy, sources, direction, weights, ctx.eps, ctx.factor)
    return list(dx.unbind(0)), du, None, None


mixture_op.register_autograd(_differentiate, setup_context=_save)


@triton.jit
def mixture_kernel(
    sources, direction, mixed, weights,                                      # tensors
    eps, factor, D: tl.constexpr, N: tl.constexpr,                           # sizes
    BD: tl.constexpr, BN: tl.constexpr,                                      # blocks
):  # fmt: skip
    """One program per token."""
    i_r = tl.program_id(0).to(tl.int64)
    o_d, o_n = tl.arange(0, BD), tl.arange(0, BN)
    m_d = o_d < D
    b_u = tl.load(direction + o_d, mask=m_d, other=0.0)
    b_s = tl.full([BN], float("-inf"), tl.float32)
    for j in tl.static_range(N):
        b_x = tl.load(sources[j] + i_r * D + o_d, mask=m_d, other=0.0).to(tl.float32)
        s = tl.sum(b_x * b_u, 0) * tl.rsqrt(tl.sum(b_x * b_x, 0) / D + eps)
        b_s = tl.where(o_n == j, s, b_s)
    b_p = tl.exp(b_s - tl.max(b_s, 0))
    b_p /= tl.sum(b_p, 0)
    tl.store(weights + i_r * N + o_n, b_p, mask=o_n < N)
    b_y = tl.zeros([BD], tl.float32)
    for j in tl.static_range(N):
        b_x = tl.load(sources[j] + i_r * D + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_y += factor * tl.sum(tl.where(o_n == j, b_p, 0.0), 0) * b_x
    tl.store(mixed + i_r * D + o_d, b_y.to(mixed.dtype.element_ty), mask=m_d)


@triton.jit
def mixture_factors_kernel(
    sources, direction, weights, dy, factors,                                # tensors
    eps, factor, D: tl.constexpr, N: tl.constexpr,                           # sizes
    BD: tl.constexpr, BN: tl.constexpr,                                      # blocks
):  # fmt: skip
    """One program per token: p, r ds and r^2 s ds / D of every source."""
    i_r = tl.program_id(0).to(tl.int64)
    o_d, o_n = tl.arange(0, BD), tl.arange(0, BN)
    m_d, m_n = o_d < D, o_n < N
    b_u = tl.load(direction + o_d, mask=m_d, other=0.0)
    b_dy = tl.load(dy + i_r * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_p = tl.load(weights + i_r * N + o_n, mask=m_n, other=0.0)
    b_s = tl.zeros([BN], tl.float32)
    b_r = tl.zeros([BN], tl.float32)
    b_dp = tl.zeros([BN], tl.float32)
    for j in tl.static_range(N):
        b_x = tl.load(sources[j] + i_r * D + o_d, mask=m_d, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(b_x * b_x, 0) / D + eps)
        b_r = tl.where(o_n == j, r, b_r)
        b_s = tl.where(o_n == j, tl.sum(b_x * b_u, 0) * r, b_s)
        b_dp = tl.where(o_n == j, factor * tl.sum(b_x * b_dy, 0), b_dp)
    b_ds = b_p * (b_dp - tl.sum(b_p * b_dp, 0))
    p_f = factors + (i_r * N + o_n) * 3
    tl.store(p_f, b_p, mask=m_n)
    tl.store(p_f + 1, b_r * b_ds, mask=m_n)
    tl.store(p_f + 2, b_r * b_r * b_s * b_ds / D, mask=m_n)


@triton.jit(do_not_specialize=["R"])
def mixture_backward_kernel(
    sources, direction, factors, dy, dx, shares,                             # tensors
    factor, R, D: tl.constexpr, N: tl.constexpr,                             # sizes
    BC: tl.constexpr, RUN: tl.constexpr,                                     # blocks
):  # fmt: skip
    """One program: the gradients of BC channels of RUN tokens, and their share of du."""
    i_t, i_c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_c = i_c * BC + tl.arange(0, BC)
    m_c = o_c < D
    b_u = tl.load(direction + o_c, mask=m_c, other=0.0)
    b_du = tl.zeros([BC], tl.float32)
    for i_r in range(i_t * RUN, tl.minimum(i_t * RUN + RUN, R)):
        b_dy = factor * tl.load(dy + i_r * D + o_c, mask=m_c, other=0.0).to(tl.float32)
        for j in tl.static_range(N):
            b_x = tl.load(sources[j] + i_r * D + o_c, mask=m_c, other=0.0).to(tl.float32)
            p_f = factors + (i_r * N + j) * 3
            p, scored, normed = tl.load(p_f), tl.load(p_f + 1), tl.load(p_f + 2)
            b_dx = p * b_dy + scored * b_u - normed * b_x
            b_du += scored * b_x
            p_dx = dx + (tl.cast(j, tl.int64) * R + i_r) * D + o_c
            tl.store(p_dx, b_dx.to(dx.dtype.element_ty), mask=m_c)
    tl.store(shares + i_t * D + o_c, b_du, mask=m_c)
