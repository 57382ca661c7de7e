"""Draws what `benchmarks/long_context.py` measured: examples/results/long_context.png.

python examples/long_context_plot.py
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from lineage_plots import HYBRID, KEPT, finish

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "benchmarks" / "results" / "long_context.json"
PICTURE = HERE / "results" / "long_context.png"
# as the JSON file names the models -> label and colour
MODELS = {"mla": ("MLA in every layer", KEPT), "kda:mla 3:1": ("KDA : MLA = 3 : 1", HYBRID)}


def main():
    results = json.loads(RESULTS.read_text())
    fig, (step, token, prefill) = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    for name, (label, color) in MODELS.items():
        rows = [row for row in results["decode"] if row["model"] == name]
        single = [row for row in rows if row["batch"] == 1]
        draw(step, [(row["length"], row["step_ms"]) for row in single], label, color)
        most = {row["length"]: row["step_ms"] / row["batch"] for row in rows}
        draw(token, most.items(), label, color)
        key = "prefill_mla_s" if name == "mla" else "prefill_s"
        draw(prefill, [(row["length"], row[key]) for row in results["ratios"] if key in row], label, color)
    for ax, title, unit in (
        (step, "Decoding, one sequence", "ms per step"),
        (token, "Decoding, as many as fit", "ms per token (log scale)"),
        (prefill, "Reading the prompt", "seconds (log scale)"),
    ):
        ax.set_title(title, loc="left")
        ax.set_ylabel(unit)
        ax.set_xscale("log", base=2)
        ax.set_xticks([2**12, 2**17, 2**18, 2**19, 2**20], ["4k", "128k", "256k", "512k", "1M"])
        ax.set_xlabel("tokens in context")
        if ax is not step:
            ax.set_yscale("log")
    step.set_ylim(0)
    step.legend(frameon=False)
    for ax in (step, token, prefill):
        finish(fig, ax, PICTURE)


def draw(ax, points, label, color):
    x, y = zip(*sorted(points), strict=True)
    ax.plot(x, y, color=color, marker="o", linewidth=2.2, label=label)


if __name__ == "__main__":
    main()
