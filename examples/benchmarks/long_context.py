"""Long contexts on one GPU: latent attention in every layer beside Kimi Linear's three KDA layers for each of those.

    python examples/benchmarks/long_context.py [--lengths 4096 131072 ...] [--out FILE]

Both models have 27 layers of the width, heads and latents of Kimi Linear 48B (`KDAConfig.kimi_linear_48b`) and a dense
MLP of the width that a token uses there (8 + 1 experts of 1,024), so the parameters at work per token are the same.
Weights are random, and so is what the caches hold: neither changes the time.

decode   one step of the whole model in a CUDA graph with a static cache, for one sequence and for as many as fit
cache    the bytes that the caches of one sequence really hold
prefill  one layer of each kind, timed on its own and multiplied by how many the models have; the KDA layer reads the
         prompt in pieces through its state, as chunked prefill does, and the latent layer at once

The paper is "Kimi Linear", arXiv 2510.26692, figures 1 and 7.
"""

import argparse
import gc
import json
import sys
import time
from pathlib import Path

import torch
import triton
from transformers import StaticCache

from modeling_kda import KDAConfig, KDAForCausalLM
from modeling_kda.cache_kda import KDACache

RESULTS = Path(__file__).parent / "results" / "long_context.json"
LENGTHS = [4096, 131072, 262144, 524288, 1048576]
# the paper's ratios, latent attention everywhere over Kimi Linear, where its figures print them
PAPER = {
    "decode, batch 1": {524288: 1.8, 1048576: 2.2},
    "decode, largest batch": {262144: 4.8, 524288: 5.7, 1048576: 6.3},
    "prefill": {524288: 2.3, 1048576: 2.9},
}
# what is left beside the caches, for activations and the allocator
SPARE_BYTES = 12e9
PIECE = 65536


def configurations():
    """name -> configuration."""
    hybrid = KDAConfig.kimi_linear_48b(num_experts=0)
    layers = hybrid.num_hidden_layers
    return {"mla": KDAConfig.kimi_linear_48b(num_experts=0, stages=["mla"] * layers), "kda:mla 3:1": hybrid}


def build(config):
    """A model with random weights on the GPU, made there."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return KDAForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def filled_cache(model, B, length):
    """A static cache that has seen `length - 1` tokens of a past that nobody computed, and has room for one more."""
    cache = StaticCache(config=model.config, max_cache_len=length)
    model(torch.zeros(B, 1, dtype=torch.int64, device="cuda"), cache=cache)
    for layer in cache.layers:
        if getattr(layer, "keys", None) is not None:
            for row in range(B):
                layer.keys[row].normal_()
                layer.values[row].normal_()
    rewind(cache, length)
    return cache


def bytes_held(cache):
    """Bytes of keys, values, conv windows and states."""
    tensors = []
    for layer in cache.layers:
        tensors += [getattr(layer, "keys", None), getattr(layer, "values", None)]
        for held in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
            tensors += list(held.values())
    return sum(x.nbytes for x in tensors if isinstance(x, torch.Tensor))


def rewind(cache, length):
    """Let the cache hold `length - 1` tokens, so that the same step can be taken again."""
    for layer in cache.layers:
        if getattr(layer, "keys", None) is not None:
            layer.cumulative_length.fill_(length - 1)


def time_decode(model, B, length, repeats):
    """Milliseconds of one step of B sequences, and the bytes of their caches."""
    cache = filled_cache(model, B, length)
    token = torch.zeros(B, 1, dtype=torch.int64, device="cuda")
    model(token, cache=cache)
    torch.cuda.synchronize()
    rewind(cache, length)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model(token, cache=cache).logits
    times = []
    for _ in range(repeats + 1):
        rewind(cache, length)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    if not logits.isfinite().all():
        raise SystemExit("a decode step gave logits that are not finite")
    return sorted(times[1:])[repeats // 2], bytes_held(cache)


def largest_batch(bytes_per_sequence):
    free, _ = torch.cuda.mem_get_info()
    return max(1, int((free - SPARE_BYTES) // bytes_per_sequence))


def run_decode(name, model, length, repeats):
    """Rows of one model at one length: batch 1 and the largest batch."""
    ms, held = time_decode(model, 1, length, repeats)
    yield {"model": name, "length": length, "batch": 1, "step_ms": ms, "cache_bytes_per_sequence": held}
    release()
    batch = min(largest_batch(held), 512)
    if batch > 1:
        ms, held = time_decode(model, batch, length, repeats)
        row = {"model": name, "length": length, "batch": batch, "step_ms": ms}
        yield row | {"cache_bytes_per_sequence": held // batch}
        release()


def release():
    gc.collect()
    torch.cuda.empty_cache()


def time_layer(layer, config, length):
    """Seconds that one decoder layer needs for a prompt of `length` tokens of one sequence."""
    recurrent = config.layer_types[layer.mixer.layer_idx] == "linear_attention"
    piece = min(length, PIECE) if recurrent else length
    x = torch.randn(1, piece, config.hidden_size, device="cuda", dtype=torch.bfloat16)

    def run(pieces):
        cache = KDACache(config) if recurrent else None
        for _ in range(pieces):
            layer(x, None, cache=cache)

    # compiles what starts from nothing and what starts from a state; the latent layer has no pieces to repeat
    if recurrent or length <= LENGTHS[1]:
        run(2)
    else:
        layer(x[:, :PIECE], None)
    torch.cuda.synchronize()
    start = time.perf_counter()
    run(length // piece)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def run_prefill(model, lengths):
    """Rows with the seconds of one layer of each kind."""
    config = model.config
    kinds = {stage: model.model.layers[config.stages.index(stage)] for stage in ("kda", "mla")}
    for length in lengths:
        row = {"length": length}
        for stage, layer in kinds.items():
            row[f"{stage}_layer_s"] = time_layer(layer, config, length)
            release()
        yield row


def ratios(decode, prefill, stages):
    """For each length, what latent attention in every layer costs over the hybrid: time per token, and bytes."""
    table = []
    for length in sorted({row["length"] for row in decode}):
        rows = [row for row in decode if row["length"] == length]
        mla, hybrid = ([row for row in rows if row["model"] == name] for name in ("mla", "kda:mla 3:1"))
        single = mla[0]["step_ms"] / hybrid[0]["step_ms"]
        largest = [row[-1]["step_ms"] / row[-1]["batch"] for row in (mla, hybrid)]
        line = {"length": length, "decode, batch 1": single, "decode, largest batch": largest[0] / largest[1]}
        line["cache"] = hybrid[0]["cache_bytes_per_sequence"] / mla[0]["cache_bytes_per_sequence"]
        layers = next((row for row in prefill if row["length"] == length), None)
        if layers and all(layers[f"{stage}_layer_s"] for stage in stages):
            seconds = sum(layers[f"{stage}_layer_s"] for stage in stages)
            line["prefill"] = len(stages) * layers["mla_layer_s"] / seconds
            line |= {"prefill_s": seconds, "prefill_mla_s": len(stages) * layers["mla_layer_s"]}
        line["paper"] = {what: numbers[length] for what, numbers in PAPER.items() if length in numbers}
        table.append(line)
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of context")
    parser.add_argument("--repeats", type=int, default=9, help="decode steps timed (the median counts)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file for the numbers (default: %(default)s)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("long_context.py times whole models on a GPU and needs a CUDA device; there is none here")
    torch.manual_seed(0)
    decode, prefill = [], []
    with torch.inference_mode():
        for name, config in configurations().items():
            model = build(config)
            for length in arguments.lengths:
                for row in run_decode(name, model, length, arguments.repeats):
                    decode.append(row)
                    print(row, flush=True)
        # the hybrid has layers of both kinds
        for row in run_prefill(model, arguments.lengths):
            prefill.append(row)
            print(row, flush=True)
    table = ratios(decode, prefill, model.config.stages)
    for line in table:
        print(line)
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    report = {"machine": machine, "stages": model.config.stages, "decode": decode, "prefill": prefill, "ratios": table}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
