"""Padding anywhere, in any call, is an exact no-op: real tokens get the numbers of the same rows without padding."""

import pytest
import torch
from helpers import PATTERNS, assert_same, tiny_model, tokens
from torch import nn

from modeling_kda import KDACache

every_pattern = pytest.mark.parametrize("stages", PATTERNS)
# sums in another order, in fp64, relative to the largest gradient of the model
GRADIENT = 1e-10


def real(*rows):
    return torch.tensor([[c != "." for c in row] for row in rows])


def pad(ids, mask, seed=9):
    """Rows of ids spread over the real places of mask; padding is ordinary tokens."""
    padded = tokens(*mask.shape, seed=seed)
    for i, row in enumerate(ids):
        padded[i, mask[i]] = row[: mask[i].sum()]
    return padded


@torch.no_grad()
def assert_rows_equal_alone(model, ids, mask, logits):
    """logits [B, T, V] of padded rows equal those of each row alone, on its real tokens."""
    for i, row in enumerate(ids):
        alone = model(row[None, : mask[i].sum()], use_cache=False).logits[0]
        assert_same(logits[i, mask[i]], alone)


@every_pattern
@pytest.mark.parametrize(
    "mask",
    [
        real(".......11111"),
        real("11111......."),
        real("1..11.1...1."),
        real("...........1"),
        real("1..........."),
        real(".......11111", "111111111111"),
        real("1111........", "111111111...", "111111111111"),
        real(".1.1.1.1.1.1", "1.1.1.1.1.1.", "....1111...."),
    ],
    ids=["left", "right", "inside", "all but last", "all but first", "left batch", "right batch", "mixed batch"],
)
def test_padded_rows_equal_rows_alone(stages, mask):
    model, ids = tiny_model(stages), tokens(len(mask), 12)
    with torch.no_grad():
        logits = model(pad(ids, mask), attention_mask=mask.long()).logits
    assert_rows_equal_alone(model, ids, mask, logits)


@every_pattern
@pytest.mark.parametrize("seed", range(4))
def test_random_padding_over_random_calls(stages, seed):
    """Rows of one batch are at different places of their sequence, and some calls are padding only."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(3, 24, generator=generator) < 0.6
    mask[0, 8:14] = False
    mask[:, 20] = True
    ids = tokens(3, 24, seed=seed)
    padded, model = pad(ids, mask, seed=seed + 50), tiny_model(stages, seed=seed)
    cuts = sorted(torch.randint(1, 24, (4,), generator=generator).tolist())
    cuts = [0, *cuts, 24]
    cache, logits = KDACache(model.config), []
    with torch.no_grad():
        for start, end in zip(cuts[:-1], cuts[1:], strict=True):
            if end > start:
                logits.append(model(padded[:, start:end], attention_mask=mask[:, :end], cache=cache).logits)
    assert cache.get_seq_length() == 24
    assert_rows_equal_alone(model, ids, mask, torch.cat(logits, 1))


@every_pattern
@pytest.mark.parametrize("give_positions", [True, False])
def test_decoding_after_right_padding(stages, give_positions):
    model, ids = tiny_model(stages), tokens(2, 12)
    lengths = torch.tensor([5, 9])
    mask = torch.arange(9) < lengths[:, None]
    padded, cache, logits = pad(ids, mask), KDACache(model.config), []
    with torch.no_grad():
        logits.append(model(padded, attention_mask=mask, cache=cache).logits)
        for step in range(3):
            mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.bool)], 1)
            positions = (lengths + step)[:, None] if give_positions else None
            new = ids.gather(1, (lengths + step)[:, None])
            logits.append(model(new, attention_mask=mask, position_ids=positions, cache=cache).logits)
    assert_rows_equal_alone(model, ids, mask, torch.cat(logits, 1))


@every_pattern
def test_the_state_does_not_notice_padding(stages):
    model, ids, mask = tiny_model(stages), tokens(1, 6), real("1.11..1.11")
    with torch.no_grad():
        padded, plain = KDACache(model.config), KDACache(model.config)
        model(pad(ids, mask), attention_mask=mask, cache=padded)
        model(ids, cache=plain)
    for ours, theirs in zip(padded.layers, plain.layers, strict=True):
        if hasattr(ours, "recurrent_states"):
            assert_same(ours.recurrent_states[0], theirs.recurrent_states[0])
            assert_same(ours.conv_states[0], theirs.conv_states[0])


@every_pattern
def test_a_row_of_padding_only_is_finite_and_leaves_no_trace(stages):
    model, ids = tiny_model(stages), tokens(2, 8)
    nothing, everything = torch.zeros(1, 4), torch.ones(1, 4)
    with torch.no_grad():
        cache = KDACache(model.config)
        first = model(ids[:1, :4], attention_mask=nothing, cache=cache).logits
        then = model(ids[:1, 4:], attention_mask=torch.cat([nothing, everything], 1), cache=cache).logits
        alone = model(ids[:1, 4:]).logits
        beside = model(ids, attention_mask=torch.cat([torch.zeros(1, 8), torch.ones(1, 8)])).logits
        other = model(ids[1:]).logits
    assert torch.isfinite(first).all()
    assert_same(then, alone)
    assert torch.isfinite(beside).all()
    assert_same(beside[1:], other)


@every_pattern
def test_left_padded_generation_equals_single_prompts(stages):
    model, ids = tiny_model(stages), tokens(2, 12)
    mask = real(".......11111", "111111111111")
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "eos_token_id": None,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    batch = model.generate(pad(ids, mask), attention_mask=mask.long(), **options)
    for i, length in enumerate((5, 12)):
        single = model.generate(ids[i : i + 1, :length], **options)
        assert batch.sequences[i, 12:].tolist() == single.sequences[0, length:].tolist()
        for ours, alone in zip(batch.logits, single.logits, strict=True):
            assert_same(ours[i : i + 1], alone)


@every_pattern
@pytest.mark.parametrize("with_mask", [True, False])
def test_right_padding_changes_neither_loss_nor_gradients(stages, with_mask):
    model, ids, lengths = tiny_model(stages).double(), tokens(3, 13), (4, 9, 13)
    mask = torch.arange(13) < torch.tensor(lengths)[:, None]
    padded = pad(ids, mask)

    def gradients(losses):
        model.zero_grad()
        total = sum(losses)
        total.backward()
        return total.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}

    def loss(rows, labels, mask=None):
        logits = model(rows, attention_mask=mask).logits[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")

    labels = padded.masked_fill(~mask, -100)
    together, batched = gradients([loss(padded, labels, mask if with_mask else None)])
    apart, single = gradients([loss(ids[i : i + 1, :n], ids[i : i + 1, :n]) for i, n in enumerate(lengths)])
    assert_same(together, apart)
    largest = max(gradient.abs().max() for gradient in single.values())
    for name, gradient in single.items():
        error = (batched[name] - gradient).abs().max() / largest
        assert error < GRADIENT, f"{name}: {error:.1e}"
