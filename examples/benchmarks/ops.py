"""Times the chunked recurrences of this package on one GPU, beside flash-linear-attention and FlashKDA where those are
installed.

    python examples/benchmarks/ops.py [case ...] [--out FILE]      without names: every case

Everything a case times is first compared with the chunked recurrence of PyTorch in fp64: outputs, and the gradient of
every input. KDA is timed as layers call it, from the outputs of their projections: unit queries and keys, the gate and
the sigmoid of beta are inside. Times are medians over device events. Beside them stands what the kernels alone take,
which is less where a device waits for its host. The roofline is the bytes that any implementation must move, inputs
and outputs once, at the speed of a copy.

flash-linear-attention tunes its kernels at the first call of every shape, for minutes; that is done beforehand here,
in one process per case, and is no part of the times.
"""

import argparse
import json
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from triton.testing import do_bench

from modeling_kda.delta_rule import chunk_delta_rule
from modeling_kda.layers import l2norm
from modeling_kda.triton_delta_rule import triton_chunk_delta_rule, triton_chunk_delta_rule_from_logits

RESULTS = Path(__file__).parent / "results" / "ops.json"
LOWER_BOUND = -5.0


class Case(NamedTuple):
    """rule: a stage, or "bounded" for KDA with the gate of Kimi K3; whether the backward pass is timed, too."""

    rule: str
    B: int
    T: int
    H: int
    K: int = 128
    backward: bool = True


CASES = {
    "kda_h96": Case("kda", 1, 8192, 96),
    "kda_bounded_h96": Case("bounded", 1, 8192, 96),
    "kda_h32": Case("kda", 1, 8192, 32),
    "kda_bounded_h32": Case("bounded", 1, 8192, 32),
    "kda_short": Case("kda", 1, 1024, 64, backward=False),
    "kda_long": Case("kda", 1, 65536, 4, backward=False),
    "kda_gpt2": Case("kda", 8, 2048, 12, 64),
    "delta_h32": Case("delta", 1, 8192, 32),
    "gated_delta_h32": Case("gated_delta", 1, 8192, 32),
    "ssd_h32": Case("ssd", 1, 8192, 32),
    "linear_h32": Case("linear", 1, 8192, 32),
}
KDA = ("kda", "bounded")
ERASING = ("delta", "gated_delta", *KDA)
# relative root mean square error: outputs, and the worst of the gradients (those of gates sum what cancels)
BUDGETS = {"output": 5e-3, "gradient": 3e-2}


def make_inputs(case):
    """name -> tensor. bf16 but for what layers keep in fp32."""

    def random(*shape):
        return torch.randn(*shape, device="cuda")

    shape = case.B, case.T, case.H, case.K
    inputs = {name: random(*shape).bfloat16() for name in "qkv"}
    if case.rule in KDA:
        inputs |= {"beta": random(*shape[:3]).bfloat16(), "gate": random(*shape).bfloat16()}
        A_log = torch.rand(case.H, device="cuda")
        return inputs | {"A_log": A_log, "dt_bias": random(case.H * case.K) - 4}
    inputs |= {name: F.normalize(inputs[name].float(), dim=-1).bfloat16() for name in "qk"}
    if case.rule != "linear":
        inputs["beta"] = torch.rand(*shape[:3], device="cuda")
    if case.rule in ("gated_delta", "ssd"):
        inputs["gate"] = -5 * random(*shape[:3], 1).sigmoid()
    return inputs


def definition(rule, q, k, v, beta=None, gate=None, A_log=None, dt_bias=None):
    """The operation in the dtype of its inputs."""
    if rule in KDA:
        q, k, beta = l2norm(q), l2norm(k), beta.sigmoid()
        gate, rate = gate + dt_bias.view(gate.shape[-2:]), A_log.exp()[:, None]
        gate = LOWER_BOUND * torch.sigmoid(rate * gate) if rule == "bounded" else -rate * F.softplus(gate)
    return chunk_delta_rule(q, k, v, beta, gate, erase=rule in ERASING)[0]


def ours(rule, q, k, v, beta=None, gate=None, A_log=None, dt_bias=None):
    if rule in KDA:
        bound = LOWER_BOUND if rule == "bounded" else None
        return triton_chunk_delta_rule_from_logits(q, k, v, beta, gate, A_log, dt_bias, lower_bound=bound)[0]
    return triton_chunk_delta_rule(q, k, v, beta, gate, erase=rule in ERASING)[0]


def fla(rule, q, k, v, beta=None, gate=None, A_log=None, dt_bias=None):
    from fla.ops.delta_rule import chunk_delta_rule
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda
    from fla.ops.linear_attn import chunk_linear_attn
    from fla.ops.simple_gla import chunk_simple_gla

    if rule in KDA:
        inside = dict.fromkeys(("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"), True)
        bounded = {"safe_gate": True, "lower_bound": LOWER_BOUND} if rule == "bounded" else {}
        return chunk_kda(q, k, v, gate, beta, A_log=A_log, dt_bias=dt_bias, **inside, **bounded)[0]
    if rule == "delta":
        return chunk_delta_rule(q, k, v, beta.to(q.dtype))[0]
    if rule == "gated_delta":
        return chunk_gated_delta_rule(q, k, v, gate[..., 0], beta)[0]
    if rule == "ssd":
        return chunk_simple_gla(q, k, (v * beta[..., None]).to(v.dtype), gate[..., 0])[0]
    return chunk_linear_attn(q, k, v, normalize=False)[0]


def flash_kda(rule, q, k, v, beta, gate, A_log, dt_bias):
    """Forward only, bounded gates only."""
    import flash_kda

    o = torch.empty_like(v)
    bias = dt_bias.view(gate.shape[-2:])
    scale = q.shape[-1] ** -0.5
    flash_kda.fwd(q, k, v, gate, beta, scale, o, A_log=A_log, dt_bias=bias, lower_bound=LOWER_BOUND)
    return o


def implementations(case, backward):
    """name -> function of the rule and the inputs that returns outputs."""
    found = {"modeling_kda": ours}
    if installed("flash-linear-attention"):
        found["fla"] = fla
    if installed("flash-kda") and case.rule == "bounded" and case.K == 128 and not backward:
        found["FlashKDA"] = flash_kda
    return found


def installed(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def results_of(run, case, inputs, do):
    """[o], and with do [o, gradients of all inputs]."""
    leaves = {name: x.detach().requires_grad_(do is not None) for name, x in inputs.items()}
    o = run(case.rule, **leaves)
    return [o.detach()] if do is None else [o.detach(), *torch.autograd.grad(o, list(leaves.values()), do.to(o.dtype))]


def errors_of(results, expected):
    """Relative errors of the output and of the worst gradient (None without gradients)."""
    errors = [
        ((x.double() - y).norm() / y.norm()).item() if x.isfinite().all() else float("inf")
        for x, y in zip(results, expected, strict=True)
    ]
    return {"output": errors[0], "gradient": max(errors[1:], default=None)}


def time_case(run, case, inputs, do):
    """Median milliseconds of calls, milliseconds of their kernels, and peak extra memory in MiB."""

    def step():
        results_of(run, case, inputs, do)

    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return do_bench(step, warmup=50, rep=200, return_mode="median"), kernel_time(step), peak


def kernel_time(step, count=5):
    """Milliseconds that the device is busy with a step."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(count):
            step()
        torch.cuda.synchronize()
    busy = sum(event.device_time for event in profiled.events() if event.device_type == DeviceType.CUDA)
    return busy / count / 1000


def run_case(name, rate):
    """Rows of one case, ours first. rate: bytes per ms of a copy."""
    case = CASES[name]
    inputs = make_inputs(case)
    for backward in (False, True)[: 1 + case.backward]:
        do = torch.randn_like(inputs["v"]) if backward else None
        wide = {key: x.double() for key, x in inputs.items()}
        expected = results_of(definition, case, wide, None if do is None else do.double())
        read = sum(x.nbytes for x in inputs.values())
        # outputs; and back: the inputs and do read, the gradients written
        least = read + inputs["v"].nbytes + (2 * read + inputs["v"].nbytes if backward else 0)
        base = None
        for who, run in implementations(case, backward).items():
            row = {"case": name, "pass": "forward+backward" if backward else "forward", "by": who, **case._asdict()}
            try:
                errors = errors_of(results_of(run, case, inputs, do), expected)
                ms, kernels, peak = time_case(run, case, inputs, do)
            except (RuntimeError, ValueError, TypeError, AssertionError) as refusal:
                if run is ours:
                    raise
                yield row | {"refused": str(refusal).splitlines()[0]}
                continue
            base = base or ms
            row |= {"errors": errors, "right": all(e is None or e <= BUDGETS[k] for k, e in errors.items())}
            row |= {"ms": ms, "kernels_ms": kernels, "peak_MiB": peak}
            yield row | {"ratio_to_ours": ms / base, "roofline": least / rate / ms}


def copy_rate():
    """Bytes per ms that a device-to-device copy reads and writes."""
    x = torch.empty(2**30, dtype=torch.bfloat16, device="cuda").normal_()
    y = torch.empty_like(x)
    return 2 * x.nbytes / do_bench(lambda: y.copy_(x), return_mode="median")


def tune_peers(names):
    """Let flash-linear-attention find and store its configurations, the cases side by side."""
    if not installed("flash-linear-attention"):
        print("flash-linear-attention is not installed: no peer for this table", file=sys.stderr)
        return
    command = [sys.executable, __file__, "--only-tune"]
    # a case that the peer refuses is said in the table
    for process in [subprocess.Popen([*command, name], stderr=subprocess.DEVNULL) for name in names]:
        process.wait()


def tune(name):
    case = CASES[name]
    inputs = make_inputs(case)
    results_of(fla, case, inputs, torch.randn_like(inputs["v"]) if case.backward else None)


def show(row):
    head = f"{row['case']:18}{row['pass']:18}{row['by']:14}"
    if "refused" in row:
        print(f"{head}  refused: {row['refused'][:60]}")
        return
    gradient = row["errors"]["gradient"]
    times = f"{row['ms']:9.3f}{row['kernels_ms']:9.3f}{row['ratio_to_ours']:8.2f}"
    print(
        f"{head}{row['errors']['output']:9.1e}{'' if gradient is None else f'{gradient:.1e}':>9}"
        f"{'' if row['right'] else ' WRONG':6}{times}{row['peak_MiB']:8.0f}{row['roofline']:10.0%}"
    )


def machine():
    packages = "torch", "triton", "flash-linear-attention", "flash-kda"
    versions = {package: installed(package) for package in packages}
    return {"gpu": torch.cuda.get_device_name(), "python": platform.python_version(), **versions}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="case", help=f"some of {', '.join(CASES)}")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file for the numbers (default: %(default)s)")
    parser.add_argument("--only-tune", action="store_true", help="only let peers tune themselves for these cases")
    arguments = parser.parse_args()
    names = arguments.cases or list(CASES)
    if set(names) - set(CASES):
        parser.error(f"unknown cases {sorted(set(names) - set(CASES))}; choose from {list(CASES)}")
    if not torch.cuda.is_available():
        sys.exit("ops.py times GPU kernels and needs a CUDA device; there is none here")
    torch.manual_seed(0)
    if arguments.only_tune:
        for name in names:
            tune(name)
        return
    tune_peers(names)
    rate, rows = copy_rate(), []
    columns = f"{'error':>9}{'of grads':>9}{'':6}{'ms':>9}{'kernels':>9}{'x ours':>8}{'MiB':>8}{'roofline':>10}"
    print(f"{'case':18}{'pass':18}{'by':14}{columns}")
    report = {"machine": machine(), "copy_GB_per_s": rate / 1e6, "budgets": BUDGETS, "rows": rows}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        for row in run_case(name, rate):
            rows.append(row)
            show(row)
            # a case can take minutes: what is known is kept
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    if not all(row.get("right", True) for row in rows if row["by"] == "modeling_kda"):
        sys.exit("the kernels of modeling_kda are outside their error budget")


if __name__ == "__main__":
    main()
