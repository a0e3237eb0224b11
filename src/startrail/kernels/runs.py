"""Runs of tokens in chunks of equal size, and the loop that carries states from chunk to chunk.

A rank has some runs of a sequence, one after the other: two with zigzag, one per document with packed documents. All
chunks are computed at once. Only states go from one chunk of a run to its next, and that loop handles the first chunks
of all runs together, then the second ones, and so on.

>>> chunks = RunChunks([3, 5], size=2, device=torch.device("cpu"))
>>> chunks.split(torch.arange(1, 9).unsqueeze(0)).squeeze(1).tolist()   # the longer run comes first; 0 is padding
[[4, 5], [1, 2], [6, 7], [3, 0], [8, 0]]
>>> chunks.steps
[2, 2, 1]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from startrail._compat import dtype_name

CHUNK = 64  # tokens


class Recurrence(ABC):
    """Some runs of tokens, as a function of the state before each. ``matrix`` says whether a ``transition`` is a matrix
    for each head, or multiplies the state elementwise. ``shape`` is that of the states, (batch, runs, heads, ...),
    ``dtype`` theirs."""

    matrix: bool
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def moves(self) -> tuple[int, ...]:
        """The shape of a head's transition: (1, 1) if it is one number."""
        return (*self.shape[3:-1], self.shape[-2]) if self.matrix else self.shape[3:]

    @abstractmethod
    def run(self, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The outputs, and the state after each run; ``state`` is that before each run, zeros by default."""

    @property
    @abstractmethod
    def transition(self) -> Tensor:
        """M of each run, (batch, runs, ...)."""

    @property
    @abstractmethod
    def contribution(self) -> Tensor:
        """B of each run: the state after it if that before is zero."""

    @abstractmethod
    def outputs(self, state: Tensor) -> Tensor:
        """The outputs, given what ``transition`` and ``contribution`` have computed already."""


_checked: set[object] = set()  # kernels whose recurrences have been found to be linear, by their code


def recurrence_of(
    kernel: Callable[..., Recurrence], tensors: Sequence[Tensor], lengths: Sequence[int], options: Mapping[str, Any]
) -> Recurrence:
    """What ``kernel`` makes of runs of these lengths. ``ValueError`` if it is no kernel or rejects its arguments, and,
    when it is first used, if it does to a state something other than M S + B.

    >>> recurrence_of(torch.cumsum, [torch.ones(1, 4, 2)], [3, 1], {})
    Traceback (most recent call last):
    ValueError: cumsum rejects its arguments: cumsum() missing 1 required positional arguments: "dim"
    """
    name = name_of(kernel)
    try:
        recurrence = kernel(*tensors, lengths=lengths, **options)
    except (TypeError, RuntimeError, IndexError) as error:
        raise ValueError(f"{name} rejects its arguments: {str(error).strip().splitlines()[0]}") from error
    if not isinstance(recurrence, Recurrence):
        raise ValueError(
            f"{name} returned {type(recurrence).__name__}, without states: a kernel must return a "
            "startrail.kernels.runs.Recurrence, which takes and gives the state of each run"
        )
    code = getattr(kernel, "__code__", type(kernel))
    is_known = code in _checked or getattr(kernel, "__module__", "").startswith("startrail.kernels.")
    if not is_known and not torch.compiler.is_compiling():
        with torch.no_grad():
            _check_linear(name, kernel(*tensors, lengths=lengths, **options), len(lengths))
        _checked.add(code)
    return recurrence


def name_of(kernel: object) -> str:
    while isinstance(kernel, partial):
        kernel = kernel.func
    return str(getattr(kernel, "__name__", type(kernel).__name__))


def _check_linear(name: str, recurrence: Recurrence, runs: int) -> None:
    """Compare what two ways compute from a random state."""
    if recurrence.shape[1:2] != (runs,):
        raise ValueError(f"{name} gives states {recurrence.shape} for {runs} runs, expected (batch, runs, ...)")
    moves, adds = recurrence.transition, recurrence.contribution
    state = torch.randn(recurrence.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    state = state.to(adds.device, adds.dtype)
    out, after = recurrence.run(state)
    moved = moves @ state if recurrence.matrix else moves * state
    for what, x, expected in (
        ("state after a run is not M S + B with its transition M and contribution B", moved + adds, after),
        ("outputs(state) are not those of run(state)", recurrence.outputs(state), out),
    ):
        difference = float((x - expected).abs().max()) if x.shape == expected.shape and x.numel() else 0.0
        if x.shape != expected.shape or not difference <= 1e-3 * (1 + float(expected.abs().max()) if x.numel() else 1):
            raise ValueError(f"{name} is not a linear recurrence: the {what} (off by {difference:.2g})")


def check_numbers(*tensors: Tensor) -> None:
    """``ValueError`` unless all are floating-point numbers, which gradients of recurrences need."""
    if wrong := [dtype_name(x.dtype) for x in tensors if not x.is_floating_point()]:
        raise ValueError(f"recurrences take floating-point numbers, got {wrong[0]}")


def check_decay(name: str, logarithm: Tensor) -> None:
    """``ValueError`` if a decay's logarithm is positive. Only where reading numbers costs nothing."""
    is_plain = type(logarithm) is Tensor and not torch.compiler.is_compiling()
    if is_plain and logarithm.device.type == "cpu" and bool((logarithm > 0).any()):
        largest = float(logarithm.max())
        raise ValueError(f"{name} is a decay's logarithm, at most 0, but has {largest:.3g}: pass the log of a decay")


def lengths_of(lengths: Sequence[int] | None, x: Tensor) -> list[int]:
    """The tokens of each run of x (batch, tokens, ...): one run, unless ``lengths`` says otherwise."""
    lengths = [x.shape[1]] if lengths is None else list(lengths)
    if sum(lengths) != x.shape[1] or min(lengths, default=0) < 0:
        raise ValueError(f"lengths {lengths} add up to {sum(lengths)}, but there are {x.shape[1]} tokens")
    return lengths


def check_states(states: Tensor, expected: tuple[int, ...]) -> None:
    if states.shape != expected:
        raise ValueError(f"the state has shape {tuple(states.shape)}, expected {expected}: batch, runs, ...")


def chunks_of(lengths: Sequence[int], device: torch.device, most: int = CHUNK) -> RunChunks:
    """Chunks of ``most`` tokens, or of fewer if all runs are shorter; a power of two."""
    longest = max(lengths, default=1)
    return RunChunks(lengths, min(most, 1 << (longest - 1).bit_length()), device)


class RunChunks:
    """``steps[j]`` runs have a chunk number j. Chunks are in the order of their numbers; within a number, the run with
    most chunks comes first."""

    def __init__(self, lengths: Sequence[int], size: int, device: torch.device) -> None:
        self.size, self.runs, self.tokens = size, len(lengths), sum(lengths)
        counts = [-(-length // size) for length in lengths]
        order = sorted(range(len(lengths)), key=lambda run: -counts[run])
        ascending = sorted(counts)
        self.steps = [len(counts) - bisect_right(ascending, step) for step in range(max(counts, default=0))]
        ends = list(accumulate(lengths))
        run_and_step = [(run, step) for step, runs in enumerate(self.steps) for run in order[:runs]]
        starts = [ends[run] - lengths[run] + step * size for run, step in run_and_step]
        stops = [ends[run] for run, _ in run_and_step]
        self._order = torch.tensor(order, dtype=torch.long, device=device)
        runs = [run for count in self.steps for run in range(count)]
        self._run = torch.tensor(runs, dtype=torch.long, device=device)
        starts_and_stops = torch.tensor([starts, stops], dtype=torch.long, device=device).unsqueeze(2)
        tokens = starts_and_stops[0] + torch.arange(size, device=device)
        real = tokens < starts_and_stops[1]
        self._token = tokens.where(real, self.tokens).flatten()  # the token at each place; padding is the one after all
        self._place = torch.empty(self.tokens, dtype=torch.long, device=device)
        self._place[tokens[real]] = real.flatten().nonzero().squeeze(1)

    def split(self, x: Tensor, padding: float = 0.0) -> Tensor:
        """(batch, tokens, ...) -> (chunks, batch, size, ...)."""
        padded = torch.cat((x, x.new_full((x.shape[0], 1, *x.shape[2:]), padding)), 1)
        return padded.index_select(1, self._token).unflatten(1, (-1, self.size)).transpose(0, 1)

    def join(self, x: Tensor) -> Tensor:
        """The inverse of ``split``."""
        return x.transpose(0, 1).flatten(1, 2).index_select(1, self._place)

    def sort(self, states: Tensor, shape: Sequence[int]) -> Tensor:
        """States (batch, runs, ...) -> (runs, batch, ...), the run with most chunks first, as ``carry`` takes them.
        ``shape`` is (batch, ...) of one run."""
        check_states(states, (shape[0], self.runs, *shape[1:]))
        return states.transpose(0, 1).index_select(0, self._order)

    def of_chunks(self, states: Tensor) -> Tensor:
        """The state of each chunk's run, of sorted states."""
        return states.index_select(0, self._run)

    def unsort(self, states: Tensor) -> Tensor:
        """The inverse of ``sort``."""
        return states.index_select(0, self._order.argsort()).transpose(0, 1)


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a backward pass that autograd cannot differentiate. ``torch.autograd.function.once_differentiable``
    leaves such derivatives out silently where ``torch.autograd.grad`` asks for them."""

    @wraps(backward)
    def checked(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise ValueError("recurrences have no second derivatives: compute gradients without create_graph=True")
        return backward(ctx, *grads)

    return checked


def carry(
    transition: Tensor, contribution: Tensor, initial: Tensor, steps: Sequence[int], matrix: bool
) -> tuple[Tensor, Tensor]:
    """S' = transition S + contribution, from chunk to chunk of every run. Returns the state before each chunk, (chunks,
    batch, ...), and the state after each run. ``initial`` has a state per run, sorted like chunks. With ``matrix`` a
    transition is a matrix, otherwise it multiplies elementwise."""
    before, after = _Carry.apply(transition, contribution, initial, steps, matrix)
    return before, after


class _Carry(torch.autograd.Function):
    """Written out, since autograd would keep the states twice and add up small gradients chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, transition: Tensor, contribution: Tensor, initial: Tensor, steps: Sequence[int], matrix: bool
    ) -> tuple[Tensor, Tensor]:
        before, state = torch.empty_like(contribution), initial.clone()
        for chunks in slices(steps):
            now = state[: chunks.stop - chunks.start]
            before[chunks] = now
            moved = transition[chunks] @ now if matrix else transition[chunks] * now
            torch.add(moved, contribution[chunks], out=now)
        ctx.save_for_backward(transition, before)
        ctx.steps, ctx.matrix = steps, matrix
        return before, state

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_before: Tensor, grad_after: Tensor) -> Any:
        transition, before = ctx.saved_tensors
        grad_contribution, grad_state = torch.empty_like(before), grad_after.clone()
        for chunks in reversed(slices(ctx.steps)):
            now = grad_state[: chunks.stop - chunks.start]
            grad_contribution[chunks] = now
            moved = transition[chunks].mT @ now if ctx.matrix else transition[chunks] * now
            torch.add(moved, grad_before[chunks], out=now)
        if ctx.matrix:
            grad_transition = grad_contribution @ before.mT
        else:
            grad_transition = (grad_contribution * before).sum_to_size(transition.shape)
        return grad_transition, grad_contribution, grad_state, None, None


def slices(steps: Sequence[int]) -> list[slice]:
    ends = list(accumulate(steps))
    return [slice(end - runs, end) for runs, end in zip(steps, ends, strict=True)]
