"""A saved folder carries its own code: it loads where this package is not installed, whatever else is."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import tiny_model, tokens
from hub_process import outputs
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, pipeline

import modeling_kda
from modeling_kda import STAGES, KDAForCausalLM, KDAForSequenceClassification, KDAModel

ROOT = Path(__file__).parent.parent
STAGES_IN_USE = [*STAGES, "kda"]
# what Kimi K3 has besides them
MODULES = {
    "attention_residual": "block",
    "attention_residual_block_size": 3,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 16,
    "routed_expert_hidden_size": 16,
    "mlp_gated": True,
    "hidden_act": "situ",
}
SAVED = {
    "AutoModel": KDAModel,
    "AutoModelForSequenceClassification": KDAForSequenceClassification,
    "AutoModelForCausalLM": KDAForCausalLM,
}
FAKE_FLA = '''
"""A package that takes the type `kda`, and whose operations changed."""
import transformers


class KDAConfig(transformers.PreTrainedConfig):
    model_type = "kda"


class KDAForCausalLM(transformers.PreTrainedModel):
    config: KDAConfig


def chunk_kda(query, *, other):
    raise TypeError("another signature")


transformers.AutoConfig.register("kda", KDAConfig)
transformers.AutoModelForCausalLM.register(KDAConfig, KDAForCausalLM)
'''


def start(folder, name, loads, hide=("modeling_kda",), first=(), resave=None, cache=None):
    """A new process in an empty folder, with an empty cache of remote code and nothing of this tree on its path."""
    home = folder / name
    home.mkdir()
    task = {"loads": loads, "hide": list(hide), "first": list(first), "resave": resave and str(resave)}
    (home / "task.json").write_text(json.dumps(task))
    # run from a copy: Python puts the folder of a program on its path
    (home / "hub_process.py").write_text((ROOT / "tests" / "hub_process.py").read_text())
    environment = {
        **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        "HF_HOME": str(folder / "hf" / (cache or name)),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(folder / "site"),
    }
    command = [sys.executable, "hub_process.py", "task.json"]
    return subprocess.Popen(
        command, cwd=home, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def report(process):
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    return json.loads(stdout.split("REPORT")[1]), stderr


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with saved models, what they give, and an adapter; and what a stranger's process has to load."""
    folder = tmp_path_factory.mktemp("hub")
    loads = []
    for auto_class, model_class in SAVED.items():
        model = tiny_model(STAGES_IN_USE, model_class=model_class, **MODULES)
        model.save_pretrained(folder / auto_class)
        loads.append(remember(model, auto_class, folder / auto_class, folder))
    model.name_or_path = str(folder / "AutoModelForCausalLM")
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False))
    adapted.save_pretrained(folder / "adapter")
    loads.append(remember(adapted.eval(), "AutoPeftModelForCausalLM", folder / "adapter", folder))
    (folder / "site").mkdir()
    (folder / "site" / "fla.py").write_text(FAKE_FLA)
    return folder, loads


def remember(model, auto_class, path, folder):
    ids = tokens(2, 70)
    torch.save({"ids": ids, **outputs(model, auto_class, ids)}, folder / f"{auto_class}.pt")
    return [auto_class, str(path), str(folder / f"{auto_class}.pt")]


def test_the_folder_holds_the_code_and_names_every_class(saved):
    folder, _ = saved
    package = Path(modeling_kda.__file__).parent
    expected = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    for auto_class in SAVED:
        shipped = {path.name for path in (folder / auto_class).glob("*.py")}
        assert shipped == expected
        config = json.loads((folder / auto_class / "config.json").read_text())
        assert config["auto_map"] == {
            "AutoConfig": "configuration_kda.KDAConfig",
            "AutoModel": "modeling_kda.KDAModel",
            "AutoModelForCausalLM": "modeling_kda.KDAForCausalLM",
            "AutoModelForSequenceClassification": "modeling_kda.KDAForSequenceClassification",
        }
        assert "layer_types" not in config


def test_a_stranger_loads_every_class_without_triton_and_saves_again(saved):
    folder, loads = saved
    # the last model loaded is the language model, with its code from another folder
    hidden = ["modeling_kda", "triton", "fla", "einops", "peft"]
    first, stderr = report(start(folder, "first", loads[:3], hide=hidden, resave=folder / "again"))
    assert [name for _, _, name in first] == [model_class.__name__ for model_class in SAVED.values()]
    assert all(module.startswith("transformers_modules.") for *modules, _ in first for module in modules)
    assert complaints(stderr) == []

    # what a stranger saved loads again, and an adapter finds its base and the code of its base
    again = [["AutoModelForCausalLM", str(folder / "again"), loads[2][2]], loads[3]]
    present = ["triton"] if importlib.util.find_spec("triton") else []
    second, _ = report(start(folder, "second", again, first=[*present, "fla"]))
    assert [name for _, _, name in second] == ["KDAForCausalLM", "PeftModelForCausalLM"]


def complaints(stderr):
    """What a process printed to stderr, without progress bars."""
    return [line for line in stderr.splitlines() if line.strip() and "%|" not in line]


def test_processes_that_load_at_the_same_time_do_not_disturb_each_other(saved):
    """Each copies the code into the cache of remote code; with one cache they write the same files."""
    folder, loads = saved
    processes = [start(folder, f"parallel{i}", [loads[2]], cache="shared") for i in range(4)]
    for process in processes:
        report(process)


def test_the_installed_package_works_without_triton(saved):
    folder, loads = saved
    found, stderr = report(start(folder, "installed", [loads[2]], hide=["triton"], first=["modeling_kda"]))
    assert found == [["modeling_kda.configuration_kda", "modeling_kda.modeling_kda", "KDAForCausalLM"]]
    assert complaints(stderr) == []


def test_text_generation_pipeline(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples" / "teacher")
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
    model = tiny_model(["kda", "softmax"], vocab_size=len(tokenizer), eos_token_id=None)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    generate = pipeline("text-generation", str(tmp_path), device="cpu")
    assert type(generate.model) is KDAForCausalLM
    prompts = ["Alice was beginning to get very tired", "Of Man's first disobedience, and the fruit of that tree"]
    options = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    together = generate(prompts, batch_size=2, **options)
    alone = [generate(prompt, **options) for prompt in prompts]
    assert together == alone
    assert together[0] != together[1]
