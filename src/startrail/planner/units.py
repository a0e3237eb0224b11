"""Readers for description files: TOML (or JSON) in which every key must be known and numbers carry units.

>>> parse_quantity("100 Gbit/s", "bytes/s"), parse_quantity("40 GB", "bytes"), parse_quantity("2 ms", "s")
(12500000000.0, 40000000000.0, 0.002)
>>> parse_quantity("100 Gbit", "bytes/s")
Traceback (most recent call last):
ValueError: '100 Gbit' is not a rate; write a number and a unit, such as '100 Gbit/s' or '300 GB/s'
>>> parse_quantity("1e999 s", "s")                        # every quantity has a range, so that sums cannot overflow
Traceback (most recent call last):
ValueError: '1e999 s' is not between 0 s and 1 h
>>> parse_count("512k"), parse_count("1M"), parse_count("131072")
(524288, 1048576, 131072)
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Table = Mapping[str, Any]
_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


class _Unit(NamedTuple):
    """A kind of quantity: its name and an example for errors, the factor of each unit, and the range, also in words."""

    name: str
    example: str
    units: dict[str, float]
    least: float
    most: float
    range: str


def _scaled(unit: str, size: float = 1.0, prefixes: Mapping[str, float] = _PREFIXES) -> dict[str, float]:
    return {prefix + unit: factor * size for prefix, factor in prefixes.items()}


# The ranges are far wider than any hardware's: a value outside them is a typo, or would overflow or never end.
_RATES, _SIZES = _scaled("B/s") | _scaled("bit/s", 0.125), _scaled("B", prefixes=_PREFIXES | _BINARY)
_TIMES, _SPEEDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}, _scaled("FLOP/s")
_KINDS = {
    "bytes/s": _Unit("a rate", "'100 Gbit/s' or '300 GB/s'", _RATES, 1e3, 1e18, "between 1 kB/s and 1000 PB/s"),
    "bytes": _Unit("an amount of memory", "'40 GB' or '80 GiB'", _SIZES, 1e6, 1e18, "between 1 MB and 1000 PB"),
    "s": _Unit("a time", "'5 us' or '0.1 ms'", _TIMES, 0.0, 3600.0, "between 0 s and 1 h"),
    "flop/s": _Unit("a speed", "'312 TFLOP/s'", _SPEEDS, 1e6, 1e21, "between 1 MFLOP/s and 1000000 PFLOP/s"),
}
MAX_COUNT = 2**40  # tokens or sequences
MAX_SIZE = 2**24  # of a model's or a cluster's dimensions
MAX_FILE = 2**20  # characters


def short_repr(value: object) -> str:
    """The value for an error message, on one line of readable length.

    >>> short_repr("x"), short_repr("9" * 400)
    ("'x'", "'9999999999999999999999999999999999999999999999999999999...")
    """
    text = repr(value)
    return text if len(text) <= 59 else f"{text[:56]}..."


def count_text(number: int, noun: str) -> str:
    """
    >>> count_text(1, "plan"), count_text(2, "node")
    ('1 plan', '2 nodes')
    """
    return f"{number} {noun if number == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """
    >>> plural("node"), plural("box"), plural("GPU"), plural("switch")
    ('nodes', 'boxes', 'GPUs', 'switches')
    """
    return noun + ("es" if noun.endswith(("s", "x", "z", "ch", "sh")) else "s")


def bytes_text(nbytes: float) -> str:
    """A number of bytes in three digits and the unit that fits.

    >>> bytes_text(0), bytes_text(512), bytes_text(13.94e9), bytes_text(999.9e6), bytes_text(2.57e16)
    ('0 B', '512 B', '13.9 GB', '1.00 GB', '25.7 PB')
    """
    units = ["B", "kB", "MB", "GB", "TB", "PB"]
    at = 0
    while nbytes >= 999.5 and at < len(units) - 1:
        nbytes, at = nbytes / 1000, at + 1
    decimals = 0 if at == 0 or nbytes >= 99.95 else 1 if nbytes >= 9.995 else 2
    return f"{nbytes:.{decimals}f} {units[at]}"


def seconds_text(seconds: float) -> str:
    """
    >>> seconds_text(12.345), seconds_text(0.0123), seconds_text(0.00045), seconds_text(123.45), seconds_text(24000)
    ('12.35 s', '12.3 ms', '450.0 us', '123.5 s', '6.67 h')
    """
    if seconds >= 3600:
        return f"{seconds / 3600:.2f} h"
    if seconds >= 1:
        return f"{seconds:.{1 if seconds >= 99.995 else 2}f} s"
    return f"{seconds / 1e-3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def parse_quantity(value: object, unit: str, least: float | None = None) -> float:
    """Parse a text such as ``"100 Gbit/s"`` into ``unit``. ``least`` replaces the lower end of the unit's range."""
    kind = _KINDS[unit]
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE][+-]?\d+)?)\s*([A-Za-z/]+)\s*", value) if isinstance(value, str) else None
    if match is None or match[2] not in kind.units:
        raise ValueError(f"{short_repr(value)} is not {kind.name}; write a number and a unit, such as {kind.example}")
    try:
        number = float(match[1]) * kind.units[match[2]]
    except ValueError:
        raise ValueError(f"{short_repr(value)} is not {kind.name}; {short_repr(match[1])} is not a number") from None
    if not (kind.least if least is None else least) <= number <= kind.most:
        raise ValueError(f"{short_repr(value)} is not {kind.range}")
    return number


def parse_count(value: object) -> int:
    """Parse a number of tokens or sequences. ``k`` and ``M`` are binary, as usual for context lengths."""
    fits = isinstance(value, int | str) and not isinstance(value, bool)
    match = re.fullmatch(r"\s*0*([1-9]\d{0,14})\s*([kKmM]?)\s*", str(value), re.ASCII) if fits else None
    number = int(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2].lower()] if match else 0
    if not 1 <= number <= MAX_COUNT:
        limits = f"of at least 1 and at most {MAX_COUNT}"
        raise ValueError(f"{short_repr(value)} is not a whole number {limits}, such as 131072, 128k or 1M")
    return number


def suggestion(name: str, names: Iterable[str], what: str) -> str:
    """``; did you mean 'x'?``, or all names."""
    names = list(names)
    near = difflib.get_close_matches(name, names, n=1) or [n for n in names if name and n.startswith(name)]
    return f"; did you mean {near[0]!r}?" if near else f"; {what} {', '.join(names)}"


class Fields:
    """Reads the values of a table. Errors start with ``where`` and name the key."""

    def __init__(self, table: Table, where: str = "") -> None:
        self.table, self.prefix = table, where and f"{where}: "

    def _error(self, key: str, value: object, expected: str) -> ValueError:
        return ValueError(f"{self.prefix}{key} = {short_repr(value)} is not {expected}")

    def number(self, key: str, *, least: float, most: float, default: float) -> float:
        value = self.table.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self._error(key, value, f"a number between {least:g} and {most:g}")
        return float(value)

    def integer(self, key: str, *, least: int = 1, most: int = MAX_SIZE, default: int = 0) -> int:
        value = self.table.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._error(key, value, f"a whole number of at least {least} and at most {most}")
        return value

    def count(self, key: str) -> int:
        try:
            return parse_count(self.table[key])
        except ValueError as error:
            raise ValueError(f"{self.prefix}{key} = {error}") from None

    def quantity(self, key: str, unit: str, default: str = "") -> float:
        """A default such as ``"0 B"`` lowers the minimum of the unit's range."""
        least = parse_quantity(default, unit, 0.0) if default else None
        try:
            return parse_quantity(self.table.get(key, default), unit, least)
        except ValueError as error:
            raise ValueError(f"{self.prefix}{key} = {error}") from None

    def choice(self, key: str, choices: Sequence[object], default: object = None) -> Any:
        value = self.table.get(key, default)
        if value not in choices or type(value) is not type(choices[0]):
            raise self._error(key, value, f"one of {', '.join(map(str, choices))}")
        return value

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self.table.get(key, default)
        if not isinstance(value, bool):
            raise self._error(key, value, "true or false")
        return value

    def line(self, key: str) -> str:
        value = self.table[key]
        if not isinstance(value, str) or not value.strip() or not value.isprintable():
            raise self._error(key, value, "one line of text")
        return value


def read_all(readers: Iterable[Callable[[], Any]], where: str) -> list[Any]:
    """What the readers return. Raises one ``ValueError`` with the problems of all parts of a file."""
    found, problems = [], []
    for read in readers:
        try:
            found.append(read())
        except ValueError as error:
            problems.append(str(error).removeprefix(f"{where}: "))
    if problems:
        raise ValueError(f"{where}: {'; '.join(problems)}")
    return found


def check_keys(table: object, known: Iterable[str], required: Iterable[str], where: str) -> Fields:
    """The table's fields. Raises ``ValueError`` for an unknown or a missing key."""
    if not isinstance(table, Mapping):
        raise ValueError(f"{where} must be a table of keys, not {short_repr(table)}")
    known = list(known)
    for key in table:
        if key not in known:
            raise ValueError(f"{where}: no key {short_repr(key)}{suggestion(str(key), known, 'known keys:')}")
    if missing := [repr(key) for key in required if key not in table]:
        raise ValueError(f"{where}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    fields = Fields(table, where)
    if "description" in table:
        fields.line("description")
    return fields


def shipped(folder: str) -> dict[str, Path]:
    """The description files of the package, by name."""
    return {path.stem: path for path in sorted((Path(__file__).parent / folder).glob("*.toml"))}


def find_file(name: str, folder: str, what: str) -> Path:
    known = shipped(folder)
    if name in known:
        return known[name]
    path = Path(name)
    if path.suffix in (".toml", ".json") or "/" in name:
        return path
    raise ValueError(f"no {what} {name!r}{suggestion(name, known, 'choose from')} (or pass a file)")


def read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open() as file:  # a device such as /dev/zero has no end
            text = file.read(MAX_FILE + 1)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file") from None
    if len(text) > MAX_FILE:
        raise ValueError(f"{path}: longer than the {MAX_FILE} characters that a description may have")
    return parse_text(text, path)


def parse_text(text: str, path: Path) -> dict[str, Any]:
    try:
        table = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except RecursionError:
        raise ValueError(f"{path}: nested too deeply") from None
    if not isinstance(table, dict):
        raise ValueError(f"{path}: not a table of keys")
    return table
