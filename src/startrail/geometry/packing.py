"""Which documents of a global batch become one sequence, and which data-parallel group computes it when.

A step of training waits for its slowest group. So sequences that are computed at the same time get equal work, and no
sequence gets more tokens than its ranks hold. Inside a sequence, the layout (`zones`) gives a document as many ranks as
it needs. No torch: `PackedSampler` is a batch sampler for PyTorch's DataLoader because it yields lists of numbers.

Work is counted in tokens: a document of n tokens costs n + n²/even. With ``even`` tokens, attention takes as long as
all else that is computed per token. That is 12 x the width of a plain causal Transformer: 49,152 for 4,096.
"""

from __future__ import annotations

import heapq
import operator
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

EVEN = 49_152  # tokens


@dataclass(frozen=True)
class Packing:
    """``steps[i][g]``: the numbers of the documents of the sequence that group g computes in its i-th pass, forward and
    backward, of an optimizer step. ``tokens`` and ``work`` are those of each such sequence."""

    steps: tuple[tuple[tuple[int, ...], ...], ...]
    tokens: tuple[tuple[int, ...], ...]
    work: tuple[tuple[float, ...], ...]
    capacity: int  # tokens that a sequence may have

    @property
    def filled(self) -> float:
        """The share of the room for tokens that is used."""
        return sum(map(sum, self.tokens)) / (self.capacity * sum(map(len, self.tokens)))

    @property
    def balance(self) -> float:
        """The mean work of a group over the work that all wait for, if groups wait for each other at every pass."""
        return sum(sum(work) / len(work) for work in self.work) / sum(map(max, self.work))

    def __str__(self) -> str:
        documents = sum(len(sequence) for step in self.steps for sequence in step)
        return (
            f"{documents} documents in {len(self.steps)} x {len(self.steps[0])} sequences, {self.filled:.0%} of "
            f"{self.capacity} tokens filled, groups work {self.balance:.0%} of the time"
        )


def pack(
    lengths: Sequence[int], ranks: int, tokens_per_rank: int, *, groups: int = 1, even: float = EVEN
) -> Packing:  # fmt: skip
    """Pack the documents with these ``lengths``, a global batch, into sequences of at most ``ranks * tokens_per_rank``
    tokens for ``groups`` data-parallel groups of ``ranks`` ranks. All groups compute equally many sequences, as few as
    possible; if there are more of these than documents, some are empty. Documents are not cut, and all groups get the
    same answer without communicating.

    Here, eight tokens fit into a sequence. The document of 8 has work 8 + 8²/4 = 24 and takes a sequence alone. The
    other group then computes those of 5 and 2 tokens, with 11.25 + 3, because no other sequence comes closer to 24:

    >>> packing = pack([8, 2, 5, 2, 4, 3, 3], ranks=2, tokens_per_rank=4, groups=2, even=4)
    >>> packing.steps
    (((0,), (2, 3)), ((5, 6), (1, 4)))
    >>> packing.tokens, packing.work
    (((8, 7), (6, 6)), ((24.0, 14.25), (10.5, 11.0)))
    """
    lengths, capacity = _check(lengths, groups, ranks, tokens_per_rank, even)
    if len(lengths) < groups:
        raise ValueError(f"{len(lengths)} documents are too few: each of {groups} groups needs one")
    alone = sum(2 * length > capacity for length in lengths)  # in a sequence each
    passes = max(-(-sum(lengths) // (groups * capacity)), -(-alone // groups))
    failed, more = passes - 1, 1
    while (packed := _pack(lengths, range(len(lengths)), groups, passes, capacity, even)) is None:
        failed, passes, more = passes, passes + more, 2 * more  # ends: with a document per sequence, all fit
    while passes - failed > 1:
        middle = (failed + passes) // 2
        if fewer := _pack(lengths, range(len(lengths)), groups, middle, capacity, even):
            packed, passes = fewer, middle
        else:
            failed = middle
    return packed


class PackedSampler:
    """A batch sampler for ``torch.utils.data.DataLoader``: yields the numbers of the documents of this group's next
    sequence. Every ``steps`` sequences are one optimizer step, whose documents follow each other in the (shuffled)
    order of the epoch: packing decides who computes them, not what is learned together. The last documents of an epoch
    are left out if they are fewer than the step has sequences.

    ``group`` is the number of this data-parallel group; all ranks of a group yield the same. Nothing is communicated.
    The order depends on ``seed`` and the epoch, which each iteration counts up.

    >>> sampler = PackedSampler([8, 2, 5, 2, 4, 3, 3], ranks=2, tokens_per_rank=4, groups=2, group=1, shuffle=False)
    >>> before = list(sampler)
    >>> sampler.load_state_dict(sampler.state_dict() | {"epoch": 0, "sequences": 1})       # after the first one
    >>> before[1:] == list(sampler)
    True
    """

    def __init__(
        self, lengths: Sequence[int], ranks: int, tokens_per_rank: int, *, groups: int = 1, group: int = 0,
        steps: int = 1, seed: int = 0, shuffle: bool = True, even: float = EVEN,
    ) -> None:  # fmt: skip
        lengths, self._capacity = _check(lengths, groups, ranks, tokens_per_rank, even)
        _check_counts(steps=steps)
        if not 0 <= group < groups:
            raise ValueError(f"group={group} is not one of 0 to {groups - 1}, the {groups} groups")
        if len(lengths) < groups * steps:
            raise ValueError(f"{len(lengths)} documents are too few: {groups} groups x {steps} steps need one each")
        self._lengths, self._groups, self._group, self._steps = lengths, groups, group, steps
        self._seed, self._shuffle, self._even = seed, shuffle, even
        self._epoch = self._sequences = 0
        self._settings = (
            f"{len(lengths)} documents with {sum(lengths)} tokens, {ranks} ranks x {tokens_per_rank} tokens, "
            f"{groups} groups, steps {steps}, seed {seed}, shuffle {shuffle}, even {even}"
        )

    def __iter__(self) -> Iterator[list[int]]:
        """The rest of this epoch."""
        skipped = self._sequences
        for packing in self.packings(self._epoch):
            for step in packing.steps:
                if skipped:
                    skipped -= 1
                    continue
                self._sequences += 1
                yield list(step[self._group])
        self._epoch, self._sequences = self._epoch + 1, 0

    def packings(self, epoch: int) -> Iterator[Packing]:
        """The optimizer steps of an epoch, for all groups."""
        order = list(range(len(self._lengths)))
        if self._shuffle:
            random.Random(f"{self._seed} {epoch}").shuffle(order)
        ends = [0, *accumulate(self._lengths[number] for number in order)]
        room, start, sequences = self._capacity * self._groups * self._steps, 0, self._groups * self._steps
        while len(order) - start >= sequences:
            most = bisect_right(ends, ends[start] + room) - 1 - start
            packing, taken = self._largest(order[start : start + most], sequences)
            yield packing
            start += taken

    def _largest(self, numbers: Sequence[int], least: int) -> tuple[Packing, int]:
        """The packing of as many of these documents, in their order, as fit, and their number. ``least`` always do."""
        most, found = len(numbers) + 1, None
        trial = len(numbers)
        while trial > least or found is None:
            packing = _pack(self._lengths, numbers[:trial], self._groups, self._steps, self._capacity, self._even)
            if packing is None:
                most = trial
            else:
                found, least = packing, trial
            trial = (least + most) // 2
        return found, least

    def state_dict(self) -> dict[str, int | str]:
        """Where to go on, the same for all groups. A DataLoader with workers reads ahead of the training loop: replace
        ``sequences`` by the number of sequences of this epoch that were trained on."""
        return {"settings": self._settings, "epoch": self._epoch, "sequences": self._sequences}

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Go on where ``state`` was taken. Raises ``ValueError`` if it is that of other documents or settings."""
        if state.get("settings") != self._settings:
            raise ValueError(f"the state is that of {state.get('settings')}, not of {self._settings}")
        epoch, sequences = state["epoch"], state["sequences"]
        _check_counts(0, epoch=epoch, sequences=sequences)
        self._epoch, self._sequences = int(epoch), int(sequences)


def _check(lengths: Sequence[int], groups: int, ranks: int, tokens_per_rank: int, even: float) -> tuple[list[int], int]:
    """The lengths, and the tokens that a sequence may have. Raises ``ValueError`` if these are too few for one."""
    _check_counts(ranks=ranks, tokens_per_rank=tokens_per_rank, groups=groups)
    if not even > 0:
        raise ValueError(f"even={even!r} must be a number of tokens greater than 0")
    capacity = ranks * tokens_per_rank
    try:
        lengths = [operator.index(length) for length in lengths]
    except TypeError as error:
        raise ValueError(f"lengths must be whole numbers of tokens, one per document: {error}") from None
    for number, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"document {number} has {length} tokens; it needs at least 1")
        if length > capacity:
            raise ValueError(
                f"document {number} has {length} tokens, but a sequence has at most {ranks} ranks x {tokens_per_rank} "
                f"tokens per rank = {capacity}: use more ranks, or cut it"
            )
    return lengths, capacity


def _check_counts(least: int = 1, **counts: object) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            raise ValueError(f"{name}={count!r} must be a whole number, {name} >= {least}")


def _pack(
    lengths: Sequence[int], numbers: Sequence[int], groups: int, passes: int, capacity: int, even: float
) -> Packing | None:
    """The best of a few ways to pack these documents into ``passes`` sequences for each of ``groups``; None if no way
    fits."""
    ordered = sorted(numbers, key=lambda number: (-lengths[number], number))
    costs = [lengths[number] * (1 + lengths[number] / even) for number in ordered]
    sizes = [lengths[number] for number in ordered]
    packings = []
    for weights in (costs, sizes):
        if (bins := _spread(sizes, weights, groups * passes, capacity)) is None:
            continue
        work = [sum(costs[at] for at in places) for places in bins]
        ranked = sorted(range(len(bins)), key=lambda i: -work[i])
        steps = [ranked[i * groups : (i + 1) * groups][:: -1 if i % 2 else 1] for i in range(passes)]
        packings.append(
            Packing(
                tuple(tuple(tuple(sorted(ordered[at] for at in bins[i])) for i in step) for step in steps),
                tuple(tuple(sum(sizes[at] for at in bins[i]) for i in step) for step in steps),
                tuple(tuple(work[i] for i in step) for step in steps),
                capacity,
            )
        )
    return max(packings, key=lambda packing: packing.balance, default=None)


def _spread(sizes: Sequence[int], weights: Sequence[float], bins: int, capacity: int) -> list[list[int]] | None:
    """Each document, the largest first, goes to the bin with the least weight that has room; None if none has."""
    contents: list[list[int]] = [[] for _ in range(bins)]
    heap = [(0.0, 0, at) for at in range(bins)]  # weight, tokens, number
    full: list[tuple[int, float, int]] = []  # tokens, weight, number: for now, since documents become smaller
    for place, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        while full and full[0][0] + size <= capacity:
            tokens, before, at = heapq.heappop(full)
            heapq.heappush(heap, (before, tokens, at))
        while heap and heap[0][1] + size > capacity:
            before, tokens, at = heapq.heappop(heap)
            heapq.heappush(full, (tokens, before, at))
        if not heap:
            return None
        before, tokens, at = heap[0]
        contents[at].append(place)
        heapq.heapreplace(heap, (before + weight, tokens + size, at))
    return contents
