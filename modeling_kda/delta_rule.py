"""The recurrence of the linear lineage: the step form is the definition, the chunk form is the fast path.

    S = exp(log_decay_t) * S        forget
    e = v_t - S^T k_t               compare with what k_t already retrieves (erase=False: e = v_t)
    S = S + beta_t k_t e^T          write
    o_t = scale * S^T q_t           read

B batch, T time, H query/key heads, HV value heads, K key channels, V value channels, N sequences.
log_decay has one rate per head (last dimension 1) or one per key channel (K): Kimi Delta Attention, arXiv:2510.26692.

Chunk form, for C tokens that start from state S. decay(j..i) is the product of exp(log_decay) over tokens j+1 to i,
into_i is decay(start..i) and out_j is decay(j..end):

    scores_ij  = scale q_i . (decay(j..i) k_j)      i >= j     what i reads of what j writes
    overlap_ij = (beta k)_i . (decay(j..i) k_j)     i > j      what i corrects of what j writes
    writes = (I + overlap)^-1 (beta v - (into beta k) S)       erase=False: beta v
    o = (into scale q) S + scores writes
    S = into_C S + (out k)^T writes

q and beta k meet the state and the earlier keys in the same way: they are stacked as R = 2 readers (1 without erase).
decay(j..i) differs per channel, so scores and overlap are not products of two matrices. They are built from pairs of
neighbouring blocks of 1, 2, 4, ... tokens: a row in the right block has the factor `into` (counted from that block's
start), a column in the left block the factor `out` (counted to that block's end). Every factor is a product of decays
of tokens between j and i only, so any gate is exact and no token sees the future, forward and backward.
"""

import math
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

# One round of the chunk form works on a slab of chunks; on a CPU it should stay in the cache of one core.
SLAB_BYTES = 2**19
SLAB_BYTES_OF_ACCELERATORS = 2**26


def recurrent_delta_rule(
    q, k, v, beta=None, log_decay=None, state=None, *, erase=True, scale=None, cu_seqlens=None, inplace=False
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step per token. This is the definition: every other path is tested against it.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V], HV a multiple of H; value head i uses query/key head i // (HV // H).
        beta: [B, T, HV], None for ones.
        log_decay: [B, T, HV, 1 or K], at most 0 (-inf forgets everything), None for zeros.
        state: [B, HV, K, V], None for zeros. With `cu_seqlens`: [N, HV, K, V].
        erase: write v minus what k already retrieves (delta rule), or just v.
        scale: multiplies the output, default K ** -0.5.
        cu_seqlens: [N + 1] int32 or int64, for N sequences packed along T (then B is 1): sequence n is the tokens
            from cu_seqlens[n] up to cu_seqlens[n + 1], possibly none.
        inplace: overwrite `state` with the new state and return it; otherwise it is never modified. For decoding: one
            token takes half the time. `state` must be contiguous and in the dtype of the result, and no input may
            need a gradient.

    Returns:
        o [B, T, HV, V] in the dtype of v, and the state after the last token in float32.
        All is computed in float32, also under autocast, or in float64 if an input is float64.

    Raises:
        ValueError: a shape or a dtype does not fit, or `inplace` is not possible.
    """
    x = _check(q, k, v, beta, log_decay, state, scale, cu_seqlens)
    if inplace and (x.needs_grad or state is not x.state or not state.is_contiguous()):
        raise ValueError(f"inplace needs a contiguous state of dtype {x.state.dtype} and no gradients; leave it out")
    tokens = (q, k, v, x.beta, x.log_decay)
    with _without_autocast(q.device):
        if cu_seqlens is not None:
            o, new_state = _loop_over_sequences(tokens, x, erase)
        elif q.shape[1] == 1 and not x.needs_grad:
            o, new_state = _decode_step(*tokens, x.state, x.scale, erase, inplace)
        else:
            o, new_state = _loop_over_tokens(*tokens, x.state, x.scale, erase)
    if inplace and new_state is not state:
        new_state = state.copy_(new_state)
    return o.to(v.dtype), new_state


def chunk_delta_rule(
    q, k, v, beta=None, log_decay=None, state=None, *, erase=True, scale=None, cu_seqlens=None, chunk_size=32
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as `recurrent_delta_rule`, many tokens at a time; exact for any gate and any length.

    Decays of less than 1e-19 (float32) count as 0. The backward pass keeps the inputs, one state per chunk and two
    C x C matrices per chunk and head; it cannot be differentiated again.

    Args:
        chunk_size: C, a multiple of 16; it is rounded up to a power of two.
    """
    if chunk_size < 16 or chunk_size % 16:
        raise ValueError(f"chunk_size must be a positive multiple of 16, got {chunk_size}")
    x = _check(q, k, v, beta, log_decay, state, scale, cu_seqlens)
    layout = _Layout(x.lengths, 1 << (chunk_size - 1).bit_length(), q.shape[2], v.shape[2], q.device)
    plan = _Plan(layout, x.scale, erase, x.needs_grad)
    return _ChunkDeltaRule.apply(q, k, v, x.beta, x.log_decay, x.state, plan)


def _loop_over_sequences(tokens, x, erase):
    o, states, start = [tokens[2][:, :0].to(x.state.dtype)], [x.state[:0]], 0
    for n, length in enumerate(x.lengths):
        sequence = (y[:, start : start + length] for y in tokens)
        o_n, state_n = _loop_over_tokens(*sequence, x.state[n : n + 1], x.scale, erase)
        o.append(o_n)
        states.append(state_n)
        start += length
    return torch.cat(o, 1), torch.cat(states)


def _loop_over_tokens(q, k, v, beta, log_decay, state, scale, erase):
    S = state.clone()  # [B, HV, K, V]; without tokens the caller must not get his own tensor back
    q, k = (x.to(S.dtype).repeat_interleave(v.shape[2] // q.shape[2], 2) for x in (q, k))
    v, beta, log_decay = (x.to(S.dtype) for x in (v, beta, log_decay))
    o = [v[:, :0]]
    for t in range(q.shape[1]):
        S = log_decay[:, t].exp()[..., None] * S
        e = v[:, t] - _retrieve(S, k[:, t]) if erase else v[:, t]
        S = S + k[:, t, :, :, None] * (beta[:, t, :, None] * e)[:, :, None]
        o.append(scale * _retrieve(S, q[:, t])[:, None])
    return torch.cat(o, 1), S


def _retrieve(S, x):
    return (S * x[..., None]).sum(2)


def _decode_step(q, k, v, beta, log_decay, state, scale, erase, inplace):
    """One token without gradients: three passes over the state, to decay it, to read it for k and q, and to write."""
    decay = log_decay[:, 0].to(state.dtype).exp()[..., None]
    new_state = state.mul_(decay) if inplace else (state * decay).contiguous()
    S = new_state.flatten(0, 1)  # [B * HV, K, V], a view: what is written below reaches new_state
    kq = torch.stack((k[:, 0], q[:, 0]), 2).to(S.dtype)  # [B, H, 2, K]
    if k.shape[2] < v.shape[2]:
        kq = kq.repeat_interleave(v.shape[2] // k.shape[2], 1)
    kq = kq.flatten(0, 1)
    k = kq[:, :1].mT
    retrieved, o = torch.bmm(kq, S).split(1, 1)  # [B * HV, 1, V]
    e = v.to(S.dtype).reshape(retrieved.shape)
    writes = (e - retrieved if erase else e) * beta.to(S.dtype).reshape(-1, 1, 1)
    # o does not wait for the write: S^T q grows by (q . k) writes
    o = torch.baddbmm(o, torch.bmm(kq[:, 1:], k), writes, beta=scale, alpha=scale)
    S.baddbmm_(k, writes)
    return o.view(v.shape), new_state


class _Plan(NamedTuple):
    layout: "_Layout"
    scale: float
    erase: bool
    keep: bool  # what the backward pass needs


class _ChunkDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, beta, log_decay, state, plan):
        with _without_autocast(q.device):
            o, state, saved = _chunk_forward(q, k, v, beta, log_decay, state, plan)
        if plan.keep:
            ctx.save_for_backward(q, k, v, beta, log_decay, *saved)
            ctx.plan = plan
        return o, state

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dstate):
        with _without_autocast(do.device):
            grads = _chunk_backward(*ctx.saved_tensors, do, dstate, ctx.plan)
        return *(x if needed else None for x, needed in zip(grads, ctx.needs_input_grad, strict=False)), None


def _chunk_forward(q, k, v, beta, log_decay, state, plan):
    layout, C, (K, V) = plan.layout, plan.layout.C, state.shape[-2:]
    tokens = [_flat(x) for x in (q, k, v, beta, log_decay)]
    S = layout.sort(state)  # [N * HV, K, V], a copy
    o = S.new_empty(len(tokens[2]), V)
    kept = layout.num_rows if plan.keep else 0
    states, all_scores, inverses = S.new_empty(kept, K, V), S.new_empty(kept, C, C), S.new_empty(kept, C, C)
    for slab in layout.slabs(S):
        x = _load(tokens, slab, plan, S.dtype)
        into, out = x.decay, torch.ones_like(x.decay)
        scores = _pairwise(x.readers, x.k, into, out)
        inverse = _inverse(scores[:, :, 1]) if plan.erase else None
        scores, values, k_out = scores[:, :, 0], x.v * x.beta, x.k * out
        readers_into, o_slab = (x.readers * into[:, :, None]).flatten(1, 2), torch.empty_like(values)
        if plan.keep:
            all_scores[slab.rows] = scores
            if plan.erase:
                inverses[slab.rows] = inverse
        for step, columns, i in slab.steps:
            S_step = S[columns]
            if plan.keep:
                states[step] = S_step
            reads = torch.bmm(readers_into[i], S_step).view(-1, C, x.readers.shape[2], V)
            writes = torch.bmm(inverse[i], values[i] - reads[:, :, 1]) if plan.erase else values[i]
            torch.baddbmm(reads[:, :, 0], scores[i], writes, out=o_slab[i])
            S_step.mul_(into[i, -1, :, None]).baddbmm_(k_out[i].transpose(1, 2), writes)
        slab.scatter(o_slab, o)
    return o.view(v.shape).to(v.dtype), layout.unsort(S), (states, all_scores, inverses)


def _inverse(overlap):
    """(I + strictly lower part of overlap)^-1 by substitution: a power series explodes on correlated keys."""
    eye = torch.eye(overlap.shape[-1], dtype=overlap.dtype, device=overlap.device)
    return _flush(torch.linalg.solve_triangular(overlap, eye.expand_as(overlap), upper=False, unitriangular=True))


def _chunk_backward(q, k, v, beta, log_decay, states, scores, inverses, do, dstate, plan):
    layout, inputs = plan.layout, (q, k, v, beta, log_decay)
    tokens, do = [_flat(x) for x in inputs], _flat(do)
    dS = layout.sort(dstate)
    grads = [dS.new_empty(len(do), x.shape[1]) for x in tokens]
    for slab in reversed(layout.slabs(dS)):
        x = _load(tokens, slab, plan, dS.dtype)
        into, out = _chunk_decays(x.decay)
        d = _scan_backward(x, into, out, (states, scores, inverses), slab.gather(do, dS.dtype), dS, slab.steps)
        d.readers.mul_(into[:, :, None])
        d.k.mul_(out)
        _add_sums_(d.log_decay, d.log_decay, (x.readers * d.readers).sum(2), x.k * d.k)
        if into.shape[-1] == 1:
            _pairwise_backward_one_rate(x, d)
        else:
            _pairwise_backward(x, d)
        if plan.erase:
            d.beta.add_((d.readers[:, :, 1] * x.k).sum(-1, keepdim=True))
            d.k.addcmul_(d.readers[:, :, 1], x.beta)
        slab_grads = (d.readers[:, :, 0] * plan.scale, d.k, d.values * x.beta, d.beta, d.log_decay)
        for slab_grad, grad in zip(slab_grads, grads, strict=True):
            slab.scatter(slab_grad, grad)
    return *(_like(grad, x) for grad, x in zip(grads, inputs, strict=True)), layout.unsort(dS)


class _Gradients(NamedTuple):
    readers: torch.Tensor  # [M, C, R, K]
    k: torch.Tensor  # [M, C, K]
    values: torch.Tensor  # [M, C, V], of beta v
    beta: torch.Tensor  # [M, C, 1]
    log_decay: torch.Tensor  # [M, C, K or 1]
    scores: torch.Tensor  # [M, C, R, C], of scores and overlap


def _scan_backward(x, into, out, saved, do, dS, steps):
    """The sequential part, last step first. dS becomes the gradient of the state before the slab.

    Returns the gradients of readers * into, k * out, beta v, scores and overlap, and what log_decay gets through
    the state alone.
    """
    (states, scores, inverses), (M, C, R, _) = saved, x.readers.shape
    readers_into, k_out, values = x.readers * into[:, :, None], x.k * out, x.v * x.beta
    dreaders, dk, dscores = torch.empty_like(readers_into), torch.empty_like(k_out), do.new_empty(M, C, R, C)
    dvalues, dlog_decay = torch.empty_like(values), torch.empty_like(into)
    dreads = do[:, :, None].repeat(1, 1, R, 1)
    for step, columns, i in reversed(steps):
        S, dS_step, r_into = states[step], dS[columns], readers_into[i]
        dwrites = torch.bmm(k_out[i], dS_step).baddbmm_(scores[step].transpose(1, 2), do[i])
        writes = values[i]
        if R == 2:
            writes = torch.bmm(inverses[step], torch.baddbmm(writes, r_into[:, :, 1], S, alpha=-1))
            dwrites = torch.bmm(inverses[step].transpose(1, 2), dwrites)
            torch.neg(dwrites, out=dreads[i, :, 1])
        dvalues[i] = dwrites
        r_into, dr = r_into.flatten(1, 2), dreads[i].flatten(1, 2)
        torch.bmm(dr, writes.transpose(1, 2), out=dscores[i].flatten(1, 2))
        torch.bmm(dr, S.transpose(1, 2), out=dreaders[i].flatten(1, 2))
        torch.bmm(writes, dS_step.transpose(1, 2), out=dk[i])
        total = into[i, -1, :, None]
        dlog_decay[i] = ((S * dS_step).sum(-1, keepdim=True) * total).sum_to_size(total.shape)[:, None, :, 0]
        dS_step.mul_(total).baddbmm_(r_into.transpose(1, 2), dr)
    dbeta = (dvalues * x.v).sum(-1, keepdim=True)
    return _Gradients(dreaders, dk, dvalues, dbeta, dlog_decay, dscores)


def _pairwise(readers, k, into, out):
    """scores and overlap [M, C, R, C], zero above the diagonal; the diagonal of overlap is meaningless.

    readers [M, C, R, K], k [M, C, K]; into = decay and out = 1 [M, C, K or 1] grow in place to span the whole chunk.
    """
    M, C, R, K = readers.shape
    if into.shape[-1] < K:
        ones = torch.ones_like(into)
        products = torch.bmm(readers.flatten(1, 2), k.transpose(1, 2)).view(M, C, R, C)
        return products.mul_(_pairwise(ones[:, :, None], ones, into, out))
    scores = readers.new_zeros(M, C, R, C)
    scores[:, :, 0].diagonal(dim1=1, dim2=2).copy_((readers[:, :, 0] * k).sum(-1))
    for size in _sizes(C):
        (into_left, into_right), (out_left, _) = _halves(into, size), _halves(out, size)
        rows = _halves(readers, size)[1] * into_right[:, :, :, None]
        columns = _halves(k, size)[0] * out_left
        block = torch.bmm(rows.view(-1, size * R, K), columns.view(-1, size, K).transpose(1, 2))
        _blocks(scores, size).copy_(block.view(M, -1, size, R, size))
        _join_(into_left, into_right, out_left)
    return _flush(scores)


def _pairwise_backward(x, d):
    """Adds to the gradients of readers, k and log_decay what they get through scores and overlap."""
    M, C, R, K = x.readers.shape
    into, out = x.decay, torch.ones_like(x.decay)
    on_diagonal = d.scores[:, :, 0].diagonal(dim1=1, dim2=2)[..., None]
    d.readers[:, :, 0].addcmul_(on_diagonal, x.k)
    d.k.addcmul_(on_diagonal, x.readers[:, :, 0])
    for size in _sizes(C):
        (into_left, into_right), (out_left, _) = _halves(into, size), _halves(out, size)
        readers, k, r_into = _halves(x.readers, size)[1], _halves(x.k, size)[0], into_right[:, :, :, None]
        rows, columns = (readers * r_into).view(-1, size * R, K), (k * out_left).view(-1, size, K)
        dblock = _blocks(d.scores, size).reshape(-1, size * R, size)
        drows = torch.bmm(dblock, columns).view(readers.shape).mul_(r_into)
        dcolumns = torch.bmm(dblock.transpose(1, 2), rows).view(k.shape).mul_(out_left)
        _halves(d.readers, size)[1].add_(drows)
        _halves(d.k, size)[0].add_(dcolumns)
        dlog_decay_left, dlog_decay_right = _halves(d.log_decay, size)
        _add_sums_(dlog_decay_right, dlog_decay_left, drows.mul_(readers).sum(3), dcolumns.mul_(k))
        _join_(into_left, into_right, out_left)


def _pairwise_backward_one_rate(x, d):
    """The same with one rate per head, where scores and overlap are products of two matrices times decay(j..i)."""
    M, C, R, K = x.readers.shape
    ones = torch.ones_like(x.decay)
    dproducts = d.scores * _pairwise(ones[:, :, None], ones, x.decay, torch.ones_like(ones))
    dproducts[:, :, 1:].diagonal(dim1=1, dim2=3).zero_()
    readers, dproducts = x.readers.flatten(1, 2), dproducts.flatten(1, 2)
    d.readers.flatten(1, 2).baddbmm_(dproducts, x.k)
    d.k.baddbmm_(dproducts.transpose(1, 2), readers)
    # log_decay_t gets the sum of what passes from any j < t to any i >= t
    passed = torch.bmm(readers, x.k.transpose(1, 2)).mul_(dproducts).view(M, C, R, C).sum(2)
    before = passed.new_ones(C, C).triu(1).expand_as(passed)
    d.log_decay.add_(torch.bmm(passed, before).tril_().sum(1)[..., None])


def _add_sums_(dlog_decay_right, dlog_decay_left, from_rows, to_columns):
    """log_decay_t gets what rows i >= t received in the right block, and what columns j < t sent in the left block."""
    size = from_rows.shape[-2]
    lower = from_rows.new_ones(size, size).tril_()
    for dlog_decay, x, sums in ((dlog_decay_right, from_rows, lower.T), (dlog_decay_left, to_columns, lower.tril(-1))):
        x = x.sum_to_size(dlog_decay.shape).flatten(0, -3)
        dlog_decay.add_(torch.bmm(sums.expand(len(x), size, size), x).view(dlog_decay.shape))


def _chunk_decays(decay):
    into, out = decay.clone(), torch.ones_like(decay)
    for size in _sizes(decay.shape[1]):
        (into_left, into_right), (out_left, _) = _halves(into, size), _halves(out, size)
        _join_(into_left, into_right, out_left)
    return into, out


def _sizes(C):
    return [1 << i for i in range(C.bit_length() - 1)]


def _halves(x, size):
    """[M, C, ...] -> left and right blocks [M, number of pairs, size, ...], views."""
    return x.view(x.shape[0], -1, 2, size, *x.shape[2:]).unbind(2)


def _blocks(scores, size):
    """[M, C, R, C] -> [M, number of pairs, size, R, size]: right block by left block, a view."""
    M, C, R, _ = scores.shape
    pairs = scores.view(M, -1, 2, size, R, C // (2 * size), 2, size)[:, :, 1, :, :, :, 0]
    return pairs.diagonal(dim1=1, dim2=4).movedim(-1, 1)


def _join_(into_left, into_right, out_left):
    """Two blocks become one: `into` of the right one and `out` of the left one now span both."""
    smallest = _smallest_decay(into_left.dtype)
    torch.threshold_(out_left.mul_(into_right[:, :, -1:]), smallest, 0.0)
    torch.threshold_(into_right.mul_(into_left[:, :, -1:]), smallest, 0.0)


def _smallest_decay(dtype):
    """Two factors above it do not multiply to a denormal number. Those cost a CPU a hundred times more."""
    return torch.finfo(dtype).tiny ** 0.5


def _flush(x):
    """Zero for what is so small that its product with an ordinary number may be denormal."""
    return torch.nn.functional.hardshrink(x, torch.finfo(x.dtype).tiny * 2.0**26)


class _Tokens(NamedTuple):
    """A slab of M = chunks * HV rows, heads before time, in the dtype of the state."""

    readers: torch.Tensor  # [M, C, R, K]: scale q and, with erase, beta k
    k: torch.Tensor  # [M, C, K]
    v: torch.Tensor  # [M, C, V]
    beta: torch.Tensor  # [M, C, 1]
    decay: torch.Tensor  # [M, C, K or 1]


def _load(tokens, slab, plan, dtype):
    q, k = (slab.gather(x, dtype, of_keys=True) for x in tokens[:2])
    v, beta, log_decay = (slab.gather(x, dtype) for x in tokens[2:])
    readers = q.new_empty(*q.shape[:2], 2 if plan.erase else 1, q.shape[2])
    torch.mul(q, plan.scale, out=readers[:, :, 0])
    if plan.erase:
        torch.mul(k, beta, out=readers[:, :, 1])
    smallest = _smallest_decay(dtype)
    decay = torch.threshold_(log_decay.clamp_min_(math.log(smallest)).exp_(), 2 * smallest, 0.0)
    return _Tokens(readers, k, v, beta, decay)


class _Layout:
    """Where every token goes when sequences are cut into chunks of C tokens, one row per chunk and value head.

    Rows are ordered by step (first chunks of all sequences, then second chunks, ...), and within a step by sequence,
    the longest first: the sequences that still run at a step are the first ones, so one batched product serves all.
    """

    def __init__(self, lengths, C, H, HV, device):
        lengths = torch.tensor(lengths, dtype=torch.long)
        chunks = (lengths + C - 1) // C
        order = chunks.argsort(descending=True, stable=True)
        num_steps = int(chunks.max()) if len(chunks) else 0
        step, slot = (torch.arange(num_steps)[:, None] < chunks[order]).nonzero(as_tuple=True)
        sequence = order[slot]
        first = (lengths.cumsum(0) - lengths)[sequence] + step * C
        padding = torch.arange(C) >= (lengths[sequence] - step * C)[:, None]  # [chunks, C]
        token = (first[:, None] + torch.arange(C)).masked_fill_(padding, 0)[:, None]
        head = torch.arange(HV)[:, None]
        row = token * HV + head  # [chunks, HV, C], into [tokens * HV, .]
        key_row = token * H + head // (HV // H)
        self.C, self.HV, self.num_rows = C, HV, len(first) * HV
        self.order = order.to(device)
        self.value_rows, self.key_rows = row.view(-1, C).to(device), key_row.view(-1, C).to(device)
        padding = padding[:, None].expand_as(row).reshape(-1, C, 1)
        self.padding = padding.to(device) if padding.any() else None
        ends = (step.bincount(minlength=num_steps).cumsum(0) * HV).tolist()
        self.steps = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def slabs(self, S):
        """The rows in rounds that fit into a slab: parts of a step, or several steps."""
        num_bytes = SLAB_BYTES if S.device.type == "cpu" else SLAB_BYTES_OF_ACCELERATORS
        width = max(1, num_bytes // (self.C * S.shape[1] * S.element_size()))
        slabs = []
        for first in range(0, len(S), width):
            steps = []
            for step in self.steps:
                start, stop = step.start + first, min(step.stop, step.start + first + width)
                if start >= stop:
                    break
                if not steps or start != steps[-1][0].stop or stop - steps[0][0].start > width:
                    steps = []
                    slabs.append(_Slab(self, steps))
                i = start - (steps[0][0].start if steps else start)
                steps.append((slice(start, stop), slice(first, first + stop - start), slice(i, i + stop - start)))
        return slabs

    def sort(self, state):
        return state.index_select(0, self.order).flatten(0, 1)

    def unsort(self, S):
        return S.view(len(self.order), self.HV, *S.shape[1:]).index_select(0, self.order.argsort())


class _Slab(NamedTuple):
    layout: _Layout
    steps: list[tuple[slice, slice, slice]]  # for every step: rows of the layout, rows of S, rows of the slab

    @property
    def rows(self):
        return slice(self.steps[0][0].start, self.steps[-1][0].stop)

    def gather(self, x, dtype, of_keys=False):
        """[tokens * heads, .] -> [M, C, .], zero where there is no token."""
        index = (self.layout.key_rows if of_keys else self.layout.value_rows)[self.rows]
        x = x.index_select(0, index.flatten()).to(dtype).unflatten(0, index.shape)
        return x if self.layout.padding is None else x.masked_fill_(self.layout.padding[self.rows], 0)

    def scatter(self, x, out):
        """The way back for value heads: writes x [M, C, .] into out [tokens * HV, .]."""
        index, x = self.layout.value_rows[self.rows].flatten(), x.flatten(0, 1)
        if self.layout.padding is not None:
            is_token = ~self.layout.padding[self.rows].flatten()
            index, x = index[is_token], x[is_token]
        out.index_copy_(0, index, x)


def _flat(x):
    """[B, T, heads, .] -> [tokens * heads, .]"""
    return x.reshape(-1, x.shape[3] if x.ndim == 4 else 1)


def _like(x, tokens):
    """[tokens * HV, .] -> shape and dtype of `tokens`, a sum over the value heads that share a key head."""
    B, T, heads = tokens.shape[:3]
    groups = len(x) // max(1, B * T * heads)
    if groups > 1:
        x = x.view(B * T * heads, groups, -1).sum(1)
    return x.view(tokens.shape).to(tokens.dtype)


class _Checked(NamedTuple):
    beta: torch.Tensor
    log_decay: torch.Tensor
    state: torch.Tensor
    scale: float
    lengths: list[int]
    needs_grad: bool


def _check(q, k, v, beta, log_decay, state, scale, cu_seqlens):
    """Neutral values for what is absent, or a ValueError."""
    given = [x for x in (q, k, v, beta, log_decay, state) if x is not None]
    if not all(x.is_floating_point() for x in given):
        raise ValueError(f"all inputs must be floating point tensors, got {[str(x.dtype) for x in given]}")
    if q.ndim != 4 or q.shape[2] == 0:
        raise ValueError(f"q must be [B, T, H, K], got {list(q.shape)}")
    B, T, H, K = q.shape
    if v.ndim != 4 or v.shape[:2] != q.shape[:2] or v.shape[2] % H or v.shape[2] == 0:
        raise ValueError(f"v must be [B, T, HV, V] = [{B}, {T}, a multiple of {H}, V], got {list(v.shape)}")
    HV, V = v.shape[2:]
    lengths = [T] * B if cu_seqlens is None else _lengths(cu_seqlens, B, T)
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in given) else torch.float32
    beta = v.new_ones(B, T, HV) if beta is None else beta
    log_decay = v.new_zeros(B, T, HV, 1) if log_decay is None else log_decay
    state = v.new_zeros(len(lengths), HV, K, V, dtype=dtype) if state is None else state.to(dtype)
    for name, x, shapes in (
        ("k", k, [[B, T, H, K]]),
        ("beta", beta, [[B, T, HV]]),
        ("log_decay", log_decay, [[B, T, HV, K], [B, T, HV, 1]]),
        ("state", state, [[len(lengths), HV, K, V]]),
    ):
        if list(x.shape) not in shapes:
            raise ValueError(f"{name} must be {' or '.join(map(str, shapes))}, got {list(x.shape)}")
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    return _Checked(beta, log_decay, state, K**-0.5 if scale is None else scale, lengths, needs_grad)


def _lengths(cu_seqlens, B, T):
    """Number of tokens of each packed sequence."""
    if not torch.is_tensor(cu_seqlens) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens must be an int32 or int64 tensor, got {cu_seqlens}")
    if cu_seqlens.ndim != 1 or len(cu_seqlens) == 0:
        raise ValueError(f"cu_seqlens must be [N + 1], got {list(cu_seqlens.shape)}")
    bounds = cu_seqlens.tolist()
    lengths = [end - start for start, end in zip(bounds, bounds[1:], strict=False)]
    if B != 1 or bounds[0] != 0 or bounds[-1] != T or min(lengths, default=0) < 0:
        raise ValueError(f"cu_seqlens needs B = 1 and must rise from 0 to T = {T}, got B = {B} and {bounds}")
    return lengths


def _without_autocast(device):
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
