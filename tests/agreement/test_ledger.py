"""What ranks write into the store: it is right whatever another rank does at the same time."""

import contextlib
from datetime import timedelta

import pytest
import torch.distributed as dist

from startrail.agreement import ledger
from startrail.agreement.ledger import CallLedger, Failure, abandon_epoch


class _StoppedError(Exception):
    pass


class _Interrupted(dist.PrefixStore):
    """A store for a rank that stops after ``left`` requests."""

    left = 99


def _counted(name):
    def request(self, *arguments):
        if not _Interrupted.left:
            raise _StoppedError
        _Interrupted.left -= 1
        return getattr(dist.PrefixStore, name)(self, *arguments)

    return request


for _name in ("add", "set", "get", "check", "compare_set", "delete_key"):
    setattr(_Interrupted, _name, _counted(_name))


@pytest.mark.parametrize("num_requests", range(1, 6))
def test_a_second_rank_finishes_what_the_first_has_begun(num_requests, monkeypatch):
    """One rank abandons an epoch and stops between two requests to the store. Another one abandons it as well, and sees
    it abandoned, for one reason, before it goes on: it would otherwise raise again, or join a call of the old epoch."""
    store = dist.HashStore()
    monkeypatch.setattr(ledger, "default_store", lambda: store)
    monkeypatch.setattr(ledger, "PrefixStore", _Interrupted)
    reader = CallLedger("group/1", 2, 3, timedelta(seconds=5))
    reader.enter(0)
    failures = [Failure(True, f"because of rank {rank}", 1, "an instance", 0, None, [2]) for rank in (0, 1)]
    _Interrupted.left = num_requests
    with contextlib.suppress(_StoppedError):
        abandon_epoch(reader.name, 0, failures[0])
    _Interrupted.left = 99
    seen = reader.newest_epoch(), reader.read_failure(0), reader.may_rejoin(0)
    assert seen[0] == 0 or seen == (1, failures[0], True), "whoever sees the new epoch sees the reason"
    assert abandon_epoch(reader.name, 0, failures[1]) == 1
    assert reader.newest_epoch() == 1 and reader.may_rejoin(0)
    assert reader.read_failure(0) == failures[0 if num_requests > 1 else 1]
    assert abandon_epoch(reader.name, 0, failures[1]) == 1 == reader.newest_epoch()
