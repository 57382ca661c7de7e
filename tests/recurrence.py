"""What the tests of the recurrence share: inputs, gradients, and every linear stage as arguments of the operator."""

import torch
import torch.nn.functional as F
from helpers import relative_error

from modeling_kda.delta_rule import chunk_delta_rule, recurrent_delta_rule
from modeling_kda.stages import STAGES

PATHS = {"recurrent": recurrent_delta_rule, "chunk": chunk_delta_rule}
NAMES = ("q", "k", "v", "beta", "log_decay", "state")
LINEAR_STAGES = {name: stage for name, stage in STAGES.items() if stage.mixer == "recurrent"}

# Largest error relative to the largest number: some hundred roundings of sums of up to a few thousand terms.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6}


def random_inputs(stage="kda", B=2, T=100, H=2, HV=None, K=16, V=16, N=None, decay=0.3, dtype=torch.float64, seed=0):
    """q, k, v, beta, log_decay, state as a layer of that stage would hand them over; always the same for one seed."""
    generator, HV, stage = torch.Generator().manual_seed(seed), HV or H, LINEAR_STAGES[stage]

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v, beta = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, HV, V), normal(B, T, HV).sigmoid()
    if stage.unit_keys:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    rates = {None: None, "head": 1, "channel": K}[stage.decay]
    log_decay = rates and -decay * torch.rand(B, T, HV, rates, generator=generator, dtype=torch.float64)
    inputs = q, k, v, None if stage.write == "one" else beta, log_decay, normal(N or B, HV, K, V)
    return cast(inputs, dtype)


def cast(inputs, dtype):
    return tuple(x if x is None else x.detach().to(dtype) for x in inputs)


def run_with_gradients(path, inputs, *, tokens=slice(None), seed=1, **options):
    """name -> output, final state and the gradient of every input, for a random loss on these tokens and the state."""
    inputs = [x if x is None else x.detach().requires_grad_() for x in inputs]
    o, state = path(*inputs, **options)
    generator = torch.Generator().manual_seed(seed)
    weight_o, weight_state = (torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (o, state))
    loss = (o * weight_o.to(o))[:, tokens].sum()
    if tokens == slice(None):
        loss = loss + (state * weight_state.to(state)).sum()
    given = {name: x for name, x in zip(NAMES, inputs, strict=True) if x is not None}
    grads = torch.autograd.grad(loss, list(given.values()), materialize_grads=True)
    return {"o": o, "final state": state, **{f"d{name}": x for name, x in zip(given, grads, strict=True)}}


def assert_same_results(actual, expected, tolerance):
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        error = relative_error(actual[name], x)
        assert error <= tolerance, f"{name}: relative error {error:.1e} is above {tolerance:.0e}"
