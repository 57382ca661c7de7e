"""Learned positions faded out during training, so that a model reads texts of any length afterwards.

Recurrent layers know the order of their tokens without a table of positions, and causal attention can learn it from
them. Taking the table away at once costs much; taking it away slowly, little (DroPE, arXiv 2512.12167, drops positions
after pretraining and recalibrates for less than a hundredth of it).
"""

from transformers import TrainerCallback


class FadingPositions(TrainerCallback):
    """Multiplies a model's learned positions with a factor that falls from 1 to 0, step by step, and then stays there.

    The factor follows from the number of the step alone, so that an interrupted run goes on where it was.

    Args:
        share: of the training steps after which the factor is 0, above 0 and at most 1.

    Attributes:
        factor: of the current step.
    """

    def __init__(self, share: float):
        self.share, self.factor, self._hook = share, 1.0, None

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        tables = [module for name, module in model.named_modules() if name.split(".")[-1] == "embed_positions"]
        assert len(tables) == 1, f"expected one table of positions, found {len(tables)}"
        self._hook = tables[0].register_forward_hook(lambda module, args, positions: positions * self.factor)

    def on_step_begin(self, args, state, control, **kwargs):
        self.factor = max(0.0, 1 - state.global_step / (self.share * state.max_steps))

    def on_train_end(self, args, state, control, **kwargs):
        self._hook.remove()


def drop_positions(model):
    """Remove the learned positions of a model of ours, in place: the same as setting all of them to zero."""
    model.config.position_embedding = "none"
    del model.base_model.embed_positions
