"""Kimi models for tests: tiny configurations, the tensors of released checkpoints, and transformers' model in fp64."""

import json
import sys
import types
from pathlib import Path

import torch
import transformers.models.kimi_linear.modeling_kimi_linear as native
from helpers import wake
from safetensors.torch import save_file
from transformers import KimiLinearConfig

KIMI_LINEAR_48B = {
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
    "vocab_size": 163840,
    "hidden_size": 2304,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 72,
    "intermediate_size": 9216,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "model_max_length": 1048576,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "mla_use_nope": True,
    "tie_word_embeddings": False,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "linear_attn_config": {
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
    },
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1024,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "routed_scaling_factor": 2.446,
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "dtype": "bfloat16",
}
K3_FULL_ATTENTION = [*range(4, 93, 4), 93]
K3_TEXT = {
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
    "vocab_size": 163840,
    "hidden_size": 7168,
    "num_hidden_layers": 93,
    "num_attention_heads": 96,
    "num_key_value_heads": 96,
    "intermediate_size": 33792,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "max_position_embeddings": 1048576,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "linear_attn_config": {
        "num_heads": 96,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
        "full_attn_layers": K3_FULL_ATTENTION,
        "kda_layers": [layer for layer in range(1, 94) if layer not in K3_FULL_ATTENTION],
    },
    "num_experts": 896,
    "num_experts_per_token": 16,
    "num_shared_experts": 2,
    "moe_intermediate_size": 3072,
    "routed_expert_hidden_size": 3584,
    "latent_moe_use_norm": True,
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_renormalize": True,
    "routed_scaling_factor": 1.0,
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "attn_res_block_size": 12,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
    "dtype": "bfloat16",
}
TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 16,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def layers_of(pattern, **linear):
    """The fields that say which layers there are: "kkm" for two KDA layers and one MLA layer."""
    lists = {
        "kda_layers": [i for i, letter in enumerate(pattern, 1) if letter == "k"],
        "full_attn_layers": [i for i, letter in enumerate(pattern, 1) if letter == "m"],
    }
    sizes = {"num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 4}
    return {"num_hidden_layers": len(pattern), "linear_attn_config": sizes | lists | linear}


def tiny_kimi_linear(pattern="kkmk", **fields):
    """The `config.json` of a tiny Kimi Linear, with sizes that are all different."""
    return KIMI_LINEAR_48B | TINY | {"model_max_length": 256, "dtype": "float32"} | layers_of(pattern) | fields


def tiny_k3(pattern="km", **fields):
    """The `config.json` of a tiny Kimi K3; widths of experts are multiples of 32 for MXFP4."""
    linear = {"use_full_rank_gate": True, "gate_lower_bound": -5.0}
    sizes = {"hidden_size": 48, "moe_intermediate_size": 32, "routed_expert_hidden_size": 64, "q_lora_rank": 10}
    text = K3_TEXT | TINY | sizes | {"max_position_embeddings": 256, "attn_res_block_size": 1}
    text |= layers_of(pattern, **linear) | fields
    return {"model_type": "kimi_k3", "architectures": ["KimiK3ForConditionalGeneration"], "text_config": text}


def native_model(config=None, seed=0, *, module=native):
    """transformers' KimiLinearForCausalLM with weights in which every tensor matters."""
    model = module.KimiLinearForCausalLM(KimiLinearConfig(**(config or tiny_kimi_linear()))).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            wake(name, tensor, generator)
    return model


def native_in_fp64():
    """transformers' module with every fp32 in it made fp64: the same formulas, with rounding out of the way."""
    name = f"{native.__package__}.in_fp64"
    if name not in sys.modules:
        source = Path(native.__file__).read_text(encoding="utf-8")
        module = types.ModuleType(name)
        module.__package__, module.__file__ = native.__package__, native.__file__
        sys.modules[name] = module
        source = source.replace("torch.float32", "torch.float64").replace(".float()", ".double()")
        exec(compile(source, native.__file__, "exec"), module.__dict__)
    return sys.modules[name]


def released_tensors(config):
    """Name and shape of every tensor of a released checkpoint, written out from the inventories of both models."""
    k3 = "text_config" in config
    text = config.get("text_config", config)
    start, D = ("language_model." if k3 else ""), text["hidden_size"]
    shapes = {
        "model.embed_tokens.weight": (text["vocab_size"], D),
        "model.norm.weight": (D,),
        "lm_head.weight": (text["vocab_size"], D),
    }
    if k3:
        shapes |= {"model.output_attn_res_norm.weight": (D,), "model.output_attn_res_proj.weight": (1, D)}
    for layer in range(text["num_hidden_layers"]):
        inner = _norms(text, k3) | _feed_forward(text, layer, k3)
        kda = layer + 1 in text["linear_attn_config"]["kda_layers"]
        inner |= {f"self_attn.{name}": shape for name, shape in (_kda if kda else _mla)(text, k3).items()}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in inner.items()}
    return {start + name: shape for name, shape in shapes.items()}


def _norms(text, k3):
    D = text["hidden_size"]
    shapes = {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,)}
    if k3:
        for part in ("self_attention_res", "mlp_res"):
            shapes |= {f"{part}_norm.weight": (D,), f"{part}_proj.weight": (1, D)}
    return shapes


def _kda(text, k3):
    linear, D = text["linear_attn_config"], text["hidden_size"]
    H, K = linear["num_heads"], linear["head_dim"]
    shapes = {f"{part}_proj.weight": (H * K, D) for part in "qkv"}
    shapes |= {f"{part}_conv1d.weight": (H * K, 1, linear["short_conv_kernel_size"]) for part in "qkv"}
    shapes |= {"A_log": (128,) if k3 else (1, 1, H, 1), "dt_bias": (H * K,), "b_proj.weight": (H, D)}
    shapes |= {"f_a_proj.weight": (K, D), "f_b_proj.weight": (H * K, K)}
    low_rank = {"g_a_proj.weight": (K, D), "g_b_proj.weight": (H * K, K)}
    shapes |= {"g_proj.weight": (H * K, D)} if k3 else low_rank
    return shapes | {"o_norm.weight": (K,), "o_proj.weight": (D, H * K)}


def _mla(text, k3):
    D, H, R, rank = text["hidden_size"], text["num_attention_heads"], text["kv_lora_rank"], text["q_lora_rank"]
    nope, rope, V = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
    queries = {"q_proj.weight": (H * (nope + rope), D)}
    if rank is not None:
        queries = {"q_a_proj.weight": (rank, D), "q_a_layernorm.weight": (rank,)}
        queries |= {"q_b_proj.weight": (H * (nope + rope), rank)}
    latent = {"kv_a_proj_with_mqa.weight": (R + rope, D), "kv_a_layernorm.weight": (R,)}
    gate = {"g_proj.weight": (H * V, D)} if k3 else {}
    return queries | latent | {"kv_b_proj.weight": (H * (nope + V), R)} | gate | {"o_proj.weight": (D, H * V)}


def _feed_forward(text, layer, k3):
    D, E, inner = text["hidden_size"], text["num_experts"], text["moe_intermediate_size"]
    if layer < text["first_k_dense_replace"]:
        return {f"mlp.{name}": shape for name, shape in _gated(D, text["intermediate_size"]).items()}
    shapes, Z = {"gate.weight": (E, D), "gate.e_score_correction_bias": (E,)}, D
    if k3:
        Z = text["routed_expert_hidden_size"]
        shapes |= {"routed_expert_down_proj.weight": (Z, D), "routed_expert_norm.weight": (Z,)}
        shapes |= {"routed_expert_up_proj.weight": (D, Z)}
    for expert in range(E):
        shapes |= {f"experts.{expert}.{part}.weight": (inner, Z) for part in ("w1", "w3")}
        shapes |= {f"experts.{expert}.w2.weight": (Z, inner)}
    shared = _gated(D, text["num_shared_experts"] * inner)
    shapes |= {f"shared_experts.{name}": shape for name, shape in shared.items()}
    return {f"block_sparse_moe.{name}": shape for name, shape in shapes.items()}


def _gated(D, inner):
    return {"gate_proj.weight": (inner, D), "up_proj.weight": (inner, D), "down_proj.weight": (D, inner)}


# stored in fp32 by K3, whatever the rest is stored in
FP32 = ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias")


def released_weights(config, seed=0, dtype=torch.bfloat16):
    """Random weights of a released checkpoint, with the padding of K3's A_log."""
    generator, weights = torch.Generator().manual_seed(seed), {}
    heads = config.get("text_config", config)["num_attention_heads"]
    for name, shape in released_tensors(config).items():
        tensor = torch.empty(shape)
        wake(name, tensor, generator)
        if name.endswith("A_log") and len(shape) == 1:
            tensor[heads:] = 0
        weights[name] = tensor if name.endswith(FP32) else tensor.to(dtype)
    return weights


def save_checkpoint(folder, config, weights, shards=1):
    """A checkpoint folder, in one file or in several with their index."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for i in range(shards):
        file, names = f"model-{i + 1:05d}-of-{shards:05d}.safetensors", list(weights)[i::shards]
        save_file({name: weights[name] for name in names}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
