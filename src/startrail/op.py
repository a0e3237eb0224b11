"""The custom ops ``startrail::attention`` and ``startrail::attention_backward``.

They are opaque to autograd and to torch.compile, so that a compiled graph stays whole, and selective activation
checkpointing can save their results instead of repeating a distributed forward. ``instance`` names the
``SequenceParallel`` that runs the call: an op takes only tensors, numbers and texts.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from startrail.schedule import build_program
from startrail.wire import Shapes


class Runner(Protocol):
    """What the ops need of a ``SequenceParallel``."""

    world: int
    rank: int

    def shapes_of(self, q: Tensor, k: Tensor, length: int | None) -> Shapes: ...

    def run_forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None,
        causal: bool,
        window: int | None,
        length: int | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def run_backward(
        self,
        dout: Tensor,
        qkv: list[Tensor],
        out: Tensor,
        lse: Tensor,
        kept: Tensor,
        documents: Tensor | None,
        kv_heads: int,
        causal: bool,
        window: int | None,
        length: int | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


_runners: weakref.WeakValueDictionary[str, Runner] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(runner: Runner) -> str:
    """A name under which the ops find ``runner``; a text, since torch.compile would take numbers for sizes."""
    name = f"sp{next(_numbers)}"
    _runners[name] = runner
    return name


def _runner(name: str) -> Runner:
    if name not in _runners:
        raise ValueError(
            f"the SequenceParallel {name!r} of this attention call no longer exists; keep it with the model"
        )
    return _runners[name]


@torch.library.custom_op("startrail::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    instance: str,
    causal: bool,
    window: int | None,
    length: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, and the bytes that the forward pass keeps for its backward pass."""
    return _runner(instance).run_forward(q, k, v, documents, causal, window, length, scale)


@attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    instance: str,
    causal: bool,
    window: int | None,
    length: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    runner = _runner(instance)
    shapes = runner.shapes_of(q, k, length)
    kept = build_program(shapes.plan, runner.world, runner.rank, "forward").kept
    return (
        torch.empty(q.shape, dtype=q.dtype, device=q.device),
        torch.empty(q.shape[:3], dtype=shapes.acc, device=q.device),
        torch.empty(shapes.kept_bytes(kept), dtype=torch.uint8, device=q.device),
    )


@torch.library.custom_op("startrail::attention_backward", mutates_args=())
def attention_backward(
    dout: Tensor,
    qkv: list[Tensor],
    out: Tensor,
    lse: Tensor,
    kept: Tensor,
    documents: Tensor | None,
    kv_heads: int,
    instance: str,
    causal: bool,
    window: int | None,
    length: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv. ``qkv`` is empty where ``kept`` holds them: after a Ulysses exchange."""
    return _runner(instance).run_backward(dout, qkv, out, lse, kept, documents, kv_heads, causal, window, length, scale)


@attention_backward.register_fake
def _(
    dout: Tensor,
    qkv: list[Tensor],
    out: Tensor,
    lse: Tensor,
    kept: Tensor,
    documents: Tensor | None,
    kv_heads: int,
    instance: str,
    causal: bool,
    window: int | None,
    length: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, _, tokens, dim = out.shape
    dk = torch.empty((batch, kv_heads, tokens, dim), dtype=out.dtype, device=out.device)
    return torch.empty_like(out), dk, torch.empty_like(dk)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, documents, ctx.instance, *ctx.arguments = inputs
    out, lse, kept = output
    ctx.kv_heads = k.shape[1]
    plan = _runner(ctx.instance).shapes_of(q, k, ctx.arguments[2]).plan
    qkv = () if plan.heads > 1 else (q, k, v)
    ctx.save_for_backward(out, lse, kept, documents, *qkv)


def _backward(ctx: Any, dout: Tensor | None, dlse: None, dkept: None) -> tuple[Tensor | None, ...]:
    out, lse, kept, documents, *qkv = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)  # the other ranks may need our part of the backward pass
    grads = torch.ops.startrail.attention_backward(
        dout, qkv, out, lse, kept, documents, ctx.kv_heads, ctx.instance, *ctx.arguments
    )
    return (*grads, *(None,) * (2 + len(ctx.arguments)))


attention.register_autograd(_backward, setup_context=_save)
