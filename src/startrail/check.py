"""Running a plan on local ranks against a float64 reference: errors, bytes and waiting, one report a case.

The reference is dense attention written from the masks' definition, with autograd's gradients for random cotangents;
it shares nothing with the engine. The yardstick is what single-process scaled_dot_product_attention errs on the same
inputs in the same dtype: our root-mean-square error may be twice that, and our worst element four times its worst. (The
worst element of a block with few keys is noisy: ATen's CPU kernel takes exponentials to 2^-20.)
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from startrail.attention import MAX_HEAD_DIM, SequenceParallel
from startrail.layout import Layout
from startrail.local import run_local
from startrail.mask import Mask
from startrail.plan import Plan
from startrail.wire import Shapes

NAMES = ("out", "dq", "dk", "dv")
FLOOR = 5e-7  # what float32 may err on unit-variance inputs, whatever the yardstick says


class Error(NamedTuple):
    """Root-mean-square and largest absolute error."""

    rms: float
    worst: float

    @classmethod
    def of(cls, ours: Tensor, truth: Tensor) -> Error:
        difference = (ours.double() - truth).abs()
        return cls(difference.square().mean().sqrt().item(), difference.max().item())


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
        Mask(self.causal, self.window, self.documents).check_length(self.length)
        if self.plan != "auto":
            plan, layout = Plan.parse(self.plan), Layout(self.layout, self.world, self.length)
            plan.check_world(self.world)
            sizes = (self.batch, self.q_heads, self.kv_heads, self.head_dim)
            Shapes(plan, layout, *sizes, self.dtype, self.wire_dtype or self.dtype)


@dataclass
class Data:
    """Inputs and the float64 truth: q, k, v, dout and by name the exact results and SDPA's errors."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    exact: dict[str, Tensor]
    yardstick: dict[str, Error]


@dataclass
class Report:
    """What one rank (or, merged, all ranks) found."""

    errors: dict[str, Error]
    yardstick: dict[str, Error]
    sent: dict[str, int]
    promised: dict[str, int]
    waiting: float
    total: float
    problems: list[str] = field(default_factory=list)

    def verdict(self, floor: float = FLOOR) -> list[str]:
        """What is wrong, one line each; empty if all is well."""
        wrong = list(self.problems)
        for name, error in self.errors.items():
            sdpa = self.yardstick[name]
            # dq and dk are differences of numbers of the size of dout @ v. Where a query sees one key they cancel: SDPA
            # then returns an exact zero, while we, who work from delta instead of out, keep a rounding error of those.
            rms, worst = (floor / 2, 8 * floor) if name in ("dq", "dk") else (floor / 5, floor)
            for kind, ours, allowed in (
                ("rms", error.rms, max(2 * sdpa.rms, rms)),
                ("worst", error.worst, max(4 * sdpa.worst, worst)),
            ):
                if not ours <= allowed:  # written so that NaN fails
                    wrong.append(f"{name}: {kind} error {ours:.2e}, allowed {allowed:.2e}")
        if self.sent != self.promised:
            wrong.append(f"sent {self.sent}, the closed form says {self.promised}")
        return wrong

    def text(self, case: Case) -> str:
        """A table that one can paste into an issue."""
        mask = Mask(case.causal, case.window, case.documents)
        lines = [
            f"plan {case.plan} on {case.world} ranks, {case.length} tokens, {mask}, batch {case.batch}, "
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
    if case.documents is not None:
        document = torch.bucketize(torch.arange(case.length), torch.tensor(case.documents[1:]), right=True)
        seen &= document.unsqueeze(1) == document.unsqueeze(0)
    return seen


def make_data(case: Case) -> Data:
    generator = torch.Generator().manual_seed(case.seed)

    def random(heads: int) -> Tensor:
        shape = (case.batch, heads, case.length, case.head_dim)
        return torch.randn(shape, generator=generator).to(case.dtype)

    q, k, v, dout = random(case.q_heads), random(case.kv_heads), random(case.kv_heads), random(case.q_heads)
    mask = visible_pairs(case)
    exact = _dense(q.double(), k.double(), v.double(), dout.double(), mask, case.scale)
    wire = case.wire_dtype or case.dtype
    coarser = wire if torch.finfo(wire).eps > torch.finfo(case.dtype).eps else case.dtype
    same_dtype = _dense(q.to(coarser), k.to(coarser), v.to(coarser), dout.to(coarser), mask, case.scale)
    yardstick = {name: Error.of(same_dtype[name], exact[name]) for name in NAMES}
    return Data(q, k, v, dout, exact, yardstick)


def _dense(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Tensor, scale: float | None) -> dict[str, Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return dict(zip(NAMES, (out.detach(), *torch.autograd.grad(out, (q, k, v), dout)), strict=True))


def check_on_rank(case: Case, data: Data, sp: SequenceParallel) -> Report:
    """One forward and backward on this rank, compared with this rank's part of the truth."""
    q, k, v = (sp.shard(x, 2).requires_grad_() for x in (data.q, data.k, data.v))
    sp.reset_counters()
    masks = (case.causal, case.window, case.documents)
    out = sp.attention(q, k, v, *masks, length=case.length, scale=case.scale)
    grads = torch.autograd.grad(out, (q, k, v), sp.shard(data.dout, 2))
    sent = {name: lane["bytes"] for name, lane in sp.traffic().items()}
    both = sp.promised_traffic(q, k, case.length).values()
    promised = {name: sum(part.get(name, 0) for part in both) for name in {n for part in both for n in part}}
    errors, problems = {}, []
    for name, mine in zip(NAMES, (out, *grads), strict=True):
        truth = sp.shard(data.exact[name], 2)  # zero where there is padding, and so must ours be
        errors[name] = Error.of(mine, truth)
        if mine.shape != truth.shape or mine.dtype != case.dtype:
            problems.append(f"{name} is {tuple(mine.shape)} {mine.dtype}")
    timings = sp.timings()
    return Report(errors, data.yardstick, sent, promised, timings["waiting"], timings["total"], problems)


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
            for name in NAMES
        },
        reports[0].yardstick,
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
            key = (case.plan, case.layout, case.wire_dtype)
            if key not in plans:
                plans[key] = SequenceParallel(case.plan, layout=case.layout, wire_dtype=case.wire_dtype)
            reports.append(check_on_rank(case, inputs, plans[key]))
            dist.barrier()
        return reports

    by_rank = [reports for reports in run_local(on_rank, world, deadline) if reports is not None]
    return [merge(reports) for reports in zip(*by_rank, strict=True)]
