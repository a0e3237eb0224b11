"""The list of a folder's files with their checksums, as ``sha256sum`` writes it: ``sha256sum -c SHA256SUMS`` reads it.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as name:
...     folder = Path(name)
...     _ = (folder / "part.bin").write_bytes(b"abc")
...     write_sums(folder, {"part.bin": sha256_of(folder / "part.bin")})
...     before = problem_with(folder, read_sums(folder))
...     _ = (folder / "part.bin").write_bytes(b"abb")
...     before, problem_with(folder, read_sums(folder))
(None, 'part.bin has other contents than were written')
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

SUMS = "SHA256SUMS"
BLOCK = 1 << 20
_LINE = re.compile(r"([0-9a-f]{64})  ([\w.-]+)")


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def write_file(path: Path, contents: bytes | bytearray) -> str:
    """Write, see that it is on the disk, and return the checksum of what was meant."""
    with path.open("wb") as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(contents).hexdigest()


def write_sums(folder: Path, sums: Mapping[str, str]) -> None:
    write_file(folder / SUMS, "".join(f"{value}  {name}\n" for name, value in sorted(sums.items())).encode())


def read_sums(folder: Path) -> dict[str, str]:
    """The checksum that each file must have; ``ValueError`` if there is no such list, or it cannot be read.

    Names are names in this folder, never paths out of it.
    """
    try:
        *lines, rest = (folder / SUMS).read_bytes().decode().split("\n")
    except (OSError, ValueError):
        raise ValueError(f"{SUMS} is missing or cannot be read") from None
    found = [_LINE.fullmatch(line) for line in lines]
    sums = {match[2]: match[1] for match in found if match}
    if rest or not sums or len(sums) < len(lines):
        raise ValueError(f"{SUMS} is not a list of checksums")
    return sums


def problem_with(folder: Path, sums: Mapping[str, str]) -> str | None:
    """What is wrong with the first of these files that is not as it was written, or None."""
    for name, value in sums.items():
        try:
            found = sha256_of(folder / name)
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if found != value:
            return f"{name} has other contents than were written"
    return None
