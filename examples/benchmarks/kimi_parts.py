"""What Kimi's parts cost and keep: the shipped teacher with each of them, converted and healed.

    python examples/benchmarks/kimi_parts.py [--jobs N] [--quick] [--out examples/benchmarks/results/kimi_parts.json]

Every row is converted, measured, healed with the same recipe on nine tenths of the text, and measured on the last
tenth. Students without positions are also read in windows four times as long as the teacher's table of them.
"""

import argparse
import math
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from transformers.utils import logging

from modeling_kda.conversion.commands import parse_stages
from modeling_kda.conversion.cost import environment
from modeling_kda.conversion.distillation import distill
from modeling_kda.conversion.evaluate import compare, cut_windows, recall
from modeling_kda.conversion.files import load_model, load_tokenizer, read_text, tokenize, write_json
from modeling_kda.conversion.upcycle import upcycle

EXAMPLES = Path(__file__).resolve().parents[1]
TEACHER = EXAMPLES / "teacher"
K3_PARTS = {"mla_output_gate": True, "attention_residual": "block", "experts": "latent", "num_experts": 8}
PARTITION = {"experts": "partition", "num_experts": 8, "num_experts_per_token": 4}
NO_MATCHING = {"layerwise_steps": 0}
# in words, stages, choices of the conversion, what differs in the recipe
ROWS = (
    ("`kda*3,softmax`", "kda*3,softmax", {}, {}),
    ("`kimi`: attention keeps a latent of full size", "kimi", {}, {}),
    ("`kimi`, latent of a quarter", "kimi", {"kv_lora_rank": 32}, {}),
    ("`kimi` with the parts of K3: gate, residuals, latent experts", "kimi", K3_PARTS, {}),
    ("`kimi`, positions faded out in the first third", "kimi", {}, {"drop_positions": 0.33}),
    ("attention only, positions faded out in the first third", "softmax", {}, NO_MATCHING | {"drop_positions": 0.33}),
    ("`mla`, latent of a half", "mla", {"kv_lora_rank": 64}, {}),
    ("`mla`, latent of a quarter", "mla", {"kv_lora_rank": 32}, {}),
    ("attention, 8 copies of the MLP, 2 a token", "softmax", {"experts": "copies", "num_experts": 8}, NO_MATCHING),
    ("attention, the MLP in 8 parts, 4 a token", "softmax", PARTITION, NO_MATCHING),
)
# high rates, because there are few steps and the model is small
RECIPE = {"layerwise_steps": 150, "kl_steps": 300, "block_size": 511, "batch_size": 8, "save_every": 1000}
RECIPE |= {"layerwise_rate": 3e-3, "mixer_rate": 2e-3, "other_rate": 1e-3}
QUICK = {"layerwise_steps": 1, "kl_steps": 2, "batch_size": 1}
LONG = 2044


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="rows at a time (1)")
    parser.add_argument("--quick", action="store_true", help="two rows and a few steps, to see that it runs")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "kimi_parts.json")
    options = parser.parse_args()
    rows = [ROWS[2], ROWS[4]] if options.quick else ROWS
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        rows = list(pool.map(partial(measure, quick=options.quick), rows))
    results = {
        "recipe": RECIPE | (QUICK if options.quick else {}),
        "environment": environment(load_model(TEACHER)),
        "teacher": rows[0].pop("teacher"),
        "rows": [{name: value for name, value in row.items() if name != "teacher"} for row in rows],
    }
    write_json(options.out, results)
    print(as_table(results))


def measure(row, quick):
    """One row of the table, from the teacher to a healed student."""
    title, pattern, choices, recipe = row
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer, teacher = load_tokenizer(TEACHER), load_model(TEACHER)
    train, held_out = texts(0.98 if quick else 0.9)
    ids = tokenize(tokenizer, held_out)
    windows = cut_windows(ids, RECIPE["block_size"])
    recipe = RECIPE | recipe | (QUICK if quick else {})
    with tempfile.TemporaryDirectory() as folder:
        upcycle(TEACHER, f"{folder}/new", parse_stages(pattern, teacher.config.num_hidden_layers), **choices)
        student = load_model(f"{folder}/new")
        converted = quality(student, windows, teacher)
        distill(student, teacher, train, f"{folder}/out", tokenizer=tokenizer, progress=False, **recipe)
        student = load_model(f"{folder}/out")
    with torch.inference_mode():
        gain = recall(student, tokenizer, windows, 127)["text_gain_nats"]
        found = {"title": title, "converted": converted, "healed": quality(student, windows, teacher), "recall": gain}
        if student.config.position_embedding == "none":
            found["by_position"] = by_position(student, cut_windows(ids, LONG))
        with_teacher = compare(teacher, windows)["perplexity"]["perplexity"]
    return found | {"parameters": student.num_parameters(), "teacher": {"perplexity": with_teacher}}


def texts(share):
    """The beginnings and the ends of the books."""
    books = [read_text(path) for path in sorted((EXAMPLES / "text").glob("*.txt"))]
    cuts = [int(len(book) * share) for book in books]
    pairs = list(zip(books, cuts, strict=True))
    return [book[:cut] for book, cut in pairs], [book[cut:] for book, cut in pairs]


def quality(student, windows, teacher):
    with torch.inference_mode():
        found = compare(student, windows, teacher)
    return {"perplexity": found["perplexity"]["perplexity"], "kl": found["agreement"]["kl_teacher_student_nats"]}


def by_position(student, windows):
    """Perplexity of the first 511 tokens of long windows, of the next 511, and of the rest."""
    nats = []
    for window in windows.to(student.device):
        log_p = student(window[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        nats.append(-log_p.gather(1, window[1:, None])[:, 0])
    nats = torch.stack(nats).mean(0)
    borders = (0, 511, 1022, windows.shape[1] - 1)
    return [
        {"from": start, "to": end, "perplexity": math.exp(nats[start:end].mean().item())}
        for start, end in zip(borders, borders[1:], strict=False)
    ]


def as_table(results):
    """The rows as a Markdown table."""
    lines = [
        f"teacher: perplexity {results['teacher']['perplexity']:.1f}",
        "",
        "| | parameters | PPL converted | KL | PPL healed | KL | recall |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        cells = [row["title"], f"{row['parameters']:,}"]
        for found in (row["converted"], row["healed"]):
            # rounding can leave less than nothing
            cells += [f"{found['perplexity']:.1f}", f"{max(found['kl'], 0):.3f}"]
        lines.append(f"| {' | '.join(cells)} | {row['recall']:+.2f} |")
    lines.append("")
    for row in results["rows"]:
        if "by_position" in row:
            parts = [f"{part['perplexity']:.1f} (tokens {part['from']}-{part['to']})" for part in row["by_position"]]
            lines.append(f"Without positions, in windows of {LONG}: {row['title']}: {', '.join(parts)}.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
