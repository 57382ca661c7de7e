"""Triton kernels of the chunked backward pass with decay per channel, every chunk alone. The mathematics and the
letters are at the head of triton_chunk_forward.py and triton_chunk_backward.py.

A program holds the queries of a chunk over its keys, [2C, channels], so that one product at each level serves readers
and writers. dP and dN lie beside each other, [C, 2C], below the diagonal what a reader takes, above it the same number
for the writer. With E = exp(D_b) and z the rows q, then k, rows of later halves read and rows of earlier ones collect:

    [dq; dk] += E (M (E z)),   later rows of M: [0 dP; 0 dN],   earlier rows: [0 0; dP dN]

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
# keys of one program; 32 are slower, two programs of 128 registers each on a processor or one
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
def load_step_rows(steps, i_m, m_vector, BT: tl.constexpr):
    """Matrix i_m of `steps` for both halves of rows. m_vector: the vectors of 8 columns that hold any ones; masks of
    those load no other bytes."""
    o_i = tl.arange(0, 2 * BT) % BT
    p_steps = steps + i_m * BT * BT + o_i[:, None] * BT + tl.arange(0, BT)[None, :]
    return tl.load(p_steps, mask=m_vector, other=0.0)


@triton.jit
def sums_from(tails, b_g, BT: tl.constexpr, PRECISE: tl.constexpr):
    """Sums over the tokens from each one on and over both halves of rows: in two bf16 parts, in three for fp32."""
    o_i = tl.arange(0, 2 * BT) % BT
    m = tl.load(tails + tl.arange(0, BT)[:, None] * BT + o_i[None, :])
    if PRECISE:
        b_sum = exact_dot(m, b_g)
    else:
        hi = b_g.to(BF16_OPERAND)
        lo = (b_g - hi.to(tl.float32)).to(BF16_OPERAND)
        m = m.to(BF16_OPERAND)
        b_sum = tl.dot(m, hi) + tl.dot(m, lo)
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

    What costs time here are the bytes between L2 and a processor, those of spilled registers among them, and loads
    that wait for results: 8 warps share the rows, no matrix is loaded where it is 0, and what can be is loaded first.
    """
    # the blocks of channels of one chunk beside each other, so that the second finds in L2 what the first has read
    i_k = tl.program_id(0) % (KP // BK)
    i_s = tl.program_id(0) // (KP // BK) // HV
    i_hv = tl.program_id(0) // (KP // BK) % HV
    bos, length, i_t = locate_chunk(i_s, cu_seqlens, T, NT, N, BT, IS_VARLEN)
    if i_t * BT >= length:
        return
    # rows: the tokens' queries, then their keys
    o_r = tl.arange(0, 2 * BT)
    is_key = o_r >= BT
    o_i = o_r % BT
    o_j = tl.arange(0, BT)
    o_k = i_k * BK + tl.arange(0, BK)
    m_t = i_t * BT + o_i < length
    m_j = i_t * BT + o_j < length
    m_k = o_k < K
    m_tk = m_t[:, None] & m_k[None, :]
    m_jk = m_j[:, None] & m_k[None, :]
    first_row = bos + i_t * BT
    i_row = first_row * HV + i_hv
    slot = i_s.to(tl.int64) * HV + i_hv
    key_row = (first_row * H + i_hv // (HV // H)) * K
    chunk_states += slot * V * KP
    d_states += slot * V * KP
    # 64-bit, because the compiler can fold the distances between those into the loads
    o_t = o_i.to(tl.int64)[:, None]
    o_gate = o_j.to(tl.int64)[:, None] * (HV * K) + o_k[None, :]
    o_key = key_row + o_t * (H * K) + o_k[None, :]
    p_rows = tl.where(is_key[:, None], k + o_key, q + o_key)
    o_norm = slot * BT + o_i

    # all loads, then what is computed from them
    rate = 1.0
    log_decay += i_row * K
    b_y = tl.load(log_decay + o_gate, mask=m_jk, other=0.0)
    b_z = tl.load(p_rows, mask=m_tk, other=0.0)
    if GATE:
        rate = tl.load(A_log + i_hv).to(tl.float32)
        dt_bias += i_hv * K
        b_bias = tl.load(dt_bias + o_k, mask=m_k, other=0.0).to(tl.float32)
    if QK_NORM:
        b_norm = tl.load(tl.where(is_key, norm_k + o_norm, norm_q + o_norm))
    b_beta = load_beta(beta, i_row, o_i * HV, m_t, HAS_BETA, RAW_BETA)
    # vectors of 8 columns are all inside a mask or all outside
    m_step = tl.max_constancy((o_j >> 3)[None, :] <= (o_i >> 3)[:, None], [1, 8])
    b_up = load_step_rows(steps, NUM_LEVELS, m_step, BT)
    m_step = tl.max_constancy((o_j >> 3)[None, :] >= (o_i >> 3)[:, None], [1, 8])
    b_down = load_step_rows(steps, NUM_LEVELS + 1, m_step, BT)
    if NEAR:
        m_step = tl.max_constancy((o_i >> NEAR)[:, None] == (o_j >> NEAR)[None, :], [1, 8])
        b_near = load_step_rows(steps, NUM_LEVELS + NEAR - 1, m_step, BT)
    b_y = b_y.to(tl.float32)
    if GATE:
        rate = tl.exp(rate)
        b_y += b_bias[None, :]
    b_g = activate_gate(b_y, rate, lower_bound, m_jk, LOG2_E, GATE, PRECISE)
    if not PRECISE:
        b_g = b_g.to(tl.float16)
    if QK_NORM:
        b_z = scaled(b_z, b_norm[:, None] + tl.zeros([2 * BT, BK], tl.float32), DT)

    # what goes through the states
    b_x = tl.zeros([2 * BT, BK], tl.float32)
    b_kn = tl.zeros([2 * BT, BK], tl.float32)
    b_through = tl.zeros([BV, BK], tl.float32)
    for i_v in tl.range(0, V, BV, num_stages=STAGES):
        o_v = i_v + tl.arange(0, BV)
        m_v = (o_v < V)[:, None]
        m_tv = m_t[:, None] & (o_v < V)[None, :]
        o_block = i_row * V + o_t * (HV * V) + o_v[None, :]
        p_state = o_v.to(tl.int64)[:, None] * KP + o_k[None, :]
        b_s = tl.load(chunk_states + p_state, mask=m_v, other=0.0)
        b_ds = tl.load(d_states + p_state, mask=m_v, other=0.0)
        b_through += b_s.to(tl.float32) * b_ds.to(tl.float32)
        if ERASE:
            b_r = tl.load(tl.where(is_key[:, None], dv + o_block, do + o_block), mask=m_tv, other=0.0)
        else:
            b_r = tl.load(do + o_block, mask=m_tv & (o_r < BT)[:, None], other=0.0)
        b_x = tl.dot(b_r.to(DT), b_s.to(DT), b_x, input_precision="tf32x3")
        b_u = tl.load(errors + o_block, mask=m_tv & is_key[:, None], other=0.0)
        b_kn = tl.dot(b_u.to(DT), b_ds.to(DT), b_kn, input_precision="tf32x3")
    b_d = b_x * exp2_flushed(sum_steps(b_up, b_g, PRECISE))
    b_d *= tl.where(is_key, -1.0, scale)[:, None]
    b_dg = b_z.to(tl.float32) * b_d
    b_kn *= exp2_flushed(sum_steps(b_down, b_g, PRECISE)) * b_beta[:, None]
    b_d += b_kn
    b_kn *= b_z.to(tl.float32)
    # into the last row, which all steps collect
    b_left = tl.sum(b_through, 0) * tl.load(total + slot * KP + o_k) + tl.sum(b_kn, 0)
    b_dg += tl.where((o_r == 2 * BT - 1)[:, None], b_left[None, :], 0.0) - b_kn

    # a reader's row of dP for a query, of dN for a key, stands under the keys' columns, a writer's under both
    p_pair = d_pairs + slot * (2 * BT * BT) + o_i.to(tl.int64)[:, None] * (2 * BT) + o_r[None, :]
    o_reader = tl.where(is_key, 0, -BT)
    if NEAR:
        b_e = sum_steps(b_near, b_g, PRECISE) - lower_bound * ((2**NEAR - 1) * 0.5 * LOG2_E)
        m_near = (o_i >> NEAR)[:, None] == (o_i >> NEAR)[None, :]
        m_pair = tl.max_constancy(m_near & is_key[None, :], [1, 8])
        p_bits = pairs + (NUM_LEVELS + 2 * NEAR - 6) * (4 * BT * BT) + o_r[:, None] * (2 * BT) + o_r[None, :]
        b_p = tl.load(p_pair + o_reader[:, None], mask=m_pair, other=0.0)
        b_p = keep_bits(b_p, tl.load(p_bits, mask=m_pair, other=0), PRECISE)
        b_w = scaled(b_z, exp2_flushed(-b_e, AGAIN=True), DT)
        b_x = tl.dot(b_p.to(DT), b_w, input_precision="tf32x3")
        b_y = exp2_flushed(b_e, AGAIN=True)
        b_w = scaled(b_z, b_y, DT)
        b_d += b_y * b_x
        b_dg += b_w.to(tl.float32) * b_x
        m_pair = tl.max_constancy(m_near & is_key[:, None], [1, 8])
        b_p = tl.load(p_pair, mask=m_pair, other=0.0)
        b_p = keep_bits(b_p, tl.load(p_bits + 4 * BT * BT, mask=m_pair, other=0), PRECISE)
        b_x = tl.dot(b_p.to(DT), b_w, input_precision="tf32x3")
        b_y = exp2_flushed(-b_e, AGAIN=True)
        b_d += b_y * b_x
        b_dg -= scaled(b_z, b_y, DT).to(tl.float32) * b_x

    for i_l in range(NEAR, NUM_LEVELS):
        later = ((o_i >> i_l) & 1) == 1
        # below level 3 the vectors that hold the pairs hold others, too
        level = tl.maximum(i_l, 3)
        m_pair = (o_i >> level)[:, None] == ((o_i >> level) ^ (tl.minimum(i_l, 3) // 3))[None, :]
        m_pair = tl.max_constancy(m_pair & tl.where(later[:, None], is_key[None, :], is_key[:, None]), [1, 8])
        b_p = tl.load(p_pair + tl.where(later, o_reader, 0)[:, None], mask=m_pair, other=0.0)
        if NEAR == 0:
            p_bits = pairs + i_l * (4 * BT * BT) + o_r[:, None] * (2 * BT) + o_r[None, :]
            b_p = keep_bits(b_p, tl.load(p_bits, mask=m_pair, other=0), PRECISE)
        level = tl.maximum(i_l + 1, 3)
        m_step = tl.max_constancy((o_i >> level)[:, None] == (o_j >> level)[None, :], [1, 8])
        b_e = exp2_flushed(sum_steps(load_step_rows(steps, i_l, m_step, BT), b_g, PRECISE))
        b_w = scaled(b_z, b_e, DT)
        b_x = tl.dot(b_p.to(DT), b_w, tl.zeros_like(b_e), input_precision="tf32x3")
        b_d += b_e * b_x
        b_dg += (b_w.to(tl.float32) * tl.where(later, 1.0, -1.0)[:, None]) * b_x

    # pairs of a token with itself: each query reads its own key, which no step decays
    b_own = tl.load(own + o_norm)
    if QK_NORM:
        b_own *= tl.load(tl.where(is_key, norm_q + o_norm, norm_k + o_norm))
    b_u = tl.load(tl.where(is_key[:, None], q + o_key, k + o_key), mask=m_tk, other=0.0).to(tl.float32)
    b_d += b_own[:, None] * b_u
    # loads with a policy of their own, or the compiler would keep the first ones in registers all the time
    if QK_NORM:
        b_r = tl.load(tl.where(is_key, norm_k + o_norm, norm_q + o_norm), eviction_policy="evict_first")
        b_c = tl.load(tl.where(is_key, along_k + o_norm, along_q + o_norm)) * b_r * b_r
        b_u = tl.load(p_rows, mask=m_tk, other=0.0, eviction_policy="evict_first").to(tl.float32)
        b_d = b_r[:, None] * b_d - b_u * b_c[:, None]
    o_out = i_row * K + o_t * (HV * K) + o_k[None, :]
    tl.store(tl.where(is_key[:, None], dk + o_out, dq + o_out), b_d.to(dq.dtype.element_ty), mask=m_tk)

    b_dg = sums_from(tails, b_dg, BT, PRECISE)
    b_x = tl.load(log_decay + o_gate, mask=m_jk, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if GATE:
        b_x += tl.load(dt_bias + o_k, mask=m_k, other=0.0, eviction_policy="evict_first").to(tl.float32)[None, :]
    if GATE == 2:
        b_share = tl.where(m_jk, fast_sigmoid(b_x, rate), 0.0)
        if NEAR == 0:
            # only a deep bound reaches it
            b_share = tl.where(lower_bound * b_share > SMALLEST_LOG_DECAY, b_share, 0.0)
        # finite, so that a saturated gate has slope 0, whatever its rate
        b_dg *= (b_share - b_share * b_share) * tl.maximum(lower_bound * rate, -3e38)
        tl.store(d_rate + slot * (KP // BK) + i_k, tl.sum(b_dg * b_x))
    else:
        b_y = activate_gate(b_x, rate, lower_bound, m_jk, 1.0, GATE, PRECISE)
        b_dg = tl.where(m_jk & (b_y > SMALLEST_LOG_DECAY), b_dg, 0.0)
        if GATE == 1:
            tl.store(d_rate + slot * (KP // BK) + i_k, tl.sum(b_dg * b_y))
            b_dg *= -rate * fast_sigmoid(b_x, 1.0)
    if GATE:
        tl.store(d_bias + slot * K + o_k, tl.sum(b_dg, 0), mask=m_k)
    tl.store(d_gate + i_row * K + o_gate, b_dg.to(d_gate.dtype.element_ty), mask=m_jk)
