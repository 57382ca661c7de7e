"""The two pictures of `lineage.py`: how caches grow, and what conversion and healing do to the perplexity."""

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, NullLocator

from modeling_kda.conversion.commands import human_bytes
from modeling_kda.conversion.cost import cache_bytes

KEPT, HYBRID, RECURRENT = "#b3541e", "#7a5195", "#00717a"


def color_of(stages):
    attention = {"softmax", "mla"} & set(stages)
    return RECURRENT if not attention else KEPT if attention == set(stages) else HYBRID


def plot_cache(configs, path):
    """Bytes of cache against tokens, log-log, with the names at the right end of the lines.

    Args: configs: `KDAConfig` by stage pattern.
    """
    tokens = [2**i for i in range(21)]
    fig, ax = plt.subplots(figsize=(9, 5.2))
    ends = []
    for pattern, config in configs.items():
        sizes = [cache_bytes(config, count) for count in tokens]
        color = color_of(config.stages)
        ax.plot(tokens, sizes, color=color, linewidth=2.2)
        ends.append((sizes[-1], pattern, color))
    for size, names, color in labels_of(ends):
        ax.text(tokens[-1] * 1.3, size, names, color=color, va="center", fontsize=9.5)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xlim(1, tokens[-1])
    ax.set_xticks([1, 32, 1024, 32 * 1024, 1024 * 1024], ["1", "32", "1k", "32k", "1M"])
    ax.yaxis.set_major_formatter(FuncFormatter(lambda size, _: human_bytes(int(size)).replace(".0", "")))
    ax.set_xlabel("tokens in context")
    ax.set_title("Memory of one sequence: what attention keeps grows, a state does not", loc="left")
    finish(fig, ax, path)


def labels_of(ends):
    """(height, names, color) of each label; lines that end within a few percent of one another share one."""
    groups = []
    for size, name, color in sorted(ends, key=lambda end: end[0]):
        if groups and size < 1.1 * groups[-1][0]:
            groups[-1][1].append(name)
        else:
            groups.append((size, [name], color))
    for size, names, color in groups:
        rows = [", ".join(names[i : i + 3]) for i in range(0, len(names), 3)]
        yield size, ",\n".join(rows), color


def plot_ladder(results, path):
    """Perplexity of every stage at conversion and healed, on a log axis, with the teacher as a line.

    Args: results: what `lineage.py` writes to lineage.json.
    """
    rows, teacher = results["stages"], results["teacher"]["perplexity"]["perplexity"]
    fig, ax = plt.subplots(figsize=(9, 0.55 * len(rows) + 1.9))
    ax.axvline(teacher, color=KEPT, linewidth=1.5, zorder=1)
    ax.text(teacher, -0.85, f"teacher {teacher:.1f}", color=KEPT, ha="center", va="bottom", fontsize=9.5)
    for y, row in enumerate(rows):
        before, after = row["perplexity_at_conversion"], row["healed"]["perplexity"]["perplexity"]
        color = color_of(row["healed"]["model"]["stages"])
        ax.plot([before, after], [y, y], color=color, linewidth=2, alpha=0.35, zorder=2)
        ax.scatter([before], [y], facecolor="white", edgecolor=color, s=55, linewidth=1.8, zorder=3)
        ax.scatter([after], [y], color=color, s=55, zorder=4)
        words = f"{before:.1f} → {after:.1f}" if before != after else f"{after:.1f}"
        ax.annotate(words, (max(before, after), y), (9, 0), textcoords="offset points", va="center", fontsize=9.5)
    ax.set_xscale("log")
    low = min(min(r["perplexity_at_conversion"], r["healed"]["perplexity"]["perplexity"]) for r in rows)
    high = max(r["perplexity_at_conversion"] for r in rows)
    ax.set_xlim(min(low, teacher) / 1.12, high * 1.5)
    ax.xaxis.set_major_locator(plt.FixedLocator([t for t in nice_ticks() if low / 1.12 <= t <= high * 1.5]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_yticks(range(len(rows)), [row["stage"] for row in rows])
    ax.set_ylim(len(rows) - 0.5, -0.8)
    ax.set_xlabel("perplexity per token on held-out text (log scale)")
    ax.set_title("At conversion (ring) and after healing (dot)", loc="left", pad=22)
    finish(fig, ax, path)


def nice_ticks():
    return [lead * 10**power for power in range(6) for lead in (1, 1.5, 2, 3, 4, 5, 7)]


def finish(fig, ax, path):
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(True, which="major", color="#dddddd", linewidth=0.7)
    ax.set_axisbelow(True)
    fig.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(fig)
