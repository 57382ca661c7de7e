"""What the chunk kernels of both passes share: where a chunk lies, what they load, exponents and masks.

The mathematics and the letters are at the head of triton_chunk_forward.py.
"""

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the fast path needs triton: pip install triton") from error

from .triton_launch import INTERPRETED

# exp of anything below is 0 in fp32, so that clamping a step there changes no bit, and sums stay in fp16's range
SMALLEST_LOG_DECAY = tl.constexpr(-110.0)
# arguments whose values compile nothing anew: without this, 1 and multiples of 16 would be kernels of their own
LENGTHS = ["T", "NT", "N", "NUM_SEGMENTS"]
LOG2_E = tl.constexpr(1.4426950408889634)
# Triton's interpreter multiplies the bit patterns of bf16 operands
BF16_OPERAND = tl.constexpr(tl.float32 if INTERPRETED else tl.bfloat16)
# instructions of NVIDIA GPUs that Triton does not emit by itself; the interpreter has none of them
HAS_PTX = tl.constexpr(not INTERPRETED and torch.version.hip is None)


@triton.jit
def locate_chunk(i_s, cu_seqlens, T, NT, N, BT: tl.constexpr, IS_VARLEN: tl.constexpr):
    """Slot -> (first token of the sequence, its length, chunk in the sequence). Sequence n starts at slot
    cu_seqlens[n] // BT + n, an upper bound that needs no count of chunks; slots past a sequence have nothing to do."""
    if IS_VARLEN:
        i_n = i_s * 0
        i_end = i_n + N
        while i_end - i_n > 1:
            i_mid = (i_n + i_end) // 2
            is_right = tl.load(cu_seqlens + i_mid).to(tl.int32) // BT + i_mid <= i_s
            i_n = tl.where(is_right, i_mid, i_n)
            i_end = tl.where(is_right, i_end, i_mid)
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = (tl.load(cu_seqlens + i_n + 1) - bos).to(tl.int32)
        i_t = i_s - (bos.to(tl.int32) // BT + i_n)
    else:
        i_n = i_s // NT
        bos = i_n.to(tl.int64) * T
        length = T
        i_t = i_s - i_n * NT
    return bos, length, i_t


@triton.jit
def locate_sequence(i_n, cu_seqlens, T, NT, BT: tl.constexpr, IS_VARLEN: tl.constexpr):
    """Sequence -> (its first token, its length, its first slot)."""
    if IS_VARLEN:
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = (tl.load(cu_seqlens + i_n + 1) - bos).to(tl.int32)
        i_s = bos.to(tl.int32) // BT + i_n
    else:
        bos = i_n.to(tl.int64) * T
        length = T
        i_s = i_n * NT
    return bos, length, i_s


@triton.jit
def exact_dot(m, x):
    """m @ x for m of 0 and 1: x is split in three bf16 parts, so that fp32 survives."""
    hi = x.to(BF16_OPERAND)
    rest = x - hi.to(tl.float32)
    mid = rest.to(BF16_OPERAND)
    lo = (rest - mid.to(tl.float32)).to(BF16_OPERAND)
    m = m.to(BF16_OPERAND)
    return tl.dot(m, hi) + (tl.dot(m, mid) + tl.dot(m, lo))


@triton.jit
def load_steps(steps, i_m, BT: tl.constexpr):
    """Matrix i_m of `steps` (0/1, [BT, BT]); computed here it would cost registers and go to shared memory anyway."""
    o_i = tl.arange(0, BT)
    return tl.load(steps + i_m * BT * BT + o_i[:, None] * BT + o_i[None, :])


@triton.jit
def sum_steps(m, b_g, PRECISE: tl.constexpr):
    """Exponents: a matrix of steps times the log-decays [BT, BK]. Rounding those to fp16 moves a factor e^-x by at
    most x e^-x 2^-12 < 1e-4, less than the rounding of the 16-bit operands that it multiplies."""
    return exact_dot(m, b_g) if PRECISE else tl.dot(m, b_g.to(tl.float16))


@triton.jit
def exp2_flushed(x, AGAIN: tl.constexpr = False):
    """2^x, 0 where fp32 has no normal number for it: one instruction instead of four. AGAIN: computed anew where the
    compiler would keep an equal one in registers."""
    if HAS_PTX:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, not AGAIN, pack=1)
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def load_head_gate(log_decay, i_row, o_row, m_t):
    """Log-decays of one head's rows."""
    return tl.maximum(tl.load(log_decay + i_row + o_row, mask=m_t, other=0.0).to(tl.float32), SMALLEST_LOG_DECAY)


@triton.jit
def head_factors(b_g):
    """From one head's log-decays: their sums up to each token, in units of log 2 and in fp64, so that a difference of
    two sums is as good as the sum of what lies between; e^{G_i}, e^{G_C - G_i} and e^{G_C}."""
    b_steps = b_g.to(tl.float64) * LOG2_E
    b_sum = tl.cumsum(b_steps, 0)
    b_all = tl.sum(b_steps, 0)
    b_in = exp2_flushed(b_sum.to(tl.float32))
    return b_sum, b_in, exp2_flushed((b_all - b_sum).to(tl.float32)), exp2_flushed(b_all.to(tl.float32))


@triton.jit
def head_decay_matrix(b_sum, b_product, EXACT: tl.constexpr):
    """exp(sum of the steps between tokens i and j) for one rate per head, in the layout of a product."""
    hi = b_sum.to(tl.float32)
    b_steps = hi[:, None] - hi[None, :]
    if EXACT:
        # the difference of two large sums has no error of its own, but both were rounded
        lo = (b_sum - hi.to(tl.float64)).to(tl.float32)
        b_steps += lo[:, None] - lo[None, :]
    # without the 0 of a product Triton would compute the exponentials in another layout and move them
    return exp2_flushed(-tl.abs(b_product * 0.0 + b_steps))


@triton.jit
def fast_sigmoid(x, rate):
    """sigmoid(rate x)."""
    if HAS_PTX:
        y = 1.0 + exp2_flushed(x * (rate * -LOG2_E))
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], tl.float32, is_pure=True, pack=1)
    else:
        y = tl.sigmoid(rate * x)
    return y


@triton.jit
def load_beta(beta, i_row, o_row, m_t, HAS_BETA: tl.constexpr, RAW: tl.constexpr):
    """Write strengths of the rows; RAW: from their logits. Rows past the end write nothing."""
    if HAS_BETA:
        b_beta = tl.load(beta + i_row + o_row, mask=m_t, other=0.0).to(tl.float32)
        if RAW:
            b_beta = tl.where(m_t, fast_sigmoid(b_beta, 1.0), 0.0)
    else:
        b_beta = m_t.to(tl.float32)
    return b_beta


@triton.jit
def keep_level(x, b_level, i_l, rest, PRECISE: tl.constexpr):
    """x where two tokens meet at level i_l, else rest, which must be 0 where they do; 16-bit numbers two at a time."""
    if HAS_PTX and not PRECISE:
        y = tl.inline_asm_elementwise(
            """{
            .reg .b32 m;
            set.eq.u32.f16x2 m, $2, $3;
            lop3.b32 $0, $1, m, $4, 0xEA;
            }""",
            "=r,r,r,r,r", [x, b_level, tl.full(b_level.shape, i_l, tl.float16), rest],
            dtype=x.dtype, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        y = tl.where(b_level == i_l, x, rest)
    return y


@triton.jit
def keep_levels_below(x, b_level, count, rest, PRECISE: tl.constexpr):
    """x where two tokens meet at one of the first levels, else rest, which must be 0 where they do."""
    if HAS_PTX and not PRECISE:
        y = tl.inline_asm_elementwise(
            """{
            .reg .b32 m, n;
            set.lt.u32.f16x2 m, $2, $3;
            set.ge.u32.f16x2 n, $2, $5;
            and.b32 m, m, n;
            lop3.b32 $0, $1, m, $4, 0xEA;
            }""",
            "=r,r,r,r,r,r",
            [x, b_level, tl.full(b_level.shape, count, tl.float16), rest, tl.zeros_like(b_level)],
            dtype=x.dtype, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        y = tl.where((b_level < count) & (b_level >= 0), x, rest)
    return y


@triton.jit
def keep_bits(x, bits, PRECISE: tl.constexpr):
    """x where all bits are set, 0 where none is."""
    if HAS_PTX and not PRECISE:
        y = tl.inline_asm_elementwise(
            "and.b32 $0, $1, $2;", "=r,r,r", [x, bits], dtype=x.dtype, is_pure=True, pack=2
        )  # fmt: skip
    else:
        y = tl.where(bits != 0, x, 0.0)
    return y


@triton.jit
def fast_softplus(x, PRECISE: tl.constexpr):
    """softplus(x) / log 2."""
    x *= LOG2_E
    if HAS_PTX and not PRECISE:
        y = exp2_flushed(tl.minimum(x, 30.0)) + 1.0
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [y], tl.float32, is_pure=True, pack=1)
    else:
        y = tl.log2(1.0 + tl.exp2(tl.minimum(x, 30.0)))
    return tl.where(x > 30.0, x, y)


@triton.jit
def activate_gate(b_x, rate, lower_bound, m, unit: tl.constexpr, GATE: tl.constexpr, PRECISE: tl.constexpr):
    """Log-decays times `unit`: GATE 0 given, or from logits, 1 -rate softplus(x), 2 lower_bound sigmoid(rate x)."""
    if GATE == 1:
        b_x = fast_softplus(b_x, PRECISE) * (rate * (-unit / LOG2_E))
    elif GATE == 2:
        b_x = fast_sigmoid(b_x, rate) * (lower_bound * unit)
    else:
        b_x *= unit
    if GATE:
        b_x = tl.where(m, b_x, 0.0)
    return tl.maximum(b_x, SMALLEST_LOG_DECAY * unit)


@triton.jit
def load_key_block(
    keys, i_row, i_slot, i_t, length, heads, i_h,
    K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """[BT, KP] of one of the three prepared blocks of a slot (DECAY = 2), or of the rows of the input itself."""
    o_i = tl.arange(0, BT)[:, None]
    o_k = tl.arange(0, KP)[None, :]
    # 64-bit offsets once per block, 32-bit inside it
    if DECAY == 2:
        b_keys = tl.load(keys + i_slot * (3 * BT * KP) + (o_i * KP + o_k))
    else:
        mask = (i_t * BT + o_i < length) & (o_k < K)
        b_keys = tl.load(keys + (i_row * heads + i_h) * K + (o_i * (heads * K) + o_k), mask=mask, other=0.0)
    return b_keys


@triton.jit
def load_values(
    x, bos, i_t, length, i_hv, o_v,
    HV: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """[BT, BV] (or [BV, BT]) of one chunk of a tensor [tokens, HV, V]; 0 outside."""
    o_i = tl.arange(0, BT)
    m_t = i_t * BT + o_i < length
    x += ((bos + i_t * BT) * HV + i_hv) * V
    if TURNED:
        b_x = tl.load(x + o_i[None, :] * (HV * V) + o_v[:, None], mask=(o_v < V)[:, None] & m_t[None, :], other=0.0)
    else:
        b_x = tl.load(x + o_i[:, None] * (HV * V) + o_v[None, :], mask=(o_v < V)[None, :] & m_t[:, None], other=0.0)
    return b_x


@triton.jit
def load_factors(
    strength, total, row_q, row_k, row_out, first, i_t, i_hv,
    HV: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """The write strengths of a chunk, e^{G_C} ([KP], or one number for all) and the factors of its rows of q and k."""
    o_i = tl.arange(0, BT)
    i_slot = (first + i_t).to(tl.int64) * HV + i_hv
    b_beta = tl.load(strength + i_slot * BT + o_i)
    b_total = 1.0
    b_rq = 1.0
    b_rk = 1.0
    b_ro = 1.0
    if DECAY == 2:
        b_total = tl.load(total + i_slot * KP + tl.arange(0, KP))
    elif DECAY == 1:
        b_total = tl.load(total + i_slot)
    if DECAY != 2:
        b_rq = tl.load(row_q + i_slot * BT + o_i)
        b_rk = tl.load(row_k + i_slot * BT + o_i)
        b_ro = tl.load(row_out + i_slot * BT + o_i)
    return b_beta, b_total, b_rq, b_rk, b_ro
