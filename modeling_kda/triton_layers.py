"""The layers around the recurrence as Triton kernels, forward and backward: short convolution and gated norm.

    z_t = sum_j weight[W-1-j] x_{t-j},  y = act(z)        causal and depthwise, over 0 <= j < W, j <= age_t
        dx_t = sum_j weight[W-1-j] dz_{t+j},  dweight[W-1-j] = sum_t dz_{t+j} x_t,  dz = dy act'(z), z computed again

    y = o r weight s,  r = 1 / sqrt(mean(o^2) + eps),  s = sigmoid(gate)
        do = r c - o r^3 mean(c o),  c = dy weight s,  dgate = dy o r weight s (1 - s),  dweight = sum dy o r s

Everything is computed in fp32 and rounded once. Sums over tokens are added in a fixed order, so gradients are
deterministic. B batch, T time, C channels, W taps, V value channels.
"""

import os

import torch

try:
    import triton
    import triton.language as tl
except ImportError as e:
    raise ImportError(
        "the Triton kernels need the package triton (pip install triton); the PyTorch path works without it"
    ) from e

MAX_TAPS = 4
MAX_NORM_SIZE = 4096
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = {None: 0, "silu": 1, "relu": 2}
# measured on an H200: tokens and channels of a tile, its warps, and how many tiles a program of the backward adds up
FORWARD_TILE = {"BT": 32, "BC": 128, "num_warps": 8}
BACKWARD_TILE = {"BT": 16, "BC": 128, "num_warps": 8, "TILES": 16}
# elements of one tile of rows of the norm, and the most programs of its backward, each with a share of dweight
NORM_TILE, NORM_WARPS, NORM_PROGRAMS = 2048, 4, 1024


def triton_short_convolution(x, weight, window=None, *, age=None, activation=None):
    """Causal depthwise convolution over time, then the activation; differentiable in x, weight and window.

    Args:
        x: [B, T, C], bf16, fp16 or fp32; may be a view whose channels are contiguous.
        weight: [C, 1, W], W from 2 to 4, the last tap for the current token.
        window: [B, W-1, C], the inputs before x, or None for zeros.
        age: [B, T] integers, index of each token in its own document, or None when every tap is allowed.
        activation: None, "silu" or "relu".

    Returns: y [B, T, C] in x's dtype, and the window for the next call [B, W-1, C] (it may share memory with x).

    Raises: ValueError for what `unsupported_convolution_reason` names.
    """
    reason = unsupported_convolution_reason(x, weight, window, age=age, activation=activation)
    if reason:
        raise ValueError(reason)
    y = ShortConvolutionFunction.apply(x, weight, window, age, ACTIVATIONS[activation])
    before = weight.shape[-1] - 1
    if x.shape[1] >= before:
        return y, x[:, x.shape[1] - before :]
    window = x.new_zeros(x.shape[0], before, x.shape[2]) if window is None else window.to(x.dtype)
    return y, torch.cat([window, x], 1)[:, x.shape[1] :]


def unsupported_convolution_reason(x, weight, window=None, *, age=None, activation=None):
    """None, or one line that says which argument of `triton_short_convolution` does not fit."""
    given = {"x": x, "weight": weight, "window": window}
    reason = _unfit_tensors({name: tensor for name, tensor in given.items() if tensor is not None})
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


class ShortConvolutionFunction(torch.autograd.Function):
    """y [B, T, C] of x, weight, window, age and the number of the activation."""

    @staticmethod
    def forward(ctx, x, weight, window, age, activation):
        x, weight, window, age = _unit_stride(x), weight.contiguous(), _unit_stride(window), _unit_stride(age)
        ctx.save_for_backward(x, weight, window, age)
        ctx.activation = activation
        B, T, C = x.shape
        y = torch.empty(B, T, C, dtype=x.dtype, device=x.device)
        if y.numel() == 0:
            return y
        with torch.cuda.device_of(x):
            blocks = triton.cdiv(T, FORWARD_TILE["BT"]), triton.cdiv(C, FORWARD_TILE["BC"])
            short_convolution_kernel[(*blocks, B)](
                x,
                weight,
                window,
                age,
                y,
                T,
                C,
                *_strides(x, 2),
                *_strides(window, 2),
                *_strides(age, 1),
                TAPS=weight.shape[-1],
                ACTIVATION=activation,
                HAS_WINDOW=window is not None,
                HAS_AGE=age is not None,
                **FORWARD_TILE,
            )
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, weight, window, age = ctx.saved_tensors
        B, T, C = x.shape
        taps, dy = weight.shape[-1], _unit_stride(dy)
        dx = torch.empty(B, T, C, dtype=x.dtype, device=x.device)
        dwindow = None if window is None else torch.empty(B, taps - 1, C, dtype=window.dtype, device=x.device)
        # with a window there are W-1 more inputs
        rows = T + (0 if window is None else taps - 1)
        blocks = triton.cdiv(rows, BACKWARD_TILE["BT"] * BACKWARD_TILE["TILES"])
        shares = torch.empty(B, blocks, taps, C, dtype=torch.float32, device=x.device)
        if shares.numel():
            with torch.cuda.device_of(x):
                short_convolution_backward_kernel[(blocks, triton.cdiv(C, BACKWARD_TILE["BC"]), B)](
                    x,
                    weight,
                    window,
                    age,
                    dy,
                    dx,
                    dwindow,
                    shares,
                    T,
                    C,
                    *_strides(x, 2),
                    *_strides(window, 2),
                    *_strides(age, 1),
                    *_strides(dy, 2),
                    TAPS=taps,
                    ACTIVATION=ctx.activation,
                    HAS_WINDOW=window is not None,
                    HAS_AGE=age is not None,
                    **BACKWARD_TILE,
                )
        dweight = shares.sum((0, 1)).t()[:, None].to(weight.dtype)
        return dx, dweight, dwindow, None, None


@triton.jit
def short_convolution_kernel(
    x,
    weight,
    window,
    age,
    y,
    T,
    C,
    s_xb,
    s_xt,
    s_wb,
    s_wt,
    s_ab,
    TAPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_AGE: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """One program: BT tokens of BC channels."""
    i_t, i_c, i_b = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_t, o_c = i_t * BT + tl.arange(0, BT), i_c * BC + tl.arange(0, BC)
    p_x, p_w, p_a = x + i_b * s_xb, window, age
    if HAS_WINDOW:
        p_w = window + i_b * s_wb
    if HAS_AGE:
        p_a = age + i_b * s_ab
    b_z = preactivation(p_x, weight, p_w, p_a, o_t, o_c, T, C, s_xt, s_wt, TAPS, HAS_WINDOW, HAS_AGE)
    if ACTIVATION == 1:
        b_z = b_z * tl.sigmoid(b_z)
    elif ACTIVATION == 2:
        b_z = tl.maximum(b_z, 0.0)
    p_y = y + i_b * T * C + o_t[:, None] * C + o_c[None, :]
    tl.store(p_y, b_z.to(y.dtype.element_ty), mask=(o_t < T)[:, None] & (o_c < C)[None, :])


@triton.jit
def preactivation(
    p_x,
    weight,
    p_w,
    p_a,
    o_t,
    o_c,
    T,
    C,
    s_xt,
    s_wt,
    TAPS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_AGE: tl.constexpr,
):
    """z at the tokens o_t, anything where there is no such token. The pointers are those of one sequence."""
    m_c = o_c < C
    b_z = tl.zeros([o_t.shape[0], o_c.shape[0]], tl.float32)
    if HAS_AGE:
        b_age = tl.load(p_a + o_t, mask=(o_t >= 0) & (o_t < T), other=0)
    for j in tl.static_range(TAPS):
        allowed = o_t < T
        if HAS_AGE:
            allowed = allowed & (b_age >= j)
        b_x = input_rows(p_x, p_w, o_t - j, o_c, allowed, T, C, s_xt, s_wt, TAPS, HAS_WINDOW)
        b_z += b_x * tl.load(weight + o_c * TAPS + (TAPS - 1 - j), mask=m_c, other=0.0).to(tl.float32)[None, :]
    return b_z


@triton.jit
def input_rows(p_x, p_w, o_t, o_c, allowed, T, C, s_xt, s_wt, TAPS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """The inputs at tokens o_t, which may lie in the window (negative); zeros where nothing is or is allowed."""
    m_c = o_c < C
    m_x = ((o_t >= 0) & (o_t < T) & allowed)[:, None] & m_c[None, :]
    b_x = tl.load(p_x + o_t[:, None] * s_xt + o_c[None, :], mask=m_x, other=0.0).to(tl.float32)
    if HAS_WINDOW:
        o_w = o_t + (TAPS - 1)
        m_w = ((o_t < 0) & (o_w >= 0) & allowed)[:, None] & m_c[None, :]
        b_x += tl.load(p_w + o_w[:, None] * s_wt + o_c[None, :], mask=m_w, other=0.0).to(tl.float32)
    return b_x


@triton.jit
def short_convolution_backward_kernel(
    x,
    weight,
    window,
    age,
    dy,
    dx,
    dwindow,
    shares,
    T,
    C,
    s_xb,
    s_xt,
    s_wb,
    s_wt,
    s_ab,
    s_yb,
    s_yt,
    TAPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_AGE: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    TILES: tl.constexpr,
):
    """One program: TILES tiles of BT inputs of BC channels, and their share of dweight."""
    i_t, i_c, i_b = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_c = i_c * BC + tl.arange(0, BC)
    m_c = o_c < C
    p_x, p_w, p_a, p_dw = x + i_b * s_xb, window, age, dwindow
    if HAS_WINDOW:
        p_w = window + i_b * s_wb
        p_dw = dwindow + i_b * (TAPS - 1) * C
    if HAS_AGE:
        p_a = age + i_b * s_ab
    b_w0 = tl.zeros([BT, BC], tl.float32)
    b_w1 = tl.zeros([BT, BC], tl.float32)
    b_w2 = tl.zeros([BT, BC], tl.float32)
    b_w3 = tl.zeros([BT, BC], tl.float32)
    for i_tile in range(TILES):
        o_t = (i_t * TILES + i_tile) * BT + tl.arange(0, BT)
        if HAS_WINDOW:
            o_t -= TAPS - 1
        b_x = input_rows(p_x, p_w, o_t, o_c, o_t < T, T, C, s_xt, s_wt, TAPS, HAS_WINDOW)
        b_dx = tl.zeros([BT, BC], tl.float32)
        for j in tl.static_range(TAPS):
            # the output that this input reaches through tap j
            o_y = o_t + j
            m_y = (o_y >= 0) & (o_y < T)
            if HAS_AGE:
                m_y = m_y & (tl.load(p_a + o_y, mask=m_y, other=0) >= j)
            p_dy = dy + i_b * s_yb + o_y[:, None] * s_yt + o_c[None, :]
            b_dz = tl.load(p_dy, mask=m_y[:, None] & m_c[None, :], other=0.0).to(tl.float32)
            if ACTIVATION > 0:
                b_z = preactivation(p_x, weight, p_w, p_a, o_y, o_c, T, C, s_xt, s_wt, TAPS, HAS_WINDOW, HAS_AGE)
                if ACTIVATION == 1:
                    b_s = tl.sigmoid(b_z)
                    b_dz *= b_s * (1.0 + b_z * (1.0 - b_s))
                else:
                    b_dz = tl.where(b_z > 0.0, b_dz, 0.0)
            b_dx += b_dz * tl.load(weight + o_c * TAPS + (TAPS - 1 - j), mask=m_c, other=0.0).to(tl.float32)[None, :]
            if j == 0:
                b_w0 += b_dz * b_x
            elif j == 1:
                b_w1 += b_dz * b_x
            elif j == 2:
                b_w2 += b_dz * b_x
            else:
                b_w3 += b_dz * b_x
        m_x = ((o_t >= 0) & (o_t < T))[:, None] & m_c[None, :]
        tl.store(dx + i_b * T * C + o_t[:, None] * C + o_c[None, :], b_dx.to(dx.dtype.element_ty), mask=m_x)
        if HAS_WINDOW:
            o_w = o_t + (TAPS - 1)
            m_w = (o_t < 0)[:, None] & m_c[None, :]
            tl.store(p_dw + o_w[:, None] * C + o_c[None, :], b_dx.to(dwindow.dtype.element_ty), mask=m_w)
    p_share = shares + (i_b * tl.num_programs(0) + i_t) * TAPS * C + o_c
    tl.store(p_share + (TAPS - 1) * C, tl.sum(b_w0, 0), mask=m_c)
    tl.store(p_share + (TAPS - 2) * C, tl.sum(b_w1, 0), mask=m_c)
    if TAPS > 2:
        tl.store(p_share + (TAPS - 3) * C, tl.sum(b_w2, 0), mask=m_c)
    if TAPS > 3:
        tl.store(p_share + (TAPS - 4) * C, tl.sum(b_w3, 0), mask=m_c)


def triton_gated_norm(o, weight, gate=None, *, eps):
    """RMSNorm(o) * weight * sigmoid(gate) over the last dimension; differentiable in all three.

    Args:
        o: [..., V], bf16, fp16 or fp32, V at most 4096. weight: [V].
        gate: logits with as many elements as o, in the same order (for example [B, T, HV V]), or None for no gate.

    Returns: y, shaped as o, in o's dtype.

    Raises: ValueError for what `unsupported_norm_reason` names.
    """
    reason = unsupported_norm_reason(o, weight, gate)
    if reason:
        raise ValueError(reason)
    return GatedNormFunction.apply(o, weight, gate, eps)


def unsupported_norm_reason(o, weight, gate=None):
    """None, or one line that says which argument of `triton_gated_norm` does not fit."""
    given = {"o": o, "weight": weight, "gate": gate}
    reason = _unfit_tensors({name: tensor for name, tensor in given.items() if tensor is not None})
    if reason:
        return reason
    if weight.shape != o.shape[-1:]:
        return f"weight must be [V] = {list(o.shape[-1:])}, got {list(weight.shape)}"
    if o.shape[-1] > MAX_NORM_SIZE:
        return f"the norm kernel takes at most {MAX_NORM_SIZE} channels, got {o.shape[-1]}"
    if gate is not None and gate.numel() != o.numel():
        return f"gate must have one logit for each of the {o.numel()} elements of o, got {gate.numel()}"
    return None


class GatedNormFunction(torch.autograd.Function):
    """y of o, weight, gate and eps. Saves its inputs only; the norm is computed again in the backward."""

    @staticmethod
    def forward(ctx, o, weight, gate, eps):
        o, weight, gate = o.contiguous(), weight.contiguous(), None if gate is None else gate.contiguous()
        ctx.save_for_backward(o, weight, gate)
        ctx.eps = eps
        y = torch.empty_like(o)
        N, V, BN, BV = _norm_tile(o)
        if N:
            with torch.cuda.device_of(o):
                gated_norm_kernel[(triton.cdiv(N, BN),)](
                    o, weight, gate, y, eps, N, V=V, BN=BN, BV=BV, HAS_GATE=gate is not None, num_warps=NORM_WARPS
                )
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        o, weight, gate = ctx.saved_tensors
        dy, do = dy.contiguous(), torch.empty_like(o)
        dgate = None if gate is None else torch.empty_like(gate)
        N, V, BN, BV = _norm_tile(o)
        tiles = triton.cdiv(triton.cdiv(N, BN), NORM_PROGRAMS)
        programs = triton.cdiv(N, BN * tiles) if N else 0
        shares = torch.empty(programs, V, dtype=torch.float32, device=o.device)
        if N:
            with torch.cuda.device_of(o):
                gated_norm_backward_kernel[(programs,)](
                    o,
                    weight,
                    gate,
                    dy,
                    do,
                    dgate,
                    shares,
                    ctx.eps,
                    N,
                    tiles,
                    V=V,
                    BN=BN,
                    BV=BV,
                    HAS_GATE=gate is not None,
                    num_warps=NORM_WARPS,
                )
        return do, shares.sum(0).to(weight.dtype), dgate, None


@triton.jit
def gated_norm_kernel(
    o, weight, gate, y, eps, N, V: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr, HAS_GATE: tl.constexpr
):
    """One program: BN rows."""
    o_n, o_v = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN), tl.arange(0, BV)
    m_v = o_v < V
    mask = (o_n < N)[:, None] & m_v[None, :]
    o_y = o_n[:, None] * V + o_v[None, :]
    b_o = tl.load(o + o_y, mask=mask, other=0.0).to(tl.float32)
    b_y = b_o * tl.rsqrt(tl.sum(b_o * b_o, 1) / V + eps)[:, None]
    b_y *= tl.load(weight + o_v, mask=m_v, other=0.0).to(tl.float32)[None, :]
    if HAS_GATE:
        b_y *= tl.sigmoid(tl.load(gate + o_y, mask=mask, other=0.0).to(tl.float32))
    tl.store(y + o_y, b_y.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tiles"])
def gated_norm_backward_kernel(
    o,
    weight,
    gate,
    dy,
    do,
    dgate,
    shares,
    eps,
    N,
    tiles,
    V: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    HAS_GATE: tl.constexpr,
):
    """One program: `tiles` times BN rows, and their share of dweight."""
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
        b_r = tl.rsqrt(tl.sum(b_o * b_o, 1) / V + eps)[:, None]
        b_x = b_o * b_r
        if HAS_GATE:
            b_s = tl.sigmoid(tl.load(gate + o_y, mask=mask, other=0.0).to(tl.float32))
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


def _unfit_tensors(tensors):
    """None, or why these named tensors cannot go into one kernel."""
    device = next(iter(tensors.values())).device
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the Triton kernels need tensors on a CUDA device, got {device}"
    for name, x in tensors.items():
        if x.device != device:
            return f"all tensors must be on one device, got {device} and {name} on {x.device}"
        if x.dtype not in DTYPES:
            return f"the Triton kernels take fp32, bf16 and fp16, got {x.dtype} for {name}"
    return None


def _unit_stride(x):
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def _strides(x, count):
    """The first strides of x; 0 where there is one element, so that odd strides do not make another kernel."""
    if x is None:
        return (0,) * count
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape[:count], x.stride()[:count], strict=True))
