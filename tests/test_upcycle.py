"""Upcycling: what is carried is the teacher's, what is new starts as documented, and nothing is ever half-written."""

import errno
import json
import math
import os
import shutil
import subprocess
import sys

import pytest
import torch
from conversion_helpers import TEACHER, sample_text
from gpt2_helpers import (
    IDENTITY,
    RECURRENCE,
    gpt2_config_dict,
    largest_difference,
    random_gpt2,
    random_ids,
    save_gpt2,
    softmax_model,
)
from transformers import AutoTokenizer, GenerationConfig, GPT2Config, GPT2LMHeadModel

from modeling_kda import STAGES, KDAConfig, KDAForCausalLM
from modeling_kda.conversion import layer_conversion, model_folder
from modeling_kda.conversion.checkpoint import TOKENIZER_FILES, Checkpoint
from modeling_kda.conversion.gpt2_weights import to_softmax_stage
from modeling_kda.conversion.initialisation import (
    NEW_PARAMETERS,
    HeadSettings,
    channel_half_lives,
    decay_bias,
    new_parameters,
)
from modeling_kda.conversion.measurement import LayerRecord, match_outputs, measure_heads
from modeling_kda.conversion.upcycle import upcycle
from modeling_kda.layers import Decay

RECURRENT = [stage for stage in STAGES if STAGES[stage].mixer == "recurrent"]
FULL_DISK = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(scope="module")
def gpt2():
    return random_gpt2()


@pytest.fixture(scope="module")
def source(gpt2, tmp_path_factory):
    return save_gpt2(tmp_path_factory.mktemp("source") / "gpt2", gpt2)


@pytest.fixture(scope="module")
def source_with_tokenizer(tmp_path_factory):
    folder = save_gpt2(tmp_path_factory.mktemp("source") / "worded", random_gpt2(vocab_size=2048, n_layer=2))
    for name in TOKENIZER_FILES:
        if (TEACHER / name).exists():
            shutil.copyfile(TEACHER / name, folder / name)
    return folder


def load(folder):
    return KDAForCausalLM.from_pretrained(folder).eval()


def weights(folder):
    checkpoint = Checkpoint(folder)
    return checkpoint.read(list(checkpoint.shapes))


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "choices", [{}, {"output_gate": "full", "short_conv_kernel_size": 0, "feature_map": "hedgehog"}]
)
def test_every_stage_loads_and_runs(source, gpt2, tmp_path, stage, choices):
    choices = choices if STAGES[stage].mixer == "recurrent" else {}
    report = upcycle(source, tmp_path / "out", stage, **choices)
    model = load(tmp_path / "out")
    assert model.config.stages == [stage] * 4
    assert all(getattr(model.config, name) == value for name, value in choices.items())
    assert torch.isfinite(logits(model, random_ids(gpt2))).all()
    assert json.loads((tmp_path / "out" / "upcycle.json").read_text()) == report


@pytest.mark.parametrize(
    "stages", [["softmax", "kda", "softmax", "linear"], ["delta", "ssd", "gated_delta", "softmax"]]
)
def test_hybrids_load_and_run(source, gpt2, tmp_path, stages):
    upcycle(source, tmp_path / "out", stages)
    model = load(tmp_path / "out")
    assert model.config.stages == stages
    assert torch.isfinite(logits(model, random_ids(gpt2))).all()


def test_six_layers_as_in_distilgpt2(tmp_path):
    gpt2 = random_gpt2(n_layer=6)
    upcycle(save_gpt2(tmp_path / "gpt2", gpt2), tmp_path / "out", ["kda", "kda", "softmax"] * 2)
    assert torch.isfinite(logits(load(tmp_path / "out"), random_ids(gpt2))).all()


def test_keeping_every_layer_keeps_the_teacher_bit_for_bit(source, gpt2, tmp_path):
    upcycle(source, tmp_path / "out", "softmax")
    expected = to_softmax_stage(gpt2.state_dict(), gpt2_config_dict(gpt2))
    written = weights(tmp_path / "out")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    ids = random_ids(gpt2)
    assert torch.equal(logits(load(tmp_path / "out"), ids), logits(softmax_model(gpt2), ids))
    assert largest_difference(logits(load(tmp_path / "out"), ids), logits(gpt2, ids)) <= IDENTITY[torch.float32]


def test_layers_below_a_converted_one_are_untouched(source, gpt2, tmp_path):
    upcycle(source, tmp_path / "out", ["softmax", "softmax", "kda", "softmax"])
    ids = random_ids(gpt2)
    with torch.no_grad():
        student = load(tmp_path / "out")(ids, output_hidden_states=True).hidden_states
        teacher = softmax_model(gpt2)(ids, output_hidden_states=True).hidden_states
    assert all(torch.equal(student[i], teacher[i]) for i in range(3))
    assert largest_difference(student[3], teacher[3]) > 1e-3


@pytest.mark.parametrize("stage", STAGES)
def test_the_report_says_what_really_happened(source, gpt2, tmp_path, stage):
    report = upcycle(source, tmp_path / "out", [stage, "softmax", stage, stage])
    teacher, student = to_softmax_stage(gpt2.state_dict(), gpt2_config_dict(gpt2)), weights(tmp_path / "out")
    assert all(torch.equal(student[name], teacher[name]) for name in report["carried"])
    told = set(report["carried"])
    for row in report["layers"]:
        names = {
            kind: {f"model.layers.{row['layer']}.{n}" for n in row[kind]} for kind in ("carried", "transformed", "new")
        }
        assert all(torch.equal(student[name], teacher[name]) for name in names["carried"])
        assert all(not torch.equal(student[name], teacher[name]) for name in names["transformed"])
        assert names["new"].isdisjoint(teacher)
        told |= names["carried"] | names["transformed"] | names["new"]
        kept = {f"mixer.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")}
        if row["to"] == "mla":
            kept = {"mixer.q_proj.weight", "mixer.q_proj.bias", "mixer.o_proj.weight"}
        if row["to"] == "ssd":
            kept -= {f"mixer.{part}_proj.{kind}" for part in "qk" for kind in ("weight", "bias")}
        assert kept <= set(row["carried"])
        assert set(row["transformed"]) >= ({"mixer.o_proj.weight"} if row["to"] in RECURRENT else set())
    assert told == set(student)


@pytest.mark.parametrize("stage", ["softmax", *RECURRENT])
@pytest.mark.parametrize("output_gate", ["none", "low_rank", "full"])
@pytest.mark.parametrize("bias", [True, False])
def test_new_parameters_are_exactly_what_a_stage_adds(stage, output_gate, bias):
    fields = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 8}
    fields |= {"output_gate": output_gate, "attention_bias": bias, "feature_map": "hedgehog"}
    names = {}
    for each in (stage, "softmax"):
        with torch.device("meta"):
            model = KDAForCausalLM(KDAConfig(stages=each, **fields))
        names[each] = {name: tensor.shape for name, tensor in model.model.layers[0].state_dict().items()}
    config = KDAConfig(stages=stage, **fields)
    new = new_parameters(
        stage, config, HeadSettings.default(2), channel_spread=2.0, generator=torch.Generator().manual_seed(0)
    )
    assert {name: tensor.shape for name, tensor in new.items()} == {
        name: shape for name, shape in names[stage].items() if name not in names["softmax"]
    }
    assert NEW_PARAMETERS.keys() == {"softmax", *RECURRENT}


@pytest.mark.parametrize("bound", [None, -5.0])
def test_a_head_forgets_half_in_its_half_life(bound):
    half_lives = torch.tensor([0.5, 1.5, 4.0, 16.0, 64.0, 256.0])
    decay = Decay(6, 1, bound)
    with torch.no_grad():
        decay.A_log.zero_()
        decay.dt_bias.copy_(decay_bias(half_lives, bound))
        log_decay = decay(torch.zeros(1, 1, 6, 1))
    log_decay = log_decay[0] if isinstance(log_decay, tuple) else log_decay
    torch.testing.assert_close(log_decay.flatten(), -math.log(2) / half_lives)


def test_documented_decay_biases():
    softplus = decay_bias(torch.tensor([1.5, 4, 16, 64, 256]))
    torch.testing.assert_close(softplus.tolist(), [-0.532, -1.665, -3.117, -4.520, -5.910], atol=6e-4, rtol=0)
    bounded = decay_bias(torch.tensor([8.0, 32.0]), -5.0)
    torch.testing.assert_close(bounded.tolist(), [-4.038, -5.437], atol=6e-4, rtol=0)


def test_channels_spread_around_the_head():
    spread = channel_half_lives(torch.tensor([8.0, 2.0]), 5, 4.0)
    assert spread.shape == (2, 5)
    torch.testing.assert_close(spread[0].tolist(), [2.0, 4.0, 8.0, 16.0, 32.0])
    assert torch.equal(channel_half_lives(torch.tensor([8.0]), 5, 1.0), torch.full((1, 5), 8.0, dtype=torch.float64))


def test_attention_distances_are_measured_without_the_first_token():
    config = KDAConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, stages="softmax", vocab_size=8)
    layer = KDAForCausalLM(config).model.layers[0]
    with torch.no_grad():
        for projection in (layer.mixer.q_proj, layer.mixer.k_proj):
            projection.weight.zero_()
            projection.bias.zero_()
    # scores of zero: every query looks back evenly over all tokens but the first
    settings, distances = measure_heads(layer, torch.randn(3, 41, 16))
    # the median of (t - 1) / 2 over the queries 10 to 40
    torch.testing.assert_close(distances.tolist(), [12.0, 12.0], atol=1e-4, rtol=0)
    assert torch.equal(settings.half_lives, distances.clamp(1.5, 32.0))
    assert torch.isfinite(1 / settings.query_norms).all()


def test_outputs_are_matched_by_least_squares():
    generator = torch.Generator().manual_seed(0)
    ours, theirs, outputs = (torch.randn(2, 50, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    layer = {
        "mixer.o_proj.weight": torch.randn(8, 8, generator=generator).double(),
        "mixer.o_proj.bias": torch.ones(8).double(),
    }
    record = LayerRecord(inputs=None, heads=ours + 0.5 * theirs, outputs=outputs, hidden_states=None)
    matched, factors = match_outputs(layer, ours, record, num_heads=2)
    rest = record.heads - ours * factors.repeat_interleave(4)
    by_head = (rest * ours).sum((0, 1)).view(2, 4).sum(1)
    torch.testing.assert_close(by_head, torch.zeros(2).double(), atol=1e-10, rtol=0)
    torch.testing.assert_close(
        matched["mixer.o_proj.weight"], layer["mixer.o_proj.weight"] * factors.repeat_interleave(4)
    )
    mean = (ours @ matched["mixer.o_proj.weight"].T + matched["mixer.o_proj.bias"]).mean((0, 1))
    torch.testing.assert_close(mean, outputs.mean((0, 1)))


@pytest.mark.parametrize("kind", ["safetensors-sharded", "bin", "bin-sharded"])
def test_the_file_format_of_the_source_does_not_matter(source, gpt2, tmp_path, kind):
    upcycle(source, tmp_path / "one", ["kda", "softmax", "softmax", "softmax"])
    prefixed = {f"module.{name}": t for name, t in gpt2.state_dict().items() if name != "lm_head.weight"}
    other = save_gpt2(tmp_path / "gpt2", gpt2, tensors=prefixed, kind=kind)
    upcycle(other, tmp_path / "two", ["kda", "softmax", "softmax", "softmax"])
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_small_shards_get_an_index(source, gpt2, tmp_path):
    upcycle(source, tmp_path / "whole", "kda")
    upcycle(source, tmp_path / "cut", "kda", max_shard_bytes=100_000)
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "cut").glob("*.safetensors"))
    assert len(files) > 3 and files == sorted(set(index["weight_map"].values()))
    assert index["metadata"]["total_size"] == Checkpoint(tmp_path / "cut").num_bytes
    ids = random_ids(gpt2)
    assert torch.equal(logits(load(tmp_path / "cut"), ids), logits(load(tmp_path / "whole"), ids))


def test_an_untied_head_and_low_precision_are_kept(tmp_path):
    gpt2 = random_gpt2(dtype=torch.bfloat16, tie_word_embeddings=False, n_layer=2)
    source = save_gpt2(tmp_path / "gpt2", gpt2, tensors=gpt2.state_dict())
    upcycle(source, tmp_path / "out", ["kda", "softmax"])
    written = weights(tmp_path / "out")
    assert torch.equal(written["lm_head.weight"], gpt2.lm_head.weight)
    decays = {name for name, tensor in written.items() if tensor.dtype == torch.float32}
    assert decays == {"model.layers.0.mixer.decay.A_log", "model.layers.0.mixer.decay.dt_bias"}
    model = load(tmp_path / "out")
    assert model.dtype == torch.bfloat16 and model.model.layers[0].mixer.decay.A_log.dtype == torch.float32
    assert torch.isfinite(logits(model, random_ids(gpt2))).all()


def test_the_tokenizer_and_generation_settings_come_along(source_with_tokenizer, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 5, "top_k": 7}))
    shutil.copytree(source_with_tokenizer, tmp_path / "source")
    shutil.move(tmp_path / "generation_config.json", tmp_path / "source")
    # GPT-2's published tokenizer settings do not name a class
    settings = json.loads((tmp_path / "source" / "tokenizer_config.json").read_text())
    del settings["tokenizer_class"]
    (tmp_path / "source" / "tokenizer_config.json").write_text(json.dumps(settings))
    report = upcycle(tmp_path / "source", tmp_path / "out", "kda")
    assert "sample" in report["text"]
    assert all(1.5 <= h <= 32 for row in report["layers"] for h in row["half_lives"])
    text = "Alice was beginning to get very tired"
    original, copied = (AutoTokenizer.from_pretrained(folder) for folder in (TEACHER, tmp_path / "out"))
    assert type(copied) is type(original)
    assert copied(text)["input_ids"] == original(text)["input_ids"]
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (generation.eos_token_id, generation.top_k) == (5, 7)


def test_without_a_tokenizer_half_lives_are_the_documented_default(source, tmp_path):
    report = upcycle(source, tmp_path / "out", "gated_delta")
    assert "no tokenizer" in report["text"]
    for row in report["layers"]:
        torch.testing.assert_close(row["half_lives"], [2.0, 5.04, 12.7, 32.0], atol=1e-12, rtol=1e-3)
        assert row["betas"] == [0.5] * 4
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 0


def test_the_same_seed_gives_the_same_model(source, tmp_path):
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        upcycle(source, tmp_path / name, ["kda", "softmax", "softmax", "softmax"], seed=seed)
    one, two, three = (weights(tmp_path / name) for name in ("one", "two", "three"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    name = "model.layers.0.mixer.decay_a_proj.weight"
    assert not torch.equal(one[name], three[name])


@pytest.mark.parametrize("stage", RECURRENT)
def test_large_queries_and_keys_can_be_trained(tmp_path, stage):
    gpt2 = random_gpt2(n_layer=2)
    with torch.no_grad():
        for block in gpt2.transformer.h:
            block.attn.c_attn.weight[:, :128].mul_(10)
            block.attn.c_attn.bias[:128].mul_(10)
    upcycle(save_gpt2(tmp_path / "gpt2", gpt2), tmp_path / "out", stage)
    model = load(tmp_path / "out").train()
    ids = random_ids(gpt2, length=32, batch=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(20):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0]


def test_more_tokens_than_positions_are_refused(source, tmp_path):
    upcycle(source, tmp_path / "out", "kda")
    model = load(tmp_path / "out")
    for length in (49, 200):
        with pytest.raises(ValueError, match="max_position_embeddings=48"):
            model(torch.zeros(1, length, dtype=torch.int64))


def test_a_shipped_teacher_keeps_most_of_what_it_knows(tmp_path):
    teacher = GPT2LMHeadModel.from_pretrained(TEACHER, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    # behind the first chapter, on which starts are chosen
    ids = torch.tensor([tokenizer(sample_text(30_000)[20_000:])["input_ids"][:511]])
    upcycle(TEACHER, tmp_path / "out", "gated_delta")
    student = KDAForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    expected = logits(teacher, ids).log_softmax(-1)

    def distance(other):
        return (expected.exp() * (expected - other.log_softmax(-1))).sum(-1).mean().item()

    for block in teacher.transformer.h:
        block.attn.register_forward_hook(lambda module, args, result: (torch.zeros_like(result[0]), *result[1:]))
    deaf = distance(logits(teacher, ids))
    assert distance(logits(student, ids)) < 0.6 * deaf


def test_calibration_brings_layers_closer(source_with_tokenizer, tmp_path):
    report = upcycle(
        source_with_tokenizer, tmp_path / "out", ["kda", "linear"], calibrate=sample_text(3000), fit_steps=20
    )
    assert report["text"] == "the given text"
    for row in report["layers"]:
        assert min(row["errors"].values()) < row["errors"]["start"]
    assert torch.isfinite(logits(load(tmp_path / "out"), torch.zeros(1, 8, dtype=torch.int64))).all()


def test_a_fit_that_goes_wrong_is_not_kept(source_with_tokenizer, tmp_path, monkeypatch):
    def ruin(mixer, *args, **kwargs):
        with torch.no_grad():
            mixer.q_proj.weight.fill_(torch.nan)

    monkeypatch.setattr("modeling_kda.conversion.layer_fit._train", ruin)
    report = upcycle(source_with_tokenizer, tmp_path / "out", "kda", calibrate=sample_text(3000), fit_steps=1)
    assert all(math.isnan(row["errors"]["steps"]) for row in report["layers"])
    assert all(torch.isfinite(tensor).all() for tensor in weights(tmp_path / "out").values())


def test_our_softmax_models_are_sources_too(source, tmp_path):
    upcycle(source, tmp_path / "softmax", "softmax")
    upcycle(tmp_path / "softmax", tmp_path / "two_steps", "kda", output_gate="none")
    upcycle(source, tmp_path / "one_step", "kda", output_gate="none")
    two, one = weights(tmp_path / "two_steps"), weights(tmp_path / "one_step")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_source_of_ours_need_not_look_like_gpt2(tmp_path):
    fields = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 24}
    fields |= {"attention_bias": False, "mlp_bias": False, "norm": "rmsnorm", "mlp_gated": True, "hidden_act": "silu"}
    fields |= {"position_embedding": "none", "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0}
    teacher = KDAForCausalLM(KDAConfig(stages="softmax", **fields))
    teacher.save_pretrained(tmp_path / "softmax")
    for stage in RECURRENT:
        upcycle(tmp_path / "softmax", tmp_path / stage, stage)
        student = load(tmp_path / stage)
        assert torch.equal(student.lm_head.weight, teacher.lm_head.weight)
        assert torch.isfinite(logits(student, torch.arange(40)[None])).all()


def test_damaged_models_of_ours_are_named(tmp_path):
    fields = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    KDAForCausalLM(KDAConfig(stages="softmax", bos_token_id=0, eos_token_id=0, **fields)).save_pretrained(
        tmp_path / "s"
    )
    config = json.loads((tmp_path / "s" / "config.json").read_text())
    for changed, message in (
        ({"num_hidden_layers": 3, "stages": ["softmax"] * 3}, r"lacks model\.layers\.2"),
        ({"num_hidden_layers": 1, "stages": ["softmax"]}, r"holds unknown tensors: model\.layers\.1"),
        ({"vocab_size": 98}, r"embed_tokens\.weight must have shape \[98, 32\].*got \[97, 32\]"),
        ({"norm": "batchnorm"}, "no valid kda_hybrid configuration.*norm must be one of"),
        ({"hidden_size": "wide"}, "no valid kda_hybrid configuration"),
    ):
        (tmp_path / "s" / "config.json").write_text(json.dumps(config | changed))
        with pytest.raises(ValueError, match=message) as error:
            upcycle(tmp_path / "s", tmp_path / "out", "kda")
        one_line(error)


@pytest.mark.parametrize("decay_gate", ["softplus", "lower_bound"])
def test_gated_delta_becomes_kda_without_a_change(source, gpt2, tmp_path, decay_gate):
    upcycle(source, tmp_path / "gdn", ["gated_delta", "softmax", "gated_delta", "softmax"], decay_gate=decay_gate)
    report = upcycle(tmp_path / "gdn", tmp_path / "kda", ["kda", "softmax", "kda", "softmax"])
    assert set(report["layers"][0]["new"]) == {"mixer.decay_a_proj.weight", "mixer.decay_b_proj.weight"}
    ids = random_ids(gpt2)
    before, after = logits(load(tmp_path / "gdn"), ids), logits(load(tmp_path / "kda"), ids)
    assert largest_difference(after, before) <= RECURRENCE[torch.float32] * before.abs().max()


def test_delta_becomes_gated_delta_up_to_a_decay_that_nobody_notices(source, gpt2, tmp_path):
    upcycle(source, tmp_path / "delta", "delta")
    ids = random_ids(gpt2)
    before = logits(load(tmp_path / "delta"), ids)
    for stage in ("gated_delta", "kda"):
        upcycle(tmp_path / "delta", tmp_path / stage, stage)
        # 24 tokens that each forget ln 2 / 1e6
        assert largest_difference(logits(load(tmp_path / stage), ids), before) <= 24 * 7e-7 * before.abs().max() * 10


def test_softmax_layers_of_a_hybrid_are_converted_on_what_they_see(source, tmp_path):
    upcycle(source, tmp_path / "hybrid", ["kda", "softmax", "kda", "softmax"])
    report = upcycle(tmp_path / "hybrid", tmp_path / "kda", "kda")
    assert [row["from"] for row in report["layers"]] == ["kda", "softmax", "kda", "softmax"]
    hybrid, kda = weights(tmp_path / "hybrid"), weights(tmp_path / "kda")
    assert all(torch.equal(kda[name], t) for name, t in hybrid.items() if ".0.mixer." in name or ".2.mixer." in name)


def test_steps_that_are_not_exact_are_refused(source, tmp_path):
    upcycle(source, tmp_path / "kda", ["kda", "softmax", "softmax", "softmax"])
    for stages, message in (
        ("gated_delta", "a kda layer cannot become a gated_delta layer"),
        ("softmax", "a kda layer cannot become a softmax layer"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            upcycle(tmp_path / "kda", tmp_path / "out", stages)
        one_line(error)
    with pytest.raises(ValueError, match="output_gate cannot be changed"):
        upcycle(tmp_path / "kda", tmp_path / "out", "kda", output_gate="none")
    upcycle(source, tmp_path / "gdn", "gated_delta")
    with pytest.raises(ValueError, match="decay_rank must be at least the number of value heads, 4, got 2"):
        upcycle(tmp_path / "gdn", tmp_path / "out", "kda", decay_rank=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("stages", "options", "message"),
    [
        ("mamba", {}, "stages must come from .*got .'mamba'"),
        (["kda"] * 3, {}, "one entry per layer, num_hidden_layers=4, got 3"),
        ("kda", {"hidden_size": 8}, "hidden_size cannot be set"),
        ("kda", {"output_gate": "wide"}, "output_gate must be one of"),
        ("kda", {"short_conv_kernel_size": "four"}, "short_conv_kernel_size"),
        ("kda", {"fit_steps": -1}, "fit_steps must be at least 0"),
        ("kda", {"channel_spread": 0.5}, "channel_spread at least 1"),
        ("kda", {"calibrate": "some text"}, "has no tokenizer"),
    ],
)
def test_wrong_options_are_one_clear_line(source, tmp_path, stages, options, message):
    with pytest.raises(ValueError, match=message) as error:
        upcycle(source, tmp_path / "out", stages, **options)
    one_line(error)
    assert list(tmp_path.iterdir()) == []


def test_texts_that_are_empty_or_too_short_are_refused(source_with_tokenizer, tmp_path):
    for text, message in (("", "empty"), ("  \n ", "empty"), ("A few words.", "at least 64 tokens")):
        with pytest.raises(ValueError, match=message):
            upcycle(source_with_tokenizer, tmp_path / "out", "kda", calibrate=text)
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    for vocab_size, fits in ((2047, False), (2048, True), (2112, True), (4096, False)):
        source = save_gpt2(tmp_path / str(vocab_size), random_gpt2(vocab_size=vocab_size, n_layer=1))
        shutil.copyfile(TEACHER / "tokenizer.json", source / "tokenizer.json")
        shutil.copyfile(TEACHER / "tokenizer_config.json", source / "tokenizer_config.json")
        if fits:
            upcycle(source, tmp_path / f"out{vocab_size}", "ssd")
        else:
            with pytest.raises(ValueError, match=f"2048 tokens, but the model's embedding has {vocab_size}"):
                upcycle(source, tmp_path / f"out{vocab_size}", "ssd")
    for damaged in ("{", '{"model": {"type": "BPE"}}'):
        (source / "tokenizer.json").write_text(damaged)
        with pytest.raises(ValueError, match="tokenizer files .* cannot be read") as error:
            upcycle(source, tmp_path / "out", "ssd")
        one_line(error)


def test_an_existing_output_is_left_alone(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("kept")
    with pytest.raises(ValueError, match="exists already"):
        upcycle(source, tmp_path / "out", "kda")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious"]


@pytest.mark.parametrize("place", ["save_file", "custom_object_save"])
def test_a_full_disk_leaves_nothing(source, tmp_path, monkeypatch, place):
    def full(*args, **kwargs):
        raise FULL_DISK

    monkeypatch.setattr(model_folder, place, full)
    with pytest.raises(ValueError, match="could not write .*No space left") as error:
        upcycle(source, tmp_path / "deep" / "out", "kda")
    one_line(error)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_conversion_leaves_nothing(source, tmp_path, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(layer_conversion, "run_layer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        upcycle(source, tmp_path / "out", "kda")
    assert list(tmp_path.iterdir()) == []


def test_parents_of_the_output_are_made(source, tmp_path):
    upcycle(source, tmp_path / "a" / "b" / "out", "softmax")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    load(tmp_path / "a" / "b" / "out")


def test_the_folder_brings_the_code_that_save_pretrained_brings(source, tmp_path):
    upcycle(source, tmp_path / "out", ["kda", "softmax", "linear", "ssd"])
    load(tmp_path / "out").save_pretrained(tmp_path / "saved")
    code = {path.name: path.read_bytes() for path in (tmp_path / "saved").glob("*.py")}
    assert "modeling_kda.py" in code
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.py")} == code
    ours, saved = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "saved"))
    assert ours == saved
    assert ours["auto_map"]["AutoModelForCausalLM"] == "modeling_kda.KDAForCausalLM"


MEMORY_PROCESS = """
import resource, sys
import torch
torch.set_num_threads(1)
from modeling_kda.conversion.upcycle import upcycle
used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
upcycle(sys.argv[1], sys.argv[2] + "_small", "kda")  # so that libraries are loaded
before = used()
upcycle(sys.argv[3], sys.argv[2], ["softmax"] * 9 + ["kda"] * 2)
print(used() - before)
"""


def synthetic_gpt2(folder, **fields):
    """A sharded checkpoint of any size, made quickly: every matrix is a piece of the same noise."""
    config = GPT2Config(bos_token_id=0, eos_token_id=0, **fields)
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    tensors = {name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}
    noise = 0.02 * torch.randn(max(t.numel() for t in tensors.values()))
    return save_gpt2(
        folder,
        model,
        tensors={n: noise[: t.numel()].view(t.shape) for n, t in tensors.items()},
        kind="safetensors-sharded",
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in KiB on Linux")
def test_memory_stays_near_the_size_of_the_checkpoint(source, tmp_path):
    folder = synthetic_gpt2(tmp_path / "big", vocab_size=97, n_positions=48, n_embd=768, n_head=12, n_layer=11)
    size = Checkpoint(folder).num_bytes
    assert size > 300_000_000
    command = [sys.executable, "-c", MEMORY_PROCESS, str(source), str(tmp_path / "out"), str(folder)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(result.stdout) <= 1.3 * size
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
