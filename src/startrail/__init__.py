"""startrail: exact attention over near-infinite contexts, by concentric-ring sequence parallelism.

Names are imported when they are first used, so that plans, schedules and their viewer work without torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import startrail.plan  # noqa: F401  (made callable below)

if TYPE_CHECKING:
    from startrail.checkpoint import checkpoint_context
    from startrail.logprobs import next_tokens
    from startrail.mask import Mask
    from startrail.parallel import SequenceParallel
    from startrail.peers import PeerError
    from startrail.plan import Plan
    from startrail.sequence import Sequence
    from startrail.training.loss import global_mean, gradient_factor, sum_gradients

__version__ = "0.1.0"
__all__ = [
    "Mask",
    "PeerError",
    "Plan",
    "Sequence",
    "SequenceParallel",
    "checkpoint_context",
    "global_mean",
    "gradient_factor",
    "next_tokens",
    "sum_gradients",
]

_HOMES = {
    "Mask": "mask",
    "PeerError": "peers",
    "Plan": "plan",
    "Sequence": "sequence",
    "SequenceParallel": "parallel",
    "checkpoint_context": "checkpoint",
    "global_mean": "training.loss",
    "gradient_factor": "training.loss",
    "next_tokens": "logprobs",
    "sum_gradients": "training.loss",
}


class _PlanModule(ModuleType):
    """``startrail.plan`` is the module of plans, and called it is the planner: ``startrail.plan("a100-4x8", ...)``."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return import_module("startrail.planning.explain").plan(*arguments, **options)


sys.modules["startrail.plan"].__class__ = _PlanModule


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'startrail' has no attribute {name!r}")
    return getattr(import_module(f"startrail.{_HOMES[name]}"), name)
