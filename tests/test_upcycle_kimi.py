"""Kimi's parts in an upcycled model: what starts exact is exact, what is lost in a small latent is lost where it hurts
least, and every new part can learn.
"""

import json

import pytest
import torch
from conversion_helpers import TEACHER, sample_text, tokenizer
from gpt2_helpers import FACTORISED, IDENTITY, largest_difference, random_gpt2, random_ids, save_gpt2
from transformers import GPT2LMHeadModel

from modeling_kda import KDAConfig, KDAForCausalLM
from modeling_kda.conversion import layer_conversion
from modeling_kda.conversion.evaluate import compare, cut_windows
from modeling_kda.conversion.expert_conversion import KINDS
from modeling_kda.conversion.files import tokenize
from modeling_kda.conversion.upcycle import upcycle

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
    return KDAForCausalLM.from_pretrained(folder, dtype=dtype).to(dtype).eval()


@torch.no_grad()
def logits(model, ids):
    return model(ids).logits


@pytest.mark.parametrize("parts", EXACT)
def test_attention_becomes_latent_without_a_change(source, gpt2, dtype, tmp_path, parts):
    choices, experts = EXACT[parts]
    upcycle(source, tmp_path / "out", "mla", experts=experts, **choices)
    model = load(tmp_path / "out", dtype)
    assert all(getattr(model.config, name) == value for name, value in choices.items())
    ids = random_ids(gpt2)
    assert largest_difference(logits(model, ids), logits(gpt2, ids)) <= IDENTITY[dtype]
