"""Several processes (gloo, on CPU): DDP, FSDP2 and tensor parallelism give the numbers of one process."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from distributed_helpers import assert_same_gradients, step_in_shards
from helpers import ROUNDING, assert_same, tiny_model, tokens
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed import DistributedConfig

from modeling_kda import KDAForCausalLM

STAGES_IN_USE = ["kda", "softmax", "ssd"]
# what transformers shards
SOURCE = {"stages": [*STAGES_IN_USE, "mla"], "mlp_gated": True, "q_lora_rank": 8, "mla_output_gate": True}
SOURCE |= {"attention_residual": "block", "attention_residual_block_size": 2}
WORLD = 2
PLANS = {"tensor_parallel": {"tp_size": WORLD, "tp_plan": "auto"}, "fully_sharded": {"fsdp_size": WORLD}}
# losses of two bf16 runs after steps that differ by rounding
BF16_LOSS = 2e-2


def batch():
    return tokens(4, 20)


def mixed_model():
    """bf16 with fp32 decays, as from_pretrained(dtype=torch.bfloat16) gives it."""
    model = tiny_model(STAGES_IN_USE).train().to(torch.bfloat16)
    for layer in model.model.layers:
        if hasattr(layer.mixer, "decay"):
            layer.mixer.decay.float()
    return model


def join_group(rank, folder):
    torch.set_num_threads(1)
    # transformers reads where it is from here
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    torch.save(every_run(rank, folder), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def ddp_steps(rank):
    # a parameter without a gradient would be an error in the second step
    model = DistributedDataParallel(tiny_model(STAGES_IN_USE).train())
    ids = batch()[rank * 2 :][:2]
    for _ in range(2):
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
    return {"loss": loss.detach(), "grads": {name: p.grad for name, p in model.module.named_parameters()}}


def shard(model, **fields):
    """As transformers' own plan does it: the fp32 parameters in groups of their own, then blocks, then the rest."""
    for layer in model.model.layers:
        if hasattr(layer.mixer, "decay"):
            fully_shard(layer.mixer.decay)
        fully_shard(layer, **fields)
    return fully_shard(model, **fields)


def train(model, ids, steps=3):
    # small steps: with large ones losses in bf16 drift apart by more than a mistake would make
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for _ in range(steps):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def fsdp_steps(rank):
    results = {}
    for checkpointing in (False, True):
        model = mixed_model()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        shard(model)
        results[checkpointing] = train(model, batch())
        dtypes = {name: p.dtype for name, p in model.named_parameters()}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(tiny_model(STAGES_IN_USE).train(), mp_policy=policy)
    return {"plain": results[False], "checkpointed": results[True], "cast": train(model, batch()), "dtypes": dtypes}


def transformers_run(folder, kind):
    return step_in_shards(f"{folder}/source", f"{folder}/{kind}", PLANS[kind], batch(), new_tokens=4)


def every_run(rank, folder):
    own = {kind: transformers_run(folder, kind) for kind in PLANS}
    return {"ddp": ddp_steps(rank), "fsdp": fsdp_steps(rank), "folder": folder, **own}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What every rank saw; starting processes is the slow part, so that all runs share them."""
    folder = tmp_path_factory.mktemp("ranks")
    tiny_model(**SOURCE).save_pretrained(folder / "source")
    mp.start_processes(join_group, (str(folder),), nprocs=WORLD, start_method="spawn")
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


def test_ddp_has_the_gradients_of_one_process(results):
    model = tiny_model(STAGES_IN_USE).train()
    loss = model(batch(), labels=batch()).loss
    loss.backward()
    assert_same(sum(result["ddp"]["loss"] for result in results) / WORLD, loss)
    for result in results:
        assert_same_gradients(result["ddp"]["grads"], model)


@pytest.mark.parametrize("kind", ["plain", "checkpointed", "cast"])
def test_fsdp2_has_the_losses_of_one_process(results, kind):
    """`plain` and `checkpointed`: bf16 weights with fp32 decays; `cast`: fp32 weights that compute in bf16."""
    expected = train(mixed_model(), batch())
    assert expected[-1] < expected[0]
    for result in results:
        assert_same(result["fsdp"][kind], expected, BF16_LOSS)
    if kind == "plain":
        assert_same(results[0]["fsdp"][kind][0], expected[0])


def test_fsdp2_keeps_the_decays_in_fp32(results):
    for result in results:
        dtypes = result["fsdp"]["dtypes"]
        assert {dtype for name, dtype in dtypes.items() if ".decay." in name} == {torch.float32}
        assert {dtype for name, dtype in dtypes.items() if ".decay." not in name} == {torch.bfloat16}


@pytest.mark.parametrize("kind", PLANS)
def test_models_that_transformers_shards_compute_and_save_the_same(results, kind):
    model = tiny_model(**SOURCE)
    output = model(batch(), labels=batch())
    output.loss.backward()
    text = model.generate(batch(), max_new_tokens=4, do_sample=False)
    for result in results:
        assert_same(result[kind]["logits"], output.logits, ROUNDING)
        assert_same_gradients(result[kind]["grads"], model)
        assert torch.equal(result[kind]["text"], text)
    saved = KDAForCausalLM.from_pretrained(f"{results[0]['folder']}/{kind}")
    assert all(torch.equal(p, q) for p, q in zip(saved.parameters(), model.parameters(), strict=True))


def test_tensor_parallelism_shards_the_large_matrices(results):
    names = {name for name, _ in tiny_model(**SOURCE).named_parameters()}
    large = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "embed_tokens.weight")
    large += ("gate_proj.weight", "up_proj.weight", "down_proj.weight", "q_b_proj.weight")
    expected = {name for name in names if name.endswith(large) and "output_gate" not in name}
    assert expected <= results[0]["tensor_parallel"]["sharded"]


@pytest.mark.parametrize("distributed_config", [DistributedConfig(pp_size=2), {"pp_size": 2}], ids=["object", "dict"])
def test_pipeline_stages_are_refused(distributed_config, tmp_path):
    tiny_model("kda").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="pp_size must be 1, got 2"):
        KDAForCausalLM.from_pretrained(tmp_path, distributed_config=distributed_config)
