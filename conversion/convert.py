"""Checkpoints from one format to another: ours, transformers' `kimi_linear`, Moonshot's released form, fla's `kda`.

A tensor of the target is put together from stretches of tensors of ours, and those from stretches of the source's, a
piece at a time: memory holds a few pieces, whatever the size of the model. Numbers are copied bit for bit, and keep
their dtypes; only packed experts are dequantised, or quantised if that is asked for.
"""

from functools import lru_cache, partial, reduce
from math import prod
from pathlib import Path

import torch

from modeling_kda.configuration_kda import KDAConfig
from modeling_kda.modeling_kda import KDAForCausalLM

from .checkpoint import Checkpoint
from .expressible import TITLES, check_expressible
from .files import write_json
from .fla_config import from_fla_config, to_fla_config
from .kda_weights import model_shapes, parse_config
from .kimi_config import from_kimi_config, to_kimi_config
from .kimi_weights import FORMATS, Stretches, name_table
from .model_folder import (
    MAX_SHARD_BYTES,
    copy_generation_config,
    copy_tokenizer,
    new_folder,
    save_config_and_code,
)
from .mxfp4 import GROUP, quantise
from .stored_tensors import PACKED, SCALE, StoredTensors
from .tensor_files import PIECE, Planned, write_tensors

# parts whose dtype the models do not fix by themselves
WIDE_PARTS = ("conv1d", "o_norm")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def convert(
    source: str | Path,
    output: str | Path,
    to: str,
    *,
    mxfp4: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> dict:
    """Write the model in a folder or on the Hub in another format.

    Args:
        source: folder or Hub id of a model of ours, of a Kimi Linear or Kimi K3 (released, or saved by transformers),
            or of fla's `kda`. The text model is taken; vision parts are left out.
        output: folder to write; must not exist. It appears complete or not at all.
        to: "ours", "kimi_linear" (transformers' names), "moonshot" (the names of released checkpoints, which
            transformers and inference engines read) or "fla".
        mxfp4: store the weights of routed experts in 4 bits, as Kimi K3 does; for "moonshot" only.
        max_shard_bytes: largest weight file; a tensor that is larger gets a file of its own.

    Returns: `from`, the format found; `tensors`, how many were written; `left_out`, stored names that were not read.

    Raises:
        ValueError: a source that cannot be read, or that is damaged or incomplete; a model with something that the
            target has no place for, naming the first layer; an output folder that exists or cannot be written.
    """
    if to not in FORMATS:
        raise ValueError(f"a model can be converted to {', '.join(FORMATS)}, got {to!r}")
    if mxfp4 and to != "moonshot":
        raise ValueError(f"MXFP4 experts are part of released checkpoints only, got to={to!r}")
    model = SourceModel(source)
    if to != "ours":
        check_expressible(model.config, to)
    table = name_table(model.config, to, model.table.ours)
    model.check_left_out(table, to)
    planned = _plan(model, table, mxfp4)
    folder = model.stored.checkpoint.folder
    with new_folder(output) as path:
        write_tensors(path, planned, max_shard_bytes, progress="converting")
        _write_config(model.config, to, path, mxfp4)
        copy_generation_config(folder, path, model.config)
        copy_tokenizer(folder, path)
    return {"from": model.format, "tensors": len(planned), "left_out": model.stored.left_out}


class SourceModel:
    """A checkpoint of any of the formats, read as tensors of ours.

    Attributes:
        format: one of `FORMATS`.
        config: of our model.
        stored: the tensors of the checkpoint.
        table: what they are of ours.

    Raises: ValueError for anything that keeps it from being a whole model of a format we know.
    """

    def __init__(self, source: str | Path):
        checkpoint = Checkpoint(source)
        self.stored = StoredTensors(checkpoint)
        self.format = _format_of(checkpoint.config, self.stored.shapes)
        self.config = self._read_config(checkpoint.config)
        self.table = self._read_table()
        self._stretches = Stretches(self.table.spans, "ours")
        self._check_tails()
        self.dtypes = self._read_dtypes()
        if self.config.dtype is None:
            self.config.dtype = self.dtypes[EMBEDDING]
        if self.format != "ours":
            self.config.keep_in_fp32 = self._kept_in_fp32() or None

    def read(self, name: str, start: int, count: int) -> torch.Tensor:
        """[count] numbers of a tensor of ours in memory order; zeros where the source has no tensor for it."""
        stretches = self._stretches.overlapping(self._alias(name), start, count)
        pieces = [self.stored.read(span.stored, span.stored_start + skip, n) for span, skip, n in stretches]
        return _joined(pieces, count, self.dtypes[name])

    def check_left_out(self, table, to: str):
        """Raises: ValueError for a tensor that is not zero and that the target has no place for."""
        placed = {span.ours for span in table.spans}
        for name, shape in table.ours.items():
            if name in placed or name == HEAD:
                continue
            if self.read(name, 0, prod(shape)).any():
                layer, _, inner = name.removeprefix("model.layers.").partition(".")
                where = f"layer {layer}" if name.startswith("model.layers.") else "the model"
                what = inner if name.startswith("model.layers.") else name
                raise ValueError(
                    f"{where} cannot be written for {TITLES[to]}: {what} is not zero, and there is no place for it"
                )

    def _alias(self, name):
        """A tied head is the embedding."""
        return EMBEDDING if name == HEAD and self.config.tie_word_embeddings else name

    def _read_config(self, config):
        if self.format == "ours":
            return parse_config(config)
        if self.format == "fla":
            biases = [name for name in self.stored.shapes if name.endswith("attn.g_proj.1.bias")]
            return from_fla_config(config, gate_bias=not all(self.stored.is_zero(name) for name in biases))
        return self._tied(from_kimi_config(config))

    def _tied(self, config):
        """Released checkpoints store the head even where it is the embedding; a head of its own always counts."""
        names = self.stored.shapes
        if HEAD in names:
            config.tie_word_embeddings = names[HEAD] == names.get(EMBEDDING) and self._same(HEAD, EMBEDDING)
        return config

    def _same(self, one, other):
        if self.stored.dtypes[one] != self.stored.dtypes[other]:
            return False
        total, row = prod(self.stored.shapes[one]), self.stored.shapes[one][-1]
        step = max(1, PIECE // row) * row
        pieces = ((start, min(step, total - start)) for start in range(0, total, step))
        return all(torch.equal(self.stored.read(one, *piece), self.stored.read(other, *piece)) for piece in pieces)

    def _read_table(self):
        table = name_table(self.config, self.format, model_shapes(self.config), prefix=False)
        tied, optional = self.config.tie_word_embeddings, set()
        if tied:
            # tied checkpoints may hold the head or not; it is not read
            table.stored[HEAD] = table.ours[HEAD]
            table.spans = [span for span in table.spans if span.ours != HEAD]
            optional.add(HEAD)
        self.stored.check(table, optional)
        return table

    def _read_dtypes(self):
        """The widest dtype that parts of each tensor of ours are stored in; that of the embedding where none is."""
        found = {}
        for name in self.table.ours:
            dtypes = {self.stored.dtypes[span.stored] for span in self._stretches.of(self._alias(name))}
            found[name] = reduce(torch.promote_types, dtypes) if dtypes else None
        return {name: dtype or found[EMBEDDING] for name, dtype in found.items()}

    def _kept_in_fp32(self):
        """Parts that the source stores in fp32 although its model is of fewer bits, as K3 does: they stay so."""
        if self.config.dtype.itemsize >= 4:
            return []
        found = {part: {t for name, t in self.dtypes.items() if f"{part}." in name} for part in WIDE_PARTS}
        return [part for part, dtypes in found.items() if dtypes == {torch.float32}]

    def _check_tails(self):
        """What no stretch reaches must be zero: padding, and biases that our model has not."""
        spans = Stretches(self.table.spans, "stored")
        for name, shape in self.table.stored.items():
            end, total = sum(span.count for span in spans.of(name)), prod(shape)
            if end < total and name != HEAD and not self.stored.is_zero(name, end):
                raise ValueError(
                    f"{self.stored.name_in_file(name)} must be zero from element {end} on, which has no counterpart"
                )


def _plan(model, table, mxfp4):
    """The tensors to write, in the order of the model."""
    stretches, planned = Stretches(table.spans, "stored"), []
    # the two parts of an expert's weight are written one after the other
    quantised = lru_cache(maxsize=1)(_quantised)
    for name, shape in table.stored.items():
        dtypes = {model.dtypes[span.ours] for span in stretches.of(name)} or {model.dtypes[EMBEDDING]}
        dtype = reduce(torch.promote_types, dtypes)
        tensor = Planned(name, shape, dtype, partial(_read_target, model, stretches, name, dtype))
        planned += _packed(tensor, quantised) if mxfp4 and ".experts." in name else [tensor]
    return planned


def _read_target(model, stretches, name, dtype, start, count):
    found = stretches.overlapping(name, start, count)
    pieces = [model.read(span.ours, span.ours_start + skip, n) for span, skip, n in found]
    return _joined(pieces, count, dtype)


def _joined(pieces, count, dtype):
    """Pieces in one dtype; what they leave open at the end is zero."""
    rest = count - sum(len(piece) for piece in pieces)
    return torch.cat([piece.to(dtype) for piece in pieces] + [torch.zeros(rest, dtype=dtype)])


def _quantised(read, shape):
    return quantise(read(0, prod(shape)).view(shape))


def _packed(tensor, quantised):
    """The two tensors that stand for the weight of an expert in MXFP4."""
    base, (rows, columns) = tensor.name.removesuffix(".weight"), tensor.shape
    if columns % GROUP:
        raise ValueError(f"{tensor.name} must be a multiple of {GROUP} wide for MXFP4, got {columns}")

    def part(i):
        return lambda start, count: quantised(tensor.read, tensor.shape)[i].flatten()

    return [
        Planned(base + PACKED, (rows, columns // 2), torch.uint8, part(0), whole=True),
        Planned(base + SCALE, (rows, columns // GROUP), torch.uint8, part(1), whole=True),
    ]


def _write_config(config, to, path, mxfp4):
    if to == "ours":
        with torch.device("meta"):
            save_config_and_code(KDAForCausalLM(config), path)
    elif to == "fla":
        write_json(path / "config.json", to_fla_config(config))
    else:
        stored = to_kimi_config(config)
        if mxfp4:
            stored.get("text_config", stored)["quantization_config"] = _quantization_config()
        write_json(path / "config.json", stored)


def _quantization_config():
    """What compressed-tensors reads: MXFP4 for every Linear except those outside the routed experts."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "group_size": GROUP,
        "symmetric": True,
        "strategy": "group",
        "scale_dtype": "torch.uint8",
        "observer": "minmax",
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    others = ("self_attn", "shared_experts", "mlp\\.(gate|up|gate_up|down)_proj", "lm_head")
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [f"re:.*{part}.*" for part in (*others, "routed_expert_(down|up)_proj")],
    }


def _format_of(config, names):
    text = config.get("text_config", config)
    kind = text.get("model_type") if isinstance(text, dict) else None
    if kind == KDAConfig.model_type:
        return "ours"
    if kind == "kda":
        return "fla"
    if kind != "kimi_linear":
        raise ValueError(
            f"model_type must be {KDAConfig.model_type!r}, 'kimi_linear' (also below text_config) or 'kda', got "
            f"{config.get('model_type')!r}; a GPT-2 is converted by upcycling it"
        )
    native = ("self_attn.conv1d.", ".forget_gate.", ".mlp.experts.", ".mlp.gate.", ".mlp.shared_experts.")
    return "kimi_linear" if any(part in name for name in names for part in native) else "moonshot"
