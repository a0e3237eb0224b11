"""The documents to plan for: a distribution's name, or lengths that are repeated and cut to fill a sequence."""

from __future__ import annotations

from functools import lru_cache
from itertools import cycle, islice, pairwise
from pathlib import Path

from startrail.geometry.distributions import DISTRIBUTIONS, document_lengths
from startrail.planner.units import MAX_COUNT, short_repr

MAX_DIGITS = len(str(MAX_COUNT))
MAX_DOCUMENTS = 10_000  # of one sequence
MAX_FILE_BYTES = 64 * 2**20
Documents = str | tuple[int, ...]  # a distribution, or lengths


def read_documents(text: object, where: str) -> Documents:
    """A distribution's name or a list of lengths as it is, or the lengths in a file: whole numbers, separated by spaces
    or lines."""
    if isinstance(text, list | tuple):
        return tuple(text)
    if not isinstance(text, str):
        raise ValueError(f"{where}: documents = {short_repr(text)} is not a distribution, a file or a list of lengths")
    if text in DISTRIBUTIONS:
        return text
    path = Path(text)
    names = ", ".join(DISTRIBUTIONS)
    if not path.is_file():
        raise ValueError(f"documents {short_repr(text)}: no such file, and not one of {names}")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{text}: more than {MAX_FILE_BYTES // 2**20} MiB; a sample of the lengths is enough")
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{text}: cannot be read as text: {error}") from None
    lengths = [_length(word, f"{text}:{number}") for number, line in enumerate(lines, 1) for word in line.split()]
    if not lengths:
        raise ValueError(f"{text}: no document lengths found")
    return tuple(lengths)


def _length(word: str, where: str) -> int:
    if len(word) <= MAX_DIGITS and word.isascii() and word.isdecimal() and 1 <= int(word) <= MAX_COUNT:
        return int(word)
    raise ValueError(f"{where}: {short_repr(word)} is not a document's length, a whole number from 1 to {MAX_COUNT}")


def check_documents(documents: object) -> None:
    if isinstance(documents, str) and documents in DISTRIBUTIONS:
        return
    if not isinstance(documents, tuple):
        raise ValueError(f"documents = {short_repr(documents)} is not one of {', '.join(DISTRIBUTIONS)}, or lengths")
    for tokens in documents:
        if isinstance(tokens, bool) or not isinstance(tokens, int) or not 1 <= tokens <= MAX_COUNT:
            raise ValueError(f"documents: {short_repr(tokens)} is not a length, a whole number from 1 to {MAX_COUNT}")


@lru_cache(maxsize=16)
def document_ends(documents: Documents, length: int) -> tuple[int, ...]:
    """cu_seqlens of a sequence filled with these documents; () without documents. Raises ``ValueError`` for more than
    can be planned for.

    >>> document_ends((3, 4), 12)
    (0, 3, 7, 10, 12)
    """
    if not documents:
        return ()
    lengths = document_lengths(documents, length) if isinstance(documents, str) else cycle(documents)
    ends = [0]
    for tokens in islice(lengths, MAX_DOCUMENTS):
        ends.append(min(ends[-1] + tokens, length))
        if ends[-1] == length:
            return tuple(ends)
    raise ValueError(f"{length} tokens hold more than {MAX_DOCUMENTS} of these documents, too many to plan for")


def describe_documents(documents: Documents, length: int) -> str:
    """The documents of a sequence in words.

    >>> describe_documents((3, 4), 12)
    '4 documents of 2 to 4 tokens (the given lengths, repeated)'
    """
    ends = document_ends(documents, length)
    lengths = [stop - start for start, stop in pairwise(ends)]
    if isinstance(documents, str):
        source = f"drawn from {documents}"
    else:
        source = "the given lengths, repeated" if sum(documents) < length else "the given lengths"
    return f"{len(lengths):,} documents of {min(lengths):,} to {max(lengths):,} tokens ({source})"
