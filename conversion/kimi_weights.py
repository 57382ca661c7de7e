"""Which tensor is which: our names, Moonshot's released checkpoints, transformers' `kimi_linear` and fla's `kda`.

Wherever two formats differ in more than a name, one tensor is a stretch of another in memory order: a convolution is a
third of the fused one, an expert's matrix one block of the stacked ones. So a table is a list of such stretches, read
in one direction or the other. What no stretch reaches, such as the padding of K3's A_log, holds zeros.
"""

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from math import prod
from operator import attrgetter

from modeling_kda.configuration_kda import KDAConfig

from .kimi_config import is_k3

FORMATS = ("ours", "kimi_linear", "moonshot", "fla")
# K3's file has 96 heads in 128 places; other numbers of heads are filled up alike
PADDED_HEADS = 128
K3_PREFIX = "language_model."

ENDS = {
    "model.embed_tokens.weight": "model.embed_tokens.weight",
    "model.norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
    "model.output_residual.norm.weight": "model.output_attn_res_norm.weight",
    "model.output_residual.query": "model.output_attn_res_proj.weight",
}
LAYER = {
    "mixer_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mixer_residual.norm.weight": "self_attention_res_norm.weight",
    "mixer_residual.query": "self_attention_res_proj.weight",
    "mlp_residual.norm.weight": "mlp_res_norm.weight",
    "mlp_residual.query": "mlp_res_proj.weight",
    "mlp.gate_proj.weight": "mlp.gate_proj.weight",
    "mlp.up_proj.weight": "mlp.up_proj.weight",
    "mlp.down_proj.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "block_sparse_moe.gate.weight",
    "mlp.router.selection_bias": "block_sparse_moe.gate.e_score_correction_bias",
    "mlp.latent_down_proj.weight": "block_sparse_moe.routed_expert_down_proj.weight",
    "mlp.latent_norm.weight": "block_sparse_moe.routed_expert_norm.weight",
    "mlp.latent_up_proj.weight": "block_sparse_moe.routed_expert_up_proj.weight",
    "mlp.shared_experts.gate_proj.weight": "block_sparse_moe.shared_experts.gate_proj.weight",
    "mlp.shared_experts.up_proj.weight": "block_sparse_moe.shared_experts.up_proj.weight",
    "mlp.shared_experts.down_proj.weight": "block_sparse_moe.shared_experts.down_proj.weight",
}
KDA = {
    "mixer.q_proj.weight": "self_attn.q_proj.weight",
    "mixer.k_proj.weight": "self_attn.k_proj.weight",
    "mixer.v_proj.weight": "self_attn.v_proj.weight",
    "mixer.q_conv1d.weight": "self_attn.q_conv1d.weight",
    "mixer.k_conv1d.weight": "self_attn.k_conv1d.weight",
    "mixer.v_conv1d.weight": "self_attn.v_conv1d.weight",
    "mixer.beta_proj.weight": "self_attn.b_proj.weight",
    "mixer.decay_a_proj.weight": "self_attn.f_a_proj.weight",
    "mixer.decay_b_proj.weight": "self_attn.f_b_proj.weight",
    "mixer.decay.A_log": "self_attn.A_log",
    "mixer.decay.dt_bias": "self_attn.dt_bias",
    "mixer.output_gate_a_proj.weight": "self_attn.g_a_proj.weight",
    "mixer.output_gate_b_proj.weight": "self_attn.g_b_proj.weight",
    "mixer.output_gate_proj.weight": "self_attn.g_proj.weight",
    "mixer.o_norm.weight": "self_attn.o_norm.weight",
    "mixer.o_proj.weight": "self_attn.o_proj.weight",
}
# g_proj is the gate before o_proj here, and the gate after the heads' norm in KDA layers
MLA = {
    "mixer.q_proj.weight": "self_attn.q_proj.weight",
    "mixer.q_a_proj.weight": "self_attn.q_a_proj.weight",
    "mixer.q_norm.weight": "self_attn.q_a_layernorm.weight",
    "mixer.q_b_proj.weight": "self_attn.q_b_proj.weight",
    "mixer.kv_a_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "mixer.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
    "mixer.kv_b_proj.weight": "self_attn.kv_b_proj.weight",
    "mixer.gate_proj.weight": "self_attn.g_proj.weight",
    "mixer.o_proj.weight": "self_attn.o_proj.weight",
}
FLA_NAMES = {
    "model.embed_tokens.": "model.embeddings.",
    "model.output_attn_res_": "model.res_",
    "input_layernorm.": "attn_norm.",
    "post_attention_layernorm.": "mlp_norm.",
    "self_attention_res_": "attn_res_",
    "self_attn.f_a_proj.": "self_attn.f_proj.0.",
    "self_attn.f_b_proj.": "self_attn.f_proj.1.",
    "self_attn.g_a_proj.": "self_attn.g_proj.0.",
    "self_attn.g_b_proj.": "self_attn.g_proj.1.",
    "self_attn.": "attn.",
}
FLA_GATE_BIAS = {"mixer.output_gate_b_proj.bias": "attn.g_proj.1.bias"}
NATIVE_NAMES = {
    r"self_attn\.(f_a_proj|f_b_proj|A_log|dt_bias)": r"self_attn.forget_gate.\1",
    r"block_sparse_moe\.": "mlp.",
}


@dataclass(frozen=True)
class Span:
    """`count` numbers that lie in the tensor `ours` from `ours_start` on and in `stored` from `stored_start` on."""

    ours: str
    ours_start: int
    stored: str
    stored_start: int
    count: int


class Stretches:
    """Spans by the name of one side, "ours" or "stored", and where they lie in that tensor."""

    def __init__(self, spans: list[Span], side: str):
        self._start = attrgetter(f"{side}_start")
        self._spans = {}
        for span in sorted(spans, key=self._start):
            self._spans.setdefault(getattr(span, side), []).append(span)

    def of(self, name: str) -> list[Span]:
        """All spans of a tensor, in order."""
        return self._spans.get(name, [])

    def overlapping(self, name: str, start: int, count: int):
        """Yields for `count` numbers from `start` on each span they lie in, how many of its numbers come before, and
        how many are wanted."""
        spans = self.of(name)
        first = max(0, bisect_right(spans, start, key=self._start) - 1)
        for span in spans[first:]:
            begin = self._start(span)
            if begin >= start + count:
                return
            low, high = max(start, begin), min(start + count, begin + span.count)
            if low < high:
                yield span, low - begin, high - low


@dataclass
class NameTable:
    """Tensors of ours and of another format, by name and shape, and what they have in common."""

    ours: dict[str, tuple[int, ...]]
    stored: dict[str, tuple[int, ...]] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    def add(self, ours, stored, stored_shape, *, ours_start=0, stored_start=0, count=None):
        """A tensor of the other format, and the stretch of it that is one of ours; count: as much as both hold."""
        count = min(prod(self.ours[ours]), prod(stored_shape)) if count is None else count
        self.stored[stored] = tuple(stored_shape)
        self.spans.append(Span(ours, ours_start, stored, stored_start, count))


def name_table(config: KDAConfig, form: str, ours: dict[str, tuple[int, ...]], *, prefix: bool = True) -> NameTable:
    """The table between our model of this configuration and the same model in another format.

    Args:
        config: of a model that `check_expressible` lets pass, unless `form` is "ours".
        form: one of `FORMATS`.
        ours: shape of every tensor of ours by name, see `kda_weights.model_shapes`.
        prefix: whether released names of a K3 start with `language_model.`, as in the file.
    """
    table = NameTable(dict(ours))
    dropped = {"lm_head.weight"} if config.tie_word_embeddings and form in ("ours", "fla") else set()
    start = K3_PREFIX if prefix and form == "moonshot" and is_k3(config) else ""
    for name, shape in ours.items():
        if name in dropped:
            continue
        layer, inner = _split(name)
        if form == "ours":
            table.add(name, name, shape)
        elif layer is None:
            stored = _renamed(ENDS[name], form) if name in ENDS else None
            if stored:
                table.add(name, start + stored, _stored_shape(name, shape, form, config))
        else:
            _add_in_layer(table, f"{start}model.layers.{layer}.", name, inner, config.stages[layer], form, config)
    if form in ("kimi_linear", "fla"):
        _add_what_only_they_have(table, config, form)
    return table


def _add_in_layer(table, start, name, inner, stage, form, config):
    shape = table.ours[name]
    if inner.startswith("mlp.experts.") and form == "moonshot" and not inner.endswith("_bias"):
        _add_experts(table, start, name, inner)
        return
    if inner.startswith("mlp.experts.") and not inner.endswith("_bias"):
        table.add(name, start + inner, shape)
        return
    conv = re.fullmatch(r"mixer\.([qkv])_conv1d\.weight", inner)
    if conv and form == "kimi_linear":
        size = prod(shape)
        fused = (3 * shape[0], *shape[1:])
        at = "qkv".index(conv[1]) * size
        table.add(name, f"{start}self_attn.conv1d.weight", fused, stored_start=at, count=size)
        return
    names = LAYER | (KDA if stage == "kda" else MLA)
    stored = _renamed(names[inner], form) if inner in names else None
    if form == "fla":
        stored = FLA_GATE_BIAS.get(inner, stored)
    if stored:
        table.add(name, start + stored, _stored_shape(inner, shape, form, config))


def _add_experts(table, start, name, inner):
    """[E, 2 I, Z] has for each expert the rows of w1 (gate) and then those of w3 (up); [E, Z, I] has w2."""
    experts, rows, columns = table.ours[name]
    parts = ("w1", "w3") if inner == "mlp.experts.gate_up_proj" else ("w2",)
    shape = (rows // len(parts), columns)
    for i in range(experts * len(parts)):
        stored = f"{start}block_sparse_moe.experts.{i // len(parts)}.{parts[i % len(parts)]}.weight"
        table.add(name, stored, shape, ours_start=i * prod(shape))


def _add_what_only_they_have(table, config, form):
    """Tensors without a counterpart: fla's gate biases where ours have none, and shared experts of no width."""
    for layer, stage in enumerate(config.stages):
        start = f"model.layers.{layer}."
        if form == "fla" and stage == "kda":
            inner = config.num_value_heads * config.value_head_dim
            table.stored.setdefault(f"{start}attn.g_proj.1.bias", (inner,))
        if form == "kimi_linear" and config.uses_experts(layer) and not config.shared_intermediate_size:
            for part in ("gate_proj", "up_proj", "down_proj"):
                shape = (config.hidden_size, 0) if part == "down_proj" else (0, config.hidden_size)
                table.stored[f"{start}mlp.shared_experts.{part}.weight"] = shape


def _stored_shape(name, shape, form, config):
    if name.endswith(".query"):
        return (1, *shape)
    if name.endswith("A_log") and form != "fla":
        heads = shape[0]
        padded = -(-heads // PADDED_HEADS) * PADDED_HEADS
        return (padded,) if form == "moonshot" and is_k3(config) else (1, 1, heads, 1)
    return shape


def _renamed(released, form):
    """A released name in the words of another format."""
    if form == "kimi_linear":
        for pattern, new in NATIVE_NAMES.items():
            released = re.sub(pattern, new, released)
    if form == "fla":
        for old, new in FLA_NAMES.items():
            released = released.replace(old, new)
    return released


def _split(name):
    """(layer, name inside it), or (None, name)."""
    match = re.match(r"model\.layers\.(\d+)\.(.+)", name)
    return (int(match[1]), match[2]) if match else (None, name)
