"""A trained GPT-2 becomes a hybrid of Kimi Delta Attention and attention, is loaded like any model, and writes.

    python examples/quickstart.py [SOURCE]

SOURCE is a GPT-2 folder or Hub id, by default the small teacher in this folder. Nothing is trained here: the text
shows what conversion alone keeps. `finetune.py` goes on from there.
"""

import sys
import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from modeling_kda.conversion.upcycle import upcycle

source = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent / "teacher")
teacher = AutoModelForCausalLM.from_pretrained(source)
stages = (["kda"] * 3 + ["softmax"]) * (teacher.config.num_hidden_layers // 4)

with tempfile.TemporaryDirectory() as folder:
    upcycle(source, f"{folder}/hybrid", stages)
    student = AutoModelForCausalLM.from_pretrained(f"{folder}/hybrid")
    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/hybrid")

prompt = tokenizer("The old man looked at the sea and", return_tensors="pt")
for name, model in (("teacher", teacher), ("hybrid", student)):
    tokens = model.generate(**prompt, max_new_tokens=40, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    print(f"{name}: {tokenizer.decode(tokens[0])}\n")
