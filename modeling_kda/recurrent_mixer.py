"""Every linear stage: projections, short convolution, gates, the recurrence, and what is done to its output.

What distinguishes the stages is read from `stages.py`; nothing here asks for a stage by name.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from .layers import Decay, EluFeatureMap, HedgehogFeatureMap, RMSNorm, ShortConvolution, at_least_fp32, l2norm
from .ops import decode_step, delta_rule, delta_rule_from_logits, gated_norm, short_convolution, takes_logits
from .recurrent_cache import Written, next_window
from .stages import STAGES
from .token_layout import TokenLayout


@dataclass
class Projected:
    """What the projections make of a call's tokens, before the convolutions and activations; None where there is none.

    q, k: [B, T, H * K], v: [B, T, HV * V], beta_logits: [B, T, HV], decay_logits: [B, T, HV, 1 or K], gate_logits:
    [B, T, HV * V], of the output gate.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    beta_logits: torch.Tensor | None
    decay_logits: torch.Tensor | None
    gate_logits: torch.Tensor | None


class RecurrentMixer(nn.Module):
    """y = o_proj(norm(o) * sigmoid(gate(x))), where o comes from the recurrence of `delta_rule.py`.

    Queries and keys have H heads of K channels, values HV heads of V channels (HV a multiple of H).
    """

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.stage = STAGES[config.stages[layer_idx]]
        self.layer_idx = layer_idx
        self.head_dim, self.value_head_dim = config.head_dim, config.value_head_dim
        D, H, K = config.hidden_size, config.num_attention_heads, config.head_dim
        HV, V, bias = config.num_value_heads, config.value_head_dim, config.attention_bias
        self.sizes = [H * K, H * K, HV * V]
        self.num_value_heads = HV
        self.q_proj = nn.Linear(D, H * K, bias=bias)
        self.k_proj = nn.Linear(D, H * K, bias=bias)
        self.v_proj = nn.Linear(D, HV * V, bias=bias)
        self.short_conv_kernel_size = config.short_conv_kernel_size
        if config.short_conv_kernel_size:
            taps, act = config.short_conv_kernel_size, config.short_conv_activation
            self.q_conv1d, self.k_conv1d, self.v_conv1d = (ShortConvolution(size, taps, act) for size in self.sizes)
        self._build_feature_maps(config)
        self._build_gates(config)
        self.o_norm = RMSNorm(V, eps=config.norm_eps) if config.output_norm else None
        self._build_output_gate(config)
        self.o_proj = nn.Linear(HV * V, D, bias=bias)

    def _build_feature_maps(self, config):
        if self.stage.normaliser:
            hedgehog = config.feature_map == "hedgehog"
            for name in ("q_feature_map", "k_feature_map"):
                size = (config.num_attention_heads, config.head_dim)
                self.add_module(name, HedgehogFeatureMap(*size) if hedgehog else EluFeatureMap())

    def _build_gates(self, config):
        D, HV, K = config.hidden_size, config.num_value_heads, config.head_dim
        if self.stage.write == "beta":
            self.beta_proj = nn.Linear(D, HV, bias=config.attention_bias)
        if self.stage.decay == "head":
            self.decay_proj = nn.Linear(D, HV, bias=False)
        if self.stage.decay == "channel":
            self.decay_a_proj = nn.Linear(D, config.decay_rank, bias=False)
            self.decay_b_proj = nn.Linear(config.decay_rank, HV * K, bias=False)
        if self.stage.decay:
            # Mamba-2's step size is a softplus; the bounded form exists for the delta rules
            bounded = config.decay_gate == "lower_bound" and self.stage.write != "step"
            channels = K if self.stage.decay == "channel" else 1
            self.decay = Decay(HV, channels, config.decay_lower_bound if bounded else None)

    def _build_output_gate(self, config):
        D, inner, bias = config.hidden_size, config.num_value_heads * config.value_head_dim, config.attention_bias
        self.output_gate = config.output_gate
        if config.output_gate == "low_rank":
            self.output_gate_a_proj = nn.Linear(D, config.output_gate_rank, bias=False)
            self.output_gate_b_proj = nn.Linear(config.output_gate_rank, inner, bias=bias)
        elif config.output_gate == "full":
            self.output_gate_proj = nn.Linear(D, inner, bias=bias)

    def forward(self, hidden_states, mask: TokenLayout | None = None, cache=None, **kwargs):
        """Args:
            hidden_states: [B, T, D].
            mask: the batch's `TokenLayout`, None when every token is real and rows hold one sequence.
            cache: a transformers `Cache` whose layer here is a `RecurrentLayer`, or None.

        Returns: [B, T, D], and None in the place of attention weights.
        """
        layout = TokenLayout() if mask is None else mask
        memory = None if cache is None else cache.layers[self.layer_idx]
        x = self._project(hidden_states)
        window, state = self._recall(memory, x)
        y = self._decode(x, window, state, layout, memory)
        if y is None:
            q, k, v = self._heads(*self._short_conv(x, window, layout))
            o, state, written = self._recurrence(q, k, v, x, state, layout, memory)
            if memory is not None:
                self._remember(memory, window, state, x, written, layout)
            y = self._output(o, x.gate_logits)
        return self.o_proj(y.to(hidden_states.dtype)), None

    def _project(self, x):
        B, T, _ = x.shape
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        beta_logits = self.beta_proj(x) if self.stage.write == "beta" else None
        decay_logits, gate_logits = None, None
        if self.stage.decay:
            low_rank = self.stage.decay == "channel"
            decay_logits = self.decay_b_proj(self.decay_a_proj(x)) if low_rank else self.decay_proj(x)
            decay_logits = decay_logits.view(B, T, self.num_value_heads, -1)
        if self.output_gate == "low_rank":
            gate_logits = self.output_gate_b_proj(self.output_gate_a_proj(x))
        elif self.output_gate == "full":
            gate_logits = self.output_gate_proj(x)
        return Projected(q, k, v, beta_logits, decay_logits, gate_logits)

    def _recall(self, memory, x):
        """The conv window and the state that this call starts from, each None where there is none."""
        window, state = (None, None) if memory is None else memory.read()
        expected = None
        if self.short_conv_kernel_size:
            expected = (x.q.shape[0], self.short_conv_kernel_size - 1, sum(self.sizes))
        if state is not None and expected != (None if window is None else tuple(window.shape)):
            raise ValueError(
                f"the cache of layer {self.layer_idx} must hold a conv window of the shape {expected}, got "
                f"{None if window is None else tuple(window.shape)}: it was filled by another model"
            )
        return window, state

    def _decode(self, x, window, state, layout, memory):
        """One more token of a cached sequence in one launch: [B, 1, HV * V], or None where that cannot be.

        State and window change in place, so nobody else may need the old ones.
        """
        if memory is None or not memory.may_overwrite or self.stage.normaliser or not layout.is_plain:
            return None
        convs = [self.q_conv1d, self.k_conv1d, self.v_conv1d] if self.short_conv_kernel_size else []
        decay, norm = (self.decay if self.stage.decay else None), self.o_norm
        if not all(_is_untouched(module) for module in (*convs, decay, norm) if module is not None):
            return None
        y = decode_step(
            *self._heads(x.q, x.k, x.v),
            state,
            window,
            [conv.weight for conv in convs] or None,
            beta_logits=x.beta_logits,
            decay_logits=x.decay_logits,
            A_log=getattr(decay, "A_log", None),
            dt_bias=getattr(decay, "dt_bias", None),
            lower_bound=getattr(decay, "lower_bound", None),
            norm_weight=getattr(norm, "weight", None),
            gate_logits=x.gate_logits,
            erase=self.stage.erase,
            unit_keys=self.stage.unit_keys,
            write=self.stage.write,
            activation=convs[0].activation if convs else None,
            eps=getattr(norm, "eps", 0.0),
        )
        if y is not None:
            memory.write(window, state, 1)
        return y

    def _short_conv(self, x, window, layout):
        """q, k and v after their convolutions, [B, T, C] each."""
        parts = x.q, x.k, x.v
        if not self.short_conv_kernel_size:
            return parts
        windows = [None] * 3 if window is None else window.split(self.sizes, -1)
        convs = self.q_conv1d, self.k_conv1d, self.v_conv1d
        return [
            layout.spread(conv(layout.compact(part), past, layout.age, run=short_convolution))
            for conv, part, past in zip(convs, parts, windows, strict=True)
        ]

    def _heads(self, q, k, v):
        B, T, _ = q.shape
        return (
            q.view(B, T, -1, self.head_dim),
            k.view(B, T, -1, self.head_dim),
            v.view(B, T, -1, self.value_head_dim),
        )

    def _recurrence(self, q, k, v, x, state, layout, memory):
        """Outputs [B, T, HV, V] (V + 1 with the normaliser), the new state, what was written if that is recorded."""
        # outputs come in the dtype of the values, and sums over the past can pass 65504
        v = v.float() if v.dtype == torch.float16 else v
        records = memory is not None and memory.record_past
        activates = self.stage.unit_keys and self.stage.write == "beta" and layout.starts is None and not records
        if activates and takes_logits(q, k, v, x.beta_logits, x.decay_logits, state):
            run = partial(delta_rule_from_logits, q, k, v, layout.hush(x.beta_logits), state)
            o, state = self.decay(layout.hush(x.decay_logits), run=run) if self.stage.decay else run()
            return o, state, None
        q, k, v = self._features(q, k, v)
        beta, log_decay = self._gates(x, layout)
        # feature maps and step sizes take the place of the usual K^-0.5 where outputs are normalised by their weights
        scale = 1.0 if self.stage.normaliser else None
        overwrite = memory is not None and memory.may_overwrite
        o, state = delta_rule(
            q, k, v, beta, log_decay, state, erase=self.stage.erase, scale=scale, overwrite=overwrite
        )
        return o, state, (k, v, beta, log_decay) if records else None

    def _features(self, q, k, v):
        if self.stage.unit_keys:
            return l2norm(q), l2norm(k), v
        if self.stage.normaliser:
            # the arguments that softmax saw: q k^T K^-0.5, half of the scale on each side
            half = self.head_dim**-0.25
            # the column of ones sums the weights, so that the state carries the normaliser
            return self.q_feature_map(q * half), self.k_feature_map(k * half), F.pad(v, (0, 1), value=1.0)
        return q, k, v

    def _gates(self, x, layout):
        """beta [B, T, HV] or None and log_decay [B, T, HV, 1 or K] or None, with padding and documents respected."""
        shape = (*x.q.shape[:2], self.num_value_heads)
        beta, log_decay = None, None
        if self.stage.decay:
            log_decay, step = self.decay(x.decay_logits)
            if self.stage.write == "step":
                beta = step[..., 0]
        if self.stage.write == "beta":
            beta = at_least_fp32(x.beta_logits).sigmoid()
        if layout.real is not None:
            beta = layout.silence(x.q.new_ones(shape, dtype=torch.float32) if beta is None else beta)
        if layout.starts is not None and log_decay is None:
            log_decay = x.q.new_zeros(*shape, 1, dtype=torch.float32)
        return beta, None if log_decay is None else layout.hold(log_decay)

    def _remember(self, memory, window, state, x, written, layout):
        parts = x.q, x.k, x.v
        inputs = torch.cat(parts, -1) if written is not None and self.short_conv_kernel_size else None
        if self.short_conv_kernel_size:
            taps_before = self.short_conv_kernel_size - 1
            if layout.real is None:
                # all that a window can hold
                parts = [part[:, -taps_before:] for part in parts]
            window = next_window(window, torch.cat(parts, -1), layout.real, taps_before)
        memory.write(window, state, x.q.shape[1], None if written is None else Written(*written, inputs, layout.real))

    def _output(self, o, gate_logits):
        """[B, T, HV, V] -> [B, T, HV * V]: divide by the normaliser, norm, gate."""
        if self.stage.normaliser:
            o, weight = o[..., :-1], o[..., -1:]
            o = o / weight.clamp_min(1e-6)
        y = gated_norm(o, gate=gate_logits) if self.o_norm is None else self.o_norm(o, gate_logits, run=gated_norm)
        return y.flatten(2)


def _is_untouched(module):
    """Whether a layer's parameters may be used without calling it: nothing wraps it, shards it or listens to it."""
    own = type(module) in (ShortConvolution, Decay, RMSNorm) and "forward" not in vars(module)
    return own and not (module._forward_hooks or module._forward_pre_hooks)
