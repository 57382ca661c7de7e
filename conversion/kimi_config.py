"""Configurations of Kimi models as Moonshot and transformers write them, from and to ours.

Moonshot's Kimi Linear and the text part of Kimi K3 share the model type `kimi_linear` and the class name, and
transformers' own `kimi_linear` shares them too. What a model is follows from its fields alone.
"""

from huggingface_hub.errors import StrictDataclassError

from modeling_kda.configuration_kda import KDAConfig

# the RMSNorms on the latents are built without an epsilon, whatever rms_norm_eps says: this is their default
LATENT_NORM_EPS = 1e-6
# transformers writes some fields under other names than Moonshot
ALIASES = {
    "max_position_embeddings": ("model_max_length",),
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "num_experts_per_token": ("num_experts_per_tok",),
    "num_shared_experts": ("n_shared_experts",),
    "moe_renormalize": ("norm_topk_prob",),
    "num_expert_group": ("n_group",),
}
# what these fields must be, where they are given: nothing else is known to exist
FIXED = {
    "attention_bias": (False,),
    "mla_use_nope": (True,),
    "moe_router_activation_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
    "num_nextn_predict_layers": (0, None),
    "hidden_act": ("silu", "situ"),
}
# fields that have the same name and meaning everywhere
SHARED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
OPTIONAL = ("initializer_range", "use_cache", "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id")
EXPERTS = ("num_experts_per_token", "moe_intermediate_size", "moe_renormalize", "routed_scaling_factor")


def from_kimi_config(config: dict) -> KDAConfig:
    """Our configuration for a `config.json` of Kimi Linear or Kimi K3, by Moonshot or by transformers.

    Raises: ValueError for a model of another kind, a field that is missing, or a value that has no counterpart.
    """
    text = config.get("text_config", config)
    if text.get("model_type") != "kimi_linear":
        raise ValueError(f"model_type must be 'kimi_linear', got {text.get('model_type')!r}")
    _refuse_others(text)
    try:
        return _read_fields(text, config)
    except (AttributeError, KeyError, TypeError) as error:
        # a word in the place of a number, a number in the place of a list
        raise ValueError(f"config.json has a field of a wrong type, or lacks one: {error}") from error


def _read_fields(text, config):
    linear = text.get("linear_attn_config") or {}
    head_dim = linear["head_dim"] if "head_dim" in linear else read_field(text, "linear_head_dim")
    heads = linear["num_heads"] if "num_heads" in linear else read_field(text, "linear_num_heads")
    taps = linear.get("short_conv_kernel_size") or read_field(text, "linear_conv_kernel_dim")
    for name, value in {"linear_attn_config.num_heads": heads, "num_key_value_heads": _kv_heads(text)}.items():
        if value != text["num_attention_heads"]:
            raise ValueError(f"{name} must equal num_attention_heads={text['num_attention_heads']}, got {value}")
    bound = linear.get("gate_lower_bound")
    fields = {
        "stages": _stages(text, linear),
        "head_dim": head_dim,
        "hidden_act": text.get("hidden_act", "silu"),
        "mlp_gated": True,
        "attention_bias": False,
        "mlp_bias": False,
        "norm": "rmsnorm",
        "norm_eps": read_field(text, "rms_norm_eps"),
        "position_embedding": "none",
        "max_position_embeddings": read_field(text, "max_position_embeddings"),
        "tie_word_embeddings": bool(text.get("tie_word_embeddings", False)),
        "short_conv_kernel_size": taps,
        # SiLU also where hidden_act is "situ"
        "short_conv_activation": "silu",
        "output_gate": "full" if linear.get("use_full_rank_gate") else "low_rank",
        "decay_gate": "softplus" if bound is None else "lower_bound",
        **({} if bound is None else {"decay_lower_bound": float(bound)}),
        **_latent_fields(text),
        **_expert_fields(text),
    }
    block = text.get("attn_res_block_size")
    if block is not None:
        fields |= {"attention_residual": "block", "attention_residual_block_size": block}
    if fields["hidden_act"] == "situ":
        beta = text.get("activation_situ_beta")
        fields |= {"situ_beta": 1.0 if beta is None else float(beta)}
        fields |= {"situ_linear_beta": text.get("activation_situ_linear_beta")}
    return build_config(fields | plain_fields(text, config))


def to_kimi_config(config: KDAConfig) -> dict:
    """The `config.json` of the same model in Moonshot's form, which transformers' `kimi_linear` reads as well. It is
    flat for what Kimi Linear has; what Kimi K3 alone has puts it below `text_config`.

    The model must be one that `expressible.check_expressible` lets pass.
    """
    text = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        **{name: getattr(config, name) for name in (*SHARED, *OPTIONAL)},
        "num_key_value_heads": config.num_attention_heads,
        "hidden_act": "silu" if config.hidden_act == "swish" else config.hidden_act,
        "rms_norm_eps": config.norm_eps,
        "model_max_length": config.max_position_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        # both checkpoints store the head
        "tie_word_embeddings": False,
        "mla_use_nope": True,
        **{name: getattr(config, name) for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim")},
        **{name: getattr(config, name) for name in ("qk_rope_head_dim", "v_head_dim")},
        "linear_attn_config": _linear_attn_config(config),
        **{name: getattr(config, name) for name in ("num_experts", "num_shared_experts", *EXPERTS)},
        "moe_router_activation_func": "sigmoid",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        # no experts: every layer is one of the first ones, that are dense
        "first_k_dense_replace": config.first_k_dense_replace if config.num_experts else config.num_hidden_layers,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "dtype": dtype_name(config),
    }
    if not is_k3(config):
        return text
    text |= _k3_fields(config)
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "text_config": text,
        "tie_word_embeddings": False,
        "dtype": text["dtype"],
    }


def is_k3(config: KDAConfig) -> bool:
    """Whether something in the model exists in Kimi K3 only, of the two."""
    return (
        config.attention_residual != "none"
        or config.hidden_act == "situ"
        or config.mla_output_gate
        or config.routed_expert_hidden_size is not None
        or ("kda" in config.stages and (config.decay_gate == "lower_bound" or config.output_gate == "full"))
    )


def _k3_fields(config):
    fields = {
        "mla_use_output_gate": config.mla_output_gate,
        "topk_method": "noaux_tc",
        "routed_expert_hidden_size": config.routed_expert_hidden_size,
        "latent_moe_use_norm": config.latent_moe_use_norm,
    }
    if config.hidden_act == "situ":
        fields |= {"activation_situ_beta": config.situ_beta, "activation_situ_linear_beta": config.situ_linear_beta}
    if config.attention_residual == "block":
        fields["attn_res_block_size"] = config.attention_residual_block_size
    return fields


def _linear_attn_config(config):
    """Layers are counted from 1 here."""
    linear = {
        "kda_layers": [i for i, stage in enumerate(config.stages, 1) if stage == "kda"],
        "full_attn_layers": [i for i, stage in enumerate(config.stages, 1) if stage == "mla"],
        "num_heads": config.num_attention_heads,
        "head_dim": config.head_dim,
        "short_conv_kernel_size": config.short_conv_kernel_size,
    }
    if is_k3(config):
        linear["use_full_rank_gate"] = config.output_gate == "full"
        if config.decay_gate == "lower_bound":
            linear["gate_lower_bound"] = config.decay_lower_bound
    return linear


def _stages(text, linear):
    """The stage of each layer, from the lists that count layers from 1 or from transformers' `layer_types`."""
    count = read_field(text, "num_hidden_layers")
    words = {"linear_attention": "kda", "full_attention": "mla"}
    lists = {"kda": linear.get("kda_layers"), "mla": linear.get("full_attn_layers")}
    types = text.get("layer_types")
    stages = [words.get(word) for word in types] if types is not None else None
    if None not in lists.values():
        named = sorted(layer for layers in lists.values() for layer in layers)
        if named != list(range(1, count + 1)):
            raise ValueError(
                f"linear_attn_config must name each of the layers 1 to {count} once in kda_layers or full_attn_layers "
                f"(counted from 1), got {lists['kda']} and {lists['mla']}"
            )
        listed = ["kda" if i in set(lists["kda"]) else "mla" for i in range(1, count + 1)]
        if stages not in (None, listed):
            raise ValueError(f"layer_types and linear_attn_config disagree: {types} and {lists}")
        return listed
    if stages is None or None in stages or len(stages) != count:
        raise ValueError(
            f"config.json must give linear_attn_config.kda_layers and full_attn_layers, or layer_types of {count} "
            f"words out of {list(words)}, got {types}"
        )
    return stages


def _latent_fields(text):
    """MLA."""
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {
        "q_lora_rank": text.get("q_lora_rank"),
        **{name: read_field(text, name) for name in names},
        "latent_norm": True,
        "latent_norm_eps": LATENT_NORM_EPS,
        "mla_output_gate": bool(text.get("mla_use_output_gate", False)),
    }


def _expert_fields(text):
    """The mixture of experts, if there is one in any layer."""
    layers, types = text["num_hidden_layers"], text.get("mlp_layer_types")
    experts = read_field(text, "num_experts", None) or 0
    if types is not None:
        dense = next((i for i, word in enumerate(types) if word != "dense"), layers)
        if list(types) != ["dense"] * dense + ["sparse"] * (layers - dense):
            raise ValueError(f"mlp_layer_types must be dense layers first and sparse ones after them, got {types}")
    else:
        dense = read_field(text, "first_k_dense_replace") if experts else layers
    if not experts or dense >= layers:
        return {"num_experts": 0}
    groups, chosen = read_field(text, "num_expert_group", 1) or 1, text.get("topk_group") or 1
    if groups != chosen:
        raise ValueError(f"experts in {groups} groups of which {chosen} are chosen have no counterpart here")
    return {
        "num_experts": experts,
        "first_k_dense_replace": dense,
        "num_shared_experts": read_field(text, "num_shared_experts", None) or 0,
        **{name: read_field(text, name) for name in EXPERTS},
        **_latent_expert_fields(text),
    }


def _latent_expert_fields(text):
    size = text.get("routed_expert_hidden_size")
    if size is None:
        return {}
    return {"routed_expert_hidden_size": size, "latent_moe_use_norm": bool(text.get("latent_moe_use_norm", False))}


def _refuse_others(text):
    for name, allowed in FIXED.items():
        if name in text and text[name] not in allowed:
            raise ValueError(f"{name}={text[name]!r} has no counterpart here, only {allowed[0]!r}")


def plain_fields(text: dict, outer: dict) -> dict:
    """The fields that every configuration has under the same name."""
    fields = {name: text[name] for name in SHARED if name in text}
    fields |= {name: text[name] for name in OPTIONAL if text.get(name) is not None}
    # our defaults are GPT-2's tokens
    fields |= {name: text.get(name) for name in OPTIONAL if name.endswith("_token_id")}
    dtype = next((c[key] for c in (text, outer) for key in ("dtype", "torch_dtype") if c.get(key)), None)
    return fields if dtype is None else fields | {"dtype": dtype}


def read_field(config: dict, name: str, *default):
    """A field under one of its names. Raises: ValueError if it is not there and there is no default."""
    found = next((config[key] for key in (name, *ALIASES.get(name, ())) if key in config), None)
    if found is None and not default:
        raise ValueError(f"config.json lacks {name}; give the configuration that belongs to the checkpoint")
    return default[0] if found is None else found


def _kv_heads(text):
    heads = text.get("num_key_value_heads")
    return read_field(text, "num_attention_heads") if heads is None else heads


def dtype_name(config: KDAConfig) -> str | None:
    """The dtype as a word for JSON."""
    return None if config.dtype is None else str(config.dtype).removeprefix("torch.")


def build_config(fields: dict) -> KDAConfig:
    """Our configuration. Raises: ValueError, in one line, for what it refuses."""
    try:
        return KDAConfig(**fields)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ValueError(f"config.json has no counterpart here: {' '.join(str(error).split())}") from error
