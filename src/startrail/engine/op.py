"""The custom ops ``startrail::attention`` and ``startrail::attention_backward``.

They are opaque to autograd and torch.compile, so a compiled graph stays whole, and selective activation checkpointing
can save their results instead of repeating a distributed forward pass. An op takes only tensors, numbers and texts:
``session`` names the ``Session`` that runs the call, ``call`` is the text of an ``AttentionCall``, and ``op_key``
identifies the sequence (see `op_key`). A forward pass also returns its number as a tensor: its backward pass refers to
it, also within a compiled graph.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from startrail.engine import attention as attention_call
from startrail.engine.arguments import AttentionCall, CallShapes, Shapes
from startrail.engine.attention import kept_bytes
from startrail.engine.session import Session
from startrail.kernels import accumulator

_sessions: weakref.WeakValueDictionary[str, Session] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(session: Session) -> str:
    """Returns the name under which the ops find ``session``: a text, because torch.compile takes numbers for sizes."""
    _sessions[name := f"sp{next(_numbers)}"] = session
    return name


def find_session(name: str) -> Session:
    if name not in _sessions:
        raise ValueError(
            f"the SequenceParallel {name!r} of this attention call no longer exists; keep it with the model"
        )
    return _sessions[name]


# Transfers and reused buffers: replaying a CUDA graph would give wrong results.
UNSAFE = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("startrail::attention", mutates_args=(), tags=UNSAFE)
def attention(
    q: Tensor, k: Tensor, v: Tensor, op_key: Tensor, session: str, call: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out, lse, the bytes kept for the backward pass, the call's number, and the largest logit of each batch entry and
    head among those that this rank computed (empty unless the call asks for it)."""
    return attention_call.forward(find_session(session), q, k, v, op_key, AttentionCall.parse(call))


@attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, op_key: Tensor, session: str, call: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    shapes = Shapes.of(q, k, v)
    shapes.check()
    return fake_results(q, shapes, session, call)


def fake_results(
    q: Tensor, shapes: CallShapes, session: str, call: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tensors like the results of a forward pass."""
    max_logits = q.shape[:2] if AttentionCall.parse(call).max_logits else (0, 0)
    return (
        torch.empty((*q.shape[:3], shapes.value_dim), dtype=q.dtype, device=q.device),
        torch.empty(q.shape[:3], dtype=accumulator(q.dtype), device=q.device),
        torch.empty(kept_bytes(find_session(session), shapes), dtype=torch.uint8, device=q.device),
        torch.empty(2, dtype=torch.int64, device="cpu"),
        torch.empty(max_logits, dtype=accumulator(q.dtype), device=q.device),
    )


@torch.library.custom_op("startrail::attention_backward", mutates_args=(), tags=UNSAFE)
def attention_backward(
    dout: Tensor, qkv: list[Tensor], out: Tensor, lse: Tensor, kept: Tensor, number: Tensor,
    kv_heads: int, head_dim: int, op_key: Tensor, session: str, call: str, dlse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv. ``qkv`` is empty if ``kept`` holds them, which it does after a head exchange. ``dlse``: the cotangent
    of lse, if lse was used."""
    parsed = AttentionCall.parse(call)
    owner = find_session(session)
    return attention_call.backward(
        owner, dout, qkv, out, lse, kept, number, kv_heads, head_dim, op_key, parsed, dlse
    )  # fmt: skip


@attention_backward.register_fake
def _(
    dout: Tensor, qkv: list[Tensor], out: Tensor, lse: Tensor, kept: Tensor, number: Tensor,
    kv_heads: int, head_dim: int, *context: object,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    batch, heads, tokens, value_dim = out.shape
    shapes = (heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim)
    dq, dk, dv = (torch.empty((batch, h, tokens, dim), dtype=out.dtype, device=out.device) for h, dim in shapes)
    return dq, dk, dv


def register_backward(
    op: Any, backward: Callable[..., tuple[Tensor, ...]], sizes: Callable[..., tuple[int, ...]], num_weights: int = 0
) -> None:
    """Have ``backward`` compute the gradients of a custom op. It gets the ``sizes`` of the op's tensors that the shapes
    of results do not tell. The last ``num_weights`` tensors are saved, and the others unless ``kept`` holds them."""

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)  # a result that was not used has no cotangent, and costs nothing
        *tensors, op_key, ctx.session, ctx.call = inputs
        out, lse, kept, number, _ = output
        ctx.sizes = sizes(*tensors)
        ctx.owner = find_session(ctx.session)  # stays alive until the backward pass has run
        own, weights = tensors[: len(tensors) - num_weights], tensors[len(tensors) - num_weights :]
        if ctx.owner.settings.split.plan.keeps_exchanged:
            own = []
        ctx.save_for_backward(out, lse, kept, number, op_key, *weights, *own)

    def run(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *others: None) -> tuple[Tensor | None, ...]:
        out, lse, kept, number, op_key, *saved = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)  # other ranks may need this rank's part of the backward pass
        weights = [saved[:num_weights]] if num_weights else []
        gradients = backward(
            dout, saved[num_weights:], *weights, out, lse, kept, number, *ctx.sizes, op_key, ctx.session, ctx.call, dlse
        )
        return (*gradients, None, None, None)

    op.register_autograd(run, setup_context=save)


register_backward(attention, attention_backward, lambda q, k, v: (k.shape[1], k.shape[3]))
