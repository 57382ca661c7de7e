"""Every kernel of the chunked path compiles for GPUs that are not here, and fits them."""

import os

import pytest
import torch
from kernel_reference import SHARED_MEMORY, Recorder, compile_launch, resource_usage

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from modeling_kda import triton_delta_rule as host  # noqa: E402

KERNELS = ("prep_kernel", "prep_head_kernel", "scan_kernel", "reverse_scan_kernel", "score_gradient_kernel",
           "channel_gradient_kernel", "head_gradient_kernel")  # fmt: skip
# bytes of registers that ptxas may keep in memory: the kernel with six levels does not fit in 255 registers, nor do
# four matrices of a chunk on sm_80; and two programs of gradients on a processor that spill beat one that does not
SPILLS = {
    "prep_kernel": 384,
    "prep_head_kernel": 64,
    "score_gradient_kernel": 192,
    "channel_gradient_kernel": 448,
    "head_gradient_kernel": 192,
}


@pytest.fixture
def launches(monkeypatch):
    """The launches of a forward and a backward pass on a machine of the given kind, recorded instead of run."""

    def record(capability, K, decay, erase=True):
        found = []
        monkeypatch.setattr(host, "shared_memory_of", lambda device: SHARED_MEMORY[capability])
        for name in KERNELS:
            monkeypatch.setattr(host, name, Recorder(getattr(host, name), found))
        q = torch.empty(1, 64, 2, K, dtype=torch.bfloat16)
        beta = torch.empty(1, 64, 2)
        gate = None if decay == 0 else torch.empty(1, 64, 2, 1 if decay == 1 else K)
        state = torch.empty(1, 2, K, K)
        o, final, *saved = host._forward(
            q, q, q, beta, gate, state, None, None, None, erase, 1.0, 0, 0.0, False, False, True
        )
        host._backward(
            o, final, q, q, q, beta, gate, None, None, None, o, *saved, erase, 1.0, 0, 0.0, False, False, True
        )
        return {kernel.__name__: (kernel, args, options) for kernel, args, options in found}

    return record


@pytest.mark.parametrize(
    ("capability", "K", "decay", "names"),
    [
        (90, 128, 2, ("prep_kernel", "scan_kernel", "reverse_scan_kernel", "score_gradient_kernel")),
        (90, 128, 2, ("channel_gradient_kernel",)),
        (90, 64, 2, ("prep_kernel", "scan_kernel", "reverse_scan_kernel")),
        (90, 128, 1, ("prep_head_kernel", "scan_kernel", "reverse_scan_kernel", "head_gradient_kernel")),
        (90, 128, 0, ("head_gradient_kernel",)),
        (80, 128, 2, ("scan_kernel", "reverse_scan_kernel", "score_gradient_kernel")),
        (100, 128, 2, ("scan_kernel", "reverse_scan_kernel", "score_gradient_kernel")),
    ],
)
def test_kernels_fit_the_device(launches, capability, K, decay, names):
    recorded = launches(capability, K, decay)
    for name in names:
        compiled = compile_launch(*recorded[name], capability)
        assert compiled.metadata.shared <= SHARED_MEMORY[capability], name
        assert resource_usage(compiled.asm["cubin"])["STACK"] <= SPILLS.get(name, 128), name
