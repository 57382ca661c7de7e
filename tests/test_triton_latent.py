"""The latent attention kernel: against plain attention in fp64, under Triton's interpreter and on a CUDA device."""

import os

import pytest
import torch
import torch.nn.functional as F
from kernel_reference import (
    BUDGET,
    SHARED_MEMORY,
    assert_close,
    compile_launch,
    on_gpu,
    poison,
    recorded,
    resource_usage,
    run_interpreted,
)
from test_latent_mixer import decode, make_cache, make_mixer

pytest.importorskip("triton", reason="the kernels need triton")
from modeling_kda import latent_mixer  # noqa: E402
from modeling_kda import triton_latent as kernels  # noqa: E402


@pytest.fixture(autouse=True)
def no_plans_of_other_devices():
    kernels._plan.cache_clear()
    yield
    kernels._plan.cache_clear()


def reference(q_latent, q_shared, latent, shared, mask=None, seen=None, *, causal=True, scale):
    """Attention of every head to the same keys, in fp64."""
    q_latent, q_shared, latent, shared = (x.double() for x in (q_latent, q_shared, latent, shared))
    B, T, H, R = q_latent.shape
    S = latent.shape[1]
    scores = torch.einsum("bthr,bsr->bths", q_latent, latent) + torch.einsum("bthp,bsp->bths", q_shared, shared)
    scores = scores * scale
    order = torch.arange(S, device=latent.device)
    end = (torch.full((B,), S) if seen is None else seen.reshape(-1).expand(B)).to(latent.device)
    visible = (order < end[:, None])[:, None]
    if mask is None and causal:
        visible = order < (end[:, None] - T + 1 + torch.arange(T, device=latent.device))[..., None]
    if mask is not None and mask.dtype == torch.bool:
        visible = visible & mask[:, 0]
    elif mask is not None:
        scores = scores + mask[:, 0, :, None].double()
    scores = scores.masked_fill(~visible.expand(B, T, S)[:, :, None], -torch.inf)
    return torch.einsum("bths,bsr->bthr", scores.softmax(-1).nan_to_num(0.0), latent)


def inputs(B, T, H, S, R, P, dtype=torch.float32, device="cpu"):
    q_latent, q_shared = torch.randn(B, T, H, R), torch.randn(B, T, H, P)
    latent, shared = torch.randn(B, S, R), torch.randn(B, S, P)
    return [x.to(dtype).to(device) for x in (q_latent, q_shared, latent, shared)]


def check(*shape, dtype=torch.float32, device="cpu", mask=None, seen=None, **options):
    tensors = inputs(*shape, dtype=dtype, device=device)
    options = {"scale": (shape[4] + shape[5]) ** -0.5, **options}
    poison(device)
    actual = kernels.triton_latent_attention(*tensors, mask, seen, **options)
    assert actual.dtype == dtype
    # weights are rounded to the dtype of the latents
    assert_close(actual, reference(*tensors, mask, seen, **options), BUDGET[dtype])


@pytest.mark.parametrize(
    "shape",
    [(1, 1, 2, 70, 16, 16), (2, 1, 3, 5, 24, 8), (1, 3, 5, 40, 33, 0), (1, 1, 20, 33, 16, 3), (1, 1, 1, 1, 1, 1)],
    ids=str,
)
def interpreted_shapes(shape):
    check(*shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def interpreted_dtypes(dtype):
    check(1, 2, 3, 130, 24, 8, dtype=dtype)


def interpreted_many_rows():
    check(1, 3, 30, 12, 16, 4)


@pytest.mark.parametrize("form, T", [("bool", 2), ("additive", 2), ("one_row", 2), ("bool", 1), ("additive", 1)])
def interpreted_masks(form, T):
    B, S = 2, 50
    real = torch.ones(B, 1, T, S, dtype=torch.bool).tril(S - T)
    real[0, ..., :20] = False
    # a row that sees nothing, as a padded token does
    real[1, :, 0] = False
    if form == "additive":
        real = torch.randn(B, 1, T, S).masked_fill(~real, torch.finfo(torch.float32).min)
        real[1, :, 0] = -torch.inf
    elif form == "one_row":
        real = real[:1].expand(1, 1, T, S)
    check(B, T, 3, S, 16, 4, mask=real)


@pytest.mark.parametrize("seen", [torch.tensor(37), torch.tensor([1, 64]), torch.tensor([64], dtype=torch.int32)])
def interpreted_room_for_more(seen):
    """What stands behind the tokens of a static cache is not read, whatever it is."""
    check(2, 1, 3, 64, 16, 4, seen=seen)
    tensors = inputs(2, 1, 3, 64, 16, 4)
    expected = kernels.triton_latent_attention(*tensors, None, seen, scale=0.3)
    for row, end in enumerate(seen.reshape(-1).expand(2).tolist()):
        for x in tensors[2:]:
            x[row, end:] = torch.nan
    assert torch.equal(kernels.triton_latent_attention(*tensors, None, seen, scale=0.3), expected)


def interpreted_causality():
    check(1, 4, 2, 40, 16, 4, seen=torch.tensor(30))
    check(1, 4, 2, 40, 16, 4, causal=False)


def interpreted_strides():
    check_strides("cpu")


def check_strides(device):
    """Views give what contiguous copies give."""
    B, T, H, S, R, P = 2, 2, 3, 40, 16, 4
    fused = torch.randn(B, S, R + P, device=device)
    heads = torch.randn(H, B, T, R + P, device=device).permute(1, 2, 0, 3)
    views = [heads[..., :R], heads[..., R:], fused[..., :R], fused[..., R:]]
    copies = [x.contiguous() for x in views]
    actual, expected = (kernels.triton_latent_attention(*x, scale=0.3) for x in (views, copies))
    assert torch.equal(actual, expected)


def interpreted_as_an_operator():
    """What torch.compile sees: no input changes, and shapes and strides are known without running it."""
    q_latent, q_shared, latent, shared = inputs(2, 1, 3, 20, 16, 4)
    checks = ("test_schema", "test_faketensor")
    for mask, seen in ((None, None), (torch.ones(2, 1, 1, 20, dtype=torch.bool), torch.tensor(9))):
        arguments = q_latent, q_shared, latent, shared, mask, seen, True, 0.3
        torch.library.opcheck(kernels.latent_attention_op, arguments, test_utils=checks)
        actual = kernels.latent_attention_op(*arguments).permute(1, 2, 0, 3)
        expected = reference(q_latent, q_shared, latent, shared, mask, seen, scale=0.3)
        assert_close(actual, expected, BUDGET[torch.float32])


def interpreted_nothing_to_see():
    tensors = inputs(1, 1, 2, 0, 16, 4)
    assert torch.equal(kernels.triton_latent_attention(*tensors, scale=1.0), torch.zeros(1, 1, 2, 16))
    tensors = inputs(1, 1, 2, 8, 16, 4)
    nothing = torch.zeros(1, dtype=torch.long)
    assert torch.equal(kernels.triton_latent_attention(*tensors, None, nothing, scale=1.0), torch.zeros(1, 1, 2, 16))


def interpreted_large_scores():
    """Scores of a thousand neither overflow nor lose the small differences between them."""
    q_latent, q_shared, latent, shared = inputs(1, 1, 2, 100, 16, 4)
    tensors = q_latent * 300, q_shared, latent, shared
    actual = kernels.triton_latent_attention(*tensors, scale=1.0)
    assert_close(actual, reference(*tensors, scale=1.0), 1e-4)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def interpreted_mixer(kind, monkeypatch):
    """The mixer calls it for single tokens and drafts, with and without padding, and gives what one pass gives."""
    mixer, x = make_mixer(torch.float32), torch.randn(2, 12, 24)
    real = torch.ones(2, 12, dtype=torch.bool)
    real[0, :3] = False
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    with torch.no_grad():
        expected = [mixer(x)[0], mixer(x, mask & real[:, None, None])[0][:, 3:]]
        monkeypatch.setattr("modeling_kda.ops.BACKEND", "triton")
        calls, kernel = [], latent_mixer.launch_latent_attention
        counting = lambda *args, **options: calls.append(args) or kernel(*args, **options)  # noqa: E731
        monkeypatch.setattr(latent_mixer, "launch_latent_attention", counting)
        cache = make_cache(kind)
        mixer(x[:, :8], mask[..., :8, :8], cache=cache)
        outputs = [mixer(x[:, first:last], None, cache=cache)[0] for first, last in ((8, 9), (9, 12))]
        assert_close(torch.cat(outputs, 1), expected[0][:, 8:], 1e-5)
        cache = make_cache(kind)
        mixer(x[:, :8], mask[..., :8, :8] & real[:, None, None, :8], cache=cache)
        room = 12 if kind == "dynamic" else 16
        given = F.pad(mask & real[:, None, None], (0, room - 12))
        steps = ((8, 9, 9 if kind == "dynamic" else room), (9, 12, room))
        outputs = [mixer(x[:, i:j], given[..., i:j, :k], cache=cache)[0] for i, j, k in steps]
        assert_close(torch.cat(outputs, 1), expected[1][:, 5:], 1e-5)
    assert len(calls) == 4


def test_under_the_interpreter():
    run_interpreted(__file__)


def test_what_does_not_fit_is_said_in_one_line():
    q_latent, q_shared, latent, shared = inputs(2, 1, 3, 8, 16, 4)
    fit = {"q_latent": q_latent, "q_shared": q_shared, "latent": latent, "shared": shared}
    wrong = {
        "B, T, H, R": {"q_latent": q_latent[0]},
        "q_shared must be": {"q_shared": q_shared[..., :2]},
        "latent must be": {"latent": latent[:1]},
        "torch.float32 as": {"latent": latent.half()},
        "at most 16 tokens": {name: x.expand(2, 17, 3, -1) for name, x in fit.items() if name.startswith("q")},
        "R up to 512": {
            "q_latent": q_latent[..., :1].expand(2, 1, 3, 600),
            "latent": latent[..., :1].expand(2, 8, 600),
        },
        "P up to 128": {
            "q_shared": q_shared[..., :1].expand(2, 1, 3, 130),
            "shared": shared[..., :1].expand(2, 8, 130),
        },
        "mask must be": {"mask": torch.ones(2, 3, 1, 8)},
        "bool or additive": {"mask": torch.ones(2, 1, 1, 8, dtype=torch.int32)},
        "CUDA device": {},
    }
    for message, given in wrong.items():
        with pytest.raises(ValueError, match=message):
            kernels.triton_latent_attention(**{**fit, **given}, scale=1.0)


def test_a_device_with_little_shared_memory(monkeypatch):
    """Smaller blocks where they fit, and one line where none does."""
    for room, rows in ((100_000, 16), (40_000, None)):
        monkeypatch.setattr(kernels, "shared_memory_of", lambda device, room=room: room)
        kernels._plan.cache_clear()
        plan = kernels._plan(32, 512, 64, 2, torch.device("cpu"))
        assert plan is None if rows is None else plan[2]["BN"] == rows
    with pytest.raises(ValueError, match="shared memory"):
        kernels.triton_latent_attention(*inputs(1, 1, 32, 8, 512, 64, dtype=torch.bfloat16), scale=1.0)


@pytest.mark.parametrize(
    "programs, key_blocks, slots", [(1, 16384, 264), (16, 16384, 264), (100, 2048, 132), (1, 3, 264)]
)
def test_the_keys_are_split_so_that_the_device_is_full(programs, key_blocks, slots):
    splits = kernels._count_splits(programs, key_blocks, slots)
    assert 1 <= splits <= kernels.MAX_SPLITS
    # either no part could be shorter, or nine tenths of the slots are in use in the last wave, too
    waves = programs * splits / slots
    assert splits == max(1, key_blocks // kernels.MIN_BLOCKS) or waves / -(-waves // 1) > 0.9


# (shape, dtype, mask): Kimi Linear, the same with drafted tokens and a mask, a small model, odd sizes in fp32
LAUNCHES = {
    "kimi": ((1, 1, 32, 4096, 512, 64), torch.bfloat16, None),
    "drafted": ((1, 4, 32, 4096, 512, 64), torch.float16, torch.bool),
    "gpt2": ((1, 1, 12, 1024, 256, 0), torch.bfloat16, torch.bfloat16),
    "odd": ((1, 3, 5, 333, 96, 24), torch.float32, None),
}


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("name, capability", [("kimi", 90), ("drafted", 80), ("gpt2", 90), ("odd", 80)])
def test_it_compiles_for_devices_that_are_not_here(name, capability, monkeypatch):
    shape, dtype, mask = LAUNCHES[name]
    monkeypatch.setattr(kernels, "shared_memory_of", lambda device: SHARED_MEMORY[capability])
    tensors, launches = inputs(*shape, dtype=dtype), []
    mask = None if mask is None else torch.ones(shape[0], 1, shape[1], shape[3], dtype=mask)
    with recorded(kernels, launches):
        kernels.triton_latent_attention(*tensors, mask, scale=0.1)
    assert len(launches) == 2
    for launch in launches:
        compiled = compile_launch(*launch, capability)
        # two programs share a multiprocessor of the large ones
        assert compiled.metadata.shared <= SHARED_MEMORY[capability] // (2 if capability >= 90 else 1)
        assert resource_usage(compiled.asm["cubin"])["STACK"] <= 512


@on_gpu
@pytest.mark.parametrize(
    "shape, dtype",
    [
        ((2, 1, 32, 3000, 512, 64), torch.bfloat16),
        ((2, 1, 96, 500, 512, 64), torch.bfloat16),
        ((1, 4, 32, 700, 512, 64), torch.float16),
        ((2, 3, 12, 333, 256, 0), torch.bfloat16),
        ((2, 1, 12, 500, 768, 0), torch.bfloat16),
        ((1, 2, 5, 77, 96, 24), torch.float32),
        ((3, 1, 4, 77, 16, 8), torch.float16),
        ((1, 1, 1, 1, 1, 1), torch.float32),
    ],
    ids=str,
)
def test_shapes_on_gpu(shape, dtype):
    check(*shape, dtype=dtype, device="cuda")


@on_gpu
@pytest.mark.parametrize("form", ["bool", "additive"])
def test_masks_on_gpu(form):
    mask = torch.ones(2, 1, 2, 500, dtype=torch.bool, device="cuda").tril(498)
    mask[0, ..., :130] = False
    if form == "additive":
        mask = torch.zeros(mask.shape, device="cuda").masked_fill(~mask, torch.finfo(torch.bfloat16).min).bfloat16()
    check(2, 2, 8, 500, 512, 64, dtype=torch.bfloat16, device="cuda", mask=mask)


@on_gpu
def test_room_for_more_on_gpu():
    check(2, 3, 32, 4096, 512, 64, dtype=torch.bfloat16, device="cuda", seen=torch.tensor([5, 4000], device="cuda"))


@on_gpu
def test_strides_on_gpu():
    check_strides("cuda")


@on_gpu
def test_in_a_cuda_graph():
    tensors = inputs(2, 1, 32, 2000, 512, 64, dtype=torch.bfloat16, device="cuda")
    kernels.triton_latent_attention(*tensors, scale=0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = kernels.triton_latent_attention(*tensors, scale=0.1)
    for x in tensors:
        x.mul_(0.5)
    graph.replay()
    assert torch.equal(actual, kernels.triton_latent_attention(*tensors, scale=0.1))


@on_gpu
def test_offsets_beyond_32_bits_on_gpu():
    """Rows of more than 2^31 numbers: the last keys decide."""
    S = (1 << 22) + 64
    latent, shared = (torch.zeros(1, S, size, dtype=torch.bfloat16, device="cuda") for size in (512, 64))
    latent[0, -1], shared[0, -1] = 1.0, 30.0
    q_latent, q_shared = (torch.ones(1, 1, 4, size, dtype=torch.bfloat16, device="cuda") for size in (512, 64))
    o = kernels.triton_latent_attention(q_latent, q_shared, latent, shared, scale=1.0)
    assert torch.equal(o, torch.ones_like(o))


@on_gpu
def test_the_mixer_decodes_with_it(monkeypatch):
    """In bf16 on the device: the kernel is called for single tokens and drafts, and gives what a whole pass gives."""
    mixer = make_mixer(torch.bfloat16).cuda()
    calls, kernel = [], latent_mixer.launch_latent_attention
    monkeypatch.setattr(latent_mixer, "launch_latent_attention", lambda *a, **k: calls.append(a) or kernel(*a, **k))
    x, cache = torch.randn(2, 36, 24, dtype=torch.bfloat16, device="cuda"), make_cache()
    with torch.no_grad():
        actual = decode(mixer, x, [30, 1, 1, 4], cache)
        expected = mixer.float()(x.float())[0]
    assert len(calls) == 3
    assert_close(actual, expected, 2e-2)
