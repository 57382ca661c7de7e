"""GPT-2 checkpoints as tensors and configuration of our softmax stage. The only place that knows GPT-2's names.

GPT-2 stores its four projections as `Conv1D`, [in, out]; ours are [out, in]. `c_attn` holds query, key and value side
by side. Both are undone here, and nothing else changes: the softmax stage computes what GPT-2 computes.

Accepted are the checkpoints of transformers' GPT2Model and GPT2LMHeadModel, with any of the prefixes in `PREFIXES` in
any nesting, with or without a head, with or without the mask buffers of old versions, and those of nanoGPT, whose
projections are [out, in] already and whose biases may be absent (`bias=False`): absent biases are zeros.
"""

import re

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import GPT2Config

from modeling_kda.configuration_kda import KDAConfig

from .checkpoint import listed

# GPT-2 module -> our modules; several when its weight is split. {i} is the layer
NAMES = {
    "wte": ("model.embed_tokens",),
    "wpe": ("model.embed_positions",),
    "h.{i}.ln_1": ("model.layers.{i}.mixer_norm",),
    "h.{i}.attn.c_attn": tuple(f"model.layers.{{i}}.mixer.{part}_proj" for part in "qkv"),
    "h.{i}.attn.c_proj": ("model.layers.{i}.mixer.o_proj",),
    "h.{i}.ln_2": ("model.layers.{i}.mlp_norm",),
    "h.{i}.mlp.c_fc": ("model.layers.{i}.mlp.up_proj",),
    "h.{i}.mlp.c_proj": ("model.layers.{i}.mlp.down_proj",),
    "ln_f": ("model.norm",),
    "lm_head": ("lm_head",),
}
PREFIXES = ("transformer.", "module.", "_orig_mod.")
# causal masks that old versions stored; `attn.bias` is one of them and no bias
MASK_BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
ACTIVATIONS = ("gelu_new", "gelu", "relu", "gelu_pytorch_tanh", "silu")


def config_fields(gpt2_config: dict) -> dict:
    """The keyword arguments of `KDAConfig` for a GPT-2's `config.json`, without `stages`.

    Dropouts are left out: a student starts without. `reorder_and_upcast_attn` only changes rounding and is ignored;
    `scale_attn_weights` and `scale_attn_by_inverse_layer_idx` go into the weights (`query_scale`).

    Raises:
        ValueError: not a GPT-2, or one with cross attention or an activation that is not in `ACTIVATIONS`.
    """
    config = _parsed(gpt2_config)
    if config.add_cross_attention:
        raise ValueError("add_cross_attention=True is not supported: only decoder-only GPT-2 models can be converted")
    if config.activation_function not in ACTIVATIONS:
        raise ValueError(
            f"activation_function must be one of {', '.join(ACTIVATIONS)}, got {config.activation_function!r}"
        )
    if config.n_head < 1 or config.n_embd % config.n_head:
        raise ValueError(f"n_embd must be a multiple of n_head, got n_embd={config.n_embd} and n_head={config.n_head}")
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.n_embd,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "intermediate_size": config.n_inner or 4 * config.n_embd,
        "hidden_act": config.activation_function,
        "norm_eps": config.layer_norm_epsilon,
        "max_position_embeddings": config.n_positions,
        "initializer_range": config.initializer_range,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }


def query_scale(gpt2_config: dict, layer: int) -> float:
    """What to multiply a layer's queries with so that GPT-2's own attention scale becomes head_dim**-0.5."""
    config = _parsed(gpt2_config)
    scale = 1.0 if config.scale_attn_weights else (config.n_embd // config.n_head) ** 0.5
    return scale / (layer + 1) if config.scale_attn_by_inverse_layer_idx else scale


def to_softmax_stage(state_dict: dict[str, torch.Tensor], gpt2_config: dict) -> dict[str, torch.Tensor]:
    """A GPT-2 state dict in memory as the state dict of `KDAForCausalLM(KDAConfig(stages="softmax", ...))`.

    Args:
        state_dict: tensors by GPT-2's names, in one of the accepted forms.
        gpt2_config: the `config.json` of the model as a dict.

    Returns:
        Tensors by our names, in the dtypes given. `lm_head.weight` is among them only if it differs from the
        embedding.

    Raises:
        ValueError: a tensor that is missing, unknown or of another shape than the configuration says, by name.
    """
    weights = Gpt2Weights(_InMemory(state_dict, gpt2_config))
    tensors = weights.ends()
    for layer in range(weights.fields["num_hidden_layers"]):
        tensors.update({f"model.layers.{layer}.{name}": tensor for name, tensor in weights.layer(layer).items()})
    return tensors


class Gpt2Weights:
    """A GPT-2 checkpoint read as softmax-stage tensors, a layer at a time.

    Args:
        checkpoint: what `Checkpoint` offers: `config`, `shapes`, `dtypes` and `read(names)`.

    Attributes:
        fields: the keyword arguments of `KDAConfig`, with `tie_word_embeddings` as the weights have it.
        config: made of them.
        dtype: the dtype of the token embedding.

    Raises:
        ValueError: a tensor that is missing, unknown or of another shape than the configuration says, by name.
    """

    def __init__(self, checkpoint):
        self.checkpoint = checkpoint
        self.fields = config_fields(checkpoint.config)
        self.fields["stages"] = ["softmax"] * self.fields["num_hidden_layers"]
        self._stored = _plain_names(checkpoint.shapes)
        self._transposed = self._is_conv1d()
        self._check()
        self.dtype = checkpoint.dtypes[self._stored["wte.weight"]]
        self.fields["tie_word_embeddings"] = self._is_tied()
        self.config = KDAConfig(**self.fields)

    def layer(self, layer: int) -> dict[str, torch.Tensor]:
        """The tensors of one layer by their names below `model.layers.{layer}.`."""
        modules = [module for module in NAMES if module.startswith("h.")]
        tensors = self._read(modules, layer)
        scale = query_scale(self.checkpoint.config, layer)
        if scale != 1.0:
            for name in ("mixer.q_proj.weight", "mixer.q_proj.bias"):
                tensors[name] = (tensors[name].double() * scale).to(tensors[name].dtype)
        return tensors

    def ends(self) -> dict[str, torch.Tensor]:
        """The tensors outside the layers: embeddings, last norm and, if it is not tied, the head."""
        head = () if self.fields["tie_word_embeddings"] else ("lm_head",)
        return self._read(["wte", "wpe", "ln_f", *head])

    def _read(self, modules, layer=None):
        wanted = [(module, kind) for module in modules for kind in _kinds(module)]
        names = {f"{module.format(i=layer)}.{kind}": (module, kind) for module, kind in wanted}
        stored = self.checkpoint.read([self._stored[name] for name in names if name in self._stored])
        tensors = {}
        for name, (module, kind) in names.items():
            ours = [target.removeprefix("model.layers.{i}.") for target in NAMES[module]]
            if name in self._stored:
                whole = stored[self._stored[name]]
            else:
                shape = gpt2_shapes(self.fields, self._transposed)[name]
                whole = torch.zeros(shape, dtype=self.dtype)
            if whole.dim() == 2 and _is_projection(module) and self._transposed:
                whole = whole.T
            for target, part in zip(ours, whole.chunk(len(ours)), strict=True):
                tensors[f"{target}.{kind}"] = part.contiguous()
        return tensors

    def _is_conv1d(self):
        """Conv1D stores [in, out], nanoGPT's Linear [out, in]; the square attn.c_proj cannot tell, c_attn can."""
        width = self.fields["hidden_size"]
        shape = self.checkpoint.shapes.get(self._stored.get("h.0.attn.c_attn.weight"))
        return shape != (3 * width, width)

    def _check(self):
        expected = gpt2_shapes(self.fields, self._transposed)
        unknown = [self._stored[name] for name in self._stored if name not in expected]
        if unknown:
            raise ValueError(
                f"the checkpoint holds tensors that GPT-2 has not: {listed(unknown)}; "
                "convert a plain GPT2LMHeadModel or GPT2Model checkpoint of the size in config.json"
            )
        biases = {name for name in expected if name.endswith(".bias")}
        optional = {"lm_head.weight"} | (biases if biases.isdisjoint(self._stored) else set())
        missing = [name for name in expected if name not in self._stored and name not in optional]
        if missing:
            raise ValueError(
                f"the checkpoint lacks {len(missing)} of {len(expected)} tensors: {listed(missing)}; "
                "give the whole checkpoint of the model that config.json describes"
            )
        for name, stored in self._stored.items():
            shape, dtype = self.checkpoint.shapes[stored], self.checkpoint.dtypes[stored]
            if tuple(shape) != expected[name]:
                raise ValueError(
                    f"{stored} must have shape {list(expected[name])} by config.json, got {list(shape)}; "
                    "the configuration belongs to another model"
                )
            if not dtype.is_floating_point or dtype.itemsize < 2:
                raise ValueError(f"{stored} must be of 16, 32 or 64 bit floating point, got {dtype}; dequantise it")

    def _is_tied(self):
        if "lm_head.weight" not in self._stored:
            if not self.checkpoint.config.get("tie_word_embeddings", True):
                raise ValueError(
                    "the checkpoint lacks lm_head.weight, but config.json says tie_word_embeddings=False; "
                    "give the checkpoint of the whole language model"
                )
            return True
        head, embedding = self._stored["lm_head.weight"], self._stored["wte.weight"]
        pair = self.checkpoint.read([head, embedding])
        return torch.equal(pair[head], pair[embedding])


def gpt2_shapes(fields: dict, conv1d: bool = True) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a GPT-2 of this size, by name without prefix; projections [in, out] if `conv1d`."""
    width, inner = fields["hidden_size"], fields["intermediate_size"]
    weights = {
        "wte": (fields["vocab_size"], width),
        "wpe": (fields["max_position_embeddings"], width),
        "h.{i}.attn.c_attn": (width, 3 * width),
        "h.{i}.attn.c_proj": (width, width),
        "h.{i}.mlp.c_fc": (width, inner),
        "h.{i}.mlp.c_proj": (inner, width),
        "lm_head": (fields["vocab_size"], width),
    }
    shapes = {}
    for module in NAMES:
        shape = weights.get(module, (width,))
        for i in range(fields["num_hidden_layers"]) if "{i}" in module else [0]:
            for kind in _kinds(module):
                flipped = shape[::-1] if _is_projection(module) and not conv1d else shape
                shapes[f"{module.format(i=i)}.{kind}"] = flipped if kind == "weight" else shape[-1:]
    return shapes


def _kinds(module):
    return ("weight",) if module in ("wte", "wpe", "lm_head") else ("weight", "bias")


def _is_projection(module):
    return ".c_" in module


def _plain_names(stored_names):
    """Stored name by name without prefix; mask buffers are dropped."""
    plain = {}
    for stored in stored_names:
        name = stored
        while name.startswith(PREFIXES):
            name = name.split(".", 1)[1]
        if MASK_BUFFERS.fullmatch(name):
            continue
        if name in plain:
            raise ValueError(f"the checkpoint holds {name} twice, as {plain[name]} and {stored}; keep one of them")
        plain[name] = stored
    return plain


def _parsed(gpt2_config):
    """The configuration with GPT-2's defaults filled in."""
    if gpt2_config.get("model_type") != "gpt2":
        raise ValueError(
            f"model_type must be 'gpt2' (or one of our own models), got {gpt2_config.get('model_type')!r}"
        )
    try:
        return GPT2Config.from_dict(gpt2_config)
    except (StrictDataclassError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"config.json is no valid GPT-2 configuration: {reason}") from error


class _InMemory:
    """A state dict with the interface of `Checkpoint`."""

    def __init__(self, state_dict, config):
        self.config, self._tensors = config, state_dict
        self.shapes = {name: tuple(tensor.shape) for name, tensor in state_dict.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in state_dict.items()}

    def read(self, names):
        return {name: self._tensors[name] for name in names}
