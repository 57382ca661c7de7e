"""What the commands read and write: models, text, tokens and JSON, with errors a user can act on."""

import hashlib
import json
import os
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

# importing the package registers its classes with the Auto classes
import modeling_kda  # noqa: F401


def load_config(source):
    """The configuration of a model folder or Hub id. Raises ValueError if there is none."""
    return _load(AutoConfig, source)


def load_model(source, *, device=None, dtype=torch.float32):
    """Load a causal language model, ours or any other, ready for evaluation.

    Args:
        source: a folder or a Hub id.
        device: where to put it; a CUDA device if there is one, else the CPU.
        dtype: of the weights.

    Raises: ValueError if there is no such model.
    """
    return _load(AutoModelForCausalLM, source, dtype=dtype).to(device or best_device()).eval()


def load_tokenizer(source):
    """Load the tokenizer of a folder or Hub id. Raises ValueError if there is none, or it cannot be read."""
    try:
        tokenizer = _load(AutoTokenizer, source)
    except ValueError:
        raise
    # nothing narrower: what comes from the Rust side of tokenizers is a bare Exception
    except Exception as error:
        raise ValueError(f"the tokenizer of {source} cannot be read ({' '.join(str(error).split())})") from error
    # texts are longer than a window on purpose, and cut afterwards
    tokenizer.model_max_length = int(1e30)
    return tokenizer


def _load(kind, source, **options):
    """Every way in which loading fails, as one sentence."""
    try:
        return kind.from_pretrained(source, **options)
    except (OSError, ValueError, SafetensorError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{source} cannot be loaded as a model folder or Hub id: {reason}") from error


def best_device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def read_text(path):
    """The text of a UTF-8 file, with line ends as LF.

    Raises: OSError if it cannot be read; ValueError if it is empty or not UTF-8.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be a UTF-8 text file, got a byte that is not at {error.start}") from error
    if not text.strip():
        raise ValueError(f"{path} is empty; give a text file with something in it")
    return text


def tokenize(tokenizer, texts, *, end_of_text=False):
    """Token ids of one text, or of several one after the other.

    Args:
        texts: a string, or a list of strings (documents).
        end_of_text: whether each document is followed by the tokenizer's end-of-text token.

    Returns: int64 [num_tokens].

    Raises: ValueError if there is no text, or no end-of-text token to append.
    """
    texts = [texts] if isinstance(texts, str) else list(texts)
    if not any(text.strip() for text in texts):
        raise ValueError("the text is empty; give one with something in it")
    if end_of_text and tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end-of-text token; set tokenizer.eos_token")
    ids = []
    for text in texts:
        ids += tokenizer(text, add_special_tokens=False)["input_ids"]
        if end_of_text:
            ids.append(tokenizer.eos_token_id)
    return torch.tensor(ids, dtype=torch.int64)


def check_vocabulary(ids, **models):
    """All models must know every token, and predict over the same number of them.

    Raises: ValueError naming the two sizes.
    """
    sizes = {name: model.config.vocab_size for name, model in models.items() if model is not None}
    if len(set(sizes.values())) > 1:
        told = " and ".join(f"the {name} has {size}" for name, size in sizes.items())
        raise ValueError(f"teacher and student must have the same vocabulary, but {told} tokens; use a matching pair")
    name, size = next(iter(sizes.items()))
    if int(ids.max()) >= size:
        raise ValueError(
            f"the {name} has {size} tokens, but the tokenizer made token {int(ids.max())}; use its own tokenizer"
        )


def digest(ids):
    """A short fingerprint of token ids, to tell texts apart in records."""
    return hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:16]


def write_json(path, data):
    """Write JSON so that a reader sees the old file or the new one, never half of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    beside.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    os.replace(beside, path)
