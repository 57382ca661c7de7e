"""The released Kimi models as fields of `KDAConfig`, and how many parameters models have and a token uses."""

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

# what both models have in common
KIMI = {
    "vocab_size": 163840,
    "head_dim": 128,
    "hidden_act": "silu",
    "mlp_gated": True,
    "attention_bias": False,
    "mlp_bias": False,
    "norm": "rmsnorm",
    "norm_eps": 1e-5,
    "position_embedding": "none",
    "max_position_embeddings": 1048576,
    "tie_word_embeddings": False,
    "short_conv_kernel_size": 4,
    "short_conv_activation": "silu",
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "latent_norm_eps": 1e-6,
    "first_k_dense_replace": 1,
    "moe_renormalize": True,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
}
# Kimi-Linear-48B-A3B (arXiv 2510.26692)
KIMI_LINEAR_48B = {
    **KIMI,
    "hidden_size": 2304,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "intermediate_size": 9216,
    "output_gate": "low_rank",
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1024,
    "routed_scaling_factor": 2.446,
}
# the text model of Kimi K3 (arXiv 2607.24653)
KIMI_K3 = {
    **KIMI,
    "hidden_size": 7168,
    "num_hidden_layers": 93,
    "num_attention_heads": 96,
    "intermediate_size": 33792,
    "hidden_act": "situ",
    "situ_beta": 4.0,
    "situ_linear_beta": 25.0,
    "output_gate": "full",
    "decay_gate": "lower_bound",
    "decay_lower_bound": -5.0,
    "q_lora_rank": 1536,
    "mla_output_gate": True,
    "num_experts": 896,
    "num_experts_per_token": 16,
    "num_shared_experts": 2,
    "moe_intermediate_size": 3072,
    "routed_scaling_factor": 1.0,
    "routed_expert_hidden_size": 3584,
    "latent_moe_use_norm": True,
    "attention_residual": "block",
    "attention_residual_block_size": 12,
    # stored so in the released file
    "keep_in_fp32": ["conv1d", "o_norm"],
}


def kimi_stages(num_layers: int) -> list[str]:
    """Three KDA layers, then one of latent attention, and so on; the last layer is always one of latent attention."""
    return ["mla" if i % 4 == 3 or i == num_layers - 1 else "kda" for i in range(num_layers)]


def with_stages(preset: dict, overrides: dict) -> dict:
    """`preset` with the fields of `overrides`, and with the pattern of stages for its number of layers."""
    fields = {**preset, **overrides}
    # under either of its names
    num_layers = overrides.get("n_layer", fields["num_hidden_layers"])
    return {"stages": kimi_stages(num_layers), **fields}


def total_parameters(model) -> int:
    """How many numbers a model stores, each once: its parameters and the routers' selection biases.

    Args: model: a model, or a config, from which one is made on the meta device (no memory is used).
    """
    return sum(_sizes(_model_of(model)).values())


def active_parameters(model) -> int:
    """How many of them one token uses: those of the experts that it goes to, no embedding (it reads one row), and the
    rest whole, the output head with it, also where it is tied to the embedding.

    Args: model: as in `total_parameters`.
    """
    model = _model_of(model)
    config, sizes = model.config, _sizes(model)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    unused = experts - (experts * config.num_experts_per_token // config.num_experts if experts else 0)
    read = 0 if head is not None and head.weight is embedding.weight else embedding.weight.numel()
    return sum(sizes.values()) - unused - read


def _model_of(model):
    if isinstance(model, PreTrainedModel):
        return model
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model)


def _sizes(model):
    """The number of elements of every tensor of the model, shared ones once."""
    return {name: tensor.numel() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
