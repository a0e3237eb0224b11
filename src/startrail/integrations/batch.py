"""An ordinary or packed batch, which every rank has whole, as this rank's keyword arguments for a language model.

Rows with padding, or with other documents than their neighbours, are laid one behind the other as documents of one
sequence: nothing is padded, nobody sees another row, and every token keeps the position that it had.

Of padding on the left, one process learns too: the last padding token sees nothing at all, but what it says is
compared with the row's first token, if that has a label. So it stays, as a document of its own that is *blind*: its
attention gives zero, as transformers' does.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from startrail.integrations.versions import CHUNKS_FOLLOW_POSITIONS
from startrail.parallel import SequenceParallel
from startrail.sequence import Sequence

IGNORE = -100
FLASH = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")  # what flash-attn would be told


@dataclass(frozen=True)
class Shared:
    """What all layers share about a batch. ``places``: the number of each token that chunks count by, if it is not its
    number in the sequence: where rows were joined, or where transformers counts from each document. ``blind``: which of
    this rank's tokens are padding that sees nothing."""

    sequence: Sequence
    places: Tensor | None
    blind: Tensor | None = None
    by_chunk: dict[int, Sequence] = field(default_factory=dict)

    def chunked(self, chunk: int | None) -> tuple[Sequence, int | None]:
        """What a layer with this ``chunk`` attends over. Chunks count from a row's beginning: of joined rows, each
        becomes a document."""
        if chunk is None or self.places is None:
            return self.sequence, chunk
        if chunk not in self.by_chunk:
            starts = torch.zeros_like(self.places, dtype=torch.bool)
            starts[1:] = (self.places // chunk).diff() != 0
            starts[self.sequence.documents[:-1].to(starts.device)] = True
            self.by_chunk[chunk] = self.sequence.packed(_ends(starts))
        return self.by_chunk[chunk], None


def shard_batch(
    sp: SequenceParallel,
    input_ids: Tensor,
    labels: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    shift_labels: Tensor | None = None,
    documents: Tensor | SequenceOf[int] | None = None,
    blocks: Tensor | SequenceOf[tuple[int, int]] | None = None,
    num_items_in_batch: Tensor | int | None = None,
    **others: Any,
) -> dict[str, Any]:
    """Keyword arguments for a model that ``attach`` has prepared: the *sum* over ranks of ``model(**these).loss`` is
    the loss of one process with the whole batch, and the sum over ranks of the gradients are its gradients.

    Every rank gives the same batch: ``input_ids`` (batch, tokens) and ``labels`` as for one process, not shifted (or
    ``shift_labels``), ``attention_mask`` of ones and zeros, ``position_ids`` (batch, tokens) or (3, batch, tokens).
    Documents are told apart by positions that do not go on by one, where there is no attention mask, as transformers
    does it; or by ``documents`` (or cu_seq_lens_q), cu_seqlens of every row. Padding is cut away, on either side.
    ``num_items_in_batch`` is the number of labels of all that counts as one batch, where that is more than this one:
    with gradient accumulation or data parallelism.

    >>> sp = SequenceParallel("1x1")
    >>> ids, labels, mask = torch.tensor([[[5, 6, 7, 0]], [[5, 6, 7, -100]], [[1, 1, 1, 0]]])
    >>> batch = shard_batch(sp, ids, labels, mask)
    >>> batch["input_ids"].tolist(), batch["shift_labels"].tolist(), batch["num_items_in_batch"].item()
    ([[5, 6, 7]], [[6, 7, -100]], 2)
    """
    _check(input_ids, labels, attention_mask, position_ids, shift_labels)
    batch, length = input_ids.shape
    flash = {name: others.pop(name) for name in FLASH if name in others}
    if documents is None and batch == 1:
        documents = flash.get("cu_seq_lens_q")
    if shift_labels is None and labels is not None:
        shift_labels = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
    positions = torch.arange(length, device=input_ids.device) if position_ids is None else position_ids
    positions = positions.expand(*positions.shape[:-2], batch, length)
    starts = _document_starts(positions, attention_mask, documents is not None)
    real = torch.ones_like(starts) if attention_mask is None else attention_mask.bool()
    tensors = {"input_ids": input_ids, "shift_labels": shift_labels, **_by_token(others, batch, length)}
    follow = CHUNKS_FOLLOW_POSITIONS and bool(starts.any())
    index = _text_axis(positions) if follow else torch.arange(length, device=real.device) - real.int().argmax(1, True)
    places = index[0] if follow else None
    blind = None
    if not bool(real.all()) or bool((starts != starts[:1]).any()) or bool((index != index[:1]).any()):
        if documents is not None or blocks is not None:
            raise ValueError("documents or blocks beside rows of different lengths: give one row, without padding")
        blind = _blind(real, shift_labels)
        kept = (real | blind).flatten().nonzero().squeeze(1)
        starts = F.pad(starts[:, 1:] | blind[:, :-1], (1, 0), value=True) | blind  # a row is a document, or several
        documents = _ends(_first_kept(starts, real | blind).flatten()[kept])
        tensors = {name: None if x is None else x.flatten(0, 1)[kept].unsqueeze(0) for name, x in tensors.items()}
        positions = positions.flatten(-2)[..., kept].unsqueeze(-2)
        places = index.flatten()[kept]
        blind = blind.flatten()[kept] if bool(blind.any()) else None
    elif documents is None:
        documents = _ends(starts[0])
    sequence = sp.sequence(positions.shape[-1], documents, blocks)
    made: dict[str, Any] = {
        name: sequence.shard(x, 1, IGNORE if name == "shift_labels" else 0)
        for name, x in tensors.items()
        if x is not None
    }
    made["position_ids"] = sequence.shard(positions, -1)
    # Of ones: padding is gone. It keeps models from taking the positions of a shard for those of packed documents.
    made["attention_mask"] = torch.ones_like(made["input_ids"])
    if tensors["shift_labels"] is not None:
        made["labels"] = made["shift_labels"]
        count = (tensors["shift_labels"] != IGNORE).sum()
        made["num_items_in_batch"] = count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    plain = {name: x for name, x in others.items() if name not in made}
    blind = None if blind is None else sequence.shard(blind, 0)
    return {**plain, **made, "use_cache": False, "startrail": Shared(sequence, places, blind)}


def count_labels(labels: Tensor, shift_labels: Tensor | None = None) -> int:
    """How many labels of a batch are learnt from, as ``shard_batch`` counts them."""
    shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORE) if shift_labels is None else shift_labels
    return int((shifted != IGNORE).sum())


def _check(input_ids: object, labels: object, mask: object, positions: object, shifted: object) -> None:
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.is_floating_point():
        shown = tuple(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise ValueError(f"input_ids must be a tensor (batch, tokens) of whole numbers, got {shown}")
    for name, x in (("labels", labels), ("attention_mask", mask), ("shift_labels", shifted)):
        if x is not None and (not isinstance(x, Tensor) or x.shape != input_ids.shape):
            shown = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must have the shape of input_ids, {tuple(input_ids.shape)}, got {shown}")
    if isinstance(mask, Tensor) and not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("attention_mask must be ones and zeros (packed documents are told by position_ids)")
    if isinstance(mask, Tensor) and not bool(mask.bool().any()):
        raise ValueError("attention_mask has no token that counts")
    if isinstance(mask, Tensor) and isinstance(labels, Tensor) and bool(((labels != IGNORE) & (mask == 0)).any()):
        row, token = ((labels != IGNORE) & (mask == 0)).nonzero()[0].tolist()
        raise ValueError(
            f"labels of padding must be {IGNORE}, or padding is learnt: row {row}, token {token} has attention_mask 0 "
            f"and label {labels[row, token].item()}"
        )
    if positions is not None and (
        not isinstance(positions, Tensor)
        or positions.dim() not in (2, 3)
        or positions.shape[-2:] not in (input_ids.shape, (1, input_ids.shape[1]))
    ):
        shown = tuple(positions.shape) if isinstance(positions, Tensor) else type(positions).__name__
        raise ValueError(f"position_ids must be (batch, tokens) or (n, batch, tokens), got {shown}")


def _by_token(others: dict[str, Any], batch: int, length: int) -> dict[str, Tensor]:
    """Further tensors with something for each token; ``ValueError`` names one that cannot be cut."""
    found = {}
    for name, x in others.items():
        if isinstance(x, Tensor) and x.dim() >= 2 and x.shape[:2] == (batch, length):
            found[name] = x
        elif not isinstance(x, bool | int | float | str | None):
            shown = f"of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise ValueError(
                f"{name}, {shown}, is not (batch {batch}, tokens {length}, ...): it cannot be cut by tokens"
            )
    return found


def _document_starts(positions: Tensor, mask: Tensor | None, told: bool) -> Tensor:
    """(batch, tokens) where a document begins inside a row, by positions that do not go on by one. Of several axes,
    such as an image's, the first goes on or stays inside a document, and documents must be ``told``; of four, it is
    the text's own."""
    several = positions.dim() == 3 and positions.shape[0] in (2, 3)
    steps = _text_axis(positions).diff(dim=1)
    starts = F.pad(steps < 0 if several else steps != 1, (1, 0))
    if mask is not None:
        starts &= F.pad(mask.bool()[:, 1:] & mask.bool()[:, :-1], (1, 0))
    if (several and told) or not bool(starts.any()):
        return torch.zeros_like(starts)
    if mask is not None:
        raise ValueError(
            "position_ids begin anew inside a row, but there is an attention_mask: one process would let the documents "
            "see each other; leave the attention_mask out"
        )
    if several:
        row, token = starts.nonzero()[0].tolist()
        raise ValueError(
            f"position_ids of {len(positions)} axes go back in row {row} at token {token}, but do not say whether a "
            "document begins there: give documents= (cu_seqlens)"
        )
    return starts


def _text_axis(positions: Tensor) -> Tensor:
    """(batch, tokens) of positions with any number of axes: the first is the text's."""
    return positions if positions.dim() == 2 else positions[0]


def _blind(real: Tensor, shift_labels: Tensor | None) -> Tensor:
    """(batch, tokens) padding on the left that the next token is learnt from."""
    if shift_labels is None:
        return torch.zeros_like(real)
    learnt = ~real & (shift_labels != IGNORE)
    inside = learnt & (real.cumsum(1) > 0)
    if bool(inside.any()):
        row, token = inside.nonzero()[0].tolist()
        raise ValueError(
            f"row {row}, token {token + 1} would be learnt from padding behind other tokens: only padding on the left "
            f"may come before a label, set it to {IGNORE}"
        )
    return learnt


def _first_kept(starts: Tensor, keep: Tensor) -> Tensor:
    """Starts moved on to the next token that is kept."""
    number = starts.cumsum(1)
    before = F.pad((number * keep).cummax(1).values[:, :-1], (1, 0), value=0)
    return keep & (number > before)


def _ends(starts: Tensor) -> list[int]:
    """cu_seqlens from where documents begin."""
    return [0, *(starts[1:].nonzero().squeeze(1) + 1).tolist(), len(starts)] if len(starts) > 1 else [0, 1]
