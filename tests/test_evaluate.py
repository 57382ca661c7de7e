"""The numbers of an evaluation, each against an independent way to get it."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from conversion_helpers import sample_text, tiny_student, tiny_teacher, tokenizer

from modeling_kda.conversion.evaluate import compare, cut_windows, evaluate, recall
from modeling_kda.conversion.files import tokenize


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    path = tmp_path_factory.mktemp("evaluation") / "result.json"
    student, teacher = tiny_student(["kda", "softmax"]), tiny_teacher()
    memory = {"recall_sequences": 4, "memory_tokens": (1, 64), "decode_contexts": [8]}
    result = evaluate(
        student, tokenizer(), sample_text(1500), teacher, window=20, max_windows=5, **memory, output=path
    )
    return student, teacher, result, json.loads(path.read_text())


def test_the_json_holds_exactly_what_was_returned(result):
    assert result[2] == result[3]


def test_perplexity_is_that_of_the_models_own_loss(result):
    student, teacher, measured, _ = result
    windows = cut_windows(tokenize(tokenizer(), sample_text(1500)), 20, 5)
    for model, numbers in ((student, measured["perplexity"]), (teacher, measured["teacher"]["perplexity"])):
        with torch.no_grad():
            loss = model(windows, labels=windows).loss.item()
        assert numbers["nats_per_token"] == pytest.approx(loss, rel=1e-5)
        assert numbers["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
        assert numbers["tokens_predicted"] == 5 * 19
    assert "5 non-overlapping windows of 20 tokens" in measured["protocol"]


def test_agreement_is_the_divergence_from_teacher_to_student(result):
    student, teacher, measured, _ = result
    windows = cut_windows(tokenize(tokenizer(), sample_text(1500)), 20, 5)
    with torch.no_grad():
        s, t = (model(windows).logits[:, :-1].double().log_softmax(-1) for model in (student, teacher))
    expected = F.kl_div(s, t, log_target=True, reduction="none").sum(-1).mean().item()
    assert measured["agreement"]["kl_teacher_student_nats"] == pytest.approx(expected, rel=1e-4)
    assert measured["agreement"]["top1"] == pytest.approx((s.argmax(-1) == t.argmax(-1)).double().mean().item())


def test_a_model_agrees_with_itself():
    teacher = tiny_teacher()
    windows = cut_windows(tokenize(tokenizer(), sample_text(500)), 16)
    with torch.no_grad():
        same = compare(teacher, windows, teacher)["agreement"]
    assert same["kl_teacher_student_nats"] == pytest.approx(0.0, abs=1e-6)
    assert same["top1"] == 1.0 and same["perplexity_ratio"] == 1.0


def test_more_windows_at_a_time_change_nothing():
    student = tiny_student()
    windows = cut_windows(tokenize(tokenizer(), sample_text(800)), 16, 7)
    with torch.no_grad():
        one, three = (compare(student, windows, batch_size=size)["perplexity"] for size in (1, 3))
    assert one["nats_per_token"] == pytest.approx(three["nats_per_token"], rel=1e-5)


class Copier(torch.nn.Module):
    """Predicts the token that followed the last earlier occurrence of the current one: an ideal induction head."""

    def __init__(self, config):
        super().__init__()
        self.config, self.device = config, torch.device("cpu")

    def forward(self, ids, use_cache=False):
        B, T = ids.shape
        logits = torch.zeros(B, T, self.config.vocab_size)
        for b in range(B):
            followed_by = {}
            for t in range(T - 1):
                if int(ids[b, t]) in followed_by:
                    logits[b, t, followed_by[int(ids[b, t])]] = 20.0
                followed_by[int(ids[b, t])] = int(ids[b, t + 1])
        return type("Output", (), {"logits": logits})


def test_recall_tells_a_copier_from_a_model_without_memory():
    windows = cut_windows(tokenize(tokenizer(), sample_text(1500)), 24)
    config = tiny_teacher().config
    copier = recall(Copier(config), tokenizer(), windows, 12, sequences=4)
    # a random token that comes twice in one showing can mislead it, so not always 1
    assert copier["random_accuracy"] > 0.95 and copier["text_gain_nats"] > 3
    with torch.no_grad():
        forgetful = recall(tiny_teacher(n_positions=64), tokenizer(), windows, 12, sequences=4)
    assert forgetful["random_accuracy"] < 0.2
    assert copier["random_chance"] == pytest.approx(1 / 2047)  # end-of-text is not an ordinary token


def test_recall_depends_on_its_seed_alone():
    windows = cut_windows(tokenize(tokenizer(), sample_text(900)), 24)
    with torch.no_grad():
        a, b = (recall(tiny_student(), tokenizer(), windows, 10, sequences=4, seed=3) for _ in range(2))
    assert a == b


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("  \n", {}, "the text is empty"),
        ("too short", {"window": 60}, "at least one window of 60 tokens"),
        ("too short", {"window": 1}, "at least 4 tokens, got 1"),
        ("too short", {"window": 0}, "at least 4 tokens, got 0"),
        (sample_text(400), {"window": 65}, "64 positions, got a window of 65"),
        (sample_text(400), {"window": 8, "recall_length": 5}, "half of the window, 4, got 5"),
        (sample_text(400), {"batch_size": 0}, "batch_size must be at least 1"),
        (sample_text(400), {"max_windows": 0}, "max_windows must be at least 1"),
        (
            sample_text(400),
            {"window": 8, "decode_contexts": [0]},
            "context, steps and batch must be at least 1, got 0",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_refused(text, options, message):
    with pytest.raises(ValueError, match=message):
        evaluate(tiny_student(), tokenizer(), text, **options)


def test_vocabularies_must_agree():
    with pytest.raises(ValueError, match="the student has 2048 and the teacher has 50 tokens"):
        evaluate(tiny_student(), tokenizer(), sample_text(500), tiny_teacher(vocab_size=50))
    with pytest.raises(ValueError, match="the student has 50 tokens, but the tokenizer made token"):
        evaluate(tiny_student(vocab_size=50), tokenizer(), sample_text(500))
