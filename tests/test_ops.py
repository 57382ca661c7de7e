"""Which implementation runs a call: chosen by device, said once when it is not the fast one, and the same numbers."""

import pytest
import torch
from helpers import RECURRENT_PATTERNS, assert_same, tiny_model, tokens
from kernel_reference import run_interpreted

from modeling_kda import KDACache, ops

# two implementations in fp32: sums in another order, through a whole model and its backward pass
TWO_PATHS = 5e-5


def call(dtype=torch.float32, T=4, device="cpu"):
    q, k, v = torch.randn(3, 1, T, 2, 16, dtype=dtype, device=device)
    return q, k, v, None, None, None


@pytest.fixture
def warnings(monkeypatch):
    """Every line that is said, as often as it is said."""
    said = []
    # what warning_once calls, the first time that it gets a line
    monkeypatch.setattr(ops.logger, "warning", lambda line, *args, **kwargs: said.append(line))
    return said


def test_cpu_tensors_go_to_pytorch_silently_also_where_triton_is_installed(warnings):
    assert ops.find_kernel(*call()) is None
    assert warnings == []


@pytest.mark.parametrize("T", [1, 4])
def test_without_triton_the_kernels_are_named_missing_once_and_refused_if_insisted_on(T, monkeypatch, warnings):
    monkeypatch.setattr(ops, "triton_chunk_delta_rule", None)
    monkeypatch.setattr(ops, "BACKEND", "triton")
    with pytest.raises(ValueError, match="pip install triton"):
        ops.delta_rule(*call(T=T), erase=True)
    monkeypatch.setattr(ops, "BACKEND", "auto")
    assert ops.find_kernel(*call(T=T)) is None
    # as on a GPU, where the kernels would have been used
    reason = f"triton is not installed, T = {T}"
    assert [ops.fall_back("recurrence", reason) for _ in range(2)] == [None, None]
    assert len(warnings) == 1 and reason in warnings[0]


def test_insisting_on_kernels_that_cannot_run_a_call_is_an_error(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(ops, "BACKEND", "triton")
    with pytest.raises(ValueError, match="cannot run this call"):
        ops.delta_rule(*call(torch.float64), erase=True)


def test_insisting_holds_for_convolutions_and_norms(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(ops, "BACKEND", "triton")
    x, weight = torch.randn(1, 3, 4, dtype=torch.float64), torch.randn(4, 1, 4, dtype=torch.float64)
    for operation in (lambda: ops.short_convolution(x, weight), lambda: ops.gated_norm(x, weight[:, 0, 0])):
        with pytest.raises(ValueError, match="cannot run this call"):
            operation()
    # without a weight there is no norm, only a gate
    assert_same(ops.gated_norm(x, gate=x), x * x.sigmoid())


def test_one_launch_that_cannot_be_leaves_the_token_to_the_single_operations(monkeypatch):
    x, state = torch.randn(1, 1, 2, 16), torch.zeros(1, 2, 16, 16)
    for backend in ("torch", "auto", "triton"):
        monkeypatch.setattr(ops, "BACKEND", backend)
        y = ops.decode_step(x, x, x.double(), state, None, None, erase=True, unit_keys=True, write="one")
        assert y is None and not state.any()


def test_an_unknown_backend_is_named(monkeypatch):
    monkeypatch.setattr(ops, "BACKEND", "cuda")
    with pytest.raises(ValueError, match="KDA_BACKEND must be 'auto', 'torch' or 'triton', got 'cuda'"):
        ops.delta_rule(*call(), erase=True)


def test_asking_for_pytorch_is_honoured_silently(monkeypatch, warnings):
    monkeypatch.setattr(ops, "BACKEND", "torch")
    o, _ = ops.delta_rule(*call(), erase=True)
    assert torch.isfinite(o).all() and warnings == []


@pytest.mark.parametrize("T", [1, 4])
def test_a_state_is_overwritten_only_if_that_was_allowed(T):
    *tensors, _ = call(T=T)
    state = torch.randn(1, 2, 16, 16)
    for overwrite in (False, True):
        held = state.clone()
        o, new = ops.delta_rule(*tensors, held, erase=True, overwrite=overwrite)
        # only the form for single tokens gains from it
        assert (new is held) == (overwrite and T == 1)
        assert torch.equal(held, state) == (new is not held)
        expected, expected_new = ops.recurrent_delta_rule(*tensors, state, erase=True)
        assert_same(o, expected)
        assert_same(new, expected_new)
    # what cannot be overwritten is left alone
    turned = state.transpose(2, 3)
    assert ops.delta_rule(*tensors, turned, erase=True, overwrite=True)[1] is not turned
    assert ops.delta_rule(*call(torch.float64, T)[:5], state, erase=True, overwrite=True)[1].dtype == torch.float64


def test_decoding_overwrites_the_state_of_a_cache_unless_it_is_recorded_or_differentiated():
    model, ids = tiny_model("kda"), tokens(1, 6)
    for max_rollback, grad, stays in ((0, False, True), (4, False, True), (0, True, False)):
        cache = KDACache(model.config, max_rollback)
        with torch.set_grad_enabled(grad):
            model(ids[:, :5], cache=cache)
            before, layer = cache.layers[0].recurrent_states[0], cache.layers[0]
            assert layer.may_overwrite == (not grad and not max_rollback)
            model(ids[:, 5:], cache=cache)
        # recorded states too keep their address; those that gradients need are new
        assert (layer.recurrent_states[0].data_ptr() == before.data_ptr()) == stays


def both_backends(model, ids, set_backend):
    """Per backend: the logits of one pass, all gradients of its loss, and the logits of three cached calls."""
    results = []
    for backend in ("triton", "torch"):
        set_backend(backend)
        model.zero_grad()
        out = model(ids, labels=ids, use_cache=False)
        out.loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        cache = KDACache(model.config)
        with torch.no_grad():
            # a prompt in chunks, a draft in the verify form, one token
            parts = [model(part, cache=cache).logits for part in ids.split([ids.shape[1] - 7, 6, 1], 1)]
        results.append((out.logits.detach(), gradients, torch.cat(parts, 1)))
    return results


def assert_backends_agree(model, ids, set_backend, budget=TWO_PATHS):
    (logits, gradients, cached), (expected, expected_gradients, _) = both_backends(model, ids, set_backend)
    assert_same(logits, expected, budget)
    assert_same(cached, expected, budget)
    assert gradients.keys() == expected_gradients.keys()
    largest = max(g.abs().max() for g in expected_gradients.values())
    for name, expected_gradient in expected_gradients.items():
        error = (gradients[name] - expected_gradient).abs().max() / largest
        assert error <= budget, f"{name}: {error:.1e}"


@pytest.mark.parametrize("stage", ["linear", "kda"])
def interpreted_backends_agree(stage, monkeypatch):
    model, ids = tiny_model([stage]), tokens(1, 70)
    assert_backends_agree(model, ids, lambda backend: monkeypatch.setattr(ops, "BACKEND", backend))


def test_kernels_under_the_interpreter_give_the_logits_and_gradients_of_pytorch():
    pytest.importorskip("triton")
    run_interpreted(__file__)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("stages", RECURRENT_PATTERNS)
def test_kernels_give_the_logits_and_gradients_of_pytorch_on_a_gpu(stages, monkeypatch):
    model, ids = tiny_model(stages).cuda(), tokens(2, 150).cuda()
    assert_backends_agree(model, ids, lambda backend: monkeypatch.setattr(ops, "BACKEND", backend))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_call_takes_the_kernel_of_its_length_and_falls_back_aloud(warnings):
    short, long = call(T=4, device="cuda"), call(T=40, device="cuda")
    assert ops.find_kernel(*short) is ops.triton_recurrent_delta_rule
    assert ops.find_kernel(*long) is ops.triton_chunk_delta_rule
    assert ops.find_kernel(*call(torch.float64, device="cuda")) is None
    assert len(warnings) == 1
