"""Makes sure that all ranks of a process group are about to run the same collective.

gloo ends the process if ranks send different amounts, and NCCL hangs. So ranks first exchange a digest of what they are
about to do. It has one size whatever they do, so ranks in different collectives find that out as well.
"""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist

from startrail.comm.errors import peer_errors
from startrail.comm.gather import gather_texts
from startrail.comm.waits import rank_names

_agreed: set[tuple[int, ...] | None] = set()  # ranks of a group, and a digest that they have agreed on


def agree(operation: str, details: list[str], group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Raise ``ValueError`` on all ranks of ``group`` unless all call ``operation`` with the same ``details``.

    On CPUs every call is compared. Elsewhere the host would wait for the device, so only the first such call is.
    """
    if dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake":
        return
    text = "; ".join((operation, *details))
    digest = zlib.crc32(text.encode())
    known = None if device.type == "cpu" else (*dist.get_process_group_ranks(group), digest)
    if known in _agreed:
        return
    extremes = torch.tensor([digest, -digest], device=device)
    with peer_errors(operation, group):
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
        low, high = extremes.tolist()
    if low + high == 0:
        if known is not None:
            _agreed.add(known)
        return
    raise ValueError(_explain([text.split("; ") for text in gather_texts(text, group, device)]))


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
