"""torch.compile and torch.export: whole graphs, equal numbers, no compilation per length or step, fixed addresses."""

import importlib.util
import sys

import pytest
import torch
from helpers import assert_same, tiny_model, tokens
from transformers import CompileConfig, StaticCache

from modeling_kda import ops

LENGTH = 32
# fused kernels round elsewhere, and a difference feeds back through the tokens that follow
COMPILED = 1e-3
# few layers: tracing is what takes the time
HYBRID = ["kda", "softmax", "gated_delta"]
EVERY_KIND = {"softmax": ["softmax"], "linear": ["linear"], "ssd": ["ssd"], "kda": ["kda", "kda"], "hybrid": HYBRID}


@pytest.fixture(autouse=True)
def nothing_compiled_yet():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counting_backend(graphs):
    def compile_nothing(graph, _):
        graphs.append(graph)
        return graph.forward

    return compile_nothing


@pytest.mark.parametrize("stages", EVERY_KIND.values(), ids=EVERY_KIND)
def test_forward_is_one_graph_for_every_length(stages):
    model, graphs = tiny_model(stages), []
    compiled = torch.compile(model, fullgraph=True, backend=counting_backend(graphs))
    with torch.no_grad():
        for length in (20, 33, 70, 130):
            ids = tokens(2, length)
            assert_same(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    # the second length makes torch compile once more, with a length that may vary
    assert len(graphs) == 2


def test_padding_and_packing_survive_compilation():
    model = tiny_model(HYBRID)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    ids = tokens(2, 20)
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[0, :6] = 0
    starts_again = torch.cat([torch.arange(8), torch.arange(12)]).expand(2, 20)
    with torch.no_grad():
        for inputs in ({"attention_mask": mask}, {"position_ids": starts_again}):
            actual = compiled(ids, use_cache=False, **inputs).logits
            expected = model(ids, use_cache=False, **inputs).logits
            assert_same(actual[:, 6:], expected[:, 6:])


def test_training_step_has_the_gradients_of_the_eager_one():
    gradients = []
    for wrap in (lambda model: model, lambda model: torch.compile(model, fullgraph=True, backend="aot_eager")):
        model = tiny_model(["kda", "softmax", "ssd", "linear"]).train()
        wrap(model)(tokens(2, 20), labels=tokens(2, 20)).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert_same(gradients[1], gradients[0])


@pytest.mark.parametrize("padded", [False, True], ids=["full", "left_padded"])
@pytest.mark.parametrize("stages", EVERY_KIND.values(), ids=EVERY_KIND)
def test_decoding_with_a_static_cache_compiles_once_and_keeps_addresses(stages, padded):
    """As generate drives it: eager prefill, then one compiled step per token with masks made for the whole cache."""
    model, graphs, ids = tiny_model(stages), [], tokens(2, LENGTH)
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    if padded:
        mask[0, :5] = 0
    compiled = torch.compile(model, fullgraph=True, backend=counting_backend(graphs))
    static, addresses, logits = StaticCache(config=model.config, max_cache_len=LENGTH), [], []
    with torch.no_grad():
        model(ids[:, :9], attention_mask=mask[:, :9], cache=static)
        for t in range(9, 20):
            step = {"attention_mask": mask[:, : t + 1], "cache": static, "position_ids": positions(mask)[:, t : t + 1]}
            inputs = model.prepare_inputs_for_generation(ids[:, : t + 1], next_sequence_length=1, **step)
            logits.append(compiled(**inputs).logits)
            addresses.append(held(static))
        expected = model(ids[:, :20], attention_mask=mask[:, :20], use_cache=False).logits[:, 9:]
    assert_same(torch.cat(logits, 1), expected)
    assert len(graphs) == 1
    assert all(step == addresses[0] for step in addresses)


def positions(mask):
    return (mask.cumsum(1) - 1).clamp_min(0)


def held(cache):
    """The addresses of everything a cache keeps."""
    names = ("keys", "values", "cumulative_length")
    tensors = [getattr(layer, name, None) for layer in cache.layers for name in names]
    for layer in cache.layers:
        if hasattr(layer, "recurrent_states"):
            tensors += [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return [tensor.data_ptr() for tensor in tensors if isinstance(tensor, torch.Tensor)]


@pytest.mark.parametrize("stages", [["kda"], HYBRID], ids=["kda", "hybrid"])
def test_generate_compiles_with_a_static_cache(stages):
    model, ids = tiny_model(stages, eos_token_id=None), tokens(2, 9)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(ids, **options)
    config = CompileConfig(fullgraph=True, backend="eager", mode=None)
    # compile on a CPU, too
    config._compile_all_devices = True
    actual = model.generate(ids, cache_implementation="static", compile_config=config, **options)
    assert torch.equal(actual.sequences, expected.sequences)
    assert_same(torch.stack(actual.logits), torch.stack(expected.logits))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("stages", EVERY_KIND.values(), ids=EVERY_KIND)
def test_cuda_graphs_decode_the_same(stages):
    model, ids = tiny_model(stages, eos_token_id=None).cuda(), tokens(2, 9).cuda()
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(ids, **options)
    config = CompileConfig(fullgraph=True, mode="reduce-overhead")
    actual = model.generate(ids, cache_implementation="static", compile_config=config, **options)
    assert_same(torch.stack(actual.logits), torch.stack(expected.logits), COMPILED)


def test_export_holds_for_every_length():
    model = tiny_model(HYBRID)
    length = torch.export.Dim("length", min=2, max=200)
    with torch.no_grad():
        program = torch.export.export(
            model,
            (tokens(2, 20),),
            {"use_cache": False},
            dynamic_shapes={"input_ids": {1: length}, "use_cache": None},
            strict=False,
        )
        for number in (2, 20, 64, 65, 150):
            ids = tokens(2, number)
            assert_same(program.module()(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


@pytest.mark.parametrize("erase, channels, grouped", [(True, 16, False), (True, 1, True), (False, 0, False)])
def test_operator_declares_what_it_does(erase, channels, grouped):
    """Shapes, dtypes, aliases and gradients, as torch checks them for operators of libraries."""
    q, k = (torch.randn(2, 20, 2, 16).requires_grad_() for _ in range(2))
    heads = 4 if grouped else 2
    v = torch.randn(2, 20, heads, 8).requires_grad_()
    beta = torch.rand(2, 20, heads).requires_grad_() if erase else None
    log_decay = (-torch.rand(2, 20, heads, channels)).requires_grad_() if channels else None
    state = torch.randn(2, heads, 16, 8).requires_grad_()
    torch.library.opcheck(ops.chunk_delta_rule_op, (q, k, v, beta, log_decay, state, erase, None))


def test_two_copies_of_the_code_do_not_take_each_others_operators():
    """The installed package and a copy that came with a checkpoint."""
    spec = importlib.util.spec_from_file_location("modeling_kda.ops_of_a-checkpoint", ops.__file__)
    copy = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = copy
    spec.loader.exec_module(copy)
    assert copy.NAMESPACE != ops.NAMESPACE
    assert copy.chunk_delta_rule_op is not ops.chunk_delta_rule_op
    x = torch.randn(1, 4, 2, 8)
    results = [module.chunk_delta_rule_op(x, x, x, None, None, None, False, None)[0] for module in (ops, copy)]
    assert torch.equal(*results)
