"""Fills a model card from the JSON that `evaluate` and `distill` wrote. No number in a card has another source."""

import os
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

# the folder lies beside this one in the repository and when installed
TEMPLATE = Path(__file__).resolve().parents[1] / "model_cards" / "TEMPLATE.md"


def fill_card(
    evaluation, output, *, distillation=None, template=None, name=None, license="apache-2.0", dataset="held-out text"
):
    """Write the card of one model.

    Args:
        evaluation: the result of `evaluate`.
        output: the file to write, usually README.md in the model's folder.
        distillation: the record of `distill`, for the training section.
        template: a Jinja file; `model_cards/TEMPLATE.md` if not given.
        name: of the model; the last part of its folder or Hub id if not given.
        license: of the weights, as the Hub spells it.
        dataset: what the evaluation text is, in words.

    Returns: the card, a `huggingface_hub.ModelCard`.

    Raises: ValueError if the evaluation lacks a part that the card needs.
    """
    missing = [part for part in ("protocol", "model", "perplexity", "recall", "cache") if part not in evaluation]
    if missing:
        raise ValueError(f"a model card is filled from the JSON of evaluate(), which lacks {', '.join(missing)}")
    model = evaluation["model"]
    name = name or model["name"].rsplit("/", 1)[-1] or "model"
    data = ModelCardData(
        model_name=name,
        license=license,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["linear-attention", *sorted(set(model["stages"]))],
        eval_results=[
            EvalResult(
                task_type="text-generation",
                dataset_type="text",
                dataset_name=dataset,
                metric_type="perplexity",
                metric_name="perplexity per token",
                metric_value=round(evaluation["perplexity"]["perplexity"], 4),
            )
        ],
    )
    card = ModelCard.from_template(
        data,
        template_path=str(template or TEMPLATE),
        evaluation=evaluation,
        distillation=distillation,
        name=name,
        dataset=dataset,
        stages=runs_of(model["stages"]),
    )
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    beside = output.with_name(f".{output.name}.tmp")
    card.save(beside)
    os.replace(beside, output)
    return card


def runs_of(stages):
    """The stages in words: ["kda", "kda", "kda", "softmax"] -> "3 kda, 1 softmax"."""
    runs = []
    for stage in stages:
        if runs and runs[-1][1] == stage:
            runs[-1][0] += 1
        else:
            runs.append([1, stage])
    return ", ".join(f"{count} {stage}" for count, stage in runs)
