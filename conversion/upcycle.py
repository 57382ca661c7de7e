"""A GPT-2, or a model of ours, becomes a model of any stage: what is carried over, what is new, and where it starts.

The source is read, converted and written one layer at a time. Embeddings, norms and MLPs are carried; so are layers
that keep their stage, bit for bit. A softmax layer that becomes recurrent keeps its query, key and value projections;
its output projection is scaled to what the new mixer gives it, and the new parameters start where the new mixer
follows the old attention best on a few windows of text. Recurrent layers go up the lineage by `exact_steps.py`.

The parts of Kimi Linear and Kimi K3 start exact: latent attention of full size (`latent_conversion.py`), its output
gate, experts (`expert_conversion.py`) and attention residuals.
"""

from pathlib import Path

import torch
from tqdm.auto import tqdm

from modeling_kda.configuration_kda import KDAConfig
from modeling_kda.modeling_kda import KDAForCausalLM

from .checkpoint import Checkpoint
from .files import best_device, read_text
from .gpt2_weights import Gpt2Weights
from .kda_weights import KDAWeights
from .layer_conversion import LayerConverter, Options, fresh_residuals
from .measurement import SAMPLE_TEXT, cut_windows, load_source_tokenizer, random_windows
from .model_folder import MAX_SHARD_BYTES, new_model_folder
from .student_config import student_config

SAMPLE_WINDOWS, FITTED_WINDOWS = 8, 64
RANDOM_TOKENS = "random tokens: the source has no tokenizer, so half-lives are the default and not measured"


def upcycle(
    source: str | Path,
    output: str | Path,
    stages: str | list[str],
    *,
    experts: str | None = None,
    calibrate: str | None = None,
    fit_steps: int = 200,
    channel_spread: float = 2.0,
    seed: int = 0,
    device: str | torch.device | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    **config_overrides,
) -> dict:
    """Convert a model folder and write the result as a folder that `from_pretrained` loads.

    Args:
        source: folder or Hub id of a GPT-2 or of a model of ours.
        output: folder to write; must not exist. It appears complete or not at all.
        stages: a stage of the lineage for all layers, or a list with one per layer.
        experts: how the MLPs become experts: "partition", "copies" or "latent", see `expert_conversion.py`; `None`
            keeps them. Their number and sizes are fields of the configuration.
        calibrate: a text to fit the new mixers to, layer by layer (64 windows of it at most); without it, starts are
            chosen on a short sample that comes with this package, and nothing is fitted.
        fit_steps: steps of that fit per layer, after a closed-form step.
        channel_spread: half-lives of a kda head's channels start from h / channel_spread to h * channel_spread.
        seed: of everything random.
        device: where layers are measured and fitted; a CUDA device if there is one, else the CPU.
        max_shard_bytes: largest weight file.
        config_overrides: fields of the new configuration, from `student_config.CHOICES`.

    Returns:
        What was done, as written to `upcycle.json`: for every layer the tensors that were carried, transformed and
        new, and what its heads start from.

    Raises:
        ValueError: a source that cannot be read or converted, unknown stages or fields, a text that is empty or too
            short, a tokenizer that does not fit, an output folder that exists or cannot be written.
    """
    if fit_steps < 0 or channel_spread < 1:
        raise ValueError(
            f"fit_steps must be at least 0 and channel_spread at least 1, got {fit_steps} and {channel_spread}"
        )
    weights = open_weights(source)
    config = student_config(weights.config, stages, config_overrides, experts)
    config.dtype = weights.dtype
    folder = weights.checkpoint.folder
    with new_model_folder(output, config, max_shard_bytes=max_shard_bytes) as target:
        target.copy_generation_config(folder)
        target.copy_tokenizer(folder)
        windows, about_text = _windows(folder, config, calibrate, seed)
        options = Options(
            measured=about_text != RANDOM_TOKENS,
            fitted=calibrate is not None,
            fit_steps=fit_steps,
            channel_spread=channel_spread,
            seed=seed,
            device=torch.device(device or best_device()),
            experts=experts,
        )
        report = {"source": str(source), "text": about_text, "windows": list(windows.shape)}
        report |= _convert(weights, config, windows, options, target)
        target.write_json("upcycle.json", report)
    return report


def open_weights(source: str | Path) -> Gpt2Weights | KDAWeights:
    """The weights at a folder or Hub id, read as tensors of ours. Raises: ValueError if that is not possible."""
    checkpoint = Checkpoint(source)
    ours = checkpoint.config.get("model_type") == KDAConfig.model_type
    return KDAWeights(checkpoint) if ours else Gpt2Weights(checkpoint)


def _convert(weights, config, windows, options, target):
    """Everything from the source to the target, and the report about it."""
    ends = weights.ends()
    dtype = torch.promote_types(weights.dtype, torch.float32)
    converter = LayerConverter(weights.config, config, ends, windows, options, dtype)
    target.add(ends)
    report = {"carried": list(ends), "new": [], "layers": []}
    if weights.config.attention_residual == "none" != config.attention_residual:
        with torch.device("meta"):
            empty = KDAForCausalLM(config)
        new = fresh_residuals(empty, weights.dtype)
        new = {name: tensor for name, tensor in new.items() if not name.startswith("model.layers.")}
        target.add(new)
        report["new"] = list(new)
    del ends
    for i in tqdm(range(config.num_hidden_layers), desc="upcycling", unit="layer", disable=None):
        tensors, row = converter.convert(i, weights.layer(i))
        target.add({f"model.layers.{i}.{name}": tensor for name, tensor in tensors.items()})
        report["layers"].append(row)
    return report


def _windows(folder, config, calibrate, seed):
    """Tokens to measure on, [N, T], and in words what they are."""
    tokenizer = load_source_tokenizer(folder, config.vocab_size)
    if tokenizer is None:
        if calibrate is not None:
            raise ValueError(f"{folder} has no tokenizer for the calibration text; put its tokenizer files there")
        generator = torch.Generator().manual_seed(seed)
        return random_windows(config.vocab_size, config.max_position_embeddings, generator), RANDOM_TOKENS
    if calibrate is None:
        windows = cut_windows(tokenizer, read_text(SAMPLE_TEXT), config.max_position_embeddings, SAMPLE_WINDOWS)
        return windows, f"the package's sample, {SAMPLE_TEXT.name}"
    return cut_windows(tokenizer, calibrate, config.max_position_embeddings, FITTED_WINDOWS), "the given text"
