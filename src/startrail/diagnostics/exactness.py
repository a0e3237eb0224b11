"""Running a plan on local ranks against a float64 reference: errors, bytes and waiting, one report a case.

The reference is dense attention written from the masks' definition, with autograd's gradients for random cotangents;
it shares nothing with the engine. The yardstick is what single-process scaled_dot_product_attention errs on the same
inputs: in the same dtype or in float32, and with the tokens in order or shuffled, whichever is worse, since its worst
element changes up to twofold with the order in which it adds up. Our root-mean-square error and our worst element may
each be twice that; or what arithmetic can promise, since SDPA may be exact by luck: for each element by itself, and for
the root mean square of all errors, each by what it may be itself (`rounding`). Where half precision travels, partial
results are rounded once more than SDPA rounds; outputs and gradients whose parts cancel may err by half a unit in the
last place of their parts.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from startrail.diagnostics.reference import CPU, TWO_CALLS, Case, CaseData, Error, make_data
from startrail.diagnostics.rounding import Floor
from startrail.geometry.mask import Mask
from startrail.kernels import kernel_for
from startrail.launch.local import check_ranks, run_local
from startrail.parallel import SequenceParallel
from startrail.sequence import Sequence as SplitSequence

Plans = dict[tuple[object, ...], SequenceParallel]


def check_room(case: Case) -> None:
    """``ValueError`` if this machine has not the memory for so many ranks, or for the dense reference."""
    # float64: weights, their gradients and what softmax keeps of both
    reference = 4 * 8 * case.batch * case.q_heads * case.length**2
    check_ranks(case.world, reference, f"the float64 reference of {case.length:,} tokens")


@dataclass
class Report:
    """What one rank (or, merged, all ranks) found."""

    errors: dict[str, Error]
    yardstick: dict[str, Error]
    floor: dict[str, float]  # what ``Error.spread`` may be, if the rms is more than twice SDPA's
    sent: dict[str, int]
    promised: dict[str, int]
    waiting: float
    total: float
    problems: list[str] = field(default_factory=list)

    def verdict(self) -> list[str]:
        """What is wrong, one line each; empty if all is well."""
        wrong = list(self.problems)
        for name, ours in self.errors.items():
            sdpa = self.yardstick[name]
            if not (ours.rms <= 2 * sdpa.rms or ours.spread <= self.floor[name]):  # written so that NaN fails
                text = f"{ours.spread:.2f} deviations of roundings, allowed {self.floor[name]:.2f}"
                wrong.append(f"{name}: rms error {ours.rms:.2e}, allowed {2 * sdpa.rms:.2e}; {text}")
            if not ours.beyond <= 2 * sdpa.worst:
                wrong.append(f"{name}: worst error {ours.beyond:.2e}, allowed {2 * sdpa.worst:.2e}")
        if self.sent != self.promised:
            wrong.append(f"sent {self.sent}, the closed form says {self.promised}")
        return wrong

    def text(self, case: Case, device: torch.device = CPU) -> str:
        """A table that one can paste into an issue."""
        lines = [
            f"plan {case.plan} on {case.world} ranks, {case.length} tokens, {case.mask}, batch {case.batch}, "
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


def check_on_rank(case: Case, data: CaseData, sp: SequenceParallel) -> Report:
    """Forward and backward on this rank, compared with this rank's part of the truth."""
    sequence = sp.sequence(case.length, case.documents, case.blocks)
    parts = [None if x is None else x if x.dim() == 1 else sequence.shard(x, 2) for x in data.inputs]
    if case.use == "strided":
        parts[:4] = [None if x is None else _with_gaps(x, (case.seed + i) % 2) for i, x in enumerate(parts[:4])]
    q, k, v = (x for x in parts[:3] if x is not None)
    dout, sinks, dlse = parts[3:]
    assert dout is not None
    if case.use == "expanded":  # over padding too, as a sum would
        dout = dout[tuple(map(slice, case.repeated))].expand_as(dout)
    wanted = {"dq": q, "dk": k, "dv": v} | ({} if sinks is None else {"dsinks": sinks})
    left_out = {"q only": ("dk", "dv", "dsinks"), "k and v only": ("dq", "dsinks")}.get(case.use, ())
    wanted = {name: x.requires_grad_() for name, x in wanted.items() if name not in left_out}
    mask = Mask(case.causal, case.window, chunk=case.chunk, steps=case.mask.steps)
    attend = partial(sequence.attention, mask=mask, scale=case.scale, softcap=case.softcap, return_lse=True)
    given = [(q, k, v, sinks, dout, dlse)]
    if case.use in TWO_CALLS:
        other = _mirrored(q, -1), _mirrored(k, -1), _mirrored(v, -2), _mirrored(sinks), _mirrored(dout, 0.5)
        given.insert(0, (*other, _mirrored(dlse, -1)))
    sp.reset_counters()
    calls = []
    for *qkv, sink, _, _ in given:
        out, lse, *largest = attend(*qkv, sinks=sink, return_largest=case.wants_largest)
        calls.append({"out": out} | ({} if dlse is None else {"lse": lse}))
    pairs = list(zip(calls, given, strict=True))
    for made, (*_, dout, dlse) in pairs[::-1] if case.use == "nested" else pairs:
        cotangents = [dout] if dlse is None else [dout, dlse]
        grads = torch.autograd.grad(list(made.values()), list(wanted.values()), cotangents)
        made |= dict(zip(wanted, grads, strict=True))
    sent = {name: lane["bytes"] for name, lane in sp.traffic().items()}
    both = sp.promised_traffic(q, k, v).values()
    names = {name for part in both for name in part}
    promised = {name: len(calls) * sum(part.get(name, 0) for part in both) for name in names}
    if case.use in TWO_CALLS:  # back to what it is the mirror image of
        signs = {"out": -0.5, "lse": 1.0}
        calls[0] = {n: _mirrored(x, signs[n]) if n in signs else -x for n, x in calls[0].items()}
    errors, problems = _compared(case, data, sequence, calls)
    problems += _largest_problems(*data.largest, *largest) if data.largest is not None else []
    timings = sp.timings()
    seconds = timings["waiting"], timings["total"]
    floor = {name: floor.spread for name, floor in data.floor.items()}
    return Report(errors, data.yardstick, floor, sent, promised, *seconds, problems)


def _compared(
    case: Case, data: CaseData, sequence: SplitSequence, calls: list[dict[str, Tensor]]
) -> tuple[dict[str, Error], list[str]]:
    """By name the worst errors of the calls, which should all give the same, and what else is wrong with them."""
    errors: dict[str, Error] = {}
    problems = []
    real = sequence.shard(torch.ones(case.length, dtype=torch.bool, device=calls[0]["out"].device), 0)
    for name, mine in (pair for made in calls for pair in made.items()):
        truth, may = data.exact[name], data.floor[name]
        if name == "dsinks":  # of this rank's rows: a share
            if sequence.sp.group is not None:
                dist.all_reduce(mine, group=sequence.sp.group)
        else:
            may = Floor(*(sequence.shard(x, 2) for x in may))
            truth = sequence.shard(truth, 2)  # zero where there is padding, and so must ours be
        if name == "lse":  # minus infinity in rows that see nothing
            mine = mine.detach().where(real, 0.0)
            if not torch.equal(mine.isinf(), truth.isinf()):
                problems.append("lse is not infinite just where nothing is seen")
            mine, truth = mine.nan_to_num(neginf=0.0), truth.nan_to_num(neginf=0.0)
        errors[name] = Error.worse(errors.get(name, Error(0.0, 0.0, 0.0, 0.0)), Error.of(mine, truth, may))
        if mine.shape != truth.shape or (mine.dtype != case.dtype and name not in ("lse", "dsinks")):
            problems.append(f"{name} is {tuple(mine.shape)} {mine.dtype}")
    return errors, problems


def _mirrored(x: Any, by: float = 1.0) -> Any:
    """Batch and heads the other way round, times ``by``. Attention of q, k, v mirrored by -1, -1, -2 is its output
    mirrored by -2, and its lse mirrored; with cotangents mirrored by 1/2 and -1, all gradients are their negatives. No
    digit changes, so that the same errors are allowed; but whatever is taken from one call for the other shows."""
    if x is None:
        return None
    return x.flip(0) if x.dim() == 1 else x.flip(0, 1) * by


def _largest_problems(truth: Tensor, least: Tensor, largest: Tensor) -> list[str]:
    """A pair's exact logit, rounded once: the largest, or one that looks as large to float32. 2^-20 more, since the
    float64 numbers that are rounded here and there are not the same to the last bit."""
    rounding = (1 + 2.0**-20) * torch.finfo(torch.float32).eps / 2 * truth.abs()
    right = ((largest >= least - rounding) & (largest <= truth + rounding)) | (largest == truth)
    return [] if right.all() else [f"largest logits {largest.tolist()}, exactly {truth.tolist()}"]


def _with_gaps(x: Tensor, inner: int) -> Tensor:
    """The same values as a view into something larger, whose other numbers spoil whatever takes them; with ``inner``
    there are gaps in the last dimension as well."""
    batch, heads, tokens, dim = x.shape
    whole = x.new_full((batch, tokens, heads + 1, 2 * dim), float("nan"))
    last = slice(1, None, 2) if inner else slice(dim, None)
    return whole[:, :, 1:, last].transpose(1, 2).copy_(x)


def merge(reports: Iterable[Report]) -> Report:
    """The worst errors and the sums of the rest over all ranks."""
    reports = list(reports)

    def total(parts: list[dict[str, int]]) -> dict[str, int]:
        return {name: sum(part.get(name, 0) for part in parts) for name in sorted({n for part in parts for n in part})}

    return Report(
        {name: Error.all_of([r.errors[name] for r in reports]) for name in reports[0].errors},
        reports[0].yardstick,
        reports[0].floor,
        total([r.sent for r in reports]),
        total([r.promised for r in reports]),
        sum(r.waiting for r in reports),
        sum(r.total for r in reports),
        [f"rank {rank}: {problem}" for rank, r in enumerate(reports) for problem in r.problems],
    )


def check_cases(cases: list[Case], deadline: float = 300.0) -> list[Report]:
    """Run cases of one world size on one set of forked ranks; a merged report each. Cases that differ in what runs them
    only share a truth."""
    torch.set_num_threads(1)
    data = [_truth(replace(case, plan="", layout="zigzag", world=min(case.world, 2))) for case in cases]
    by_rank = run_local(lambda rank: check_all(cases, data), cases[0].world, deadline)
    return [merge(reports) for reports in zip(*(reports for reports in by_rank if reports is not None), strict=True)]


@lru_cache(maxsize=64)
def _truth(case: Case) -> CaseData:
    return make_data(case)


def check_all(cases: list[Case], data: list[CaseData]) -> list[Report]:
    """Cases in turn on this rank of the default process group."""
    plans: Plans = {}
    reports = []
    for case, inputs in zip(cases, data, strict=True):
        reports.append(check_on_rank(case, inputs, parallel_for(case, plans)))
        dist.barrier()
    return reports


def parallel_for(case: Case, plans: Plans) -> SequenceParallel:
    """What runs a case on this rank; one for all cases in a row that can share it. Others are dropped: the connections
    of many plans on many ranks are thousands of threads."""
    heads = (case.q_heads, case.kv_heads) if case.plan == "auto" else ()
    key = (case.plan, case.layout, case.wire_dtype, *heads)
    if key not in plans:
        plans.clear()
        plans[key] = case.parallel()
    return plans[key]


def where(device: torch.device, cases: Sequence[Case]) -> str:
    """What this ran on: devices, backend, and for each dtype the kernel and why it was chosen."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    backend = dist.get_backend_config() if dist.is_initialized() else "local processes, gloo"
    lines = [f"torch {torch.__version__}, {cases[0].world} x {name}, {backend}, seed {cases[0].seed}"]
    for dtype, dim in dict.fromkeys((case.dtype, case.head_dim) for case in cases):
        kernel = kernel_for(device, dtype, dim)
        lines.append(f"{str(dtype).removeprefix('torch.')}: {kernel.name} ({kernel.reason})")
    return "\n".join(lines)
