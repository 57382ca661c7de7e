"""Writing a model folder that is complete or not there at all, without holding the whole model in memory."""

import contextlib
import json
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

from .checkpoint import TOKENIZER_FILES, listed, read_json

# with the tensors of one layer beside it, well below the size of any checkpoint that has several
MAX_SHARD_BYTES = 250_000_000


@contextlib.contextmanager
def new_model_folder(output: str | Path, config: KDAConfig, *, max_shard_bytes: int = MAX_SHARD_BYTES):
    """A `ModelFolder` to fill; at the end of the block it appears as `output`, after any error nothing does.

    Args:
        output: the folder to make; must not exist. Missing parents are made when everything else is done.
        config: of the model that is written.
        max_shard_bytes: tensors are collected up to this size and then written as one file.

    Raises:
        ValueError: `output` exists, or the system refused to write (a full disk).
        AssertionError: the block left a tensor of the model out.
    """
    output = Path(output)
    if output.exists():
        raise ValueError(f"output folder {output} exists already; remove it or choose another name")
    present = next(parent for parent in output.absolute().parents if parent.exists())
    partial = present / f".{output.name}.{uuid.uuid4().hex[:8]}"
    try:
        partial.mkdir()
        folder = ModelFolder(partial, config, max_shard_bytes)
        yield folder
        folder.finish()
        output.absolute().parent.mkdir(parents=True, exist_ok=True)
        os.rename(partial, output)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ValueError(
            f"could not write {output} ({reason}); nothing was left there, free some space or permissions"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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
        for name in TOKENIZER_FILES:
            if (source / name).exists():
                shutil.copyfile(source / name, self.path / name)
        if any((self.path / name).exists() for name in TOKENIZER_FILES):
            self._name_tokenizer_class()

    def copy_generation_config(self, source: Path):
        """`generation_config.json` of `source` as it is, or one made from the model's configuration."""
        name = "generation_config.json"
        if (source / name).exists():
            self.write_json(name, read_json(source / name))
        else:
            GenerationConfig.from_model_config(self.config).save_pretrained(self.path)

    def write_json(self, name: str, content: dict):
        """One more JSON file."""
        (self.path / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def finish(self):
        """The last shard, the index, the configuration and the code that loads the model from the Hub."""
        self._flush()
        missing = sorted(set(self._shapes) - {name for names in self._written for name in names})
        assert not missing, f"not written: {listed(missing)}"
        self._name_shards()
        self.config.architectures = [type(self._model).__name__]
        custom_object_save(self._model, self.path)
        self.config.save_pretrained(self.path)

    def _flush(self):
        if not self._shard:
            return
        save_file(self._shard, self.path / f"{len(self._written)}.safetensors", metadata={"format": "pt"})
        self._written.append(list(self._shard))
        self._total_bytes += self._shard_bytes
        self._shard, self._shard_bytes = {}, 0

    def _name_shards(self):
        count = len(self._written)
        if count == 1:
            (self.path / "0.safetensors").rename(self.path / "model.safetensors")
            return
        weight_map = {}
        for i, names in enumerate(self._written):
            file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            (self.path / f"{i}.safetensors").rename(self.path / file)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        self.write_json("model.safetensors.index.json", index)

    def _name_tokenizer_class(self):
        """GPT-2's published files leave the class to the model type, which is ours now."""
        path = self.path / "tokenizer_config.json"
        settings = read_json(path) if path.exists() else {}
        if "tokenizer_class" not in settings:
            self.write_json(path.name, settings | {"tokenizer_class": "GPT2Tokenizer"})
