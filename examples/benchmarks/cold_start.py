"""How long the first call takes on a fresh machine: each operation in a clean process with an empty Triton cache.

    python examples/benchmarks/cold_start.py [--out examples/benchmarks/results/cold_start.json]

Timed is the first call alone, from Python to the device being done, after PyTorch and CUDA are up; a second call with
another length shows that nothing is compiled for a length.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEADS, HEAD, TAPS = 32, 128, 4


def kernels(name):
    """A kernel file of the package without the package, which needs transformers."""
    package = types.ModuleType("modeling_kda")
    package.__path__ = [str(ROOT / "modeling_kda")]
    sys.modules.setdefault("modeling_kda", package)
    return importlib.import_module(f"modeling_kda.{name}")


def recurrence_inputs(T):
    import torch
    import torch.nn.functional as F

    q, k = (F.normalize(torch.randn(1, T, HEADS, HEAD, device="cuda"), dim=-1).bfloat16() for _ in range(2))
    v = torch.randn(1, T, HEADS, HEAD, device="cuda").bfloat16()
    beta, log_decay = torch.rand(1, T, HEADS, device="cuda"), -torch.rand(1, T, HEADS, HEAD, device="cuda")
    return [x.requires_grad_() for x in (q, k, v, beta, log_decay)]


def decode():
    """One token of the recurrence, with its state."""
    import torch

    function = kernels("triton_decode").triton_recurrent_delta_rule
    state = torch.zeros(1, HEADS, HEAD, HEAD, device="cuda")

    def call(T):
        with torch.no_grad():
            function(*recurrence_inputs(1), state)

    return call


def layer_step():
    """One token of a layer in one launch: convolution, gates, recurrence, gated norm."""
    import torch

    function = kernels("triton_decode").triton_decode_step
    channels = HEADS * HEAD

    def random(*shape):
        return torch.randn(*shape, device="cuda").bfloat16()

    tensors = {name: random(1, 1, HEADS, HEAD) for name in ("q", "k", "v", "decay_logits")}
    tensors |= {"state": torch.zeros(1, HEADS, HEAD, HEAD, device="cuda"), "window": random(1, TAPS - 1, 3 * channels)}
    tensors |= {"conv_weights": [random(channels, 1, TAPS) for _ in range(3)], "beta_logits": random(1, 1, HEADS)}
    tensors |= {"A_log": random(HEADS), "dt_bias": random(channels)}
    tensors |= {"norm_weight": random(HEAD), "gate_logits": random(1, 1, channels)}
    return lambda T: function(**tensors, erase=True, unit_keys=True, activation="silu")


def neighbours():
    """Short convolution and gated norm, forward and backward."""
    import torch

    module = kernels("triton_layers")
    channels = HEADS * HEAD
    weight = torch.randn(channels, 1, TAPS, device="cuda").bfloat16().requires_grad_()
    gain = torch.randn(HEAD, device="cuda").bfloat16().requires_grad_()

    def call(T):
        x = torch.randn(1, T, channels, device="cuda").bfloat16().requires_grad_()
        y, _ = module.triton_short_convolution(x, weight, activation="silu")
        module.triton_gated_norm(y.view(1, T, HEADS, HEAD), gain, x, eps=1e-5).sum().backward()

    return call


def chunk_forward():
    """The chunked recurrence, forward."""
    import torch

    function = kernels("triton_delta_rule").triton_chunk_delta_rule

    def call(T):
        with torch.no_grad():
            function(*recurrence_inputs(T))

    return call


def chunk_training():
    """The chunked recurrence, forward and backward."""
    function = kernels("triton_delta_rule").triton_chunk_delta_rule

    def call(T):
        o, _ = function(*recurrence_inputs(T))
        o.sum().backward()

    return call


OPERATIONS = {each.__name__: each for each in (decode, layer_step, neighbours, chunk_forward, chunk_training)}
# seconds on an H200, from the first call to its result
TARGETS = {"chunk_forward": 6.0, "chunk_training": 15.0}


def measure(operation):
    """In the clean process: prints the seconds of the first call, and of a later one with another length."""
    import torch

    torch.ones(1, device="cuda").matmul(torch.ones(1, device="cuda"))
    started = time.perf_counter()
    call = OPERATIONS[operation]()
    seconds = []
    for T in (1024, 1500):
        call(T)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        started = time.perf_counter()
    print(json.dumps({"first_s": seconds[0], "other_length_s": seconds[1]}))


def run(operation):
    """Measures one operation in a process of its own; None if it is not there."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TRITON_CACHE_DIR": cache}
        command = [sys.executable, __file__, "--measure", operation]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(f"{operation}: not measured: {done.stderr.strip().splitlines()[-1]}")
        return None
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    parser.add_argument("--measure", choices=OPERATIONS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure)
        return
    import torch
    import triton

    if not torch.cuda.is_available():
        raise SystemExit("cold_start.py times GPU kernels and needs a CUDA device; there is none here")
    rows = {}
    print(f"{'':16} {'first call s':>12} {'target':>7} {'other length s':>15}")
    for operation in OPERATIONS:
        row = run(operation)
        if row is None:
            continue
        rows[operation] = row | {"target_s": TARGETS.get(operation)}
        print(f"{operation:16} {row['first_s']:>12.2f} {TARGETS.get(operation, ''):>7} {row['other_length_s']:>15.3f}")
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
