"""Fine-tune a model of any stage on a text with transformers' Trainer, with or without LoRA.

    python examples/finetune.py MODEL --text FILE --output DIR [--lora] [--steps 100]

MODEL is a folder that `kda upcycle` or `kda distill` wrote, or a Hub id. With --lora only adapters are trained and
saved; their default targets reach the query, key, value and output projections of every mixer.
"""

import argparse

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import modeling_kda  # noqa: F401  registers the models with transformers' Auto classes
from modeling_kda.conversion.blocks import PackedBlocks, pad_on_the_right
from modeling_kda.conversion.files import read_text, tokenize

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("--text", required=True)
parser.add_argument("--output", required=True)
parser.add_argument("--lora", action="store_true", help="train LoRA adapters of rank 8 instead of all weights")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--block-size", type=int, default=256, help="tokens per row")
arguments = parser.parse_args()

model = AutoModelForCausalLM.from_pretrained(arguments.model)
tokenizer = AutoTokenizer.from_pretrained(arguments.model)
if arguments.lora:
    model = get_peft_model(model, LoraConfig(r=8, task_type="CAUSAL_LM"))
    model.print_trainable_parameters()

rows = PackedBlocks(tokenize(tokenizer, [read_text(arguments.text)], end_of_text=True), arguments.block_size)
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=arguments.output,
        max_steps=arguments.steps,
        per_device_train_batch_size=4,
        learning_rate=1e-3 if arguments.lora else 1e-4,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=rows,
    data_collator=pad_on_the_right,
)
trainer.train()
trainer.save_model(arguments.output)
tokenizer.save_pretrained(arguments.output)
