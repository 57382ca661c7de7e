"""A short fit of one new mixer to its teacher's attention: a closed-form step, then a few hundred of AdamW.

Each layer is fitted on its own, fed with the teacher's hidden states, so nothing but this layer is in memory.
"""

import math

import torch
from tqdm.auto import tqdm

from modeling_kda.modeling_kda import KDADecoderLayer

from .measurement import LayerRecord, run_mixer

# relative to the mean square of what enters o_proj; the best on held-out windows is taken
RIDGES = (0.1, 1.0)
BATCH = 4
# on the shipped teacher 1e-3 and 1e-4 reach perplexity 53 with kda, 1e-3 and 1e-3 48.5, these 47.8 (teacher: 42.0)
NEW_RATE, CARRIED_RATE = 3e-3, 1e-3
WARMUP = 0.1
CARRIED = ("q_proj", "k_proj", "v_proj", "kv_a_proj", "kv_b_proj")


def fit_mixer(layer: KDADecoderLayer, record: LayerRecord, *, steps: int, seed: int, title: str) -> dict:
    """Bring the outputs of a layer's mixer closer to those of the teacher's, in place.

    What is kept is the best of the start, the closed-form step and the steps after it, on windows that were not
    fitted.

    Args:
        layer: the student's.
        record: what the teacher's layer did, at least 2 windows of it.
        steps: of AdamW after the closed-form refit of `o_proj`.
        seed: of the order of the windows.
        title: of the progress bar.

    Returns: held-out errors after each part, relative to the variance of the teacher's outputs.
    """
    held_out = max(1, len(record.inputs) // 8)
    train = [x[:-held_out] for x in (record.inputs, record.outputs)]
    test = [x[-held_out:] for x in (record.inputs, record.outputs)]
    errors, best = {"start": output_error(layer, *test)}, _copy(layer)
    _refit_o_proj(layer, train, test)
    errors["ridge"] = output_error(layer, *test)
    if errors["ridge"] < errors["start"]:
        best = _copy(layer)
    else:
        layer.load_state_dict(best)
    if steps:
        _train(layer.mixer, *train, steps=steps, seed=seed, title=title)
        errors["steps"] = output_error(layer, *test)
        # not `>=`: a NaN must lose too
        if not errors["steps"] < min(errors["start"], errors["ridge"]):
            layer.load_state_dict(best)
    return errors


def _refit_o_proj(layer, train, test):
    """Ridge regression of the teacher's outputs on what enters `o_proj`, drawn towards the weight that is there."""
    o_proj = layer.mixer.o_proj
    heads, targets = run_mixer(layer, train[0]).flatten(0, 1).double(), train[1].flatten(0, 1).double()
    start = o_proj.weight.detach().double()
    head_mean, target_mean = heads.mean(0), targets.mean(0)
    heads, rest = heads - head_mean, targets - target_mean
    rest = rest - heads @ start.T
    gram, cross = heads.T @ heads, heads.T @ rest
    size = gram.diagonal().mean()
    test_heads = run_mixer(layer, test[0]).double()
    candidates = []
    for ridge in RIDGES:
        penalty = (ridge * size + 1e-12) * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        weight = start + torch.linalg.solve(gram + penalty, cross).T
        bias = target_mean - weight @ head_mean
        error = (test_heads @ weight.T + bias - test[1]).square().mean().item()
        candidates.append((error, weight, bias))
    _, weight, bias = min(candidates, key=lambda candidate: candidate[0])
    with torch.no_grad():
        o_proj.weight.copy_(weight)
        if o_proj.bias is not None:
            o_proj.bias.copy_(bias)


def _train(mixer, inputs, targets, *, steps, seed, title):
    """AdamW on the squared error, relative to the variance of the targets so that every layer has the same scale."""
    carried = [p for name, p in mixer.named_parameters() if name.split(".")[0] in CARRIED]
    new = [p for p in mixer.parameters() if all(p is not q for q in carried)]
    groups = [{"params": new, "lr": NEW_RATE}, {"params": carried, "lr": CARRIED_RATE}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    generator = torch.Generator().manual_seed(seed)
    variance = targets.var()
    order = torch.empty(0, dtype=torch.int64)
    for _ in tqdm(range(steps), desc=title, leave=False, disable=None):
        if len(order) < BATCH:
            order = torch.cat([order, torch.randperm(len(inputs), generator=generator)])
        batch, order = order[:BATCH], order[BATCH:]
        output, _ = mixer(inputs[batch])
        loss = (output - targets[batch]).square().mean() / variance
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(mixer.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def _rate(step, steps):
    """A short rise, then half a cosine down to a tenth."""
    warmup = max(1, int(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))


@torch.no_grad()
def output_error(layer, inputs, targets) -> float:
    """Mean squared error of a layer's mixer, relative to the variance of the targets. Both [N, T, D]."""
    squares = [
        (layer.mixer(window)[0] - target).square().mean()
        for window, target in zip(inputs.split(1), targets.split(1), strict=True)
    ]
    return (torch.stack(squares).mean() / targets.var()).item()


def _copy(layer):
    return {name: tensor.clone() for name, tensor in layer.state_dict().items()}
