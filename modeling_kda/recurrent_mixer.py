"""Every linear stage: projections, short convolution, gates, the recurrence, and what is done to its output.

What distinguishes the stages is read from `stages.py`; nothing here asks for a stage by name.
"""

import torch
import torch.nn.functional as F
from torch import nn

from .layers import Decay, EluFeatureMap, HedgehogFeatureMap, RMSNorm, ShortConvolution, at_least_fp32, l2norm
from .ops import delta_rule
from .recurrent_cache import Written, next_window
from .stages import STAGES
from .token_layout import TokenLayout


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
        self.q_proj = nn.Linear(D, H * K, bias=bias)
        self.k_proj = nn.Linear(D, H * K, bias=bias)
        self.v_proj = nn.Linear(D, HV * V, bias=bias)
        self.short_conv_kernel_size = config.short_conv_kernel_size
        if config.short_conv_kernel_size:
            taps, act = config.short_conv_kernel_size, config.short_conv_activation
            self.q_conv1d, self.k_conv1d, self.v_conv1d = (ShortConvolution(size, taps, act) for size in self.sizes)
        self._build_feature_maps(config)
        self._build_gates(config)
        self.o_norm = RMSNorm(V, eps=config.norm_eps) if config.output_norm else nn.Identity()
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

        inputs = torch.cat([self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)], -1)
        window, state = self._recall(memory, inputs)
        q, k, v = self._heads(self._short_conv(inputs, window, layout))
        q, k, v = self._features(q, k, v)
        beta, log_decay = self._gates(hidden_states, layout)
        # feature maps and step sizes take the place of the usual K^-0.5 where outputs are normalised by their weights
        scale = 1.0 if self.stage.normaliser else None
        overwrite = memory is not None and memory.may_overwrite
        o, state = delta_rule(
            q, k, v, beta, log_decay, state, erase=self.stage.erase, scale=scale, overwrite=overwrite
        )
        if memory is not None:
            self._remember(memory, window, state, inputs, Written(k, v, beta, log_decay, inputs, layout.real))
        return self.o_proj(self._output(o, hidden_states)), None

    def _recall(self, memory, inputs):
        """The conv window and the state that this call starts from, each None where there is none."""
        window, state = (None, None) if memory is None else memory.read()
        taps_before = self.short_conv_kernel_size - 1
        expected = (inputs.shape[0], taps_before, inputs.shape[2]) if self.short_conv_kernel_size else None
        if state is not None and expected != (None if window is None else tuple(window.shape)):
            raise ValueError(
                f"the cache of layer {self.layer_idx} must hold a conv window of the shape {expected}, got "
                f"{None if window is None else tuple(window.shape)}: it was filled by another model"
            )
        return window, state

    def _short_conv(self, inputs, window, layout):
        """[B, T, C] q, k, v inputs side by side -> the three after their convolutions."""
        if not self.short_conv_kernel_size:
            return inputs.split(self.sizes, -1)
        x = layout.compact(inputs)
        x = F.pad(x, (0, 0, self.short_conv_kernel_size - 1, 0)) if window is None else torch.cat([window, x], 1)
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        outputs = (conv(part, layout.age) for conv, part in zip(convs, x.split(self.sizes, -1), strict=True))
        return [layout.spread(y) for y in outputs]

    def _heads(self, qkv):
        q, k, v = qkv
        B, T, _ = q.shape
        q, k = (x.view(B, T, -1, self.head_dim) for x in (q, k))
        v = v.view(B, T, -1, self.value_head_dim)
        # outputs come in the dtype of the values, and sums over the past can pass 65504
        return q, k, v.float() if v.dtype == torch.float16 else v

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
        B, T, _ = x.shape
        beta, log_decay = None, None
        if self.stage.decay:
            project = (
                self.decay_proj if self.stage.decay == "head" else lambda y: self.decay_b_proj(self.decay_a_proj(y))
            )
            logits = project(x).view(B, T, self.decay.A_log.shape[0], -1)
            log_decay, step = self.decay(logits)
            if self.stage.write == "step":
                beta = step[..., 0]
        if self.stage.write == "beta":
            beta = at_least_fp32(self.beta_proj(x)).sigmoid()
        heads = self.sizes[2] // self.value_head_dim
        if layout.real is not None:
            beta = layout.silence(x.new_ones(B, T, heads, dtype=torch.float32) if beta is None else beta)
        if layout.starts is not None and log_decay is None:
            log_decay = x.new_zeros(B, T, heads, 1, dtype=torch.float32)
        return beta, None if log_decay is None else layout.hold(log_decay)

    def _remember(self, memory, window, state, inputs, written):
        if self.short_conv_kernel_size:
            window = next_window(window, inputs, written.real, self.short_conv_kernel_size - 1)
        else:
            written.conv_inputs = None
        memory.write(window, state, written)

    def _output(self, o, x):
        """[B, T, HV, V] -> [B, T, HV * V]: divide by the normaliser, norm, gate."""
        if self.stage.normaliser:
            o, weight = o[..., :-1], o[..., -1:]
            o = o / weight.clamp_min(1e-6)
        o = self.o_norm(o).flatten(2)
        if self.output_gate == "low_rank":
            o = o * self.output_gate_b_proj(self.output_gate_a_proj(x)).sigmoid()
        elif self.output_gate == "full":
            o = o * self.output_gate_proj(x).sigmoid()
        return o.to(x.dtype)
