"""KDAConfig: what it derives, what it refuses, and what survives saving."""

import copy
import json
import re

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
        ({"hidden_act": "situ"}, ["hidden_act", "situ", "mlp_gated=True"]),
        ({"situ_beta": 0.0}, ["situ_beta", "0.0"]),
        ({"situ_linear_beta": -1.0}, ["situ_linear_beta", "-1.0"]),
        ({"q_lora_rank": 0}, ["q_lora_rank", "0"]),
        ({"kv_lora_rank": 0}, ["kv_lora_rank", "0"]),
        ({"qk_nope_head_dim": 0}, ["qk_nope_head_dim", "0"]),
        ({"qk_rope_head_dim": -1}, ["qk_rope_head_dim", "-1"]),
        ({"v_head_dim": 0}, ["v_head_dim", "0"]),
        ({"latent_norm_eps": -1.0}, ["latent_norm_eps", "-1.0"]),
        ({"num_experts": -1}, ["num_experts must", "-1"]),
        ({"norm_eps": float("nan")}, ["norm_eps", "nan"]),
        ({"decay_lower_bound": -float("inf")}, ["decay_lower_bound", "-inf"]),
        ({"situ_linear_beta": float("nan")}, ["situ_linear_beta", "nan"]),
        ({"keep_in_fp32": ["conv1d", ""]}, ["keep_in_fp32", "empty"]),
        ({"num_experts": 4}, ["num_experts_per_token", "num_experts=4", "8"]),
        ({"num_experts": 4, "num_experts_per_token": 0}, ["num_experts_per_token", "0"]),
        ({"num_shared_experts": -1}, ["num_shared_experts", "-1"]),
        ({"moe_intermediate_size": 0}, ["moe_intermediate_size", "0"]),
        ({"first_k_dense_replace": -1}, ["first_k_dense_replace", "-1"]),
        ({"routed_scaling_factor": 0.0}, ["routed_scaling_factor", "0.0"]),
        ({"routed_expert_hidden_size": 0}, ["routed_expert_hidden_size", "0"]),
        ({"attention_residual": "half"}, ["attention_residual", "half", "block"]),
        ({"attention_residual_block_size": 0}, ["attention_residual_block_size", "0"]),
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
        {"kv_lora_rank": "512"},
        {"num_experts": None},
        {"latent_norm": 1},
        {"keep_in_fp32": "conv1d"},
    ],
)
def test_a_wrong_type_is_refused_and_named(fields):
    with pytest.raises(StrictDataclassFieldValidationError, match=next(iter(fields))):
        small(**fields)


def test_sizes_of_latents_and_experts_follow_from_the_others():
    config = small(num_hidden_layers=3, num_experts=8, num_shared_experts=2)
    sizes = (config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim)
    assert sizes == (32, 16, 0, 16)
    assert (config.moe_intermediate_size, config.shared_intermediate_size) == (128, 256)
    assert [config.uses_experts(i) for i in range(3)] == [False, True, True]
    assert small(moe_intermediate_size=8, num_shared_experts=3).shared_intermediate_size == 24
    assert small(num_shared_experts=0).shared_intermediate_size == 0
    assert not small().uses_experts(1)


def test_names_of_the_released_configs_for_experts():
    config = small(num_local_experts=8, num_experts_per_tok=2, n_shared_experts=3, norm_topk_prob=False)
    assert (config.num_experts, config.num_experts_per_token, config.num_shared_experts) == (8, 2, 3)
    assert config.moe_renormalize is False


def test_a_config_from_before_there_were_experts_is_one_without():
    old = {"stages": ["kda", "softmax"], "vocab_size": 97, "hidden_size": 32, "num_attention_heads": 2}
    config = KDAConfig.from_dict({**old, "num_hidden_layers": 2, "model_type": "kda_hybrid"})
    assert (config.num_experts, config.attention_residual, config.keep_in_fp32) == (0, "none", None)
    assert KDAForCausalLM(config).num_parameters() == KDAForCausalLM(small(stages=["kda", "softmax"])).num_parameters()


GATED = {
    "mlp_gated": True,
    "mlp_bias": False,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 8,
}


@pytest.mark.parametrize(
    "fields",
    [
        {"stages": "kda"},
        {"stages": "softmax", "mlp_gated": True},
        {"stages": "mla"},
        {"stages": "mla", "q_lora_rank": 8, "mla_output_gate": True},
        {"stages": ["kda", "mla"], "q_lora_rank": 8, **GATED},
        {"stages": "kda", "first_k_dense_replace": 0, **GATED},
        {"stages": "kda", "num_shared_experts": 0, **GATED},
        {"stages": "kda", **GATED, "mlp_gated": False},
        {"stages": "kda", **GATED, "mlp_bias": True},
    ],
    ids=str,
)
def test_every_rule_of_the_parallel_plans_has_a_module(fields):
    """Another one would make loading print a warning."""
    model = KDAForCausalLM(small(**fields)).model
    names = [name for named in (model.named_modules, model.named_parameters) for name, _ in named()]
    names = {re.sub(r"\.\d+", ".*", name) for name in names}
    for plan in (model.config.base_model_tp_plan, model.config.base_model_ep_plan):
        assert {rule for rule in plan or {} if rule not in names} == set()


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
