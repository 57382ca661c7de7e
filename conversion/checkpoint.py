"""Where a checkpoint lies and how to read it one tensor at a time: a local folder or a Hub id, safetensors or .bin.

Nothing here knows a model: names come out as they are stored. Tensors that are not asked for are never read, so the
memory needed is that of the tensors a caller holds, not that of the file.
"""

import json
import pickle
import re
import zipfile
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError, safe_open

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "tiktoken.model",
)
# a tokenizer can bring its own code, as those of Kimi do
TOKENIZER_CODE = ("tokenization_*.py", "encoding_*.py", "tool_declaration_ts.py")
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


class Checkpoint:
    """The weights of a model folder, opened for reading tensor by tensor.

    Args:
        source: a folder with `config.json` and weights, or the id of a model on the Hub (then only the files needed
            are downloaded). Weights may be `model.safetensors`, `pytorch_model.bin`, or shards of either with their
            index; the first that is there is taken, in this order.

    Attributes:
        folder: where the files lie.
        config: `config.json` as a dict.
        shapes, dtypes: shape and dtype of every tensor by its stored name.

    Raises:
        ValueError: nothing at `source`, no configuration, no weights, a missing shard, or a file that is not whole.
    """

    def __init__(self, source: str | Path):
        self.source = str(source)
        self.folder = _locate(source)
        self.config = read_json(self.folder / "config.json")
        self._whole_files, self._places, self._last_bin = {}, {}, (None, None)
        self.shapes, self.dtypes, self._file_of = {}, {}, {}
        for path, promised in _weight_files(self.folder).items():
            self._list_file(path, promised)

    def read(self, names) -> dict[str, torch.Tensor]:
        """The tensors of these stored names, on CPU, in the dtype they are stored in. Each file is opened once."""
        by_file = {}
        for name in names:
            by_file.setdefault(self._file_of[name], []).append(name)
        tensors = {}
        for path, wanted in by_file.items():
            tensors.update(self._read_file(path, wanted))
        return {name: tensors[name] for name in names}

    def read_range(self, name: str, start: int, count: int) -> torch.Tensor:
        """Part of a tensor, which as a whole may be larger than memory.

        Args:
            name: its stored name.
            start, count: which of its numbers, in memory order.

        Returns: [count], on CPU, in the dtype it is stored in.
        """
        path, dtype = self._file_of[name], self.dtypes[name]
        if path.suffix != ".safetensors":
            if self._last_bin[0] != path:
                self._last_bin = path, self._load_bin(path)
            return self._last_bin[1][name].reshape(-1)[start : start + count].clone()
        try:
            if path not in self._places:
                self._places[path] = _places(path)
            with open(path, "rb") as file:
                file.seek(self._places[path][name] + start * dtype.itemsize)
                content = bytearray(file.read(count * dtype.itemsize))
        except OSError as error:
            raise _unreadable(path, error) from error
        if len(content) != count * dtype.itemsize:
            raise _unreadable(path, EOFError("it ends inside a tensor"))
        return torch.frombuffer(content, dtype=dtype) if count else torch.empty(0, dtype=dtype)

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(torch.Size(shape).numel() * self.dtypes[name].itemsize for name, shape in self.shapes.items())

    def _list_file(self, path, promised):
        if path.suffix == ".safetensors":
            # an empty slice tells shape and dtype without reading the data
            with _open_safetensors(path) as file:
                found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                shapes = {name: tuple(part.get_shape()) for name, part in found.items()}
                dtypes = {name: _empty(part).dtype for name, part in found.items()}
        else:
            found = self._load_bin(path)
            shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
            dtypes = {name: tensor.dtype for name, tensor in found.items()}
        lacking = sorted(set(promised) - set(shapes))
        if lacking:
            raise ValueError(
                f"{path} lacks {listed(lacking)}, which the index next to it promises; copy the checkpoint again"
            )
        self.shapes.update(shapes)
        self.dtypes.update(dtypes)
        self._file_of.update(dict.fromkeys(shapes, path))

    def _read_file(self, path, names):
        """Copies: a tensor that views the mapped file would keep in memory every page of it that was ever read."""
        if path.suffix != ".safetensors":
            stored = self._load_bin(path)
            return {name: stored[name].clone() for name in names}
        try:
            with _open_safetensors(path) as file:
                return {name: file.get_tensor(name).clone() for name in names}
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from error

    def _load_bin(self, path):
        if path in self._whole_files:
            return self._whole_files[path]
        # files written before torch 1.6 are no zip archives and cannot be mapped: they are kept in memory instead
        mapped = zipfile.is_zipfile(path)
        try:
            stored = torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
        except (RuntimeError, pickle.UnpicklingError, EOFError, OSError, KeyError, ValueError) as error:
            raise _unreadable(path, error) from error
        if not isinstance(stored, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in stored.values()):
            raise ValueError(f"{path} must hold a dict of tensors by name; save model.state_dict() into it")
        if not mapped:
            self._whole_files[path] = stored
        return stored


def read_json(path: Path) -> dict:
    """A JSON file that must be there and whole."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path.parent} has no {path.name}; give the folder of a saved model") from error
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _locate(source):
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ValueError(f"source must be a model folder or a Hub id, got the file {path}; give the folder it lies in")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", str(source)):
        raise ValueError(f"source folder {source} does not exist; give a model folder or a Hub id like owner/name")
    return _download(str(source))


def _download(repo_id):
    """The files of a Hub model that a conversion needs: .bin weights only if there are no safetensors."""
    texts = ["config.json", "generation_config.json", *TOKENIZER_FILES, *TOKENIZER_CODE]
    try:
        folder = Path(snapshot_download(repo_id, allow_patterns=[*texts, "model*.safetensors*"]))
        if not any((folder / name).exists() for name in WEIGHT_FILES):
            folder = Path(snapshot_download(repo_id, allow_patterns=[*texts, "pytorch_model*.bin*"]))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{repo_id} is no local folder and could not be fetched from the Hub ({type(error).__name__}: {reason}); "
            "check the name and the connection, or give a local folder"
        ) from error
    return folder


def _weight_files(folder):
    """Path of each weight file and the names its index promises in it (none without an index)."""
    chosen = next((folder / name for name in WEIGHT_FILES if (folder / name).exists()), None)
    if chosen is None:
        raise ValueError(f"{folder} has no weights; one of {', '.join(WEIGHT_FILES)} is wanted")
    if chosen.suffix != ".json":
        return {chosen: ()}
    weight_map = read_json(chosen).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{chosen} has no weight_map; copy the checkpoint again")
    files = {}
    for name, file in weight_map.items():
        files.setdefault(folder / Path(file).name, []).append(name)
    missing = sorted(path.name for path in files if not path.exists())
    if missing:
        raise ValueError(f"{folder} lacks the shards {listed(missing)} of {chosen.name}; copy or download them again")
    return files


def _open_safetensors(path):
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from error


def _places(path):
    """Where each tensor of a safetensors file starts: after 8 bytes that say how long the JSON header is, and it."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items()}


def _empty(part):
    return part[:0] if part.get_shape() else part[...]


def _unreadable(path, error):
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ValueError(f"{path} cannot be read ({reason}); it is damaged or cut short: copy or download it again")


def listed(names: list[str], limit: int = 8) -> str:
    """Names for an error message, cut when there are many."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
