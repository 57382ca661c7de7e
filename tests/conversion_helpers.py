"""Small models and text that the tests of conversion/ share, with the 2,048-token tokenizer of the shipped teacher."""

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from modeling_kda import KDAConfig, KDAForCausalLM
from modeling_kda.conversion.files import load_tokenizer

ROOT = Path(__file__).parents[1]
TEACHER = ROOT / "examples" / "teacher"
VOCABULARY = 2048


def tokenizer():
    return load_tokenizer(TEACHER)


def sample_text(characters=6000):
    return (ROOT / "examples" / "text" / "alice_in_wonderland.txt").read_text(encoding="utf-8")[
        1000 : 1000 + characters
    ]


def tiny_teacher(seed=0, **overrides):
    """A random GPT-2 of 2 layers, width 32; larger weights than usual, so that it says something."""
    torch.manual_seed(seed)
    fields = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    config = GPT2Config(**fields | {"bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.2} | overrides)
    return GPT2LMHeadModel(config).eval()


def tiny_student(stages="kda", seed=1, **overrides):
    """A random model of ours that fits `tiny_teacher`."""
    torch.manual_seed(seed)
    fields = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    fields |= {"max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0, "stages": stages}
    return KDAForCausalLM(KDAConfig(**fields | overrides)).eval()
