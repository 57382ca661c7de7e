"""Times the chunked recurrences of this package on one GPU, beside flash-linear-attention where it is installed.

    python examples/benchmarks/ops.py [case ...]      without names: every case

Each implementation is compared with the fp64 token loop before it is timed. Times are medians over device events; the
last column is the time of the bytes that any implementation must move (inputs once, outputs once) over the measured
time. The rows go to examples/benchmarks/results/ops.json, next to the machine and the versions they belong to.
"""

import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.nn.functional as F
from triton.testing import do_bench

from modeling_kda.delta_rule import recurrent_delta_rule
from modeling_kda.triton_delta_rule import triton_chunk_delta_rule

RESULTS = Path(__file__).parent / "results" / "ops.json"
# name: rule, B, T, H, K, whether the backward pass is timed too
CASES = {
    "kda_h96": ("kda", 1, 8192, 96, 128, True),
    "kda_h32": ("kda", 1, 8192, 32, 128, True),
    "kda_short": ("kda", 1, 1024, 64, 128, False),
    "kda_long": ("kda", 1, 65536, 4, 128, False),
    "kda_gpt2": ("kda", 8, 2048, 12, 64, True),
    "delta_h32": ("delta", 1, 8192, 32, 128, True),
    "gated_delta_h32": ("gated_delta", 1, 8192, 32, 128, True),
    "ssd_h32": ("ssd", 1, 8192, 32, 128, True),
    "linear_h32": ("linear", 1, 8192, 32, 128, True),
}
ERASING = ("delta", "gated_delta", "kda")


def make_inputs(rule, B, T, H, K):
    """q, k, v in bf16; beta and log_decay in fp32, None where the rule has none."""
    q, k = (F.normalize(torch.randn(B, T, H, K, device="cuda"), dim=-1).bfloat16() for _ in range(2))
    v = torch.randn(B, T, H, K, device="cuda").bfloat16()
    beta = torch.rand(B, T, H, device="cuda") if rule != "linear" else None
    channels = {"kda": K, "gated_delta": 1, "ssd": 1}.get(rule)
    log_decay = -5 * torch.randn(B, T, H, channels, device="cuda").sigmoid() if channels else None
    return q, k, v, beta, log_decay


def implementations(rule):
    """name -> function of q, k, v, beta, log_decay that returns outputs."""

    def ours(q, k, v, beta, log_decay):
        return triton_chunk_delta_rule(q, k, v, beta, log_decay, erase=rule in ERASING)[0]

    found = {"modeling_kda": ours}
    try:
        from fla.ops.delta_rule import chunk_delta_rule
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.kda import chunk_kda
        from fla.ops.linear_attn import chunk_linear_attn
        from fla.ops.simple_gla import chunk_simple_gla
    except ImportError:
        print("flash-linear-attention is not installed: no peer for this table", file=sys.stderr)
        return found
    found["fla"] = {
        "kda": lambda q, k, v, b, g: chunk_kda(q=q, k=k, v=v, g=g, beta=b)[0],
        "delta": lambda q, k, v, b, g: chunk_delta_rule(q=q, k=k, v=v, beta=b.to(q.dtype))[0],
        "gated_delta": lambda q, k, v, b, g: chunk_gated_delta_rule(q=q, k=k, v=v, g=g[..., 0], beta=b)[0],
        "ssd": lambda q, k, v, b, g: chunk_simple_gla(q=q, k=k, v=(v * b[..., None]).to(v.dtype), g=g[..., 0])[0],
        "linear": lambda q, k, v, b, g: chunk_linear_attn(q=q, k=k, v=v, normalize=False)[0],
    }[rule]
    return found


def error(run, rule, K):
    """Relative error of the outputs against the token loop in fp64."""
    inputs = make_inputs(rule, 1, 300, 2, K)
    expected, _ = recurrent_delta_rule(*(None if x is None else x.double() for x in inputs), erase=rule in ERASING)
    return ((run(*inputs).double() - expected).norm() / expected.norm()).item()


def time_case(run, inputs, backward):
    """Median milliseconds and peak extra memory in MiB."""
    leaves = [None if x is None else x.detach().requires_grad_(backward) for x in inputs]
    do = torch.randn_like(inputs[2])

    def step():
        o = run(*leaves)
        if backward:
            torch.autograd.grad(o, [x for x in leaves if x is not None], do)

    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return do_bench(step, warmup=50, rep=200, return_mode="median"), peak


def copy_rate():
    """Bytes per ms that a device-to-device copy reads and writes."""
    x = torch.empty(2**30, dtype=torch.bfloat16, device="cuda").normal_()
    y = torch.empty_like(x)
    return 2 * x.nbytes / do_bench(lambda: y.copy_(x), return_mode="median")


def machine():
    versions = {}
    for package in ("torch", "triton", "flash-linear-attention"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {"gpu": torch.cuda.get_device_name(), "python": platform.python_version(), **versions}


def main(names):
    unknown = set(names) - set(CASES)
    if unknown:
        sys.exit(f"unknown cases {sorted(unknown)}; choose from {list(CASES)}")
    rate, rows = copy_rate(), []
    print(
        f"{'case':18}{'pass':18}{'implementation':16}{'error':>9}{'ms':>9}{'x ours':>8}{'MiB':>8}{'of roofline':>13}"
    )
    for name in names or CASES:
        rule, B, T, H, K, backward = CASES[name]
        inputs = make_inputs(rule, B, T, H, K)
        bytes_in = sum(x.nbytes for x in inputs if x is not None)
        for direction in ("forward", "forward+backward")[: 1 + backward]:
            least = bytes_in + inputs[2].nbytes
            if direction != "forward":
                least += 2 * bytes_in + inputs[2].nbytes
            base = None
            for who, run in implementations(rule).items():
                try:
                    off = error(run, rule, K)
                    ms, peak = time_case(run, inputs, direction != "forward")
                except RuntimeError as refusal:
                    rows.append({"case": name, "pass": direction, "by": who, "refused": str(refusal).splitlines()[0]})
                    print(f"{name:18}{direction:18}{who:16}  refused: {rows[-1]['refused'][:60]}")
                    continue
                base = base or ms
                row = {"case": name, "pass": direction, "by": who, "error": off, "ms": ms, "peak_MiB": peak}
                rows.append({**row, "ratio_to_ours": ms / base, "share_of_roofline": least / rate / ms})
                share = f"{least / rate / ms:12.0%}"
                print(f"{name:18}{direction:18}{who:16}{off:9.1e}{ms:9.3f}{ms / base:8.2f}{peak:8.0f}{share}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"machine": machine(), "copy_GB_per_s": rate / 1e6, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    main(sys.argv[1:])
