"""Triton kernels of the chunked backward pass. Letters as in triton_chunk_forward.py; dX is the gradient of X.

`reverse_scan_kernel`, from the last chunk to the first, with dS the gradient of the state after the chunk:

    dU = P^T dO + (k e^{G_C - G}) dS     dR = (I - Z^T diag(beta)) dU     dV = beta dR     dbeta_i = E_i . dR_i
    dS <- e^{G_C} dS + scale (q e^G)^T dO - (k e^G)^T dV, or - W^T diag(beta) dU where W is prepared

`head_gradient_kernel` (one decay per head, or none) and those of triton_chunk_channels.py (decay per channel), every
chunk alone, with U = beta E:

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
    LENGTHS,
    SMALLEST_LOG_DECAY,
    head_decay_matrix,
    head_factors,
    load_beta,
    load_factors,
    load_head_gate,
    load_key_block,
    load_values,
    locate_chunk,
    locate_sequence,
)

SIZES = [*LENGTHS, "num_rows", "NUM_PARTS"]


@triton.jit(do_not_specialize=SIZES)
def reverse_scan_kernel(
    do, errors, q_in, k_in, k_out, strength, row_q, row_k, row_out, total, scores, erasing,  # inputs, saved
    d_final, segment_state, cu_seqlens,
    dv, d_beta, d_states, d_state,                                                      # outputs
    T, NT, N, NUM_SEGMENTS, num_rows,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, NUM_LEVELS: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, ERASE: tl.constexpr, HAS_FINAL: tl.constexpr, HAS_STATE: tl.constexpr,
    SEGMENT: tl.constexpr, IS_VARLEN: tl.constexpr, DT: tl.constexpr,
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
    b_do = load_values(do, bos, i_next, length, i_hv, o_v, HV, V, BT, True)
    b_e = load_values(errors, bos, i_next, length, i_hv, o_v, HV, V, BT, True)
    b_beta, b_total, b_rq, b_rk, b_ro = load_factors(
        strength, total, row_q, row_k, row_out, first, i_next, i_hv, HV, KP, BT, DECAY
    )
    for i_back in range(0, end - start):
        i_t = end - 1 - i_back
        i_next = tl.maximum(i_t - 1, start)
        b_do_next = load_values(do, bos, i_next, length, i_hv, o_v, HV, V, BT, True)
        b_e_next = load_values(errors, bos, i_next, length, i_hv, o_v, HV, V, BT, True)
        b_beta_next, b_total_next, b_rq_next, b_rk_next, b_ro_next = load_factors(
            strength, total, row_q, row_k, row_out, first, i_next, i_hv, HV, KP, BT, DECAY
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
        b_k = load_key_block(k_out, i_row, i_slot, i_t, length, H, i_h, K, KP, BT, DECAY).to(DT)
        b_d = tl.dot(b_ds.to(DT), tl.trans(b_k), input_precision="tf32x3")
        if DECAY != 2:
            b_d *= b_ro[None, :]
        b_p = tl.load(scores + o_matrix).to(DT)
        b_d = tl.dot(b_do.to(DT), b_p, b_d, input_precision="tf32x3")
        b_ds *= b_total[None, :] if DECAY == 2 else b_total
        b_q = load_key_block(q_in, i_row, i_slot, i_t, length, H, i_h, K, KP, BT, DECAY).to(DT)
        b_read = b_do if DECAY == 2 else b_do.to(tl.float32) * b_rq[None, :]
        b_ds = tl.dot(b_read.to(DT), b_q, b_ds, input_precision="tf32x3")
        if ERASE:
            b_uh = (b_d * b_beta[None, :]).to(DT)
            b_z = tl.load(erasing + o_matrix).to(DT)
            b_d -= tl.dot(b_uh, b_z, input_precision="tf32x3")
            if DECAY == 2:
                # -W
                b_w = load_key_block(k_in, i_row, i_slot, i_t, length, H, i_h, K, KP, BT, DECAY).to(DT)
                b_ds = tl.dot(b_uh, b_w, b_ds, input_precision="tf32x3")
            else:
                b_ds = tl.dot((b_d * -(b_beta * b_rk)[None, :]).to(DT), b_k, b_ds, input_precision="tf32x3")
        if SEGMENT != 1:
            b_db = tl.sum(b_e.to(tl.float32) * b_d, 0)
            tl.store(d_beta + (i_v.to(tl.int64) * num_rows + i_row) * HV + i_hv + o_i * HV, b_db, mask=m_t)
            b_d *= b_beta[None, :]
            tl.store(dv + o_value + o_block, b_d.to(dv.dtype.element_ty), mask=m_vt)
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
def load_tokens(x, v_0, m_t, HV: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr):
    """[BT, BV] of a chunk of one head of a tensor [tokens, HV, V], 0 outside."""
    o_v = v_0 + tl.arange(0, BV)
    o_block = tl.arange(0, BT).to(tl.int64)[:, None] * (HV * V) + o_v[None, :]
    return tl.load(x + o_block, mask=m_t[:, None] & (o_v < V)[None, :], other=0.0)


@triton.jit(do_not_specialize=SIZES)
def head_gradient_kernel(
    q, k, v, o, log_decay, beta, d_beta_parts, errors, do, dv, cu_seqlens,  # inputs, and from before
    norm_q, norm_k, chunk_states, d_states,                                 # saved, and from before
    dq, dk, d_beta, d_gate,                                                 # outputs
    scale, T, NT, N, num_rows, NUM_PARTS,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, NUM_LEVELS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PARTS: tl.constexpr, DECAY: tl.constexpr, ERASE: tl.constexpr, HAS_BETA: tl.constexpr, RAW_BETA: tl.constexpr,
    QK_NORM: tl.constexpr, PRECISE: tl.constexpr, IS_VARLEN: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """dq, dk (of this value head), dbeta and the gradient of the log-decays of one chunk. PARTS: a power of 2 from
    NUM_PARTS on."""
    i_s = tl.program_id(0) // HV
    i_hv = tl.program_id(0) % HV
    bos, length, i_t = locate_chunk(i_s, cu_seqlens, T, NT, N, BT, IS_VARLEN)
    if i_t * BT >= length:
        return
    WHOLE: tl.constexpr = BV >= V
    o_i = tl.arange(0, BT)
    o_w = o_i.to(tl.int64)
    m_t = i_t * BT + o_i < length
    first_row = bos + i_t * BT
    i_row = first_row * HV + i_hv
    slot = i_s.to(tl.int64) * HV + i_hv
    q += (first_row * H + i_hv // (HV // H)) * K
    k += (first_row * H + i_hv // (HV // H)) * K
    v += i_row * V
    o += i_row * V
    do += i_row * V
    dv += i_row * V
    errors += i_row * V
    chunk_states += slot * V * KP
    d_states += slot * V * KP
    dq += i_row * K
    dk += i_row * K
    b_beta = load_beta(beta, i_row, o_i * HV, m_t, HAS_BETA, RAW_BETA)
    b_w = tl.full([BT, BT], 1.0, tl.float32)
    b_in = tl.full([BT], 1.0, tl.float32)
    b_out = b_beta
    if DECAY:
        b_g = load_head_gate(log_decay, i_row, o_i * HV, m_t)
    # the shares of dbeta: all at once, and long before they are needed
    o_part = tl.arange(0, PARTS)
    m_part = (o_part < NUM_PARTS)[None, :] & m_t[:, None]
    p_part = d_beta_parts + i_row + o_i[:, None] * HV + o_part.to(tl.int64)[None, :] * num_rows * HV
    b_parts = tl.load(p_part, mask=m_part, other=0.0)

    # dP and dN and their transposes, each a product: Triton 3.6 transposes results of products wrongly on Hopper
    b_x = tl.zeros([BT, BT], tl.float32)
    b_y = tl.zeros([BT, BT], tl.float32)
    b_cq = tl.zeros([BT], tl.float32)
    b_ck = tl.zeros([BT], tl.float32)
    for v_0 in tl.static_range(0, V, BV):
        b_do = load_tokens(do, v_0, m_t, HV, V, BT, BV)
        b_e = load_tokens(errors, v_0, m_t, HV, V, BT, BV).to(DT)
        b_x = tl.dot(b_do.to(DT), tl.trans(b_e), b_x, input_precision="tf32x3")
        b_y = tl.dot(b_e, tl.trans(b_do.to(DT)), b_y, input_precision="tf32x3")
        if ERASE and QK_NORM:
            b_o = load_tokens(o, v_0, m_t, HV, V, BT, BV).to(tl.float32)
            b_cq += tl.sum(b_o * b_do.to(tl.float32), 1)
    if DECAY:
        b_sum, b_in, b_out, b_all = head_factors(b_g)
        b_out *= b_beta
        b_w = head_decay_matrix(b_sum, b_x, PRECISE)
        # a token on itself has no part in dG: added later, so that nothing of it is left there
        b_self = tl.sum(tl.where(o_i[:, None] == o_i[None, :], b_x, 0.0), 1) * (b_beta * scale)
        b_dp = (b_x * tl.where(o_i[:, None] > o_i[None, :], b_w * (b_beta * scale)[None, :], 0.0)).to(DT)
        b_dpt = (b_y * tl.where(o_i[:, None] < o_i[None, :], b_w * (b_beta * scale)[:, None], 0.0)).to(DT)
    else:
        b_dp = (b_x * tl.where(o_i[:, None] >= o_i[None, :], (b_beta * scale)[None, :], 0.0)).to(DT)
        b_dpt = (b_y * tl.where(o_i[:, None] <= o_i[None, :], (b_beta * scale)[:, None], 0.0)).to(DT)
    if ERASE:
        b_x = tl.zeros([BT, BT], tl.float32)
        b_y = tl.zeros([BT, BT], tl.float32)
        for v_0 in tl.static_range(0, V, BV):
            if not WHOLE:
                b_e = load_tokens(errors, v_0, m_t, HV, V, BT, BV).to(DT)
            b_dv = load_tokens(dv, v_0, m_t, HV, V, BT, BV)
            b_x = tl.dot(b_dv.to(DT), tl.trans(b_e), b_x, input_precision="tf32x3")
            b_y = tl.dot(b_e, tl.trans(b_dv.to(DT)), b_y, input_precision="tf32x3")
            if QK_NORM:
                b_v = load_tokens(v, v_0, m_t, HV, V, BT, BV).to(tl.float32)
                b_ck -= tl.sum(b_v * b_dv.to(tl.float32), 1)
        b_dn = (b_x * tl.where(o_i[:, None] > o_i[None, :], b_w * -b_beta[None, :], 0.0)).to(DT)
        b_dnt = (b_y * tl.where(o_i[:, None] < o_i[None, :], b_w * -b_beta[:, None], 0.0)).to(DT)

    b_db = tl.sum(b_parts, 1)
    if QK_NORM:
        b_ck += 2.0 * b_beta * b_db
        b_rq = tl.load(norm_q + slot * BT + o_i)
        b_rk = tl.load(norm_k + slot * BT + o_i)
    if HAS_BETA:
        if RAW_BETA:
            b_db *= b_beta * (1.0 - b_beta)
        tl.store(d_beta + i_row + o_i * HV, b_db.to(d_beta.dtype.element_ty), mask=m_t)

    b_dg = tl.zeros([BT], tl.float32)
    b_written = tl.zeros([BT], tl.float32)
    b_through = tl.zeros([BV], tl.float32)
    for i_k in range(0, KP, BK):
        o_k = i_k + tl.arange(0, BK)
        m_tk = m_t[:, None] & (o_k < K)[None, :]
        o_key = o_w[:, None] * (H * K) + o_k[None, :]
        o_grad = o_w[:, None] * (HV * K) + o_k[None, :]
        # what reads the state
        b_dq = tl.zeros([BT, BK], tl.float32)
        b_kp = tl.zeros([BT, BK], tl.float32)
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            p_state = o_v.to(tl.int64)[:, None] * KP + o_k[None, :]
            b_s = tl.load(chunk_states + p_state, mask=(o_v < V)[:, None], other=0.0).to(DT)
            if not WHOLE:
                b_do = load_tokens(do, i_v, m_t, HV, V, BT, BV)
                if ERASE:
                    b_dv = load_tokens(dv, i_v, m_t, HV, V, BT, BV)
            b_dq = tl.dot(b_do.to(DT), b_s, b_dq, input_precision="tf32x3")
            if ERASE:
                b_kp = tl.dot(b_dv.to(DT), b_s, b_kp, input_precision="tf32x3")
        b_k = tl.load(k + o_key, mask=m_tk, other=0.0)
        b_q = tl.load(q + o_key, mask=m_tk, other=0.0)
        if QK_NORM:
            b_q = b_q.to(tl.float32) * b_rq[:, None]
            b_k = b_k.to(tl.float32) * b_rk[:, None]
        b_qh = b_q.to(DT)
        b_kh = b_k.to(DT)
        b_dq *= (b_in * scale)[:, None]
        b_dq = tl.dot(b_dp, b_kh, b_dq, input_precision="tf32x3")
        if DECAY:
            b_dg += tl.sum(b_q.to(tl.float32) * b_dq, 1)
            b_dq += b_self[:, None] * b_k.to(tl.float32)
        if QK_NORM:
            b_dq = b_rq[:, None] * (b_dq - b_q * b_cq[:, None])
        tl.store(dq + o_grad, b_dq.to(dq.dtype.element_ty), mask=m_tk)
        if ERASE:
            b_kp = tl.dot(b_dn, b_kh, b_kp * -b_in[:, None], input_precision="tf32x3")
            if DECAY:
                b_dg += tl.sum(b_k.to(tl.float32) * b_kp, 1)
        # what the state takes in
        b_kn = tl.zeros([BT, BK], tl.float32)
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            p_state = o_v.to(tl.int64)[:, None] * KP + o_k[None, :]
            b_ds = tl.load(d_states + p_state, mask=(o_v < V)[:, None], other=0.0).to(DT)
            if not WHOLE:
                b_e = load_tokens(errors, i_v, m_t, HV, V, BT, BV).to(DT)
            if DECAY:
                b_s = tl.load(chunk_states + p_state, mask=(o_v < V)[:, None], other=0.0).to(DT)
                b_through += tl.sum(b_s.to(tl.float32) * b_ds.to(tl.float32), 1)
            b_kn = tl.dot(b_e, b_ds, b_kn, input_precision="tf32x3")
        # loads with a policy of their own, or the compiler would keep the first ones in registers all the time
        b_k = tl.load(k + o_key, mask=m_tk, other=0.0, eviction_policy="evict_first")
        b_q = tl.load(q + o_key, mask=m_tk, other=0.0, eviction_policy="evict_first")
        if QK_NORM:
            b_q = b_q.to(tl.float32) * b_rq[:, None]
            b_k = b_k.to(tl.float32) * b_rk[:, None]
        b_qh = b_q.to(DT)
        b_kh = b_k.to(DT)
        b_kn *= b_out[:, None]
        if DECAY:
            b_written += tl.sum(b_k.to(tl.float32) * b_kn, 1)
        b_kn = tl.dot(b_dpt, b_qh, b_kn, input_precision="tf32x3")
        if ERASE:
            b_kn = tl.dot(b_dnt, b_kh, b_kn, input_precision="tf32x3")
        if DECAY:
            b_dg -= tl.sum(b_k.to(tl.float32) * b_kn, 1)
            b_kn += b_self[:, None] * b_q.to(tl.float32)
        if ERASE:
            b_kn += b_kp
        if QK_NORM:
            b_kn = b_rk[:, None] * (b_kn - b_k * b_ck[:, None])
        tl.store(dk + o_grad, b_kn.to(dk.dtype.element_ty), mask=m_tk)

    if DECAY:
        b_left = tl.sum(b_through) * b_all + tl.sum(b_written)
        b_dg = tl.cumsum(tl.where(m_t, b_dg, 0.0), 0, reverse=True) + b_left
        b_dg = tl.where(b_g > SMALLEST_LOG_DECAY, b_dg, 0.0)
        tl.store(d_gate + i_row + o_i * HV, b_dg.to(d_gate.dtype.element_ty), mask=m_t)
