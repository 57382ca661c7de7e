"""The mixture of experts against a loop over tokens, transformers' own block, and the traps of the released models."""

import pytest
import torch
import torch.nn.functional as F
from helpers import ROUNDING, assert_different, assert_same, tiny_model, tokens, wake
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearMoE

from modeling_kda import KDAConfig, KDAForCausalLM
from modeling_kda.layers import MLP
from modeling_kda.moe import MoE

KINDS = {
    "kimi_linear": {"routed_scaling_factor": 2.446},
    "kimi_k3": {"hidden_act": "situ", "routed_expert_hidden_size": 16, "num_shared_experts": 2},
    "latent_without_norm": {"routed_expert_hidden_size": 16, "latent_moe_use_norm": False},
    "gpt2": {"hidden_act": "gelu_new", "mlp_gated": False, "mlp_bias": True},
    "gated_with_biases": {"mlp_bias": True},
    "routed_only": {"num_shared_experts": 0, "moe_renormalize": False},
    "every_expert": {"num_experts_per_token": 8},
}
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
EXACT = 1e-12


def build(kind="kimi_linear", implementation="eager", dtype=torch.float32, seed=0, **overrides):
    """A block in which every tensor matters, the selection bias too."""
    fields = {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "mlp_gated": True,
        "mlp_bias": False,
        "hidden_act": "silu",
        "num_experts": 8,
        "num_experts_per_token": 3,
        "moe_intermediate_size": 24,
    }
    config = KDAConfig(**{**fields, **KINDS[kind], **overrides})
    config._experts_implementation = implementation
    moe = MoE(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in moe.named_parameters():
            wake(name, parameter, generator)
        wake("router.selection_bias", moe.router.selection_bias, generator)
    return moe.to(dtype)


def inputs(*shape, dtype=torch.float32, seed=1):
    return torch.randn(*shape, 32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def reference(moe, config, x):
    """One token after the other, one expert after the other, written down from the formulas."""
    rows = []
    for token in x.flatten(0, -2):
        scores = torch.sigmoid(moe.router.weight @ token)
        chosen = sorted(range(config.num_experts), key=lambda e, s=scores: -(s + moe.router.selection_bias)[e].item())
        chosen = chosen[: config.num_experts_per_token]
        total = sum(scores[e] for e in chosen) + 1e-20 if config.moe_renormalize else 1.0
        z = token if config.routed_expert_hidden_size is None else moe.latent_down_proj.weight @ token
        y = sum(
            config.routed_scaling_factor * scores[e] / total * one_expert(moe.experts, config, e, z) for e in chosen
        )
        if config.routed_expert_hidden_size is not None:
            if config.latent_moe_use_norm:
                y = y / torch.sqrt(y.square().mean() + config.norm_eps) * moe.latent_norm.weight
            y = moe.latent_up_proj.weight @ y
        if config.shared_intermediate_size:
            y = y + mlp(moe.shared_experts, config, token)
        rows.append(y)
    return torch.stack(rows).view_as(x)


def one_expert(experts, config, e, z):
    if not config.mlp_gated:
        hidden = activation(config, experts.up_proj[e] @ z + experts.up_bias[e])
    else:
        both = experts.gate_up_proj[e] @ z
        if config.mlp_bias:
            both = both + experts.gate_up_bias[e]
        gate, up = both[: len(both) // 2], both[len(both) // 2 :]
        hidden = activation(config, gate, up)
    y = experts.down_proj[e] @ hidden
    return y + experts.down_bias[e] if config.mlp_bias else y


def mlp(module, config, x):
    up = module.up_proj(x)
    return module.down_proj(activation(config, *([module.gate_proj(x), up] if config.mlp_gated else [up])))


def activation(config, gate, up=1.0):
    if config.hidden_act == "situ":
        return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
    return (F.silu(gate) if config.hidden_act == "silu" else F.gelu(gate, approximate="tanh")) * up


def gradients(y, *tensors):
    """Of a sum in which every output counts differently."""
    return torch.autograd.grad((y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum(), tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_equal_a_loop_over_tokens(kind):
    moe = build(kind, dtype=torch.float64)
    x = inputs(2, 5, dtype=torch.float64).requires_grad_()
    names, parameters = zip(*moe.named_parameters(), strict=True)
    actual, expected = moe(x), reference(moe, moe.experts.config, x)
    assert_same(actual, expected, EXACT)
    # every parameter has a gradient: that of the router comes through the weights
    of_actual, of_expected = gradients(actual, x, *parameters), gradients(expected, x, *parameters)
    for name, ours, theirs in zip(("x", *names), of_actual, of_expected, strict=True):
        assert theirs.abs().max() > 0, name
        assert_same(ours, theirs, EXACT)


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_implementation_gives_the_same(kind, dtype, implementation):
    x = inputs(2, 9, dtype=dtype).requires_grad_()
    expected, actual = build(kind, dtype=dtype), build(kind, implementation, dtype=dtype)
    # bf16 rounds the sums of the matrices, whose order differs
    budget = ROUNDING if dtype == torch.float32 else 2e-2
    y, same = expected(x), actual(x)
    assert y.dtype == dtype
    assert_same(same, y, budget)
    pairs = zip(gradients(y, x, *expected.parameters()), gradients(same, x, *actual.parameters()), strict=True)
    for of_expected, of_actual in pairs:
        assert_same(of_actual, of_expected, budget)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_equals_the_block_of_transformers(dtype):
    fields = {"hidden_size": 32, "num_experts": 8, "num_experts_per_token": 3, "moe_intermediate_size": 24}
    theirs = KimiLinearMoE(KimiLinearConfig(**fields, num_hidden_layers=2, routed_scaling_factor=2.446))
    theirs.experts.config._experts_implementation = "eager"
    assert theirs.gate.num_group == 1  # their group step is executed, and changes nothing
    ours = build("kimi_linear", dtype=dtype)
    theirs.to(dtype).load_state_dict(
        {
            "gate.weight": ours.router.weight,
            "gate.e_score_correction_bias": ours.router.selection_bias,
            **{f"experts.{name}": p for name, p in ours.experts.named_parameters()},
            **{f"shared_experts.{name}": p for name, p in ours.shared_experts.named_parameters()},
        }
    )
    # their router rounds the scores to fp32
    assert_same(ours(inputs(2, 40, dtype=dtype)), theirs(inputs(2, 40, dtype=dtype)), 1e-6)


def test_the_bias_chooses_and_does_not_weigh():
    """A released implementation adds the bias to the scores in place, and with it to the weights."""
    router = build().router
    x = inputs(50)
    _, weights, chosen = router(x)
    scores = torch.sigmoid(x @ router.weight.T)
    assert_same(weights, 2.446 * scores.gather(1, chosen) / scores.gather(1, chosen).sum(1, keepdim=True))
    favourite = int(torch.bincount(chosen.flatten(), minlength=8).argmin())
    router.selection_bias[favourite] += 10
    _, moved_weights, moved = router(x)
    assert (moved == favourite).any(1).all() and not (chosen == favourite).any(1).all()
    # nobody else's score changed, and what is chosen in both cases is weighed by the same scores
    assert_same(moved_weights.sum(1), torch.full((50,), 2.446))
    assert_same(moved_weights, 2.446 * scores.gather(1, moved) / scores.gather(1, moved).sum(1, keepdim=True))
    # the same bias on all experts is no bias
    router.selection_bias += 3
    assert torch.equal(router(x)[2].sort(1).values, moved.sort(1).values)


def test_the_bias_is_saved_and_never_learned():
    moe = build()
    assert "router.selection_bias" in moe.state_dict()
    assert "router.selection_bias" not in dict(moe.named_parameters())
    moe(inputs(1, 6)).sum().backward()
    assert moe.router.selection_bias.grad is None and not moe.router.selection_bias.requires_grad


def test_router_and_shared_experts_read_the_full_width():
    """Only the routed experts read the latent, and the norm comes after the sum, before the projection up."""
    moe = build("kimi_k3")
    with torch.no_grad():
        moe.latent_down_proj.weight.zero_()
    x = inputs(2, 4)
    assert_same(moe(x), moe.shared_experts(x))
    assert_different(moe(x)[0], moe(x)[1])
    assert moe.router.weight.shape == (8, 32) and moe.latent_norm.weight.shape == (16,)
    assert moe.experts.gate_up_proj.shape == (8, 48, 16) and moe.experts.down_proj.shape == (8, 16, 24)


def test_shared_experts_are_one_mlp():
    """Two shared experts are one MLP of twice the width, with the names of one."""
    moe = build("kimi_k3")
    assert isinstance(moe.shared_experts, MLP)
    assert moe.shared_experts.up_proj.weight.shape == (48, 32)
    assert {name for name, _ in moe.named_parameters() if name.startswith("shared")} == {
        f"shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")
    }
    # upcycled models give it the width of the MLP that it was
    assert build("kimi_k3", shared_intermediate_size=40).shared_experts.up_proj.weight.shape == (40, 32)


def test_situ_caps_both_branches_of_an_expert():
    """The values of the report for equal branches: 1 -> 0.71582, 4 -> 11.86526, 1000 -> 100."""
    experts = build("kimi_k3").experts
    branch = torch.tensor([[1.0, 2.0, 4.0, 8.0, -1.0, -4.0, 1000.0]])
    expected = torch.tensor([[0.71582, 3.24932, 11.86526, 29.82732, 0.26333, 0.21732, 100.0]])
    torch.testing.assert_close(experts._apply_gate(torch.cat([branch, branch], 1)), expected, rtol=0, atol=1e-4)
    zeros = torch.zeros_like(branch)
    gate_only = experts._apply_gate(torch.cat([branch, zeros + 1000], 1))
    assert_same(gate_only, 25 * 4 * torch.tanh(branch / 4) * torch.sigmoid(branch))


def test_the_latent_norm_cancels_the_scaling_factor():
    plain, scaled = (
        build("kimi_k3", dtype=torch.float64, routed_scaling_factor=f, norm_eps=1e-12) for f in (1.0, 7.0)
    )
    assert_same(scaled(inputs(2, 4, dtype=torch.float64)), plain(inputs(2, 4, dtype=torch.float64)), 1e-9)
    plain, scaled = (build(routed_scaling_factor=factor) for factor in (1.0, 7.0))
    assert_different(scaled(inputs(2, 4)), plain(inputs(2, 4)))


def test_an_upcycled_block_starts_as_its_shared_experts():
    """With a projection up of zeros the routed part is there, adds nothing, and still learns."""
    moe = build("kimi_k3")
    with torch.no_grad():
        moe.latent_up_proj.weight.zero_()
    x = inputs(2, 4)
    assert torch.equal(moe(x), moe.shared_experts(x))
    assert gradients(moe(x), moe.latent_up_proj.weight)[0].abs().max() > 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_token_does_not_depend_on_its_neighbours(implementation):
    """One token at a time, and beside padding, whatever padding holds."""
    moe = build("kimi_k3", implementation)
    x = inputs(3, 7)
    together = moe(x)
    assert_same(moe(x[:, 3:4]), together[:, 3:4])
    padded = torch.cat([torch.full_like(x[:, :2], 1e4), x], dim=1)
    assert_same(moe(padded)[:, 2:], together)


@pytest.mark.parametrize(("size", "dtype"), [(16, torch.float64), (15, torch.bfloat16), (15, torch.float32)], ids=str)
def test_sizes_and_dtypes_that_no_kernel_takes_are_computed_all_the_same(size, dtype):
    """fp64, and rows that are no multiple of 16 bytes: transformers' default refuses both."""
    x = inputs(2, 4, dtype=dtype)
    expected, actual = (
        build("kimi_k3", implementation, dtype, routed_expert_hidden_size=size)(x)
        for implementation in ("eager", "grouped_mm")
    )
    assert_same(actual, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_sum_over_experts_is_rounded_once(implementation):
    """Experts that give their bias, and nothing of x."""
    experts = build("gpt2", implementation, torch.bfloat16, num_experts_per_token=8).experts
    with torch.no_grad():
        experts.down_proj.zero_()
    weights = torch.rand(50, 8) / 4
    actual = experts(inputs(50, dtype=torch.bfloat16), torch.arange(8).expand(50, 8), weights)
    exact = weights.double() @ experts.down_bias.double()
    half_a_step = exact.abs() * 2**-8 + 1e-6
    assert ((actual.double() - exact).abs() <= half_a_step).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_experts_of_other_ranks_add_nothing(implementation):
    """Expert parallelism gives them the index that is one too many, and the weight 0."""
    experts = build("kimi_linear", implementation).experts
    experts._is_expert_parallel = True
    chosen, weights = torch.tensor([[1, 8, 8], [8, 8, 8], [2, 5, 8]]), torch.rand(3, 3)
    actual = experts(inputs(3), chosen, weights.masked_fill(chosen == 8, 0.0))
    alone = experts(inputs(3)[:1], chosen[:1, :1], weights[:1, :1])
    both = experts(inputs(3)[2:], chosen[2:, :2], weights[2:, :2])
    assert_same(actual, torch.cat([alone, torch.zeros_like(alone), both]))


def test_the_router_stays_in_fp32_under_autocast():
    moe = build("kimi_k3")
    x = inputs(2, 40)
    expected = moe.router(x.flatten(0, 1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = moe.router(x.flatten(0, 1))
        y = moe(x)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert_same(y, moe(x), 2e-2)


@pytest.mark.parametrize(("kind", "implementation"), [("gpt2", "batched_mm"), ("kimi_k3", "grouped_mm")])
def test_compiles_as_one_graph(kind, implementation):
    moe = build(kind, implementation)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    x = inputs(2, 6).requires_grad_()
    actual, expected = compiled(x), moe(x)
    assert_same(actual, expected)
    pairs = zip(gradients(actual, *moe.parameters()), gradients(expected, *moe.parameters()), strict=True)
    for of_actual, of_expected in pairs:
        assert_same(of_actual, of_expected)


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_exports_with_a_length_that_may_change(implementation):
    moe = build("kimi_k3", implementation)
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(moe, (inputs(2, 5),), dynamic_shapes=({1: length},))
    assert_same(program.module()(inputs(2, 11)), moe(inputs(2, 11)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputing_activations_changes_no_gradient(reentrant):
    moe = build("kimi_k3")
    x = inputs(2, 6).requires_grad_()
    moe(x).square().sum().backward()
    expected = [x.grad, *(p.grad for p in moe.parameters())]
    x.grad = None
    moe.zero_grad()
    torch.utils.checkpoint.checkpoint(moe, x, use_reentrant=reentrant).square().sum().backward()
    for actual, wanted in zip([x.grad, *(p.grad for p in moe.parameters())], expected, strict=True):
        assert_same(actual, wanted)


def test_routing_can_be_recorded_as_in_transformers():
    moe = build()
    seen = []
    moe.router.register_forward_hook(lambda module, args, output: seen.append(output))
    x = inputs(2, 5)
    moe(x)
    logits, weights, chosen = seen[0]
    assert_same(logits, x.flatten(0, 1) @ moe.router.weight.T)
    assert weights.shape == chosen.shape == (10, 3) and weights.dtype == torch.float32


def test_fresh_experts_have_the_configured_spread_and_no_bias():
    config = KDAConfig(
        num_experts=16, num_experts_per_token=2, hidden_size=64, num_attention_heads=2, initializer_range=0.3
    )
    moe = MoE(config)
    for weight in (moe.router.weight, moe.experts.up_proj, moe.experts.down_proj):
        assert abs(weight.std().item() - 0.3) < 0.03
    for bias in (moe.router.selection_bias, moe.experts.up_bias, moe.experts.down_bias):
        assert not bias.any()
    assert moe.router.weight.dtype == torch.float32


def model_with_experts(**overrides):
    """A dense layer, then one with experts."""
    fields = {"num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 16, "mlp_gated": True}
    model = tiny_model(["kda", "softmax"], **{**fields, **overrides})
    model.model.layers[1].mlp.router.selection_bias.copy_(torch.linspace(-0.2, 0.2, 8))
    return model


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_decoding_equals_one_pass(implementation):
    model, ids = model_with_experts(), tokens(2, 9)
    assert isinstance(model.model.layers[0].mlp, MLP) and isinstance(model.model.layers[1].mlp, MoE)
    expected = model(ids).logits
    model.set_experts_implementation(implementation)
    output = model(ids[:, :6], use_cache=True)
    logits = [output.logits]
    for position in range(6, 9):
        logits.append(model(ids[:, position : position + 1], cache=output.cache).logits)
    assert_same(torch.cat(logits, dim=1), expected)


def test_router_logits_are_given_when_asked_for():
    model, ids = model_with_experts(), tokens(2, 9)
    seen = []
    model.model.layers[1].mlp.router.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    output = model(ids, output_router_logits=True)
    assert len(output.router_logits) == 1 and output.router_logits[0].shape == (18, 8)
    assert torch.equal(output.router_logits[0], seen[0])
    assert torch.equal(model.model(ids, output_router_logits=True).router_logits[0], seen[0])
    assert model(ids).router_logits is None


def test_a_model_in_bf16_keeps_its_routers_in_fp32(tmp_path):
    model = model_with_experts()
    model.save_pretrained(tmp_path)
    loaded = KDAForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).model.layers[1].mlp
    assert loaded.experts.down_proj.dtype == torch.bfloat16
    for name, tensor in model.model.layers[1].mlp.router.state_dict().items():
        assert torch.equal(loaded.router.state_dict()[name], tensor)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_that_recomputes_has_the_same_gradients(reentrant):
    plain, recomputing = model_with_experts().train(), model_with_experts().train()
    recomputing.activation_checkpointing_enable({"use_reentrant": reentrant})
    for model in (plain, recomputing):
        model(tokens(2, 9), labels=tokens(2, 9)).loss.backward()
    for (name, expected), actual in zip(plain.named_parameters(), recomputing.parameters(), strict=True):
        # what all keys share has no gradient in a softmax layer, only rounding
        if "k_proj.bias" not in name:
            assert_same(actual.grad, expected.grad)
