"""Set-ups of a plain model for ``verify``: right ones, and one with each fault. They need no transformers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import startrail
from startrail.checkpoint import checkpoint_context
from startrail.losses import chunked_cross_entropy
from startrail.sequence import Sequence
from tests.helpers import causal_mask, document_numbers

LENGTH, VOCAB, WIDTH, HEADS = 40, 32, 16, 4
Make = Callable[[], tuple[Any, ...]]


@dataclass
class Options:
    """What a step does; the reference takes its mask and scale from them as well."""

    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    positions: str = "global"
    labels: str = "shifted"
    mean: str = "global"
    factor: float = 1.0
    wrap: str | None = None
    sum: bool = True
    autocast: bool = False
    parts: int = 1
    chunked: bool = False
    before: Callable[[Any], None] = lambda model: None
    after: Callable[[Any], None] = lambda model: None
    returned: Callable[[Tensor], Any] = lambda loss: loss


class Net(nn.Module):
    def __init__(self, table: bool = False, dropout: float = 0.0, tied: bool = False, checkpoint: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Parameter(torch.randn(64, WIDTH)) if table else nn.Embedding(64, WIDTH)
        self.inside = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.up, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB, bias=not tied)
        self.gain, self.sinks = nn.Parameter(torch.full((1,), 1e-6)), nn.Parameter(torch.randn(HEADS))
        self.dropout, self.checkpoint = dropout, checkpoint
        self.register_buffer("called", torch.zeros(()))
        self.register_buffer("level", torch.zeros(WIDTH))
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor, positions: Tensor | None, attend: Callable[..., Tensor]) -> Tensor:
        x = self.hidden(ids, positions, attend)
        return self.head(x)

    def hidden(self, ids: Tensor, positions: Tensor | None, attend: Callable[..., Tensor]) -> Tensor:
        table = isinstance(self.places, nn.Parameter)
        if positions is None:  # local ones, as in a model that knows nothing of ranks
            where = self.places[: ids.shape[1]] if table else self.places(torch.arange(ids.shape[1]))
        else:
            where = self.places[positions] if table else self.places(positions)
        x = self.words(ids) + where
        for layer in self.inside:
            x = self.block(x, layer, attend)
        self.called.fill_(1.0)
        x = x + self.gain * torch.tanh(self.up(x)) * 1e-3
        return F.dropout(x, self.dropout, self.training)

    def block(self, x: Tensor, layer: nn.Module, attend: Callable[..., Tensor]) -> Tensor:
        def run(x: Tensor) -> Tensor:
            q, k, v = layer(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            return x + attend(q, k, v, self.sinks).transpose(1, 2).flatten(2).to(x.dtype)

        if self.checkpoint:
            return checkpoint(run, x, use_reentrant=False, context_fn=checkpoint_context)
        return run(x)


def ids(length: int = LENGTH) -> Tensor:
    return torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(1))


def labels_of(ids: Tensor) -> Tensor:
    labels = ids.clone()
    labels[:, : ids.shape[1] // 3] = -100  # a prompt, so that ranks have different numbers of labels
    return labels


def reference(options: Options, key_mask: Tensor | None = None) -> Callable[[Any, Tensor], Tensor]:
    """One process, by torch alone. Neither softcap nor sinks."""

    def run(model: Any, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
        mask = causal_mask(length, options.documents) if options.causal else distance == distance
        if options.window:
            mask = mask & (distance.abs() < options.window)
        mask = mask.unsqueeze(0) if key_mask is None else mask & key_mask[:, None]

        def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.unsqueeze(1), scale=options.scale)

        number = document_numbers(length, options.documents)
        with torch.autocast("cpu", torch.bfloat16) if options.autocast else nullcontext():
            logits = model(ids, None, attend)
        labels = labels_of(ids)[:, 1:].masked_fill((number[1:] != number[:-1]).unsqueeze(0), -100)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).to(precise(logits)), labels.flatten())
        loss.backward()
        return loss

    return run


def precise(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def step(options: Options) -> Callable[[Any, Tensor, Any], Any]:
    def run(model: Any, ids: Tensor, sp: Any) -> Any:
        options.before(model)
        wrapped, factor = model, options.factor
        if options.wrap == "fsdp":
            fully_shard(model)
            factor *= startrail.gradient_factor(model)
        elif options.wrap is not None:
            wrapped = DistributedDataParallel(model)
            factor *= startrail.gradient_factor(wrapped) if options.wrap == "ddp" else 1
        total, count = 0.0, (labels_of(ids)[:, 1:] != -100).sum()
        for part in ids.chunk(options.parts):
            loss = _loss(wrapped, model, part, sp, options, count if options.parts > 1 else None)
            (factor * loss).backward()
            total = total + loss.detach()
        if options.sum and options.wrap is None:
            startrail.sum_gradients(model.parameters(), sp.group)
        options.after(model)
        return options.returned(total)

    return run


def _loss(wrapped: Any, model: Any, ids: Tensor, sp: Any, options: Options, count: Tensor | None) -> Tensor:
    seq = sp.sequence(ids.shape[1], options.documents)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        given: Any = dict(causal=options.causal, window=options.window, scale=options.scale, softcap=options.softcap)
        return seq.attention(q, k, v, sinks=sinks if options.sinks else None, **given)

    own = seq.shard(ids, 1)
    labels = seq.shard_labels(labels_of(ids))
    if options.labels == "lost":
        labels = F.pad(seq.shard(labels_of(ids), 1, -100)[:, 1:], (0, 1), value=-100)
    elif options.labels == "zero":
        labels = seq.shard(F.pad(labels_of(ids)[:, 1:], (0, 1), value=-100), 1)
    with torch.autocast("cpu", torch.bfloat16) if options.autocast else nullcontext():
        positions = None if options.positions == "local" else seq.positions()
        if options.chunked:
            hidden = model.hidden(own, positions, attend)
            total, _ = chunked_cross_entropy(hidden, model.head.weight, labels, chunk=8)
        else:
            logits = wrapped(own, positions, attend)
            total = F.cross_entropy(logits.flatten(0, 1).to(precise(logits)), labels.flatten(), reduction="sum")
    if count is not None:
        loss = total / count
        return loss + (startrail.global_mean(total.detach(), count, sp.group) * sp.world - loss).detach()
    mine = (labels != -100).sum()
    if options.mean == "ranks":
        return total / mine.clamp(min=1) / sp.world
    if options.mean == "nan":
        return total / (mine if sp.rank else 0) / sp.world
    if options.mean == "share":
        return total / (labels_of(ids)[:, 1:] != -100).sum()
    return startrail.global_mean(total, mine, sp.group)


def of(
    changed: dict[str, Any] | None = None, length: int = LENGTH, alone: bool = False, dtype: torch.dtype | None = None,
    prepare: Callable[[Any], None] = lambda model: None, net: dict[str, Any] | None = None, **right: Any,
) -> Make:  # fmt: skip
    """A set-up with the ``right`` options, except that ranks use the ``changed`` ones. ``alone``: no reference."""

    def make() -> tuple[Any, ...]:
        model = Net(**(net or {})).to(dtype or torch.float32)
        prepare(model)
        options = Options(**right)
        wrong = step(replace(options, **(changed or {})))
        if not alone:
            return model, ids(length), wrong, reference(options)
        both = step(options)
        return model, ids(length), lambda model, ids, sp: (wrong if sp.world > 1 else both)(model, ids, sp)

    return make


def freeze(model: Any, name: str = "inside.0.weight", on: bool = False) -> None:
    model.get_parameter(name).requires_grad_(on)


def without_sinks(model: Any) -> None:
    """DDP reduces nothing if a parameter is not used."""
    freeze(model, "sinks")


def scale_gradient(name: str, factor: float) -> Callable[[Any], None]:
    def run(model: Any) -> None:
        model.get_parameter(name).grad.mul_(factor)

    return run


def other(kind: str) -> Make:
    def make() -> tuple[Any, ...]:
        model, batch, *rest = of()()
        if dist.is_initialized() and dist.get_rank():
            if kind == "data":
                batch = batch.roll(1)
            else:
                dict(model.named_parameters(), **dict(model.named_buffers()))[kind].data.add_(1e-6)
        return (model, batch, *rest)

    return make


def padding_attended() -> tuple[Any, ...]:
    keys = torch.ones(2, LENGTH, dtype=torch.bool)
    keys[:, LENGTH // 4 : LENGTH // 3] = False  # they have no labels
    return Net(), ids(), step(Options()), reference(Options(), keys)


def only_rank(rank: int, factor: float) -> Callable[[Tensor], Tensor]:
    return lambda loss: loss * factor if dist.get_rank() == rank else loss


def local_statistics(model: Any) -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        model.level += 0.1


def slices_of_the_batch() -> tuple[Any, ...]:
    """Ranks take every fourth token, and attention takes them for other ones."""

    def run(model: Any, ids: Tensor, sp: Any) -> Tensor:
        order = torch.arange(LENGTH).view(-1, sp.world).T.flatten()
        return step(Options())(model, ids[:, order], sp)

    return Net(), ids(), run, reference(Options())


def cut_without_shard() -> tuple[Any, ...]:
    """Ranks take contiguous slices of ids and shifted labels, and attention takes them for a zigzag."""
    model, batch, right_step, right = of()()

    def run(model: Any, ids: Tensor, sp: Any) -> Any:
        shard = Sequence.shard
        Sequence.shard = lambda self, x, dim, pad_value=0: x.narrow(dim, sp.rank * self.local, self.local)
        try:
            return right_step(model, ids, sp)
        finally:
            Sequence.shard = shard

    return model, batch, run, right


def keys_without_gradient() -> tuple[Any, ...]:
    model, batch, wrong, right = of()()

    def run(model: Any, ids: Tensor, sp: Any) -> Any:
        hook = model.inside[0].register_forward_hook(lambda module, args, out: out.detach())
        try:
            return wrong(model, ids, sp)
        finally:
            hook.remove()

    return model, batch, run, right


PACKED = (0, 13, 24, LENGTH)
SMALL = "gain"  # its gradient is about a millionth of the others'
FAULTS: dict[str, tuple[Make, str]] = {
    "window forgotten": (of(dict(window=None), window=7), "the sliding window is ignored (one process: 7 tokens)"),
    "window off by one": (of(dict(window=8), window=7), "the sliding window is 8 tokens on ranks, 7 on one process"),
    "window on ranks only": (of(dict(window=9)), "attention has a window of 9 tokens on ranks, but not on one process"),
    "not causal": (of(dict(causal=False)), "attention is not causal on ranks"),
    "causal on ranks": (of(dict(causal=True), causal=False), "attention is causal on ranks, but not on one process"),
    "documents leak": (of(dict(documents=None), documents=PACKED), "documents see each other"),
    "padding attended": (padding_attended, "padding is attended to"),
    "scale": (of(dict(scale=0.3)), "attention's scale is 0.3 on ranks, 0.5 on one process"),
    "scale, slightly": (of(dict(scale=0.5001)), "attention's scale is 0.5001 on ranks, 0.5 on one process"),
    "softcap": (of(dict(softcap=None), alone=True, softcap=1.0), "attention's softcap is None on ranks, 1.0 on one"),
    "sinks": (of(dict(sinks=False), alone=True, sinks=True), "attention sinks are ignored"),
    "local positions": (of(dict(positions="local")), "positions are local"),
    "local positions, table": (of(dict(positions="local"), net=dict(table=True)), "positions are local"),
    "local positions, window": (of(dict(positions="local"), window=7), "positions are local"),
    "labels lost": (of(dict(labels="lost")), "labels are lost at the edges of shards"),
    "labels lost, no reference": (of(dict(labels="lost"), alone=True), "labels are lost at the edges of shards"),
    "labels lost, chunked": (
        of(dict(labels="lost"), alone=True, chunked=True, net=dict(tied=True)), "labels are lost at the edges of shards"
    ),
    "mean of means": (of(dict(mean="ranks")), "losses are averaged on each rank"),
    "averaged": (of(dict(wrap="averaged"), prepare=without_sinks), "gradients are 1/4 of one process's: they are"),
    "summed twice": (of(dict(factor=4.0)), "gradients are 4 times one process's: they are summed twice"),
    "other factor": (of(dict(factor=1.01)), "gradients are 1.01 times one process's"),
    "never summed": (of(dict(sum=False)), "gradients are not summed over ranks"),
    "frozen on ranks": (of(dict(before=freeze)), "parameter inside.0.weight is trained on one process, but frozen on"),
    "trained on ranks": (
        of(dict(before=lambda model: freeze(model, on=True)), prepare=freeze),
        "parameter inside.0.weight is trained on ranks, but frozen on one process (1 of",
    ),
    "losses of other ranks": (of(dict(returned=only_rank(2, 1.5))), "gradients are right, but the loss is not"),
    "loss of the last rank": (of(dict(returned=only_rank(3, 7.0))), "gradients are right, but the loss is not"),
    "buffers": (of(dict(after=local_statistics)), "buffer level differs from one process's"),
    "eval on ranks": (
        of(dict(before=lambda model: model.eval()), net=dict(dropout=0.2)),
        "the model is in eval mode on ranks, and in training mode on one process",
    ),
    "small gradient lost": (of(dict(after=scale_gradient(SMALL, 0.0))), "gradient of gain is lost: it is zero on"),
    "small gradient doubled": (of(dict(after=scale_gradient(SMALL, 2.0))), "gradient of gain is 2 times one process's"),
    "cleared": (of(dict(after=lambda model: model.zero_grad())), "all gradients are zero or None on ranks"),
    "no labels on a rank": (of(dict(mean="nan")), "are infinite or NaN on ranks"),
    "other data": (other("data"), "data differ between ranks: tensor"),
    "other weights": (other("head.weight"), "weights differ between ranks: parameter head.weight"),
    "other buffers": (other("level"), "weights differ between ranks: buffer level"),
    "window in bfloat16": (of(dict(window=None), window=7, dtype=torch.bfloat16), "the sliding window is ignored"),
    "labels in autocast": (of(dict(labels="lost"), autocast=True), "labels are lost at the edges of shards"),
    "tokens in another order": (slices_of_the_batch, "tokens are in another order: ranks take every 4th token"),
    "contiguous slices": (cut_without_shard, "tokens are in another order: ranks take a contiguous slice of the batch"),
    "a layer detached": (keys_without_gradient, "gradient of inside.0.weight is lost: it is zero on ranks"),
}  # fmt: skip
RETRIED: dict[str, tuple[Make, str]] = {
    "padding counted": (of(dict(labels="zero"), length=37), "padding is counted"),
    "dropout": (of(net=dict(dropout=0.2)), "dropout differs"),
}
RIGHT: dict[str, Make] = {
    "no reference": of(length=37, alone=True),
    "plain": of(length=37),
    "float64": of(dtype=torch.float64),
    "bfloat16": of(dtype=torch.bfloat16),
    "share of the loss": of(dict(mean="share")),
    "a number": of(dict(returned=float)),
    "autocast": of(autocast=True, window=9),
    "autocast on ranks": of(dict(autocast=True)),
    "tied": of(net=dict(tied=True)),
    "checkpointing": of(net=dict(checkpoint=True), window=7),
    "frozen": of(prepare=freeze),
    "table": of(net=dict(table=True)),
    "fsdp": of(dict(wrap="fsdp")),
    "ddp": of(dict(wrap="ddp"), prepare=without_sinks),
    "documents": of(documents=PACKED, window=7),
    "accumulation": of(dict(parts=2)),
    "sinks": of(alone=True, sinks=True, softcap=2.0),
    "chunked": of(dict(chunked=True), net=dict(tied=True)),
}
