"""The tensors of a Kimi checkpoint under the names of `kimi_weights.py`, with packed experts as ordinary weights."""

import re
from math import prod

import torch

from .checkpoint import Checkpoint, listed
from .kimi_weights import K3_PREFIX, NameTable
from .mxfp4 import GROUP, dequantise

# the parts of K3 that are no text model
OTHER_PARTS = ("vision_tower.", "mm_projector.")
# transformers 5.24 saves the dense MLP of its kimi_linear under the name of the experts
MISNAMED = (r"\.block_sparse_moe\.(gate|up|down)_proj\.", r".mlp.\1_proj.")
PACKED, SCALE = ".weight_packed", ".weight_scale"


class StoredTensors:
    """What a checkpoint holds of the text model.

    Attributes:
        checkpoint: the files.
        shapes, dtypes: of every tensor. MXFP4 weights appear as the bfloat16 weights they stand for.
        left_out: stored names of the parts that are no text model.

    Raises: ValueError for a name that occurs twice, or packed weights without their scales.
    """

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint, self.left_out, self.shapes, self.dtypes = checkpoint, [], {}, {}
        self._stored = {}
        for name in checkpoint.shapes:
            if name.startswith(OTHER_PARTS):
                self.left_out.append(name)
                continue
            plain = re.sub(*MISNAMED, name.removeprefix(K3_PREFIX))
            if plain in self._stored:
                raise ValueError(f"the checkpoint holds {plain} twice, as {self._stored[plain]} and {name}")
            self._stored[plain] = name
        self._list()

    def name_in_file(self, name: str) -> str:
        """What a tensor is called in the file."""
        return self._stored.get(name) or self._stored[name.removesuffix(".weight") + PACKED]

    def read(self, name: str, start: int, count: int) -> torch.Tensor:
        """[count] of a tensor's numbers in memory order; of packed weights, whole rows only."""
        if name in self._stored:
            return self.checkpoint.read_range(self._stored[name], start, count)
        base, columns = name.removesuffix(".weight"), self.shapes[name][-1]
        assert start % columns == 0 and count % columns == 0, f"{name}: rows of {columns}, got {start} and {count}"
        packed = self.checkpoint.read_range(self._stored[base + PACKED], start // 2, count // 2)
        scale = self.checkpoint.read_range(self._stored[base + SCALE], start // GROUP, count // GROUP)
        return dequantise(packed.view(-1, columns // 2), scale.view(-1, columns // GROUP)).flatten()

    def is_zero(self, name: str, start: int = 0, count: int | None = None) -> bool:
        """Whether all numbers there are zero."""
        return not self.read(name, start, prod(self.shapes[name]) - start if count is None else count).any()

    def check(self, table: NameTable, optional: set[str]):
        """Adapt a table to shapes that only differ in dimensions of one, and compare it with what is there.

        Args:
            table: of the format; its `stored` takes the shapes that are in the file.
            optional: names that need not be there.

        Raises: ValueError for tensors that are missing, unknown, of another shape or no floating point numbers.
        """
        missing = [
            name
            for name, shape in table.stored.items()
            if name not in self.shapes and prod(shape) and name not in optional
        ]
        if missing:
            raise ValueError(
                f"the checkpoint in {self.checkpoint.folder} lacks {len(missing)} of {len(table.stored)} tensors: "
                f"{listed(missing)}; give the whole checkpoint of the model that config.json describes"
            )
        unknown = [self.name_in_file(name) for name in self.shapes if name not in table.stored]
        if unknown:
            raise ValueError(
                f"the checkpoint in {self.checkpoint.folder} holds tensors that a model of its config.json has not: "
                f"{listed(unknown)}"
            )
        heads = {span.stored: span.count for span in table.spans if span.stored.endswith("A_log")}
        for name, shape in self.shapes.items():
            self._check_one(name, shape, table.stored[name], heads.get(name))
            table.stored[name] = shape

    def _check_one(self, name, shape, wanted, heads):
        dtype = self.dtypes[name]
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise ValueError(
                f"{self.name_in_file(name)} must be of 16, 32 or 64 bit floating point or packed MXFP4, got {dtype}"
            )
        sizes = [size for size in shape if size != 1]
        # one rate of decay per head: [H], [1, 1, H, 1] and, with zeros behind, longer ones are in use
        padded = heads is not None and len(sizes) < 2 and prod(sizes) >= heads
        if not padded and sizes != [size for size in wanted if size != 1]:
            raise ValueError(
                f"{self.name_in_file(name)} must have shape {list(wanted)} by config.json, got {list(shape)}; "
                "the configuration belongs to another model"
            )

    def _list(self):
        for name, stored in self._stored.items():
            shape, dtype = tuple(self.checkpoint.shapes[stored]), self.checkpoint.dtypes[stored]
            if name.endswith(PACKED):
                self._list_packed(name.removesuffix(PACKED), shape)
            elif not (name.endswith(SCALE) and name.removesuffix(SCALE) + PACKED in self._stored):
                self.shapes[name], self.dtypes[name] = shape, dtype

    def _list_packed(self, base, shape):
        """Packed weights appear as what they stand for."""
        if base + SCALE not in self._stored:
            raise ValueError(f"the checkpoint holds {self._stored[base + PACKED]} without its {SCALE.lstrip('.')}")
        if f"{base}.weight" in self._stored:
            twice = f"{self._stored[base + PACKED]} and {self._stored[base + '.weight']}"
            raise ValueError(f"the checkpoint holds {base}.weight twice, as {twice}")
        scale = tuple(self.checkpoint.shapes[self._stored[base + SCALE]])
        dtypes = {self.checkpoint.dtypes[self._stored[base + kind]] for kind in (PACKED, SCALE)}
        wanted = (*shape[:-1], shape[-1] * 2 // GROUP)
        if dtypes != {torch.uint8} or scale != wanted or shape[-1] * 2 % GROUP:
            raise ValueError(
                f"{self._stored[base + PACKED]} must be MXFP4 with one uint8 scale for every {GROUP} elements, got "
                f"{list(shape)} with scales {list(scale)}"
            )
        self.shapes[f"{base}.weight"], self.dtypes[f"{base}.weight"] = (*shape[:-1], shape[-1] * 2), torch.bfloat16
