"""The loss of a language model without whole logits.

With 32,768 tokens per rank and a vocabulary of 128,000, logits in float32 take 16 GiB, and as much again for their
gradient. ``attach`` replaces the model's forward pass by one that runs the layers once, and then the rest of the
model's *own* forward pass (its head, with its bias, scale or softcap, and its loss) on one chunk of tokens at a time:
the layers are replaced by a stand-in that returns their results for the chunk.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from startrail.checkpoint import in_chunks
from startrail.integrations import routers, z_loss
from startrail.integrations.batch import IGNORE

CHUNK_BYTES = 128 * 2**20  # of one chunk's logits in float32
FUSED = "fused_lm_head"  # by which TRL asks for its own loss without logits


class StandIn(nn.Module):
    """Takes the place of a model's layers: calls ``function`` in their stead, and else is like them."""

    def __init__(self, layers: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__.update(layers=layers, function=function)  # no submodule: its parameters are not the head's

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layers"], name)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self.function(*arguments, **options)


def install(model: PreTrainedModel) -> None:
    """Replace ``model.forward``. ``remove`` undoes it."""
    if model.get_output_embeddings() is None:
        return
    model._startrail_forward = model.__dict__.get("forward")  # another wrapper's
    wrapper = wraps(type(model).forward)(forward_without_logits)
    model.forward = model._startrail_wrapper = MethodType(wrapper, model)


def remove(model: PreTrainedModel) -> None:
    wrapper, before = (model.__dict__.pop(f"_startrail_{name}", None) for name in ("wrapper", "forward"))
    if wrapper is not None and model.__dict__.get("forward") is wrapper:
        del model.forward
        if before is not None:
            model.forward = before


def forward_without_logits(model: PreTrainedModel, *arguments: Any, **options: Any) -> Any:
    """The model's forward pass. Its result has the same loss, and no logits."""
    before = model.__dict__.get("_startrail_forward")
    original = partial(type(model).forward, model) if before is None else before
    attached = model.__dict__.get("_startrail")
    if arguments:
        bound = inspect.signature(type(model).forward).bind_partial(model, *arguments).arguments
        options |= {name: given for name, given in bound.items() if given is not model}
    labels = options.get("shift_labels")
    name = None if attached is None else attached.layers
    z = None
    if attached is not None and labels is not None and not options.get(FUSED):
        z = z_loss.of_call(model, attached)
    if z is not None:
        original = z_loss.without(model, original)
    if name is None or attached.wants_logits or labels is None or _asks_for_logits(model, options):
        output = original(**options)
        return output if z is None else z.add(output, z.counted)

    layers = model.get_submodule(name)
    # the loss of a token without a label is what the model adds to the loss of labels
    adds_more = routers.is_wanted(model, options)
    nothing = torch.full_like(labels[:, :1], IGNORE) if adds_more else None
    of_chunks = {**options, "output_router_logits": False} if adds_more else options
    results: list[Any] = []

    def run_layers(*arguments: Any, **options: Any) -> Any:
        results.append(layers(*arguments, **options))
        return _with_hidden(results[0], results[0][0][:, :1])

    def loss_of(hidden: Tensor, labels: Tensor, *counted: Tensor) -> Tensor:
        with _replaced(model, name, lambda *_, **__: _with_hidden(results[0], hidden)):
            output = original(**{**of_chunks, "labels": labels, "shift_labels": labels})
        loss: Tensor = output.loss if z is None else z.add(output, *counted).loss
        return loss

    with _replaced(model, name, run_layers):  # in which only the head has parameters
        output = original(
            **{**options, "labels": nothing, "shift_labels": nothing}
        )  # with logits of one token, dropped
        hidden = results[0][0].flatten(0, 1).unsqueeze(0)
        chunk = attached.loss_chunk or tokens_per_chunk(_vocabulary(model))
        per_token = [x.reshape(1, -1) for x in (labels, *([] if z is None else [z.counted]))]
        loss = in_chunks(model, loss_of, hidden, *per_token, chunk=chunk, summed=True)
        loss = loss + output.loss if adds_more else loss
    _announce(model, attached, labels.numel(), chunk)
    return type(output)(**{**output, "loss": loss, "logits": None})


@contextmanager
def finding_layers(model: PreTrainedModel, attached: Any) -> Iterator[None]:
    """Inside, a call of ``model`` shows which of its parts computes what its head gets: the first model inside it that
    runs. In OPT, that is not its base model, but a part of it."""

    def note(name: str, *_: object) -> None:
        attached.layers = attached.layers or name

    with ExitStack() as hooks:
        for name, part in model.named_modules():
            if isinstance(part, PreTrainedModel) and part is not model:
                hooks.enter_context(part.register_forward_pre_hook(partial(note, name)))
        yield


def _asks_for_logits(model: PreTrainedModel, options: dict[str, Any]) -> bool:
    """True if the caller reads logits, or computes the loss without them, or if the loss is a mean over this
    rank's tokens. A compiler sees only the model's own forward pass."""
    if options.get("num_items_in_batch") is None:
        return True
    as_tuple = options.get("return_dict", getattr(model.config, "return_dict", True)) is False
    return bool(options.get(FUSED)) or "logits_to_keep" in options or as_tuple or torch.compiler.is_compiling()


def tokens_per_chunk(vocabulary: int) -> int:
    """The number of tokens whose logits are computed at a time: a power of two.

    >>> tokens_per_chunk(131_072)
    256
    """
    tokens = CHUNK_BYTES // (4 * vocabulary)
    return 1 << max(tokens.bit_length() - 1, 0)


def _vocabulary(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config(decoder=True).vocab_size)


def _announce(model: PreTrainedModel, attached: Any, tokens: int, chunk: int) -> None:
    """Say once what is saved."""
    if attached.announced or attached.probed is not None or tokens <= chunk or attached.sp.rank:
        return
    attached.announced = True
    whole, part = (count * _vocabulary(model) * 4 / 2**20 for count in (tokens, chunk))
    print(
        f"startrail: the loss is computed on {chunk:,d} tokens at a time: their logits in float32 take {part:,.0f} MiB "
        f"per rank, those of all {tokens:,d} tokens {whole:,.0f} MiB (pass logits=True to get them)",
        file=sys.stderr,
    )


def _with_hidden(results: Any, hidden: Tensor) -> Any:
    """What the layers returned, for other tokens."""
    if isinstance(results, tuple):
        return (hidden, *results[1:])
    return type(results)(**{**results, next(iter(results)): hidden})


@contextmanager
def _replaced(model: PreTrainedModel, name: str, function: Callable[..., Any]) -> Iterator[None]:
    parent, _, own = name.rpartition(".")
    modules = model.get_submodule(parent)._modules
    layers = modules[own]
    assert layers is not None
    modules[own] = StandIn(layers, function)
    try:
        yield
    finally:
        modules[own] = layers
