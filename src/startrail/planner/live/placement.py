"""Where this job's ranks run: each rank's GPU, and which ranks share a node.

torchrun says both. Other launchers (Slurm's srun, Open MPI, MPICH and its relatives) say which of a node's ranks a
process is, and host names say which ranks share a node.
"""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from startrail.agreement.gather import gather_texts
from startrail.planner.topology import Machine
from startrail.transport.process_groups import gpus_use_nccl

# Variables with a rank's number on its node, in the order in which they count: some launchers run inside another one.
LOCAL_RANKS = {
    "LOCAL_RANK": "torchrun",
    "OMPI_COMM_WORLD_LOCAL_RANK": "Open MPI",
    "MV2_COMM_WORLD_LOCAL_RANK": "MVAPICH",
    "MPI_LOCALRANKID": "MPICH",
    "PMI_LOCAL_RANK": "PMI",
    "PALS_LOCAL_RANKID": "PALS",
    "SLURM_LOCALID": "Slurm",
}


def local_rank(environment: Mapping[str, str]) -> tuple[int, str] | None:
    """This rank's number on its node, and the variable that says so; None if no launcher does.

    >>> local_rank({"SLURM_LOCALID": "3", "SLURM_PROCID": "11"})
    (3, 'SLURM_LOCALID of Slurm')
    """
    for name, launcher in LOCAL_RANKS.items():
        if (value := environment.get(name, "")).isdecimal():
            return int(value), f"{name} of {launcher}"
    return None


def own_device() -> torch.device:
    """This rank's GPU if the ranks use NCCL, which emulated nodes never do, or if it runs alone; else the CPU."""
    return _found_device()[0]


def _found_device() -> tuple[torch.device, str]:
    """The device, and how it was found."""
    if not torch.cuda.is_available() or (dist.is_initialized() and not gpus_use_nccl()):
        return torch.device("cpu"), ""
    if torch.cuda.is_initialized() and (current := torch.cuda.current_device()):
        return torch.device("cuda", current), "the current device"
    number, source = local_rank(os.environ) or (0, "no launcher's variable, and no torch.cuda.set_device")
    return torch.device("cuda", number % torch.cuda.device_count()), source


def find_machine(group: dist.ProcessGroup | None, ranks: Sequence[int]) -> tuple[Machine, str]:
    """The nodes of the global ``ranks`` of ``group``, which all call this together, and how they were found.

    With torchrun all nodes have as many ranks, node by node. Otherwise ranks compare host names. Raises ``ValueError``
    if several ranks would use one GPU."""
    if per_node := int(os.environ.get("LOCAL_WORLD_SIZE") or 0):
        return _described(Machine.of_ranks(ranks, per_node), "LOCAL_WORLD_SIZE of torchrun")
    if group is None:
        return _described(Machine(1, 1), "a single process")
    device, source = _found_device()
    by_cpu = "cpu:" in dist.get_backend_config(group)  # NCCL cannot: it fails if ranks share a GPU
    found = gather_texts(f"{platform.node()}\n{device}\n{source}", group, "cpu" if by_cpu else device)
    hosts, devices, sources = zip(*(text.split("\n") for text in found), strict=True)
    _check_devices(hosts, devices, sources)
    machine = Machine.of_nodes(hosts)
    if machine.nodes == 1 and len(set(hosts)) > 1:
        warnings.warn(
            f"ranks {list(ranks)[:4]}... run on {', '.join(hosts[:4])}...: nodes are not filled evenly, one after the "
            "other, so the plan treats all ranks as one node. Launch ranks node by node: srun --distribution=block, "
            "mpirun --map-by slot",
            stacklevel=2,
        )
    return _described(machine, f"host names; GPUs from {source}" if device.type == "cuda" else "host names")


def _described(machine: Machine, source: str) -> tuple[Machine, str]:
    many = f"{machine.nodes} nodes" if machine.nodes > 1 else "1 node"
    return machine, f"{many} of {machine.ranks_per_node} (by {source})"


def _check_devices(hosts: Sequence[str], devices: Sequence[str], sources: Sequence[str]) -> None:
    users: dict[tuple[str, str], list[int]] = {}
    for rank, place in enumerate(zip(hosts, devices, strict=True)):
        users.setdefault(place, []).append(rank)
    for (host, device), ranks in users.items():
        if device.startswith("cuda") and len(ranks) > 1:
            raise ValueError(
                f"ranks {ranks} would all use {device} of {host} (by {sources[ranks[0]]}): call "
                "torch.cuda.set_device(local rank) on each rank first"
            )
