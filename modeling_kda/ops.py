"""One function per operation, and the only place that knows which implementation runs it.

A call on a GPU goes to the Triton kernels where they can run it, everything else to PyTorch. The environment variable
KDA_BACKEND, read once, overrides that: `torch` never uses the kernels, `triton` insists on them.

A token of a cached sequence is one launch per layer (`decode_step`). In longer calls the convolutions, the recurrence,
and the norm with its gate have kernels of their own, and the activations of q, k, beta and the decays are inside those
of the recurrence where they are known there (`takes_logits`).
"""

import os
import re

import torch
from transformers.utils import is_torchdynamo_compiling, logging

from .delta_rule import chunk_delta_rule, recurrent_delta_rule
from .layers import gated_norm as torch_gated_norm
from .layers import short_convolution as torch_short_convolution
from .triton_launch import needs_gradients

try:
    from .triton_decode import MAX_TOKENS, run_decode_step, triton_recurrent_delta_rule, unsupported_step
    from .triton_decode import unsupported as unsupported_by_recurrent
    from .triton_delta_rule import triton_chunk_delta_rule, triton_chunk_delta_rule_from_logits
    from .triton_delta_rule import unsupported as unsupported_by_chunk
    from .triton_layers import run_gated_norm, run_short_convolution, unsupported_convolution, unsupported_norm
except ImportError:
    triton_chunk_delta_rule = triton_recurrent_delta_rule = None

logger = logging.get_logger(__name__)

# these can write the new state over the old one
STEPS = tuple(step for step in (recurrent_delta_rule, triton_recurrent_delta_rule) if step is not None)
BACKEND = os.environ.get("KDA_BACKEND", "auto")
# torch knows operators by name. The installed package and code loaded with a checkpoint can be in one process and need
# not agree, so each copy of this file has names of its own.
NAMESPACE = re.sub(r"\W", "_", __name__)


def short_convolution(x, weight, window=None, *, age=None, activation=None):
    """Causal depthwise convolution over time; arguments and result as in `layers.short_convolution`."""
    if asks_for_kernels(x):
        reason = why_not(lambda: unsupported_convolution(x, weight, window, age=age, activation=activation))
        if reason is None:
            return run_short_convolution(x, weight, window, age=age, activation=activation)
        fall_back("short convolution", reason)
    return torch_short_convolution(x, weight, window, age=age, activation=activation)


def gated_norm(o, weight=None, gate=None, *, eps=0.0):
    """RMSNorm(o) * weight * sigmoid(gate); arguments and result as in `layers.gated_norm`."""
    if asks_for_kernels(o) and weight is not None:
        reason = why_not(lambda: unsupported_norm(o, weight, gate))
        if reason is None:
            return run_gated_norm(o, weight, gate, eps=eps)
        fall_back("norm of the outputs", reason)
    return torch_gated_norm(o, weight, gate, eps=eps)


def decode_step(q, k, v, state, window, conv_weights, **arguments):
    """One token of a layer between its projections, in one launch: arguments and result of `triton_decode_step`; state
    and window are replaced. None, and nothing is replaced, where the kernel cannot run it: the operations one by one
    can, each by its own kernel or not.
    """
    if q.shape[1] != 1 or not asks_for_kernels(q) or triton_chunk_delta_rule is None:
        return None
    given = q, k, v, state, window, conv_weights
    return None if unsupported_step(*given, **arguments) else run_decode_step(*given, **arguments)


def takes_logits(q, k, v, beta_logits, gate_logits, state):
    """Whether `delta_rule_from_logits` runs this call."""
    if triton_chunk_delta_rule is None or not asks_for_kernels(q):
        return False
    tensors = q, k, v, beta_logits, gate_logits, state
    known = gate_logits is None or gate_logits.shape[-1] == q.shape[-1]
    # a few tokens without gradients are quicker, and their state more exact, in the step form
    return known and not _is_short(*tensors) and unsupported_by_chunk(*tensors) is None


def delta_rule_from_logits(
    q, k, v, beta_logits, state=None, gate_logits=None, A_log=None, dt_bias=None, lower_bound=None
):
    """The recurrence with its activations in the kernels, where `takes_logits`: q and k to unit length, beta and
    log-decays from their logits, as `triton_chunk_delta_rule_from_logits` says."""
    return triton_chunk_delta_rule_from_logits(
        q, k, v, beta_logits, gate_logits, A_log, dt_bias, state, lower_bound=lower_bound
    )


def delta_rule(q, k, v, beta=None, log_decay=None, state=None, *, erase, scale=None, overwrite=False):
    """The recurrence of `delta_rule.py` by the fastest implementation for this call.

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V]. beta: [B, T, HV] or None. log_decay: [B, T, HV, 1 or K] or None.
        state: [B, HV, K, V], fp32, or None for an empty one.
        erase: whether a token first subtracts what its key already retrieves.
        scale: multiplier of q, K**-0.5 if not given.
        overwrite: `state` is not needed any more and may be overwritten, which halves the time of a single token.

    Returns: outputs [B, T, HV, V] in v's dtype, and the final state [B, HV, K, V] in fp32 (fp64 for fp64 inputs).

    Raises: ValueError if KDA_BACKEND insists on kernels that cannot run this call.
    """
    tensors = q, k, v, beta, log_decay, state
    kernel = find_kernel(*tensors)
    if kernel is None and q.shape[1] == 1:
        # the step form reads and writes the state once; the chunk form would pad to a whole chunk
        kernel = recurrent_delta_rule
    if kernel in STEPS:
        fits = (
            state is not None and state.is_contiguous() and state.dtype == torch.promote_types(q.dtype, torch.float32)
        )
        return kernel(*tensors, erase=erase, scale=scale, inplace=overwrite and fits)
    if kernel is not None:
        return kernel(*tensors, erase=erase, scale=scale)
    if is_torchdynamo_compiling():
        return chunk_delta_rule_op(*tensors, erase, scale)
    return chunk_delta_rule(*tensors, erase=erase, scale=scale)


def find_kernel(*tensors):
    """The Triton function for this call of the recurrence, or None where PyTorch has to do it; why is said once."""
    if not asks_for_kernels(tensors[0]):
        return None
    short = triton_chunk_delta_rule is not None and _is_short(*tensors)
    reason = why_not(lambda: (unsupported_by_recurrent if short else unsupported_by_chunk)(*tensors))
    if reason is not None:
        return fall_back("recurrence", reason)
    return triton_recurrent_delta_rule if short else triton_chunk_delta_rule


def asks_for_kernels(x):
    """Whether calls with this tensor go to the Triton kernels where they can.

    Raises: ValueError if KDA_BACKEND is no word that is known.
    """
    if BACKEND not in ("auto", "torch", "triton"):
        raise ValueError(f"KDA_BACKEND must be 'auto', 'torch' or 'triton', got {BACKEND!r}")
    return BACKEND == "triton" or (BACKEND == "auto" and x.is_cuda)


def why_not(unsupported):
    """None, or why no kernel can run a call. unsupported: a function that says what it thinks of the call."""
    return "triton is not installed (pip install triton)" if triton_chunk_delta_rule is None else unsupported()


def fall_back(what, reason):
    """Say once that PyTorch computes something and why.

    Raises: ValueError if KDA_BACKEND insists on the kernels.
    """
    if BACKEND == "triton":
        raise ValueError(f"KDA_BACKEND=triton, but the kernels cannot run this call: {reason}")
    if not is_torchdynamo_compiling():
        logger.warning_once(f"The {what} runs in PyTorch, slower than with the Triton kernels: {reason}")


def _is_short(*tensors):
    return tensors[0].shape[1] <= MAX_TOKENS and not needs_gradients(*tensors)


def advance_state(k, v, beta, log_decay, state, *, erase):
    """Only the state after the given tokens (arguments as in `delta_rule`)."""
    return delta_rule(torch.zeros_like(k), k, v, beta, log_decay, state, erase=erase)[1]


@torch.library.custom_op(f"{NAMESPACE}::chunk_delta_rule", mutates_args=())
def chunk_delta_rule_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor | None,
    log_decay: torch.Tensor | None,
    state: torch.Tensor | None,
    erase: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`chunk_delta_rule` for torch.compile and torch.export, which must not look inside: what happens there depends on
    T, so a traced copy would hold for one length. The backward pass keeps the inputs and runs the forward pass again.
    """
    o, state = chunk_delta_rule(q, k, v, beta, log_decay, state, erase=erase, scale=scale)
    return o.contiguous(), state.contiguous()


@chunk_delta_rule_op.register_fake
def _(q, k, v, beta, log_decay, state, erase, scale):
    dtype = torch.float32
    for x in (q, k, v, beta, log_decay, state):
        dtype = dtype if x is None else torch.promote_types(dtype, x.dtype)
    return v.new_empty(v.shape), v.new_empty(v.shape[0], v.shape[2], q.shape[3], v.shape[3], dtype=dtype)


@torch.library.custom_op(f"{NAMESPACE}::chunk_delta_rule_backward", mutates_args=())
def chunk_delta_rule_backward_op(
    do: torch.Tensor,
    dstate: torch.Tensor,
    tensors: list[torch.Tensor],
    given: list[bool],
    erase: bool,
    scale: float | None,
) -> list[torch.Tensor]:
    """The gradients of those of q, k, v, beta, log_decay and state that were given: `tensors`, in this order."""
    tensors = [x.detach().requires_grad_() for x in tensors]
    with torch.enable_grad():
        results = chunk_delta_rule(*_spread(tensors, given), erase=erase, scale=scale)
    return [x.contiguous() for x in torch.autograd.grad(results, tensors, (do, dstate))]


@chunk_delta_rule_backward_op.register_fake
def _(do, dstate, tensors, given, erase, scale):
    return [x.new_empty(x.shape) for x in tensors]


def _setup_context(ctx, inputs, output):
    *tensors, ctx.erase, ctx.scale = inputs
    ctx.given = [x is not None for x in tensors]
    ctx.save_for_backward(*(x for x in tensors if x is not None))


def _backward(ctx, do, dstate):
    grads = chunk_delta_rule_backward_op(do, dstate, list(ctx.saved_tensors), ctx.given, ctx.erase, ctx.scale)
    return *_spread(grads, ctx.given), None, None


chunk_delta_rule_op.register_autograd(_backward, setup_context=_setup_context)


def _spread(tensors, given):
    """The tensors at the places where `given` is true, None elsewhere."""
    tensors = iter(tensors)
    return [next(tensors) if here else None for here in given]
