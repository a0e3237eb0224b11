"""``PeerError``: the one error for a lost peer, raised whichever way the loss is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from startrail._compat import is_gloo_error


class PeerError(RuntimeError):
    """A peer died, failed, or did not deliver in time. The message names the rank, the step, the piece and the peer."""


def is_peer_error(error: RuntimeError) -> bool:
    """True if a rank failed because another one did."""
    return isinstance(error, PeerError | dist.DistError) or is_gloo_error(error)


@contextmanager
def peer_errors(operation: str) -> Iterator[None]:
    """Raise ``PeerError`` if a collective of torch's own fails because of a lost peer."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, PeerError) or not is_peer_error(error):
            raise
        raise PeerError(f"{operation}: a rank is gone or late: {str(error).strip().splitlines()[0]}") from error
