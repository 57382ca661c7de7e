"""Keeps experts evenly used during training, through the selection bias of the routers and without an extra loss.

A callback for `Trainer`: it watches what every router gives, over all micro-batches of a step and all processes, and
sets the bias that the next step chooses experts with. The bias is part of the checkpoint, and fixed once training
ends. There are two rules: `QuantileBalancing`, and `SignBalancing` with a step size.

E experts, of which each token goes to k; N tokens. Padding counts nowhere, if the model is called with a mask [B, T].
"""

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, TrainerCallback


class RouterBalancing(TrainerCallback):
    """What both rules share. In a training loop of one's own: `attach(model)`, `update()` after each step, `detach()`.

    Attributes:
        loads: after a step, how many of its tokens went to each expert, int32 [E] for the name of each router.
    """

    def __init__(self):
        self.loads = {}
        self._routers, self._counts, self._hooks = {}, {}, []
        self._recording, self._mask, self._next_mask = False, None, None

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.attach(model)

    def on_step_end(self, args, state, control, **kwargs):
        self.update()

    def on_train_end(self, args, state, control, **kwargs):
        self.detach()

    def attach(self, model):
        """Start to watch the routers of a model; routers that send every token to every expert are left alone.

        Raises: ValueError for a model without routers.
        """
        self.detach()
        found = {name: module for name, module in model.named_modules() if hasattr(module, "selection_bias")}
        if not found:
            raise ValueError(
                "balancing needs a model with experts, got one with num_experts=0; leave the callback out"
            )
        self._routers = {name: r for name, r in found.items() if r.num_chosen < len(r.selection_bias)}
        for module in model.modules():
            if isinstance(module, PreTrainedModel) and hasattr(module, "layers"):
                self._hooks.append(module.register_forward_pre_hook(self._open, with_kwargs=True))
                self._hooks.append(module.register_forward_hook(self._close, always_call=True))
        for name, router in self._routers.items():
            self._counts[name] = self.new_counts(router)
            self._hooks.append(router.register_forward_hook(self._watch(self._counts[name])))

    def count_only(self, mask):
        """Say which tokens of the next pass count, [B, T], to a model that is called without a mask."""
        self._next_mask = mask

    def detach(self):
        """Watch no more."""
        for hook in self._hooks:
            hook.remove()
        self._routers, self._counts, self._hooks = {}, {}, []

    # a pass of the model, from end to end: checkpointed layers run once more, but in the backward pass
    def _open(self, model, args, kwargs):
        mask = kwargs.get("attention_mask") if self._next_mask is None else self._next_mask
        self._mask = mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None
        self._recording = model.training

    def _close(self, model, args, output):
        self._recording, self._mask, self._next_mask = False, None, None

    def _watch(self, counts):
        def hook(router, args, output):
            if self._recording:
                with torch.no_grad():
                    self._count(router, counts, *output)

        return hook

    def _count(self, router, counts, logits, weights, chosen):
        real = torch.ones_like(logits[:, :1], dtype=torch.int32)  # [N, 1]
        if self._mask is not None:
            real = real * self._mask[:, -(len(logits) // len(self._mask)) :].reshape(-1, 1).to(torch.int32)
        counts["load"].scatter_add_(0, chosen.flatten(), real.expand_as(chosen).flatten())
        self.count(router, counts, logits, real)

    @torch.no_grad()
    def update(self):
        """Set the biases from what was seen since the last update, here and in all other processes."""
        for name, router in self._routers.items():
            counts = self._counts[name]
            if dist.is_available() and dist.is_initialized():
                for tensor in counts.values():
                    dist.all_reduce(tensor)
            self.loads[name] = counts["load"].clone()
            router.selection_bias.copy_(self.new_bias(router, counts))
            for tensor in counts.values():
                tensor.zero_()

    def new_counts(self, router):
        """What is counted for one router: a dict of int32 tensors, which start at zero and are added up."""
        return {"load": torch.zeros_like(router.selection_bias, dtype=torch.int32)}

    def count(self, router, counts, logits, real):
        """Add a pass to the counts, beyond the load. logits: [N, E]; real: int32 [N, 1], 0 on padding."""

    def new_bias(self, router, counts):
        """The bias for the next step, [E], from the counts of all processes."""
        raise NotImplementedError(f"{type(self).__name__} must say how the bias follows from the counts")


class SignBalancing(RouterBalancing):
    """bias += rate * sign(mean load - load): experts with less than their share become a little easier to choose.

    The rule of DeepSeek-V3 (arXiv 2408.15664, 2412.19437).

    Args: rate: the step; scores lie between 0 and 1.
    """

    def __init__(self, rate: float = 1e-3):
        super().__init__()
        if rate <= 0:
            raise ValueError(f"rate must be positive, got {rate}")
        self.rate = rate

    def new_bias(self, router, counts):
        load = counts["load"].double()
        return router.selection_bias + self.rate * (load.mean() - load).sign()


class QuantileBalancing(RouterBalancing):
    """bias = `quantile_bias` of all tokens of a step: there is no step size, one step goes the whole way.

    The rule of Kimi K3 (arXiv 2607.24653), which keeps a histogram instead of the tokens.

    Args:
        bins: of the histogram, per expert; a bias is exact to about a bin, (2 + max bias - min bias) / bins.
        ema: how much of the old bias stays: bias = ema * old + (1 - ema) * new.
    """

    def __init__(self, bins: int = 1000, ema: float = 0.0):
        super().__init__()
        if bins < 2:
            raise ValueError(f"bins must be at least 2, got {bins}")
        if not 0 <= ema < 1:
            raise ValueError(f"ema must be at least 0 and below 1, got {ema}")
        self.bins, self.ema = bins, ema

    def new_counts(self, router):
        shape = len(router.selection_bias), self.bins
        histogram = torch.zeros(shape, dtype=torch.int32, device=router.selection_bias.device)
        return {**super().new_counts(router), "histogram": histogram}

    def count(self, router, counts, logits, real):
        needed = needed_bias(logits.sigmoid(), router.selection_bias, router.num_chosen)
        low, width = self._grid(router)
        rows = torch.arange(len(router.selection_bias), device=logits.device) * self.bins
        cells = ((needed - low) / width).long().clamp(0, self.bins - 1) + rows
        counts["histogram"].view(-1).scatter_add_(0, cells.flatten(), real.expand_as(cells).flatten())

    def new_bias(self, router, counts):
        low, width = self._grid(router)
        up_to = counts["histogram"].double().cumsum(-1)  # [E, bins]
        tokens = up_to[:, -1:]
        wanted = tokens * router.num_chosen / len(router.selection_bias)
        cell = torch.searchsorted(up_to, wanted).clamp(max=self.bins - 1)  # [E, 1]
        inside = up_to.gather(1, cell) - wanted
        share = 1 - inside / counts["histogram"].gather(1, cell).clamp(min=1)
        bias = (low + width * (cell + share))[:, 0]
        bias = self.ema * router.selection_bias + (1 - self.ema) * (bias - bias.mean())
        # a step in which the router saw nothing changes nothing
        return torch.where(tokens[:, 0] > 0, bias, router.selection_bias)

    def _grid(self, router):
        """Start and width of the bins: what is counted lies between the smallest bias - 1 and the largest + 1."""
        low, high = router.selection_bias.aminmax()
        return low - 1, (high - low + 2) / self.bins


def quantile_bias(scores, bias, num_chosen):
    """The bias under which each expert would be among the chosen of k/E of the tokens, if only its own bias changed.

    This is the definition of `QuantileBalancing`. If alpha_i is what the first expert that token i does not go to has,
    the (k+1)-th largest of scores_i + bias, then for every expert j a share k/E of the tokens has
    scores_ij + bias_j > alpha_i. The share is exact but for ties: an expert that is itself the first one left out for
    many tokens, and for which k/E lies among them, keeps its bias. The mean is taken out, which changes no choice.

    Args:
        scores: [N, E], sigmoid of the router's logits.
        bias: [E], the one in use.
        num_chosen: k, below E.

    Returns: [E].
    """
    new = needed_bias(scores, bias, num_chosen).quantile(num_chosen / scores.shape[1], dim=0)
    return new - new.mean()


def needed_bias(scores, bias, num_chosen):
    """The bias with which each expert would be level with the first that is not chosen, [N, E]."""
    first_left_out = (scores + bias).topk(num_chosen + 1, dim=-1).values[:, -1:]
    return first_left_out - scores
