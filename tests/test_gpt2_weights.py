"""GPT-2 checkpoints in every accepted form become a model that computes what GPT-2 does; others are refused."""

import json

import pytest
import torch
from gpt2_helpers import (
    IDENTITY,
    gpt2_config_dict,
    largest_difference,
    random_gpt2,
    random_ids,
    save_gpt2,
    softmax_model,
)

from modeling_kda.conversion import checkpoint as checkpoint_module
from modeling_kda.conversion.checkpoint import Checkpoint
from modeling_kda.conversion.gpt2_weights import NAMES, Gpt2Weights, config_fields, gpt2_shapes, to_softmax_stage


def assert_same_logits(ours, gpt2, dtype=torch.float32):
    ids = random_ids(gpt2)
    with torch.no_grad():
        difference = largest_difference(ours(ids).logits, gpt2(ids).logits)
    assert difference <= IDENTITY[dtype]


@pytest.mark.parametrize("dtype", IDENTITY)
def test_the_softmax_stage_is_gpt2(dtype):
    gpt2 = random_gpt2(dtype=dtype)
    assert_same_logits(softmax_model(gpt2), gpt2, dtype)


@pytest.mark.parametrize(
    "fields",
    [
        {"layer_norm_epsilon": 1e-3},
        {"activation_function": "gelu"},
        {"activation_function": "relu"},
        {"activation_function": "silu"},
        {"activation_function": "gelu_pytorch_tanh"},
        {"scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True},
        {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True},
        {"reorder_and_upcast_attn": True},
        {"n_inner": 48},
        {"n_layer": 6},
        {"vocab_size": 71},
        {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5},
    ],
)
def test_options_of_gpt2_are_carried(fields):
    gpt2 = random_gpt2(dtype=torch.float64, **fields)
    ours = softmax_model(gpt2)
    assert_same_logits(ours, gpt2, torch.float64)
    # without dropout even in training
    ours.train()
    assert_same_logits(ours, gpt2, torch.float64)


@pytest.mark.parametrize(
    "prefixes", ["", "transformer.", "module.", "module._orig_mod.", "_orig_mod.module.transformer."]
)
@pytest.mark.parametrize("with_head", [False, True])
def test_prefixes_and_a_tied_head_change_nothing(prefixes, with_head):
    gpt2 = random_gpt2()
    plain = gpt2.transformer.state_dict()
    stored = {prefixes + name: t for name, t in plain.items()}
    if with_head:
        stored[prefixes.replace("transformer.", "") + "lm_head.weight"] = gpt2.lm_head.weight.detach().clone()
    tensors = to_softmax_stage(stored, gpt2_config_dict(gpt2))
    expected = to_softmax_stage(gpt2.state_dict(), gpt2_config_dict(gpt2))
    assert tensors.keys() == expected.keys()
    assert "lm_head.weight" not in tensors
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_a_head_of_its_own_is_kept():
    gpt2 = random_gpt2(tie_word_embeddings=False)
    ours = softmax_model(gpt2)
    assert not torch.equal(ours.lm_head.weight, ours.model.embed_tokens.weight)
    assert_same_logits(ours, gpt2)
    without = {name: t for name, t in gpt2.state_dict().items() if name != "lm_head.weight"}
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        to_softmax_stage(without, gpt2_config_dict(gpt2))


def test_mask_buffers_are_ignored_and_nothing_else():
    gpt2 = random_gpt2()
    config, plain = gpt2_config_dict(gpt2), gpt2.state_dict()
    mask = torch.ones(48, 48, dtype=torch.bool).tril()[None, None]
    buffers = {f"transformer.h.{i}.attn.bias": mask for i in range(4)}
    buffers |= {f"transformer.h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(4)}
    with_buffers, expected = to_softmax_stage(plain | buffers, config), to_softmax_stage(plain, config)
    assert with_buffers.keys() == expected.keys()
    assert all(torch.equal(with_buffers[name], expected[name]) for name in expected)
    with pytest.raises(ValueError, match=r"transformer\.h\.0\.attn\.rotary"):
        to_softmax_stage(plain | {"transformer.h.0.attn.rotary": torch.ones(3)}, config)


def nanogpt_without_biases(gpt2):
    """The same model as nanoGPT stores it: Linear weights, no biases."""
    names = {name: t for name, t in gpt2.transformer.state_dict().items() if not name.endswith(".bias")}
    return {f"transformer.{name}": t.T if ".c_" in name else t for name, t in names.items()}


@pytest.mark.parametrize("linear", [True, False])
def test_absent_biases_are_zeros(linear):
    gpt2 = random_gpt2(vocab_size=71)
    with torch.no_grad():
        for name, parameter in gpt2.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
    stored = nanogpt_without_biases(gpt2)
    if not linear:
        stored = {name: t.T if ".c_" in name else t for name, t in stored.items()}
    assert_same_logits(softmax_model(gpt2, stored), gpt2)


def test_missing_renamed_and_misshapen_tensors_are_named():
    gpt2 = random_gpt2()
    config, plain = gpt2_config_dict(gpt2), gpt2.state_dict()
    with pytest.raises(ValueError, match=r"lacks \d+ of \d+ tensors: wte\.weight"):
        to_softmax_stage({}, config)
    half = {name: t for name, t in plain.items() if ".h.3." not in name}
    with pytest.raises(ValueError, match=r"h\.3\.ln_1\.weight"):
        to_softmax_stage(half, config)
    some_biases = {name: t for name, t in plain.items() if name != "transformer.h.1.mlp.c_fc.bias"}
    with pytest.raises(ValueError, match=r"h\.1\.mlp\.c_fc\.bias"):
        to_softmax_stage(some_biases, config)
    renamed = {name.replace("ln_1.weight", "ln_1.g"): t for name, t in plain.items()}
    with pytest.raises(ValueError, match=r"transformer\.h\.0\.ln_1\.g"):
        to_softmax_stage(renamed, config)
    with pytest.raises(ValueError, match=r"wte\.weight must have shape \[104, 64\].*got \[97, 64\]"):
        to_softmax_stage(plain, config | {"vocab_size": 104})
    with pytest.raises(ValueError, match="twice"):
        to_softmax_stage(plain | {"wpe.weight": plain["transformer.wpe.weight"]}, config)
    with pytest.raises(ValueError, match="int8"):
        to_softmax_stage(plain | {"transformer.wpe.weight": plain["transformer.wpe.weight"].to(torch.int8)}, config)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "llama"}, "model_type must be 'gpt2'.*'llama'"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"activation_function": "mish"}, "activation_function.*'mish'"),
        ({"n_head": 5}, "n_embd must be a multiple of n_head"),
        ({"n_embd": "wide"}, "no valid GPT-2 configuration"),
    ],
)
def test_what_cannot_be_converted_is_refused(fields, message):
    with pytest.raises(ValueError, match=message) as error:
        config_fields(gpt2_config_dict(random_gpt2()) | fields)
    assert "\n" not in str(error.value)


def test_the_name_table_covers_every_tensor_once():
    gpt2 = random_gpt2()
    fields = config_fields(gpt2_config_dict(gpt2))
    assert gpt2_shapes(fields) == {
        name.removeprefix("transformer."): tuple(t.shape) for name, t in gpt2.state_dict().items()
    }
    targets = [target for module in NAMES.values() for target in module]
    assert len(targets) == len(set(targets))


@pytest.mark.parametrize("kind", ["safetensors", "safetensors-sharded", "bin", "bin-sharded"])
def test_every_file_format_reads_the_same(tmp_path, kind):
    gpt2 = random_gpt2()
    weights = Gpt2Weights(Checkpoint(save_gpt2(tmp_path / "gpt2", gpt2, kind=kind)))
    expected = to_softmax_stage(gpt2.state_dict(), gpt2_config_dict(gpt2))
    tensors = weights.ends()
    for i in range(4):
        tensors |= {f"model.layers.{i}.{name}": t for name, t in weights.layer(i).items()}
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_bin_files_of_old_torch_versions_are_read(tmp_path):
    gpt2 = random_gpt2(n_layer=1)
    folder = save_gpt2(tmp_path / "gpt2", gpt2, kind="bin")
    torch.save(gpt2.state_dict(), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    layer = Gpt2Weights(Checkpoint(folder)).layer(0)
    assert torch.equal(layer["mixer.o_proj.weight"], gpt2.transformer.h[0].attn.c_proj.weight.T)


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_damaged_and_missing_files_are_one_clear_line(tmp_path, kind):
    gpt2 = random_gpt2(n_layer=1)
    folder = save_gpt2(tmp_path / "whole", gpt2, kind=kind)
    file = next(path for path in folder.iterdir() if path.suffix != ".json")
    content = file.read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"no weights at all", bytes(64)):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=file.name) as error:
            Checkpoint(folder)
        assert "copy or download it again" in one_line(error)
    file.unlink()
    with pytest.raises(ValueError, match="has no weights") as error:
        Checkpoint(folder)
    one_line(error)
    (folder / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        Checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config\.json"):
        Checkpoint(folder)


@pytest.mark.parametrize("kind", ["safetensors-sharded", "bin-sharded"])
def test_a_missing_shard_and_a_wrong_index_are_named(tmp_path, kind):
    folder = save_gpt2(tmp_path / "whole", random_gpt2(n_layer=1), kind=kind)
    index_file = next(folder.glob("*.index.json"))
    index = json.loads(index_file.read_text())
    index_file.write_text(json.dumps({"weight_map": index["weight_map"] | {"transformer.h.9.ln_1.weight": "x"}}))
    with pytest.raises(ValueError, match="lacks the shards x"):
        Checkpoint(folder)
    first = next(iter(index["weight_map"].values()))
    index_file.write_text(json.dumps({"weight_map": index["weight_map"] | {"transformer.h.9.ln_1.weight": first}}))
    with pytest.raises(ValueError, match=r"lacks transformer\.h\.9\.ln_1\.weight"):
        Checkpoint(folder)
    index_file.write_text(json.dumps(index))
    (folder / first).unlink()
    with pytest.raises(ValueError, match=f"lacks the shards {first}"):
        Checkpoint(folder)
    index_file.write_text("{}")
    with pytest.raises(ValueError, match="weight_map"):
        Checkpoint(folder)


def test_a_bin_file_must_hold_tensors_by_name(tmp_path):
    folder = save_gpt2(tmp_path / "gpt2", random_gpt2(n_layer=1), kind="bin")
    torch.save({"model": {"wte.weight": torch.ones(2)}}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="must hold a dict of tensors"):
        Checkpoint(folder)


def test_sources_that_are_not_there(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="does not exist"):
        Checkpoint(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="got the file"):
        Checkpoint(tmp_path / "file")

    def offline(repo_id, allow_patterns):
        raise OSError("no route\nto the Hub")

    monkeypatch.setattr(checkpoint_module, "snapshot_download", offline)
    with pytest.raises(ValueError, match="owner/name is no local folder.*no route") as error:
        Checkpoint("owner/name")
    one_line(error)


def test_only_the_needed_files_are_fetched_from_the_hub(tmp_path, monkeypatch):
    folder = save_gpt2(tmp_path / "snapshot", random_gpt2(n_layer=1), kind="bin")
    asked = []

    def download(repo_id, allow_patterns):
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr(checkpoint_module, "snapshot_download", download)
    assert Checkpoint("gpt2").folder == folder
    assert "model*.safetensors*" in asked[0]
    # the .bin is there in this snapshot already: asked for only when safetensors are not
    assert len(asked) == 1
