"""Every test runs offline, on one thread, from the same random numbers."""

import os

# before transformers is imported: it reads this once
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_random_numbers():
    torch.manual_seed(0)
