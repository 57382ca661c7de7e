"""Our own model folders read a layer at a time, with the interface of `Gpt2Weights`."""

import torch
from huggingface_hub.errors import StrictDataclassError

from modeling_kda.configuration_kda import KDAConfig
from modeling_kda.modeling_kda import KDAForCausalLM

from .checkpoint import Checkpoint, listed


def parse_config(stored: dict) -> KDAConfig:
    """The configuration in a `config.json` of ours. Raises: ValueError, in one line, if it is none."""
    try:
        return KDAConfig.from_dict(stored)
    except (StrictDataclassError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"config.json is no valid {KDAConfig.model_type} configuration: {reason}") from error


def model_shapes(config: KDAConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of our model by name, the tied head included, made without memory for it."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in KDAForCausalLM(config).state_dict().items()}


class KDAWeights:
    """The checkpoint of a `KDAForCausalLM`.

    Attributes:
        config: its configuration.
        dtype: the dtype of the token embedding.

    Raises:
        ValueError: an invalid configuration, or tensors that are missing, unknown or of another shape, by name.
    """

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self.config = parse_config(checkpoint.config)
        expected = model_shapes(self.config)
        if self.config.tie_word_embeddings:
            del expected["lm_head.weight"]
        self._names = list(expected)
        self._check(expected)
        self.dtype = checkpoint.dtypes["model.embed_tokens.weight"]

    def layer(self, layer: int) -> dict[str, torch.Tensor]:
        """The tensors of one layer by their names below `model.layers.{layer}.`."""
        prefix = f"model.layers.{layer}."
        stored = self.checkpoint.read([name for name in self._names if name.startswith(prefix)])
        return {name.removeprefix(prefix): tensor for name, tensor in stored.items()}

    def ends(self) -> dict[str, torch.Tensor]:
        """The tensors outside the layers: embeddings, last norm and, if it is not tied, the head."""
        return self.checkpoint.read([name for name in self._names if not name.startswith("model.layers.")])

    def _check(self, expected):
        stored = self.checkpoint.shapes
        missing = [name for name in expected if name not in stored]
        unknown = [name for name in stored if name not in expected and name != "lm_head.weight"]
        if missing or unknown:
            told = f"lacks {listed(missing)}" if missing else f"holds unknown tensors: {listed(unknown)}"
            raise ValueError(f"the checkpoint in {self.checkpoint.folder} {told}; give a KDAForCausalLM checkpoint")
        for name, shape in expected.items():
            if stored[name] != shape:
                raise ValueError(f"{name} must have shape {list(shape)} by config.json, got {list(stored[name])}")
