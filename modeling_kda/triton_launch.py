"""What the launches of all layer kernels share: what they take, on which device they run, and strides.

Kernels that torch.compile meets are operators of their own; each file of kernels registers them under its own name.
"""

import contextlib
import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MAX_TAPS = 4
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = {None: 0, "silu": 1, "relu": 2}


def on_device(x):
    """Launches go to the current device: make it that of x. torch.compile sees to that itself."""
    if x.device.type != "cuda" or torch.compiler.is_compiling():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


# (device, kinds of tensors) -> (kernel, constants) -> what Triton compiled, and the constants in order
_compiled = {}


def compiled_for(*tensors):
    """What was compiled for tensors like these, for `launch`: alike are those of the same dtypes and the same 16-byte
    alignment, on the same device, with the same ones absent. One look for all launches of a call."""
    kinds = tuple(None if x is None else (x.dtype, x.data_ptr() % 16 == 0) for x in tensors)
    return _compiled.setdefault((tensors[0].device, *kinds), {})


def launch(compiled, kernel, grid, args, options):
    """kernel[grid](*args, **options), where equal launches go to what Triton compiled for the first: its look at every
    argument is most of a launch's time on the host.

    compiled: of `compiled_for`, with every tensor that args hold and the caller did not allocate itself. grid: three
    numbers. args: all parameters but the constants, none of them an integer that Triton specializes on. options: the
    constants, which stand behind them, num_warps and the like, in the same order at every call.
    """
    key = id(kernel), *options.values()
    if key in compiled:
        binary, constants = compiled[key]
        binary[grid](*args, *constants)
        return
    binary = kernel[grid](*args, **options)
    # the interpreter compiles nothing
    if binary is not None:
        compiled[key] = binary, tuple(options[name] for name in kernel.arg_names[len(args) :])


def unfit_tensors(tensors, *, backward):
    """None, or why these named tensors cannot go into one kernel. backward: whether it has one."""
    device = next(iter(tensors.values())).device
    if device.type != "cuda" and not INTERPRETED:
        return f"the Triton kernels need tensors on a CUDA device, got {device}"
    for name, x in tensors.items():
        if x.device != device:
            return f"all tensors must be on one device, got {device} and {name} on {x.device}"
        if x.dtype not in DTYPES:
            return f"the Triton kernels take fp32, bf16 and fp16, got {x.dtype} for {name}"
        if x.requires_grad and torch.is_grad_enabled() and not backward:
            return f"the decode kernels have no backward, got {name} that requires grad; use torch.no_grad()"
    return None


def choose(operator, differentiable, plain, *tensors):
    """Of three ways to the same kernels the cheapest that does: torch's operator, which torch.compile does not look
    into; an autograd function, half the host's time of an operator; or the launch itself."""
    if torch.compiler.is_compiling():
        return operator
    return differentiable if needs_gradients(*tensors) else plain


def needs_gradients(*tensors):
    """Whether autograd records a call with these tensors; None for absent ones."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def eager_function(launch, launch_back, save, differentiate):
    """What torch's operator around launches is to autograd, as an autograd function: half of its host time.

    Args: launch, launch_back: both passes. save, differentiate: of the operator's autograd; differentiate takes what
        runs the backward pass as `run`.
    """

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            output = launch(*inputs)
            save(ctx, inputs, output)
            return output

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, *gradients):
            return differentiate(ctx, *gradients, run=launch_back)

    return Eager.apply


def unit_stride(x):
    """x with its last dimension dense in memory; None stays None."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def strides(x, count):
    """The first strides of x; 0 where there is one element, so that odd strides do not make another kernel."""
    if x is None:
        return (0,) * count
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape[:count], x.stride()[:count], strict=True))
