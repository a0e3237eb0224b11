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

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from startrail.agreement.digest import digest
from startrail.sequence import Sequence
from startrail.training.data.seeds import generator_of
from startrail.training.data.sources import check_count, check_split, find_files, names_of
from startrail.training.data.streams import Stream, bytes_of, split_stream
from startrail.training.data.tokenizing import load_tokenizer, tokens_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

IGNORE = -100
ENTROPY_TOKENS = 2**26  # enough for a baseline without delaying the start
READ_TOKENS = 2**20


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
