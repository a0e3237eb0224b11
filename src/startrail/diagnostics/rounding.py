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
from functools import cached_property
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
class AttentionErrors:
    """An attention call: its inputs, the ``weights`` of its keys and its ``lse``, with sinks. k and v have as many
    heads as q, ``kv_heads`` of them different. At most ``parts`` partial results are merged.

    In a row with keys j and logits s_j, where l and o are lse and out of the keys alone, without the sink::

        l = log sum_j exp(s_j)        share = sigmoid(l - sink)     what the sink leaves to the keys
        p_j = exp(s_j - l)            w_j = share p_j               weights without and with the sink
        o = sum_j p_j v_j             delta = sum dout o
        ds_j = w_j (dout v_j - share delta + dlse) scale            dq = sum_j ds_j k_j, and so on

    ``e_x`` is the variance of the error of x: that of all that x is computed from, times the square of the derivative,
    and 1 x² each time that x is rounded. ``e_p`` and ``e_share`` are relative.
    """

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
        >>> call = AttentionErrors(one, one, 3 * one, one, None, None, one.bool(), 1.0, one, one[..., 0], 1, 1)
        >>> call.variances()["out"].item() / 3**2
        3.0
        """
        found = {"out": self.e_out, **self._gradients(), "lse": self.e_lse_of_keys}
        if self.sinks is None:
            return found
        by_sink = (self.sink_weight.square() * self.e_share).unsqueeze(-1)
        out = self.e_out + self.out.square() * (3 + by_sink)  # out times share, which is rounded three times
        found["out"] = self.share.unsqueeze(-1).square() * out
        # lse = l + log(1 + exp(sink - l)), whose derivatives are share and the sink's weight
        lse = self.share.square() * self.e_lse_of_keys + (self.sink_weight * (self.lse_of_keys - self.sink)).square()
        found["lse"] = lse + 2 * self.finite_lse.square() + 2 * EXP
        found["dsinks"] = self._of_sinks()
        return found

    # --- a row's weights

    @cached_property
    def finite_lse(self) -> Tensor:
        return self.lse.nan_to_num(neginf=0.0)

    @cached_property
    def sink(self) -> Tensor:
        zero = torch.zeros_like(self.finite_lse)
        return zero if self.sinks is None else zero + self.sinks.to(zero).view(1, -1, 1)

    @cached_property
    def sink_weight(self) -> Tensor:
        return torch.zeros_like(self.sink) if self.sinks is None else (self.sink - self.finite_lse).exp()

    @cached_property
    def share(self) -> Tensor:
        share = self.weights.sum(-1)
        return share.where(share > 0, 1.0)  # a row that sees no keys has no weights and no errors

    @cached_property
    def lse_of_keys(self) -> Tensor:
        return self.finite_lse + self.share.log()

    @cached_property
    def p_squared(self) -> Tensor:
        return self.weights.square() / self.share.square().unsqueeze(-1)

    @cached_property
    def keys(self) -> Tensor:
        """The number of keys of each row."""
        return self.mask.sum(1).to(self.q.dtype).unsqueeze(-1)

    @cached_property
    def logits(self) -> Tensor:
        return self.q @ self.k.mT * self.scale

    @cached_property
    def e_logits(self) -> Tensor:
        """A sum of products, scaled."""
        squares = self.q.square() @ self.k.square().mT * self.scale**2
        return of_sum(self.logits, squares, self.q.shape[3]) + self.logits.square()

    @cached_property
    def e_p(self) -> Tensor:
        """Of exp(s - l): the exponent's error is relative to its result. The error of l is the same for all keys, and
        is counted apart (``e_row``)."""
        return self.e_logits + (self.logits - self.lse_of_keys.unsqueeze(-1)).square() + EXP

    @cached_property
    def e_lse_of_keys(self) -> Tensor:
        """dl / ds_j = p_j; the sum of exponentials and its logarithm are rounded."""
        return (self.p_squared * self.e_logits).sum(-1) + 2 * self.lse_of_keys.square() + EXP

    @cached_property
    def e_share(self) -> Tensor:
        """Of exp(logsigmoid(l - sink)), in units of the sink's weight, which is its derivative."""
        if self.sinks is None:
            return torch.zeros_like(self.lse_of_keys)
        return self.e_lse_of_keys + (self.lse_of_keys - self.sink).square() + self.share.log().square() + 2 * EXP

    @cached_property
    def e_row(self) -> Tensor:
        """The error that all weights of a row have in common when the backward pass computes them again from lse."""
        return self.e_lse_of_keys + self.sink_weight.square() * self.e_share

    # --- out and delta

    @cached_property
    def out(self) -> Tensor:
        return self.weights @ self.v / self.share.unsqueeze(-1)

    @cached_property
    def e_out(self) -> Tensor:
        """do = sum_j p_j (error of p_j) (v_j - o), since a common error cancels. Then the sum over keys, and the
        division by the sum of weights, with two more roundings."""
        errors = self.p_squared * self.e_p
        of_weights = errors @ self.v.square() - 2 * self.out * (errors @ self.v)
        of_weights = of_weights + self.out.square() * errors.sum(-1, keepdim=True)
        total = of_weights.clamp(min=0.0)
        total = total + self._summed(self.out, self.p_squared @ self.v.square(), self.keys, is_merge=True)
        of_division = of_sum(
            torch.ones_like(self.lse_of_keys), self.p_squared.sum(-1), self.keys.squeeze(-1), products=False
        )
        return total + self.out.square() * (of_division.unsqueeze(-1) + 2) + self._of_merging()

    def _of_merging(self) -> Tensor | float:
        """A merge weighs two parts by w and 1 - w, and one of these is rounded near 1, whatever the other is: an error
        times the parts' distance, whose square falls with the number of keys in each part."""
        if self.parts == 1:
            return 0.0
        visible, keys = self.mask.to(self.q.dtype), self.keys.clamp(min=1.0)
        distances = visible @ self.v.square() - 2 * self.out * (visible @ self.v) + keys * self.out.square()
        return 4 * keys.clamp(max=self.parts) / keys.square() * distances.clamp(min=0.0)

    @cached_property
    def delta(self) -> Tensor:
        """Without the cotangent of lse."""
        return (self.dout * self.out).sum(-1)

    @cached_property
    def cotangent_of_lse(self) -> Tensor:
        return torch.zeros_like(self.lse_of_keys) if self.dlse is None else self.dlse.to(self.q.dtype)

    @cached_property
    def e_delta_by_out(self) -> Tensor:
        return (self.dout.square() * self.e_out).sum(-1)

    @cached_property
    def e_delta_by_sum(self) -> Tensor:
        return of_sum(self.delta, (self.dout * self.out).square().sum(-1), self.v.shape[3])

    @cached_property
    def e_delta(self) -> Tensor:
        """With sinks, delta is added up from out times share, so that the sink's errors come back."""
        total = self.e_delta_by_out + 3 * self.delta.square() + 3 * self.cotangent_of_lse.square()
        if self.sinks is None:
            return total
        by_sink = self.e_delta_by_sum + self.delta.square() * self.e_share
        return total + (self.dout * self.out).square().sum(-1) + self.sink_weight.square() * by_sink

    # --- gradients

    def _gradients(self) -> dict[str, Tensor]:
        """Errors of ds are independent between pairs, except those of a row's l and delta: in dq they add up before
        they are squared, in dk each row has its own."""
        dp = self.dout @ self.v.mT
        squares = self.dout.square() @ self.v.square().mT
        e_dp = of_sum(dp, squares, self.v.shape[3])
        if self.sinks is not None:
            e_dp = e_dp + squares  # dout is multiplied by share
        w_squared, e_row, e_delta = self.weights.square(), self.e_row.unsqueeze(-1), self.e_delta.unsqueeze(-1)
        steep = dp - (self.delta * self.share - self.cotangent_of_lse).unsqueeze(-1)
        ds = self.weights * steep * self.scale
        e_pair = self.scale**2 * w_squared * ((self.e_p + 3) * steep.square() + e_dp)
        e_in_row = self.scale**2 * w_squared * (e_row * steep.square() + e_delta)
        dq, dq_by_delta = ds @ self.k, self.scale * (self.weights @ self.k)
        e_dq = e_pair @ self.k.square() + e_row * dq.square() + e_delta * dq_by_delta.square()
        e_dk = self._for_keys((e_pair + e_in_row).mT @ self.q.square())
        e_dv = self._for_keys((w_squared * (self.e_p + e_row)).mT @ self.dout.square())
        rows = self.mask.sum(0).to(self.q.dtype).unsqueeze(-1) * (self.q.shape[1] // self.kv_heads)
        terms_of_dk = self._for_keys(ds.mT @ self.q), self._for_keys(ds.square().mT @ self.q.square())
        terms_of_dv = (
            self._for_keys(self.weights.mT @ self.dout),
            self._for_keys(w_squared.mT @ self.dout.square()),
        )
        return {
            "dq": e_dq + self._summed(dq, ds.square() @ self.k.square(), self.keys),
            "dk": e_dk + self._summed(*terms_of_dk, rows),
            "dv": e_dv + self._summed(*terms_of_dv, rows),
        }

    def _of_sinks(self) -> Tensor:
        """dsink = - sum over rows of the sink's weight times (share delta - the cotangent of lse)."""
        by_out, dlse = self.delta * self.share, self.cotangent_of_lse
        terms = self.sink_weight * (by_out - dlse)
        e_delta = self.share.square() * (self.e_delta_by_out + self.e_delta_by_sum)
        e_terms = self.sink_weight.square() * ((by_out.square() + dlse.square()) * (self.e_share + 3) + e_delta)
        rows = self.q.shape[0] * self.q.shape[2]
        return e_terms.sum((0, 2)) + of_sum(terms.sum((0, 2)), terms.square().sum((0, 2)), rows, products=False)

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
        >>> call = AttentionErrors(one, v, v, one, None, None, mask, 1.0, half, one[..., 0], 1, 2)
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
        >>> call = AttentionErrors(one, 2 * one, 3 * one, one, None, None, one.bool(), 1.0, half, one[..., 0], 1, 1)
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
