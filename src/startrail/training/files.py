"""Files in the folder of a run: opened without following links, and only if they are regular files.

The folder may come from someone else. A symbolic link in it could lead to any file of this machine, and reading a FIFO
or a device may never end.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as name:
...     replace_file(Path(name, "notes"), b"abc")
...     with Folder(Path(name), own=0) as folder:
...         folder.read("notes", start=1, count=2), folder.size("notes")
(bytearray(b'bc'), 3)
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

BLOCK_BYTES = 1 << 20


def open_regular(path: Path | str, flags: int, folder: int | None = None) -> int:
    """Open a regular file and return its descriptor; ``path`` may be relative to the open ``folder``. Raises
    ``ValueError`` if it is anything else."""
    with suppress(FileNotFoundError):  # before it is opened too: that alone has effects on some devices
        _check_regular(path, os.stat(path, dir_fd=folder, follow_symlinks=False).st_mode)
    # O_NONBLOCK: opening a FIFO that has just taken the file's place would wait for its other end
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644, dir_fd=folder)
    try:
        _check_regular(path, os.fstat(descriptor).st_mode)
    except ValueError:
        os.close(descriptor)
        raise
    return descriptor


def _check_regular(path: Path | str, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO"}
        raise ValueError(f"{path} is {kinds.get(stat.S_IFMT(mode), 'a device or socket')}, not a regular file")


def replace_file(path: Path, contents: bytes) -> None:
    """Write a file under another name and rename it, so that no reader finds half of it, and a link with its name is
    replaced and not followed."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    with open(open_regular(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(contents)
    partial.replace(path)


def make_folder(path: Path, own: int) -> None:
    """Make a folder unless there is one; for ``own`` see `Folder`."""
    path.mkdir(parents=True, exist_ok=True)
    with Folder(path, own):
        pass


class Folder:
    """An open folder, to read files in it. ``path`` may lead through symbolic links, but its last ``own`` names may
    not be links. ``check_stop`` is called before every block that is read, and may raise to end the reading. Its
    methods raise ``ValueError``, which names the file."""

    def __init__(self, path: Path, own: int, check_stop: Callable[[], None] = lambda: None) -> None:
        self._check_stop = check_stop
        flags = os.O_RDONLY | os.O_DIRECTORY
        self._descriptor = os.open(path.parents[own - 1] if own else path, flags)
        for name in path.parts[len(path.parts) - own :]:
            parent = self._descriptor
            try:
                self._descriptor = os.open(name, flags | os.O_NOFOLLOW, dir_fd=parent)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    raise ValueError(f"{name} is a symbolic link, or not a folder") from None
                raise
            finally:
                os.close(parent)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)

    def size(self, name: str) -> int:
        """The bytes of a regular file."""
        with _problems_of(name):
            status = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        _check_regular(name, status.st_mode)
        return status.st_size

    def read(self, name: str, start: int, count: int) -> bytearray:
        """``count`` bytes of a file from ``start`` on."""
        contents = bytearray(count)
        filled = 0
        for block in self._blocks(name, start, count):
            contents[filled : filled + len(block)] = block
            filled += len(block)
        return contents

    def sha256(self, name: str) -> str:
        digest = hashlib.sha256()
        for block in self._blocks(name, 0, self.size(name)):
            digest.update(block)
        return digest.hexdigest()

    def _blocks(self, name: str, start: int, count: int) -> Iterator[bytes]:
        with _problems_of(name), open(open_regular(name, os.O_RDONLY, self._descriptor), "rb", buffering=0) as file:
            file.seek(start)
            while count:
                self._check_stop()
                block = file.read(min(count, BLOCK_BYTES))
                if not block:
                    raise ValueError(f"{name} is too short")
                count -= len(block)
                yield block


@contextmanager
def _problems_of(name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise ValueError(f"{name} is missing") from None
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}") from None


def size_text(size: float) -> str:
    """Bytes in a suitable unit.

    >>> size_text(3 * 2**20), size_text(1536)
    ('3.0 MiB', '1.5 KiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.1f} {unit}"


def first_line(error: BaseException) -> str:
    """The first line of an error's text. What a file says may be part of it, so it is cut after 300 characters, and
    control characters, which would change a terminal's state, are replaced.

    >>> first_line(ValueError("step 'one\\x1b[2J' is odd\\nreally"))
    "step 'one\ufffd[2J' is odd"
    """
    text = (getattr(error, "strerror", None) or str(error)).strip().splitlines()
    return printable(text[0][:300]) if text else type(error).__name__


def printable(text: str) -> str:
    """The text without control characters, except line ends and tabs."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text)
