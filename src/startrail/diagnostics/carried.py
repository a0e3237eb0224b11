"""Faults of layers that carry something from token to token, recurrences and convolutions: what one process computes if
it makes them as ranks with a fault do.

>>> shards = [torch.tensor([0, 1, 6, 7]), torch.tensor([2, 3, 4, 5])]                      # zigzag
>>> runs = RankRuns.of(shards, documents=[0, 5, 8])
>>> runs.starts, runs.ranks, runs.documents
([0, 2, 5, 6], [0, 1, 1, 0], [0, 0, 1, 1])
>>> Restart("shards").split(runs, 8)                 # rank 0 takes its two runs for one, unless a document begins
([0, 1, 6, 7, 2, 3, 4, 5], [2, 2, 3, 1])
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from startrail import sequence as _sequence
from startrail.kernels.convolution import causal_conv1d
from startrail.kernels.runs import Recurrence

RESTARTS = (
    "a recurrence's state restarts at the edges of shards: call seq.scan, which carries it from run to run over all "
    "ranks"
)
LEAKS = "a recurrence's state leaks from one packed document into the next: pass documents to sp.sequence"
NEIGHBOUR = (
    "a recurrence gets only what its neighbour's tokens leave, without the state before them: right on 2 ranks, wrong "
    "on more; call seq.scan"
)
DETACHED = (
    "no gradient flows back through a recurrence's state to the ranks before: send states by an operation with a "
    "backward pass, as seq.scan does"
)
NO_HALO = (
    "a convolution has no halo: at the edges of shards it sees zeros instead of the tokens before; call seq.conv1d or "
    "seq.halo"
)
CONV_LEAKS = "a convolution sees the packed document before: pass documents to sp.sequence"
CONV_DETACHED = "no gradient flows back from a convolution to the tokens of its halo: call seq.conv1d or seq.halo"


class RankRuns(NamedTuple):
    """The runs of all ranks, cut at documents, in order: first tokens, lengths, ranks, and numbers of documents.
    ``order`` is that in which ranks hold tokens."""

    starts: list[int]
    lengths: list[int]
    ranks: list[int]
    documents: list[int]
    order: list[int]

    @classmethod
    def of(cls, shards: Sequence[Tensor], documents: Sequence[int]) -> RankRuns:
        order = torch.cat(list(shards)).tolist()
        owner = dict(zip(order, (rank for rank, shard in enumerate(shards) for _ in shard), strict=True))
        tokens = sorted(owner)
        starts = [t for t in tokens if t in documents or owner.get(t - 1) != owner[t]]
        lengths = [stop - start for start, stop in pairwise([*starts, len(tokens)])]
        numbers = [bisect_right(documents, t) - 1 for t in starts]
        return cls(starts, lengths, [owner[t] for t in starts], numbers, order)

    def begins(self, run: int) -> bool:
        """True if a document does."""
        return run == 0 or self.documents[run] != self.documents[run - 1]


class Fault(ABC):
    """``scan`` and ``conv1d`` say what is wrong with them; without a text they are as they should be."""

    scan = conv1d = ""

    @abstractmethod
    def outputs(self, runs: RankRuns, make: Callable[..., Recurrence], tensors: Sequence[Tensor]) -> Tensor:
        """A recurrence's outputs. ``make(*tensors, lengths=...)`` computes runs."""

    @abstractmethod
    def convolved(self, runs: RankRuns, convolve: Callable[..., Tensor], x: Tensor, before: int) -> Tensor:
        """A convolution of x (batch, channels, tokens); ``convolve(x, history=...)`` computes one run, and sees
        ``before`` tokens before each."""


class Restart(Fault):
    """Every run begins anew; with ``of`` "shards", only the first of a rank in each document."""

    scan, conv1d = RESTARTS, NO_HALO

    def __init__(self, of: str) -> None:
        self.of = of

    def split(self, runs: RankRuns, length: int) -> tuple[list[int], list[int]]:
        """The order of tokens, and the lengths of what is computed separately."""
        if self.of == "runs":
            return list(range(length)), runs.lengths
        lengths: list[int] = []
        kinds = dict(zip(runs.starts, zip(runs.ranks, runs.documents, strict=True), strict=True))
        kind = None
        for token in runs.order:
            if kinds.get(token, kind) != kind:
                kind = kinds[token]
                lengths.append(0)
            lengths[-1] += 1
        return runs.order, lengths

    def outputs(self, runs: RankRuns, make: Callable[..., Recurrence], tensors: Sequence[Tensor]) -> Tensor:
        length = tensors[0].shape[1]
        order, lengths = (torch.tensor(x) for x in self.split(runs, length))
        shape = tensors[0].shape[:2]
        given = [x.index_select(1, order) if x.shape[:2] == shape else x for x in tensors]
        return make(*given, lengths=lengths.tolist()).run()[0].index_select(1, order.argsort())

    def convolved(self, runs: RankRuns, convolve: Callable[..., Tensor], x: Tensor, before: int) -> Tensor:
        order, lengths = self.split(runs, x.shape[2])
        taken = torch.tensor(order)
        outs = [convolve(each) for each in x.index_select(2, taken).split(lengths, 2)]
        return torch.cat(outs, 2).index_select(2, taken.argsort())


class Leak(Fault):
    """There is one document."""

    scan, conv1d = LEAKS, CONV_LEAKS

    def outputs(self, runs: RankRuns, make: Callable[..., Recurrence], tensors: Sequence[Tensor]) -> Tensor:
        return make(*tensors, lengths=[tensors[0].shape[1]]).run()[0]

    def convolved(self, runs: RankRuns, convolve: Callable[..., Tensor], x: Tensor, before: int) -> Tensor:
        return convolve(x)


class HandedOn(Fault):
    """States and halos are right, but have no gradient. ``neighbour``: states are those that the run before makes of
    zeros; ``gradient``: they have their gradient."""

    def __init__(self, neighbour: bool, gradient: bool) -> None:
        self.neighbour, self.gradient = neighbour, gradient
        self.scan = "; ".join([NEIGHBOUR] * neighbour + [DETACHED] * (not gradient))
        self.conv1d = "" if neighbour else CONV_DETACHED

    def outputs(self, runs: RankRuns, make: Callable[..., Recurrence], tensors: Sequence[Tensor]) -> Tensor:
        recurrence = make(*tensors, lengths=runs.lengths)
        moves, adds = recurrence.transition, recurrence.contribution
        states = [torch.zeros_like(adds[:, 0])]
        for run in range(1, len(runs.starts)):
            state = adds[:, run - 1]
            if not self.neighbour:
                move, last = moves[:, run - 1], states[-1]
                state = state + (move @ last if recurrence.matrix else move * last)
            states.append(torch.zeros_like(state) if runs.begins(run) else state)
        entering = torch.stack(states, 1)
        return recurrence.outputs(entering if self.gradient else entering.detach())

    def convolved(self, runs: RankRuns, convolve: Callable[..., Tensor], x: Tensor, before: int) -> Tensor:
        outs, document = [], 0
        for run, (start, length) in enumerate(zip(runs.starts, runs.lengths, strict=True)):
            document = start if runs.begins(run) else document
            first = max(document, start - before)
            zeros = x.new_zeros(*x.shape[:2], before - (start - first))
            halo = torch.cat((zeros, x[:, :, first:start].detach()), 2)
            outs.append(convolve(x[:, :, start : start + length], history=halo))
        return torch.cat(outs, 2)


@contextmanager
def carrying(shards: Sequence[Tensor] | None, scans: Fault | None, convolutions: Fault | None) -> Iterator[None]:
    """Within, ``Sequence.scan`` and ``Sequence.conv1d`` of one process compute what ranks with these faults do."""
    kind = _sequence.Sequence
    right_scan, right_conv1d = kind.scan, kind.conv1d

    def runs_of(sequence: Any, length: int) -> RankRuns:
        own = [shard[shard < length] for shard in shards or ()]
        left = torch.arange(sum(map(len, own)), length)
        return RankRuns.of([*own[:-1], torch.cat((own[-1], left))], sequence.documents.tolist())

    def scan(sequence: Any, kernel: Any, *tensors: Tensor, **options: Any) -> Any:
        if scans is None or options.keys() & {"initial_state", "output_final_state"}:
            return right_scan(sequence, kernel, *tensors, **options)
        runs = runs_of(sequence, tensors[0].shape[1])
        return scans.outputs(runs, lambda *given, lengths: kernel(*given, lengths=lengths, **options), tensors)

    def conv1d(
        sequence: Any, x: Tensor, weight: Tensor, bias: Any = None, activation: Any = None, *, dim: int = 2
    ) -> Tensor:
        if convolutions is None:
            return right_conv1d(sequence, x, weight, bias, activation, dim=dim)
        x = x if dim in (2, -1) else x.mT

        def convolve(x: Tensor, history: Tensor | None = None) -> Tensor:
            return causal_conv1d(x, weight, bias, activation, history)

        out = convolutions.convolved(runs_of(sequence, x.shape[2]), convolve, x, weight.shape[1] - 1)
        return out if dim in (2, -1) else out.mT

    with patch.object(kind, "scan", scan), patch.object(kind, "conv1d", conv1d):
        yield


def faults_of(called: set[str]) -> Iterator[tuple[str, Fault | None, Fault | None]]:
    """Texts of faults of what one process has ``called``, each with what is wrong with scans and with convolutions."""
    runs, shards, leak, detached = Restart("runs"), Restart("shards"), Leak(), HandedOn(False, gradient=False)
    neighbours = HandedOn(True, gradient=True), HandedOn(True, gradient=False)
    both = runs, shards, leak, detached
    pairs: list[tuple[Fault | None, Fault | None]] = [(fault, None) for fault in (*both, *neighbours)]
    pairs += [(None, fault) for fault in both] + [(fault, fault) for fault in both]
    pairs += [(scan, conv1d) for scan in neighbours for conv1d in (runs, shards)]
    for scan, conv1d in pairs:
        if (scan is None or "scan" in called) and (conv1d is None or "conv1d" in called):
            texts = ([scan.scan] if scan else []) + ([conv1d.conv1d] if conv1d else [])
            yield "; ".join(texts), scan, conv1d
