"""A dense MLP as a mixture of experts that starts as the same function, or next to it.

- `partition`: every expert has a part of the neurons. Exact while each token goes to all of them.
- `copies`: every expert is the MLP. Exact for any router, because the weights of a token's experts sum to one.
- `latent`: the MLP stays as a shared expert; beside it, experts work in a smaller space whose way back is zero. Exact;
  the way back has a gradient from the first step, and through it then the experts and the router.
"""

import torch

from modeling_kda.configuration_kda import KDAConfig
from modeling_kda.layers import build_activation

KINDS = ("partition", "copies", "latent")
# The scores of a partition's router are one half plus so much times how large each expert's output is expected to be:
# enough to choose by, and all chosen parts keep a weight near one
ROUTER_SCALE = 0.05
RIDGE = 1e-2
# of the tokens that went through a layer, so many are looked at
MOST_INPUTS = 8192


def expert_fields(source: KDAConfig, kind: str, choices: dict) -> dict:
    """The fields of the new configuration that make experts out of the MLPs of `source`.

    Args:
        source: a configuration without experts.
        kind: one of `KINDS`.
        choices: fields that were asked for; what is missing among them is chosen here.

    Raises: ValueError for a kind that does not exist, or choices that contradict it.
    """
    if kind not in KINDS:
        raise ValueError(f"experts must be one of {', '.join(KINDS)}, got {kind!r}")
    if source.num_experts:
        raise ValueError("the source has experts already; leave experts out")
    inner, num_experts = source.intermediate_size, choices.get("num_experts", 8)
    if not isinstance(num_experts, int) or num_experts < 1:
        raise ValueError(f"num_experts must be a number, at least 1, got {num_experts!r}")
    latent_only = ("routed_expert_hidden_size", "latent_moe_use_norm")
    follows = {"partition": ("moe_intermediate_size", *latent_only), "copies": ("moe_intermediate_size", *latent_only)}
    wrong = [name for name in follows.get(kind, ()) if name in choices]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} cannot be set with experts={kind}: the MLP decides")
    fields = {"num_experts": num_experts, "moe_renormalize": True, "routed_scaling_factor": 1.0}
    if kind == "latent":
        fields |= {"num_shared_experts": 1, "shared_intermediate_size": inner}
        fields |= {"moe_intermediate_size": max(1, inner // num_experts)}
        fields |= {"routed_expert_hidden_size": max(1, source.hidden_size // 2)}
        return fields | {"num_experts_per_token": min(2, num_experts)} | choices
    fields |= {"num_shared_experts": 0, "shared_intermediate_size": 0}
    if kind == "copies":
        return fields | {"moe_intermediate_size": inner, "num_experts_per_token": min(2, num_experts)} | choices
    if inner % num_experts:
        raise ValueError(f"num_experts must divide the {inner} neurons of the MLP, got {num_experts}")
    fields |= {"moe_intermediate_size": inner // num_experts, "num_experts_per_token": num_experts} | choices
    # so that the weights, which sum to it, are one on average
    return fields | {"routed_scaling_factor": float(fields["num_experts_per_token"])}


def needs_inputs(config: KDAConfig, kind: str) -> bool:
    """Whether `dense_to_experts` looks at what enters the MLP."""
    return kind == "latent" or (kind == "partition" and config.num_experts_per_token < config.num_experts)


@torch.no_grad()
def dense_to_experts(
    layer: dict, config: KDAConfig, kind: str, inputs: torch.Tensor | None, generator: torch.Generator
) -> dict:
    """A layer with the experts of `config` in the place of its MLP.

    Args:
        layer: the tensors by their names below the layer, with a dense MLP.
        config: of the new model, with the fields of `expert_fields`.
        kind: one of `KINDS`.
        inputs: [N, T, D], what enters the MLP on some text; None where `needs_inputs` says so.
        generator: for the router.

    Returns: the tensors, those of the experts in the dtype of the MLP, those of the router in fp32.
    """
    mlp = {name.removeprefix("mlp."): tensor for name, tensor in layer.items() if name.startswith("mlp.")}
    if inputs is not None:
        inputs = inputs.flatten(0, 1)
        inputs = inputs[:: -(-len(inputs) // MOST_INPUTS)].double().cpu()
    make = {"partition": _partition, "copies": _copies, "latent": _latent}[kind]
    router = torch.randn(config.num_experts, config.hidden_size, generator=generator) * config.initializer_range
    tensors = {"router.weight": router, "router.selection_bias": torch.zeros(config.num_experts)}
    tensors |= make(mlp, config, inputs)
    dtype = mlp["down_proj.weight"].dtype
    rest = {name: tensor for name, tensor in layer.items() if not name.startswith("mlp.")}
    return rest | {
        f"mlp.{name}": tensor.to(torch.float32 if name.startswith("router.") else dtype).contiguous()
        for name, tensor in tensors.items()
    }


def _copies(mlp, config, inputs):
    everything = torch.arange(config.intermediate_size).expand(config.num_experts, -1)
    experts = _cut(mlp, everything)
    if "down_proj.bias" in mlp:
        experts["experts.down_bias"] = mlp["down_proj.bias"].expand(config.num_experts, -1)
    return experts


def _partition(mlp, config, inputs):
    """Parts of equal size, in the order of the neurons. The router of the exact form is zero: all parts weigh one.

    If tokens go to fewer parts than there are, the router guesses by a linear regression how large the output of each
    part will be. A dense MLP is not sparse, and this start is far from it: on the shipped teacher, with 6 of 8 parts,
    KL 1.35 from it; knowing the largest parts gives 1.17, and grouping neurons that fire together 1.25.
    """
    parts = torch.arange(config.intermediate_size).view(config.num_experts, -1)
    experts, chosen = _cut(mlp, parts), config.num_experts_per_token
    if "down_proj.bias" in mlp:
        experts["experts.down_bias"] = mlp["down_proj.bias"].double().expand(config.num_experts, -1) / chosen
    if chosen == config.num_experts:
        return experts | {"router.weight": torch.zeros(config.num_experts, config.hidden_size)}
    weight, bias = _expected_size(_outputs(mlp, config, parts, inputs).norm(dim=-1).T, inputs)
    # a sigmoid has the slope 1/4 at zero, and the selection bias is added behind it
    return experts | {"router.weight": ROUTER_SCALE * weight, "router.selection_bias": ROUTER_SCALE / 4 * bias}


def _latent(mlp, config, inputs):
    """Experts of slices of the MLP, seen through the main directions of its input and of its output matrix."""
    size, count = config.routed_expert_hidden_size, config.num_experts
    mean = inputs.mean(0)
    covariance = (inputs - mean).T @ (inputs - mean) / len(inputs)
    down, back = (_main_directions(moment, size) for moment in (covariance, _square(mlp["down_proj.weight"])))
    slices = torch.arange(count * config.moe_intermediate_size) % config.intermediate_size
    experts = _cut(mlp, slices.view(count, -1))
    for name in [name for name in experts if "up_" in name and name.endswith("proj")]:
        full = experts[name].double()
        experts[name] = full @ down.T
        bias = name.replace("proj", "bias")
        if bias in experts:
            # what the latent does not show of the input is its mean, as far as experts know
            experts[bias] = experts[bias].double() + full @ (mean - down.T @ (down @ mean))
            experts["experts.down_bias"] = torch.zeros(count, size)
    experts["experts.down_proj"] = back @ experts["experts.down_proj"].double()
    if config.latent_moe_use_norm:
        experts["latent_norm.weight"] = torch.ones(size)
    experts |= {"latent_down_proj.weight": down, "latent_up_proj.weight": torch.zeros(config.hidden_size, size)}
    return experts | {f"shared_experts.{name}": tensor for name, tensor in mlp.items()}


def _cut(mlp, neurons):
    """The matrices of experts that have these neurons, [E, I], without a bias at their outputs."""
    branches = ["gate_proj", "up_proj"] if "gate_proj.weight" in mlp else ["up_proj"]
    name = "gate_up" if len(branches) == 2 else "up"
    # gates first, then what they act on
    experts = {f"experts.{name}_proj": torch.cat([mlp[f"{branch}.weight"][neurons] for branch in branches], 1)}
    if "up_proj.bias" in mlp:
        experts[f"experts.{name}_bias"] = torch.cat([mlp[f"{branch}.bias"][neurons] for branch in branches], 1)
    return experts | {"experts.down_proj": mlp["down_proj.weight"][:, neurons].transpose(0, 1)}


def _outputs(mlp, config, parts, inputs):
    """What each part of the neurons adds for each input, [E, N, D]."""
    branches = [
        inputs @ mlp[f"{name}.weight"].double().T + mlp.get(f"{name}.bias", torch.zeros(1)).double()
        for name in ("gate_proj", "up_proj")
        if f"{name}.weight" in mlp
    ]
    hidden, down = build_activation(config)(*branches), mlp["down_proj.weight"].double()
    return torch.stack([hidden[:, part] @ down[:, part].T for part in parts])


def _expected_size(sizes, inputs):
    """Weight [E, D] and bias [E] of a linear guess of sizes [N, E], in units of their spread."""
    sizes = sizes / sizes.std()
    mean, centre = inputs.mean(0), sizes.mean(0)
    x = inputs - mean
    gram = x.T @ x
    gram += RIDGE * gram.diagonal().mean() * torch.eye(len(gram)).to(gram)
    weight = torch.linalg.solve(gram, x.T @ (sizes - centre)).T
    bias = centre - weight @ mean
    return weight, bias - bias.mean()


def _main_directions(moment, count):
    """The orthonormal rows [count, D] that hold most of a second moment [D, D]."""
    return torch.linalg.eigh(moment).eigenvectors[:, -count:].flip(1).T


def _square(weight):
    return weight.double() @ weight.double().T
