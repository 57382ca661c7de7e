"""The command `kda`: its arguments, and what happens to errors. A wrong input ends with one line and exit code 2."""

import argparse
import sys

from .commands import (
    convert_command,
    distill_command,
    evaluate_command,
    generate_command,
    info_command,
    upcycle_command,
)

STAGE_PATTERN = """\
STAGES is a stage name for all layers (softmax, linear, delta, ssd, gated_delta, kda, mla), or a pattern from the first
layer up, separated by commas, in which NAME*N stands for N layers. A pattern shorter than the model repeats:
    kda                 every layer KDA
    kda*3,softmax       three KDA layers, then one with attention, and so on
    gated_delta,softmax alternating
    kimi                as Kimi Linear: every fourth layer and the last one mla, the others kda

The parts of Kimi Linear and Kimi K3 change nothing of what a model computes when they are added:
    mla layers                              keep one latent of the model's width; only a smaller one, which
                                            --set kv_lora_rank=N asks for, loses something
    --set mla_output_gate=true              a gate on the outputs of mla layers
    --set attention_residual=block          layers read mixtures of what earlier blocks made (or: full)
    --experts latent --set num_experts=N    N experts in a latent space, beside the MLP
    --experts copies --set num_experts=N    N copies of the MLP, of which each token goes to 2
    --experts partition --set num_experts=N the MLP cut into N experts; only if tokens go to fewer than all, which
                                            --set num_experts_per_token=K asks for, it loses something"""
FORMAT_NAMES = """\
The formats:
    ours         a KDAForCausalLM; loads with trust_remote_code where this package is not installed
    moonshot     the names of released Kimi Linear and Kimi K3 checkpoints; transformers' kimi_linear loads it, and it
                 is what inference engines expect
    kimi_linear  the names inside transformers' KimiLinearForCausalLM
    fla          a KDAForCausalLM of flash-linear-attention"""


def main(argv=None):
    """Run one command. Returns the exit code: 0, 2 for a wrong input, 130 when interrupted."""
    arguments = build_parser().parse_args(argv)
    try:
        _quiet_loading()
        arguments.command(arguments)
    except KeyboardInterrupt:
        print("kda: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        if not _is_about_the_input(error):
            raise
        print(f"kda: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage above it."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (try '{self.prog} --help')\n")


def build_parser():
    parser = OneLineParser(prog="kda", description="From GPT-2 to Kimi Delta Attention and back to numbers.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=OneLineParser)
    _add_upcycle(commands)
    _add_convert(commands)
    _add_distill(commands)
    _add_evaluate(commands)
    _add_generate(commands)
    _add_info(commands)
    return parser


def _add_upcycle(commands):
    parser = commands.add_parser(
        "upcycle",
        help="turn a GPT-2, or a model of ours, into another stage",
        description="Turn a GPT-2 (folder or Hub id), or a model of this project, into any stage of the lineage.",
        epilog=STAGE_PATTERN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SOURCE", help="model folder or Hub id, such as gpt2")
    parser.add_argument("--stages", required=True, help="stage, or pattern of stages (see below)")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write; must not exist")
    parser.add_argument("--experts", metavar="KIND", help="make experts of the MLPs (see below)")
    parser.add_argument("--calibrate", metavar="FILE", help="text to fit the new mixers to")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="a field of the new configuration, such as short_conv_kernel_size=0 (repeatable)",
    )
    parser.set_defaults(command=upcycle_command)


def _add_convert(commands):
    parser = commands.add_parser(
        "convert",
        help="weights and configuration between our format and those of transformers, Moonshot and fla",
        description="Write a model in another format. What SOURCE is follows from its files.",
        epilog=FORMAT_NAMES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SOURCE", help="model folder or Hub id")
    parser.add_argument("output", metavar="OUTPUT", help="folder to write; must not exist")
    parser.add_argument("--to", required=True, choices=("ours", "kimi_linear", "moonshot", "fla"), help="see below")
    parser.add_argument("--mxfp4", action="store_true", help="routed experts in 4 bits, as Kimi K3 has them")
    parser.set_defaults(command=convert_command)


def _add_distill(commands):
    parser = commands.add_parser(
        "distill",
        help="heal a student: match its teacher layer by layer, then in its predictions",
        description="Heal an upcycled student. After an interruption the same command goes on where it was.",
    )
    parser.add_argument("student", metavar="STUDENT", help="folder of an upcycled model")
    parser.add_argument("--teacher", required=True, metavar="MODEL", help="the model it came from")
    parser.add_argument("--text", required=True, nargs="+", metavar="FILE", help="training text, one document a file")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the trained model")
    # no defaults here: those of conversion.distillation.Recipe hold
    recipe = {"default": argparse.SUPPRESS}
    count, number = {"type": int, "metavar": "N", **recipe}, {"type": float, "metavar": "X", **recipe}
    parser.add_argument("--layerwise-steps", help="steps of layer-wise matching (500)", **count)
    parser.add_argument("--kl-steps", help="steps on the teacher's predictions (1000)", **count)
    parser.add_argument("--block-size", help="tokens per row (the positions of the model less one)", **count)
    parser.add_argument("--batch-size", help="rows per forward pass (4)", **count)
    parser.add_argument("--accumulate", help="forward passes per step (1)", **count)
    parser.add_argument("--layerwise-rate", help="learning rate of layer-wise matching (1e-3)", **number)
    parser.add_argument("--mixer-rate", help="learning rate of the mixers after that (3e-4)", **number)
    parser.add_argument("--other-rate", help="learning rate of everything else (1e-4)", **number)
    parser.add_argument("--weight-decay", help="of matrices (0)", **number)
    parser.add_argument("--drop-positions", help="fraction of the KL steps in which positions fade out (0)", **number)
    parser.add_argument("--warmup", help="fraction of a phase with rising rates (0.1)", **number)
    parser.add_argument("--save-every", help="steps between checkpoints (100)", **count)
    parser.add_argument("--seed", help="of the order of the rows (0)", **count)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16", **recipe)
    parser.add_argument("--checkpoint-activations", action="store_true", help="save memory, recompute", **recipe)
    parser.set_defaults(command=distill_command)


def _add_evaluate(commands):
    parser = commands.add_parser(
        "evaluate",
        help="perplexity, agreement with the teacher, recall, cache size and speed, as JSON",
        description="Measure a model, and its teacher on the same text. The protocol is named in the JSON.",
    )
    parser.add_argument("model", metavar="MODEL", help="model folder or Hub id")
    parser.add_argument("--text", required=True, nargs="+", metavar="FILE", help="held-out text")
    parser.add_argument("--teacher", metavar="MODEL", help="compare with this model")
    parser.add_argument("--window", type=int, metavar="N", help="tokens per window (positions of the model less one)")
    parser.add_argument("--max-windows", type=int, metavar="N", help="only the first N windows")
    parser.add_argument("--batch-size", type=int, default=4, metavar="N", help="windows per forward pass (4)")
    parser.add_argument(
        "--decode", type=int, nargs="+", default=[], metavar="N", help="time decoding after N tokens of context"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random sequences for recall (0)")
    parser.add_argument("--json", metavar="FILE", help="write everything that was measured to this file")
    parser.add_argument("--card", metavar="FILE", help="write a model card from it to this file")
    parser.set_defaults(command=evaluate_command)


def _add_generate(commands):
    parser = commands.add_parser("generate", help="continue a prompt", description="Continue a prompt.")
    parser.add_argument("model", metavar="MODEL", help="model folder or Hub id")
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=100, metavar="N", help="(100)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 takes the likeliest token (0)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling (0)")
    parser.set_defaults(command=generate_command)


def _add_info(commands):
    parser = commands.add_parser(
        "info",
        help="stages, parameters and cache size of a model, without loading its weights",
        description="Show a model's layers: stage, parameters, what it remembers, and how its cache grows.",
    )
    parser.add_argument("model", metavar="MODEL", help="model folder or Hub id")
    parser.set_defaults(command=info_command)


def _quiet_loading():
    """Only what matters on stderr: no bars for reading weights, no hints about long texts."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    # a Hub that cannot be reached is one line at the end, not one per try
    hub_logging.set_verbosity_error()


def _is_about_the_input(error):
    """Whether this package or the system raised this to tell the user something; other errors are our mistakes."""
    if isinstance(error, OSError):
        return True
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    return last.tb_frame.f_globals.get("__name__", "").startswith("modeling_kda")


if __name__ == "__main__":
    sys.exit(main())
