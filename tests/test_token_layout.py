"""The arithmetic of padding and documents: moving real tokens to the front, ages, boundaries."""

import pytest
import torch
from helpers import tokens

from modeling_kda.token_layout import (
    TokenLayout,
    documents_from_cu_seqlens,
    documents_from_positions,
    first_of_run,
    isolate_padding,
    padding_splits_a_document,
)


def row(text):
    """Digits to a row of numbers, . and 1 to a row of padding and real tokens."""
    return torch.tensor([[int(c) if c != "." else 0 for c in text]])


def real(text):
    return torch.tensor([[c != "." for c in text]])


def test_an_empty_layout_does_nothing():
    layout, x = TokenLayout(), torch.randn(2, 5, 3)
    beta, log_decay = torch.rand(2, 5, 4), -torch.rand(2, 5, 4, 1)
    assert layout.compact(x) is x
    assert layout.spread(x) is x
    assert layout.silence(beta) is beta
    assert layout.hold(log_decay) is log_decay


@pytest.mark.parametrize("seed", range(5))
def test_compact_moves_real_tokens_to_the_front_in_order(seed):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(3, 9, generator=generator) < 0.6
    mask[0], mask[1, :] = True, mask[1] & (seed > 0)
    x = torch.randn(3, 9, 2, generator=generator)
    layout = TokenLayout.padded(mask)
    compact = layout.compact(x)
    for i in range(3):
        assert torch.equal(compact[i, : mask[i].sum()], x[i, mask[i]])
    assert torch.equal(layout.spread(compact), x)


def test_padding_neither_writes_nor_forgets():
    layout = TokenLayout.padded(real(".1.11"))
    beta, log_decay = torch.rand(1, 5, 2) + 0.1, -torch.rand(1, 5, 2, 3) - 0.1
    silent, held = layout.silence(beta), layout.hold(log_decay)
    assert torch.equal(silent != 0, real(".1.11")[..., None].expand(1, 5, 2))
    assert torch.equal(held != 0, real(".1.11")[..., None, None].expand(1, 5, 2, 3))
    assert torch.equal(silent[:, 3:], beta[:, 3:])
    assert torch.equal(held[:, 3:], log_decay[:, 3:])


def test_documents_have_starts_and_ages():
    layout = TokenLayout.packed(row("0001122222"))
    assert layout.age.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3, 4]]
    assert layout.starts.nonzero()[:, 1].tolist() == [0, 3, 5]
    held = layout.hold(-torch.rand(1, 10, 1, 2))
    assert (held.exp()[0, [0, 3, 5]] == 0).all()
    assert (held.exp()[0, [1, 2, 4, 6, 7, 8, 9]] > 0).all()


@pytest.mark.parametrize(
    "positions, mask, restarts, documents",
    [
        ("0123", None, False, "0000"),
        ("01012", None, False, "00111"),
        ("000", None, False, "012"),
        ("5678", None, False, "0000"),
        ("0156", None, False, "0011"),
        ("0156", None, True, "0000"),
        ("0101", None, True, "0011"),
        # a forward jump over padding only counts the padding; positions that start again are a document
        ("01..4", "11..1", False, "00..0"),
        ("01..2", "11..1", False, "00..0"),
        ("01..0", "11..1", False, "00..1"),
        ("01..1", "11..1", True, "00..1"),
        ("..0123", "..1111", False, "..0000"),
        ("0123..", "1111..", False, "0000.."),
        ("0156.0", "1111.1", False, "0011.2"),
    ],
)
def test_documents_from_positions(positions, mask, restarts, documents):
    mask = None if mask is None else real(mask)
    found = documents_from_positions(row(positions), mask, only_restarts=restarts)
    kept = real(documents)
    assert found[kept].tolist() == row(documents)[kept].tolist()


@pytest.mark.parametrize("bounds, documents", [([0, 4], "0000"), ([0, 1, 4], "0111"), ([0, 2, 2, 4], "0022")])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_documents_from_cu_seqlens(bounds, documents, dtype):
    found = documents_from_cu_seqlens(torch.tensor(bounds, dtype=dtype), (1, 4))
    assert torch.equal(first_of_run(found), first_of_run(row(documents)))


@pytest.mark.parametrize(
    "bounds, shape, words",
    [
        ([0, 4, 8], (2, 4), "one row"),
        ([0, 3], (1, 4), "end at the 4 tokens"),
        ([0, 5], (1, 4), "end at the 4 tokens"),
        ([1, 4], (1, 4), "start at 0"),
        ([0, 3, 2, 4], (1, 4), "never decrease"),
        ([0], (1, 4), "one-dimensional"),
        ([[0, 4]], (1, 4), "one-dimensional"),
    ],
)
def test_boundaries_that_make_no_sense_are_refused(bounds, shape, words):
    with pytest.raises(ValueError, match=words) as error:
        documents_from_cu_seqlens(torch.tensor(bounds), shape)
    assert str(torch.tensor(bounds).tolist()) in str(error.value) or "rows" in str(error.value)


def test_padding_is_isolated_and_splits_are_found():
    document, mask = row("000111222"), real("11..11.11")
    starts = first_of_run(isolate_padding(document, mask))
    assert starts.tolist() == [[True, False, True, True, True, False, True, True, False]]
    assert not padding_splits_a_document(document, mask)
    assert padding_splits_a_document(document, real("1.1111111"))
    assert not padding_splits_a_document(document, real(".11111111"))
    assert not padding_splits_a_document(document, real("11111111."))


def test_first_of_run():
    assert first_of_run(row("0011101")).tolist() == [[True, False, True, False, False, True, True]]
    assert first_of_run(tokens(2, 1)).tolist() == [[True], [True]]
