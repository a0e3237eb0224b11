"""A data x sequence mesh of all ranks, and parameters sharded over both dimensions: FSDP2, gradients, clipping.

8 ranks with ``data_parallel=2`` are two groups of four. Each group shards its own sequences over its four ranks;
parameters, gradients and optimizer state are sharded over all eight, since every rank has a part of every gradient.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from startrail.checkpoint import checkpoint_context
from startrail.losses import sum_gradients
from startrail.offload import HostOffload
from startrail.training.data.sources import generator_of
from startrail.training.models.dit import DiT
from startrail.training.models.gpt import GPT
from startrail.training.recipes import Recipe
from startrail.training.tasks import compute_dtype, make_model


def make_mesh(data_parallel: int, device_type: str) -> DeviceMesh:
    """The mesh of all ranks: neighbouring ranks share a sequence."""
    world = dist.get_world_size()
    return init_device_mesh(device_type, (data_parallel, world // data_parallel), mesh_dim_names=("data", "sequence"))


def build_model(recipe: Recipe, device: torch.device) -> GPT | DiT:
    """Build the recipe's model on ``device``, sharded over all ranks if ``zero`` is 2 or 3. The initial values of a
    parameter depend only on the seed and its name. No rank ever holds more than one full parameter, so models larger
    than a rank's memory can be built."""
    with torch.device("meta"):
        model = make_model(recipe.config)
    if recipe.recompute:
        recompute_blocks(model, recipe.offload)
    if recipe.zero:
        # FSDP warns that outputs are views, in case of in-place changes, which do not happen here
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        # autocast alone would gather float32 weights and then convert them; this halves the bytes
        narrow = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        precision = narrow if compute_dtype(recipe, device) == torch.bfloat16 else MixedPrecisionPolicy()
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=recipe.zero == 3, mp_policy=precision)
        # the loss uses the embedding after the forward pass has ended, so the root's own parameters stay until then
        fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=precision)
    model.to_empty(device=device)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for name, parameter in model.named_parameters():
            torch.manual_seed(generator_of(recipe.seed, name).initial_seed())
            full = torch.empty(parameter.shape)
            model.reset_parameter(name, full)
            if isinstance(parameter, DTensor):
                shards = parameter.device_mesh, parameter.placements
                full = distribute_tensor(full.to(device), *shards, src_data_rank=None)
            parameter.copy_(full)
    return model


def recompute_blocks(model: GPT | DiT, offload: bool) -> None:
    """Make every block keep only its input and its attention output, and recompute the rest in the backward pass.
    Distributed attention is never repeated (``startrail.checkpoint_context``). With ``offload``, the inputs are kept in
    host memory. Call it before the blocks are sharded: parameters are then gathered once for both computations."""
    context = HostOffload() if offload else nullcontext()
    for block in model.blocks:
        block.forward = partial(_recompute, block.forward, context)


def _recompute(forward: Callable[..., Tensor], context: AbstractContextManager[None], *args: Any) -> Tensor:
    with context:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=checkpoint_context, preserve_rng_state=False)


def backward(model: nn.Module, share: Tensor) -> None:
    """Accumulate the gradients of the sum of ``share`` over all ranks; ``finish_gradients`` completes them. FSDP
    averages over the ranks, so the share is multiplied by their number first; see ``startrail.losses``."""
    (share * dist.get_world_size() if isinstance(model, FSDPModule) else share).backward()


def finish_gradients(model: nn.Module) -> None:
    """Call after the last ``backward`` of a step. FSDP has already summed the gradients."""
    if not isinstance(model, FSDPModule):
        sum_gradients(model.parameters())


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale the gradients so that their global norm is at most ``max_norm``; return the norm before. If that is not
    finite, the clipped gradients are not either: check it before they are used."""
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    total = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    if isinstance(total, DTensor):
        total = total.full_tensor()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total


def free_gathered(model: nn.Module) -> None:
    """Call after a forward pass without a backward: FSDP would keep gathered parameters and use them when stale."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
