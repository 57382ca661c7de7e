"""Writing a model folder that is complete or not there at all, without holding the whole model in memory."""

import contextlib
import os
import shutil
import uuid
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import GenerationConfig
from transformers.dynamic_module_utils import custom_object_save

from modeling_kda.configuration_kda import KDAConfig
from modeling_kda.modeling_kda import KDAForCausalLM

from .checkpoint import TOKENIZER_CODE, TOKENIZER_FILES, listed, read_json
from .files import write_json

# with the tensors of one layer beside it, well below the size of any checkpoint that has several
MAX_SHARD_BYTES = 250_000_000


@contextlib.contextmanager
def new_folder(output: str | Path):
    """A hidden folder to fill; at the end of the block it appears as `output`, after any error nothing does.

    Args:
        output: the folder to make; must not exist. Missing parents are made when everything else is done.

    Raises: ValueError if `output` exists, or the system refused to write (a full disk).
    """
    output = Path(output)
    if output.exists():
        raise ValueError(f"output folder {output} exists already; remove it or choose another name")
    present = next(parent for parent in output.absolute().parents if parent.exists())
    partial = present / f".{output.name}.{uuid.uuid4().hex[:8]}"
    try:
        partial.mkdir()
        yield partial
        output.absolute().parent.mkdir(parents=True, exist_ok=True)
        os.rename(partial, output)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ValueError(
            f"could not write {output} ({reason}); nothing was left there, free some space or permissions"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def new_model_folder(output: str | Path, config: KDAConfig, *, max_shard_bytes: int = MAX_SHARD_BYTES):
    """A `ModelFolder` to fill; at the end of the block it appears as `output`, after any error nothing does.

    Args:
        output: the folder to make; must not exist.
        config: of the model that is written.
        max_shard_bytes: tensors are collected up to this size and then written as one file.

    Raises:
        ValueError: as `new_folder`.
        AssertionError: the block left a tensor of the model out.
    """
    with new_folder(output) as partial:
        folder = ModelFolder(partial, config, max_shard_bytes)
        yield folder
        folder.finish()


class ModelFolder:
    """The files of a model on their way to disk: shards of bounded size, configuration, code, tokenizer."""

    def __init__(self, path: Path, config: KDAConfig, max_shard_bytes: int):
        self.path, self.config, self.max_shard_bytes = path, config, max_shard_bytes
        with torch.device("meta"):
            self._model = KDAForCausalLM(config)
        tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
        self._shapes = {name: t.shape for name, t in self._model.state_dict().items() if name not in tied}
        self._shard, self._shard_bytes, self._total_bytes = {}, 0, 0
        self._written = []  # names in each shard

    def add(self, tensors: dict[str, torch.Tensor]):
        """More tensors of the model, by their full names."""
        for name, tensor in tensors.items():
            expected = self._shapes.get(name)
            assert expected == tensor.shape, f"{name}: the model has {expected}, got {tuple(tensor.shape)}"
            size = tensor.numel() * tensor.element_size()
            if self._shard and self._shard_bytes + size > self.max_shard_bytes:
                self._flush()
            self._shard[name] = tensor.detach().cpu().contiguous()
            self._shard_bytes += size

    def copy_tokenizer(self, source: Path):
        """The tokenizer files of `source`, as far as it has any."""
        copy_tokenizer(source, self.path)

    def copy_generation_config(self, source: Path):
        """`generation_config.json` of `source` as it is, or one made from the model's configuration."""
        copy_generation_config(source, self.path, self.config)

    def write_json(self, name: str, content: dict):
        """One more JSON file."""
        write_json(self.path / name, content)

    def finish(self):
        """The last shard, the index, the configuration and the code that loads the model from the Hub."""
        self._flush()
        missing = sorted(set(self._shapes) - {name for names in self._written for name in names})
        assert not missing, f"not written: {listed(missing)}"
        self._name_shards()
        save_config_and_code(self._model, self.path)

    def _flush(self):
        if not self._shard:
            return
        save_file(self._shard, self.path / f"{len(self._written)}.safetensors", metadata={"format": "pt"})
        self._written.append(list(self._shard))
        self._total_bytes += self._shard_bytes
        self._shard, self._shard_bytes = {}, 0

    def _name_shards(self):
        name_shards(self.path, self._written, self._total_bytes)


def name_shards(path: Path, names: list[list[str]], total_bytes: int):
    """Give the files `0.safetensors`, `1.safetensors`, ... their final names, and write the index that several need.

    Args:
        path: the folder.
        names: of the tensors in each file.
        total_bytes: size of all tensors.
    """
    count = len(names)
    if count == 1:
        (path / "0.safetensors").rename(path / "model.safetensors")
        return
    weight_map = {}
    for i, inside in enumerate(names):
        file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        (path / f"{i}.safetensors").rename(path / file)
        weight_map.update(dict.fromkeys(inside, file))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(path / "model.safetensors.index.json", index)


def save_config_and_code(model: KDAForCausalLM, path: Path):
    """The configuration of a model (which may be on the meta device) and the code that loads it from the Hub."""
    model.config.architectures = [type(model).__name__]
    custom_object_save(model, path)
    model.config.save_pretrained(path)


def copy_tokenizer(source: Path, target: Path):
    """The tokenizer files of one folder into another, as far as there are any."""
    for pattern in (*TOKENIZER_FILES, *TOKENIZER_CODE):
        for file in source.glob(pattern):
            shutil.copyfile(file, target / file.name)
    if any((target / name).exists() for name in TOKENIZER_FILES):
        _name_tokenizer_class(target)


def copy_generation_config(source: Path, target: Path, config: KDAConfig):
    """`generation_config.json` as it is, or one made from a configuration where there is none."""
    name = "generation_config.json"
    if (source / name).exists():
        write_json(target / name, read_json(source / name))
    else:
        GenerationConfig.from_model_config(config).save_pretrained(target)


def _name_tokenizer_class(folder):
    """GPT-2's published files leave the class to the model type, which is ours now."""
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.exists() else {}
    if "tokenizer_class" not in settings:
        write_json(path, settings | {"tokenizer_class": "GPT2Tokenizer"})
