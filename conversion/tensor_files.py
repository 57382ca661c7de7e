"""Tensors written as safetensors files piece by piece: neither a model nor a tensor of it must fit in memory."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from tqdm.auto import tqdm

from .model_folder import name_shards

# numbers held at once
PIECE = 2**20
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
}


@dataclass
class Planned:
    """A tensor to write.

    Attributes:
        name, shape, dtype: what it will be.
        read: (start, count) -> that many of its numbers in memory order, as a flat tensor; asked for whole rows (of
            the last dimension) only.
        whole: whether `read` must be asked for everything at once.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], torch.Tensor]
    whole: bool = False

    @property
    def num_bytes(self):
        return prod(self.shape) * self.dtype.itemsize

    def pieces(self):
        """All its bytes, a bounded number at a time."""
        total, row = prod(self.shape), max(1, self.shape[-1] if self.shape else 1)
        step = total if self.whole else max(1, PIECE // row) * row
        for start in range(0, total, max(1, step)):
            piece = self.read(start, min(step, total - start))
            yield piece.to(self.dtype).contiguous().view(torch.uint8).numpy()


def write_tensors(folder: Path, tensors: list[Planned], max_shard_bytes: int, *, progress: str):
    """`model.safetensors`, or shards of at most that size with their index; a tensor that is larger gets its own.

    Raises: OSError if the system refuses to write.
    """
    shards, total = [[]], 0
    for tensor in tensors:
        if shards[-1] and total + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            total = 0
        shards[-1].append(tensor)
        total += tensor.num_bytes
    with tqdm(total=len(tensors), desc=progress, unit="tensor", disable=None) as bar:
        for i, shard in enumerate(shards):
            _write_shard(folder / f"{i}.safetensors", shard, bar)
    names = [[tensor.name for tensor in shard] for shard in shards]
    name_shards(folder, names, sum(tensor.num_bytes for tensor in tensors))


def _write_shard(path, tensors, bar):
    # wide numbers first, as the library does: every tensor then starts at a multiple of its item size
    tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for tensor in tensors:
        place = [end, end + tensor.num_bytes]
        entry = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        header[tensor.name], end = entry, place[1]
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    with open(path, "wb") as file:
        file.write(len(content).to_bytes(8, "little"))
        file.write(content)
        for tensor in tensors:
            for piece in tensor.pieces():
                file.write(piece)
            bar.update()
