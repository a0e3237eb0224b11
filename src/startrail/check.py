"""Running a plan on local ranks against a float64 reference: errors, bytes and waiting, one report a case.

The reference is dense attention written from the masks' definition, with autograd's gradients for random cotangents;
it shares nothing with the engine. The yardstick is what single-process scaled_dot_product_attention errs on the same
inputs: in the same dtype or in float32, and with the tokens in order or shuffled, whichever is worse, since its worst
element changes up to twofold with the order in which it adds up. Our root-mean-square error and our worst element may
each be twice that, or what float32 arithmetic can promise (``Data.floor``), whichever is larger. Where half precision
travels, partial results are rounded once more than SDPA rounds, and the worst element may be three times SDPA's.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from startrail.arguments import MAX_HEAD_DIM
from startrail.kernels import accumulator
from startrail.layout import LAYOUTS, check_layout
from startrail.local import run_local
from startrail.mask import Mask
from startrail.parallel import SequenceParallel
from startrail.plan import Plan
from startrail.sizes import Sizes

FLOOR = 5e-7  # what float32 may err on unit-variance inputs and logits, whatever the yardstick says


class Error(NamedTuple):
    """Root-mean-square and largest absolute error."""

    rms: float
    worst: float

    @classmethod
    def of(cls, ours: Tensor, truth: Tensor) -> Error:
        difference = (ours.double() - truth).abs()
        return cls(difference.square().mean().sqrt().item(), difference.max().item())

    @classmethod
    def worse(cls, a: Error, b: Error) -> Error:
        return cls(max(a.rms, b.rms), max(a.worst, b.worst))


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
    lse: bool = False  # whether lse is used too, with a cotangent of its own
    seed: int = 0

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
class Data:
    """Inputs (q, k, v, dout, and the sinks and lse's cotangent, or None) and the float64 truth: by name the exact
    results, SDPA's errors, and what float32 arithmetic may err whatever SDPA does.

    dq and dk add up differences of dout·v and delta. Where a query sees one key the two cancel: the truth is zero, SDPA
    returns a rounding error of theirs or, in shapes where it happens to add both up in one order, an exact zero.
    So the floor of dq, dk and dv is one unit in the last place of the sums of the absolute values.
    """

    inputs: list[Tensor | None]
    exact: dict[str, Tensor]
    yardstick: dict[str, Error]
    floor: dict[str, Error]


@dataclass
class Report:
    """What one rank (or, merged, all ranks) found."""

    errors: dict[str, Error]
    yardstick: dict[str, Error]
    floor: dict[str, Error]
    half_on_the_wire: bool
    sent: dict[str, int]
    promised: dict[str, int]
    waiting: float
    total: float
    problems: list[str] = field(default_factory=list)

    def verdict(self) -> list[str]:
        """What is wrong, one line each; empty if all is well."""
        wrong = list(self.problems)
        for name in self.errors:
            for measure, times in (("rms", 2), ("worst", 3 if self.half_on_the_wire else 2)):
                ours, sdpa, floor = (getattr(x[name], measure) for x in (self.errors, self.yardstick, self.floor))
                allowed = max(times * sdpa, floor)
                if not ours <= allowed:  # written so that NaN fails
                    wrong.append(f"{name}: {measure} error {ours:.2e}, allowed {allowed:.2e}")
        if self.sent != self.promised:
            wrong.append(f"sent {self.sent}, the closed form says {self.promised}")
        return wrong

    def text(self, case: Case) -> str:
        """A table that one can paste into an issue."""
        lines = [
            f"plan {case.plan} on {case.world} ranks, {case.length} tokens, {case.mask}, batch {case.batch}, "
            f"heads {case.q_heads}:{case.kv_heads} x {case.head_dim}, {str(case.dtype).removeprefix('torch.')}",
            f"torch {torch.__version__}, {platform.machine()}, seed {case.seed}",
            "",
            f"{'against float64':16s} {'rms error':>10s} {'SDPA rms':>10s} {'worst':>10s} {'SDPA worst':>10s}",
        ]
        for name, error in self.errors.items():
            sdpa = self.yardstick[name]
            lines.append(f"{name:16s} {error.rms:10.2e} {sdpa.rms:10.2e} {error.worst:10.2e} {sdpa.worst:10.2e}")
        lines += ["", f"{'all ranks':16s} {'bytes sent':>14s} {'closed form':>14s}"]
        for name in sorted(self.sent.keys() | self.promised.keys()):
            lines.append(f"{name:16s} {self.sent.get(name, 0):14,d} {self.promised.get(name, 0):14,d}")
        share = self.waiting / self.total if self.total else 0.0
        lines += ["", f"waiting for transfers: {share:.0%} of {self.total / case.world:.3f} s a rank"]
        wrong = self.verdict()
        return "\n".join([*lines, "", *(wrong or ["ok: exact, and every byte accounted for"])])


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


def make_data(case: Case) -> Data:
    generator = torch.Generator().manual_seed(case.seed)

    def random(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    rows, keys = (case.batch, case.q_heads, case.length), (case.batch, case.kv_heads, case.length)
    value_dim = case.head_dim if case.value_dim is None else case.value_dim
    inputs: list[Tensor | None] = [
        random(*rows, case.head_dim), random(*keys, case.head_dim), random(*keys, value_dim), random(*rows, value_dim),
        random(case.q_heads, dtype=torch.float32) if case.sinks else None,
        random(*rows, dtype=torch.float32) if case.lse else None,
    ]  # fmt: skip
    mask = visible_pairs(case)
    exact = _dense(_as(inputs, torch.float64), mask, case.scale)
    truths = [(inputs, exact)]
    if case.sinks or case.lse:  # those are written out, with fewer roundings than flash attention has
        plain = [*inputs[:4], None, None]
        truths.append((plain, _dense(_as(plain, torch.float64), mask, case.scale)))
    yardstick = dict.fromkeys(exact, Error(0.0, 0.0))
    for dtype, order in (
        (_coarser(case), torch.arange(case.length)),
        (_coarser(case), torch.randperm(case.length, generator=generator)),
        (accumulator(case.dtype), torch.randperm(case.length, generator=generator)),
    ):
        for given, true in truths:
            ordered = [x if x is None or x.dim() == 1 else x[:, :, order] for x in given]
            for name, x in _dense(_as(ordered, dtype), mask[order][:, order], case.scale).items():
                error = Error.of(x, true[name] if name == "dsinks" else true[name][:, :, order])
                yardstick[name] = Error.worse(yardstick[name], error)
    return Data(inputs, exact, yardstick, _floor(case, _as(inputs, torch.float64), mask))


def _as(inputs: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor | None]:
    """``inputs`` in ``dtype``; sinks and the cotangent of lse are never narrower than float32."""
    wide = torch.promote_types(dtype, torch.float32)
    return [None if x is None else x.to(dtype if place < 4 else wide) for place, x in enumerate(inputs)]


def _coarser(case: Case) -> torch.dtype:
    """What the results can be no better than: the inputs' dtype or the wire's."""
    wire = case.wire_dtype or case.dtype
    return wire if torch.finfo(wire).eps > torch.finfo(case.dtype).eps else case.dtype


def _floor(case: Case, inputs: Sequence[Tensor | None], mask: Tensor) -> dict[str, Error]:
    q, k, v, dout, sinks, dlse = inputs
    assert q is not None and k is not None and v is not None and dout is not None
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    floor = FLOOR * max(1.0, scale * case.head_dim**0.5)  # the logits' size: exp turns their errors into relative ones
    k, v = (x.repeat_interleave(case.q_heads // case.kv_heads, 1) for x in (k, v))
    weights, lse = _softmax(q, k, mask, scale, sinks)
    dweights = dout @ v.mT
    delta = (weights * dweights).sum(-1, keepdim=True).abs()
    if dlse is not None:
        delta = delta + dlse.abs().unsqueeze(-1)
    sizes = weights * (dweights.abs() + delta) * scale
    sums = {"dq": sizes @ k.abs(), "dk": (sizes.mT @ q.abs()), "dv": weights.mT @ dout.abs()}
    sums |= {name: sums[name].unflatten(1, (case.kv_heads, -1)).sum(2) for name in ("dk", "dv")}
    if sinks is not None:
        sums["dsinks"] = ((sinks.view(1, -1, 1) - lse).exp() * delta.squeeze(-1)).sum((0, 2))
    if dlse is not None:
        sums["lse"] = lse.nan_to_num(neginf=0.0).abs() + floor / torch.finfo(torch.float32).eps
    unit = torch.finfo(torch.float32).eps
    floors = {name: Error(floor / 5, floor) for name in ("out", "dq", "dk", "dv", "lse", "dsinks")}
    for name, total in sums.items():
        last_place = Error(unit / 2 * total.square().mean().sqrt().item(), unit * total.max().item())
        floors[name] = Error.worse(floors[name], last_place)
    return floors


def _softmax(q: Tensor, k: Tensor, mask: Tensor, scale: float, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """The weights of the keys, and lse; rows that see nothing have weights 0."""
    scores = (q @ k.mT * scale).masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(q.dtype).view(1, -1, 1, 1).expand(*q.shape[:3], 1)], -1)
    lse = scores.logsumexp(-1)
    blind = lse.isinf().unsqueeze(-1)
    weights = torch.where(blind, 0.0, (scores - lse.unsqueeze(-1).masked_fill(blind, 0)).exp())
    return weights[..., : k.shape[2]], lse


def _dense(inputs: Sequence[Tensor | None], mask: Tensor, scale: float | None) -> dict[str, Tensor]:
    """Everything that attention returns, and every gradient, on one process."""
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3] if x is not None)
    dout, sinks, dlse = inputs[3:]
    if sinks is None and dlse is None:
        widest, width = max(q.shape[3], v.shape[3]), v.shape[3]
        wq, wk, wv = (F.pad(x, (0, widest - x.shape[3])) for x in (q, k, v))  # or it is not flash attention
        scale, grouped = scale or q.shape[3] ** -0.5, q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(wq, wk, wv, mask, scale=scale, enable_gqa=grouped)[..., :width]
        grads = torch.autograd.grad(out, (q, k, v), dout)
        return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))
    sinks = None if sinks is None else sinks.detach().requires_grad_()
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    weights, lse = _softmax(q, keys, mask, q.shape[3] ** -0.5 if scale is None else scale, sinks)
    made = {"out": weights @ values} | ({} if dlse is None else {"lse": lse})
    wanted = {"dq": q, "dk": k, "dv": v} | ({} if sinks is None else {"dsinks": sinks})
    cotangents = [dout] if dlse is None else [dout, dlse.to(lse.dtype)]
    grads = torch.autograd.grad(list(made.values()), list(wanted.values()), cotangents)
    return {name: x.detach() for name, x in made.items()} | dict(zip(wanted, grads, strict=True))


def check_on_rank(case: Case, data: Data, sp: SequenceParallel) -> Report:
    """One forward and backward on this rank, compared with this rank's part of the truth."""
    sequence = sp.sequence(case.length, case.documents, case.blocks)
    parts = [None if x is None else x if x.dim() == 1 else sequence.shard(x, 2) for x in data.inputs]
    q, k, v = (x.requires_grad_() for x in parts[:3] if x is not None)
    dout, sinks, dlse = parts[3:]
    wanted = {"dq": q, "dk": k, "dv": v} | ({} if sinks is None else {"dsinks": sinks.requires_grad_()})
    sp.reset_counters()
    mask = Mask(case.causal, case.window, chunk=case.chunk, steps=case.mask.steps)
    out, lse, largest = sequence.attention(
        q, k, v, mask=mask, scale=case.scale, sinks=sinks, return_lse=True, return_largest=True
    )
    made = {"out": out} | ({} if dlse is None else {"lse": lse})
    grads = torch.autograd.grad(list(made.values()), list(wanted.values()), [dout] if dlse is None else [dout, dlse])
    made |= dict(zip(wanted, grads, strict=True))
    sent = {name: lane["bytes"] for name, lane in sp.traffic().items()}
    both = sp.promised_traffic(q, k, v).values()
    promised = {name: sum(part.get(name, 0) for part in both) for name in {n for part in both for n in part}}
    errors, problems = {}, []
    real = sequence.shard(torch.ones(case.length, dtype=torch.bool), 0)
    for name, mine in made.items():
        truth = data.exact[name]
        if name == "dsinks":  # of this rank's rows: a share
            if sp.group is not None:
                dist.all_reduce(mine, group=sp.group)
        else:
            truth = sequence.shard(truth, 2)  # zero where there is padding, and so must ours be
        if name == "lse":  # minus infinity in rows that see nothing
            mine = mine.detach().where(real, 0.0)
            if not torch.equal(mine.isinf(), truth.isinf()):
                problems.append("lse is not infinite just where nothing is seen")
            mine, truth = mine.nan_to_num(neginf=0.0), truth.nan_to_num(neginf=0.0)
        errors[name] = Error.of(mine, truth)
        if mine.shape != truth.shape or (mine.dtype != case.dtype and name not in ("lse", "dsinks")):
            problems.append(f"{name} is {tuple(mine.shape)} {mine.dtype}")
    problems += _largest_problems(case, data, largest)
    timings = sp.timings()
    half = torch.finfo(_coarser(case)).bits < 32
    seconds = timings["waiting"], timings["total"]
    return Report(errors, data.yardstick, data.floor, half, sent, promised, *seconds, problems)


def _largest_problems(case: Case, data: Data, largest: Tensor) -> list[str]:
    q, k = (x.double() for x in data.inputs[:2] if x is not None)
    scores = q @ k.repeat_interleave(case.q_heads // case.kv_heads, 1).mT * (case.scale or case.head_dim**-0.5)
    truth = scores.masked_fill(~visible_pairs(case), float("-inf")).amax((0, 2, 3))
    allowed = 2 * torch.finfo(_coarser(case)).eps * truth.abs().clamp(min=1) + 2e-6
    right = ((largest - truth).abs() <= allowed) | (largest == truth)
    return [] if right.all() else [f"largest logits {largest.tolist()}, exactly {truth.tolist()}"]


def merge(reports: Iterable[Report]) -> Report:
    """The worst errors and the sums of the rest over all ranks."""
    reports = list(reports)

    def total(parts: list[dict[str, int]]) -> dict[str, int]:
        return {name: sum(part.get(name, 0) for part in parts) for name in sorted({n for part in parts for n in part})}

    return Report(
        {
            name: Error(
                (sum(r.errors[name].rms ** 2 for r in reports) / len(reports)) ** 0.5,
                max(r.errors[name].worst for r in reports),
            )
            for name in reports[0].errors
        },
        reports[0].yardstick,
        reports[0].floor,
        reports[0].half_on_the_wire,
        total([r.sent for r in reports]),
        total([r.promised for r in reports]),
        sum(r.waiting for r in reports),
        sum(r.total for r in reports),
        [f"rank {rank}: {problem}" for rank, r in enumerate(reports) for problem in r.problems],
    )


def check_cases(cases: list[Case], deadline: float = 300.0) -> list[Report]:
    """Run cases of one world size on one set of forked ranks; a merged report each."""
    torch.set_num_threads(1)
    world = cases[0].world
    data = [make_data(case) for case in cases]

    def on_rank(rank: int) -> list[Report]:
        plans: dict[tuple[object, ...], SequenceParallel] = {}
        reports = []
        for case, inputs in zip(cases, data, strict=True):
            key = (
                case.plan,
                case.layout,
                case.wire_dtype,
                *((case.q_heads, case.kv_heads) if case.plan == "auto" else ()),
            )
            if key not in plans:
                plans[key] = case.parallel()
            reports.append(check_on_rank(case, inputs, plans[key]))
            dist.barrier()
        return reports

    by_rank = [reports for reports in run_local(on_rank, world, deadline) if reports is not None]
    return [merge(reports) for reports in zip(*by_rank, strict=True)]
