"""Checksums of the files in a folder, in the format of ``sha256sum``: ``sha256sum -c SHA256SUMS`` verifies them.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as name:
...     folder = Path(name)
...     _ = (folder / "part.bin").write_bytes(b"abc")
...     write_sums(folder, {"part.bin": sha256_of(folder / "part.bin")})
...     before = find_damage(folder, read_sums(folder))
...     _ = (folder / "part.bin").write_bytes(b"abb")
...     before, find_damage(folder, read_sums(folder))
(None, 'part.bin has changed since it was written')
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

SUMS = "SHA256SUMS"
BLOCK_BYTES = 1 << 20
_LINE = re.compile(r"([0-9a-f]{64})  ([\w.-]+)")


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def write_file(path: Path, contents: bytes | bytearray) -> str:
    """Write and fsync a file; return the checksum of ``contents``, not of what the disk holds."""
    with path.open("wb") as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(contents).hexdigest()


def write_sums(folder: Path, sums: Mapping[str, str]) -> None:
    write_file(folder / SUMS, "".join(f"{value}  {name}\n" for name, value in sorted(sums.items())).encode())


def read_sums(folder: Path) -> dict[str, str]:
    """Return the expected checksum of each file; raise ``ValueError`` if there is no readable list. File names cannot
    be paths that lead out of the folder."""
    try:
        *lines, rest = (folder / SUMS).read_bytes().decode().split("\n")
    except (OSError, ValueError):
        raise ValueError(f"{SUMS} is missing or cannot be read") from None
    matches = [_LINE.fullmatch(line) for line in lines]
    sums = {match[2]: match[1] for match in matches if match}
    if rest or not sums or len(sums) < len(lines):
        raise ValueError(f"{SUMS} is not a list of checksums")
    return sums


def find_damage(folder: Path, sums: Mapping[str, str]) -> str | None:
    """Describe the first file that does not match its checksum, or return None."""
    for name, value in sums.items():
        try:
            actual = sha256_of(folder / name)
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if actual != value:
            return f"{name} has changed since it was written"
    return None
