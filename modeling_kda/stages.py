"""What distinguishes the stages of the lineage, as a table.

Every linear stage is one recurrence with two independent choices (the maths and its letters are in ``delta_rule.py``):

|                                                      | forgets nothing | one rate per head | one rate per channel |
|------------------------------------------------------|-----------------|-------------------|----------------------|
| adds (writes v)                                      | ``linear``      | ``ssd``           |                      |
| corrects (writes v minus what k already retrieves)   | ``delta``       | ``gated_delta``   | ``kda``              |

``softmax`` is where the lineage starts; ``mla`` is the attention that stands between the KDA layers of Kimi Linear.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """The facts of one stage; everything else about a mixer follows from them and the config.

    Attributes:
        mixer: ``"softmax"`` (keys and values are kept), ``"latent"`` (what they are made from is kept) or
            ``"recurrent"`` (a state of fixed size is kept).
        layer_type: the word transformers uses for such a layer in ``layer_types``.
        memory: the memory mechanism in a few words, for tables.
        erase: whether a token first subtracts what its key already retrieves (the delta rule).
        decay: ``None``, ``"head"`` (one forget factor per head) or ``"channel"`` (one per key channel).
        write: write strength of a token: ``"one"``, ``"beta"`` (a learned sigmoid) or ``"step"`` (Mamba-2's step size,
            which also sets the decay).
        unit_keys: whether queries and keys are scaled to unit length.
        normaliser: whether q and k pass a positive feature map and the output is divided by the sum of its weights.
    """

    mixer: str
    layer_type: str
    memory: str
    erase: bool = False
    decay: str | None = None
    write: str = "one"
    unit_keys: bool = False
    normaliser: bool = False


STAGES = {
    "softmax": Stage("softmax", "full_attention", "keeps every key and value"),
    "linear": Stage("recurrent", "linear_attention", "adds to one state, forgets nothing", normaliser=True),
    "delta": Stage(
        "recurrent", "linear_attention", "reads before it writes", erase=True, write="beta", unit_keys=True
    ),
    "ssd": Stage("recurrent", "linear_attention", "adds, forgets per head", decay="head", write="step"),
    "gated_delta": Stage(
        "recurrent",
        "linear_attention",
        "reads before it writes, forgets per head",
        erase=True,
        decay="head",
        write="beta",
        unit_keys=True,
    ),
    "kda": Stage(
        "recurrent",
        "linear_attention",
        "reads before it writes, forgets per channel",
        erase=True,
        decay="channel",
        write="beta",
        unit_keys=True,
    ),
    "mla": Stage("latent", "full_attention", "keeps one latent per token"),
}
