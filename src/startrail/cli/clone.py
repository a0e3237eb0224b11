"""What runs only from a clone: the workshop, which lies beside ``src/`` and is not installed."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import startrail

HOW = (
    "runs only from a clone of the repository, because pip installs neither emulated clusters nor other libraries to "
    "compare with: run `make setup-bench` in the clone, then .venv/bin/"
)


def workshop(name: str) -> ModuleType | None:
    """The module ``workshop.NAME`` of the clone that startrail runs from; None if it does not run from one.

    The place follows from startrail's own file. The working directory must not decide what runs.
    """
    source = Path(startrail.__file__).resolve().parents[1]
    first = source.parent / "workshop" / "__init__.py"
    if source.name != "src" or not first.is_file():
        return None
    if "workshop" not in sys.modules:
        spec = spec_from_file_location("workshop", first, submodule_search_locations=[str(first.parent)])
        assert spec is not None and spec.loader is not None
        sys.modules["workshop"] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules["workshop"])
    return import_module(f"workshop.{name}")
