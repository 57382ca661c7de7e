"""Write the tables of README.md from the JSON files that the commands wrote, so that no number is typed by hand.

    python examples/readme_tables.py [--check]

A table stands between `<!-- NAME -->` and `<!-- end -->`. With --check nothing is written, and the exit code says
whether README.md is up to date.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from benchmarks import kimi_parts
from lineage import as_table

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
LINEAGE = HERE / "results" / "lineage.json"
RECURRENCE = HERE / "benchmarks" / "results" / "recurrence_cpu.json"
DECODE = HERE / "benchmarks" / "results" / "decode.json"
OPS = HERE / "benchmarks" / "results" / "ops.json"
LONG_CONTEXT = HERE / "benchmarks" / "results" / "long_context.json"
KIMI_PARTS = HERE / "benchmarks" / "results" / "kimi_parts.json"


def lineage():
    results = json.loads(LINEAGE.read_text())
    environment, settings = results["environment"], results["settings"]
    return (
        f"{as_table(results)}\nMeasured in {results['seconds']:.0f} s on {environment['device']} "
        f"(torch {environment['torch']}, transformers {environment['transformers']}): {settings['steps'] // 2} "
        f"layer-wise and {settings['steps']} distillation steps per stage, perplexity on "
        f"{settings['held_out_windows']} held-out windows of {settings['window']} tokens. {source(LINEAGE)}"
    )


def recurrence_cpu():
    results = json.loads(RECURRENCE.read_text())
    rows = {(row["case"], row["path"]): row for row in results["rows"]}
    memory, shape = results["extra_peak_memory"], results["shape"]
    lines = ["| | ours | transformers | ratio | extra memory, ours | transformers |", "|---|---|---|---|---|---|"]
    for case in ("forward", "forward+backward"):
        ours, theirs = rows[case, "ours"], rows[case, "transformers"]
        lines.append(
            f"| {case} | {ours['cpu_ms']:.0f} ms | {theirs['cpu_ms']:,.0f} ms "
            f"| {ours['times_faster']:.0f} times faster "
            + "".join(f"| {memory[case][path]:,.0f} MB " for path in ("ours", "transformers"))
            + "|"
        )
    step, copy = rows["decode", "ours, in place"], rows["decode", "copy"]
    lines += [
        "",
        f"B{shape['B']} T{shape['T']} H{shape['H']} D{shape['K']} fp32, one thread of "
        f"{results['machine']['cpu']}, process CPU time. {source(RECURRENCE)}",
        "",
        f"One decode step of {results['decode_heads']} heads takes {step['cpu_ms']:.2f} ms, "
        f"{step['copies_of_the_state']:.1f} times a copy of its state ({copy['cpu_ms']:.2f} ms; transformers: "
        f"{rows['decode', 'transformers']['copies_of_the_state']:.1f}).",
    ]
    return "\n".join(lines)


def decode():
    results = json.loads(DECODE.read_text())
    lines = ["| | batch | time | share of 4.3 TB/s | fla, updating in place |", "|---|---|---|---|---|"]
    peers = {(row["op"], row["B"]): row for row in results["rows"] if row["path"] == "fla in place"}
    for row in results["rows"]:
        if row["path"] != "ours":
            continue
        peer = peers.get((row["op"], row["B"]))
        theirs = f"{1000 * peer['stream_ms']:.1f} us" if peer else "-"
        ours = f"{1000 * row['stream_ms']:.1f} us | {row['share_of_bandwidth']:.0%}"
        lines.append(f"| {row['op']} | {row['B']} | {ours} | {theirs} |")
    shape, machine = results["shape"], results["machine"]
    lines += [
        "",
        f"H{shape['H']} K{shape['K']} V{shape['V']}, {shape['dtype']} inputs, {shape['state']} state, one "
        f"{machine['device']}, torch {machine['torch']}, Triton {machine['triton']}; time of one call among many that "
        f"were captured together. {source(DECODE)}",
    ]
    return "\n".join(lines)


def parts_of_kimi():
    results = json.loads(KIMI_PARTS.read_text())
    recipe, machine = results["recipe"], results["environment"]
    steps = f"{recipe['layerwise_steps']} layer-wise and {recipe['kl_steps']} distillation steps"
    return (
        f"{kimi_parts.as_table(results)}\n{steps} of {recipe['batch_size']} rows of {recipe['block_size']} tokens on "
        f"{machine['device']}, torch {machine['torch']}. {source(KIMI_PARTS)}"
    )


def ops():
    results = json.loads(OPS.read_text())
    lines = [
        "| | ours (kernels) | fla (kernels) | ratio | share of the roofline | extra memory: ours | fla |",
        "|---|---|---|---|---|---|---|",
    ]
    peers = {(row["case"], row["pass"]): row for row in results["rows"] if row["by"] == "fla"}
    for row in results["rows"]:
        if row["by"] != "modeling_kda":
            continue
        peer = peers.get((row["case"], row["pass"]), {})
        theirs, ratio, memory = "-", "-", "-"
        if "refused" in peer:
            theirs = "refuses to run"
        elif peer:
            theirs, ratio = _times(peer), f"{peer['ratio_to_ours']:.1f}x"
            memory = f"{peer['peak_MiB']:,.0f} MiB"
        shape = f"B{row['B']} T{row['T']:,} H{row['H']} K{row['K']}"
        rule = "kda, bounded decay" if row["rule"] == "bounded" else row["rule"]
        numbers = f"{theirs} | {ratio} | {row['roofline']:.0%} | {row['peak_MiB']:,.0f} MiB | {memory}"
        lines.append(f"| {rule}, {shape}, {row['pass']} | {_times(row)} | {numbers} |")
    machine = results["machine"]
    flash = [f"{row['ms']:.2f} ms at {row['case']}" for row in results["rows"] if row["by"] == "FlashKDA"]
    said = (
        " FlashKDA, forward only and in a process of its own on the same kind of machine: " + ", ".join(flash) + "."
        if flash
        else ""
    )
    lines += [
        "",
        f"One {machine['gpu']}, torch {machine['torch']}, Triton {machine['triton']}, flash-linear-attention "
        f"{machine['flash-linear-attention']}; bf16, K = V. KDA is timed from the outputs of the projections, other "
        "rules from unit keys, log-decays and write strengths. In brackets: what the kernels alone take, where a call "
        f"waits for its host.{said} {source(OPS)}",
    ]
    return "\n".join(lines)


def _times(row):
    """Milliseconds of a call, and of its kernels where those are less by more than a twentieth."""
    waits = row["kernels_ms"] < 0.95 * row["ms"]
    return f"{row['ms']:.2f} ms" + (f" ({row['kernels_ms']:.2f})" if waits else "")


def long_context():
    results = json.loads(LONG_CONTEXT.read_text())
    kinds = ("decode, batch 1", "decode, largest batch", "prefill")
    lines = [
        "| context | cache of a sequence: MLA | 3:1 | step, batch 1: MLA | 3:1 | ratio "
        "| per token, largest batch: MLA | 3:1 | ratio | prefill ratio |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for ratios in results["ratios"]:
        length = ratios["length"]
        rows = {
            name: [row for row in results["decode"] if (row["model"], row["length"]) == (name, length)]
            for name in ("mla", "kda:mla 3:1")
        }
        cells = [f"{length:,}"]
        cells += [f"{own[0]['cache_bytes_per_sequence'] / 2**20:,.0f} MiB" for own in rows.values()]
        cells += [f"{own[0]['step_ms']:.2f} ms" for own in rows.values()]
        cells.append(_beside_paper(ratios, kinds[0]))
        cells += [f"{own[-1]['step_ms'] / own[-1]['batch']:.3f} ms ({own[-1]['batch']})" for own in rows.values()]
        cells += [_beside_paper(ratios, kind) for kind in kinds[1:]]
        lines.append(f"| {' | '.join(cells)} |")
    machine = results["machine"]
    lines += [
        "",
        f"27 layers of the width of Kimi Linear 48B with dense MLPs, bf16, one {machine['gpu']}, torch "
        f"{machine['torch']}, Triton {machine['triton']}; in brackets: how many sequences fit, and the paper's ratio. "
        f"{source(LONG_CONTEXT)}",
    ]
    if notes := results.get("notes"):
        # a dash in the table needs its reason
        lines += ["", f"Notes: {'; '.join(notes)}."]
    return "\n".join(lines)


def _beside_paper(ratios, kind):
    if kind not in ratios:
        return "-"
    paper = ratios["paper"].get(kind)
    return f"{ratios[kind]:.1f}x" + (f" ({paper:.1f}x)" if paper else "")


def source(path):
    return f"From `{path.relative_to(README.parent)}`."


TABLES = {
    "lineage": lineage,
    "recurrence_cpu": recurrence_cpu,
    "decode": decode,
    "ops": ops,
    "long_context": long_context,
    "kimi_parts": parts_of_kimi,
}


def with_tables(text):
    """The text with every table made anew. Raises: KeyError for a table that nobody makes."""

    def fill(match):
        return f"<!-- {match[1]} -->\n{TABLES[match[1]]().strip()}\n<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", fill, text, flags=re.DOTALL)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether README.md is up to date")
    arguments = parser.parse_args()
    old = README.read_text(encoding="utf-8")
    new = with_tables(old)
    if not arguments.check:
        README.write_text(new, encoding="utf-8")
    elif new != old:
        sys.exit("README.md does not show what the JSON files say; run python examples/readme_tables.py")


if __name__ == "__main__":
    main()
