"""Exact rewrites of a whole model: each gives GPT-2's own logits in fp64 and fp32, and its gradients where it says so.

What is about the recurrence alone is tested with it, and the parts of Kimi in `test_upcycle_kimi.py`. Mixers that are
no part of the model are short definitions in this file.
"""

import pytest
import torch
from gpt2_helpers import (
    IDENTITY,
    NORM_EPSILON,
    RECURRENCE,
    largest_difference,
    logits_and_gradient,
    random_gpt2,
    random_ids,
    softmax_model,
)
from torch import nn

from modeling_kda import KDAConfig, KDAForCausalLM
from modeling_kda.conversion.exact_steps import steps_between
from modeling_kda.conversion.initialisation import HeadSettings, fit_queries_and_keys, new_parameters
from modeling_kda.conversion.rewrites import (
    fold_attention_biases,
    fold_norms,
    layernorm_to_rmsnorm,
    morph,
    rescale_queries_and_keys,
    scale_values,
)
from modeling_kda.layers import ShortConvolution


@pytest.fixture(params=IDENTITY, ids=str)
def dtype(request):
    return request.param


@pytest.fixture
def gpt2(dtype):
    return random_gpt2(dtype=dtype)


@pytest.fixture
def ours(gpt2):
    return softmax_model(gpt2)


def layer_tensors(model, i):
    return {name: tensor.detach().clone() for name, tensor in model.model.layers[i].state_dict().items()}


def rewritten(model, rewrite):
    """The model with every layer's tensors passed through a function."""
    for i, layer in enumerate(model.model.layers):
        layer.load_state_dict(rewrite(layer_tensors(model, i)))
    return model


def assert_is_gpt2(model, gpt2):
    ids = random_ids(gpt2)
    (ours, our_gradient), (theirs, their_gradient) = (logits_and_gradient(m, ids) for m in (model, gpt2))
    assert largest_difference(ours, theirs) <= IDENTITY[theirs.dtype]
    # gradients of a mean over thousands of numbers are small: compare on the scale of the largest
    assert largest_difference(our_gradient, their_gradient) <= IDENTITY[theirs.dtype] * their_gradient.abs().max()


def test_e1_the_softmax_stage_is_gpt2(ours, gpt2):
    assert_is_gpt2(ours, gpt2)


def test_e2_cached_decoding_is_the_full_pass(ours, gpt2, dtype):
    ids = random_ids(gpt2)
    with torch.no_grad():
        full = gpt2(ids).logits
        for chunks in ((24,), (1,) * 24, (7, 1, 9, 7)):
            cache, parts = None, []
            for part in ids.split(chunks, 1):
                result = ours(part, cache=cache, use_cache=True)
                cache = result.cache
                parts.append(result.logits)
            assert largest_difference(torch.cat(parts, 1), full) <= IDENTITY[dtype]


def test_e3_key_and_value_biases_fold_away(ours, gpt2):
    rewritten(ours, fold_attention_biases)
    assert all(not layer.mixer.k_proj.bias.any() and not layer.mixer.v_proj.bias.any() for layer in ours.model.layers)
    assert_is_gpt2(ours, gpt2)


def test_e3_dropping_biases_without_folding_is_no_identity(ours, gpt2):
    rewritten(ours, lambda layer: layer | {"mixer.v_proj.bias": torch.zeros_like(layer["mixer.v_proj.bias"])})
    ids = random_ids(gpt2)
    assert largest_difference(ours(ids).logits, gpt2(ids).logits) > 0.1


def test_e4_layernorm_becomes_rmsnorm(ours, gpt2, dtype):
    tensors, logit_bias = layernorm_to_rmsnorm(ours.state_dict(), num_layers=4)
    fields = ours.config.to_dict() | {"norm": "rmsnorm", "tie_word_embeddings": False}
    model = KDAForCausalLM(KDAConfig.from_dict(fields)).to(dtype).eval()
    model.load_state_dict(tensors)
    ids = random_ids(gpt2)
    with torch.no_grad():
        assert largest_difference(model(ids).logits + logit_bias, gpt2(ids).logits) <= IDENTITY[dtype]


def test_norms_fold_into_projections(ours, gpt2):
    assert_is_gpt2(rewritten(ours, fold_norms), gpt2)


def test_queries_and_keys_share_a_scale(ours, gpt2):
    factors = torch.tensor([0.25, 1.5, 3.0, 0.7])
    assert_is_gpt2(rewritten(ours, lambda layer: rescale_queries_and_keys(layer, factors)), gpt2)


class WindowAndLinear(nn.Module):
    """Softmax weights inside a window, those of positive features before it, one common denominator."""

    window = 24

    def __init__(self, mixer):
        super().__init__()
        self.base = mixer
        self.num_heads = mixer.q_proj.out_features // mixer.head_dim

    def forward(self, x, mask=None, cache=None, **kwargs):
        q, k, v = (p(x) for p in (self.base.q_proj, self.base.k_proj, self.base.v_proj))
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in (q, k, v))
        scores = q @ k.transpose(2, 3) * self.base.head_dim**-0.5
        lag = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        near = (lag >= 0) & (lag < self.window)
        features = (nn.functional.elu(q) + 1) @ (nn.functional.elu(k) + 1).transpose(2, 3)
        top = scores.masked_fill(~near, -torch.inf).amax(-1, keepdim=True)
        weights = (scores - top).exp() * near + features * (lag >= self.window)
        return self.base.o_proj((weights / weights.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(2)), None


def test_e19_a_window_over_everything_is_softmax(ours, gpt2):
    for layer in ours.model.layers:
        layer.mixer = WindowAndLinear(layer.mixer)
    assert_is_gpt2(ours, gpt2)


def test_e20_a_morph_starts_as_the_old_and_ends_as_the_new():
    old, new = torch.randn(5), torch.full((5,), torch.inf)
    assert torch.equal(morph(old, new, 0), old)
    assert torch.equal(morph(new, old, 1.0), old)
    assert torch.equal(morph(old, 3 * old, 0.5), 2 * old)


def recurrent(ours, stage, dtype, **choices):
    """The softmax-stage model with every layer replaced by a start of this stage, nothing measured."""
    config = KDAConfig.from_dict(ours.config.to_dict() | choices | {"stages": stage})
    tensors = {name: t for name, t in ours.state_dict().items() if not name.startswith("model.layers.")}
    settings = HeadSettings.default(4)
    for i in range(4):
        generator = torch.Generator().manual_seed(i)
        new = new_parameters(stage, config, settings, channel_spread=2.0, generator=generator)
        layer = fit_queries_and_keys(layer_tensors(ours, i), stage, config, settings) | new
        tensors |= {f"model.layers.{i}.{name}": t for name, t in layer.items()}
    model = KDAForCausalLM(config).to(dtype).eval()
    model.load_state_dict(tensors)
    return model


def test_e21_a_short_convolution_starts_as_nothing(ours, gpt2, dtype):
    ids = random_ids(gpt2)
    with_convolution = recurrent(ours, "kda", dtype, short_conv_kernel_size=4)
    assert isinstance(with_convolution.model.layers[0].mixer.k_conv1d, ShortConvolution)
    without = recurrent(ours, "kda", dtype, short_conv_kernel_size=0)
    with torch.no_grad():
        assert torch.equal(with_convolution(ids).logits, without(ids).logits)


def test_e23_an_output_norm_does_not_see_the_scale_of_values(ours, gpt2, dtype):
    ids = random_ids(gpt2)
    factors = torch.tensor([3.0, 0.4, 8.0, 1.5])
    # the first token writes beta v: far above the norm's epsilon for these factors
    with torch.no_grad():
        for norm, changes in ((True, False), (False, True)):
            model = recurrent(ours, "gated_delta", dtype, output_norm=norm, norm_eps=1e-12)
            before = model(ids).logits
            rewritten(model, lambda layer: scale_values(layer, factors))
            difference = largest_difference(model(ids).logits, before)
            assert difference > 0.1 if changes else difference <= max(NORM_EPSILON, IDENTITY[dtype])


@pytest.mark.parametrize("decay_gate", ["softplus", "lower_bound"])
def test_e25_gated_delta_becomes_kda(ours, gpt2, dtype, decay_gate):
    before = recurrent(ours, "gated_delta", dtype, decay_gate=decay_gate)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for layer in before.model.layers:
            for parameter in (layer.mixer.decay_proj.weight, layer.mixer.decay.A_log, layer.mixer.beta_proj.weight):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    config = KDAConfig.from_dict(before.config.to_dict() | {"stages": "kda"})
    after = KDAForCausalLM(config).to(dtype).eval()
    (step,) = steps_between("gated_delta", "kda")
    tensors = {name: t for name, t in before.state_dict().items() if not name.startswith("model.layers.")}
    for i in range(4):
        layer = step(layer_tensors(before, i), config, generator)
        tensors |= {f"model.layers.{i}.{name}": t for name, t in layer.items()}
    after.load_state_dict(tensors)
    ids = random_ids(gpt2)
    (ours_before, gradient_before), (ours_after, gradient_after) = (
        logits_and_gradient(m, ids) for m in (before, after)
    )
    assert largest_difference(ours_after, ours_before) <= RECURRENCE[dtype] * ours_before.abs().max()
    assert largest_difference(gradient_after, gradient_before) <= RECURRENCE[dtype] * gradient_before.abs().max()
