"""Set-ups for ``verify``: correct ones, and one with each fault that it names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import startrail
from startrail.integrations.transformers import attach, shard_batch
from tests.integrations.tiny import packed, padded, tiny, tokens

LENGTH = 40  # ten tokens per rank on four ranks: no padding


def right() -> tuple[Any, dict[str, Tensor]]:
    return tiny("llama"), batch()


def batch(length: int = LENGTH) -> dict[str, Tensor]:
    ids = tokens(2, length)
    labels = ids.clone()
    labels[:, : length // 3] = -100  # a prompt, so that ranks have different numbers of labels
    return dict(input_ids=ids, labels=labels)


def own_step(
    change: Callable[[dict[str, Any], Any], None] = lambda made, sp: None,
    finish: Callable[[Any], None] = lambda model: startrail.sum_gradients(model.parameters()),
    factor: float = 1.0,
) -> Callable[..., Tensor]:
    """A correct step, except for ``change``, which spoils the model's arguments, or ``finish``."""

    def step(model, batch, sp):
        attach(model, sp, check=False)
        made = shard_batch(sp, **batch)
        change(made, sp)
        loss = model(**made).loss
        (factor * loss).backward()
        finish(model)
        return loss

    return step


def averaged():
    def step(model, batch, sp):
        wrapped = DistributedDataParallel(attach(model, sp, check=False))
        loss = wrapped(**shard_batch(sp, **batch)).loss
        loss.backward()
        return loss

    return (*right(), step)


def label_lost():
    def change(made, sp):
        labels = made["startrail"].sequence.shard(batch()["labels"], 1)  # sharded, then shifted
        made["shift_labels"] = made["labels"] = F.pad(labels[:, 1:], (0, 1), value=-100)

    return (*right(), own_step(change))


def local_positions():
    def change(made, sp):
        made["position_ids"] = torch.arange(made["input_ids"].shape[1]).unsqueeze(0)

    return (*right(), own_step(change))


def window_ignored():
    def step(model, batch, sp):
        model.config.sliding_window = 10**6
        for layer in model.model.layers:
            layer.self_attn.sliding_window = 10**6
        return own_step()(model, batch, sp)

    return tiny("mistral"), batch(), step


def sinks_ignored():
    def step(model, batch, sp):
        for layer in model.model.layers:
            layer.self_attn.sinks.data.fill_(-1e4)
        return own_step()(model, batch, sp)

    return tiny("gpt-oss"), batch(), step


def padding_counted():
    def change(made, sp):
        whole = F.pad(batch(37)["labels"][:, 1:], (0, 1), value=-100)
        made["shift_labels"] = made["labels"] = made["startrail"].sequence.shard(whole, 1)  # padded with 0

    def spoil(made, sp):
        if made["startrail"].sequence.length == 37:
            change(made, sp)

    return tiny("llama"), batch(37), own_step(spoil)


def padding_attended():
    def step(model, batch, sp):
        without = {name: x for name, x in batch.items() if name != "attention_mask"}
        return own_step()(model, without, sp)

    return tiny("llama"), padded([25, 40], "left"), step


def documents_leaking():
    def step(model, batch, sp):
        attach(model, sp, check=False)
        made = shard_batch(sp, **batch, documents=[0, LENGTH])
        loss = model(**made).loss
        loss.backward()
        startrail.sum_gradients(model.parameters())
        return loss

    return tiny("llama"), packed(17, 23), step


def dropout_differs():
    model = tiny("gpt2")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout) and module is not getattr(module, "attn_dropout", None):
            module.p = 0.0
    model.transformer.drop.p = 0.3
    return model, batch(), own_step()


def not_reduced():
    def finish(model):
        startrail.sum_gradients([x for name, x in model.named_parameters() if "lm_head" not in name])

    return (*right(), own_step(finish=finish))


class Plain(torch.nn.Module):
    """A model outside transformers, with its own step."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inside, self.head = (
            torch.nn.Embedding(64, 16),
            torch.nn.Linear(16, 48),
            torch.nn.Linear(16, 64),
        )

    def forward(self, ids: Tensor, sequence: startrail.Sequence) -> Tensor:
        x = self.words(ids)
        q, k, v = self.inside(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return self.head(x + sequence.attention(q, k, v, causal=True).transpose(1, 2).flatten(2))


def plain(wrap: Callable[[Any], Any] = lambda model: model) -> tuple[Any, ...]:
    def step(model, ids, sp):
        wrapped = wrap(model) if sp.world > 1 else model
        sequence = sp.sequence(ids.shape[1])
        labels = sequence.shard_labels(ids)
        logits = wrapped(sequence.shard(ids, 1), sequence)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = startrail.global_mean(loss, (labels != -100).sum(), sp.group)
        loss.backward()
        if wrapped is model:
            startrail.sum_gradients(model.parameters(), sp.group)
        return loss

    return Plain(), tokens(2, 37), step


def plain_averaged():
    return plain(DistributedDataParallel)


def never_summed():
    return (*right(), own_step(finish=lambda model: None))


def other_data():
    model, made = right()
    if dist.is_initialized():
        made["input_ids"] = tokens(2, LENGTH, seed=dist.get_rank())
    return model, made


def other_weights():
    model, made = right()
    if dist.is_initialized():
        model.lm_head.weight.data += dist.get_rank()
    return model, made


def mean_of_means():
    def change(made, sp):
        made["num_items_in_batch"] = sp.world * (made["labels"] != -100).sum().clamp(min=1)

    return (*right(), own_step(change))


def summed_twice():
    return (*right(), own_step(factor=4.0))


FAULTS = {
    averaged: "gradients are 1/4 of one process's: they are averaged over ranks",
    plain_averaged: "gradients are 1/4 of one process's: they are averaged over ranks",
    label_lost: "labels are lost at the edges of shards",
    local_positions: "positions are local",
    window_ignored: "the sliding window is ignored",
    sinks_ignored: "attention sinks are ignored",
    padding_counted: "padding is counted",
    padding_attended: "padding is attended to",
    documents_leaking: "documents see each other",
    dropout_differs: "dropout differs",
    not_reduced: "gradient of lm_head.weight is not reduced over ranks (1 of",
    never_summed: "gradients are not summed over ranks: call startrail.sum_gradients(model.parameters()) after "
    "backward",
    other_data: "data differ between ranks: input_ids",
    other_weights: "weights differ between ranks: parameter lm_head.weight",
    mean_of_means: "losses are averaged on each rank",
    summed_twice: "gradients are 4 times one process's",
}
