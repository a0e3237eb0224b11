"""Private torch APIs: everything that may have to change for another version of torch."""

from __future__ import annotations

from torch import Tensor


def mark_weakly_dynamic(x: Tensor, dim: int) -> Tensor:
    """Have torch.compile treat the size of ``x`` in ``dim`` as dynamic. Does what ``torch._dynamo.maybe_mark_dynamic``
    does, without its import, which takes seconds."""
    x._dynamo_weak_dynamic_indices = {dim}  # type: ignore[attr-defined]
    return x
