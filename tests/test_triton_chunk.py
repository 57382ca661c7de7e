"""The chunked Triton path against the token loop in fp64: values, gradients, and what must hold bit by bit."""

import os

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from kernel_reference import assert_close, delta_rule_loop, on_gpu, poison, rmse, run_interpreted  # noqa: E402

from modeling_kda import triton_delta_rule as host  # noqa: E402
from modeling_kda.triton_launch import compiled_for, launch  # noqa: E402

RULES = {  # decay channels (K: per channel), erase, has beta
    "linear": (0, False, False),
    "delta": (0, True, True),
    "ssd": (1, False, True),
    "gated_delta": (1, True, True),
    "kda": ("K", True, True),
    "gla": ("K", False, False),
}
NAMES = ("q", "k", "v", "beta", "log_decay", "state")
# relative error of outputs and states; gradients of q, k, v, state; gradients of beta, log_decay
BUDGETS = {
    torch.float32: (1e-5, 1e-5, 2e-5),
    torch.bfloat16: (5e-3, 8e-3, 1.5e-2),
    # products are in bf16, which has to round inputs of fp16 once more
    torch.float16: (6e-3, 8e-3, 1.5e-2),
}
if os.environ.get("TRITON_INTERPRET") == "1":
    # the interpreter cuts bits off where the device rounds
    BUDGETS[torch.bfloat16] = (1e-2, 1.5e-2, 2e-2)


def make_inputs(
    rule="kda", T=100, H=1, group=1, K=16, V=16, B=1, N=None, dtype=torch.float32, lowest=-5.0, device="cpu", keys=0.0,
    key_dtype=None,
):  # fmt: skip
    """keys: how much of every key is the same vector. key_dtype: of q and k, where it is not that of v."""
    channels, erase, has_beta = RULES[rule]
    HV = H * group

    def random(*shape):
        return torch.randn(*shape, device=device)

    q = F.normalize(random(B, T, H, K), dim=-1).to(key_dtype or dtype)
    k = F.normalize((1 - keys) * random(B, T, H, K) + keys * random(1, 1, H, K), dim=-1).to(key_dtype or dtype)
    v = random(B, T, HV, V).to(dtype)
    beta = 2 * torch.rand(B, T, HV, device=device) if has_beta else None
    log_decay = lowest * (3 * random(B, T, HV, K if channels == "K" else 1)).sigmoid() if channels else None
    return [q, k, v, beta, log_decay, random(N or B, HV, K, V)], erase


def reference(tensors, erase, bounds):
    """The loop over each sequence; bounds: ends of the packed sequences, or None."""
    if bounds is None:
        return delta_rule_loop(*tensors, erase=erase)
    *inputs, state = tensors
    parts = []
    for n, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        pieces = [None if x is None else x[:, start:end] for x in inputs]
        parts.append(delta_rule_loop(*pieces, state[n : n + 1], erase=erase))
    return torch.cat([o for o, _ in parts], 1), torch.cat([s for _, s in parts])


def check(rule="kda", *, bounds=None, dtype=torch.float32, device="cpu", factor=1.0, **sizes):
    """Outputs, final state and all gradients within their budgets, each element written."""
    tensors, erase = make_inputs(rule, dtype=dtype, device=device, N=bounds and len(bounds) - 1, **sizes)
    ours = [None if x is None else x.clone().requires_grad_() for x in tensors]
    exact = [None if x is None else x.double().requires_grad_() for x in tensors]
    cu_seqlens = None if bounds is None else torch.tensor(bounds, device=device)
    poison(device)
    o, state = host.triton_chunk_delta_rule(*ours, erase=erase, cu_seqlens=cu_seqlens)
    expected = reference(exact, erase, bounds)
    do, d_state = torch.randn_like(o), torch.randn_like(state)
    torch.autograd.backward([o, state], [do, d_state])
    torch.autograd.backward(expected, [do.double(), d_state.double()])
    values, main, gates = (factor * x for x in BUDGETS[dtype])
    assert_close(o, expected[0], values)
    assert_close(state, expected[1], values)
    for name, a, b in zip(NAMES, ours, exact, strict=True):
        if a is not None:
            budget = gates if name in ("beta", "log_decay") else main
            assert a.grad.dtype == a.dtype
            assert rmse(a.grad, b.grad) <= budget, f"d{name}: {rmse(a.grad, b.grad):.1e} is above {budget:.0e}"


def from_logits(tensors, lower_bound, run):
    q, k, v, beta_logits, gate_logits, A_log, dt_bias, state = tensors
    if run is host.triton_chunk_delta_rule_from_logits:
        return run(q, k, v, beta_logits, gate_logits, A_log, dt_bias, state, lower_bound=lower_bound)
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    z = gate_logits + dt_bias.view(gate_logits.shape[2:])
    rate = A_log.exp()[:, None]
    log_decay = -rate * F.softplus(z) if lower_bound is None else lower_bound * (rate * z).sigmoid()
    return run(q, k, v, beta_logits.sigmoid(), log_decay, state, erase=True)


def check_logits(lower_bound, *, dtype=torch.float32, device="cpu", T=70, H=1, group=2, K=16, V=16):
    (q, k, v, *_, state), _ = make_inputs("kda", T, H, group, K, V, 2, dtype=dtype, device=device)
    HV = H * group
    shapes = ((2, T, HV), (2, T, HV, K), (HV,), (HV * K,))
    tensors = [3 * q, 0.1 * k, v, *(torch.randn(shape, device=device) for shape in shapes), state]
    ours, exact = [x.clone().requires_grad_() for x in tensors], [x.double().requires_grad_() for x in tensors]
    results = from_logits(ours, lower_bound, host.triton_chunk_delta_rule_from_logits)
    expected = from_logits(exact, lower_bound, delta_rule_loop)
    gradients = [torch.randn_like(x) for x in results]
    torch.autograd.backward(results, gradients)
    torch.autograd.backward(expected, [x.double() for x in gradients])
    values, _, gates = BUDGETS[dtype]
    for a, b in zip(results, expected, strict=True):
        assert_close(a, b, values)
    for a, b in zip(ours, exact, strict=True):
        assert_close(a.grad, b.grad, gates)


@pytest.mark.parametrize("rule", RULES)
def interpreted_every_rule(rule):
    check(rule, T=70, group=2, V=17)


def interpreted_bf16():
    check(T=70, dtype=torch.bfloat16)


@pytest.mark.parametrize("rule", ["kda", "gated_delta"])
def interpreted_fp32_keys_with_bf16_values(rule):
    check(rule, T=66, dtype=torch.bfloat16, key_dtype=torch.float32, factor=2)


@pytest.mark.parametrize("lowest", [-1e-5, -316.0, -1e4])
def interpreted_gates(lowest):
    check(T=66, lowest=lowest)


def interpreted_packed():
    check(T=90, bounds=[0, 0, 1, 66, 90, 90])


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def interpreted_logits(lower_bound):
    check_logits(lower_bound)


@pytest.mark.parametrize("lower_bound", [-0.5, -2.5, -5.0, -30.0])
def interpreted_levels_at_once(lower_bound):
    check_logits(lower_bound, dtype=torch.bfloat16)


def interpreted_identical_keys():
    check(T=70, keys=1.0, lowest=-1e-5, factor=20)


@pytest.mark.parametrize("rule", ["kda", "gated_delta", "ssd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def interpreted_segments(monkeypatch, rule, dtype):
    tensors, erase = make_inputs(rule, T=330, V=20, N=3, lowest=-0.05, dtype=dtype)
    bounds = [0, 90, 90, 330]
    monkeypatch.setattr(host, "num_segments", lambda p: 3)
    found = host.triton_chunk_delta_rule(*tensors, erase=erase, cu_seqlens=torch.tensor(bounds))
    for a, b in zip(found, reference(tensors, erase, bounds), strict=True):
        assert_close(a, b, BUDGETS[dtype][0])


@pytest.mark.parametrize("scale", [1e-7, 1e7])
def interpreted_scale_outside_of_fp16(scale):
    tensors, erase = make_inputs(T=20, dtype=torch.bfloat16)
    o = host.triton_chunk_delta_rule(*tensors, scale=scale)[0]
    assert_close(o, delta_rule_loop(*tensors, erase=erase, scale=scale)[0], BUDGETS[torch.bfloat16][0])


def interpreted_nothing():
    tensors, _ = make_inputs(T=0)
    o, state = host.triton_chunk_delta_rule(*tensors)
    assert o.shape == tensors[2].shape
    assert torch.equal(state, tensors[5])


def test_under_the_interpreter():
    run_interpreted(__file__)


def test_refuses_what_it_cannot_run():
    (q, k, v, *_), _ = make_inputs()
    with pytest.raises(ValueError, match="GPU"):
        host.triton_chunk_delta_rule(q, k, v)
    assert not host.supports(q, k, v)


@on_gpu
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", BUDGETS)
def test_rules(rule, dtype):
    # nothing that the delta rule stores decays, and neither do its errors
    factor = 1.5 if rule == "delta" else 1.0
    check(rule, T=200, H=2, group=2, K=128, V=128, dtype=dtype, device="cuda", factor=factor)
    check(rule, T=130, B=3, K=64, V=65, dtype=dtype, device="cuda")


@on_gpu
@pytest.mark.parametrize("rule", ["kda", "gated_delta"])
def test_fp32_keys_with_bf16_values(rule):
    check(rule, T=200, H=2, K=128, V=128, dtype=torch.bfloat16, key_dtype=torch.float32, device="cuda", factor=2)


@on_gpu
@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 500])
def test_lengths(T):
    check(T=T, H=2, K=128, V=128, dtype=torch.bfloat16, device="cuda")


@on_gpu
@pytest.mark.parametrize(("K", "V"), [(16, 32), (32, 16), (60, 100), (100, 60), (64, 256), (256, 64), (256, 256)])
def test_head_sizes(K, V):
    check(T=150, H=2, K=K, V=V, dtype=torch.bfloat16, device="cuda")
    # without decay, 150 random keys of few channels are so alike that erasing enlarges every rounding
    for rule in ("gated_delta", "ssd", *["delta"] * (K >= 60)):
        check(rule, T=150, H=2, K=K, V=V, dtype=torch.bfloat16, device="cuda")


@on_gpu
@pytest.mark.parametrize("rule", ["kda", "gated_delta", "delta"])
def test_the_largest_heads_in_fp32(rule):
    check(rule, T=150, H=2, K=256, V=64, device="cuda")


@on_gpu
@pytest.mark.parametrize("lowest", [0.0, -1e-5, -0.05, -20.0, -316.0, -1e4])
def test_gates(lowest):
    for rule in ("kda", "gated_delta", "ssd"):
        # below about -20 almost nothing of dlog_decay is left but rounding
        check(rule, T=200, H=2, K=128, V=64, dtype=torch.bfloat16, device="cuda", lowest=lowest, factor=2)
        check(rule, T=200, H=2, K=128, V=64, device="cuda", lowest=lowest, factor=4 if lowest > -1000 else 10)


def test_equal_launches_go_to_what_the_first_compiled():
    compiled, looks = {}, []

    class Kernel:
        arg_names = "x", "T", "BK", "DT"

        def __getitem__(self, grid):
            def compile_and_run(*args, **options):
                looks.append(options["BK"])
                return {grid: lambda *given: runs.append((*given, "again"))}

            return compile_and_run

    runs, kernel, grid = [], Kernel(), (1, 1, 1)
    for BK in (64, 128, 64):
        for T in (5, 6):
            launch(compiled, kernel, grid, ("x", T), {"DT": "bf16", "BK": BK, "num_warps": 4})
    assert looks == [64, 128]
    assert runs == [("x", 6, 64, "bf16", "again"), ("x", 6, 128, "bf16", "again"),
                    ("x", 5, 64, "bf16", "again"), ("x", 6, 64, "bf16", "again")]  # fmt: skip
    launch(compiled, Kernel(), grid, ("x", 5), {"DT": "bf16", "BK": 64, "num_warps": 4})
    assert looks == [64, 128, 64]


def test_tensors_that_compile_another_kernel_are_not_alike():
    x = torch.zeros(64, dtype=torch.bfloat16)
    alike = compiled_for(x, None)
    assert compiled_for(x[8:], None) is alike
    for others in ((x[1:], None), (x.half(), None), (x, x), (x,)):
        assert compiled_for(*others) is not alike


@on_gpu
def test_inputs_anywhere_in_memory():
    """Also after a call with the same shapes at multiples of 16 bytes, for which Triton compiles wider loads."""
    tensors, _ = make_inputs(T=130, H=2, K=64, V=64, dtype=torch.bfloat16, device="cuda")
    expected = host.triton_chunk_delta_rule(*tensors)
    moved = [None if x is None else torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in tensors]
    for a, b in zip(host.triton_chunk_delta_rule(*moved), expected, strict=True):
        assert_close(a, b, 1e-6)


@on_gpu
@pytest.mark.parametrize("keys", [0.8, 0.95, 1.0])
def test_correlated_keys(keys):
    # bf16 operands alone cost this much when the inverse is that ill-conditioned
    check(T=200, H=2, K=128, V=128, dtype=torch.bfloat16, device="cuda", lowest=-1e-3, keys=keys, factor=12)


@on_gpu
@pytest.mark.parametrize(
    "bounds", [[0, 15], [0, 256, 500, 1000], [0, 15, 100, 300], [0, 31, 96, 160], [0, 0, 5], [0, 1, 2, 3, 64, 64, 65]]
)
def test_packed(bounds):
    # of fifteen tokens the gradients of thirty rates are left, sums that nearly cancel
    factor = 2 if bounds[-1] == 15 else 1
    for rule in ("kda", "gated_delta", "linear"):
        check(rule, T=bounds[-1], H=2, K=64, V=64, bounds=bounds, dtype=torch.bfloat16, device="cuda", factor=factor)


@on_gpu
@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits(lower_bound, dtype):
    check_logits(lower_bound, dtype=dtype, device="cuda", T=300, K=128, V=128)


def record_segments(monkeypatch):
    """Splitting is on, and the number of runs of every call is noted."""
    found, num_segments = [], host.num_segments
    monkeypatch.setattr(host, "SPLIT_SEQUENCES", True)

    def record(p):
        found.append(num_segments(p))
        return found[-1]

    monkeypatch.setattr(host, "num_segments", record)
    return found


@on_gpu
@pytest.mark.parametrize("rule", ["kda", "gated_delta", "ssd"])
@pytest.mark.parametrize("bounds", [None, [0, 8192], [0, 20, 16384]])
def test_split_sequences(monkeypatch, rule, bounds):
    T = bounds[-1] if bounds else 8192
    tensors, erase = make_inputs(
        rule, T=T, H=1, N=bounds and len(bounds) - 1, K=128, V=128, dtype=torch.bfloat16, device="cuda", lowest=-0.02
    )
    cu_seqlens = None if bounds is None else torch.tensor(bounds, device="cuda")
    segments = record_segments(monkeypatch)
    poison("cuda")
    found = host.triton_chunk_delta_rule(*tensors, erase=erase, cu_seqlens=cu_seqlens)
    assert segments == [8]
    for a, b in zip(found, reference(tensors, erase, bounds), strict=True):
        assert_close(a, b, BUDGETS[torch.bfloat16][0])


@on_gpu
def test_split_sequences_like_whole_ones(monkeypatch):
    tensors, _ = make_inputs(T=65536, H=4, K=128, V=128, dtype=torch.bfloat16, device="cuda", lowest=-0.05)
    segments = record_segments(monkeypatch)
    poison("cuda")
    split = host.triton_chunk_delta_rule(*tensors)
    monkeypatch.setattr(host, "SPLIT_SEQUENCES", False)
    whole = host.triton_chunk_delta_rule(*tensors)
    assert segments == [16, 1]
    for a, b in zip(split, whole, strict=True):
        assert_close(a, b, BUDGETS[torch.bfloat16][0])


def run_rule(rule):
    """A function of inputs and the state that gives outputs; "softplus" and "bounded" are kda from logits."""
    if rule in RULES:
        return lambda *tensors: host.triton_chunk_delta_rule(*tensors, erase=RULES[rule][1])[0]
    bound = None if rule == "softplus" else -5.0
    A_log, dt_bias = torch.zeros(2, device="cuda"), torch.zeros(2 * 128, device="cuda")

    def run(*inputs_and_state):
        *inputs, state = inputs_and_state
        return from_logits([*inputs, A_log, dt_bias, state], bound, host.triton_chunk_delta_rule_from_logits)[0]

    return run


@on_gpu
@pytest.mark.parametrize("rule", ["delta", "gated_delta", "ssd", "kda", "gla", "softplus", "bounded"])
def test_the_future_changes_nothing(rule):
    run, shape = run_rule(rule), {"T": 300, "H": 2, "K": 128, "V": 128, "device": "cuda"}
    known = rule if rule in RULES else "kda"
    *inputs, state = make_inputs(known, dtype=torch.bfloat16, lowest=-20.0, **shape)[0]
    *others, _ = make_inputs(known, **shape)[0]
    for P in (37, 64, 201):
        changed = [
            None if x is None else torch.cat([x[:, :P], y[:, P:].to(x.dtype)], 1)
            for x, y in zip(inputs, others, strict=True)
        ]
        results = []
        for version in (inputs, changed):
            leaves = [None if x is None else x.clone().requires_grad_() for x in version]
            o = run(*leaves, state)
            o[:, :P].float().square().sum().backward()
            results.append([o.detach()[:, :P], *(x.grad[:, :P] for x in leaves if x is not None)])
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)


@on_gpu
def test_packing_batching_and_repeating_change_no_bit():
    tensors, _ = make_inputs(T=330, H=2, K=128, V=128, N=3, dtype=torch.bfloat16, device="cuda")
    *inputs, state = tensors
    cu_seqlens = torch.tensor([0, 100, 130, 330], device="cuda", dtype=torch.int32)
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed = host.triton_chunk_delta_rule(*inputs, state, cu_seqlens=cu_seqlens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for _ in range(5):
        again = host.triton_chunk_delta_rule(*inputs, state, cu_seqlens=cu_seqlens)
        assert all(torch.equal(a, b) for a, b in zip(packed, again, strict=True))
    alone = host.triton_chunk_delta_rule(*(x[:, 130:] for x in inputs), state[2:])
    assert torch.equal(packed[0][:, 130:], alone[0])
    assert torch.equal(packed[1][2:], alone[1])


@on_gpu
def test_graphs_and_compilation():
    tensors, _ = make_inputs(T=200, H=2, K=64, V=64, dtype=torch.bfloat16, device="cuda")
    leaves = [x.clone().requires_grad_() for x in tensors]

    def step(*inputs):
        o, state = host.triton_chunk_delta_rule(*inputs)
        return o.float().square().sum() + state.square().sum()

    expected = torch.autograd.grad(step(*leaves), leaves)
    compiled = torch.autograd.grad(torch.compile(step, fullgraph=True)(*leaves), leaves)
    for a, b in zip(compiled, expected, strict=True):
        assert_close(a, b, 1e-3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = host.triton_chunk_delta_rule(*tensors)
    graph.replay()
    again = host.triton_chunk_delta_rule(*tensors)
    assert torch.equal(o, again[0])
    assert torch.equal(state, again[1])
