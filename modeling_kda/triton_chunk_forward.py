"""Triton kernels of the chunked forward pass: `prep_kernel` (every chunk alone) and `scan_kernel` (chunk after chunk).

For C tokens with start state S, G_i = sum of the log-decays up to and with token i, D_ij = exp(G_i - G_j):

    N_ij = sum_d k_i k_j D_ij  (i > j)        P_ij = scale sum_d q_i k_j D_ij  (i >= j)
    Z    = N (I + diag(beta) N)^-1            E    = (I - Z diag(beta)) (V - (k e^G) S)      the prediction errors
    U    = beta E     O = scale (q e^G) S + P U     S <- e^{G_C} S + (k e^{G_C - G})^T U

With decay per channel X = I - Z diag(beta) and W = X (k e^G) are prepared, and E = X V - W S: two products instead of
three follow each other from state to state. Everything else of a chunk waits for nothing.

Z holds the erasing of both directions without a division: I - Z diag(beta) = (I + N diag(beta))^-1 turns values into
errors, I - diag(beta) Z = (I + diag(beta) N)^-1 carries gradients back.

No exponent is positive and no factor spans more than it must. Rows i and columns j meet at the level that separates
them: halves of 2b rows, b = C/2 ... 1. There a row of the right half carries the decay from the middle to itself, a
row of the left half the decay from itself to the middle, so one tile exp(D_b), D_b a 0/1 matrix times the log-decays,
serves rows and columns at once, for gates of any size, and a later token never touches an earlier one. Where the gate
has a bound, the levels whose 2^n rows decay by no more than 2^-128 are done at once: a row as reader carries the decay
from the first of these rows, times the root of what the bound allows, and as writer the inverse of that.
"""

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the fast path needs triton: pip install triton") from error

from .triton_chunk_common import (
    BF16_OPERAND,
    LENGTHS,
    LOG2_E,
    activate_gate,
    exp2_flushed,
    head_decay_matrix,
    head_factors,
    keep_level,
    keep_levels_below,
    load_beta,
    load_factors,
    load_head_gate,
    load_key_block,
    load_steps,
    load_values,
    locate_chunk,
    locate_sequence,
    sum_steps,
)


@triton.jit
def load_inverse_norm(x, o_row, m_t, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr):
    """1 / sqrt(sum x^2 + 1e-6) per row, for rows at x + o_row."""
    b_sum = tl.zeros([BT], tl.float32)
    for i_d in range(0, D, BD):
        o_d = i_d + tl.arange(0, BD)
        b_x = tl.load(x + o_row[:, None] + o_d[None, :], mask=m_t[:, None] & (o_d < D)[None, :], other=0.0)
        b_sum += tl.sum(b_x.to(tl.float32) * b_x.to(tl.float32), 1)
    return tl.rsqrt(b_sum + 1e-6)


@triton.jit
def load_rows(x, o_row, o_k, m_t, K: tl.constexpr):
    """[BT, BK] of q, k or the gate."""
    return tl.load(x + o_row[:, None] + o_k[None, :], mask=m_t[:, None] & (o_k < K)[None, :], other=0.0)


@triton.jit
def activate_block(
    b_x, dt_bias, o_k, m_t, rate, lower_bound, K: tl.constexpr, GATE: tl.constexpr, PRECISE: tl.constexpr
):
    """Log-decays of a block in units of log 2, 0 outside."""
    m_k = o_k < K
    b_x = b_x.to(tl.float32)
    if GATE:
        b_x += tl.load(dt_bias + o_k, mask=m_k, other=0.0).to(tl.float32)[None, :]
    return activate_gate(b_x, rate, lower_bound, m_t[:, None] & m_k[None, :], LOG2_E, GATE, PRECISE)


@triton.jit
def store_decayed(b_x, b_e, x, o_block):
    """x times its decay, rounded once."""
    tl.store(x + o_block, (b_x.to(tl.float32) * b_e).to(x.dtype.element_ty))


@triton.jit
def store_solved(b_z, b_x, b_e, x, o_block, PRECISE: tl.constexpr):
    """-(I + b_z) times decayed rows, not in fp16: the smallest decays are below its range."""
    WIDE: tl.constexpr = tl.float32 if PRECISE else BF16_OPERAND
    b_x = b_x.to(tl.float32) * b_e
    b_x = tl.dot(b_z.to(WIDE), b_x.to(WIDE), b_x, input_precision="tf32x3")
    tl.store(x + o_block, (-b_x).to(x.dtype.element_ty))


@triton.jit
def add_near_products(m, b_q, b_k, b_g, shift, b_qk, b_kk, ERASE: tl.constexpr):
    """q k^T and k k^T with the decays inside of the rows that m sums from the first of: a reader has its own, times
    2^-shift, and a writer the inverse. Such numbers are outside the range of fp16."""
    b_e = sum_steps(m, b_g, False) - shift
    b_w = (b_k.to(tl.float32) * exp2_flushed(-b_e)).to(BF16_OPERAND)
    b_e = exp2_flushed(b_e)
    b_qk = tl.dot((b_q.to(tl.float32) * b_e).to(BF16_OPERAND), tl.trans(b_w), b_qk)
    if ERASE:
        b_kk = tl.dot((b_k.to(tl.float32) * b_e).to(BF16_OPERAND), tl.trans(b_w), b_kk)
    return b_qk, b_kk


@triton.jit
def erasing_matrix(
    b_n, b_beta, b_level, BT: tl.constexpr, NUM_LEVELS: tl.constexpr, PRECISE: tl.constexpr, DT: tl.constexpr
):
    """Z = (I + N diag(beta))^-1 N by block doubling, the recursive 2x2 block inverse: X holds inverses of diagonal
    blocks, and each level couples them in pairs. No power of a matrix is taken, and fp16 operands suffice."""
    o_i = tl.arange(0, BT)
    b_m = (b_n.to(tl.float32) * -b_beta[None, :]).to(DT)
    # blocks of two rows have nothing to multiply
    b_x = tl.where(o_i[:, None] == o_i[None, :], 1.0, 0.0).to(DT)
    b_x = keep_level(b_m, b_level, 0, b_x, PRECISE)
    for i_l in range(1, NUM_LEVELS):
        # of all pairs of blocks this level's are kept: M stays in shared memory, and X M in registers
        b_y = tl.dot(b_x, b_m, input_precision="tf32x3").to(DT)
        b_y = tl.dot(b_y, b_x, input_precision="tf32x3")
        b_x = keep_level(b_y.to(DT), b_level, i_l, b_x, PRECISE)
    return tl.dot(b_x, b_n, input_precision="tf32x3")


@triton.jit(do_not_specialize=LENGTHS)
def prep_kernel(
    q, k, gate, beta, A_log, dt_bias, cu_seqlens, steps, levels,              # inputs
    q_in, k_in, k_out, strength, row_q, row_k, row_out, norm_q, norm_k, total, scores, erasing, solving,  # per slot
    scale, lower_bound, T, NT, N,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    BT: tl.constexpr, NUM_LEVELS: tl.constexpr, BK: tl.constexpr,
    DECAY: tl.constexpr, ERASE: tl.constexpr, HAS_BETA: tl.constexpr,
    QK_NORM: tl.constexpr, GATE: tl.constexpr, RAW_BETA: tl.constexpr,
    NEAR: tl.constexpr, PRECISE: tl.constexpr, IS_VARLEN: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """P, Z and X of one chunk of one value head with decay per channel, scale q e^G, -W, k e^{G_C - G} and e^{G_C}.
    DT: dtype of the operands that are multiplied here. NEAR: how many levels the bound of the gate allows to do at
    once, 0 for none. The key channels are taken in one block or two."""
    i_s = tl.program_id(0) // HV
    i_hv = tl.program_id(0) % HV
    bos, length, i_t = locate_chunk(i_s, cu_seqlens, T, NT, N, BT, IS_VARLEN)
    if i_t * BT >= length:
        return
    o_i = tl.arange(0, BT)
    m_t = i_t * BT + o_i < length
    row = bos + i_t * BT
    slot = i_s.to(tl.int64) * HV + i_hv
    # 64-bit offsets once per block, 32-bit inside it
    q += (row * H + i_hv // (HV // H)) * K
    k += (row * H + i_hv // (HV // H)) * K
    gate += (row * HV + i_hv) * K
    o_key = o_i * (H * K)
    o_gate = o_i * (HV * K)
    rate = 1.0
    if GATE:
        rate = tl.exp(tl.load(A_log + i_hv).to(tl.float32))
        dt_bias += i_hv * K
    tl.static_assert(KP <= 2 * BK, "the key channels are taken in one or two blocks")
    # -W, scale q e^G and k e^{G_C - G} of a slot lie behind each other
    o_block = slot * 3 * BT * KP + o_i[:, None] * KP
    o_k = tl.arange(0, BK)
    # every read of the chunk is on its way before the first number is needed
    b_q = load_rows(q, o_key, o_k, m_t, K)
    b_k = load_rows(k, o_key, o_k, m_t, K)
    b_x = load_rows(gate, o_gate, o_k, m_t, K)
    if KP > BK:
        b_q1 = load_rows(q, o_key, o_k + BK, m_t, K)
        b_k1 = load_rows(k, o_key, o_k + BK, m_t, K)
        b_x1 = load_rows(gate, o_gate, o_k + BK, m_t, K)
    b_beta = load_beta(beta, row * HV + i_hv, o_i * HV, m_t, HAS_BETA, RAW_BETA)
    # the diagonal of q k^T needs no decay; the levels fill in the rest
    b_pair = b_q.to(tl.float32) * b_k.to(tl.float32)
    if KP > BK:
        b_pair += b_q1.to(tl.float32) * b_k1.to(tl.float32)
    b_diagonal = tl.sum(b_pair, 1)
    b_rq = scale
    b_rk = 1.0
    if QK_NORM:
        b_q2 = b_q.to(tl.float32) * b_q.to(tl.float32)
        b_k2 = b_k.to(tl.float32) * b_k.to(tl.float32)
        if KP > BK:
            b_q2 += b_q1.to(tl.float32) * b_q1.to(tl.float32)
            b_k2 += b_k1.to(tl.float32) * b_k1.to(tl.float32)
        b_rq = tl.rsqrt(tl.sum(b_q2, 1) + 1e-6)
        b_rk = tl.rsqrt(tl.sum(b_k2, 1) + 1e-6)
        tl.store(norm_q + slot * BT + o_i, b_rq)
        tl.store(norm_k + slot * BT + o_i, b_rk)
        b_rq = (b_rq * scale)[:, None]
        b_rk = b_rk[:, None]
    b_diagonal = b_diagonal[:, None] * b_rq * b_rk
    b_q = (b_q.to(tl.float32) * b_rq).to(DT)
    b_k = (b_k.to(tl.float32) * b_rk).to(DT)
    b_g = activate_block(b_x, dt_bias, o_k, m_t, rate, lower_bound, K, GATE, PRECISE)
    tl.store(total + slot * KP + o_k, exp2_flushed(tl.sum(b_g, 0)))
    if KP > BK:
        b_q1 = (b_q1.to(tl.float32) * b_rq).to(DT)
        b_k1 = (b_k1.to(tl.float32) * b_rk).to(DT)
        b_g1 = activate_block(b_x1, dt_bias, o_k + BK, m_t, rate, lower_bound, K, GATE, PRECISE)
        tl.store(total + slot * KP + BK + o_k, exp2_flushed(tl.sum(b_g1, 0)))
    o_block += o_k[None, :]
    m = load_steps(steps, NUM_LEVELS, BT)
    b_in = exp2_flushed(sum_steps(m, b_g, PRECISE))
    store_decayed(b_q, b_in, q_in, o_block)
    if KP > BK:
        b_in = exp2_flushed(sum_steps(m, b_g1, PRECISE))
        store_decayed(b_q1, b_in, q_in, o_block + BK)
    m = load_steps(steps, NUM_LEVELS + 1, BT)
    store_decayed(b_k, exp2_flushed(sum_steps(m, b_g, PRECISE)), k_out, o_block)
    if KP > BK:
        store_decayed(b_k1, exp2_flushed(sum_steps(m, b_g1, PRECISE)), k_out, o_block + BK)

    b_qk = tl.zeros([BT, BT], tl.float32)
    b_kk = tl.zeros([BT, BT], tl.float32)
    if NEAR:
        m = load_steps(steps, NUM_LEVELS + NEAR - 1, BT)
        shift = lower_bound * ((2**NEAR - 1) * 0.5 * LOG2_E)
        b_qk, b_kk = add_near_products(m, b_q, b_k, b_g, shift, b_qk, b_kk, ERASE)
        if KP > BK:
            b_qk, b_kk = add_near_products(m, b_q1, b_k1, b_g1, shift, b_qk, b_kk, ERASE)
    # the table of levels, and what it chooses from, only after those products, which need the registers
    b_level = tl.load(levels + o_i[:, None] * BT + o_i[None, :])
    PT: tl.constexpr = scores.dtype.element_ty
    b_n = tl.zeros([BT, BT], DT)
    b_p = tl.where(o_i[:, None] == o_i[None, :], b_diagonal, 0.0).to(PT)
    if NEAR:
        b_p = keep_levels_below(b_qk.to(PT), b_level, NEAR, b_p, PRECISE)
        if ERASE:
            b_n = keep_levels_below(b_kk.to(DT), b_level, NEAR, b_n, PRECISE)
    for i_l in range(NEAR, NUM_LEVELS):
        m = load_steps(steps, i_l, BT)
        b_e = exp2_flushed(sum_steps(m, b_g, PRECISE)).to(DT)
        b_ke = b_k * b_e
        b_qk = tl.dot(b_q * b_e, tl.trans(b_ke), input_precision="tf32x3")
        if ERASE:
            b_kk = tl.dot(b_ke, tl.trans(b_ke), input_precision="tf32x3")
        if KP > BK:
            b_e = exp2_flushed(sum_steps(m, b_g1, PRECISE)).to(DT)
            b_ke = b_k1 * b_e
            b_qk = tl.dot(b_q1 * b_e, tl.trans(b_ke), b_qk, input_precision="tf32x3")
            if ERASE:
                b_kk = tl.dot(b_ke, tl.trans(b_ke), b_kk, input_precision="tf32x3")
        b_p = keep_level(b_qk.to(PT), b_level, i_l, b_p, PRECISE)
        if ERASE:
            b_n = keep_level(b_kk.to(DT), b_level, i_l, b_n, PRECISE)

    o_matrix = slot * BT * BT + o_i[:, None] * BT + o_i[None, :]
    tl.store(scores + o_matrix, b_p)
    tl.store(strength + slot * BT + o_i, b_beta)
    if ERASE:
        b_z = erasing_matrix(b_n, b_beta, b_level, BT, NUM_LEVELS, PRECISE, DT)
        tl.store(erasing + o_matrix, b_z.to(erasing.dtype.element_ty))
        b_z *= -b_beta[None, :]
        # X may take the place of Z
        tl.debug_barrier()
        b_x = tl.where(o_i[:, None] == o_i[None, :], 1.0, b_z)
        tl.store(solving + o_matrix, b_x.to(solving.dtype.element_ty))
        m = load_steps(steps, NUM_LEVELS, BT)
        store_solved(b_z, b_k, exp2_flushed(sum_steps(m, b_g, PRECISE)), k_in, o_block, PRECISE)
        if KP > BK:
            store_solved(b_z, b_k1, exp2_flushed(sum_steps(m, b_g1, PRECISE)), k_in, o_block + BK, PRECISE)


@triton.jit(do_not_specialize=LENGTHS)
def prep_head_kernel(
    q, k, log_decay, beta, cu_seqlens, levels,                                 # inputs
    strength, row_q, row_k, row_out, norm_q, norm_k, total, scores, erasing,   # per slot
    scale, T, NT, N,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    BT: tl.constexpr, NUM_LEVELS: tl.constexpr, BK: tl.constexpr,
    DECAY: tl.constexpr, ERASE: tl.constexpr, HAS_BETA: tl.constexpr,
    QK_NORM: tl.constexpr, RAW_BETA: tl.constexpr, IS_VARLEN: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """The same with one decay per head (DECAY = 1) or none: P, Z, e^{G_C}, and the factors of the rows of q and k that
    take the place of decayed copies."""
    i_s = tl.program_id(0) // HV
    i_hv = tl.program_id(0) % HV
    bos, length, i_t = locate_chunk(i_s, cu_seqlens, T, NT, N, BT, IS_VARLEN)
    if i_t * BT >= length:
        return
    o_i = tl.arange(0, BT)
    m_t = i_t * BT + o_i < length
    row = bos + i_t * BT
    slot = i_s.to(tl.int64) * HV + i_hv
    q += (row * H + i_hv // (HV // H)) * K
    k += (row * H + i_hv // (HV // H)) * K
    o_key = o_i * (H * K)
    if DECAY == 1:
        b_g = load_head_gate(log_decay, row * HV + i_hv, o_i * HV, m_t)
    b_rq = tl.full([BT], 1.0, tl.float32)
    b_rk = tl.full([BT], 1.0, tl.float32)
    if QK_NORM:
        b_rq = load_inverse_norm(q, o_key, m_t, K, BK, BT)
        b_rk = load_inverse_norm(k, o_key, m_t, K, BK, BT)
        tl.store(norm_q + slot * BT + o_i, b_rq)
        tl.store(norm_k + slot * BT + o_i, b_rk)

    # bf16 as it was given is exact
    KEYS: tl.constexpr = BF16_OPERAND if q.dtype.element_ty == tl.bfloat16 and not QK_NORM else DT
    b_p = tl.zeros([BT, BT], tl.float32)
    b_n = tl.zeros([BT, BT], tl.float32)
    for i_k in tl.static_range(0, KP, BK):
        o_k = i_k + tl.arange(0, BK)
        b_q = (load_rows(q, o_key, o_k, m_t, K).to(tl.float32) * b_rq[:, None]).to(KEYS)
        b_k = (load_rows(k, o_key, o_k, m_t, K).to(tl.float32) * b_rk[:, None]).to(KEYS)
        b_p = tl.dot(b_q, tl.trans(b_k), b_p, input_precision="tf32x3")
        if ERASE:
            b_n = tl.dot(b_k, tl.trans(b_k), b_n, input_precision="tf32x3")
    b_in = tl.full([BT], 1.0, tl.float32)
    b_out = tl.full([BT], 1.0, tl.float32)
    if DECAY == 1:
        b_sum, b_in, b_out, b_all = head_factors(b_g)
        b_d = head_decay_matrix(b_sum, b_p, True)
        b_p *= b_d
        b_n *= b_d
        tl.store(total + slot, b_all)
    tl.store(row_q + slot * BT + o_i, b_in * b_rq * scale)
    tl.store(row_k + slot * BT + o_i, b_in * b_rk)
    tl.store(row_out + slot * BT + o_i, b_out * b_rk)

    o_matrix = slot * BT * BT + o_i[:, None] * BT + o_i[None, :]
    b_p = tl.where(o_i[:, None] >= o_i[None, :], b_p * scale, 0.0)
    tl.store(scores + o_matrix, b_p.to(scores.dtype.element_ty))
    b_beta = load_beta(beta, row * HV + i_hv, o_i * HV, m_t, HAS_BETA, RAW_BETA)
    tl.store(strength + slot * BT + o_i, b_beta)
    if ERASE:
        b_n = tl.where(o_i[:, None] > o_i[None, :], b_n, 0.0)
        b_level = tl.load(levels + o_i[:, None] * BT + o_i[None, :])
        PRECISE: tl.constexpr = tl.float32 == DT
        b_z = erasing_matrix(b_n.to(DT), b_beta, b_level, BT, NUM_LEVELS, PRECISE, DT)
        tl.store(erasing + o_matrix, b_z.to(erasing.dtype.element_ty))


@triton.jit(do_not_specialize=LENGTHS)
def scan_kernel(
    v, q_in, k_in, k_out, strength, row_q, row_k, row_out, total, scores, solving,  # inputs, prepared
    state, segment_state, cu_seqlens,
    o, errors, chunk_states, final_state,                                      # outputs
    T, NT, N, NUM_SEGMENTS,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, NUM_LEVELS: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, ERASE: tl.constexpr, HAS_STATE: tl.constexpr, SEGMENT: tl.constexpr, SAVE: tl.constexpr,
    IS_VARLEN: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """O, and the state after the last token, of BV value channels of one head, chunk after chunk.

    SEGMENT 0: whole sequences. 1: only what each run of chunks does to a state, as a sum (V rows) and as a matrix (K
    more rows: the images of the unit states without values), into segment_state. 2: each run from its state there.
    SAVE: keep what the backward pass needs, the state before each chunk and the errors.
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
    m_kv = (o_k < K)[:, None] & m_v[None, :]
    p_io = tl.program_id(1).to(tl.int64) * K * V + o_k[:, None] * V + o_v[None, :]

    start = 0
    end = tl.cdiv(length, BT)
    if SEGMENT:
        run = tl.cdiv(end, NUM_SEGMENTS)
        start = tl.minimum(i_g * run, end)
        end = tl.minimum(start + run, end)
        rows = tl.cdiv(V, BV) * BV + KP
        # rows past the values hold the unit states
        b_s = tl.where(o_v[None, :] - (rows - KP) == o_k[:, None], 1.0, 0.0)
        i_run = tl.program_id(1).to(tl.int64) * NUM_SEGMENTS + i_g
        p_run = (i_run * rows + o_v[None, :]) * KP + o_k[:, None]
    if SEGMENT == 2:
        b_s = tl.load(segment_state + p_run)
    elif SEGMENT == 0:
        b_s = tl.zeros([KP, BV], tl.float32)
        if HAS_STATE:
            b_s += tl.load(state + p_io, mask=m_kv, other=0.0).to(tl.float32)

    # values that only a product reads are copied to shared memory with the rest; for wide blocks there is no room
    COPIED: tl.constexpr = DECAY == 2 and ERASE and BV <= 32
    i_next = tl.maximum(tl.minimum(start, end - 1), 0)
    if not COPIED:
        b_v = load_values(v, bos, i_next, length, i_hv, o_v, HV, V, BT, False)
    b_beta, b_total, b_rq, b_rk, b_ro = load_factors(
        strength, total, row_q, row_k, row_out, first, i_next, i_hv, HV, KP, BT, DECAY
    )
    for i_t in range(start, end):
        i_slot = (first + i_t).to(tl.int64) * HV + i_hv
        i_row = bos + i_t * BT
        o_value = (i_row * HV + i_hv) * V
        o_block = o_i[:, None] * (HV * V) + o_v[None, :]
        m_tv = (i_t * BT + o_i < length)[:, None] & m_v[None, :]
        o_matrix = i_slot * BT * BT + (o_i[:, None] * BT + o_i[None, :])
        b_half = b_s.to(DT)
        if DECAY == 2 and ERASE:
            if SEGMENT == 1:
                b_w = load_key_block(k_in, i_row, i_slot, i_t, length, H, i_h, K, KP, BT, DECAY).to(DT)
                b_u = tl.dot(b_w, b_half, input_precision="tf32x3")
            else:
                # the queries lie behind -W
                o_2 = tl.arange(0, 2 * BT)
                b_wq = tl.load(k_in + i_slot * (3 * BT * KP) + (o_2[:, None] * KP + o_k[None, :])).to(DT)
                b_u = tl.dot(b_wq, b_half, input_precision="tf32x3")
                b_u, b_o = tl.split(tl.permute(tl.reshape(b_u, (2, BT, BV)), (1, 2, 0)))
            b_x = tl.load(solving + o_matrix).to(DT)
            if COPIED:
                b_v = tl.load(v + o_value + o_block, mask=m_tv, other=0.0)
            b_u = tl.dot(b_x, b_v.to(DT), b_u, input_precision="tf32x3")
        else:
            b_k = load_key_block(k_out, i_row, i_slot, i_t, length, H, i_h, K, KP, BT, DECAY).to(DT)
            b_u = b_v.to(tl.float32)
            if ERASE:
                b_u -= tl.dot(b_k, b_half, input_precision="tf32x3") * b_rk[:, None]
                b_z = tl.load(solving + o_matrix).to(DT)
                b_u -= tl.dot(b_z, (b_u * b_beta[:, None]).to(DT), input_precision="tf32x3")
        b_write = b_u * b_beta[:, None]
        b_uh = b_write.to(DT)
        if DECAY == 2:
            b_new = b_uh
            b_s *= b_total[:, None]
        else:
            b_new = (b_write * b_ro[:, None]).to(DT)
            b_s *= b_total
        if DECAY == 2 and ERASE:
            b_k = load_key_block(k_out, i_row, i_slot, i_t, length, H, i_h, K, KP, BT, DECAY).to(DT)
        b_s = tl.dot(tl.trans(b_k), b_new, b_s, input_precision="tf32x3")
        # the next values and factors, which no product reads from shared memory, are asked for here and all is stored
        # below: every fence before a product waits for what is under way
        i_next = tl.minimum(i_t + 1, end - 1)
        if not COPIED:
            b_v_next = load_values(v, bos, i_next, length, i_hv, o_v, HV, V, BT, False)
        b_beta_next, b_total_next, b_rq_next, b_rk_next, b_ro_next = load_factors(
            strength, total, row_q, row_k, row_out, first, i_next, i_hv, HV, KP, BT, DECAY
        )
        if SEGMENT != 1:
            if not (DECAY == 2 and ERASE):
                b_q = load_key_block(q_in, i_row, i_slot, i_t, length, H, i_h, K, KP, BT, DECAY).to(DT)
                b_o = tl.dot(b_q, b_half, input_precision="tf32x3")
                if DECAY != 2:
                    b_o *= b_rq[:, None]
            b_p = tl.load(scores + o_matrix).to(DT)
            b_o = tl.dot(b_p, b_uh, b_o, input_precision="tf32x3")
            tl.store(o + o_value + o_block, b_o.to(o.dtype.element_ty), mask=m_tv)
        if SAVE:
            p_s = i_slot * V * KP + o_v[None, :] * KP + o_k[:, None]
            tl.store(chunk_states + p_s, b_half, mask=m_v[None, :])
            if ERASE:
                tl.store(errors + o_value + o_block, b_u.to(errors.dtype.element_ty), mask=m_tv)
        if not COPIED:
            b_v = b_v_next
        b_beta = b_beta_next
        b_total = b_total_next
        b_rq = b_rq_next
        b_rk = b_rk_next
        b_ro = b_ro_next

    if SEGMENT == 1:
        tl.store(segment_state + p_run, b_s)
    elif SEGMENT == 0 or i_g == NUM_SEGMENTS - 1:
        tl.store(final_state + p_io, b_s, mask=m_kv)


@triton.jit(do_not_specialize=LENGTHS)
def merge_kernel(
    state, segment_state, NUM_SEGMENTS,
    K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr,
    HAS_STATE: tl.constexpr,
):  # fmt: skip
    """Turns what every run of chunks does to a state (S -> S M + E, transposed; E in V rows, M in K more) into the
    state before each run, which replaces E."""
    o_v = tl.program_id(0) * BV + tl.arange(0, BV)
    o_k = tl.arange(0, KP)
    i_nh = tl.program_id(1).to(tl.int64)
    b_s = tl.zeros([BV, KP], tl.float32)
    if HAS_STATE:
        p_state = state + i_nh * K * V + o_k[None, :] * V + o_v[:, None]
        b_s += tl.load(p_state, mask=(o_v < V)[:, None] & (o_k < K)[None, :], other=0.0).to(tl.float32)
    p_run = segment_state + i_nh * NUM_SEGMENTS * (VP + KP) * KP
    for _ in range(NUM_SEGMENTS):
        p_sum = p_run + o_v[:, None] * KP + o_k[None, :]
        b_e = tl.load(p_sum)
        b_m = tl.load(p_run + (VP + o_k)[:, None] * KP + o_k[None, :])
        tl.store(p_sum, b_s)
        b_s = tl.dot(b_s, b_m, b_e, input_precision="tf32x3")
        p_run += (VP + KP) * KP
