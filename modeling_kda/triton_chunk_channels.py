"""Triton kernels of the chunked backward pass with decay per channel, every chunk alone. The mathematics and the
letters are at the head of triton_chunk_forward.py and triton_chunk_backward.py.

dP and dN are kept as full matrices: below the diagonal what a reader takes, above it the same number for the writer.
Then one product at each level serves both. With E = exp(D_b) and W the rows E q of right halves and E k of left ones,

    X = dP W: what right rows add to dq, and left rows to kneg       Y = dN (E k): the same for kpos and kneg

dG collects W X and E k Y with the operands as they were rounded for the products: what a pair of tokens adds for the
steps up to the later one is then, bit for bit, what it takes away up to the earlier one.
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
    load_steps,
    locate_chunk,
    sum_steps,
)

SIZES = [*LENGTHS, "num_rows", "NUM_PARTS"]
# keys of one program: blocks of 32 make Triton 3.6 write operands out of range on Hopper
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
def sums_from(steps, i_m, b_g, BT: tl.constexpr, PRECISE: tl.constexpr):
    """Sums over the tokens from each one on: in two bf16 parts, in three for fp32."""
    m = load_steps(steps, i_m, BT)
    if PRECISE:
        b_sum = exact_dot(m, b_g, True)
    else:
        hi = b_g.to(BF16_OPERAND)
        lo = (b_g - hi.to(tl.float32)).to(BF16_OPERAND)
        m = m.to(BF16_OPERAND)
        b_sum = tl.dot(m, hi, tl.dot(m, lo))
    return b_sum


@triton.jit(do_not_specialize=SIZES)
def score_gradient_kernel(
    v, o, do, dv, beta, d_beta_parts, errors, cu_seqlens,  # inputs
    d_scores, d_coupling, d_beta, along_q, along_k,        # outputs
    scale, T, NT, N, num_rows, NUM_PARTS,
    HV: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
    ERASE: tl.constexpr, HAS_BETA: tl.constexpr, RAW_BETA: tl.constexpr, QK_NORM: tl.constexpr,
    IS_VARLEN: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """scale dP and dN of one chunk, mirrored at the diagonal, and with QK_NORM q . dq and k . dk of its rows."""
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
        o_turned = o_v[:, None] + o_i[None, :] * (HV * V)
        m_vt = (o_v < V)[:, None] & m_t[None, :]
        b_et = tl.load(errors + i_row * V + o_turned, mask=m_vt, other=0.0).to(DT)
        b_dp += tl.dot(b_do.to(DT), b_et, input_precision="tf32x3")
        b_e = tl.load(errors + i_row * V + o_block, mask=m_tv, other=0.0).to(DT)
        b_dot = tl.load(do + i_row * V + o_turned, mask=m_vt, other=0.0).to(DT)
        b_dpt += tl.dot(b_e, b_dot, input_precision="tf32x3")
        if ERASE:
            b_dvt = tl.load(dv + i_row * V + o_turned, mask=m_vt, other=0.0).to(DT)
            b_dnt -= tl.dot(b_e, b_dvt, input_precision="tf32x3")
            b_dv = tl.load(dv + i_row * V + o_block, mask=m_tv, other=0.0)
            b_dn -= tl.dot(b_dv.to(DT), b_et, input_precision="tf32x3")
            if QK_NORM:
                b_v = tl.load(v + i_row * V + o_block, mask=m_tv, other=0.0).to(tl.float32)
                b_o = tl.load(o + i_row * V + o_block, mask=m_tv, other=0.0).to(tl.float32)
                b_ck -= tl.sum(b_v * b_dv.to(tl.float32), 1)
                b_cq += tl.sum(b_o * b_do.to(tl.float32), 1)
    b_beta = load_beta(beta, i_row, o_i * HV, m_t, HAS_BETA, RAW_BETA)
    o_matrix = o_i[:, None] * BT + o_i[None, :]
    b_dp = tl.where(o_i[:, None] >= o_i[None, :], b_dp * b_beta[None, :], b_dpt * b_beta[:, None]) * scale
    tl.store(d_scores + slot * BT * BT + o_matrix, b_dp.to(d_scores.dtype.element_ty))
    if ERASE:
        b_dn = tl.where(o_i[:, None] > o_i[None, :], b_dn * b_beta[None, :], b_dnt * b_beta[:, None])
        tl.store(d_coupling + slot * BT * BT + o_matrix, b_dn.to(d_coupling.dtype.element_ty))
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


@triton.jit
def add_level(
    i_l, steps, pairs, d_scores, d_coupling, o_matrix, b_g, b_q, b_k, b_dq, b_dk, b_dg,
    BT: tl.constexpr, ERASE: tl.constexpr, PRECISE: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """dq, dk and dG with what the pairs that meet at level i_l add."""
    o_i = tl.arange(0, BT)
    right = (((o_i >> i_l) & 1) == 1)[:, None]
    b_bits = tl.load(pairs + i_l * BT * BT + o_i[:, None] * BT + o_i[None, :])
    # an offset of 0 that depends on the level: kept in registers across the levels, the matrices would spill
    b_p = keep_bits(tl.load(d_scores + o_matrix + (i_l >> 3) * (BT * BT)), b_bits, PRECISE)
    b_e = exp2_flushed(sum_steps(load_steps(steps, i_l, BT), b_g, PRECISE))
    b_ke = scaled(b_k, b_e, DT)
    b_w = tl.where(right, scaled(b_q, b_e, DT), b_ke)
    b_x = tl.dot(b_p.to(DT), b_w, tl.zeros_like(b_e), input_precision="tf32x3")
    b_dq += tl.where(right, b_e, 0.0) * b_x
    sign = tl.where(right, 1.0, -1.0)
    if ERASE:
        b_n = keep_bits(tl.load(d_coupling + o_matrix + (i_l >> 3) * (BT * BT)), b_bits, PRECISE)
        b_dg += tl.where(right, b_w.to(tl.float32), 0.0) * b_x
        b_x = tl.dot(b_n.to(DT), b_ke, tl.where(right, 0.0, b_x), input_precision="tf32x3")
        b_dk += b_e * b_x
        b_dg += (b_ke.to(tl.float32) * sign) * b_x
    else:
        b_dk += tl.where(right, 0.0, b_e) * b_x
        b_dg += (b_w.to(tl.float32) * sign) * b_x
    return b_dq, b_dk, b_dg


@triton.jit(do_not_specialize=SIZES)
def channel_gradient_kernel(
    q, k, log_decay, beta, errors, do, dv, A_log, dt_bias, cu_seqlens, steps, pairs,             # inputs
    norm_q, norm_k, total, chunk_states, d_states, d_scores, d_coupling, along_q, along_k,  # saved, and from before
    dq, dk, d_gate, d_rate, d_bias,                                                         # outputs
    scale, lower_bound, T, NT, N,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, NUM_LEVELS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ERASE: tl.constexpr, HAS_BETA: tl.constexpr, RAW_BETA: tl.constexpr,
    QK_NORM: tl.constexpr, GATE: tl.constexpr,
    PRECISE: tl.constexpr, IS_VARLEN: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """dq, dk (of this value head), and the gradient of the log-decays or of their logits, for BK key channels of one
    chunk. d_rate and d_bias: this chunk's share of the gradients of A_log and dt_bias."""
    i_s = tl.program_id(0) // HV
    i_hv = tl.program_id(0) % HV
    i_k = tl.program_id(1)
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
    q += (first_row * H + i_hv // (HV // H)) * K
    k += (first_row * H + i_hv // (HV // H)) * K
    do += i_row * V
    dv += i_row * V
    errors += i_row * V
    log_decay += i_row * K
    chunk_states += slot * V * KP
    d_states += slot * V * KP
    # 64-bit, because the compiler can fold the distances between those into the loads
    o_t = o_i.to(tl.int64)[:, None]
    o_key = o_t * (H * K) + o_k[None, :]
    o_gate = o_t * (HV * K) + o_k[None, :]

    # what goes through the states
    b_dq = tl.zeros([BT, BK], tl.float32)
    b_kp = tl.zeros([BT, BK], tl.float32)
    b_kn = tl.zeros([BT, BK], tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        m_v = (o_v < V)[:, None]
        m_tv = m_t[:, None] & (o_v < V)[None, :]
        o_block = o_t * (HV * V) + o_v[None, :]
        p_state = o_v.to(tl.int64)[:, None] * KP + o_k[None, :]
        b_s = tl.load(chunk_states + p_state, mask=m_v, other=0.0).to(DT)
        b_do = tl.load(do + o_block, mask=m_tv, other=0.0).to(DT)
        b_dq = tl.dot(b_do, b_s, b_dq, input_precision="tf32x3")
        if ERASE:
            b_dv = tl.load(dv + o_block, mask=m_tv, other=0.0).to(DT)
            b_kp = tl.dot(b_dv, b_s, b_kp, input_precision="tf32x3")
        b_ds = tl.load(d_states + p_state, mask=m_v, other=0.0).to(DT)
        b_u = tl.load(errors + o_block, mask=m_tv, other=0.0).to(DT)
        b_kn = tl.dot(b_u, b_ds, b_kn, input_precision="tf32x3")

    rate = 1.0
    b_x = tl.load(log_decay + o_gate, mask=m_tk, other=0.0).to(tl.float32)
    if GATE:
        rate = tl.exp(tl.load(A_log + i_hv).to(tl.float32))
        dt_bias += i_hv * K
        b_x += tl.load(dt_bias + o_k, mask=m_k, other=0.0).to(tl.float32)[None, :]
    b_g = activate_gate(b_x, rate, lower_bound, m_tk, LOG2_E, GATE, PRECISE)
    if not PRECISE:
        b_g = b_g.to(tl.float16)
    b_q = tl.load(q + o_key, mask=m_tk, other=0.0)
    b_k = tl.load(k + o_key, mask=m_tk, other=0.0)
    if QK_NORM:
        b_q = scaled(b_q, tl.load(norm_q + slot * BT + o_i)[:, None] + tl.zeros_like(b_dq), DT)
        b_k = scaled(b_k, tl.load(norm_k + slot * BT + o_i)[:, None] + tl.zeros_like(b_dq), DT)
    b_e = exp2_flushed(sum_steps(load_steps(steps, NUM_LEVELS, BT), b_g, PRECISE))
    b_dq *= b_e * scale
    b_dg = b_q.to(tl.float32) * b_dq
    b_diagonal = tl.load(d_scores + slot * BT * BT + o_i * (BT + 1)).to(tl.float32)[:, None]
    b_dq += b_diagonal * b_k.to(tl.float32)
    b_beta = load_beta(beta, i_row, o_i * HV, m_t, HAS_BETA, RAW_BETA)
    b_kn *= exp2_flushed(sum_steps(load_steps(steps, NUM_LEVELS + 1, BT), b_g, PRECISE)) * b_beta[:, None]
    b_written = b_k.to(tl.float32) * b_kn
    b_all = tl.sum(b_written, 0)
    b_dg -= b_written
    b_kp *= -b_e
    b_dg += b_k.to(tl.float32) * b_kp
    b_dk = b_kp + b_kn
    b_dk += b_diagonal * b_q.to(tl.float32)

    o_matrix = slot * BT * BT + o_i[:, None] * BT + o_i[None, :]
    for i_l in range(NUM_LEVELS):
        b_dq, b_dk, b_dg = add_level(
            i_l, steps, pairs, d_scores, d_coupling, o_matrix, b_g, b_q, b_k, b_dq, b_dk, b_dg, BT, ERASE, PRECISE, DT
        )

    # what the state carries through the chunk; here, where registers are free
    b_through = tl.zeros([BV, BK], tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        m_v = (o_v < V)[:, None]
        p_state = o_v.to(tl.int64)[:, None] * KP + o_k[None, :]
        b_s = tl.load(chunk_states + p_state, mask=m_v, other=0.0).to(tl.float32)
        b_through += b_s * tl.load(d_states + p_state, mask=m_v, other=0.0).to(tl.float32)
    b_left = tl.sum(b_through, 0) * tl.load(total + slot * KP + o_k) + b_all
    # loads with a policy of their own, or the compiler would keep the first ones in registers all the time
    if QK_NORM:
        b_r = tl.load(norm_q + slot * BT + o_i, eviction_policy="evict_first")
        b_c = tl.load(along_q + slot * BT + o_i) * b_r * b_r
        b_u = tl.load(q + o_key, mask=m_tk, other=0.0, eviction_policy="evict_first").to(tl.float32)
        b_dq = b_r[:, None] * b_dq - b_u * b_c[:, None]
        b_r = tl.load(norm_k + slot * BT + o_i, eviction_policy="evict_first")
        b_c = tl.load(along_k + slot * BT + o_i) * b_r * b_r
        b_u = tl.load(k + o_key, mask=m_tk, other=0.0, eviction_policy="evict_first").to(tl.float32)
        b_dk = b_r[:, None] * b_dk - b_u * b_c[:, None]
    dq += i_row * K
    dk += i_row * K
    d_gate += i_row * K
    tl.store(dq + o_gate, b_dq.to(dq.dtype.element_ty), mask=m_tk)
    tl.store(dk + o_gate, b_dk.to(dk.dtype.element_ty), mask=m_tk)

    b_dg = sums_from(steps, NUM_LEVELS + 2, b_dg, BT, PRECISE) + b_left[None, :]
    b_x = tl.load(log_decay + o_gate, mask=m_tk, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if GATE:
        b_x += tl.load(dt_bias + o_k, mask=m_k, other=0.0, eviction_policy="evict_first").to(tl.float32)[None, :]
    if GATE == 2:
        b_share = fast_sigmoid(b_x, rate)
        b_slope = tl.where(m_tk & (lower_bound * b_share > SMALLEST_LOG_DECAY), b_share * (1.0 - b_share), 0.0)
        # a saturated gate has slope 0, whatever its rate
        b_dg = tl.where(b_slope == 0.0, 0.0, b_dg * b_slope * (lower_bound * rate))
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
