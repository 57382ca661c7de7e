"""The step form defines the recurrence; the chunk form equals it, forward and backward, whatever the gates."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import relative_error
from recurrence import (
    LINEAR_STAGES,
    NAMES,
    PATHS,
    TOLERANCE,
    assert_same_results,
    cast,
    random_inputs,
    run_with_gradients,
)

from modeling_kda.delta_rule import chunk_delta_rule, recurrent_delta_rule

DTYPES = [torch.float64, torch.float32]
LENGTHS = [1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 150]


def assert_equals_the_definition(inputs, dtype=torch.float64, factor=1, chunk_size=64, **options):
    """Chunk form in `dtype`, gradients included, against the step form in fp64 on the same numbers."""
    inputs = cast(inputs, dtype)
    expected = run_with_gradients(recurrent_delta_rule, cast(inputs, torch.float64), **options)
    actual = run_with_gradients(chunk_delta_rule, inputs, chunk_size=chunk_size, **options)
    assert_same_results(actual, expected, factor * TOLERANCE[dtype])


def assert_bitwise_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(actual[name], x), f"{name} differs by {(actual[name] - x).abs().max():.1e}"


# ---------------------------------------------------------------- the definition


def test_the_definition_is_the_recurrence():
    q, k, v, beta, log_decay, state = random_inputs("kda", B=1, T=3, H=1)
    o, final = recurrent_delta_rule(q, k, v, beta, log_decay, state, scale=0.5)
    S = state[0, 0]
    for t in range(3):
        S = torch.diag(log_decay[0, t, 0].exp()) @ S
        e = v[0, t, 0] - S.T @ k[0, t, 0]
        S = S + beta[0, t, 0] * torch.outer(k[0, t, 0], e)
        assert relative_error(o[0, t, 0], 0.5 * S.T @ q[0, t, 0]) < 1e-14
    assert relative_error(final[0, 0], S) < 1e-14


@pytest.mark.parametrize("stage", LINEAR_STAGES)
def test_absent_arguments_have_neutral_values(stage):
    q, k, v, *_ = random_inputs(stage, T=20)
    B, T, HV, V = v.shape
    for path in PATHS.values():
        o, state = path(q, k, v)
        zeros = v.new_zeros(B, HV, q.shape[-1], V)
        given = path(q, k, v, v.new_ones(B, T, HV), v.new_zeros(B, T, HV, 1), zeros, scale=q.shape[-1] ** -0.5)
        assert relative_error(o, given[0]) < 1e-14
        assert relative_error(state, given[1]) < 1e-14


@pytest.mark.parametrize("stage", LINEAR_STAGES)
@pytest.mark.parametrize("HV", [2, 6])
def test_decoding_one_token_equals_the_definition(stage, HV):
    inputs, erase = random_inputs(stage, B=3, T=1, HV=HV, V=24), LINEAR_STAGES[stage].erase
    expected = run_with_gradients(recurrent_delta_rule, inputs, erase=erase)
    with torch.no_grad():
        o, state = recurrent_delta_rule(*inputs, erase=erase)
    assert relative_error(o, expected["o"]) < 1e-14
    assert relative_error(state, expected["final state"]) < 1e-14


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("T", [1, 5])
def test_only_inplace_touches_the_state(T, inplace):
    *tokens, state = random_inputs(B=3, T=T, HV=4, dtype=torch.float32)
    before, expected = state.clone(), recurrent_delta_rule(*tokens, state.clone())
    o, new_state = recurrent_delta_rule(*tokens, state, inplace=inplace)
    assert torch.equal(o, expected[0])
    assert torch.equal(new_state, expected[1])
    assert (new_state is state) == inplace
    assert torch.equal(state, expected[1] if inplace else before)


def test_packed_states_in_place():
    *tokens, state = random_inputs(B=1, T=9, N=3)
    options = {"cu_seqlens": torch.tensor([0, 4, 4, 9])}
    expected = recurrent_delta_rule(*tokens, state.clone(), **options)[1]
    assert recurrent_delta_rule(*tokens, state, inplace=True, **options)[1] is state
    assert torch.equal(state, expected)


def test_decoding_from_a_state_in_any_memory_layout():
    *tokens, state = random_inputs(B=3, T=1, HV=4)
    expected = recurrent_delta_rule(*tokens, state)
    for dims in ((0, 1), (2, 3), (1, 3)):
        odd = state.transpose(*dims).contiguous().transpose(*dims)
        for actual, x in zip(recurrent_delta_rule(*tokens, odd), expected, strict=True):
            assert relative_error(actual, x) < 1e-14


# ---------------------------------------------------------------- chunk form = step form


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("stage", LINEAR_STAGES)
def test_chunks_equal_steps(stage, T, dtype):
    assert_equals_the_definition(random_inputs(stage, T=T), dtype, erase=LINEAR_STAGES[stage].erase)


@pytest.mark.parametrize("chunk_size", [16, 32, 48, 128])
def test_any_chunk_size(chunk_size):
    assert_equals_the_definition(random_inputs(T=150), chunk_size=chunk_size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", LINEAR_STAGES)
@pytest.mark.parametrize(("H", "HV", "K", "V"), [(2, 2, 60, 20), (2, 4, 12, 33), (1, 3, 7, 1), (3, 9, 1, 5)])
def test_head_groups_and_sizes(stage, H, HV, K, V, dtype):
    inputs = random_inputs(stage, T=70, H=H, HV=HV, K=K, V=V)
    assert_equals_the_definition(inputs, dtype, erase=LINEAR_STAGES[stage].erase, chunk_size=32)


def test_channels_decay_without_erasing():
    assert_equals_the_definition(random_inputs("kda"), erase=False)


def test_no_state_and_no_state_in_the_loss():
    inputs = (*random_inputs(T=70)[:5], None)
    expected = run_with_gradients(recurrent_delta_rule, inputs, tokens=slice(0, 70))
    assert_same_results(run_with_gradients(chunk_delta_rule, inputs, tokens=slice(0, 70)), expected, 1e-12)


@pytest.mark.parametrize("slab_bytes", [1, 2**14, 2**17])
def test_slabs_do_not_matter(slab_bytes, monkeypatch):
    monkeypatch.setattr("modeling_kda.delta_rule.SLAB_BYTES", slab_bytes)
    assert_equals_the_definition(random_inputs(B=3, T=70), chunk_size=16)
    cu_seqlens = torch.tensor([0, 40, 40, 57, 58, 130])
    assert_equals_the_definition(random_inputs(B=1, T=130, N=5), cu_seqlens=cu_seqlens, chunk_size=16)


def test_agrees_with_transformers():
    modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    q, k, v, beta, log_decay, state = random_inputs(T=100, dtype=torch.float32)
    peer = modeling.chunk_kimi_delta_attention(q, k, v, log_decay, beta, initial_state=state, output_final_state=True)
    for actual, expected in zip(chunk_delta_rule(q, k, v, beta, log_decay, state), peer, strict=True):
        assert relative_error(actual, expected) < TOLERANCE[torch.float32]


def quadratic_form(q, k, v, beta, log_decay, erase):
    """Every pair of tokens at once, without any state: [B, HV, T, T] weights."""
    B, T, HV, _ = v.shape
    q, k = (x.repeat_interleave(HV // x.shape[2], 2) for x in (q, k))
    q, k, v, beta, log_decay = (x.transpose(1, 2) for x in (q, k, v, beta[..., None], log_decay))
    since_start = log_decay.cumsum(2)
    future = torch.ones(T, T).triu(1).bool()[..., None]
    decay = (since_start[:, :, :, None] - since_start[:, :, None]).masked_fill(future, -math.inf).exp()
    overlap = beta * torch.einsum("bhid,bhjd,bhijd->bhij", k, k, decay.expand(-1, -1, -1, -1, k.shape[-1])).tril(-1)
    writes = torch.linalg.solve(torch.eye(T) + overlap, beta * v) if erase else beta * v
    scores = torch.einsum("bhid,bhjd,bhijd->bhij", q, k, decay.expand(-1, -1, -1, -1, k.shape[-1]))
    return (q.shape[-1] ** -0.5 * scores @ writes).transpose(1, 2)


@pytest.mark.parametrize("erase", [True, False])
@pytest.mark.parametrize("stage", ["gated_delta", "kda"])
def test_equals_the_quadratic_form(stage, erase):
    inputs = random_inputs(stage, T=70, HV=4)[:5]
    for path in PATHS.values():
        assert relative_error(path(*inputs, erase=erase)[0], quadratic_form(*inputs, erase)) < 1e-12


@pytest.mark.parametrize("first", PATHS)
@pytest.mark.parametrize("second", PATHS)
@pytest.mark.parametrize("cut", [1, 37, 64, 99])
def test_a_sequence_in_two_parts(first, second, cut):
    *tokens, state = random_inputs(T=100)
    o, final = recurrent_delta_rule(*tokens, state)
    o1, middle = PATHS[first](*(x[:, :cut] for x in tokens), state)
    o2, end = PATHS[second](*(x[:, cut:] for x in tokens), middle)
    assert relative_error(torch.cat((o1, o2), 1), o) < 1e-12
    assert relative_error(end, final) < 1e-12


# ---------------------------------------------------------------- gates and keys that break other forms


def gates(kind, like):
    """log_decay of the shape of `like`, of one kind."""
    T = like.shape[1]
    mixed = torch.where(torch.rand(like.shape, generator=torch.Generator().manual_seed(0)) < 0.5, 0.0, -316.0)
    every_tenth = (torch.arange(T) % 10 == 7)[None, :, None, None]
    early = (torch.arange(T) < T // 2)[None, :, None, None]
    kinds = {
        "none": torch.zeros(1),
        "1e-5": torch.tensor(-1e-5),
        "5": torch.tensor(-5.0),
        "5 to 60": -5 - 55 * torch.rand(like.shape, generator=torch.Generator().manual_seed(1)),
        "316": torch.tensor(-316.0),
        "mixed": mixed,
        "mixed over time": mixed[:, :, :1, :1],
        "early": torch.where(early, -316.0, -0.1),
        "reset": torch.where(every_tenth, -1e4, -0.1),
        "infinite": torch.where(every_tenth, -math.inf, -0.1),
    }
    return kinds[kind].to(like).expand_as(like).contiguous()


KINDS = ["none", "1e-5", "5", "5 to 60", "316", "mixed", "mixed over time", "early", "reset", "infinite"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", ["ssd", "gated_delta", "kda"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_gate(kind, stage, dtype):
    *inputs, log_decay, state = random_inputs(stage, T=100)
    inputs = (*inputs, gates(kind, log_decay), state)
    assert_equals_the_definition(inputs, dtype, erase=LINEAR_STAGES[stage].erase)


@pytest.mark.parametrize("stage", ["gated_delta", "kda"])
@pytest.mark.parametrize("T", [40, 150])
def test_soft_gates_after_strong_ones_are_exact(stage, T):
    """Differences of running sums that hold -316 per token would be wrong by 1e-3 here."""
    *inputs, log_decay, state = random_inputs(stage, T=T, dtype=torch.float32)
    log_decay[:, : T // 2] = -316
    inputs = (*inputs, log_decay, state)
    late = slice(T // 2, None)
    expected = run_with_gradients(recurrent_delta_rule, cast(inputs, torch.float64))
    actual = run_with_gradients(chunk_delta_rule, inputs)
    for name in ("o", "dlog_decay"):
        assert relative_error(actual[name][:, late], expected[name][:, late]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("value", [-316.0, -1e4, -math.inf])
def test_a_reset_forgets_everything(value):
    """Bitwise: whatever came before, outputs after a hard reset are the same, and no gradient passes it."""
    *inputs, log_decay, state = random_inputs(T=60, dtype=torch.float32)
    log_decay[:, 25] = value
    other = [torch.where((torch.arange(60) < 25).view(1, 60, *[1] * (x.ndim - 2)), x.flip(1), x) for x in inputs]
    one = run_with_gradients(chunk_delta_rule, (*inputs, log_decay, state), tokens=slice(25, 60))
    two = run_with_gradients(chunk_delta_rule, (*other, log_decay, 3 * state), tokens=slice(25, 60))
    assert torch.equal(one["o"][:, 25:], two["o"][:, 25:])
    for name in ("dq", "dk", "dv", "dbeta", "dlog_decay"):
        assert not one[name][:, :25].any()
    assert not one["dlog_decay"][:, 25].any()
    assert not one["dstate"].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strength", [1.0, 2.0])
@pytest.mark.parametrize("correlation", [0.95, 1.0])
@pytest.mark.parametrize("stage", ["delta", "kda"])
def test_keys_that_are_alike(stage, correlation, strength, dtype):
    """Powers of the triangular system overflow here; substitution does not."""
    q, k, v, beta, log_decay, state = random_inputs(stage, decay=1e-3)
    k = F.normalize(correlation * k[:, :1] + (1 - correlation**2) ** 0.5 * k, dim=-1)
    inputs = (q, k, v, torch.full_like(beta, strength), log_decay, state)
    # the system amplifies roundings: the step form in fp32 is off by as much
    assert_equals_the_definition(inputs, dtype, factor=5)


def test_a_positive_but_vanishing_decay_in_one_channel():
    *inputs, log_decay, state = random_inputs(T=70, dtype=torch.float32)
    log_decay = torch.zeros_like(log_decay)
    log_decay[..., 3] = math.log(1e-12)
    assert_equals_the_definition((*inputs, log_decay, state), torch.float32)


# ---------------------------------------------------------------- packed sequences

PACKED = {
    "empty ones first": [0, 0, 5],
    "empty ones between": [0, 15, 15, 15, 90, 91],
    "one token": [0, 1],
    "one token each": [0, 1, 2, 3, 4],
    "longest last": [0, 2, 18, 150],
    "longest first": [0, 130, 195, 196, 196],
    "nothing": [0, 0],
    "no sequence": [0],
}


@pytest.mark.parametrize("stage", LINEAR_STAGES)
@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_equal_each_alone(name, stage):
    bounds, erase = PACKED[name], LINEAR_STAGES[stage].erase
    *tokens, state = random_inputs(stage, B=1, T=bounds[-1], HV=4, N=len(bounds) - 1 or 1)
    state = state[: len(bounds) - 1]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    for path in PATHS.values():
        o, final = path(*tokens, state, erase=erase, cu_seqlens=cu_seqlens)
        assert final.shape == state.shape
        for n, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            one = (x if x is None else x[:, start:end] for x in tokens)
            o_n, final_n = recurrent_delta_rule(*one, state[n : n + 1], erase=erase)
            assert relative_error(o[:, start:end], o_n) < 1e-12
            assert relative_error(final[n : n + 1], final_n) < 1e-12
    assert_equals_the_definition((*tokens, state), erase=erase, cu_seqlens=cu_seqlens, chunk_size=32)


def test_many_packed_sequences():
    lengths = torch.randint(0, 6, (200,), generator=torch.Generator().manual_seed(0))
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
    inputs = random_inputs(B=1, T=int(cu_seqlens[-1]), N=200, H=1, K=4, V=4)
    assert_equals_the_definition(inputs, cu_seqlens=cu_seqlens, chunk_size=16)


@pytest.mark.parametrize("path", PATHS.values())
def test_no_tokens_leave_the_state_alone(path):
    inputs = random_inputs(T=0)
    o, state = path(*inputs)
    assert o.shape == inputs[2].shape
    assert torch.equal(state, inputs[5])
    assert state.data_ptr() != inputs[5].data_ptr()
    assert run_with_gradients(path, inputs)["dstate"].any()


# ---------------------------------------------------------------- bitwise properties


@pytest.mark.parametrize("chunk_size", [16, 64])
@pytest.mark.parametrize("position", [1, 16, 37, 70])
@pytest.mark.parametrize("stage", LINEAR_STAGES)
def test_the_future_changes_nothing(stage, position, chunk_size):
    """Outputs before an edit, and gradients of a loss on those outputs, are the same to the last bit."""
    options = {"tokens": slice(0, position), "erase": LINEAR_STAGES[stage].erase, "chunk_size": chunk_size}
    *tokens, state = random_inputs(stage, T=100, dtype=torch.float32)
    *others, _ = random_inputs(stage, T=100, dtype=torch.float32, decay=50.0, seed=5)
    edited = [
        x if x is None else torch.cat((x[:, :position], y[:, position:]), 1)
        for x, y in zip(tokens, others, strict=True)
    ]
    one = run_with_gradients(chunk_delta_rule, (*tokens, state), **options)
    two = run_with_gradients(chunk_delta_rule, (*edited, state), **options)
    assert torch.equal(one["dstate"], two["dstate"])
    for name in one.keys() - {"final state", "dstate"}:
        assert torch.equal(one[name][:, :position], two[name][:, :position]), name
        if name != "o":
            assert not one[name][:, position:].any(), name


@pytest.mark.parametrize("stage", LINEAR_STAGES)
def test_a_row_does_not_depend_on_its_batch(stage):
    erase = LINEAR_STAGES[stage].erase
    inputs = random_inputs(stage, B=3, T=70, dtype=torch.float32)
    together = chunk_delta_rule(*inputs, erase=erase)
    packed = [x if x is None else x.flatten(0, 1)[None] for x in inputs[:5]]
    packed = chunk_delta_rule(*packed, inputs[5], erase=erase, cu_seqlens=torch.tensor([0, 70, 140, 210]))
    for b in range(3):
        alone = chunk_delta_rule(*(x if x is None else x[b : b + 1] for x in inputs), erase=erase)
        assert torch.equal(together[0][b], alone[0][0])
        assert torch.equal(together[1][b], alone[1][0])
        assert torch.equal(packed[0][0, 70 * b : 70 * (b + 1)], alone[0][0])
        assert torch.equal(packed[1][b], alone[1][0])


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("stage", LINEAR_STAGES)
def test_not_a_number_stays_in_its_sequence(stage, poison):
    erase = LINEAR_STAGES[stage].erase
    inputs = random_inputs(stage, B=3, T=70, dtype=torch.float32)
    poisoned = [x if x is None else x.clone() for x in inputs]
    for x in poisoned:
        if x is not None:
            x[1, -1] = poison
    for shape in ("batch", "packed"):
        options = {"erase": erase}
        if shape == "packed":
            options["cu_seqlens"] = torch.tensor([0, 70, 140, 210])
            inputs, poisoned = (
                [*(y if y is None else y.flatten(0, 1)[None] for y in x[:5]), x[5]] for x in (inputs, poisoned)
            )
        clean = run_with_gradients(chunk_delta_rule, inputs, **options)
        dirty = run_with_gradients(chunk_delta_rule, poisoned, **options)
        for name, x in clean.items():
            per_sequence = (y.reshape(3, -1)[[0, 2]] for y in (dirty[name], x))
            assert torch.equal(*per_sequence), name


def test_the_same_call_gives_the_same_bits():
    inputs = random_inputs(T=150, HV=4, dtype=torch.float32)
    first = run_with_gradients(chunk_delta_rule, inputs)
    for _ in range(5):
        assert_bitwise_equal(run_with_gradients(chunk_delta_rule, inputs), first)


@pytest.fixture
def uninitialised_memory_is_nan():
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("stage", LINEAR_STAGES)
def test_nothing_uninitialised_is_read(stage, uninitialised_memory_is_nan):
    assert torch.empty(3).isnan().all()
    options = {"erase": LINEAR_STAGES[stage].erase}
    inputs = random_inputs(stage, T=70, HV=4)
    assert_equals_the_definition(inputs, **options)
    packed = [*(x if x is None else x[:1] for x in inputs[:5]), torch.cat((inputs[5], inputs[5][:1]))]
    assert_equals_the_definition(packed, cu_seqlens=torch.tensor([0, 20, 20, 70]), **options)


# ---------------------------------------------------------------- modes, dtypes, layouts


@pytest.mark.parametrize("path", PATHS.values())
@pytest.mark.parametrize("T", [1, 70])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(path, T, mode):
    inputs = random_inputs(T=T)
    expected = path(*(x.requires_grad_() for x in inputs))
    before = [x.detach().clone() for x in inputs]
    with mode():
        actual = path(*inputs)
    assert not any(x.requires_grad for x in actual)
    assert all(x.requires_grad for x in expected)
    for x, y in zip(actual, expected, strict=True):
        assert relative_error(x, y) < 1e-14
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True)), "an input was modified"


@pytest.mark.parametrize("path", PATHS.values())
def test_autocast_changes_nothing(path):
    inputs = random_inputs(T=40, dtype=torch.float32)
    expected = run_with_gradients(path, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_bitwise_equal(run_with_gradients(path, inputs), expected)
        with torch.no_grad():
            one_token = path(*(x[:, :1] for x in inputs[:5]), inputs[5])
    with torch.no_grad():
        expected = path(*(x[:, :1] for x in inputs[:5]), inputs[5])
    assert all(torch.equal(x, y) for x, y in zip(one_token, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("path", PATHS.values())
@pytest.mark.parametrize("T", [1, 70])
def test_low_precision_is_rounded_once(path, T, dtype):
    """Inputs are exact in fp32: the output is off by its own rounding, the state is not rounded."""
    *tokens, state = random_inputs(T=T, HV=4, dtype=dtype)
    inputs = (*tokens, state.float())
    expected = run_with_gradients(recurrent_delta_rule, cast(inputs, torch.float64))
    actual = run_with_gradients(path, inputs)
    with torch.no_grad():
        o, final = path(*inputs)
    assert o.dtype == actual["o"].dtype == dtype
    assert final.dtype == actual["final state"].dtype == torch.float32
    assert relative_error(final, expected["final state"]) < TOLERANCE[torch.float32]
    for name in ("o", "dq", "dk", "dv", "dbeta", "dlog_decay"):
        assert actual[name].dtype == dtype
        assert relative_error(actual[name], expected[name]) < 2 * torch.finfo(dtype).eps, name


@pytest.mark.parametrize("path", PATHS.values())
@pytest.mark.parametrize("name", NAMES)
def test_one_input_in_float64_is_enough(path, name):
    inputs = [
        x.double() if n == name else x for n, x in zip(NAMES, random_inputs(T=20, dtype=torch.float32), strict=True)
    ]
    o, state = path(*inputs)
    assert o.dtype == inputs[2].dtype
    assert state.dtype == torch.float64
    assert relative_error(state, recurrent_delta_rule(*cast(inputs, torch.float64))[1]) < 1e-12


@pytest.mark.parametrize("path", PATHS.values())
def test_memory_layout_does_not_matter(path):
    """Heads before time in memory, every second element, one number for all tokens."""
    inputs = list(random_inputs(T=70, HV=4, dtype=torch.float32))
    inputs[4] = inputs[4][:, :1].expand(-1, 70, -1, -1)
    odd = [
        inputs[0].transpose(1, 2).contiguous().transpose(1, 2),
        torch.stack((inputs[1], inputs[1]), -1)[..., 0],
        inputs[2].transpose(2, 3).contiguous().transpose(2, 3),
        inputs[3].T.contiguous().T if inputs[3].ndim == 2 else inputs[3].transpose(0, 2).contiguous().transpose(0, 2),
        inputs[4],
        inputs[5].transpose(2, 3).contiguous().transpose(2, 3),
    ]
    assert not any(x.is_contiguous() for x in odd)
    expected = run_with_gradients(path, [x.contiguous() for x in inputs])
    assert_same_results(run_with_gradients(path, odd), expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_one_input_alone(name):
    inputs = random_inputs(T=40)
    expected = run_with_gradients(chunk_delta_rule, inputs)
    alone = [x.requires_grad_(n == name) for n, x in zip(NAMES, cast(inputs, torch.float64), strict=True)]
    o, state = chunk_delta_rule(*alone)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (o, state)]
    ((o * weights[0]).sum() + (state * weights[1]).sum()).backward()
    for n, x in zip(NAMES, alone, strict=True):
        assert (x.grad is not None) == (n == name)
    assert torch.equal(alone[NAMES.index(name)].grad, expected[f"d{name}"])


def test_gradients_are_right_by_finite_differences():
    inputs = [x.requires_grad_() for x in random_inputs(B=1, T=18, H=1, HV=2, K=3, V=2)]
    assert torch.autograd.gradcheck(lambda *x: chunk_delta_rule(*x, chunk_size=16), inputs, fast_mode=True)


def test_no_second_derivative():
    q, *others = random_inputs(T=20)
    o, _ = chunk_delta_rule(q.requires_grad_(), *others)
    (grad,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_what_is_kept_for_the_backward_pass():
    """The inputs themselves, and per chunk and head one state and two C x C matrices."""
    inputs = [x.requires_grad_() for x in random_inputs(T=128, dtype=torch.float32)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        chunk_delta_rule(*inputs, chunk_size=32)
    own = [x for x in kept if x.data_ptr() not in {y.data_ptr() for y in inputs}]
    chunks_and_heads = 2 * 2 * 4
    assert sum(x.numel() for x in own) == chunks_and_heads * (16 * 16 + 2 * 32 * 32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", LINEAR_STAGES)
def test_the_same_on_a_gpu(stage, dtype):
    inputs, erase = random_inputs(stage, T=150, HV=4), LINEAR_STAGES[stage].erase
    expected = run_with_gradients(recurrent_delta_rule, inputs, erase=erase)
    inputs = [x if x is None else x.to("cuda", dtype) for x in inputs]
    for path in PATHS.values():
        actual = run_with_gradients(path, inputs, erase=erase)
        assert_same_results({name: x.cpu() for name, x in actual.items()}, expected, TOLERANCE[dtype])


# ---------------------------------------------------------------- refusals

WRONG = {
    "q of three dimensions": ({"q": torch.zeros(2, 9, 4)}, "q must be"),
    "k unlike q": ({"k": torch.zeros(2, 9, 2, 5)}, "k must be"),
    "v of another length": ({"v": torch.zeros(2, 8, 2, 4)}, "v must be"),
    "v heads no multiple": ({"v": torch.zeros(2, 9, 3, 4)}, "v must be"),
    "beta per channel": ({"beta": torch.zeros(2, 9, 2, 4)}, "beta must be"),
    "beta of the wrong heads": ({"beta": torch.zeros(2, 9, 1)}, "beta must be"),
    "decay without last dimension": ({"log_decay": torch.zeros(2, 9, 2)}, "log_decay must be"),
    "decay of the wrong channels": ({"log_decay": torch.zeros(2, 9, 2, 2)}, "log_decay must be"),
    "state transposed": ({"state": torch.zeros(2, 2, 4, 3)}, "state must be"),
    "state of another batch": ({"state": torch.zeros(1, 2, 3, 4)}, "state must be"),
    "integers": ({"q": torch.zeros(2, 9, 2, 3, dtype=torch.long)}, "floating point"),
    "complex numbers": ({"v": torch.zeros(2, 9, 2, 4, dtype=torch.complex64)}, "floating point"),
    "packed batch": ({"cu_seqlens": torch.tensor([0, 9])}, "cu_seqlens"),
}


@pytest.mark.parametrize("path", PATHS.values())
@pytest.mark.parametrize("case", WRONG)
def test_wrong_inputs_are_refused(path, case):
    changes, message = WRONG[case]
    right = {"q": torch.zeros(2, 9, 2, 3), "k": torch.zeros(2, 9, 2, 3), "v": torch.zeros(2, 9, 2, 4)}
    path(**right)
    with pytest.raises(ValueError, match=message):
        path(**{**right, **changes})


@pytest.mark.parametrize("path", PATHS.values())
@pytest.mark.parametrize(
    "bounds",
    [
        torch.tensor([1, 9]),
        torch.tensor([0, 8]),
        torch.tensor([0, 6, 4, 9]),
        torch.tensor([0.0, 9.0]),
        torch.tensor([[0, 9]]),
        torch.tensor([], dtype=torch.long),
        [0, 9],
    ],
)
def test_wrong_bounds_are_refused(path, bounds):
    q, v = torch.zeros(1, 9, 2, 3), torch.zeros(1, 9, 2, 4)
    with pytest.raises(ValueError, match="cu_seqlens"):
        path(q, q, v, cu_seqlens=bounds)


def test_inplace_is_refused_where_it_cannot_be():
    *tokens, state = random_inputs(T=1, dtype=torch.float32)
    states = [None, state.bfloat16(), state.transpose(2, 3), state.clone().requires_grad_()]
    for state in states:
        with pytest.raises(ValueError, match="inplace"):
            recurrent_delta_rule(*tokens, state, inplace=True)


@pytest.mark.parametrize("chunk_size", [0, -16, 8, 40])
def test_wrong_chunk_sizes_are_refused(chunk_size):
    q = torch.zeros(1, 9, 2, 3)
    with pytest.raises(ValueError, match="chunk_size"):
        chunk_delta_rule(q, q, q, chunk_size=chunk_size)
