"""Turns an ordinary, padded or packed batch, the same on all ranks, into this rank's arguments for a language model.

Rows with padding, or with different documents, are joined into one sequence with one document per row. This removes the
padding, keeps rows from seeing each other, and keeps the position of every token.

With padding on the left, one token of padding can matter: the model's output at the last padding token is trained to
predict the row's first token if that has a label. This token sees no keys. It is kept as a document of its own, whose
attention output is set to zero, as transformers does for fully masked rows.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from startrail.integrations.versions import CHUNKS_FOLLOW_POSITIONS
from startrail.parallel import SequenceParallel
from startrail.sequence import Sequence

IGNORE = -100  # the label of tokens that are not learnt
IMAGES = ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "mm_encoder_outputs")
TOKEN_TYPES = "token_type_ids"  # 1 for the tokens of images (Gemma 3)
FLASH_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")  # for flash-attn


class Whole(NamedTuple):
    """A batch that reaches the model whole, because images are embedded first. ``kept``: the tokens of all rows that
    form the sequence, if rows are joined. ``own``: the places of this rank's tokens in it, -1 for padding.
    ``positions`` (batch, tokens) are those without the images' axes."""

    kept: Tensor | None
    own: Tensor
    positions: Tensor


@dataclass(eq=False)
class BatchContext:
    """What all layers share about a batch. ``ones``: the attention mask of this rank's tokens, all ones except for
    padding of its shard. ``chunk_positions``: the position of each token that chunks are counted by,
    if not its index in the sequence. ``fully_masked``: True for those of this rank's tokens that are padding and see no
    keys. ``whole``: set if only the language model's inputs are split. ``has_positions``: the batch came with
    positions. ``unpadded_positions``: those of this rank's tokens counted from each row's first token, if the batch
    came without positions and has padding on the left."""

    sequence: Sequence
    ones: Tensor
    chunk_positions: Tensor | None
    fully_masked: Tensor | None = None
    whole: Whole | None = None
    has_positions: bool = True
    unpadded_positions: Tensor | None = None
    _by_chunk: dict[int, Sequence] = field(default_factory=dict)

    def split(self, x: Tensor, dim: int, pad_value: float = 0) -> Tensor:
        """This rank's tokens of a whole batch's tensor. Rows come before tokens, ``dim``. Ranks do not compare what
        they split: a GPU may compute an image's features differently in the last bit."""
        assert self.whole is not None
        x, own = _joined(x, self.whole.kept, dim), self.whole.own
        dim %= x.dim()
        padding = (own < 0).view(-1, *(1,) * (x.dim() - dim - 1))
        return x.index_select(dim, own.clamp(min=0)).masked_fill(padding, pad_value)

    def counted(self) -> Tensor:
        """1 for those of this rank's tokens over which routers' losses and z losses are means, else 0."""
        return self.ones if self.fully_masked is None else self.ones * ~self.fully_masked

    def check_blocks(self, inside: Tensor) -> None:
        """Raise ``ValueError`` unless the blocks are the runs of ``inside`` (batch, tokens), by which the model would
        mask."""
        if self.whole is None:  # ``inside`` is about this rank's tokens only
            if bool(inside.any()):
                raise ValueError(f"{TOKEN_TYPES} without images: leave them out, and pass blocks= to shard_batch")
            return
        expected = _runs(_joined(inside, self.whole.kept, 1)[0], self.sequence.documents)
        if list(self.sequence.blocks) != expected:
            shown, ours = (", ".join(map(str, blocks)) or "no blocks" for blocks in (expected, self.sequence.blocks))
            raise ValueError(
                f"the model's images are the blocks {shown}, but the batch has {ours}: pass {TOKEN_TYPES}= to "
                "shard_batch, and no blocks"
            )

    def sequence_for(self, chunk: int | None) -> tuple[Sequence, int | None]:
        """The sequence and the chunk size for a layer with this ``chunk``. Where chunks are counted by
        ``chunk_positions``, each becomes a document."""
        if chunk is None or self.chunk_positions is None:
            return self.sequence, chunk
        if chunk not in self._by_chunk:
            starts = torch.zeros_like(self.chunk_positions, dtype=torch.bool)
            starts[1:] = (self.chunk_positions // chunk).diff() != 0
            starts[self.sequence.documents[:-1].to(starts.device)] = True
            self._by_chunk[chunk] = self.sequence.packed(_cu_seqlens(starts))
        return self._by_chunk[chunk], None


def shard_batch(
    sp: SequenceParallel,
    input_ids: Tensor | None = None,
    labels: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    inputs_embeds: Tensor | None = None,
    shift_labels: Tensor | None = None,
    documents: Tensor | SequenceOf[int] | None = None,
    blocks: Tensor | SequenceOf[tuple[int, int]] | None = None,
    num_items_in_batch: Tensor | int | None = None,
    **others: Any,
) -> dict[str, Any]:
    """Keyword arguments for a model prepared by ``attach``. The *sum* over ranks of ``model(**arguments).loss`` is the
    loss of one process on the whole batch, and the sum over ranks of the gradients is its gradient.

    Every rank passes the same batch: ``input_ids`` (batch, tokens) or ``inputs_embeds`` (batch, tokens, width),
    ``labels`` as for one process, not shifted (or ``shift_labels``), ``attention_mask`` of ones and zeros,
    ``position_ids`` (batch, tokens) or (3, batch, tokens).
    As in transformers, without an attention mask a document begins wherever positions do not increase by one. You can
    also pass ``documents`` (or cu_seq_lens_q), the cu_seqlens of every row. Padding is removed on both sides.
    ``num_items_in_batch`` is the number of labels that the loss is divided by. Pass it if that is more than the labels
    of this batch: with gradient accumulation or data parallelism. A step without labels has loss 0, and no gradients.

    A batch with images (``pixel_values`` and the like) reaches the model whole, except for its labels: images are
    embedded on every rank, and the language model's inputs are split. ``token_type_ids`` of 1, as Gemma 3's processor
    makes them, become ``blocks``: the tokens of an image see each other.

    >>> sp = SequenceParallel("1x1")
    >>> ids, labels, mask = torch.tensor([[[5, 6, 7, 0]], [[5, 6, 7, -100]], [[1, 1, 1, 0]]])
    >>> batch = shard_batch(sp, ids, labels, mask)
    >>> batch["input_ids"].tolist(), batch["shift_labels"].tolist(), batch["num_items_in_batch"].item()
    ([[5, 6, 7]], [[6, 7, -100]], 2)
    """
    given = _check_tensors(input_ids, inputs_embeds, labels, attention_mask, position_ids, shift_labels)
    batch, length = given.shape[:2]
    flash = {name: others.pop(name) for name in FLASH_ARGUMENTS if name in others}
    if documents is None and batch == 1:
        documents = flash.get("cu_seq_lens_q")
    if shift_labels is None and labels is not None:
        shift_labels = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
    has_images = any(others.get(name) is not None for name in IMAGES)
    positions = torch.arange(length, device=given.device) if position_ids is None else position_ids
    positions = positions.expand(*positions.shape[:-2], batch, length)
    starts = _document_starts(positions, attention_mask, documents is not None)
    real = torch.ones_like(starts) if attention_mask is None else attention_mask.bool()
    tensors = {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
    tensors = {} if has_images else {**tensors, **_per_token(others, batch, length)}
    tensors["shift_labels"] = shift_labels
    by_position = CHUNKS_FOLLOW_POSITIONS and bool(starts.any())
    row_index = torch.arange(length, device=real.device) - real.int().argmax(1, keepdim=True)
    counted = _text_axis(positions) if by_position else row_index
    images = _image_tokens(others, blocks) if has_images else None
    kept = masked = None
    chunk_positions = counted[0] if by_position else None
    if not bool(real.all()) or any(bool((x != x[:1]).any()) for x in (starts, counted, images) if x is not None):
        if documents is not None or blocks is not None:
            raise ValueError(
                "documents and blocks need rows with the same documents and positions, and no padding: pass one row"
            )
        documents, kept, masked = _join_rows(starts, real, shift_labels)
        tensors = {name: None if x is None else _joined(x, kept, 1) for name, x in tensors.items()}
        chunk_positions = counted.flatten()[kept]
    elif documents is None:
        documents = _cu_seqlens(starts[0])
    if images is not None:
        blocks = _runs(_joined(images, kept, 1)[0], documents)
    sequence = _checked(sp.sequence(length if kept is None else len(kept), documents, blocks))
    arguments: dict[str, Any] = {
        name: sequence.shard(x, 1, IGNORE if name == "shift_labels" else 0)
        for name, x in tensors.items()
        if x is not None
    }
    # Ones, except for padding of a shard: it is only counted, by trainers and routers. Without it, models would take
    # a shard's positions for packed documents.
    rows = batch if kept is None else 1
    ones = sequence.shard(torch.ones(rows, sequence.length, dtype=torch.long, device=given.device), 1)
    whole = None
    if has_images:
        given_whole = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "position_ids": position_ids}
        whole, more = _whole_batch(sequence, kept, positions, attention_mask=real.long(), **given_whole)
        arguments |= more
    else:
        arguments |= {"attention_mask": ones, "position_ids": sequence.shard(_joined(positions, kept, -1), -1)}
    if tensors["shift_labels"] is not None:
        arguments["labels"] = arguments["shift_labels"]
        items = (tensors["shift_labels"] != IGNORE).sum() if num_items_in_batch is None else num_items_in_batch
        arguments["num_items_in_batch"] = torch.as_tensor(items).clamp(min=1)  # 0 / 0 would make all gradients NaN
    masked = None if masked is None else sequence.shard(masked, 0)
    unpadded = None
    if position_ids is None and not bool(real[:, 0].all()):
        unpadded = sequence.shard(_joined(row_index, kept, -1), -1)
    context = BatchContext(sequence, ones, chunk_positions, masked, whole, position_ids is not None, unpadded)
    return {**others, **arguments, "startrail": context}


def _checked(sequence: Sequence) -> Sequence:
    """Models of transformers cannot run on no tokens. Only unequal shares give a rank none."""
    if 0 in (counts := sequence._layout.counts):
        raise ValueError(
            f"{sequence.length} tokens leave none for rank {counts.index(0)}, of shares {sequence.sp.shares}: models "
            "need one on every rank"
        )
    return sequence


def _join_rows(starts: Tensor, real: Tensor, shift_labels: Tensor | None) -> tuple[list[int], Tensor, Tensor | None]:
    """Rows as one sequence, each at least one document: its cu_seqlens; the tokens that are kept, ``real`` ones and
    padding with labels; and which of them are such padding, which sees no keys, if there is any."""
    masked = _learnt_padding(real, shift_labels)
    kept = (real | masked).flatten().nonzero().squeeze(1)
    starts = F.pad(starts[:, 1:] | masked[:, :-1], (1, 0), value=True) | masked
    documents = _cu_seqlens(_move_to_kept(starts, real | masked).flatten()[kept])
    return documents, kept, masked.flatten()[kept] if bool(masked.any()) else None


def _whole_batch(
    sequence: Sequence, kept: Tensor | None, positions: Tensor, **given: Tensor | None
) -> tuple[Whole, dict[str, Tensor]]:
    """What a batch with images needs to be split later, and the ``given`` arguments, which reach the model whole."""
    own = sequence.shard(torch.arange(sequence.length, device=positions.device), 0, -1)
    arguments = {name: x for name, x in given.items() if x is not None}
    return Whole(kept, own, _text_axis(positions)), arguments


def _joined(x: Tensor, kept: Tensor | None, dim: int) -> Tensor:
    """The rows of ``x`` as one, without padding: (..., batch, tokens, ...), tokens in dimension ``dim``."""
    if kept is None:
        return x
    dim %= x.dim()
    return x.flatten(dim - 1, dim).index_select(dim - 1, kept).unsqueeze(dim - 1)


def _image_tokens(others: dict[str, Any], blocks: object) -> Tensor | None:
    """(batch, tokens) True for tokens of images that see each other, if the batch says so and no blocks are given."""
    types = others.get(TOKEN_TYPES)
    return None if types is None or blocks is not None else types == 1


def _runs(inside: Tensor, documents: Tensor | SequenceOf[int]) -> list[tuple[int, int]]:
    """Runs (start, stop) of True, which end where documents do."""
    before = F.pad(inside[:-1], (1, 0))
    cuts = torch.zeros_like(inside)
    cuts[torch.as_tensor(documents, device=inside.device)[:-1].long()] = True
    starts, after = inside & (~before | cuts), F.pad(inside[1:] & ~cuts[1:], (0, 1))
    stops = (inside & ~after).nonzero().squeeze(1) + 1
    return list(zip(starts.nonzero().squeeze(1).tolist(), stops.tolist(), strict=True))


def count_labels(labels: Tensor, shift_labels: Tensor | None = None) -> int:
    """The number of labels in a batch, as ``shard_batch`` counts them."""
    shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORE) if shift_labels is None else shift_labels
    return int((shifted != IGNORE).sum())


def _check_tensors(
    input_ids: object, embeds: object, labels: object, mask: object, positions: object, shifted: object
) -> Tensor:
    """The ids or the embeddings, of which there must be one."""
    if (input_ids is None) == (embeds is None):
        raise ValueError(f"pass input_ids or inputs_embeds, {'not both' if embeds is not None else 'got neither'}")
    given = embeds if input_ids is None else input_ids
    if input_ids is None and (not isinstance(embeds, Tensor) or embeds.dim() != 3 or not embeds.is_floating_point()):
        raise ValueError(f"inputs_embeds must be floats (batch, tokens, width), got {_shape_text(embeds)}")
    if not isinstance(given, Tensor) or (embeds is None and (given.dim() != 2 or given.is_floating_point())):
        raise ValueError(f"input_ids must be an integer tensor (batch, tokens), got {_shape_text(input_ids)}")
    shape = given.shape[:2]
    for name, x in (("labels", labels), ("attention_mask", mask), ("shift_labels", shifted)):
        if x is not None and (not isinstance(x, Tensor) or x.shape != shape):
            raise ValueError(f"{name} must be (batch, tokens) like the input, {tuple(shape)}, got {_shape_text(x)}")
    if isinstance(mask, Tensor) and not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("attention_mask must consist of ones and zeros (use position_ids for packed documents)")
    if isinstance(mask, Tensor) and not bool(mask.bool().any()):
        raise ValueError("attention_mask is zero everywhere: the batch is only padding")
    if isinstance(mask, Tensor) and isinstance(labels, Tensor) and bool(((labels != IGNORE) & (mask == 0)).any()):
        row, token = ((labels != IGNORE) & (mask == 0)).nonzero()[0].tolist()
        raise ValueError(
            f"labels of padding must be {IGNORE}, or padding is learnt: row {row}, token {token} has attention_mask 0 "
            f"and label {labels[row, token].item()}"
        )
    if positions is not None and (
        not isinstance(positions, Tensor)
        or positions.dim() not in (2, 3)
        or positions.shape[-2:] not in (shape, (1, shape[1]))
    ):
        raise ValueError(f"position_ids must be (batch, tokens) or (n, batch, tokens), got {_shape_text(positions)}")
    return given


def _shape_text(x: object) -> str:
    return str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__


def _per_token(others: dict[str, Any], batch: int, length: int) -> dict[str, Tensor]:
    """The other arguments that have one entry per token. Raises ``ValueError`` for one that cannot be sharded."""
    tensors = {}
    for name, x in others.items():
        if isinstance(x, Tensor) and x.dim() >= 2 and x.shape[:2] == (batch, length):
            tensors[name] = x
        elif not isinstance(x, bool | int | float | str | None):
            raise ValueError(
                f"{name} cannot be sharded by tokens: it is {_shape_text(x)}, not (batch {batch}, tokens {length}, ...)"
            )
    return tensors


def _document_starts(positions: Tensor, mask: Tensor | None, has_documents: bool) -> Tensor:
    """(batch, tokens) where a document begins inside a row: where positions do not increase by one. With two or three
    axes, such as an image's, the first axis grows or stays inside a document, so documents must be passed. With four,
    the first is the text's."""
    several = positions.dim() == 3 and positions.shape[0] in (2, 3)
    steps = _text_axis(positions).diff(dim=1)
    starts = F.pad(steps < 0 if several else steps != 1, (1, 0))
    if mask is not None:
        starts &= F.pad(mask.bool()[:, 1:] & mask.bool()[:, :-1], (1, 0))
    if (several and has_documents) or not bool(starts.any()):
        return torch.zeros_like(starts)
    if mask is not None:
        raise ValueError(
            "position_ids restart inside a row, but there is an attention_mask, with which one process lets the "
            "documents see each other: leave the attention_mask out"
        )
    if several:
        row, token = starts.nonzero()[0].tolist()
        raise ValueError(
            f"position_ids with {len(positions)} axes decrease in row {row} at token {token}, which may or may not "
            "begin a document: pass documents= (cu_seqlens)"
        )
    return starts


def _text_axis(positions: Tensor) -> Tensor:
    """The positions (batch, tokens) of the text."""
    return positions if positions.dim() == 2 else positions[0]


def _learnt_padding(real: Tensor, shift_labels: Tensor | None) -> Tensor:
    """(batch, tokens) padding on the left whose next token has a label."""
    if shift_labels is None:
        return torch.zeros_like(real)
    learnt = ~real & (shift_labels != IGNORE)
    inside = learnt & (real.cumsum(1) > 0)
    if bool(inside.any()):
        row, token = inside.nonzero()[0].tolist()
        raise ValueError(
            f"row {row}, token {token + 1} has a label, but comes after padding inside the row: only padding on the "
            f"left may come before a label, set it to {IGNORE}"
        )
    return learnt


def _move_to_kept(starts: Tensor, kept: Tensor) -> Tensor:
    """``starts``, each moved to the next token that is kept."""
    number = starts.cumsum(1)
    before = F.pad((number * kept).cummax(1).values[:, :-1], (1, 0), value=0)
    return kept & (number > before)


def _cu_seqlens(starts: Tensor) -> list[int]:
    return [0, *(starts[1:].nonzero().squeeze(1) + 1).tolist(), len(starts)] if len(starts) > 1 else [0, 1]
