"""Packed rows: every document gets the numbers it gets alone, however the boundaries are said."""

import copy

import pytest
import torch
from helpers import PATTERNS, assert_different, assert_same, tiny_model, tokens
from torch import nn
from transformers import DataCollatorWithFlattening

from modeling_kda import KDACache, KDAModel

every_pattern = pytest.mark.parametrize("stages", PATTERNS)
LENGTHS = (5, 1, 17, 3, 4)


def documents(lengths=LENGTHS):
    return [tokens(1, n, seed=i) for i, n in enumerate(lengths)]


def starting_again(lengths=LENGTHS, start=0):
    return torch.cat([torch.arange(start, start + n) for n in lengths])[None]


def cu_seqlens(lengths=LENGTHS):
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    return {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def seq_idx(lengths=LENGTHS):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].int()


@torch.no_grad()
def separately(model, lengths=LENGTHS):
    return torch.cat([model(document, use_cache=False).logits for document in documents(lengths)], 1)


@every_pattern
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_every_way_to_say_it_equals_separate_documents(stages, attention):
    model, packed = tiny_model(stages), torch.cat(documents(), 1)
    model.set_attn_implementation(attention)
    expected = separately(model)
    ways = [
        {"position_ids": starting_again()},
        {"position_ids": starting_again()[0]},
        cu_seqlens(),
        {"seq_idx": seq_idx()},
        {"position_ids": starting_again(), **cu_seqlens()},
        {"position_ids": starting_again(), "seq_idx": seq_idx(), **cu_seqlens()},
    ]
    for way in ways:
        outputs = model(packed, **way)
        assert_same(outputs.logits, expected)
        assert outputs.cache is None
    assert_different(model(packed).logits, expected)


@every_pattern
@torch.no_grad()
def test_rows_of_a_batch_are_packed_each_in_its_own_way(stages):
    model = tiny_model(stages)
    splits = [(5, 7), (1, 1, 10), (12,)]
    rows = [documents(lengths) for lengths in splits]
    packed = torch.cat([torch.cat(row, 1) for row in rows])
    positions = torch.cat([starting_again(lengths) for lengths in splits])
    expected = torch.cat([separately(model, lengths) for lengths in splits])
    assert_same(model(packed, position_ids=positions).logits, expected)
    index = torch.cat([seq_idx(lengths) for lengths in splits])
    assert_same(model(packed, seq_idx=index).logits, expected)


@every_pattern
@torch.no_grad()
def test_many_short_documents_longer_than_a_chunk(stages):
    lengths = (1, 2, 3, 1, 1, 5, 40, 2, 2, 64, 1, 8)
    model = tiny_model(stages)
    got = model(torch.cat(documents(lengths), 1), position_ids=starting_again(lengths)).logits
    assert_same(got, separately(model, lengths))


@every_pattern
@torch.no_grad()
def test_positions_given_are_the_ones_used(stages):
    """A row may start in the middle of a document, and documents need not start at zero."""
    model, packed = tiny_model(stages), torch.cat(documents(), 1)
    expected = [
        model(document, position_ids=torch.arange(n) + 7).logits
        for document, n in zip(documents(), LENGTHS, strict=True)
    ]
    assert_same(model(packed, position_ids=starting_again(start=7)).logits, torch.cat(expected, 1))
    assert_same(model(packed, position_ids=starting_again(start=7), seq_idx=seq_idx()).logits, torch.cat(expected, 1))


@every_pattern
@torch.no_grad()
def test_padding_may_stand_between_documents(stages):
    model = tiny_model(stages)
    first, second = documents((4, 6))
    padding = tokens(1, 2, seed=8)
    packed = torch.cat([padding, first, padding, second, padding], 1)
    real = torch.tensor([[0] * 2 + [1] * 4 + [0] * 2 + [1] * 6 + [0] * 2])
    positions = torch.tensor([[9, 9, 0, 1, 2, 3, 7, 0, 0, 1, 2, 3, 4, 5, 1, 1]])
    numbers = torch.tensor([[0] * 7 + [1] * 9])
    expected = separately(model, (4, 6))
    for way in ({"position_ids": positions}, {"seq_idx": numbers}, {"position_ids": positions, "seq_idx": numbers}):
        assert_same(model(packed, attention_mask=real, **way).logits[real.bool()][None], expected)


def test_padding_inside_a_packed_document_is_refused():
    real = torch.tensor([[1, 1, 0, 1, 1, 1]])
    with pytest.raises(ValueError, match="padding inside a packed document"):
        tiny_model()(tokens(1, 6), attention_mask=real, seq_idx=torch.tensor([[0, 0, 0, 0, 1, 1]]))


@pytest.mark.parametrize("stages", ["linear", "delta", "ssd", "gated_delta", "kda"])
@torch.no_grad()
def test_neither_the_state_nor_the_convolution_leaks(stages):
    """Each alone: without a convolution only the state could leak; with a wiped state only the convolution could."""
    packed, way = torch.cat(documents(), 1), {"position_ids": starting_again()}
    model = tiny_model(stages, short_conv_kernel_size=0)
    assert_same(model(packed, **way).logits, separately(model))
    assert_different(model(packed).logits, separately(model))
    if stages in ("ssd", "gated_delta", "kda"):
        model = tiny_model(stages)
        for layer in model.model.layers:
            layer.mixer.decay.A_log.fill_(12.0)
        assert_same(model(packed, **way).logits, separately(model))
        assert_different(model(packed).logits, separately(model))


@every_pattern
@torch.no_grad()
def test_boundaries_survive_every_wrapper(stages):
    model, packed = tiny_model(stages), torch.cat(documents(), 1)
    base = KDAModel(model.config).eval()
    base.load_state_dict(model.model.state_dict())

    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *args, **kwargs):
            return self.inner(*args, **kwargs)

    expected = torch.cat([base(document).last_hidden_state for document in documents()], 1)
    assert_same(base(packed, **cu_seqlens()).last_hidden_state, expected)
    assert_same(Wrapper(base)(packed, seq_idx=seq_idx()).last_hidden_state, expected)
    hidden = Wrapper(model)(packed, output_hidden_states=True, **cu_seqlens()).hidden_states[-1]
    assert_same(hidden, expected)


@every_pattern
@pytest.mark.parametrize("way", [{}, {"return_flash_attn_kwargs": True}, {"return_seq_idx": True}])
@torch.no_grad()
def test_the_loss_of_a_pack_is_the_mean_over_its_documents(stages, way):
    model = tiny_model(stages)
    lengths = (5, 9, 3, 12)
    rows = documents(lengths)
    batch = DataCollatorWithFlattening(**way)([{"input_ids": row[0].tolist()} for row in rows])
    losses = [model(row, labels=row).loss * (row.shape[1] - 1) for row in rows]
    assert_same(model(**batch).loss, sum(losses) / (sum(lengths) - len(lengths)))


@pytest.mark.parametrize(
    "way, words",
    [
        ({"cu_seq_lens_q": torch.tensor([0, 5, 9])}, "end at the 12 tokens"),
        ({"cu_seq_lens_q": torch.tensor([0, 5, 13])}, "end at the 12 tokens"),
        ({"cu_seq_lens_q": torch.tensor([0, 7, 5, 12])}, "never decrease"),
        ({"seq_idx": torch.zeros(1, 11)}, "seq_idx must be"),
        ({"seq_idx": torch.zeros(12)}, "seq_idx must be"),
        ({"seq_idx": seq_idx((6, 6)), "cu_seq_lens_q": torch.tensor([0, 5, 12])}, "contradict"),
        ({"position_ids": starting_again((6, 6)), "cu_seq_lens_q": torch.tensor([0, 5, 12])}, "contradict"),
        ({"position_ids": starting_again((6, 6)), "seq_idx": seq_idx((5, 7))}, "contradict"),
        ({"cu_seq_lens_q": torch.tensor([0, 5, 12]), "cu_seq_lens_k": torch.tensor([0, 6, 12])}, "contradict"),
    ],
)
def test_boundaries_that_contradict_are_refused(way, words):
    for stages in ("softmax", "kda"):
        with pytest.raises(ValueError, match=words) as error:
            tiny_model(stages)(tokens(1, 12), **way)
        assert "\n" not in str(error.value)


def test_cu_seqlens_describe_one_row():
    with pytest.raises(ValueError, match="one row"):
        tiny_model()(tokens(2, 6), cu_seq_lens_q=torch.tensor([0, 6, 12]))


@torch.no_grad()
def test_an_empty_document_changes_nothing():
    model, packed = tiny_model("softmax_inside"), torch.cat(documents(), 1)
    bounds = torch.tensor([0, 5, 5, 6, 23, 23, 26, 30])
    assert_same(model(packed, cu_seq_lens_q=bounds).logits, separately(model))


@every_pattern
@torch.no_grad()
def test_packed_rows_and_a_cache_are_refused(stages):
    """Also where only position ids say so: otherwise documents would leak into each other silently."""
    model, packed = tiny_model(stages), torch.cat(documents(), 1)
    for way in ({"position_ids": starting_again()}, cu_seqlens(), {"seq_idx": seq_idx()}):
        cache = KDACache(model.config)
        with pytest.raises(ValueError, match="packed rows and a cache"):
            model(packed, cache=cache, **way)
        assert cache.get_seq_length() == 0


@torch.no_grad()
def test_one_document_alone_is_no_pack():
    model, ids = tiny_model("softmax_inside"), tokens(1, 12)
    outputs = model(ids, position_ids=torch.arange(12)[None])
    assert outputs.cache is not None
    assert_same(model(ids, seq_idx=torch.full((1, 12), 3)).logits, outputs.logits)
    assert_same(model(ids, cu_seq_lens_q=torch.tensor([0, 12])).logits, outputs.logits)


@every_pattern
def test_no_gradient_crosses_a_boundary(stages):
    model, packed = copy.deepcopy(tiny_model(stages)), torch.cat(documents((6, 7)), 1)
    embeds = model.model.embed_tokens(packed).detach().requires_grad_()
    logits = model(inputs_embeds=embeds, position_ids=starting_again((6, 7))).logits
    logits[:, 6:].square().sum().backward()
    assert not embeds.grad[:, :6].any()
    assert embeds.grad[:, 6:].any()


@torch.no_grad()
def test_compiled_packs_equal_separate_documents():
    """The compiler cannot look at positions to see whether they start again."""
    model, packed = tiny_model(["kda", "softmax"]), torch.cat(documents(), 1)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    got = compiled(packed, position_ids=starting_again(), use_cache=False).logits
    assert_same(got, separately(model))
    alone = compiled(packed, position_ids=torch.arange(packed.shape[1])[None], use_cache=False).logits
    assert_same(alone, model(packed, use_cache=False).logits)
