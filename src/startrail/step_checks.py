"""Cheap checks of the first training steps: equal parameters on all ranks, and gradients that are sums over ranks.

Neither mistake raises an error by itself. Ranks with different weights each follow a gradient of other weights, and
DDP and FSDP, which average, make every gradient P times too small.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from startrail._compat import FSDPMesh, fsdp_meshes
from startrail.agreement.digest import digest
from startrail.agreement.errors import peer_errors
from startrail.agreement.gather import gather_tensors
from startrail.transport.torch_collectives import agree

CHECKED_STEPS = 2
IGNORED_LABEL = -100
UNEQUAL = 1e-3  # relative difference between ranks of a gradient that is not reduced over them


def check_same_parameters(named: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup | None = None) -> None:
    """Raises ``ValueError`` on every rank, naming the first parameter that differs between ranks of ``group``.

    Sharded parameters (DTensors), which differ by design, are skipped.
    """
    unsharded = [(name, x) for name, x in named if not is_sharded(x) and x.device.type != "meta"]
    if not unsharded or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    agree("comparing parameters", [f"{name} {tuple(x.shape)}" for name, x in unsharded], group, unsharded[0][1].device)
    digests = gather_tensors(torch.stack([digest(x) for _, x in unsharded]), group, "comparing parameters")
    for index, (name, _) in enumerate(unsharded):
        different = [rank for rank, of_rank in enumerate(digests) if of_rank[index] != digests[0][index]]
        if different:
            raise ValueError(
                f"parameter {name} is not the same on all ranks (rank {different[0]} differs from rank 0): load the "
                "same weights, or set the same seed on every rank before the model is built"
            )


def is_sharded(x: object) -> bool:
    return hasattr(x, "device_mesh")


def check_shifted(owner: object, sequence: object, x: Tensor, dim: int, pad_value: float) -> None:
    """Warns if ``x`` are labels that are not shifted: where they are not ignored, they are the ids that were sharded
    before, and not those of the next tokens. Only the first labels of an ``owner`` are checked."""
    if x.is_floating_point() or x.is_complex() or x.device.type == "meta":
        return
    if pad_value != IGNORED_LABEL:
        _ids.setdefault(sequence, weakref.ref(x))
        return
    ids = _ids[sequence]() if sequence in _ids else None
    if ids is None or ids.shape != x.shape or ids.device != x.device:
        return
    if _num_label_checks.setdefault(owner, 0) == CHECKED_STEPS:
        return
    _num_label_checks[owner] += 1
    ignored = x == IGNORED_LABEL
    own, following = (bool(((x == y) | ignored).all()) for y in (ids, ids.roll(-1, dim)))
    if own and not following:
        warnings.warn(
            "labels are the ids of the same tokens, not of the next ones: shard them with sequence.shard_labels(labels)"
            ", which shifts them before the sequence is split. Shifted afterwards, every shard loses labels at its end",
            stacklevel=3,
        )


def check_fsdp_meshes(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Raises ``ValueError`` if FSDP2 does not reduce gradients over the ranks of a sequence, ``group``. Experts have a
    mesh of their own: the other ranks hold other experts. Warns if parameters are copied over one dimension of a (data,
    sequence) mesh, unless that is what it is called."""
    ranks = set(dist.get_process_group_ranks(group or dist.group.WORLD)) if dist.is_initialized() else {0}
    meshes = list(dict.fromkeys(fsdp_meshes(model)))
    usual = {each.divisor for each in meshes if ranks <= each.ranks}
    for each in meshes:
        mesh, inside = each.mesh, sorted(each.ranks)
        names = mesh.mesh_dim_names or [f"dimension {dim}" for dim in range(mesh.ndim)]
        if not ranks <= each.covered:
            raise ValueError(
                f"FSDP reduces gradients over ranks {inside} ({', '.join(names)}), but a sequence is sharded "
                f"over ranks {sorted(ranks)}, whose gradients must be summed too: pass it the flattened mesh of both, "
                "such as mesh['dp', 'sp']._flatten() (or attach with check=False if you sum them yourself)"
            )
        if not ranks <= each.ranks and usual - {each.divisor}:
            raise ValueError(
                f"FSDP divides the gradients of experts, which it sums over ranks {inside} ({', '.join(names)}), by "
                f"{each.divisor:g}, and others by {max(usual):g}: call experts.set_gradient_divide_factor("
                f"{max(usual):g}) on their modules, as experts get the tokens of all ranks"
            )
        if each.replicate_dim is not None and each.shard_dim is not None:
            _warn_of_copies(names[each.shard_dim], names[each.replicate_dim], each, ranks)


def _warn_of_copies(shard_name: str, copy_name: str, given: FSDPMesh, sequence: set[int]) -> None:
    """Warns if a mesh looks like one of data and sequence by mistake."""
    assert given.shard_dim is not None and given.replicate_dim is not None
    shards, copies = given.mesh.size(given.shard_dim), given.mesh.size(given.replicate_dim)
    if "repl" in copy_name or shards > len(sequence):
        return
    warnings.warn(
        f"FSDP was given a 2D mesh, so it keeps {copies} copies of the parameters over {copy_name} and shards them "
        f"over {shard_name} only (HSDP): each rank holds 1/{shards} of them, not 1/{shards * copies}. Pass a flattened "
        "mesh, such as mesh['dp', 'sp']._flatten(), to shard over both, or call the first dimension dp_replicate",
        stacklevel=5,
    )


def unchecked_parameters(loss: Tensor) -> list[Tensor]:
    """The parameters that ``loss`` depends on, nearest first; none if their gradients have a check already."""
    if torch.compiler.is_compiling() or not dist.is_initialized():
        return []
    nearest = next(_parameters(loss), None)
    return [] if nearest is None or nearest in _checks else list(_parameters(loss))


def check_gradients(
    loss: Tensor, parameters: list[Tensor], agreed: bool, group: dist.ProcessGroup | None,
    sequence: dist.ProcessGroup | None,
) -> None:  # fmt: skip
    """Check the gradients of ``loss`` in the first optimizer steps.

    ``parameters`` are the ``unchecked_parameters`` of ``loss``. ``agreed``: every rank of ``group`` has some. A check
    must start on all ranks, since it communicates. ``sequence``: the ranks of ``group`` that share a sequence.
    """
    if torch.compiler.is_compiling():
        return
    if parameters:
        wanted = agreed and dist.get_world_size(group) > 1
        _checks[parameters[0]] = GradientCheck(parameters, group, sequence) if wanted else None
    nearest = next(_parameters(loss), None)
    check = None if nearest is None else _checks.get(nearest)
    if check is not None and check.is_active:
        loss.register_hook(check.add_scale)


class GradientCheck:
    """Checks in the first optimizer steps that a parameter's gradient is the sum of all ranks' gradients.

    One small parameter is the probe. Its local gradient is accumulated before DDP, FSDP or the user reduces it, divided
    by the scale of the loss, and compared with the gradient that the optimizer gets. Only certain mistakes raise:
    exactly the mean, or exactly this rank's own gradient, or one that is reduced, but differs between the ranks of a
    sequence. (Clipping changes the norm, and then only the last is reported.)
    FSDP gives the optimizer another tensor than autograd's: the one of that shape with these gradients. With n losses
    per step, as in gradient accumulation, their mean is right as well.
    """

    def __init__(
        self, parameters: list[Tensor], group: dist.ProcessGroup | None, sequence: dist.ProcessGroup | None
    ) -> None:
        probe = min((x for x in parameters if x.dim() and not is_sharded(x)), key=Tensor.numel, default=parameters[0])
        self._probe = weakref.ref(probe)
        self._parameters = [weakref.ref(x) for x in parameters]
        self._group, self._sequence = group, sequence
        self._steps_left = CHECKED_STEPS
        self._local: Tensor | None = None
        self._scales: list[float] = []
        self._hook = probe.register_hook(self._add_local)
        _active_checks.append(self)
        weakref.finalize(probe, _active_checks.remove, self).atexit = False
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_any_step))

    @property
    def is_active(self) -> bool:
        return self._steps_left > 0

    def add_scale(self, gradient: Tensor | None) -> None:
        if gradient is not None:  # DDP and FSDP pass on None if the loss is computed from other results
            self._scales.append(float(gradient))

    def _add_local(self, gradient: Tensor) -> None:
        local = gradient.detach().clone()  # autograd may pass the same memory on, to be reduced in place
        self._local = local if self._local is None else self._local + local

    @peer_errors("comparing gradients")
    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before a step of any optimizer, whether it has this model's parameters or not."""
        probe = self._probe()
        optimized = {id(x): x for group in optimizer.param_groups for x in group["params"]}
        if probe is None or not self.is_active or not self._is_for(optimized):
            return
        self._steps_left -= 1
        if not self.is_active:
            self._hook.remove()
        local, self._local = self._local, None
        scales, self._scales = self._scales, []
        candidates = [probe] if id(probe) in optimized else self._sharded(probe, optimized)
        ready = local is not None and not is_sharded(local) and len(set(scales)) == 1 and scales[0] != 0
        ready = ready and bool(candidates) and all(x.grad is not None for x in candidates)
        unsharded = [x for x in optimized.values() if not is_sharded(x)]
        # Every rank takes part: the others would wait for a rank that lacks a gradient.
        size, count = float(probe.numel()), float(len(unsharded))
        least = torch.tensor([float(ready), size, -size, count, -count], dtype=torch.float64, device=probe.device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._group)
        if unsharded and least[3] == -least[4]:
            self._compare_weights(unsharded, probe.device)
        if least[0] == 0 or least[1] != -least[2]:
            return
        assert local is not None
        self._compare(local, scales, candidates, probe is candidates[0])

    def _compare_weights(self, weights: list[Any], device: torch.device) -> None:
        """Raises ``ValueError`` if ranks have the same gradient for different weights. Weights that differ by design,
        such as experts, have gradients of their own."""
        none = torch.zeros((), dtype=torch.long, device=device)
        own = [[digest(x).to(device), none if x.grad is None else digest(x.grad).to(device)] for x in weights]
        ranks = gather_tensors(torch.stack([torch.stack(pair) for pair in own]), self._group, "comparing parameters")
        for index, x in enumerate(weights):
            digests = [tuple(of_rank[index].tolist()) for of_rank in ranks]
            different = [rank for rank, (weight, _) in enumerate(digests) if weight != digests[0][0]]
            if different and digests[0][1] and len({gradient for _, gradient in digests}) == 1:
                raise ValueError(
                    f"parameter {index} {tuple(x.shape)} of the optimizer is not the same on all ranks (rank "
                    f"{different[0]} differs from rank 0), but gets the same gradient: load the same weights, or set "
                    "the same seed on every rank before the model is built"
                )

    def _compare(self, local: Tensor, scales: list[float], candidates: list[Any], unsharded: bool) -> None:
        world, losses = dist.get_world_size(self._group), len(scales)
        precision = max(torch.finfo(x.dtype).eps for x in (local, candidates[0]))
        local = local.double()
        total = (unscaled := local / scales[0]).clone()
        dist.all_reduce(total, group=self._group)
        hypotheses = [total, total / losses, total / world, total / losses / world, local, unscaled]
        rows = []
        for x in candidates:
            gradient = (x.grad if unsharded else x.grad.full_tensor()).detach().to(total).view_as(total)
            rows.append(torch.stack([(gradient - hypothesis).norm() for hypothesis in hypotheses]))
        norms = torch.stack([*rows, total.norm().expand(len(hypotheses))])
        dist.all_reduce(norms, op=dist.ReduceOp.MAX, group=self._group)
        fits = norms[:-1] <= max(1e-4, 4 * precision) * norms[-1]
        if not bool(norms[-1].any()) or bool(fits[:, :2].any()):
            return
        if bool(fits[:, 2:4].any()):
            wrapper = "DDP" if unsharded else "FSDP"
            raise ValueError(
                f"gradients are averaged over {world} ranks, but must be summed ({wrapper} divides by its number of "
                "ranks): call (startrail.gradient_factor(model) * loss).backward()"
            )
        if unsharded and bool(fits[:, 4:].any()):
            raise ValueError(
                "each rank still has only its own part of the gradients: call "
                "startrail.sum_gradients(model.parameters()) after the backward pass"
            )
        if unsharded and self._differs(candidates[0].grad.detach().double()):
            ranks = sorted(dist.get_process_group_ranks(self._sequence))
            raise ValueError(
                f"gradients differ between ranks {ranks}, which share a sequence: DDP over the data-parallel group "
                "alone does not reduce over them. Give it all ranks, or call startrail.sum_gradients(model.parameters()"
                ", sp.group) after the backward pass"
            )

    def _differs(self, gradient: Tensor) -> bool:
        """True if a gradient is not the same on the ranks of a sequence."""
        ends = torch.stack([gradient, -gradient])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self._sequence)
        return bool((ends[0] + ends[1]).norm() > UNEQUAL * torch.maximum(ends[0].abs(), ends[1].abs()).norm())

    def _is_for(self, optimized: dict[int, Tensor]) -> bool:
        """True if the optimizer has this check's parameters."""
        probe = self._probe()
        alive = {id(x()) for x in self._parameters}
        return bool(alive & optimized.keys()) or (probe is not None and bool(self._sharded(probe, optimized)))

    def _sharded(self, probe: Tensor, optimized: dict[int, Tensor]) -> list[Any]:
        """Parameters that FSDP may have made from ``probe``, over exactly the ranks of this check's group."""
        ranks = sorted(dist.get_process_group_ranks(self._group))
        same_shape: list[Any] = [x for x in optimized.values() if is_sharded(x) and x.shape == probe.shape]
        return [x for x in same_shape if sorted(x.device_mesh.mesh.flatten().tolist()) == ranks]


def _before_any_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for check in list(_active_checks):
        check.before_step(optimizer)


# Checks whose probes are alive. They share one permanent hook: a hook must not be removed while an optimizer iterates
# over its hooks, and a model may be collected just then.
_active_checks: list[GradientCheck] = []
_hooks: list[Any] = []
# The first integers that were sharded, by their sequence, and how often the labels of an instance were checked.
_ids: WeakKeyDictionary[object, weakref.ref[Tensor]] = WeakKeyDictionary()
_num_label_checks: WeakKeyDictionary[object, int] = WeakKeyDictionary()
# The check of each model, by the parameter nearest to its loss; None if it cannot be checked.
_checks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _parameters(loss: Tensor) -> Iterator[Tensor]:
    """Parameters in the graph of ``loss``, nearest first."""
    queue: deque[Any] = deque([loss.grad_fn])
    seen = set(queue)
    while queue:
        node = queue.popleft()
        if node is None:
            continue
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter):
            yield leaf
        for parent, _ in node.next_functions:
            if parent not in seen:
                seen.add(parent)
                queue.append(parent)
