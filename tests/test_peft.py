"""Adapters of the peft library: they reach every layer, train, survive saving and merging, or are refused clearly."""

import pytest
import torch
from helpers import PATTERNS, assert_different, assert_same, tiny_model, tokens
from peft import (
    AutoPeftModelForCausalLM,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    TaskType,
    get_peft_model,
)

from modeling_kda import STAGES

MIXER_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]
LATENT_PROJECTIONS = ["q_proj", "kv_a_proj", "o_proj"]


def lora(**fields):
    return LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, init_lora_weights=False, **fields)


def train(model, ids, steps=3):
    """The losses of a few steps on one batch."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stages", PATTERNS.values(), ids=PATTERNS)
def test_lora_trains_saves_loads_and_merges(stages, tmp_path):
    ids = tokens(2, 24)
    base = tiny_model(stages)
    model = get_peft_model(base, lora())
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    losses = train(model, ids)
    assert losses[-1] < losses[0]
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if not p.requires_grad)

    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(ids).logits
        loaded = PeftModel.from_pretrained(tiny_model(stages), tmp_path)
        assert torch.equal(loaded(ids).logits, expected)
        merged = loaded.merge_and_unload()
        assert_same(merged(ids).logits, expected)
        assert_different(merged(ids).logits, tiny_model(stages)(ids).logits)


def test_default_targets_reach_every_mixer():
    stages = ["softmax", *STAGES, "kda"]
    model = get_peft_model(tiny_model(stages), lora())
    names = [LATENT_PROJECTIONS if stage == "mla" else MIXER_PROJECTIONS for stage in stages]
    expected = {f"model.layers.{i}.mixer.{name}" for i, own in enumerate(names) for name in own}
    assert set(model.targeted_module_names) == expected


@pytest.mark.parametrize("output_gate", ["none", "low_rank", "full"])
def test_all_linear_reaches_every_linear_but_the_head_and_merges(output_gate):
    base = tiny_model(["kda", "softmax", "ssd", "gated_delta"], output_gate=output_gate, mlp_gated=True)
    linears = {name for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)}
    model = get_peft_model(base, lora(target_modules="all-linear"))
    assert set(model.targeted_module_names) == linears - {"lm_head"}
    ids = tokens(2, 24)
    with torch.no_grad():
        expected = model(ids).logits
        assert_same(model.merge_and_unload()(ids).logits, expected)


def test_lora_under_gradient_checkpointing_has_the_same_gradients():
    gradients = []
    for checkpointing in (False, True):
        base = tiny_model(["kda", "softmax"])
        if checkpointing:
            base.gradient_checkpointing_enable({"use_reentrant": True})
            base.enable_input_require_grads()
        torch.manual_seed(1)
        model = get_peft_model(base, lora()).train()
        model(tokens(2, 24), labels=tokens(2, 24)).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    for name, gradient in gradients[0].items():
        assert_same(gradients[1][name], gradient)


def test_adapter_folder_loads_through_the_auto_class(tmp_path):
    tiny_model("kda").save_pretrained(tmp_path / "base")
    base = tiny_model("kda")
    base.name_or_path = str(tmp_path / "base")
    model = get_peft_model(base, lora())
    model.save_pretrained(tmp_path / "adapter")
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        assert torch.equal(loaded(tokens(2, 24)).logits, model(tokens(2, 24)).logits)


def test_saving_resized_embeddings_with_the_adapter(tmp_path):
    base = tiny_model("kda")
    base.resize_token_embeddings(100)
    # the head is tied to the embedding, so both are trained and saved as one
    model = get_peft_model(base, lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True))
    model.save_pretrained(tmp_path)
    again = tiny_model("kda")
    again.resize_token_embeddings(100)
    with torch.no_grad():
        loaded = PeftModel.from_pretrained(again, tmp_path)
        assert_same(loaded(tokens(2, 24)).logits, model(tokens(2, 24)).logits)


def test_lora_on_the_short_convolution_is_refused():
    with pytest.raises(ValueError, match=r"(?s)ShortConvolution.*is not supported"):
        get_peft_model(tiny_model("kda"), lora(target_modules=["q_conv1d"]))


@pytest.mark.parametrize("stages", ["softmax", "kda", ["kda", "softmax"]], ids=str)
def test_prompt_tuning_is_the_prompt_before_the_embeddings(stages):
    ids = tokens(2, 24)
    base = tiny_model(stages)
    torch.manual_seed(0)
    model = get_peft_model(base, PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=5))
    losses = train(model, ids)
    assert losses[-1] < losses[0]
    with torch.no_grad():
        embeds = torch.cat([model.get_prompt(len(ids)), base.get_input_embeddings()(ids)], dim=1)
        logits = base(inputs_embeds=embeds, use_cache=False).logits
        assert_same(model(ids, use_cache=False).logits, logits)
        first = model.generate(input_ids=ids, max_new_tokens=1, do_sample=False)
    assert torch.equal(first[:, -1], logits[:, -1].argmax(-1))


@pytest.mark.parametrize("stages", ["kda", ["kda", "softmax"], ["softmax", "kda"]], ids=str)
def test_prefix_tuning_is_refused_where_a_layer_has_no_keys_and_values(stages):
    prefix = PrefixTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=5)
    model = get_peft_model(tiny_model(stages), prefix)
    with pytest.raises(ValueError, match=r"layer \d .*stage kda.*prefix tuning"):
        model(tokens(2, 24))


def test_prefix_tuning_trains_the_softmax_stage():
    prefix = PrefixTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=5)
    model = get_peft_model(tiny_model("softmax"), prefix)
    losses = train(model, tokens(2, 24))
    assert losses[-1] < losses[0]
