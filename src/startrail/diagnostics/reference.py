"""What attention should give: random inputs of a case, the float64 truth, and what single-process attention errs on it.

The reference is dense attention written from the masks' definition, with autograd's gradients for random cotangents; it
shares nothing with the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from startrail.diagnostics.rounding import ROUNDING, Attention, Floor, floor_of
from startrail.engine.validate import MAX_HEAD_DIM
from startrail.geometry.layout import LAYOUTS, check_layout
from startrail.geometry.mask import Mask
from startrail.kernels import accumulator
from startrail.parallel import SequenceParallel
from startrail.schedule.plan import Plan
from startrail.schedule.sizes import Sizes

# How a case calls attention: on plain tensors; on views with gaps, as (batch, tokens, heads, dim) projections give
# them; with a cotangent that repeats a few numbers, as a sum of the output gives it; with gradients of some inputs
# only; or with another call before it, whose backward pass comes after its own (nested) or before it (in turn).
TWO_CALLS = ("nested", "in turn")
USES = ("plain", "strided", "expanded", "q only", "k and v only", *TWO_CALLS)
CPU = torch.device("cpu")


class Error(NamedTuple):
    """Root-mean-square and largest absolute error, the largest of an element that errs more than arithmetic may, and
    the root mean square of errors in the deviations of arithmetic's.

    >>> may = Floor(deviation=torch.tensor([0.1, 0.1, 0.5]), each=torch.tensor([0.3, 0.3, 1.5]))
    >>> ours, truth = torch.tensor([1.5, 3.0, 5.0]), torch.tensor([1.0, 3.0, 4.0])
    >>> worst, beyond, spread = Error.of(ours, truth, may)[1:]
    >>> worst, beyond, round(spread**2, 2)      # (5² + 0² + 2²) / 3
    (1.0, 0.5, 9.67)
    """

    rms: float
    worst: float
    beyond: float
    spread: float

    @classmethod
    def of(cls, ours: Tensor, truth: Tensor, may: Floor | None = None) -> Error:
        ours = ours.double()
        off = (ours - truth).abs().masked_fill(ours == truth, 0.0)  # also where both are infinite
        beyond, spread = off, off
        if may is not None:
            beyond = off.masked_fill(off <= may.each, 0.0)  # NaN stays
            spread = (off / may.deviation).masked_fill(off == 0, 0.0)
        rms = (x.square().mean().sqrt().item() for x in (off, spread))
        return cls(next(rms), off.max().item(), beyond.max().item(), next(rms))

    @classmethod
    def worse(cls, a: Error, b: Error) -> Error:
        return cls(*map(larger, a, b))

    @classmethod
    def all_of(cls, parts: Sequence[Error]) -> Error:
        """Of something whose equal parts have these errors."""
        rms, spread = ((sum(x * x for x in found) / len(parts)) ** 0.5 for found in list(zip(*parts, strict=True))[::3])
        worst = reduce(cls.worse, parts)
        return cls(rms, worst.worst, worst.beyond, spread)


def larger(a: float, b: float) -> float:
    """The larger of two errors, NaN if one is: ``max`` may lose it.

    >>> larger(1.0, float("nan")), larger(float("nan"), 1.0), larger(1.0, 2.0)
    (nan, nan, 2.0)
    """
    return a if a >= b or a != a else b


@dataclass(frozen=True)
class Case:
    plan: str
    world: int
    length: int = 256
    batch: int = 1
    q_heads: int = 4
    kv_heads: int = 4
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    causal: bool = False
    window: int | None = None
    documents: tuple[int, ...] | None = None
    layout: str = "zigzag"
    wire_dtype: torch.dtype | None = None
    scale: float | None = None
    chunk: int | None = None
    blocks: tuple[tuple[int, int], ...] = ()
    slices: tuple[tuple[int, ...], ...] = ()
    value_dim: int | None = None
    sinks: bool = False
    softcap: float | None = None
    lse: bool = False  # whether lse is used too, with a cotangent of its own
    seed: int = 0
    use: str = "plain"  # of USES

    def validate(self) -> None:
        """Raise here what every rank would raise, before any is started."""
        for name in ("world", "length", "batch", "q_heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name.replace('_', ' ')} {getattr(self, name)} must be at least 1")
        if self.q_heads % self.kv_heads:
            raise ValueError(f"{self.q_heads} query heads are not a multiple of {self.kv_heads} key/value heads")
        if self.head_dim > MAX_HEAD_DIM:
            raise ValueError(f"head dim {self.head_dim} is more than {MAX_HEAD_DIM}")
        self.mask.check_length(self.length)
        check_layout(self.layout)
        if self.plan != "auto":
            plan = Plan.parse(self.plan)
            local = LAYOUTS[self.layout](plan.slots(self.world), self.length).local
            Sizes(plan, local, self.batch, self.q_heads, self.kv_heads, self.head_dim)

    @property
    def mask(self) -> Mask:
        steps = Mask.from_slices(self.slices).steps
        return Mask(self.causal, self.window, self.documents, self.chunk, self.blocks, steps)

    @property
    def wants_largest(self) -> bool:
        """Whether the largest logits are asked for: not always, since they cost as much again."""
        return self.seed % 4 == 0

    @property
    def repeated(self) -> tuple[int, int, int, int]:
        """The shape of the cotangent before it is expanded to the output's, where the use is "expanded"."""
        dim = self.head_dim if self.value_dim is None else self.value_dim
        return ((1, 1, 1, 1), (1, 1, 1, dim), (self.batch, self.q_heads, 1, 1), (self.batch, 1, 1, dim))[self.seed % 4]

    def parallel(self) -> SequenceParallel:
        """What runs it on this rank."""
        return SequenceParallel(
            self.plan,
            heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            layout=self.layout,
            wire_dtype=self.wire_dtype,
        )


@dataclass
class CaseData:
    """Inputs (q, k, v, dout, and the sinks and lse's cotangent, or None) and the float64 truth: by name the exact
    results, SDPA's errors, and what arithmetic may err whatever SDPA does (`rounding`); and each head's largest logit,
    if it is asked for, and what may be returned for it at least.

    Why SDPA's errors are not enough: dq and dk add up differences of dout·v and delta. Where a query sees one key the
    two cancel: the truth is zero, SDPA returns a rounding error of theirs or, in shapes where it happens to add both up
    in one order, an exact zero.
    """

    inputs: list[Tensor | None]
    exact: dict[str, Tensor]
    yardstick: dict[str, Error]
    floor: dict[str, Floor]
    largest: tuple[Tensor, Tensor] | None


def visible_pairs(case: Case) -> Tensor:
    """(length, length), True where a query sees a key, from the definition."""
    i = torch.arange(case.length).unsqueeze(1)
    j = torch.arange(case.length).unsqueeze(0)
    seen = torch.ones(case.length, case.length, dtype=torch.bool)
    if case.causal:
        seen &= j <= i
    if case.window is not None:
        seen &= (i - j).abs() < case.window
    if case.chunk is not None:
        seen &= i // case.chunk == j // case.chunk
    if case.slices:
        wanted = torch.zeros_like(seen)
        for q0, q1, k0, k1, *causal in case.slices:
            inside = (i >= q0) & (i < q1) & (j >= k0) & (j < k1)
            wanted |= inside & (j < k1 - (q1 - 1 - i)) if any(causal) else inside
        seen &= wanted
    for start, stop in case.blocks:
        seen |= (i >= start) & (i < stop) & (j >= start) & (j < stop)
    if case.documents is not None:
        document = torch.bucketize(torch.arange(case.length), torch.tensor(case.documents[1:]), right=True)
        seen &= document.unsqueeze(1) == document.unsqueeze(0)
    return seen


def make_data(case: Case, device: torch.device = CPU) -> CaseData:
    generator = torch.Generator().manual_seed(case.seed)

    def random(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    wide = accumulator(case.dtype)
    rows, keys = (case.batch, case.q_heads, case.length), (case.batch, case.kv_heads, case.length)
    value_dim = case.head_dim if case.value_dim is None else case.value_dim
    inputs: list[Tensor | None] = [
        random(*rows, case.head_dim), random(*keys, case.head_dim), random(*keys, value_dim), random(*rows, value_dim),
        random(case.q_heads, dtype=wide) if case.sinks else None,
        random(*rows, dtype=wide) if case.lse else None,
    ]  # fmt: skip
    if case.use == "expanded":  # written out: the kernels behind the truth may not know such strides
        inputs[3] = random(*case.repeated).expand(*rows, value_dim).contiguous()
    mask = visible_pairs(case).to(device)
    exact = _dense(_as(inputs, torch.float64), mask, case.scale, case.softcap)
    truths = [(inputs, exact)]
    if case.sinks or case.lse or case.softcap:  # those are written out, with fewer roundings than flash attention has
        plain = [*inputs[:4], None, None]
        truths.append((plain, _dense(_as(plain, torch.float64), mask, case.scale)))
    yardstick = dict.fromkeys(exact, Error(0.0, 0.0, 0.0, 0.0))
    for dtype, order in (
        (coarser(case), torch.arange(case.length)),
        (coarser(case), torch.randperm(case.length, generator=generator)),
        (accumulator(case.dtype), torch.randperm(case.length, generator=generator)),
    ):
        order = order.to(device)
        for given, true in truths:
            ordered = [x if x is None or x.dim() == 1 else x[:, :, order] for x in given]
            softcap = case.softcap if true is exact else None
            for name, x in _dense(_as(ordered, dtype), mask[order][:, order], case.scale, softcap).items():
                error = Error.of(x, true[name] if name == "dsinks" else true[name][:, :, order])
                yardstick[name] = Error.worse(yardstick[name], error)
    largest = _largest(case, inputs, mask) if case.wants_largest else None
    # float32 is enough for sizes of errors
    return CaseData(inputs, exact, yardstick, _floor(case, _as(inputs, torch.float32), mask), largest)


def _as(inputs: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor | None]:
    """``inputs`` in ``dtype``; sinks and the cotangent of lse are never narrower than float32."""
    wide = torch.promote_types(dtype, torch.float32)
    return [None if x is None else x.to(dtype if place < 4 else wide) for place, x in enumerate(inputs)]


def coarser(case: Case) -> torch.dtype:
    """What the results can be no better than: the inputs' dtype or the wire's, if there is one."""
    wire = case.wire_dtype or case.dtype if case.world > 1 else case.dtype
    return wire if torch.finfo(wire).eps > torch.finfo(case.dtype).eps else case.dtype


def _largest(case: Case, inputs: Sequence[Tensor | None], mask: Tensor) -> tuple[Tensor, Tensor]:
    """Each head's largest logit, and the smallest that arithmetic may take for it: of two logits a and b, b may look as
    large as a if a - b is no more than what both may err when they are computed."""
    q, k = (x.to(coarser(case)).double() for x in inputs[:2] if x is not None)  # what travels is rounded
    k, scale = k.repeat_interleave(case.q_heads // case.kv_heads, 1), case.scale or case.head_dim**-0.5
    scores = (q @ k.mT * scale).masked_fill_(~mask, float("-inf"))
    largest = scores.amax((0, 2, 3))
    # n roundings of a sum of products, whatever their order, are at most n u of the sum of absolute values; a kernel
    # for half precision may round the logit to that
    errs = (case.head_dim + 1) * torch.finfo(accumulator(case.dtype)).eps / 2 * scale * (q.abs() @ k.abs().mT)
    errs += torch.finfo(coarser(case)).eps / 2 * scores.nan_to_num(neginf=0.0).abs()
    highest = (scores - errs).amax((0, 2, 3)).view(1, -1, 1, 1)
    return largest, scores.masked_fill_(scores + errs < highest, float("inf")).amin((0, 2, 3))


def _floor(case: Case, inputs: Sequence[Tensor | None], mask: Tensor) -> dict[str, Floor]:
    q, k, v, dout, sinks, dlse = inputs
    assert q is not None and k is not None and v is not None and dout is not None
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    k, v = (x.repeat_interleave(case.q_heads // case.kv_heads, 1) for x in (k, v))
    weights, lse = _softmax(q, k, mask, scale, sinks, case.softcap)
    parts = 2 * case.world  # every rank has two runs of keys; no more are counted where worlds share a truth
    call = Attention(q, k, v, dout, sinks, dlse, mask, scale, weights, lse, case.kv_heads, parts)
    coarse, wide = coarser(case), accumulator(coarser(case))
    unit = torch.finfo(wide).eps / 2
    if wide == torch.float64:
        unit *= 2**0.5  # the truth is float64 as well: the variances of its errors and of ours add up
    floors = {name: floor_of(variance, unit) for name, variance in call.variances().items()}
    if case.world > 1 and coarse != wide:  # partial results are rounded to what travels, and may cancel
        unit = torch.finfo(coarse).eps / 2
        variance, total = call.travelled()
        deviation, each = floor_of(variance, unit)
        floors["out"] = Floor(deviation, each.minimum(unit * total).maximum(floors["out"].each))
        for name, total in call.sizes().items():
            deviation, each = floors[name]
            floors[name] = Floor(deviation.maximum(ROUNDING**0.5 * unit * total), each.maximum(unit * total))
    return floors


def _softmax(
    q: Tensor, k: Tensor, mask: Tensor, scale: float, sinks: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """The weights of the keys, and lse; rows that see nothing have weights 0."""
    scores = q @ k.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(q.dtype).view(1, -1, 1, 1).expand(*q.shape[:3], 1)], -1)
    lse = scores.logsumexp(-1)
    blind = lse.isinf().unsqueeze(-1)
    weights = torch.where(blind, 0.0, scores.masked_fill(blind, 0.0).softmax(-1))  # not by lse, which is rounded
    return weights[..., : k.shape[2]], lse


def _dense(
    inputs: Sequence[Tensor | None], mask: Tensor, scale: float | None, softcap: float | None = None
) -> dict[str, Tensor]:
    """Everything that attention returns, and every gradient, on one process."""
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3] if x is not None)
    dout, sinks, dlse = inputs[3:]
    if sinks is None and dlse is None and softcap is None:
        widest, width = max(q.shape[3], v.shape[3]), v.shape[3]
        wq, wk, wv = (F.pad(x, (0, widest - x.shape[3])) for x in (q, k, v))  # or it is not flash attention
        scale, grouped = scale or q.shape[3] ** -0.5, q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(wq, wk, wv, mask, scale=scale, enable_gqa=grouped)[..., :width]
        grads = torch.autograd.grad(out, (q, k, v), dout)
        return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))
    sinks = None if sinks is None else sinks.detach().requires_grad_()
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    weights, lse = _softmax(q, keys, mask, q.shape[3] ** -0.5 if scale is None else scale, sinks, softcap)
    made = {"out": weights @ values} | ({} if dlse is None else {"lse": lse})
    wanted = {"dq": q, "dk": k, "dv": v} | ({} if sinks is None else {"dsinks": sinks})
    cotangents = [dout] if dlse is None else [dout, dlse.to(lse.dtype)]
    grads = torch.autograd.grad(list(made.values()), list(wanted.values()), cotangents)
    return {name: x.detach() for name, x in made.items()} | dict(zip(wanted, grads, strict=True))
