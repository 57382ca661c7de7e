"""The two losses that teach a student what its teacher does, each as a `Trainer`.

First every new mixer alone learns to give the output of the attention that it replaces (`LayerwiseTrainer`), then
the whole model learns the teacher's predictions (`LogitTrainer`). Both losses are sums over tokens divided by the
number of tokens of the whole accumulated batch, so 4 batches of 1 row take the same step as 1 batch of 4 rows, even if
their lengths differ.

Padding is on the right and models are causal, so no real token sees it; it only has to be left out of the sums.
"""

import torch
import torch.nn.functional as F
from transformers import Trainer

from modeling_kda.stages import STAGES

from .balancing import RouterBalancing
from .blocks import IGNORED
from .latent_conversion import is_exact


class DistillationTrainer(Trainer):
    """What both phases share: a frozen teacher and exact averages. Takes `teacher` and what `Trainer` takes."""

    # losses are divided by the token count of the accumulated batch here, so the Trainer must not divide again
    loss_is_scaled_for_ga = True

    def __init__(self, *args, teacher, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = teacher.to(self.args.device).eval().requires_grad_(False)

    def weights(self, labels, num_items_in_batch):
        """What each prediction counts in the average; the last position of a row predicts nothing.

        Args:
            labels: int64 [B, T].
            num_items_in_batch: predictions in the whole accumulated batch of all processes; None for this one alone.

        Returns: float32 [B, T - 1].
        """
        counted = (labels[:, 1:] != IGNORED).float()
        if num_items_in_batch is None:
            return counted / counted.sum()
        return counted / num_items_in_batch


class LogitTrainer(DistillationTrainer):
    """KL(teacher || student) of the next-token distributions at temperature 1, in nats per token."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids = inputs["input_ids"]
        with torch.no_grad(), self.accelerator.autocast():
            teacher_logits = self.teacher(input_ids=ids, use_cache=False).logits
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, RouterBalancing):
                callback.count_only(inputs["labels"] != IGNORED)
        outputs = model(input_ids=ids, use_cache=False)
        weights = self.weights(inputs["labels"], num_items_in_batch)
        loss = (kl_divergence(teacher_logits[:, :-1], outputs.logits[:, :-1]) * weights).sum()
        if num_items_in_batch is not None and self.model.training:
            # data parallel wrappers average gradients over processes, and the count is already that of all of them
            loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


class LayerwiseTrainer(DistillationTrainer):
    """Each new mixer gets the hidden state that enters the teacher's layer and learns its attention's output.

    The loss of a layer is the squared error divided by the variance of the teacher's output, so that 1 means "no
    better than a constant" in every layer; what is minimised is the mean over layers. A layer only sees the teacher,
    so each is differentiated on its own and one layer's graph is held at a time.

    Args:
        variances: float [num_layers], of `output_variances`. They are fixed, because an average over changing batches
            would make the loss depend on how a batch is cut into pieces.
    """

    def __init__(self, *args, variances, **kwargs):
        super().__init__(*args, **kwargs)
        self.variances = variances

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        total = torch.zeros((), device=self.args.device)
        for loss in self.layer_losses(model, inputs, num_items_in_batch):
            self.accelerator.backward(loss)
            total += loss.detach()
        if self.accelerator.num_processes > 1:
            if self.accelerator.sync_gradients:
                self._add_gradients(model)
            total = self.accelerator.reduce(total, "sum")
        return total

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = sum(self.layer_losses(model, inputs, num_items_in_batch))
        return (loss, {"loss": loss}) if return_outputs else loss

    def layer_losses(self, model, inputs, num_items_in_batch=None):
        """Yields the loss of one layer to match after the other, already divided by the number of such layers."""
        student = self.accelerator.unwrap_model(model)
        weights = self.weights(inputs["labels"], num_items_in_batch)
        with torch.no_grad(), self.accelerator.autocast():
            trace = mixer_trace(self.teacher, inputs["input_ids"])
        layers = layers_to_match(student)
        for i in layers:
            hidden, target = trace[i]
            layer = student.base_model.layers[i]
            with self.accelerator.autocast():
                output = layer.mixer(layer.mixer_norm(hidden), causal_mask(student.config, i, hidden))[0]
            error = (output - target).float().square().mean(-1) / self.variances[i]  # [B, T]
            yield (error[:, :-1] * weights).sum() / len(layers)

    def _add_gradients(self, model):
        # the mixers are called without the data parallel wrapper, which therefore adds up nothing
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(self.accelerator.reduce(parameter.grad, "sum"))


def kl_divergence(teacher_logits, student_logits):
    """KL(teacher || student) per position, in float32.

    Args: both logits: [..., vocabulary].
    Returns: float32 [...].
    """
    log_t = F.log_softmax(teacher_logits.float(), dim=-1)
    log_s = F.log_softmax(student_logits.float(), dim=-1)
    return (log_t.exp() * (log_t - log_s)).sum(-1)


def mixer_trace(model, input_ids):
    """What each mixer (attention) of a model reads, before its norm, and what it gives.

    Args:
        model: one of our models, or a GPT-2 of transformers.
        input_ids: int64 [B, T].

    Returns: for each layer (hidden state before the norm [B, T, D], output of the mixer [B, T, D]).
    """
    base = model.base_model
    layers = base.layers if hasattr(base, "layers") else base.h
    hidden, outputs, hooks = [], [], []
    for layer in layers:
        norm, mixer = (layer.mixer_norm, layer.mixer) if hasattr(layer, "mixer") else (layer.ln_1, layer.attn)
        # not what enters the layer: with attention residuals that is another thing
        hooks.append(norm.register_forward_pre_hook(lambda module, args: hidden.append(args[0])))
        hooks.append(mixer.register_forward_hook(lambda module, args, result: outputs.append(result[0])))
    try:
        base(input_ids=input_ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return list(zip(hidden, outputs, strict=True))


@torch.no_grad()
def output_variances(teacher, blocks):
    """The variance over tokens of each layer's mixer output, mean over channels. Constants such as biases don't count.

    Args: blocks: token ids, a list of int64 [T].
    Returns: list of floats, one per layer.
    """
    sums, squares, count = 0.0, 0.0, 0
    for block in blocks:
        outputs = [output[0].double() for _, output in mixer_trace(teacher, block[None].to(teacher.device))]
        outputs = torch.stack(outputs)  # [L, T, D]
        sums, squares, count = sums + outputs.sum(1), squares + outputs.square().sum(1), count + outputs.shape[1]
    variances = (squares / count - (sums / count).square()).mean(-1)
    # an attention that always gives the same cannot be normalised; the floor makes its error count as it is
    return variances.clamp_min(1e-12).tolist()


def layers_to_match(model):
    """The layers with something to learn from attention: recurrent ones, and those with a latent that is not exact.

    Kept softmax layers are the teacher's own, and so are latents of full size: an optimiser would only add noise.
    """
    config = model.config
    lossy = config.latent_norm or not is_exact(config)
    return [
        i
        for i, stage in enumerate(config.stages)
        if STAGES[stage].mixer == "recurrent" or (STAGES[stage].mixer == "latent" and lossy)
    ]


def causal_mask(config, layer_idx, hidden_states):
    """The mask of a mixer outside its model: only eager attention is not causal without one."""
    if STAGES[config.stages[layer_idx]].mixer == "recurrent" or config._attn_implementation != "eager":
        return None
    length = hidden_states.shape[1]
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=hidden_states.device).tril()


def parameter_groups(model, *, mixer_rate, other_rate, weight_decay=0.0):
    """Optimizer groups: mixers learn faster than what is kept of the teacher; only matrices decay.

    Norms, biases, convolution taps, A_log and dt_bias are not matrices; experts are stacks of them. Parameters that
    need no gradient are left out.
    """
    groups = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            rate = mixer_rate if ".mixer." in name else other_rate
            matrix = parameter.dim() == (3 if ".experts." in name else 2)
            decay = weight_decay if matrix else 0.0
            groups.setdefault((rate, decay), []).append(parameter)
    return [{"params": params, "lr": rate, "weight_decay": decay} for (rate, decay), params in groups.items()]
