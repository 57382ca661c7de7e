"""Exact relations between the linear stages, on the operator: outputs, final states and every gradient.

All start from a state that is not zero, with a length that is no multiple of the chunk and more value heads than keys.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import relative_error
from recurrence import LINEAR_STAGES, PATHS, TOLERANCE, assert_same_results, cast, random_inputs, run_with_gradients

from modeling_kda.delta_rule import chunk_delta_rule, recurrent_delta_rule

DTYPES = [torch.float64, torch.float32]
SHAPE = {"T": 83, "H": 2, "HV": 6, "K": 12, "V": 20}

every_path = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def gdn2(q, k, v, erase_strength, write_strength, log_decay, state):
    """Gated DeltaNet 2: erases with one strength per key channel and writes with one per value channel."""
    groups, o, S = v.shape[2] // q.shape[2], [], state
    q, k = (x.repeat_interleave(groups, 2) for x in (q, k))
    for t in range(q.shape[1]):
        S = log_decay[:, t].exp()[..., None] * S
        erased = (S * (erase_strength * k)[:, t, ..., None]).sum(2)
        S = S + k[:, t, ..., None] * ((write_strength * v)[:, t] - erased)[:, :, None]
        o.append((S * q[:, t, ..., None]).sum(2) * q.shape[-1] ** -0.5)
    return torch.stack(o, 1), S


@every_dtype
@every_path
def test_e12_kda_with_equal_channels_is_gated_deltanet(path, dtype):
    q, k, v, beta, log_decay, state = random_inputs("gated_delta", dtype=dtype, **SHAPE)
    gdn = run_with_gradients(path, (q, k, v, beta, log_decay, state))
    per_channel = log_decay.expand(-1, -1, -1, SHAPE["K"]).contiguous()
    kda = run_with_gradients(path, (q, k, v, beta, per_channel, state))
    kda["dlog_decay"] = kda["dlog_decay"].sum(-1, keepdim=True)
    assert_same_results(kda, gdn, TOLERANCE[dtype])


@every_dtype
@every_path
@pytest.mark.parametrize("rates", ["head", "channel"])
def test_e13_gated_deltanet_that_forgets_nothing_is_deltanet(rates, path, dtype):
    q, k, v, beta, _, state = random_inputs("delta", dtype=dtype, **SHAPE)
    deltanet = run_with_gradients(path, (q, k, v, beta, None, state))
    zeros = q.new_zeros(*v.shape[:3], {"head": 1, "channel": SHAPE["K"]}[rates])
    gated = run_with_gradients(path, (q, k, v, beta, zeros, state))
    assert gated.pop("dlog_decay").any()
    assert_same_results(gated, deltanet, TOLERANCE[dtype])


@every_dtype
@every_path
def test_e14_gdn2_with_one_strength_is_gated_deltanet(path, dtype):
    inputs = random_inputs("gated_delta", dtype=dtype, **SHAPE)

    def one_strength(q, k, v, beta, log_decay, state):
        return gdn2(q, k, v, beta[..., None], beta[..., None], log_decay, state)

    expected = run_with_gradients(one_strength, cast(inputs, torch.float64))
    assert_same_results(run_with_gradients(path, inputs), expected, TOLERANCE[dtype])


@every_dtype
@every_path
def test_e15_gdn2_that_erases_nothing_is_ssd(path, dtype):
    q, k, v, _, log_decay, state = random_inputs("ssd", dtype=dtype, **SHAPE)

    def erases_nothing(q, k, v, beta, log_decay, state):
        return gdn2(q, k, v, torch.zeros(1), torch.ones(1), log_decay, state)

    inputs = (q, k, v, None, log_decay, state)
    expected = run_with_gradients(erases_nothing, cast(inputs, torch.float64))
    assert_same_results(run_with_gradients(path, inputs, erase=False), expected, TOLERANCE[dtype])


@every_dtype
@every_path
def test_e16_ssd_that_forgets_nothing_with_unit_steps_is_linear_attention(path, dtype):
    """To the last bit."""
    q, k, v, _, _, state = random_inputs("linear", dtype=dtype, **SHAPE)
    linear = run_with_gradients(path, (q, k, v, None, None, state), erase=False)
    ones, zeros = v.new_ones(v.shape[:3]), v.new_zeros(*v.shape[:3], 1)
    ssd = run_with_gradients(path, (q, k, v, ones, zeros, state), erase=False)
    for name, x in linear.items():
        assert torch.equal(ssd[name], x), name
    # and that is the sum over all pairs
    q, k = (x.repeat_interleave(3, 2) for x in (q, k))
    pairs = torch.einsum("bihk,bjhk->bhij", q, k).tril()
    o = torch.einsum("bhij,bjhv->bihv", pairs, v) + torch.einsum("bihk,bhkv->bihv", q, state)
    assert relative_error(linear["o"], o * SHAPE["K"] ** -0.5) <= TOLERANCE[dtype]


@every_path
def test_e17_deltanet_approaches_linear_attention_with_slope_one(path):
    """As beta goes to 0 with values of v / beta, the error of outputs and gradients is proportional to beta."""
    q, k, v, beta, _, state = random_inputs("delta", **SHAPE)
    linear = run_with_gradients(path, (q, k, v, None, None, state), erase=False)
    errors = {name: [] for name in ("o", "final state", "dq", "dk", "dv")}
    strengths = [1e-3, 1e-4, 1e-5]
    for strength in strengths:

        def weak(q, k, v, beta, log_decay, state, strength=strength):
            return path(q, k, v / strength, torch.full_like(v[..., 0], strength), log_decay, state)

        delta = run_with_gradients(weak, (q, k, v, None, None, state))
        for name, error in errors.items():
            error.append(relative_error(delta[name], linear[name]))
    for name, error in errors.items():
        for larger, smaller in zip(error, error[1:], strict=False):
            assert abs(math.log10(larger / smaller) - 1) < 0.05, (name, error)


@every_dtype
@every_path
@pytest.mark.parametrize("K", [17, 40])
def test_e18_deltanet_recalls_orthonormal_keys_exactly(K, path, dtype):
    """beta = 1 and T <= K: nothing is erased, DeltaNet is linear attention, and every pair can be read back."""
    T, V = 17, 20
    q, k, v, beta, _, state = random_inputs("delta", T=T, H=2, HV=6, K=K, V=V, dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    basis = torch.linalg.qr(torch.randn(2, 2, K, K, generator=generator, dtype=torch.float64))[0].to(dtype)
    k = basis[..., :T].permute(0, 3, 1, 2).contiguous()
    # what the state holds along the other directions stays; along the keys it must be empty
    others = basis[..., T:] @ basis[..., T:].transpose(2, 3)
    state = others.repeat_interleave(3, 1) @ state
    ones = torch.ones_like(beta)
    delta = run_with_gradients(path, (q, k, v, ones, None, state))
    linear = run_with_gradients(path, (q, k, v, None, None, state), erase=False)
    # the gradients of k and state differ: linear attention does not read with k
    same = ("o", "final state", "dq", "dv")
    assert_same_results({name: delta[name] for name in same}, {name: linear[name] for name in same}, TOLERANCE[dtype])
    recalled = torch.einsum("bthk,bhkv->bthv", k.repeat_interleave(3, 2), delta["final state"])
    assert relative_error(recalled, v) <= TOLERANCE[dtype]


@every_dtype
@pytest.mark.parametrize("stage", LINEAR_STAGES)
@pytest.mark.parametrize("cuts", [[], [40], [1, 17, 64, 80]])
def test_e22_all_forms_agree_with_hand_over(cuts, stage, dtype):
    """Steps, chunks of any size, and chunks in pieces that hand over the state: forward and backward."""
    inputs, erase = random_inputs(stage, dtype=dtype, **SHAPE), LINEAR_STAGES[stage].erase
    expected = run_with_gradients(recurrent_delta_rule, cast(inputs, torch.float64), erase=erase)
    bounds = [0, *cuts, SHAPE["T"]]
    for chunk_size in (16, 64):

        def in_pieces(*inputs, chunk_size=chunk_size):
            *tokens, state = inputs
            outputs = []
            for start, end in zip(bounds, bounds[1:], strict=False):
                piece = (x if x is None else x[:, start:end] for x in tokens)
                o, state = chunk_delta_rule(*piece, state, erase=erase, chunk_size=chunk_size)
                outputs.append(o)
            return torch.cat(outputs, 1), state

        assert_same_results(run_with_gradients(in_pieces, inputs), expected, TOLERANCE[dtype])


@every_dtype
@every_path
def test_nothing_written_is_pure_decay(path, dtype):
    """beta = 0: the state only shrinks, by the product of all decays."""
    q, k, v, beta, log_decay, state = random_inputs("kda", dtype=dtype, **SHAPE)
    o, final = path(q, k, v, torch.zeros_like(beta), log_decay, state)
    decayed = log_decay.cumsum(1).exp()[..., None] * state[:, None]
    assert relative_error(final, decayed[:, -1]) <= TOLERANCE[dtype]
    q = q.repeat_interleave(3, 2)
    assert relative_error(o, torch.einsum("bthk,bthkv->bthv", q, decayed) * SHAPE["K"] ** -0.5) <= TOLERANCE[dtype]


@every_path
def test_the_key_of_a_written_value_returns_it(path):
    """beta = 1 and a key of unit length: read with the same key, the value comes back whatever was stored before."""
    q, k, v, beta, log_decay, state = random_inputs("kda", **SHAPE)
    k = F.normalize(k, dim=-1)
    o, _ = path(k, k, v, torch.ones_like(beta), log_decay, state, scale=1.0)
    assert relative_error(o, v) < 1e-12
