"""Chooses the transport for a kind of device: the one place that knows which backend needs which class."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch

from startrail.agreement.consensus import Consensus
from startrail.kernels.device import on_device
from startrail.schedule.places import Place
from startrail.schedule.program import Program
from startrail.transport import process_groups
from startrail.transport.counters import Counters
from startrail.transport.gloo import Gloo
from startrail.transport.interface import Transport
from startrail.transport.lanes import Lanes
from startrail.transport.nccl import Fake, Nccl

CLASSES: dict[str, type[Lanes]] = {"gloo": Gloo, "fake": Fake}  # any other backend is taken to behave like NCCL


def transport_class(device: torch.device) -> type[Lanes]:
    """The class for several ranks, with their tensors on such devices."""
    return CLASSES.get(process_groups.backend_for(device), Nccl)


def open_transport(
    consensus: Consensus, counters: Counters, place: Place, name: str, timeout: timedelta, device: torch.device,
    programs: Sequence[Program],
) -> Transport:  # fmt: skip
    """Open the lanes of ``programs``, together with all ranks. ``name`` is the same on all of them, and used once."""
    if len(consensus.ranks) <= 1:
        return Transport(device)
    with on_device(device):
        return transport_class(device)(consensus, counters, place, name, timeout, device, programs)
