"""Decoding with multi-head latent attention: all heads of a few new tokens against the past, latents read once.

    s = scale (c . q_latent + k_r . q_shared)      for every key, and every head of every new token
    o = sum over keys of softmax(s) c

That is multi-query attention with one key of R + P channels, whose first R are also the value. One program holds all
heads it can, so that a latent comes from memory once, and a part of the keys; `combine_kernel` adds the parts up.
Scores are made transposed, [keys, heads]: keys, and in the second product channels, fill the rows of a matrix product,
while heads are only few columns. Blocks of 32 keys leave room for two programs on a multiprocessor of Hopper.

Nothing here waits for the device or chooses by timing, so it can be captured into a CUDA graph. Forward only.

B batch, T new tokens, S keys, H heads, R latent channels, P shared key channels.
Splitting over keys: flash-decoding (Dao et al., 2023). The absorbed form: DeepSeek-V2, arXiv 2405.04434.
"""

import functools
import math
import re

import torch
from torch import Tensor

from .triton_chunk_blocks import shared_memory_of
from .triton_launch import INTERPRETED, on_device, strides, unfit_tensors, unit_stride

try:
    import triton
    import triton.language as tl
except ImportError as e:
    raise ImportError(
        "the Triton kernels need the package triton (pip install triton); the PyTorch path works without it"
    ) from e

MAX_TOKENS = 16
LOG2_E = math.log2(math.e)
# by bytes of a number: what a program holds of its output must fit in registers
MAX_LATENT = {2: 1024, 4: 512}
MAX_SHARED = 128
MAX_SPLITS = 256
# key blocks of a part: fewer cost more to add up than they save
MIN_BLOCKS = 2
# one name for each copy of this file in a process (the installed package, code from a Hub repository)
NAMESPACE = re.sub(r"\W", "_", __name__)
# Triton's interpreter multiplies the bit patterns of bf16 operands
IS_INTERPRETED = tl.constexpr(INTERPRETED)


def triton_latent_attention(q_latent, q_shared, latent, shared, mask=None, seen=None, *, causal=True, scale):
    """Attention of T <= 16 new tokens to the latents of all tokens.

    Args:
        q_latent: [B, T, H, R] and q_shared: [B, T, H, P], any strides. R at most 1024, in fp32 512; P from 0 to 128.
        latent: [B, S, R] and shared: [B, S, P], in the dtype of the queries: bf16, fp16 or fp32.
        mask: None, or [B or 1, 1, T, S], bool and True where a key may be seen, or additive; no other order of
            the tokens holds then.
        seen: how many of the S keys there are, an integer tensor with one element, or [B], on the device; None for S.
        causal: without a mask, whether the new tokens, which are the last ones, do not see each other's future.
        scale: multiplier of the scores.

    Returns: [B, T, H, R] in the dtype of the queries (heads first in memory); 0 where a token may see nothing.

    Raises: ValueError for what `unsupported` names.
    """
    reason = unsupported(q_latent, q_shared, latent, shared, mask)
    if reason:
        raise ValueError(reason)
    return launch_latent_attention(q_latent, q_shared, latent, shared, mask, seen, causal=causal, scale=scale)


def launch_latent_attention(q_latent, q_shared, latent, shared, mask=None, seen=None, *, causal=True, scale):
    """`triton_latent_attention` of arguments in which `unsupported` has found no fault."""
    run = latent_attention_op if torch.compiler.is_compiling() else _launch
    return run(q_latent, q_shared, latent, shared, mask, seen, causal, float(scale)).permute(1, 2, 0, 3)


def unsupported(q_latent, q_shared, latent, shared, mask=None):
    """None, or one line that says which argument of `triton_latent_attention` does not fit."""
    given = {"q_latent": q_latent, "q_shared": q_shared, "latent": latent, "shared": shared}
    if q_latent.dim() != 4 or latent.dim() != 3 or shared.dim() != 3:
        return f"q_latent must be [B, T, H, R] and latent [B, S, R], got {list(q_latent.shape)}, {list(latent.shape)}"
    (B, T, H, R), S, P = q_latent.shape, latent.shape[1], shared.shape[2]
    for name, shape in {"q_shared": (B, T, H, P), "latent": (B, S, R), "shared": (B, S, P)}.items():
        if given[name].shape != shape:
            return f"{name} must be {list(shape)}, got {list(given[name].shape)}"
        if given[name].dtype != q_latent.dtype:
            return f"{name} must be {q_latent.dtype} as q_latent, got {given[name].dtype}"
    if T > MAX_TOKENS:
        return f"the latent kernel takes at most {MAX_TOKENS} tokens, got {T}; expand the heads"
    most = MAX_LATENT.get(latent.element_size(), 0)
    if most and (most < R or P > MAX_SHARED):
        return f"the latent kernel takes R up to {most} and P up to {MAX_SHARED}, got R = {R} and P = {P}"
    # torch.compile must not look into the device
    if not torch.compiler.is_compiling() and _plan(T * H, R, P, latent.element_size(), latent.device) is None:
        return _too_large(R, P, latent)
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape not in ((B, 1, T, S), (1, 1, T, S)):
            shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            return f"mask must be [B or 1, 1, T, S] = {[B, 1, T, S]}, got {shape}"
        if mask.device != q_latent.device or not (mask.dtype == torch.bool or mask.is_floating_point()):
            return f"mask must be bool or additive, on {q_latent.device}, got {mask.dtype} on {mask.device}"
    return unfit_tensors(given, backward=False)


def _launch(
    q_latent: Tensor, q_shared: Tensor, latent: Tensor, shared: Tensor, mask: Tensor | None, seen: Tensor | None,
    causal: bool, scale: float,
) -> Tensor:  # fmt: skip
    (B, T, H, R), S, P = q_latent.shape, latent.shape[1], shared.shape[2]
    # heads first: the product with each head's own matrix comes next
    out = q_latent.new_empty(H, B, T, R)
    if not out.numel() or not S:
        return out.zero_()
    q_latent, q_shared, latent, shared = (unit_stride(x) for x in (q_latent, q_shared, latent, shared))
    rows = T * H
    plan = _plan(rows, R, P, latent.element_size(), latent.device)
    if plan is None:
        raise ValueError(_too_large(R, P, latent))
    row_blocks, slots, options = plan
    splits = _count_splits(B * row_blocks, -(-S // options["BS"]), slots)
    partial = torch.empty(B, splits, rows, R, dtype=torch.float32, device=latent.device)
    sums = torch.empty(2, B, splits, rows, dtype=torch.float32, device=latent.device)
    masked = 0 if mask is None else 1 if mask.dtype == torch.bool else 2
    with on_device(latent):
        latent_attention_kernel[(B * splits * row_blocks,)](
            q_latent, q_shared, latent, shared, mask, seen, partial, sums,
            scale * LOG2_E, S, T, H, row_blocks, splits, B * splits * rows,
            *strides(q_latent, 3), *strides(q_shared, 3), *strides(latent, 2), *strides(shared, 2),
            *((0, 0, 0) if mask is None else (strides(mask, 1)[0], mask.stride(2), mask.stride(3))),
            0 if seen is None or seen.numel() == 1 else 1,
            R=R, P=P, MASK=masked, HAS_SEEN=seen is not None, CAUSAL=causal and T > 1, ONE_TOKEN=T == 1, **options,
        )  # fmt: skip
        BC = min(64, options["BR"])
        BP = 1 << (splits - 1).bit_length()
        combine_kernel[(B * rows, -(-R // BC))](
            partial, sums, out, rows, H, splits, B * splits * rows, *strides(out.permute(1, 2, 0, 3), 3),
            R=R, BC=BC, BP=BP, BJ=min(64, max(16, BP)), num_warps=4,
        )  # fmt: skip
    return out


latent_attention_op = torch.library.custom_op(f"{NAMESPACE}::latent_attention", _launch, mutates_args=())


@latent_attention_op.register_fake
def _(q_latent, *_):
    B, T, H, R = q_latent.shape
    return q_latent.new_empty(H, B, T, R)


def _too_large(R, P, latent):
    return f"R = {R} and P = {P} in {latent.dtype} do not fit into the shared memory of {latent.device}"


@functools.lru_cache(maxsize=1024)
def _plan(rows, R, P, size, device):
    """(blocks of rows, programs that run at a time, options of the kernel), or None where nothing fits.

    Measured on an H200; nothing is timed at run time.
    """
    room = shared_memory_of(device)
    BR, BP = max(16, triton.next_power_of_2(R)), max(16, triton.next_power_of_2(P)) if P else 0
    widest = min(16 if BR > 512 else 32, max(16, triton.next_power_of_2(rows)))
    # two blocks of 32 keys, one in use and one on its way, leave room for a second program; fp32 needs as much again
    for BN, BS in ((widest, 32), (16, 32), (16, 16)) if size == 2 else ((widest, 16), (16, 16)):
        needed = ((2 if size == 2 else 4) * BS * (BR + BP) + BN * (BR + BP) + BS * BN) * size + 1024
        if needed <= room:
            break
    else:
        return None
    # numbers of the output that a thread holds, of the 255 that it can
    held = BN * BR // 128
    resident = max(1, min(room // needed, 512 // (held + 128)))
    # with one stage, Triton 3.6 makes a kernel that reads where it must not (seen on an H200)
    options = {"BN": BN, "BS": BS, "BR": BR, "BP": BP, "num_warps": 4 if held <= 128 else 8, "num_stages": 3}
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    return triton.cdiv(rows, BN), resident * processors, options


@functools.lru_cache(maxsize=4096)
def _count_splits(programs, key_blocks, slots):
    """Into how many parts to split the keys, so that the programs fill the `slots` of the device, in whole waves."""
    most = min(MAX_SPLITS, max(1, key_blocks // MIN_BLOCKS))
    best, best_use = 1, 0.0
    for waves in range(1, 5):
        splits = max(1, min(waves * slots // programs, most))
        use = programs * splits / slots
        use /= math.ceil(use)
        # adding up more parts costs more than a few idle slots
        if use > best_use + 0.1:
            best, best_use = splits, use
    return best


@triton.jit(do_not_specialize=["S", "T", "splits", "s_sums"])
def latent_attention_kernel(
    q_latent, q_shared, latent, shared, mask, seen, partial, sums,                           # tensors
    scale, S, T, H, blocks, splits, s_sums,                                                  # numbers
    s_qb, s_qt, s_qh, s_pb, s_pt, s_ph, s_cb, s_cs, s_kb, s_ks, s_mb, s_mt, s_ms, s_nb,      # strides
    BN: tl.constexpr, BS: tl.constexpr, R: tl.constexpr, P: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr,
    MASK: tl.constexpr, HAS_SEEN: tl.constexpr, CAUSAL: tl.constexpr, ONE_TOKEN: tl.constexpr,
):  # fmt: skip
    """One program: BN rows (heads of new tokens) of one sequence, one part of its keys."""
    # torch.compile hands numbers over in fp64
    scale = tl.cast(scale, tl.float32)
    # divisions in 32 bits: those in 64 are long programs of their own
    i_p = tl.program_id(0)
    o_n = i_p % blocks * BN + tl.arange(0, BN)
    m_n = o_n < T * H
    i_t, i_h = (o_n // H).to(tl.int64), (o_n % H).to(tl.int64)
    i_s, i_b = i_p // blocks % splits, (i_p // blocks // splits).to(tl.int64)
    end = tl.cast(S, tl.int32)
    if HAS_SEEN:
        end = tl.minimum(tl.load(seen + i_b * s_nb).to(tl.int32), end)
    part = tl.cdiv(tl.cdiv(end, BS), splits) * BS
    first = i_s * part
    last = tl.minimum(first + part, end)
    i_part = (i_b * splits + i_s) * T * H
    p_sums = sums + i_part + o_n

    o_r, o_k, o_s = tl.arange(0, BR), tl.arange(0, BP if P > 0 else 16), tl.arange(0, BS)
    m_r, m_k = o_r < R, o_k < P
    p_q = q_latent + i_b * s_qb + (i_t * s_qt + i_h * s_qh)[:, None] + o_r[None, :]
    b_q = tl.load(p_q, mask=m_n[:, None] & m_r[None, :], other=0.0)
    if P > 0:
        p_p = q_shared + i_b * s_pb + (i_t * s_pt + i_h * s_ph)[:, None] + o_k[None, :]
        b_p = tl.load(p_p, mask=m_n[:, None] & m_k[None, :], other=0.0)
        if IS_INTERPRETED:
            b_p = b_p.to(tl.float32)
    if IS_INTERPRETED:
        b_q = b_q.to(tl.float32)
    # offsets inside a block stay small; only its start needs 64 bits
    o_c = o_s[:, None] * s_cs + o_r[None, :]
    o_ks = o_s[:, None] * s_ks + o_k[None, :]

    b_max = tl.full([BN], -float("inf"), tl.float32)
    b_sum = tl.zeros([BN], tl.float32)
    b_o = tl.zeros([BR, BN], tl.float32)
    for start in range(first, last, BS):
        m_s = start + o_s < last
        i_start = tl.cast(start, tl.int64)
        if P > 0:
            b_k = tl.load(shared + i_b * s_kb + i_start * s_ks + o_ks, mask=m_s[:, None] & m_k[None, :], other=0.0)
        b_c = tl.load(latent + i_b * s_cb + i_start * s_cs + o_c, mask=m_s[:, None] & m_r[None, :], other=0.0)
        if IS_INTERPRETED:
            b_c = b_c.to(tl.float32)
        b_a = tl.dot(b_c, tl.trans(b_q), input_precision="tf32x3")
        if P > 0:
            if IS_INTERPRETED:
                b_k = b_k.to(tl.float32)
            b_a = tl.dot(b_k, tl.trans(b_p), b_a, input_precision="tf32x3")
        b_a *= scale
        m_a = m_s[:, None] & m_n[None, :]
        if MASK > 0:
            # one number per key where all rows are of one token
            p_m = mask + i_b * s_mb + (i_start + o_s)[:, None] * s_ms
            if not ONE_TOKEN:
                p_m += (i_t * s_mt)[None, :]
            m_m = m_s[:, None] if ONE_TOKEN else m_a
            if MASK == 1:
                m_a &= tl.load(p_m, mask=m_m, other=0) != 0
            else:
                b_a += tl.load(p_m, mask=m_m, other=0.0).to(tl.float32) * 1.4426950408889634
        elif CAUSAL:
            m_a &= (start + o_s)[:, None] <= (end - T + o_n // H)[None, :]
        b_a = tl.where(m_a, b_a, -float("inf"))
        b_new = tl.maximum(b_max, tl.max(b_a, 0))
        # a row that has seen nothing yet must not subtract infinities
        b_base = tl.where(b_new == -float("inf"), 0.0, b_new)
        b_a = tl.exp2(b_a - b_base[None, :])
        b_old = tl.exp2(b_max - b_base)
        b_sum = b_sum * b_old + tl.sum(b_a, 0)
        b_o = tl.dot(tl.trans(b_c), b_a.to(b_c.dtype), b_o * b_old[None, :], input_precision="tf32x3")
        b_max = b_new

    tl.store(p_sums, b_max, mask=m_n)
    tl.store(p_sums + s_sums, b_sum, mask=m_n)
    # a row that has seen nothing is not written: its maximum says so
    p_o = partial + i_part * R + (o_n[None, :] * R + o_r[:, None])
    tl.store(p_o, b_o, mask=m_r[:, None] & (m_n & (b_sum > 0.0))[None, :])


@triton.jit(do_not_specialize=["splits", "s_sums"])
def combine_kernel(
    partial, sums, out,                          # tensors
    rows, H, splits, s_sums, s_ob, s_ot, s_oh,   # numbers and strides
    R: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """One program: BC channels of one row of one sequence, all parts."""
    i_p, i_c = tl.program_id(0), tl.program_id(1)
    i_b, i_n = (i_p // rows).to(tl.int64), i_p % rows
    o_p, o_c = tl.arange(0, BP), i_c * BC + tl.arange(0, BC)
    m_c = o_c < R
    p_max = sums + i_b * splits * rows + i_n
    b_max = tl.load(p_max + o_p * rows, mask=o_p < splits, other=-float("inf"))
    b_sum = tl.load(p_max + s_sums + o_p * rows, mask=o_p < splits, other=0.0)
    b_base = tl.max(b_max, 0)
    b_base = tl.where(b_base == -float("inf"), 0.0, b_base)
    b_total = tl.sum(b_sum * tl.exp2(b_max - b_base), 0)
    b_o = tl.zeros([BC], tl.float32)
    for j in range(0, splits, BJ):
        o_j = j + tl.arange(0, BJ)
        b_w = tl.exp2(tl.load(p_max + o_j * rows, mask=o_j < splits, other=-float("inf")) - b_base)
        p_o = partial + ((i_b * splits + o_j) * rows + i_n)[:, None] * R + o_c[None, :]
        # not masked by the weights, which would have to be there first
        b_part = tl.load(p_o, mask=(o_j < splits)[:, None] & m_c[None, :], other=0.0)
        # parts that have seen nothing hold whatever was in memory
        b_o += tl.sum(tl.where((b_w > 0.0)[:, None], b_part, 0.0) * b_w[:, None], 0)
    b_o = tl.where(b_total > 0.0, b_o / tl.where(b_total > 0.0, b_total, 1.0), 0.0)
    p_out = out + i_b * s_ob + (i_n // H).to(tl.int64) * s_ot + (i_n % H).to(tl.int64) * s_oh + o_c
    tl.store(p_out, b_o.to(out.dtype.element_ty), mask=m_c)
