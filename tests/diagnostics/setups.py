"""Set-ups for ``verify``: correct ones, and one with each fault that it names."""

from __future__ import annotations

import functools
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


def with_model(before, after=lambda model: None, name="llama", data=None, **options):
    """A step that changes the model ``before`` it is attached, or its gradients ``after``."""

    def make():
        def step(model, batch, sp):
            before(model)
            loss = own_step(**options)(model, batch, sp)
            after(model)
            return loss

        return tiny(name), data or batch(), step

    return make


def returned(change):
    def make():
        return (*right(), lambda model, batch, sp: change(own_step()(model, batch, sp), sp))

    return make


def other_scale(model):
    for layer in model.model.layers:
        layer.self_attn.scaling *= 1.5


def zero_first_norm(model):
    model.model.layers[0].input_layernorm.weight.grad.zero_()


def double_head(model):
    model.lm_head.weight.grad.mul_(2)


def other_rope(model):
    model.model.rotary_emb.inv_freq.mul_(0.9)


def in_eval_mode():
    model = tiny("gpt2")
    model.transformer.drop.p = 0.3

    def step(model, batch, sp):
        model.eval()
        return own_step()(model, batch, sp)

    return model, batch(), step


def trained_on_ranks_only():
    model = tiny("llama")
    model.lm_head.weight.requires_grad_(False)

    def step(model, batch, sp):
        model.lm_head.weight.requires_grad_(True)
        return own_step()(model, batch, sp)

    return model, batch(), step


def accumulated(counted: bool):
    """Two rows, one after the other; ``counted``: divided by the labels of both."""

    def make():
        def step(model, batch, sp):
            attach(model, sp, check=False)
            count = (batch["labels"][:, 1:] != -100).sum() if counted else None
            losses = []
            for row in range(2):
                one = {name: x[row : row + 1] for name, x in batch.items()}
                losses.append(model(**shard_batch(sp, **one, num_items_in_batch=count)).loss)
                losses[-1].backward()
            startrail.sum_gradients(model.parameters())
            return sum(losses).detach()

        return tiny("llama"), batch(), step

    return make


def in_bfloat16(make):
    def changed():
        model, *rest = make()
        return (model.to(torch.bfloat16), *rest)

    return changed


def with_autocast(make):
    """Both the step and one process in autocast."""

    def changed():
        model, data, *step = make()
        forward = model.forward

        def run(*arguments, **options):
            with torch.autocast("cpu", torch.bfloat16):
                return forward(*arguments, **options)

        model.forward = functools.wraps(forward)(run)
        return (model, data, *step)

    return changed


def with_checkpointing():
    model = tiny("mistral")
    model.gradient_checkpointing_enable()
    return model, batch(37)


def frozen():
    model = tiny("llama")
    model.model.embed_tokens.weight.requires_grad_(False)
    return model, batch()


def of(name, data=None):
    return lambda: (tiny(name), batch(37) if data is None else data)


RIGHT = {
    "llama": right,
    "gpt-oss": of("gpt-oss"),
    "gemma2": of("gemma2"),
    "gpt2, tied": of("gpt2"),
    "packed": of("qwen3", packed(20, 17)),
    "padded": of("llama", padded([25, 40], "right")),
    "bfloat16": in_bfloat16(right),
    "autocast": with_autocast(right),
    "accumulated": accumulated(counted=True),
    "checkpointing": with_checkpointing,
    "frozen": frozen,
}
FAULTS = {
    averaged: "gradients are 1/4 of one process's: they are averaged over ranks",
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
    with_model(other_scale): "attention's scale is 0.53",
    with_model(lambda model: None, zero_first_norm): "gradient of model.layers.0.input_layernorm.weight is lost",
    with_model(lambda model: None, double_head): "gradient of lm_head.weight is 2 times one process's",
    with_model(other_rope): "buffer model.rotary_emb.inv_freq differs from one process's, and so do the gradients",
    with_model(lambda model: model.lm_head.weight.requires_grad_(False)): "parameter lm_head.weight is trained on one "
    "process, but frozen on ranks",
    trained_on_ranks_only: "parameter lm_head.weight is trained on ranks, but frozen on one process",
    in_eval_mode: "is in eval mode on ranks, and in training mode on one process",
    returned(lambda loss, sp: loss * (1.5 if sp.rank == 2 else 1.0)): "gradients are right, but the loss is not",
    with_model(lambda model: None, lambda model: model.zero_grad()): "all gradients are zero or None on ranks",
    with_model(lambda model: None, factor=1.003): "gradients are 1.003 times one process's",
    accumulated(counted=False): "gradients are 2 times one process's",
    in_bfloat16(window_ignored): "the sliding window is ignored",
    with_autocast(label_lost): "labels are lost at the edges of shards",
}
