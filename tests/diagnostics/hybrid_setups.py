"""Set-ups of a small hybrid for ``verify``: delta layers with convolutions around one of attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import startrail
from startrail.kernels.convolution import causal_conv1d
from tests.diagnostics.plain_setups import Make, ids, labels_of

LENGTH, VOCAB, WIDTH, HEADS, CONV = 40, 32, 16, 4, 4
PACKED = (0, 13, 24, LENGTH)


class Hybrid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.inside = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(3))
        self.gates = nn.ModuleList(nn.Linear(WIDTH, 2 * HEADS) for _ in range(3))
        self.windows = nn.ParameterList(torch.randn(3 * WIDTH, CONV) / 2 for _ in range(3))

    def forward(self, ids: Tensor, mixing: Any) -> Tensor:
        x = self.words(ids)
        for number, (inside, gates, window) in enumerate(zip(self.inside, self.gates, self.windows, strict=True)):
            y = inside(x)
            if number == 1:
                q, k, v = y.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
                x = x + mixing.sequence_for(mixing.attention).attention(q, k, v, causal=True).transpose(1, 2).flatten(2)
                continue
            q, k, v = mixing.conv1d(y, window).unflatten(-1, (3, HEADS, -1)).unbind(2)
            g, beta = gates(x).chunk(2, -1)
            x = x + mixing.scan(q, k, v, -0.1 * F.softplus(g), beta.sigmoid()).flatten(2)
        return self.head(x)


@dataclass
class Mixing:
    """How ranks mix tokens. ``one``: the same sequence as if it were one document."""

    whole: startrail.Sequence
    one: startrail.Sequence
    scans: str = "right"
    convolutions: str = "right"
    attention: str = "right"

    def sequence_for(self, fault: str) -> startrail.Sequence:
        return self.whole if fault == "right" else self.one

    def scan(self, *tensors: Tensor) -> Tensor:
        kernel = partial(startrail.gated_delta_rule, normalize=True)
        if self.scans in ("right", "leak"):
            return self.sequence_for(self.scans).scan(startrail.gated_delta_rule, *tensors, normalize=True)
        runs = self.whole.document_runs
        if self.scans == "restart":
            return kernel(*tensors, lengths=[count for _, count in runs]).run()[0]
        if self.scans == "restart in shards":
            return kernel(*tensors).run()[0]
        runs = self.two_runs(self.whole.sp.rank)
        recurrence = kernel(*tensors, lengths=[count for _, count in runs])
        moves, adds = (self.gathered(x) for x in (recurrence.transition, recurrence.contribution))
        sp = self.whole.sp
        starts = [start for rank in range(sp.world) for start, _ in self.two_runs(rank)]
        order = torch.tensor(starts).argsort().tolist()
        after, states = torch.zeros_like(adds[:, 0]), list(torch.zeros_like(adds).unbind(1))
        for number, run in enumerate(order):
            before = adds[:, order[number - 1]] if "neighbour" in self.scans and number else after
            states[run] = before.detach() if "detached" in self.scans else before
            after = moves[:, run] @ after + adds[:, run]
        return recurrence.outputs(torch.stack(states, 1)[:, 2 * sp.rank : 2 * sp.rank + 2])

    def two_runs(self, rank: int) -> list[tuple[int, int]]:
        """Those of a rank; gathering needs equally many of all, so the last may be empty."""
        return [*self.whole._layout.runs(rank), (LENGTH, 0)][:2]

    def gathered(self, x: Tensor) -> Tensor:
        return self.whole._gather(x.transpose(0, 1), 0).transpose(0, 1)

    def conv1d(self, x: Tensor, window: Tensor) -> Tensor:
        if self.convolutions in ("right", "leak"):
            return self.sequence_for(self.convolutions).conv1d(x, window, activation="silu", dim=1)
        if self.convolutions == "no halo in shards":
            return causal_conv1d(x.mT, window, activation="silu").mT
        outs, counts = [], [count for _, count in self.whole.document_runs]
        halo = self.whole.halo(x, CONV - 1).detach().unbind(1)
        for run, part in enumerate(x.split(counts, 1)):
            history = halo[run].mT if self.convolutions == "detached" else None
            outs.append(causal_conv1d(part.mT, window, activation="silu", history=history).mT)
        return torch.cat(outs, 1)


def reference(documents: tuple[int, ...] | None, model: Any, ids: Tensor) -> Tensor:
    sequence = startrail.SequenceParallel("1x1").sequence(ids.shape[1], documents)
    return backward(model, ids, Mixing(sequence, sequence))


def backward(model: Any, ids: Tensor, mixing: Mixing) -> Tensor:
    sequence = mixing.whole
    labels = sequence.shard_labels(labels_of(ids))
    logits = model(sequence.shard(ids, 1), mixing)
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss = startrail.global_mean(total, (labels != -100).sum(), sequence.sp.group)
    loss.backward()
    return loss


def of(documents: tuple[int, ...] | None = None, layout: str = "zones", length: int = LENGTH, **faults: str) -> Make:
    def step(model: Any, ids: Tensor, sp: Any) -> Tensor:
        sp = startrail.SequenceParallel(str(sp.plan), layout=layout)
        whole = sp.sequence(ids.shape[1], documents)
        loss = backward(model, ids, Mixing(whole, sp.sequence(ids.shape[1]), **faults))
        startrail.sum_gradients(model.parameters(), sp.group)
        return loss

    return lambda: (Hybrid(), ids(length), step, partial(reference, documents))


RESTARTS, NO_HALO = "a recurrence's state restarts at the edges of shards", "a convolution has no halo: at the edges"
LEAKS, CONV_LEAKS = (
    "a recurrence's state leaks from one packed document",
    "a convolution sees the packed document before",
)
NEIGHBOUR, DETACHED = (
    "a recurrence gets only what its neighbour's tokens leave",
    "no gradient flows back through a recur",
)
CONV_DETACHED = "no gradient flows back from a convolution"
FAULTS = {
    "restart": (of(scans="restart"), [RESTARTS]),
    "restart in shards": (of(scans="restart in shards"), [RESTARTS]),
    "restart, packed": (of(PACKED, scans="restart"), [RESTARTS]),
    "leak": (of(PACKED, "zigzag", scans="leak"), [LEAKS]),
    "all leak": (
        of(PACKED, "zigzag", scans="leak", convolutions="leak", attention="leak"),
        ["documents see each other", LEAKS, CONV_LEAKS],
    ),
    "convolutions leak": (of(PACKED, "contiguous", convolutions="leak"), [CONV_LEAKS]),
    "no halo": (of(convolutions="no halo"), [NO_HALO]),
    "no halo in shards": (of(convolutions="no halo in shards"), [NO_HALO]),
    "layers on shards": (of(scans="restart in shards", convolutions="no halo in shards"), [RESTARTS, NO_HALO]),
    "neighbour": (of(layout="contiguous", scans="neighbour"), [NEIGHBOUR]),
    "neighbour, zigzag": (of(layout="zigzag", scans="neighbour"), [NEIGHBOUR]),
    "neighbour without gradient, no halo": (
        of(layout="contiguous", scans="neighbour, detached", convolutions="no halo"), [NEIGHBOUR, DETACHED, NO_HALO]
    ),
    "no gradient": (of(layout="contiguous", scans="detached"), [DETACHED]),
    "no gradient, zigzag": (of(scans="detached"), [DETACHED]),
    "halo without gradient": (of(convolutions="detached"), [CONV_DETACHED]),
}  # fmt: skip
RIGHT = {
    "hybrid": of(),
    "hybrid, packed": of(PACKED, length=LENGTH),
    "hybrid, contiguous": of(layout="contiguous", length=37),
}
