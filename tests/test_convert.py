"""Checkpoints in all formats: the same numbers, the same outputs and gradients, and one clear error otherwise."""

import json
from pathlib import Path

import pytest
import torch
from conversion_helpers import tokenizer
from helpers import assert_different, assert_same, relative_error, tiny_model, tokens, wake
from kimi_helpers import (
    native_in_fp64,
    native_model,
    released_tensors,
    released_weights,
    save_checkpoint,
    tiny_k3,
    tiny_kimi_linear,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, KimiLinearForCausalLM

from modeling_kda import KDAForCausalLM
from modeling_kda.conversion import tensor_files
from modeling_kda.conversion.cli import main
from modeling_kda.conversion.convert import convert
from modeling_kda.conversion.kda_weights import model_shapes
from modeling_kda.conversion.kimi_config import from_kimi_config
from modeling_kda.conversion.kimi_weights import name_table
from modeling_kda.conversion.mxfp4 import dequantise, quantise
from modeling_kda.conversion.stored_tensors import StoredTensors

IDS = tokens(2, 70)
# rounding in fp64, relative to the largest number
FP64 = 1e-10


def stored(folder):
    """Every tensor of a checkpoint by name."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def assert_same_bits(actual, expected):
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and torch.equal(actual[name], tensor), name


def ours_from(folder, dtype=torch.float32):
    model, report = KDAForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


def peer_of(model, dtype):
    """transformers' model with these weights; in fp64 with all its sums in fp64."""
    exact = dtype == torch.float64
    peer = (native_in_fp64().KimiLinearForCausalLM if exact else KimiLinearForCausalLM)(model.config)
    peer.load_state_dict(model.state_dict())
    # its other ways through the experts know no fp64
    peer.set_experts_implementation("eager")
    return peer.to(dtype)


@pytest.fixture(scope="module")
def linear(tmp_path_factory):
    """A tiny Kimi Linear in every form: transformers' model, as it saves itself, and what is converted from that."""
    folder = tmp_path_factory.mktemp("linear")
    model = native_model()
    model.save_pretrained(folder / "saved")
    tokenizer().save_pretrained(folder / "saved")
    convert(folder / "saved", folder / "ours", "ours")
    for form in ("moonshot", "kimi_linear"):
        convert(folder / "ours", folder / form, form)
    return folder, model


@pytest.fixture(scope="module")
def k3(tmp_path_factory):
    """A K3-shaped checkpoint of two layers with packed experts and a vision part, and the same dequantised."""
    folder, config = tmp_path_factory.mktemp("k3"), tiny_k3()
    packed, plain = packed_weights(config)
    vision = {"vision_tower.blocks.0.wqkv.weight": torch.ones(4, 4), "mm_projector.proj.weight": torch.ones(4)}
    save_checkpoint(folder / "packed", config, packed | vision, shards=3)
    save_checkpoint(folder / "plain", config, plain)
    return folder, packed, plain


def packed_weights(config):
    """Random codes and scales for the experts, and the weights that they stand for."""
    plain = released_weights(config)
    packed = dict(plain)
    for name, weight in plain.items():
        if ".experts." in name:
            base, (rows, columns) = name.removesuffix(".weight"), weight.shape
            codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
            scale = torch.randint(121, 126, (rows, columns // 32), dtype=torch.uint8)
            packed |= {f"{base}.weight_packed": codes, f"{base}.weight_scale": scale}
            plain[name] = dequantise(codes, scale)
            del packed[name]
    return packed, plain


def test_logits_equal_those_of_transformers(linear):
    folder, model = linear
    ours = ours_from(folder / "ours")
    with torch.no_grad():
        assert_same(ours(IDS).logits, model(IDS).logits)
        assert_different(ours(IDS).logits, ours(IDS.flip(1)).logits)


def test_logits_and_cached_decoding_equal_those_of_transformers_in_fp64(linear):
    folder, model = linear
    peer = peer_of(model, torch.float64).eval()
    ours = ours_from(folder / "ours").double()
    with torch.no_grad():
        full = ours(IDS).logits
        assert_same(full, peer(IDS).logits, FP64)
        # transformers' own fp32 is further away: the comparison above is not one of the same rounding
        assert relative_error(model(IDS).logits, full) > 100 * FP64
        mine, theirs = ours(IDS[:, :60], use_cache=True), peer(IDS[:, :60], use_cache=True)
        assert_same(mine.logits, theirs.logits, FP64)
        for t in range(60, 70):
            mine = ours(IDS[:, t : t + 1], cache=mine.cache)
            theirs = peer(IDS[:, t : t + 1], cache=theirs.cache)
            assert_same(mine.logits, theirs.logits, FP64)
            assert_same(mine.logits[:, 0], full[:, t], FP64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_loss_and_every_gradient_equal_those_of_transformers(linear, dtype):
    folder, model = linear
    exact = dtype == torch.float64
    peer, ours = peer_of(model, dtype).train(), ours_from(folder / "ours").to(dtype).train()
    mine, theirs = ours(IDS, labels=IDS).loss, peer(IDS, labels=IDS).loss
    assert_same(mine, theirs, FP64 if exact else 1e-5)
    mine.backward()
    theirs.backward()
    table = name_table(ours.config, "kimi_linear", model_shapes(ours.config))
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    expected = {name: parameter.grad for name, parameter in peer.named_parameters()}
    seen = set()
    for span in table.spans:
        if span.stored not in expected:
            assert span.stored.endswith("e_score_correction_bias") and span.ours not in gradients
            continue
        got = gradients[span.ours].flatten()[span.ours_start : span.ours_start + span.count]
        wanted = expected[span.stored].flatten()[span.stored_start : span.stored_start + span.count]
        assert wanted.abs().max() > 0, f"{span.stored} has no gradient to compare"
        assert relative_error(got, wanted) < (1e-8 if exact else 1e-4), span.stored
        seen |= {span.ours, span.stored}
    assert seen == set(gradients) | set(expected)


def test_a_released_file_loads_into_both(tmp_path):
    config = tiny_kimi_linear("kmk")
    source = save_checkpoint(tmp_path / "released", config, released_weights(config, dtype=torch.float32))
    native, report = KimiLinearForCausalLM.from_pretrained(source, output_loading_info=True)
    assert not any(report.values()), report
    convert(source, tmp_path / "ours", "ours")
    with torch.no_grad():
        assert_same(ours_from(tmp_path / "ours")(IDS).logits, native.eval()(IDS).logits)


def test_transformers_loads_both_of_the_forms_for_it(linear):
    folder, model = linear
    for form in ("moonshot", "kimi_linear"):
        native, report = AutoModelForCausalLM.from_pretrained(folder / form, output_loading_info=True)
        assert isinstance(native, KimiLinearForCausalLM) and not any(report.values()), report
        assert_same_bits(native.state_dict(), model.state_dict())


def test_the_dense_layer_that_transformers_misnames(linear):
    folder, _ = linear
    saved, ours = stored(folder / "saved"), stored(folder / "moonshot")
    assert "model.layers.0.block_sparse_moe.up_proj.weight" in saved, "transformers has mended it"
    assert "model.layers.0.mlp.up_proj.weight" in ours
    assert set(ours) == set(released_tensors(tiny_kimi_linear()))


def test_round_trips_are_bit_identical(linear, tmp_path):
    folder, _ = linear
    forms = ("ours", "moonshot", "kimi_linear")
    for start in forms:
        for end in forms:
            convert(folder / start, tmp_path / f"{start}-{end}", end)
            assert_same_bits(stored(tmp_path / f"{start}-{end}"), stored(folder / end))
            first, again = (
                json.loads((f / "config.json").read_text()) for f in (tmp_path / f"{start}-{end}", folder / end)
            )
            assert first == again


def test_round_trips_of_k3_are_bit_identical(k3, tmp_path):
    folder, _, plain = k3
    convert(folder / "plain", tmp_path / "ours", "ours")
    convert(tmp_path / "ours", tmp_path / "back", "moonshot")
    assert_same_bits(stored(tmp_path / "back"), plain)
    text = json.loads((tmp_path / "back" / "config.json").read_text())["text_config"]
    assert text["attn_res_block_size"] == 1 and text["linear_attn_config"]["gate_lower_bound"] == -5.0


def test_fla_and_back(tmp_path):
    fields = {"norm": "rmsnorm", "position_embedding": "none", "mlp_gated": True, "hidden_act": "silu"}
    fields |= {"mlp_bias": False, "attention_bias": False, "short_conv_activation": "silu", "head_dim": 8}
    fields |= {"decay_gate": "lower_bound", "num_value_heads": 4, "value_head_dim": 12, "decay_rank": 12}
    fields |= {"attention_residual": "block", "attention_residual_block_size": 1}
    for tied in (True, False):
        model = tiny_model("kda", tie_word_embeddings=tied, **fields)
        here = tmp_path / str(tied)
        model.save_pretrained(here / "ours")
        convert(here / "ours", here / "fla", "fla")
        convert(here / "fla", here / "back", "ours")
        assert_same_bits(stored(here / "back"), stored(here / "ours"))
        fla = stored(here / "fla")
        assert not fla["model.layers.1.attn.g_proj.1.bias"].any() and ("lm_head.weight" in fla) != tied
        assert fla["model.layers.0.attn.A_log"].shape == (4,) and fla["model.res_proj.weight"].shape == (1, 32)
        with torch.no_grad():
            assert torch.equal(ours_from(here / "back")(IDS).logits, model(IDS).logits)


def test_biases_of_flas_gates_survive(tmp_path):
    fields = {"norm": "rmsnorm", "position_embedding": "none", "mlp_gated": True, "hidden_act": "silu"}
    fields |= {"mlp_bias": False, "short_conv_activation": "silu", "attention_bias": True}
    model = tiny_model("kda", **fields)
    model.save_pretrained(tmp_path / "biased")
    with pytest.raises(ValueError, match="layer 0 cannot be written for fla's kda: mixer.q_proj.bias is not zero"):
        convert(tmp_path / "biased", tmp_path / "no", "fla")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") and "output_gate" not in name:
                parameter.zero_()
    model.save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "fla", "fla")
    assert stored(tmp_path / "fla")["model.layers.1.attn.g_proj.1.bias"].any()
    convert(tmp_path / "fla", tmp_path / "back", "ours")
    assert_same_bits(stored(tmp_path / "back"), stored(tmp_path / "ours"))
    # the same model in released names has no place for them
    with pytest.raises(
        ValueError, match="layer 0 .*Moonshot's checkpoints: mixer.output_gate_b_proj.bias is not zero"
    ):
        convert(tmp_path / "fla", tmp_path / "no", "moonshot")
    assert not (tmp_path / "no").exists()


def test_packed_experts_are_the_weights_they_stand_for(k3, tmp_path, monkeypatch):
    folder, _, plain = k3
    # a piece is a row or two of an expert
    monkeypatch.setattr(tensor_files, "PIECE", 100)
    report = convert(folder / "packed", tmp_path / "packed", "ours")
    assert report["from"] == "moonshot" and len(report["left_out"]) == 2
    convert(folder / "plain", tmp_path / "plain", "ours")
    assert_same_bits(stored(tmp_path / "packed"), stored(tmp_path / "plain"))
    experts = stored(tmp_path / "packed")["model.layers.1.mlp.experts.gate_up_proj"]
    start = "language_model.model.layers.1.block_sparse_moe.experts."
    for expert in range(4):
        assert torch.equal(experts[expert, :32], plain[f"{start}{expert}.w1.weight"])
        assert torch.equal(experts[expert, 32:], plain[f"{start}{expert}.w3.weight"])
    model = ours_from(tmp_path / "packed")
    assert model.model.layers[1].mlp.latent_norm.weight.shape == (64,)
    with torch.no_grad():
        logits = model(IDS).logits
        assert torch.isfinite(logits).all()
        assert_different(logits, model(IDS.flip(1)).logits)
        assert torch.equal(logits, ours_from(tmp_path / "plain")(IDS).logits)


def test_a_k3_is_assembled_by_hand_to_the_same_model(k3, tmp_path):
    """Every tensor of the file taken by its name, without the table."""
    folder, _, plain = k3
    convert(folder / "plain", tmp_path / "ours", "ours")
    found, start = stored(tmp_path / "ours"), "language_model.model.layers."
    pairs = {
        "model.layers.0.mixer.output_gate_proj.weight": plain[f"{start}0.self_attn.g_proj.weight"],
        "model.layers.1.mixer.gate_proj.weight": plain[f"{start}1.self_attn.g_proj.weight"],
        "model.layers.0.mixer.decay.A_log": plain[f"{start}0.self_attn.A_log"][:2],
        "model.layers.0.mixer.decay.dt_bias": plain[f"{start}0.self_attn.dt_bias"],
        "model.layers.1.mixer.q_norm.weight": plain[f"{start}1.self_attn.q_a_layernorm.weight"],
        "model.layers.1.mixer_residual.query": plain[f"{start}1.self_attention_res_proj.weight"][0],
        "model.layers.1.mlp_residual.norm.weight": plain[f"{start}1.mlp_res_norm.weight"],
        "model.output_residual.query": plain["language_model.model.output_attn_res_proj.weight"][0],
        "model.layers.1.mlp.latent_down_proj.weight": plain[
            f"{start}1.block_sparse_moe.routed_expert_down_proj.weight"
        ],
        "model.layers.0.mlp.gate_proj.weight": plain[f"{start}0.mlp.gate_proj.weight"],
        "lm_head.weight": plain["language_model.lm_head.weight"],
    }
    for name, tensor in pairs.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    fp32 = [name for name, tensor in found.items() if tensor.dtype == torch.float32]
    endings = ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "selection_bias")
    assert fp32 and all(name.endswith(endings) for name in fp32)


def test_experts_can_be_packed_again(k3, tmp_path):
    folder, _, plain = k3
    convert(folder / "packed", tmp_path / "ours", "ours")
    convert(tmp_path / "ours", tmp_path / "packed", "moonshot", mxfp4=True)
    names = {name for name in stored(tmp_path / "packed") if "packed" in name or "scale" in name}
    assert len(names) == 4 * 3 * 2 and all(stored(tmp_path / "packed")[name].dtype == torch.uint8 for name in names)
    text = json.loads((tmp_path / "packed" / "config.json").read_text())["text_config"]
    assert text["quantization_config"]["format"] == "mxfp4-pack-quantized"
    convert(tmp_path / "packed", tmp_path / "back", "moonshot")
    assert_same_bits(stored(tmp_path / "back"), plain)
    with pytest.raises(ValueError, match="MXFP4 experts are part of released checkpoints only"):
        convert(folder / "packed", tmp_path / "no", "ours", mxfp4=True)


def test_quantising_on_the_way_rounds_to_the_nearest(linear, tmp_path):
    config = tiny_kimi_linear("km", hidden_size=32, moe_intermediate_size=32)
    weights = released_weights(config)
    convert(save_checkpoint(tmp_path / "a", config, weights), tmp_path / "b", "moonshot", mxfp4=True)
    convert(tmp_path / "b", tmp_path / "c", "moonshot")
    for name, tensor in stored(tmp_path / "c").items():
        expected = dequantise(*quantise(weights[name])) if ".experts." in name else weights[name]
        assert torch.equal(tensor, expected), name
    folder, _ = linear
    with pytest.raises(ValueError, match="w2.weight must be a multiple of 32 wide for MXFP4, got 16"):
        convert(folder / "ours", tmp_path / "no", "moonshot", mxfp4=True)


def test_dtypes_are_kept(tmp_path):
    config = tiny_kimi_linear("kmk", dtype="bfloat16")
    weights = released_weights(config)
    source = save_checkpoint(tmp_path / "released", config, weights)
    convert(source, tmp_path / "ours", "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["dtype"] == "bfloat16"
    convert(tmp_path / "ours", tmp_path / "back", "moonshot")
    assert_same_bits(stored(tmp_path / "back"), weights)
    # A_log stays fp32 in memory too, where transformers rounds it to bf16
    ours = ours_from(tmp_path / "ours", dtype="auto")
    rates = weights["model.layers.0.self_attn.A_log"].flatten()
    assert torch.equal(ours.model.layers[0].mixer.decay.A_log, rates)
    assert ours.model.layers[0].mixer.q_proj.weight.dtype == torch.bfloat16


def test_what_k3_stores_in_fp32_stays_so_in_memory(k3, tmp_path):
    folder, *_ = k3
    convert(folder / "plain", tmp_path / "ours", "ours")
    model = ours_from(tmp_path / "ours", dtype="auto")
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    wide = {name.removeprefix("model.layers.") for name, dtype in dtypes.items() if dtype == torch.float32}
    mixer = {"q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight", "o_norm.weight", "decay.A_log", "decay.dt_bias"}
    assert wide == {f"0.mixer.{name}" for name in mixer} | {"1.mlp.router.weight"}
    assert model.dtype == torch.bfloat16 and torch.isfinite(model(IDS).logits).all()


def test_tensors_of_several_dtypes_meet_in_the_wider_one(tmp_path):
    config = tiny_kimi_linear("k")
    weights = released_weights(config)
    name = "model.layers.0.self_attn.k_conv1d.weight"
    weights[name] = weights[name].bfloat16()
    convert(save_checkpoint(tmp_path / "a", config, weights), tmp_path / "b", "kimi_linear")
    fused = stored(tmp_path / "b")["model.layers.0.self_attn.conv1d.weight"]
    assert fused.dtype == torch.float32 and torch.equal(fused[16:32], weights[name].float())


@pytest.mark.parametrize("shape", [(2,), (1, 1, 2, 1), (128,), (5,)])
def test_rates_of_decay_in_every_shape(tmp_path, shape):
    config = tiny_kimi_linear("k")
    weights = released_weights(config)
    rates = torch.zeros(shape)
    rates.flatten()[:2] = torch.tensor([0.5, 1.5])
    weights["model.layers.0.self_attn.A_log"] = rates
    convert(save_checkpoint(tmp_path / "a", config, weights), tmp_path / "b", "ours")
    assert stored(tmp_path / "b")["model.layers.0.mixer.decay.A_log"].tolist() == [0.5, 1.5]


def test_a_head_that_is_the_embedding_is_tied_again(tmp_path):
    model = KDAForCausalLM(from_kimi_config(tiny_kimi_linear("km", tie_word_embeddings=True)))
    model.save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "moonshot", "moonshot")
    written = stored(tmp_path / "moonshot")
    # transformers' kimi_linear never ties
    assert torch.equal(written["lm_head.weight"], written["model.embed_tokens.weight"])
    native, report = KimiLinearForCausalLM.from_pretrained(tmp_path / "moonshot", output_loading_info=True)
    assert not any(report.values())
    convert(tmp_path / "moonshot", tmp_path / "back", "ours")
    assert_same_bits(stored(tmp_path / "back"), stored(tmp_path / "ours"))
    assert ours_from(tmp_path / "back").config.tie_word_embeddings


def test_a_head_in_another_dtype_stays_a_head(tmp_path):
    config = tiny_kimi_linear("k")
    weights = released_weights(config)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].float()
    convert(save_checkpoint(tmp_path / "a", config, weights), tmp_path / "b", "ours")
    assert stored(tmp_path / "b")["lm_head.weight"].dtype == torch.float32


def test_a_model_without_experts_or_without_shared_ones(tmp_path):
    for change in ({"first_k_dense_replace": 3}, {"num_shared_experts": 0}):
        here = tmp_path / next(iter(change))
        config = from_kimi_config(tiny_kimi_linear("kmk", **change))
        model = KDAForCausalLM(config)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                wake(name, tensor, generator)
        model.save_pretrained(here / "ours")
        convert(here / "ours", here / "native", "kimi_linear")
        native, report = KimiLinearForCausalLM.from_pretrained(here / "native", output_loading_info=True)
        assert not any(report.values()), report
        with torch.no_grad():
            assert_same(model.eval()(IDS).logits, native.eval()(IDS).logits)
        convert(here / "native", here / "back", "ours")
        assert_same_bits(stored(here / "back"), stored(here / "ours"))


def test_shards_and_pieces_change_nothing(linear, tmp_path, monkeypatch):
    folder, _ = linear
    monkeypatch.setattr(tensor_files, "PIECE", 100)
    read, counts = StoredTensors.read, []

    def counted(self, name, start, count):
        counts.append(count)
        return read(self, name, start, count)

    monkeypatch.setattr(StoredTensors, "read", counted)
    convert(folder / "ours", tmp_path / "sharded", "moonshot", max_shard_bytes=20_000)
    # the largest tensor has 4096 numbers
    assert 0 < max(counts) <= 100
    shards = sorted((tmp_path / "sharded").glob("*.safetensors"))
    assert len(shards) > 5 and all(shard.stat().st_size < 40_000 for shard in shards)
    assert_same_bits(stored(tmp_path / "sharded"), stored(folder / "moonshot"))
    index = json.loads((tmp_path / "sharded" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored(folder / "moonshot").values())
    convert(tmp_path / "sharded", tmp_path / "back", "ours")
    assert_same_bits(stored(tmp_path / "back"), stored(folder / "ours"))
    native = KimiLinearForCausalLM.from_pretrained(tmp_path / "sharded")
    assert native.num_parameters() > 0


def test_pickled_weights_are_read_too(linear, tmp_path):
    folder, _ = linear
    (tmp_path / "bin").mkdir()
    torch.save(stored(folder / "moonshot"), tmp_path / "bin" / "pytorch_model.bin")
    (tmp_path / "bin" / "config.json").write_bytes((folder / "moonshot" / "config.json").read_bytes())
    convert(tmp_path / "bin", tmp_path / "ours", "ours")
    assert_same_bits(stored(tmp_path / "ours"), stored(folder / "ours"))


def test_files_are_aligned_for_any_mixture_of_dtypes(k3, tmp_path):
    folder, packed, _ = k3
    convert(folder / "packed", tmp_path / "packed", "moonshot", mxfp4=True)
    for file in (tmp_path / "packed").glob("*.safetensors"):
        with open(file, "rb") as content:
            length = int.from_bytes(content.read(8), "little")
            header = json.loads(content.read(length))
        assert (8 + length) % 8 == 0
        sizes = {"F32": 4, "BF16": 2, "U8": 1}
        entries = [entry for name, entry in header.items() if name != "__metadata__"]
        assert {entry["dtype"] for entry in entries} == set(sizes)
        assert all(entry["data_offsets"][0] % sizes[entry["dtype"]] == 0 for entry in entries)
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}


def test_what_lies_beside_the_weights_comes_along(linear, tmp_path):
    folder, _ = linear
    (tmp_path / "source").mkdir()
    for file in (folder / "saved").iterdir():
        (tmp_path / "source" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "source" / "generation_config.json").write_text('{"max_new_tokens": 5}')
    (tmp_path / "source" / "tokenization_kimi.py").write_text("# code of a tokenizer\n")
    (tmp_path / "source" / "tiktoken.model").write_bytes(b"ranks")
    convert(tmp_path / "source", tmp_path / "ours", "ours")
    files = {path.name for path in (tmp_path / "ours").iterdir()}
    assert {"tokenizer.json", "tokenization_kimi.py", "tiktoken.model", "modeling_kda.py"} <= files
    assert json.loads((tmp_path / "ours" / "generation_config.json").read_text()) == {"max_new_tokens": 5}
    assert not {path.name for path in (folder / "moonshot").iterdir() if path.suffix == ".py"}


def broken(tmp_path, change, config=None):
    """The error of a checkpoint that `change(weights)` has spoilt."""
    config = config or tiny_kimi_linear("km")
    weights = released_weights(config)
    change(weights)
    source = save_checkpoint(tmp_path / "broken", config, weights)
    with pytest.raises(ValueError) as error:
        convert(source, tmp_path / "out", "ours")
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["broken"], "something was left behind"
    return str(error.value)


def test_a_missing_tensor_is_named(tmp_path):
    gone = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    message = broken(tmp_path, lambda weights: weights.pop(gone))
    assert gone in message and "lacks 1 of" in message


def test_an_unknown_tensor_is_named(tmp_path):
    message = broken(
        tmp_path, lambda weights: weights.update({"model.layers.2.input_layernorm.weight": torch.ones(32)})
    )
    assert "model.layers.2.input_layernorm.weight" in message


def test_a_tensor_of_another_shape_is_named(tmp_path):
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    message = broken(tmp_path, lambda weights: weights.update({name: torch.ones(28, 13)}))
    assert f"{name} must have shape [28, 12] by config.json, got [28, 13]" in message


def test_weights_in_eight_bits_are_refused(tmp_path):
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    message = broken(tmp_path, lambda weights: weights.update({name: weights[name].to(torch.float8_e4m3fn)}))
    assert f"{name} must be of 16, 32 or 64 bit floating point or packed MXFP4" in message


def test_padding_that_is_not_zero_is_refused(tmp_path):
    name = "language_model.model.layers.0.self_attn.A_log"
    message = broken(tmp_path, lambda weights: weights[name].fill_(1.0), tiny_k3())
    assert f"{name} must be zero from element 2 on" in message


def test_damaged_packed_weights_are_named(tmp_path):
    config = tiny_k3()
    packed, _ = packed_weights(config)
    base = "language_model.model.layers.1.block_sparse_moe.experts.0.w1"
    for name, change in {
        "alone": lambda weights: weights.pop(f"{base}.weight_scale"),
        "shape": lambda weights: weights.update({f"{base}.weight_scale": torch.zeros(32, 3, dtype=torch.uint8)}),
        "twice": lambda weights: weights.update({f"{base}.weight": torch.zeros(32, 64)}),
    }.items():
        weights = dict(packed)
        change(weights)
        source = save_checkpoint(tmp_path / name, config, weights)
        with pytest.raises(ValueError, match=f"{base}.weight_packed"):
            convert(source, tmp_path / "out", "ours")


def test_files_that_are_cut_short(linear, tmp_path):
    folder, _ = linear
    whole = (folder / "moonshot" / "model.safetensors").read_bytes()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "config.json").write_bytes((folder / "moonshot" / "config.json").read_bytes())
    for size in (4, 100, len(whole) - 10):
        (tmp_path / "cut" / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(ValueError, match="model.safetensors cannot be read .* damaged or cut short"):
            convert(tmp_path / "cut", tmp_path / "out", "ours")
    convert(folder / "moonshot", tmp_path / "sharded", "moonshot", max_shard_bytes=20_000)
    next((tmp_path / "sharded").glob("model-00002-*")).unlink()
    with pytest.raises(ValueError, match="lacks the shards model-00002"):
        convert(tmp_path / "sharded", tmp_path / "out", "ours")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_nothing(linear, tmp_path, monkeypatch):
    folder, _ = linear

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_files.Planned, "pieces", full)
    with pytest.raises(ValueError, match="No space left on device.*nothing was left there"):
        convert(folder / "ours", tmp_path / "out", "moonshot")
    assert not list(tmp_path.iterdir())


def test_the_command(linear, tmp_path, capsys):
    folder, _ = linear
    assert main(["convert", str(folder / "saved"), str(tmp_path / "new"), "--to", "ours"]) == 0
    shown = capsys.readouterr().out
    assert f"moonshot -> ours: {len(stored(folder / 'ours'))} tensors" in shown and f"saved {tmp_path}/new" in shown
    assert_same_bits(stored(tmp_path / "new"), stored(folder / "ours"))
    for argv, words in (
        ([folder / "saved", tmp_path / "new", "--to", "ours"], "exists already"),
        ([folder / "saved", tmp_path / "out", "--to", "fla"], "layer 1 cannot be written for fla's kda"),
        ([folder / "saved", tmp_path / "out", "--to", "gguf"], "invalid choice: 'gguf'"),
        ([tmp_path / "no", tmp_path / "out", "--to", "ours"], "does not exist"),
        ([folder / "ours", tmp_path / "out", "--to", "kimi_linear", "--mxfp4"], "released checkpoints only"),
        ([Path(__file__).parents[1] / "examples" / "teacher", tmp_path / "out", "--to", "ours"], "upcycling it"),
    ):
        try:
            code = main(["convert", *map(str, argv)])
        except SystemExit as exit:
            code = exit.code
        shown = capsys.readouterr()
        assert code == 2 and shown.err.count("\n") == 1 and words in shown.err, shown.err
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_it_leaves_out(k3, tmp_path, capsys):
    folder, *_ = k3
    assert main(["convert", str(folder / "packed"), str(tmp_path / "new"), "--to", "ours"]) == 0
    assert "left out 2 tensors of the vision parts, such as " in capsys.readouterr().out


def test_a_kimi_linear_made_by_others_can_be_refused_by_its_configuration(tmp_path):
    config = tiny_kimi_linear("km", moe_router_activation_func="softmax")
    save_file({"x": torch.ones(1)}, (save_checkpoint(tmp_path / "a", config, {}) / "model.safetensors"))
    with pytest.raises(ValueError, match="moe_router_activation_func='softmax' has no counterpart"):
        convert(tmp_path / "a", tmp_path / "b", "ours")
