"""NeMo Automodel: its recipes train with startrail's attention, through their contract for context parallelism::

    sp = startrail.SequenceParallel("u2/1x4", mesh=device_mesh["cp"])
    use_sharder(attach(model, sp), sp)       # before FSDP wraps the model

A recipe asks the model how to split a batch (``prepare_model_inputs_for_cp``) and gets a ``ContextParallelSharder``: a
function that returns this rank's part, and where its tokens stand in the batch, by which the recipe splits and gathers
other tensors. Written for nemo-automodel 0.7.0. Labels of its datasets are shifted already, and it sums gradients over
the ranks of a sequence itself.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from startrail.integrations.batch import IGNORE
from startrail.integrations.batch import shard_batch as shard_for_model
from startrail.parallel import SequenceParallel

DOCUMENTS = "_packed_seq_ids"  # (batch, tokens) the number of each token's document in its row, 0 for padding
UNSUPPORTED = ("inputs_embeds", "qkv_format", "cu_seqlens", "pixel_values")


def use_sharder(model: nn.Module, sp: SequenceParallel) -> None:
    """Make recipes split the batches of an attached model as its attention does."""
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    if not hasattr(inner, "_startrail"):
        raise ValueError("the model is not attached to startrail: attach(model, sp) first")
    if inner._startrail.sp is not sp:
        raise ValueError(f"the model is attached to {inner._startrail.sp}, not to {sp}")
    inner.prepare_model_inputs_for_cp = lambda batch, num_chunks=1: {"cp_sharder": sharder(sp, num_chunks)}
    if inner is not model:
        model.prepare_model_inputs_for_cp = inner.prepare_model_inputs_for_cp


def sharder(sp: SequenceParallel, num_chunks: int = 1) -> Any:
    """Automodel's ``ContextParallelSharder`` for the ranks of ``sp``."""
    from nemo_automodel.components.distributed.context_parallel.sharder import ContextParallelSharder, ShardLayout

    def shard_batch(
        cp_mesh: Any, tp_mesh: Any, batch: dict[str, Any], *, loss_mask: Tensor | None = None, padding_token_id: int = 0
    ) -> tuple[Any, dict[str, Any], Any]:
        ranks = 1 if cp_mesh is None else cp_mesh.size()
        if ranks != sp.world:
            raise ValueError(f"cp_size {ranks} of Automodel's mesh is not the {sp.world} ranks of {sp}")
        if num_chunks > 1:
            raise ValueError(f"{num_chunks} chunks per batch: pipeline stages of Automodel are not supported")
        local, layout = split(sp, batch, loss_mask, padding_token_id)
        return nullcontext, local, ShardLayout(**layout)

    return ContextParallelSharder(shard_batch=shard_batch)


def split(
    sp: SequenceParallel, batch: dict[str, Any], loss_mask: Tensor | None, padding: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """This rank's part of a batch, and where its tokens stand in the stream of all rows. Each row, each of its
    documents and its padding is a document of the stream, which is padded until all ranks hold equally many tokens."""
    for name in UNSUPPORTED:
        if batch.get(name) is not None:
            raise ValueError(f"the batch has {name}, which startrail cannot split for Automodel: use rows of input_ids")
    ids, labels = batch["input_ids"], batch["labels"]
    rows, tokens = ids.shape
    missing = -(rows * tokens) % (2 * sp.world)
    labels = labels if loss_mask is None else labels.masked_fill(loss_mask == 0, IGNORE)
    positions = batch.get("position_ids")
    positions = (torch.arange(tokens, device=ids.device) if positions is None else positions).expand(rows, tokens)
    parts = {
        "input_ids": (ids, padding),
        "shift_labels": (labels, IGNORE),
        "position_ids": (positions, 0),
    }
    stream = {name: F.pad(x.reshape(1, -1), (0, missing), value=fill) for name, (x, fill) in parts.items()}
    local = shard_for_model(sp, **stream, documents=_documents(batch, positions, missing))
    sequence = local["startrail"].sequence
    places = sequence.shard(torch.arange(sequence.length, device=ids.device), 0, -1)
    if int(places.min()) < 0:
        raise ValueError(f"{sequence} is padded on this rank: Automodel needs equally many tokens on all ranks")
    layout = dict(
        local_token_global_indices=places, original_seq_len=rows * tokens, padded_seq_len=sequence.length,
        input_row_shape=(rows, tokens) if rows > 1 else None,
    )  # fmt: skip
    kept = {name: local[name] for name in ("input_ids", "position_ids", "attention_mask", "labels", "startrail")}
    return kept, layout


def _documents(batch: dict[str, Any], positions: Tensor, missing: int) -> list[int]:
    """cu_seqlens of the stream: a cut at each row, and where a row's documents or its padding begin."""
    rows, tokens = positions.shape
    numbers, mask = batch.get(DOCUMENTS), batch.get("attention_mask")
    if numbers is None and mask is not None and mask.dim() != 2:
        raise ValueError(f"an attention_mask of {mask.dim()} dimensions needs {DOCUMENTS}, the numbers of documents")
    begins = positions.diff(dim=1) != 1
    for each in (mask if numbers is None else None, numbers):
        begins = begins if each is None else begins | (each.diff(dim=1) != 0)
    cuts = {row * tokens for row in range(rows + 1)} | {rows * tokens + missing}
    return sorted(cuts | {row * tokens + place + 1 for row, place in begins.nonzero().tolist()})
