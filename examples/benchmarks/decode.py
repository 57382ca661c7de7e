"""Decoding on a GPU: our kernels beside a peer's, equality first, then times from CUDA graphs.

    python examples/benchmarks/decode.py [--quick] [--out examples/benchmarks/results/decode.json]

Two things are measured: the recurrence alone, for one token and for eight drafted ones (`triton_recurrent_delta_rule`
beside `fused_recurrent_kda` of flash-linear-attention, when that is installed: as users call it, and its kernel called
so that it replaces the state in place, as ours), and a whole layer step in one launch (`triton_decode_step`).
Each is checked against a token loop in fp64 before it is timed. Two times per case, medians: "replay" is one call in a
graph with cold caches between replays, launch included, as `triton.testing.do_bench` sees it; "stream" is one of many
calls in a graph, as in a model whose layers follow one another, over as many different states.
"""

import argparse
import importlib
import json
import sys
import types
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from triton.testing import do_bench

ROOT = Path(__file__).resolve().parents[2]
# bytes per second of a large copy on an H200, read and written
H200_BYTES = 4.3e12
HEAD = 128
HEADS = 32
# relative root mean square error against fp64 that outputs in bf16 and states in fp32 may have
BUDGET = {"o": 5e-3, "state": 1e-5}


def load_kernels():
    """The kernel file without the package around it, which needs transformers."""
    package = types.ModuleType("modeling_kda")
    package.__path__ = [str(ROOT / "modeling_kda")]
    sys.modules.setdefault("modeling_kda", package)
    return importlib.import_module("modeling_kda.triton_decode")


def recurrence_inputs(B, T):
    """q, k, v, beta, log_decay, state of T KDA tokens, as a model hands them over."""
    shape = B, T, HEADS, HEAD
    q, k = (F.normalize(torch.randn(shape, device="cuda"), dim=-1).bfloat16() for _ in range(2))
    v = torch.randn(shape, device="cuda").bfloat16()
    beta = torch.rand(shape[:3], device="cuda").bfloat16()
    log_decay = -torch.rand(shape, device="cuda")
    return q, k, v, beta, log_decay, torch.randn(B, HEADS, HEAD, HEAD, device="cuda")


def recurrence_reference(q, k, v, beta, log_decay, state):
    """The definition in fp64."""
    q, k, v, beta, log_decay, S = (x.double() for x in (q, k, v, beta, log_decay, state))
    outputs = []
    for t in range(q.shape[1]):
        S = log_decay[:, t].exp()[..., None] * S
        e = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
        S = S + k[:, t, :, :, None] * e[:, :, None]
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, 1), S


def recurrence_paths(kernels):
    """name -> function of the inputs that returns (o, state)."""
    paths = {"ours": lambda *x: kernels.triton_recurrent_delta_rule(*x, inplace=True)}
    try:
        from fla.ops.kda import fused_recurrent_kda
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
    except ImportError as error:
        print(f"flash-linear-attention is not here ({error}); timing ours alone")
        return paths
    paths["fla"] = lambda q, k, v, beta, g, state: fused_recurrent_kda(
        q, k, v, g, beta, initial_state=state, output_final_state=True
    )
    paths["fla in place"] = lambda q, k, v, beta, g, state: fused_recurrent_kda_fwd(
        q, k, v, g, beta, initial_state=state
    )
    return paths


def step_inputs(B):
    """Arguments of `triton_decode_step` for a KDA layer with four taps, SiLU, a softplus gate and an output gate."""

    def random(*shape):
        return torch.randn(*shape, device="cuda").bfloat16()

    channels = HEADS * HEAD
    tensors = {name: random(B, 1, HEADS, HEAD) for name in ("q", "k", "v", "decay_logits")}
    tensors["state"] = torch.randn(B, HEADS, HEAD, HEAD, device="cuda")
    tensors["window"] = random(B, 3, 3 * channels)
    tensors["conv_weights"] = [random(channels, 1, 4) for _ in range(3)]
    tensors["beta_logits"] = random(B, 1, HEADS)
    tensors["A_log"], tensors["dt_bias"] = torch.randn(HEADS, device="cuda"), torch.randn(channels, device="cuda")
    tensors["norm_weight"], tensors["gate_logits"] = random(HEAD), random(B, 1, channels)
    return tensors


STEP_OPTIONS = {"erase": True, "unit_keys": True, "write": "beta", "activation": "silu", "eps": 1e-5}


def step_reference(q, k, v, state, window, conv_weights, beta_logits, decay_logits, A_log, dt_bias, **output):
    """(y, state) of the layer step in fp64."""
    B = q.shape[0]
    x = torch.cat([window, torch.cat([part.flatten(2) for part in (q, k, v)], -1)], 1).double()
    weight = torch.cat(conv_weights)[:, 0].double().t()
    q, k, v = F.silu((x * weight).sum(1, keepdim=True)).view(B, 1, 3, HEADS, HEAD).unbind(2)
    q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    gate = decay_logits.double() + dt_bias.double().view(HEADS, HEAD)
    log_decay = -A_log.double().exp()[:, None] * F.softplus(gate)
    o, state = recurrence_reference(q, k, v, beta_logits.double().sigmoid(), log_decay, state)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + STEP_OPTIONS["eps"]) * output["norm_weight"].double()
    return (o * output["gate_logits"].double().sigmoid().view(o.shape)).flatten(2), state


def error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


def check(name, o, state, expected):
    """Raises SystemExit if a path is not equal to the definition."""
    errors = {"o": error(o, expected[0]), "state": error(state, expected[1])}
    for what, budget in BUDGET.items():
        if not errors[what] <= budget:
            raise SystemExit(f"{name} is not timed: its {what} is off by {errors[what]:.1e}, {budget:.0e} is allowed")
    return errors


def graph_of(calls):
    """A CUDA graph of these calls, and what they return, which must stay alive while it is replayed."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for call in calls]
    return graph, results


def times(make_call, state_bytes, rep):
    """Milliseconds of one call: replayed alone with cold caches, and in a stream of calls on different states."""
    calls = [make_call() for _ in range(max(2, min(32, int(4e9 // state_bytes))))]
    alone, alone_results = graph_of(calls[:1])
    stream, stream_results = graph_of(calls)
    replay = do_bench(alone.replay, warmup=rep // 4, rep=rep, return_mode="median")
    in_stream = do_bench(stream.replay, warmup=rep // 4, rep=rep, return_mode="median") / len(calls)
    return {"replay_ms": replay, "stream_ms": in_stream}


def bytes_of(tensors):
    """What one call must move: the state and the window both ways, everything else once."""
    total = 0
    for name, x in tensors.items():
        for each in x if isinstance(x, list) else [x]:
            total += each.numel() * each.element_size() * (2 if name in ("state", "window") else 1)
    return total + tensors["v"].numel() * tensors["v"].element_size()


def run_recurrence(kernels, B, T, rep):
    names = "q", "k", "v", "beta", "log_decay", "state"
    rows = []
    for name, path in recurrence_paths(kernels).items():
        x = recurrence_inputs(B, T)
        expected = recurrence_reference(*x)
        errors = check(name, *path(*x), expected)
        moved = bytes_of(dict(zip(names, x, strict=True)))

        def make_call(path=path):
            y = recurrence_inputs(B, T)
            return lambda: path(*y)

        op = "recurrence" if T == 1 else f"recurrence, T = {T}"
        rows.append({"op": op, "path": name, "B": B, "bytes": moved, "errors": errors})
        rows[-1] |= times(make_call, x[-1].nbytes, rep)
    return rows


def run_step(kernels, B, rep):
    x = step_inputs(B)
    expected = step_reference(**x)
    moved = bytes_of(x)
    y = kernels.triton_decode_step(**x, **STEP_OPTIONS)
    errors = check("the layer step", y, x["state"], expected)

    def make_call():
        tensors = step_inputs(B)
        return lambda: kernels.triton_decode_step(**tensors, **STEP_OPTIONS)

    row = {"op": "layer step", "path": "ours", "B": B, "bytes": moved, "errors": errors}
    return [row | times(make_call, x["state"].nbytes, rep)]


def show(rows):
    print(
        f"{'':32} {'B':>4} {'replay ms':>10} {'stream ms':>10} {'floor ms':>9} {'of 4.3 TB/s':>11} {'peer/ours':>18}"
    )
    for row in rows:
        floor = row["bytes"] / H200_BYTES * 1e3
        row["share_of_bandwidth"] = floor / row["stream_ms"]
        ours = next(r for r in rows if (r["op"], r["B"], r["path"]) == (row["op"], row["B"], "ours"))
        ratio = ""
        if row is not ours:
            row["slower_than_ours"] = {key: row[key] / ours[key] for key in ("replay_ms", "stream_ms")}
            ratio = " / ".join(f"{x:.2f}x" for x in row["slower_than_ours"].values())
        print(
            f"{row['op'] + ', ' + row['path']:32} {row['B']:>4} {row['replay_ms']:>10.4f} {row['stream_ms']:>10.4f} "
            f"{floor:>9.4f} {row['share_of_bandwidth']:>11.0%} {ratio:>18}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and batch sizes")
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("decode.py times GPU kernels and needs a CUDA device; there is none here")
    torch.manual_seed(0)
    kernels = load_kernels()
    rows, rep = [], 20 if arguments.quick else 60
    for B in (1, 64, 256) if arguments.quick else (1, 8, 64, 256):
        rows += run_recurrence(kernels, B, 1, rep)
        rows += run_step(kernels, B, rep)
    rows += run_recurrence(kernels, 64, 8, rep)
    show(rows)
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    report = {"machine": machine, "shape": {"H": HEADS, "K": HEAD, "V": HEAD, "dtype": "bf16", "state": "fp32"}}
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({**report, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
