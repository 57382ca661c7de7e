"""What a model costs to run: the bytes of its cache, by formula and measured, and the speed of decoding."""

import platform
import statistics
import time
from pathlib import Path

import torch
import transformers

from modeling_kda.stages import STAGES

DECODE_STEPS = 32


def cache_bytes(config, num_tokens, batch=1, dtype=torch.float32):
    """Bytes that a model keeps between two calls after `num_tokens` tokens, by formula.

    A softmax layer keeps keys and values, 2 * heads * head_dim numbers a token in `dtype`; a latent layer the latent
    and the shared key, kv_lora_rank + qk_rope_head_dim numbers a token. A recurrent layer keeps, whatever the number
    of tokens, a state of value_heads * K * V numbers in float32 (float64 for a float64 model; one more column where
    the output is normalised by the sum of its weights, twice the rows for the feature map "hedgehog"), and the last
    inputs of its short convolution in `dtype`. `evaluate` compares this with a real cache.

    Args:
        config: a `KDAConfig` or `GPT2Config`.
        num_tokens: tokens seen, prompt included.
        batch: sequences.
        dtype: of the model's activations.
    """
    return sum(_layer_bytes(config, stage, num_tokens, dtype) for stage in layer_stages(config)) * batch


def layer_stages(config):
    """The stage of each layer; a GPT-2 is softmax throughout."""
    return getattr(config, "stages", ["softmax"] * config.num_hidden_layers)


def _layer_bytes(config, stage, num_tokens, dtype):
    if num_tokens == 0:
        return 0
    heads = config.num_attention_heads
    K = getattr(config, "head_dim", None) or config.hidden_size // heads
    if STAGES[stage].mixer == "softmax":
        return 2 * heads * K * num_tokens * dtype.itemsize
    if STAGES[stage].mixer == "latent":
        return (config.kv_lora_rank + config.qk_rope_head_dim) * num_tokens * dtype.itemsize
    HV, V = config.num_value_heads, config.value_head_dim
    taps_before = max(config.short_conv_kernel_size - 1, 0)
    window = taps_before * (2 * heads * K + HV * V) * dtype.itemsize
    features = 2 * K if STAGES[stage].normaliser and config.feature_map == "hedgehog" else K
    state = HV * features * (V + STAGES[stage].normaliser) * max(4, dtype.itemsize)
    return window + state


@torch.inference_mode()
def measured_cache_bytes(model, input_ids):
    """Bytes of the tensors in a real cache after a forward pass.

    Args: input_ids: int64 [B, T].
    """
    cache = model(input_ids.to(model.device), use_cache=True, logits_to_keep=1).cache
    tensors = []
    for layer in cache.layers:
        tensors += [getattr(layer, name, None) for name in ("keys", "values")]
        for held in ("conv_states", "recurrent_states"):
            states = getattr(layer, held, {})
            tensors += list(states.values() if isinstance(states, dict) else states)
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def cache_report(model, windows, memory_tokens):
    """The formula for each number of tokens, after it was checked against a real cache of one window.

    Raises: AssertionError if formula and cache disagree: then one of them is wrong.
    """
    measured = measured_cache_bytes(model, windows[:1])
    formula = cache_bytes(model.config, windows.shape[1], dtype=model.dtype)
    assert measured == formula, (
        f"after {windows.shape[1]} tokens the cache holds {measured} bytes, by formula {formula}"
    )
    return {
        "dtype": str(model.dtype).split(".")[-1],
        "measured": {"tokens": windows.shape[1], "bytes": measured},
        "by_formula": [
            {"tokens": count, "bytes": cache_bytes(model.config, count, dtype=model.dtype)} for count in memory_tokens
        ],
    }


def last_position(config):
    """How many tokens a model can read, or None if it has no table of positions that could end."""
    return None if getattr(config, "position_embedding", "learned") == "none" else config.max_position_embeddings


def check_decoding(config, context, steps=DECODE_STEPS, batch=1):
    """Raises: ValueError if `decode_speed` cannot measure this."""
    last = last_position(config)
    if context < 1 or steps < 1 or batch < 1:
        raise ValueError(f"context, steps and batch must be at least 1, got {context}, {steps} and {batch}")
    if last is not None and context + steps > last:
        raise ValueError(
            f"decoding {steps} tokens after {context} needs {context + steps} positions, the model has {last}; "
            "give a shorter context"
        )


@torch.inference_mode()
def decode_speed(model, context, *, steps=DECODE_STEPS, batch=1, seed=0):
    """Time greedy decoding after a prompt of random tokens, which is read once: `steps` single tokens are timed.

    Returns: context, batch, median milliseconds per step and tokens per second.

    Raises: ValueError if the model has too few positions, or for numbers below 1.
    """
    check_decoding(model.config, context, steps, batch)
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(model.config.vocab_size, (batch, context), generator=generator).to(model.device)
    out = model(prompt, use_cache=True, logits_to_keep=1)
    times = []
    for _ in range(steps):
        token = out.logits[:, -1:].argmax(-1)
        _synchronize(model.device)
        start = time.perf_counter()
        out = model(token, cache=out.cache, use_cache=True)
        _synchronize(model.device)
        times.append(time.perf_counter() - start)
    median = statistics.median(times)
    return {"context": context, "batch": batch, "ms_per_step": 1000 * median, "tokens_per_second": batch / median}


def _synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe(model):
    """Facts of a model for records: its name (of a folder the last part only), stages and size."""
    source = model.config._name_or_path
    return {
        "name": Path(source).resolve().name if Path(source).is_dir() and source else source,
        "type": model.config.model_type,
        "stages": list(layer_stages(model.config)),
        "parameters": model.num_parameters(),
        "vocabulary": model.config.vocab_size,
    }


def environment(model):
    """What a reader needs to judge a speed."""
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else _processor()
    return {
        "device": f"{model.device.type} {device}".strip(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _processor():
    """The name of the CPU; Python alone does not know it on Linux."""
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text().splitlines() if listing.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
