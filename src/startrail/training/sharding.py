"""All ranks of a run as data x sequence, and the parameters over both: FSDP2, gradients, clipping.

8 ranks with ``data_parallel=2`` are two groups of four. Each group splits its own sequences over its four ranks;
parameters, gradients and optimizer state are split over all eight, since every rank has a part of every gradient.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from startrail.losses import sum_gradients
from startrail.training.data.seeds import generator_of
from startrail.training.memory import recompute_blocks
from startrail.training.models.dit import DiT
from startrail.training.models.gpt import GPT
from startrail.training.recipes import Recipe
from startrail.training.tasks import compute_dtype, make_model


def data_by_sequence(data_parallel: int, device_type: str) -> DeviceMesh:
    """The mesh of all ranks: neighbours share a sequence."""
    world = dist.get_world_size()
    return init_device_mesh(device_type, (data_parallel, world // data_parallel), mesh_dim_names=("data", "sequence"))


def build_model(recipe: Recipe, device: torch.device) -> GPT | DiT:
    """The recipe's model with its parameters on ``device``, sharded over all ranks if ``zero`` is 2 or 3.

    A parameter's values depend on the seed and its name alone. No rank ever holds more than one whole parameter, so
    models larger than a rank's memory can be built.
    """
    with torch.device("meta"):
        model = make_model(recipe.config)
    if recipe.recompute:
        recompute_blocks(model, recipe.offload)
    if recipe.zero:
        # it warns of outputs that are views, in case somebody changes them in place, which nobody does here
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        # autocast would make bfloat16 of float32 weights after they were gathered; so half as many bytes travel
        narrow = compute_dtype(recipe, device) == torch.bfloat16
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        precision = policy if narrow else MixedPrecisionPolicy()
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=recipe.zero == 3, mp_policy=precision)
        # the loss uses the embedding after the forward pass has ended, so the root's own parameters stay until then
        fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=precision)
    model.to_empty(device=device)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for name, parameter in model.named_parameters():
            torch.manual_seed(generator_of(recipe.seed, name).initial_seed())
            whole = torch.empty(parameter.shape)
            model.reset_parameter(name, whole)
            if isinstance(parameter, DTensor):
                mine = distribute_tensor(
                    whole.to(device), parameter.device_mesh, parameter.placements, src_data_rank=None
                )
                parameter.copy_(mine)
            else:
                parameter.copy_(whole)
    return model


def backward(model: nn.Module, share: Tensor) -> None:
    """Add to the gradients those of the sum over all ranks of ``share``, once ``finish_gradients`` was called.

    FSDP divides the sum by the number of ranks, so that it must be multiplied by it first; see ``loss``.
    """
    (share * dist.get_world_size() if isinstance(model, FSDPModule) else share).backward()


def finish_gradients(model: nn.Module) -> None:
    """After the last ``backward`` of a step. FSDP has summed the gradients already."""
    if not isinstance(model, FSDPModule):
        sum_gradients(model.parameters())


def clip_gradients(parameters: Iterable[nn.Parameter], largest: float) -> Tensor:
    """Scale all gradients so that their norm, as one vector over all ranks, is at most ``largest``; the norm before.

    If it is not finite, neither are the gradients then: look at it before they are used.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    total = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    if isinstance(total, DTensor):
        total = total.full_tensor()
    nn.utils.clip_grads_with_norm_(parameters, largest, total)
    return total


def forget_gathered(model: nn.Module) -> None:
    """After passes without a backward: FSDP would otherwise keep whole parameters, and use them after they changed."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
