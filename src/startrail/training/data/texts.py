"""Text for a GPT: files as bytes or as a tokenizer's ids. Every rank reads only its part of each sequence.

The tokens of a batch depend only on the arguments and the batch's index, so a run resumes with the next index, on any
number of ranks. Labels are the *next* tokens of the full sequence, shifted before sharding: the successor of a rank's
last token is on another rank.

>>> import pathlib, tempfile
>>> from startrail import SequenceParallel
>>> with tempfile.TemporaryDirectory() as folder:
...     _ = pathlib.Path(folder, "text").write_text("abcdefghijklmnopqrstuvwxyz")
...     sequence = SequenceParallel("1x1").sequence(6)
...     data = TextData(folder, sequence)                      # the last twentieth, "z", is held out
...     [data.decode(data.batch(index).tokens[0]) for index in range(data.num_samples)]
...     data.decode(data.batch(0).labels[0])
['ghijkl', 'abcdef', 'mnopqr', 'stuvwx']
'hijklm'
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch
from torch import Tensor

from startrail.agreement.digest import digest
from startrail.sequence import Sequence
from startrail.training.data.sources import (
    HELD_OUT,
    check_count,
    check_split,
    find_files,
    generator_of,
    held_out,
    names_of,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

IGNORE = -100
ENTROPY_TOKENS = 2**26  # enough for a baseline without delaying the start
READ_TOKENS = 2**20
CACHE_FORMAT = 1
CACHE_DEADLINE_SECONDS = 3600.0  # to wait for another process that tokenizes the same files
PIECE_CHARACTERS = 2**20  # per call of the tokenizer; a longer file is cut after a line
BATCH_PIECES = 8  # pieces that the tokenizer's threads share


@dataclass(frozen=True)
class TextBatch:
    """This rank's part of a batch; ``sequence`` gives positions and attention."""

    tokens: Tensor  # (batch, local tokens) int64; padding is 0
    labels: Tensor  # the same shape; -100 is ignored by the loss
    counted: int  # labels that are not -100: the divisor of the loss
    sequence: Sequence  # with document boundaries, if packed


class TextData:
    """Sequences like ``sequence`` from the files of ``source``: a folder, a file, a glob, or ``"stdlib"``.

    Files are concatenated in the order of their paths, and each window of the sequence's length is one sample; every
    epoch shuffles the windows. With ``packed``, every epoch also shuffles the files, each file is a document, and the
    documents of a window neither attend to nor predict each other: the batch's ``sequence`` has their boundaries. A
    document that crosses the end of a window is cut there. The rest after the last full window is not used in that
    epoch.

    ``split`` is ``"train"`` or ``"held-out"``: about a twentieth, in whole files if possible, otherwise the end of
    every file. ``tokenizer`` is a Hugging Face ``tokenizers`` file (.json); without one, tokens are bytes.
    """

    def __init__(
        self,
        source: str,
        sequence: Sequence,
        *,
        batch: int = 1,
        seed: int = 0,
        packed: bool = False,
        tokenizer: str | None = None,
        split: str = "train",
    ) -> None:
        check_count("batch", batch)
        check_split(split)
        if packed and batch != 1:
            raise ValueError(f"batch {batch} must be 1 with packed documents: every sequence has different boundaries")
        files = find_files(source)
        self._tokenizer: Tokenizer | None = None
        self.vocab, self._unit = 256, "byte"
        if tokenizer is None:
            whole = bytes_of(files)
        else:
            self._tokenizer = load_tokenizer(tokenizer)
            self.vocab, self._unit = 1 + max(self._tokenizer.get_vocab().values()), "token"
            whole = tokens_of(files, tokenizer, self._tokenizer)
        self._stream = split_stream(whole, names_of(files), split)
        self.num_tokens = self._stream.length
        self.num_samples = self.num_tokens // sequence.length
        self._source, self._sequence, self._split = source, sequence, split
        self._batch, self._seed, self._packed = batch, seed, packed
        if self.num_samples == 0:
            raise ValueError(f"a sequence needs {sequence.length:,} tokens, but there are too few: {self._summary()}")
        self._epoch = -1, self._stream, torch.empty(0)

    def batch(self, index: int) -> TextBatch:
        """Batch ``index``, from 0 without limit: after the last sequence the next epoch begins."""
        check_count("index", index, least=0)
        sequence, length = self._sequence, self._sequence.length
        rows = []
        for row in range(self._batch):
            epoch, place = divmod(index * self._batch + row, self.num_samples)
            stream, order = self._epoch_order(epoch)
            start = int(order[place]) * length
            if self._packed:  # one row only
                ends = stream.ends_within(start, start + length - 1)
                sequence = sequence.sp.sequence(length, (0, *(end - start for end in ends), length))
            rows.append(self._read(sequence, stream, start))
        sequence.identify(index)  # each rank reads its own tokens, so nothing is sharded
        tokens, labels = (torch.stack(tensors) for tensors in zip(*rows, strict=True))
        return TextBatch(tokens, labels, int((labels != IGNORE).sum()), sequence)

    def _read(self, sequence: Sequence, stream: Stream, window: int) -> tuple[Tensor, Tensor]:
        """This rank's tokens and labels of the sequence that begins at ``window``."""
        tokens = torch.zeros(sequence.local, dtype=torch.long)
        labels = torch.full_like(tokens, IGNORE)
        filled = 0
        for first, count in sequence.padded_runs:
            if first < sequence.length:
                start, real = window + first, min(count, sequence.length - first)
                read = stream.read(start, min(start + real + 1, self.num_tokens))  # one more for the last label
                tokens[filled : filled + real] = read[:real]
                labels[filled : filled + len(read) - 1] = read[1:]
                if self._packed:
                    for end in stream.ends_within(start, start + real):
                        labels[filled + end - 1 - start] = IGNORE
            filled += count
        return tokens, labels

    def _epoch_order(self, epoch: int) -> tuple[Stream, Tensor]:
        """The stream of an epoch and the order of its windows. Cached: the next batch is almost always in the same
        epoch."""
        if self._epoch[0] != epoch:
            generator, stream = generator_of(self._seed, epoch), self._stream
            if self._packed:
                order = torch.randperm(len(stream.documents), generator=generator).tolist()
                stream = Stream(tuple(stream.documents[number] for number in order), stream.dtype)
            self._epoch = epoch, stream, torch.randperm(self.num_samples, generator=generator)
        return self._epoch[1:]

    def decode(self, tokens: SequenceOf[int] | Tensor) -> str:
        """Convert tokens to text; invalid UTF-8, such as half a character, becomes U+FFFD."""
        ids = [int(token) for token in tokens]
        if invalid := [token for token in ids if not 0 <= token < self.vocab]:
            raise ValueError(f"token {invalid[0]} is not one of 0 to {self.vocab - 1}")
        if self._tokenizer is None:
            return bytes(ids).decode("utf-8", errors="replace")
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def describe(self) -> str:
        """One line: the files, the tokens, and as a baseline the unigram entropy. Reads up to 67 million tokens: call
        it once, on one rank."""
        counts = torch.zeros(self.vocab, dtype=torch.long)
        counted = min(self.num_tokens, ENTROPY_TOKENS)
        for start in range(0, counted, READ_TOKENS):
            counts += self._stream.read(start, min(start + READ_TOKENS, counted)).bincount(minlength=self.vocab)
        share = counts[counts > 0].double() / counted
        entropy = -(share * share.log()).sum().item()
        of = "" if counted == self.num_tokens else f" (of the first {counted:,})"
        return f"{self._summary()}, unigram entropy {entropy:.3f} nats/{self._unit}{of}"

    def digest(self) -> int:
        """A hash of some tokens at 16 places."""
        distance = -(-self.num_tokens // 16)
        starts = range(0, self.num_tokens, distance)
        parts = [self._stream.read(start, min(start + min(distance, 4096), self.num_tokens)) for start in starts]
        return int(digest(torch.cat(parts)))

    def _summary(self) -> str:
        files = len({(document.path, document.start) for document in self._stream.documents})
        return f"{self._source}, {self._split}: {files:,} files, {self.num_tokens:,} {self._unit}s"


# --- tokens in files


@dataclass(frozen=True)
class Document:
    """``count`` tokens of the file ``path``, from token ``start`` on."""

    path: Path
    start: int
    count: int


@dataclass(frozen=True)
class Stream:
    """Documents one after the other; ``dtype`` is the type of a token in their files."""

    documents: tuple[Document, ...]
    dtype: torch.dtype

    @cached_property
    def ends(self) -> list[int]:
        """The end of each document."""
        return list(accumulate(document.count for document in self.documents))

    @property
    def length(self) -> int:
        return self.ends[-1] if self.ends else 0

    def ends_within(self, start: int, stop: int) -> list[int]:
        """The document ends in (start, stop]."""
        return self.ends[bisect_right(self.ends, start) : bisect_right(self.ends, stop)]

    def read(self, start: int, stop: int) -> Tensor:
        """The tokens in [start, stop); nothing else is read from disk."""
        parts = [torch.empty(0, dtype=torch.long)]
        number = bisect_right(self.ends, start)
        while start < stop:
            document = self.documents[number]
            first = start - (self.ends[number] - document.count)
            count = min(document.count - first, stop - start)
            parts.append(_read(document.path, document.start + first, count, self.dtype))
            start, number = start + count, number + 1
        return torch.cat(parts)


def _read(path: Path, start: int, count: int, dtype: torch.dtype) -> Tensor:
    first, last = start * dtype.itemsize, (start + count) * dtype.itemsize
    try:
        with open(path, "rb") as file:
            file.seek(first)
            contents = bytearray(file.read(last - first))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    if first + len(contents) < last:
        raise ValueError(f"{path} has changed: it has {path.stat().st_size} bytes, expected at least {last}")
    return torch.frombuffer(contents, dtype=dtype).long()


def bytes_of(files: SequenceOf[Path]) -> Stream:
    """A stream with one document per file and one token per byte."""
    return Stream(tuple(Document(file, 0, file.stat().st_size) for file in files), torch.uint8)


def split_stream(stream: Stream, names: SequenceOf[str], split: str) -> Stream:
    """The documents of a split: whole files, or parts of every file if files are too large for that. Empty documents
    are dropped."""
    chosen = held_out(names, [document.count for document in stream.documents])
    taken = []
    for number, whole in enumerate(stream.documents):
        held = (whole.count if number in chosen else 0) if chosen else whole.count // HELD_OUT
        border = whole.count - held
        start, stop = (0, border) if split == "train" else (border, whole.count)
        if start < stop:
            taken.append(Document(whole.path, whole.start + start, stop - start))
    return Stream(tuple(taken), stream.dtype)


# --- a tokenizer's ids, in a cache


def load_tokenizer(path: str) -> Tokenizer:
    """Load a Hugging Face ``tokenizers`` file and disable the truncation and padding that it may ask for."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError(f"tokenizer {path!r} needs the package tokenizers: pip install 'startrail[text]'") from None
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the library raises no other type
        raise ValueError(f"tokenizer {path!r} cannot be loaded: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if not tokenizer.get_vocab():
        raise ValueError(f"tokenizer {path!r} has no tokens")
    return tokenizer


def tokens_of(files: SequenceOf[Path], tokenizer_path: str, tokenizer: Tokenizer) -> Stream:
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


def _make_cache(path: Path, files: SequenceOf[Path], tokenizer: Tokenizer) -> None:
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


def _write_cache(path: Path, files: SequenceOf[Path], tokenizer: Tokenizer) -> None:
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


def _encode(files: SequenceOf[Path], tokenizer: Tokenizer, cache: BinaryIO) -> None:
    counts = [0] * len(files)
    pieces = _pieces(files)
    while group := list(islice(pieces, BATCH_PIECES)):
        encodings = tokenizer.encode_batch_fast([text for _, text in group], add_special_tokens=False)
        for (number, _), encoding in zip(group, encodings, strict=True):
            cache.write(array("i", encoding.ids).tobytes())
            counts[number] += len(encoding.ids)
    cache.write(array("q", counts).tobytes())


def _pieces(files: SequenceOf[Path]) -> Iterator[tuple[int, str]]:
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
