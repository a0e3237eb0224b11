"""The errors that the planner quotes as intervals: ``src/startrail/planner/errors.toml``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from startrail.planner.rows import ERRORS
from startrail.planner.units import read_file

HEAD = """# Errors of predictions by kind, written by `make validate-hardware` (attention and step, on GPUs) and
# `make validate` (lab): nine in ten of so many figures were off by at most this share.
"""
SHARE = 0.9


def record(kind: str, errors: Sequence[float]) -> None:
    path = ERRORS
    table: dict[str, Any] = read_file(path) if path.exists() else {}
    ordered = sorted(map(abs, errors))
    table[kind] = {"figures": len(ordered), "within": round(ordered[round(SHARE * (len(ordered) - 1))], 3)}
    sections = (
        f"\n[{name}]\nfigures = {found['figures']}\nwithin = {found['within']}\n" for name, found in table.items()
    )
    path.write_text(HEAD + "".join(sections))
