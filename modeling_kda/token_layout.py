"""Which tokens of a batch are real and which belong together, worked out once per forward for all recurrent layers.

A recurrent layer needs three things where softmax attention needs a mask: padding must be an exact no-op, the short
convolution must look at the previous real tokens, and a packed document must start from an empty state.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .tracing import numbers_are_hidden


@dataclass
class TokenLayout:
    """Attributes (each None when there is nothing to do):
    real: [B, T] bool, False on padding.
    order: [B, T] int64, real tokens first, each group in time order (only with padding).
    starts: [B, T] bool, True on the first token of each packed document.
    age: [B, T] int64, index of each token within its document (only when packed).
    """

    real: torch.Tensor | None = None
    order: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    age: torch.Tensor | None = None

    @property
    def is_plain(self):
        """Whether every token is real and rows hold one sequence."""
        return self.real is None and self.starts is None

    @classmethod
    def padded(cls, real):
        """Rows with padding anywhere. real: [B, T] bool."""
        return cls(real=real, order=torch.argsort((~real).to(torch.int8), dim=1, stable=True))

    @classmethod
    def packed(cls, document, real=None):
        """Rows that hold several documents. document: [B, T], equal numbers for tokens of one document in a row."""
        starts = first_of_run(document)
        positions = torch.arange(document.shape[1], device=document.device).expand_as(document)
        age = positions - positions.where(starts, 0).cummax(1).values
        return cls(real=real, starts=starts, age=age)

    def compact(self, x):
        """Move the real tokens of [B, T, C] to the front of each row."""
        return x if self.order is None else x.gather(1, self.order[..., None].expand_as(x))

    def spread(self, x):
        """Undo `compact`."""
        if self.order is None:
            return x
        return torch.zeros_like(x).scatter(1, self.order[..., None].expand_as(x), x)

    def silence(self, beta):
        """A padded token writes nothing. beta: [B, T, H]."""
        return beta if self.real is None else beta * self.real[..., None]

    def hush(self, logits):
        """Logits of padding far below what any bias lifts: a sigmoid or softplus of them is exactly zero, so that a
        padded token writes nothing and forgets nothing. logits: [B, T, ...]; in fp32 if they were fp16.
        """
        if self.real is None:
            return logits
        logits = logits.float() if logits.dtype == torch.float16 else logits
        return logits.masked_fill(~self.real.view(*self.real.shape, *[1] * (logits.dim() - 2)), HUSHED)

    def hold(self, log_decay):
        """Padding forgets nothing; the first token of a document forgets everything before it.

        log_decay: [B, T, H, 1 or K]. exp(FORGET_ALL) is exactly zero, so nothing leaks between documents.
        """
        if self.real is not None:
            log_decay = log_decay.masked_fill(~self.real[..., None, None], 0.0)
        if self.starts is not None:
            log_decay = log_decay.masked_fill(self.starts[..., None, None], FORGET_ALL)
        return log_decay


FORGET_ALL = -1e4
HUSHED = -1e30


def first_of_run(ids):
    """[B, T] -> bool: True where a token's number differs from that of the token before it in its row."""
    return F.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True)


def documents_from_positions(position_ids, real=None, *, only_restarts=False):
    """[B, T] position ids -> [B, T] document numbers: a new document wherever positions do not go up by one.

    Across padding, and everywhere with `only_restarts`, a new document needs positions that do not go up at all.
    """
    if real is None:
        gone_up = position_ids[:, 1:] - position_ids[:, :-1]
        jump = gone_up < 1 if only_restarts else gone_up != 1
        return F.pad(jump, (1, 0)).cumsum(1)
    order = TokenLayout.padded(real).order
    positions, real = position_ids.gather(1, order), real.gather(1, order)
    gone_up = positions[:, 1:] - positions[:, :-1]
    jump = gone_up < 1
    if not only_restarts:
        jump = jump | ((gone_up != 1) & (order[:, 1:] == order[:, :-1] + 1))
    document = F.pad(jump & real[:, 1:], (1, 0)).cumsum(1)
    return torch.zeros_like(document).scatter(1, order, document)


def documents_from_cu_seqlens(cu_seqlens, shape):
    """[N+1] boundaries of the documents of one row -> [1, T] document numbers.

    Raises: ValueError if there are several rows, or the boundaries do not start at 0, decrease, or do not end at T.
    """
    if shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q describes one row of packed documents, got a batch of {shape[0]} rows")
    bounds = cu_seqlens.to(torch.int64)
    if not numbers_are_hidden() and not _are_bounds(bounds, shape[1]):
        raise ValueError(
            f"cu_seq_lens_q must be one-dimensional, start at 0, never decrease and end at the {shape[1]} tokens of "
            f"the row, got {cu_seqlens.tolist()}"
        )
    tokens = torch.arange(shape[1], device=bounds.device)
    return torch.searchsorted(bounds[1:].contiguous(), tokens, right=True).view(shape)


def _are_bounds(bounds, length):
    if bounds.dim() != 1 or bounds.numel() < 2 or (bounds.diff() < 0).any():
        return False
    return int(bounds[0]) == 0 and int(bounds[-1]) == length


def boundaries_between_real_tokens(document, real=None):
    """[B, T-1] bool for the neighbours that remain without padding: True where a new document starts.

    document, real: [B, T]. Neighbours are in the order of `TokenLayout.order`, padding's at the end are False.
    """
    if real is None:
        return document[:, 1:] != document[:, :-1]
    order = TokenLayout.padded(real).order
    document, real = document.gather(1, order), real.gather(1, order)
    return (document[:, 1:] != document[:, :-1]) & real[:, 1:]


def padding_splits_a_document(document, real):
    """Whether padding stands between two tokens of one document. document, real: [B, T]."""
    order = TokenLayout.padded(real).order
    apart = (order[:, 1:] != order[:, :-1] + 1) & real.gather(1, order)[:, 1:]
    return bool((apart & ~boundaries_between_real_tokens(document, real)).any())


def isolate_padding(document, real):
    """Give every padded token of packed rows a document of its own. document, real: [B, T]."""
    split = (document[:, 1:] != document[:, :-1]) | ~real[:, 1:] | ~real[:, :-1]
    return F.pad(split, (1, 0)).cumsum(1)
