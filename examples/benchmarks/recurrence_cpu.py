"""The recurrence on a CPU: the chunk form beside transformers' fallback for Kimi Linear, and one decode step.

    python examples/benchmarks/recurrence_cpu.py [--quick] [--output examples/benchmarks/results/recurrence_cpu.json]

Equality first, in the same process: outputs, states and gradients agree with transformers; then both are timed by
turns, on one thread. Every time is given twice, as medians: cpu_ms is process CPU time, which other programs on the
machine disturb least, and the ratios are of it; wall_ms is what the clock on the wall says. Memory is what the peak of
resident memory grows by during one call, in a process of its own (Linux). The decode step is compared with copying its
state once, which reads and writes as many bytes as any step must.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

# before torch starts its threads
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.nn.functional as F
import transformers
from transformers.models.kimi_linear.modeling_kimi_linear import (
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
)

from modeling_kda.delta_rule import chunk_delta_rule, recurrent_delta_rule

RESULTS = Path(__file__).resolve().parent / "results" / "recurrence_cpu.json"
SHAPE = {"B": 1, "T": 2048, "H": 8, "K": 128, "V": 128}
DECODE_HEADS = 32
CHUNK_SIZES = (16, 32, 64, 128)
# largest difference relative to the largest number, both sides in fp32
BUDGET = 1e-5
TARGETS = {"forward": 35, "forward+backward": 18}


def random_inputs(T, H=SHAPE["H"]):
    """q, k, v, beta, log_decay as a layer of Kimi Linear hands them over, decays from none to exp(-5)."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, gate = (torch.randn(SHAPE["B"], T, H, SHAPE["K"], generator=generator) for _ in range(4))
    beta = torch.rand(SHAPE["B"], T, H, generator=generator)
    return F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, beta, -5 * torch.sigmoid(2 * gate)


def ours(q, k, v, beta, log_decay, **options):
    return chunk_delta_rule(q, k, v, beta, log_decay, **options)


def theirs(q, k, v, beta, log_decay):
    return chunk_kimi_delta_attention(q, k, v, log_decay, beta, output_final_state=True)


PATHS = {"ours": ours, "transformers": theirs}


def forward(path, inputs):
    with torch.no_grad():
        return path(*inputs)


def forward_backward(path, inputs):
    inputs = [x.detach().requires_grad_() for x in inputs]
    o, state = path(*inputs)
    return o, state, *torch.autograd.grad(o.sum() + state.sum(), inputs)


MODES = {"forward": forward, "forward+backward": forward_backward}


def check(T=200):
    """Raises SystemExit unless both sides give the same numbers; returns the largest relative error."""
    inputs = random_inputs(T)
    names = ("o", "state", "dq", "dk", "dv", "dbeta", "dlog_decay")
    errors = {}
    results = zip(names, forward_backward(ours, inputs), forward_backward(theirs, inputs), strict=True)
    for name, actual, expected in results:
        errors[name] = ((actual - expected).abs().max() / expected.abs().max()).item()
    wrong = {name: f"{error:.1e}" for name, error in errors.items() if not error <= BUDGET}
    if wrong:
        raise SystemExit(f"nothing is timed: ours differs from transformers by {wrong}, {BUDGET:.0e} is allowed")
    return errors


def medians(calls, repeats):
    """name -> cpu_ms, wall_ms and the number of samples; calls take turns, so that what disturbs one disturbs all."""
    samples = {name: [] for name in calls}
    for repeat in range(max(repeats.values()) + 1):
        for name, call in calls.items():
            if repeat <= repeats[name]:
                wall, cpu = time.perf_counter(), time.process_time()
                call()
                samples[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    # the first round warms up
    times = {}
    for name, (_, *rows) in samples.items():
        cpu, wall = (1e3 * statistics.median(x) for x in zip(*rows, strict=True))
        times[name] = {"cpu_ms": cpu, "wall_ms": wall, "samples": len(rows)}
    return times


def time_prefill(mode, repeats):
    """Rows for our chunk sizes and for transformers; the ratio is transformers' time over ours."""
    inputs = random_inputs(SHAPE["T"])
    calls = {"ours": lambda: MODES[mode](ours, inputs), "transformers": lambda: MODES[mode](theirs, inputs)}
    for size in CHUNK_SIZES:
        calls[f"ours, chunk_size={size}"] = lambda size=size: MODES[mode](lambda *x: ours(*x, chunk_size=size), inputs)
    # transformers takes 5 seconds forward and 25 with the backward pass
    samples = dict.fromkeys(calls, repeats) | {"transformers": 3 if mode == "forward" else 1}
    times = medians(calls, samples)
    reference = times["transformers"]["cpu_ms"]
    return [
        {"case": mode, "path": name, **row, "times_faster": reference / row["cpu_ms"]} for name, row in times.items()
    ]


def time_decode(repeats, calls_per_sample=20):
    """One token: our step and transformers' as multiples of the time to copy the state."""
    q, k, v, beta, log_decay = random_inputs(1, DECODE_HEADS)
    state = torch.randn(1, DECODE_HEADS, SHAPE["K"], SHAPE["V"])
    target, own_state = torch.empty_like(state), state.clone()
    steps = {
        "ours": lambda: recurrent_delta_rule(q, k, v, beta, log_decay, state),
        "ours, in place": lambda: recurrent_delta_rule(q, k, v, beta, log_decay, own_state, inplace=True),
        "transformers": lambda: recurrent_kimi_delta_attention(q, k, v, log_decay, beta, state, True),
        "copy": lambda: target.copy_(state),
        "copy to new memory": state.clone,
    }

    def many(step):
        def call():
            for _ in range(calls_per_sample):
                step()

        return call

    with torch.inference_mode():
        for actual, expected in zip(steps["ours"](), steps["transformers"](), strict=True):
            if not (actual - expected).abs().max() <= BUDGET * expected.abs().max():
                raise SystemExit("nothing is timed: the decode step differs from transformers")
        times = medians({name: many(step) for name, step in steps.items()}, dict.fromkeys(steps, repeats))
    rows = []
    for name, row in times.items():
        per_step = {unit: row[unit] / calls_per_sample for unit in ("cpu_ms", "wall_ms")}
        copies = row["cpu_ms"] / times["copy"]["cpu_ms"]
        rows.append({"case": "decode", "path": name, **row, **per_step, "copies_of_the_state": copies})
    return rows


def peak_memory(path, mode):
    """MB by which one call raises the peak of resident memory, measured in a process of its own."""
    command = [sys.executable, __file__, "--measure-memory", path, mode]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"measuring the memory of {path}, {mode} failed:\n{result.stderr}")
    return float(result.stdout)


def print_memory(path, mode):
    MODES[mode](PATHS[path], random_inputs(64))
    inputs = random_inputs(SHAPE["T"])
    # start the peak afresh: loading the libraries took more than what is there now
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_memory("VmRSS")
    MODES[mode](PATHS[path], inputs)
    print(resident_memory("VmHWM") - before)


def resident_memory(field):
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) / 1024


def machine():
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), platform.processor())
    return {
        "cpu": model,
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "threads_used": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def show(rows, memory):
    print(f"{'case':18} {'path':24} {'cpu ms':>10} {'wall ms':>10}")
    for row in rows:
        ratio = "times_faster" if "times_faster" in row else "copies_of_the_state"
        numbers = f"{row['cpu_ms']:10.3f} {row['wall_ms']:10.3f} {row[ratio]:8.1f} {ratio.replace('_', ' ')}"
        print(f"{row['case']:18} {row['path']:24} {numbers}")
    for mode, by_path in memory.items():
        print(f"{mode:18} extra peak memory: " + ", ".join(f"{path} {x:.0f} MB" for path, x in by_path.items()))
    for mode, target in TARGETS.items():
        reached = next(x["times_faster"] for x in rows if (x["case"], x["path"]) == (mode, "ours"))
        print(f"{mode:18} {reached:.0f} times faster than transformers, the target is {target}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=Path, default=RESULTS, help="JSON file for the numbers (default: results/recurrence_cpu.json)"
    )
    parser.add_argument("--quick", action="store_true", help="3 repetitions instead of 15")
    parser.add_argument("--measure-memory", nargs=2, metavar=("PATH", "MODE"), help="print MB of one call, then stop")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.measure_memory:
        path, mode = arguments.measure_memory
        if path not in PATHS or mode not in MODES:
            parser.error(f"PATH is one of {list(PATHS)} and MODE one of {list(MODES)}, got {path} {mode}")
        return print_memory(path, mode)
    if not Path("/proc/self/clear_refs").exists():
        parser.error("memory is measured through /proc/self/clear_refs, which only Linux has")
    if not arguments.output.parent.is_dir():
        parser.error(f"--output {arguments.output}: there is no folder {arguments.output.parent}")
    repeats = 3 if arguments.quick else 15
    report = {"machine": machine(), "shape": SHAPE, "decode_heads": DECODE_HEADS, "dtype": "fp32"}
    report["relative_errors"] = check()
    rows = [row for mode in MODES for row in time_prefill(mode, repeats)] + time_decode(3 * repeats)
    memory = {mode: {path: peak_memory(path, mode) for path in PATHS} for mode in MODES}
    show(rows, memory)
    report["units"] = "medians; cpu_ms: process CPU time, ratios are of it; wall_ms: wall clock; memory in MB"
    arguments.output.write_text(json.dumps({**report, "rows": rows, "extra_peak_memory": memory}, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
