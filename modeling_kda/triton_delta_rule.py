"""The chunked delta rule on a GPU: checks, buffers, launches and gradients around the Triton kernels.

The definition of the operation is `recurrent_delta_rule` in delta_rule.py, and the mathematics of the chunked form are
at the head of triton_chunk_forward.py and triton_chunk_backward.py. B batch, T time, H query and key heads of K
channels, HV value heads of V channels. Nothing here waits for the device, so calls can be captured in a CUDA graph.
"""

import os
import zlib
from functools import cached_property

import torch
from torch import Tensor

try:
    import triton.language as tl
except ImportError as error:
    raise ImportError("the fast path needs triton: pip install triton") from error

from .triton_chunk_backward import head_gradient_kernel, reverse_scan_kernel
from .triton_chunk_blocks import (
    BLOCKS,
    CHUNK,
    FULL_GRID,
    MIN_PADDED_K,
    NUM_LEVELS,
    fit,
    levels_at_once,
    pair_levels,
    pair_masks,
    shared_memory_of,
    step_masks,
    tail_mask,
)
from .triton_chunk_channels import CHANNELS, channel_gradient_kernel, score_gradient_kernel
from .triton_chunk_common import BF16_OPERAND
from .triton_chunk_forward import merge_kernel, prep_head_kernel, prep_kernel, scan_kernel
from .triton_launch import (
    DTYPES,
    INTERPRETED,
    choose,
    compiled_for,
    eager_function,
    launch,
    needs_gradients,
    on_device,
)

MAX_DIM = 256


def triton_chunk_delta_rule(
    q, k, v, beta=None, log_decay=None, state=None, *, erase=True, scale=None, cu_seqlens=None
):
    """The chunked delta rule on a GPU, differentiable, with the meaning of `recurrent_delta_rule`.

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V] with HV a multiple of H. bf16, fp16 or fp32; q and k are taken in the
            dtype of v.
        beta: [B, T, HV] or None for 1. log_decay: [B, T, HV, 1 or K], <= 0, or None for 0. Any float dtype.
        state: [B, HV, K, V], or None for zeros. With cu_seqlens [N, HV, K, V].
        erase: whether a token first subtracts what its key already retrieves; keys must then be about unit vectors.
        scale: multiplier of q, K**-0.5 if not given.
        cu_seqlens: [N + 1] integers on the device, bounds of N sequences packed in one row (B == 1).

    Returns: outputs [B, T, HV, V] in v's dtype, and the state after the last token in fp32.
    Raises: ValueError where `unsupported` names a reason.
    """
    return _call(q, k, v, beta, log_decay, state, None, None, cu_seqlens, erase, scale, 0, 0.0, False, False)


def triton_chunk_delta_rule_from_logits(
    q, k, v, beta_logits=None, gate_logits=None, A_log=None, dt_bias=None, state=None,
    *, lower_bound=None, scale=None, cu_seqlens=None,
):  # fmt: skip
    """The erasing rules with their activations inside the kernels: q and k to unit length (x / sqrt(sum x^2 + 1e-6)),
    beta = sigmoid(beta_logits), and per channel log_decay = -exp(A_log) softplus(gate_logits + dt_bias), or
    lower_bound * sigmoid(exp(A_log) (gate_logits + dt_bias)).

    Args: as in `triton_chunk_delta_rule`; gate_logits: [B, T, HV, K] or None for no decay. A_log: [HV].
        dt_bias: [HV * K]. lower_bound: None for the softplus form, or a negative number.
    """
    gate = 0 if gate_logits is None else 1 if lower_bound is None else 2
    if gate and gate_logits.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"gate_logits must be [B, T, HV, K] with K = {q.shape[-1]}, got {list(gate_logits.shape)}; "
            "compute gates of one rate per head outside and pass log_decay"
        )
    bound = 0.0 if lower_bound is None else lower_bound
    raw_beta = beta_logits is not None
    return _call(
        q, k, v, beta_logits, gate_logits, state, A_log, dt_bias, cu_seqlens, True, scale, gate, bound, True, raw_beta
    )


def unsupported(q, k, v, beta=None, log_decay=None, state=None, *, erase=True, scale=None, cu_seqlens=None):
    """Why these kernels cannot run this call, or None if they can."""
    H, K, HV, V = *q.shape[2:], *v.shape[2:]
    if q.device.type != "cuda" and not INTERPRETED:
        return f"Triton kernels need tensors on a GPU, got {q.device}"
    if v.dtype not in DTYPES or q.dtype not in DTYPES or k.dtype not in DTYPES:
        return f"q, k and v must be bf16, fp16 or fp32, got {q.dtype}, {k.dtype}, {v.dtype}"
    if max(K, V) > MAX_DIM:
        return f"K and V can be at most {MAX_DIM}, got K = {K} and V = {V}"
    if HV % H:
        return f"the number of value heads must be a multiple of the {H} key heads, got {HV}"
    if log_decay is not None and log_decay.shape[-1] not in (1, K):
        return f"log_decay must end in 1 or K = {K}, got {list(log_decay.shape)}"
    if cu_seqlens is not None and q.shape[0] != 1:
        return f"with cu_seqlens the sequences are packed in one row, got B = {q.shape[0]}"
    return None


def supports(*args, **kwargs):
    """Whether `triton_chunk_delta_rule` can run this call; `unsupported` says why not."""
    return unsupported(*args, **kwargs) is None


def _call(q, k, v, beta, gate, state, A_log, dt_bias, cu_seqlens, erase, scale, form, bound, qk_norm, raw_beta):
    reason = unsupported(q, k, v, beta, gate, state, cu_seqlens=cu_seqlens)
    if reason:
        raise ValueError(reason)
    # only kernels for equal dtypes are checked on a GPU; the products are in v's precision in any case
    q, k = (x if x.dtype == v.dtype else x.to(v.dtype) for x in (q, k))
    tensors = [None if x is None else x.contiguous() for x in (q, k, v, beta, gate, state, A_log, dt_bias, cu_seqlens)]
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    # kernels round scale * q to fp16, which keeps no very small or large numbers
    inside, outside = (scale, None) if 2**-10 <= abs(scale) <= 2**10 else (1.0, scale)
    save = needs_gradients(*tensors)
    run = choose(forward_op, eager_chunks, _forward, *tensors)
    with on_device(q):
        o, final, *_ = run(*tensors, erase, inside, form, float(bound), qk_norm, raw_beta, save)
    return o if outside is None else o * outside, final


# Long sequences of few heads go in several runs at once. How many depends on the batch, and with it the last bits of
# outputs: KDA_SPLIT_SEQUENCES=0 keeps a sequence in one run, for the same bits alone and in any batch.
SPLIT_SEQUENCES = os.environ.get("KDA_SPLIT_SEQUENCES") != "0"


class Problem:
    """Sizes, switches and launch arguments of one call, shared by its kernels."""

    def __init__(self, q, k, v, beta, gate, cu_seqlens, erase, form, qk_norm, raw_beta, *others):
        """others: what else the caller brought and kernels read."""
        self.brought = q, k, v, beta, gate, cu_seqlens, *others
        self.B, self.T, self.H, self.K = q.shape
        self.HV, self.V = v.shape[2:]
        self.rows = self.B * self.T
        self.N = self.B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        NT = (self.T + CHUNK - 1) // CHUNK
        # with cu_seqlens an upper bound, known without looking at it
        self.slots = self.B * NT if cu_seqlens is None else self.T // CHUNK + self.N
        self.KP = max(MIN_PADDED_K, 1 << (self.K - 1).bit_length())
        self.decay = 0 if gate is None else 1 if gate.shape[-1] == 1 else 2
        self.precise = v.dtype == torch.float32
        self.blocks = fit(BLOCKS[self.precise, self.KP], shared_memory_of(q.device))
        self.dtype = torch.float32 if self.precise else torch.bfloat16
        self.erase, self.qk_norm = erase, qk_norm
        self.lengths = self.T, NT, self.N
        self.key_sizes = {"H": self.H, "HV": self.HV, "K": self.K, "KP": self.KP, "NUM_LEVELS": NUM_LEVELS}
        self.varlen = {"IS_VARLEN": cu_seqlens is not None, "BT": CHUNK}
        self.write = {"ERASE": erase, "HAS_BETA": beta is not None, "RAW_BETA": raw_beta}
        self.gate = {"DECAY": self.decay}
        self.activations = {"QK_NORM": qk_norm, "GATE": form, "PRECISE": self.precise}
        # keys are expected to be about unit vectors where they erase, so that fp16 gains precision and cannot overflow
        narrow = erase or self.decay == 2
        self.wide_dtype = tl.float32 if self.precise else BF16_OPERAND.value
        self.prep_dtype = tl.float16 if narrow and not self.precise else self.wide_dtype

    def near(self, bound):
        """How many levels kernels do at once: more than none where the gate has a bound, and not in fp32."""
        return levels_at_once(bound) if self.activations["GATE"] == 2 and not self.precise else 0

    @cached_property
    def compiled(self):
        return compiled_for(*self.brought)

    def launch(self, kernel, grid, *args, **options):
        launch(self.compiled, kernel, grid, args, options)


def _forward(
    q, k, v, beta, gate, state, A_log, dt_bias, cu_seqlens, erase, scale, form, bound, qk_norm, raw_beta, save
):
    """Launches the forward kernels on contiguous tensors. Returns o, the final state, and what a backward pass needs:
    prepared keys, write strengths and row factors, inverse norms, decays of chunks, P, Z, errors, earlier states; None
    for what is absent."""
    p = Problem(q, k, v, beta, gate, cu_seqlens, erase, form, qk_norm, raw_beta, state, A_log, dt_bias)
    outputs = _forward_buffers(p, q, v, save)
    o, final, keys, rows, norms, total, scores, erasing, errors, states = outputs
    if not p.slots or not p.HV:
        final.copy_(torch.zeros_like(final) if state is None else state)
        return outputs
    BK, warps, stages = p.blocks.prep
    options = {**p.key_sizes, "BK": BK, **p.gate, **p.write, **p.varlen, "QK_NORM": qk_norm}
    options |= {"DT": p.prep_dtype, "num_warps": warps, "num_stages": stages}
    rows, norms = _parts(rows, 4), _parts(norms, 2)
    prepared = *rows, *norms, total, scores, erasing
    grid = p.slots * p.HV, 1, 1
    scanned = _scan_keys(p, q, k, keys)
    # X takes the place of Z where no backward pass reads that
    solving = torch.empty_like(erasing) if save and p.erase and p.decay == 2 else erasing
    if p.decay == 2:
        p.launch(
            prep_kernel, grid, q, k, gate, beta, A_log, dt_bias, cu_seqlens, step_masks(q.device),
            pair_levels(q.device), *scanned, *prepared, solving, scale, bound, *p.lengths,
            GATE=form, NEAR=p.near(bound), PRECISE=p.precise, **options,
        )  # fmt: skip
    else:
        p.launch(
            prep_head_kernel, grid,
            q, k, gate, beta, cu_seqlens, pair_levels(q.device), *prepared, scale, *p.lengths, **options,
        )  # fmt: skip
    segments = 1 if save else num_segments(p)
    _scan(p, segments, (v, *scanned, *rows, total, scores, solving, state), cu_seqlens,
          (o, errors, states, final), save)  # fmt: skip
    return outputs


def num_segments(p):
    """Runs of chunks that go side by side where sequences and heads alone leave the device idle; a matter of shapes
    only, so that equal calls sum in equal order."""
    if not SPLIT_SEQUENCES:
        return 1
    programs = p.N * p.HV * ((p.V + 31) // 32)
    chunks = p.slots // max(p.N, 1)
    segments = min(2 * FULL_GRID // max(programs, 1), chunks // 16)
    # the states cost a pass of twice as many programs: fewer runs than these would be slower than one
    return segments if segments >= 8 and p.KP <= 128 and not p.precise else 1


def _scan(p, segments, inputs, cu_seqlens, outputs, save):
    """The scan over whole sequences; or first what each run of chunks does to a state, then the states between runs,
    then all runs at once."""
    state = inputs[-1]
    wide = p.blocks.many_heads
    fills = p.decay == 2 and not save and p.N * p.HV * ((p.V + wide[0] - 1) // wide[0]) >= FULL_GRID
    BV, warps, stages = wide if fills else p.blocks.scan
    blocks = (p.V + BV - 1) // BV
    lengths = *p.lengths, segments
    options = {**p.key_sizes, "V": p.V, "BV": BV}
    options |= {**p.gate, "ERASE": p.erase, **p.varlen}
    options |= {"HAS_STATE": state is not None, "SAVE": save, "DT": p.wide_dtype, "num_warps": warps}
    if segments == 1:
        grid = blocks, p.N * p.HV, 1
        p.launch(
            scan_kernel, grid, *inputs, None, cu_seqlens, *outputs, *lengths, **options, SEGMENT=0, num_stages=stages
        )
        return
    VP = blocks * BV
    between = torch.empty(p.N * p.HV, segments, VP + p.KP, p.KP, dtype=torch.float32, device=inputs[0].device)
    # twice as many programs here: two stages leave room for two of them on a processor
    p.launch(
        scan_kernel, (blocks + p.KP // BV, p.N * p.HV, segments),
        *inputs, between, cu_seqlens, *outputs, *lengths, **options, SEGMENT=1, num_stages=min(stages, 2),
    )  # fmt: skip
    p.launch(
        merge_kernel, (VP // 16, p.N * p.HV, 1),
        state, between, segments, K=p.K, KP=p.KP, V=p.V, VP=VP, BV=16, HAS_STATE=state is not None,
        num_warps=4, num_stages=1,
    )  # fmt: skip
    p.launch(
        scan_kernel, (blocks, p.N * p.HV, segments),
        *inputs, between, cu_seqlens, *outputs, *lengths, **options, SEGMENT=2, num_stages=stages,
    )  # fmt: skip


def _forward_buffers(p, q, v, save):
    def new(*shape, dtype=torch.float32):
        return q.new_empty(*shape, dtype=dtype)

    per_channel = p.decay == 2
    o = torch.empty_like(v)
    final = new(p.N, p.HV, p.K, p.V)
    keys = new(p.slots, p.HV, 3, CHUNK, p.KP, dtype=p.dtype) if per_channel else None
    rows = new(1 if per_channel else 4, p.slots, p.HV, CHUNK)
    norms = new(2, p.slots, p.HV, CHUNK) if p.qk_norm else None
    total = new(p.slots, p.HV, p.KP) if per_channel else new(p.slots, p.HV)
    scores = new(p.slots, p.HV, CHUNK, CHUNK, dtype=p.dtype)
    erasing = torch.empty_like(scores) if p.erase else None
    errors = torch.empty_like(v, dtype=p.dtype) if save and p.erase else None
    states = new(p.slots, p.HV, p.V, p.KP, dtype=p.dtype) if save else None
    return o, final, keys, rows, norms, total, scores, erasing, errors, states


def _parts(x, count):
    """The tensors that share an allocation, None for those that are not there."""
    parts = () if x is None else x.unbind()
    return *parts, *(None,) * (count - len(parts))


def _scan_keys(p, q, k, keys):
    """What the scans read: scale q e^G, -W and k e^{G_C - G} of every slot, or the inputs, whose decays per head are
    row factors. The queries lie behind -W in memory: one product reads both."""
    if p.decay != 2:
        return q, k, k
    k_in, q_in, k_out = keys.unbind(2)
    return q_in, k_in, k_out


def _backward(
    do, d_final, q, k, v, beta, gate, A_log, dt_bias, cu_seqlens, o, keys, rows, norms, total, scores, erasing, errors,
    states, erase, scale, form, bound, qk_norm, raw_beta, has_state,
):  # fmt: skip
    """Launches the backward kernels. Returns the gradients of q, k, v, beta, gate, state, A_log and dt_bias, None for
    what is absent."""
    saved = o, keys, rows, norms, total, scores, erasing, errors, states
    p = Problem(q, k, v, beta, gate, cu_seqlens, erase, form, qk_norm, raw_beta, do, d_final, A_log, dt_bias, *saved)
    errors = errors if erase else v
    dv, d_beta, d_states, d_state, parts = _reverse_scan(
        p, do, d_final, q, k, v, beta, cu_seqlens, keys, rows, total, scores, erasing, errors, has_state
    )
    before = dv, norms, errors, states, d_states
    if p.decay == 2:
        gradients = _channel_gradients(
            p, do, q, k, v, o, beta, gate, A_log, dt_bias, cu_seqlens, before, total, parts, d_beta, scale, form, bound
        )  # fmt: skip
    else:
        gradients = _head_gradients(p, do, q, k, v, o, beta, gate, cu_seqlens, before, parts, d_beta, scale)
    dq, dk, d_gate, d_rate, d_bias = gradients
    if p.HV != p.H:
        dq, dk = (g.view(p.B, p.T, p.H, -1, p.K).sum(3).to(x.dtype) for g, x in ((dq, q), (dk, k)))
    return dq, dk, dv, d_beta, d_gate, d_state, d_rate, d_bias


def _reverse_scan(p, do, d_final, q, k, v, beta, cu_seqlens, keys, rows, total, scores, erasing, errors, has_state):
    BV, warps, stages = p.blocks.reverse
    blocks = (p.V + BV - 1) // BV
    dv = torch.empty_like(v)
    d_beta = None if beta is None else torch.empty_like(beta)
    d_states = q.new_empty(p.slots, p.HV, p.V, p.KP, dtype=p.dtype)
    d_state = q.new_empty(p.N, p.HV, p.K, p.V, dtype=torch.float32) if has_state else None
    parts = q.new_empty(blocks, p.rows, p.HV, dtype=torch.float32)
    p.launch(
        reverse_scan_kernel, (blocks, p.N * p.HV, 1),
        do, errors, *_scan_keys(p, q, k, keys), *_parts(rows, 4), total, scores, erasing, d_final, None,
        cu_seqlens, dv, parts, d_states, d_state, *p.lengths, 1, p.rows, **p.key_sizes, V=p.V,
        BV=BV, **p.gate, ERASE=p.erase, HAS_FINAL=d_final is not None, HAS_STATE=has_state, SEGMENT=0, **p.varlen,
        DT=p.wide_dtype, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dv, d_beta, d_states, d_state, parts


def _key_gradients(p, q, k):
    """Buffers for the gradients of q and k, of each value head: fp32 where several share a key head."""
    return (x.new_empty(p.B, p.T, p.HV, p.K, dtype=torch.float32 if p.HV != p.H else x.dtype) for x in (q, k))


def _head_gradients(p, do, q, k, v, o, beta, gate, cu_seqlens, before, parts, d_beta, scale):
    dv, norms, errors, states, d_states = before
    decaying, constant = (p.blocks.gated, p.blocks.erasing) if p.erase else (p.blocks.decaying, p.blocks.adding)
    BV, warps, stages = decaying if p.decay else constant
    dq, dk = _key_gradients(p, q, k)
    d_gate = None if gate is None else torch.empty_like(gate)
    if p.slots:
        p.launch(
            head_gradient_kernel, (p.slots * p.HV, 1, 1),
            q, k, v, o, gate, beta, parts, errors, do, dv, cu_seqlens, *_parts(norms, 2), states, d_states,
            dq, dk, d_beta, d_gate, scale, *p.lengths, p.rows, parts.shape[0], **p.key_sizes,
            V=p.V, BK=MIN_PADDED_K, BV=BV, PARTS=max(2, 1 << (parts.shape[0] - 1).bit_length()), **p.gate, **p.write,
            QK_NORM=p.qk_norm, PRECISE=p.precise, **p.varlen, DT=p.wide_dtype, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return dq, dk, d_gate, None, None


def _channel_gradients(
    p, do, q, k, v, o, beta, gate, A_log, dt_bias, cu_seqlens, before, total, parts, d_beta, scale, form, bound
):  # fmt: skip
    dv, norms, errors, states, d_states = before
    BV, warps, stages = p.blocks.channels
    blocks = p.KP // CHANNELS
    dq, dk = _key_gradients(p, q, k)
    d_gate = torch.empty_like(gate)
    fused = A_log is not None
    # slots past the end of a packed sequence stay unwritten
    new = q.new_empty if cu_seqlens is None else q.new_zeros
    d_rate = new(p.slots, p.HV, blocks, dtype=torch.float32) if fused else None
    d_bias = new(p.slots, p.HV, p.K, dtype=torch.float32) if fused else None
    pairs = q.new_empty(p.slots, p.HV, CHUNK, 2 * CHUNK, dtype=p.dtype)
    # q . dq, k . dk, and the diagonal of dP
    along = q.new_empty(3, p.slots, p.HV, CHUNK, dtype=torch.float32)
    if p.slots:
        options = {"V": p.V, "BV": BV, **p.write, **p.varlen, "DT": p.wide_dtype}
        p.launch(
            score_gradient_kernel, (p.slots * p.HV, 1, 1),
            v, o, do, dv, beta, parts, errors, cu_seqlens, pairs, d_beta, *along, scale, *p.lengths, p.rows,
            parts.shape[0], HV=p.HV, QK_NORM=p.qk_norm, **options, num_warps=4, num_stages=1,
        )  # fmt: skip
        p.launch(
            channel_gradient_kernel, (p.slots * p.HV * blocks, 1, 1),
            q, k, gate, beta, errors, do, dv, A_log, dt_bias, cu_seqlens, step_masks(q.device), tail_mask(q.device),
            pair_masks(q.device), *_parts(norms, 2), total, states, d_states, pairs, *along, dq, dk, d_gate,
            d_rate, d_bias, scale, bound, *p.lengths, **p.key_sizes, BK=CHANNELS, **p.activations, NEAR=p.near(bound),
            STAGES=stages, **options, num_warps=warps, num_stages=1,
        )  # fmt: skip
    if fused:
        d_rate, d_bias = d_rate.sum((0, 2)).to(A_log.dtype), d_bias.sum(0).view_as(dt_bias).to(dt_bias.dtype)
    return dq, dk, d_gate, d_rate, d_bias


# one name for each copy of this file in a process (the installed package, code from a Hub repository)
NAMESPACE = f"modeling_kda_{zlib.crc32(__name__.encode()):08x}"


def _present(tensors, like):
    """An operator returns tensors: empty ones for what is absent."""
    return tuple(like.new_empty(0) if x is None else x for x in tensors)


@torch.library.custom_op(f"{NAMESPACE}::chunk_forward", mutates_args=())
def forward_op(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, gate: Tensor | None, state: Tensor | None,
    A_log: Tensor | None, dt_bias: Tensor | None, cu_seqlens: Tensor | None, erase: bool, scale: float,
    form: int, bound: float, qk_norm: bool, raw_beta: bool, save: bool,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    outputs = _forward(
        q, k, v, beta, gate, state, A_log, dt_bias, cu_seqlens, erase, scale, form, bound, qk_norm, raw_beta, save
    )
    return _present(outputs, q)


@torch.library.custom_op(f"{NAMESPACE}::chunk_backward", mutates_args=())
def backward_op(
    do: Tensor, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, gate: Tensor | None,
    A_log: Tensor | None, dt_bias: Tensor | None, cu_seqlens: Tensor | None, o: Tensor, keys: Tensor, rows: Tensor,
    norms: Tensor, total: Tensor, scores: Tensor, erasing: Tensor, errors: Tensor, states: Tensor, erase: bool,
    scale: float, form: int, bound: float, qk_norm: bool, raw_beta: bool, has_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    gradients = _backward(
        do, d_final, q, k, v, beta, gate, A_log, dt_bias, cu_seqlens, o, keys, rows, norms, total, scores, erasing,
        errors, states, erase, scale, form, bound, qk_norm, raw_beta, has_state,
    )  # fmt: skip
    return _present(gradients, q)


@forward_op.register_fake
def _(q, k, v, beta, gate, state, A_log, dt_bias, cu_seqlens, erase, scale, form, bound, qk_norm, raw_beta, save):
    p = Problem(q, k, v, beta, gate, cu_seqlens, erase, form, qk_norm, raw_beta)
    return _present(_forward_buffers(p, q, v, save), q)


@backward_op.register_fake
def _(
    do, d_final, q, k, v, beta, gate, A_log, dt_bias, cu_seqlens, o, keys, rows, norms, total, scores, erasing, errors,
    states, erase, scale, form, bound, qk_norm, raw_beta, has_state,
):  # fmt: skip
    def like(x):
        return q.new_empty(0) if x is None else torch.empty_like(x)

    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (N, v.shape[2], q.shape[3], v.shape[3]) if has_state else (0,)
    d_state = q.new_empty(shape, dtype=torch.float32 if has_state else q.dtype)
    return *(like(x) for x in (q, k, v, beta, gate)), d_state, like(A_log), like(dt_bias)


def _save(ctx, inputs, output):
    q, k, v, beta, gate, state, A_log, dt_bias, cu_seqlens, *options = inputs
    o, _, *saved = output
    ctx.save_for_backward(q, k, v, beta, gate, A_log, dt_bias, cu_seqlens, o, *saved)
    ctx.options, ctx.state = options[:-1], None if state is None else state.dtype
    ctx.present = [x is not None for x in (q, k, v, beta, gate, state, A_log, dt_bias, cu_seqlens)]
    ctx.set_materialize_grads(False)


def _differentiate(ctx, do, d_final, *_, run=backward_op):
    q, k, v, *rest = ctx.saved_tensors
    do = torch.zeros_like(v) if do is None else do.contiguous()
    d_final = None if d_final is None else d_final.contiguous()
    gradients = list(run(do, d_final, q, k, v, *rest, *ctx.options, ctx.state is not None))
    gradients = [g if present else None for g, present in zip(gradients, ctx.present, strict=False)]
    if ctx.state is not None:
        gradients[5] = gradients[5].to(ctx.state)
    return *gradients, *[None] * 8


forward_op.register_autograd(_differentiate, setup_context=_save)

eager_chunks = eager_function(_forward, _backward, _save, _differentiate)
