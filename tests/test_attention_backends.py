"""Softmax layers run on whatever attention function transformers is told to use; flags promise no more than that."""

import pytest
import torch
from helpers import assert_same, tiny_kimi, tiny_model, tokens
from torch.nn.attention.flex_attention import create_mask
from transformers import AttentionInterface, StaticCache
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from modeling_kda import STAGES, KDAForCausalLM, KDAForSequenceClassification, KDAModel

CALLS = []


def recording_attention(module, q, k, v, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """What a serving engine plugs in: it gets all heads, the layer it is called for, and the caller's arguments."""
    CALLS.append({"module": module, "shapes": [tuple(x.shape) for x in (q, k, v)], "dropout": dropout, **kwargs})
    causal = attention_mask is None and q.shape[2] > 1
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attention_mask, scale=scaling, is_causal=causal)
    return o.transpose(1, 2), None


AttentionInterface.register("recording", recording_attention)
AttentionMaskInterface.register("recording", sdpa_mask)


@pytest.fixture(autouse=True)
def no_calls_yet():
    CALLS.clear()


def test_another_attention_function_gets_what_it_needs():
    model, ids = tiny_model(["softmax", "kda", "softmax"], head_dim=8), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    expected = model(ids, attention_mask=mask).logits
    model.set_attn_implementation("recording")
    actual = model(ids, attention_mask=mask, of_the_engine="kept").logits
    assert_same(actual[mask.bool()], expected[mask.bool()])
    assert [call["module"].layer_idx for call in CALLS] == [0, 2]
    for call in CALLS:
        assert call["shapes"] == [(2, 2, 12, 8)] * 3
        assert call["module"].is_causal and call["dropout"] == 0.0 and call["of_the_engine"] == "kept"


def test_dropout_and_packed_positions_reach_it_in_training():
    model = tiny_model(["softmax", "kda"], attention_dropout=0.25).train()
    model.set_attn_implementation("recording")
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    model(tokens(1, 7), position_ids=positions)
    assert [call["dropout"] for call in CALLS] == [0.25]
    assert torch.equal(CALLS[0]["position_ids"], positions)


@pytest.mark.parametrize("model_class", [KDAModel, KDAForCausalLM, KDAForSequenceClassification])
def test_an_attention_function_can_be_chosen_when_loading(model_class, tmp_path):
    tiny_model(["softmax", "kda"], model_class=model_class).save_pretrained(tmp_path)
    model = model_class.from_pretrained(tmp_path, attn_implementation="recording")
    model(tokens(1, 5))
    assert len(CALLS) == 1
    with pytest.raises(ValueError, match="nonsense"):
        model_class.from_pretrained(tmp_path, attn_implementation="nonsense")


def flex_attention_in_full(module, q, k, v, mask, scaling=None, **kwargs):
    """What flex attention computes with a mask, looked at when the cache holds the new tokens."""
    visible = create_mask(mask.mask_mod, mask.shape[0], mask.shape[1], q.shape[2], k.shape[2], device=q.device)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, visible, scale=scaling).transpose(1, 2), None


@pytest.mark.parametrize("generating", [False, True])
@pytest.mark.parametrize("stage", ["softmax", "mla"])
@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def test_flex_attention_with_a_static_cache(stage, generating, monkeypatch):
    """transformers' static layers count in place, after the mask was made and before it is looked at."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "flex_attention", flex_attention_in_full)
    model, ids = tiny_model(stage) if STAGES[stage].mixer == "softmax" else tiny_kimi("kimi_k3"), tokens(2, 20)
    expected = model(ids, use_cache=False).logits
    model.set_attn_implementation("flex_attention")
    cache, outputs = StaticCache(model.config, max_cache_len=32), []
    for part in ids.split([9, 6, 1, 4], 1):
        masks = None
        if generating:
            known = {"config": model.config, "inputs_embeds": part[..., None].float(), "cache": cache}
            masks = model.create_masks_for_generate(**known, attention_mask=None)
            masks = masks if isinstance(masks, dict) else {"full_attention": masks}
        positions = torch.arange(part.shape[1])[None] + int(cache.get_seq_length())
        outputs.append(model(part, attention_mask=masks, position_ids=positions, cache=cache).logits)
    assert_same(torch.cat(outputs, 1), expected)
