"""A tokenizer's ids of text files, made once: the first process to need them writes a cache, the others wait for it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch

from startrail.training.data.streams import Document, Stream

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CACHE_FORMAT = 1
CACHE_DEADLINE = 3600.0  # seconds that a process waits for another that tokenises the same files
PIECE = 2**20  # characters to tokenise in one go; a longer file is cut after a line
PIECES = 8  # pieces that the tokenizer's threads share


def load_tokenizer(path: str) -> Tokenizer:
    """A Hugging Face ``tokenizers`` file, set to encode all of a text: such files may ask to cut or pad it."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError(
            f"tokenizer {path!r} needs the package tokenizers: pip install 'startrail[tokenizers]'"
        ) from None
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the library raises nothing more special
        raise ValueError(f"tokenizer {path!r} cannot be loaded: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if not tokenizer.get_vocab():
        raise ValueError(f"tokenizer {path!r} has no tokens")
    return tokenizer


def tokens_of(files: Sequence[Path], tokenizer_path: str, tokenizer: Tokenizer) -> Stream:
    """Every file a document of the tokenizer's ids, from a cache that the first process to need it makes.

    The others wait for a lock, which is free again also when its holder dies. A cache belongs to the tokenizer and to
    the files' paths, sizes and times of change: all ranks can tell which one they need without reading the corpus.
    """
    key = hashlib.sha256(Path(tokenizer_path).read_bytes())
    for file in files:
        status = file.stat()
        key.update(repr((str(file.resolve()), status.st_size, status.st_mtime_ns, CACHE_FORMAT)).encode())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "startrail", "tokens")
    path = folder / key.hexdigest()[:32]
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _make_cache(path, files, tokenizer)
    except OSError as error:
        raise ValueError(
            f"cannot write the tokens of {len(files)} files to {path}: {error.strerror}; make room there, or set "
            "XDG_CACHE_HOME to another folder"
        ) from error
    return _read_cache(path, len(files))


def _make_cache(path: Path, files: Sequence[Path], tokenizer: Tokenizer) -> None:
    end = time.monotonic() + CACHE_DEADLINE
    with open(path.with_suffix(".lock"), "w") as lock:
        while not path.exists():
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise ValueError(
                        f"another process has held {lock.name} for {CACHE_DEADLINE:.0f} s and not made the tokens of "
                        f"{len(files)} files"
                    ) from None
                time.sleep(0.1)
                continue
            if not path.exists():
                _write_cache(path, files, tokenizer)


def _write_cache(path: Path, files: Sequence[Path], tokenizer: Tokenizer) -> None:
    """All ids as int32, then how many each file has as int64; under another name until it is complete.

    Who holds the lock is alone, so what a killed process may have left under that name is simply overwritten.
    """
    unfinished = path.with_suffix(".part")
    try:
        with open(unfinished, "wb") as cache:
            _encode(files, tokenizer, cache)
            cache.flush()
            os.fsync(cache.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _encode(files: Sequence[Path], tokenizer: Tokenizer, cache: BinaryIO) -> None:
    counts = [0] * len(files)
    pieces = _pieces(files)
    while group := list(islice(pieces, PIECES)):
        encodings = tokenizer.encode_batch_fast([text for _, text in group], add_special_tokens=False)
        for (number, _), encoding in zip(group, encodings, strict=True):
            cache.write(array("i", encoding.ids).tobytes())
            counts[number] += len(encoding.ids)
    cache.write(array("q", counts).tobytes())


def _pieces(files: Sequence[Path]) -> Iterator[tuple[int, str]]:
    for number, file in enumerate(files):
        try:
            with open(file, encoding="utf-8", errors="replace", newline="") as text:
                while lines := text.readlines(PIECE):
                    yield number, "".join(lines)
        except OSError as error:
            raise ValueError(f"cannot read {file}: {error.strerror}") from error


def _read_cache(path: Path, num_files: int) -> Stream:
    size, table = path.stat().st_size, 8 * num_files
    counts: list[int] = []
    if size >= table:
        with open(path, "rb") as cache:
            cache.seek(size - table)
            counts = array("q", cache.read()).tolist()
    if 4 * sum(counts) + table != size:
        raise ValueError(f"the tokens in {path} are damaged: delete that file to have them made again")
    starts = accumulate(counts, initial=0)
    documents = (Document(path, start, count) for start, count in zip(starts, counts, strict=False))
    return Stream(tuple(documents), torch.int32)
