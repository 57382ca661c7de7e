"""Names, shapes and configurations of Kimi models in all formats, and what the formats cannot express."""

from math import prod

import pytest
from kimi_helpers import (
    K3_TEXT,
    KIMI_LINEAR_48B,
    layers_of,
    native_model,
    released_tensors,
    tiny_k3,
    tiny_kimi_linear,
)
from transformers import KimiLinearConfig

from modeling_kda import KDAConfig
from modeling_kda.conversion.expressible import check_expressible
from modeling_kda.conversion.fla_config import from_fla_config, to_fla_config
from modeling_kda.conversion.kda_weights import model_shapes
from modeling_kda.conversion.kimi_config import from_kimi_config, is_k3, to_kimi_config
from modeling_kda.conversion.kimi_weights import Stretches, name_table

K3 = {"model_type": "kimi_k3", "architectures": ["KimiK3ForConditionalGeneration"], "text_config": K3_TEXT}
FLA = {
    "model_type": "kda",
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "head_dim": 8,
    "hidden_act": "swish",
    "intermediate_size": 48,
    "norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PACKED_EXPERTS = 92 * 896 * 3


def table_of(config, form):
    return name_table(config, form, model_shapes(config))


@pytest.fixture(scope="module")
def k3_table():
    """The table with 250,000 rows, made once."""
    return table_of(from_kimi_config(K3), "moonshot")


def without(fields, *names):
    return {name: value for name, value in fields.items() if name not in names}


def test_kimi_linear_has_the_tensors_of_the_released_checkpoint():
    config = from_kimi_config(KIMI_LINEAR_48B)
    assert not is_k3(config)
    assert table_of(config, "moonshot").stored == released_tensors(KIMI_LINEAR_48B)
    # of the 49.12 billion numbers in the file, those of the router's bias are no parameters
    assert sum(map(prod, model_shapes(config).values())) == 49_122_681_728


def test_kimi_k3_has_the_tensors_of_the_released_checkpoint(k3_table):
    table = k3_table
    assert table.stored == released_tensors(K3)
    # 497,220 in the file, of which 168 are of the vision parts; packed weights bring their scales
    assert len(table.stored) + PACKED_EXPERTS == 497_220 - 168
    assert sum(map(prod, table.ours.values())) == 2_779_484_476_000


RELEASED = [KIMI_LINEAR_48B, K3, tiny_kimi_linear(), tiny_k3()]


def assert_every_number_has_one_place(table, but=()):
    """But those tensors whose names end so."""
    for side, shapes in {"ours": table.ours, "stored": table.stored}.items():
        stretches = Stretches(table.spans, side)
        for name, shape in shapes.items():
            end = 0
            for span in stretches.of(name):
                assert getattr(span, f"{side}_start") == end, f"{name}: a gap or an overlap"
                end += span.count
            assert end == prod(shape) or name.endswith(but), name


def test_every_number_has_one_place(k3_table):
    assert_every_number_has_one_place(k3_table, but=("self_attn.A_log",))
    for released in (KIMI_LINEAR_48B, tiny_kimi_linear("kkmm", num_shared_experts=0)):
        for form in ("moonshot", "kimi_linear", "ours"):
            assert_every_number_has_one_place(table_of(from_kimi_config(released), form))
    table = table_of(from_fla_config(FLA | {"attnres_block_size": 2}), "fla")
    assert_every_number_has_one_place(table, but=("g_proj.1.bias",))
    table = table_of(from_fla_config(FLA, gate_bias=True), "fla")
    assert_every_number_has_one_place(table, but=tuple(f"{part}_proj.bias" for part in ("q", "k", "v", "o", "beta")))


def test_names_and_shapes_of_transformers():
    config = from_kimi_config(tiny_kimi_linear())
    expected = {name: tuple(tensor.shape) for name, tensor in native_model().state_dict().items()}
    assert table_of(config, "kimi_linear").stored == expected


def test_stretches_are_found_from_any_place():
    config = from_kimi_config(tiny_kimi_linear())
    stretches = Stretches(table_of(config, "moonshot").spans, "ours")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    size = 16 * 32
    assert [span.count for span in stretches.of(name)] == [size] * 8
    found = list(stretches.overlapping(name, size + 5, size))
    assert [(skip, count) for _, skip, count in found] == [(5, size - 5), (0, 5)]
    assert [span.stored.split("experts.")[1] for span, *_ in found] == ["0.w3.weight", "1.w1.weight"]
    assert not list(stretches.overlapping(name, 8 * size, 1)) and not list(stretches.overlapping("no", 0, 1))


def test_the_dense_layer_is_an_mlp_in_released_names():
    names = table_of(from_kimi_config(tiny_kimi_linear()), "moonshot").stored
    dense = [name for name in names if ".layers.0." in name and ("mlp" in name or "moe" in name)]
    assert sorted(dense) == [f"model.layers.0.mlp.{part}_proj.weight" for part in ("down", "gate", "up")]


def test_g_proj_is_another_gate_in_each_kind_of_layer():
    config = from_kimi_config(tiny_k3("km"))
    ours = {span.stored: span.ours for span in table_of(config, "moonshot").spans}
    start = "language_model.model.layers."
    assert ours[f"{start}0.self_attn.g_proj.weight"] == "model.layers.0.mixer.output_gate_proj.weight"
    assert ours[f"{start}1.self_attn.g_proj.weight"] == "model.layers.1.mixer.gate_proj.weight"


def test_layer_lists_are_counted_from_one():
    config = from_kimi_config(KIMI_LINEAR_48B)
    assert [i for i, stage in enumerate(config.stages) if stage == "mla"] == [3, 7, 11, 15, 19, 23, 26]
    assert from_kimi_config(K3).stages[-3:] == ["kda", "mla", "mla"]
    # transformers' own default is another pattern, so that lists must be there
    lists = KIMI_LINEAR_48B | {"linear_attn_config": without(KIMI_LINEAR_48B["linear_attn_config"], "kda_layers")}
    with pytest.raises(ValueError, match="config.json must give linear_attn_config.kda_layers"):
        from_kimi_config(lists)
    native = KimiLinearConfig(**to_kimi_config(config))
    assert native.layer_types == config.layer_types and native.layer_types[3] == "full_attention"


def test_fields_and_not_the_model_type_tell_the_two_models_apart():
    assert K3_TEXT["model_type"] == KIMI_LINEAR_48B["model_type"]
    bare, nested = from_kimi_config(K3_TEXT), from_kimi_config(K3)
    assert without(bare.to_dict(), "_name_or_path") == without(nested.to_dict(), "_name_or_path")
    linear = from_kimi_config(KIMI_LINEAR_48B)
    facts = ("output_gate", "decay_gate", "hidden_act", "attention_residual", "routed_expert_hidden_size")
    assert [getattr(linear, fact) for fact in facts] == ["low_rank", "softplus", "silu", "none", None]
    assert [getattr(bare, fact) for fact in facts] == ["full", "lower_bound", "situ", "block", 3584]
    assert (bare.mla_output_gate, bare.q_lora_rank, bare.attention_residual_block_size) == (True, 1536, 12)
    assert (bare.short_conv_activation, linear.short_conv_activation) == ("silu", "silu")
    assert (bare.latent_norm_eps, bare.norm_eps) == (1e-6, 1e-5)


@pytest.mark.parametrize("released", RELEASED, ids=["linear", "k3", "tiny", "tiny_k3"])
def test_configurations_come_back(released):
    config = from_kimi_config(released)
    written = to_kimi_config(config)
    assert ("text_config" in written) == ("text_config" in released)
    assert written["tie_word_embeddings"] is False and written["architectures"] == released["architectures"]
    again = from_kimi_config(written)
    assert again.to_dict() == config.to_dict()
    given, back = released.get("text_config", released), written.get("text_config", written)
    unused = {"head_dim", "rope_theta", "rope_scaling"}
    assert {name: back[name] for name in given if name not in unused} == without(given, *unused)


def test_the_presets_are_the_released_models():
    # the dtype is that of a checkpoint, and so is what it keeps in fp32
    of_files = ("dtype", "keep_in_fp32")
    for preset, released in ((KDAConfig.kimi_linear_48b(), KIMI_LINEAR_48B), (KDAConfig.kimi_k3(), K3)):
        assert without(preset.to_dict(), *of_files) == without(from_kimi_config(released).to_dict(), *of_files)


def test_configurations_of_transformers_are_read():
    native = KimiLinearConfig(**tiny_kimi_linear("kmkk", first_k_dense_replace=2))
    saved = native.to_dict()
    assert "first_k_dense_replace" in saved, "transformers keeps it, and mlp_layer_types beside it"
    for fields in (saved, without(saved, "first_k_dense_replace", "linear_attn_config", "mla_use_nope")):
        config = from_kimi_config(fields)
        assert config.stages == ["kda", "mla", "kda", "kda"]
        assert [config.uses_experts(i) for i in range(4)] == [False, False, True, True]
        assert (config.head_dim, config.num_experts, config.num_experts_per_token) == (8, 4, 2)
        assert config.max_position_embeddings == 256


def test_bounds_of_situ_that_are_absent():
    config = from_kimi_config(tiny_k3(activation_situ_beta=None, activation_situ_linear_beta=None))
    assert (config.situ_beta, config.situ_linear_beta) == (1.0, None)


def test_silu_has_two_names():
    swish = KDAConfig(**from_kimi_config(tiny_kimi_linear()).to_dict() | {"hidden_act": "swish"})
    for form in ("kimi_linear", "moonshot"):
        check_expressible(swish, form)
    assert to_kimi_config(swish)["hidden_act"] == "silu"


def test_a_model_without_experts_has_dense_layers_only():
    ours = KDAConfig(**from_kimi_config(tiny_kimi_linear()).to_dict() | {"num_experts": 0})
    written = to_kimi_config(ours)
    assert written["first_k_dense_replace"] == 4
    assert set(KimiLinearConfig(**written).mlp_layer_types) == {"dense"}
    assert from_kimi_config(written).num_experts == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type must be 'kimi_linear', got 'llama'"),
        ({"attention_bias": True}, "attention_bias=True has no counterpart"),
        ({"mla_use_nope": False}, "mla_use_nope=False has no counterpart"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func='softmax'"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' has no counterpart here, only 'silu'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ({"num_expert_group": 4, "topk_group": 2}, "experts in 4 groups of which 2"),
        ({"num_key_value_heads": 1}, "num_key_value_heads must equal num_attention_heads=2, got 1"),
        (layers_of("kkmk", num_heads=4), "linear_attn_config.num_heads must equal num_attention_heads=2, got 4"),
        (layers_of("kkmk", kda_layers=[0, 1, 3]), "must name each of the layers 1 to 4 once"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types and linear_attn_config disagree"),
        ({"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}, "mlp_layer_types must be dense layers first"),
        ({"rms_norm_eps": None}, "config.json lacks rms_norm_eps"),
        ({"kv_lora_rank": None}, "config.json lacks kv_lora_rank"),
        ({"vocab_size": 0}, "no counterpart here: vocab_size must be at least 1"),
        ({"vocab_size": "many"}, "no counterpart here: .*vocab_size"),
        ({"num_hidden_layers": "4"}, "wrong type"),
        ({"layer_types": 5}, "wrong type"),
        ({"mlp_layer_types": 5}, "wrong type"),
        ({"linear_attn_config": 3}, "wrong type"),
        (layers_of("kkmk", kda_layers=["1", "2", "4"]), "wrong type"),
    ],
)
def test_what_is_no_kimi_model_is_one_clear_error(change, message):
    with pytest.raises(ValueError, match=message) as error:
        from_kimi_config(tiny_kimi_linear() | change)
    assert "\n" not in str(error.value)


def test_configurations_of_fla_come_back():
    for change in (
        {},
        {"num_v_heads": 4, "expand_v": 2.0, "tie_word_embeddings": True},
        {"safe_gate": True, "lower_bound": -5.0, "attnres_block_size": 4},
        {"lower_bound": -7.0, "attnres_block_size": 1, "use_short_conv": False},
    ):
        config = from_fla_config(FLA | change)
        written = to_fla_config(config)
        assert {name: written[name] for name in change} == change
        assert from_fla_config(written).to_dict() == config.to_dict()
    # fla's own default is 1e-6 and its layer's 1e-5: only the file knows
    with pytest.raises(ValueError, match="config.json lacks norm_eps"):
        from_fla_config(without(FLA, "norm_eps"))
    assert from_fla_config(without(FLA, "intermediate_size")).intermediate_size == 256
    assert from_fla_config(FLA | {"attnres_block_size": 4}).attention_residual_block_size == 2
    assert from_fla_config(FLA | {"attnres_block_size": 1}).attention_residual == "full"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn": {"layers": [1], "num_heads": 2}}, "attn=.* of fla's kda has no counterpart"),
        ({"allow_neg_eigval": True}, "allow_neg_eigval=True"),
        ({"hidden_act": "powlu"}, "hidden_act='powlu'"),
        ({"model_type": "gla"}, "model_type must be 'kda', got 'gla'"),
    ],
)
def test_what_is_no_kda_of_fla_is_one_clear_error(change, message):
    with pytest.raises(ValueError, match=message):
        from_fla_config(FLA | change)


KIMI = {"norm": "rmsnorm", "position_embedding": "none", "mlp_gated": True, "hidden_act": "silu", "mlp_bias": False}
KIMI |= {"attention_bias": False, "short_conv_activation": "silu", "qk_rope_head_dim": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("to", "stages", "change", "message"),
    [
        ("kimi_linear", "kkm", {"decay_gate": "lower_bound"}, "layer 0 .*decay gate must be softplus"),
        ("kimi_linear", "mkm", {"decay_gate": "lower_bound"}, "layer 1 .*decay gate must be softplus"),
        (
            "kimi_linear",
            "mk",
            {"output_gate": "full"},
            "layer 1 .*output gate must be 'low_rank', got output_gate='full'",
        ),
        ("kimi_linear", "mk", {"output_gate": "none"}, "layer 1 .*output_gate='none'"),
        ("moonshot", "mk", {"output_gate": "none"}, "layer 1 .*'low_rank' or 'full', got output_gate='none'"),
        ("kimi_linear", "km", {"hidden_act": "situ"}, "layer 0 .*activation of its MLP must be 'silu', .*'situ'"),
        ("moonshot", "km", {"hidden_act": "gelu_new"}, "layer 0 .*'silu' or 'situ', got hidden_act='gelu_new'"),
        ("kimi_linear", "km", {"mlp_gated": False}, "layer 0 .*gated"),
        ("kimi_linear", "km", EXPERTS | {"routed_expert_hidden_size": 8}, "layer 1 .*latent experts"),
        (
            "kimi_linear",
            "km",
            EXPERTS | {"num_experts": 1, "num_experts_per_token": 1},
            "layer 1 .*two experts at least",
        ),
        ("moonshot", "km", EXPERTS | {"shared_intermediate_size": 20}, "layer 1 .*shared expert must be 16 wide .*20"),
        (
            "kimi_linear",
            "km",
            {"attention_residual": "block"},
            "layer 0 .*attention_residual must be 'none', got 'block'",
        ),
        ("moonshot", "km", {"attention_residual": "full"}, "layer 0 .*'none' or 'block', got 'full'"),
        ("moonshot", "km", {"attention_residual": "block", "residual_scale": True}, "layer 0 .*residual_scale=True"),
        ("kimi_linear", "km", {"latent_norm": False}, "layer 1 .*latents must be normalised"),
        ("kimi_linear", "km", {"latent_norm_eps": 1e-5}, "layer 1 .*epsilon of 1e-06, got 1e-05"),
        ("kimi_linear", "km", {"mla_output_gate": True}, "layer 1 .*mla_output_gate=True"),
        ("kimi_linear", "km", {"position_embedding": "learned"}, "layer 0 .*position_embedding='learned'"),
        ("kimi_linear", "km", {"norm": "layernorm"}, "layer 0 .*RMSNorm, got norm='layernorm'"),
        ("kimi_linear", "ks", {}, "layer 1 .*stage must be kda or mla, got 'softmax'"),
        ("moonshot", "kd", {}, "layer 1 .*stage must be kda or mla, got 'gated_delta'"),
        ("kimi_linear", "mk", {"short_conv_kernel_size": 0}, "layer 1 .*short_conv_kernel_size=0"),
        ("fla", "kk", {"short_conv_activation": None}, "layer 0 .*SiLU, got short_conv_activation=None"),
        ("kimi_linear", "mk", {"decay_rank": 5}, "layer 1 .*rank 16, got decay_rank=5"),
        ("kimi_linear", "mk", {"output_gate_rank": 5}, "layer 1 .*rank 16, got output_gate_rank=5"),
        ("kimi_linear", "mk", {"num_value_heads": 4}, "layer 1 .*2 of 16 channels as its keys, got 4 of 16"),
        ("kimi_linear", "mk", {"output_norm": False}, "layer 1 .*output_norm=False"),
        ("fla", "km", {}, "layer 1 .*stage must be kda, got 'mla'"),
        ("fla", "kk", EXPERTS, "layer 1 .*dense, got num_experts=4"),
        ("fla", "kk", {"output_gate": "full"}, "layer 0 .*output_gate='full'"),
        ("fla", "kk", {"value_head_dim": 8, "output_gate_rank": 8}, "layer 0 .*rank 8, got decay_rank=16"),
    ],
)
def test_the_first_layer_that_a_format_cannot_hold_is_named(to, stages, change, message):
    names = {"k": "kda", "m": "mla", "s": "softmax", "d": "gated_delta"}
    stages = [names[letter] for letter in stages]
    fields = KIMI | {"hidden_size": 32, "num_attention_heads": 2, "stages": stages, "num_hidden_layers": len(stages)}
    plain = ["kda"] * len(stages) if to == "fla" else ["mla", "kda", "mla"][: len(stages)]
    check_expressible(KDAConfig(**fields | {"stages": plain}), to)
    with pytest.raises(ValueError, match=message) as error:
        check_expressible(KDAConfig(**fields | change), to)
    assert "\n" not in str(error.value)


def test_what_formats_beyond_kimi_linear_can_hold():
    fields = KIMI | {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "stages": "kda"}
    bounded = {"decay_gate": "lower_bound", "attention_residual": "full", "value_head_dim": 8, "num_value_heads": 4}
    check_expressible(KDAConfig(**fields | bounded | {"decay_rank": 8, "output_gate_rank": 8}), "fla")
    check_expressible(from_kimi_config(tiny_k3()), "moonshot")
