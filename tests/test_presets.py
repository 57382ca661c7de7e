"""Presets: every size of the released Kimi models, to the last parameter. Nothing is allocated."""

import pytest
import torch
from helpers import tokens

from modeling_kda import KDAConfig, KDAForCausalLM
from modeling_kda.presets import active_parameters, kimi_stages, total_parameters

# layers of latent attention as the released configs list them, from 1
MLA_KIMI_LINEAR = [4, 8, 12, 16, 20, 24, 27]
MLA_KIMI_K3 = [*range(4, 93, 4), 93]


@pytest.fixture(scope="module")
def models():
    with torch.device("meta"):
        return {
            "linear": KDAForCausalLM(KDAConfig.kimi_linear_48b()),
            "k3": KDAForCausalLM(KDAConfig.kimi_k3()),
        }


def millions(module):
    return sum(t.numel() for t in (*module.parameters(), *module.buffers())) / 1e6


def shapes(module):
    return {name: list(t.shape) for name, t in (*module.named_parameters(), *module.named_buffers())}


def test_total_and_active_parameters(models):
    assert total_parameters(models["linear"]) == 49_122_681_728
    assert active_parameters(models["linear"]) == 3_106_972_544
    assert total_parameters(models["k3"]) == 2_779_484_476_000
    assert active_parameters(models["k3"]) == 104_189_612_640


@pytest.mark.parametrize("preset, mla", [("kimi_linear_48b", MLA_KIMI_LINEAR), ("kimi_k3", MLA_KIMI_K3)])
def test_layers_are_where_the_released_lists_put_them(preset, mla):
    config = getattr(KDAConfig, preset)()
    assert [i for i, stage in enumerate(config.stages, 1) if stage == "mla"] == mla
    assert set(config.stages) == {"kda", "mla"}
    assert [i for i in range(config.num_hidden_layers) if not config.uses_experts(i)] == [0]


def test_parts_of_k3_have_the_sizes_of_the_report(models):
    layers = models["k3"].model.layers
    assert millions(layers[0].mixer) == pytest.approx(443.7, abs=0.05)
    assert millions(layers[3].mixer) == pytest.approx(232.2, abs=0.05)
    moe = layers[1].mlp
    assert millions(moe.experts) / 896 == pytest.approx(33.030144)
    assert millions(moe.shared_experts) == pytest.approx(132.1, abs=0.05)
    latent = [moe.latent_down_proj, moe.latent_norm, moe.latent_up_proj]
    assert sum(map(millions, latent)) == pytest.approx(51.4, abs=0.05)
    mixtures = [m for name, m in models["k3"].named_modules() if name.endswith("_residual")]
    assert len(mixtures) == 2 * 93 + 1
    assert sum(map(millions, mixtures)) == pytest.approx(2.68, abs=0.005)


def test_shapes_of_kimi_linear(models):
    layers = models["linear"].model.layers
    assert shapes(layers[0].mixer) == {
        **{f"{name}_proj.weight": [4096, 2304] for name in "qkv"},
        **{f"{name}_conv1d.weight": [4096, 1, 4] for name in "qkv"},
        "decay.A_log": [32],
        "decay.dt_bias": [4096],
        "decay_a_proj.weight": [128, 2304],
        "decay_b_proj.weight": [4096, 128],
        "beta_proj.weight": [32, 2304],
        "output_gate_a_proj.weight": [128, 2304],
        "output_gate_b_proj.weight": [4096, 128],
        "o_norm.weight": [128],
        "o_proj.weight": [2304, 4096],
    }
    assert shapes(layers[3].mixer) == {
        "q_proj.weight": [6144, 2304],
        "kv_a_proj.weight": [576, 2304],
        "kv_norm.weight": [512],
        "kv_b_proj.weight": [8192, 512],
        "o_proj.weight": [2304, 4096],
    }
    assert shapes(layers[0].mlp)["gate_proj.weight"] == [9216, 2304]
    assert shapes(layers[26].mlp) == {
        "router.weight": [256, 2304],
        "router.selection_bias": [256],
        "experts.gate_up_proj": [256, 2048, 2304],
        "experts.down_proj": [256, 2304, 1024],
        "shared_experts.gate_proj.weight": [1024, 2304],
        "shared_experts.up_proj.weight": [1024, 2304],
        "shared_experts.down_proj.weight": [2304, 1024],
    }


def test_shapes_of_k3(models):
    layers = models["k3"].model.layers
    kda = shapes(layers[0].mixer)
    assert kda["output_gate_proj.weight"] == [12288, 7168]
    assert kda["decay_b_proj.weight"] == [12288, 128]
    assert kda["decay.A_log"] == [96]
    assert shapes(layers[92].mixer) == {
        "q_a_proj.weight": [1536, 7168],
        "q_norm.weight": [1536],
        "q_b_proj.weight": [18432, 1536],
        "kv_a_proj.weight": [576, 7168],
        "kv_norm.weight": [512],
        "kv_b_proj.weight": [24576, 512],
        "gate_proj.weight": [12288, 7168],
        "o_proj.weight": [7168, 12288],
    }
    assert shapes(layers[0].mlp)["up_proj.weight"] == [33792, 7168]
    moe = shapes(layers[92].mlp)
    assert moe["router.weight"] == [896, 7168]
    assert moe["experts.gate_up_proj"] == [896, 2 * 3072, 3584]
    assert moe["experts.down_proj"] == [896, 3584, 3072]
    assert moe["latent_up_proj.weight"] == [7168, 3584]
    # two shared experts are one wide MLP
    assert moe["shared_experts.down_proj.weight"] == [7168, 6144]
    assert shapes(layers[0].mixer_residual) == {"norm.weight": [7168], "query": [7168]}


def test_norms_of_latents_have_an_epsilon_of_their_own(models):
    for model in models.values():
        for name, module in model.named_modules():
            if hasattr(module, "eps"):
                latent = name.endswith((".mixer.q_norm", ".mixer.kv_norm"))
                assert module.eps == (1e-6 if latent else 1e-5), name


def test_k3_has_the_bounded_decay_and_kimi_linear_has_not(models):
    assert models["k3"].model.layers[0].mixer.decay.lower_bound == -5.0
    assert models["linear"].model.layers[0].mixer.decay.lower_bound is None


def test_activations_of_k3(models):
    """SiTU in every MLP and expert, on both branches, but not after the convolutions."""
    layers = models["k3"].model.layers
    for act in (layers[0].mlp.act, layers[1].mlp.experts.act_fn, layers[1].mlp.shared_experts.act):
        assert (act.beta, act.linear_beta) == (4.0, 25.0)
    assert models["k3"].config.short_conv_activation == "silu"


def test_overrides_make_small_models_of_the_same_kind():
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 2, "head_dim": 16, "qk_nope_head_dim": 16}
    sizes |= {"v_head_dim": 16, "qk_rope_head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 24, "intermediate_size": 64}
    sizes |= {"num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 16}
    tokens_ = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    fields = {**sizes, **tokens_, "num_hidden_layers": 6, "routed_expert_hidden_size": 16}
    config = KDAConfig.kimi_k3(**fields, attention_residual_block_size=2)
    assert config.stages == kimi_stages(6) == ["kda", "kda", "kda", "mla", "kda", "mla"]
    assert KDAConfig.kimi_k3(**fields, stages="kda").stages == ["kda"] * 6
    assert KDAConfig.kimi_k3(**{**fields, "n_layer": 2}).stages == KDAConfig.kimi_linear_48b(n_layer=2).stages
    assert KDAConfig.kimi_linear_48b(n_layer=2).stages == ["kda", "mla"]
    model = KDAForCausalLM(config)
    assert model(tokens(2, 9)).logits.isfinite().all()
    # one token at a time: which experts have a gradient is what is active
    used = 0
    model(tokens(1, 1)).logits.sum().backward()
    for name, p in model.named_parameters():
        if ".experts." in name:
            used += p.numel() * 2 // 8
            assert p.grad.flatten(1).any(1).sum() == 2, name
        elif "embed_tokens" not in name:
            used += p.numel()
    assert active_parameters(model) == used + 5 * 8
