"""Loss and gradients of tiny models on one process and on many ranks, and their comparison."""

from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist

import startrail
from startrail.integrations.transformers import shard_batch
from tests.integrations.tiny import InFloat64, backward, differences, gradients, packed, padded, tiny, tokens

# What a gradient may be off by, relative to its norm; or twice what one process errs in the same dtype. float32 adds up
# in another order on many ranks, which shows where a sum over all tokens has terms of both signs: one process itself
# errs by 2e-6 to 4e-6 in gpt-oss's router and key biases and in qwen3's norms of keys.
ALLOWED = {torch.float32: 2e-6, torch.float64: 1e-13}


def ordinary(batch: int, length: int) -> dict:
    ids = tokens(batch, length)
    return dict(input_ids=ids, labels=ids)


BATCHES = {
    "uneven": ordinary(2, 37),
    "packed": packed(20, 1, 30, 12),
    "right": padded([30, 17, 33]),
    "left": padded([17, 30, 33], "left"),
}


def batch_of(name, kind):
    """Eager attention, which gemma2 has in one process, lets padding attend to everything: learn nothing from it."""
    batch = BATCHES[kind]
    if (name, kind) != ("gemma2", "left"):
        return batch
    first = batch["attention_mask"].cumsum(1) == 1
    return dict(batch, labels=batch["labels"].masked_fill(first, -100))


def one_process(name, batch, dtype=torch.float32):
    """Loss and gradients; of packed documents one by one, since not every model of transformers keeps them apart."""
    model = tiny(name, dtype)
    with InFloat64() if dtype == torch.float64 else nullcontext():
        loss = loss_of(model, name, batch)
        backward(loss)
    return loss.item(), gradients(model)


def loss_of(model, name, batch):
    if "position_ids" in batch and name != "llama4":  # whose chunks count from the row's beginning
        starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
        count = (batch["labels"] != -100).sum()
        loss = 0.0
        for start, stop in zip(starts, [*starts[1:], batch["input_ids"].shape[1]], strict=True):
            part = {key: x[:, start:stop] for key, x in batch.items()}
            loss = loss + model(**part, num_items_in_batch=count, use_cache=False).loss
    else:
        loss = model(**batch, use_cache=False).loss
    return loss


def many_ranks(model, sp, batch):
    model.zero_grad()
    loss = model(**shard_batch(sp, **batch)).loss
    backward(loss)
    startrail.sum_gradients(model.parameters(), sp.group)
    return summed(loss), gradients(model)


def summed(loss) -> float:
    """The ranks' shares of a loss as one."""
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss.item()


class Truth(NamedTuple):
    """What one process gives, and the gradients that it should give."""

    loss: float
    grads: dict[str, torch.Tensor]
    exact: dict[str, torch.Tensor]


def truth_of(name, batch):
    return Truth(*one_process(name, batch), one_process(name, batch, torch.float64)[1])


def compare(loss, grads, truth) -> list[str]:
    """What is wrong: every gradient by itself against float64, and loss and all gradients against one process."""
    allowed = ALLOWED[next(iter(truth.grads.values())).dtype]
    wrong = differences(grads, truth.exact, allowed, truth.grads)
    whole, true = (
        {"all gradients": torch.cat([x[name].flatten() for name in truth.grads])} for x in (grads, truth.grads)
    )
    wrong += differences(whole, true, allowed)
    if not abs(loss / truth.loss - 1) <= min(1e-6, allowed):  # written so that NaN fails
        wrong.append(f"loss {loss}, one process {truth.loss}")
    return wrong
