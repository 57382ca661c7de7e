"""The two losses, that they are exact averages, and that a run can be killed anywhere."""

import json
import os
import shutil
import socket
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conversion_helpers import VOCABULARY, sample_text, tiny_student, tiny_teacher, tokenizer
from transformers import AutoModelForCausalLM, TrainingArguments

from modeling_kda import STAGES
from modeling_kda.conversion import distillation, trainers
from modeling_kda.conversion.blocks import PackedBlocks, pad_on_the_right
from modeling_kda.conversion.distillation import distill, latest_checkpoint
from modeling_kda.conversion.files import load_tokenizer
from modeling_kda.conversion.trainers import (
    LayerwiseTrainer,
    LogitTrainer,
    kl_divergence,
    layers_to_match,
    mixer_trace,
    output_variances,
    parameter_groups,
)

QUICK = {"layerwise_steps": 4, "kl_steps": 4, "block_size": 24, "batch_size": 2, "save_every": 2, "progress": False}
UNEVEN = [torch.arange(1, 1 + length) for length in (20, 3, 11, 7)]


def build_trainer(kind, student, teacher, folder, rows, *, batch_size, accumulate, optimizer):
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=1,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulate,
        save_strategy="no",
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        report_to="none",
        remove_unused_columns=False,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=True,
    )
    data = [{"input_ids": row} for row in rows]
    more = {"variances": output_variances(teacher, UNEVEN)} if kind is LayerwiseTrainer else {}
    common = {"train_dataset": data, "data_collator": pad_on_the_right, "teacher": teacher}
    return kind(student, arguments, optimizers=(optimizer, None), **common, **more)


def one_step(kind, folder, batch_size, accumulate):
    """The student after one step of plain gradient descent on all of UNEVEN, and the loss that was reported."""
    student, teacher = tiny_student(["gated_delta", "kda"]), tiny_teacher()
    if kind is LayerwiseTrainer:
        student.requires_grad_(False)
        for layer in student.model.layers:
            layer.mixer.requires_grad_(True)
    optimizer = torch.optim.SGD([p for p in student.parameters() if p.requires_grad], lr=0.5)
    shape = {"batch_size": batch_size, "accumulate": accumulate}
    trainer = build_trainer(kind, student, teacher, folder, UNEVEN, **shape, optimizer=optimizer)
    loss = trainer.train().training_loss
    return student, loss


def work(rank, port, folder):
    """One of two processes: takes the step of `one_step` with both losses, and stores the student."""
    torch.set_num_threads(1)
    world = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ.update(world, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    for kind in (LogitTrainer, LayerwiseTrainer):
        student, _ = one_step(kind, folder, batch_size=1, accumulate=2)
        torch.save(student.state_dict(), folder / f"{kind.__name__}-{rank}.pt")


def test_two_processes_take_the_step_of_one(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (port, tmp_path), nprocs=2)
    for kind in (LogitTrainer, LayerwiseTrainer):
        alone, _ = one_step(kind, tmp_path, batch_size=4, accumulate=1)
        for rank in range(2):
            together = torch.load(tmp_path / f"{kind.__name__}-{rank}.pt")
            for name, value in alone.state_dict().items():
                assert torch.allclose(value, together[name], atol=1e-6), (kind, rank, name)


@pytest.mark.parametrize("kind", [LogitTrainer, LayerwiseTrainer])
def test_accumulating_is_the_same_as_one_large_batch(kind, tmp_path):
    large, large_loss = one_step(kind, tmp_path, 4, 1)
    small, small_loss = one_step(kind, tmp_path, 1, 4)
    assert small_loss == pytest.approx(large_loss, rel=1e-5)
    start, moved = tiny_student(["gated_delta", "kda"]).state_dict(), 0.0
    for name, value in large.state_dict().items():
        assert torch.allclose(value, small.state_dict()[name], atol=1e-5), name
        moved = max(moved, (value - start[name]).abs().max().item())
    assert moved > 1e-3


def test_the_logit_loss_is_the_mean_divergence_per_predicted_token(tmp_path):
    student, teacher = tiny_student(["gated_delta", "kda"]), tiny_teacher()
    divergences = []
    with torch.no_grad():
        for row in UNEVEN:
            s, t = (model(row[None]).logits[0, :-1].double().log_softmax(-1) for model in (student, teacher))
            divergences.append(F.kl_div(s, t, log_target=True, reduction="none").sum(-1))
    expected = torch.cat(divergences).mean().item()
    assert one_step(LogitTrainer, tmp_path, 2, 2)[1] == pytest.approx(expected, rel=1e-4)


def test_the_layerwise_loss_is_the_error_relative_to_the_variance(tmp_path):
    student, teacher = tiny_student(["gated_delta", "kda"]), tiny_teacher()
    errors, variances = [], output_variances(teacher, UNEVEN)
    with torch.no_grad():
        for row in UNEVEN:
            for i, (hidden, target) in enumerate(mixer_trace(teacher, row[None])):
                layer = student.model.layers[i]
                output = layer.mixer(layer.mixer_norm(hidden))[0]
                errors.append((output - target).square().mean(-1)[0, :-1] / variances[i])
    # both layers have the same number of tokens, so their mean is the mean over all
    expected = torch.cat(errors).mean().item()
    assert one_step(LayerwiseTrainer, tmp_path, 2, 2)[1] == pytest.approx(expected, rel=1e-4)


def test_the_trace_is_what_gpt2_computes():
    teacher, ids = tiny_teacher(), torch.arange(12)[None]
    first = teacher.transformer.h[0]
    with torch.no_grad():
        states = teacher(ids, output_hidden_states=True).hidden_states
        hooks = len(first.ln_1._forward_pre_hooks), len(first.attn._forward_hooks)
        trace = mixer_trace(teacher, ids)
        for i, (hidden, output) in enumerate(trace):
            assert torch.equal(hidden, states[i])
            block = teacher.transformer.h[i]
            after_attention = hidden + output
            mlp = block.mlp(block.ln_2(after_attention))
            # the last hidden state that GPT-2 reports has passed its final norm
            expected = states[i + 1] if i + 1 < len(trace) else None
            if expected is not None:
                assert torch.allclose(after_attention + mlp, expected, atol=1e-5)
    assert (len(first.ln_1._forward_pre_hooks), len(first.attn._forward_hooks)) == hooks


def test_the_trace_is_what_mixers_read_where_residuals_are_mixtures():
    model, ids = tiny_student(["mla", "kda", "mla"], num_hidden_layers=3, attention_residual="full"), UNEVEN[0][None]
    with torch.no_grad():
        for residual in (layer.mixer_residual for layer in model.model.layers):
            residual.query.normal_()
        for layer, (hidden, output) in zip(model.model.layers, mixer_trace(model, ids), strict=True):
            assert torch.allclose(layer.mixer(layer.mixer_norm(hidden))[0], output, atol=1e-6)


def test_variances_leave_constants_out():
    teacher = tiny_teacher()
    before = output_variances(teacher, UNEVEN)
    with torch.no_grad():
        teacher.transformer.h[1].attn.c_proj.bias += 100.0
        outputs = torch.cat([mixer_trace(teacher, row[None])[1][1][0] for row in UNEVEN])
    after = output_variances(teacher, UNEVEN)
    assert after[1] == pytest.approx(before[1], rel=1e-4)
    assert after[1] == pytest.approx(outputs.double().var(0, unbiased=False).mean().item(), rel=1e-6)


def test_divergence_is_zero_only_between_equals():
    a, b = torch.randn(2, 3, 11, generator=torch.Generator().manual_seed(0))
    assert kl_divergence(a, a + 5.0).abs().max() < 1e-6
    assert kl_divergence(a, b).min() > 0
    exact = torch.distributions.kl_divergence(*(torch.distributions.Categorical(logits=x) for x in (a, b)))
    assert torch.allclose(kl_divergence(a, b), exact, atol=1e-6)


def test_only_matrices_decay_and_mixers_learn_faster():
    student = tiny_student(["ssd", "kda"])
    groups = parameter_groups(student, mixer_rate=3e-4, other_rate=1e-4, weight_decay=0.1)
    names = {id(p): name for name, p in student.named_parameters()}
    seen = {}
    for group in groups:
        for parameter in group["params"]:
            seen[names[id(parameter)]] = (group["lr"], group["weight_decay"])
    assert set(seen) == set(names.values())
    for name, (rate, decay) in seen.items():
        assert rate == (3e-4 if ".mixer." in name else 1e-4), name
        small = ("norm", "bias", "A_log", "conv1d")
        assert decay == (0.0 if any(part in name for part in small) else 0.1), name


def test_a_collator_keeps_real_end_of_text_labels():
    eos = 50
    batch = pad_on_the_right([{"input_ids": [7, 8, eos]}, {"input_ids": [9, eos]}], pad_token_id=eos)
    assert batch["input_ids"].tolist() == [[7, 8, eos], [9, eos, eos]]
    assert batch["labels"].tolist() == [[7, 8, eos], [9, eos, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]


def test_blocks_hold_every_token_once():
    ids = torch.arange(23)
    blocks = PackedBlocks(ids, 5)
    assert torch.equal(torch.cat([blocks[i]["input_ids"] for i in range(len(blocks))]), ids)
    assert [len(blocks[i]["input_ids"]) for i in range(len(blocks))] == [5, 5, 5, 5, 3]
    # a single token predicts nothing
    assert len(PackedBlocks(torch.arange(21), 5)) == 4


def run(output, stages=("kda", "softmax"), teacher=None, text=None, **options):
    student = tiny_student(list(stages))
    record = distill(
        student,
        teacher or tiny_teacher(),
        text or [sample_text(900), sample_text(400)],
        output,
        tokenizer=tokenizer(),
        **QUICK | options,
    )
    return student, record


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    output = tmp_path_factory.mktemp("run") / "student"
    student, record = run(output)
    return output, student, record


def test_a_run_saves_a_model_that_loads_and_a_record(finished):
    output, student, record = finished
    loaded = AutoModelForCausalLM.from_pretrained(output)
    for name, value in student.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name
    assert json.loads((output / "distillation.json").read_text()) == record
    assert [phase["phase"] for phase in record["phases"]] == ["layerwise", "kl"]
    assert all(phase["losses"][-1]["step"] == 4 for phase in record["phases"])
    assert load_tokenizer(output)("Alice")["input_ids"] == tokenizer()("Alice")["input_ids"]
    assert os.listdir(output.parent) == ["student"]


def test_layerwise_matching_touches_recurrent_mixers_only(tmp_path):
    start = tiny_student(["kda", "softmax"]).state_dict()
    student, _ = run(tmp_path / "student", kl_steps=0)
    changed = {name for name, value in student.state_dict().items() if not torch.equal(value, start[name])}
    assert changed and all(name.startswith("model.layers.0.mixer.") for name in changed)
    assert all(p.requires_grad for p in student.parameters())


@pytest.mark.parametrize("stage", [name for name in STAGES if STAGES[name].mixer == "recurrent"])
def test_both_phases_lower_their_loss(stage, tmp_path):
    options = {"layerwise_steps": 12, "kl_steps": 12, "save_every": 50, "layerwise_rate": 1e-2, "mixer_rate": 1e-2}
    _, record = run(tmp_path / "student", [stage, stage], **options, other_rate=1e-2)
    for phase in record["phases"]:
        assert phase["losses"][-1]["loss"] < phase["losses"][0]["loss"], phase


def test_recomputing_activations_changes_nothing(finished, tmp_path):
    _, record = run(tmp_path / "student", checkpoint_activations=True)
    assert record["phases"] == finished[2]["phases"]


def test_bfloat16_computes_nearly_the_same_and_keeps_float32_weights(finished, tmp_path):
    student, record = run(tmp_path / "student", bf16=True)
    assert {p.dtype for p in student.parameters()} == {torch.float32}
    for phase, exact in zip(record["phases"], finished[2]["phases"], strict=True):
        assert phase["losses"] != exact["losses"]
        for ours, theirs in zip(phase["losses"], exact["losses"], strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.05)


class Killed(Exception):
    pass


def kill_at(monkeypatch, kind, step):
    """From now on a trainer of this kind dies in its n-th training step."""
    calls, original = [], kind.training_step

    def training_step(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == step:
            raise Killed
        return original(self, *args, **kwargs)

    monkeypatch.setattr(kind, "training_step", training_step)


@pytest.mark.parametrize(
    ("kind", "step"), [(LayerwiseTrainer, 2), (LayerwiseTrainer, 4), (LogitTrainer, 1), (LogitTrainer, 4)]
)
def test_a_killed_run_ends_where_an_unbroken_one_does(kind, step, finished, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        kill_at(patch, kind, step)
        with pytest.raises(Killed):
            run(tmp_path / "student")
    assert not (tmp_path / "student").exists()
    student, record = run(tmp_path / "student")
    assert record["phases"] == finished[2]["phases"]
    for name, value in finished[1].state_dict().items():
        assert torch.equal(value, student.state_dict()[name]), name


def test_positions_fade_on_after_an_interruption(tmp_path, monkeypatch):
    unbroken, record = run(tmp_path / "unbroken", drop_positions=0.9, layerwise_steps=0)
    with monkeypatch.context() as patch:
        kill_at(patch, LogitTrainer, 4)
        with pytest.raises(Killed):
            run(tmp_path / "student", drop_positions=0.9, layerwise_steps=0)
    student, again = run(tmp_path / "student", drop_positions=0.9, layerwise_steps=0)
    assert again["phases"] == record["phases"]
    assert unbroken.config.position_embedding == "none"
    for name, value in unbroken.state_dict().items():
        assert torch.equal(value, student.state_dict()[name]), name


def test_a_half_written_checkpoint_is_not_used(finished, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        kill_at(patch, LogitTrainer, 4)
        with pytest.raises(Killed):
            run(tmp_path / "student")
    phase = tmp_path / "student.unfinished" / "kl"
    # killed while the third step was being saved: weights are there, the rest is not
    half = phase / "checkpoint-3"
    half.mkdir()
    shutil.copy(phase / "checkpoint-2" / "model.safetensors", half)
    (half / "trainer_state.json").write_text('{"epoch": 0.1, "global')
    assert latest_checkpoint(phase).name == "checkpoint-2" and not half.exists()
    student, _ = run(tmp_path / "student")
    for name, value in finished[1].state_dict().items():
        assert torch.equal(value, student.state_dict()[name]), name


def die(*args, **kwargs):
    raise Killed


def test_a_run_killed_just_before_its_model_appears_ends_well(finished, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(distillation, "os", SimpleNamespace(replace=die))
        with pytest.raises(Killed):
            run(tmp_path / "student")
    assert os.listdir(tmp_path) == ["student.unfinished"]
    assert run(tmp_path / "student")[1] == finished[2]
    assert os.listdir(tmp_path) == ["student"]


def test_a_run_killed_just_after_its_model_appeared_leaves_nothing_behind(finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "student")
    (tmp_path / "student.unfinished" / "kl").mkdir(parents=True)
    assert run(tmp_path / "student")[1] == finished[2]
    assert os.listdir(tmp_path) == ["student"]


def test_a_finished_run_is_not_repeated(finished, monkeypatch):
    output, _, record = finished
    monkeypatch.setattr(trainers.Trainer, "train", lambda *args, **kwargs: pytest.fail("trained again"))
    assert run(output)[1] == record
    with pytest.raises(ValueError, match="was not made by this run"):
        run(output, kl_steps=5)


def test_an_unfinished_run_wants_the_same_arguments(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        kill_at(patch, LayerwiseTrainer, 1)
        with pytest.raises(Killed):
            run(tmp_path / "student")
    with pytest.raises(ValueError, match=r"recipe.kl_steps was 4, now 9"):
        run(tmp_path / "student", kl_steps=9)
    with pytest.raises(ValueError, match=r"teacher.weights was"):
        run(tmp_path / "student", teacher=tiny_teacher(seed=5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"teacher": tiny_teacher(vocab_size=77)}, "the teacher has 77"),
        ({"teacher": tiny_teacher(n_layer=3)}, "same num_hidden_layers, but the teacher has 3 and the student 2"),
        ({"teacher": tiny_teacher(n_embd=64)}, "same hidden_size, but the teacher has 64"),
        ({"stages": ["softmax", "softmax"]}, "no recurrent layer"),
        ({"drop_positions": 1.5}, "drop_positions must be a fraction between 0 and 1, got 1.5"),
        ({"drop_positions": 0.5, "kl_steps": 0}, "drop_positions needs kl_steps"),
        ({"text": " "}, "the text is empty"),
        ({"layerwise_steps": 0, "kl_steps": 0}, "both 0"),
        ({"layerwise_steps": -1}, "must not be negative, got -1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"block_size": 65}, "above the 64 positions of the models, got 65"),
        ({"block_size": 1}, "block_size must be at least 2"),
        ({"warmup": 2.0}, "between 0 and 1"),
    ],
)
def test_what_cannot_be_distilled_is_refused_before_anything_is_written(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "student", **options)
    assert os.listdir(tmp_path) == []


def test_layers_to_match_are_those_that_are_not_exact():
    assert layers_to_match(tiny_student(["softmax", "linear"])) == [1]
    for fields, expected in (({"latent_norm": False}, [1]), ({}, [0, 1]), ({"kv_lora_rank": 16}, [0, 1])):
        assert layers_to_match(tiny_student(["mla", "kda"], **fields)) == expected
    assert tiny_student().config.vocab_size == VOCABULARY


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_small_latent_is_matched_with_what_it_may_see(implementation, tmp_path):
    torch.manual_seed(1)
    student, teacher = tiny_student(["mla", "softmax"], latent_norm=False, kv_lora_rank=16), tiny_teacher()
    student.set_attn_implementation(implementation)
    with torch.no_grad():
        trace = mixer_trace(teacher, UNEVEN[0][None])
        hidden, target = trace[0]
        layer = student.model.layers[0]
        # one token at a time sees nothing of the future
        outputs = [layer.mixer(layer.mixer_norm(hidden[:, : t + 1]))[0][:, -1] for t in range(19)]
    error = (torch.stack(outputs, 1) - target[:, :-1]).square().mean(-1) / output_variances(teacher, UNEVEN)[0]
    data, more = [{"input_ids": UNEVEN[0]}], {"variances": output_variances(teacher, UNEVEN)}
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True)
    trainer = LayerwiseTrainer(student, arguments, train_dataset=data, teacher=teacher, **more)
    loss = trainer.compute_loss(student, pad_on_the_right(data))
    assert loss.item() == pytest.approx(error.mean().item(), rel=1e-4)
