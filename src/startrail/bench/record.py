"""Results in a file, with the machine, versions and options of the run."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import startrail

Json = dict[str, Any]


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


def metadata(argv: Sequence[str], started: float) -> Json:
    """Machine, versions and options of the run."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(started)),
        "seconds": round(time.time() - started, 1),
        "arguments": list(argv),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "startrail": startrail.__version__,
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted": _git("status", "--porcelain", "--", "src", "workshop").splitlines(),
        "load_at_start": os.getloadavg(),
    }


def _processor() -> str:
    with open("/proc/cpuinfo") as lines:
        names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        return next(names, platform.machine())


def _git(*arguments: str) -> str:
    """Its output in the clone that startrail runs from; nothing if it does not run from one."""
    root = Path(startrail.__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    return "" if done.returncode else done.stdout.strip()
