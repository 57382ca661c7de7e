"""The chunked delta rule on a GPU: checks, buffers, launches and gradients around the Triton kernels.

The definition of the operation is `recurrent_delta_rule` in delta_rule.py, and the mathematics of the chunked form are
at the head of triton_chunk_forward.py and triton_chunk_backward.py. B batch, T time, H query and key heads of K
channels, HV value heads of V channels. Nothing here waits for the device, so calls can be captured in a CUDA graph.
"""

from typing import NamedTuple

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the fast path needs triton: pip install triton") from error

from .triton_chunk_forward import BF16_OPERAND, prep_kernel, scan_kernel

CHUNK = 64
SIXTEEN_BIT = (torch.bfloat16, torch.float16)


class Blocks(NamedTuple):
    """Block lengths, warps and stages of the kernels for one size of head; chosen on an H200, never by timing here."""

    BK: int  # key channels that prep and the chunk gradients take at a time
    prep_warps: int
    BV: int  # value channels of one scan
    scan_warps: int
    scan_stages: int
    grad_BK: int
    grad_warps: int
    reverse_BV: int
    reverse_warps: int
    reverse_stages: int


# (fp32 inputs, padded K) -> blocks; the number of tokens is no key, so that no length compiles anything anew
BLOCKS = {
    (False, 16): Blocks(16, 4, 64, 4, 2, 16, 4, 64, 4, 2),
    (False, 32): Blocks(32, 4, 64, 4, 2, 32, 4, 64, 4, 2),
    (False, 64): Blocks(64, 4, 64, 4, 2, 64, 4, 64, 4, 2),
    (False, 128): Blocks(128, 4, 64, 4, 2, 64, 4, 64, 4, 2),
    (False, 256): Blocks(128, 4, 64, 4, 1, 64, 4, 64, 4, 1),
    (True, 16): Blocks(16, 4, 32, 4, 1, 16, 4, 32, 4, 1),
    (True, 32): Blocks(32, 4, 32, 4, 1, 32, 4, 32, 4, 1),
    (True, 64): Blocks(32, 4, 32, 4, 1, 32, 4, 32, 4, 1),
    (True, 128): Blocks(32, 4, 32, 4, 1, 32, 4, 32, 4, 1),
    (True, 256): Blocks(32, 4, 16, 4, 1, 32, 4, 16, 4, 1),
}


class Problem:
    """Sizes, switches and launch arguments of one call, shared by its kernels."""

    def __init__(self, q, v, beta, log_decay, cu_seqlens, erase, gate, qk_norm, raw_beta):
        self.B, self.T, self.H, self.K = q.shape
        self.HV, self.V = v.shape[2:]
        self.N = self.B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self.NT = triton.cdiv(self.T, CHUNK)
        # an upper bound with cu_seqlens, known without looking at it
        self.slots = self.B * self.NT if cu_seqlens is None else self.T // CHUNK + self.N
        self.KP = max(16, triton.next_power_of_2(self.K))
        self.decay = 0 if log_decay is None else 1 if log_decay.shape[-1] == 1 else 2
        self.precise = v.dtype == torch.float32
        self.blocks = BLOCKS[self.precise, self.KP]
        self.dtype = torch.float32 if self.precise else torch.bfloat16
        self.sizes = {"H": self.H, "HV": self.HV, "K": self.K, "KP": self.KP, "BT": CHUNK}
        self.sizes["NUM_LEVELS"] = CHUNK.bit_length() - 1
        self.lengths = {"T": self.T, "NT": self.NT, "N": self.N}
        self.switches = {"DECAY": self.decay, "ERASE": erase, "HAS_BETA": beta is not None, "RAW_BETA": raw_beta}
        self.switches["IS_VARLEN"] = cu_seqlens is not None
        self.activations = {"QK_NORM": qk_norm, "GATE": gate, "PRECISE": self.precise}
        # keys are expected to be about unit vectors where they erase, so that fp16 gains precision and cannot overflow
        narrow = erase or self.decay == 2
        self.prep_dtype = tl.float32 if self.precise else tl.float16 if narrow else BF16_OPERAND.value
        self.scan_dtype = tl.float32 if self.precise else BF16_OPERAND.value


def forward(
    q,
    k,
    v,
    beta,
    log_decay,
    state,
    A_log,
    dt_bias,
    cu_seqlens,
    erase,
    scale,
    gate,
    lower_bound,
    qk_norm,
    raw_beta,
    save,
):
    """Launches the forward kernels on contiguous tensors. Returns o, the final state, and what a backward pass needs."""
    p = Problem(q, v, beta, log_decay, cu_seqlens, erase, gate, qk_norm, raw_beta)
    keys, rows, total, scores, erasing = workspace(p, q, erase)
    empty = v.new_empty(0)
    o = torch.empty_like(v)
    final = q.new_empty(p.N, p.HV, p.K, p.V, dtype=torch.float32)
    errors = torch.empty_like(v, dtype=p.dtype) if save and erase else empty
    states = q.new_empty(p.slots, p.HV, p.V, p.KP, dtype=p.dtype) if save else empty
    if p.slots:
        prep_kernel[(p.slots * p.HV,)](
            q, k, log_decay, beta, A_log, dt_bias, cu_seqlens, step_masks(q.device), *keys, *rows, total, scores, erasing,
            scale, lower_bound, **p.lengths, **p.sizes, BK=p.blocks.BK, **p.switches, **p.activations,
            DT=p.prep_dtype, num_warps=p.blocks.prep_warps, num_stages=1,
        )  # fmt: skip
    scan(p, (q, k, k) if p.decay < 2 else keys, rows, total, scores, erasing, v, beta, state, cu_seqlens,
         o, errors, states, final, save)  # fmt: skip
    return o, final, keys, rows, total, scores, erasing, errors, states


STEP_MASKS = {}


def step_masks(device):
    """0/1 matrices [8, C, C] that sum log-decays: for each level l the steps between row i and the middle of its
    2^(l+1) rows, then the steps up to i, then those after i."""
    if device in STEP_MASKS:
        return STEP_MASKS[device]
    i = torch.arange(CHUNK, device=device)[:, None]
    t = i.T
    masks = []
    for level in range(CHUNK.bit_length() - 1):
        middle = ((i >> level) | 1) << level
        masks.append(torch.where(i >= middle, (t >= middle) & (t <= i), (t > i) & (t < middle)))
    masks = torch.stack([*masks, t <= i, t > i]).to(torch.float16)
    # memory of a graph under capture holds nothing until the graph runs
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        STEP_MASKS[device] = masks
    return masks


def workspace(p, like, erase):
    """The tensors that prep fills: decayed keys, row factors, decay of whole chunks, P and Z."""

    def new(*shape, dtype=torch.float32):
        return like.new_empty(*shape, dtype=dtype)

    per_channel = p.decay == 2
    keys = new(3, p.slots, p.HV, CHUNK, p.KP, dtype=p.dtype) if per_channel else new(3, 0)
    rows = new(3, 0) if per_channel else new(3, p.slots, p.HV, CHUNK)
    total = new(p.slots, p.HV, p.KP) if per_channel else new(p.slots, p.HV)
    scores = new(p.slots, p.HV, CHUNK, CHUNK, dtype=p.dtype)
    return keys, rows, total, scores, torch.empty_like(scores) if erase else new(0, dtype=p.dtype)


def scan(p, keys, rows, total, scores, erasing, v, beta, state, cu_seqlens, o, errors, states, final, save):
    BV = p.blocks.BV
    scan_kernel[(triton.cdiv(p.V, BV), p.N * p.HV, 1)](
        v, beta, *keys, *rows, total, scores, erasing, state, None, cu_seqlens, o, errors, states, final,
        **p.lengths, NUM_SEGMENTS=1, **p.sizes, V=p.V, BV=BV, **p.switches,
        HAS_STATE=state is not None, SEGMENT=0, SAVE=save, DT=p.scan_dtype,
        num_warps=p.blocks.scan_warps, num_stages=p.blocks.scan_stages,
    )  # fmt: skip
