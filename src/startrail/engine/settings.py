"""The settings of a ``SequenceParallel``."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch

from startrail.routing.route import Rule
from startrail.schedule.plan import Plan


@dataclass(frozen=True)
class Settings:
    """The arguments of a ``SequenceParallel``, except for its group. ``str()`` has those that all ranks must share."""

    plan: Plan
    layout: str
    wire_dtype: torch.dtype | None
    timeout: timedelta
    check_every_call: bool
    sparse: bool | Rule
    windows: bool = False

    def __str__(self) -> str:
        """What all ranks must have in common."""
        text = f"plan {self.plan}, {self.layout}, wire {self.wire_dtype}"
        if self.sparse is not True:
            text += f", direct {self.sparse}" if self.sparse else ", sparse=False"
        flags = "check_every_call", "windows"
        return text + "".join(f", {name}=True" for name in flags if getattr(self, name))
