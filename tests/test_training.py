"""Training: every stage with the Trainer; the loss; gradients under checkpointing, packing, a cache, low precision."""

import pytest
import torch
from helpers import PATTERNS, ROUNDING, assert_same, tiny_model, tokens
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from modeling_kda import STAGES, KDACache

# central differences in fp64
SLOPE = 1e-4
# mean error of logits of order one after bf16 or fp16 arithmetic; on average, because the norm of a state that holds
# one token leaves nothing but its sign, which rounding may change
LOW_PRECISION = 0.1

OPTIONS = {
    "no short convolution": {"short_conv_kernel_size": 0},
    "convolution and activation": {"short_conv_activation": "silu"},
    "no gate, no norm": {"output_gate": "none", "output_norm": False},
    "full gate": {"output_gate": "full"},
    "bounded decay": {"decay_gate": "lower_bound"},
    "hedgehog": {"feature_map": "hedgehog"},
    "grouped values": {"num_value_heads": 4, "value_head_dim": 8},
    "Kimi-like": {
        "mlp_gated": True,
        "hidden_act": "silu",
        "norm": "rmsnorm",
        "attention_bias": False,
        "mlp_bias": False,
        "position_embedding": "none",
        "tie_word_embeddings": False,
    },
}


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(got, expected, budget=ROUNDING):
    """Relative to each gradient, but a gradient that is zero but for rounding (a softmax layer's k bias) may be so."""
    assert got.keys() == expected.keys()
    floor = 1e-2 * max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in expected.items():
        error = (got[name] - gradient).abs().max() / gradient.abs().max().clamp_min(floor)
        assert error <= budget, f"{name}: relative error {error:.2e} is above {budget:.0e}"


class Rows(Dataset):
    def __init__(self, count=8, length=20):
        self.ids = tokens(count, length, seed=3)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


def trainer(model, folder, **fields):
    defaults = {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True}
    arguments = TrainingArguments(str(folder), **quiet, **{**defaults, **fields})
    return Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows(5))


@pytest.mark.parametrize("stages", PATTERNS.values(), ids=PATTERNS)
def test_trainer_trains_evaluates_predicts_and_resumes(stages, tmp_path):
    straight = trainer(tiny_model(stages).train(), tmp_path / "straight", save_strategy="steps", save_steps=2)
    before = straight.evaluate()["eval_loss"]
    straight.train()
    assert straight.evaluate()["eval_loss"] < before
    predictions = straight.predict(Rows(5)).predictions
    assert predictions.shape == (5, 20, 97)

    other = tiny_model(stages).train()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.5)
    resumed = trainer(other, tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-2"))
    for name, p in straight.model.named_parameters():
        assert_same(resumed.model.get_parameter(name), p)


def test_label_smoothing_smooths_the_shifted_labels(tmp_path):
    model, ids = tiny_model("kda"), tokens(2, 20)
    smoothed = trainer(model, tmp_path, label_smoothing_factor=0.1)
    with torch.no_grad():
        got = smoothed.compute_loss(model, {"input_ids": ids, "labels": ids})
        logits = model(ids).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), label_smoothing=0.1)
    assert_same(got, expected)


@pytest.mark.parametrize("stages", ["softmax", "kda"])
def test_gradient_accumulation_equals_one_large_batch(stages, tmp_path):
    models = []
    for steps in (1, 4):
        model = tiny_model(stages).train()
        run = trainer(
            model,
            tmp_path,
            max_steps=1,
            per_device_train_batch_size=8 // steps,
            gradient_accumulation_steps=steps,
            max_grad_norm=0.0,
            optim="sgd",
        )
        run.train()
        models.append((model, run.state.log_history[0]["loss"]))
    assert models[0][1] == pytest.approx(models[1][1], rel=ROUNDING)
    for p, q in zip(models[0][0].parameters(), models[1][0].parameters(), strict=True):
        assert_same(q, p)


def test_loss_divides_by_the_number_of_items_it_is_told():
    model, ids = tiny_model("kda"), tokens(2, 20)
    with torch.no_grad():
        mean = model(ids, labels=ids).loss
        told = model(ids, labels=ids, num_items_in_batch=10).loss
    assert_same(told, mean * 2 * 19 / 10)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("stages", PATTERNS.values(), ids=PATTERNS)
def test_checkpointing_runs_each_mixer_twice_and_keeps_the_gradients(stages, reentrant):
    ids = tokens(2, 20)
    plain = tiny_model(stages).train()
    plain(ids, labels=ids).loss.backward()

    model = tiny_model(stages).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    calls = [0] * len(stages)
    for i, layer in enumerate(model.model.layers):

        def count(*_, i=i):
            calls[i] += 1

        layer.mixer.register_forward_hook(count)
    model(ids, labels=ids).loss.backward()
    assert calls == [2] * len(stages)
    assert_same_gradients(gradients(model), gradients(plain))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_parameter_gets_a_gradient(options):
    model = tiny_model(list(STAGES), **options).train()
    ids = tokens(2, 20)
    model(ids, labels=ids).loss.backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    zero = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.any()]
    # softmax ignores what all keys share, so that bias never matters
    assert without == [] and [name for name in zero if "k_proj.bias" not in name] == []


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "checkpointed", "reentrant"])
def test_packed_rows_train_as_their_documents_do(reentrant):
    """The gradient of a pack is the sum of its documents', whichever way the boundaries reach the recomputation."""
    stages, lengths = ["kda", "softmax", "linear", "delta"], (7, 1, 12)
    documents = [tokens(1, length, seed=seed) for seed, length in enumerate(lengths)]
    expected = tiny_model(stages).train()
    for ids in documents:
        if ids.shape[1] > 1:
            expected(ids, labels=ids, num_items_in_batch=17).loss.backward()

    model = tiny_model(stages).train()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    ids = torch.cat(documents, 1)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    labels = torch.where(positions == 0, -100, ids)
    model(ids, labels=labels, position_ids=positions, num_items_in_batch=17).loss.backward()
    assert_same_gradients(gradients(model), gradients(expected))


@pytest.mark.parametrize("stages", PATTERNS.values(), ids=PATTERNS)
def test_gradients_flow_through_a_cache_between_segments(stages):
    ids = tokens(2, 20)
    parts = ids[:, :8], ids[:, 8:9], ids[:, 9:]
    one_shot, segmented = tiny_model(stages).double().train(), tiny_model(stages).double().train()
    one_shot(ids).logits[:, 9:].square().sum().backward()
    cache = KDACache(segmented.config)
    with torch.autograd.set_detect_anomaly(True):
        logits = [segmented(part, cache=cache).logits for part in parts]
        logits[-1].square().sum().backward()
    assert_same_gradients(gradients(segmented), gradients(one_shot))


@pytest.mark.parametrize("stages", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("precision", ["bfloat16", "float16", "autocast"])
def test_low_precision_trains_and_decodes(precision, stages):
    dtype = torch.float16 if precision == "float16" else torch.bfloat16
    model = tiny_model(stages).train()
    exact = model(tokens(2, 20)).logits
    if precision != "autocast":
        # as from_pretrained(dtype=...) does: the decay stays fp32
        model.to(dtype)
        for layer in model.model.layers:
            if hasattr(layer.mixer, "decay"):
                layer.mixer.decay.float()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        output = model(tokens(2, 20), labels=tokens(2, 20))
        output.loss.backward()
        model.eval()
        with torch.no_grad():
            cache = KDACache(model.config)
            steps = [model(part, cache=cache).logits for part in tokens(2, 20).split([17, 1, 1, 1], 1)]
    assert output.logits.dtype == steps[0].dtype == dtype
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert (output.logits - exact).abs().mean() < LOW_PRECISION
    assert (torch.cat(steps, 1) - exact).abs().mean() < LOW_PRECISION


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_match_finite_differences(stage):
    model, ids, step = tiny_model(stage).double().train(), tokens(2, 20), 1e-6
    generator = torch.Generator().manual_seed(0)

    def loss():
        # the library's own loss is always fp32
        return torch.nn.functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    loss().backward()
    for name, p in model.named_parameters():
        direction = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        with torch.no_grad():
            p.add_(direction, alpha=step)
            above = loss()
            p.sub_(direction, alpha=2 * step)
            below = loss()
            p.add_(direction, alpha=step)
        expected = (above - below) / (2 * step)
        torch.testing.assert_close((p.grad * direction).sum(), expected, rtol=SLOPE, atol=1e-7, msg=name)


def test_no_cache_leaves_a_training_step_unless_one_is_passed():
    """Also because DataParallel takes outputs apart and joins their tensors, which a cache would not survive."""
    model = tiny_model(["kda", "softmax"]).train()
    output = model(tokens(2, 20), labels=tokens(2, 20))
    assert all(isinstance(value, torch.Tensor) for value in output.values())
    rebuilt = type(output)((name, torch.stack([value, value])) for name, value in output.items())
    assert rebuilt.logits.shape == (2, *output.logits.shape)
    assert isinstance(model(tokens(2, 20), cache=KDACache(model.config)).cache, KDACache)
