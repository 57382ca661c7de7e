"""Decoding in one launch: the recurrence for a few tokens, and a whole layer step around it, as Triton kernels.

    S = exp(log_decay_t) * S            forget
    r = S^T k_t,  p = S^T q_t           both in one pass over the state, which stays in registers
    e = beta_t (v_t - r)                or beta_t v_t without erase
    S = S + k_t e^T                     write
    o = scale (p + e (q_t . k_t))       equals scale S^T q_t, and does not wait for the write

`triton_recurrent_delta_rule` is that recurrence for at most `MAX_TOKENS` tokens, which is what decoding and the
verification of drafted tokens need. `triton_decode_step` is one token of a whole recurrent layer between its input and
output projections: short convolution, unit length, gates, recurrence, gated norm.

The state is read once and written once, in fp32. Nothing here waits for the device or chooses by timing, so both can
be captured into a CUDA graph. Forward only.

B batch, T time, H heads, HV value heads (a multiple of H), K key channels, V value channels.
Gate and recurrence: Kimi Linear, arXiv 2510.26692.
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

from .triton_launch import ACTIVATIONS, MAX_TAPS, on_device, strides, unfit_tensors, unit_stride

MAX_TOKENS = 16
MAX_CHANNELS = 256
# the layer step keeps a row of the state in the registers of each thread
MAX_STEP_VALUES = 128
WRITES = {"one": 0, "beta": 1, "step": 2}
# one name for each copy of this file in a process (the installed package, code from a Hub repository)
NAMESPACE = re.sub(r"\W", "_", __name__)


def triton_recurrent_delta_rule(
    q, k, v, beta=None, log_decay=None, state=None, *, erase=True, scale=None, inplace=False
):
    """The recurrence for T <= 16 tokens, one launch.

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V]. K and V at most 256. bf16, fp16 or fp32, any strides.
        beta: [B, T, HV] or None (1). log_decay: [B, T, HV, 1 or K], <= 0 at any magnitude, or None (0).
        state: [B, HV, K, V] or None (zeros).
        erase: whether a token first subtracts what its key already retrieves.
        scale: multiplier of q, K**-0.5 if not given.
        inplace: write the final state into `state`, which must then be fp32 with contiguous [K, V].

    Returns: o [B, T, HV, V] in v's dtype, and the final state [B, HV, K, V] in fp32 (`state` itself if inplace).

    Raises: ValueError for what `supports` denies.
    """
    reason = unsupported(q, k, v, beta, log_decay, state, inplace=inplace)
    if reason:
        raise ValueError(reason)
    (B, T, HV, V), K = v.shape, q.shape[-1]
    o = torch.empty(B, T, HV, V, dtype=v.dtype, device=v.device)
    final = state if inplace else torch.empty(B, HV, K, V, dtype=torch.float32, device=v.device)
    if state is not None and not inplace:
        state = state.contiguous()
    if o.numel() == 0 or K == 0:
        return o.zero_(), final if inplace else (final.zero_() if state is None else final.copy_(state))
    _launch_recurrence(q, k, v, beta, log_decay, state, final, o, erase, K**-0.5 if scale is None else scale)
    return o, final


def _launch_recurrence(q, k, v, beta, log_decay, state, final, o, erase, scale):
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    q, k, v = (unit_stride(x) for x in (q, k, v))
    decay = _decay_kind(log_decay, K)
    log_decay = unit_stride(log_decay) if decay == 2 else log_decay
    BK, BV, num_warps = _recurrent_config(B * HV, K, V)
    NV = triton.cdiv(V, BV)
    with on_device(q):
        recurrent_delta_rule_kernel[(B * HV * NV,)](
            q, k, v, beta, log_decay, state, final, o,
            scale, T, H, HV, NV,
            *strides(q, 3), *strides(k, 3), *strides(v, 3),
            *strides(beta, 3), *strides(log_decay, 3), *strides(state, 2), *strides(final, 2),
            K=K, V=V, BK=BK, BV=BV,
            DECAY=decay, ERASE=erase, HAS_BETA=beta is not None, HAS_STATE=state is not None, ONE_TOKEN=T == 1,
            num_warps=num_warps,
        )  # fmt: skip


def supports(q, k, v, beta=None, log_decay=None, state=None, *, inplace=False):
    """Whether `triton_recurrent_delta_rule` takes these arguments; `unsupported` says why not."""
    return unsupported(q, k, v, beta, log_decay, state, inplace=inplace) is None


def unsupported(q, k, v, beta=None, log_decay=None, state=None, *, inplace=False):
    """None, or one line that says which argument of `triton_recurrent_delta_rule` does not fit."""
    given = {"q": q, "k": k, "v": v, "beta": beta, "log_decay": log_decay, "state": state}
    reason = unfit_tensors({name: x for name, x in given.items() if x is not None}, backward=False)
    if reason:
        return reason
    if q.dim() != 4 or k.shape != q.shape:
        return f"q and k must both be [B, T, H, K], got {list(q.shape)} and {list(k.shape)}"
    B, T, H, K = q.shape
    if v.dim() != 4 or v.shape[:2] != q.shape[:2] or H == 0 or v.shape[2] % H:
        return f"v must be [B, T, HV, V] with B, T = {[B, T]} and HV a multiple of {H}, got {list(v.shape)}"
    HV, V = v.shape[2:]
    if T > MAX_TOKENS:
        return f"the step kernel takes at most {MAX_TOKENS} tokens, got {T}; use the chunk form"
    if max(K, V) > MAX_CHANNELS:
        return f"the step kernel takes at most {MAX_CHANNELS} channels per head, got K = {K} and V = {V}"
    if beta is not None and beta.shape != (B, T, HV):
        return f"beta must be [B, T, HV] = {[B, T, HV]}, got {list(beta.shape)}"
    if log_decay is not None and (log_decay.shape[:-1] != (B, T, HV) or log_decay.shape[-1] not in (1, K)):
        return f"log_decay must be [B, T, HV, 1 or K] = {[B, T, HV, K]}, got {list(log_decay.shape)}"
    if state is not None and state.shape != (B, HV, K, V):
        return f"state must be [B, HV, K, V] = {[B, HV, K, V]}, got {list(state.shape)}"
    return _unfit_inplace(state) if inplace else None


@triton.jit(do_not_specialize=["T"])
def recurrent_delta_rule_kernel(
    q, k, v, beta, log_decay, state, final, o,                      # tensors
    scale, T, H, HV, NV,                                            # numbers
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh,           # strides over batch, time, heads
    s_bb, s_bt, s_bh, s_gb, s_gt, s_gh, s_sb, s_sh, s_fb, s_fh,     # of beta, log_decay, state, final
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, ERASE: tl.constexpr, HAS_BETA: tl.constexpr, HAS_STATE: tl.constexpr, ONE_TOKEN: tl.constexpr,
):  # fmt: skip
    """One program: BV value channels of one value head of one sequence, all T tokens."""
    # torch.compile hands numbers over in fp64
    scale = tl.cast(scale, tl.float32)
    i_p = tl.program_id(0).to(tl.int64)
    i_v, i_n = i_p % NV, i_p // NV
    i_b, i_hv = i_n // HV, i_n % HV
    i_h = i_hv // (HV // H)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_s = m_k[:, None] & m_v[None, :]
    o_s = o_k[:, None] * V + o_v[None, :]
    if HAS_STATE:
        b_s = tl.load(state + i_b * s_sb + i_hv * s_sh + o_s, mask=m_s, other=0.0).to(tl.float32)
    else:
        b_s = tl.zeros([BK, BV], tl.float32)

    p_q = q + i_b * s_qb + i_h * s_qh + o_k
    p_k = k + i_b * s_kb + i_h * s_kh + o_k
    p_v = v + i_b * s_vb + i_hv * s_vh + o_v
    p_beta = beta
    if HAS_BETA:
        p_beta = beta + i_b * s_bb + i_hv * s_bh
    p_g = log_decay
    if DECAY == 2:
        p_g = log_decay + i_b * s_gb + i_hv * s_gh + o_k
    elif DECAY == 1:
        p_g = log_decay + i_b * s_gb + i_hv * s_gh
    p_o = o + (i_b * T * HV + i_hv) * V + o_v
    tokens = 1 if ONE_TOKEN else T
    for i_t in range(tokens):
        i_t = tl.cast(i_t, tl.int64)
        b_q = tl.load(p_q + i_t * s_qt, mask=m_k, other=0.0).to(tl.float32)
        b_k = tl.load(p_k + i_t * s_kt, mask=m_k, other=0.0).to(tl.float32)
        b_e = tl.load(p_v + i_t * s_vt, mask=m_v, other=0.0).to(tl.float32)
        if DECAY == 2:
            b_s *= tl.exp(tl.load(p_g + i_t * s_gt, mask=m_k, other=0.0).to(tl.float32))[:, None]
        elif DECAY == 1:
            b_s *= tl.exp(tl.load(p_g + i_t * s_gt).to(tl.float32))
        if ERASE:
            b_p, b_r = tl.reduce((b_s * b_q[:, None], b_s * b_k[:, None]), 0, add_pairs)
            b_e -= b_r
        else:
            b_p = tl.sum(b_s * b_q[:, None], 0)
        if HAS_BETA:
            b_e *= tl.load(p_beta + i_t * s_bt).to(tl.float32)
        b_s += b_k[:, None] * b_e[None, :]
        b_o = scale * (b_p + b_e * tl.sum(b_q * b_k, 0))
        tl.store(p_o + i_t * HV * V, b_o.to(o.dtype.element_ty), mask=m_v)
    # small tiles are held by several warps: all must have read the state before one overwrites it
    tl.debug_barrier()
    tl.store(final + i_b * s_fb + i_hv * s_fh + o_s, b_s, mask=m_s)


def _recurrent_config(heads, K, V):
    """(BK, BV, num_warps) for `heads` value heads in the batch. Measured on an H200; nothing is timed at run time."""
    BK = triton.next_power_of_2(K)
    # few heads: split their value channels until every multiprocessor has work
    BV = min(16 if heads <= 256 else 32 if heads <= 1024 else 64, triton.next_power_of_2(V))
    # 64 elements of the state per thread; never more threads than keys, or each would load its keys one by one
    return BK, BV, max(1, BK * BV // 2048)


def triton_decode_step(
    q, k, v, state, window=None, conv_weights=None, beta_logits=None, decay_logits=None, A_log=None, dt_bias=None,
    norm_weight=None, gate_logits=None,
    *, erase, unit_keys, write="beta", activation=None, lower_bound=None, scale=None, eps=1e-5,
):  # fmt: skip
    """One token of a recurrent layer between its input and its output projections, one launch.

    Args:
        q, k: [B, 1, H, K] and v: [B, 1, HV, V], the projections before the convolution.
        state: [B, HV, K, V] fp32, replaced in place.
        window: [B, W-1, 2 H K + HV V], the last inputs of the convolution, q, k and v side by side, replaced in place;
            None without convolution.
        conv_weights: three of shape [channels, 1, W], W from 2 to 4, the last tap for the current token; or None.
        beta_logits: [B, 1, HV], with write "beta". decay_logits: [B, 1, HV, 1 or K], or None for no decay.
        A_log: [HV]. dt_bias: [HV] or [HV K]. norm_weight: [V], or None for no norm.
        gate_logits: [B, 1, HV V], or None for no output gate.
        erase, unit_keys, write ("one", "beta" or "step"): as in `stages.py`.
        activation: of the convolution, None, "silu" or "relu".
        lower_bound: None for the softplus gate -exp(A_log) softplus(x + dt_bias), else
            lower_bound * sigmoid(exp(A_log) (x + dt_bias)).
        scale: multiplier of q, K**-0.5 if not given. eps: of the norm.

    Returns: y [B, 1, HV V] in v's dtype: RMSNorm(o) * norm_weight * sigmoid(gate_logits).

    Raises: ValueError for what `supports_step` denies.
    """
    given = q, k, v, state, window, conv_weights, beta_logits, decay_logits, A_log, dt_bias, norm_weight, gate_logits
    reason = unsupported_step(*given, write=write, activation=activation, lower_bound=lower_bound)
    if reason:
        raise ValueError(reason)
    options = {"activation": activation, "lower_bound": lower_bound, "scale": scale, "eps": eps}
    return run_decode_step(*given, erase=erase, unit_keys=unit_keys, write=write, **options)


def run_decode_step(
    q, k, v, state, window=None, conv_weights=None, beta_logits=None, decay_logits=None, A_log=None, dt_bias=None,
    norm_weight=None, gate_logits=None,
    *, erase, unit_keys, write="beta", activation=None, lower_bound=None, scale=None, eps=1e-5,
):  # fmt: skip
    """`triton_decode_step` without checks: for callers that have asked `unsupported_step`."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    bounded, bound = lower_bound is not None, 0.0 if lower_bound is None else lower_bound
    options = erase, unit_keys, WRITES[write], ACTIVATIONS[activation], bounded, float(bound), float(scale), float(eps)
    weights = (None,) * 3 if conv_weights is None else conv_weights
    run = decode_step_op if torch.compiler.is_compiling() else _launch_step
    return run(
        q, k, v, state, window, *weights, beta_logits, decay_logits, A_log, dt_bias, norm_weight, gate_logits, *options
    )


def _launch_step(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, window: Tensor | None, q_weight: Tensor | None,
    k_weight: Tensor | None, v_weight: Tensor | None, beta_logits: Tensor | None, decay_logits: Tensor | None,
    A_log: Tensor | None, dt_bias: Tensor | None, norm_weight: Tensor | None, gate_logits: Tensor | None,
    erase: bool, unit_keys: bool, write: int, activation: int, bounded: bool, lower_bound: float, scale: float,
    eps: float,
) -> Tensor:  # fmt: skip
    (B, _, H, K), (HV, V) = q.shape, v.shape[2:]
    y = v.new_empty(B, 1, HV * V)
    if not y.numel():
        return y
    q, k, v, gate_logits = (unit_stride(x) for x in (q, k, v, gate_logits))
    taps = 1 if q_weight is None else q_weight.shape[-1]
    # without convolution nothing is read through these, but pointers they must be
    weights = (q, k, v) if q_weight is None else (w.contiguous() for w in (q_weight, k_weight, v_weight))
    window = q if window is None else window
    decay = _decay_kind(decay_logits, K)
    decay_logits = unit_stride(decay_logits) if decay == 2 else decay_logits
    A_log, dt_bias, norm_weight = (None if x is None else x.contiguous() for x in (A_log, dt_bias, norm_weight))
    BK, BV, num_warps = _step_config(K, V)
    with on_device(q):
        decode_step_kernel[(B * H,)](
            q, k, v, window, *weights, beta_logits, decay_logits, A_log, dt_bias, norm_weight, gate_logits, state, y,
            scale, lower_bound, eps, H,
            *_step_strides(q), *_step_strides(k), *_step_strides(v), *strides(window, 2),
            *_step_strides(beta_logits), *_step_strides(decay_logits), *strides(gate_logits, 1), *strides(state, 2),
            GROUP=HV // H, K=K, V=V, BK=BK, BV=BV,
            TAPS=taps, ACTIVATION=activation if taps > 1 else 0, UNIT_KEYS=unit_keys,
            DECAY=decay, BOUNDED=bounded, WRITE=write, ERASE=erase,
            HAS_NORM=norm_weight is not None, HAS_GATE=gate_logits is not None,
            num_warps=num_warps,
        )  # fmt: skip
    return y


decode_step_op = torch.library.custom_op(f"{NAMESPACE}::decode_step", _launch_step, mutates_args=("state", "window"))


@decode_step_op.register_fake
def _(q, k, v, *_):
    return v.new_empty(v.shape[0], 1, v.shape[2] * v.shape[3])


def supports_step(*args, **kwargs):
    """Whether `triton_decode_step` takes these arguments; `unsupported_step` says why not."""
    return unsupported_step(*args, **kwargs) is None


def unsupported_step(
    q, k, v, state, window=None, conv_weights=None, beta_logits=None, decay_logits=None, A_log=None, dt_bias=None,
    norm_weight=None, gate_logits=None, *, write="beta", activation=None, lower_bound=None, **_,
):  # fmt: skip
    """None, or one line that says which argument of `triton_decode_step` does not fit."""
    if q.dim() != 4 or q.shape[1] != 1 or k.shape != q.shape:
        return f"the layer step takes one token, q and k [B, 1, H, K], got {list(q.shape)} and {list(k.shape)}"
    B, _, H, K = q.shape
    if v.dim() != 4 or v.shape[:2] != (B, 1) or H == 0 or v.shape[2] % H:
        return f"v must be [B, 1, HV, V] with B = {B} and HV a multiple of {H}, got {list(v.shape)}"
    HV, V = v.shape[2:]
    if K > MAX_CHANNELS or V > MAX_STEP_VALUES:
        return f"the layer step takes K up to {MAX_CHANNELS} and V up to {MAX_STEP_VALUES}, got K = {K} and V = {V}"
    if (window is None) != (conv_weights is None):
        return "window and conv_weights belong together, got only one of them"
    if (decay_logits is None) != (A_log is None) or (A_log is None) != (dt_bias is None):
        return "decay_logits, A_log and dt_bias belong together, got only some of them"
    taps = 1 if conv_weights is None else conv_weights[0].shape[-1]
    channels = 1 if decay_logits is None else decay_logits.shape[-1]
    if taps > MAX_TAPS or (conv_weights is not None and taps < 2):
        return f"the convolution kernel takes 2 to {MAX_TAPS} taps, got {taps}"
    reason = _unfit_step_options(channels, K, write, activation, beta_logits, decay_logits, lower_bound)
    if reason:
        return reason
    q_weight, k_weight, v_weight = (None,) * 3 if conv_weights is None else conv_weights
    wanted = {
        "q": (q, (B, 1, H, K)), "k": (k, (B, 1, H, K)), "v": (v, (B, 1, HV, V)), "state": (state, (B, HV, K, V)),
        "window": (window, (B, taps - 1, 2 * H * K + HV * V)), "q's convolution": (q_weight, (H * K, 1, taps)),
        "k's convolution": (k_weight, (H * K, 1, taps)), "v's convolution": (v_weight, (HV * V, 1, taps)),
        "beta_logits": (beta_logits, (B, 1, HV)), "decay_logits": (decay_logits, (B, 1, HV, channels)),
        "A_log": (A_log, (HV,)), "dt_bias": (dt_bias, (HV * channels,)),
        "norm_weight": (norm_weight, (V,)), "gate_logits": (gate_logits, (B, 1, HV * V)),
    }  # fmt: skip
    wanted = {name: (x, shape) for name, (x, shape) in wanted.items() if x is not None}
    for name, (x, shape) in wanted.items():
        if x.shape != shape:
            return f"{name} must be {list(shape)}, got {list(x.shape)}"
    if window is not None and window.stride(-1) != 1:
        return f"window must be contiguous in its channels to be replaced in place, got strides {window.stride()}"
    return unfit_tensors({name: x for name, (x, _) in wanted.items()}, backward=False) or _unfit_inplace(state)


def _unfit_step_options(channels, K, write, activation, beta_logits, decay_logits, lower_bound):
    """None, or why these options do not go together."""
    if activation not in ACTIVATIONS:
        return f"the activation must be one of {list(ACTIVATIONS)}, got {activation!r}"
    if write not in WRITES:
        return f"write must be one of {list(WRITES)}, got {write!r}"
    if (beta_logits is not None) != (write == "beta"):
        return f"beta_logits and write='beta' belong together, got write={write!r}"
    if channels not in (1, K):
        return f"decay_logits must end in 1 or K = {K}, got {channels}"
    if write == "step" and (decay_logits is None or channels != 1 or lower_bound is not None):
        return "write='step' needs decay_logits of one channel per head and the softplus gate, got others"
    return None


@triton.jit
def decode_step_kernel(
    q, k, v, window, q_weight, k_weight, v_weight, beta_logits, decay_logits, A_log, dt_bias,  # inputs
    norm_weight, gate_logits, state, y,
    scale, lower_bound, eps, H,                                                                # numbers
    s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, s_wb, s_wt,                                            # strides
    s_bb, s_bh, s_gb, s_gh, s_zb, s_sb, s_sh,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    TAPS: tl.constexpr, ACTIVATION: tl.constexpr, UNIT_KEYS: tl.constexpr,
    DECAY: tl.constexpr, BOUNDED: tl.constexpr, WRITE: tl.constexpr, ERASE: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """One program: one q/k head of one sequence and its GROUP value heads.

    Value heads that share a key share its convolution window, which is replaced in place: only one program may own it.
    """
    scale, eps, lower_bound = tl.cast(scale, tl.float32), tl.cast(eps, tl.float32), tl.cast(lower_bound, tl.float32)
    i_p = tl.program_id(0).to(tl.int64)
    i_b, i_h = i_p // H, i_p % H
    HV = H * GROUP
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_s = m_k[:, None] & m_v[None, :]
    o_s = o_k[:, None] * V + o_v[None, :]
    p_w = window + i_b * s_wb
    for i_g in range(GROUP):
        i_hv = i_h * GROUP + i_g
        # first, because everything below is short beside this read
        p_s = state + i_b * s_sb + i_hv * s_sh + o_s
        b_s = tl.load(p_s, mask=m_s, other=0.0)
        c_q, c_k, c_v = i_h * K + o_k, (H + i_h) * K + o_k, 2 * H * K + i_hv * V + o_v
        b_q, q0, q1, q2 = convolve(
            q + i_b * s_qb + i_h * s_qh + o_k, p_w + c_q, s_wt, q_weight + c_q * TAPS, m_k, TAPS, ACTIVATION
        )
        b_k, k0, k1, k2 = convolve(
            k + i_b * s_kb + i_h * s_kh + o_k, p_w + c_k, s_wt, k_weight + c_q * TAPS, m_k, TAPS, ACTIVATION
        )
        b_e, v0, v1, v2 = convolve(
            v + i_b * s_vb + i_hv * s_vh + o_v,
            p_w + c_v,
            s_wt,
            v_weight + (i_hv * V + o_v) * TAPS,
            m_v,
            TAPS,
            ACTIVATION,
        )
        if UNIT_KEYS:
            b_qq, b_kk, b_qk = tl.reduce((b_q * b_q, b_k * b_k, b_q * b_k), 0, add_triples)
            b_rq, b_rk = tl.rsqrt(b_qq + 1e-6), tl.rsqrt(b_kk + 1e-6)
            b_q *= b_rq
            b_k *= b_rk
            b_qk *= b_rq * b_rk
        else:
            b_qk = tl.sum(b_q * b_k, 0)

        b_beta = 1.0
        if WRITE == 1:
            b_beta = tl.sigmoid(tl.load(beta_logits + i_b * s_bb + i_hv * s_bh).to(tl.float32))
        if DECAY == 2:
            b_x = tl.load(decay_logits + i_b * s_gb + i_hv * s_gh + o_k, mask=m_k, other=0.0).to(tl.float32)
            b_x += tl.load(dt_bias + i_hv * K + o_k, mask=m_k, other=0.0).to(tl.float32)
        elif DECAY == 1:
            b_x = tl.load(decay_logits + i_b * s_gb + i_hv * s_gh).to(tl.float32)
            b_x += tl.load(dt_bias + i_hv).to(tl.float32)
        if DECAY > 0:
            b_rate = tl.exp(tl.load(A_log + i_hv).to(tl.float32))
            if BOUNDED:
                b_a = tl.exp(lower_bound * tl.sigmoid(b_rate * b_x))
            else:
                b_step = softplus(b_x)
                b_a = tl.exp(-b_rate * b_step)
                if WRITE == 2:
                    b_beta = b_step
            if DECAY == 2:
                b_s *= b_a[:, None]
            else:
                b_s *= b_a

        if ERASE:
            b_p, b_r = tl.reduce((b_s * b_q[:, None], b_s * b_k[:, None]), 0, add_pairs)
            b_e -= b_r
        else:
            b_p = tl.sum(b_s * b_q[:, None], 0)
        if WRITE > 0:
            b_e *= b_beta
        b_s += b_k[:, None] * b_e[None, :]
        b_y = scale * (b_p + b_e * b_qk)
        if HAS_NORM:
            b_y *= tl.rsqrt(tl.sum(b_y * b_y, 0) / V + eps)
            b_y *= tl.load(norm_weight + o_v, mask=m_v, other=0.0).to(tl.float32)
        if HAS_GATE:
            p_z = gate_logits + i_b * s_zb + i_hv * V + o_v
            b_y *= tl.sigmoid(tl.load(p_z, mask=m_v, other=0.0).to(tl.float32))
        tl.store(y + (i_b * HV + i_hv) * V + o_v, b_y.to(y.dtype.element_ty), mask=m_v)

        # several warps hold the same small vectors: all must have read before one overwrites
        tl.debug_barrier()
        tl.store(p_s, b_s, mask=m_s)
        shift_window(p_w + c_v, s_wt, v0, v1, v2, m_v, TAPS)
        # the other value heads of the group still read the old window of their key
        m_last = m_k & (i_g == GROUP - 1)
        shift_window(p_w + c_q, s_wt, q0, q1, q2, m_last, TAPS)
        shift_window(p_w + c_k, s_wt, k0, k1, k2, m_last, TAPS)


@triton.jit
def convolve(p_x, p_w, s_wt, p_weight, mask, TAPS: tl.constexpr, ACTIVATION: tl.constexpr):
    """act(sum_j weight[TAPS - 1 - j] x_{t-j}), and the newest three inputs, newest first."""
    x0 = tl.load(p_x, mask=mask, other=0.0).to(tl.float32)
    x1 = x0
    x2 = x0
    y = x0
    if TAPS > 1:
        y = x0 * tl.load(p_weight + (TAPS - 1), mask=mask, other=0.0).to(tl.float32)
        x1 = tl.load(p_w + (TAPS - 2) * s_wt, mask=mask, other=0.0).to(tl.float32)
        y += x1 * tl.load(p_weight + (TAPS - 2), mask=mask, other=0.0).to(tl.float32)
    if TAPS > 2:
        x2 = tl.load(p_w + (TAPS - 3) * s_wt, mask=mask, other=0.0).to(tl.float32)
        y += x2 * tl.load(p_weight + (TAPS - 3), mask=mask, other=0.0).to(tl.float32)
    if TAPS > 3:
        x3 = tl.load(p_w + (TAPS - 4) * s_wt, mask=mask, other=0.0).to(tl.float32)
        y += x3 * tl.load(p_weight + (TAPS - 4), mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == 1:
        y = y * tl.sigmoid(y)
    elif ACTIVATION == 2:
        y = tl.maximum(y, 0.0)
    return y, x0, x1, x2


@triton.jit
def shift_window(p_w, s_wt, x0, x1, x2, mask, TAPS: tl.constexpr):
    """The window then ends with x0."""
    if TAPS > 1:
        tl.store(p_w + (TAPS - 2) * s_wt, x0.to(p_w.dtype.element_ty), mask=mask)
    if TAPS > 2:
        tl.store(p_w + (TAPS - 3) * s_wt, x1.to(p_w.dtype.element_ty), mask=mask)
    if TAPS > 3:
        tl.store(p_w + (TAPS - 4) * s_wt, x2.to(p_w.dtype.element_ty), mask=mask)


@triton.jit
def add_pairs(a0, a1, b0, b1):
    """For sums that share their passes through shared memory."""
    return a0 + b0, a1 + b1


@triton.jit
def add_triples(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def softplus(x):
    """log(1 + exp(x)) to full relative accuracy, also where it is tiny: log(1 + e) = 2 atanh(e / (2 + e)), e <= 1."""
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    z = s * s
    series = 1.0 + z * (1 / 3 + z * (1 / 5 + z * (1 / 7 + z * (1 / 9 + z * (1 / 11 + z * (1 / 13 + z * (1 / 15)))))))
    return tl.maximum(x, 0.0) + 2.0 * s * series


def _step_config(K, V):
    """(BK, BV, num_warps) of the layer step. Measured on an H200; nothing is timed at run time."""
    BK, BV = triton.next_power_of_2(K), triton.next_power_of_2(V)
    return BK, BV, max(1, BK // 32)


def _unfit_inplace(state):
    if state is None:
        return "inplace needs a state to replace, got None"
    if state.dtype != torch.float32 or state.stride(-1) != 1 or state.stride(-2) != state.shape[-1]:
        return (
            f"a state replaced in place must be fp32 with contiguous [K, V], got {state.dtype} with strides "
            f"{state.stride()}"
        )
    return None


def _decay_kind(x, K):
    """0 without decay, 1 for one rate per head, 2 for one per channel; x ends in 1 or K."""
    return 0 if x is None else 2 if x.shape[-1] == K and K > 1 else 1


def _step_strides(x):
    """Strides of the batch and of the heads of [B, 1, H, ...]."""
    batch, _, head = strides(x, 3)
    return batch, head
