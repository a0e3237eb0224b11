"""Documents with facts in a haystack, and questions about them at their end.

A document is a piece of Python's standard library, in bytes. Pairs of tokens in it are replaced by facts, "key value".
Its last tokens ask for each fact in random order: a key, and the value that belongs to it. Values are all that is
learnt, and nothing but the fact itself says which is right. (In short documents every fact is asked for three times,
which makes the first steps of learning faster.)
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

BYTES, KEYS, VALUES = 256, 64, 32  # guessing is right once in 32
VOCABULARY = BYTES + KEYS + VALUES
FACTS = 32  # at most, in a document
_text = b"".join(path.read_bytes() for path in sorted(Path(argparse.__file__).parent.glob("*.py"))[:40])
HAYSTACK = torch.frombuffer(bytearray(_text), dtype=torch.uint8).long()


class Row(NamedTuple):
    """Packed documents (1, tokens). ``depth`` is where the fact stands whose value a token's label is, else -1."""

    ids: Tensor
    labels: Tensor
    positions: Tensor  # which restart in every document
    depth: Tensor


def document(length: int, generator: torch.Generator) -> Row:
    facts = min(FACTS, length // 8)
    questions = 3 * facts if length < 128 else facts
    start = int(torch.randint(len(HAYSTACK) - length, (), generator=generator))
    ids, labels, depth = (
        HAYSTACK[start : start + length].clone(),
        torch.full((length,), -100),
        torch.full((length,), -1),
    )
    keys = BYTES + torch.randperm(KEYS, generator=generator)[:facts]
    values = BYTES + KEYS + torch.randint(VALUES, (facts,), generator=generator)
    places = 2 * torch.randperm(length // 2 - questions, generator=generator)[:facts]
    ids[places], ids[places + 1] = keys, values
    asked = torch.cat([torch.randperm(facts, generator=generator) for _ in range(questions // facts)])
    ids[length - 2 * questions :] = torch.stack([keys[asked], values[asked]], 1).flatten()
    labels[length - 2 * questions + 1 :: 2] = values[asked]
    depth[length - 2 * questions :: 2] = places[asked]  # the token that predicts the value
    return Row(ids, labels, torch.arange(length), depth)


def packed(tokens: int, shortest: int, longest: int, seed: int) -> Row:
    """A row of documents whose lengths are powers of two from ``shortest`` to ``longest``."""
    generator = torch.Generator().manual_seed(seed)
    documents, left = [], tokens
    while left:
        doublings = (min(longest, left) // shortest).bit_length()
        length = shortest * 2 ** int(torch.randint(doublings, (), generator=generator))
        documents.append(document(length, generator))
        left -= length
    return Row(*(torch.cat(parts).unsqueeze(0) for parts in zip(*documents, strict=True)))
