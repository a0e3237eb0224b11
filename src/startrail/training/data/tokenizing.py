"""Token ids of text files: the first process that needs them writes a cache, the others wait for it."""

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
CACHE_DEADLINE_SECONDS = 3600.0  # to wait for another process that tokenizes the same files
PIECE_CHARACTERS = 2**20  # per call of the tokenizer; a longer file is cut after a line
BATCH_PIECES = 8  # pieces that the tokenizer's threads share


def load_tokenizer(path: str) -> Tokenizer:
    """Load a Hugging Face ``tokenizers`` file and disable the truncation and padding that it may ask for."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError(
            f"tokenizer {path!r} needs the package tokenizers: pip install 'startrail[tokenizers]'"
        ) from None
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the library raises no other type
        raise ValueError(f"tokenizer {path!r} cannot be loaded: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if not tokenizer.get_vocab():
        raise ValueError(f"tokenizer {path!r} has no tokens")
    return tokenizer


def tokens_of(files: Sequence[Path], tokenizer_path: str, tokenizer: Tokenizer) -> Stream:
    """A stream of token ids with one document per file, from a cache that the first process creates. The others wait
    for a lock, which is also released when its owner dies. The cache's key is the tokenizer and the files' paths, sizes
    and modification times, so ranks find their cache without reading the corpus."""
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
            f"cannot write the tokens of {len(files)} files to {path}: {error.strerror}; free some space, or set "
            "XDG_CACHE_HOME to another folder"
        ) from error
    return _read_cache(path, len(files))


def _make_cache(path: Path, files: Sequence[Path], tokenizer: Tokenizer) -> None:
    end = time.monotonic() + CACHE_DEADLINE_SECONDS
    with open(path.with_suffix(".lock"), "w") as lock:
        while not path.exists():
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise ValueError(
                        f"another process has held {lock.name} for {CACHE_DEADLINE_SECONDS:.0f} s without writing the "
                        f"tokens of {len(files)} files"
                    ) from None
                time.sleep(0.1)
                continue
            if not path.exists():
                _write_cache(path, files, tokenizer)


def _write_cache(path: Path, files: Sequence[Path], tokenizer: Tokenizer) -> None:
    """Write all ids as int32, then the count per file as int64, under another name until it is complete. The lock's
    owner is the only writer, so it can overwrite the unfinished file of a killed process."""
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
    while group := list(islice(pieces, BATCH_PIECES)):
        encodings = tokenizer.encode_batch_fast([text for _, text in group], add_special_tokens=False)
        for (number, _), encoding in zip(group, encodings, strict=True):
            cache.write(array("i", encoding.ids).tobytes())
            counts[number] += len(encoding.ids)
    cache.write(array("q", counts).tobytes())


def _pieces(files: Sequence[Path]) -> Iterator[tuple[int, str]]:
    for number, file in enumerate(files):
        try:
            with open(file, encoding="utf-8", errors="replace", newline="") as text:
                while lines := text.readlines(PIECE_CHARACTERS):
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
        raise ValueError(f"the tokens in {path} are damaged: delete the file to recreate them")
    starts = accumulate(counts, initial=0)
    documents = (Document(path, start, count) for start, count in zip(starts, counts, strict=False))
    return Stream(tuple(documents), torch.int32)
