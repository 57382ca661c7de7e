"""A recurrent layer with its kernels is the layer without them: every stage, gate and kind of call.

On a CPU Triton's interpreter runs the kernels, on a GPU the device. Either way PyTorch on the same machine says what
is expected.
"""

import pytest
import torch
from helpers import assert_same, tiny_model, tokens
from kernel_reference import on_gpu, rmse, run_interpreted
from transformers import StaticCache

from modeling_kda import KDACache, ops, recurrent_mixer
from modeling_kda.recurrent_mixer import _is_untouched

pytest.importorskip("triton", reason="the kernels need triton")
from test_triton_chunk import BUDGETS  # noqa: E402

# two implementations in fp32: sums in another order, through a whole model and its backward pass
TWO_PATHS = 5e-5
BOUNDED = {"decay_gate": "lower_bound"}
CASES = {
    "kda": ("kda", {"short_conv_activation": "silu", "output_gate": "low_rank"}),
    "kda_bounded": ("kda", {**BOUNDED, "output_gate": "full", "num_value_heads": 2, "value_head_dim": 8}),
    "kda_bare": ("kda", {"short_conv_kernel_size": 0, "output_norm": False}),
    "kda_ungated_norm": ("kda", {"short_conv_kernel_size": 2, "short_conv_activation": "relu"}),
    "delta": ("delta", {"output_gate": "full"}),
    "ssd": ("ssd", {"short_conv_kernel_size": 3, "output_gate": "low_rank"}),
    "gated_delta": ("gated_delta", {"output_gate": "full", "num_value_heads": 2}),
    "linear": ("linear", {"output_gate": "low_rank", "output_norm": False}),
    "linear_hedgehog": ("linear", {"feature_map": "hedgehog"}),
}
KDA = ("kda", "kda_bounded")


def build(case, heads=1, layers=1, **overrides):
    stage, fields = CASES[case]
    sizes = {"hidden_size": 16 * heads, "num_attention_heads": heads, "intermediate_size": 16, "head_dim": 16}
    fields = {key: value * heads if key == "num_value_heads" else value for key, value in fields.items()}
    return tiny_model([stage] * layers, vocab_size=97, eos_token_id=None, **sizes, **fields, **overrides)


class Backends:
    """Runs a function with the kernels and without them, and counts the calls of kernels."""

    FUNCTIONS = ("run_decode_step", "triton_chunk_delta_rule_from_logits", "triton_chunk_delta_rule")
    FUNCTIONS += ("triton_recurrent_delta_rule", "run_short_convolution", "run_gated_norm")

    def __init__(self, monkeypatch):
        self.set = lambda name: monkeypatch.setattr(ops, "BACKEND", name)
        self.calls = {}
        for name in self.FUNCTIONS:
            # a kernel is told from PyTorch's function by what it is
            if name != "triton_recurrent_delta_rule":
                monkeypatch.setattr(ops, name, self._counted(name, getattr(ops, name)))

    def _counted(self, name, function):
        def call(*args, **kwargs):
            self.calls[name] = self.calls.get(name, 0) + 1
            return function(*args, **kwargs)

        return call

    def __call__(self, function):
        """What the function gives with PyTorch, and with the kernels."""
        self.set("torch")
        expected = function()
        assert self.calls == {}
        self.set("triton")
        actual = function()
        return actual, expected


@pytest.fixture
def backends(monkeypatch):
    return Backends(monkeypatch)


def gradients(model, ids, **inputs):
    """Logits of real tokens, and all gradients of the loss on what real tokens predict."""
    model.zero_grad()
    mask = inputs.get("attention_mask")
    labels = ids
    if mask is not None:
        # the first label has no token before it
        labels = ids.masked_fill((mask * mask.roll(1, 1)) == 0, -100)
    out = model(ids, labels=labels, use_cache=False, **inputs)
    out.loss.backward()
    logits = out.logits if mask is None else out.logits[mask.bool()]
    return logits.detach(), gradients_of(model)


def gradients_of(model):
    named = ((name.removeprefix("_orig_mod."), p.grad) for name, p in model.named_parameters())
    return {name: gradient.clone() for name, gradient in named if gradient is not None}


def assert_same_step(results, budget=TWO_PATHS):
    (logits, grads), (expected, expected_grads) = results
    assert_same(logits, expected, budget)
    assert grads.keys() == expected_grads.keys()
    largest = max(g.abs().max() for g in expected_grads.values())
    for name, gradient in expected_grads.items():
        error = (grads[name] - gradient).abs().max() / largest
        assert error <= budget, f"{name}: {error:.1e}"


def padding(B, T, device="cpu"):
    """One row padded on the left, one on the right, the others full."""
    mask = torch.ones(B, T, dtype=torch.int64, device=device)
    mask[0, :5], mask[1, -3:] = 0, 0
    return mask


def packing(T, device="cpu"):
    """Positions of three documents in a row, the first of one token."""
    return torch.cat([torch.arange(1), torch.arange(T - 8), torch.arange(7)])[None].to(device)


def in_parts(model, ids, sizes, cache, **inputs):
    with torch.no_grad():
        return torch.cat([model(part, cache=cache, **inputs).logits for part in ids.split(sizes, 1)], 1)


def check_training(backends, case, T, B=1, device="cpu", **build_options):
    model, ids = build(case, **build_options).to(device), tokens(B, T).to(device)
    assert_same_step(backends(lambda: gradients(model, ids)))
    calls, fields = backends.calls, CASES[case][1]
    convolutions = 0 if fields.get("short_conv_kernel_size") == 0 else 3
    assert calls.get("run_short_convolution", 0) == convolutions
    assert calls.get("run_gated_norm", 0) == fields.get("output_norm", True)
    inside = case.startswith(("kda", "delta"))
    assert calls.get("triton_chunk_delta_rule_from_logits", 0) == inside
    assert calls.get("triton_chunk_delta_rule", 0) == (not inside)


def check_decoding(backends, case, prompt, device="cpu", B=2, **build_options):
    """A prompt, a few tokens in one call, then single tokens; what the cache holds stays where it is."""
    model, ids = build(case, **build_options).to(device), tokens(B, prompt + 7).to(device)
    backends.set("torch")
    expected = in_parts(model, ids, [prompt + 7], None)
    backends.set("triton")
    cache = KDACache(model.config)
    assert_same(in_parts(model, ids[:, : prompt + 4], [prompt, 4], cache), expected[:, : prompt + 4], TWO_PATHS)
    layer = cache.layers[0]
    before = layer.recurrent_states[0].data_ptr(), layer.recurrent_states[0].clone()
    assert_same(in_parts(model, ids[:, prompt + 4 :], [1] * 3, cache), expected[:, prompt + 4 :], TWO_PATHS)
    assert cache.get_seq_length() == prompt + 7
    fused = CASES[case][0] != "linear"
    assert backends.calls.get("run_decode_step", 0) == 3 * fused
    assert layer.recurrent_states[0].data_ptr() == before[0]
    assert not torch.equal(layer.recurrent_states[0], before[1])


def check_padding(backends, case, T, device="cpu", **build_options):
    """Equal to PyTorch; and bit by bit what it is with other tokens in the padding, gradients too."""
    model, ids, mask = build(case, **build_options).to(device), tokens(2, T).to(device), padding(2, T, device)
    results = backends(lambda: gradients(model, ids, attention_mask=mask))
    assert_same_step(results)
    _assert_padding_counts_for_nothing(model, ids, mask, results[0])
    assert backends.calls["run_short_convolution"] == 6
    assert backends.calls.get("triton_chunk_delta_rule_from_logits", 0) == 2 * case.startswith(("kda", "delta"))


def _assert_padding_counts_for_nothing(model, ids, mask, results):
    logits, grads = gradients(model, ids.masked_fill(mask == 0, 7), attention_mask=mask)
    assert torch.equal(logits, results[0])
    for name, gradient in grads.items():
        if ".mixer." in name:
            assert torch.equal(gradient, results[1][name]), name


def check_packing(backends, case, T, device="cpu", **build_options):
    model, ids = build(case, **build_options).to(device), tokens(1, T).to(device)
    positions = packing(T, device)
    assert_same_step(backends(lambda: gradients(model, ids, position_ids=positions)))
    # documents forget everything at their start, which no gate of finite logits does
    assert "triton_chunk_delta_rule_from_logits" not in backends.calls
    backends.set("triton")
    logits = model(ids, position_ids=positions, use_cache=False).logits.detach()
    alone = model(ids[:, -7:], use_cache=False).logits.detach()
    assert_same(logits[:, -7:], alone, TWO_PATHS)


def check_generation(backends, case, prompt, device="cpu", **build_options):
    """A padded batch: the tokens are those of PyTorch, and after the prompt each is one launch per layer."""
    model, ids = build(case, **build_options).to(device), tokens(2, prompt).to(device)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "output_logits": True}

    def run():
        out = model.generate(ids, return_dict_in_generate=True, **options)
        return out.sequences, torch.stack(out.logits)

    (sequences, logits), (expected, expected_logits) = backends(run)
    assert torch.equal(sequences, expected)
    assert_same(logits, expected_logits, TWO_PATHS)
    assert backends.calls["run_decode_step"] == 3 * model.config.num_hidden_layers


def check_rollback(backends, case, prompt, device="cpu", **build_options):
    """Tokens that were taken back leave nothing; a cache that can take back is never overwritten."""
    model, ids = build(case, **build_options).to(device), tokens(1, prompt + 6).to(device)
    draft = tokens(1, 4, seed=5).to(device)

    def run():
        cache = KDACache(model.config, max_rollback=4)
        in_parts(model, torch.cat([ids[:, :prompt], draft], 1), [prompt, 4], cache)
        cache.crop(-4)
        return in_parts(model, ids[:, prompt:], [1, 4, 1], cache)

    actual, expected = backends(run)
    assert_same(actual, expected, TWO_PATHS)
    backends.set("torch")
    assert_same(expected, in_parts(model, ids, [prompt + 6], None)[:, prompt:], TWO_PATHS)
    assert "run_decode_step" not in backends.calls


def check_watched_layers(backends, device="cpu"):
    """A layer whose forward does more than ours, as hooks and wrappers make it, is called, not gone around."""
    model, ids = build("kda").to(device), tokens(1, 3).to(device)
    mixer = model.model.layers[0].mixer
    backends.set("triton")
    for module in (mixer.q_conv1d, mixer.o_norm, mixer.decay):
        seen = []
        handle = module.register_forward_hook(lambda module, args, y, seen=seen: seen.append(module))
        in_parts(model, ids, [2, 1], KDACache(model.config))
        handle.remove()
        assert seen == [module] * 2
    assert "run_decode_step" not in backends.calls
    in_parts(model, ids, [2, 1], KDACache(model.config))
    assert backends.calls["run_decode_step"] == 1


def check_gradients_through_the_cache(backends, device="cpu"):
    """With gradients a state is never overwritten, and they flow from call to call."""
    model, ids = build("kda").to(device), tokens(1, 6).to(device)

    def run():
        model.zero_grad()
        cache = KDACache(model.config)
        logits = torch.cat([model(part, cache=cache).logits for part in ids.split([5, 1], 1)], 1)
        logits.square().sum().backward()
        return logits.detach(), gradients_of(model)

    assert_same_step(backends(run))
    assert "run_decode_step" not in backends.calls


def compile_model(model, backend):
    """The compiled model, and the code of the graphs that torch makes of it."""
    torch._dynamo.reset()
    graphs = []

    def watched(graph, inputs):
        graphs.append(graph.code)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    return torch.compile(model, fullgraph=True, backend=watched), graphs


def check_compiled_training(monkeypatch, backend, case, device="cpu", budget=TWO_PATHS, **build_options):
    monkeypatch.setattr(ops, "BACKEND", "triton")
    model, ids = build(case, **build_options).to(device), tokens(1, 24).to(device)
    compiled, graphs = compile_model(model, backend)
    assert_same_step((gradients(compiled, ids), gradients(model, ids)), budget)
    (code,) = graphs
    assert "short_convolution" in code and "gated_norm" in code and "chunk_forward" in code


def check_compiled_decoding(monkeypatch, backend, case, device="cpu", budget=TWO_PATHS, **build_options):
    """One graph for all steps, with one launch per layer between the projections."""
    monkeypatch.setattr(ops, "BACKEND", "triton")
    model, ids = build(case, position_embedding="none", **build_options).to(device), tokens(1, 10).to(device)
    compiled, graphs = compile_model(model, backend)
    expected = in_parts(model, ids, [10], None)[:, 7:]
    cache = StaticCache(config=model.config, max_cache_len=24)
    in_parts(model, ids[:, :7], [7], cache)
    assert_same(in_parts(compiled, ids[:, 7:], [1] * 3, cache), expected, budget)
    (code,) = graphs
    assert code.count("decode_step") == model.config.num_hidden_layers
    assert "gated_norm" not in code and "short_convolution" not in code


@pytest.mark.parametrize("case", CASES)
def interpreted_training_step(backends, case):
    check_training(backends, case, 18)


@pytest.mark.parametrize("case", CASES)
def interpreted_decoding(backends, case):
    # a prompt of more than 16 tokens has the activations in the kernels
    check_decoding(backends, case, 17 if case == "kda_bounded" else 2, B=1)


@pytest.mark.parametrize("case", KDA)
def interpreted_padding(backends, case):
    check_padding(backends, case, 9)


def interpreted_packing(backends):
    check_packing(backends, "kda", 12)


def interpreted_generation(backends):
    check_generation(backends, "kda_bounded", 9)


def interpreted_rollback(backends):
    check_rollback(backends, "kda", 3)


def interpreted_watched_layers(backends):
    check_watched_layers(backends)


def interpreted_gradients_through_the_cache(backends):
    check_gradients_through_the_cache(backends)


def interpreted_compiled_decoding(monkeypatch):
    check_compiled_decoding(monkeypatch, "aot_eager", "kda")


def test_under_the_interpreter():
    run_interpreted(__file__)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_fp32_parameters_beside_half_precision(case, dtype):
    """As checkpoints of Kimi K3 hold them: gates, convolutions and norms of the outputs."""
    model, ids = half_precision(build(case, heads=2), dtype), tokens(2, 24)
    exact, grads = gradients(build(case, heads=2), ids)
    logits, half_grads = gradients(model, ids)
    assert logits.dtype == dtype and rmse(logits, exact) < 0.05
    kept = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight")
    for name, gradient in half_grads.items():
        assert gradient.dtype == (torch.float32 if name.endswith(kept) else dtype), name
        assert torch.isfinite(gradient).all() and gradient.any() == grads[name].any(), name
    assert rmse(in_parts(model, ids, [20, 3, 1], KDACache(model.config)), exact) < 0.05


def test_parameters_of_a_replaced_or_sharded_layer_are_left_to_its_forward():
    """accelerate replaces `forward`, FSDP2 and parametrizations the class."""
    decay = build("kda").model.layers[0].mixer.decay
    assert _is_untouched(decay)
    decay.forward = decay.forward
    assert not _is_untouched(decay)
    del decay.forward
    assert _is_untouched(decay)
    torch.nn.utils.parametrize.register_parametrization(decay, "A_log", torch.nn.Identity())
    assert not _is_untouched(decay)


GPU_MODEL = {"heads": 2, "layers": 2}
GPU = {"device": "cuda", **GPU_MODEL}


def half_precision(model, dtype=torch.bfloat16):
    """The gates, the convolutions and the norms of the outputs stay in fp32."""
    model.to(dtype)
    for name, module in model.named_modules():
        if name.endswith(("decay", "conv1d", "o_norm")):
            module.float()
    return model


class Jitter(torch.autograd.Function):
    """Noise on values and on gradients, relative to the root mean square of their last dimension."""

    @staticmethod
    def forward(ctx, x, values, gradients):
        ctx.size = gradients
        return Jitter.add(x, values)

    @staticmethod
    def backward(ctx, dx):
        return Jitter.add(dx, ctx.size), None, None

    @staticmethod
    def add(x, size):
        return x + size * torch.randn_like(x) * x.square().mean(-1, keepdim=True).sqrt()


def with_errors_of_the_kernel(delta_rule):
    """The recurrence in PyTorch with the errors that test_triton_chunk.py grants the kernel, in every direction."""
    outputs, inputs, gates = BUDGETS[torch.bfloat16]

    def run(q, k, v, beta=None, log_decay=None, state=None, **options):
        q, k, v = (Jitter.apply(x, 0.0, inputs) for x in (q, k, v))
        beta, log_decay = (None if x is None else Jitter.apply(x, 0.0, gates) for x in (beta, log_decay))
        o, state = delta_rule(q, k, v, beta, log_decay, state, **options)
        return Jitter.apply(o, outputs, 0.0), state

    return run


def expected_errors(model, ids, exact, monkeypatch, runs=4):
    """Per gradient, and for the logits, how far half precision and the kernel's errors take PyTorch from fp32."""
    with monkeypatch.context() as patch:
        patch.setattr(recurrent_mixer, "delta_rule", with_errors_of_the_kernel(recurrent_mixer.delta_rule))
        results = [gradients(model, ids) for _ in range(runs)]
    errors = {name: [rmse(grads[name], gradient) for _, grads in results] for name, gradient in exact[1].items()}
    errors["logits"] = [rmse(logits, exact[0]) for logits, _ in results]
    return {name: (sum(error**2 for error in each) / runs) ** 0.5 for name, each in errors.items()}


def check_half_precision(backends, case, T, monkeypatch, dtype, device):
    ids, layers = tokens(2, T).to(device), GPU_MODEL
    backends.set("torch")
    exact = gradients(build(case, **layers).to(device), ids)
    model = half_precision(build(case, **layers), dtype).to(device)
    expected = expected_errors(model, ids, exact, monkeypatch)
    logits, grads = backends(lambda: gradients(model, ids))[0]
    assert logits.dtype == dtype
    for name, error in expected.items():
        actual = rmse(logits, exact[0]) if name == "logits" else rmse(grads[name], exact[1][name])
        # one draw against the root mean square of four
        assert actual <= 3 * error + 1e-3, f"{name}: {actual:.1e}, expected {error:.1e}"


@on_gpu
@pytest.mark.parametrize("T", [18, 150])
@pytest.mark.parametrize("case", CASES)
def test_training_step(backends, case, T):
    # counts are for one layer
    check_training(backends, case, T, B=2, device="cuda", heads=2)


@on_gpu
@pytest.mark.parametrize("case", CASES)
def test_decoding(backends, case):
    check_decoding(backends, case, 70, device="cuda", heads=2)


@on_gpu
@pytest.mark.parametrize("case", [*KDA, "delta", "gated_delta", "ssd", "linear"])
def test_padding(backends, case):
    check_padding(backends, case, 90, device="cuda", heads=2)


@on_gpu
@pytest.mark.parametrize("case", CASES)
def test_packing(backends, case):
    check_packing(backends, case, 90, device="cuda", heads=2)


@on_gpu
@pytest.mark.parametrize("case", ["kda", "kda_bounded", "ssd", "gated_delta"])
def test_generation(backends, case):
    check_generation(backends, case, 40, **GPU)


@on_gpu
@pytest.mark.parametrize("case", ["kda", "ssd", "linear"])
def test_rollback(backends, case):
    check_rollback(backends, case, 20, device="cuda", heads=2)


@on_gpu
def test_watched_layers(backends):
    check_watched_layers(backends, "cuda")


@on_gpu
def test_gradients_through_the_cache(backends):
    check_gradients_through_the_cache(backends, "cuda")


@on_gpu
@pytest.mark.parametrize("case", ["kda", "kda_bounded", "gated_delta"])
@pytest.mark.parametrize("check", [check_compiled_training, check_compiled_decoding])
def test_compilation(monkeypatch, check, case):
    # fused kernels of torch round elsewhere
    check(monkeypatch, "inductor", case, budget=1e-3, **GPU)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_half_precision_is_as_exact_as_its_roundings(backends, case, dtype, monkeypatch):
    """Every gradient, also sums over tokens of what largely cancels, is as far from fp32 as roundings explain."""
    check_half_precision(backends, case, 150, monkeypatch, dtype, "cuda")


@on_gpu
@pytest.mark.parametrize("case", ["kda", "kda_bounded", "gated_delta", "ssd", "delta"])
def test_one_launch_decodes_what_one_pass_gives_in_bf16(backends, case):
    model, ids = half_precision(build(case, **GPU_MODEL)).cuda(), tokens(3, 48).cuda()
    exact = in_parts(build(case, **GPU_MODEL).cuda(), ids, [48], None)[:, 40:]
    backends.set("torch")
    plain = in_parts(model, ids, [48], None)[:, 40:]
    backends.set("triton")
    fused = in_parts(model, ids, [40, *[1] * 8], KDACache(model.config))[:, 40:]
    assert backends.calls["run_decode_step"] == 16
    budget = 2 * rmse(plain, exact) + model.config.num_hidden_layers * BUDGETS[torch.bfloat16][0]
    assert rmse(fused, exact) <= budget


@on_gpu
@pytest.mark.parametrize("case", ["kda", "gated_delta", "linear"])
def test_a_captured_step_decodes(backends, case):
    """A CUDA graph of one step of the whole model: nothing waits for the device, everything stays in its place."""
    model, ids = build(case, position_embedding="none", **GPU_MODEL).cuda(), tokens(2, 32).cuda()
    backends.set("triton")
    expected = in_parts(model, ids, [32], None)[:, 24:]
    cache = StaticCache(config=model.config, max_cache_len=32)
    token, logits = ids[:, :1].clone(), []
    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            # the first calls compile
            for _ in range(2):
                cache.reset()
                in_parts(model, ids[:, :23], [22, 1], cache)
        torch.cuda.synchronize()
        cache.reset()
        in_parts(model, ids[:, :24], [24], cache)
        graph = torch.cuda.CUDAGraph()
        held = [layer.recurrent_states[0].clone() for layer in cache.layers]
        with torch.cuda.graph(graph):
            captured = model(token, cache=cache).logits
        for layer, before in zip(cache.layers, held, strict=True):
            assert torch.equal(layer.recurrent_states[0], before)
        for t in range(24, 32):
            token.copy_(ids[:, t : t + 1])
            graph.replay()
            logits.append(captured.clone())
    assert_same(torch.cat(logits, 1), expected, TWO_PATHS)
