"""Descriptions as data: TOML (or JSON) files whose every key is known, and whose numbers carry units.

>>> quantity("100 Gbit/s", "bytes/s"), quantity("40 GB", "bytes"), quantity("2 ms", "s")
(12500000000.0, 40000000000.0, 0.002)
>>> quantity("100 Gbit", "bytes/s")
Traceback (most recent call last):
ValueError: '100 Gbit' is not a rate; write a number and a unit, such as '100 Gbit/s' or '300 GB/s'
>>> count("512k"), count("1M"), count("131072")
(524288, 1048576, 131072)
"""

from __future__ import annotations

import difflib
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Table = Mapping[str, Any]
_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
# By what a number is of: how it is called, an example, and what each unit counts for.
_KINDS: dict[str, tuple[str, str, dict[str, float]]] = {
    "bytes/s": (
        "a rate",
        "'100 Gbit/s' or '300 GB/s'",
        {f"{p}{unit}/s": x * size for p, x in _PREFIXES.items() for unit, size in (("B", 1.0), ("bit", 0.125))},
    ),
    "bytes": (
        "an amount of memory",
        "'40 GB' or '80 GiB'",
        {f"{p}B": x for p, x in (_PREFIXES | _BINARY).items()},
    ),
    "s": ("a time", "'5 us' or '0.1 ms'", {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}),
    "flop/s": ("a speed", "'312 TFLOP/s'", {f"{p}FLOP/s": x for p, x in _PREFIXES.items()}),
}


def quantity(value: object, unit: str) -> float:
    """The number that a text such as ``"100 Gbit/s"`` stands for, in ``unit``."""
    name, example, units = _KINDS[unit]
    found = re.fullmatch(r"\s*([0-9.]+(?:[eE][+-]?\d+)?)\s*([A-Za-z/]+)\s*", value) if isinstance(value, str) else None
    if found is None or found[2] not in units:
        raise ValueError(f"{value!r} is not {name}; write a number and a unit, such as {example}")
    try:
        return float(found[1]) * units[found[2]]
    except ValueError:
        raise ValueError(f"{value!r} is not {name}; {found[1]!r} is not a number") from None


def count(value: object) -> int:
    """Tokens, sequences or ranks; ``k`` and ``M`` are binary, as context lengths are written."""
    found = re.fullmatch(r"\s*(\d+)\s*([kKmM]?)\s*", str(value)) if not isinstance(value, bool) else None
    if found is None or not int(found[1]):
        raise ValueError(f"{value!r} is not a whole number of at least 1, such as 131072, 128k or 1M")
    return int(found[1]) * {"": 1, "k": 2**10, "m": 2**20}[found[2].lower()]


def nearest(name: str, names: Iterable[str], what: str) -> str:
    """``; did you mean 'x'?``, or the names that there are."""
    names = list(names)
    near = difflib.get_close_matches(name, names, n=1) or [n for n in names if name and n.startswith(name)]
    return f"; did you mean {near[0]!r}?" if near else f"; {what} {', '.join(names)}"


def check_keys(table: object, known: Iterable[str], required: Iterable[str], where: str) -> Table:
    """``table``, if it has no key but the known ones and all that it must have."""
    if not isinstance(table, Mapping):
        raise ValueError(f"{where} must be a table of keys, not {table!r}")
    known = list(known)
    for key in table:
        if key not in known:
            raise ValueError(f"{where}: no key {key!r}{nearest(str(key), known, 'keys are')}")
    for key in required:
        if key not in table:
            raise ValueError(f"{where}: {key!r} is missing")
    return table


def number(table: Table, key: str, where: str, *, least: float, most: float = math.inf, default: float = 0.0) -> float:
    """A plain number between two limits."""
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        limits = f"of at least {least:g}" if most == math.inf else f"between {least:g} and {most:g}"
        raise ValueError(f"{where}: {key} = {value!r} is not a number {limits}")
    return value


def whole(table: Table, key: str, where: str, *, least: int = 1, default: int = 0) -> int:
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{where}: {key} = {value!r} is not a whole number of at least {least}")
    return value


def measured(table: Table, key: str, where: str, unit: str, default: str = "") -> float:
    """A number with a unit, more than 0 (or its default)."""
    try:
        value = quantity(table.get(key, default), unit)
    except ValueError as error:
        raise ValueError(f"{where}: {key} = {error}") from None
    if value <= 0 and key in table:
        raise ValueError(f"{where}: {key} = {table[key]!r} must be more than 0")
    return value


def choice(table: Table, key: str, where: str, choices: tuple[str, ...], default: str) -> str:
    value = table.get(key, default)
    if value not in choices:
        raise ValueError(f"{where}: {key} = {value!r} is not one of {', '.join(choices)}")
    return str(value)


def shipped(folder: str) -> dict[str, Path]:
    """The files that come with the package, by name."""
    return {path.stem: path for path in sorted((Path(__file__).parent.parent / folder).glob("*.toml"))}


def find_file(name: str, folder: str, what: str) -> Path:
    """The shipped file of that name, or the file at that path."""
    known = shipped(folder)
    if name in known:
        return known[name]
    path = Path(name)
    if path.suffix in (".toml", ".json") or "/" in name:
        return path
    raise ValueError(f"no {what} {name!r}{nearest(name, known, 'there are')} (or give a file)")


def read_file(path: Path) -> dict[str, Any]:
    try:
        return parse_text(path.read_text(), path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file") from None


def parse_text(text: str, path: Path) -> dict[str, Any]:
    """The table that the text of a file at ``path`` is."""
    try:
        found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: a description is a table of keys")
    return found
