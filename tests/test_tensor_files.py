"""Files written and read piece by piece hold what safetensors itself would."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from modeling_kda.conversion import tensor_files
from modeling_kda.conversion.checkpoint import Checkpoint
from modeling_kda.conversion.tensor_files import Planned, write_tensors

TENSORS = {
    "odd": torch.arange(7, dtype=torch.uint8),
    "half": torch.randn(3, 5).bfloat16(),
    "wide": torch.randn(2, 3, 4),
    "single": torch.tensor(3.0),
    "empty": torch.zeros(0, 4),
    "double": torch.randn(6, dtype=torch.float64),
    "float16": torch.randn(9).half(),
}


def planned(tensors):
    return [
        Planned(name, tuple(t.shape), t.dtype, lambda start, count, t=t: t.flatten()[start : start + count])
        for name, t in tensors.items()
    ]


@pytest.mark.parametrize("piece", [1, 4, 1000])
def test_any_mixture_of_shapes_and_dtypes(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(tensor_files, "PIECE", piece)
    write_tensors(tmp_path, planned(TENSORS), 10**9, progress="test")
    back = load_file(tmp_path / "model.safetensors")
    assert set(back) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor), name


def test_every_tensor_starts_at_a_multiple_of_its_item_size(tmp_path):
    write_tensors(tmp_path, planned(TENSORS), 10**9, progress="test")
    with open(tmp_path / "model.safetensors", "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    assert length % 8 == 0
    for name, tensor in TENSORS.items():
        assert header[name]["data_offsets"][0] % tensor.dtype.itemsize == 0, name


def test_pieces_are_whole_rows_and_no_larger_than_asked(monkeypatch):
    monkeypatch.setattr(tensor_files, "PIECE", 10)
    asked = []

    def read(start, count):
        asked.append((start, count))
        return torch.zeros(count)

    list(Planned("t", (7, 4), torch.float32, read).pieces())
    assert asked == [(0, 8), (8, 8), (16, 8), (24, 4)]
    asked.clear()
    list(Planned("t", (7, 4), torch.float32, read, whole=True).pieces())
    assert asked == [(0, 28)]


def test_shards_are_filled_up_to_their_size(tmp_path):
    tensors = {f"t{i}": torch.full((10,), float(i)) for i in range(5)} | {"large": torch.ones(100)}
    write_tensors(tmp_path, planned(tensors), 85, progress="test")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = [index["weight_map"][name] for name in tensors]
    assert files == [f"model-{i:05d}-of-00004.safetensors" for i in (1, 1, 2, 2, 3, 4)]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_ranges_of_stored_tensors(tmp_path, file):
    tensors = {"a": torch.randn(5, 3).bfloat16(), "b": torch.randn(4, 2, 3), "e": torch.zeros(0, 3)}
    (tmp_path / "config.json").write_text("{}")
    save = save_file if file.endswith("safetensors") else torch.save
    save(tensors, tmp_path / file)
    checkpoint = Checkpoint(tmp_path)
    for name, tensor in tensors.items():
        for start, count in ((0, tensor.numel()), (4, 7), (tensor.numel(), 0)):
            start, count = min(start, tensor.numel()), min(count, max(0, tensor.numel() - start))
            part = checkpoint.read_range(name, start, count)
            assert part.dtype == tensor.dtype and torch.equal(part, tensor.flatten()[start : start + count])


def test_a_file_that_becomes_shorter_is_one_clear_error(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.ones(100)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.truncate(300)
    with pytest.raises(ValueError, match="model.safetensors cannot be read .it ends inside a tensor.*cut short"):
        checkpoint.read_range("a", 0, 100)
