"""One function per operation, and the only place that knows which implementation runs it."""

import torch

from .delta_rule import chunk_delta_rule, recurrent_delta_rule


def delta_rule(q, k, v, beta=None, log_decay=None, state=None, *, erase, scale=None):
    """The recurrence of `delta_rule.py` by the fastest implementation for this call.

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V]. beta: [B, T, HV] or None. log_decay: [B, T, HV, 1 or K] or None.
        state: [B, HV, K, V], fp32, or None for an empty one.
        erase: whether a token first subtracts what its key already retrieves.
        scale: multiplier of q, K**-0.5 if not given.

    Returns: outputs [B, T, HV, V] in v's dtype, and the final state [B, HV, K, V] in fp32 (fp64 for fp64 inputs).
    """
    # one token: the step form reads and writes the state once; the chunk form would pad to a whole chunk
    path = recurrent_delta_rule if q.shape[1] == 1 else chunk_delta_rule
    return path(q, k, v, beta, log_decay, state, erase=erase, scale=scale)


def advance_state(k, v, beta, log_decay, state, *, erase):
    """Only the state after the given tokens (arguments as in `delta_rule`)."""
    return delta_rule(torch.zeros_like(k), k, v, beta, log_decay, state, erase=erase)[1]
