"""A first look at a cluster: `check` on the ranks and devices that torchrun has started, several plans and dtypes in
one table to paste into an issue."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from startrail.check import Report, check_all, merge
from startrail.mask import Mask
from startrail.texts import gather_texts
from startrail.truth import Case, Error, make_data


def check_on_group(cases: list[Case], device: torch.device) -> list[Report]:
    """Run cases on the ranks of the default process group, each on its own ``device``; every rank gets the reports."""
    mine = check_all(cases, [make_data(case, device) for case in cases])
    texts = gather_texts(json.dumps([asdict(report) for report in mine]), device=device)
    by_rank = [[_report(fields) for fields in json.loads(text)] for text in texts]
    return [merge(reports) for reports in zip(*by_rank, strict=True)]


def _report(fields: dict[str, Any]) -> Report:
    errors = {
        name: {key: Error(*pair) for key, pair in fields[name].items()} for name in ("errors", "yardstick", "floor")
    }
    return Report(**{**fields, **errors})


def typical_cases(case: Case) -> list[Case]:
    """``case`` in float32 and bfloat16, causal, with packed documents, and with the plans that fit its ranks: a ring,
    heads, teams and rings, both together, and what keeps and groups."""
    world, texts = case.world, [f"1x{case.world}", f"u{case.world}"]
    if world % 2 == 0:
        half = world // 2
        texts += [f"2x{half}", f"u2/1x{half}", f"1x{half}/u2,keep=all,groups=2"]
    cases = []
    for text in texts:
        for dtype in (torch.float32, torch.bfloat16):
            try:
                found = replace(case, plan=text, dtype=dtype, causal=True)
                found.validate()
            except ValueError:  # such as fewer heads than ranks
                continue
            cases.append(found)
    cut = (0, case.length // 3, case.length // 2, case.length)
    return [*cases, replace(case, plan=texts[0], dtype=torch.bfloat16, causal=True, window=None, documents=cut)]


def table(cases: Sequence[Case], reports: Sequence[Report]) -> str:
    """One line a case: the worst of our errors by the worst allowed, and the bytes."""
    lines = [f"{'plan':28s} {'dtype':9s} {'mask':20s} {'rms of SDPA':>12s} {'worst':>8s} {'bytes sent':>14s}"]
    for case, report in zip(cases, reports, strict=True):
        pairs = [(report.errors[name], report.yardstick[name]) for name in report.errors]
        rms = max(ours.rms / max(sdpa.rms, 1e-30) for ours, sdpa in pairs)
        worst = max(ours.worst / max(sdpa.worst, 1e-30) for ours, sdpa in pairs)
        mask = str(Mask(case.causal, case.window, case.documents))
        wrong = report.verdict()
        lines.append(
            f"{case.plan:28s} {str(case.dtype).removeprefix('torch.'):9s} {mask:20s} {rms:11.2f}x {worst:7.2f}x "
            f"{sum(report.sent.values()):14,d}  {'; '.join(wrong) or 'ok'}"
        )
    return "\n".join(lines)
