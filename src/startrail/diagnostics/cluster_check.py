"""``startrail check`` under torchrun: several plans and dtypes on the cluster's own ranks and devices, in one table to
paste into an issue."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from startrail import __version__
from startrail._compat import dtype_name
from startrail.agreement.gather import gather_texts
from startrail.diagnostics.doctor import facts
from startrail.diagnostics.exactness import Plans, Report, check_on_rank, environment_text, merge, parallel_for
from startrail.diagnostics.reference import Case, CaseData, Error, make_data
from startrail.geometry.mask import Mask

SETTINGS = ("NCCL_", "TORCH_NCCL_", "GLOO_", "STARTRAIL_", "CUDA_", "LOCAL_WORLD_SIZE")  # of the environment
LARGE_TOKENS, MIN_LARGE_TOKENS = 4096, 1024  # per rank
MAX_LENGTH = 2**16  # whose float64 reference takes a GPU under a minute


def check_on_group(
    cases: list[Case], device: torch.device, before_case: Callable[[list[Report]], None] = lambda reports: None
) -> list[Report]:
    """Run cases on the ranks of the default process group, each on its own ``device``, and return the reports on every
    rank. A case that raises, for example because a GPU lacks a kernel, gives a failed report; the others still run.
    ``before_case`` is called with the reports so far."""
    plans: Plans = {}
    reports: list[Report] = []
    for case in cases:
        before_case(reports)
        reports.append(_merge(_gather_reports(case, device, plans)))
    return reports


def _gather_reports(case: Case, device: torch.device, plans: Plans) -> list[Report]:
    """All ranks' reports of one case. If any rank cannot prepare it, no rank starts, so no rank waits for another."""

    def attempt(function: Callable[[], Report | CaseData]) -> tuple[Report | CaseData | None, str]:
        try:
            return function(), ""
        except Exception as error:
            return None, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"

    data, problem = attempt(lambda: make_data(case, device))
    problems = gather_texts(problem, device=device)
    if any(problems):
        return [_failed_report([text] if text else []) for text in problems]
    assert isinstance(data, CaseData)
    report, problem = attempt(lambda: check_on_rank(case, data, parallel_for(case, plans)))
    mine = report if isinstance(report, Report) else _failed_report([problem])
    return [_report_from(json.loads(text)) for text in gather_texts(json.dumps(asdict(mine)), device=device)]


def _failed_report(problems: list[str]) -> Report:
    """The report of a case without results."""
    return Report({}, {}, {}, {}, {}, 0.0, 0.0, problems)


def _merge(reports: Sequence[Report]) -> Report:
    if all(report.errors for report in reports):
        return merge(reports)
    ranks_by_problem: dict[str, list[str]] = {}
    for rank, report in enumerate(reports):
        for problem in report.problems:
            ranks_by_problem.setdefault(problem, []).append(str(rank))
    return _failed_report([f"rank {', '.join(ranks)}: {problem}" for problem, ranks in ranks_by_problem.items()])


def _report_from(fields: dict[str, Any]) -> Report:
    errors = {name: {key: Error(*found) for key, found in fields[name].items()} for name in ("errors", "yardstick")}
    return Report(**{**fields, **errors})


def typical_cases(case: Case, tokens_per_rank: int = 0) -> list[Case]:
    """``case``, causal, in float32 and bfloat16 with the plans that fit its ranks: a ring, heads, teams with rings,
    heads with rings, and one with keep and groups. Also a ring and heads in float16, with packed documents, with a
    window wider than a shard, and with fewer KV heads. With ``tokens_per_rank``, each plan also in bfloat16 with that
    many: kernels then run on many tiles of theirs, which ``case`` may be too short for."""
    world, ring, heads = case.world, f"1x{case.world}", f"u{case.world}"
    texts = [ring, heads]
    if world % 2 == 0:
        half = world // 2
        texts += [f"2x{half}", f"u2/1x{half}", f"1x{half}/u2,keep=all,groups=2"]
    plain = replace(case, causal=True, window=None, documents=None, dtype=torch.bfloat16)
    found = [replace(plain, plan=text, dtype=dtype) for text in texts for dtype in (torch.float32, torch.bfloat16)]
    documents = (0, case.length // 3, case.length // 2, case.length)
    shared = next(case.q_heads // n for n in (4, 2, case.q_heads) if case.q_heads % n == 0)
    for text in (ring, heads):
        one = replace(plain, plan=text)
        found += [replace(one, dtype=torch.float16), replace(one, documents=documents)]
        found += [replace(one, window=case.length // 3 + 1), replace(one, kv_heads=shared)]
    if tokens_per_rank:
        large = replace(plain, length=tokens_per_rank * world, by_rows=True)
        found += [replace(large, plan=text) for text in texts]
        found += [replace(large, plan=ring, kv_heads=shared)]
    return [case for case in found if _is_valid(case)]


def large_tokens(world: int, device: torch.device) -> int:
    """Tokens per rank for large cases: none on CPUs, and fewer on many ranks, each of which computes the whole
    reference.

    >>> [large_tokens(world, torch.device("cuda")) for world in (1, 8, 16, 64, 128)]
    [4096, 4096, 4096, 1024, 0]
    """
    tokens = min(LARGE_TOKENS, MAX_LENGTH // world)
    return tokens if device.type == "cuda" and tokens >= MIN_LARGE_TOKENS else 0


def _is_valid(case: Case) -> bool:
    """True if the plan can run the case; some plans need more heads."""
    try:
        case.validate()
    except ValueError:
        return False
    return True


def table(cases: Sequence[Case], reports: Sequence[Report]) -> str:
    """One line per case: the largest ratio of our errors to SDPA's, and the bytes."""
    lines = [
        f"{'plan':28s} {'dtype':9s} {'heads':>7s} {'mask':20s} {'rms of SDPA':>12s} {'worst':>8s} {'bytes sent':>14s}"
    ]
    for case, report in zip(cases, reports, strict=True):
        pairs = [(report.errors[name], report.yardstick[name]) for name in report.errors]
        rms = max((ours.rms / max(sdpa.rms, 1e-30) for ours, sdpa in pairs), default=float("nan"))
        worst = max((ours.worst / max(sdpa.worst, 1e-30) for ours, sdpa in pairs), default=float("nan"))
        mask = str(Mask(case.causal, case.window, case.documents)) + (f", {case.length:,}" if case.by_rows else "")
        verdict = "; ".join(report.verdict()) or "ok"
        lines.append(
            f"{case.plan:28s} {dtype_name(case.dtype):9s} {f'{case.q_heads}:{case.kv_heads}':>7s} "
            f"{mask:20s} {rms:11.2f}x {worst:7.2f}x {sum(report.sent.values()):14,d}  {verdict}"
        )
    return "\n".join(lines)


def coverage(cases: Sequence[Case], reports: Sequence[Report]) -> str:
    """One line: what was compared with float64, and what failed."""
    tokens = sorted({case.length // case.world for case in cases})
    dtypes = sorted({dtype_name(case.dtype) for case in cases})
    failed = sum(bool(report.verdict()) for report in reports)
    result = f"{failed} of {len(cases)} cases failed" if failed else f"all {len(cases)} cases are exact"
    return (
        f"{result}: {len({case.plan for case in cases})} plans, {', '.join(dtypes)}, "
        f"{' and '.join(f'{count:,}' for count in tokens)} tokens per rank, head dim {cases[0].head_dim}"
    )


def record(cases: Sequence[Case], reports: Sequence[Report], device: torch.device) -> dict[str, Any]:
    """Everything that a maintainer needs to understand a run, for a JSON file. Cases without a report have not run, or
    ended the program."""
    done, missing = cases[: len(reports)], cases[len(reports) :]
    found = [
        {"case": _fields_of(case), "verdict": report.verdict() or "ok", "report": asdict(report)}
        for case, report in zip(done, reports, strict=True)
    ]
    settings = {name: value for name, value in os.environ.items() if name.startswith(SETTINGS)}
    return {
        "startrail": __version__,
        "command": sys.argv,
        "environment": environment_text(device, cases).splitlines(),
        "machine": facts().splitlines(),
        "variables": settings,
        "coverage": coverage(done, reports) if done else "no case has ended",
        "cases": found,
        "unfinished": [_fields_of(case) for case in missing],
    }


def write(out: Path | None, cases: Sequence[Case], reports: Sequence[Report], device: torch.device) -> None:
    """Write the record to a file, if there is one."""
    if out is not None:
        out.write_text(json.dumps(record(cases, reports, device), indent=1) + "\n")


def _fields_of(case: Case) -> dict[str, Any]:
    """A case without what it leaves at its default, with texts for dtypes."""
    default = Case(case.plan, case.world)
    fields = {name: value for name, value in asdict(case).items() if value != getattr(default, name)}
    fields |= {"plan": case.plan, "world": case.world, "dtype": case.dtype}
    return {name: str(value) if isinstance(value, torch.dtype) else value for name, value in fields.items()}
