"""Kimi's parts in an upcycled model: what starts exact is exact, what is lost in a small latent is lost where it hurts
least, and every new part can learn.
"""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from conversion_helpers import TEACHER, sample_text, tiny_student, tiny_teacher, tokenizer
from gpt2_helpers import IDENTITY, largest_difference, logits_and_gradient, random_gpt2, random_ids, save_gpt2
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

from modeling_kda import KDAConfig, KDAForCausalLM
from modeling_kda.conversion import layer_conversion
from modeling_kda.conversion.cli import main
from modeling_kda.conversion.commands import parse_stages
from modeling_kda.conversion.distillation import distill
from modeling_kda.conversion.evaluate import compare, cut_windows
from modeling_kda.conversion.files import tokenize
from modeling_kda.conversion.latent_conversion import measure_inputs, nearest_latent, softmax_to_latent
from modeling_kda.conversion.positions import FadingPositions
from modeling_kda.conversion.upcycle import upcycle
from modeling_kda.presets import kimi_stages

# what a softmax model becomes without any change of what it computes: fields, and how MLPs become experts
EXACT = {
    "latent": ({}, None),
    "shared_key": ({"qk_rope_head_dim": 8}, None),
    "gate": ({"mla_output_gate": True}, None),
    "block_residual": ({"attention_residual": "block"}, None),
    "full_residual": ({"attention_residual": "full"}, None),
    "partition": ({"num_experts": 8}, "partition"),
    "copies": ({"num_experts": 4, "num_experts_per_token": 3, "first_k_dense_replace": 0}, "copies"),
    "latent_experts": ({"num_experts": 4, "routed_expert_hidden_size": 24}, "latent"),
    "everything": (
        {"mla_output_gate": True, "attention_residual": "block", "num_experts": 8, "qk_rope_head_dim": 8},
        "latent",
    ),
}
HYBRID = ["kda", "kda", "kda", "mla"]


@pytest.fixture(scope="module", params=IDENTITY, ids=str)
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def gpt2(dtype):
    return random_gpt2(dtype=dtype)


@pytest.fixture(scope="module")
def source(gpt2, tmp_path_factory):
    return save_gpt2(tmp_path_factory.mktemp("source") / "gpt2", gpt2)


@pytest.fixture(scope="module")
def small_source(tmp_path_factory):
    return save_gpt2(tmp_path_factory.mktemp("source") / "small", random_gpt2())


def load(folder, dtype=torch.float32):
    return KDAForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.no_grad()
def logits(model, ids):
    return model(ids, use_cache=False).logits


@pytest.mark.parametrize("parts", EXACT)
def test_softmax_attention_becomes_latent_without_a_change(source, gpt2, dtype, tmp_path, parts):
    choices, experts = EXACT[parts]
    report = upcycle(source, tmp_path / "out", "mla", experts=experts, **choices)
    model = load(tmp_path / "out", dtype)
    assert all(getattr(model.config, name) == value for name, value in choices.items())
    (ours, our_gradient), (theirs, their_gradient) = (logits_and_gradient(m, random_ids(gpt2)) for m in (model, gpt2))
    assert largest_difference(ours, theirs) <= IDENTITY[dtype]
    assert largest_difference(our_gradient, their_gradient) <= IDENTITY[dtype] * their_gradient.abs().max()
    assert all(row["energy"] == 1.0 for row in report["layers"])
    told = {*report["carried"], *report["new"]}
    for row in report["layers"]:
        told |= {f"model.layers.{row['layer']}.{n}" for kind in ("carried", "transformed", "new") for n in row[kind]}
    assert told == set(model.state_dict()) - {"lm_head.weight"}


def test_a_latent_cache_holds_half_of_gpt2s_and_gives_its_logits(source, gpt2, dtype, tmp_path):
    upcycle(source, tmp_path / "out", "mla")
    model, ids = load(tmp_path / "out", dtype), random_ids(gpt2)
    with torch.no_grad():
        cache, parts = None, []
        for part in ids.split((15, 1, 7, 1), 1):
            result = model(part, cache=cache, use_cache=True)
            cache = result.cache
            parts.append(result.logits)
        assert largest_difference(torch.cat(parts, 1), logits(gpt2, ids)) <= IDENTITY[dtype]
    layer = cache.layers[0]
    assert layer.keys.numel() + layer.values.numel() == ids.numel() * gpt2.config.n_embd


def test_a_doubled_projection_behind_a_gate_of_one_half_is_bit_for_bit_the_same(small_source, tmp_path):
    upcycle(small_source, tmp_path / "plain", "mla")
    upcycle(small_source, tmp_path / "at_once", "mla", mla_output_gate=True)
    upcycle(tmp_path / "plain", tmp_path / "later", "mla", mla_output_gate=True)
    plain, at_once, later = (load(tmp_path / name) for name in ("plain", "at_once", "later"))
    ids = random_ids(plain)
    assert torch.equal(logits(at_once, ids), logits(plain, ids))
    assert all(torch.equal(t, later.state_dict()[name]) for name, t in at_once.state_dict().items())


@pytest.mark.parametrize("parts", ["gate", "block_residual", "full_residual", "partition", "copies", "everything"])
def test_parts_added_to_a_hybrid_change_nothing(source, gpt2, dtype, tmp_path, parts):
    choices, experts = EXACT[parts]
    choices = {name: value for name, value in choices.items() if name != "qk_rope_head_dim"}
    upcycle(source, tmp_path / "hybrid", HYBRID)
    upcycle(tmp_path / "hybrid", tmp_path / "out", HYBRID, experts=experts, **choices)
    hybrid, model, ids = load(tmp_path / "hybrid", dtype), load(tmp_path / "out", dtype), random_ids(gpt2)
    assert largest_difference(logits(model, ids), logits(hybrid, ids)) <= IDENTITY[dtype]
    mixers = {name: t for name, t in hybrid.state_dict().items() if ".mixer." in name and "o_proj" not in name}
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in mixers.items())


def test_kept_attention_of_a_hybrid_becomes_latent_later(source, gpt2, dtype, tmp_path):
    upcycle(source, tmp_path / "softmax", ["kda", "kda", "kda", "softmax"])
    upcycle(tmp_path / "softmax", tmp_path / "later", HYBRID)
    upcycle(source, tmp_path / "at_once", HYBRID)
    softmax, later, at_once = (load(tmp_path / name, dtype) for name in ("softmax", "later", "at_once"))
    ids = random_ids(gpt2)
    assert largest_difference(logits(later, ids), logits(softmax, ids)) <= IDENTITY[dtype]
    assert all(torch.equal(t, at_once.state_dict()[name]) for name, t in later.state_dict().items())


def test_every_new_part_can_learn(small_source, tmp_path):
    choices, experts = EXACT["everything"]
    upcycle(small_source, tmp_path / "out", HYBRID, experts=experts, **choices)
    model = load(tmp_path / "out").train()
    ids = random_ids(model, length=32, batch=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        losses.append(model(ids, labels=ids).loss)
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    # the first layer's mixer reads the embedding alone, whatever its query
    idle = {"model.layers.0.mixer_residual.query", "model.layers.0.mixer_residual.norm.weight"}
    still = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert still == idle
    assert all(torch.isfinite(p.grad).all() for name, p in model.named_parameters() if name not in idle)


def test_the_way_back_from_silent_experts_learns_first(small_source, tmp_path):
    upcycle(small_source, tmp_path / "out", "mla", experts="latent", num_experts=4)
    model = load(tmp_path / "out").train()
    ids = random_ids(model, length=32, batch=8)
    model(ids, labels=ids).loss.backward()
    moe = model.model.layers[1].mlp
    assert moe.latent_up_proj.weight.grad.abs().max() > 0
    assert not moe.experts.down_proj.grad.any() and not moe.router.weight.grad.any()
    up, everything = moe.experts.up_proj, moe.shared_experts.up_proj.weight
    # experts look at the input's main directions: their weights are those of the MLP, as far as these go
    slices = everything.view(4, -1, everything.shape[1])
    assert largest_difference(up, slices @ moe.latent_down_proj.weight.T) < 1e-5


def test_fewer_parts_than_all_are_the_likely_largest(tmp_path):
    """A partition that tokens see only some of: nearer to the MLP than the same number of arbitrary parts."""
    teacher = GPT2LMHeadModel.from_pretrained(TEACHER, dtype=torch.float32).eval()
    windows = held_out(2)
    upcycle(TEACHER, tmp_path / "out", "softmax", experts="partition", num_experts=8, num_experts_per_token=6)
    model = load(tmp_path / "out")
    chosen = compare(model, windows, teacher)["agreement"]["kl_teacher_student_nats"]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            router = layer.mlp.router.weight
            router.copy_(1e-3 * torch.randn(router.shape, generator=generator))
            layer.mlp.router.selection_bias.zero_()
    assert chosen < 0.9 * compare(model, windows, teacher)["agreement"]["kl_teacher_student_nats"]


def held_out(count):
    """Windows of another book than the one that starts are chosen on."""
    text = (TEACHER.parent / "text" / "paradise_lost.txt").read_text(encoding="utf-8")
    return cut_windows(tokenize(tokenizer(), text[200_000:230_000]), 511, count)


def test_what_is_measured_decides_what_a_small_latent_keeps(tmp_path, monkeypatch):
    teacher = GPT2LMHeadModel.from_pretrained(TEACHER, dtype=torch.float32).eval()
    distances, energies, windows = {}, {}, held_out(4)

    def convert(name, rank):
        report = upcycle(TEACHER, tmp_path / name, "mla", kv_lora_rank=rank)
        assert load(tmp_path / name).config.kv_lora_rank == rank
        distances[name] = compare(load(tmp_path / name), windows, teacher)["agreement"]["kl_teacher_student_nats"]
        energies[name] = [row["energy"] for row in report["layers"]]

    convert("half", 64)
    convert("quarter", 32)
    monkeypatch.setattr(layer_conversion, "measure_inputs", lambda *args: None)
    convert("plain", 64)
    # measured 0.16, 0.49 and 0.47 on more windows
    assert distances["half"] < 0.5 * distances["plain"]
    assert 1.5 * distances["half"] < distances["quarter"]
    assert all(1 > a > b > 0.9 for a, b in zip(energies["half"], energies["quarter"], strict=True))


def test_a_small_latent_is_the_best_there_is_for_its_inputs():
    """Against the definition: no other projection of that rank has a smaller weighted error."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    heads, K, D, rank = 2, 4, 12, 5
    layer = {f"mixer.{p}_proj.weight": random(heads * K, D) for p in "qkv"} | {
        "mixer.o_proj.weight": random(D, heads * K)
    }
    inputs = random(3, 50, D) * torch.logspace(0, -1.5, D, dtype=torch.float64)
    statistics = measure_inputs(layer, inputs, heads)
    k, v, o = (layer[f"mixer.{p}_proj.weight"] for p in "kvo")
    down, up_k, up_v, energy = nearest_latent(k, v, o, rank, statistics)
    assert down.shape == (rank, D) and up_k.shape == up_v.shape == (heads * K, rank) and 0 < energy < 1

    def error(a, b):
        """How far scores are off (per query and key), and outputs, relative to their size."""
        x = inputs.flatten(0, 1)
        q = (x @ layer["mixer.q_proj.weight"].T).unflatten(-1, (heads, K))
        scores, outputs = [], []
        for weight in (k, k - a @ down):
            keys = (x @ weight.T).unflatten(-1, (heads, K))
            scores.append(torch.einsum("ihk,jhk->hij", q, keys).square().mean())
        for weight in (v, v - b @ down):
            outputs.append((x @ weight.T @ o.T).square().mean())
        return (9 * scores[1] / scores[0] + outputs[1] / outputs[0]).item()

    best = error(up_k, up_v)
    for _ in range(20):
        assert error(up_k + 0.05 * random(*up_k.shape), up_v + 0.05 * random(*up_v.shape)) > best
    assert torch.linalg.matrix_rank(torch.cat([up_k, up_v]) @ down) == rank


def test_a_constant_error_of_values_is_taken_back_by_the_bias():
    generator = torch.Generator().manual_seed(0)
    layer = {f"mixer.{p}_proj.weight": torch.randn(8, 8, generator=generator).double() for p in "qkvo"}
    layer |= {f"mixer.{p}_proj.bias": torch.randn(8, generator=generator).double() for p in "qkvo"}
    inputs = torch.randn(2, 40, 8, generator=generator).double() + 3.0
    fields = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 8, "kv_lora_rank": 4}
    config = KDAConfig(stages="mla", latent_norm=False, **fields)
    new, _ = softmax_to_latent(layer, config, measure_inputs(layer, inputs, 2), generator)
    x = inputs.flatten(0, 1)
    values = (x @ new["mixer.kv_a_proj.weight"].T @ new["mixer.kv_b_proj.weight"].T).unflatten(-1, (2, 8))[..., 4:]
    ours = values.flatten(1) @ new["mixer.o_proj.weight"].T + new["mixer.o_proj.bias"]
    theirs = (x @ layer["mixer.v_proj.weight"].T + layer["mixer.v_proj.bias"]) @ layer["mixer.o_proj.weight"].T
    theirs = theirs + layer["mixer.o_proj.bias"]
    torch.testing.assert_close(ours.mean(0), theirs.mean(0), rtol=0, atol=1e-12)
    assert largest_difference(ours, theirs) > 0.1


def test_calibration_brings_small_latents_closer(tmp_path):
    options = {"kv_lora_rank": 24, "fit_steps": 10, "calibrate": sample_text(8000)}
    report = upcycle(TEACHER, tmp_path / "out", ["softmax", "softmax", "mla", "mla"], **options)
    for row in report["layers"][2:]:
        assert min(row["errors"].values()) < row["errors"]["start"] < 1
    assert "errors" not in report["layers"][0]


def test_kimis_pattern():
    assert kimi_stages(12) == (["kda"] * 3 + ["mla"]) * 3
    assert parse_stages(" kimi", 4) == HYBRID
    # the released models: layers 4, 8, ..., 24, 27 of 27, and 4, 8, ..., 92, 93 of 93
    for layers, expected in ((27, [*range(4, 25, 4), 27]), (93, [*range(4, 93, 4), 93]), (6, [4, 6]), (1, [1])):
        assert [i for i, stage in enumerate(kimi_stages(layers), 1) if stage == "mla"] == expected
    assert parse_stages("kda*3,mla", 12) == kimi_stages(12)


def test_a_source_of_ours_need_not_look_like_gpt2(tmp_path):
    fields = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 24}
    fields |= {"attention_bias": False, "mlp_bias": False, "norm": "rmsnorm", "mlp_gated": True, "hidden_act": "silu"}
    fields |= {"position_embedding": "none", "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    teacher = KDAForCausalLM(KDAConfig(stages="softmax", initializer_range=0.2, **fields)).eval()
    teacher.save_pretrained(tmp_path / "softmax")
    ids = torch.arange(40)[None]
    for parts in EXACT:
        choices, experts = EXACT[parts]
        upcycle(tmp_path / "softmax", tmp_path / parts, "mla", experts=experts, **choices)
        difference = largest_difference(logits(load(tmp_path / parts), ids), logits(teacher, ids))
        assert difference <= IDENTITY[torch.float32], parts
    upcycle(tmp_path / "softmax", tmp_path / "small", "mla", kv_lora_rank=20)
    upcycle(tmp_path / "softmax", tmp_path / "some", "softmax", experts="partition", num_experts_per_token=3)
    for name in ("small", "some"):
        assert torch.isfinite(logits(load(tmp_path / name), ids)).all()


@pytest.mark.parametrize(("name", "value"), [("kv_lora_rank", 8), ("qk_rope_head_dim", 8), ("mla_output_gate", True)])
def test_choices_of_latent_attention_need_some(small_source, tmp_path, name, value):
    with pytest.raises(ValueError, match=f"{name} would have no effect: the model will have no mla layers; drop it"):
        upcycle(small_source, tmp_path / "out", "kda", **{name: value})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 4}, "num_experts cannot be set without experts .* which says how"),
        ({"experts": "many"}, "experts must be one of partition, copies, latent, got 'many'"),
        ({"experts": "partition", "num_experts": 7}, "num_experts must divide the 256 neurons of the MLP, got 7"),
        ({"experts": "copies", "num_experts": "four"}, "num_experts must be a number, at least 1, got 'four'"),
        ({"experts": "copies", "moe_intermediate_size": 8}, "moe_intermediate_size cannot be set with experts=copies"),
        ({"experts": "latent", "num_experts": 2, "num_experts_per_token": 3}, "at most num_experts=2, got 3"),
        ({"kv_lora_rank": 65}, "kv_lora_rank must be at most 64, the width of the model .*, got 65"),
        ({"latent_norm": True}, "latent_norm cannot be set"),
        ({"attention_residual": "some"}, "attention_residual must be one of"),
        ({"feature_map": "elu"}, "feature_map would have no effect: the model will have no recurrent layers"),
        ({"decay_rank": 4}, "decay_rank would have no effect: the model will have no kda layers"),
        ({"residual_scale": False}, "residual_scale would have no effect: the model will have no attention residuals"),
    ],
)
def test_wrong_options_are_one_clear_line(small_source, tmp_path, options, message):
    with pytest.raises(ValueError, match=message) as error:
        upcycle(small_source, tmp_path / "out", "mla", **options)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_what_a_source_has_settled_is_not_changed(small_source, tmp_path):
    stages = ["kda", "softmax", "softmax", "mla"]
    upcycle(small_source, tmp_path / "model", stages, experts="copies", kv_lora_rank=32)
    upcycle(tmp_path / "model", tmp_path / "residual", stages, attention_residual="full")
    for source, target, options, message in (
        ("model", stages, {"kv_lora_rank": 48}, "kv_lora_rank cannot be changed: the source has mla layers"),
        ("model", stages, {"num_experts": 4}, "num_experts cannot be changed: the source has experts"),
        ("model", stages, {"experts": "copies"}, "the source has experts already"),
        (
            "residual",
            stages,
            {"residual_scale": False},
            "residual_scale cannot be changed: the source has attention res",
        ),
        ("residual", "mla", {}, "a kda layer cannot become a mla layer"),
        ("model", "kda", {}, "a mla layer cannot become a kda layer"),
        (
            "residual",
            ["kda", "kda", "softmax", "mla"],
            {},
            "the source has attention residuals, and its layers cannot",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            upcycle(tmp_path / source, tmp_path / "out", target, **options)
    assert not (tmp_path / "out").exists()
    # what is left of softmax attention can still follow, into latents of the size that is there
    upcycle(tmp_path / "model", tmp_path / "on", ["kda", "mla", "mla", "mla"])
    assert load(tmp_path / "on").config.kv_lora_rank == 32


def test_the_command_line_makes_a_small_kimi(tmp_path, capsys):
    command = f"upcycle {TEACHER} --stages kimi --output {tmp_path}/k3 --experts latent --set num_experts=4"
    options = "--set mla_output_gate=true --set attention_residual=block --set attention_residual_block_size=2"
    assert main(f"{command} {options}".split()) == 0
    assert "3  softmax      mla" in capsys.readouterr().out
    config = load(tmp_path / "k3").config
    assert config.stages == HYBRID and config.mla_output_gate and config.residual_scale
    assert (config.attention_residual, config.attention_residual_block_size) == ("block", 2)
    assert (config.num_experts, config.num_experts_per_token, config.routed_expert_hidden_size) == (4, 2, 64)
    report = json.loads((tmp_path / "k3" / "upcycle.json").read_text())
    assert report["layers"][3]["energy"] == 1.0 and "model.output_residual.query" in report["new"]


def test_positions_fade_step_by_step_and_stay_away():
    model, fading = tiny_student(["kda", "mla"]), FadingPositions(0.5)
    ids, seen = torch.arange(5)[None], []
    table = model.model.embed_positions
    fading.on_train_begin(None, None, None, model=model)
    for step in range(8):
        fading.on_step_begin(None, SimpleNamespace(global_step=step, max_steps=8), None)
        seen.append(table(ids) / table.weight[:5])
    fading.on_train_end(None, None, None)
    for factor, ratio in zip([1, 0.75, 0.5, 0.25, 0, 0, 0, 0], seen, strict=True):
        torch.testing.assert_close(ratio, torch.full_like(ratio, factor))
    assert torch.equal(table(ids)[0], table.weight[:5])


def test_a_student_without_positions_reads_on(tmp_path):
    student, teacher = tiny_student(["kda", "mla"], latent_norm=False), tiny_teacher()
    options = {"layerwise_steps": 2, "kl_steps": 6, "block_size": 24, "batch_size": 2, "progress": False}
    text = sample_text(900)
    distill(student, teacher, text, tmp_path / "out", tokenizer=tokenizer(), drop_positions=0.5, **options)
    loaded = load(tmp_path / "out")
    assert loaded.config.position_embedding == "none"
    assert not any("embed_positions" in name for name in loaded.state_dict())
    # with a table of zeros instead
    config = KDAConfig.from_dict(loaded.config.to_dict() | {"position_embedding": "learned"})
    zeroed = KDAForCausalLM(config).eval()
    table = {"model.embed_positions.weight": torch.zeros_like(zeroed.model.embed_positions.weight)}
    zeroed.load_state_dict(loaded.state_dict() | table)
    ids = torch.randint(2048, (2, 60), generator=torch.Generator().manual_seed(0))
    assert torch.equal(logits(loaded, ids), logits(zeroed, ids))
    # more than the 64 positions that student and teacher had
    longer = torch.cat([ids, ids, ids], 1)
    assert largest_difference(logits(loaded, longer)[:, :60], logits(loaded, ids)) < 1e-4
    with pytest.raises(ValueError, match="this one has none"):
        distill(loaded, teacher, text, tmp_path / "again", tokenizer=tokenizer(), drop_positions=0.5, **options)


def test_from_a_gpt2_to_a_kimi_that_writes(tmp_path, capsys):
    """The whole way on the command line: upcycle, distil without positions, evaluate, continue a text, load."""
    (tmp_path / "text.txt").write_text(sample_text(9000), encoding="utf-8")
    text = f"--text {tmp_path}/text.txt"
    commands = [
        f"upcycle {TEACHER} --stages kimi --output {tmp_path}/new --set kv_lora_rank=96 --set mla_output_gate=true "
        "--set attention_residual=block --experts latent --set num_experts=4",
        f"distill {tmp_path}/new --teacher {TEACHER} {text} --output {tmp_path}/healed --drop-positions 0.5 "
        "--layerwise-steps 2 --kl-steps 4 --block-size 128 --batch-size 2",
        f"evaluate {tmp_path}/healed --teacher {TEACHER} {text} --window 128 --max-windows 2 --json {tmp_path}/e.json",
        f"info {tmp_path}/healed",
    ]
    for command in commands:
        assert main(command.split()) == 0, capsys.readouterr().err
    assert "latents keep at least 99." in capsys.readouterr().out
    evaluation = json.loads((tmp_path / "e.json").read_text())
    assert evaluation["model"]["stages"] == HYBRID
    assert math.isfinite(evaluation["perplexity"]["perplexity"])
    # one latent of 96 channels a token, and states of a fixed size
    short, long = (row["bytes"] for row in evaluation["cache"]["by_formula"][:2])
    assert long - short == (32 - 1) * 1024 * 96 * 4
    # 512 positions are all that the teacher has
    assert main(["generate", f"{tmp_path}/healed", "Alice was " * 200, "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("Alice was Alice was")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "healed")
    assert model.config.position_embedding == "none" and model.config.kv_lora_rank == 96
