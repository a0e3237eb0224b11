"""``PeerError``: the one error for a lost peer, however the loss is detected."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from startrail._compat import is_gloo_error
from startrail.agreement.waits import describe_waits, published_wait


class PeerError(RuntimeError):
    """A peer died, failed, or did not deliver in time. The message names the rank, the step, the piece and the peer."""


def is_peer_error(error: RuntimeError) -> bool:
    """True if a rank failed because another one did."""
    return isinstance(error, PeerError | dist.DistError) or is_gloo_error(error)


@contextmanager
def peer_errors(operation: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raise ``PeerError`` if a collective of torch's own on ``group`` fails because of a lost peer. After a long wait
    it says what the other ranks wait for."""
    start = time.monotonic()
    try:
        with published_wait(operation):
            yield
    except RuntimeError as error:
        if isinstance(error, PeerError) or not is_peer_error(error):
            raise
        first = str(error).strip().splitlines()[0]
        others = describe_waits(dist.get_process_group_ranks(group), start)
        raise PeerError(f"{operation}: a rank is gone or late: {first}{others}") from error
