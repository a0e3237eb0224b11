"""The rounding error of a correct implementation: how the roundings of attention add up in each of its results.

A rounding error is uniform, and at most u = eps / 2 of the power of two below the result, so its variance is u² / 3 of
that power's square. Relative to the result's own square, divide by m², where m in [1, 2) is the mantissa. Mantissas
have density 1 / (m ln 2), so 1 / m² is 3 / (8 ln 2) = 0.54 on average. u² / 3 times this is ``ROUNDING``, the unit of
every variance here.

Roundings are independent, so their variances add up, each times the square of the factor between its error and the
result (Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019). The worst
case, where all errors have the same sign, is about a hundred times larger and would hide mistakes.

The errors of one process are similar. They are a fair yardstick for many numbers, but not for few: with two tokens,
single-process attention may be exact by luck.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

CHANCE = 1e-7  # of a correct result exceeding a bound: 1 % for 10,000 cases of ten bounds each
ROUNDING = 1 / (8 * log(2))  # of a result's square, in u²: 0.18
EXP = 4.0  # exp, log and sigmoid are accurate to one unit in the last place: twice u


def of_sum(total: Tensor, squares: Tensor | float, terms: Tensor | float, products: bool = True) -> Tensor:
    """The variance of a sum of ``terms`` numbers, added in any order; ``squares`` is the sum of their squares. If they
    are ``products``, each is multiplied and added with one rounding.

    The sum of the first j of n terms is rounded, from j = 1 on if they are products, else from j = 2 on. Over all
    orders its square is on average (j/n)² total² + j(n-j) / (n(n-1)) (squares - total²/n): this adds that up.

    Products 1 and 2: roundings of 1 or 2, (1² + 2²) / 2 on average, and of 3; products 1, 1 and 1: of 1, 2 and 3.

    >>> of_sum(torch.tensor(3.0), 5.0, 2.0).item(), of_sum(torch.tensor(3.0), 3.0, 3.0).item()
    (11.5, 14.0)
    """
    n = torch.as_tensor(terms).clamp(min=1.0)
    mean = total.square() / n
    walk = (n + 1) * (2 * n + 1) / 6 * mean + (n + 1) / 6 * (squares - mean).clamp(min=0.0)
    return walk if products else (walk - squares / n).clamp(min=0.0)


@dataclass(frozen=True)
class Attention:
    """An attention call and its results: ``weights`` of the keys and ``lse``, with sinks. k and v have as many heads as
    q, ``kv_heads`` of them different. At most ``parts`` partial results are merged."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    sinks: Tensor | None
    dlse: Tensor | None
    mask: Tensor
    scale: float
    weights: Tensor
    lse: Tensor
    kv_heads: int
    parts: int

    def variances(self) -> dict[str, Tensor]:
        """The variances of out, dq, dk, dv, lse and dsinks.

        One token, v = 3: the weight is 1, and 3 is multiplied by it, divided by the sum of weights, merged.

        >>> one = torch.ones(1, 1, 1, 1)
        >>> call = Attention(one, one, 3 * one, one, None, None, one.bool(), 1.0, one, one[..., 0], 1, 1)
        >>> call.variances()["out"].item() / 3**2
        3.0
        """
        q, k, v, dout, scale = self.q, self.k, self.v, self.dout, self.scale
        dim, width = q.shape[3], v.shape[3]
        seen, seeing = (self.mask.sum(side).to(q.dtype) for side in (1, 0))
        lse = self.lse.nan_to_num(neginf=0.0)
        # the sink's share of a row, and the row without it: the sink is merged last
        sink = torch.zeros_like(lse) if self.sinks is None else self.sinks.to(q.dtype).view(1, -1, 1).expand_as(lse)
        rest = torch.zeros_like(lse) if self.sinks is None else (sink - lse).exp()
        share = self.weights.sum(-1)
        share = share.where(share > 0, 1.0)  # a row that sees no keys has no weights and no errors
        alone = lse + share.log()
        squares = self.weights.square()
        inner = squares / share.square().unsqueeze(-1)
        out = self.weights @ v / share.unsqueeze(-1)

        # logits: a product of q and k, scaled
        scores = q @ k.mT * scale
        logits = of_sum(scores, q.square() @ k.square().mT * scale**2, dim) + scores.square()
        # a weight, relative to itself: a logit less the row's lse, and exp
        weight = logits + (scores - alone.unsqueeze(-1)).square() + EXP
        # lse, which the backward pass takes from the forward pass: the errors of all logits, and two more roundings
        of_lse = (inner * logits).sum(-1) + 2 * alone.square() + EXP
        # the share that the sink leaves: exp of logsigmoid of the distance
        of_share = of_lse + (alone - sink).square() + share.log().square() + 2 * EXP
        if self.sinks is None:
            of_share = torch.zeros_like(lse)

        # out: an error common to all weights cancels
        errs = inner * weight
        of_out = errs @ v.square() - 2 * out * (errs @ v) + out.square() * errs.sum(-1, keepdim=True)
        of_out = of_out.clamp(min=0.0) + self._summed(out, inner @ v.square(), seen.unsqueeze(-1), is_merge=True)
        of_norm = of_sum(torch.ones_like(lse), inner.sum(-1), seen, products=False)
        of_out = of_out + out.square() * (of_norm.unsqueeze(-1) + 2)
        if self.parts > 1:
            # a merge weighs two parts by w and 1 - w, and one of these is rounded near 1, whatever the other is: an
            # error times the parts' distance, whose square falls with the number of keys in each part
            visible, keys = self.mask.to(q.dtype), seen.unsqueeze(-1).clamp(min=1.0)
            distances = visible @ v.square() - 2 * out * (visible @ v) + keys * out.square()
            of_out = of_out + 4 * keys.clamp(max=self.parts) / keys.square() * distances.clamp(min=0.0)

        # delta: the sum of dout * out in a row minus dlse, and the extra terms with sinks
        whole = (dout * out).sum(-1)
        products = (dout * out).square().sum(-1)
        of_whole = (dout.square() * of_out).sum(-1)
        summed = of_sum(whole, products, width)
        of_delta = of_whole + 3 * whole.square()
        if self.sinks is not None:
            of_delta = of_delta + products + rest.square() * (summed + whole.square() * of_share)
        dlse = torch.zeros_like(lse) if self.dlse is None else self.dlse.to(q.dtype)
        of_delta = of_delta + 3 * dlse.square()
        of_row = of_lse + rest.square() * of_share  # the error common to all weights of a row

        # gradients
        dweights = dout @ v.mT
        of_dweights = of_sum(dweights, dout.square() @ v.square().mT, width)
        if self.sinks is not None:  # dout is multiplied by the share that the sink leaves
            of_dweights = of_dweights + dout.square() @ v.square().mT
        steep = dweights - (whole * share - dlse).unsqueeze(-1)
        dscores = self.weights * steep * scale
        of_pair = scale**2 * squares * ((weight + 3) * steep.square() + of_dweights)
        of_rows = scale**2 * squares * (of_row.unsqueeze(-1) * steep.square() + of_delta.unsqueeze(-1))
        dq = dscores @ k
        mean = scale * (self.weights @ k)
        of_dq = of_pair @ k.square() + of_row.unsqueeze(-1) * dq.square() + of_delta.unsqueeze(-1) * mean.square()
        of_dq = of_dq + self._summed(dq, dscores.square() @ k.square(), seen.unsqueeze(-1))
        of_dk = self._for_keys((of_pair + of_rows).mT @ q.square())
        of_dv = self._for_keys((squares * (weight + of_row.unsqueeze(-1))).mT @ dout.square())
        rows = seeing.unsqueeze(-1) * (q.shape[1] // self.kv_heads)
        for_dk = self._for_keys(dscores.mT @ q), self._for_keys(dscores.square().mT @ q.square())
        for_dv = self._for_keys(self.weights.mT @ dout), self._for_keys(squares.mT @ dout.square())
        found = {"out": of_out, "dq": of_dq, "dk": of_dk + self._summed(*for_dk, rows)}
        found |= {"dv": of_dv + self._summed(*for_dv, rows), "lse": of_lse}
        if self.sinks is not None:
            kept = share.unsqueeze(-1).square()
            found["out"] = kept * (of_out + out.square() * (3 + (rest.square() * of_share).unsqueeze(-1)))
            found["lse"] = share.square() * of_lse + (rest * (alone - sink)).square() + 2 * lse.square() + 2 * EXP
            parts = rest * (whole * share - dlse)
            errors = rest.square() * (
                ((whole * share).square() + dlse.square()) * (of_share + 3) + share.square() * (of_whole + summed)
            )
            many = q.shape[0] * q.shape[2]
            found["dsinks"] = errors.sum((0, 2)) + of_sum(parts.sum((0, 2)), parts.square().sum((0, 2)), many, False)
        return found

    def sizes(self) -> dict[str, Tensor]:
        """For each gradient, the sum of its terms' absolute values: a bound for all its partial sums together."""
        dweights = self.dout @ self.v.mT
        delta = (self.weights * dweights).sum(-1, keepdim=True).abs()
        if self.dlse is not None:
            delta = delta + self.dlse.abs().unsqueeze(-1)
        pairs = self.weights * (dweights.abs() + delta) * self.scale
        found = {"dq": pairs @ self.k.abs(), "dk": self._for_keys(pairs.mT @ self.q.abs())}
        found["dv"] = self._for_keys(self.weights.mT @ self.dout.abs())
        if self.sinks is not None:
            rows = (self.weights * dweights.abs()).sum(-1) + (0.0 if self.dlse is None else delta.squeeze(-1))
            found["dsinks"] = ((self.sinks.view(1, -1, 1) - self.lse).exp() * rows).sum((0, 2))
        return found

    def sent_outputs(self) -> tuple[Tensor, Tensor]:
        """For partial outputs, which are rounded when sent, when merged, and once more with sinks: the variance, and
        the sum of the absolute values that are rounded.

        A part is the sum of the weighted values of its keys. Averaged over all ways to assign keys to parts, the
        squares of the parts add up to at most out² plus the squares of the weighted values, and the rounded values to
        at most the absolute values. Values 3 and -3 with half the weight each: 0, and two parts of 1.5.

        >>> one, half = torch.ones(1, 1, 1, 1), torch.full((1, 1, 1, 2), 0.5)
        >>> v, mask = torch.tensor([[[[3.0], [-3.0]]]]), torch.ones(1, 2).bool()
        >>> call = Attention(one, v, v, one, None, None, mask, 1.0, half, one[..., 0], 1, 2)
        >>> [x.item() for x in call.sent_outputs()]      # 1.5² + 1.5², 1.5 + 1.5
        [4.5, 3.0]
        """
        out, times = self.weights @ self.v, 1 if self.sinks is None else 2
        variance = (1 + times) * out.square() + self.weights.square() @ self.v.square()
        return variance, times * out.abs() + self.weights @ self.v.abs()

    def from_rounded_out(self) -> dict[str, Tensor]:
        """The variances of dq and dk that come from ``out`` alone, which the backward pass reads as it was returned:
        rounded to the dtype of the inputs. An error of out times dout is one of the row's delta.

        One key of 2 with half the weight, v = 3: out is 1.5 and so is delta; dq has an error of 1.5 x 0.5 x 2.

        >>> one, half = torch.ones(1, 1, 1, 1), torch.full((1, 1, 1, 1), 0.5)
        >>> call = Attention(one, 2 * one, 3 * one, one, None, None, one.bool(), 1.0, half, one[..., 0], 1, 1)
        >>> call.from_rounded_out()["dq"].item() == 1.5**2
        True
        """
        of_delta = (self.dout * (self.weights @ self.v)).square().sum(-1, keepdim=True) * self.scale**2
        of_dk = self.weights.square().mT @ (of_delta * self.q.square())
        return {"dq": of_delta * (self.weights @ self.k).square(), "dk": self._for_keys(of_dk)}

    def _for_keys(self, x: Tensor) -> Tensor:
        """Sums over the query heads that share a key."""
        return x.unflatten(1, (self.kv_heads, -1)).sum(2)

    def _summed(self, total: Tensor, squares: Tensor, terms: Tensor, is_merge: bool = False) -> Tensor:
        """The variance of a sum over pairs of query and key; merging two outputs rounds three times, not once."""
        found = of_sum(total, squares, terms)
        if is_merge:
            found = found + 2 * of_sum(total, squares, terms.clamp(max=self.parts), products=False)
        return found


class Floor(NamedTuple):
    """The allowed rounding error: the standard ``deviation`` of each element, and a bound for ``each``. The probability
    that any element exceeds its bound is at most ``CHANCE``."""

    deviation: Tensor
    each: Tensor

    @property
    def spread(self) -> float:
        """The bound that the root mean square of all errors, in deviations, exceeds with probability ``CHANCE``.

        The length of a vector of independent errors exceeds its expectation by t deviations with probability
        exp(-t²/2). A row counts as one error, since one weight's error is in all its elements: 1 + t / sqrt(rows).

        >>> row = torch.ones(1, 1, 1, 4)
        >>> round(Floor(row, row).spread, 2), round(Floor(*torch.ones(2, 100)).spread, 2)
        (6.68, 1.57)
        """
        width = self.deviation.shape[3] if self.deviation.dim() == 4 else 1
        return 1 + _deviations(1) / sqrt(self.deviation.numel() / width)


def floor_of(variance: Tensor, unit: float) -> Floor:
    """The floor for errors with these variances; ``unit`` is u.

    >>> floor = floor_of(torch.tensor([1 / ROUNDING]), 2.0**-24)
    >>> round(floor.deviation.item() / 2**-24, 2), round(floor.each.item() / 2**-24, 2)
    (1.0, 5.68)
    """
    deviation = unit * (ROUNDING * variance.double()).sqrt()
    return Floor(deviation, _deviations(variance.numel()) * deviation)


def _deviations(count: int) -> float:
    """The number t of deviations that one of ``count`` errors exceeds with probability count exp(-t²/2) = CHANCE."""
    return sqrt(2 * log(count / CHANCE))
