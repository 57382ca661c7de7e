"""Attention residuals: the mixture, the bookkeeping of blocks, and that everything else works through them."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_different, assert_same, tiny_model, tokens

from modeling_kda import KDACache, KDAConfig, KDAForCausalLM
from modeling_kda.attention_residual import AttentionResidual

# two orders of summation in fp64
EXACT = 1e-12
# one rounding to bf16, of the result
BF16 = 2**-8
# seven layers in blocks of three: a block that ends, a block that ends with the model, and one that it cuts off
STAGES = ["kda", "softmax", "kda", "kda", "ssd", "softmax", "kda"]
FORMS = {
    "block": {"attention_residual": "block", "attention_residual_block_size": 3},
    "full": {"attention_residual": "full"},
}


def model_with(form, **fields):
    return tiny_model(STAGES, **FORMS[form], **fields)


def mixture(size=8, count=3, seed=0, **fields):
    config = KDAConfig(hidden_size=size, num_attention_heads=1, attention_residual="block", **fields)
    generator = torch.Generator().manual_seed(seed)
    mixture = AttentionResidual(config).double()
    with torch.no_grad():
        mixture.norm.weight.copy_(1 + 0.3 * torch.randn(size, generator=generator, dtype=torch.float64))
        mixture.query.copy_(torch.randn(size, generator=generator, dtype=torch.float64))
    sources = [torch.randn(2, 5, size, generator=generator, dtype=torch.float64) for _ in range(count)]
    return mixture, sources


def naive_mixture(mixture, sources, values="raw"):
    """The formula, with every normed source in memory."""
    stacked = torch.stack(sources)
    keys = F.rms_norm(stacked, stacked.shape[-1:], mixture.norm.weight, mixture.norm.eps)
    weights = (keys @ mixture.query).softmax(0)
    return ((stacked if values == "raw" else keys) * weights[..., None]).sum(0)


def naive_logits(model, ids, form, fault=None):
    """The rule of the K3 report and of the paper, step by step, with one `fault` if given."""
    base, size = model.model, model.config.attention_residual_block_size
    h = base.embed_tokens(ids) + base.embed_positions(torch.arange(ids.shape[1]))
    bank, pre = [], h

    def mix(mixture, sources):
        return naive_mixture(mixture, sources, "normed" if fault == "normed values" else "raw")

    for i, layer in enumerate(base.layers):
        opens = form == "full" or i % (size // 2 if fault == "size in mixers and MLPs" else size) == 0
        twice = [pre] if opens and fault == "in the bank before the mixture" else []
        h = mix(layer.mixer_residual, [*bank, *twice, pre])
        if opens:
            bank.append(h if fault == "mixture in the bank" else pre)
        added = layer.mixer(layer.mixer_norm(h), causal_mask(layer, ids))[0]
        pre = added if opens else pre + added
        h = pre if fault == "no mixture for MLPs" else mix(layer.mlp_residual, [*bank, pre])
        added = layer.mlp(layer.mlp_norm(h))
        if form == "full":
            bank.append(pre)
            pre = added
        else:
            pre = pre + added
    if fault == "mixture after the last norm":
        h = mix(base.output_residual, [base.norm(x) for x in [*bank, pre]])
    else:
        h = base.norm(pre if fault == "no last mixture" else mix(base.output_residual, [*bank, pre]))
    return model.lm_head(h)


def causal_mask(layer, ids):
    if type(layer.mixer).__name__ != "SoftmaxMixer":
        return None
    return torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool).tril()


def test_the_mixture_is_the_formula():
    mixture_, sources = mixture()
    assert_same(mixture_(sources), naive_mixture(mixture_, sources), EXACT)
    assert_different(naive_mixture(mixture_, sources), naive_mixture(mixture_, sources, "normed"))


def test_a_fresh_query_weighs_all_sources_alike():
    mixture_, sources = mixture()
    mixture_.reset_parameters()
    assert_same(mixture_(sources), torch.stack(sources).mean(0), EXACT)
    scaled, _ = mixture(residual_scale=True)
    scaled.reset_parameters()
    assert_same(scaled(sources), torch.stack(sources).sum(0), EXACT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_one_source_comes_back_as_it_is(dtype):
    mixture_, sources = mixture(count=1)
    source = sources[0].to(dtype)
    assert torch.equal(mixture_.to(dtype)([source]), source)


def test_sums_are_fp32_in_low_precision():
    mixture_, sources = mixture(size=64, count=9)
    mixture_, sources = mixture_.to(torch.bfloat16), [source.to(torch.bfloat16) for source in sources]
    mixed = mixture_(sources)
    assert mixed.dtype == torch.bfloat16
    exact = mixture_.double()([source.double() for source in sources])
    assert_same(mixed, exact, BF16)


def test_sources_are_left_alone():
    mixture_, sources = mixture()
    before = [source.clone() for source in sources]
    mixed = mixture_(sources)
    mixed.mul_(2)
    assert all(torch.equal(source, copy) for source, copy in zip(sources, before, strict=True))


def test_gradients_of_the_mixture():
    mixture_, sources = mixture()
    inputs = [*sources, mixture_.norm.weight.detach(), mixture_.query.detach()]

    def mix(*inputs):
        parameters = {"norm.weight": inputs[-2], "query": inputs[-1]}
        return torch.func.functional_call(mixture_, parameters, (list(inputs[:-2]),))

    assert torch.autograd.gradcheck(mix, [x.requires_grad_() for x in inputs])


def sources_seen(num_layers, **fields):
    """The number of sources of every mixture: per mixer, per MLP, and of the last one."""
    model = tiny_model(["softmax"] * num_layers, hidden_size=8, intermediate_size=8, **fields)
    counts = {}
    for name, module in model.named_modules():
        if isinstance(module, AttentionResidual):
            module.register_forward_hook(lambda _, args, __, name=name: counts.update({name: len(args[0])}))
    model(tokens(1, 2))
    layers = [f"model.layers.{i}" for i in range(num_layers)]
    mixers, mlps = ([counts[f"{layer}.{kind}_residual"] for layer in layers] for kind in ("mixer", "mlp"))
    return mixers, mlps, counts["model.output_residual"]


def test_number_of_sources_in_k3():
    mixers, mlps, last = sources_seen(93, attention_residual="block", attention_residual_block_size=12)
    assert mixers == [1] + [2 + (i - 1) // 12 for i in range(1, 93)]
    assert mlps == [2 + i // 12 for i in range(93)]
    assert (mixers[12], mixers[13], mlps[11], mlps[12], mlps[84], mlps[92]) == (2, 3, 2, 3, 9, 9)
    # the report's nine blocks, with the embedding
    assert last == 9


def test_number_of_sources_of_the_full_form():
    mixers, mlps, last = sources_seen(4, attention_residual="full")
    assert (mixers, mlps, last) == ([1, 3, 5, 7], [2, 4, 6, 8], 9)


@pytest.mark.parametrize("form", FORMS)
def test_the_model_is_the_rule_step_by_step(form):
    model, ids = model_with(form).double(), tokens(2, 20)
    assert_same(model(ids).logits, naive_logits(model, ids, form), EXACT)


@pytest.mark.parametrize(
    "fault",
    [
        "normed values",
        "in the bank before the mixture",
        "mixture in the bank",
        "size in mixers and MLPs",
        "no mixture for MLPs",
        "no last mixture",
        "mixture after the last norm",
    ],
)
def test_every_detail_of_the_rule_shows(fault):
    model, ids = model_with("block"), tokens(2, 20)
    with torch.no_grad():
        assert_different(naive_logits(model, ids, "block", fault), model(ids).logits)


@pytest.mark.parametrize("form", FORMS)
def test_with_residual_scale_a_model_with_fresh_queries_is_the_plain_one(form):
    plain, scaled, ids = tiny_model(STAGES).double(), model_with(form, residual_scale=True).double(), tokens(2, 20)
    missing, unexpected = scaled.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected and all("_residual." in name for name in missing)
    with torch.no_grad():
        assert_different(scaled(ids).logits, plain(ids).logits)
        for module in scaled.modules():
            if isinstance(module, AttentionResidual):
                module.reset_parameters()
        assert_same(scaled(ids).logits, plain(ids).logits, EXACT)


@pytest.mark.parametrize("form", FORMS)
def test_every_parameter_has_a_gradient(form):
    """Also those of the first mixture, which has one source: training in parallel counts on it."""
    model = model_with(form).train()
    model(tokens(2, 20), labels=tokens(2, 20)).loss.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.any() != name.startswith("model.layers.0.mixer_residual"), name


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_gradient_checkpointing_gives_the_same_gradients(form, reentrant):
    plain, saving, ids = model_with(form).double().train(), model_with(form).double().train(), tokens(2, 20)
    saving.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for model in (plain, saving):
        model(ids).logits.square().mean().backward()
    largest = max(p.grad.abs().max() for p in plain.parameters())
    for (name, p), q in zip(plain.named_parameters(), saving.parameters(), strict=True):
        # relative to all gradients: softmax does not see a key bias, whose gradient is nothing but rounding
        assert (q.grad - p.grad).abs().max() <= EXACT * largest, name


@pytest.mark.parametrize("form", FORMS)
def test_decoding_equals_one_pass(form):
    model, ids = model_with(form), tokens(2, 20)
    with torch.no_grad():
        whole, cache = model(ids).logits, KDACache(model.config)
        parts = [model(part, cache=cache).logits for part in ids.split([9, 1, 1, 7, 2], 1)]
        assert_same(torch.cat(parts, 1), whole)
        text = model.generate(ids, max_new_tokens=4, do_sample=False)
        assert torch.equal(model(text).logits[:, 19:-1].argmax(-1), text[:, 20:])


@pytest.mark.parametrize("form", FORMS)
def test_hidden_states_are_what_layers_give(form):
    model, ids = model_with(form), tokens(2, 20)
    with torch.no_grad():
        output = model(ids, output_hidden_states=True)
    assert [h.shape for h in output.hidden_states] == [(2, 20, 32)] * (len(STAGES) + 1)
    assert_same(model.lm_head(output.hidden_states[-1]), output.logits)


@pytest.mark.parametrize("form", FORMS)
def test_compilation_changes_nothing(form):
    model = tiny_model(["softmax"] * 3, **{**FORMS[form], "attention_residual_block_size": 2})
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert_same(compiled(tokens(2, 20)).logits, model(tokens(2, 20)).logits)


def test_saved_models_load_with_their_queries(tmp_path):
    model = model_with("block", residual_scale=True)
    model.save_pretrained(tmp_path)
    loaded = KDAForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(tokens(2, 20)).logits, model(tokens(2, 20)).logits)
