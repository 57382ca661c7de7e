"""The mixture of experts: a router that chooses a few experts per token, the experts, and what every token goes to."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.utils.generic import maybe_autocast

from .layers import MLP, RMSNorm, at_least_fp32, build_activation


class MoE(nn.Module):
    """y = up(norm(sum_e weight_e expert_e(down(x)))) + shared(x), over the experts e that the router chose for x.

    `down`, `norm` and `up` are there with `routed_expert_hidden_size` only (the latent experts of Kimi K3); router and
    shared experts read x itself in any case. N tokens, D channels, E experts of width I, of which each token goes to
    k; experts read and write Z channels: D, or `routed_expert_hidden_size`.
    """

    def __init__(self, config):
        super().__init__()
        size = config.routed_expert_hidden_size or config.hidden_size
        self.router = Router(config)
        self.latent_down_proj = self.latent_norm = self.latent_up_proj = nn.Identity()
        if config.routed_expert_hidden_size is not None:
            self.latent_down_proj = nn.Linear(config.hidden_size, size, bias=False)
            if config.latent_moe_use_norm:
                self.latent_norm = RMSNorm(size, eps=config.norm_eps)
            self.latent_up_proj = nn.Linear(size, config.hidden_size, bias=False)
        self.experts = Experts(config, size)
        inner = config.shared_intermediate_size
        self.shared_experts = MLP(config, inner=inner) if inner else None

    def forward(self, x):
        """x: [B, T, D] -> [B, T, D]."""
        tokens = x.reshape(-1, x.shape[-1])
        _, weights, chosen = self.router(tokens)
        y = self.experts(self.latent_down_proj(tokens), chosen, weights)
        y = self.latent_up_proj(self.latent_norm(y)).view_as(x)
        return y if self.shared_experts is None else y + self.shared_experts(x)


class Router(nn.Module):
    """Chooses k experts per token by sigmoid(W x) + selection_bias, and weighs them by sigmoid(W x) alone.

    The bias is there to balance the experts. It is no parameter: nothing is learned through a choice, and whoever
    trains sets it from what the router sees. Both tensors stay fp32, and with them everything that is computed here.
    """

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, dtype=torch.float32))
        self.register_buffer("selection_bias", torch.empty(config.num_experts, dtype=torch.float32))
        self.num_chosen = config.num_experts_per_token
        self.renormalize = config.moe_renormalize
        self.scaling_factor = config.routed_scaling_factor
        self.initializer_range = config.initializer_range
        self.reset_parameters()

    def reset_parameters(self):
        init.normal_(self.weight, std=self.initializer_range)
        init.zeros_(self.selection_bias)

    def forward(self, x):
        """x: [N, D] -> logits [N, E], weights [N, k] and the indices of the chosen experts [N, k], in no order.

        A forward hook sees all three: that is how routing is recorded and balanced.
        """
        with maybe_autocast(x.device.type, enabled=False):
            wide = at_least_fp32(x)
            # of a model in fp64, whose routers are loaded in fp32
            logits = F.linear(wide, self.weight.to(wide.dtype))
        scores = logits.sigmoid()
        chosen = (scores + self.selection_bias).topk(self.num_chosen, dim=-1, sorted=False).indices
        weights = scores.gather(-1, chosen)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return logits, weights * self.scaling_factor, chosen


class Experts(nn.Module):
    """E MLPs of one shape, stored together: gate_up_proj [E, 2I, Z] (the gates first; up_proj [E, I, Z] if not gated)
    and down_proj [E, Z, I], with `mlp_bias` also gate_up_bias [E, 2I] (or up_bias [E, I]) and down_bias [E, Z].

    How they are computed is `config._experts_implementation`, a name from transformers' `ALL_EXPERTS_FUNCTIONS`, whose
    attributes this class has; `"eager"` is `loop_over_experts` below, the definition.
    """

    has_post_expert_norm = False
    is_transposed = False
    is_concatenated = True
    # set to True by expert parallelism, which also lowers `num_experts` to the number on this rank
    _is_expert_parallel = False

    def __init__(self, config, size: int):
        super().__init__()
        self.config = config
        self.num_experts = config.num_experts
        self.has_gate = config.mlp_gated
        self.has_bias = config.mlp_bias
        self.act_fn = build_activation(config)
        self.aligned = size % 8 == 0 and config.moe_intermediate_size % 8 == 0
        inner, name = config.moe_intermediate_size, "up"
        rows = inner
        if self.has_gate:
            rows, name = 2 * inner, "gate_up"
        self.register_parameter(f"{name}_proj", nn.Parameter(torch.empty(self.num_experts, rows, size)))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, size, inner))
        if self.has_bias:
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(self.num_experts, rows)))
            self.down_bias = nn.Parameter(torch.empty(self.num_experts, size))
        self.reset_parameters()

    # transformers' names for the biases
    gate_up_proj_bias = property(lambda self: self.gate_up_bias)
    up_proj_bias = property(lambda self: self.up_bias)
    down_proj_bias = property(lambda self: self.down_bias)

    def reset_parameters(self):
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                init.zeros_(parameter)
            else:
                init.normal_(parameter, std=self.config.initializer_range)

    def forward(self, x, chosen, weights):
        """Args:
            x: [N, Z].
            chosen: int64 [N, k], the experts of each token.
            weights: [N, k], fp32 at least.

        Returns: [N, Z], the weighted sums over the k experts, which are added up in the dtype of the weights.
        """
        compute = ALL_EXPERTS_FUNCTIONS.get_interface(self._implementation(x.dtype), loop_over_experts)
        return compute(self, x, chosen, weights)

    def _implementation(self, dtype):
        wanted = self.config._experts_implementation
        # outside a graph `grouped_mm` is a kernel that refuses fp64 and rows which are no multiple of 16 bytes
        if wanted == "grouped_mm" and not torch.compiler.is_compiling():
            return wanted if self.aligned and dtype != torch.float64 else "eager"
        # a module that stands alone, without a model around it that would have chosen
        return wanted or "eager"

    def _apply_gate(self, gate_up):
        """[..., 2I] -> [..., I]. transformers calls it; unlike its own, it can bound both branches (SiTU)."""
        return self.act_fn(*gate_up.chunk(2, dim=-1))


def loop_over_experts(experts, x, chosen, weights):
    """One expert after the other. This is the definition of `Experts`: transformers' implementations equal it."""
    y = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, weights.dtype))
    for e in chosen.unique().tolist():
        # with expert parallelism, the number of experts stands for "on another rank"
        if e < experts.num_experts:
            token, slot = (chosen == e).nonzero(as_tuple=True)
            y.index_add_(0, token, (_one_expert(experts, e, x[token]) * weights[token, slot, None]).to(y.dtype))
    return y.to(x.dtype)


def _one_expert(experts, e, x):
    """x: [n, Z] -> [n, Z], the MLP of expert e."""

    def bias(name):
        return getattr(experts, name)[e] if experts.has_bias else None

    if experts.has_gate:
        hidden = experts._apply_gate(F.linear(x, experts.gate_up_proj[e], bias("gate_up_bias")))
    else:
        hidden = experts.act_fn(F.linear(x, experts.up_proj[e], bias("up_bias")))
    return F.linear(hidden, experts.down_proj[e], bias("down_bias"))
