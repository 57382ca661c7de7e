"""Triton kernels of the chunked backward pass with decay per channel, every chunk alone. The mathematics and the
letters are at the head of triton_chunk_forward.py and triton_chunk_backward.py.

dP and dN lie beside each other, [C, 2C], below the diagonal what a reader takes, above it the same number for the
writer. At a level rows of later halves read and rows of earlier ones collect. With E = exp(D_b), and of dP and dN what
lies where two tokens meet at this level:

    dq += E (dP (E k))                 later rows of dP
    dk += E (dP (E q) + dN (E k))      earlier rows of dP, all rows of dN

Where the gate has a bound, the levels whose 2^n rows decay by no more than 2^-128 are done at once: readers with the
decay E from the first of these rows, times the root of what the bound allows, writers with 1 / E. Neither leaves
2^-64 ... 2^64, and a later token still touches no earlier one.

dG collects z E times those products with the operands as they were rounded for them: what a pair of tokens adds for
the steps up to the later one is then, bit for bit, what it takes away up to the earlier one.
"""

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the fast path needs triton: pip install triton") from error

from .triton_chunk_common import (
    BF16_OPERAND,
    HAS_PTX,
    LENGTHS,
    LOG2_E,
    SMALLEST_LOG_DECAY,
    activate_gate,
    exact_dot,
    exp2_flushed,
    fast_sigmoid,
    keep_bits,
    load_beta,
    locate_chunk,
    sum_steps,
)

SIZES = [*LENGTHS, "num_rows", "NUM_PARTS"]
# key channels of one program; products of fewer than 64 columns go wrong, and with more the registers do not suffice
CHANNELS = 64


@triton.jit
def scaled(x, e, DT: tl.constexpr):
    """x e, rounded once; 16-bit x stays packed in registers, which Triton would unpack outside the loop."""
    if HAS_PTX and x.dtype == tl.bfloat16 and x.dtype == DT:
        y = tl.inline_asm_elementwise(
            """{
            .reg .f32 a, b;
            shl.b32 a, $1, 16;
            and.b32 b, $1, 0xffff0000;
            mul.f32 a, a, $2;
            mul.f32 b, b, $3;
            cvt.rn.bf16x2.f32 $0, b, a;
            }""",
            "=r,r,f,f", [x, e], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        y = (x.to(tl.float32) * e).to(DT)
    return y


@triton.jit
def add_product(total, x, y):
    """total + x y in fp32; 16-bit x stays packed in registers."""
    if HAS_PTX and x.dtype == tl.bfloat16:
        total = tl.inline_asm_elementwise(
            """{
            .reg .f32 a, b;
            shl.b32 a, $2, 16;
            and.b32 b, $2, 0xffff0000;
            fma.rn.f32 $0, a, $3, $5;
            fma.rn.f32 $1, b, $4, $6;
            }""",
            "=f,=f,r,f,f,f,f", [x, y, total], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        total += x.to(tl.float32) * y
    return total


@triton.jit
def reciprocal(x):
    """1 / x, computed anew where the compiler would keep an equal one in registers."""
    if HAS_PTX:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=False, pack=1)
    else:
        y = 1.0 / x
    return y


@triton.jit
def load_square(
    x, m_vector, ROW: tl.constexpr, BT: tl.constexpr, OTHER: tl.constexpr = 0, AGAIN: tl.constexpr = False
):  # fmt: skip
    """A matrix [BT, BT] with rows of ROW numbers. m_vector: the vectors of 8 columns that hold what counts; no other
    bytes are loaded. AGAIN: by a policy of its own, or the compiler would keep an equal one in registers."""
    o_i = tl.arange(0, BT)
    p_x = x + o_i[:, None] * ROW + o_i[None, :]
    return tl.load(p_x, mask=m_vector, other=OTHER, eviction_policy="evict_first" if AGAIN else "")


@triton.jit
def load_level_steps(steps, i_l, BT: tl.constexpr):
    """The steps between each token and the middle of its 2^(i_l + 1)."""
    o_i = tl.arange(0, BT)
    # below level 3 the vectors that hold the steps hold others, too
    level = tl.maximum(i_l + 1, 3)
    m_step = tl.max_constancy((o_i >> level)[:, None] == (o_i >> level)[None, :], [1, 8])
    return load_square(steps + i_l * (BT * BT), m_step, BT, BT)


@triton.jit
def pair_vectors(i_l, m_row, BT: tl.constexpr):
    """The vectors of 8 columns in rows m_row where two tokens meet at level i_l, and below level 3 others, too."""
    level = tl.maximum(i_l, 3)
    o_i = tl.arange(0, BT) >> level
    return tl.max_constancy((o_i[:, None] == (o_i ^ (tl.minimum(i_l, 3) // 3))[None, :]) & m_row[:, None], [1, 8])


@triton.jit
def load_level_bits(pairs, i_l, m_pair, BT: tl.constexpr):
    """The pairs that meet at level i_l; from level 3 on `m_pair` tells them already."""
    return load_square(pairs + i_l * (BT * BT), m_pair & (i_l < 3), BT, BT, OTHER=-1)


@triton.jit
def together(x, y):
    """x and y, of 16 bits: both are loaded before either goes to shared memory, or the compiler waits for each."""
    if HAS_PTX and x.dtype.primitive_bitwidth == 16 and y.dtype.primitive_bitwidth == 16:
        x, y = tl.inline_asm_elementwise(
            "mov.b32 $0, $2; mov.b32 $1, $3;", "=r,=r,r,r", [x, y], dtype=(x.dtype, y.dtype), is_pure=False, pack=2
        )  # fmt: skip
    return x, y


@triton.jit
def sums_from(m, b_g, PRECISE: tl.constexpr):
    """Sums over the tokens from each one on, m of 0 and 1: in two bf16 parts, in three for fp32."""
    if PRECISE:
        b_sum = exact_dot(m, b_g)
    else:
        hi = b_g.to(BF16_OPERAND)
        lo = (b_g - hi.to(tl.float32)).to(BF16_OPERAND)
        m = m.to(BF16_OPERAND)
        b_sum = tl.dot(m, lo, tl.dot(m, hi))
    return b_sum


@triton.jit(do_not_specialize=SIZES)
def score_gradient_kernel(
    v, o, do, dv, beta, d_beta_parts, errors, cu_seqlens,  # inputs
    d_pairs, d_beta, along_q, along_k, own,                # outputs
    scale, T, NT, N, num_rows, NUM_PARTS,
    HV: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
    ERASE: tl.constexpr, HAS_BETA: tl.constexpr, RAW_BETA: tl.constexpr, QK_NORM: tl.constexpr,
    IS_VARLEN: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """scale dP and dN of one chunk beside each other, mirrored at their diagonals; the diagonal of dP, and with
    QK_NORM q . dq and k . dk of the rows."""
    i_s = tl.program_id(0) // HV
    i_hv = tl.program_id(0) % HV
    bos, length, i_t = locate_chunk(i_s, cu_seqlens, T, NT, N, BT, IS_VARLEN)
    if i_t * BT >= length:
        return
    o_i = tl.arange(0, BT)
    m_t = i_t * BT + o_i < length
    i_row = (bos + i_t * BT) * HV + i_hv
    slot = i_s.to(tl.int64) * HV + i_hv
    b_dp = tl.zeros([BT, BT], tl.float32)
    b_dn = tl.zeros([BT, BT], tl.float32)
    # the transposed matrices as products of their own: Triton 3.6 transposes results of products wrongly on Hopper
    b_dpt = tl.zeros([BT, BT], tl.float32)
    b_dnt = tl.zeros([BT, BT], tl.float32)
    b_cq = tl.zeros([BT], tl.float32)
    b_ck = tl.zeros([BT], tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        o_block = o_i[:, None] * (HV * V) + o_v[None, :]
        m_tv = m_t[:, None] & (o_v < V)[None, :]
        b_do = tl.load(do + i_row * V + o_block, mask=m_tv, other=0.0)
        b_e = tl.load(errors + i_row * V + o_block, mask=m_tv, other=0.0).to(DT)
        b_dp = tl.dot(b_do.to(DT), tl.trans(b_e), b_dp, input_precision="tf32x3")
        b_dpt = tl.dot(b_e, tl.trans(b_do.to(DT)), b_dpt, input_precision="tf32x3")
        if ERASE:
            b_dv = tl.load(dv + i_row * V + o_block, mask=m_tv, other=0.0)
            b_dn = tl.dot(b_dv.to(DT), tl.trans(b_e), b_dn, input_precision="tf32x3")
            b_dnt = tl.dot(b_e, tl.trans(b_dv.to(DT)), b_dnt, input_precision="tf32x3")
            if QK_NORM:
                b_v = tl.load(v + i_row * V + o_block, mask=m_tv, other=0.0).to(tl.float32)
                b_o = tl.load(o + i_row * V + o_block, mask=m_tv, other=0.0).to(tl.float32)
                b_ck -= tl.sum(b_v * b_dv.to(tl.float32), 1)
                b_cq += tl.sum(b_o * b_do.to(tl.float32), 1)
    b_beta = load_beta(beta, i_row, o_i * HV, m_t, HAS_BETA, RAW_BETA)
    later = o_i[:, None] > o_i[None, :]
    p_pair = d_pairs + slot * (2 * BT * BT) + o_i[:, None] * (2 * BT) + o_i[None, :]
    b_dp *= b_beta[None, :] * scale
    tl.store(own + slot * BT + o_i, tl.sum(tl.where(o_i[:, None] == o_i[None, :], b_dp, 0.0), 1))
    b_dp = tl.where(later, b_dp, b_dpt * (b_beta[:, None] * scale))
    tl.store(p_pair, b_dp.to(d_pairs.dtype.element_ty))
    b_dn = tl.where(later, b_dn * -b_beta[None, :], b_dnt * -b_beta[:, None])
    tl.store(p_pair + BT, b_dn.to(d_pairs.dtype.element_ty))
    b_db = tl.zeros([BT], tl.float32)
    p_part = d_beta_parts + i_row
    for _ in range(NUM_PARTS):
        b_db += tl.load(p_part + o_i * HV, mask=m_t, other=0.0)
        p_part += num_rows * HV
    if QK_NORM:
        tl.store(along_q + slot * BT + o_i, b_cq)
        tl.store(along_k + slot * BT + o_i, b_ck + 2.0 * b_beta * b_db)
    if HAS_BETA:
        if RAW_BETA:
            b_db *= b_beta * (1.0 - b_beta)
        tl.store(d_beta + i_row + o_i * HV, b_db.to(d_beta.dtype.element_ty), mask=m_t)


@triton.jit(do_not_specialize=SIZES)
def channel_gradient_kernel(
    q, k, log_decay, beta, errors, do, dv, A_log, dt_bias, cu_seqlens, steps, tails, pairs,  # inputs
    norm_q, norm_k, total, chunk_states, d_states, d_pairs, along_q, along_k, own,           # saved, and from before
    dq, dk, d_gate, d_rate, d_bias,                                                          # outputs
    scale, lower_bound, T, NT, N,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, NUM_LEVELS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
    ERASE: tl.constexpr, HAS_BETA: tl.constexpr, RAW_BETA: tl.constexpr,
    QK_NORM: tl.constexpr, GATE: tl.constexpr, NEAR: tl.constexpr,
    PRECISE: tl.constexpr, IS_VARLEN: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """dq, dk (of this value head), and the gradient of the log-decays or of their logits, for BK key channels of one
    chunk. d_rate and d_bias: this chunk's share of the gradients of A_log and dt_bias. NEAR: how many levels the bound
    of the gate allows to do at once, 0 for none.

    What costs time here are loads that wait for results, and the bytes between L2 and a processor: two programs of 4
    warps share a processor, no matrix is loaded where it is 0, and what can be is loaded first.
    """
    # the blocks of channels of one chunk beside each other, so that the second finds in L2 what the first has read
    i_k = tl.program_id(0) % (KP // BK)
    i_s = tl.program_id(0) // (KP // BK) // HV
    i_hv = tl.program_id(0) // (KP // BK) % HV
    bos, length, i_t = locate_chunk(i_s, cu_seqlens, T, NT, N, BT, IS_VARLEN)
    if i_t * BT >= length:
        return
    o_i = tl.arange(0, BT)
    o_k = i_k * BK + tl.arange(0, BK)
    m_t = i_t * BT + o_i < length
    m_k = o_k < K
    m_tk = m_t[:, None] & m_k[None, :]
    first_row = bos + i_t * BT
    i_row = first_row * HV + i_hv
    slot = i_s.to(tl.int64) * HV + i_hv
    key_row = (first_row * H + i_hv // (HV // H)) * K
    chunk_states += slot * V * KP
    d_states += slot * V * KP
    d_pairs += slot * (2 * BT * BT)
    # 64-bit, because the compiler can fold the distances between those into the loads
    o_t = o_i.to(tl.int64)[:, None]
    o_gate = i_row * K + o_t * (HV * K) + o_k[None, :]
    o_key = key_row + o_t * (H * K) + o_k[None, :]
    o_norm = slot * BT + o_i

    # all loads, then what is computed from them
    rate = 1.0
    b_y = tl.load(log_decay + o_gate, mask=m_tk, other=0.0)
    b_q = tl.load(q + o_key, mask=m_tk, other=0.0)
    b_k = tl.load(k + o_key, mask=m_tk, other=0.0)
    if GATE:
        rate = tl.load(A_log + i_hv).to(tl.float32)
        dt_bias += i_hv * K
        b_bias = tl.load(dt_bias + o_k, mask=m_k, other=0.0).to(tl.float32)
    if QK_NORM:
        b_rq = tl.load(norm_q + o_norm)
        b_rk = tl.load(norm_k + o_norm)
    b_beta = load_beta(beta, i_row, o_i * HV, m_t, HAS_BETA, RAW_BETA)
    b_y = b_y.to(tl.float32)
    if GATE:
        rate = tl.exp(rate)
        b_y += b_bias[None, :]
    b_g = activate_gate(b_y, rate, lower_bound, m_tk, LOG2_E, GATE, PRECISE)
    if not PRECISE:
        b_g = b_g.to(tl.float16)
    if QK_NORM:
        b_q = scaled(b_q, b_rq[:, None] + tl.zeros([BT, BK], tl.float32), DT)
        b_k = scaled(b_k, b_rk[:, None] + tl.zeros([BT, BK], tl.float32), DT)

    # the queries, then the keys, so that the registers need not hold both
    b_dq = tl.zeros([BT, BK], tl.float32)
    for i_v in tl.range(0, V, BV, num_stages=STAGES):
        o_v = i_v + tl.arange(0, BV)
        o_block = i_row * V + o_t * (HV * V) + o_v[None, :]
        b_r = tl.load(do + o_block, mask=m_t[:, None] & (o_v < V)[None, :], other=0.0)
        p_state = o_v.to(tl.int64)[:, None] * KP + o_k[None, :]
        b_s = tl.load(chunk_states + p_state, mask=(o_v < V)[:, None], other=0.0)
        b_dq = tl.dot(b_r.to(DT), b_s.to(DT), b_dq, input_precision="tf32x3")
    # vectors of 8 columns are all inside a mask or all outside
    m_step = tl.max_constancy((o_i >> 3)[None, :] <= (o_i >> 3)[:, None], [1, 8])
    b_up = load_square(steps + NUM_LEVELS * BT * BT, m_step, BT, BT)
    b_dq *= exp2_flushed(sum_steps(b_up, b_g, PRECISE), AGAIN=True) * scale
    b_dg = add_product(tl.zeros_like(b_dq), b_q, b_dq)
    if NEAR:
        m_near = tl.max_constancy((o_i >> NEAR)[:, None] == (o_i >> NEAR)[None, :], [1, 8])
        p_bits = pairs + (NUM_LEVELS + 2 * NEAR - 6) * (BT * BT)
        b_near = load_square(steps + (NUM_LEVELS + NEAR - 1) * BT * BT, m_near, BT, BT)
        near_shift = lower_bound * ((2**NEAR - 1) * 0.5 * LOG2_E)
        b_p = keep_bits(load_square(d_pairs, m_near, 2 * BT, BT), load_square(p_bits, m_near, BT, BT), PRECISE)
        b_near, b_p = together(b_near, b_p)
        b_e = exp2_flushed(sum_steps(b_near, b_g, PRECISE) - near_shift)
        b_x = tl.dot(b_p.to(DT), scaled(b_k, reciprocal(b_e), DT), input_precision="tf32x3")
        b_dq += b_e * b_x
        b_dg = add_product(b_dg, scaled(b_q, b_e, DT), b_x)
    for i_l in range(NEAR, NUM_LEVELS):
        later = ((o_i >> i_l) & 1) == 1
        m_pair = pair_vectors(i_l, later, BT)
        b_p = load_square(d_pairs, m_pair, 2 * BT, BT)
        b_m = load_level_steps(steps, i_l, BT)
        if NEAR == 0:
            b_p = keep_bits(b_p, load_level_bits(pairs, i_l, m_pair, BT), PRECISE)
        b_m, b_p = together(b_m, b_p)
        b_e = exp2_flushed(sum_steps(b_m, b_g, PRECISE), AGAIN=True)
        b_w = scaled(b_k, b_e, DT)
        b_x = tl.dot(b_p.to(DT), b_w, input_precision="tf32x3")
        b_dq += b_e * b_x
        b_dg = add_product(b_dg, scaled(b_q, b_e, DT), b_x)
    # a pair of a token with itself: the query reads its own key, which no step decays
    b_dq = add_product(b_dq, b_k, tl.load(own + o_norm)[:, None] + tl.zeros_like(b_dq))
    if QK_NORM:
        b_dq = add_product(b_dq, b_q, tl.zeros_like(b_dq) - tl.load(along_q + o_norm)[:, None])
        # a load with a policy of its own, or the compiler would keep the first one in registers all the time
        b_dq *= tl.load(norm_q + o_norm, eviction_policy="evict_first")[:, None]
    tl.store(dq + o_gate, b_dq.to(dq.dtype.element_ty), mask=m_tk)

    b_dk = tl.zeros([BT, BK], tl.float32)
    b_kn = tl.zeros([BT, BK], tl.float32)
    b_through = tl.zeros([BV // 4, BK], tl.float32)
    for i_v in tl.range(0, V, BV, num_stages=STAGES):
        o_v = i_v + tl.arange(0, BV)
        m_v = (o_v < V)[:, None]
        m_tv = m_t[:, None] & (o_v < V)[None, :]
        o_block = i_row * V + o_t * (HV * V) + o_v[None, :]
        p_state = o_v.to(tl.int64)[:, None] * KP + o_k[None, :]
        b_s = tl.load(chunk_states + p_state, mask=m_v, other=0.0)
        b_ds = tl.load(d_states + p_state, mask=m_v, other=0.0)
        b_through += tl.sum(tl.reshape(b_s.to(tl.float32) * b_ds.to(tl.float32), [4, BV // 4, BK]), 0)
        if ERASE:
            b_r = tl.load(dv + o_block, mask=m_tv, other=0.0)
            b_dk = tl.dot(b_r.to(DT), b_s.to(DT), b_dk, input_precision="tf32x3")
        b_u = tl.load(errors + o_block, mask=m_tv, other=0.0)
        b_kn = tl.dot(b_u.to(DT), b_ds.to(DT), b_kn, input_precision="tf32x3")
    m_step = tl.max_constancy((o_i >> 3)[None, :] >= (o_i >> 3)[:, None], [1, 8])
    b_down = load_square(steps + (NUM_LEVELS + 1) * BT * BT, m_step, BT, BT)
    if ERASE:
        m_step = tl.max_constancy((o_i >> 3)[None, :] <= (o_i >> 3)[:, None], [1, 8])
        b_up = load_square(steps + NUM_LEVELS * BT * BT, m_step, BT, BT)
        b_up, b_down = together(b_up, b_down)
        b_dk *= -exp2_flushed(sum_steps(b_up, b_g, PRECISE), AGAIN=True)
        b_dg = add_product(b_dg, b_k, b_dk)
    b_kn *= exp2_flushed(sum_steps(b_down, b_g, PRECISE)) * b_beta[:, None]
    b_dk += b_kn
    b_kn = add_product(tl.zeros_like(b_kn), b_k, b_kn)
    # into the last row, which all steps collect
    b_left = tl.sum(b_through, 0) * tl.load(total + slot * KP + o_k) + tl.sum(b_kn, 0)
    b_dg += tl.where((o_i == BT - 1)[:, None], b_left[None, :], 0.0) - b_kn
    if NEAR:
        b_near = load_square(steps + (NUM_LEVELS + NEAR - 1) * BT * BT, m_near, BT, BT, AGAIN=True)
        b_p = load_square(d_pairs, m_near, 2 * BT, BT, AGAIN=True)
        b_bits = load_square(p_bits + BT * BT, m_near, BT, BT)
        if ERASE:
            b_n = load_square(d_pairs + BT, m_near, 2 * BT, BT)
            b_read = keep_bits(b_n, load_square(p_bits, m_near, BT, BT, AGAIN=True), PRECISE)
            b_near, b_n = together(b_near, keep_bits(b_n, b_bits, PRECISE))
            b_near, b_read = together(b_near, b_read)
        b_near, b_p = together(b_near, keep_bits(b_p, b_bits, PRECISE))
        b_e = exp2_flushed(sum_steps(b_near, b_g, PRECISE) - near_shift)
        if ERASE:
            b_x = tl.dot(b_read.to(DT), scaled(b_k, reciprocal(b_e), DT), input_precision="tf32x3")
            b_dk += b_e * b_x
            b_dg = add_product(b_dg, scaled(b_k, b_e, DT), b_x)
        b_x = tl.dot(b_p.to(DT), scaled(b_q, b_e, DT), input_precision="tf32x3")
        if ERASE:
            b_x = tl.dot(b_n.to(DT), scaled(b_k, b_e, DT), b_x, input_precision="tf32x3")
        b_e = reciprocal(b_e)
        b_dk += b_e * b_x
        b_dg = add_product(b_dg, scaled(b_k, b_e, DT), -b_x)
    for i_l in range(NEAR, NUM_LEVELS):
        later = ((o_i >> i_l) & 1) == 1
        m_pair = pair_vectors(i_l, o_i >= 0, BT)
        b_p = load_square(d_pairs, m_pair & (later == 0)[:, None], 2 * BT, BT)
        if ERASE:
            b_n = load_square(d_pairs + BT, m_pair, 2 * BT, BT)
        b_m = load_level_steps(steps, i_l, BT)
        if NEAR == 0:
            b_bits = load_level_bits(pairs, i_l, m_pair, BT)
            b_p = keep_bits(b_p, b_bits, PRECISE)
            if ERASE:
                b_n = keep_bits(b_n, b_bits, PRECISE)
        b_m, b_p = together(b_m, b_p)
        if ERASE:
            b_m, b_n = together(b_m, b_n)
        b_e = exp2_flushed(sum_steps(b_m, b_g, PRECISE), AGAIN=True)
        b_x = tl.dot(b_p.to(DT), scaled(b_q, b_e, DT), input_precision="tf32x3")
        b_w = scaled(b_k, b_e, DT)
        if ERASE:
            b_x = tl.dot(b_n.to(DT), b_w, b_x, input_precision="tf32x3")
        b_dk += b_e * b_x
        b_dg = add_product(b_dg, b_w, b_x * tl.where(later, 1.0, -1.0)[:, None])
    b_dk = add_product(b_dk, b_q, tl.load(own + o_norm)[:, None] + tl.zeros_like(b_dk))
    if QK_NORM:
        b_dk = add_product(b_dk, b_k, tl.zeros_like(b_dk) - tl.load(along_k + o_norm)[:, None])
        b_dk *= tl.load(norm_k + o_norm, eviction_policy="evict_first")[:, None]
    tl.store(dk + o_gate, b_dk.to(dk.dtype.element_ty), mask=m_tk)

    b_m = tl.load(tails + o_i[:, None] * BT + o_i[None, :])
    b_x = tl.load(log_decay + o_gate, mask=m_tk, other=0.0, eviction_policy="evict_first")
    b_m, b_x = together(b_m, b_x)
    b_x = b_x.to(tl.float32)
    b_dg = sums_from(b_m, b_dg, PRECISE)
    if GATE:
        b_x += tl.load(dt_bias + o_k, mask=m_k, other=0.0, eviction_policy="evict_first").to(tl.float32)[None, :]
    if GATE == 2:
        b_share = tl.where(m_tk, fast_sigmoid(b_x, rate), 0.0)
        if NEAR == 0:
            # only a deep bound reaches it
            b_share = tl.where(lower_bound * b_share > SMALLEST_LOG_DECAY, b_share, 0.0)
        # finite, so that a saturated gate has slope 0, whatever its rate
        b_dg *= (b_share - b_share * b_share) * tl.maximum(lower_bound * rate, -3e38)
        tl.store(d_rate + slot * (KP // BK) + i_k, tl.sum(b_dg * b_x))
    else:
        b_y = activate_gate(b_x, rate, lower_bound, m_tk, 1.0, GATE, PRECISE)
        b_dg = tl.where(m_tk & (b_y > SMALLEST_LOG_DECAY), b_dg, 0.0)
        if GATE == 1:
            tl.store(d_rate + slot * (KP // BK) + i_k, tl.sum(b_dg * b_y))
            b_dg *= -rate * fast_sigmoid(b_x, 1.0)
    if GATE:
        tl.store(d_bias + slot * K + o_k, tl.sum(b_dg, 0), mask=m_k)
    tl.store(d_gate + o_gate, b_dg.to(d_gate.dtype.element_ty), mask=m_tk)
