"""What a teacher's layer does on a few windows of text, and which start of a new mixer comes nearest to it.

Everything is done for one layer at a time: its module, the hidden states that enter it, and nothing else of the model.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from modeling_kda.configuration_kda import KDAConfig
from modeling_kda.modeling_kda import KDADecoderLayer

from .checkpoint import TOKENIZER_FILES
from .files import load_tokenizer, tokenize
from .initialisation import NEW_PARAMETERS, HeadSettings
from .rewrites import scale_head_outputs

# the opening chapter of Alice's Adventures in Wonderland (Lewis Carroll, 1865; public domain), one paragraph a line
SAMPLE_TEXT = Path(__file__).with_name("calibration.txt")
WINDOW = 512
SHORTEST_HALF_LIFE, LONGEST_HALF_LIFE = 1.5, 32.0
# Starts that are tried for each head, by how well its outputs then follow the teacher's. On the shipped teacher and
# text it had not seen, these choices brought the perplexity of a gated_delta student from 122 to 98 (teacher: 42)
BETAS = (0.5, 0.2, 0.1, 0.05)
SHARPNESS = (1.0, 2.0, 4.0, 8.0)
HALF_LIFE_FACTORS = (1.0, 2.0, 4.0)


def load_source_tokenizer(folder: Path, vocab_size: int):
    """The tokenizer that lies next to a model's weights, or None if there is none.

    Raises: ValueError if it cannot be read or does not fit the embedding. Up to 127 unused rows are allowed, because
        vocabularies are padded to multiples of 64 or 128 for speed.
    """
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        return None
    try:
        tokenizer = load_tokenizer(folder)
    except ValueError as error:
        raise ValueError(f"the tokenizer files in {folder} cannot be read ({error}); repair them") from error
    if not len(tokenizer) <= vocab_size < len(tokenizer) + 128:
        raise ValueError(
            f"the tokenizer in {folder} has {len(tokenizer)} tokens, but the model's embedding has {vocab_size}; "
            "put the tokenizer of this model there, or remove the tokenizer files"
        )
    return tokenizer


def cut_windows(tokenizer, text: str, max_positions: int, limit: int) -> torch.Tensor:
    """Up to `limit` windows of the text, int64 [N, T]: at least 4, of at most `WINDOW` tokens.

    GPT-2's last position is hardly trained, so windows stay below it.

    Raises: ValueError if the text is too short to be worth measuring on.
    """
    ids = tokenize(tokenizer, text)
    if len(ids) < 64:
        raise ValueError(f"the calibration text must have at least 64 tokens, got {len(ids)}; give a longer one")
    length = min(WINDOW, max(max_positions - 1, 1), len(ids) // 4)
    return ids[: len(ids) // length * length].view(-1, length)[:limit]


def random_windows(vocab_size: int, max_positions: int, generator: torch.Generator) -> torch.Tensor:
    """Windows of random tokens, for amplitudes where there is no tokenizer."""
    length = min(WINDOW, max(max_positions - 1, 1))
    return torch.randint(vocab_size, (4, length), generator=generator)


def build_layer(config: KDAConfig, index: int, tensors: dict[str, torch.Tensor], *, dtype, device) -> KDADecoderLayer:
    """One layer of a model in eval mode with these tensors, which must be all of its parameters."""
    with torch.device("meta"):
        layer = KDADecoderLayer(config, index)
    layer.load_state_dict({name: t.to(device, dtype) for name, t in tensors.items()}, assign=True)
    return layer.eval()


@dataclass
class LayerRecord:
    """What passed through a layer: inputs of its mixer [N, T, D], what entered `o_proj` [N, T, C], outputs of its
    mixer [N, T, D], outputs of the layer [N, T, D], and inputs of its MLP [N, T, D] if asked for."""

    inputs: torch.Tensor
    heads: torch.Tensor
    outputs: torch.Tensor
    hidden_states: torch.Tensor
    mlp_inputs: torch.Tensor | None = None


@torch.no_grad()
def run_layer(layer: KDADecoderLayer, hidden_states: torch.Tensor, *, with_mlp: bool = False) -> LayerRecord:
    """Run a layer window by window and keep what passed. hidden_states: [N, T, D]."""
    seen = {"inputs": [], "heads": [], "outputs": [], "hidden_states": []}
    hooks = [
        layer.mixer.register_forward_pre_hook(lambda module, args: seen["inputs"].append(args[0])),
        layer.mixer.o_proj.register_forward_pre_hook(lambda module, args: seen["heads"].append(args[0])),
        layer.mixer.register_forward_hook(lambda module, args, result: seen["outputs"].append(result[0])),
    ]
    if with_mlp:
        seen["mlp_inputs"] = []
        hooks.append(layer.mlp.register_forward_pre_hook(lambda module, args: seen["mlp_inputs"].append(args[0])))
    for window in hidden_states.split(1):
        seen["hidden_states"].append(layer(window))
    for hook in hooks:
        hook.remove()
    return LayerRecord(**{name: torch.cat(parts) for name, parts in seen.items()})


@torch.no_grad()
def run_mixer(layer: KDADecoderLayer, inputs: torch.Tensor) -> torch.Tensor:
    """What enters `o_proj` of a layer's mixer, [N, T, C], for these inputs of the mixer [N, T, D]."""
    heads = []
    hook = layer.mixer.o_proj.register_forward_pre_hook(lambda module, args: heads.append(args[0]))
    for window in inputs.split(1):
        layer.mixer(window)
    hook.remove()
    return torch.cat(heads)


@torch.no_grad()
def measure_heads(layer: KDADecoderLayer, inputs: torch.Tensor) -> tuple[HeadSettings, torch.Tensor]:
    """Half-lives and norms of a softmax layer's heads, and their attention distances [H].

    inputs: [N, T, D], of the mixer. The half-life of a head is the distance it looks back, kept between the limits
    above: a start that forgets too slowly is worse than one that forgets too fast, because its state fills up.
    """
    mixer = layer.mixer
    num_heads = mixer.q_proj.out_features // mixer.head_dim
    distances, squares = [], torch.zeros(2, num_heads, dtype=torch.float64)
    for window in inputs:
        q, k = (proj(window).unflatten(-1, (num_heads, -1)).transpose(0, 1) for proj in (mixer.q_proj, mixer.k_proj))
        distances.append(_distances(q, k, mixer.scaling).cpu())
        squares += torch.stack([x.double().square().sum(-1).mean(-1).cpu() for x in (q, k)])
    distance = torch.cat(distances, 1).double().median(1).values
    query_norms, key_norms = (squares / len(inputs)).sqrt().clamp_min(1e-12)
    half_lives = distance.clamp(SHORTEST_HALF_LIFE, LONGEST_HALF_LIFE)
    settings = HeadSettings.default(num_heads)
    return settings.replace(half_lives=half_lives, query_norms=query_norms, key_norms=key_norms), distance


def _distances(q, k, scale):
    """How many tokens back each query looks on average: q, k [H, T, K] -> [H, T'] for the later queries.

    The first token is left out: heads park their attention there when they look at nothing.
    """
    T = q.shape[1]
    positions = torch.arange(T, device=q.device)
    lags = positions[:, None] - positions
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(lags < 0, -torch.inf)
    weights = scores.softmax(-1)
    weights[..., 0] = 0
    looked = (weights * lags.clamp_min(0)).sum(-1) / weights.sum(-1).clamp_min(1e-9)
    return looked[:, min(64, T // 4) :]


def choose_settings(stage: str, settings: HeadSettings, followed) -> HeadSettings:
    """The best of a few alternatives to these settings for each head, one kind of setting after the other.

    Args:
        stage: of the new mixer.
        settings: what was measured.
        followed: function of settings that returns for each head [H] how well its outputs follow the teacher's.
    """
    groups, ones = NEW_PARAMETERS[stage], torch.ones_like(settings.betas)
    alternatives = {}
    if "beta" in groups:
        alternatives["betas"] = [ones * beta for beta in BETAS]
    if "feature_map" in groups:
        alternatives["sharpness"] = [ones * factor for factor in SHARPNESS]
    if {"step", "head_decay", "channel_decay"} & set(groups):
        longer = (settings.half_lives * factor for factor in HALF_LIFE_FACTORS)
        alternatives["half_lives"] = [half_lives.clamp_max(LONGEST_HALF_LIFE) for half_lives in longer]
    for field, values in alternatives.items():
        scores = torch.stack([followed(settings.replace(**{field: value})) for value in values])
        best = scores.argmax(0, keepdim=True)
        settings = settings.replace(**{field: torch.stack(values).gather(0, best)[0]})
    return settings


def explained(student_heads: torch.Tensor, teacher_heads: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Share of the variance of each teacher head that a multiple of the student's head explains, [H].

    Both [N, T, H * V], as they enter `o_proj`.
    """
    ours, theirs = (_by_head(x, num_heads) for x in (student_heads, teacher_heads))
    ours, theirs = ours - ours.mean(1, keepdim=True), theirs - theirs.mean(1, keepdim=True)
    size = (ours.square().sum((1, 2)) * theirs.square().sum((1, 2))).clamp_min(1e-30)
    return ((ours * theirs).sum((1, 2)).square() / size).cpu()


def match_outputs(layer: dict, student_heads: torch.Tensor, record: LayerRecord, num_heads: int):
    """`o_proj` made to fit what its new mixer gives it: a factor per head, and an offset in its bias.

    The factor is the least-squares one. Equal root mean squares would be the other choice: on the shipped teacher it
    gives a worse model (perplexity 140 against 122), because it also amplifies what the student gets wrong.

    Args:
        layer: the student's tensors, with `o_proj` still the teacher's.
        student_heads: [N, T, H * V], what enters it now.
        record: what the teacher's layer did.

    Returns: the tensors, and the factors [H].
    """
    ours, theirs = (_by_head(x, num_heads) for x in (student_heads, record.heads))
    factors = (ours * theirs).sum((1, 2)) / ours.square().sum((1, 2)).clamp_min(1e-30)
    factors = factors.cpu()
    matched = scale_head_outputs(layer, factors)
    bias = matched.get("mixer.o_proj.bias")
    if bias is not None:
        weight = matched["mixer.o_proj.weight"].to(student_heads.device, torch.float64)
        mean = weight @ student_heads.double().mean((0, 1)) + bias.to(weight)
        offset = record.outputs.double().mean((0, 1)) - mean
        matched["mixer.o_proj.bias"] = (bias.double() + offset.cpu()).to(bias.dtype)
    return matched, factors


def _by_head(heads, num_heads):
    """[N, T, H * V] -> [H, N * T, V], fp64."""
    return heads.flatten(0, 1).unflatten(-1, (num_heads, -1)).transpose(0, 1).double()
