"""The committed table of block lengths for the chunk kernels, and the constant masks that they read."""

from functools import cache, wraps
from typing import NamedTuple

import torch

CHUNK = 64
NUM_LEVELS = CHUNK.bit_length() - 1


class Blocks(NamedTuple):
    """Block lengths, warps and stages of the kernels for one size of head; chosen on an H200, never by timing here."""

    prep: tuple  # key channels at a time, warps, stages
    scan: tuple  # value channels of one program, warps, stages
    many_heads: tuple  # the same where even so every processor has a program, and nothing is kept for a backward pass
    reverse: tuple  # the same for the scan back
    channels: tuple  # gradients with decay per channel: value channels at a time, warps, stages of the loop over them
    gated: tuple  # with one decay per head and erasing: value channels at a time, warps, stages
    decaying: tuple  # with one decay per head
    erasing: tuple  # with erasing alone
    adding: tuple  # with neither


# blocks of the gradients with one decay per head or none
WHOLE, HALF, EXACT = (128, 4, 1), (64, 4, 1), (32, 4, 1)
# (fp32 inputs, padded K) -> blocks; the number of tokens is no key, so that no length compiles anything anew
BLOCKS = {
    (False, 64): Blocks((64, 4, 1), (32, 4, 3), (64, 4, 3), (32, 4, 3), (64, 4, 3), HALF, WHOLE, WHOLE, WHOLE),
    (False, 128): Blocks((128, 4, 1), (32, 4, 3), (64, 4, 3), (32, 4, 3), (64, 4, 3), HALF, WHOLE, WHOLE, WHOLE),
    (False, 256): Blocks((128, 4, 1), (64, 8, 1), (64, 8, 1), (32, 4, 1), (64, 4, 3), HALF, HALF, HALF, HALF),
    (True, 64): Blocks((64, 4, 1), (32, 4, 1), (32, 4, 1), (32, 4, 1), (32, 4, 1), EXACT, EXACT, EXACT, EXACT),
    (True, 128): Blocks((64, 4, 1), (32, 4, 1), (32, 4, 1), (32, 4, 1), (32, 4, 1), EXACT, EXACT, EXACT, EXACT),
    (True, 256): Blocks((128, 4, 1), (16, 4, 1), (16, 4, 1), (16, 4, 1), (32, 4, 1), EXACT, EXACT, EXACT, EXACT),
}
# Triton 3.6 miscompiles 16-bit products of fewer than 64 columns on Hopper, unless three stages bring their operands:
# 64 value channels where those do not fit, and keys are padded to 64
MIN_PADDED_K = 64
# programs of the scan that fill an H200
FULL_GRID = 132


@cache
def shared_memory_of(device):
    """Bytes of shared memory that one program may use."""
    if device.type != "cuda":
        return 232448
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def fit(blocks, shared_memory):
    """The same blocks with as many stages, and as wide scans, as the shared memory of the device allows."""
    if shared_memory >= 220_000:
        return blocks
    deepest = 2 if shared_memory >= 160_000 else 1
    shallow = {name: (*getattr(blocks, name)[:-1], min(getattr(blocks, name)[-1], deepest)) for name in blocks._fields}
    blocks = Blocks(**shallow)
    if deepest == 2:
        return blocks
    narrow = (min(blocks.scan[0], 32), 4, 1)
    return blocks._replace(scan=narrow, many_heads=narrow)


def kept_per_device(build):
    """A function of a device that makes its constant once for each, but for those under capture of a CUDA graph."""
    kept = {}

    @wraps(build)
    def get(device):
        if device in kept:
            return kept[device]
        constant = build(device)
        # memory of a graph under capture holds nothing until the graph runs
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            kept[device] = constant
        return constant

    return get


@kept_per_device
def step_masks(device):
    """0/1 matrices [12, C, C] that sum log-decays: for each level l the steps between row i and the middle of its
    2^(l+1) rows; the steps up to i, those after i, and for n = 3 ... 6 those from the first of its 2^n rows to i, at
    index NUM_LEVELS + n - 1."""
    i = torch.arange(CHUNK, device=device)[:, None]
    t = i.T
    masks = []
    for level in range(NUM_LEVELS):
        middle = ((i >> level) | 1) << level
        masks.append(torch.where(i >= middle, (t >= middle) & (t <= i), (t > i) & (t < middle)))
    near = [(t > (i >> n << n)) & (t <= i) for n in range(3, NUM_LEVELS + 1)]
    return torch.stack([*masks, t <= i, t > i, *near]).to(torch.float16)


@kept_per_device
def tail_mask(device):
    """[C, C] bf16: 1 for the tokens from each one on."""
    i = torch.arange(CHUNK, device=device)
    return (i[:, None] <= i[None, :]).to(torch.bfloat16)


@kept_per_device
def pair_masks(device):
    """[14, C, C] int16, all bits set where two tokens meet: at level l in halves of the same 2^(l+1) rows. Then for
    n = 3 ... 6 what reads, and what collects, inside of 2^n rows, at index NUM_LEVELS + 2 (n - 3)."""
    i = torch.arange(CHUNK, device=device)[:, None]
    j = i.T
    masks = [(i >> level) ^ 1 == j >> level for level in range(NUM_LEVELS)]
    for n in range(3, NUM_LEVELS + 1):
        same = i >> n == j >> n
        masks += [same & (i > j), same & (i < j)]
    return -torch.stack(masks).short()


def levels_at_once(lower_bound):
    """The largest n for which 2^n rows decay by no more than 2^-128 under every gate of this bound; 0 if below 3."""
    return max((n for n in range(3, NUM_LEVELS + 1) if (2**n - 1) * -lower_bound * 1.4427 <= 128), default=0)


@kept_per_device
def pair_levels(device):
    """[C, C] fp16: the level at which row i reads column j, that of the highest bit in which i and j differ; -1 where
    nothing is read there, on the diagonal and above."""
    i = torch.arange(CHUNK, device=device)
    apart = [(i[:, None] >> level) != (i[None, :] >> level) for level in range(NUM_LEVELS)]
    return torch.where(i[:, None] > i[None, :], torch.stack(apart).sum(0) - 1, -1).to(torch.float16)
