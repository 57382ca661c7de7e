"""The model's forward for every stage: masks, positions, outputs, options, dtypes, and what it refuses."""

import copy

import pytest
import torch
from helpers import PATTERNS, RECURRENT_PATTERNS, ROUNDING, assert_different, assert_same, tiny_model, tokens
from torch import nn

from modeling_kda import KDACache, KDAForCausalLM, KDAForSequenceClassification, KDAModel

every_pattern = pytest.mark.parametrize("stages", PATTERNS)
recurrent_patterns = pytest.mark.parametrize("stages", RECURRENT_PATTERNS)
# mean error of logits of order one; single values may differ more where a norm sees a nearly empty state
HALF_PRECISION = 0.1

OPTIONS = {
    "no convolution": {"short_conv_kernel_size": 0},
    "two taps, silu": {"short_conv_kernel_size": 2, "short_conv_activation": "silu"},
    "one tap": {"short_conv_kernel_size": 1},
    "four taps, relu": {"short_conv_activation": "relu"},
    "no gate": {"output_gate": "none"},
    "full gate": {"output_gate": "full"},
    "low-rank gate of rank 3": {"output_gate_rank": 3, "decay_rank": 5},
    "no output norm": {"output_norm": False},
    "two value heads per key head": {"num_value_heads": 4},
    "three narrow value heads per key head": {"num_value_heads": 6, "value_head_dim": 4},
    "wide values": {"value_head_dim": 24},
    "wide keys": {"head_dim": 24, "value_head_dim": 8},
    "bounded decay": {"decay_gate": "lower_bound"},
    "hedgehog": {"feature_map": "hedgehog"},
    "llama-like": {"norm": "rmsnorm", "mlp_gated": True, "hidden_act": "silu", "position_embedding": "none"},
    "no bias": {"attention_bias": False, "mlp_bias": False},
    "not tied": {"tie_word_embeddings": False},
}


@torch.no_grad()
def one_shot(model, ids, **inputs):
    return model(ids, use_cache=False, **inputs).logits


@torch.no_grad()
def in_parts(model, ids, cuts, cache=None):
    """Logits of the same tokens in several calls that share a cache."""
    cache = KDACache(model.config) if cache is None else cache
    return torch.cat([model(part, cache=cache).logits for part in ids.tensor_split(cuts, dim=1)], 1)


def causal(B, S, T=None, real=None):
    """[B, 1, T, S] bool: each of the last T tokens sees the real ones up to itself."""
    mask = torch.ones(S, S, dtype=torch.bool).tril().expand(B, 1, S, S)
    mask = mask if real is None else mask & real[:, None, None]
    return mask[:, :, S - (T or S) :]


# --- the woken model depends on everything


@every_pattern
def test_every_token_of_the_past_matters(stages):
    """Without this the equalities below could hold for a model that forgets everything."""
    model, ids = tiny_model(stages), tokens(1, 12)
    full = one_shot(model, ids)
    for i in range(11):
        other = ids.clone()
        other[0, i] = (ids[0, i] + 1) % 97
        changed = one_shot(model, other)
        assert torch.equal(changed[:, :i], full[:, :i])
        assert_different(changed[:, i + 1 :], full[:, i + 1 :])


# --- numerics


@every_pattern
@pytest.mark.parametrize("length", [17, 65, 70])
def test_nothing_of_the_future_leaks_into_logits_or_gradients(stages, length):
    model, ids = tiny_model(stages), tokens(1, length)
    other = ids.clone()
    other[0, -1] = 5 if ids[0, -1] != 5 else 6
    results = []
    for row in (ids, other):
        embeds = model.model.embed_tokens(row).detach().requires_grad_()
        logits = model(inputs_embeds=embeds).logits[:, :-1]
        logits.square().sum().backward()
        results.append((logits.detach(), embeds.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1][:, :-1], results[1][1][:, :-1])
    assert not results[0][1][:, -1].any()


@every_pattern
@pytest.mark.parametrize("length", [5, 63, 64, 65])
def test_one_pass_equals_prefill_and_one_step(stages, length):
    model, ids = tiny_model(stages), tokens(2, length)
    assert_same(in_parts(model, ids, [length - 1]), one_shot(model, ids))


@recurrent_patterns
def test_bf16_paths_differ_by_rounding_only(stages):
    exact, ids = tiny_model(stages), tokens(2, 40)
    model = copy.deepcopy(exact).bfloat16()
    full, stepped = one_shot(model, ids), in_parts(model, ids, [39])
    assert full.dtype == stepped.dtype == torch.bfloat16
    rounding = (full - one_shot(exact, ids)).abs().mean()
    assert (full - stepped).abs().mean() <= 2 * rounding


@pytest.mark.parametrize("one_channel", [False, True])
@pytest.mark.parametrize("stages", ["ssd", "gated_delta", "kda"])
def test_extreme_decay_is_finite_and_the_same_in_chunks_and_steps(stages, one_channel):
    model, ids = tiny_model(stages), tokens(1, 65)

    def nearly_forget(module, args, outputs):
        log_decay, *others = outputs
        extreme = torch.full_like(log_decay, -27.6)
        if one_channel:
            extreme = torch.zeros_like(log_decay)
            extreme[..., 0] = -27.6
        return extreme, *others

    for layer in model.model.layers:
        layer.mixer.decay.register_forward_hook(nearly_forget)
    full = one_shot(model, ids)
    assert torch.isfinite(full).all()
    assert_same(in_parts(model, ids, list(range(1, 65))), full)


@pytest.mark.parametrize("stages", ["linear", "delta", "ssd", "gated_delta", "kda"])
def test_large_values_do_not_overflow_in_half_precision(stages):
    """Sums over the past are unbounded: kept in fp16 they would pass 65504."""
    model, ids = tiny_model(stages, max_position_embeddings=512), tokens(1, 512)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mixer.v_proj.weight.mul_(1000)
            if stages == "ssd":  # large steps, and still hardly any decay
                layer.mixer.decay.A_log.fill_(-8.0)
                layer.mixer.decay.dt_bias.fill_(2.0)
            elif hasattr(layer.mixer, "decay"):
                layer.mixer.decay.dt_bias.fill_(-8.0)
    exact = one_shot(model, ids)
    half = one_shot(model.half(), ids).float()
    assert torch.isfinite(half).all()
    assert nn.functional.cosine_similarity(half.flatten(), exact.flatten(), dim=0) > 0.99


@pytest.mark.parametrize("feature_map", ["elu", "hedgehog"])
def test_a_vanishing_normaliser_stays_finite(feature_map):
    model, ids = tiny_model("linear", feature_map=feature_map), tokens(1, 20)
    for layer in model.model.layers:
        for name in ("q_feature_map", "k_feature_map"):
            getattr(layer.mixer, name).register_forward_hook(lambda module, args, features: features * 1e-8)
    full = one_shot(model, ids)
    assert torch.isfinite(full).all()
    assert_same(in_parts(model, ids, [7, 8]), full)


def test_dt_bias_belongs_to_one_channel_of_one_head():
    model, ids = tiny_model(["kda"]), tokens(1, 30)
    mixer, outputs = model.model.layers[0].mixer, []
    mixer.o_norm.register_forward_hook(lambda module, args, y: outputs.append(y))
    one_shot(model, ids)
    with torch.no_grad():
        mixer.decay.dt_bias[3] += 2.0
    one_shot(model, ids)
    assert_different(outputs[1][:, :, 0], outputs[0][:, :, 0])
    assert torch.equal(outputs[1][:, :, 1], outputs[0][:, :, 1])


def test_a_nan_stays_in_its_row():
    model, ids = tiny_model("softmax_inside"), tokens(3, 9)
    embeds = model.model.embed_tokens(ids).detach()
    poisoned = embeds.clone()
    poisoned[0, 3] = float("nan")
    with torch.no_grad():
        cache, clean = KDACache(model.config), KDACache(model.config)
        got = model(inputs_embeds=poisoned, cache=cache).logits
        expected = model(inputs_embeds=embeds, cache=clean).logits
        assert got[0, 3:].isnan().all()
        assert torch.equal(got[1:], expected[1:])
        for step in tokens(5, 3, 1, seed=4):
            got, expected = model(step, cache=cache).logits, model(step, cache=clean).logits
            assert torch.equal(got[1:], expected[1:])
        assert torch.isfinite(one_shot(model, ids)).all()


# --- masks


@every_pattern
def test_a_mask_of_ones_in_any_form_changes_nothing(stages):
    model, ids = tiny_model(stages), tokens(2, 9)
    full = one_shot(model, ids)
    ones = torch.ones(2, 9)
    additive = torch.zeros(2, 1, 9, 9).masked_fill(~causal(2, 9), torch.finfo(torch.float32).min)
    for mask in (ones.long(), ones.bool(), ones, ones.int(), causal(2, 9), causal(2, 9).long(), additive):
        assert_same(one_shot(model, ids, attention_mask=mask), full)
    by_kind = {"full_attention": causal(2, 9), "linear_attention": None}
    positions = torch.arange(9)[None]
    assert_same(one_shot(model, ids, attention_mask=by_kind, position_ids=positions), full)


@every_pattern
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_padding_may_be_said_in_any_form(stages, attention):
    model, ids = tiny_model(stages), tokens(2, 9)
    model.set_attn_implementation(attention)
    real = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 0]]).bool()
    expected = one_shot(model, ids, attention_mask=real)[real]
    lowest = torch.finfo(torch.float32).min
    forms = [real.long(), real.float(), causal(2, 9, real=real), causal(2, 9, real=real).int()]
    forms += [torch.zeros(2, 1, 9, 9).masked_fill(~causal(2, 9, real=real), value) for value in (lowest, -1e9)]
    for mask in forms:
        assert_same(one_shot(model, ids, attention_mask=mask)[real], expected)
    positions = (real.long().cumsum(-1) - 1).clamp_min(0)
    by_kind = {"full_attention": causal(2, 9, real=real), "linear_attention": real}
    assert_same(one_shot(model, ids, attention_mask=by_kind, position_ids=positions)[real], expected)


@every_pattern
def test_a_4d_mask_continues_from_a_cache(stages):
    model, ids = tiny_model(stages), tokens(1, 9)
    real = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 1, 1]]).bool()
    expected = one_shot(model, ids, attention_mask=real)[real]
    with torch.no_grad():
        cache = KDACache(model.config)
        first = model(ids[:, :4], attention_mask=causal(1, 4, real=real[:, :4]), cache=cache).logits
        second = model(ids[:, 4:], attention_mask=causal(1, 9, T=5, real=real), cache=cache).logits
    assert_same(torch.cat([first, second], 1)[real], expected)


@recurrent_patterns
@pytest.mark.parametrize("shape", ["everything", "window", "blocks", "per head", "biased"])
def test_a_4d_mask_that_a_state_cannot_honour_is_refused(stages, shape):
    model, ids = tiny_model(stages), tokens(1, 8)
    mask = causal(1, 8)
    if shape == "everything":
        mask = torch.ones_like(mask)
    elif shape == "window":
        mask = mask & ~mask.tril(-3)
    elif shape == "blocks":
        mask = mask & torch.block_diag(torch.ones(4, 4), torch.ones(4, 4)).bool()
    elif shape == "per head":
        mask = torch.cat([mask, mask & ~mask.tril(-3)], 1)
    else:
        mask = torch.zeros(1, 1, 8, 8).masked_fill(~mask, torch.finfo(torch.float32).min) - 0.5
    with pytest.raises(ValueError, match="must be causal"):
        model(ids, attention_mask=mask)


def test_a_softmax_model_takes_any_4d_mask():
    model, ids = tiny_model("softmax"), tokens(1, 8)
    blocks = causal(1, 8) & torch.block_diag(torch.ones(3, 3), torch.ones(5, 5)).bool()
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    separate = torch.cat([one_shot(model, ids[:, :3]), one_shot(model, ids[:, 3:])], 1)
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        mask = {"full_attention": blocks}
        assert_same(one_shot(model, ids, attention_mask=mask, position_ids=positions), separate)


@pytest.mark.parametrize("stages", ["softmax", "kda", "softmax_inside"])
@pytest.mark.parametrize(
    "mask, words",
    [
        (torch.ones(2, 8), "past"),
        (torch.ones(2, 10), "past"),
        (torch.ones(1, 9), "attention_mask"),
        (torch.ones(9), "attention_mask"),
        (torch.ones(2, 9, 9), "attention_mask"),
        (torch.ones(2, 1, 9, 8), "attention_mask"),
        (torch.ones(2, 1, 8, 9), "attention_mask"),
        (torch.ones(3, 1, 9, 9), "attention_mask"),
        (torch.zeros(2, 9) - torch.arange(9), "negative"),
    ],
)
def test_a_mask_of_another_shape_is_refused(stages, mask, words):
    with pytest.raises(ValueError, match=words) as error:
        tiny_model(stages)(tokens(2, 9), attention_mask=mask)
    assert "\n" not in str(error.value)


def test_a_dict_of_masks_must_be_complete_and_come_with_positions():
    model, ids = tiny_model("softmax_inside"), tokens(2, 9)
    positions = torch.arange(9)[None]
    with pytest.raises(ValueError, match="linear_attention"):
        model(ids, attention_mask={"full_attention": causal(2, 9)}, position_ids=positions)
    with pytest.raises(ValueError, match="linear_attention"):
        masks = {"full_attention": causal(2, 9), "linear_attention": torch.ones(2, 8)}
        model(ids, attention_mask=masks, position_ids=positions)
    with pytest.raises(ValueError, match="position_ids"):
        model(ids, attention_mask={"full_attention": causal(2, 9), "linear_attention": None})


# --- inputs and positions


@every_pattern
def test_inputs_embeds_stand_for_ids(stages):
    model, ids = tiny_model(stages), tokens(2, 9)
    embeds = model.get_input_embeddings()(ids).detach()
    with torch.no_grad():
        assert torch.equal(model(inputs_embeds=embeds).logits, model(ids).logits)
        cache = KDACache(model.config)
        parts = [model(ids[:, :4], cache=cache).logits, model(inputs_embeds=embeds[:, 4:], cache=cache).logits]
    assert_same(torch.cat(parts, 1), one_shot(model, ids))


def test_inputs_must_be_ids_or_embeds_and_hold_a_token():
    model = tiny_model()
    with pytest.raises(ValueError, match="exactly one"):
        model()
    with pytest.raises(ValueError, match="exactly one"):
        model(tokens(1, 3), inputs_embeds=torch.zeros(1, 3, 32))
    with pytest.raises(ValueError, match="at least one row and one token"):
        model(tokens(2, 0))
    cache = KDACache(model.config)
    model(tokens(2, 3), cache=cache)
    with pytest.raises(ValueError, match="at least one row and one token"):
        model(tokens(2, 0), cache=cache)


@pytest.mark.parametrize(
    "inputs, words",
    [
        ({"input_ids": torch.full((1, 3), 97)}, "from 0 to 96, got 97"),
        ({"input_ids": torch.tensor([[5, -100]])}, "from 0 to 96, got -100"),
        ({"input_ids": torch.ones(1, 3)}, "integers"),
        ({"input_ids": torch.ones(3, dtype=torch.long)}, r"\[B, T\]"),
        ({"input_ids": torch.ones(1, 1, 3, dtype=torch.long)}, r"\[B, T\]"),
        ({"input_ids": [[1, 2, 3]]}, "tensor, got list"),
        ({"input_ids": torch.ones(0, 3, dtype=torch.long)}, "at least one row"),
        ({"inputs_embeds": torch.zeros(3, 32)}, "hidden_size=32"),
        ({"inputs_embeds": torch.zeros(1, 3, 16)}, "hidden_size=32"),
        ({"input_ids": torch.ones(1, 3, dtype=torch.long), "attention_mask": [[1, 1, 1]]}, "attention_mask"),
    ],
)
def test_inputs_of_another_form_are_refused(inputs, words):
    for stages in ("softmax", "kda"):
        with pytest.raises(ValueError, match=words) as error:
            tiny_model(stages)(**inputs)
        assert "\n" not in str(error.value)


@recurrent_patterns
def test_a_recurrent_layer_cannot_look_ahead(stages):
    with pytest.raises(ValueError, match="is_causal"):
        tiny_model(stages)(tokens(1, 5), is_causal=False)


@every_pattern
def test_short_inputs_work_forward_and_backward(stages):
    model, long = tiny_model(stages), tokens(1, 9)
    full = one_shot(model, long)
    for length in range(1, 10):
        ids = long[:, :length]
        assert_same(one_shot(model, ids), full[:, :length])
        assert_same(in_parts(model, ids, list(range(1, length))), full[:, :length])
        model.zero_grad()
        model(ids).logits.square().mean().backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@every_pattern
def test_positions_may_be_given_as_one_row(stages):
    model, ids = tiny_model(stages), tokens(2, 9)
    full = one_shot(model, ids)
    for positions in (torch.arange(9), torch.arange(9)[None], torch.arange(9).expand(2, 9), torch.arange(9).int()):
        assert torch.equal(one_shot(model, ids, position_ids=positions), full)
    shifted = one_shot(model, ids, position_ids=torch.arange(9) + 5)
    assert_different(shifted, full)
    without = tiny_model(stages, position_embedding="none")
    assert torch.equal(one_shot(without, ids, position_ids=torch.arange(9) + 1000), one_shot(without, ids))


@pytest.mark.parametrize(
    "positions, words",
    [
        (torch.arange(8), "position_ids must be"),
        (torch.arange(27).view(3, 9), "position_ids must be"),
        (torch.arange(18).view(2, 1, 9), "position_ids must be"),
        (torch.arange(9).float(), "integers"),
        (torch.arange(9) - 1, "position -1"),
        (torch.arange(9) + 250, "max_position_embeddings=256.*position 258"),
    ],
)
def test_positions_that_do_not_fit_are_refused(positions, words):
    with pytest.raises(ValueError, match=words):
        tiny_model("softmax_inside")(tokens(2, 9), position_ids=positions)


@every_pattern
def test_learned_positions_end_with_a_clear_error(stages):
    model = tiny_model(stages, max_position_embeddings=16)
    one_shot(model, tokens(1, 16))
    with pytest.raises(ValueError, match="max_position_embeddings=16.*position 16"):
        model(tokens(1, 17))
    cache = KDACache(model.config)
    with torch.no_grad():
        model(tokens(1, 16), cache=cache)
        with pytest.raises(ValueError, match="position 16"):
            model(tokens(1, 1), cache=cache)
    assert cache.get_seq_length() == 16
    endless = tiny_model(stages, max_position_embeddings=16, position_embedding="none")
    assert torch.isfinite(one_shot(endless, tokens(1, 40))).all()


# --- outputs


@every_pattern
def test_logits_to_keep_is_a_slice_of_the_logits(stages):
    model, ids = tiny_model(stages), tokens(2, 9)
    full = one_shot(model, ids)
    some = torch.tensor([[0, 8], [3, 3]])
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[0, 2] = mask[1, 4:] = True
    pairs = [
        (1, full[:, -1:]),
        (3, full[:, -3:]),
        (0, full),
        (torch.tensor([0, 5]), full[:, [0, 5]]),
        (some, torch.stack([full[0, [0, 8]], full[1, [3, 3]]])),
        (mask, full[mask]),
    ]
    for keep, expected in pairs:
        assert_same(one_shot(model, ids, logits_to_keep=keep), expected)


@every_pattern
def test_hidden_states_and_attentions(stages):
    model, ids = tiny_model(stages), tokens(2, 9)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        outputs = model(ids, output_hidden_states=True, output_attentions=True)
        embeds = model.model.embed_tokens(ids) + model.model.embed_positions.weight[:9]
    hidden = outputs.hidden_states
    assert len(hidden) == model.config.num_hidden_layers + 1
    assert_same(hidden[0], embeds)
    assert_same(model.lm_head(hidden[-1]), outputs.logits)
    assert len(outputs.attentions or ()) == model.config.layer_types.count("full_attention")
    for weights in outputs.attentions or ():
        assert weights.shape == (2, 2, 9, 9)
        assert_same(weights.sum(-1), torch.ones(2, 2, 9))
        assert not weights.triu(1).any()


@pytest.mark.parametrize("stages", ["softmax", "softmax_inside"])
def test_attention_implementations_agree(stages):
    model, ids = tiny_model(stages), tokens(2, 9)
    real = torch.ones(2, 9, dtype=torch.long)
    real[0, :3] = real[1, 7:] = 0
    results = {}
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            cache = KDACache(model.config)
            padded = model(ids[:, :7], attention_mask=real[:, :7], cache=cache).logits
            rest = model(ids[:, 7:], attention_mask=real, cache=cache).logits
        results[attention] = torch.cat([padded, rest], 1)[real.bool()]
    assert_same(results["eager"], results["sdpa"])


@every_pattern
def test_the_old_name_of_the_cache_is_accepted(stages):
    model, ids = tiny_model(stages), tokens(1, 8)
    with torch.no_grad():
        new = model(ids[:, :5], use_cache=True)
        assert new["cache"] is new.cache
        assert new.past_key_values is new.cache
        expected = model(ids[:, 5:], cache=copy.deepcopy(new.cache)).logits
        with pytest.warns(FutureWarning, match="past_key_values"):
            old = model(ids[:, 5:], past_key_values=new.cache)
    assert torch.equal(old.logits, expected)
    assert old.cache is new.cache
    for inner in (model.model, model.model.layers[0]):
        with pytest.warns(FutureWarning, match="past_key_values"), torch.no_grad():
            if inner is model.model:
                inner(ids, past_key_values=None)
            else:
                inner(torch.zeros(1, 4, 32), past_key_values=None)


def test_tuples_are_returned_on_request():
    model, ids = tiny_model("softmax_inside"), tokens(1, 6)
    with torch.no_grad():
        logits, cache = model(ids, return_dict=False)
        loss, *_ = model(ids, labels=ids, return_dict=False)
    assert_same(logits, one_shot(model, ids))
    assert cache.get_seq_length() == 6
    assert loss.dim() == 0


@every_pattern
def test_the_loss_counts_the_items_it_is_told(stages):
    model, ids = tiny_model(stages), tokens(2, 9)
    labels = ids.clone()
    labels[0, :4] = -100
    with torch.no_grad():
        logits = model(ids).logits[:, :-1].flatten(0, 1)
        total = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        assert_same(model(ids, labels=labels).loss, total / 13)
        assert_same(model(ids, labels=labels, num_items_in_batch=torch.tensor(50)).loss, total / 50)


# --- options


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_decodes_pads_and_saves(options, tmp_path):
    model, ids = tiny_model("every_stage", **options), tokens(2, 20)
    full = one_shot(model, ids)
    assert_different(full, one_shot(tiny_model("every_stage"), ids))
    assert_same(in_parts(model, ids, [3, 4, 5, 17]), full)
    real = torch.ones(2, 23, dtype=torch.bool)
    real[0, [0, 5, 22]] = real[1, [7, 8, 9]] = False
    padded = tokens(2, 23, seed=5).masked_scatter(real, ids)
    assert_same(one_shot(model, padded, attention_mask=real)[real].view_as(full), full)
    model.save_pretrained(tmp_path)
    assert torch.equal(one_shot(KDAForCausalLM.from_pretrained(tmp_path), ids), full)


@pytest.mark.parametrize("ratio", [2, 3])
@pytest.mark.parametrize("stages", ["linear", "delta", "ssd", "gated_delta", "kda"])
def test_grouped_value_heads_read_the_key_head_they_belong_to(stages, ratio):
    """Equal to a model whose query and key projections are repeated for every value head."""
    grouped = tiny_model(stages, num_value_heads=2 * ratio, head_dim=8, value_head_dim=4, feature_map="hedgehog")
    plain = tiny_model(stages, num_attention_heads=2 * ratio, head_dim=8, value_head_dim=4, feature_map="hedgehog")

    def repeated(rows, per_head):
        heads = rows.view(2, per_head, *rows.shape[1:])
        return heads.repeat_interleave(ratio, 0).flatten(0, 1)

    weights = grouped.state_dict()
    for name, weight in weights.items():
        if any(part in name for part in ("q_proj", "k_proj", "q_conv1d", "k_conv1d")):
            weights[name] = repeated(weight, 8)
        elif "feature_map" in name:
            weights[name] = repeated(weight, 1)
    plain.load_state_dict(weights)
    ids = tokens(2, 20)
    assert_same(one_shot(plain, ids), one_shot(grouped, ids))


def test_wide_values_survive_a_chunk_boundary():
    """A state written as [K, V] and read as [V, K] shows only where K is not V."""
    model, ids = tiny_model("every_stage", value_head_dim=32), tokens(1, 200)
    assert_same(in_parts(model, ids, [130]), one_shot(model, ids))


# --- dtypes


@every_pattern
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_runs_in_every_mode(stages, dtype):
    exact, ids = tiny_model(stages), tokens(2, 12)
    expected = one_shot(exact, ids)
    model = copy.deepcopy(exact).to(dtype)
    full = one_shot(model, ids)
    stepped = in_parts(model, ids, [8, 9, 10, 11])
    for logits in (full, stepped):
        assert logits.dtype == dtype
        assert (logits.float() - expected).abs().mean() < HALF_PRECISION
    model(ids, labels=ids).loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@every_pattern
def test_autocast_runs_in_every_mode(stages):
    model, ids = tiny_model(stages), tokens(2, 12)
    expected = one_shot(model, ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        full, stepped = one_shot(model, ids), in_parts(model, ids, [8, 9, 10, 11])
        loss = model(ids, labels=ids).loss
    for logits in (full, stepped):
        assert logits.dtype == torch.bfloat16
        assert (logits.float() - expected).abs().mean() < HALF_PRECISION
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@every_pattern
def test_double_precision_is_double_throughout(stages):
    model, ids = tiny_model(stages).double(), tokens(1, 40)
    full = one_shot(model, ids)
    assert full.dtype == torch.float64
    assert_same(in_parts(model, ids, [17, 18]), full, budget=1e-6 * ROUNDING)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stages", ["ssd", "gated_delta", "kda"])
def test_decay_parameters_stay_exact_when_the_rest_is_rounded(stages, dtype, tmp_path):
    model = tiny_model(stages)
    model.save_pretrained(tmp_path)
    loaded = KDAForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    loaded.save_pretrained(tmp_path / "again")
    again = KDAForCausalLM.from_pretrained(tmp_path / "again", dtype=dtype)
    for other in (loaded, again):
        fp32 = {name.rsplit(".", 1)[1] for name, p in other.named_parameters() if p.dtype != dtype}
        assert fp32 == {"A_log", "dt_bias"}
        with torch.no_grad():
            assert torch.isfinite(other(tokens(1, 9)).logits).all()
        for ours, theirs in zip(model.model.layers, other.model.layers, strict=True):
            for name in ("A_log", "dt_bias"):
                kept = getattr(theirs.mixer.decay, name)
                assert kept.dtype == torch.float32
                assert torch.equal(kept, getattr(ours.mixer.decay, name))


# --- the heads, and what users do to models


@every_pattern
def test_classification_scores_the_last_token_that_is_no_padding(stages):
    model = tiny_model(stages, model_class=KDAForSequenceClassification, num_labels=3)
    ids = tokens(2, 9)
    ids[0, 6:] = model.config.pad_token_id
    mask = ids != model.config.pad_token_id
    with torch.no_grad():
        scores = model(ids, attention_mask=mask.long()).logits
        alone = torch.cat([model(ids[:1, :6]).logits, model(ids[1:]).logits])
        left = torch.cat([ids[:1, 6:], ids[:1, :6]], 1)
        from_left = model(left, attention_mask=(left != 0).long()).logits
    assert scores.shape == (2, 3)
    assert_same(scores, alone)
    assert_same(from_left, alone[:1])


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_can_be_resized(tied):
    model, ids = tiny_model("softmax_inside", tie_word_embeddings=tied), tokens(1, 8)
    before = one_shot(model, ids)
    for size in (103, 97):
        model.resize_token_embeddings(size)
        assert model.config.vocab_size == size
        assert_same(one_shot(model, ids)[..., :97], before)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert torch.isfinite(model(ids, labels=ids).loss)


def test_the_padding_token_is_learned_like_any_other():
    """GPT-2 pads with its end of text, which a model must learn to emit and to read."""
    model = tiny_model("softmax_inside", pad_token_id=1, eos_token_id=1, tie_word_embeddings=False)
    ids = tokens(1, 8)
    ids[0, 3] = 1
    model(ids, labels=ids).loss.backward()
    assert model.model.embed_tokens.weight.grad[1].any()
    assert KDAModel(model.config).embed_tokens.weight[1].any()


@every_pattern
def test_a_copied_model_is_independent(stages):
    model, ids = tiny_model(stages), tokens(1, 8)
    full = one_shot(model, ids)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert torch.equal(one_shot(model, ids), full)


def test_two_models_may_share_a_config():
    config, ids = tiny_model("softmax_inside").config, tokens(1, 8)
    first, second = KDAForCausalLM(config).eval(), KDAForCausalLM(config).eval()
    expected = one_shot(first, ids)
    one_shot(second, ids)
    assert torch.equal(one_shot(first, ids), expected)
    assert_different(one_shot(second, ids), expected)


@every_pattern
def test_fresh_weights_are_initialised_everywhere(stages):
    """Also after the meta device, where memory holds anything."""
    config = tiny_model(stages, feature_map="hedgehog", norm="rmsnorm").config
    with torch.device("meta"):
        model = KDAForCausalLM(config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    for module in model.modules():
        module._is_hf_initialized = False
    model.init_weights()
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all(), name
        if name.endswith("A_log"):
            assert ((parameter.exp() >= 1) & (parameter.exp() <= 16)).all()
        if name.endswith("dt_bias"):
            step = nn.functional.softplus(parameter)
            assert ((step >= 0.99e-3) & (step <= 1.01e-1)).all()


def test_waking_reaches_every_parameter():
    fresh, woken = KDAForCausalLM(tiny_model("every_stage").config), tiny_model("every_stage")
    for (name, before), after in zip(fresh.named_parameters(), woken.parameters(), strict=True):
        assert not torch.equal(before, after), name


@every_pattern
def test_inference_mode_and_no_grad_may_alternate(stages):
    model, ids = tiny_model(stages), tokens(1, 12)
    full, cache = one_shot(model, ids), None
    with torch.inference_mode():
        first = model(ids[:, :5], use_cache=True)
        cache = first.cache
        second = model(ids[:, 5:6], cache=cache).logits
    with torch.no_grad():
        third = model(ids[:, 6:9], cache=cache).logits
    with torch.inference_mode():
        fourth = model(ids[:, 9:], cache=cache).logits
    assert_same(torch.cat([first.logits, second, third, fourth], 1), full)
