"""Experts in two processes (gloo, on CPU): sharded by width, by expert, or with everything else, and balanced."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from distributed_helpers import assert_same_gradients, step_in_shards, whole
from helpers import ROUNDING, assert_same, tiny_model, tokens
from test_balancing import RULES, balance, skewed_router, some_tokens
from transformers.distributed import DistributedConfig

from modeling_kda import KDAForCausalLM

WORLD = 2
KINDS = {
    "kimi_k3": {"mlp_gated": True, "hidden_act": "situ", "mlp_bias": False, "routed_expert_hidden_size": 16},
    "gpt2": {"shared_intermediate_size": 64},
}
PLANS = {
    "tensor_parallel": {"tp_size": WORLD},
    "expert_parallel": {"tp_size": WORLD, "ep_size": WORLD},
    "fully_sharded": {"fsdp_size": WORLD},
}


def model_with_experts(kind):
    fields = {"num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 16}
    model = tiny_model(["kda", "softmax"], **{**fields, **KINDS[kind]})
    model.model.layers[1].mlp.router.selection_bias.copy_(torch.linspace(-0.2, 0.2, 8))
    return model


def batch():
    return tokens(2, 12)


def join_group(rank, folder):
    torch.set_num_threads(1)
    # transformers reads where it is from here
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    results = {(plan, kind): sharded_run(folder, plan, kind) for plan in PLANS for kind in KINDS}
    results["bf16"] = bf16_run(folder)
    results["balanced"] = {name: balance_a_part(rank, make()) for name, make in RULES.items()}
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def sharded_run(folder, plan, kind):
    return step_in_shards(f"{folder}/{kind}", f"{folder}/{plan}-{kind}", PLANS[plan], batch(), new_tokens=3)


def bf16_run(folder):
    """The router and its bias stay fp32, beside experts in bf16."""
    config = DistributedConfig(**PLANS["fully_sharded"])
    model = KDAForCausalLM.from_pretrained(f"{folder}/kimi_k3", dtype=torch.bfloat16, distributed_config=config)
    output = model(batch(), labels=batch())
    output.loss.backward()
    mlp = model.model.layers[1].mlp
    tensors = {"router": mlp.router.weight, "bias": mlp.router.selection_bias, "experts": mlp.experts.down_proj}
    gradient = whole(mlp.router.weight.grad)
    return {"loss": output.loss.detach(), "dtypes": {n: t.dtype for n, t in tensors.items()}, "gradient": gradient}


def balance_a_part(rank, rule):
    router = skewed_router()
    loads = balance(rule, router, some_tokens(400).split([100, 300])[rank], steps=3)
    return router.selection_bias, loads[-1]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What every rank saw; starting processes is the slow part, so that all runs share them."""
    folder = tmp_path_factory.mktemp("ranks")
    for kind in KINDS:
        model_with_experts(kind).save_pretrained(folder / kind)
    mp.start_processes(join_group, (str(folder),), nprocs=WORLD, start_method="spawn")
    return folder, [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", PLANS)
def test_shards_compute_and_save_what_one_process_does(results, plan, kind):
    folder, ranks = results
    model = model_with_experts(kind)
    output = model(batch(), labels=batch())
    output.loss.backward()
    text = model.generate(batch(), max_new_tokens=3, do_sample=False)
    for result in (rank[plan, kind] for rank in ranks):
        assert_same(result["logits"], output.logits, ROUNDING)
        assert torch.equal(result["text"], text)
        assert_same_gradients(result["grads"], model)
    saved = KDAForCausalLM.from_pretrained(folder / f"{plan}-{kind}").state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())


def test_experts_are_sharded(results):
    _, ranks = results
    experts = {f"model.layers.1.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")}
    for plan in PLANS:
        assert experts <= ranks[0][plan, "kimi_k3"]["sharded"]
    # every expert's bias goes where the expert is; sharded by width, biases would be added once per rank
    biased = {f"model.layers.1.mlp.experts.{name}" for name in ("up_proj", "up_bias", "down_proj", "down_bias")}
    assert biased <= ranks[0]["expert_parallel", "gpt2"]["sharded"]
    assert not biased & ranks[0]["tensor_parallel", "gpt2"]["sharded"]


def test_the_router_stays_fp32_in_a_sharded_bf16_model(results):
    folder, ranks = results
    model = KDAForCausalLM.from_pretrained(folder / "kimi_k3", dtype=torch.bfloat16)
    output = model(batch(), labels=batch())
    output.loss.backward()
    for result in (rank["bf16"] for rank in ranks):
        assert result["dtypes"] == {"router": torch.float32, "bias": torch.float32, "experts": torch.bfloat16}
        assert_same(result["loss"], output.loss)
        assert_same(result["gradient"], model.model.layers[1].mlp.router.weight.grad)


@pytest.mark.parametrize("name", RULES)
def test_two_processes_with_part_of_the_tokens_each_set_the_bias_of_one(results, name):
    router = skewed_router()
    loads = balance(RULES[name](), router, some_tokens(400), steps=3)
    for rank in results[1]:
        bias, load = rank["balanced"][name]
        assert torch.equal(load, loads[-1])
        assert torch.equal(bias, router.selection_bias)
