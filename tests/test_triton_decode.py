"""The decode kernels: against a token loop in fp64, under Triton's interpreter on any machine and on a CUDA device."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from kernel_reference import (
    BUDGET,
    FP32,
    assert_close,
    assert_fits,
    convolution_loop,
    delta_rule_loop,
    gated_norm,
    on_gpu,
    poison,
    recorded,
    run_interpreted,
)

pytest.importorskip("triton", reason="the kernels need triton")

from modeling_kda import triton_decode as decode  # noqa: E402

NORM_EPS = 1e-5
# decay, erase, beta: the rows of the stage table, and what the recurrence allows beside them
RULES = {
    "linear": (None, False, False),
    "delta": ("head", True, True),
    "ssd": ("head", False, True),
    "gated_linear": ("channel", False, False),
    "gated_delta": ("head", True, True),
    "kda": ("channel", True, True),
    "delta_without_decay": (None, True, True),
}
# lower bounds of the log-decays: mild, strong, and far below what exp can represent
MILD, STRONG, EXTREME = -0.1, -5.0, -316.0


def inputs(rule, B, T, H, HV, K, V, *, dtype=torch.float32, device="cpu", lowest=MILD, has_state=True):
    """(q, k, v, beta, log_decay, state), erase."""
    decay, erase, has_beta = RULES[rule]
    q, k = (F.normalize(torch.randn(B, T, H, K), dim=-1).to(dtype).to(device) for _ in range(2))
    v = torch.randn(B, T, HV, V).to(dtype).to(device)
    beta = torch.rand(B, T, HV).to(device) if has_beta else None
    log_decay = None
    if decay:
        log_decay = (torch.rand(B, T, HV, K if decay == "channel" else 1) * lowest).to(device)
        # channels that forget everything beside channels that forget nothing
        log_decay[..., ::3] *= 1e-4
    state = torch.randn(B, HV, K, V).to(device) if has_state else None
    return (q, k, v, beta, log_decay, state), erase


def check_rule(rule, *shape, dtype=torch.float32, device="cpu", **options):
    tensors, erase = inputs(rule, *shape, dtype=dtype, device=device, **options)
    poison(device)
    o, state = decode.triton_recurrent_delta_rule(*tensors, erase=erase)
    expected_o, expected_state = delta_rule_loop(*tensors, erase=erase)
    assert o.dtype == dtype and state.dtype == torch.float32
    assert_close(o, expected_o, BUDGET[dtype])
    assert_close(state, expected_state, FP32)


@pytest.mark.parametrize("rule", RULES)
def interpreted_every_rule(rule):
    check_rule(rule, 1, 2, 1, 2, 12, 20)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 16, 16), (2, 1, 1, 3, 5, 33), (1, 16, 1, 1, 33, 4), (1, 2, 1, 1, 1, 1), (1, 0, 1, 1, 4, 4)]
)
def interpreted_shapes(shape):
    check_rule("kda", *shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def interpreted_dtypes(dtype):
    check_rule("kda", 1, 2, 1, 2, 16, 16, dtype=dtype)


@pytest.mark.parametrize("lowest", [0.0, STRONG, EXTREME])
def interpreted_gates(lowest):
    check_rule("kda", 1, 4, 1, 2, 12, 8, lowest=lowest)


def interpreted_no_state():
    check_rule("gated_delta", 2, 3, 1, 2, 8, 8, has_state=False)


def interpreted_strided_inputs():
    check_strided("cpu")


def check_strided(device):
    """Views of one fused projection, heads-first tensors and broadcast gates give what contiguous copies give."""
    B, T, H, K, V = 2, 3, 2, 8, 8
    fused = torch.randn(B, T, H * (2 * K + V), device=device)
    q, k, v = (x.view(B, T, H, -1) for x in fused.split([H * K, H * K, H * V], -1))
    k = F.normalize(k.transpose(1, 2).contiguous(), dim=-1).transpose(1, 2)
    beta = torch.rand(T, H, device=device).expand(B, T, H)
    log_decay = -torch.rand(B, T, H, 1, device=device).expand(B, T, H, K)
    state = torch.randn(H, B, K, V, device=device).transpose(0, 1)
    views = q, k, v, beta, log_decay, state
    copies = [x.contiguous() for x in views]
    for strided, plain in zip(
        decode.triton_recurrent_delta_rule(*views), decode.triton_recurrent_delta_rule(*copies), strict=True
    ):
        assert torch.equal(strided, plain)


def interpreted_in_place():
    check_in_place("cpu")


def check_in_place(device):
    """Only the given slots of a pool change, and they become what the call returns otherwise."""
    tensors, _ = inputs("kda", 2, 1, 1, 2, 12, 8, device=device)
    _, expected = decode.triton_recurrent_delta_rule(*tensors)
    pool = torch.randn(5, 2, 12, 8, device=device)
    before = pool.clone()
    pool[1:3] = tensors[-1]
    _, state = decode.triton_recurrent_delta_rule(*tensors[:-1], pool[1:3], inplace=True)
    assert state.data_ptr() == pool[1:3].data_ptr()
    assert torch.equal(pool[1:3], expected)
    assert torch.equal(pool[[0, 3, 4]], before[[0, 3, 4]])


STEP_CASES = {
    "kda": {},
    "kda_bounded": {"lower_bound": -5.0},
    "kda_plain": {"taps": 0, "gate": False, "norm": False},
    "gated_delta": {"decay": "head", "taps": 3, "activation": "relu"},
    "delta": {"decay": None, "taps": 2, "activation": None},
    "ssd": {"decay": "head", "write": "step", "erase": False, "unit_keys": False},
    "adds": {"decay": "channel", "write": "one", "erase": False, "unit_keys": False, "gate": False},
}


def step_inputs(
    B,
    H,
    HV,
    K,
    V,
    *,
    dtype=torch.float32,
    device="cpu",
    decay="channel",
    taps=4,
    activation="silu",
    write="beta",
    erase=True,
    unit_keys=True,
    lower_bound=None,
    norm=True,
    gate=True,
    logit=2.0,
):
    """Positional and keyword arguments of `triton_decode_step`."""

    def random(*shape):
        return torch.randn(*shape).to(dtype).to(device)

    tensors = {"q": random(B, 1, H, K), "k": random(B, 1, H, K), "v": random(B, 1, HV, V)}
    tensors["state"] = torch.randn(B, HV, K, V).to(device)
    if taps:
        tensors["window"] = random(B, taps - 1, 2 * H * K + HV * V)
        tensors["conv_weights"] = [random(size, 1, taps) for size in (H * K, H * K, HV * V)]
    if write == "beta":
        tensors["beta_logits"] = random(B, 1, HV)
    if decay:
        channels = K if decay == "channel" else 1
        tensors["decay_logits"] = logit * random(B, 1, HV, channels)
        tensors["A_log"] = torch.randn(HV).to(device)
        tensors["dt_bias"] = torch.randn(HV * channels).to(device)
    if norm:
        tensors["norm_weight"] = random(V)
    if gate:
        tensors["gate_logits"] = random(B, 1, HV * V)
    options = {"erase": erase, "unit_keys": unit_keys, "write": write, "activation": activation}
    return tensors, {**options, "lower_bound": lower_bound, "eps": NORM_EPS}


def step_reference(tensors, options):
    """(y, state, window) of the layer step in fp64, written from the formulas."""
    x = tensors
    B, _, H, K = x["q"].shape
    parts = [x[name].double().flatten(2) for name in ("q", "k", "v")]
    window = None
    if "window" in x:
        sizes = [part.shape[-1] for part in parts]
        past = x["window"].double().split(sizes, -1)
        window = torch.cat([x["window"].double(), torch.cat(parts, -1)], 1)[:, 1:]
        parts = [
            convolution_loop(part, weight, before, activation=options["activation"])
            for part, weight, before in zip(parts, x["conv_weights"], past, strict=True)
        ]
    q, k, v = (part.view(B, 1, heads, -1) for part, heads in zip(parts, (H, H, x["v"].shape[2]), strict=True))
    if options["unit_keys"]:
        q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    beta = x["beta_logits"].double().sigmoid() if "beta_logits" in x else None
    log_decay = None
    if "decay_logits" in x:
        shifted = x["decay_logits"].double() + x["dt_bias"].double().view(x["decay_logits"].shape[2:])
        rate = x["A_log"].double().exp()[:, None]
        log_decay = -rate * F.softplus(shifted)
        if options["lower_bound"] is not None:
            log_decay = options["lower_bound"] * torch.sigmoid(rate * shifted)
        if options["write"] == "step":
            beta = F.softplus(shifted)[..., 0]
    o, state = delta_rule_loop(q, k, v, beta, log_decay, x["state"], erase=options["erase"])
    gate = x["gate_logits"].view(o.shape) if "gate_logits" in x else None
    return gated_norm(o, x.get("norm_weight"), gate, NORM_EPS).flatten(2), state, window


def check_step(*shape, dtype=torch.float32, device="cpu", **case):
    tensors, options = step_inputs(*shape, dtype=dtype, device=device, **case)
    expected_y, expected_state, expected_window = step_reference(tensors, options)
    poison(device)
    y = decode.triton_decode_step(**tensors, **options)
    assert y.dtype == dtype
    # the norm divides small outputs by their size, and with it their rounding errors
    assert_close(y, expected_y, BUDGET[dtype] * (2 if dtype == torch.float32 else 1))
    assert_close(tensors["state"], expected_state, FP32)
    if expected_window is not None:
        assert torch.equal(tensors["window"].double(), expected_window)


@pytest.mark.parametrize("case", STEP_CASES)
def interpreted_layer_step(case):
    check_step(2, 2, 2, 12, 20, **STEP_CASES[case])


@pytest.mark.parametrize("group", [2, 3])
def interpreted_layer_step_grouped(group):
    check_step(2, 2, 2 * group, 8, 12)


def interpreted_layer_step_dtypes():
    check_step(1, 1, 2, 16, 8, dtype=torch.bfloat16)


@pytest.mark.parametrize("logit", [0.01, 30.0, 400.0])
def interpreted_layer_step_gates(logit):
    check_step(1, 1, 2, 8, 8, logit=logit)
    check_step(1, 1, 2, 8, 8, logit=logit, lower_bound=-5.0)
    check_step(1, 1, 2, 8, 8, logit=logit, decay="head", write="step", erase=False, unit_keys=False)


def interpreted_several_steps():
    """Five steps of the layer kernel leave what five tokens leave: the window is handed on."""
    B, H, K, V, taps = 2, 1, 8, 8, 4
    runs = [step_inputs(B, H, H, K, V)[0] for _ in range(5)]
    options = step_inputs(B, H, H, K, V)[1]
    shared = {name: runs[0][name] for name in ("state", "conv_weights", "A_log", "dt_bias", "norm_weight")}
    shared["window"] = torch.zeros(B, taps - 1, H * (2 * K + V))
    expected = {"state": shared["state"].clone(), "window": shared["window"].clone()}
    for run in runs:
        tensors = {**run, **shared}
        y_expected, expected["state"], expected["window"] = step_reference({**tensors, **expected}, options)
        assert_close(decode.triton_decode_step(**tensors, **options), y_expected, 4 * FP32)
    assert_close(shared["state"], expected["state"], FP32)


def interpreted_errors():
    (q, k, v, beta, log_decay, state), _ = inputs("kda", 1, 2, 1, 2, 8, 8)
    assert decode.supports(q, k, v, beta, log_decay, state)
    wrong = {
        "on several shapes": (q, k[..., :4], v),
        "heads that do not divide": (q.expand(1, 2, 3, 8), k.expand(1, 2, 3, 8), v),
        "too many tokens": (q.expand(20, 2, 1, 8).reshape(1, 40, 1, 8),) * 3,
        "fp64": (q.double(), k.double(), v.double()),
        "beta": (q, k, v, beta[..., :1]),
        "log_decay": (q, k, v, beta, log_decay[..., :3]),
        "state": (q, k, v, beta, log_decay, state[:, :1]),
        "a gradient": (q.clone().requires_grad_(), k, v),
    }
    for what, arguments in wrong.items():
        assert not decode.supports(*arguments), what
        with pytest.raises(ValueError):
            decode.triton_recurrent_delta_rule(*arguments)
    with pytest.raises(ValueError, match="inplace"):
        decode.triton_recurrent_delta_rule(q, k, v, inplace=True)
    with pytest.raises(ValueError, match="replaced in place"):
        decode.triton_recurrent_delta_rule(q, k, v, beta, log_decay, state.transpose(2, 3), inplace=True)
    tensors, options = step_inputs(1, 1, 1, 8, 8)
    assert decode.supports_step(**tensors, **options)
    for change in ({"window": None}, {"A_log": None}, {"beta_logits": None}, {"state": tensors["state"].half()}):
        with pytest.raises(ValueError):
            decode.triton_decode_step(**{**tensors, **change}, **options)
    with pytest.raises(ValueError, match="activation"):
        decode.triton_decode_step(**tensors, **{**options, "activation": "gelu"})


def interpreted_operator_declares_what_it_does():
    check_operator("cpu")


def check_operator(device):
    """Shapes, dtypes and what it replaces, as torch checks them; with and without what is optional."""
    for taps in (4, 0):
        x, _ = step_inputs(1, 1, 2, 8, 4, device=device, taps=taps, norm=taps > 0)
        names = "q", "k", "v", "state", "window", "beta_logits", "decay_logits", "A_log", "dt_bias", "norm_weight"
        tensors = [x.get(name) for name in (*names, "gate_logits")]
        tensors[5:5] = x.get("conv_weights", [None] * 3)
        torch.library.opcheck(decode.decode_step_op, (*tensors, True, True, 1, 1, False, 0.0, 0.5, NORM_EPS))


def test_under_the_interpreter():
    run_interpreted(__file__)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_configuration_compiles_without_spilling(capability):
    launches = []
    with recorded(decode, launches):
        for B in (1, 100, 300):
            tensors, _ = inputs("kda", B, 1, 1, 4, 128, 128, dtype=torch.bfloat16)
            decode.triton_recurrent_delta_rule(*tensors)
        tensors, _ = inputs("gated_delta", 1, 4, 1, 1, 256, 256, dtype=torch.bfloat16)
        decode.triton_recurrent_delta_rule(*tensors)
        for sizes in ((128, 128), (256, 128), (64, 64), (100, 60)):
            tensors, options = step_inputs(1, 1, 1, *sizes, dtype=torch.bfloat16)
            decode.triton_decode_step(**tensors, **options)
    for launch in launches:
        assert_fits(*launch, capability)


def test_refuses_the_cpu_without_the_interpreter():
    tensors, _ = inputs("kda", 1, 1, 1, 1, 4, 4)
    with pytest.raises(ValueError, match="CUDA"):
        decode.triton_recurrent_delta_rule(*tensors)


@on_gpu
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", BUDGET)
def test_every_rule(rule, dtype):
    for T, group in ((1, 1), (1, 3), (5, 2), (16, 1)):
        check_rule(rule, 3, T, 2, 2 * group, 128, 128, dtype=dtype, device="cuda")


@on_gpu
@pytest.mark.parametrize("sizes", [*itertools.product([60, 100, 128], [60, 64, 256]), (16, 65), (256, 256), (8, 1)])
def test_head_sizes(sizes):
    # few, more and many heads take different configurations
    for B in (1, 100, 260):
        check_rule("kda", B, 2, 2, 4, *sizes, dtype=torch.bfloat16, device="cuda")
    check_rule("linear", 1, 1, 2, 4, *sizes, device="cuda", has_state=False)


@on_gpu
@pytest.mark.parametrize("lowest", [0.0, -1e-5, STRONG, EXTREME])
def test_gates(lowest):
    for rule in ("kda", "gated_delta", "ssd"):
        check_rule(rule, 2, 16, 2, 4, 128, 64, device="cuda", lowest=lowest)


@on_gpu
def test_many_sequences():
    check_rule("kda", 3000, 1, 1, 24, 16, 16, device="cuda")


@on_gpu
def test_strided_inputs():
    check_strided("cuda")


@on_gpu
def test_operator_declares_what_it_does():
    check_operator("cuda")


@on_gpu
def test_in_place():
    check_in_place("cuda")


@on_gpu
@pytest.mark.parametrize("case", STEP_CASES)
@pytest.mark.parametrize("dtype", BUDGET)
def test_layer_step(case, dtype):
    for shape in ((2, 2, 2, 128, 128), (1, 2, 6, 64, 64), (3, 1, 2, 100, 60), (2, 3, 3, 16, 16)):
        check_step(*shape, dtype=dtype, device="cuda", **STEP_CASES[case])


@on_gpu
@pytest.mark.parametrize("sizes", [(256, 64), (256, 128), (60, 100), (32, 128), (1, 8), (192, 96)])
def test_layer_step_head_sizes(sizes):
    check_step(2, 2, 4, *sizes, dtype=torch.bfloat16, device="cuda")


@on_gpu
@pytest.mark.parametrize("logit", [0.01, 30.0, 400.0])
def test_layer_step_gates(logit):
    check_step(2, 2, 2, 128, 128, device="cuda", logit=logit)
    check_step(2, 2, 2, 128, 128, device="cuda", logit=logit, lower_bound=-5.0)


@on_gpu
def test_batch_does_not_matter():
    """A sequence gets bitwise the same numbers alone and among others, whatever configuration the batch takes."""
    tensors, options = step_inputs(9, 2, 2, 128, 128, device="cuda")
    alone = {name: x[4:5].clone() if torch.is_tensor(x) and x.shape[0] == 9 else x for name, x in tensors.items()}
    y, y_alone = (decode.triton_decode_step(**each, **options) for each in (tensors, alone))
    assert torch.equal(y[4:5], y_alone)
    assert torch.equal(tensors["state"][4:5], alone["state"])
    many, _ = inputs("kda", 300, 2, 2, 4, 128, 128, device="cuda")
    one = [x[7:8] for x in many]
    for batched, single in zip(
        decode.triton_recurrent_delta_rule(*many), decode.triton_recurrent_delta_rule(*one), strict=True
    ):
        assert_close(batched[7:8], single, FP32)


@on_gpu
def test_deterministic():
    tensors, options = step_inputs(8, 4, 8, 128, 128, dtype=torch.bfloat16, device="cuda")
    runs = []
    for _ in range(20):
        copies = {name: x.clone() if torch.is_tensor(x) else x for name, x in tensors.items()}
        y = decode.triton_decode_step(**copies, **options)
        runs.append(torch.cat([y.float().flatten(), copies["state"].flatten(), copies["window"].float().flatten()]))
    assert all(torch.equal(run, runs[0]) for run in runs)


@on_gpu
def test_graph_replay():
    """A captured step replays on the same buffers: as many tokens as replays."""
    tensors, options = step_inputs(2, 2, 4, 128, 128, device="cuda")
    eager = {name: x.clone() if torch.is_tensor(x) else x for name, x in tensors.items()}
    decode.triton_decode_step(**{**tensors, "state": tensors["state"].clone()}, **options)
    tensors["window"].copy_(eager["window"])
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = decode.triton_decode_step(**tensors, **options)
    for _ in range(3):
        graph.replay()
        expected = decode.triton_decode_step(**eager, **options)
        assert torch.equal(y, expected)
    assert torch.equal(tensors["state"], eager["state"])
    assert torch.equal(tensors["window"], eager["window"])


@on_gpu
def test_no_host_synchronisation():
    tensors, options = step_inputs(2, 2, 2, 64, 64, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        decode.triton_decode_step(**tensors, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_gpu
def test_inside_torch_compile():
    tensors, options = step_inputs(2, 2, 2, 64, 64, device="cuda")
    x, _ = inputs("kda", 2, 2, 2, 2, 64, 64, device="cuda")

    def both(tensors, x):
        y = decode.triton_decode_step(**tensors, **options)
        return y, tensors["state"], tensors["window"], *decode.triton_recurrent_delta_rule(*x)

    results = []
    for function in (both, torch.compile(both, fullgraph=True)):
        copies = {name: y.clone() if torch.is_tensor(y) else y for name, y in tensors.items()}
        results.append(function(copies, [y.clone() for y in x]))
    for eager, compiled in zip(*results, strict=True):
        assert_close(compiled, eager.double(), FP32)
