"""The settings of a ``SequenceParallel``."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch

from startrail.schedule.plan import Plan


@dataclass(frozen=True)
class Settings:
    """The arguments of a ``SequenceParallel``, except for its group. ``str()`` has those that all ranks must share."""

    plan: Plan
    layout: str
    wire_dtype: torch.dtype | None
    timeout: timedelta
    check_every_call: bool
    sparse: bool
    windows: bool = False

    def __str__(self) -> str:
        text = f"plan {self.plan}, {self.layout}, wire {self.wire_dtype}"
        flags = ("check_every_call", False), ("sparse", True), ("windows", False)
        return text + "".join(f", {name}={not usual}" for name, usual in flags if getattr(self, name) != usual)
