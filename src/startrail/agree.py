"""Ranks that must do the same thing say so before anything is sent.

Each new kind of call is compared once over the whole group. A rank whose arguments are wrong takes part as well, so that
every rank raises the same ``ValueError`` instead of waiting for it.
"""

from __future__ import annotations

import torch.distributed as dist


class Agreement:
    def __init__(self, group: dist.ProcessGroup | None, every_call: bool) -> None:
        self.group, self.every_call = group, every_call
        self._agreed: set[str] = set()

    def knows(self, subject: str) -> bool:
        return subject in self._agreed and not self.every_call

    def confirm(self, subject: str, detail: str, problem: str | None) -> None:
        """Raise on every rank unless all ranks come with the same ``detail`` and none with a ``problem``."""
        if self.group is None:
            if problem:
                raise ValueError(problem)
            return
        said: list[tuple[str, str | None]] = [("", None)] * self.group.size()
        dist.all_gather_object(said, (detail, problem), group=self.group)
        problems = {}
        for rank, (_, text) in enumerate(said):
            if text:
                problems.setdefault(text, []).append(rank)
        if problems:
            if len(problems) == 1 and len(next(iter(problems.values()))) == len(said):
                raise ValueError(problem)
            raise ValueError("; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in problems.items()))
        details: dict[str, list[int]] = {}
        for rank, (text, _) in enumerate(said):
            details.setdefault(text, []).append(rank)
        if len(details) > 1:
            shown = "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in details.items())
            raise ValueError(f"ranks disagree about one attention call: {shown}")
        self._agreed.add(subject)


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:6])) + (", ..." if len(ranks) > 6 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
