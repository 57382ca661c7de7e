"""How good a student is beside its teacher: perplexity, agreement, recall; and what its memory costs (`cost.py`).

Every number in a model card comes from the JSON that `evaluate` writes; the protocol is pinned here and named there.
"""

import statistics

import torch
import torch.nn.functional as F
from tqdm.auto import tqdm

from .cost import cache_report, check_decoding, decode_speed, describe, environment, last_position
from .files import check_vocabulary, digest, tokenize, write_json

PROTOCOL = (
    "raw text, the model's own tokenizer, no BOS; {windows} non-overlapping windows of {window} tokens, each read on "
    "its own; every token of a window but its first is predicted from the tokens before it in that window; an "
    "incomplete last window is dropped; logits in {dtype}, sums in float32; perplexity = exp(mean nats per token), "
    "per token of this tokenizer"
)


@torch.inference_mode()
def evaluate(
    model,
    tokenizer,
    text,
    teacher=None,
    *,
    window=None,
    max_windows=None,
    batch_size=4,
    recall_length=None,
    recall_sequences=32,
    memory_tokens=(1024, 32 * 1024, 1024 * 1024),
    decode_contexts=(),
    seed=0,
    output=None,
):
    """Measure one model, and its teacher on the same windows.

    Args:
        model: a causal language model (`KDAForCausalLM`, `GPT2LMHeadModel`); both models are put into eval mode.
        tokenizer: its tokenizer.
        text: held-out text, a string or a list of strings.
        teacher: the model it came from, for KL(teacher || student) and top-1 agreement.
        window: tokens per window; one less than the positions the model knows if not given, because GPT-2's last
            position is hardly trained.
        max_windows: only the first so many windows.
        batch_size: windows per forward pass.
        recall_length: tokens of a sequence that is shown twice; a quarter of the window if not given.
        recall_sequences: how many such sequences.
        memory_tokens: for how many tokens the size of the cache is reported.
        decode_contexts: context lengths at which decoding is timed.
        seed: of the random sequences.
        output: a JSON file to write the result to.

    Returns: the result, a dict that JSON can hold.

    Raises: ValueError for an empty text, a text shorter than a window, vocabularies that differ, or lengths that the
        models or the window do not hold.
    """
    ids = tokenize(tokenizer, text)
    check_vocabulary(ids, student=model, teacher=teacher)
    models = [m.eval() for m in (model, teacher) if m is not None]
    positions = min(m.config.max_position_embeddings for m in models)
    window = positions - 1 if window is None else window
    recall_length = max(2, window // 4) if recall_length is None else recall_length
    windows = cut_windows(ids, window, max_windows)
    _check_lengths(models, window, recall_length, batch_size)
    for context in decode_contexts:
        check_decoding(model.config, context)

    result = {
        "protocol": PROTOCOL.format(windows=len(windows), window=window, dtype=str(model.dtype).split(".")[-1]),
        "model": describe(model),
        "text": {"tokens": len(ids), "sha256_of_tokens": digest(ids)},
        **compare(model, windows, teacher, batch_size),
        "recall": recall(model, tokenizer, windows, recall_length, recall_sequences, seed),
        "cache": cache_report(model, windows, memory_tokens),
        "decode": [decode_speed(model, context) for context in decode_contexts],
        "environment": environment(model),
    }
    if teacher is not None:
        result["teacher"]["model"] = describe(teacher)
        result["teacher"]["recall"] = recall(teacher, tokenizer, windows, recall_length, recall_sequences, seed)
        result["teacher"]["cache"] = cache_report(teacher, windows, memory_tokens)
    if output is not None:
        write_json(output, result)
    return result


def _check_lengths(models, window, recall_length, batch_size):
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    for model in models:
        positions = last_position(model.config)
        if positions is not None and window > positions:
            raise ValueError(
                f"the model has {positions} positions, got a window of {window} tokens; give a shorter one"
            )
    if not 2 <= recall_length <= window // 2:
        raise ValueError(f"recall_length must be 2 to half of the window, {window // 2}, got {recall_length}")


def cut_windows(ids, window, max_windows=None):
    """The full, non-overlapping windows of a text.

    Returns: int64 [N, window].

    Raises: ValueError if the window is too short to predict anything, or the text shorter than one window.
    """
    if window < 4:
        raise ValueError(f"a window must have at least 4 tokens, got {window}")
    if max_windows is not None and max_windows < 1:
        raise ValueError(f"max_windows must be at least 1, got {max_windows}")
    count = len(ids) // window
    if count == 0:
        raise ValueError(
            f"the text must fill at least one window of {window} tokens, got {len(ids)} tokens; "
            "give a longer text or a smaller window"
        )
    return ids[: count * window].view(count, window)[:max_windows]


def compare(model, windows, teacher=None, batch_size=4):
    """Perplexity of the model and, on the same windows, of the teacher; KL(teacher || model) and top-1 agreement.

    Args: windows: int64 [N, W].
    """
    losses, teacher_losses, kl, same = [], [], [], []
    for batch in tqdm(windows.split(batch_size), desc="perplexity", leave=False, disable=None):
        logits = model(batch.to(model.device), use_cache=False).logits
        teacher_logits = None if teacher is None else teacher(batch.to(teacher.device), use_cache=False).logits
        # row by row: float32 copies of a whole batch of logits would be the largest thing in memory
        for i, row in enumerate(batch):
            log_p = F.log_softmax(logits[i, :-1].float(), dim=-1)  # [W-1, vocabulary]
            target = row[1:, None].to(log_p.device)
            losses.append(-log_p.gather(1, target).mean().item())
            if teacher is not None:
                log_t = F.log_softmax(teacher_logits[i, :-1].float(), dim=-1).to(log_p.device)
                teacher_losses.append(-log_t.gather(1, target).mean().item())
                kl.append((log_t.exp() * (log_t - log_p)).sum(-1).mean().item())
                same.append((log_t.argmax(-1) == log_p.argmax(-1)).float().mean().item())
    result = {"perplexity": _perplexity(losses, windows)}
    if teacher is not None:
        result["teacher"] = {"perplexity": _perplexity(teacher_losses, windows)}
        result["agreement"] = {
            "kl_teacher_student_nats": statistics.fmean(kl),
            "top1": statistics.fmean(same),
            "perplexity_ratio": result["perplexity"]["perplexity"] / result["teacher"]["perplexity"]["perplexity"],
        }
    return result


def _perplexity(losses, windows):
    """From the mean loss of each window; the standard error is over windows."""
    nats = statistics.fmean(losses)
    error = statistics.stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 else None
    return {
        "windows": windows.shape[0],
        "window": windows.shape[1],
        "tokens_predicted": windows.shape[0] * (windows.shape[1] - 1),
        "nats_per_token": nats,
        "nats_standard_error": error,
        "perplexity": float(torch.tensor(nats, dtype=torch.float64).exp()),
    }


def recall(model, tokenizer, windows, length, sequences=32, seed=0, batch_size=8):
    """What a model can look up in its own context: everything is shown twice, and the second showing is scored.

    Args:
        windows: int64 [N, W] of ordinary text, W >= length.
        length: tokens of one showing.

    Returns:
        `random_accuracy`: how often the next token of the second showing of a random sequence is guessed (top-1; its
        first token cannot be known and is left out); `random_chance`; and for passages of the text, the nats per token
        of the first and the second showing and how much the second gains.
    """
    known = set(range(min(len(tokenizer), model.config.vocab_size)))
    ordinary = torch.tensor(sorted(known - set(tokenizer.all_special_ids)))
    generator = torch.Generator().manual_seed(seed)
    random = ordinary[torch.randint(len(ordinary), (sequences, length), generator=generator)]
    text = windows[:sequences, :length]
    hits, first, second = [], [], []
    for batch in random.split(batch_size):
        hits.append(_next_token_scores(model, batch)[1][:, length:])
    for batch in text.split(batch_size):
        nats = _next_token_scores(model, batch)[0]
        # position i scores token i + 1: the same length - 1 tokens of both showings
        first.append(nats[:, : length - 1])
        second.append(nats[:, length:])
    first, second = torch.cat(first).mean().item(), torch.cat(second).mean().item()
    return {
        "length": length,
        "sequences": sequences,
        "random_accuracy": torch.cat(hits).mean().item(),
        "random_chance": 1 / len(ordinary),
        "text_first_nats": first,
        "text_second_nats": second,
        "text_gain_nats": first - second,
    }


def _next_token_scores(model, shown):
    """Nats and top-1 hits of each next token of [shown, shown], both float32 [B, 2 * length - 1]."""
    ids = torch.cat([shown, shown], dim=1).to(model.device)
    log_p = F.log_softmax(model(ids, use_cache=False).logits[:, :-1].float(), dim=-1)
    target = ids[:, 1:, None]
    return -log_p.gather(2, target)[..., 0], (log_p.argmax(-1, keepdim=True) == target)[..., 0].float()
