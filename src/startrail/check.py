"""Running a plan on local ranks against a float64 reference: errors, bytes and waiting, one report a case.

The reference is dense attention written from the masks' definition, with autograd's gradients for random cotangents;
it shares nothing with the engine. The yardstick is what single-process scaled_dot_product_attention errs on the same
inputs: in the same dtype or in float32, and with the tokens in order or shuffled, whichever is worse, since its worst
element changes up to twofold with the order in which it adds up. Our root-mean-square error and our worst element may
each be twice that, or what arithmetic can promise (``Data.floor``), whichever is larger. Where half precision travels,
partial results are rounded once more than SDPA rounds: the worst element may be three times SDPA's, and gradients whose
parts cancel may err by half a unit in the last place of their parts.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from startrail.arguments import MAX_HEAD_DIM
from startrail.kernels import accumulator, kernel_for
from startrail.layout import LAYOUTS, check_layout
from startrail.local import run_local
from startrail.mask import Mask
from startrail.parallel import SequenceParallel
from startrail.plan import Plan
from startrail.sizes import Sizes

NAMES = ("out", "dq", "dk", "dv")
CPU = torch.device("cpu")
# How a case calls attention: on plain tensors; on views with gaps, as (batch, tokens, heads, dim) projections give
# them; with gradients of some inputs only; or with another call before it whose backward pass comes after.
USES = ("plain", "strided", "q only", "k and v only", "interleaved")
FLOOR = 4.2  # units in the last place that sums may err on unit-variance inputs and logits, whatever the yardstick says
MOST_RANKS = 256
RANK_BYTES = 48 * 2**20  # what a forked rank has of its own, beside its part of the tensors


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
        Mask(self.causal, self.window, self.documents).check_length(self.length)
        check_layout(self.layout)
        if self.plan != "auto":
            plan = Plan.parse(self.plan)
            local = LAYOUTS[self.layout](plan.slots(self.world), self.length).local
            Sizes(plan, local, self.batch, self.q_heads, self.kv_heads, self.head_dim)

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


def check_room(case: Case) -> None:
    """``ValueError`` if this machine has not the memory for so many ranks, or for the dense reference."""
    if case.world > MOST_RANKS:
        raise ValueError(
            f"plan {case.plan} has {case.world:,} ranks, a process each; at most {MOST_RANKS} are started on one "
            "machine (startrail show needs none)"
        )
    ranks = case.world * RANK_BYTES
    # float64: weights, their gradients and what softmax keeps of both
    reference = 4 * 8 * case.batch * case.q_heads * case.length**2
    with open("/proc/meminfo") as file:
        free = next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    if ranks + reference > free:
        raise ValueError(
            f"{case.world} ranks need about {ranks / 2**30:.1f} GiB and the float64 reference of {case.length:,} "
            f"tokens {reference / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB are free: take less of one"
        )


@dataclass
class Data:
    """Inputs and the float64 truth: q, k, v, dout and by name the exact results, SDPA's errors, and what arithmetic may
    err whatever SDPA does.

    dq and dk add up differences of dout·v and delta. Where a query sees one key the two cancel: the truth is zero, SDPA
    returns a rounding error of theirs or, in shapes where it happens to add both up in one order, an exact zero.
    So the floor of dq and dk is one unit in the last place of the sums of the absolute values.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
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

    def text(self, case: Case, device: torch.device = CPU) -> str:
        """A table that one can paste into an issue."""
        mask = Mask(case.causal, case.window, case.documents)
        lines = [
            f"plan {case.plan} on {case.world} ranks, {case.length} tokens, {mask}, batch {case.batch}, "
            f"heads {case.q_heads}:{case.kv_heads} x {case.head_dim}, {str(case.dtype).removeprefix('torch.')}",
            *where(device, [case]).splitlines(),
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


def make_data(case: Case, device: torch.device = CPU) -> Data:
    generator = torch.Generator().manual_seed(case.seed)

    def random(heads: int) -> Tensor:
        shape = (case.batch, heads, case.length, case.head_dim)
        return torch.randn(shape, generator=generator).to(device, case.dtype)

    q, k, v, dout = random(case.q_heads), random(case.kv_heads), random(case.kv_heads), random(case.q_heads)
    mask = visible_pairs(case).to(device)
    inputs = (q, k, v, dout)
    exact = _dense([x.double() for x in inputs], mask, case.scale)
    yardstick = dict.fromkeys(NAMES, Error(0.0, 0.0))
    for dtype, order in (
        (_coarser(case), torch.arange(case.length)),
        (_coarser(case), torch.randperm(case.length, generator=generator)),
        (accumulator(case.dtype), torch.randperm(case.length, generator=generator)),
    ):
        order = order.to(device)
        found = _dense([x[:, :, order].to(dtype) for x in inputs], mask[order][:, order], case.scale)
        for name, x in found.items():
            yardstick[name] = Error.worse(yardstick[name], Error.of(x, exact[name][:, :, order]))
    return Data(q, k, v, dout, exact, yardstick, _floor(case, [x.double() for x in inputs], mask))


def _coarser(case: Case) -> torch.dtype:
    """What the results can be no better than: the inputs' dtype or the wire's."""
    wire = case.wire_dtype or case.dtype
    return wire if torch.finfo(wire).eps > torch.finfo(case.dtype).eps else case.dtype


def _floor(case: Case, inputs: Sequence[Tensor], mask: Tensor) -> dict[str, Error]:
    q, k, v, dout = inputs
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    coarser = _coarser(case)
    unit = torch.finfo(accumulator(coarser)).eps * (2 if accumulator(coarser) == torch.float64 else 1)  # as the truth's
    floor = FLOOR * unit * max(1.0, scale * case.head_dim**0.5)  # exp turns errors of the logits into relative ones
    k, v = (x.repeat_interleave(case.q_heads // case.kv_heads, 1) for x in (k, v))
    weights = (q @ k.mT * scale).masked_fill(~mask, float("-inf")).softmax(-1)
    dweights = dout @ v.mT
    delta = (weights * dweights).sum(-1, keepdim=True)
    sizes = weights * (dweights.abs() + delta.abs()) * scale
    sums = {"dq": sizes @ k.abs(), "dk": (sizes.mT @ q.abs()).unflatten(1, (case.kv_heads, -1)).sum(2)}
    floors = {name: Error(floor / 5, floor) for name in NAMES}
    if case.world > 1:  # partial sums of gradients are rounded to what travels, and may cancel
        unit = max(unit, torch.finfo(coarser).eps / 2)
    for name, total in sums.items():
        last_place = Error(unit / 2 * total.square().mean().sqrt().item(), unit * total.max().item())
        floors[name] = Error.worse(floors[name], last_place)
    return floors


def _dense(inputs: Sequence[Tensor], mask: Tensor, scale: float | None) -> dict[str, Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return dict(zip(NAMES, (out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3])), strict=True))


def check_on_rank(case: Case, data: Data, sp: SequenceParallel) -> Report:
    """One forward and backward on this rank, compared with this rank's part of the truth."""
    sequence = sp.sequence(case.length, case.documents)
    q, k, v, dout = (sequence.shard(x, 2) for x in (data.q, data.k, data.v, data.dout))
    if case.use == "strided":
        q, k, v, dout = (_with_gaps(x) for x in (q, k, v, dout))
    wanted = {"q only": (q,), "k and v only": (k, v)}.get(case.use, (q, k, v))
    for x in wanted:
        x.requires_grad_()
    attend = partial(sequence.attention, causal=case.causal, window=case.window, scale=case.scale)
    before = attend(-q, k, v) if case.use == "interleaved" else None
    sp.reset_counters()
    out = attend(q, k, v)
    found = iter(torch.autograd.grad(out, wanted, dout))
    sent = {name: lane["bytes"] for name, lane in sp.traffic().items()}
    if before is not None:
        torch.autograd.grad(before, wanted, dout)
    results = {"out": out} | {
        f"d{name}": next(found) for name, x in zip("qkv", (q, k, v), strict=True) if any(x is y for y in wanted)
    }
    both = sp.promised_traffic(q, k).values()
    promised = {name: sum(part.get(name, 0) for part in both) for name in {n for part in both for n in part}}
    errors, problems = {}, []
    for name, mine in results.items():
        truth = sequence.shard(data.exact[name], 2)  # zero where there is padding, and so must ours be
        errors[name] = Error.of(mine, truth)
        if mine.shape != truth.shape or mine.dtype != case.dtype:
            problems.append(f"{name} is {tuple(mine.shape)} {mine.dtype}")
    timings = sp.timings()
    half = torch.finfo(_coarser(case)).bits < 32
    return Report(
        errors, data.yardstick, data.floor, half, sent, promised, timings["waiting"], timings["total"], problems
    )


def _with_gaps(x: Tensor) -> Tensor:
    """The same values as a view into something larger."""
    batch, heads, tokens, dim = x.shape
    whole = x.new_empty(batch, tokens, heads + 1, 2 * dim)
    view = whole[:, :, 1:, dim:].transpose(1, 2)
    return view.copy_(x)


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
    data = [make_data(case) for case in cases]
    by_rank = run_local(lambda rank: check_all(cases, data), cases[0].world, deadline)
    return [merge(reports) for reports in zip(*(reports for reports in by_rank if reports is not None), strict=True)]


def check_all(cases: list[Case], data: list[Data]) -> list[Report]:
    """Cases in turn on this rank of the default process group."""
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


def where(device: torch.device, cases: Sequence[Case]) -> str:
    """What this ran on: devices, backend, and for each dtype the kernel and why it was chosen."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    backend = dist.get_backend_config() if dist.is_initialized() else "local processes, gloo"
    lines = [f"torch {torch.__version__}, {cases[0].world} x {name}, {backend}, seed {cases[0].seed}"]
    for dtype, dim in dict.fromkeys((case.dtype, case.head_dim) for case in cases):
        kernel = kernel_for(device, dtype, dim)
        lines.append(f"{str(dtype).removeprefix('torch.')}: {kernel.name} ({kernel.why})")
    return "\n".join(lines)
