"""The kernels of the mixture of attention residuals: outputs and every gradient against fp64."""

import pytest
import torch
from helpers import tiny_model, tokens
from kernel_reference import BUDGET, assert_close, assert_fits, on_gpu, poison, recorded, run_interpreted

pytest.importorskip("triton", reason="the kernels need triton")

from modeling_kda import ops, triton_residual  # noqa: E402
from modeling_kda.attention_residual import mix_sources  # noqa: E402
from modeling_kda.triton_residual import triton_mixture, unsupported  # noqa: E402

EPS = 1e-5
# Kimi K3: nine sources of 7168 channels
K3 = (9, 7168)


def exact(sources, direction, factor):
    """The formula in fp64, with all normed sources in memory."""
    stacked = torch.stack(sources)
    normed = stacked * (stacked.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return factor * ((normed @ direction).softmax(0)[..., None] * stacked).sum(0)


def check(N, D, rows=(1, 5), *, factor=1.0, dtype=torch.float32, device="cpu", size=1.0):
    sources = [(size * torch.randn(*rows, D)).to(dtype) for _ in range(N)]
    direction = torch.randn(D) * D**-0.5
    dy = torch.randn(*rows, D).to(dtype)
    wide = [x.double().requires_grad_() for x in (*sources, direction)]
    expected = exact(wide[:-1], wide[-1], factor)
    wanted = torch.autograd.grad(expected, wide, dy.double())
    placed = [x.to(device).requires_grad_() for x in (*sources, direction)]
    poison(device)
    y = triton_mixture(placed[:-1], placed[-1], eps=EPS, factor=factor)
    assert y.dtype == dtype
    assert_close(y, expected, BUDGET[dtype])
    poison(device)
    gradients = torch.autograd.grad(y, placed, dy.to(device))
    # relative to all of them: the gradient of the direction is nothing but rounding where there is one source
    largest = max(w.norm() for w in wanted)
    for tensor, gradient, want in zip(placed, gradients, wanted, strict=True):
        assert gradient.dtype == tensor.dtype
        error = (gradient.double().cpu() - want).norm() / (want.norm() if N > 1 else largest)
        assert error <= 4 * BUDGET[dtype], f"{error:.1e}"


@pytest.mark.parametrize("N, D", [(1, 8), (2, 3), (3, 24), (12, 10)])
def interpreted_sizes(N, D):
    check(N, D, factor=float(N) if N % 3 == 0 else 1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def interpreted_low_precision(dtype):
    check(3, 24, dtype=dtype)


@pytest.mark.parametrize("size", [1e-3, 1e3])
def interpreted_magnitudes(size):
    check(2, 24, rows=(1, 2), size=size)


def interpreted_several_programs(monkeypatch):
    monkeypatch.setattr(triton_residual, "TOKENS", 4)
    monkeypatch.setattr(triton_residual, "CHANNELS", 8)
    check(2, 20, rows=(1, 10))


def interpreted_nothing_and_views():
    direction = torch.randn(8)
    assert triton_mixture([torch.randn(2, 0, 8)] * 2, direction, eps=EPS).shape == (2, 0, 8)
    views = [torch.randn(2, 8, 5).transpose(1, 2) for _ in range(2)]
    mixed = triton_mixture(views, direction, eps=EPS)
    assert torch.equal(mixed, triton_mixture([x.contiguous() for x in views], direction, eps=EPS))
    assert_close(mixed, mix_sources(views, direction, eps=EPS), BUDGET[torch.float32])


def interpreted_one_source_comes_back_as_it_is():
    x = torch.randn(2, 5, 8)
    assert torch.equal(triton_mixture([x], torch.randn(8), eps=EPS), x)


def interpreted_errors():
    x, direction = torch.randn(2, 5, 8), torch.randn(8)
    for sources, u in (
        ([], direction),
        ([x] * 13, direction),
        ([x, x[:, :4]], direction),
        ([x, x.half()], direction),
        ([x.double()], direction),
        ([x], direction[:4]),
        ([x], direction.half()),
        ([torch.randn(1, 8200)], torch.randn(8200)),
    ):
        assert unsupported(sources, u)
        with pytest.raises(ValueError):
            triton_mixture(sources, u, eps=EPS)


def interpreted_operators_declare_what_they_do():
    check_operators("cpu")


def check_operators(device):
    """Shapes, dtypes, aliases and gradients, as torch checks them."""
    sources = [torch.randn(2, 3, 8, device=device, requires_grad=True) for _ in range(3)]
    direction = torch.randn(8, device=device, requires_grad=True)
    torch.library.opcheck(triton_residual.mixture_op, (sources, direction, EPS, 3.0))


def small_model():
    fields = {"attention_residual": "block", "attention_residual_block_size": 1, "residual_scale": True}
    return tiny_model(["softmax"] * 2, hidden_size=16, intermediate_size=16, **fields)


def interpreted_model():
    check_model("cpu")


def check_model(device):
    """A model with the kernels is the model without them, gradients included."""
    results, backend = [], ops.BACKEND
    for ops.BACKEND in ("torch", "triton"):
        model, ids = small_model().to(device), tokens(1, 4).to(device)
        output = model(ids, labels=ids)
        output.loss.backward()
        results.append([output.logits, *(p.grad for p in model.parameters())])
    ops.BACKEND = backend
    largest = max(x.abs().max() for x in results[0])
    for got, expected in zip(*results[::-1], strict=True):
        assert (got - expected).abs().max() <= 1e-5 * largest


def test_under_the_interpreter():
    run_interpreted(__file__)


@pytest.mark.parametrize("capability", [80, 90])
def test_every_configuration_compiles_without_spilling(capability):
    launches = []
    with recorded(triton_residual, launches):
        for N, D in ((2, 64), K3):
            sources = [torch.randn(3, D).bfloat16().requires_grad_() for _ in range(N)]
            triton_mixture(sources, torch.randn(D, requires_grad=True), eps=EPS).sum().backward()
    assert len(launches) == 6
    for launch in launches:
        assert_fits(*launch, capability)


@on_gpu
@pytest.mark.parametrize("dtype", BUDGET)
def test_sizes(dtype):
    for N, D in ((1, 64), (2, 39), (5, 768), (12, 2304), K3, (3, 8192)):
        check(N, D, (2, 70), factor=float(N), dtype=dtype, device="cuda")


@on_gpu
def test_many_rows():
    check(9, 256, (4, 3000), device="cuda")


@on_gpu
def test_operators():
    check_operators("cuda")


@on_gpu
def test_model():
    check_model("cuda")


@on_gpu
def test_deterministic_and_captured():
    sources = [torch.randn(2, 3000, 512, device="cuda", requires_grad=True) for _ in range(4)]
    direction = torch.randn(512, device="cuda", requires_grad=True)
    runs = []
    for _ in range(5):
        y = triton_mixture(sources, direction, eps=EPS)
        runs.append([y.detach(), *torch.autograd.grad(y.sum(), [*sources, direction])])
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))
    fixed = [x.detach().clone() for x in sources]
    with torch.no_grad():
        triton_mixture(fixed, direction, eps=EPS)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = triton_mixture(fixed, direction, eps=EPS)
        fixed[0].normal_()
        graph.replay()
        assert torch.equal(y, triton_mixture(fixed, direction, eps=EPS))


@on_gpu
def test_inside_torch_compile():
    model, ids = small_model().cuda(), tokens(1, 4).cuda()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected, got = model(ids, labels=ids), compiled(ids, labels=ids)
    assert_close(got.logits, expected.logits, 1e-5)
    got.loss.backward()
    assert all(p.grad is not None for p in model.parameters())
