"""The command `kda`: reads arguments, calls the library, prints. A wrong input ends with one line and exit code 2.

Libraries are imported inside the commands, so that `kda --help` does not wait for them.
"""

import argparse
import json
import math
import sys

STAGE_PATTERN = """\
STAGES is a stage name for all layers (softmax, linear, delta, ssd, gated_delta, kda), or a pattern from the first
layer up, separated by commas, in which NAME*N stands for N layers. A pattern shorter than the model repeats:
    kda                 every layer KDA
    kda*3,softmax       three KDA layers, then one with attention, and so on
    gated_delta,softmax alternating"""


def main(argv=None):
    """Run one command. Returns the exit code: 0, 2 for a wrong input, 130 when interrupted."""
    arguments = build_parser().parse_args(argv)
    try:
        _quiet_loading()
        arguments.command(arguments)
    except KeyboardInterrupt:
        print("kda: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        if not _is_about_the_input(error):
            raise
        print(f"kda: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage above it."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (try '{self.prog} --help')\n")


def build_parser():
    parser = OneLineParser(prog="kda", description="From GPT-2 to Kimi Delta Attention and back to numbers.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=OneLineParser)
    _add_upcycle(commands)
    _add_distill(commands)
    _add_evaluate(commands)
    _add_generate(commands)
    _add_info(commands)
    return parser


def _add_upcycle(commands):
    parser = commands.add_parser(
        "upcycle",
        help="turn a GPT-2, or a model of ours, into another stage",
        description="Turn a GPT-2 (folder or Hub id), or a model of this project, into any stage of the lineage.",
        epilog=STAGE_PATTERN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SOURCE", help="model folder or Hub id, such as gpt2")
    parser.add_argument("--stages", required=True, help="stage, or pattern of stages (see below)")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write; must not exist")
    parser.add_argument("--calibrate", metavar="FILE", help="text to fit the new gates to")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="a field of the new configuration, such as short_conv_kernel_size=0 (repeatable)",
    )
    parser.set_defaults(command=upcycle_command)


def _add_distill(commands):
    parser = commands.add_parser(
        "distill",
        help="heal a student: match its teacher layer by layer, then in its predictions",
        description="Heal an upcycled student. After an interruption the same command goes on where it was.",
    )
    parser.add_argument("student", metavar="STUDENT", help="folder of an upcycled model")
    parser.add_argument("--teacher", required=True, metavar="MODEL", help="the model it came from")
    parser.add_argument("--text", required=True, nargs="+", metavar="FILE", help="training text, one document a file")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the trained model")
    # no defaults here: those of conversion.distillation.Recipe hold
    recipe = {"default": argparse.SUPPRESS}
    count, number = {"type": int, "metavar": "N", **recipe}, {"type": float, "metavar": "X", **recipe}
    parser.add_argument("--layerwise-steps", help="steps of layer-wise matching (500)", **count)
    parser.add_argument("--kl-steps", help="steps on the teacher's predictions (1000)", **count)
    parser.add_argument("--block-size", help="tokens per row (the positions of the model less one)", **count)
    parser.add_argument("--batch-size", help="rows per forward pass (4)", **count)
    parser.add_argument("--accumulate", help="forward passes per step (1)", **count)
    parser.add_argument("--layerwise-rate", help="learning rate of layer-wise matching (1e-3)", **number)
    parser.add_argument("--mixer-rate", help="learning rate of the mixers after that (3e-4)", **number)
    parser.add_argument("--other-rate", help="learning rate of everything else (1e-4)", **number)
    parser.add_argument("--weight-decay", help="of matrices (0)", **number)
    parser.add_argument("--warmup", help="fraction of a phase with rising rates (0.1)", **number)
    parser.add_argument("--save-every", help="steps between checkpoints (100)", **count)
    parser.add_argument("--seed", help="of the order of the rows (0)", **count)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16", **recipe)
    parser.add_argument("--checkpoint-activations", action="store_true", help="save memory, recompute", **recipe)
    parser.set_defaults(command=distill_command)


def _add_evaluate(commands):
    parser = commands.add_parser(
        "evaluate",
        help="perplexity, agreement with the teacher, recall, cache size and speed, as JSON",
        description="Measure a model, and its teacher on the same text. The protocol is named in the JSON.",
    )
    parser.add_argument("model", metavar="MODEL", help="model folder or Hub id")
    parser.add_argument("--text", required=True, nargs="+", metavar="FILE", help="held-out text")
    parser.add_argument("--teacher", metavar="MODEL", help="compare with this model")
    parser.add_argument("--window", type=int, metavar="N", help="tokens per window (positions of the model less one)")
    parser.add_argument("--max-windows", type=int, metavar="N", help="only the first N windows")
    parser.add_argument("--batch-size", type=int, default=4, metavar="N", help="windows per forward pass (4)")
    parser.add_argument(
        "--decode", type=int, nargs="+", default=[], metavar="N", help="time decoding after N tokens of context"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random sequences for recall (0)")
    parser.add_argument("--json", metavar="FILE", help="write everything that was measured to this file")
    parser.add_argument("--card", metavar="FILE", help="write a model card from it to this file")
    parser.set_defaults(command=evaluate_command)


def _add_generate(commands):
    parser = commands.add_parser("generate", help="continue a prompt", description="Continue a prompt.")
    parser.add_argument("model", metavar="MODEL", help="model folder or Hub id")
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=100, metavar="N", help="(100)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 takes the likeliest token (0)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling (0)")
    parser.set_defaults(command=generate_command)


def _add_info(commands):
    parser = commands.add_parser(
        "info",
        help="stages, parameters and cache size of a model, without loading its weights",
        description="Show a model's layers: stage, parameters, what it remembers, and how its cache grows.",
    )
    parser.add_argument("model", metavar="MODEL", help="model folder or Hub id")
    parser.set_defaults(command=info_command)


def upcycle_command(arguments):
    from .files import load_config, read_text
    from .upcycle import upcycle

    config = load_config(arguments.source)
    stages = parse_stages(arguments.stages, config.num_hidden_layers)
    calibrate = read_text(arguments.calibrate) if arguments.calibrate else None
    overrides = dict(parse_override(pair) for pair in arguments.set)
    report = upcycle(arguments.source, arguments.output, stages, calibrate=calibrate, **overrides)
    print(json.dumps(report, indent=2))


def distill_command(arguments):
    from dataclasses import fields

    from .distillation import Recipe, distill
    from .files import load_model, load_tokenizer, read_text

    recipe = {field.name: vars(arguments)[field.name] for field in fields(Recipe) if field.name in vars(arguments)}
    # before the models are loaded: a wrong option should not cost a minute
    Recipe(**recipe)
    texts = [read_text(path) for path in arguments.text]
    tokenizer = load_tokenizer(arguments.student)
    student, teacher = load_model(arguments.student), load_model(arguments.teacher)
    record = distill(student, teacher, texts, arguments.output, tokenizer=tokenizer, **recipe)
    for phase in record["phases"]:
        first, last = phase["losses"][0], phase["losses"][-1]
        print(f"{phase['phase']}: {phase['steps']} steps, loss {first['loss']:.4f} -> {last['loss']:.4f}")
    print(f"saved {arguments.output}")


def evaluate_command(arguments):
    from .evaluate import evaluate
    from .files import load_model, load_tokenizer, read_text
    from .model_card import fill_card

    texts = [read_text(path) for path in arguments.text]
    tokenizer = load_tokenizer(arguments.model)
    model = load_model(arguments.model)
    teacher = load_model(arguments.teacher) if arguments.teacher else None
    result = evaluate(
        model,
        tokenizer,
        texts,
        teacher,
        window=arguments.window,
        max_windows=arguments.max_windows,
        batch_size=arguments.batch_size,
        decode_contexts=arguments.decode,
        seed=arguments.seed,
        output=arguments.json,
    )
    if arguments.card:
        fill_card(result, arguments.card)
    print("\n".join(_summary(result)))


def generate_command(arguments):
    import torch
    from transformers import set_seed

    from .files import load_model, load_tokenizer

    tokenizer, model = load_tokenizer(arguments.model), load_model(arguments.model)
    inputs = tokenizer(arguments.prompt, return_tensors="pt").to(model.device)
    length = inputs["input_ids"].shape[1]
    if length == 0:
        raise ValueError("the prompt is empty; give some text to continue")
    check_generation(model.config, length, arguments.max_new_tokens, arguments.temperature)
    set_seed(arguments.seed)
    sampling = {"temperature": arguments.temperature} if arguments.temperature else {}
    with torch.inference_mode():
        tokens = model.generate(
            **inputs,
            max_new_tokens=arguments.max_new_tokens,
            do_sample=bool(sampling),
            pad_token_id=tokenizer.eos_token_id,
            **sampling,
        )
    print(tokenizer.decode(tokens[0], skip_special_tokens=True))


def info_command(arguments):
    import torch
    from transformers import AutoModelForCausalLM

    from modeling_kda.stages import STAGES

    from .evaluate import cache_bytes, layer_stages
    from .files import load_config

    config = load_config(arguments.model)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    base = model.base_model
    layers = base.layers if hasattr(base, "layers") else base.h
    print(f"{arguments.model}: {config.model_type}, {model.num_parameters():,} parameters")
    print(f"{'layer':>5}  {'stage':<12} {'parameters':>12}  memory")
    for i, (layer, stage) in enumerate(zip(layers, layer_stages(config), strict=True)):
        parameters = sum(p.numel() for p in layer.parameters())
        print(f"{i:>5}  {stage:<12} {parameters:>12,}  {STAGES[stage].memory}")
    dtype = config.dtype or torch.float32
    print(f"cache of one sequence ({str(dtype).split('.')[-1]} activations, float32 states):")
    for tokens in (1024, 32 * 1024, 1024 * 1024):
        print(f"{tokens:>9,} tokens  {human_bytes(cache_bytes(config, tokens, dtype=dtype)):>10}")


def parse_stages(pattern, num_layers):
    """One stage per layer from a pattern such as `kda*3,softmax`.

    Returns: list of `num_layers` names (whether they exist is for `KDAConfig` to say).

    Raises: ValueError for a pattern that cannot be read or does not fit the number of layers.
    """
    stages = []
    for part in pattern.split(","):
        name, star, count = part.strip().partition("*")
        if not name or (star and not (count.strip().isdecimal() and int(count))):
            raise ValueError(f"stages must look like 'kda', 'kda*3,softmax' or a list of names, got {pattern!r}")
        stages += [name.strip()] * (int(count) if star else 1)
    if num_layers % len(stages):
        raise ValueError(
            f"the stage pattern {pattern!r} has {len(stages)} layers, which does not divide the model's {num_layers}"
        )
    return stages * (num_layers // len(stages))


def parse_override(pair):
    """(field, value) from FIELD=VALUE; a value is read as JSON if it is JSON, and else taken as a word."""
    field, equals, value = pair.partition("=")
    if not field or not equals:
        raise ValueError(f"--set takes FIELD=VALUE, got {pair!r}")
    try:
        return field, json.loads(value)
    except json.JSONDecodeError:
        return field, value


def check_generation(config, length, new_tokens, temperature):
    """Raises: ValueError for what `generate` would refuse late or not at all."""
    if new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {new_tokens}")
    if temperature < 0:
        raise ValueError(f"--temperature must not be negative, got {temperature}")
    limit = config.max_position_embeddings
    if getattr(config, "position_embedding", "learned") == "learned" and length + new_tokens > limit:
        raise ValueError(
            f"the model has {limit} positions, but the prompt has {length} tokens and {new_tokens} more are wanted; "
            "shorten one of them"
        )


def human_bytes(count):
    """1536 -> '1.5 KiB'."""
    if count < 1024:
        return f"{count} B"
    power = min(int(math.log2(count)) // 10, 4)
    return f"{count / 1024**power:.1f} {' KMGT'[power]}iB"


def _summary(result):
    """The lines that `kda evaluate` prints."""
    own = result["perplexity"]
    yield f"perplexity       {own['perplexity']:.3f}  ({own['nats_per_token']:.4f} nats a token)"
    if "teacher" in result:
        agreement = result["agreement"]
        yield f"teacher          {result['teacher']['perplexity']['perplexity']:.3f}"
        yield f"KL from teacher  {agreement['kl_teacher_student_nats']:.4f} nats a token"
        yield f"top-1 agreement  {agreement['top1']:.1%}"
    recall = result["recall"]
    yield f"recall           {recall['random_accuracy']:.1%} of random tokens (chance {recall['random_chance']:.2%})"
    for row in result["cache"]["by_formula"]:
        yield f"cache            {human_bytes(row['bytes'])} after {row['tokens']:,} tokens"
    for row in result["decode"]:
        yield f"decode           {row['tokens_per_second']:.1f} tokens/s after {row['context']:,} tokens"


def _quiet_loading():
    """Only what matters on stderr: no bars for reading weights, no hints about long texts."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _is_about_the_input(error):
    """Whether this package or the system raised this to tell the user something; other errors are our mistakes."""
    if isinstance(error, OSError):
        return True
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    return last.tb_frame.f_globals.get("__name__", "").startswith("modeling_kda")


if __name__ == "__main__":
    sys.exit(main())
