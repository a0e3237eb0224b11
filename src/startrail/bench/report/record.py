"""Results in a file, with the machine, versions and options of the run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from startrail.bench.report.findings import Json
from startrail.bench.report.page import metadata


def record(file: Path | None, options: argparse.Namespace, started: float, rows: Sequence[Json]) -> None:
    """Write ``rows`` as JSON, if a file was asked for."""
    if file is None:
        return
    try:
        file.write_text(json.dumps({"meta": metadata(stated(options), started), "rows": rows}, indent=1))
    except OSError as error:
        raise ValueError(f"--json {file}: {error.strerror}") from None
    print(f"\n{file}")


def stated(options: argparse.Namespace) -> list[str]:
    """The options of a run, without what the command line keeps there for itself."""
    return [
        f"{name}={value}" for name, value in vars(options).items() if isinstance(value, bool | int | float | str | list)
    ]
