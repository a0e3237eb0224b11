"""Cheap checks of a module's first calls, which compare ranks, and look for what a result does not show."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from startrail._compat import tree_leaves
from startrail.agreement.digest import digest
from startrail.agreement.gather import gather_tensors
from startrail.integrations.splitting.calls import users_hooks
from startrail.integrations.splitting.refusals import RefusedError
from startrail.parallel import SequenceParallel
from startrail.step_checks import CHECKED_STEPS, check_same_parameters
from startrail.transport.torch_collectives import agree

UNEQUAL = 1e-3  # relative difference between ranks of a result's gradient


class FirstSteps:
    """Compares what the ranks of a sequence are given, and what they do with the result."""

    def __init__(self, sp: SequenceParallel) -> None:
        self._sp = sp
        self._checked = {True: 0, False: 0}  # calls in training, and in evaluation
        self._random_differs = False  # ranks have different states of random number generators

    def skip(self) -> None:
        """Check nothing."""
        self._checked = dict.fromkeys(self._checked, CHECKED_STEPS)

    def check_inputs(self, module: nn.Module, inputs: dict[str, Tensor]) -> bool:
        """Compare parameters and arguments between ranks. True if this is one of the first training steps."""
        training = module.training and torch.is_grad_enabled()
        if self._checked[training] >= CHECKED_STEPS or self._sp.world == 1 or not inputs:
            return False
        self._checked[training] += 1
        if training:
            check_same_parameters(module.named_parameters(), self._sp.group)
        device = next(iter(inputs.values())).device
        described = [f"{name} {tuple(x.shape)} {x.dtype}" for name, x in inputs.items()]
        agree("comparing arguments", described, self._sp.group, device)
        own = torch.stack([digest(x).to(device) for x in (*inputs.values(), random_state(device))])
        ranks = gather_tensors(own, self._sp.group, "comparing arguments")
        for index, name in enumerate(inputs):
            different = [rank for rank, of_rank in enumerate(ranks) if of_rank[index] != ranks[0][index]]
            if different:
                raise ValueError(
                    f"{name} differs between ranks of a sequence (rank {different[0]} from rank 0): all ranks need the "
                    "same data, noise and timesteps; draw them from a generator with the same seed"
                )
        self._random_differs = any(of_rank[-1] != ranks[0][-1] for of_rank in ranks)
        if training and dist.get_world_size() > self._sp.world:
            self._check_groups(next(iter(inputs)), own)
        return training

    def _check_groups(self, name: str, own: Tensor) -> None:
        group = torch.tensor([min(dist.get_process_group_ranks(self._sp.group))], device=own.device)
        ranks = gather_tensors(torch.cat([group, own[:1]]), None, "comparing data-parallel groups")
        of_groups = {int(first): int(data) for first, data in ranks}
        if len(set(of_groups.values())) < len(of_groups):
            raise ValueError(
                f"{name} is the same in several data-parallel groups: seed data and noise with the number of the group"
            )

    def check_random(self, before: Tensor | None) -> None:
        """Raises ``ValueError`` if the call drew random numbers, and ranks did not draw the same."""
        if before is not None and self._random_differs and not torch.equal(before, random_state(before.device)):
            raise ValueError(
                "the model draws random numbers (dropout, or dropped labels), but the ranks of a sequence are seeded "
                "differently: set the same seed on all of them"
            )

    def check_gradient(self, name: str, grad: Tensor) -> None:
        """Raises ``ValueError`` on all ranks if they compute different losses from the whole result."""
        x = grad.detach().double().flatten()
        weights = torch.linspace(0.5, 1.5, len(x), device=x.device, dtype=x.dtype)
        ranks = gather_tensors(torch.stack([x.norm(), x @ weights]), self._sp.group, "comparing gradients")
        largest = max(float(of_rank[0]) for of_rank in ranks)
        if any(float((of_rank - ranks[0]).norm()) > UNEQUAL * largest for of_rank in ranks):
            raise ValueError(
                f"ranks of a sequence compute different losses from the result of {name}: noise, targets or timesteps "
                "differ between ranks, or each rank uses part of the result. All must compute the same loss"
            )


def check_nothing_kept(root: nn.Module) -> None:
    """After a training call: raises ``RefusedError`` if a module keeps a tensor with a gradient. All ranks have all of
    it, and its gradient, which is not divided by the number of ranks as those of results are, would count on each."""
    for module in root.modules():
        name = module._startrail_name
        if module is not root and (hooks := users_hooks(module)) and not _is_inside_block(root, module):
            raise RefusedError(
                f"{name}: its hook {hooks[0]} may keep a tensor, whose gradient would count once per rank: remove it, "
                "or register it on the whole module"
            )
        own = [*module._parameters, *module._buffers]
        for attribute, value in vars(module).items():
            computed = any(each.startswith(f"{attribute}_") for each in own)  # as by torch.nn.utils.weight_norm
            if attribute.startswith("_") or computed:
                continue
            if any(isinstance(x, Tensor) and x.grad_fn is not None for x in tree_leaves(value)):
                raise RefusedError(
                    f"{name}: keeps a tensor with a gradient as {attribute}, such as an auxiliary loss. Its gradient "
                    "would count once per rank: return it as a result of the whole module, or detach it"
                )


def _is_inside_block(root: nn.Module, module: nn.Module) -> bool:
    """True for what was tried together with a block."""
    blocks = [block for block in root.modules() if "_startrail_plan" in block.__dict__]
    return any(module in block.modules() for block in blocks)


def random_state(device: torch.device) -> Tensor:
    return (torch.cuda if device.type == "cuda" else torch.random).get_rng_state().to(device)
