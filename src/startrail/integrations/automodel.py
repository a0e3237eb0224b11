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
    documents and its padding is a document of the stream. A rank's padding follows the stream, after that of ranks
    before it."""
    for name in UNSUPPORTED:
        if batch.get(name) is not None:
            raise ValueError(f"the batch has {name}, which startrail cannot split for Automodel: use rows of input_ids")
    ids, labels = batch["input_ids"], batch["labels"]
    rows, tokens = ids.shape
    labels = labels if loss_mask is None else labels.masked_fill(loss_mask == 0, IGNORE)
    positions = batch.get("position_ids")
    positions = (torch.arange(tokens, device=ids.device) if positions is None else positions).expand(rows, tokens)
    stream = {"input_ids": ids, "shift_labels": labels, "position_ids": positions}
    stream = {name: x.reshape(1, -1) for name, x in stream.items()}
    local = shard_for_model(sp, **stream, documents=_documents(batch, positions))
    sequence = local["startrail"].sequence
    places, counts = sequence.shard(torch.arange(sequence.length, device=ids.device), 0, -1), sequence._layout.counts
    if len(set(counts)) > 1:  # on all ranks
        raise ValueError(f"ranks hold {counts} tokens of {sequence}: Automodel needs equally many, leave out shares")
    real = [sum(n for _, n in sequence._layout.runs(rank)) for rank in range(sp.rank + 1)]
    added, own = places < 0, len(places) - real[-1]
    places[added] = sequence.length + sp.rank * len(places) - sum(real[:-1]) + torch.arange(own, device=ids.device)
    local["input_ids"] = local["input_ids"].masked_fill(added, padding)
    layout = dict(
        local_token_global_indices=places, original_seq_len=rows * tokens, padded_seq_len=sp.world * len(places),
        input_row_shape=(rows, tokens) if rows > 1 else None,
    )  # fmt: skip
    kept = {name: local[name] for name in ("input_ids", "position_ids", "attention_mask", "labels", "startrail")}
    return kept, layout


def _documents(batch: dict[str, Any], positions: Tensor) -> list[int]:
    """cu_seqlens of the stream: a cut at each row, and where a row's documents or its padding begin."""
    rows, tokens = positions.shape
    numbers, mask = batch.get(DOCUMENTS), batch.get("attention_mask")
    if numbers is None and mask is not None and mask.dim() != 2:
        raise ValueError(f"an attention_mask of {mask.dim()} dimensions needs {DOCUMENTS}, the numbers of documents")
    begins = positions.diff(dim=1) != 1
    if (each := mask if numbers is None else numbers) is not None:
        begins = begins & (each[:, 1:] != 0) | (each.diff(dim=1) != 0)  # padding is one document, wherever it counts
    cuts = {row * tokens for row in range(rows + 1)}
    return sorted(cuts | {row * tokens + place + 1 for row, place in begins.nonzero().tolist()})
