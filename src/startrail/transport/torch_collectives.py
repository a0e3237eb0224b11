"""Makes sure that all ranks of a process group are about to run the same collective of torch's own.

gloo ends the process if ranks send different amounts, and NCCL hangs. So ranks compare these calls like those of a
``SequenceParallel``: the first of a kind through the store, later ones by a digest. They have a group of their own for
that: if a rank does not come, because it has failed elsewhere, the user's group is unharmed.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from startrail._compat import default_timeout
from startrail.agreement.consensus import Consensus, rejoining
from startrail.agreement.errors import PeerError
from startrail.agreement.ledger import CallRecord
from startrail.agreement.waits import rank_names
from startrail.schedule.places import Place
from startrail.transport.counters import Counters
from startrail.transport.gloo import Gloo
from startrail.transport.process_groups import sends_nothing


def agree(operation: str, details: list[str], group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Raise ``ValueError`` on all ranks of ``group`` unless all call ``operation`` with the same ``details``.

    On CPUs every call is compared. Elsewhere only the first such call is: a host that waits would be late to launch.
    """
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group must be a ProcessGroup, got {type(group).__name__}")
    if dist.get_world_size(group) == 1 or sends_nothing():
        return
    collectives = _collectives_of(group)
    try:
        collectives.agree(operation, details, device.type == "cpu")
    except PeerError as error:
        raise PeerError(f"{operation}: a rank is gone or late: {error}") from error


class Collectives(Consensus):
    """The collectives of one group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        ranks, rank = tuple(dist.get_process_group_ranks(group)), dist.get_rank(group)
        self.timeout = default_timeout(group or dist.group.WORLD)
        name = f"startrail/collectives/{ranks[0]}-{zlib.crc32(repr(ranks).encode()):x}"
        super().__init__(name, ranks, rank, self.timeout)
        self.place = Place(rank, (len(ranks),), (False,))
        self.transport: Gloo | None = None

    @rejoining
    def agree(self, operation: str, details: list[str], on_host: bool) -> None:
        self.check_process()
        try:
            self.start(CallRecord("; ".join(details), kind=operation))
            kind = operation if on_host else (operation, *details)
            if not self.has_agreed(kind):
                self.compare([kind])
                if on_host and self.transport is None:  # all ranks are here: one that fails later would not come
                    name, cpu = f"{self.enter()}/{self.epoch}", torch.device("cpu")
                    self.transport = Gloo(self, Counters(), self.place, name, self.timeout, cpu, ())
            elif self.transport is not None and on_host:
                self.transport.compare_call()
        except BaseException as error:
            self.abandon(error, 0)
            if self.transport is not None:
                self.transport.abandon(error)
            self.transport = None
            raise

    def place_of_call(self) -> str:
        return f"{self.current.record.kind} {self.current.epoch}.{self.current.number}"

    def explain(self, records: Mapping[int, CallRecord]) -> str:
        """The first difference between what ranks call."""
        return explain_difference(records)


# Of each default process group, by the ranks of a group.
_known: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Collectives]] = WeakKeyDictionary()


def _collectives_of(group: dist.ProcessGroup | None) -> Collectives:
    assert dist.group.WORLD is not None
    of_world, ranks = _known.setdefault(dist.group.WORLD, {}), tuple(dist.get_process_group_ranks(group))
    if ranks not in of_world:
        of_world[ranks] = Collectives(group)
    return of_world[ranks]


def explain_difference(records: Mapping[int, CallRecord]) -> str:
    """The first difference between what ranks call.

    >>> of_ranks = {rank: CallRecord(f"(2, 2); {shape}", kind="sum_gradients") for rank, shape in enumerate("ab")}
    >>> explain_difference(of_ranks)
    'ranks disagree about sum_gradients: rank 0: 2 of 2 is a; rank 1: 2 of 2 is b'
    """
    texts = {rank: [record.kind, *record.call.split("; ")] for rank, record in records.items()}
    longest = max(map(len, texts.values()))
    place = next(i for i in range(longest) if len({tuple(each[: i + 1]) for each in texts.values()}) > 1)
    said: dict[str, list[int]] = {}
    for rank, (operation, *details) in texts.items():
        if place == 0:
            what = operation
        elif place > len(details):
            what = f"{len(details)} in all"
        else:
            what = f"{place} of {len(details)} is {details[place - 1]}"
        said.setdefault(what, []).append(rank)
    listed = "; ".join(f"{rank_names(at)}: {what}" for what, at in said.items())
    return f"ranks disagree about {'one call' if place == 0 else texts[min(texts)][0]}: {listed}"
