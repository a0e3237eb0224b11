"""``PeerError``: the one error for a lost peer, however the loss is detected."""

from __future__ import annotations

import re
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


def in_short(error: object) -> str:
    """The first sentence of what a backend says, without places in its source.

    >>> in_short("[/__w/gloo/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:4321. This may indicate a crash.")
    'Connection closed by peer [10.0.0.1]:4321'
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    without_places = re.sub(r"\[?[^\s\[]*/\S+\.(cc|cpp|cu|h|hpp):\d+\]?,?\s*", "", lines[0])
    return re.split(r"(?<=\S)\.(?:\s|$)", without_places, maxsplit=1)[0]


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
        others = describe_waits(dist.get_process_group_ranks(group), start)
        reasons = "; ".join(text for text in (others, in_short(error)) if text)
        raise PeerError(f"{operation}: a rank is gone or late: {reasons}") from error
