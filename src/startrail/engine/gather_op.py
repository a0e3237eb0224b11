"""The op ``startrail::gather_tokens``, with which ``unshard`` and ``roll`` get the tokens of all ranks.

It is opaque to torch.compile, so in a compiled graph, too, ranks agree before they send anything, and raise
``PeerError`` if one is gone. If the graph itself gathered, tensors of different shapes would end the process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from startrail._compat import find_group, gather_shards, sum_over_ranks, sum_to_shards
from startrail.agreement.errors import peer_errors
from startrail.engine.arguments import describe_tensor
from startrail.engine.op import UNSAFE, find_session


def agree(x: object, op_key: Tensor, session: str, operation: str, arguments: str, gradients: bool) -> None:
    """Raise ``ValueError`` on all ranks unless all are about to run ``operation`` on tensors like ``x``.
    ``gradients``: a rank without any would not take part in the backward pass, and the others would wait for it."""
    text = kind = type(x).__name__
    if isinstance(x, Tensor):
        text, kind = describe_tensor(x), f"{x.dtype} {x.dim()}"  # without the number of tokens
    kinds = (operation, arguments, kind, gradients)
    find_session(session).agree(operation, f"{text}, {arguments}", kinds, op_key, gradients)


@torch.library.custom_op("startrail::gather_tokens", mutates_args=(), tags=UNSAFE)
def gather_tokens(
    x: Tensor, dim: int, group: str, given: Tensor, op_key: Tensor, session: str, operation: str, arguments: str,
    gradients: bool,
) -> Tensor:  # fmt: skip
    """The tensors ``x`` of all ranks, one after the other in ``dim``. If an ``operation`` on tensors like ``given`` is
    named, all ranks agree on it first."""
    if operation:
        agree(given, op_key, session, operation, arguments, gradients)
    ranks = find_group(group)
    with peer_errors("gathering tokens", ranks):
        return gather_shards(x, dim, ranks)


@gather_tokens.register_fake
def _(x: Tensor, dim: int, group: str, given: Tensor, op_key: Tensor, session: str, *others: object) -> Tensor:
    shape = list(x.shape)
    shape[dim] *= find_session(session).world
    return x.new_empty(shape)


@torch.library.custom_op("startrail::sum_tokens", mutates_args=(), tags=UNSAFE)
def sum_tokens(grad: Tensor, dim: int, group: str, session: str) -> Tensor:
    """This rank's part of the sum over all ranks: the gradient of ``gather_tokens``."""
    ranks = find_group(group)
    with peer_errors("the gradient of gathering tokens", ranks):
        return sum_to_shards(grad.contiguous(), dim, ranks)


@sum_tokens.register_fake
def _(grad: Tensor, dim: int, group: str, session: str) -> Tensor:
    shape = list(grad.shape)
    shape[dim] //= find_session(session).world
    return grad.new_empty(shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.dim, ctx.group, _, _, ctx.session, *_ = inputs
    ctx.owner = find_session(ctx.session)  # stays alive until the backward pass has run


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.startrail.sum_tokens(grad, ctx.dim, ctx.group, ctx.session), *[None] * 8


gather_tokens.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("startrail::add_up", mutates_args=(), tags=UNSAFE)
def add_up(x: Tensor, group: str, session: str) -> Tensor:
    """The sum of all ranks' ``x``, on which they have agreed. So is its gradient: each rank has a share of it."""
    ranks = find_group(group)
    with peer_errors("adding up what ranks have", ranks):
        return sum_over_ranks(x.contiguous(), ranks)


@add_up.register_fake
def _(x: Tensor, group: str, session: str) -> Tensor:
    return x.new_empty(x.shape)


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.group, ctx.session = inputs
    ctx.owner = find_session(ctx.session)  # stays alive until the backward pass has run


def _backward_of_sum(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.startrail.add_up(grad, ctx.group, ctx.session), None, None


add_up.register_autograd(_backward_of_sum, setup_context=_save_sum)
