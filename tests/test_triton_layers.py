"""The kernels of the short convolution and the gated norm: outputs and every gradient against fp64."""

import pytest
import torch
from kernel_reference import (
    BUDGET,
    assert_close,
    assert_fits,
    convolution_loop,
    gated_norm,
    on_gpu,
    poison,
    recorded,
    run_interpreted,
)

pytest.importorskip("triton", reason="the kernels need triton")

from modeling_kda import triton_layers as layers  # noqa: E402

EPS = 1e-5


def check_gradients(function, reference, tensors, device, dtype):
    """Outputs and the gradients of a random projection of them agree with those of the reference in fp64."""
    placed = [None if x is None else x.to(device).requires_grad_() for x in tensors]
    exact = [None if x is None else x.detach().double().cpu().requires_grad_() for x in tensors]
    poison(device)
    y, expected = function(*placed), reference(*exact)
    assert y.dtype == dtype
    assert_close(y, expected, BUDGET[dtype])
    dy = torch.randn(expected.shape).to(dtype)
    given = [x for x in placed if x is not None]
    poison(device)
    gradients = torch.autograd.grad(y, given, dy.to(device))
    wanted = torch.autograd.grad(expected, [x for x in exact if x is not None], dy.double())
    for tensor, gradient, want in zip(given, gradients, wanted, strict=True):
        assert gradient.dtype == tensor.dtype
        # sums over the tokens and recomputed activations: a few roundings more than the output
        assert_close(gradient, want, 2 * BUDGET[dtype])


def packed_age(B, T):
    """Documents of random lengths, other ones in every row. The first may have begun before this call."""
    age = torch.zeros(B, T, dtype=torch.int64)
    for row in range(B):
        current = row
        for t in range(T):
            current = 0 if torch.rand(()) < 0.3 else current + 1
            age[row, t] = current
    return age


def check_convolution(
    B, T, C, taps, activation, *, window=True, packed=False, dtype=torch.float32, weight_dtype=None, device="cpu"
):
    tensors = [torch.randn(B, T, C).to(dtype), torch.randn(C, 1, taps).to(weight_dtype or dtype)]
    tensors.append(torch.randn(B, taps - 1, C).to(dtype) if window else None)
    age = packed_age(B, T) if packed else None
    check_gradients(
        lambda x, w, past: layers.triton_short_convolution(
            x, w, past, age=None if age is None else age.to(device), activation=activation
        )[0],
        lambda x, w, past: convolution_loop(x, w, past, age, activation),
        tensors,
        device,
        dtype,
    )


@pytest.mark.parametrize("activation", [None, "silu", "relu"])
@pytest.mark.parametrize("taps", [2, 3, 4])
def interpreted_convolution(taps, activation):
    check_convolution(2, 7, 5, taps, activation)


@pytest.mark.parametrize("window", [False, True])
def interpreted_convolution_packed(window):
    check_convolution(2, 19, 3, 4, "silu", window=window, packed=True)


@pytest.mark.parametrize("T", [1, 2, 32, 33, 70])
def interpreted_convolution_lengths(T):
    check_convolution(1, T, 2, 4, "silu", window=T % 2 == 0)


def interpreted_convolution_in_half_precision():
    check_convolution(1, 9, 4, 4, "silu", dtype=torch.float16)


def interpreted_fp32_weights_beside_half_precision():
    check_convolution(1, 9, 4, 4, "silu", dtype=torch.float16, weight_dtype=torch.float32)
    check_norm((1, 3, 2, 8), dtype=torch.float16, weight_dtype=torch.float32)


def interpreted_window_is_handed_on():
    check_pieces("cpu")


def check_pieces(device):
    """Any cut into calls gives what one call gives, and gradients flow through the window from call to call."""
    x, weight = torch.randn(2, 12, 6, device=device), torch.randn(6, 1, 4, device=device)
    whole_x, pieces_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    whole, last = layers.triton_short_convolution(whole_x, weight, activation="silu")
    window, outputs = None, []
    for piece in pieces_x.split([1, 2, 5, 4], 1):
        y, window = layers.triton_short_convolution(piece, weight, window, activation="silu")
        outputs.append(y)
    assert torch.equal(torch.cat(outputs, 1), whole)
    assert torch.equal(window, last) and torch.equal(last, x[:, -3:])
    dy = torch.randn_like(whole)
    whole.backward(dy)
    torch.cat(outputs, 1).backward(dy)
    assert_close(pieces_x.grad, whole_x.grad, BUDGET[torch.float32])


def interpreted_views():
    check_views("cpu")


def check_views(device):
    """A slice of a fused projection and a broadcast gradient give what contiguous copies give."""
    fused, weight = torch.randn(2, 9, 24, device=device), torch.randn(8, 1, 4, device=device, requires_grad=True)
    results = []
    for x in (fused[..., 8:16], fused[..., 8:16].contiguous()):
        x = x.detach().requires_grad_()
        y, _ = layers.triton_short_convolution(x, weight, activation="silu")
        results.append([y, *torch.autograd.grad(y.sum(), [x, weight])])
    for strided, plain in zip(*results, strict=True):
        assert torch.equal(strided, plain)


def check_norm(shape, *, gated=True, dtype=torch.float32, weight_dtype=None, device="cpu", scale=1.0):
    tensors = [scale * torch.randn(shape), torch.randn(shape[-1]), torch.randn(*shape[:-2], shape[-2] * shape[-1])]
    tensors = [x.to(kind) for x, kind in zip(tensors, (dtype, weight_dtype or dtype, dtype), strict=True)]
    check_gradients(
        lambda o, weight, gate: layers.triton_gated_norm(o, weight, gate, eps=EPS),
        lambda o, weight, gate: gated_norm(o, weight, None if gate is None else gate.view(o.shape), EPS),
        tensors if gated else [*tensors[:2], None],
        device,
        dtype,
    )


@pytest.mark.parametrize("shape", [(2, 3, 2, 16), (1, 1, 1, 3), (1, 70, 3, 60), (2, 2, 5, 7)])
@pytest.mark.parametrize("gated", [True, False])
def interpreted_norm(shape, gated):
    check_norm(shape, gated=gated)


@pytest.mark.parametrize("scale", [1e-3, 1e4])
def interpreted_norm_scales(scale):
    check_norm((1, 4, 2, 12), scale=scale)


def interpreted_empty():
    weight = torch.randn(4, 1, 3, requires_grad=True)
    y, window = layers.triton_short_convolution(torch.randn(2, 0, 4), weight, torch.ones(2, 2, 4))
    assert y.shape == (2, 0, 4) and torch.equal(window, torch.ones(2, 2, 4))
    (gradient,) = torch.autograd.grad(y.sum(), weight)
    assert torch.equal(gradient, torch.zeros_like(weight))
    assert layers.triton_gated_norm(torch.randn(2, 0, 1, 4), torch.ones(4), eps=EPS).shape == (2, 0, 1, 4)


def interpreted_errors():
    x, weight = torch.randn(1, 3, 4), torch.randn(4, 1, 4)
    for arguments, options in (
        ((x, weight[:3]), {}),
        ((x, torch.randn(4, 1, 5)), {}),
        ((x, weight, torch.randn(1, 2, 4)), {}),
        ((x, weight), {"age": torch.zeros(1, 2, dtype=torch.int64)}),
        ((x, weight), {"activation": "gelu"}),
        ((x.double(), weight), {}),
    ):
        assert layers.unsupported_convolution(*arguments, **options)
        with pytest.raises(ValueError):
            layers.triton_short_convolution(*arguments, **options)
    for arguments in ((x, torch.ones(3)), (x, torch.ones(4), torch.ones(3)), (x.double(), torch.ones(4))):
        assert layers.unsupported_norm(*arguments)
        with pytest.raises(ValueError):
            layers.triton_gated_norm(*arguments, eps=EPS)


def interpreted_operators_declare_what_they_do():
    check_operators("cpu")


def check_operators(device):
    """Shapes, dtypes, aliases and gradients, as torch checks them; with and without what is optional."""
    x, window = torch.randn(2, 5, 6, device=device), torch.randn(2, 3, 6, device=device)
    weight, age = torch.randn(6, 1, 4, device=device), packed_age(2, 5).to(device)
    x, window, weight = (tensor.requires_grad_() for tensor in (x, window, weight))
    o, gain, gate = torch.randn(2, 5, 3, 2, device=device), torch.randn(2, device=device), torch.randn_like(x)
    o, gain, gate = (tensor.requires_grad_() for tensor in (o, gain, gate))
    for optional in ((window, age), (None, None)):
        torch.library.opcheck(layers.short_convolution_op, (x, weight, *optional, 1))
    for optional in (gate, None):
        torch.library.opcheck(layers.gated_norm_op, (o, gain, optional, EPS))


def test_under_the_interpreter():
    run_interpreted(__file__)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_configuration_compiles_without_spilling(capability):
    launches = []
    with recorded(layers, launches):
        x, weight = torch.randn(1, 70, 256).bfloat16(), torch.randn(256, 1, 4).bfloat16().requires_grad_()
        window, age = torch.randn(1, 3, 256).bfloat16(), torch.zeros(1, 70, dtype=torch.int64)
        layers.triton_short_convolution(x, weight, activation="silu")[0].sum().backward()
        layers.triton_short_convolution(x, weight, window, age=age, activation="silu")[0].sum().backward()
        for V in (64, 128, 1000):
            o = torch.randn(9, V).bfloat16().requires_grad_()
            layers.triton_gated_norm(o, torch.randn(V), o, eps=EPS).sum().backward()
    assert len(launches) == 10
    for launch in launches:
        assert_fits(*launch, capability)


def test_refuses_the_cpu_without_the_interpreter():
    with pytest.raises(ValueError, match="CUDA"):
        layers.triton_short_convolution(torch.randn(1, 2, 4), torch.randn(4, 1, 4))
    with pytest.raises(ValueError, match="CUDA"):
        layers.triton_gated_norm(torch.randn(1, 4), torch.randn(4), eps=EPS)


@on_gpu
@pytest.mark.parametrize("dtype", BUDGET)
@pytest.mark.parametrize("taps,activation", [(2, "silu"), (3, "relu"), (4, None), (4, "silu"), (4, "relu")])
def test_convolution(taps, activation, dtype):
    for shape in ((2, 70, 304), (1, 600, 128), (3, 1, 39), (1, 2, 16)):
        check_convolution(*shape, taps, activation, dtype=dtype, device="cuda")
        check_convolution(*shape, taps, activation, dtype=dtype, device="cuda", window=False, packed=True)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp32_weights_beside_half_precision(dtype):
    check_convolution(2, 70, 304, 4, "silu", dtype=dtype, weight_dtype=torch.float32, device="cuda")
    check_norm((2, 37, 3, 128), dtype=dtype, weight_dtype=torch.float32, device="cuda")


@on_gpu
def test_convolution_of_packed_documents_with_a_window():
    check_convolution(2, 200, 304, 4, "silu", device="cuda", packed=True)


@on_gpu
def test_window_is_handed_on():
    check_pieces("cuda")


@on_gpu
def test_operators_declare_what_they_do():
    check_operators("cuda")


@on_gpu
def test_views():
    check_views("cuda")


@on_gpu
@pytest.mark.parametrize("dtype", BUDGET)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("V", [3, 16, 60, 64, 100, 128, 256, 1000])
def test_norm(V, gated, dtype):
    check_norm((2, 37, 3, V), gated=gated, dtype=dtype, device="cuda")


@on_gpu
def test_norm_with_many_rows():
    check_norm((4, 3000, 4, 128), device="cuda")


@on_gpu
def test_deterministic():
    x, weight = torch.randn(2, 2000, 384, device="cuda"), torch.randn(384, 1, 4, device="cuda", requires_grad=True)
    o, gain = torch.randn(9000, 128, device="cuda"), torch.randn(128, device="cuda", requires_grad=True)
    dy, do = torch.randn_like(x), torch.randn_like(o)
    runs = []
    for _ in range(10):
        y, _ = layers.triton_short_convolution(x, weight, activation="silu")
        (dweight,) = torch.autograd.grad(y, weight, dy)
        (dgain,) = torch.autograd.grad(layers.triton_gated_norm(o, gain, o, eps=EPS), gain, do)
        runs.append(torch.cat([y.detach().flatten(), dweight.flatten(), dgain]))
    assert all(torch.equal(run, runs[0]) for run in runs)


@on_gpu
def test_graph_replay():
    x, weight = torch.randn(1, 300, 256, device="cuda"), torch.randn(256, 1, 4, device="cuda")
    gain = torch.randn(256, device="cuda")

    def layer():
        y, window = layers.triton_short_convolution(x, weight, activation="silu")
        return layers.triton_gated_norm(y, gain, x, eps=EPS), window

    layer()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y, window = layer()
    x.copy_(torch.randn_like(x))
    graph.replay()
    expected, expected_window = layer()
    assert torch.equal(y, expected) and torch.equal(window, expected_window)


@on_gpu
def test_inside_torch_compile():
    x = torch.randn(2, 40, 64, device="cuda", requires_grad=True)
    weight, gain = torch.randn(64, 1, 4, device="cuda", requires_grad=True), torch.randn(64, device="cuda")

    def layer(x, weight):
        y, _ = layers.triton_short_convolution(x, weight, activation="silu")
        return layers.triton_gated_norm(y, gain, x, eps=EPS)

    compiled = torch.compile(layer, fullgraph=True)
    dy = torch.randn_like(x)
    for actual, expected in zip(
        [compiled(x, weight), *torch.autograd.grad(compiled(x, weight), [x, weight], dy)],
        [layer(x, weight), *torch.autograd.grad(layer(x, weight), [x, weight], dy)],
        strict=True,
    ):
        assert_close(actual, expected, BUDGET[torch.float32])
