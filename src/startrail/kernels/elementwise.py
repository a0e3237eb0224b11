"""Recurrences whose states are multiplied elementwise: h' = a h + b, as in RG-LRU and Mamba-1's selective scan.

>>> a, b = torch.rand(1, 10, 3), torch.randn(1, 10, 3)             # (batch, tokens, ...)
>>> whole = linear_recurrence(a, b)
>>> runs = linear_recurrence(a, b, lengths=[6, 4])
>>> first, second = runs.contribution.unbind(1)
>>> torch.allclose(runs.transition[:, 1] * first + second, whole.contribution[:, 0], atol=1e-6)
True
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from startrail.kernels.accumulate import accumulator
from startrail.kernels.runs import (
    Recurrence,
    check_decay,
    check_states,
    chunks_of,
    differentiable_once,
    lengths_of,
    slices,
)

BLOCK = 256  # tokens of a selective scan whose states are in memory at a time; larger blocks are slower too
BLOCK_CHUNK = 16  # tokens of a chunk in a block: as many steps within chunks as from chunk to chunk


def linear_recurrence(a: Tensor, b: Tensor, *, lengths: Sequence[int] | None = None) -> LinearRecurrence:
    """h' = a h + b, elementwise; the outputs are all h. a and b are (batch, tokens, ...), states (batch, runs, ...).

    RG-LRU is a = its recurrent gate, b = its gated and normalized inputs.
    """
    if a.shape != b.shape or a.dim() < 2:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)} are not (batch, tokens, ...) and alike")
    return LinearRecurrence(a, b, lengths)


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, *, lengths: Sequence[int] | None = None
) -> SelectiveScan:
    """Mamba-1: h' = exp(dt a) h + dt x b, and out = the sum of c h' over a channel's states.

    x and dt (batch, tokens, channels), a (channels, states), b and c (batch, tokens, states); the states of runs are
    (batch, runs, channels, states). dt is after its bias and softplus; adding D x and gating are left to the caller.
    """
    shapes = f"x {tuple(x.shape)}, dt {tuple(dt.shape)}, a {tuple(a.shape)}, b {tuple(b.shape)}, c {tuple(c.shape)}"
    if x.dim() != 3 or a.dim() != 2 or x.shape != dt.shape or a.shape[0] != x.shape[2]:
        raise ValueError(f"{shapes}: x and dt must be (batch, tokens, channels), a (channels, states)")
    if b.shape != c.shape or b.shape != (*x.shape[:2], a.shape[1]):
        raise ValueError(f"{shapes}: b and c must be (batch, tokens, states)")
    check_decay("a", a)
    return SelectiveScan(x, dt, a, b, c, lengths)


class LinearRecurrence(Recurrence):
    matrix = False

    def __init__(self, a: Tensor, b: Tensor, lengths: Sequence[int] | None) -> None:
        self._chunks = chunks_of(lengths_of(lengths, b), b.device)
        dtype = accumulator(b.dtype)
        self._a = self._chunks.split(a.to(dtype), padding=1.0).movedim(2, 0)
        self._b = self._chunks.split(b.to(dtype)).movedim(2, 0)
        self.shape, self.dtype = (b.shape[0], self._chunks.runs, *b.shape[2:]), dtype
        self._dtype = b.dtype

    def run(self, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if state is None:
            return self._join(self._from_zero[0]), self.contribution
        values, after = solve(self._a, self._b, self._sorted(state), self._chunks.steps)
        return self._join(values), self._chunks.unsort(after)

    @property
    def transition(self) -> Tensor:
        return self._chunks.unsort(self._moves_from_start[1])

    @property
    def contribution(self) -> Tensor:
        return self._chunks.unsort(self._from_zero[1])

    def outputs(self, state: Tensor) -> Tensor:
        return self._join(self._from_zero[0] + self._moves_from_start[0] * self._chunks.of_chunks(self._sorted(state)))

    @cached_property
    def _from_zero(self) -> tuple[Tensor, Tensor]:
        return solve(self._a, self._b, self._states(0.0), self._chunks.steps)

    @cached_property
    def _moves_from_start(self) -> tuple[Tensor, Tensor]:
        """The product of a from the start of a run to each token, and to its end."""
        return solve(self._a, torch.zeros_like(self._a), self._states(1.0), self._chunks.steps)

    def _states(self, value: float) -> Tensor:
        return self._b.new_full((self._chunks.runs, *self._b.shape[2:]), value)

    def _sorted(self, state: Tensor) -> Tensor:
        return self._chunks.sort(state.to(self._b.dtype), self._b.shape[2:])

    def _join(self, values: Tensor) -> Tensor:
        return self._chunks.join(values.movedim(0, 2)).to(self._dtype)


class SelectiveScan(Recurrence):
    """A block of tokens at a time, computed again in the backward pass: the states of all tokens are channels x states
    numbers per token, which is much more than the layer itself has."""

    matrix = False

    def __init__(self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, lengths: Sequence[int] | None) -> None:
        self._lengths = lengths_of(lengths, x)
        dtype = accumulator(x.dtype)
        self._tokens = [tensor.to(dtype) for tensor in (x, dt, b, c)]
        self._a, self._dtype = a.to(dtype), x.dtype
        self.shape, self.dtype = (x.shape[0], len(self._lengths), *a.shape), dtype

    def run(self, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, *_ = self._tokens
        if state is None:
            state = x.new_zeros(self.shape)
        check_states(state, self.shape)
        states = list(state.to(x.dtype).unbind(1))
        outs = [x[:, :0]]
        for first, pieces in _blocks(self._lengths):
            lengths = list(pieces.values())
            tokens = [tensor[:, first : first + sum(lengths)] for tensor in self._tokens]
            before = torch.stack([states[run] for run in pieces], 1)
            scan = _scan_block, *tokens, self._a, before, lengths
            out, after = checkpoint(*scan, use_reentrant=False, preserve_rng_state=False)
            outs.append(out)
            for run, of_run in zip(pieces, after.unbind(1), strict=True):
                states[run] = of_run
        return torch.cat(outs, 1).to(self._dtype), torch.stack(states, 1)

    @property
    def transition(self) -> Tensor:
        _, dt, *_ = self._tokens
        total = torch.stack([of_run.sum(1) for of_run in dt.split(self._lengths, 1)], 1)
        return (total.unsqueeze(-1) * self._a).exp()

    @cached_property
    def contribution(self) -> Tensor:
        return self.run()[1]

    def outputs(self, state: Tensor) -> Tensor:
        return self.run(state)[0]


def _blocks(lengths: Sequence[int]) -> Iterator[tuple[int, dict[int, int]]]:
    """Cut runs into blocks of tokens: the first token of each block, and the tokens in it of each run.

    >>> BLOCK, list(_blocks([250, 10, 300]))
    (256, [(0, {0: 250, 1: 6}), (256, {1: 4, 2: 252}), (512, {2: 48})])
    """
    first = filled = 0
    pieces: dict[int, int] = {}
    for run, length in enumerate(lengths):
        while length:
            taken = min(length, BLOCK - filled)
            pieces[run] = taken
            filled, length = filled + taken, length - taken
            if filled == BLOCK:
                yield first, pieces
                first, filled, pieces = first + BLOCK, 0, {}
    if pieces:
        yield first, pieces


def _scan_block(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, state: Tensor, lengths: Sequence[int]
) -> tuple[Tensor, Tensor]:
    chunks = chunks_of(lengths, x.device, BLOCK_CHUNK)
    x, dt, b, c = (chunks.split(tensor).movedim(2, 0) for tensor in (x, dt, b, c))
    added = (dt * x).unsqueeze(-1) * b.unsqueeze(-2)
    values, after = solve((dt.unsqueeze(-1) * a).exp(), added, chunks.sort(state, added.shape[2:]), chunks.steps)
    out = (values @ c.unsqueeze(-1)).squeeze(-1)
    return chunks.join(out.movedim(0, 2)), chunks.unsort(after)


def solve(a: Tensor, b: Tensor, initial: Tensor, steps: Sequence[int]) -> tuple[Tensor, Tensor]:
    """All h of h' = a h + b, and the last of each run. a and b are (size, chunks, ...), ``initial`` (runs, ...)."""
    values, after = _Solve.apply(a, b, initial, steps)
    return values, after


class _Solve(torch.autograd.Function):
    """Tokens at the same place of all chunks are computed together, as if the chunks began with zeros; then states are
    carried from chunk to chunk. The gradient is the same recurrence in reverse."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, initial: Tensor, steps: Sequence[int]) -> tuple[Tensor, Tensor]:
        values, moves = b.clone(), a.clone()
        for place in range(1, len(a)):
            values[place].addcmul_(a[place], values[place - 1])
            moves[place] *= moves[place - 1]
        before, state = torch.empty_like(b[0]), initial.clone()
        for chunks in slices(steps):
            now = state[: chunks.stop - chunks.start]
            before[chunks] = now
            now.mul_(moves[-1, chunks]).add_(values[-1, chunks])
        values += moves * before
        ctx.save_for_backward(a, before, values)
        ctx.steps = steps
        return values, state

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_values: Tensor, grad_after: Tensor) -> Any:
        a, before, values = ctx.saved_tensors
        grad_b, moves = grad_values.clone(), torch.ones_like(a)  # moves: from the end of the chunk to each token
        for place in reversed(range(len(a) - 1)):
            grad_b[place].addcmul_(a[place + 1], grad_b[place + 1])
            torch.mul(moves[place + 1], a[place + 1], out=moves[place])
        after, grad_state = torch.empty_like(before), grad_after.clone()
        for chunks in reversed(slices(ctx.steps)):
            now = grad_state[: chunks.stop - chunks.start]
            after[chunks] = now
            now.mul_(moves[0, chunks]).add_(grad_b[0, chunks]).mul_(a[0, chunks])
        grad_b += moves * after
        grad_a = grad_b * torch.cat((before.unsqueeze(0), values[:-1]))
        return grad_a, grad_b, grad_state, None
