"""The reference: random inputs of a case, exact results in float64, and the errors of single-process attention.

The reference is dense attention written from the definition of masks, with autograd's gradients for random cotangents.
It shares no code with the engine.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from startrail.compile import attention as compiled
from startrail.compile.problem import Split
from startrail.diagnostics.rounding import ROUNDING, AttentionErrors, Floor, floor_of
from startrail.engine.arguments import MAX_HEAD_DIM, read_boundaries, read_shares
from startrail.geometry.mask import Mask
from startrail.geometry.zones import check_layout
from startrail.kernels import accumulator
from startrail.parallel import SequenceParallel
from startrail.planner.sparse.rule import rule_for
from startrail.schedule.plan import Plan
from startrail.sequence import Sequence as SplitSequence

# How a case calls attention: on plain tensors; on strided views, as projections to (batch, tokens, heads, dim) give;
# with an expanded cotangent, as a sum of the output gives; with gradients of some inputs only; recomputed in the
# backward pass (checkpointed); compiled; or after another call, whose backward pass comes after its own (nested) or
# before it (in turn).
TWO_CALL_STYLES = ("nested", "in turn")
CALL_STYLES = ("plain", "strided", "expanded", "q only", "k and v only", "checkpointed", "compiled", *TWO_CALL_STYLES)
CPU = torch.device("cpu")
ROWS_BYTES = 2**30  # of float64 weights at a time


class Error(NamedTuple):
    """Root-mean-square and largest absolute error; the largest error of an element that exceeds its floor; and the
    root mean square of errors in units of their expected deviations.

    >>> floor = Floor(deviation=torch.tensor([0.1, 0.1, 0.5]), each=torch.tensor([0.3, 0.3, 1.5]))
    >>> ours, truth = torch.tensor([1.5, 3.0, 5.0]), torch.tensor([1.0, 3.0, 4.0])
    >>> worst, excess, spread = Error.of(ours, truth, floor)[1:]
    >>> worst, excess, round(spread**2, 2)      # (5² + 0² + 2²) / 3
    (1.0, 0.5, 9.67)
    """

    rms: float
    worst: float
    excess: float
    spread: float

    @classmethod
    def of(cls, ours: Tensor, truth: Tensor, floor: Floor | None = None) -> Error:
        if not ours.numel():  # a rank that holds no token
            return cls(0.0, 0.0, 0.0, 0.0)
        ours = ours.double()
        off = (ours - truth).abs().masked_fill(ours == truth, 0.0)  # also where both are infinite
        excess, spread = off, off
        if floor is not None:
            excess = off.masked_fill(off <= floor.each, 0.0)  # NaN stays
            spread = (off / floor.deviation).masked_fill(off == 0, 0.0)
        rms = (x.square().mean().sqrt().item() for x in (off, spread))
        return cls(next(rms), off.max().item(), excess.max().item(), next(rms))

    @classmethod
    def worse(cls, a: Error, b: Error) -> Error:
        return cls(*map(nan_max, a, b))

    @classmethod
    def combine(cls, parts: Sequence[Error]) -> Error:
        """The error of a tensor whose equal parts have these errors."""
        rms, spread = ((sum(x * x for x in found) / len(parts)) ** 0.5 for found in list(zip(*parts, strict=True))[::3])
        worst = reduce(cls.worse, parts)
        return cls(rms, worst.worst, worst.excess, spread)


def nan_max(a: float, b: float) -> float:
    """The larger of two errors, or NaN if either is; ``max`` may drop it.

    >>> nan_max(1.0, float("nan")), nan_max(float("nan"), 1.0), nan_max(1.0, 2.0)
    (nan, nan, 2.0)
    """
    return a if a >= b or a != a else b


@dataclass(frozen=True)
class Case:
    """One attention problem: shapes, dtype, mask and options, and the plan that runs it."""

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
    layout: str = "zones"
    windows: bool = False  # tokens in the order of ranks, as for models with windows
    wire_dtype: torch.dtype | None = None
    scale: float | None = None
    chunk: int | None = None
    blocks: tuple[tuple[int, int], ...] = ()
    slices: tuple[tuple[int, ...], ...] = ()
    value_dim: int | None = None
    sinks: bool = False
    softcap: float | None = None
    lse: bool = False  # True if lse is used too, with its own cotangent
    seed: int = 0
    call_style: str = "plain"  # of CALL_STYLES
    shares: tuple[float, ...] | None = None  # of the ranks
    packed_from: tuple[int, ...] | None = None  # documents of the sequence whose ``packed`` made this one
    by_rows: bool = False  # the reference is computed a few rows at a time: for lengths whose weights do not fit

    def validate(self) -> None:
        """Raise the ``ValueError`` that every rank would raise, before any rank starts."""
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
            problem, split = self.problem, self.split
            problem.sizes(split.plan, split.layout_of(problem.boundaries).largest)

    @property
    def problem(self) -> compiled.Attention:
        """The call without its tensors."""
        placement, shares = self.packed_from or (), read_shares(self.shares, self.world)
        boundaries = read_boundaries(self.length, self.documents, self.blocks, placement, shares)
        sent = self.dtype if self.world == 1 else self.wire_dtype or self.dtype
        dtype, wire = (str(x).removeprefix("torch.") for x in (self.dtype, sent))
        shape = self.q_heads, self.kv_heads, self.head_dim, self.value_dim or self.head_dim
        return compiled.Attention(boundaries, self.batch, dtype, wire, self.layer_mask, *shape)

    @property
    def split(self) -> Split:
        """How ranks split the sequence, as ``parallel`` does. The plan must not be "auto"."""
        rule = rule_for(os.environ.get("STARTRAIL_CLUSTER", ""), self.world)
        return Split(Plan.parse(self.plan), self.world, self.layout, rule, self.windows)

    @property
    def mask(self) -> Mask:
        steps = Mask.from_slices(self.slices).steps if self.slices else ()
        return Mask(self.causal, self.window, self.documents, self.chunk, self.blocks, steps)

    @property
    def layer_mask(self) -> Mask:
        """Without what belongs to the sequence."""
        return replace(self.mask, documents=None, blocks=())

    @property
    def with_max_logits(self) -> bool:
        """True if the largest logits are requested: not always, since they double the cost."""
        return self.seed % 4 == 0 and not self.by_rows

    @property
    def repeated(self) -> tuple[int, int, int, int]:
        """The shape of the cotangent before it is expanded to the output's, in the call style "expanded"."""
        dim = self.head_dim if self.value_dim is None else self.value_dim
        return ((1, 1, 1, 1), (1, 1, 1, dim), (self.batch, self.q_heads, 1, 1), (self.batch, 1, 1, dim))[self.seed % 4]

    def parallel(self) -> SequenceParallel:
        """The ``SequenceParallel`` that runs it."""
        return SequenceParallel(
            self.plan,
            heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            layout=self.layout,
            windows=self.windows,
            wire_dtype=self.wire_dtype,
        )

    def sequence(self, sp: SequenceParallel) -> SplitSequence:
        """The sequence that it runs on."""
        if self.packed_from is None:
            return sp.sequence(self.length, self.documents, self.blocks, self.shares)
        return sp.sequence(self.length, self.packed_from, self.blocks, self.shares).packed(self.documents)


@dataclass
class CaseData:
    """Inputs (q, k, v, dout, and the sinks and lse's cotangent, or None), and by name the exact results in float64,
    SDPA's errors, and the rounding errors that any correct implementation may have (`rounding`). Also, if requested,
    each head's largest logit and the smallest value that may be returned for it.

    SDPA's errors alone are not enough: dq and dk add up differences of dout·v and delta. Where a query sees one key the
    two cancel and the exact result is zero. SDPA returns a rounding error or, in shapes where it happens to add both up
    in the same order, an exact zero.
    """

    inputs: list[Tensor | None]
    exact: dict[str, Tensor]
    yardstick: dict[str, Error]
    floor: dict[str, Floor]
    max_logits: tuple[Tensor, Tensor] | None


def visible_pairs(case: Case) -> Tensor:
    """(length, length), True where a query sees a key, written from the definition."""
    i = torch.arange(case.length).unsqueeze(1)
    j = torch.arange(case.length).unsqueeze(0)
    visible = torch.ones(case.length, case.length, dtype=torch.bool)
    if case.causal:
        visible &= j <= i
    if case.window is not None:
        visible &= (i - j).abs() < case.window
    if case.chunk is not None:
        visible &= i // case.chunk == j // case.chunk
    if case.slices:
        wanted = torch.zeros_like(visible)
        for each in case.slices:
            q0, q1, k0, k1, causal, inverse = (*each, 0, 0)[:6]
            first, end = (k0 + i - q0 if inverse else k0), (k1 - (q1 - 1 - i) if causal else k1)
            wanted |= (i >= q0) & (i < q1) & (j >= first) & (j < end)
        visible &= wanted
    for start, stop in case.blocks:
        visible |= (i >= start) & (i < stop) & (j >= start) & (j < stop)
    if case.documents is not None:
        document = torch.bucketize(torch.arange(case.length), torch.tensor(case.documents[1:]), right=True)
        visible &= document.unsqueeze(1) == document.unsqueeze(0)
    return visible


def make_data(case: Case, device: torch.device = CPU) -> CaseData:
    """Random inputs of a case, the same for the same seed, and everything that results are compared with."""
    if case.by_rows:
        return data_by_rows(case, device)
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
    if case.call_style == "expanded":  # contiguous: the reference's kernels may not support such strides
        inputs[3] = random(*case.repeated).expand(*rows, value_dim).contiguous()
    mask = visible_pairs(case).to(device)
    exact = _dense(_as(inputs, torch.float64), mask, case.scale, case.softcap)
    truths = [(inputs, exact)]
    if case.sinks or case.lse or case.softcap:  # computed without flash attention, with fewer roundings
        plain = [*inputs[:4], None, None]
        truths.append((plain, _dense(_as(plain, torch.float64), mask, case.scale)))
    yardstick = dict.fromkeys(exact, Error(0.0, 0.0, 0.0, 0.0))
    for dtype, order in (
        (limiting_dtype(case), torch.arange(case.length)),
        (limiting_dtype(case), torch.randperm(case.length, generator=generator)),
        (accumulator(case.dtype), torch.randperm(case.length, generator=generator)),
    ):
        order = order.to(device)
        for given, true in truths:
            ordered = [x if x is None or x.dim() == 1 else x[:, :, order] for x in given]
            softcap = case.softcap if true is exact else None
            for name, x in _dense(_as(ordered, dtype), mask[order][:, order], case.scale, softcap).items():
                error = Error.of(x, true[name] if name == "dsinks" else true[name][:, :, order])
                yardstick[name] = Error.worse(yardstick[name], error)
    max_logits = _max_logits(case, inputs, mask) if case.with_max_logits else None
    # float32 is enough to size errors
    floors = _rounding_floors(case, _as(inputs, torch.float32), mask, exact)
    return CaseData(inputs, exact, yardstick, floors, max_logits)


def data_by_rows(case: Case, device: torch.device) -> CaseData:
    """``make_data`` for long causal sequences: the reference never holds more than ``ROWS_BYTES`` of weights, and SDPA
    runs once, without a mask tensor. There is no rounding floor, so errors must be within twice SDPA's."""
    if case.mask != Mask(causal=True):
        raise ValueError("a reference by rows is for plain causal masks")
    generator = torch.Generator().manual_seed(case.seed)
    shapes = [(case.batch, heads, case.length, case.head_dim) for heads in (case.q_heads, case.kv_heads)]
    q, k, v, dout = (
        torch.randn(shape, generator=generator).to(device, case.dtype) for shape in (*shapes, shapes[1], shapes[0])
    )
    exact = _causal_by_rows(*(x.double() for x in (q, k, v, dout)))
    sides = tuple(x.to(limiting_dtype(case)).detach().requires_grad_() for x in (q, k, v))
    grouped = case.q_heads != case.kv_heads
    out = F.scaled_dot_product_attention(sides[0], sides[1], sides[2], is_causal=True, enable_gqa=grouped)
    grads = torch.autograd.grad(out, sides, dout.to(out.dtype))
    results = dict(zip(exact, (out.detach(), *grads), strict=True))
    yardstick = {name: Error.of(results[name], exact[name]) for name in exact}
    nothing = {name: Floor(torch.zeros_like(x), torch.zeros_like(x)) for name, x in exact.items()}
    return CaseData([q, k, v, dout, None, None], exact, yardstick, nothing, None)


def _causal_by_rows(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """out, dq, dk, dv of causal attention with the usual scale."""
    (batch, heads, length, dim), kv_heads = q.shape, k.shape[1]
    keys, values = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    out, dq, dk, dv = torch.empty_like(q), torch.empty_like(q), torch.zeros_like(keys), torch.zeros_like(values)
    step = max(1, ROWS_BYTES // (batch * heads * length * q.element_size()))
    for start in range(0, length, step):
        rows, seen = slice(start, min(start + step, length)), slice(0, min(start + step, length))
        visible = torch.ones(rows.stop - rows.start, seen.stop, dtype=torch.bool, device=q.device).tril(start)
        qr, dr, kr, vr = q[:, :, rows], dout[:, :, rows], keys[:, :, seen], values[:, :, seen]
        weights = (qr @ kr.mT * dim**-0.5).masked_fill_(~visible, float("-inf")).softmax(-1)
        out[:, :, rows] = weights @ vr
        dv[:, :, seen] += weights.mT @ dr
        delta = (dr * out[:, :, rows]).sum(-1, keepdim=True)
        dlogits = weights.mul_(dr @ vr.mT - delta).mul_(dim**-0.5)
        dq[:, :, rows] = dlogits @ kr
        dk[:, :, seen] += dlogits.mT @ qr
    dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in (dk, dv))
    return {"out": out, "dq": dq, "dk": dk, "dv": dv}


def _as(inputs: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor | None]:
    """``inputs`` in ``dtype``; sinks and the cotangent of lse are never narrower than float32."""
    wide = torch.promote_types(dtype, torch.float32)
    return [None if x is None else x.to(dtype if place < 4 else wide) for place, x in enumerate(inputs)]


def limiting_dtype(case: Case) -> torch.dtype:
    """The dtype that limits the precision of results: the inputs' or the wire's, whichever is coarser."""
    wire = case.wire_dtype or case.dtype if case.world > 1 else case.dtype
    return wire if torch.finfo(wire).eps > torch.finfo(case.dtype).eps else case.dtype


def _max_logits(case: Case, inputs: Sequence[Tensor | None], mask: Tensor) -> tuple[Tensor, Tensor]:
    """Each head's largest logit, and the smallest that may be returned for it: of two logits a and b, b can appear as
    large as a if a - b is at most the sum of their rounding errors."""
    q, k = (x.to(limiting_dtype(case)).double() for x in inputs[:2] if x is not None)  # the wire rounds them
    k, scale = k.repeat_interleave(case.q_heads // case.kv_heads, 1), case.scale or case.head_dim**-0.5
    scores = (q @ k.mT * scale).masked_fill_(~mask, float("-inf"))
    largest = scores.amax((0, 2, 3))
    # n roundings of a sum of products, in any order, are at most n u of the sum of absolute values; a kernel for half
    # precision may round the logit to half precision
    errors = (case.head_dim + 1) * torch.finfo(accumulator(case.dtype)).eps / 2 * scale * (q.abs() @ k.abs().mT)
    errors += torch.finfo(limiting_dtype(case)).eps / 2 * scores.nan_to_num(neginf=0.0).abs()
    highest = (scores - errors).amax((0, 2, 3)).view(1, -1, 1, 1)
    return largest, scores.masked_fill_(scores + errors < highest, float("inf")).amin((0, 2, 3))


def _rounding_floors(
    case: Case, inputs: Sequence[Tensor | None], mask: Tensor, exact: dict[str, Tensor]
) -> dict[str, Floor]:
    q, k, v, dout, sinks, dlse = inputs
    assert q is not None and k is not None and v is not None and dout is not None
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    k, v = (x.repeat_interleave(case.q_heads // case.kv_heads, 1) for x in (k, v))
    weights, lse = _softmax(q, k, mask, scale, sinks, case.softcap)
    parts = 2 * case.world  # two runs of keys per rank; worlds that share a reference count no more
    call = AttentionErrors(q, k, v, dout, sinks, dlse, mask, scale, weights, lse, case.kv_heads, parts)
    coarse, wide = limiting_dtype(case), accumulator(limiting_dtype(case))
    unit = torch.finfo(wide).eps / 2
    if wide == torch.float64:
        unit *= 2**0.5  # the reference is float64 too: the variances of both errors add up
    variances = call.variances()
    coarser = torch.finfo(case.dtype).eps / 2 / unit
    if coarser > 1:
        for name, variance in call.from_rounded_out().items():
            variances[name] = variances[name] + variance * coarser**2
    floors = {name: floor_of(variance, unit) for name, variance in variances.items()}
    if case.world > 1 and coarse != wide:  # partial results are rounded to the wire's dtype, and may cancel
        unit = torch.finfo(coarse).eps / 2
        variance, total = call.sent_outputs()
        deviation, each = floor_of(variance, unit)
        floors["out"] = Floor(deviation, each.minimum(unit * total).maximum(floors["out"].each))
        for name, total in call.sizes().items():
            deviation, each = floors[name]
            rounded = unit * (2 * total + exact[name].abs())  # the parts at two levels of a plan, and their sum
            floors[name] = Floor(deviation.maximum(ROUNDING**0.5 * unit * total), each.maximum(rounded))
        if coarse != case.dtype:  # queries and keys are rounded too
            rounded = unit * 2 * (weights * (q.abs() @ k.abs().mT)).sum(-1) * abs(scale)
            deviation, each = floors["lse"]
            floors["lse"] = Floor(deviation.maximum(ROUNDING**0.5 * rounded), each.maximum(rounded))
    return floors


def _softmax(
    q: Tensor, k: Tensor, mask: Tensor, scale: float, sinks: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """The weights of the keys, and lse; rows that see no keys have weights 0."""
    scores = q @ k.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(q.dtype).view(1, -1, 1, 1).expand(*q.shape[:3], 1)], -1)
    lse = scores.logsumexp(-1)
    masked = lse.isinf().unsqueeze(-1)
    weights = torch.where(masked, 0.0, scores.masked_fill(masked, 0.0).softmax(-1))  # not from lse, which is rounded
    return weights[..., : k.shape[2]], lse


def _dense(
    inputs: Sequence[Tensor | None], mask: Tensor, scale: float | None, softcap: float | None = None
) -> dict[str, Tensor]:
    """All results of attention and all gradients, on one process."""
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3] if x is not None)
    dout, sinks, dlse = inputs[3:]
    if sinks is None and dlse is None and softcap is None:
        widest, width = max(q.shape[3], v.shape[3]), v.shape[3]
        wq, wk, wv = (F.pad(x, (0, widest - x.shape[3])) for x in (q, k, v))  # flash attention needs equal widths
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
