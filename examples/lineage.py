"""The whole lineage on one small, real model: GPT-2's attention becomes every kind of linear attention, and is healed.

    python examples/lineage.py [--teacher gpt2] [--steps 50] [--quick] [--output lineage_results]

For each stage: convert the teacher, prove what can be proved (identities in float64), measure the perplexity at
conversion, heal with a few distillation steps on nine tenths of the text, and measure again on the last tenth.
Everything printed is also written to the output folder: lineage.json, table.md, samples.txt, two plots, and each
healed student, which `kda generate` and `from_pretrained` can load. A second run with the same settings goes on where
the first one stopped.
"""

import argparse
import json
import shutil
import time
from pathlib import Path

import torch
from lineage_plots import plot_cache, plot_ladder
from transformers import set_seed
from transformers.utils import logging

from modeling_kda import STAGES, KDAConfig, KDAForCausalLM
from modeling_kda.conversion.commands import human_bytes, parse_stages
from modeling_kda.conversion.cost import decode_speed, describe, environment
from modeling_kda.conversion.distillation import distill
from modeling_kda.conversion.evaluate import compare, cut_windows, evaluate
from modeling_kda.conversion.files import load_model, load_tokenizer, read_text, tokenize, write_json
from modeling_kda.conversion.upcycle import upcycle

HERE = Path(__file__).parent
LINEAGE = ["softmax", "linear", "delta", "ssd", "gated_delta", "kda", "gated_delta,softmax", "kda*3,softmax", "kimi"]
# parts of Kimi K3 that start without a change
K3_PARTS = {"mla_output_gate": True, "attention_residual": "block", "experts": "latent", "num_experts": 4}
MEMORY_TOKENS = (1024, 32 * 1024, 1024 * 1024)
PROMPT = "The old man looked at the sea, and"
# in float64; what is left is rounding
TOLERANCE = 1e-9


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--teacher", default=str(HERE / "teacher"), help="GPT-2 folder or Hub id (the shipped one)")
    parser.add_argument(
        "--text", nargs="+", default=sorted(map(str, (HERE / "text").glob("*.txt"))), help="text files"
    )
    parser.add_argument("--stages", nargs="+", default=LINEAGE, help="stages or patterns, as for kda upcycle")
    parser.add_argument("--steps", type=int, default=50, help="distillation steps on the logits (half as many before)")
    parser.add_argument("--quick", action="store_true", help="a few steps and windows only, to see that it runs")
    parser.add_argument("--output", type=Path, default=Path("lineage_results"), help="folder for the results")
    return parser.parse_args()


def main():
    start, options = time.time(), arguments()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    walk = Walk(options)
    identities = walk.prove()
    rows = [walk.stage(pattern) for pattern in options.stages]
    results = {
        "settings": walk.settings,
        "environment": environment(walk.teacher),
        "seconds": round(time.time() - start, 1),
        "resumed": walk.resumed,
        "teacher": walk.teacher_numbers,
        "identities": identities,
        "stages": rows,
    }
    write_json(options.output / "lineage.json", results)
    table = as_table(results)
    (options.output / "table.md").write_text(table, encoding="utf-8")
    (options.output / "samples.txt").write_text("\n\n".join(f"[{r['stage']}]\n{r['sample']}" for r in rows) + "\n")
    plot_cache(walk.configs, options.output / "cache_growth.png")
    plot_ladder(results, options.output / "perplexity_ladder.png")
    print(table)
    for row in rows:
        print(f"[{row['stage']}] {' '.join(row['sample'].split())}\n")
    print(f"{results['seconds']:.0f} seconds; everything is in {options.output}/")


class Walk:
    """The teacher, the text cut in two, and what is done to each stage."""

    def __init__(self, options):
        self.options, self.output = options, options.output
        self.tokenizer, self.teacher = load_tokenizer(options.teacher), load_model(options.teacher)
        self.window = self.teacher.config.max_position_embeddings - 1
        texts = [read_text(path) for path in options.text]
        cut = [int(len(text) * 0.9) for text in texts]
        self.train = [text[:end] for text, end in zip(texts, cut, strict=True)]
        self.held_out = [text[end:] for text, end in zip(texts, cut, strict=True)]
        self.windows = cut_windows(tokenize(self.tokenizer, self.held_out), self.window, 2 if options.quick else None)
        self.steps = 2 if options.quick else options.steps
        self.contexts = (64, 256) if options.quick else (512, 8192)
        self.configs, self.teacher_numbers = {}, {}
        self._keep_or_clear()

    def _keep_or_clear(self):
        """Students of an earlier run are kept if it had the same settings; `resumed` says whether there are any."""
        self.settings = {
            "teacher": describe(self.teacher),
            "text": [Path(path).name for path in self.options.text],
            "steps": self.steps,
            "window": self.window,
            "held_out_windows": len(self.windows),
        }
        noted = self.output / "settings.json"
        if not noted.is_file() or json.loads(noted.read_text()) != self.settings:
            shutil.rmtree(self.output / "students", ignore_errors=True)
        self.resumed = (self.output / "students").exists()
        write_json(noted, self.settings)

    def convert(self, name, stages, source=None, **choices):
        """The folder of the teacher, or of another source, with other mixers."""
        folder = self.output / "students" / name / "converted"
        if not folder.exists():
            upcycle(source or self.options.teacher, folder, stages, **choices)
        return folder

    def prove(self):
        """What must hold exactly, on the real weights: the largest difference of logits, in float64."""
        print("identities, largest difference of logits in float64:")
        ids = self.windows[:1, :100]
        layers = self.teacher.config.num_hidden_layers
        found = {}

        def check(title, difference, limit=TOLERANCE):
            found[title] = difference
            print(f"  {title:<58} {difference:.1e}")
            assert difference <= limit, f"{title}: differs by {difference}"

        gpt2, kept = exact(self.options.teacher), exact(self.convert("softmax", "softmax"))
        check("softmax stage = GPT-2", distance(kept(ids).logits, gpt2(ids).logits))
        one = exact(self.convert("last-layer", ["softmax"] * (layers - 1) + ["kda"]))
        pairs = zip(hidden_states(one, ids)[:layers], hidden_states(kept, ids)[:layers], strict=True)
        check("last layer converted: those below are untouched", max(distance(a, b) for a, b in pairs), limit=0.0)
        # stored in float64: mla sums biases, and the shipped ones are bfloat16
        kept.save_pretrained(self.output / "students" / "float64")
        latent = self.convert("mla", "mla", self.output / "students" / "float64")
        check("a latent as wide as the model (mla) = GPT-2", distance(exact(latent)(ids).logits, gpt2(ids).logits))
        k3 = self.convert("k3", "mla", latent, **K3_PARTS)
        check("Kimi K3's gate, experts and residuals added = GPT-2", distance(exact(k3)(ids).logits, gpt2(ids).logits))
        for pattern in self.options.stages:
            model = exact(self.convert(slug(pattern), parse_stages(pattern, layers)))
            expected = model(ids, use_cache=False).logits
            check(f"{pattern}: one token at a time = one pass", distance(in_pieces(model, ids, [1]), expected))
            check(f"{pattern}: pieces of 1, 7, 64 = one pass", distance(in_pieces(model, ids, [1, 7, 64]), expected))
        return found

    def stage(self, pattern):
        """Convert, measure, heal, measure: one row of the table."""
        name, stages = slug(pattern), parse_stages(pattern, self.teacher.config.num_hidden_layers)
        print(f"\n{pattern}: {'; '.join(STAGES[stage].memory for stage in dict.fromkeys(stages))}")
        student = load_model(self.convert(name, stages))
        self.configs[pattern] = student.config
        with torch.inference_mode():
            converted = compare(student, self.windows)["perplexity"]["perplexity"]
        # a model without recurrent layers is the teacher: there is nothing to heal
        if set(stages) != {"softmax"}:
            student = self.heal(student, name)
        options = {"window": self.window, "max_windows": len(self.windows), "recall_sequences": 16}
        healed = evaluate(student, self.tokenizer, self.held_out, self.teacher, memory_tokens=MEMORY_TOKENS, **options)
        self.teacher_numbers = healed.pop("teacher")
        row = {
            "stage": pattern,
            "memory": "; ".join(dict.fromkeys(STAGES[stage].memory for stage in stages)),
            "new_parameters": student.num_parameters() - self.teacher.num_parameters(),
            "perplexity_at_conversion": converted,
            "healed": healed,
            "decode": [self.speed(student.config, context) for context in self.contexts],
            "sample": self.sample(student),
        }
        print(f"perplexity {converted:.1f} at conversion, {healed['perplexity']['perplexity']:.1f} healed")
        return row

    def heal(self, student, name):
        recipe = {
            "layerwise_steps": max(1, self.steps // 2),
            "kl_steps": self.steps,
            # rows as long as the windows it is measured on: a recurrent layer only learns the lengths that it sees
            "block_size": self.window,
            "batch_size": 2,
            # high, because there are few steps and the model is small
            "layerwise_rate": 3e-3,
            "mixer_rate": 2e-3,
            "other_rate": 1e-3,
        }
        folder = self.output / "students" / name / "healed"
        distill(student, self.teacher, self.train, folder, tokenizer=self.tokenizer, **recipe)
        return load_model(folder)

    def speed(self, config, context):
        """Decoding speed, also after more tokens than the model has positions: that of a twin without a position table
        and with random weights, on which speed does not depend.
        """
        twin = KDAForCausalLM(KDAConfig.from_dict(config.to_dict() | {"position_embedding": "none"}))
        return decode_speed(twin.to(self.teacher.device).eval(), context, steps=4 if self.options.quick else 64)

    def sample(self, student):
        set_seed(0)
        inputs = self.tokenizer(PROMPT, return_tensors="pt").to(student.device)
        length = {"max_new_tokens": 8 if self.options.quick else 60, "pad_token_id": self.tokenizer.eos_token_id}
        with torch.inference_mode():
            tokens = student.generate(**inputs, **length, do_sample=True, temperature=0.7, top_p=0.9)
        return self.tokenizer.decode(tokens[0], skip_special_tokens=True)


def slug(pattern):
    """A folder name for a stage pattern: kda*3,softmax -> kda3-softmax."""
    return pattern.replace("*", "").replace(",", "-")


def exact(source):
    return load_model(source, device="cpu", dtype=torch.float64)


def distance(a, b):
    return (a - b).abs().max().item()


def hidden_states(model, ids):
    with torch.inference_mode():
        return model(ids, output_hidden_states=True, use_cache=False).hidden_states


def in_pieces(model, ids, lengths):
    """Logits of a row that is read in pieces of these lengths, again and again, with a cache in between."""
    logits, cache, start, turn = [], None, 0, 0
    with torch.inference_mode():
        while start < ids.shape[1]:
            end = start + lengths[turn % len(lengths)]
            out = model(ids[:, start:end], cache=cache, use_cache=True)
            logits.append(out.logits)
            cache, start, turn = out.cache, end, turn + 1
    return torch.cat(logits, dim=1)


def as_table(results):
    """The rows as a Markdown table."""
    teacher, contexts = results["teacher"], [row["context"] for row in results["stages"][0]["decode"]]
    head = [
        "stage",
        "memory",
        "new parameters",
        "cache 1k",
        "32k",
        "1M",
        "PPL at conversion",
        "healed",
        "KL",
        "recall",
    ]
    head += [f"tokens/s after {context:,}" for context in contexts]
    lines = [
        f"teacher: perplexity {teacher['perplexity']['perplexity']:.1f}, recall {recall_words(teacher['recall'])}",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
    ]
    for row in results["stages"]:
        healed = row["healed"]
        cells = [row["stage"], row["memory"], f"{row['new_parameters']:,}"]
        cells += [human_bytes(entry["bytes"]) for entry in healed["cache"]["by_formula"]]
        cells += [f"{row['perplexity_at_conversion']:.1f}", f"{healed['perplexity']['perplexity']:.1f}"]
        cells += [f"{healed['agreement']['kl_teacher_student_nats']:.3f}", recall_words(healed["recall"])]
        cells += [f"{entry['tokens_per_second']:.0f}" for entry in row["decode"]]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "KL: nats per token from the teacher. Recall: gain on a passage read twice, in nats per token, and hit rate",
        "on random tokens read twice. Cache: one sequence. Speed: one sequence, random weights of the same shape.",
        "Students learnt from other parts of the same books, so a perplexity below the teacher's is no sign of a",
        "better model: KL and recall tell how far it is from its teacher.",
    ]
    return "\n".join(lines) + "\n"


def recall_words(recall):
    return f"{recall['text_gain_nats']:+.2f} / {recall['random_accuracy']:.1%}"


if __name__ == "__main__":
    main()
