"""What each `kda` command does with its arguments: loads, calls the library, prints.

Libraries are imported inside the commands, so that reading the arguments does not wait for them.
"""

import json
import math


def upcycle_command(arguments):
    from .files import load_config, read_text
    from .student_config import check_set
    from .upcycle import upcycle

    config = load_config(arguments.source)
    stages = parse_stages(arguments.stages, config.num_hidden_layers)
    calibrate = read_text(arguments.calibrate) if arguments.calibrate else None
    overrides = dict(parse_override(pair) for pair in arguments.set)
    # before the call, whose own arguments have names, too
    check_set(overrides)
    report = upcycle(
        arguments.source, arguments.output, stages, experts=arguments.experts, calibrate=calibrate, **overrides
    )
    print(f"{'layer':>5}  {'from':<12} {'to':<12} {'carried':>7} {'transformed':>11} {'new':>4}  tensors")
    for row in report["layers"]:
        counts = len(row["carried"]), len(row["transformed"]), len(row["new"])
        print(f"{row['layer']:>5}  {row['from']:<12} {row['to']:<12} {counts[0]:>7} {counts[1]:>11} {counts[2]:>4}")
    energies = [row["energy"] for row in report["layers"] if "energy" in row]
    if energies and min(energies) < 1:
        print(f"latents keep at least {min(energies):.2%} of what keys and values do; kda distill heals the rest")
    print(f"saved {arguments.output}; every tensor is named in its upcycle.json")


def convert_command(arguments):
    from .convert import convert

    report = convert(arguments.source, arguments.output, arguments.to, mxfp4=arguments.mxfp4)
    if report["left_out"]:
        print(f"left out {len(report['left_out'])} tensors of the vision parts, such as {report['left_out'][0]}")
    print(f"{report['from']} -> {arguments.to}: {report['tensors']} tensors")
    print(f"saved {arguments.output}")


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
    if not 0 <= arguments.seed < 2**32:
        raise ValueError(f"--seed must be from 0 to {2**32 - 1}, got {arguments.seed}")
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

    from .cost import cache_bytes, layer_stages
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
    """One stage per layer from a pattern such as `kda*3,softmax`, or as in Kimi Linear from `kimi`.

    Returns: list of `num_layers` names (whether they exist is for `KDAConfig` to say).

    Raises: ValueError for a pattern that cannot be read or does not fit the number of layers.
    """
    if pattern.strip() == "kimi":
        from modeling_kda.presets import kimi_stages

        return kimi_stages(num_layers)
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
    from .cost import last_position

    if new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {new_tokens}")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"--temperature must be finite and must not be negative, got {temperature}")
    limit = last_position(config)
    if limit is not None and length + new_tokens > limit:
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
