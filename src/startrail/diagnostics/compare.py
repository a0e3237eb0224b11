"""Compares gradients of ranks with those of one process, with limits that follow the dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from startrail._compat import dtype_name
from startrail.diagnostics.observe import Gradients, RankResults, Results

# Relative to a gradient's norm. Even a model in float64 computes norms, routers and losses in float32.
PRECISE_LIMIT = 2e-6  # of all gradients together
FLOAT32_LIMIT = 2e-5
MAX_EPS = 16  # limit of less precise dtypes, in units of their eps
EACH = 10  # a single gradient may be off by this many times as much
SMALL = 1e-4  # of the largest gradient's norm: rounding makes smaller gradients, which may be zero, this inexact
ROUNDED = 1e-5  # of SMALL: a larger gradient that is exactly zero on ranks is lost, however small
MATCH = 1e-3  # relative difference to gradients that a fault explains
EXPLAINED = 0.1  # of the difference to one process's gradients: what a fault may leave unexplained


@dataclass(frozen=True)
class Comparison:
    """``total``: the relative difference of all gradients. ``wrong``: parameters whose gradients differ, worst first.
    ``limit``: the limit of ``total``; ``match``: that of gradients that a fault explains; ``loss_limit``: that of
    losses and buffers. ``smallest``: the smallest difference that shows in one of the dtypes compared."""

    total: float
    wrong: tuple[str, ...]
    limit: float
    match: float
    loss_limit: float
    text: str
    smallest: float = 0.0

    @classmethod
    def of(cls, alone: Results, ranks: RankResults) -> Comparison:
        own = _native_limit(alone, ranks)
        total = distance(ranks.native.gradients, alone.best.gradients)
        own_wrong = differing(ranks.native.gradients, alone.best.gradients, own, each=own <= FLOAT32_LIMIT)
        name = dtype_name(ranks.native.dtype)
        text = f"{total:.1e} in {name}"
        if ranks.precise is None or alone.precise is None:
            return cls(total, tuple(own_wrong), own, max(MATCH, own), max(1e-4, own), text, own)
        precise = distance(ranks.precise.gradients, alone.precise.gradients)
        coarse = max(torch.finfo(x.precise.dtype).eps for x in (alone, ranks) if x.precise)
        limit = PRECISE_LIMIT if coarse <= torch.finfo(torch.float32).eps else MAX_EPS * coarse
        wrong = differing(ranks.precise.gradients, alone.precise.gradients, limit, each=limit <= FLOAT32_LIMIT)
        assert ranks.precise_dtype is not None
        text = f"{text}, {precise:.1e} in {dtype_name(ranks.precise_dtype)}"
        if wrong:
            return cls(precise, tuple(wrong), limit, max(MATCH, limit), max(1e-6, limit), text, limit)
        return cls(total, tuple(own_wrong), own, max(MATCH, own), max(1e-6, limit), text, min(limit, own))

    def factor_if_explained(self, actual: Gradients, expected: Gradients, predicted: Gradients) -> float | None:
        """The factor by which ``actual`` exceeds gradients that a fault gives, if these differ from the ``expected``
        ones as the actual ones do; else None."""
        factor = factor_of(actual, predicted, self.match)
        left = unexplained(actual, predicted, expected)
        return factor if self.is_explained(left, unexplained(actual, expected, expected)) else None

    def is_explained(self, left: float, difference: float) -> bool:
        """True if an explanation of a relative difference leaves little of it, or no more than rounding."""
        return left <= difference / 2 and left <= max(EXPLAINED * difference, EACH * self.limit)


def _native_limit(alone: Results, ranks: RankResults) -> float:
    """The limit in the model's own dtype: a few times what one process is off by, where that is known."""
    dtypes = {alone.native.dtype, ranks.native.dtype}
    eps = max(torch.finfo(x).eps for x in dtypes)
    if alone.precise is not None and len(dtypes) == 1:
        return max(FLOAT32_LIMIT, 4 * distance(alone.native.gradients, alone.precise.gradients))
    return max(FLOAT32_LIMIT, MAX_EPS * eps if eps > torch.finfo(torch.float32).eps else 0.0)


def distance(actual: Gradients, expected: Gradients) -> float:
    """The difference of all gradients relative to their norm."""
    a, b = (torch.cat([x[name].flatten() for name in expected]) for x in (actual, expected))
    return float((a - b).norm() / b.norm().clamp(min=1e-300))


def differing(actual: Gradients, expected: Gradients, limit: float, each: bool) -> list[str]:
    """The parameters whose gradients differ by more than ``limit`` allows, worst first; with ``each``, also if all
    gradients together differ by less."""
    off = {name: float((actual[name] - x).norm()) for name, x in expected.items()}
    least = SMALL * max(float(x.norm()) for x in expected.values())
    wrong = [name for name, x in expected.items() if not off[name] <= EACH * limit * max(float(x.norm()), least)]
    wrong += [
        name for name, x in expected.items() if float(x.norm()) > ROUNDED * least and not bool(actual[name].any())
    ]
    if not distance(actual, expected) <= limit:
        wrong = wrong or [max(off, key=lambda name: off[name])]
    elif not each:
        wrong = []
    return sorted(set(wrong), key=lambda name: -off[name])


def factor_of(actual: Gradients, expected: Gradients, limit: float) -> float | None:
    """The factor by which every gradient in ``actual`` exceeds that in ``expected``; None if they differ."""
    a, b = (torch.cat([x[name].flatten() for name in expected]) for x in (actual, expected))
    factor = float(a @ b / (b @ b).clamp(min=1e-300))
    scaled = {name: factor * x for name, x in expected.items()}
    if not bool(a.any()) or differing(actual, scaled, limit, each=True):
        return None
    return factor


def unexplained(actual: Gradients, explanation: Gradients, expected: Gradients) -> float:
    """How much of ``actual`` is no multiple of ``explanation``. Every parameter counts alike, by its expected norm.

    >>> x, y = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0])
    >>> unexplained({"w": x}, {"w": 2 * x}, {"w": x}), round(unexplained({"w": x}, {"w": y}, {"w": x}), 3)
    (0.0, 0.8)
    """
    least = SMALL * max(float(x.norm()) for x in expected.values())
    sizes = {name: max(float(x.norm()), least) for name, x in expected.items()}
    a, b = (torch.cat([x[name].flatten() / sizes[name] for name in sizes]) for x in (actual, explanation))
    factor = a @ b / (b @ b).clamp(min=1e-300)
    return float((a - factor * b).norm() / a.norm().clamp(min=1e-300))


def lost_or_scaled(actual: Gradients, expected: Gradients, close: Comparison, world: int) -> str | None:
    """What happened on ``world`` ranks if some parameters have gradients that are zero or multiples of the right ones,
    and all others are right."""
    names = [name for name in expected if name in close.wrong]
    if len(names) == len(expected):
        return None
    lost = [name for name in names if not bool(actual[name].any())]
    also = f"; {len(expected) - len(names)} of {len(expected)} gradients are right"
    if lost:
        return f"gradient of {lost[0]} is lost: it is zero on ranks" + also
    factors = []
    for name in names:
        ours, theirs = {name: actual[name]}, {name: expected[name]}
        factor = factor_of(ours, theirs, close.match)
        if factor is None or not close.is_explained(unexplained(ours, theirs, theirs), abs(factor - 1)):
            return None
        factors.append(factor)
    if all(abs(factor / world - 1) < 1e-3 for factor in factors):
        counted = "what every rank has in full, such as text tokens, is counted once per rank"
        return f"gradient of {names[0]} is {world} times one process's: {counted}" + also
    return f"gradient of {names[0]} is {factors[0]:.6g} times one process's" + also
