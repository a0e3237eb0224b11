"""startrail: exact attention over near-infinite contexts, by concentric-ring sequence parallelism.

Names are imported on first use, so that plans, schedules, the planner and the viewer work without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from startrail import losses, testing
    from startrail.agreement.errors import PeerError
    from startrail.checkpoint import checkpoint_context
    from startrail.geometry.mask import Mask
    from startrail.geometry.packing import PackedSampler, pack
    from startrail.kernels.elementwise import linear_recurrence, selective_scan
    from startrail.kernels.recurrences import decayed_attention, gated_delta_rule, kimi_delta_rule
    from startrail.losses import global_mean, gradient_factor, next_tokens, sum_gradients
    from startrail.parallel import SequenceParallel
    from startrail.planner.answer import plan
    from startrail.schedule.plan import Plan
    from startrail.sequence import Sequence

__version__ = "0.3.0"
__all__ = [
    "Mask",
    "PackedSampler",
    "PeerError",
    "Plan",
    "Sequence",
    "SequenceParallel",
    "checkpoint_context",
    "decayed_attention",
    "gated_delta_rule",
    "global_mean",
    "gradient_factor",
    "kimi_delta_rule",
    "linear_recurrence",
    "losses",
    "next_tokens",
    "pack",
    "plan",
    "selective_scan",
    "sum_gradients",
    "testing",
]

_HOMES = {
    "Mask": "geometry.mask",
    "PackedSampler": "geometry.packing",
    "PeerError": "agreement.errors",
    "Plan": "schedule.plan",
    "Sequence": "sequence",
    "SequenceParallel": "parallel",
    "checkpoint_context": "checkpoint",
    "decayed_attention": "kernels.recurrences",
    "gated_delta_rule": "kernels.recurrences",
    "global_mean": "losses",
    "gradient_factor": "losses",
    "kimi_delta_rule": "kernels.recurrences",
    "linear_recurrence": "kernels.elementwise",
    "next_tokens": "losses",
    "pack": "geometry.packing",
    "plan": "planner.answer",
    "selective_scan": "kernels.elementwise",
    "sum_gradients": "losses",
}


_MODULES = ("losses", "testing")


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"startrail.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'startrail' has no attribute {name!r}")
    return getattr(import_module(f"startrail.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
