"""Numbers and formulas of the Kimi Linear and Kimi K3 reports, and mistakes that others made with them."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_different, assert_same, tiny_model
from recurrence import PATHS

from modeling_kda.layers import Decay, SiTU, l2norm
from modeling_kda.token_layout import TokenLayout

# the numbers below are given with six or seven digits
DIGITS = 2e-6
EXACT = 1e-10
FORMS = {
    "kimi_linear": {"decay_gate": "softplus", "output_gate": "low_rank"},
    "kimi_k3": {"decay_gate": "lower_bound", "output_gate": "full"},
}
# log-decays of the bias alone after initialisation: the 5 %, 50 % and 95 % quantiles
START = {None: [-0.768, -0.0707, -0.0062], -5.0: [-0.382, -0.0495, -0.0063]}


def fp64(*values):
    return torch.tensor(values, dtype=torch.float64)


# --- the recurrence: decay, predict from what is left, write, read


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_two_steps_of_the_recurrence(path):
    state = fp64([1, 2], [3, 4])[None, None]
    q, k, v = l2norm(fp64([1, 2], [3, -1])), l2norm(fp64([1, 0], [1, 1])), fp64([1, -1], [2, 0.5])
    log_decay, beta = fp64([-0.1, -0.5], [-1, -0.2]), fp64(0.5, 0.8)
    expected_o = fp64([1.451992, 1.662436], [0.078711, -0.599731])
    expected_states = [
        fp64([0.952419, 0.404839], [1.819592, 2.426123]),
        fp64([0.745694, -0.422334], [1.885074, 1.415075]),
    ]
    for steps, expected_state in enumerate(expected_states, 1):
        inputs = (x[None, :steps, None] for x in (q, k, v))
        o, final = path(*inputs, beta[None, :steps, None], log_decay[None, :steps, None], state)
        assert_same(o[0, :, 0], expected_o[:steps], DIGITS)
        assert_same(final[0, 0], expected_state, DIGITS)


# --- the gate


def log_decay(z, A_log, lower_bound):
    decay = Decay(1, 1, lower_bound).double()
    with torch.no_grad():
        decay.A_log.fill_(A_log)
        decay.dt_bias.zero_()
        return decay(fp64(z).view(1, 1, 1, 1))[0].flatten()


@pytest.mark.parametrize(
    "z, A_log, softplus, bounded",
    [
        (-3.0, 0.0, -0.048587, -0.237129),
        (-3.0, 1.0, -0.132074, -0.00143629),
        (2.0, math.log(8), -17.015424, -4.9999994),
    ],
)
def test_both_forms_of_the_gate(z, A_log, softplus, bounded):
    assert_same(log_decay(z, A_log, None), fp64(softplus), 1e-5)
    assert_same(log_decay(z, A_log, -5.0), fp64(bounded), 1e-5)
    # the bounded form is another function, no limit on the first
    assert_different(log_decay(z, A_log, -5.0), log_decay(z, A_log, None).clamp_min(-5.0), 1e-7)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_bias_per_channel_and_rate_per_head(lower_bound):
    """dt_bias goes head by head, and is added before the rate multiplies."""
    decay, logits = Decay(2, 3, lower_bound).double(), torch.randn(1, 1, 2, 3, dtype=torch.float64)
    with torch.no_grad():
        decay.A_log.copy_(fp64(0.5, -1.0))
        decay.dt_bias.copy_(torch.arange(6) / 4 - 1)
        got = decay(logits)[0]
    for head, A in enumerate((math.exp(0.5), math.exp(-1.0))):
        for channel in range(3):
            z = logits[0, 0, head, channel].item() + (3 * head + channel) / 4 - 1
            expected = -A * math.log1p(math.exp(z)) if lower_bound is None else lower_bound / (1 + math.exp(-A * z))
            assert got[0, 0, head, channel].item() == pytest.approx(expected, rel=EXACT)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_gradients_of_the_gate_are_finite_for_large_logits(lower_bound):
    """log(1 + exp(z)) overflows from 89 on in fp32, also in a branch that is not used."""
    decay, logits = Decay(1, 1, lower_bound), torch.tensor([-200.0, -89.0, 0.0, 21.0, 89.0, 200.0]).view(1, -1, 1, 1)
    logits.requires_grad_()
    decay(logits)[0].sum().backward()
    for tensor in (logits, decay.A_log, decay.dt_bias):
        assert tensor.grad.isfinite().all()
    if lower_bound is None:
        assert (logits.grad[0, -2:] != 0).all()


@pytest.mark.parametrize("lower_bound", START)
def test_fresh_gates_forget_as_documented(lower_bound):
    """Rates of the softplus form in the bounded one would leave a median of -2e-15, no bias one of -2.5."""
    decay = Decay(1000, 16, lower_bound)
    with torch.no_grad():
        start = decay(torch.zeros(1, 1, 1000, 16))[0].flatten()
    quantiles = start.quantile(torch.tensor([0.05, 0.5, 0.95]))
    for got, expected in zip(quantiles.tolist(), START[lower_bound], strict=True):
        assert got == pytest.approx(expected, rel=0.1)
    if lower_bound is not None:
        assert not decay.A_log.any()
        assert start.min() > -0.476 and start.max() < -0.0049


# --- unit length


def test_epsilon_is_added_inside_the_root():
    for size in (0.0, 1e-4, 1e-3, 1.0):
        x = size * fp64(0.6, -0.8)
        assert_same(l2norm(x), x / math.sqrt(size**2 + 1e-6), EXACT)
    assert_different(l2norm(1e-3 * fp64(0.6, -0.8)), F.normalize(1e-3 * fp64(0.6, -0.8), dim=-1, eps=1e-6))


# --- SiTU


def test_situ():
    situ = SiTU(4.0, 25.0)
    x = fp64(1, 2, 4, 8, -1, -4, 1000)
    expected = fp64(0.71582, 3.24932, 11.86526, 29.82732, 0.26333, 0.21732, 100)
    assert situ(x, x).tolist() == pytest.approx(expected.tolist(), rel=3e-5)
    # the lowest value of the gate branch; SiLU's is -0.27846
    gates = torch.linspace(-3, 0, 30001, dtype=torch.float64)
    values = SiTU(4.0, None)(gates, torch.ones_like(gates))
    assert values.min().item() == pytest.approx(-0.26977, abs=1e-5)
    assert gates[values.argmin()].item() == pytest.approx(-1.21880, abs=2e-4)


def test_situ_bounds_both_branches_or_only_the_gate():
    large, one = fp64(1e4), fp64(1.0)
    assert SiTU(4.0, 25.0)(one, large).item() == pytest.approx(25 * SiTU(4.0, None)(one, one).item())
    assert SiTU(4.0, None)(one, large).item() == pytest.approx(1e4 * SiTU(4.0, None)(one, one).item())
    assert SiTU(4.0, None)(large, one).item() == pytest.approx(4)


def test_situ_is_computed_in_fp32():
    x = torch.linspace(-6, 6, 200).to(torch.bfloat16)
    got = SiTU(4.0, 25.0)(x, x)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, SiTU(4.0, 25.0)(x.float(), x.float()).to(torch.bfloat16))


# --- a KDA layer, step by step


def kda_layer(mixer, x, fault=None):
    """What the reports say, in the order in which they say it. fault: one thing done as it should not be."""
    H, K = mixer.decay.A_log.shape[0], mixer.head_dim
    heads = {}
    for name in "qkv":
        y = getattr(mixer, f"{name}_proj")(x).transpose(1, 2)
        weight = getattr(mixer, f"{name}_conv1d").weight
        weight = weight.flip(-1) if fault == "taps reversed" else weight
        y = F.conv1d(F.pad(y, (weight.shape[-1] - 1, 0)), weight, groups=y.shape[1])
        y = y if fault == "no SiLU" else F.silu(y)
        heads[name] = y.transpose(1, 2).unflatten(-1, (H, -1))
    q, k, v = heads.values()
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    q = q * K**-0.5
    beta = mixer.beta_proj(x).sigmoid()
    bias, A = mixer.decay.dt_bias, mixer.decay.A_log.exp()[:, None]
    bias = bias.view(K, H).T if fault == "bias channel by channel" else bias.view(H, K)
    z = mixer.decay_b_proj(mixer.decay_a_proj(x)).unflatten(-1, (H, K)) + bias
    g = -A * F.softplus(z) if mixer.decay.lower_bound is None else mixer.decay.lower_bound * (A * z).sigmoid()
    S, o = x.new_zeros(x.shape[0], H, K, v.shape[-1]), []
    for t in range(x.shape[1]):
        undecayed, S = S, S * g[:, t].exp()[..., None]
        seen = undecayed if fault == "predicted from the undecayed state" else S
        r = v[:, t] - torch.einsum("bhkv,bhk->bhv", seen, k[:, t])
        unwritten, S = S, S + beta[:, t, :, None, None] * k[:, t, ..., None] * r[:, :, None]
        o.append(torch.einsum("bhkv,bhk->bhv", unwritten if fault == "read before the write" else S, q[:, t]))
    o = torch.stack(o, 1)
    if hasattr(mixer, "output_gate_proj"):
        gate = mixer.output_gate_proj(x)
    else:
        gate = mixer.output_gate_b_proj(mixer.output_gate_a_proj(x))
    gate = gate.view_as(o)
    if fault == "gate before the norm":
        y = F.rms_norm(o * gate.sigmoid(), o.shape[-1:], mixer.o_norm.weight, mixer.o_norm.eps)
    else:
        y = F.rms_norm(o, o.shape[-1:], mixer.o_norm.weight, mixer.o_norm.eps)
        y = y * (F.silu(gate) if fault == "SiLU gate" else gate.sigmoid())
    return mixer.o_proj(y.flatten(2))


def kimi_layer(form):
    fields = {"mlp_gated": True, "norm": "rmsnorm", "attention_bias": False, "mlp_bias": False}
    fields |= {"position_embedding": "none", "short_conv_activation": "silu", "hidden_act": "situ"}
    model = tiny_model(["kda"], **fields, **FORMS[form]).double()
    return model.model.layers[0].mixer, torch.randn(2, 30, 32, dtype=torch.float64)


@pytest.mark.parametrize("form", FORMS)
def test_a_kda_layer_is_the_reports_step_by_step(form):
    mixer, x = kimi_layer(form)
    assert_same(mixer(x)[0], kda_layer(mixer, x), EXACT)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "fault",
    [
        "taps reversed",
        "no SiLU",
        "bias channel by channel",
        "predicted from the undecayed state",
        "read before the write",
        "gate before the norm",
        "SiLU gate",
    ],
)
def test_every_detail_of_the_layer_shows(form, fault):
    mixer, x = kimi_layer(form)
    assert_different(kda_layer(mixer, x, fault), mixer(x)[0])


@pytest.mark.parametrize("form", FORMS)
def test_write_strengths_and_decays_of_a_bf16_layer_are_fp32(form):
    """A sigmoid in bf16 would be off by up to 2.7e-3, and a decay in bf16 forgets another past."""
    mixer, x = kimi_layer(form)
    mixer, x = mixer.to(torch.bfloat16), x.to(torch.bfloat16)
    mixer.decay.float()
    projected = mixer._project(x)
    beta, log_decay = mixer._gates(projected, TokenLayout())
    assert projected.beta_logits.dtype == projected.decay_logits.dtype == torch.bfloat16
    assert beta.dtype == log_decay.dtype == torch.float32
    exact = projected.beta_logits.double().sigmoid()
    assert_same(beta, exact, DIGITS)
    assert_different(projected.beta_logits.sigmoid(), exact, 1e-3)
    wide = copy.deepcopy(mixer.decay).double()(projected.decay_logits.double())[0]
    assert_same(log_decay, wide, DIGITS)
