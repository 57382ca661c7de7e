"""What the tests share: tiny models in which every tensor matters, and how far two ways to one number may differ."""

import torch

from modeling_kda import STAGES, KDAConfig, KDAForCausalLM

# one pattern per stage, and hybrids with the softmax layer in the middle, first, and last of several kinds
PATTERNS = {
    **{stage: [stage] * 2 for stage in STAGES},
    "softmax_inside": ["kda", "softmax", "kda", "kda"],
    "softmax_first": ["softmax", "kda", "linear"],
    "every_stage": [*reversed(STAGES)],
}
RECURRENT_PATTERNS = {
    name: stages for name, stages in PATTERNS.items() if any(STAGES[stage].mixer == "recurrent" for stage in stages)
}

# two orders of summation in fp32, relative to the largest logit of a tiny model
ROUNDING = 2e-5


def relative_error(actual, expected):
    """Largest difference, relative to the largest expected magnitude; inf where shapes or finiteness differ."""
    if actual.shape != expected.shape or not torch.isfinite(actual).all():
        return float("inf")
    if not expected.numel():
        return 0.0
    actual, expected = actual.detach().double(), expected.detach().double()
    return ((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()


def assert_same(actual, expected, budget=ROUNDING):
    """Both are the same numbers up to rounding."""
    error = relative_error(actual, expected)
    assert error <= budget, f"relative error {error:.2e} is above {budget:.0e}"


def assert_different(actual, other, margin=1e-2):
    """Both differ by far more than rounding: the control of a test that expects equality elsewhere."""
    assert relative_error(actual, other) > margin


def tiny_model(stages="kda", seed=0, model_class=KDAForCausalLM, **overrides):
    """A model in eval mode with `woken` weights: fresh ones hardly depend on the past, so that errors would not show.

    stages: a name from STAGES (two layers of it), a name from PATTERNS, or a list. overrides: fields of KDAConfig.
    """
    stages = PATTERNS.get(stages, stages) if isinstance(stages, str) else stages
    fields = {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    config = KDAConfig(**{**fields, "stages": stages, "num_hidden_layers": len(stages), **overrides})
    return wake_model(model_class(config).eval(), seed)


def tiny_kimi(preset, seed=0, model_class=KDAForCausalLM, **overrides):
    """Kimi Linear or Kimi K3 in small, as `tiny_model`: five layers with every kind of module that they have.

    preset: "kimi_linear_48b" or "kimi_k3". overrides: fields of KDAConfig.
    """
    latent = {"routed_expert_hidden_size": 16, "q_lora_rank": 20, "attention_residual_block_size": 2}
    fields = {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 5,
        "num_attention_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "moe_intermediate_size": 16,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
        **(latent if preset == "kimi_k3" else {}),
    }
    config = getattr(KDAConfig, preset)(**{**fields, **overrides})
    return wake_model(model_class(config).eval(), seed)


def wake_model(model, seed):
    """Gives every parameter a value that matters, in place, and every router a bias that decides."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            wake(name, parameter, generator)
        for name, buffer in model.named_buffers():
            if name.endswith("selection_bias"):
                wake(name, buffer, generator)
    return model


def wake(name, parameter, generator):
    """Matrices of unit gain, norms around 1, biases that matter, and decays from fast to slow."""

    def noise():
        return torch.randn(parameter.shape, generator=generator)

    def uniform(low, high):
        return low + (high - low) * torch.rand(parameter.shape, generator=generator)

    if name.endswith("A_log"):
        parameter.copy_(uniform(0.3, 3.0).log())
    elif name.endswith("dt_bias"):
        parameter.copy_(uniform(-4.0, 0.5))
    elif "feature_map" in name:
        parameter.add_(0.2 * noise())
    elif name.endswith("bias"):
        parameter.copy_(0.2 * noise())
    elif "norm" in name:
        parameter.copy_(1 + 0.2 * noise())
    else:
        parameter.copy_(noise() * parameter.shape[-1] ** -0.5)


def tokens(*shape, seed=0):
    """Random ids that are no special tokens: only a mask can say that one of them is padding."""
    return torch.randint(2, 97, shape, generator=torch.Generator().manual_seed(seed))
