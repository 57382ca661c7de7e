"""Installs `modeling_kda`, and two packages in it whose files lie in top-level folders: conversion and model_cards.

Each package is named: find_packages() would also install top-level packages called tests, examples and conversion.
"""

from setuptools import setup

setup(
    name="modeling_kda",
    version="0.1.0",
    description="From GPT-2 to Kimi Delta Attention: the linear attention lineage as one transformers model",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=["modeling_kda", "modeling_kda.conversion", "modeling_kda.model_cards"],
    package_dir={
        "modeling_kda": "modeling_kda",
        "modeling_kda.conversion": "conversion",
        "modeling_kda.model_cards": "model_cards",
    },
    package_data={"modeling_kda.conversion": ["*.txt"], "modeling_kda.model_cards": ["TEMPLATE.md"]},
    # The lower bounds are versions that were tested (torch 2.11: the kernels on a GPU). transformers 5.23 has another
    # name for the argument `cache` and does not work.
    install_requires=[
        "torch>=2.11",
        "transformers>=5.24",
        "huggingface_hub>=2.4",
        "accelerate>=1.15",
        "safetensors>=0.8",
        "peft>=0.21.2",
        "jinja2>=3.1",  # huggingface_hub fills model cards with it and does not require it
        "tqdm>=4.67",
    ],
    extras_require={
        # the kernels run under triton's interpreter in the tests, and are compiled for GPUs that are not there
        "test": [
            "pytest>=8.4",
            "pytest-xdist>=3.8",
            "ruff>=0.17,<0.18",
            "triton>=3.6; platform_system == 'Linux'",
        ],
        "demo": ["matplotlib>=3.10"],
        # on Linux the CUDA wheels of torch bring triton already
        "gpu": ["triton>=3.6"],
    },
    entry_points={"console_scripts": ["kda = modeling_kda.conversion.cli:main"]},
)
