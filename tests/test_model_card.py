"""A card says what the JSON says and nothing else."""

import re

import pytest
from conversion_helpers import sample_text, tiny_student, tiny_teacher, tokenizer
from huggingface_hub import ModelCard

from modeling_kda.conversion.evaluate import evaluate
from modeling_kda.conversion.model_card import fill_card, runs_of

DISTILLATION = {
    "recipe": {"batch_size": 4, "accumulate": 2, "block_size": 63},
    "text": {"tokens": 12345},
    "phases": [
        {"phase": "layerwise", "steps": 1500, "losses": [{"step": 75, "loss": 0.91234}, {"step": 1500, "loss": 0.3}]},
        {"phase": "kl", "steps": 20, "losses": [{"step": 1, "loss": 2.5}, {"step": 20, "loss": 1.25}]},
    ],
}


@pytest.fixture(scope="module")
def evaluation():
    options = {"window": 24, "max_windows": 4, "recall_sequences": 2, "decode_contexts": [4]}
    return evaluate(tiny_student(["kda", "softmax"]), tokenizer(), sample_text(900), tiny_teacher(), **options)


def rows(card):
    """The cells of every table row by its first cell."""
    lines = [line for line in card.text.splitlines() if line.startswith("|")]
    return {cells[0]: cells[1:] for line in lines if (cells := [cell.strip() for cell in line.strip("|").split("|")])}


def test_every_number_is_that_of_the_json(evaluation, tmp_path):
    fill_card(evaluation, tmp_path / "README.md", name="student", dataset="Alice", distillation=DISTILLATION)
    card = ModelCard.load(tmp_path / "README.md")
    own, teacher = evaluation, evaluation["teacher"]
    table = rows(card)
    perplexities = [own["perplexity"]["perplexity"], teacher["perplexity"]["perplexity"]]
    assert table["perplexity per token"] == [f"{value:.3f}" for value in perplexities]
    recalls = [part["recall"]["random_accuracy"] for part in (own, teacher)]
    assert table["recall of repeated random tokens"] == [f"{100 * value:.1f}%" for value in recalls]
    for ours, theirs in zip(own["cache"]["by_formula"], teacher["cache"]["by_formula"], strict=True):
        assert table[f"{ours['tokens']:,}"] == [f"{ours['bytes']:,}", f"{theirs['bytes']:,}"]
    assert f"{own['agreement']['kl_teacher_student_nats']:.4f} nats" in card.text
    assert f"Decoding after 4 tokens: {own['decode'][0]['tokens_per_second']:.1f} tokens" in card.text
    assert evaluation["protocol"] in card.text
    assert (
        "layerwise: 1,500 steps of 8 rows of 63 tokens; loss 0.9123 by step 75 and 0.3000 by step 1,500" in card.text
    )
    assert "12,345 tokens" in card.text
    assert card.data.eval_results[0].metric_value == pytest.approx(perplexities[0], abs=1e-4)
    assert card.data.tags == ["linear-attention", "kda", "softmax"] and card.data.license == "apache-2.0"


def test_a_card_without_teacher_or_training_has_no_gaps(evaluation, tmp_path):
    alone = {key: value for key, value in evaluation.items() if key not in ("teacher", "agreement")} | {"decode": []}
    card = fill_card(alone, tmp_path / "deep" / "README.md", name="student")
    assert all(len(cells) == 1 for cells in rows(card).values())
    assert "teacher |" not in card.text and "KL(" not in card.text and "How it was trained" not in card.text
    assert not re.search(r"\{\{|\}\}|\{%|None|Undefined", card.text)
    assert "\n\n\n" not in card.text


def test_tables_are_not_torn_apart(evaluation, tmp_path):
    text = fill_card(evaluation, tmp_path / "README.md").text
    for head in ("| | this model | teacher |", "| tokens | this model | teacher |"):
        after = text[text.index(head) :].splitlines()
        assert after[1] == "|---|---|---|" and after[2].startswith("| ") and after[3].startswith("| ")


def test_a_json_of_something_else_is_refused(tmp_path):
    with pytest.raises(ValueError, match="lacks protocol, recall, cache"):
        fill_card({"model": {}, "perplexity": {}}, tmp_path / "README.md")
    assert not (tmp_path / "README.md").exists()


def test_stages_are_counted_in_order():
    assert runs_of(["kda", "kda", "kda", "softmax", "kda"]) == "3 kda, 1 softmax, 1 kda"
