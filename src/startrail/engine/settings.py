"""The settings of a ``SequenceParallel``."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch

from startrail.schedule.plan import Plan


@dataclass(frozen=True)
class Settings:
    """The arguments of a ``SequenceParallel``, except for its group."""

    plan: Plan
    layout: str
    wire_dtype: torch.dtype | None
    timeout: timedelta
    check_every_call: bool
    sparse: bool
