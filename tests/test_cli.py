"""The command line: what it prints, what it writes, and one line for whatever is wrong."""

import json
import subprocess
import sys
from dataclasses import fields

import pytest
import torch
from conversion_helpers import TEACHER, sample_text, tiny_student, tiny_teacher, tokenizer

from modeling_kda import STAGES
from modeling_kda.conversion import cli
from modeling_kda.conversion.cli import build_parser, main
from modeling_kda.conversion.commands import human_bytes, parse_override, parse_stages
from modeling_kda.conversion.cost import cache_bytes
from modeling_kda.conversion.distillation import Recipe
from modeling_kda.conversion.files import load_tokenizer
from modeling_kda.conversion.kimi_weights import FORMATS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A teacher, a student and a text on disk."""
    folder = tmp_path_factory.mktemp("cli")
    for name, model in {"teacher": tiny_teacher(), "student": tiny_student(["kda", "softmax"])}.items():
        model.save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    (folder / "text.txt").write_text(sample_text(1500), encoding="utf-8")
    return folder


def error_of(capsys, *argv):
    """The one line that a wrong command leaves on stderr."""
    try:
        code = main([str(argument) for argument in argv])
    except SystemExit as exit:
        code = exit.code
    captured = capsys.readouterr()
    assert code == 2 and captured.out == ""
    assert captured.err.count("\n") == 1 and captured.err.startswith("kda"), captured.err
    return captured.err


def test_info_shows_layers_and_memory(folder, capsys):
    assert main(["info", str(folder / "student")]) == 0
    shown = capsys.readouterr().out
    student = tiny_student(["kda", "softmax"])
    assert f"{student.num_parameters():,} parameters" in shown
    for i, stage in enumerate(("kda", "softmax")):
        parameters = sum(p.numel() for p in student.model.layers[i].parameters())
        assert f"{i}  {stage:<12} {parameters:>12,}  {STAGES[stage].memory}" in shown
    assert human_bytes(cache_bytes(student.config, 1024 * 1024)) in shown


def test_info_reads_a_gpt2_too(capsys):
    assert main(["info", str(TEACHER)]) == 0
    shown = capsys.readouterr().out
    assert "gpt2, 1,121,024 parameters" in shown and shown.count("softmax") == 4
    # 2 (keys and values) * 4 layers * 128 numbers * 2 bytes * 1024 tokens
    assert "2.0 MiB" in shown


def test_evaluate_prints_and_writes_the_same(folder, tmp_path, capsys):
    command = (
        f"evaluate {folder}/student --teacher {folder}/teacher --text {folder}/text.txt --window 20 --max-windows 3"
    )
    output = ["--json", str(tmp_path / "result.json"), "--card", str(tmp_path / "card.md"), "--decode", "4"]
    assert main([*command.split(), *output]) == 0
    shown, result = capsys.readouterr().out, json.loads((tmp_path / "result.json").read_text())
    assert f"perplexity       {result['perplexity']['perplexity']:.3f}" in shown
    assert f"top-1 agreement  {result['agreement']['top1']:.1%}" in shown
    assert "after 4 tokens" in shown
    assert f"{result['perplexity']['perplexity']:.3f}" in (tmp_path / "card.md").read_text()


def test_distill_passes_its_options_on(folder, tmp_path, capsys):
    command = f"distill {folder}/student --teacher {folder}/teacher --text {folder}/text.txt --output {tmp_path}/new"
    options = "--layerwise-steps 2 --kl-steps 2 --block-size 16 --batch-size 2 --other-rate 0.01"
    assert main(f"{command} {options}".split()) == 0
    shown = capsys.readouterr().out
    assert "layerwise: 2 steps, loss" in shown and f"saved {tmp_path}/new" in shown
    recipe = json.loads((tmp_path / "new" / "distillation.json").read_text())["recipe"]
    assert (recipe["layerwise_steps"], recipe["block_size"], recipe["other_rate"]) == (2, 16, 0.01)
    assert recipe["mixer_rate"] == Recipe().mixer_rate


def test_distill_has_an_option_for_every_field_of_the_recipe():
    text = build_parser().parse_args(["distill", "s", "--teacher", "t", "--text", "x", "--output", "o"])
    every = ["distill", "s", "--teacher", "t", "--text", "x", "--output", "o", "--bf16", "--checkpoint-activations"]
    for field in fields(Recipe):
        assert field.name not in vars(text), "the recipe's own default must hold"
        if field.name not in ("bf16", "checkpoint_activations"):
            every += [f"--{field.name.replace('_', '-')}", "1"]
    parsed = vars(build_parser().parse_args(every))
    assert all(field.name in parsed for field in fields(Recipe))


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_can_be_asked_for(form):
    assert build_parser().parse_args(["convert", "source", "output", "--to", form]).to == form


def test_the_help_of_distill_names_the_real_defaults(capsys):
    with pytest.raises(SystemExit):
        main(["distill", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for name in ("layerwise_steps", "kl_steps", "batch_size", "accumulate", "save_every", "warmup"):
        option = shown[shown.rindex(f"--{name.replace('_', '-')} ") :]
        assert f"({getattr(Recipe(), name)})" in option[: option.index(")") + 1], name


def test_generate_continues_the_prompt_and_repeats_itself(folder, capsys):
    for extra in ([], ["--temperature", "1.0", "--seed", "3"]):
        texts = []
        for _ in range(2):
            assert main(["generate", str(folder / "student"), "Alice was", "--max-new-tokens", "6", *extra]) == 0
            texts.append(capsys.readouterr().out)
        assert texts[0] == texts[1] and texts[0].startswith("Alice was")
    with torch.no_grad():
        ids = tokenizer()("Alice was", return_tensors="pt")["input_ids"]
        for _ in range(6):
            ids = torch.cat([ids, tiny_student(["kda", "softmax"])(ids).logits[:, -1:].argmax(-1)], 1)
    assert main(["generate", str(folder / "student"), "Alice was", "--max-new-tokens", "6"]) == 0
    assert capsys.readouterr().out == tokenizer().decode(ids[0], skip_special_tokens=True) + "\n"


def test_upcycle_writes_a_model_of_the_stages_asked_for(tmp_path, capsys):
    pattern = ["--stages", "kda,softmax", "--set", "output_gate=none", "--set", "short_conv_kernel_size=3"]
    assert main(["upcycle", str(TEACHER), *pattern, "--output", str(tmp_path / "student")]) == 0
    shown = capsys.readouterr().out.splitlines()
    report = json.loads((tmp_path / "student" / "upcycle.json").read_text())
    for line, row in zip(shown[1:5], report["layers"], strict=True):
        counts = [str(len(row[kind])) for kind in ("carried", "transformed", "new")]
        assert line.split() == [str(row["layer"]), row["from"], row["to"], *counts]
    config = json.loads((tmp_path / "student" / "config.json").read_text())
    assert config["stages"] == ["kda", "softmax", "kda", "softmax"]
    assert (config["output_gate"], config["short_conv_kernel_size"]) == ("none", 3)


@pytest.mark.parametrize(
    ("pattern", "layers", "stages"),
    [
        ("kda", 3, ["kda"] * 3),
        ("kda*3,softmax", 8, (["kda"] * 3 + ["softmax"]) * 2),
        (" gated_delta , softmax ", 4, ["gated_delta", "softmax"] * 2),
        ("a,b,c", 3, ["a", "b", "c"]),
    ],
)
def test_stage_patterns(pattern, layers, stages):
    assert parse_stages(pattern, layers) == stages


@pytest.mark.parametrize("pattern", ["", "kda,", "kda*0", "kda*x", "*3", "kda*-1", "kda*2*2"])
def test_stage_patterns_that_make_no_sense(pattern):
    with pytest.raises(ValueError, match="stages must look like"):
        parse_stages(pattern, 4)


def test_a_stage_pattern_must_divide_the_layers():
    with pytest.raises(ValueError, match="has 3 layers, which does not divide the model's 4"):
        parse_stages("kda*2,softmax", 4)


def test_overrides_are_json_or_words():
    pairs = ("n=3", "x=1e-5", "flag=true", "gate=none", "act=null", "name=a=b")
    values = [("n", 3), ("x", 1e-5), ("flag", True), ("gate", "none"), ("act", None), ("name", "a=b")]
    assert [parse_override(pair) for pair in pairs] == values


def test_bytes_for_people():
    counts = (0, 1023, 1024, 1536, 1024**2, 5 * 1024**3, 2 * 1024**4)
    shown = ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "5.0 GiB", "2.0 TiB"]
    assert [human_bytes(count) for count in counts] == shown


def test_wrong_input_gets_one_line(folder, tmp_path, capsys):
    student, teacher, text = folder / "student", folder / "teacher", folder / "text.txt"
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    out = ["--output", tmp_path / "new"]

    def error(*argv):
        return error_of(capsys, *argv)

    assert "invalid choice: 'frobnicate'" in error("frobnicate")
    assert "--teacher" in error("distill", student, "--text", text, *out)
    assert "no-such-model cannot be loaded" in error("info", tmp_path / "no-such-model")
    assert "No such file" in error("evaluate", student, "--text", tmp_path / "missing.txt")
    assert "is empty" in error("evaluate", student, "--text", tmp_path / "empty.txt")
    assert "must be a UTF-8 text file" in error("evaluate", student, "--text", tmp_path / "latin.txt")
    assert "at least 4 tokens, got 1" in error("evaluate", student, "--text", text, "--window", "1")
    assert "needs 132 positions" in error("evaluate", student, "--text", text, "--decode", "100")
    assert "the prompt is empty" in error("generate", student, "")
    assert "64 positions" in error("generate", student, "Alice", "--max-new-tokens", "100")
    assert "at least 1, got 0" in error("generate", student, "Alice", "--max-new-tokens", "0")
    assert "--temperature must be finite" in error("generate", student, "A", "--temperature", "-1")
    distill = ["distill", student, "--teacher", teacher, "--text", text]
    assert "both 0" in error(*distill, *out, "--layerwise-steps", "0", "--kl-steps", "0")
    assert "was not made by this run" in error(*distill, "--output", folder / "student")
    assert "does not divide" in error("upcycle", teacher, "--stages", "kda*3", *out)
    assert "stages must come from" in error("upcycle", teacher, "--stages", "mamba", *out)
    assert "--set takes FIELD=VALUE" in error("upcycle", teacher, "--stages", "kda", "--set", "x", *out)
    # names of the arguments of upcycle() are no fields, either
    assert "stages cannot be set" in error("upcycle", teacher, "--stages", "kda", "--set", "stages=kda", *out)
    assert "seed cannot be set" in error("upcycle", teacher, "--stages", "kda", "--set", "seed=1", *out)
    assert "--temperature must be finite" in error("generate", student, "A", "--temperature", "nan")
    assert "--seed must be from 0" in error("generate", student, "A", "--max-new-tokens", "1", "--seed", "-1")
    assert "mixer_rate must be finite and must not be negative" in error(*distill, *out, "--mixer-rate", "nan")
    assert "exists" in error("upcycle", teacher, "--stages", "kda", "--output", folder / "student")
    assert not (tmp_path / "new").exists()


def test_a_mistake_of_ours_keeps_its_traceback(folder, monkeypatch):
    def broken(argument):
        return int("not a number")

    monkeypatch.setattr(cli, "info_command", broken)
    with pytest.raises(ValueError, match="invalid literal"):
        main(["info", "anything"])


def test_an_interruption_is_no_traceback(monkeypatch, capsys):
    def interrupted(argument):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "info_command", interrupted)
    assert main(["info", "anything"]) == 130
    assert capsys.readouterr().err == "kda: interrupted\n"


def test_the_installed_command_exits_with_the_code_of_main(tmp_path):
    command = [sys.executable, "-m", "modeling_kda.conversion.cli", "info", tmp_path / "nothing"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_damaged_tokenizer_is_one_line_for_every_command(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "no such model"}}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ValueError) as error:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)
