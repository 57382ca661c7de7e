"""Heals an upcycled student: first layer by layer, then on the teacher's predictions, in a run that can be killed.

All work is kept in `<output>.unfinished` until the student is finished; then one rename makes it `<output>`. A second
call with the same arguments goes on from the last complete checkpoint of the phase that was interrupted.
"""

import hashlib
import json
import math
import os
import shutil
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import PrinterCallback, ProgressCallback, TrainingArguments

from .balancing import QuantileBalancing
from .blocks import PackedBlocks, pad_on_the_right
from .checkpoint import read_json
from .cost import describe, environment, last_position
from .files import best_device, check_vocabulary, digest, tokenize, write_json
from .positions import FadingPositions, drop_positions
from .trainers import LayerwiseTrainer, LogitTrainer, layers_to_match, output_variances, parameter_groups

RECORD = "distillation.json"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to distil. The rates are for small models; larger ones want smaller rates.

    Attributes:
        layerwise_steps: steps of layer-wise matching, only the mixers that are not the teacher's learn; 0 to skip.
        kl_steps: steps of KL(teacher || student) on the logits, everything learns; 0 to skip.
        block_size: tokens per training row; one less than the positions both models know if not given.
        batch_size: rows per device and forward pass.
        accumulate: forward passes per step.
        layerwise_rate: peak learning rate of the first phase.
        mixer_rate: peak learning rate of the mixers in the second phase.
        other_rate: peak learning rate of everything else in the second phase.
        weight_decay: of matrices only.
        drop_positions: fraction of the second phase in which learned positions fade out, to leave a student without
            them that reads any length; 0 to keep them.
        warmup: fraction of a phase in which rates rise; then they fall along a cosine to a tenth of the peak.
        save_every: steps between checkpoints.
        seed: of the order of the rows.
        bf16: compute in bfloat16 where that is safe; weights stay in float32.
        checkpoint_activations: recompute activations instead of keeping them in the second phase.
    """

    layerwise_steps: int = 500
    kl_steps: int = 1000
    block_size: int | None = None
    batch_size: int = 4
    accumulate: int = 1
    layerwise_rate: float = 1e-3
    mixer_rate: float = 3e-4
    other_rate: float = 1e-4
    weight_decay: float = 0.0
    drop_positions: float = 0.0
    warmup: float = 0.1
    save_every: int = 100
    seed: int = 0
    bf16: bool = False
    checkpoint_activations: bool = False

    def __post_init__(self):
        for name in ("layerwise_steps", "kl_steps", "layerwise_rate", "mixer_rate", "other_rate", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and must not be negative, got {getattr(self, name)}")
        for name in ("batch_size", "accumulate", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("warmup", "drop_positions"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be a fraction between 0 and 1, got {getattr(self, name)}")
        if self.layerwise_steps + self.kl_steps == 0:
            raise ValueError("layerwise_steps and kl_steps are both 0; ask for steps in at least one phase")
        if self.drop_positions and not self.kl_steps:
            raise ValueError("drop_positions needs kl_steps, in which the positions fade out, got kl_steps=0")


def distill(student, teacher, text, output, *, tokenizer, progress=True, **recipe):
    """Train a student towards its teacher and save it.

    Args:
        student: a `KDAForCausalLM`; trained in place, in float32. To go on with an interrupted run, give it as it was
            at first.
        teacher: the model it came from: a softmax-stage model of ours or a `GPT2LMHeadModel`.
        text: training text, a string or a list of strings (documents, each followed by end-of-text).
        output: folder for the trained model, its tokenizer and `distillation.json`. If it exists it must be the
            result of the same call, which then returns at once.
        tokenizer: of both models.
        progress: show progress bars.
        recipe: fields of `Recipe`.

    Returns: the record of the run, as in `distillation.json`.

    Raises: ValueError for vocabularies or shapes that differ, an empty text, an output that holds something else, or
        an unfinished run with other arguments.
    """
    recipe = Recipe(**recipe)
    ids = tokenize(tokenizer, text, end_of_text=True)
    check_vocabulary(ids, student=student, teacher=teacher)
    _check_shapes(student, teacher, recipe)
    block_size = _block_size(recipe, student, teacher)
    blocks = PackedBlocks(ids, block_size)
    arguments = {
        "recipe": {**asdict(recipe), "block_size": block_size},
        "student": {**describe(student), "weights": fingerprint(student)},
        "teacher": {**describe(teacher), "weights": fingerprint(teacher)},
        "text": {"tokens": len(ids), "sha256_of_tokens": digest(ids)},
    }
    output = Path(output)
    work = output.with_name(output.name + ".unfinished")
    finished = _finished_record(output, arguments)
    if finished is not None:
        shutil.rmtree(work, ignore_errors=True)
        return finished
    _open_work_folder(work, arguments)

    student.float()
    pad = partial(pad_on_the_right, pad_token_id=tokenizer.eos_token_id)
    common = {"student": student, "teacher": teacher, "blocks": blocks, "collate": pad}
    run = partial(_run_phase, **common, recipe=recipe, progress=progress)
    phases = []
    if recipe.layerwise_steps:
        phases.append(run("layerwise", recipe.layerwise_steps, work))
    if recipe.kl_steps:
        phases.append(run("kl", recipe.kl_steps, work))
    if recipe.drop_positions:
        drop_positions(student)
    record = {**arguments, "phases": phases, "environment": environment(student)}
    if PartialState().is_main_process:
        _publish(student, tokenizer, record, work, output)
    return record


def _block_size(recipe, *models):
    if recipe.block_size is None:
        return min(model.config.max_position_embeddings for model in models) - 1
    limit = min(last_position(model.config) or recipe.block_size for model in models)
    if recipe.block_size > limit:
        raise ValueError(f"block_size must not be above the {limit} positions of the models, got {recipe.block_size}")
    return recipe.block_size


def fingerprint(model):
    """Tells models of one shape apart: a hash of the first numbers of every parameter."""
    starts = [parameter.detach().flatten()[:256].float().cpu() for parameter in model.parameters()]
    return hashlib.sha256(torch.cat(starts).numpy().tobytes()).hexdigest()[:16]


def _check_shapes(student, teacher, recipe):
    if recipe.drop_positions and student.config.position_embedding != "learned":
        raise ValueError("drop_positions needs a student with learned positions, this one has none; set it to 0")
    if not recipe.layerwise_steps:
        return
    for name in ("num_hidden_layers", "hidden_size"):
        wanted, got = getattr(teacher.config, name), getattr(student.config, name)
        if wanted != got:
            raise ValueError(
                f"layer-wise matching needs the same {name}, but the teacher has {wanted} and the student {got}; "
                "set layerwise_steps to 0 to train on the logits alone"
            )
    if not layers_to_match(student):
        raise ValueError("the student has no recurrent layer and no small latent to match; set layerwise_steps to 0")


def _finished_record(output, arguments):
    """The record of a run that already made `output`, or None if there is no such folder."""
    if not output.exists():
        return None
    if (output / RECORD).is_file():
        record = read_json(output / RECORD)
        if all(record.get(name) == value for name, value in _as_json(arguments).items()):
            return record
    raise ValueError(f"{output} exists and was not made by this run; choose another output or remove it")


def _open_work_folder(work, arguments):
    """Start a run, or make sure that the one found there is the same."""
    path = work / "run.json"
    if not path.is_file():
        write_json(path, arguments)
        return
    before, now = _flat(read_json(path)), _flat(_as_json(arguments))
    different = [name for name in now if before.get(name) != now[name]]
    if different:
        name = different[0]
        raise ValueError(
            f"{work} holds an unfinished run with other arguments ({name} was {before.get(name)}, now {now[name]}); "
            "repeat those, choose another output, or remove the folder"
        )


def _as_json(data):
    return json.loads(json.dumps(data))


def _flat(data):
    return {f"{part}.{name}": value for part, fields in data.items() for name, value in fields.items()}


def _run_phase(name, steps, work, *, student, teacher, blocks, collate, recipe, progress):
    """Run one phase to its end, from its last complete checkpoint if there is one. Returns its record."""
    folder = work / name
    checkpoint = latest_checkpoint(folder)
    if checkpoint is None or _step(checkpoint) < steps:
        trainer = _build_trainer(name, steps, folder, student, teacher, blocks, collate, recipe)
        trainer.remove_callback(PrinterCallback)
        trainer.remove_callback(ProgressCallback)
        if progress:
            trainer.add_callback(LossBar(name))
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        trainer.accelerator.wait_for_everyone()
        checkpoint = latest_checkpoint(folder)
    else:
        saved = type(student).from_pretrained(checkpoint, dtype=torch.float32)
        student.load_state_dict(saved.state_dict())
    student.requires_grad_(True)
    history = read_json(checkpoint / "trainer_state.json")["log_history"]
    losses = [{"step": entry["step"], "loss": entry["loss"]} for entry in history if "loss" in entry]
    return {"phase": name, "steps": steps, "losses": losses}


def _build_trainer(name, steps, folder, student, teacher, blocks, collate, recipe):
    on_cpu = best_device().type == "cpu"
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=recipe.batch_size,
        gradient_accumulation_steps=recipe.accumulate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=int(steps * recipe.warmup),
        max_grad_norm=1.0,
        logging_steps=max(1, steps // 20),
        save_steps=recipe.save_every,
        save_total_limit=2,
        seed=recipe.seed,
        bf16=recipe.bf16,
        activation_checkpointing=recipe.checkpoint_activations and name == "kl",
        remove_unused_columns=False,
        dataloader_pin_memory=not on_cpu,
        use_cpu=on_cpu,
        report_to="none",
    )
    # one process, one device: several devices are used with torchrun, not by splitting batches inside a process
    arguments._n_gpu = min(arguments.n_gpu, 1)
    common = {"args": arguments, "train_dataset": blocks, "data_collator": collate, "teacher": teacher}
    if name == "layerwise":
        student.requires_grad_(False)
        for i in layers_to_match(student):
            student.base_model.layers[i].mixer.requires_grad_(True)
        rates = {"mixer_rate": recipe.layerwise_rate, "other_rate": 0.0}
        variances = output_variances(teacher.to(arguments.device).eval(), blocks.blocks[:16])
        kind = partial(LayerwiseTrainer, variances=variances)
    else:
        rates = {"mixer_rate": recipe.mixer_rate, "other_rate": recipe.other_rate}
        kind = LogitTrainer
    groups = parameter_groups(student, weight_decay=recipe.weight_decay, **rates)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    trainer = kind(student, optimizers=(optimizer, None), **common)
    if name == "kl" and any(student.config.uses_experts(i) for i in range(student.config.num_hidden_layers)):
        trainer.add_callback(QuantileBalancing())
    if name == "kl" and recipe.drop_positions:
        trainer.add_callback(FadingPositions(recipe.drop_positions))
    return trainer


def latest_checkpoint(folder):
    """The complete checkpoint with the most steps, or None. Half-written ones are removed.

    The Trainer writes `trainer_state.json` last, so a checkpoint with a readable one is complete.
    """
    complete = []
    for checkpoint in folder.glob("checkpoint-*"):
        try:
            read_json(checkpoint / "trainer_state.json")
            complete.append(checkpoint)
        except ValueError:
            shutil.rmtree(checkpoint)
    return max(complete, key=_step, default=None)


def _step(checkpoint):
    return int(checkpoint.name.rsplit("-", 1)[1])


def _publish(student, tokenizer, record, work, output):
    """Everything is written beside, then one rename makes it the output."""
    staged = work / "model"
    shutil.rmtree(staged, ignore_errors=True)
    student.save_pretrained(staged)
    tokenizer.save_pretrained(staged)
    write_json(staged / RECORD, record)
    os.replace(staged, output)
    shutil.rmtree(work)


class LossBar(ProgressCallback):
    """One progress bar a phase with the loss in it, instead of a line of log for every report."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None:
            self.training_bar.set_description(self.name)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is not None and logs and "loss" in logs:
            self.training_bar.set_postfix(loss=f"{float(logs['loss']):.4f}")
