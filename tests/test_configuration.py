"""KDAConfig: what it derives, what it refuses, and what survives saving."""

import copy
import json

import pytest
from helpers import tiny_model
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError

from modeling_kda import STAGES, KDAConfig, KDAForCausalLM

IRREGULAR = ["kda", "softmax", "kda", "kda", "softmax", "gated_delta", "kda"]


def small(**fields):
    return KDAConfig(
        **{"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, **fields}
    )


def test_defaults_are_gpt2_small_with_kda():
    config = KDAConfig()
    assert config.stages == ["kda"] * 12
    sizes = (config.head_dim, config.value_head_dim, config.num_value_heads, config.intermediate_size)
    assert sizes == (64, 64, 12, 3072)
    assert (config.output_gate_rank, config.decay_rank) == (64, 64)


@pytest.mark.parametrize("stage", STAGES)
def test_one_name_stands_for_every_layer(stage):
    config = small(stages=stage, num_hidden_layers=3)
    assert config.stages == [stage] * 3
    assert config.layer_types == [STAGES[stage].layer_type] * 3


def test_one_layer_is_enough():
    assert small(num_hidden_layers=1).stages == ["kda"]


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"stages": ["kda"] * 3, "num_hidden_layers": 4}, ["num_hidden_layers=4", "got 3"]),
        ({"stages": ["kda"] * 5, "num_hidden_layers": 4}, ["num_hidden_layers=4", "got 5"]),
        ({"stages": []}, ["num_hidden_layers=2", "got 0"]),
        ({"stages": ["kda", "mamba"]}, ["mamba", "gated_delta"]),
        ({"stages": "attention"}, ["attention", "softmax"]),
        ({"num_value_heads": 3}, ["num_value_heads", "multiple", "3"]),
        ({"num_value_heads": 1}, ["num_value_heads", "multiple"]),
        ({"head_dim": -4}, ["head_dim", "-4"]),
        ({"head_dim": 0}, ["head_dim", "0"]),
        ({"value_head_dim": 0}, ["value_head_dim", "0"]),
        ({"intermediate_size": 0}, ["intermediate_size", "0"]),
        ({"num_key_value_heads": 1}, ["num_key_value_heads", "num_attention_heads=2", "1"]),
        ({"hidden_size": 0}, ["hidden_size", "0"]),
        ({"num_attention_heads": 0}, ["num_attention_heads", "0"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"num_attention_heads": 33}, ["head_dim", "33"]),
        ({"hidden_size": 33}, ["hidden_size", "33", "head_dim"]),
        ({"short_conv_kernel_size": -1}, ["short_conv_kernel_size", "-1"]),
        ({"max_rollback": -1}, ["max_rollback", "-1"]),
        ({"decay_lower_bound": 0.0}, ["decay_lower_bound", "0.0"]),
        ({"norm": "batchnorm"}, ["norm", "batchnorm", "rmsnorm"]),
        ({"position_embedding": "rope"}, ["position_embedding", "rope"]),
        ({"output_gate": "on"}, ["output_gate", "'on'"]),
        ({"decay_gate": "sigmoid"}, ["decay_gate", "sigmoid"]),
        ({"feature_map": "relu"}, ["feature_map", "relu"]),
        ({"short_conv_activation": "gelu"}, ["short_conv_activation", "gelu"]),
        ({"hidden_act": "swosh"}, ["hidden_act", "swosh"]),
        ({"attention_dropout": 1.5}, ["attention_dropout", "1.5"]),
        ({"norm_eps": -1.0}, ["norm_eps", "-1.0"]),
        ({"layer_types": ["full_attention"] * 2}, ["layer_types", "stages"]),
    ],
)
def test_a_wrong_value_is_named(fields, words):
    with pytest.raises(ValueError) as error:
        small(**fields)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"stages": ("kda", "kda")},
        {"stages": None},
        {"stages": 3},
        {"hidden_size": "32"},
        {"hidden_size": 32.0},
        {"mlp_gated": "yes"},
        {"max_rollback": None},
    ],
)
def test_a_wrong_type_is_refused_and_named(fields):
    with pytest.raises(StrictDataclassFieldValidationError, match=next(iter(fields))):
        small(**fields)


def test_arguments_are_keyword_only():
    with pytest.raises(ValueError, match="keyword"):
        KDAConfig(97)


def test_a_wrong_value_assigned_later_is_found_when_the_model_is_built_or_saved(tmp_path):
    config = small(stages=["kda", "kda"])
    config.num_hidden_layers = 3
    with pytest.raises(ValueError, match="num_hidden_layers=3"):
        KDAForCausalLM(config)
    with pytest.raises(StrictDataclassClassValidationError, match="num_hidden_layers=3"):
        config.save_pretrained(tmp_path)


def test_irregular_patterns_survive_every_copy(tmp_path):
    config = small(stages=IRREGULAR, num_hidden_layers=7)
    config.save_pretrained(tmp_path)
    copies = [
        KDAConfig.from_pretrained(tmp_path),
        KDAConfig.from_dict(config.to_dict()),
        KDAConfig.from_dict(json.loads(config.to_json_string(use_diff=False))),
        copy.deepcopy(config),
    ]
    for other in copies:
        assert other.stages == IRREGULAR
        assert other.layer_types == config.layer_types
        assert other.to_dict() == config.to_dict()
    assert "layer_types" not in json.loads((tmp_path / "config.json").read_text())


def test_mixers_are_built_as_the_list_says():
    model = tiny_model(IRREGULAR)
    for stage, layer in zip(IRREGULAR, model.model.layers, strict=True):
        assert type(layer.mixer).__name__ == ("SoftmaxMixer" if stage == "softmax" else "RecurrentMixer")
        assert getattr(layer.mixer, "stage", STAGES["softmax"]) is STAGES[stage]


def test_the_list_given_is_not_shared():
    stages = ["kda", "kda"]
    config = small(stages=stages)
    stages[0] = "softmax"
    assert config.stages == ["kda", "kda"]


def test_layer_types_that_agree_are_accepted():
    config = small(stages=["kda", "softmax"], layer_types=["linear_attention", "full_attention"])
    assert config.layer_types == ["linear_attention", "full_attention"]


def test_standard_names_can_be_read_and_written():
    config = small(max_position_embeddings=64)
    for name in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "bos_token_id",
        "eos_token_id",
    ):
        assert isinstance(getattr(config, name), int), name
    assert (config.n_embd, config.n_head, config.n_layer, config.n_positions) == (32, 2, 2, 64)
    assert config.tie_word_embeddings is True
    assert config.pad_token_id is None
    config.n_positions = 128
    assert config.max_position_embeddings == 128
    assert KDAConfig(n_embd=64, n_head=4, n_layer=1).head_dim == 16
    assert config.get_text_config() is config


def test_an_unknown_field_is_kept_with_a_warning(caplog, monkeypatch):
    import logging

    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    small(decay_gates="lower_bound")
    assert "decay_gates" in caplog.text
    caplog.clear()
    KDAConfig.from_dict(small(num_labels=3, dtype="bfloat16").to_dict())
    assert not caplog.records


def test_two_models_of_one_config_do_not_disturb_each_other():
    config = small(stages=["softmax", "kda"])
    before = config.to_dict()
    KDAForCausalLM(config)
    KDAForCausalLM(config)
    assert {**config.to_dict(), "dtype": None} == {**before, "dtype": None}
