"""Triton kernels of the chunked backward pass. Letters as in triton_chunk_forward.py; dX is the gradient of X.

`reverse_scan_kernel`, from the last chunk to the first, with dS the gradient of the state after the chunk:

    dU = P^T dO + (k e^{G_C - G}) dS     dR = (I - Z^T diag(beta)) dU     dV = beta dR     dbeta_i = E_i . dR_i
    dS <- e^{G_C} dS + scale (q e^G)^T dO - (k e^G)^T dV

`score_gradient_kernel` and `chunk_gradient_kernel`, every chunk alone, with U = beta E:

    dP = tril(dO U^T)     dN = -stril(dV U^T)
    dq_i   = scale (e^{G_i} S dO_i + sum_j dP_ij D_ij k_j)
    kpos_i = -e^{G_i} S dV_i + sum_j dN_ij D_ij k_j                          k_i as a reader, later than what it meets
    kneg_j = e^{G_C - G_j} dS U_j + sum_i (scale dP_ij q_i + dN_ij k_i) D_ij   k_j as a writer, earlier
    dk = kpos + kneg      dG_i = q_i dq_i + k_i (kpos_i - kneg_i), and for the last row + sum_v S_out dS

The log-decay of token t collects dG_i for i >= t. Unit queries and keys need the part of their gradients along
themselves, which is a sum over value channels: q_i . dq_i = O_i . dO_i and k_i . dk_i = 2 beta_i dbeta_i - V_i . dV_i.
"""

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the fast path needs triton: pip install triton") from error

from .triton_chunk_common import (
    SMALLEST_LOG_DECAY,
    activate_gate,
    exact_dot,
    head_decay_matrix,
    head_sums,
    level_pairs,
    load_beta,
    load_factors,
    load_gate,
    load_key_block,
    load_values,
    locate_chunk,
    locate_sequence,
    sum_steps,
)


@triton.jit
def reverse_scan_kernel(
    do, beta, errors, q_in, k_in, k_out, row_q, row_k, row_out, total, scores, erasing,  # inputs, saved
    d_final, segment_state, cu_seqlens,
    dv, d_beta, d_states, d_state,                                                      # outputs
    T, NT, N, NUM_SEGMENTS, num_rows,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, NUM_LEVELS: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, ERASE: tl.constexpr, HAS_BETA: tl.constexpr, RAW_BETA: tl.constexpr,
    HAS_FINAL: tl.constexpr, HAS_STATE: tl.constexpr, SEGMENT: tl.constexpr,
    IS_VARLEN: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """dV, this V block's share of dbeta, the gradient of the state after every chunk, and that of the first state.

    SEGMENT 1: only the gradient of the state before each run of chunks when nothing follows it, into segment_state.
    2: each run from the gradient of the state after it, from segment_state.
    """
    i_v = tl.program_id(0)
    i_n = tl.program_id(1) // HV
    i_hv = tl.program_id(1) % HV
    i_g = tl.program_id(2)
    i_h = i_hv // (HV // H)
    bos, length, first = locate_sequence(i_n, cu_seqlens, T, NT, BT, IS_VARLEN)
    o_v = i_v * BV + tl.arange(0, BV)
    o_k = tl.arange(0, KP)
    o_i = tl.arange(0, BT)
    m_v = o_v < V
    m_vk = m_v[:, None] & (o_k < K)[None, :]
    p_io = tl.program_id(1).to(tl.int64) * K * V + o_k[None, :] * V + o_v[:, None]

    start = 0
    end = tl.cdiv(length, BT)
    if SEGMENT:
        run = tl.cdiv(end, NUM_SEGMENTS)
        start = tl.minimum(i_g * run, end)
        end = tl.minimum(start + run, end)
        rows = tl.cdiv(V, BV) * BV
        i_run = tl.program_id(1).to(tl.int64) * NUM_SEGMENTS + i_g
        p_run = (i_run * rows + o_v[:, None]) * KP + o_k[None, :]
    b_ds = tl.zeros([BV, KP], tl.float32)
    if SEGMENT == 2:
        b_ds += tl.load(segment_state + p_run)
    elif SEGMENT == 0 and HAS_FINAL:
        b_ds += tl.load(d_final + p_io, mask=m_vk, other=0.0).to(tl.float32)

    i_next = tl.maximum(end - 1, 0)
    b_do = load_values(do, bos, i_next, length, i_hv, o_v, HV, V, BT)
    b_e = load_values(errors, bos, i_next, length, i_hv, o_v, HV, V, BT)
    b_beta, b_total, b_rq, b_rk, b_ro = load_factors(
        beta, total, row_q, row_k, row_out, bos, first, i_next, length, i_hv, HV, KP, BT, DECAY, HAS_BETA, RAW_BETA
    )
    for i_back in range(0, end - start):
        i_t = end - 1 - i_back
        i_next = tl.maximum(i_t - 1, start)
        b_do_next = load_values(do, bos, i_next, length, i_hv, o_v, HV, V, BT)
        b_e_next = load_values(errors, bos, i_next, length, i_hv, o_v, HV, V, BT)
        b_beta_next, b_total_next, b_rq_next, b_rk_next, b_ro_next = load_factors(
            beta, total, row_q, row_k, row_out, bos, first, i_next, length, i_hv, HV, KP, BT, DECAY, HAS_BETA, RAW_BETA
        )
        i_slot = (first + i_t).to(tl.int64) * HV + i_hv
        i_row = bos + i_t * BT
        m_t = i_t * BT + o_i < length
        # 64-bit offsets once per block, 32-bit inside it
        o_value = (i_row * HV + i_hv) * V
        o_block = o_i[None, :] * (HV * V) + o_v[:, None]
        m_vt = m_v[:, None] & m_t[None, :]
        o_matrix = i_slot * BT * BT + o_i[:, None] * BT + o_i[None, :]
        if SEGMENT != 1:
            p_s = i_slot * V * KP + o_v[:, None] * KP + o_k[None, :]
            tl.store(d_states + p_s, b_ds.to(d_states.dtype.element_ty), mask=m_v[:, None])
        b_kt = load_key_block(k_out, i_row, i_slot, i_t, length, H, i_h, K, KP, BT, DECAY, True).to(DT)
        b_d = tl.dot(b_ds.to(DT), b_kt, input_precision="tf32x3")
        if DECAY != 2:
            b_d *= b_ro[None, :]
        b_p = tl.load(scores + o_matrix).to(DT)
        b_d = tl.dot(b_do.to(DT), b_p, b_d, input_precision="tf32x3")
        if ERASE:
            b_z = tl.load(erasing + o_matrix).to(DT)
            b_d -= tl.dot((b_d * b_beta[None, :]).to(DT), b_z, input_precision="tf32x3")
        if SEGMENT != 1:
            b_db = tl.sum(b_e.to(tl.float32) * b_d, 0)
            tl.store(d_beta + (i_v.to(tl.int64) * num_rows + i_row) * HV + i_hv + o_i * HV, b_db, mask=m_t)
        b_d *= b_beta[None, :]
        if SEGMENT != 1:
            tl.store(dv + o_value + o_block, b_d.to(dv.dtype.element_ty), mask=m_vt)
        b_ds *= b_total[None, :] if DECAY == 2 else b_total
        b_q = load_key_block(q_in, i_row, i_slot, i_t, length, H, i_h, K, KP, BT, DECAY, False).to(DT)
        b_read = b_do if DECAY == 2 else b_do.to(tl.float32) * b_rq[None, :]
        b_ds = tl.dot(b_read.to(DT), b_q, b_ds, input_precision="tf32x3")
        if ERASE:
            if DECAY != 2:
                b_d *= b_rk[None, :]
            b_k = load_key_block(k_in, i_row, i_slot, i_t, length, H, i_h, K, KP, BT, DECAY, False).to(DT)
            b_ds = tl.dot((-b_d).to(DT), b_k, b_ds, input_precision="tf32x3")
        b_do = b_do_next
        b_e = b_e_next
        b_beta = b_beta_next
        b_total = b_total_next
        b_rq = b_rq_next
        b_rk = b_rk_next
        b_ro = b_ro_next

    if SEGMENT == 1:
        tl.store(segment_state + p_run, b_ds)
    elif HAS_STATE and i_g == 0:
        tl.store(d_state + p_io, b_ds, mask=m_vk)


@triton.jit
def score_gradient_kernel(
    v, o, do, dv, beta, d_beta_parts, errors, cu_seqlens,  # inputs
    d_scores, d_coupling, d_beta, along_q, along_k,        # outputs
    scale, T, NT, N, num_rows, NUM_PARTS,
    HV: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
    ERASE: tl.constexpr, HAS_BETA: tl.constexpr, RAW_BETA: tl.constexpr, QK_NORM: tl.constexpr,
    IS_VARLEN: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """scale dP and dN of one chunk, and with QK_NORM q . dq and k . dk of its rows."""
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
        if ERASE:
            b_dv = tl.load(dv + i_row * V + o_block, mask=m_tv, other=0.0)
            b_dn -= tl.dot(b_dv.to(DT), b_et, input_precision="tf32x3")
            if QK_NORM:
                b_v = tl.load(v + i_row * V + o_block, mask=m_tv, other=0.0).to(tl.float32)
                b_o = tl.load(o + i_row * V + o_block, mask=m_tv, other=0.0).to(tl.float32)
                b_ck -= tl.sum(b_v * b_dv.to(tl.float32), 1)
                b_cq += tl.sum(b_o * b_do.to(tl.float32), 1)
    b_beta = load_beta(beta, i_row, o_i * HV, m_t, HAS_BETA, RAW_BETA)
    o_matrix = o_i[:, None] * BT + o_i[None, :]
    b_dp = tl.where(o_i[:, None] >= o_i[None, :], b_dp * b_beta[None, :] * scale, 0.0)
    tl.store(d_scores + slot * BT * BT + o_matrix, b_dp.to(d_scores.dtype.element_ty))
    if ERASE:
        b_dn = tl.where(o_i[:, None] > o_i[None, :], b_dn * b_beta[None, :], 0.0)
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
def chunk_gradient_kernel(
    q, k, log_decay, beta, errors, do, dv, A_log, dt_bias, cu_seqlens, steps,       # inputs
    norm_q, norm_k, chunk_states, d_states, d_scores, d_coupling, along_q, along_k,  # saved, and from before
    dq, dk, d_gate, d_rate, d_bias,                                                 # outputs
    scale, lower_bound, T, NT, N, num_rows,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, NUM_LEVELS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, ERASE: tl.constexpr, HAS_BETA: tl.constexpr, RAW_BETA: tl.constexpr,
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
    o_matrix = slot * BT * BT + o_i[:, None] * BT + o_i[None, :]
    o_turned = slot * BT * BT + o_i[None, :] * BT + o_i[:, None]
    b_beta = load_beta(beta, i_row, o_i * HV, m_t, HAS_BETA, RAW_BETA)

    o_key = (first_row * H + i_hv // (HV // H)) * K + o_i[:, None] * (H * K) + o_k[None, :]
    b_q = tl.load(q + o_key, mask=m_tk, other=0.0).to(tl.float32)
    b_k = tl.load(k + o_key, mask=m_tk, other=0.0).to(tl.float32)
    if QK_NORM:
        b_rq = tl.load(norm_q + slot * BT + o_i)
        b_rk = tl.load(norm_k + slot * BT + o_i)
        b_q *= b_rq[:, None]
        b_k *= b_rk[:, None]
    if DECAY == 2:
        rate = 1.0
        if GATE:
            rate = tl.exp(tl.load(A_log + i_hv).to(tl.float32))
            dt_bias += i_hv * K
        p_gate = log_decay + (first_row * HV + i_hv) * K
        b_g = load_gate(p_gate, dt_bias, o_i * (HV * K), o_k, m_t, rate, lower_bound, K, GATE)
    if DECAY == 1:
        b_h = tl.load(log_decay + i_row + o_i * HV, mask=m_t, other=0.0).to(tl.float32)
        b_h = activate_gate(b_h, 0.0, 1.0, lower_bound, m_t, 0)
        b_upto, b_after = head_sums(b_h, BT)

    # rows as readers: dq and kpos
    b_dq = tl.zeros([BT, BK], tl.float32)
    b_kp = tl.zeros([BT, BK], tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        m_tv = m_t[:, None] & (o_v < V)[None, :]
        o_block = i_row * V + o_i[:, None] * (HV * V) + o_v[None, :]
        p_state = slot * V * KP + o_v[:, None] * KP + o_k[None, :]
        b_s = tl.load(chunk_states + p_state, mask=(o_v < V)[:, None], other=0.0).to(DT)
        b_do = tl.load(do + o_block, mask=m_tv, other=0.0).to(DT)
        b_dq = tl.dot(b_do, b_s, b_dq, input_precision="tf32x3")
        if ERASE:
            b_dv = tl.load(dv + o_block, mask=m_tv, other=0.0).to(DT)
            b_kp = tl.dot(b_dv, b_s, b_kp, input_precision="tf32x3")
    if DECAY == 2:
        b_e = tl.exp2(sum_steps(steps, NUM_LEVELS, b_g, BT, PRECISE))
        b_dq *= b_e * scale
        b_kp *= -b_e
        for i_l in range(NUM_LEVELS):
            m_pair = level_pairs(i_l, BT, False)
            b_e = tl.exp2(sum_steps(steps, i_l, b_g, BT, PRECISE))
            b_ke = (b_k * b_e).to(DT)
            b_dp = tl.where(m_pair, tl.load(d_scores + o_matrix), 0.0).to(DT)
            b_dq += b_e * tl.dot(b_dp, b_ke, input_precision="tf32x3")
            if ERASE:
                b_dn = tl.where(m_pair, tl.load(d_coupling + o_matrix), 0.0).to(DT)
                b_kp += b_e * tl.dot(b_dn, b_ke, input_precision="tf32x3")
        b_diagonal = tl.load(d_scores + slot * BT * BT + o_i * (BT + 1)).to(tl.float32)
        b_dq += b_diagonal[:, None] * b_k
    else:
        b_dp = tl.load(d_scores + o_matrix).to(tl.float32)
        if ERASE:
            b_dn = tl.load(d_coupling + o_matrix).to(tl.float32)
        if DECAY == 1:
            b_dq *= tl.exp(b_upto)[:, None]
            b_kp *= tl.exp(b_upto)[:, None]
            b_e = head_decay_matrix(b_h, BT, False)
            b_dp *= b_e
            if ERASE:
                b_dn *= b_e
        b_dq = tl.dot(b_dp.to(DT), b_k.to(DT), b_dq * scale, input_precision="tf32x3")
        if ERASE:
            b_kp = tl.dot(b_dn.to(DT), b_k.to(DT), -b_kp, input_precision="tf32x3")
    b_dg = b_q * b_dq + b_k * b_kp
    if QK_NORM:
        b_dq = b_rq[:, None] * (b_dq - b_q * tl.load(along_q + slot * BT + o_i)[:, None])
    o_grad = i_row * K + o_i[:, None] * (HV * K) + o_k[None, :]
    tl.store(dq + o_grad, b_dq.to(dq.dtype.element_ty), mask=m_tk)

    # rows as writers: kneg
    b_kn = tl.zeros([BT, BK], tl.float32)
    b_left = tl.zeros([BK], tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        m_tv = m_t[:, None] & (o_v < V)[None, :]
        o_block = i_row * V + o_i[:, None] * (HV * V) + o_v[None, :]
        p_state = slot * V * KP + o_v[:, None] * KP + o_k[None, :]
        b_ds = tl.load(d_states + p_state, mask=(o_v < V)[:, None], other=0.0)
        b_u = tl.load(errors + o_block, mask=m_tv, other=0.0).to(tl.float32) * b_beta[:, None]
        b_kn = tl.dot(b_u.to(DT), b_ds.to(DT), b_kn, input_precision="tf32x3")
        if DECAY:
            b_s = tl.load(chunk_states + p_state, mask=(o_v < V)[:, None], other=0.0)
            b_left += tl.sum(b_s.to(tl.float32) * b_ds.to(tl.float32), 0)
    if DECAY == 2:
        b_kn *= tl.exp2(sum_steps(steps, NUM_LEVELS + 1, b_g, BT, PRECISE))
        b_left = b_left * tl.exp2(tl.sum(b_g, 0)) + tl.sum(b_k * b_kn, 0)
        for i_l in range(NUM_LEVELS):
            m_turned = level_pairs(i_l, BT, True)
            b_e = tl.exp2(sum_steps(steps, i_l, b_g, BT, PRECISE))
            b_dp = tl.where(m_turned, tl.load(d_scores + o_turned), 0.0).to(DT)
            b_sum = tl.dot(b_dp, (b_q * b_e).to(DT), input_precision="tf32x3")
            if ERASE:
                b_dn = tl.where(m_turned, tl.load(d_coupling + o_turned), 0.0).to(DT)
                b_sum = tl.dot(b_dn, (b_k * b_e).to(DT), b_sum, input_precision="tf32x3")
            b_kn += b_e * b_sum
        b_kn += b_diagonal[:, None] * b_q
    else:
        b_dp = tl.load(d_scores + o_turned).to(tl.float32)
        if ERASE:
            b_dn = tl.load(d_coupling + o_turned).to(tl.float32)
        if DECAY == 1:
            b_kn *= tl.exp(b_after)[:, None]
            b_left = b_left * tl.exp(tl.sum(b_h, 0)) + tl.sum(b_k * b_kn, 0)
            b_e = head_decay_matrix(b_h, BT, True)
            b_dp *= b_e
            if ERASE:
                b_dn *= b_e
        b_kn = tl.dot(b_dp.to(DT), b_q.to(DT), b_kn, input_precision="tf32x3")
        if ERASE:
            b_kn = tl.dot(b_dn.to(DT), b_k.to(DT), b_kn, input_precision="tf32x3")
    b_dg -= b_k * b_kn
    b_dk = b_kp + b_kn
    if QK_NORM:
        b_dk = b_rk[:, None] * (b_dk - b_k * tl.load(along_k + slot * BT + o_i)[:, None])
    tl.store(dk + o_grad, b_dk.to(dk.dtype.element_ty), mask=m_tk)

    if DECAY == 1:
        b_dh = tl.sum(tl.where(o_i[:, None] <= o_i[None, :], tl.sum(b_dg, 1)[None, :], 0.0), 1) + tl.sum(b_left, 0)
        b_dh = tl.where(b_h > SMALLEST_LOG_DECAY, b_dh, 0.0)
        tl.store(d_gate + i_k.to(tl.int64) * num_rows * HV + i_row + o_i * HV, b_dh, mask=m_t)
    elif DECAY == 2:
        m_from = tl.load(steps + (NUM_LEVELS + 2) * BT * BT + o_i[:, None] * BT + o_i[None, :])
        b_dg = exact_dot(m_from, b_dg, True) + b_left[None, :]
        b_x = tl.load(p_gate + o_i[:, None] * (HV * K) + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32)
        if GATE:
            b_x += tl.load(dt_bias + o_k, mask=m_k, other=0.0).to(tl.float32)[None, :]
        b_g = activate_gate(b_x, 0.0, rate, lower_bound, m_tk, GATE)
        # a factor and not a mask: Triton 3.6 moves masks between layouts wrongly for narrow blocks
        b_dg *= tl.where(m_tk & (b_g > SMALLEST_LOG_DECAY), 1.0, 0.0)
        if GATE == 1:
            tl.store(d_rate + slot * (KP // BK) + i_k, tl.sum(tl.sum(b_dg * b_g, 1), 0))
            b_dg *= -rate * tl.sigmoid(b_x)
        elif GATE == 2:
            b_share = tl.sigmoid(rate * b_x)
            b_slope = b_dg * lower_bound * b_share * (1.0 - b_share)
            # a saturated gate has slope 0, whatever its rate
            b_dg = tl.where(b_slope == 0.0, 0.0, b_slope * rate)
            tl.store(d_rate + slot * (KP // BK) + i_k, tl.sum(tl.sum(b_dg * b_x, 1), 0))
        if GATE:
            tl.store(d_bias + slot * K + o_k, tl.sum(b_dg, 0), mask=m_k)
        tl.store(d_gate + o_grad, b_dg.to(d_gate.dtype.element_ty), mask=m_tk)
