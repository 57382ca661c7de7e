"""Saving, loading, initialising: what is written comes back in any dtype and in pieces; no parameter is forgotten."""

import copy
import json
import pickle

import pytest
import torch
from accelerate import cpu_offload, disk_offload, infer_auto_device_map
from helpers import PATTERNS, tiny_model, tokens
from safetensors.torch import load_file

from modeling_kda import KDAConfig, KDAForCausalLM, KDAForSequenceClassification, KDAModel
from modeling_kda.layers import Decay
from modeling_kda.modeling_kda import KDADecoderLayer
from modeling_kda.recurrent_mixer import RecurrentMixer

EVERYTHING = {"output_gate": "full", "feature_map": "hedgehog", "mlp_gated": True}
RATES, STEPS = (1.0, 16.0), (1e-3, 1e-1)


def logits(model, **kwargs):
    with torch.no_grad():
        return model(tokens(2, 20) % 90, **kwargs)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_come_back_exactly_and_decays_stay_fp32(dtype, tmp_path):
    model = tiny_model("every_stage", **EVERYTHING)
    model.save_pretrained(tmp_path)
    loaded = KDAForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert not loaded.training
    for (name, p), q in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert p.dtype == (torch.float32 if ".decay." in name else dtype), name
        assert torch.equal(p, q.to(p.dtype)), name
    if dtype != torch.float32:
        # and once more, from a folder in low precision
        loaded.save_pretrained(tmp_path / "low")
        again = KDAForCausalLM.from_pretrained(tmp_path / "low", dtype="auto")
        assert torch.equal(logits(again), logits(loaded))


def test_sharded_folder_loads(tmp_path):
    model = tiny_model("every_stage")
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert torch.equal(logits(KDAForCausalLM.from_pretrained(tmp_path)), logits(model))


@pytest.mark.parametrize("in_place", [False, True], ids=["wrapped", "in_place"])
def test_a_compiled_model_saves_clean_names(in_place, tmp_path):
    model = tiny_model("kda")
    names = set(model.state_dict()) - {"lm_head.weight"}
    if in_place:
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    model.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == names
    assert torch.equal(logits(KDAForCausalLM.from_pretrained(tmp_path)), logits(tiny_model("kda")))


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_resizing_keeps_old_rows_and_the_tie(tie, tmp_path):
    model = tiny_model("kda", tie_word_embeddings=tie, eos_token_id=None)
    rows, head = model.model.embed_tokens.weight.detach().clone(), model.lm_head.weight.detach().clone()
    for size in (105, 90):
        model.resize_token_embeddings(size, mean_resizing=False)
        kept = min(size, 97)
        assert model.config.vocab_size == size and logits(model).shape[-1] == size
        assert torch.equal(model.get_input_embeddings().weight[:kept], rows[:kept])
        assert torch.equal(model.get_output_embeddings().weight[:kept], head[:kept])
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tie
        assert model.generate(tokens(1, 5) % 90, max_new_tokens=3, do_sample=False).shape == (1, 8)
    model.init_weights()
    model.save_pretrained(tmp_path)
    loaded = KDAForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.lm_head.weight[:90], head[:90])
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tie
    assert torch.equal(logits(copy.deepcopy(loaded)), logits(model))


@pytest.mark.parametrize("source", [KDAModel, KDAForCausalLM, KDAForSequenceClassification])
@pytest.mark.parametrize("target", [KDAModel, KDAForCausalLM, KDAForSequenceClassification])
def test_every_class_loads_the_folders_of_the_others(source, target, tmp_path):
    """Only the head that the folder lacks is new; a tied head is never lacking."""
    model = tiny_model("every_stage", model_class=source)
    assert isinstance(model.all_tied_weights_keys, dict)
    model.save_pretrained(tmp_path)
    loaded, info = target.from_pretrained(tmp_path, output_loading_info=True)
    new_head = {"score.weight"} if target is KDAForSequenceClassification is not source else set()
    assert set(info["missing_keys"]) == new_head
    assert set(info["unexpected_keys"]) <= {"score.weight"}
    base = [getattr(m, "model", m) for m in (model, loaded)]
    assert torch.equal(*(logits(m, use_cache=False) for m in base))
    assert all(p.isfinite().all() for p in loaded.parameters())


def test_a_folder_with_other_names_is_reported(tmp_path):
    model = tiny_model("kda")
    strange = {f"other.{name}": p for name, p in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=strange)
    _, info = KDAForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["unexpected_keys"]) == set(load_file(tmp_path / "model.safetensors"))
    assert len(info["missing_keys"]) >= len(list(model.parameters())) - 1


def offload(model, kind, folder):
    if kind == "cpu":
        return cpu_offload(model, execution_device=torch.device("cpu"))
    if kind == "disk":
        return disk_offload(model, folder, execution_device=torch.device("cpu"))
    model.save_pretrained(folder / "saved")
    places = {"model.layers.0": "disk", "model.layers.1": "cpu", "model.layers.2": "disk"}
    rest = dict.fromkeys(("model.embed_tokens", "model.embed_positions", "model.norm", "lm_head"), "cpu")
    return KDAForCausalLM.from_pretrained(folder / "saved", device_map=places | rest, offload_folder=folder / "off")


@pytest.mark.parametrize("kind", ["cpu", "disk", "device_map"])
def test_offloaded_models_give_the_same(kind, tmp_path):
    stages = ["kda", "softmax", "ssd"]
    model = tiny_model(stages)
    expected, text = logits(model), model.generate(tokens(2, 5), max_new_tokens=3, do_sample=False)
    offloaded = offload(tiny_model(stages), kind, tmp_path)
    assert torch.equal(logits(offloaded), expected)
    assert torch.equal(offloaded.generate(tokens(2, 5), max_new_tokens=3, do_sample=False), text)


def test_device_maps_never_cut_a_layer():
    with torch.device("meta"):
        model = KDAForCausalLM(tiny_model("every_stage").config)
    layer = sum(p.numel() * 4 for p in model.model.layers[0].parameters())
    budget = {0: 2 * layer, 1: 2 * layer, "cpu": 100 * layer}
    places = infer_auto_device_map(model, budget, no_split_module_classes=model._no_split_modules)
    assert len(set(places.values())) > 1
    inside = [name for name in places if name.startswith("model.layers.") and name.count(".") > 2]
    assert inside == []


@pytest.mark.parametrize("how", ["init_weights", "apply"])
def test_initialisation_after_meta_reaches_every_parameter(how):
    config = tiny_model("every_stage", **EVERYTHING).config
    with torch.device("meta"):
        model = KDAForCausalLM(config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(torch.nan)
    if how == "apply":
        model.apply(model._init_weights)
    else:
        model.init_weights()
    assert [name for name, p in model.named_parameters() if p.isnan().any()] == []
    decays = [module for module in model.modules() if isinstance(module, Decay)]
    assert decays
    for decay in decays:
        assert_documented(decay)


def assert_documented(decay):
    """The ranges that `Decay.reset_parameters` states, and not one value repeated."""
    for values, (low, high) in ((decay.A_log.exp(), RATES), (torch.nn.functional.softplus(decay.dt_bias), STEPS)):
        assert low * 0.999 <= values.min() < values.max() <= high * 1.001


@pytest.mark.parametrize("pattern", PATTERNS)
def test_models_from_scratch_start_from_documented_weights(pattern):
    config = KDAConfig(**{**tiny_model(pattern, **EVERYTHING).config.to_dict(), "hidden_size": 64, "head_dim": None})
    model = KDAForCausalLM(config)
    for name, p in model.named_parameters():
        assert p.isfinite().all(), name
        if name.endswith(("bias",)) and not name.endswith("dt_bias"):
            assert not p.any(), name
        elif "norm" in name:
            assert (p == 1).all(), name
        elif name.endswith("proj.weight"):
            assert p.std().item() == pytest.approx(config.initializer_range, rel=0.2), name
    for module in model.modules():
        if isinstance(module, Decay):
            assert_documented(module)


def test_a_mixer_alone_initialises_what_is_its_own():
    torch.manual_seed(0)
    config = tiny_model("kda").config
    mixer = RecurrentMixer(config, 0)
    assert_documented(mixer.decay)
    bound = config.short_conv_kernel_size**-0.5
    assert 0.8 * bound < mixer.q_conv1d.weight.abs().max() <= bound
    assert (mixer.o_norm.weight == 1).all()
    assert all(p.isfinite().all() for p in KDADecoderLayer(config, 0).parameters())


def test_models_and_configs_survive_pickling():
    model = tiny_model("every_stage")
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(logits(again), logits(model))
    assert again.config.to_dict() == model.config.to_dict()


def test_saved_config_holds_no_derived_or_generation_fields(tmp_path):
    tiny_model("softmax_inside").save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "kda_hybrid" and saved["architectures"] == ["KDAForCausalLM"]
    assert saved["stages"] == PATTERNS["softmax_inside"]
    assert not {"layer_types", "temperature", "do_sample", "_attn_implementation"} & set(saved)
