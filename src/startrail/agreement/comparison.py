"""Compares calls: makes sure that all ranks of a process group are about to run the same one.

gloo ends the process if ranks send different amounts, and NCCL hangs. So ranks first exchange a digest of what they are
about to do. It has one size whatever they do, so ranks in different calls find that out as well.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from startrail.agreement.errors import peer_errors
from startrail.agreement.gather import gather_texts
from startrail.agreement.waits import rank_names

_agreed: set[tuple[int, ...] | None] = set()  # ranks of a group, and a digest that they have agreed on


class DigestComparison:
    """Finds out whether all ranks have the same ``digest`` (at least 1), by an all-reduce of the maxima of it and of
    its negative, over one group after the other; together these connect all ranks. Starting it waits for nothing."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], digest: int, device: torch.device | str = "cpu") -> None:
        self.extremes = self._digests(digest, device)
        self.posted = time.monotonic()
        self._groups = list(groups)
        self.work = self._start()

    def _digests(self, digest: int, device: torch.device | str) -> Tensor:
        """The negative digest and the digest."""
        return torch.arange(-digest, digest + 1, 2 * digest, device=device)

    def _start(self) -> dist.Work:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        return self._groups.pop(0).allreduce([self.extremes], options)

    def is_same(self) -> bool:
        """True if all ranks have the same digest, once the result is known."""
        low, high = self.extremes.tolist()
        return bool(low + high == 0)

    def finish(self) -> bool:
        """Wait for the result, on the host. True if all ranks have the same digest."""
        self.work.wait()
        while self._groups:
            self.work = self._start()
            self.work.wait()
        return self.is_same()


def agree(operation: str, details: list[str], group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Raise ``ValueError`` on all ranks of ``group`` unless all call ``operation`` with the same ``details``.

    On CPUs every call is compared. Elsewhere the host would wait for the device, so only the first such call is.
    """
    if dist.get_world_size(group) == 1:
        return
    text = "; ".join((operation, *details))
    digest = zlib.crc32(text.encode()) + 1
    known = None if device.type == "cpu" else (*dist.get_process_group_ranks(group), digest)
    if known in _agreed:
        return
    everyone = group or dist.group.WORLD
    assert everyone is not None
    with peer_errors(operation, group):
        is_same = DigestComparison([everyone], digest, device).finish()
    if not is_same:
        raise ValueError(_explain([text.split("; ") for text in gather_texts(text, group, device)]))
    if known is not None:
        _agreed.add(known)


def _explain(ranks: list[list[str]]) -> str:
    """The first difference between what ranks call.

    >>> _explain([["sum_gradients", "(2, 2)", "(3,)"], ["sum_gradients", "(2, 2)", "(4,)"]])
    'ranks disagree about sum_gradients: rank 0: 2 of 2 is (3,); rank 1: 2 of 2 is (4,)'
    """
    place = next(i for i in range(max(map(len, ranks))) if len({tuple(each[: i + 1]) for each in ranks}) > 1)
    said: dict[str, list[int]] = {}
    for rank, (operation, *details) in enumerate(ranks):
        if place == 0:
            what = operation
        elif place > len(details):
            what = f"{len(details)} in all"
        else:
            what = f"{place} of {len(details)} is {details[place - 1]}"
        said.setdefault(what, []).append(rank)
    listed = "; ".join(f"{rank_names(at)}: {what}" for what, at in said.items())
    return f"ranks disagree about {'one call' if place == 0 else ranks[0][0]}: {listed}"
