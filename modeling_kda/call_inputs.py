"""What a caller says about the tokens of a call - masks, positions, documents - checked and brought into one form."""

from dataclasses import dataclass

import torch
from torch.nn.attention.flex_attention import BlockMask

from .token_layout import (
    TokenLayout,
    boundaries_between_real_tokens,
    documents_from_cu_seqlens,
    documents_from_positions,
    isolate_padding,
    padding_splits_a_document,
)
from .tracing import numbers_are_hidden

# an additive mask hides what is below; biases such as ALiBi's stay above on the diagonal
HIDDEN = -1e3


@dataclass
class CallInputs:
    """Attributes:
    mask: for `create_causal_mask`: None, [B, past + T] bool, or [B or 1, heads, T, S]; or a dict of such masks.
    layout: for recurrent layers, None when every token is real and rows hold one sequence.
    positions: [B, T], for learned positions; None if the model has none and none were given.
    runs: [B, T], for attention implementations, which see packed documents in positions that start again; or None.
    packed: whether rows hold several documents.
    """

    mask: torch.Tensor | dict | None
    layout: TokenLayout | None
    positions: torch.Tensor | None
    runs: torch.Tensor | None
    packed: bool


def read_inputs(
    inputs_embeds, attention_mask, position_ids, seq_idx, cu_seqlens, cache, makes_cache, config
) -> CallInputs:
    """Args: those of `KDAModel.forward`; cu_seqlens: a list; makes_cache: whether the call would make a cache.

    Raises: ValueError for what does not fit together, and for what a recurrent layer cannot honour.
    """
    if inputs_embeds.dim() != 3 or inputs_embeds.shape[2] != config.hidden_size:
        raise ValueError(
            f"inputs_embeds must be [B, T, hidden_size={config.hidden_size}], got {list(inputs_embeds.shape)}"
        )
    shape = inputs_embeds.shape[:2]
    past = _past_length(cache, shape)
    mask = read_mask(attention_mask, inputs_embeds, past, cache, config.layer_types)
    visible = visible_tokens(mask, shape, past)
    real = real_tokens(mask, visible, shape, past)
    positions = read_positions(position_ids, shape, real)
    said = shape, positions, seq_idx, cu_seqlens
    if numbers_are_hidden():
        ordinary = attention_mask is not None or cache is not None or makes_cache
        document = assume_documents(*said, real=real, ordinary=ordinary)
    else:
        document = find_documents(*said, real=real, cached=cache is not None)
    if document is not None:
        layout = TokenLayout.packed(document, real)
        return CallInputs(None, layout, layout.age if positions is None else positions, layout.age, True)
    if positions is None and config.position_embedding == "learned":
        positions = count_positions(mask, visible, shape, past, inputs_embeds.device)
    layout = None if real is None else TokenLayout.padded(real)
    return CallInputs(mask, layout, positions, positions, False)


def check_ids(input_ids, vocab_size):
    """Raises: ValueError if they are not [B, T] integers below `vocab_size`."""
    if not isinstance(input_ids, torch.Tensor):
        raise ValueError(f"input_ids must be a tensor, got {type(input_ids).__name__}")
    if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"input_ids must be integers [B, T], got {input_ids.dtype} {list(input_ids.shape)}")
    # on other devices the CPU would have to wait for the numbers
    if input_ids.device.type == "cpu" and input_ids.numel() and not numbers_are_hidden():
        first, last = (int(x) for x in input_ids.aminmax())
        if first < 0 or last >= vocab_size:
            raise ValueError(f"input_ids must be from 0 to {vocab_size - 1}, got {first if first < 0 else last}")


def read_mask(attention_mask, inputs_embeds, past, cache, layer_types):
    """The caller's attention_mask -> `CallInputs.mask`; 4-D masks become bool, or additive in the model's dtype."""
    recurrent = "linear_attention" in layer_types
    if attention_mask is None:
        return None
    if isinstance(attention_mask, dict):
        return _checked_dict(attention_mask, inputs_embeds.shape[:2], layer_types)
    if isinstance(attention_mask, BlockMask) and not recurrent:
        return attention_mask
    if not isinstance(attention_mask, torch.Tensor):
        raise ValueError(f"attention_mask must be a tensor or a dict, got {type(attention_mask).__name__}")
    if attention_mask.dim() == 2:
        return _checked_2d(attention_mask, inputs_embeds.shape[:2], past)
    if attention_mask.dim() != 4:
        raise ValueError(f"attention_mask must be [B, S] or [B, 1, T, S], got {list(attention_mask.shape)}")
    mask = _checked_4d(attention_mask, inputs_embeds, past, -1 if cache is None else cache.get_max_length())
    if recurrent and not numbers_are_hidden():
        _check_causal(mask, past)
    return mask


def visible_tokens(mask, shape, past):
    """[B, past + T] bool, False on padding, of a mask from `read_mask`; None where the mask does not say."""
    if not isinstance(mask, torch.Tensor):
        return None
    if mask.dim() == 2:
        return mask
    return _allowed(mask)[:, 0].any(-2)[:, : past + shape[1]].expand(shape[0], -1)


def real_tokens(mask, visible, shape, past):
    """[B, T] bool, False where tokens of this call are padding, or None if all are real.

    mask: from `read_mask`; visible: from `visible_tokens`.
    """
    T = shape[1]
    if isinstance(mask, dict):
        real = _real_tokens_of_dict(mask, T, past)
    else:
        real = None if visible is None else visible[:, -T:]
    if real is None or (not numbers_are_hidden() and real.all()):
        return None
    return real.expand(shape)


def read_positions(position_ids, shape, real):
    """position_ids of the caller, [B, T], [1, T] or [T] -> [B, T], or None.

    Raises: ValueError for another shape, or numbers that are not integers.
    """
    if position_ids is None:
        return None
    rows = position_ids[None] if position_ids.dim() == 1 else position_ids
    if rows.dim() != 2 or rows.shape[0] not in (1, shape[0]) or rows.shape[1] != shape[1]:
        raise ValueError(f"position_ids must be [B, T] = {list(shape)}, got {list(position_ids.shape)}")
    if rows.is_floating_point() or rows.dtype == torch.bool:
        raise ValueError(f"position_ids must be integers, got {rows.dtype}")
    rows = rows.expand(shape)
    # what stands there for padding means nothing
    return rows if real is None else rows.masked_fill(~real, 0)


def count_positions(mask, visible, shape, past, device):
    """[B, T] position of each token among the real tokens of its row. mask, visible: as in `real_tokens`."""
    if isinstance(mask, dict):
        raise ValueError("a dict of masks does not say which positions the tokens have; pass position_ids with it")
    if visible is not None:
        return (visible.long().cumsum(-1) - 1).clamp_min(0)[:, -shape[1] :].to(device)
    return (torch.arange(shape[1], device=device) + past).expand(shape)


def find_documents(shape, position_ids, seq_idx, cu_seqlens, *, real, cached):
    """[B, T] document numbers if rows are packed, else None.

    position_ids: from `read_positions`; cu_seqlens: a list whose entries may be None; real: from `real_tokens`.

    Raises: ValueError if they contradict each other, or for packed rows and a cache.
    """
    stated = _stated_documents(shape, seq_idx, cu_seqlens)
    by_position = None
    if position_ids is not None:
        by_position = documents_from_positions(position_ids, real, only_restarts=cached)
    _check_agreement(stated, by_position, real)
    if not stated and by_position is not None and by_position.any():
        stated = [by_position]
    if not stated:
        return None
    if cached:
        raise ValueError("packed rows and a cache cannot be combined: call with use_cache=False and without a cache")
    if real is None:
        return stated[0]
    if padding_splits_a_document(stated[0], real):
        raise ValueError("attention_mask has padding inside a packed document; it may only stand between documents")
    return isolate_padding(stated[0], real)


def assume_documents(shape, position_ids, seq_idx, cu_seqlens, *, real, ordinary):
    """`find_documents` for torch.compile, which cannot look at numbers: believes what is stated, and takes positions
    for those of packed rows, which is right for one document per row, too, unless the call is an `ordinary` one with a
    mask or a cache.
    """
    stated = _stated_documents(shape, seq_idx, cu_seqlens)
    if not stated and position_ids is not None and not ordinary:
        stated = [documents_from_positions(position_ids)]
    if not stated:
        return None
    return stated[0] if real is None else isolate_padding(stated[0], real)


def _past_length(cache, shape):
    """Tokens in the cache: an int, or a tensor where torch.compile must not look into it."""
    if shape[0] == 0 or shape[1] == 0:
        raise ValueError(
            f"the input must hold at least one row and one token per row, got [B, T] = {list(shape)}; with a cache "
            "that covers the whole prompt, crop the last token and pass it again"
        )
    if cache is None:
        return 0
    past = cache.get_seq_length()
    if numbers_are_hidden():
        return past
    past, room = int(past), cache.get_max_length()
    if room != -1 and past + shape[1] > room:
        raise ValueError(f"the cache has room for {room} tokens, got {past} and {shape[1]} more; make a longer one")
    return past


def _checked_dict(masks, shape, layer_types):
    missing = sorted(set(layer_types) - set(masks))
    if missing:
        raise ValueError(f"a dict of masks must have an entry for {sorted(set(layer_types))}, {missing} is missing")
    linear = masks.get("linear_attention")
    if linear is not None and tuple(linear.shape) != tuple(shape):
        raise ValueError(f"the linear_attention mask must be [B, T] = {list(shape)}, got {list(linear.shape)}")
    return masks


def _real_tokens_of_dict(masks, T, past):
    if "linear_attention" in masks:
        return None if masks["linear_attention"] is None else masks["linear_attention"] != 0
    full = masks["full_attention"]
    if not isinstance(full, torch.Tensor) or not isinstance(past, int):
        return None
    # padding does not even see itself
    return _allowed(full)[:, 0, :, past : past + T].diagonal(dim1=-2, dim2=-1)


def _checked_2d(mask, shape, past):
    B, T = shape
    # under torch.compile a static cache does not say its length
    columns = past + T if isinstance(past, int) else mask.shape[1]
    if tuple(mask.shape) != (B, columns):
        raise ValueError(f"attention_mask must be [B, past + T] = [{B}, {past} + {T}], got {list(mask.shape)}")
    if mask.is_floating_point() and not numbers_are_hidden() and (mask < 0).any():
        raise ValueError("a 2-D attention_mask must be 1 on real tokens and 0 on padding, got negative numbers")
    return mask != 0


def _checked_4d(mask, inputs_embeds, past, room):
    B, T = inputs_embeds.shape[:2]
    if not isinstance(past, int):
        raise ValueError("with a static cache under torch.compile, pass a dict of masks instead of one 4-D mask")
    if mask.shape[0] not in (1, B) or mask.shape[2] != T or mask.shape[3] not in (past + T, room):
        raise ValueError(
            f"a 4-D attention_mask must be [B, 1, T, past + T] = [{B}, 1, {T}, {past + T}], got {list(mask.shape)}"
        )
    if not mask.is_floating_point():
        return mask != 0
    # the lowest number of another dtype may not exist in this one
    return mask.clamp_min(torch.finfo(inputs_embeds.dtype).min).to(inputs_embeds.dtype)


def _allowed(mask):
    return mask if mask.dtype == torch.bool else mask > HIDDEN


def _check_causal(mask, past):
    """A recurrent layer can honour a 4-D mask only if it says: every real token before me, and me."""
    allowed = _allowed(mask)
    T, S = allowed.shape[-2:]
    causal = torch.ones(T, S, dtype=torch.bool, device=mask.device).tril(past)
    visible = allowed.any(-2, keepdim=True)
    # what a padded token sees does not matter
    real = visible[..., 0, past : past + T, None]
    wrong = ((allowed != (causal & visible)) & real) | (allowed != allowed[:, :1])
    if mask.is_floating_point():
        wrong = wrong | (allowed & (mask != 0))
    if wrong.any():
        raise ValueError(
            "a 4-D attention_mask must be causal with padding for models with recurrent layers, got another pattern; "
            "for packed documents pass position_ids that start again, cu_seq_lens_q or seq_idx"
        )


def _stated_documents(shape, seq_idx, cu_seqlens):
    stated = [documents_from_cu_seqlens(bounds, shape) for bounds in cu_seqlens if bounds is not None]
    if seq_idx is not None:
        if seq_idx.dim() != 2 or seq_idx.shape[0] not in (1, shape[0]) or seq_idx.shape[1] != shape[1]:
            raise ValueError(f"seq_idx must be [B, T] = {list(shape)}, got {list(seq_idx.shape)}")
        stated.append(seq_idx.expand(shape))
    return stated


def _check_agreement(stated, by_position, real):
    """cu_seq_lens_* and seq_idx must have the same boundaries, and positions must count up between them."""
    if not stated:
        return
    boundaries = [boundaries_between_real_tokens(document, real) for document in stated]
    contradiction = any((other != boundaries[0]).any() for other in boundaries[1:])
    if by_position is not None:
        restarts = boundaries_between_real_tokens(by_position, real)
        contradiction = contradiction or (restarts & ~boundaries[0]).any()
    if contradiction:
        raise ValueError(
            "cu_seq_lens_q, cu_seq_lens_k, seq_idx and position_ids contradict each other about where documents "
            "start; pass boundaries that agree, or only one of them"
        )
