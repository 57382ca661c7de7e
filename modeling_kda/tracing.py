"""Whether the host may look at numbers on the device."""

import torch
from transformers.utils import is_torchdynamo_compiling


def numbers_are_hidden():
    """True while torch.compile or torch.export traces, and while a CUDA graph is captured: what depends on numbers
    must then be decided on the device, or believed."""
    # the order matters: dynamo must not see the second call
    return is_torchdynamo_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
