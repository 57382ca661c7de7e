"""The cache of one recurrent layer: a conv window and a state, which `crop` can take back by a few tokens.

A state cannot forget its last tokens. So the layer keeps an older state and what was written since, and writes all but
the last tokens again; that makes assisted and prompt-lookup generation exact.
"""

from dataclasses import dataclass, fields

import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer
from transformers.utils import is_torchdynamo_compiling

from .ops import advance_state
from .tracing import numbers_are_hidden


@dataclass
class Written:
    """What a run of tokens wrote, enough to write it again.

    k: [B, T, H, K], v: [B, T, HV, V], beta: [B, T, HV] or None, log_decay: [B, T, HV, 1 or K] or None,
    conv_inputs: [B, T, C] or None, real: [B, T] bool or None (no padding).
    """

    k: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor | None
    log_decay: torch.Tensor | None
    conv_inputs: torch.Tensor | None
    real: torch.Tensor | None

    def __len__(self):
        return self.k.shape[1]

    def map(self, function):
        return Written(*(None if t is None else function(t) for t in self._tensors()))

    def __add__(self, later):
        pairs = zip(self._filled(later)._tensors(), later._filled(self)._tensors(), strict=True)
        return Written(*(None if a is None else torch.cat([a, b], 1) for a, b in pairs))

    def _tensors(self):
        return [getattr(self, field.name) for field in fields(self)]

    def _filled(self, other):
        """Make what is absent here but present in `other` explicit: no padding, full strength, no decay."""
        shape = self.k.shape[:2]
        real = self.real if self.real is not None or other.real is None else other.real.new_ones(shape)
        beta, log_decay = self.beta, self.log_decay
        if beta is None and other.beta is not None:
            beta = other.beta.new_ones(*shape, *other.beta.shape[2:])
        if log_decay is None and other.log_decay is not None:
            log_decay = other.log_decay.new_zeros(*shape, *other.log_decay.shape[2:])
        return Written(self.k, self.v, beta, log_decay, self.conv_inputs, real)


class RecurrentLayer(LinearAttentionLayer):
    """The cache of one recurrent layer: the last inputs of the short convolution and the state.

    With `record_past` it also keeps the state as it was `max_rollback` tokens ago (or more) and what was written
    since; `crop(-n)` writes all but the last n tokens again from there.
    """

    # what loops over caches look for
    keys = values = None

    def __init__(self, erase: bool, max_rollback: int, record_past: bool = False):
        super().__init__()
        self.erase = erase
        self.max_rollback = max_rollback
        self.record_past = record_past
        self.in_static_cache = True
        self.checkpoint = None  # (conv window, state) before the tokens in `written`
        self.written = None

    def read(self):
        """Returns (conv window [B, W-1, C] or None, state [B, HV, K, V] or None).

        Neither may be modified, but while `may_overwrite`.
        """
        if not self.has_previous_state[0]:
            return None, None
        return self.conv_states[0], self.recurrent_states[0]

    @property
    def may_overwrite(self):
        """Whether nobody needs what `read` gives, window and state, once the next ones are there."""
        if self.record_past or not self.has_previous_state[0]:
            return False
        return all(_may_change(held[0]) for held in (self.conv_states, self.recurrent_states) if held[0] is not None)

    def write(self, window, state, length: int, written: Written | None = None):
        """Store what the next call starts from.

        Args: window: [B, W-1, C] or None; state: [B, HV, K, V]; length: tokens of this call; written: what they wrote,
            needed with `record_past`.
        """
        if not self.record_past:
            # what was recorded before would be written again without these tokens
            self.checkpoint = self.written = None
        elif self.written is None:
            self.checkpoint = tuple(None if t is None else t.clone() for t in self.read())
        self._store(window, state)
        if self.record_past:
            self._record(written)

    def activate_past_recording(self):
        """From the next call on, remember enough to take tokens back."""
        self.record_past = True

    @property
    def is_compileable(self):
        # generate compiles for static caches; a dynamic one must not become static where none of its layers grows
        return self.in_static_cache and not self.record_past

    @property
    def is_croppable(self):
        return self.record_past

    def crop(self, tokens_to_remove: int):
        """Take the last `-tokens_to_remove` tokens back; 0 does nothing.

        Raises: ValueError if that many tokens were not recorded, or for a positive number.
        """
        count = -int(tokens_to_remove)
        self.check_recorded(count)
        if count:
            self.written = self.written.map(lambda t: t[:, : len(self.written) - count])
            self._store(*self._replay(*self.checkpoint, self.written))

    def check_recorded(self, count: int):
        """Raises: ValueError if the last `count` tokens cannot be taken back."""
        recorded = 0 if self.written is None else len(self.written)
        if count < 0:
            raise ValueError(f"crop takes the number of tokens to remove as a negative number, got {-count}")
        if count > recorded:
            raise ValueError(
                f"a recurrent layer can take back {recorded} recorded tokens, got crop(-{count}); "
                "make the cache with KDACache(config, max_rollback=...) or call activate_past_recording() before the "
                "tokens are written, and raise max_rollback if it is too small"
            )

    def reset(self):
        # the tensors stay where they are for the next write; nothing reads them before that
        self.has_previous_state[0] = False
        self.checkpoint = self.written = None

    def reorder_cache(self, beam_idx):
        self._map(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int):
        self._map(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices):
        self._map(lambda t: t[indices.to(t.device)])

    def offload(self):
        self._map(lambda t: t.to("cpu", non_blocking=True))

    def prefetch(self):
        self._map(lambda t: t.to(self.device, non_blocking=True))

    def _record(self, written):
        """Append; once there are more than twice as many tokens as needed, move the checkpoint forward.

        A prompt may be long, so only its last tokens are kept; later calls are drafts, which may all be taken back.
        """
        keep = self.max_rollback if self.written is None else max(self.max_rollback, len(written))
        self.written = written if self.written is None else self.written + written
        if len(self.written) > 2 * keep:
            old = len(self.written) - keep
            self.checkpoint = self._replay(*self.checkpoint, self.written.map(lambda t: t[:, :old]))
            self.written = self.written.map(lambda t: t[:, old:].clone())

    def _replay(self, window, state, written):
        """The (window, state) after writing the given tokens again."""
        if written.conv_inputs is not None:
            window = next_window(window, written.conv_inputs, written.real, self.conv_kernel_size[0])
        if state is None:
            HV, K, V = self.recurrent_states[0].shape[1:]
            state = self.recurrent_states[0].new_zeros(written.k.shape[0], HV, K, V)
        if len(written):
            state = advance_state(written.k, written.v, written.beta, written.log_decay, state, erase=self.erase)
        return window, state

    def _store(self, window, state):
        self.device = state.device
        if window is not None:
            self.conv_states[0] = _keep(self.conv_states[0], window)
            self.conv_kernel_size[0] = window.shape[1]
            self.is_conv_states_initialized[0] = True
        self.recurrent_states[0] = _keep(self.recurrent_states[0], state)
        self.is_recurrent_states_initialized[0] = True
        self.has_previous_state[0] = True

    def _map(self, function):
        """Apply a function to every tensor held."""
        for held in (self.conv_states, self.recurrent_states):
            if held[0] is not None:
                held[0] = function(held[0])
        if self.written is not None:
            self.written = self.written.map(function)
            self.checkpoint = tuple(None if t is None else function(t) for t in self.checkpoint)


class CountingRecurrentLayer(RecurrentLayer, CacheLayerMixin):
    """The first layer of a model without softmax layers: it also counts the tokens, for positions and for `generate`.

    The counter is a tensor, because a Python number that changes at every step makes torch.compile compile again.
    """

    supports_early_init = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.keys = self.values = None
        self.is_initialized = False
        self.cumulative_length = torch.zeros((), dtype=torch.int64)

    def write(self, window, state, length, written=None):
        super().write(window, state, length, written)
        if self.in_static_cache and self.cumulative_length.device != state.device:
            # a CUDA graph takes nothing from the CPU; elsewhere the CPU must not wait to read the number
            self.cumulative_length = self.cumulative_length.to(state.device)
            torch._dynamo.mark_static_address(self.cumulative_length)
        self._count(length)

    def crop(self, tokens_to_remove):
        super().crop(tokens_to_remove)
        self._count(int(tokens_to_remove))

    def reset(self):
        super().reset()
        self._count(-int(self.cumulative_length))

    def _count(self, tokens):
        if _is_frozen(self.cumulative_length):
            self.cumulative_length = self.cumulative_length.clone()
        self.cumulative_length.add_(tokens)

    def get_seq_length(self):
        return self.cumulative_length if numbers_are_hidden() else int(self.cumulative_length)

    def get_mask_sizes(self, query_length):
        return self.get_seq_length() + query_length, 0

    def update(self, key_states, value_states, *args, **kwargs):
        raise ValueError("a recurrent layer keeps a state, not keys and values; its cache is written by the mixer")


def next_window(window, inputs, real, taps_before):
    """The last real inputs of the short convolution, which the next call starts from.

    Args: window: [B, W-1, C] or None; inputs: [B, T, C]; real: [B, T] bool or None; taps_before: W-1.
    Returns: [B, W-1, C], zeros where there were no inputs yet.
    """
    if window is None:
        window = inputs.new_zeros(inputs.shape[0], taps_before, inputs.shape[2])
    joined = torch.cat([window, inputs], dim=1)
    if real is None:
        return joined[:, inputs.shape[1] :]
    # position in `joined` of the last W-1 inputs that are real, in time order
    seen = torch.cat([real.new_ones(real.shape[0], taps_before), real], dim=1)
    order = torch.argsort(seen.to(torch.int8), dim=1, stable=True)[:, inputs.shape[1] :]
    return joined.gather(1, order[..., None].expand(-1, -1, joined.shape[2]))


def _keep(held, new):
    """Copy into the tensor held, so that its address stays (CUDA graphs); replace it where gradients must flow."""
    if new is held:
        return held
    in_place = (
        held is not None
        and held.shape == new.shape
        and held.dtype == new.dtype
        and held.device == new.device
        and _may_change(held)
    )
    if in_place:
        return held.copy_(new)
    if not is_torchdynamo_compiling() and not new.requires_grad:
        new = new.clone()
        torch._dynamo.mark_static_address(new)
    return new


def _may_change(held):
    # autograd may have kept what is held
    return not torch.is_grad_enabled() and not _is_frozen(held)


def _is_frozen(tensor):
    """Whether it was made in inference mode and cannot change outside of it. In compiled calls torch itself raises."""
    return not is_torchdynamo_compiling() and tensor.is_inference() and not torch.is_inference_mode_enabled()
