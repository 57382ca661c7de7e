"""Converts a model's layers from the first one up, carrying along the hidden states that the next layer needs."""

import copy
from dataclasses import dataclass

import torch

from modeling_kda.configuration_kda import KDAConfig
from modeling_kda.modeling_kda import KDADecoderLayer

from .exact_steps import steps_between
from .expert_conversion import dense_to_experts, needs_inputs
from .initialisation import NEW_PARAMETERS, HeadSettings, fit_queries_and_keys, new_parameters
from .latent_conversion import add_output_gate, is_exact, measure_inputs, softmax_to_latent
from .layer_fit import fit_mixer, output_error
from .measurement import (
    LayerRecord,
    build_layer,
    choose_settings,
    explained,
    match_outputs,
    measure_heads,
    run_layer,
    run_mixer,
)

SEARCH_WINDOWS = 4


@dataclass(frozen=True)
class Options:
    """How softmax layers are replaced.

    Attributes:
        measured: whether the windows are text that says something about attention, and not random tokens.
        fitted: whether new mixers are fitted to the windows.
        fit_steps: of AdamW per layer.
        channel_spread: see `new_parameters`.
        seed: of everything random.
        device: where layers run.
        experts: how MLPs become experts, a kind of `expert_conversion.py`, or None.
    """

    measured: bool
    fitted: bool
    fit_steps: int
    channel_spread: float
    seed: int
    device: torch.device
    experts: str | None = None


class LayerConverter:
    """Takes the tensors of one layer of the source after the other and gives those of the new model.

    Args:
        source_config, config: of the source and of the new model.
        ends: the source's tensors outside its layers.
        windows: int64 [N, T] tokens to measure on; not looked at if no softmax layer is replaced.
        options: see `Options`.
        dtype: to compute in.

    Raises: ValueError if the source's stage of some layer cannot become the new one.
    """

    def __init__(self, source_config: KDAConfig, config: KDAConfig, ends, windows, options: Options, dtype):
        self.source_config, self.config, self.options, self.dtype = copy.copy(source_config), config, options, dtype
        # a layer outside its model gets no mask, and this is the attention that is causal without one
        self.source_config._attn_implementation = "sdpa"
        # new mixers are tried in layers that have nothing else that is new
        others = {"num_experts": source_config.num_experts, "attention_residual": "none"}
        self.mixer_config = KDAConfig.from_dict(config.to_dict() | others)
        self.mixer_config._attn_implementation = "sdpa"
        pairs = list(zip(source_config.stages, config.stages, strict=True))
        self.replaced = [i for i, (old, new) in enumerate(pairs) if old == "softmax" != new]
        self.steps = {i: steps_between(*pair) for i, pair in enumerate(pairs) if i not in self.replaced}
        layers = range(config.num_hidden_layers)
        self.with_experts = [i for i in layers if config.uses_experts(i) and not source_config.uses_experts(i)]
        measured = [i for i in self.replaced if config.stages[i] != "mla" or not is_exact(config)]
        self.mlps_measured = bool(self.with_experts) and needs_inputs(config, options.experts)
        if self.mlps_measured:
            measured += self.with_experts
        self.last_measured = max(measured, default=-1)
        self.hidden_states = None
        if measured:
            self._check_residual()
            self.hidden_states = self._embed(ends, windows).to(options.device, dtype)

    def convert(self, index: int, tensors: dict) -> tuple[dict, dict]:
        """Tensors of the source's layer -> tensors of the new layer, and what was done with them."""
        layer = record = None
        if index <= self.last_measured:
            layer = build_layer(self.source_config, index, tensors, dtype=self.dtype, device=self.options.device)
            record = run_layer(layer, self.hidden_states, with_mlp=self.mlps_measured)
            self.hidden_states = record.hidden_states
        converted, facts = tensors, {}
        if index not in self.replaced:
            for step in self.steps[index]:
                converted = step(converted, self.config, self._generator(index))
        elif self.config.stages[index] == "mla":
            converted, facts = self._make_latent(index, tensors, record)
        else:
            converted, facts = self._replace_softmax(index, layer, tensors, record)
        converted = self._add_parts(index, converted, record)
        return converted, self._row(index, tensors, converted) | facts

    def _add_parts(self, index, tensors, record):
        """What is new around the mixer: none of it changes what the layer computes (but see `_partition`)."""
        gated = self.config.mla_output_gate and not self.source_config.mla_output_gate
        if gated and self.source_config.stages[index] == "mla":
            tensors = add_output_gate(tensors, self.config.num_attention_heads)
        if index in self.with_experts:
            inputs = record.mlp_inputs if record is not None else None
            kind, generator = self.options.experts, self._generator(index)
            tensors = dense_to_experts(tensors, self.config, kind, inputs, generator)
        if self.source_config.attention_residual == "none" != self.config.attention_residual:
            with torch.device("meta"):
                layer = KDADecoderLayer(self.config, index)
            tensors = tensors | fresh_residuals(layer, tensors["mixer.o_proj.weight"].dtype)
        return tensors

    def _make_latent(self, index, tensors: dict, record: LayerRecord | None):
        """A latent layer in the place of a softmax layer. No record is needed where it is exact."""
        exact = is_exact(self.config)
        statistics = None if exact else measure_inputs(tensors, record.inputs, self.config.num_attention_heads)
        converted, energy = softmax_to_latent(tensors, self.config, statistics, self._generator(index))
        facts = {"energy": float(f"{energy:.6g}")}
        if exact:
            return converted, facts
        student = self._student(index, converted)
        if self.options.fitted:
            title, seed = f"fitting layer {index}", self.options.seed + index
            facts["errors"] = fit_mixer(student, record, steps=self.options.fit_steps, seed=seed, title=title)
            converted = {name: tensor.cpu() for name, tensor in student.state_dict().items()}
        else:
            facts["errors"] = {"start": output_error(student, record.inputs, record.outputs)}
        return _stored(converted, tensors), facts

    def _replace_softmax(self, index, layer: KDADecoderLayer, tensors: dict, record: LayerRecord):
        """A recurrent layer in the place of a softmax layer, as near to it as its start can be."""
        stage, num_heads = self.config.stages[index], self.config.num_attention_heads
        teacher = {name: tensor.to(self.dtype) for name, tensor in tensors.items()}

        def start(settings):
            generator = self._generator(index)
            new = new_parameters(
                stage, self.config, settings, channel_spread=self.options.channel_spread, generator=generator
            )
            return fit_queries_and_keys(teacher, stage, self.config, settings) | new

        def followed(settings):
            heads = run_mixer(self._student(index, start(settings)), record.inputs[:SEARCH_WINDOWS])
            return explained(heads, record.heads[:SEARCH_WINDOWS], num_heads)

        settings, distances = measure_heads(layer, record.inputs)
        if self.options.measured:
            settings = choose_settings(stage, settings, followed)
        else:
            settings = settings.replace(half_lives=HeadSettings.default(num_heads).half_lives)
        student_tensors = start(settings)
        heads = run_mixer(self._student(index, student_tensors), record.inputs)
        student_tensors, factors = match_outputs(student_tensors, heads, record, num_heads)
        facts = self._facts(stage, settings, distances)
        facts["explained"] = _rounded(explained(heads, record.heads, num_heads))
        facts["output_factors"] = _rounded(factors)
        if self.options.fitted:
            student = self._student(index, student_tensors)
            title, seed = f"fitting layer {index}", self.options.seed + index
            facts["errors"] = fit_mixer(student, record, steps=self.options.fit_steps, seed=seed, title=title)
            student_tensors = {name: tensor.cpu() for name, tensor in student.state_dict().items()}
        return _stored(student_tensors, tensors), facts

    def _student(self, index, tensors):
        return build_layer(self.mixer_config, index, tensors, dtype=self.dtype, device=self.options.device)

    def _facts(self, stage, settings, distances):
        """The settings that this stage has, and where they come from."""
        groups, facts = NEW_PARAMETERS[stage], {}
        if self.options.measured:
            facts["attention_distances"] = _rounded(distances)
        if {"step", "head_decay", "channel_decay"} & set(groups):
            facts["half_lives"] = _rounded(settings.half_lives)
        if "beta" in groups:
            facts["betas"] = _rounded(settings.betas)
        if "feature_map" in groups:
            facts["sharpness"] = _rounded(settings.sharpness)
        return facts

    def _row(self, index, old: dict, new: dict) -> dict:
        """Which tensors are the source's, which were changed, and which are new: by comparing, not by intention."""
        carried = [name for name in new if name in old and _same(new[name], old[name])]
        return {
            "layer": index,
            "from": self.source_config.stages[index],
            "to": self.config.stages[index],
            "carried": carried,
            "transformed": [name for name in new if name in old and name not in carried],
            "new": [name for name in new if name not in old],
        }

    def _embed(self, ends, windows):
        hidden_states = ends["model.embed_tokens.weight"][windows]
        if self.source_config.position_embedding == "learned":
            hidden_states = hidden_states + ends["model.embed_positions.weight"][: windows.shape[1]]
        return hidden_states

    def _check_residual(self):
        if self.source_config.attention_residual != "none":
            raise ValueError(
                "the source has attention residuals, and its layers cannot be measured one at a time; convert mixers "
                "and MLPs first and add attention residuals last"
            )

    def _generator(self, index):
        return torch.Generator().manual_seed(self.options.seed + index)


def fresh_residuals(module, dtype: torch.dtype) -> dict:
    """Tensors for the attention residuals in a module that may be empty (meta): the plain sum, by queries of zero."""
    shapes = {name: t.shape for name, t in module.state_dict().items() if "_residual." in name}
    return {
        name: (torch.zeros if name.endswith("query") else torch.ones)(shape, dtype=dtype)
        for name, shape in shapes.items()
    }


def _stored(tensors, source):
    """In the dtype of the source's tensor of that name, new ones in that of its projections, decays in fp32."""
    dtype = source["mixer.q_proj.weight"].dtype
    stored = {}
    for name, tensor in tensors.items():
        decay = name.startswith("mixer.decay.")
        stored[name] = tensor.to(torch.float32 if decay else source[name].dtype if name in source else dtype)
    return stored


def _same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def _rounded(values):
    return [float(f"{value:.4g}") for value in values.tolist()]
