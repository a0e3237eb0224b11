"""The one kind of error for a peer that is lost, whoever notices it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


class PeerError(RuntimeError):
    """A peer died, gave up, or did not deliver in time; the text names rank, step, piece and peer."""


def lost_peer(error: RuntimeError) -> bool:
    """Whether a rank failed because another did: gloo has no exception of its own for that."""
    return isinstance(error, PeerError | dist.DistError) or "gloo" in str(error)


@contextmanager
def peer_errors(what: str) -> Iterator[None]:
    """Where torch's own collectives are called: a lost peer is a ``PeerError``, whoever notices it."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, PeerError) or not lost_peer(error):
            raise
        raise PeerError(f"{what}: a rank is gone, or late: {str(error).strip().splitlines()[0]}") from error
