"""A program that test_hub.py starts: loads saved folders as a stranger would, without this package, and reports.

Usage: python hub_process.py task.json, with {"hide": [modules], "first": [modules to import before anything else],
"loads": [[Auto class, folder, file with inputs and expected outputs]], "resave": folder for the last model, or null}.
"""

import json
import sys
from pathlib import Path


def main(task):
    for hidden in task["hide"]:
        # None makes every import of it fail, and importlib.util.find_spec find nothing
        sys.modules[hidden] = None
    for module in task["first"]:
        __import__(module)
    import torch
    import transformers

    torch.set_num_threads(1)
    classes = []
    for auto_class, folder, file in task["loads"]:
        if "Peft" not in auto_class:
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
            assert config.model_type == "kda_hybrid"
        model = load(auto_class, folder).eval()
        saved = torch.load(file)
        for name, actual in outputs(model, auto_class, saved["ids"]).items():
            assert torch.equal(actual, saved[name]), f"{auto_class} from {folder}: {name} differs"
        classes.append([type(model.config).__module__, type(model).__module__, type(model).__name__])
    if task["resave"]:
        model.save_pretrained(task["resave"])
    print("REPORT" + json.dumps(classes))


def load(auto_class, folder):
    if auto_class == "AutoPeftModelForCausalLM":
        import peft as library
    else:
        import transformers as library
    return getattr(library, auto_class).from_pretrained(folder, trust_remote_code=True)


def outputs(model, auto_class, ids):
    """What is compared: logits or hidden states, and for language models also a cached step and a text."""
    import torch

    with torch.no_grad():
        result = {"forward": model(ids)[0]}
        if "CausalLM" in auto_class:
            first = model(ids[:, :5], use_cache=True)
            result["step"] = model(ids[:, 5:6], cache=first.cache).logits
            mask = torch.ones_like(ids)
            result["text"] = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    return result


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
