"""What the tests of the decode and layer kernels share: definitions in fp64, and how to reach a kernel.

Under the interpreter kernels run in processes of their own, because Triton reads the switch once.
"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

# relative root mean square error against fp64, by the dtype of the inputs: fp32 arithmetic, one rounding of the output
BUDGET = {torch.float32: 3e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
if os.environ.get("TRITON_INTERPRET") == "1":
    # the interpreter cuts bits off where the device rounds
    BUDGET[torch.bfloat16] = 8e-3
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
TYPES |= {torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1"}
# bytes that one program can have, by compute capability
SHARED_MEMORY = {80: 166912, 90: 232448, 100: 232448}
FP32 = BUDGET[torch.float32]


def run_interpreted(file):
    """Run the functions `interpreted_*` of a test file as tests, in a process with Triton's interpreter."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-o", "python_functions=interpreted_*", str(file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


@contextlib.contextmanager
def recorded(module, launches):
    """Inside, a kernel file takes CPU tensors and launches nothing: (kernel, arguments, options) are noted instead."""
    from modeling_kda import triton_launch

    kernels = {name: x for name, x in vars(module).items() if name.endswith("_kernel")}
    allowed, triton_launch.INTERPRETED = triton_launch.INTERPRETED, True
    for name, kernel in kernels.items():
        setattr(module, name, Recorder(kernel, launches))
    try:
        yield
    finally:
        triton_launch.INTERPRETED = allowed
        for name, kernel in kernels.items():
            setattr(module, name, kernel)


class Recorder:
    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        return lambda *args, **options: self.launches.append((self.kernel, args, options))


def assert_fits(kernel, args, options, capability):
    """The launch compiles for a GPU that need not be here, keeps everything in registers, and fits into any."""
    compiled = compile_launch(kernel, args, options, capability)
    assert compiled.metadata.shared <= 99 * 1024
    usage = resource_usage(compiled.asm["cubin"])
    assert usage["STACK"] == usage["LOCAL"] == 0, f"{kernel.__name__} {options} spills on sm_{capability}: {usage}"


def compile_launch(kernel, args, options, capability):
    """What Triton makes of a recorded launch for a GPU that need not be here."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    given = {**dict(zip(kernel.arg_names, args, strict=False)), **options}
    signature, constants, hints = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = given.pop(parameter.name)
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        if isinstance(value, tuple):
            signature[parameter.name] = tuple("*" + TYPES[x.dtype] for x in value)
            hints |= {(i, j): [["tt.divisibility", 16]] for j in range(len(value))}
        elif torch.is_tensor(value):
            signature[parameter.name] = "*" + TYPES[value.dtype]
        else:
            signature[parameter.name] = "i32" if isinstance(value, int) else "fp32"
        aligned = isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize
        if torch.is_tensor(value) or aligned:
            hints[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, hints)
    return compile(source, target=GPUTarget("cuda", capability, 32), options=given)


def resource_usage(cubin):
    """Registers per thread, and bytes of stack, shared and local memory."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return {name: int(number) for name, number in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", report.stdout)}


def on_gpu(test):
    """Marks a test that runs on a CUDA device only."""
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test))


def rmse(actual, expected):
    """Relative root mean square error; inf where shapes or finiteness differ."""
    if actual.shape != expected.shape or not torch.isfinite(actual).all():
        return float("inf")
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def assert_close(actual, expected, budget):
    error = rmse(actual, expected)
    assert error <= budget, f"relative error {error:.2e} is above {budget:.0e}"


def poison(device):
    """Fill memory that the allocator will hand out next with NaN, so that an element nobody wrote shows."""
    if torch.device(device).type == "cuda":
        for size in (1 << 12, 1 << 16, 1 << 20, 1 << 23):
            for block in [torch.full((size,), torch.nan, device=device) for _ in range(4)]:
                del block


def delta_rule_loop(q, k, v, beta, log_decay, state, *, erase, scale=None):
    """The recurrence, one token after the other, in fp64. Shapes as in `triton_decode`."""
    q, k, v, beta, log_decay, state = (None if x is None else x.double() for x in (q, k, v, beta, log_decay, state))
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    q, k = (x.repeat_interleave(HV // H, 2) for x in (q, k))
    scale = K**-0.5 if scale is None else scale
    S = v.new_zeros(B, HV, K, V) if state is None else state
    outputs = [v.new_zeros(B, 0, HV, V)]
    for t in range(T):
        if log_decay is not None:
            S = log_decay[:, t].exp()[..., None] * S
        e = v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t]) if erase else v[:, t]
        e = e if beta is None else beta[:, t, :, None] * e
        S = S + k[:, t, :, :, None] * e[:, :, None]
        outputs.append(scale * torch.einsum("bhkv,bhk->bhv", S, q[:, t])[:, None])
    return torch.cat(outputs, 1), S


def convolution_loop(x, weight, window=None, age=None, activation=None):
    """y_t = act(sum_j weight[:, 0, W-1-j] x_{t-j}) over j < W with j <= age_t. x: [B, T, C], window: [B, W-1, C]."""
    taps = weight.shape[-1]
    x, weight = x.double(), weight.double()
    past = x.new_zeros(x.shape[0], taps - 1, x.shape[2]) if window is None else window.double()
    x = torch.cat([past, x], 1)
    outputs = [x[:, :0]]
    for t in range(x.shape[1] - taps + 1):
        y = 0
        for j in range(taps):
            term = x[:, t + taps - 1 - j] * weight[:, 0, taps - 1 - j]
            y = y + (term if age is None else torch.where((age[:, t] >= j)[:, None], term, 0.0))
        outputs.append(y[:, None])
    y = torch.cat(outputs, 1)
    return {None: lambda z: z, "silu": F.silu, "relu": F.relu}[activation](y)


def gated_norm(o, weight, gate, eps):
    """RMSNorm(o) * weight * sigmoid(gate) in fp64, over the last dimension; weight or gate may be None."""
    y = o.double()
    if weight is not None:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.double()
    return y if gate is None else y * gate.double().sigmoid()
