"""Runs a plan on ranks and compares it with a float64 `reference`: errors, bytes and waiting, one report per case.

The yardstick is the error of single-process scaled_dot_product_attention on the same inputs, in the same dtype or in
float32, with tokens in order or shuffled, whichever is worse: its worst element changes up to twofold with the order of
summation. Our root-mean-square error and our worst element may each be twice that. Since SDPA can be exact by luck,
errors that rounding explains (`rounding`) are allowed too: for each element, and for the root mean square of all errors
in units of their deviations. If half precision is sent, partial results are rounded once more than in SDPA, and outputs
and gradients whose parts cancel may be off by half a unit in the last place of their parts.
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
from torch.utils.checkpoint import checkpoint

from startrail._compat import dtype_name
from startrail.compile.halo import Halo
from startrail.compile.proof import prove_call
from startrail.compile.scan import Scan
from startrail.diagnostics.reference import CPU, TWO_CALL_STYLES, Case, CaseData, Error, make_data
from startrail.diagnostics.rounding import Floor
from startrail.kernels import kernel_for
from startrail.launch.local import check_ranks, run_local
from startrail.parallel import SequenceParallel
from startrail.schedule.values import FORWARD
from startrail.sequence import Sequence as SplitSequence

Plans = dict[tuple[object, ...], SequenceParallel]
_cached_data = lru_cache(maxsize=64)(make_data)


def check_memory(case: Case) -> None:
    """Raise ``ValueError`` if this machine lacks the memory for the ranks or for the dense reference."""
    # float64: weights, their gradients, and what softmax saves for both
    reference = 4 * 8 * case.batch * case.q_heads * case.length**2
    check_ranks(case.world, reference, f"the float64 reference of {case.length:,} tokens")


def prove(case: Case) -> str:
    """Prove the programs that all ranks run for a case, without ranks and without data; in one line, what was proven.
    Raises ``ScheduleError`` if a program is wrong.

    >>> print(prove(Case("1x2/1x2", 4, length=100, causal=True, window=5)))
    proven: 1x2/1x2 (as direct) on 4 ranks, 100 tokens, causal, window 5
    """
    plans = prove_call(case.problem, case.split)
    runs = "" if set(plans) == {case.plan} else f" (as {', '.join(dict.fromkeys(plans))})"
    return f"proven: {case.plan}{runs} on {case.world} ranks, {case.length} tokens, {case.mask}"


def prove_recurrence(case: Case) -> str:
    """The same for a layer with a recurrence and a convolution of width 4 in the place of attention.

    >>> print(prove_recurrence(Case("1x2/1x2", 4, length=100)))
    proven: scan and halo by 1x2/1x2 on 4 ranks, 100 tokens, states in 4 parts
    """
    boundaries, units = case.problem.boundaries, case.q_heads
    numbers = units * case.head_dim
    prove_call(Scan(boundaries, case.batch, features=numbers, units=units, effect=2 * numbers), case.split)
    prove_call(Halo(boundaries, case.batch, before=3), case.split)
    packed = f" in {len(boundaries.documents) - 1} documents" if case.documents else ""
    tokens = f"{case.length} tokens{packed}, states in {units} parts"
    return f"proven: scan and halo by {case.plan} on {case.world} ranks, {tokens}"


@dataclass
class Report:
    """The results of one rank or, merged, of all ranks."""

    errors: dict[str, Error]
    yardstick: dict[str, Error]
    floor: dict[str, float]  # the limit for ``Error.spread``, if the rms is more than twice SDPA's
    sent: dict[str, int]
    promised: dict[str, int]
    waiting: float
    total: float
    problems: list[str] = field(default_factory=list)

    def verdict(self) -> list[str]:
        """One line per problem; empty if everything is correct."""
        wrong = list(self.problems)
        for name, ours in self.errors.items():
            sdpa = self.yardstick[name]
            if not (ours.rms <= 2 * sdpa.rms or ours.spread <= self.floor[name]):  # written so that NaN fails
                text = f"{ours.spread:.2f} rounding deviations, allowed {self.floor[name]:.2f}"
                wrong.append(f"{name}: rms error {ours.rms:.2e}, allowed {2 * sdpa.rms:.2e}; {text}")
            if not ours.excess <= 2 * sdpa.worst:
                wrong.append(f"{name}: worst error {ours.excess:.2e}, allowed {2 * sdpa.worst:.2e}")
        if self.sent != self.promised:
            wrong.append(f"sent {self.sent}, the closed form gives {self.promised}")
        return wrong

    def text(self, case: Case, device: torch.device = CPU) -> str:
        """A table to paste into an issue."""
        lines = [
            f"plan {case.plan} on {case.world} ranks, {case.length} tokens, {case.mask}, batch {case.batch}, "
            f"heads {case.q_heads}:{case.kv_heads} x {case.head_dim}, {dtype_name(case.dtype)}",
            *environment_text(device, [case]).splitlines(),
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
        lines += ["", f"waiting for transfers: {share:.0%} of {self.total / case.world:.3f} s per rank"]
        return "\n".join([*lines, "", *(self.verdict() or ["ok: exact, and the bytes sent equal the closed form"])])


def check_on_rank(case: Case, data: CaseData, sp: SequenceParallel) -> Report:
    """Run forward and backward, and compare with this rank's part of the reference."""
    sequence = case.sequence(sp)
    parts = [None if x is None else x if x.dim() == 1 else sequence.shard(x, 2) for x in data.inputs]
    if case.call_style == "strided":
        parts[:4] = [None if x is None else _strided_copy(x, (case.seed + i) % 2) for i, x in enumerate(parts[:4])]
    q, k, v = (x for x in parts[:3] if x is not None)
    dout, sinks, dlse = parts[3:]
    assert dout is not None
    if case.call_style == "expanded":  # padding included, as with a sum of the output
        whole = data.inputs[3]
        assert whole is not None
        dout = whole[tuple(map(slice, case.repeated))].expand_as(dout)
    wanted = {"dq": q, "dk": k, "dv": v} | ({} if sinks is None else {"dsinks": sinks})
    left_out = {"q only": ("dk", "dv", "dsinks"), "k and v only": ("dq", "dsinks")}.get(case.call_style, ())
    wanted = {name: x.requires_grad_() for name, x in wanted.items() if name not in left_out}
    mask, scale, softcap = case.layer_mask, case.scale, case.softcap
    attend: Any = partial(sequence.attention, mask=mask, scale=scale, softcap=softcap, return_lse=True)
    if case.call_style == "checkpointed":
        attend = partial(checkpoint, attend, use_reentrant=False)
    elif case.call_style == "compiled":
        torch.compiler.reset()  # options of other cases would become variables, which layers of a model do not have
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    given = [(q, k, v, sinks, dout, dlse)]
    if case.call_style in TWO_CALL_STYLES:
        other = _mirrored(q, -1), _mirrored(k, -1), _mirrored(v, -2), _mirrored(sinks), _mirrored(dout, 0.5)
        given.insert(0, (*other, _mirrored(dlse, -1)))
    sp.reset_counters()
    calls = []
    for *qkv, sink, _, _ in given:
        out, lse, *largest = attend(*qkv, sinks=sink, return_largest=case.with_max_logits)
        calls.append({"out": out} | ({} if dlse is None else {"lse": lse}))
    pairs = list(zip(calls, given, strict=True))
    for made, (*_, dout, dlse) in pairs[::-1] if case.call_style == "nested" else pairs:
        cotangents = [dout] if dlse is None else [dout, dlse]
        grads = torch.autograd.grad(list(made.values()), list(wanted.values()), cotangents)
        made |= dict(zip(wanted, grads, strict=True))
    sent = {name: lane["bytes"] for name, lane in sp.traffic().items()}
    by_pass = sequence.promised_traffic(q, k, v, mask=mask)
    passes = [part for part in by_pass.values() for _ in calls]
    if case.call_style == "checkpointed":
        passes.append(by_pass[str(FORWARD)])  # once more
    promised = {name: sum(part.get(name, 0) for part in passes) for name in {name for part in passes for name in part}}
    if case.call_style in TWO_CALL_STYLES:  # undo the mirroring
        signs = {"out": -0.5, "lse": 1.0}
        calls[0] = {n: _mirrored(x, signs[n]) if n in signs else -x for n, x in calls[0].items()}
    errors, problems = _compare(case, data, sequence, calls)
    problems += _max_logit_problems(*data.max_logits, *largest) if data.max_logits is not None else []
    timings = sp.timings()
    floor = {name: floor.spread for name, floor in data.floor.items()}
    return Report(errors, data.yardstick, floor, sent, promised, timings["waiting"], timings["total"], problems)


def _compare(
    case: Case, data: CaseData, sequence: SplitSequence, calls: list[dict[str, Tensor]]
) -> tuple[dict[str, Error], list[str]]:
    """The worst error over all calls, by name (all should give the same results), and any other problems."""
    errors: dict[str, Error] = {}
    problems = []
    real = sequence.shard(torch.ones(case.length, dtype=torch.bool, device=calls[0]["out"].device), 0)
    for name, mine in (pair for made in calls for pair in made.items()):
        truth, floor = data.exact[name], data.floor[name]
        if name == "dsinks":  # this rank has only its own rows' share
            if sequence.sp.group is not None:
                dist.all_reduce(mine, group=sequence.sp.group)
        else:
            floor = Floor(*(sequence.shard(x, 2) for x in floor))
            truth = sequence.shard(truth, 2)  # zero in padding, and ours must be too
        if name == "lse":  # minus infinity in rows that see no keys
            mine = mine.detach().where(real, 0.0)
            if not torch.equal(mine.isinf(), truth.isinf()):
                problems.append("lse must be infinite exactly in rows that see no keys")
            mine, truth = mine.nan_to_num(neginf=0.0), truth.nan_to_num(neginf=0.0)
        errors[name] = Error.worse(errors.get(name, Error(0.0, 0.0, 0.0, 0.0)), Error.of(mine, truth, floor))
        if mine.shape != truth.shape or (mine.dtype != case.dtype and name not in ("lse", "dsinks")):
            problems.append(f"{name} is {tuple(mine.shape)} {mine.dtype}")
    return errors, problems


def _mirrored(x: Any, by: float = 1.0) -> Any:
    """Batch and heads reversed, times ``by``. Attention of q, k, v mirrored by -1, -1, -2 gives its output mirrored by
    -2 and its lse mirrored; with cotangents mirrored by 1/2 and -1, all gradients change sign. No digit changes, so the
    same errors are allowed, but anything that leaks from one call to the other shows up."""
    if x is None:
        return None
    return x.flip(0) if x.dim() == 1 else x.flip(0, 1) * by


def _max_logit_problems(truth: Tensor, least: Tensor, largest: Tensor) -> list[str]:
    """Each value must be a pair's exact logit, rounded once: the largest, or one that is as large in its dtype. The
    limit is 2^-20 wider, since the two float64 values that are rounded can differ in the last bits. In float64 they
    are compared themselves."""
    limit = torch.finfo(torch.float32).eps / 2 * (1 + 2.0**-20) if largest.dtype == torch.float32 else 2.0**-44
    rounding = limit * truth.abs()
    right = ((largest >= least - rounding) & (largest <= truth + rounding)) | (largest == truth)
    return [] if right.all() else [f"largest logits {largest.tolist()}, exact {truth.tolist()}"]


def _strided_copy(x: Tensor, inner: int) -> Tensor:
    """The same values as a view into a larger tensor of NaNs, which spoil any result that reads them. With ``inner``,
    the last dimension is strided too."""
    batch, heads, tokens, dim = x.shape
    whole = x.new_full((batch, tokens, heads + 1, 2 * dim), float("nan"))
    last = slice(1, None, 2) if inner else slice(dim, None)
    return whole[:, :, 1:, last].transpose(1, 2).copy_(x)


def merge(reports: Iterable[Report]) -> Report:
    """The worst errors of all ranks, and the sums of everything else."""
    reports = list(reports)

    def total(parts: list[dict[str, int]]) -> dict[str, int]:
        return {name: sum(part.get(name, 0) for part in parts) for name in sorted({n for part in parts for n in part})}

    return Report(
        {name: Error.combine([r.errors[name] for r in reports]) for name in reports[0].errors},
        reports[0].yardstick,
        reports[0].floor,
        total([r.sent for r in reports]),
        total([r.promised for r in reports]),
        sum(r.waiting for r in reports),
        sum(r.total for r in reports),
        [f"rank {rank}: {problem}" for rank, r in enumerate(reports) for problem in r.problems],
    )


def check_cases(cases: list[Case], deadline: float = 300.0) -> list[Report]:
    """Run cases of one world size on one set of forked ranks, and return a merged report for each. Cases that differ
    only in plan or layout share a reference."""
    torch.set_num_threads(1)
    shared = [replace(case, plan="", layout="zones", windows=False, world=min(case.world, 2)) for case in cases]
    data = [_cached_data(case) for case in shared]
    by_rank = run_local(lambda rank: check_all(cases, data), cases[0].world, deadline)
    return [merge(reports) for reports in zip(*(reports for reports in by_rank if reports is not None), strict=True)]


def check_all(cases: list[Case], data: list[CaseData]) -> list[Report]:
    """Run cases in turn on this rank of the default process group."""
    plans: Plans = {}
    reports = []
    for case, inputs in zip(cases, data, strict=True):
        reports.append(check_on_rank(case, inputs, parallel_for(case, plans)))
        dist.barrier()
    return reports


def parallel_for(case: Case, plans: Plans) -> SequenceParallel:
    """The ``SequenceParallel`` for a case, shared by consecutive cases. Older ones are dropped: the connections of many
    plans on many ranks need thousands of threads."""
    heads = (case.q_heads, case.kv_heads) if case.plan == "auto" else ()
    key = (case.plan, case.layout, case.windows, case.wire_dtype, *heads)
    if key not in plans:
        plans.clear()
        plans[key] = case.parallel()
    return plans[key]


def environment_text(device: torch.device, cases: Sequence[Case]) -> str:
    """Devices, backend, and for each dtype the kernel and the reason for it."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    backend = dist.get_backend_config() if dist.is_initialized() else "local processes, gloo"
    lines = [f"torch {torch.__version__}, {cases[0].world} x {name}, {backend}, seed {cases[0].seed}"]
    for dtype, dim in dict.fromkeys((case.dtype, case.head_dim) for case in cases):
        kernel = kernel_for(device, dtype, dim)
        lines.append(f"{dtype_name(dtype)}: {kernel.name} ({kernel.reason})")
    return "\n".join(lines)
