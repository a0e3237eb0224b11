"""startrail: exact attention over near-infinite contexts, by concentric-ring sequence parallelism.

Names are imported when they are first used, so that plans, schedules and their viewer work without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from startrail.agree import PeerError
    from startrail.checkpoint import checkpoint_context
    from startrail.parallel import SequenceParallel
    from startrail.plan import Plan
    from startrail.sequence import Sequence

__version__ = "0.1.0"
__all__ = ["PeerError", "Plan", "Sequence", "SequenceParallel", "checkpoint_context"]

_HOMES = {
    "PeerError": "agree",
    "Plan": "plan",
    "Sequence": "sequence",
    "SequenceParallel": "parallel",
    "checkpoint_context": "checkpoint",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'startrail' has no attribute {name!r}")
    return getattr(import_module(f"startrail.{_HOMES[name]}"), name)
