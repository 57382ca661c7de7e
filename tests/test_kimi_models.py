"""Kimi Linear and Kimi K3 in small, whole: decoding, padding, packing, training, saving, and what stays fp32."""

import pytest
import torch
from accelerate import cpu_offload
from helpers import ROUNDING, assert_different, assert_same, tiny_kimi, tokens
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, StaticCache, Trainer, TrainingArguments

from modeling_kda import KDACache, KDAConfig, KDAForCausalLM, KDAForSequenceClassification
from modeling_kda.conversion.cost import cache_bytes

KIMI = ["kimi_linear_48b", "kimi_k3"]
every_kimi = pytest.mark.parametrize("preset", KIMI)
FP32 = {"kimi_linear_48b": ("A_log", "dt_bias", "router.weight", "router.selection_bias")}
FP32["kimi_k3"] = (*FP32["kimi_linear_48b"], "conv1d.weight", "o_norm.weight")
# mean error of logits of order one after bf16 arithmetic
LOW_PRECISION = 0.1
GRADIENT = 1e-9
GREEDY = {"do_sample": False, "eos_token_id": None}


def real(*rows):
    return torch.tensor([[c != "." for c in row] for row in rows])


@every_kimi
def test_every_kind_of_module_is_there(preset):
    model = tiny_kimi(preset)
    layers = model.model.layers
    assert model.config.stages == ["kda", "kda", "kda", "mla", "mla"]
    assert [type(layer.mlp).__name__ for layer in layers] == ["MLP"] + ["MoE"] * 4
    assert (model.model.output_residual is None) == (preset == "kimi_linear_48b")
    assert (layers[0].mixer.decay.lower_bound is None) == (preset == "kimi_linear_48b")


@every_kimi
@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_decoding_equals_one_pass(preset, static):
    model, ids = tiny_kimi(preset), tokens(2, 30)
    whole = model(ids, use_cache=False).logits
    cache = StaticCache(model.config, max_cache_len=40) if static else KDACache(model.config)
    parts = [model(part, cache=cache).logits for part in ids.split([9, 1, 1, 14, 2, 1, 2], 1)]
    assert_same(torch.cat(parts, 1), whole)


@every_kimi
@torch.no_grad()
def test_generated_text_is_what_a_model_without_cache_says(preset):
    model, ids = tiny_kimi(preset), tokens(2, 9)
    mask = real("...111111", "111111111").long()
    text = ids, mask
    for _ in range(6):
        logits = model(text[0], attention_mask=text[1], use_cache=False).logits[:, -1]
        text = torch.cat([text[0], logits.argmax(-1, True)], 1), torch.nn.functional.pad(text[1], (0, 1), value=1)
    options = [{}, {"use_cache": False}, {"cache_implementation": "static", "disable_compile": True}]
    for option in (*options, {"prefill_chunk_size": 4}, {"prompt_lookup_num_tokens": 3}):
        rows = slice(1, 2) if "prompt_lookup_num_tokens" in option else slice(None)
        given = {"attention_mask": mask[rows], "max_new_tokens": 6, **GREEDY, **option}
        assert torch.equal(model.generate(ids[rows], **given), text[0][rows]), option


@every_kimi
@pytest.mark.parametrize(
    "mask",
    [real(".......11111", "111111111111"), real("1111........", "11111111...."), real("1..11.1...1.", ".1.1.1.1.1.1")],
    ids=["left", "right", "inside"],
)
@torch.no_grad()
def test_padding_is_a_no_op(preset, mask):
    model, ids = tiny_kimi(preset), tokens(2, 12)
    logits = model(ids, attention_mask=mask.long()).logits
    for row in range(2):
        alone = model(ids[row, mask[row]][None], use_cache=False).logits[0]
        assert_same(logits[row, mask[row]], alone)


@every_kimi
@torch.no_grad()
def test_packed_documents_do_not_see_one_another(preset):
    model, lengths = tiny_kimi(preset), (5, 1, 17, 3)
    parts = [tokens(1, n, seed=i) for i, n in enumerate(lengths)]
    alone = torch.cat([model(part, use_cache=False).logits for part in parts], 1)
    packed, positions = torch.cat(parts, 1), torch.cat([torch.arange(n) for n in lengths])[None]
    assert_same(model(packed, position_ids=positions).logits, alone)
    assert_different(model(packed).logits, alone)


@every_kimi
@torch.no_grad()
def test_saved_models_come_back(preset, tmp_path):
    model = tiny_kimi(preset)
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert type(loaded) is KDAForCausalLM
    assert loaded.config.to_diff_dict() == model.config.to_diff_dict()
    for (name, tensor), other in zip(loaded.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(tensor, other), name
    assert torch.equal(loaded(tokens(2, 20)).logits, model(tokens(2, 20)).logits)


@every_kimi
@torch.no_grad()
def test_offloaded_models_give_the_same(preset):
    """Weights come for the forward call of the module that holds them, and for nothing else."""
    model, offloaded = tiny_kimi(preset), cpu_offload(tiny_kimi(preset), execution_device=torch.device("cpu"))
    assert torch.equal(offloaded(tokens(2, 20)).logits, model(tokens(2, 20)).logits)
    text = offloaded.generate(tokens(2, 5), max_new_tokens=3, **GREEDY)
    assert torch.equal(text, model.generate(tokens(2, 5), max_new_tokens=3, **GREEDY))


@every_kimi
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_models_in_low_precision_keep_fp32_what_has_to_be(preset, dtype, tmp_path):
    # every expert reads every token: which ones are chosen could depend on a rounding
    model = tiny_kimi(preset, num_experts_per_token=8)
    model.save_pretrained(tmp_path)
    loaded = KDAForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == (torch.float32 if name.endswith(FP32[preset]) else dtype), name
        if name.endswith(FP32[preset]):
            assert torch.equal(tensor, model.state_dict()[name]), name
    ids = tokens(2, 30)
    exact, cache = model(ids).logits, KDACache(model.config)
    parts = [loaded(part, cache=cache).logits for part in ids.split([20, 1, 9], 1)]
    assert parts[0].dtype == dtype
    assert (torch.cat(parts, 1) - exact).abs().mean() < LOW_PRECISION
    # and once more, from a folder in low precision
    loaded.save_pretrained(tmp_path / "low")
    again = KDAForCausalLM.from_pretrained(tmp_path / "low", dtype="auto")
    for (name, tensor), other in zip(again.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert tensor.dtype == other.dtype and torch.equal(tensor, other), name


@every_kimi
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_give_the_same_gradients(preset, reentrant):
    plain, saving, ids = tiny_kimi(preset).double().train(), tiny_kimi(preset).double().train(), tokens(2, 20)
    saving.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for model in (plain, saving):
        model(ids).logits.square().mean().backward()
    for (name, p), q in zip(plain.named_parameters(), saving.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None, name
        assert_same(q.grad, p.grad, GRADIENT)


class Rows(Dataset):
    def __init__(self):
        self.ids = tokens(8, 20, seed=3)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


@every_kimi
def test_autocast_trains(preset):
    """With fp32 weights the residual stream stays fp32; what matrices give is bf16."""
    model, ids = tiny_kimi(preset, num_experts_per_token=8).train(), tokens(2, 20)
    exact = model(ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        output = model(ids, labels=ids, output_hidden_states=True)
    output.loss.backward()
    assert {h.dtype for h in output.hidden_states} == {torch.float32}
    assert (output.logits - exact).abs().mean() < LOW_PRECISION
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@every_kimi
def test_the_trainer_trains(preset, tmp_path):
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    steps = {"max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 3e-3, "logging_steps": 1}
    model = tiny_kimi(preset).train()
    biases = [b.clone() for b in model.buffers()]
    trainer = Trainer(
        model, TrainingArguments(str(tmp_path), **quiet, **steps), train_dataset=Rows(), eval_dataset=Rows()
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    # nothing is learned through a choice
    assert all(torch.equal(b, c) for b, c in zip(model.buffers(), biases, strict=True))


@torch.no_grad()
def test_the_graph_of_a_whole_model_has_no_breaks():
    model = tiny_kimi("kimi_k3", num_hidden_layers=2, attention_residual_block_size=1)
    assert model.config.stages == ["kda", "mla"]
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_same(compiled(tokens(2, 20)).logits, model(tokens(2, 20)).logits, 2 * ROUNDING)


@every_kimi
@torch.no_grad()
def test_classification_reads_the_last_real_token(preset):
    model = tiny_kimi(preset, model_class=KDAForSequenceClassification, num_labels=3)
    ids = tokens(1, 12)
    padded = torch.cat([ids, torch.zeros(1, 4, dtype=torch.long)], 1)
    assert_same(model(padded, attention_mask=(padded != 0).long()).logits, model(ids).logits)


@pytest.mark.parametrize(
    "preset, layers, state, conv, per_token",
    [("kimi_linear_48b", 20, 40 * 2**20, 1.5e6, 8064), ("kimi_k3", 69, 414 * 2**20, 15.3e6, 27648)],
)
def test_bytes_that_the_released_sizes_keep(preset, layers, state, conv, per_token):
    config = getattr(KDAConfig, preset)()
    sizes = [cache_bytes(config, n, dtype=torch.bfloat16) for n in (1, 2)]
    assert sizes[1] - sizes[0] == per_token
    assert config.stages.count("kda") == layers
    assert sizes[0] - per_token - state == pytest.approx(conv, rel=0.02)
