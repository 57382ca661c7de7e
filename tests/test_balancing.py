"""Balancing the experts: the rules themselves, and that what they see is each token of a step exactly once."""

import pytest
import torch
from conversion_helpers import sample_text, tiny_student, tiny_teacher, tokenizer
from helpers import assert_same, tiny_model, tokens
from torch import nn
from transformers import Trainer, TrainingArguments

from modeling_kda import KDAConfig, KDAForCausalLM
from modeling_kda.conversion.balancing import QuantileBalancing, RouterBalancing, SignBalancing, quantile_bias
from modeling_kda.conversion.blocks import pad_on_the_right
from modeling_kda.conversion.distillation import distill
from modeling_kda.conversion.trainers import LogitTrainer, parameter_groups
from modeling_kda.moe import Router

E, K, D = 8, 2, 16
EXPERTS = {
    "first_k_dense_replace": 0,
    "num_experts": E,
    "num_experts_per_token": K,
    "moe_intermediate_size": 8,
    "mlp_gated": True,
    "hidden_act": "silu",
}
RULES = {"sign": SignBalancing, "quantile": QuantileBalancing}


def skewed_router(seed=0):
    """Without a bias, some experts get most tokens."""
    config = KDAConfig(hidden_size=D, num_attention_heads=2, num_experts=E, num_experts_per_token=K)
    router = Router(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        router.weight.normal_(std=0.3, generator=generator)
        router.weight[:, 0] += torch.linspace(-1, 1, E)
    return router


def some_tokens(count=2000, seed=1):
    x = torch.randn(count, D, generator=torch.Generator().manual_seed(seed))
    x[:, 0] = 1.0
    return x


def balance(rule, router, x, steps=1):
    """The rule on a router alone, which sees the same tokens in every step. Returns the loads of each step."""
    rule.attach(nn.ModuleDict({"router": router}))
    loads = []
    for _ in range(steps):
        rule._recording = True
        router(x)
        rule.update()
        loads.append(rule.loads["router"])
    rule.detach()
    return loads


def excess(load):
    """How much more than its share the busiest expert gets."""
    return (load.max() / load.float().mean() - 1).item()


@pytest.mark.parametrize(("rule", "steps"), [(SignBalancing(rate=0.01), 60), (QuantileBalancing(), 12)], ids=RULES)
def test_a_skewed_router_becomes_balanced(rule, steps):
    router = skewed_router()
    loads = balance(rule, router, some_tokens(), steps)
    assert all(load.sum() == 2000 * K for load in loads)
    assert excess(loads[0]) > 1.0
    assert excess(loads[-1]) < 0.1
    # and for tokens that it has not seen
    chosen = router(some_tokens(seed=2))[2]
    assert excess(torch.bincount(chosen.flatten(), minlength=E)) < 0.25


def test_after_the_update_each_expert_is_wanted_by_its_share_of_the_tokens():
    router, x = skewed_router(), some_tokens()
    scores, bias = router(x)[0].sigmoid().double(), torch.linspace(-0.2, 0.3, E).double()
    alpha = (scores + bias).topk(K + 1).values[:, -1:]
    new = quantile_bias(scores, bias, K)
    assert abs(new.mean().item()) < 1e-12
    # the mean that was taken out is the same for all experts, so it comes off alpha
    ahead = scores + new + (alpha - scores).quantile(K / E, dim=0).mean() - alpha
    above, level = (ahead > 1e-9).double().mean(0), (ahead > -1e-9).double().mean(0)
    # ties are the tokens for which the expert itself is the first one left out
    assert (above <= K / E).all() and (level >= K / E).all()
    assert (above == K / E).sum() >= E - 1
    before = (scores + bias > alpha).double().mean(0)
    assert (before - K / E).abs().max() > 0.1


@pytest.mark.parametrize("bins", [100, 1000])
def test_the_histogram_is_exact_to_a_bin(bins):
    router, x = skewed_router(), some_tokens()
    router.selection_bias.copy_(torch.linspace(-0.2, 0.3, E))
    expected = quantile_bias(router(x)[0].sigmoid(), router.selection_bias, K)
    width = 2.5 / bins
    balance(QuantileBalancing(bins=bins), router, x)
    error = (router.selection_bias - expected).abs().max().item()
    assert error < width


def test_the_quantile_lies_where_its_share_of_a_bin_does():
    """All 400 tokens of expert e are in bin 10 + e; a quarter of them is wanted, so a quarter of the bin."""
    rule, router = QuantileBalancing(bins=100), skewed_router()
    counts = rule.new_counts(router)
    counts["histogram"][torch.arange(E), 10 + torch.arange(E)] = 400
    expected = -1 + 0.02 * (10 + torch.arange(E) + K / E)
    assert_same(rule.new_bias(router, counts), expected - expected.mean())
    # with as many tokens behind that, it is half of the bin; with some of them before, less
    counts["histogram"][:, 90] = 400
    counts["histogram"][0, 5], counts["histogram"][0, 90] = 100, 300
    expected = -1 + 0.02 * (10 + torch.arange(E) + 0.5)
    expected[0] -= 0.02 * 100 / 400
    assert_same(rule.new_bias(router, counts), expected - expected.mean())


def test_a_histogram_with_few_bins_differs():
    """The control of the test above."""
    router, x = skewed_router(), some_tokens()
    expected = quantile_bias(router(x)[0].sigmoid(), router.selection_bias, K)
    balance(QuantileBalancing(bins=3), router, x)
    assert (router.selection_bias - expected).abs().max() > 0.02


def test_the_average_goes_part_of_the_way():
    whole, part = skewed_router(), skewed_router()
    balance(QuantileBalancing(), whole, some_tokens())
    balance(QuantileBalancing(ema=0.75), part, some_tokens())
    assert_same(part.selection_bias, 0.25 * whole.selection_bias)


def test_the_sign_rule_takes_one_step():
    router = skewed_router()
    (load,) = balance(SignBalancing(rate=0.125), router, some_tokens())
    expected = torch.where(load < 2000 * K / E, 0.125, -0.125)
    assert torch.equal(router.selection_bias, expected)


@pytest.mark.parametrize("name", RULES)
def test_a_step_without_tokens_changes_nothing(name):
    router = skewed_router()
    router.selection_bias.copy_(torch.linspace(-0.2, 0.3, E))
    before = router.selection_bias.clone()
    rule = RULES[name]()
    rule.attach(nn.ModuleDict({"router": router}))
    router(some_tokens())  # not within a pass of a model
    rule.update()
    assert torch.equal(router.selection_bias, before)


def model_with_experts(stages=("kda", "softmax"), **overrides):
    """In training mode, and with biases of zero: the rules set them."""
    model = tiny_model(list(stages), **{**EXPERTS, **overrides}).train()
    for layer in model.model.layers:
        layer.mlp.router.selection_bias.zero_()
    return model


def biases(model):
    return torch.stack([layer.mlp.router.selection_bias for layer in model.model.layers])


def pass_over(model, *batches, **kwargs):
    for ids in batches:
        model(ids, labels=ids, **kwargs).loss.backward()


@pytest.mark.parametrize("name", RULES)
def test_micro_batches_of_a_step_count_like_one_batch(name):
    ids = tokens(4, 12)
    whole, parts = model_with_experts(), model_with_experts()
    for model, batches in ((whole, [ids]), (parts, ids.split(1))):
        rule = RULES[name]()
        rule.attach(model)
        pass_over(model, *batches)
        rule.update()
        assert all(load.sum() == 4 * 12 * K for load in rule.loads.values())
    assert biases(whole).abs().max() > 0
    assert torch.equal(biases(whole), biases(parts))


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_count_once(reentrant):
    model = model_with_experts()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    runs = []
    model.model.layers[0].mlp.router.register_forward_hook(lambda *args: runs.append(1))
    rule = SignBalancing()
    rule.attach(model)
    pass_over(model, tokens(2, 12))
    rule.update()
    assert len(runs) == 2
    assert all(load.sum() == 2 * 12 * K for load in rule.loads.values())


def test_padding_and_evaluation_do_not_count():
    model, ids = model_with_experts(), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    rule = SignBalancing()
    rule.attach(model)
    pass_over(model, ids, attention_mask=mask)
    model.eval()
    pass_over(model, ids)
    rule.update()
    assert all(load.sum() == (2 * 12 - 5) * K for load in rule.loads.values())


def test_a_pass_without_a_mask_can_be_told_what_counts():
    model, ids = model_with_experts(), tokens(2, 12)
    rule = SignBalancing()
    rule.attach(model)
    rule.count_only(ids > 50)
    pass_over(model, ids, ids)  # it holds for the first only
    rule.update()
    assert all(load.sum() == ((ids > 50).sum() + 24) * K for load in rule.loads.values())


@pytest.mark.parametrize(("batch_size", "accumulate"), [(4, 1), (1, 4)])
def test_padding_of_distilled_rows_does_not_count(batch_size, accumulate, tmp_path):
    student, rule = tiny_student(["softmax"], num_hidden_layers=1, **EXPERTS), SignBalancing()
    rows = [{"input_ids": torch.arange(1, 1 + length)} for length in (20, 3, 11, 7)]
    fields = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulate, "max_steps": 1}
    fields.update(use_cpu=True, report_to="none", disable_tqdm=True, remove_unused_columns=False, save_strategy="no")
    arguments = TrainingArguments(str(tmp_path), **fields)
    data = {"train_dataset": rows, "data_collator": pad_on_the_right, "callbacks": [rule]}
    LogitTrainer(student, arguments, teacher=tiny_teacher(), **data).train()
    assert all(load.sum() == (20 + 3 + 11 + 7) * K for load in rule.loads.values())


def test_nothing_is_watched_that_cannot_be_balanced_or_is_over():
    model = model_with_experts(num_experts_per_token=E)
    rule = QuantileBalancing()
    rule.attach(model)
    pass_over(model, tokens(1, 6))
    rule.update()
    assert rule.loads == {} and not biases(model).any()
    rule.detach()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with pytest.raises(ValueError, match="balancing needs a model with experts"):
        rule.attach(tiny_model("kda"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SignBalancing(rate=0), "rate must be positive, got 0"),
        (lambda: QuantileBalancing(bins=1), "bins must be at least 2, got 1"),
        (lambda: QuantileBalancing(ema=1), "ema must be at least 0 and below 1, got 1"),
    ],
)
def test_values_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_rule_must_say_how_the_bias_follows():
    with pytest.raises(NotImplementedError, match="RouterBalancing must say"):
        RouterBalancing().new_bias(None, {})


def test_hooks_are_part_of_one_compiled_graph():
    plain, compiled = (model_with_experts(["softmax"]) for _ in range(2))
    for model in (plain, compiled):
        rule = QuantileBalancing()
        rule.attach(model)
        runs = torch.compile(model, backend="aot_eager", fullgraph=True) if model is compiled else model
        runs(tokens(2, 12))
        rule.update()
    assert biases(plain).abs().max() > 0
    assert_same(biases(compiled), biases(plain), 1e-2)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        ids = tokens(8, 12)[index]
        return {"input_ids": ids, "labels": ids}


def train(folder, rule, **arguments):
    model = model_with_experts()
    fields = {"per_device_train_batch_size": 4, "max_steps": 2, "learning_rate": 1e-2, "save_steps": 1}
    fields.update(use_cpu=True, report_to="none", disable_tqdm=True, seed=0, data_seed=0, **arguments)
    arguments = TrainingArguments(str(folder), **fields)
    trainer = Trainer(model, arguments, train_dataset=Rows(), callbacks=[rule])
    trainer.train()
    return model


def test_a_trainer_balances_with_the_steps_that_it_takes(tmp_path):
    whole_rule, parts_rule = QuantileBalancing(), QuantileBalancing()
    whole = train(tmp_path / "whole", whole_rule)
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "activation_checkpointing": True}
    parts = train(tmp_path / "parts", parts_rule, **options)
    assert biases(whole).abs().max() > 0
    assert_same(biases(parts), biases(whole), 1e-2)
    for rule in (whole_rule, parts_rule):
        assert all(load.sum() == 4 * 12 * K for load in rule.loads.values())
    # the checkpoint of a step has the bias which that step ends with, and training leaves no hook behind
    saved = type(whole).from_pretrained(tmp_path / "whole" / "checkpoint-2")
    assert torch.equal(biases(saved), biases(whole))
    assert not any(module._forward_hooks for module in whole.modules())


def test_distillation_balances_experts_in_its_second_phase(tmp_path):
    student = tiny_student(["kda", "softmax"], **EXPERTS)
    options = {"block_size": 24, "batch_size": 2, "save_every": 5, "progress": False}
    steps = {"layerwise_steps": 1, "kl_steps": 2}
    distill(student, tiny_teacher(), sample_text(1500), tmp_path / "out", tokenizer=tokenizer(), **options, **steps)
    trained = KDAForCausalLM.from_pretrained(tmp_path / "out")
    assert (biases(trained).abs().amax(1) > 0).all()
    first_phase = {**options, "layerwise_steps": 1, "kl_steps": 0}
    student = tiny_student(["kda", "softmax"], **EXPERTS)
    distill(student, tiny_teacher(), sample_text(1500), tmp_path / "first", tokenizer=tokenizer(), **first_phase)
    assert not biases(student).any()


def test_expert_matrices_decay_and_their_biases_do_not():
    model = model_with_experts(mlp_bias=True)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, mixer_rate=1e-3, other_rate=1e-4, weight_decay=0.1)
    decayed = {names[id(p)] for group in groups for p in group["params"] if group["weight_decay"]}
    experts = {name.split(".experts.")[1] for name in decayed if ".experts." in name}
    assert experts == {"gate_up_proj", "down_proj"}
