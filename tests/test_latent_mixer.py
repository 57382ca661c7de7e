"""Multi-head latent attention: two forms of one function, what its cache holds, and transformers' own."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_different, assert_same
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import KimiLinearConfig
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearAttention

from modeling_kda import latent_mixer
from modeling_kda.latent_mixer import LatentMixer, absorbing_is_cheaper

D, H, R, NOPE, ROPE, V = 24, 3, 16, 6, 4, 5
EXACT = 1e-12


def make_config(**fields):
    sizes = {"hidden_size": D, "num_attention_heads": H, "q_lora_rank": None, "kv_lora_rank": R}
    sizes |= {"qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": V}
    options = {"latent_norm": True, "latent_norm_eps": 1e-6, "mla_output_gate": False, "attention_bias": False}
    options |= {"attention_dropout": 0.0, "_attn_implementation": "sdpa"}
    return SimpleNamespace(**{**sizes, **options, **fields})


def make_mixer(dtype=torch.float64, **fields):
    mixer = LatentMixer(make_config(**fields), layer_idx=0).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else noise * parameter.shape[-1] ** -0.5)
    return mixer


def make_cache(kind="dynamic", room=16):
    return Cache(layers=[DynamicLayer() if kind == "dynamic" else StaticLayer(max_cache_len=room)])


def inputs(B=2, T=9, dtype=torch.float64):
    return torch.randn(B, T, D, dtype=dtype)


def causal(T, S, past):
    return torch.ones(T, S, dtype=torch.bool).tril(past)[None, None]


def decode(mixer, x, steps, cache, masks=None):
    """The outputs for x [B, T, D], given in parts of the lengths `steps`; masks: one per part, or None."""
    outputs, first = [], 0
    for i, step in enumerate(steps):
        mask = None if masks is None else masks[i]
        outputs.append(mixer(x[:, first : first + step], mask, cache=cache)[0])
        first += step
    return torch.cat(outputs, 1)


def definition(mixer, x, mask):
    """MLA as it is written down, one head after the other, in the dtype of x."""
    config = mixer.config
    q = mixer.q_proj(x)
    c, k_r = mixer.kv_a_proj(x)[..., :R], mixer.kv_a_proj(x)[..., R:]
    c = c * torch.rsqrt(c.square().mean(-1, keepdim=True) + 1e-6) * mixer.kv_norm.weight
    kv, heads = mixer.kv_b_proj(c), []
    for h in range(H):
        q_h = q[..., h * (NOPE + ROPE) : (h + 1) * (NOPE + ROPE)]
        k_n, v = kv[..., h * (NOPE + V) : (h + 1) * (NOPE + V)].split([NOPE, V], -1)
        scores = q_h @ torch.cat([k_n, k_r], -1).transpose(1, 2) * (NOPE + ROPE) ** -0.5
        heads.append(scores.masked_fill(~mask[:, 0], -torch.inf).softmax(-1) @ v)
    o = torch.cat(heads, -1)
    if config.mla_output_gate:
        o = o * (x @ mixer.gate_proj.weight.T).sigmoid()
    return o @ mixer.o_proj.weight.T


@pytest.mark.parametrize(
    ("implementation", "gate"), [("eager", False), ("eager", True), ("sdpa", False), ("flex_attention", True)]
)
def test_it_is_what_is_written_down(implementation, gate):
    dtype = torch.float32 if implementation == "flex_attention" else torch.float64
    mixer, x = make_mixer(dtype, mla_output_gate=gate, _attn_implementation=implementation), inputs(dtype=dtype)
    mask = causal(9, 9, 0)
    expected = definition(mixer, x, mask)
    if implementation == "flex_attention":
        mask = create_block_mask(lambda b, h, q, k: k <= q, None, None, 9, 9, device="cpu")
    with torch.no_grad():
        assert_same(mixer(x, mask)[0], expected, 1e-5 if dtype == torch.float32 else EXACT)


SHAPES = {
    "kimi": {},
    "q_lora": {"q_lora_rank": 7},
    "k3": {"q_lora_rank": 7, "mla_output_gate": True},
    "gpt2": {"qk_rope_head_dim": 0, "latent_norm": False, "attention_bias": True},
    "wide_values": {"v_head_dim": 13},
}


@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_absorbed_is_expanded(fields, implementation):
    mixer = make_mixer(_attn_implementation=implementation, **fields)
    x = inputs()
    q, (latent, shared) = mixer._queries(x)[:, :, -3:], mixer._latents(x)
    mask = causal(3, 9, 6)
    expanded, _ = mixer._attend_expanded(q, latent, shared, mask)
    absorbed, weights = mixer._attend_absorbed(q, latent[:, 0], shared[:, 0], mask, None)
    assert_same(absorbed, expanded, EXACT)
    assert (weights is not None) == (implementation == "eager")


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
def test_prefill_and_decoding_equal_one_pass(kind, fields):
    mixer, x = make_mixer(**fields), inputs()
    expected, _ = mixer(x)
    # one prompt, single tokens, a draft of three, and a part so long that expanding is cheaper
    assert_same(decode(mixer, x, [4, 1, 1, 3], make_cache(kind)), expected, EXACT)
    assert_same(decode(mixer, x, [2, 7], make_cache(kind)), expected, EXACT)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("form", ["bool", "additive"])
def test_masks_are_honoured(kind, form):
    """Rows padded on the left, in a prompt and in decoding, give what they give without padding."""
    mixer, x = make_mixer(), inputs()
    real = torch.ones(2, 9, dtype=torch.bool)
    real[0, :3] = False
    alone, _ = mixer(x[:1, 3:])
    cache, room = make_cache(kind), 9 if kind == "dynamic" else 16
    masks = []
    for first, length in ((0, 5), (5, 1), (6, 1), (7, 2)):
        columns = first + length if kind == "dynamic" else room
        seen = F.pad(real, (0, room - 9))[:, None, None, :columns]
        mask = causal(length, columns, first) & seen
        masks.append(mask if form == "bool" else torch.zeros(mask.shape).double().masked_fill(~mask, -1e300))
    actual = decode(mixer, x, [5, 1, 1, 2], cache, masks)
    assert_same(actual[:1, 3:], alone, EXACT)
    assert_same(actual[1:], mixer(x[1:])[0], EXACT)
    assert_different(actual[:1, 3:], mixer(x[:1])[0][:, 3:])


@pytest.mark.parametrize("implementation", ["sdpa", "flash_attention_2"])
def test_a_static_cache_without_a_mask_where_numbers_are_hidden(implementation, monkeypatch):
    """As in compiled prefill and CUDA graphs: only the device knows how many tokens there are."""
    mixer, x = make_mixer(_attn_implementation=implementation), inputs()
    monkeypatch.setattr(latent_mixer, "numbers_are_hidden", lambda: True)
    mixer.config._attn_implementation = "sdpa"
    expected, _ = mixer(x)
    cache = make_cache("static")
    first = mixer(x[:, :4], cache=cache)[0]
    mixer.config._attn_implementation = implementation
    rest = decode(mixer, x[:, 4:], [1, 2, 2], cache)
    assert_same(torch.cat([first, rest], 1), expected, EXACT)


def test_a_mask_of_padded_keys_as_flash_attention_takes_it():
    mixer, x = make_mixer(_attn_implementation="flash_attention_2"), inputs(1)
    q, (latent, shared) = mixer._queries(x)[:, :, -2:], mixer._latents(x)
    keys = torch.ones(1, 9, dtype=torch.long)
    keys[:, :3] = 0
    expected, _ = mixer._attend_absorbed(q, latent[:, 0], shared[:, 0], causal(2, 9, 7) & (keys != 0), None)
    actual, _ = mixer._attend_absorbed(q, latent[:, 0], shared[:, 0], keys, None)
    assert_same(actual, expected, EXACT)


def test_a_block_mask():
    mixer, x = make_mixer(_attn_implementation="flex_attention"), inputs(1)
    q, (latent, shared) = mixer._queries(x)[:, :, -2:], mixer._latents(x)
    block = create_block_mask(lambda b, h, q, k: (k <= q + 7) & (k > 2), 1, None, 2, 9, device="cpu")
    mask = causal(2, 9, 7)
    mask[..., :3] = False
    expected, _ = mixer._attend_absorbed(q, latent[:, 0], shared[:, 0], mask, None)
    actual, _ = mixer._attend_absorbed(q, latent[:, 0], shared[:, 0], block, None)
    assert_same(actual, expected, EXACT)


def test_without_causality():
    mixer, x = make_mixer(), inputs(1)
    expected, _ = mixer(x, torch.ones(1, 1, 9, 9, dtype=torch.bool))
    assert_same(mixer(x, is_causal=False)[0], expected, EXACT)
    cache = make_cache()
    mixer(x[:, :7], cache=cache, is_causal=False)
    assert_same(mixer(x[:, 7:], cache=cache, is_causal=False)[0], expected[:, 7:], EXACT)


def test_eager_attention_returns_its_weights_in_both_forms():
    mixer, x = make_mixer(_attn_implementation="eager"), inputs()
    _, expected = mixer(x, causal(9, 9, 0))
    cache = make_cache()
    mixer(x[:, :8], causal(8, 8, 0), cache=cache)
    _, weights = mixer(x[:, 8:], None, cache=cache)
    assert_same(weights, expected[:, :, 8:], EXACT)
    assert_same(weights.sum(-1), torch.ones(2, H, 1, dtype=torch.float64), EXACT)


def test_many_scores_are_made_in_parts(monkeypatch):
    mixer, x = make_mixer(), inputs(T=20)
    expected, _ = mixer(x)
    monkeypatch.setattr(latent_mixer, "MAX_SCORES", 2 * H * 20)
    for mask in (None, causal(3, 20, 17)):
        cache = make_cache()
        mixer(x[:, :17], cache=cache)
        assert_same(mixer(x[:, 17:], mask, cache=cache)[0], expected[:, 17:], EXACT)


@pytest.mark.parametrize("fields", [{}, {"q_lora_rank": 7}], ids=["direct", "q_lora"])
def test_it_is_transformers_kimi_linear(fields):
    mixer = make_mixer(attention_bias=False, **fields)
    config = KimiLinearConfig(
        hidden_size=D,
        num_attention_heads=H,
        num_key_value_heads=H,
        q_lora_rank=mixer.q_lora_rank,
        kv_lora_rank=R,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=V,
        attn_implementation="sdpa",
    )
    theirs = KimiLinearAttention(config, layer_idx=0).double().eval()
    names = {"kv_a_proj": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "q_norm": "q_a_layernorm"}
    weights = {}
    for name, value in mixer.state_dict().items():
        module, kind = name.split(".")
        weights[f"{names.get(module, module)}.{kind}"] = value
    theirs.load_state_dict(weights)
    # theirs round to fp32 inside, whatever the dtype
    assert theirs.kv_a_layernorm.variance_epsilon == mixer.kv_norm.eps
    theirs.kv_a_layernorm, theirs.q_a_layernorm = mixer.kv_norm, getattr(mixer, "q_norm", None)
    x = inputs()
    assert_same(mixer(x)[0], theirs(x, None)[0], EXACT)
    ours, other = make_cache(), make_cache()
    for first, last in ((0, 6), (6, 7), (7, 8)):
        part = x[:, first:last]
        assert_same(mixer(part, cache=ours)[0], theirs(part, None, cache=other)[0], EXACT)
    assert_same(ours.layers[0].keys, other.layers[0].keys, EXACT)
    assert_same(ours.layers[0].values, other.layers[0].values, EXACT)


def test_the_latent_norms_have_an_epsilon_of_their_own():
    """1e-6 although the other norms of the released models have 1e-5: 0.5 percent of a latent of size 0.03."""
    mixer = make_mixer(q_lora_rank=7)
    assert mixer.kv_norm.eps == mixer.q_norm.eps == 1e-6
    with torch.no_grad():
        mixer.kv_a_proj.weight.mul_(0.01)
    x = inputs()
    raw = mixer.kv_a_proj(x)[..., :R]
    expected = raw * torch.rsqrt(raw.square().mean(-1, keepdim=True) + 1e-6) * mixer.kv_norm.weight
    assert_same(mixer._latents(x)[0][:, 0], expected, EXACT)
    assert_different(expected, raw * torch.rsqrt(raw.square().mean(-1, keepdim=True) + 1e-5) * mixer.kv_norm.weight)
    # the shared key is neither scaled nor rotated
    assert torch.equal(mixer._latents(x)[1][:, 0], mixer.kv_a_proj(x)[..., R:])


def test_without_norms_there_are_no_norm_weights():
    names = dict(make_mixer(q_lora_rank=7, latent_norm=False).named_parameters())
    assert not [name for name in names if "norm" in name]


def test_the_gate_is_taken_from_the_input_and_before_the_output_projection():
    mixer, x = make_mixer(mla_output_gate=True), inputs()
    gated, _ = mixer(x)
    o_proj, mixer.o_proj = mixer.o_proj, torch.nn.Identity()
    with_gate, _ = mixer(x)
    mixer.config.mla_output_gate = False
    without_gate, _ = mixer(x)
    assert_same(with_gate, without_gate * torch.sigmoid(x @ mixer.gate_proj.weight.T), EXACT)
    assert_same(gated, o_proj(with_gate), EXACT)


def test_gradients_of_both_forms():
    mixer, x = make_mixer(mla_output_gate=True, q_lora_rank=3), inputs(1, 4)
    parameters = [p.detach().clone().requires_grad_() for p in mixer.parameters()]
    names = [name for name, _ in mixer.named_parameters()]

    def run(x, *parameters):
        return torch.func.functional_call(mixer, dict(zip(names, parameters, strict=True)), (x,))[0]

    assert torch.autograd.gradcheck(run, (x.requires_grad_(), *parameters), fast_mode=True)

    def absorbed(x):
        q, (latent, shared) = mixer._queries(x)[:, :, -2:], mixer._latents(x)
        return mixer._attend_absorbed(q, latent[:, 0], shared[:, 0], None, None)[0]

    assert torch.autograd.gradcheck(absorbed, (x,), fast_mode=True)


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that any operation makes inside."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given, made = (
            {x.untyped_storage().data_ptr(): x.numel() for x in tree_leaves(tree) if isinstance(x, torch.Tensor)}
            for tree in ((args, kwargs), out)
        )
        # views, and what is written in place, are no new memory
        self.numel = max([self.numel, *(numel for place, numel in made.items() if place not in given)])
        return out


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_decoding_reads_latents_only(implementation):
    past, heads, nope = 640, 8, 32
    sizes = {"num_attention_heads": heads, "qk_nope_head_dim": nope, "v_head_dim": nope}
    mixer = make_mixer(torch.bfloat16, _attn_implementation=implementation, **sizes).requires_grad_(False)
    cache, x = make_cache(), inputs(1, past + 2, torch.bfloat16)
    mixer(x[:, :past], cache=cache)
    held = sum(tensor.nbytes for tensor in (cache.layers[0].keys, cache.layers[0].values))
    assert held == past * (R + ROPE) * 2
    for first, last in ((past, past + 1), (past + 1, past + 2)):
        with Largest() as largest:
            mixer(x[:, first:last], cache=cache)
        # the cache grows by a copy; scores are [H, S]; expanded heads would be [H, S, 32] each
        assert largest.numel <= (past + 2) * max(R, heads)
    with Largest() as largest:
        mixer._attend_expanded(mixer._queries(x[:, -1:]), *mixer._latents(x), None)
    assert largest.numel >= past * heads * nope


def test_a_prompt_for_a_long_static_cache_is_not_compared_with_its_empty_rest():
    mixer, x = make_mixer(), inputs(1, 12)
    cache = make_cache("static", room=4096)
    with Largest() as largest:
        mixer(x[:, :8], cache=cache)
    # the cache itself is made here
    assert largest.numel == 4096 * R
    with Largest() as largest:
        mixer(x[:, 8:], cache=cache)
    assert largest.numel <= 4096


def test_the_form_with_fewer_multiplications_is_taken():
    def multiplications(T, S, R, nope, rope, V, absorbed):
        if absorbed:
            return T * R * (nope + V) + T * S * (R + rope + R)
        return S * R * (nope + V) + T * S * (nope + rope + V)

    taken = set()
    for T, S in ((1, 2), (1, 4096), (8, 4096), (100, 4096), (170, 1 << 20), (172, 1 << 20), (4096, 8192)):
        costs = [multiplications(T, S, 512, 128, 64, 128, form) for form in (False, True)]
        absorbed = absorbing_is_cheaper(T, S, 512, 256)
        assert absorbed == (costs[1] < costs[0]), (T, S)
        taken.add(absorbed)
    assert taken == {True, False}


def test_another_implementation_sees_expanded_heads_in_decoding():
    seen = []

    def recording(module, q, k, v, mask, scaling=None, dropout=0.0, **kwargs):
        seen.append([tuple(x.shape) for x in (q, k, v)])
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scaling).transpose(1, 2), None

    from transformers import AttentionInterface

    AttentionInterface.register("recording_latent", recording)
    mixer, x = make_mixer(), inputs()
    expected, _ = mixer(x)
    cache = make_cache()
    mixer(x[:, :8], cache=cache)
    mixer.config._attn_implementation = "recording_latent"
    assert_same(mixer(x[:, 8:], cache=cache)[0], expected[:, 8:], EXACT)
    assert seen == [[(2, H, 1, NOPE + ROPE), (2, H, 9, NOPE + ROPE), (2, H, 9, NOPE + ROPE)]]


@pytest.mark.parametrize("how", ["wrapped", "hooked", "replaced"])
def test_matrices_are_used_through_a_call_where_only_that_says_what_they_are(how):
    """As with adapters and quantization, with hooks, and with offloading, which replaces `forward`."""
    mixer, x = make_mixer(), inputs()
    proj, weight = mixer.kv_b_proj, mixer.kv_b_proj.weight.detach().clone()
    expected, _ = mixer(x)
    with torch.no_grad():
        proj.weight.zero_()
    if how == "wrapped":
        mixer.kv_b_proj = torch.nn.Sequential(torch.nn.Linear(R, weight.shape[0], bias=False).double())
        mixer.kv_b_proj[0].weight = torch.nn.Parameter(weight)
        mixer.kv_b_proj.weight = proj.weight
    elif how == "hooked":
        proj.register_forward_hook(lambda module, args, output: args[0] @ weight.T)
    else:
        proj.weight = torch.nn.Parameter(proj.weight.to("meta"))
        proj.forward = lambda x: x @ weight.T
    assert_same(decode(mixer, x, [8, 1], make_cache()), expected, EXACT)


@pytest.mark.parametrize("fields", [{}, {"qk_rope_head_dim": 0}], ids=["shared", "no_shared"])
def test_what_generation_does_to_a_cache(fields):
    """Taking tokens back, choosing and repeating rows, offloading, starting again."""
    mixer, x = make_mixer(**fields), inputs()
    expected, _ = mixer(x)
    cache = make_cache()
    mixer(x[:, :6], cache=cache)
    mixer(inputs(2, 2), cache=cache)
    cache.crop(-2)
    assert cache.get_seq_length() == 6
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.layers[0].offload()
    cache.layers[0].prefetch()
    assert_same(decode(mixer, x[:, 6:], [1, 2], cache), expected[:, 6:], EXACT)
    cache.reset()
    assert_same(decode(mixer, x, [8, 1], cache), expected, EXACT)
    static = make_cache("static")
    decode(mixer, x, [6, 2], static)
    static.crop(-2)
    assert_same(decode(mixer, x[:, 6:], [2, 1], static), expected[:, 6:], EXACT)


@pytest.mark.parametrize("backend", ["torch", "auto", "triton", "nonsense"])
def test_the_kernel_is_used_where_it_can_be_and_missed_aloud(backend, monkeypatch):
    """On a CPU the kernel cannot run: `triton` insists on it, `auto` does not ask for it there."""
    monkeypatch.setattr("modeling_kda.ops.BACKEND", backend)
    mixer, x, cache = make_mixer(torch.float32), inputs(dtype=torch.float32), make_cache()
    mixer(x[:, :8], cache=cache)
    if backend in ("torch", "auto"):
        assert_same(mixer(x[:, 8:], cache=cache)[0], mixer(x)[0][:, 8:])
        return
    with pytest.raises(ValueError, match="KDA_BACKEND"):
        mixer(x[:, 8:], cache=cache)
    # eager attention gives its weights, which the kernel does not have
    mixer.config._attn_implementation = "eager"
    assert mixer(x[:, 8:], cache=cache)[1] is not None
