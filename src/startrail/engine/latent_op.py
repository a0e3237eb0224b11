"""The custom ops ``startrail::latent_attention`` and ``startrail::latent_attention_backward``: as those in `op`, for
keys and values that are expanded from latents."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from startrail.engine import latents
from startrail.engine.arguments import AttentionCall, LatentShapes
from startrail.engine.op import UNSAFE, fake_results, find_session


@torch.library.custom_op("startrail::latent_attention", mutates_args=(), tags=UNSAFE)
def latent_attention(
    q: Tensor, latent: Tensor, k_rope: Tensor, w_k: Tensor, w_v: Tensor, op_key: Tensor, session: str, call: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What ``startrail::attention`` returns."""
    owner, parsed = find_session(session), AttentionCall.parse(call)
    return latents.forward(owner, q, latent, k_rope, w_k, w_v, op_key, parsed)


@latent_attention.register_fake
def _(
    q: Tensor, latent: Tensor, k_rope: Tensor, w_k: Tensor, w_v: Tensor, op_key: Tensor, session: str, call: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    shapes = LatentShapes.of(q, latent, k_rope, w_k, w_v)
    shapes.check()
    return fake_results(q, shapes, session, call)


@torch.library.custom_op("startrail::latent_attention_backward", mutates_args=(), tags=UNSAFE)
def latent_attention_backward(
    dout: Tensor, inputs: list[Tensor], weights: list[Tensor], out: Tensor, lse: Tensor, kept: Tensor, number: Tensor,
    rope_dim: int, op_key: Tensor, session: str, call: str, dlse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of all inputs. ``inputs`` (q, latent, k_rope) are empty if ``kept`` holds them."""
    owner, parsed = find_session(session), AttentionCall.parse(call)
    return latents.backward(owner, dout, inputs, weights, out, lse, kept, number, rope_dim, op_key, parsed, dlse)


@latent_attention_backward.register_fake
def _(
    dout: Tensor, inputs: list[Tensor], weights: list[Tensor], out: Tensor, lse: Tensor, kept: Tensor, number: Tensor,
    rope_dim: int, *context: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    (batch, heads, tokens, _), (w_k, w_v) = out.shape, weights
    return (
        out.new_empty(batch, heads, tokens, w_k.shape[1] + rope_dim),
        out.new_empty(batch, tokens, w_k.shape[2]),
        out.new_empty(batch, tokens, rope_dim),
        torch.empty_like(w_k, memory_format=torch.contiguous_format),
        torch.empty_like(w_v, memory_format=torch.contiguous_format),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)  # a result that was not used has no cotangent, and costs nothing
    q, latent, k_rope, w_k, w_v, op_key, ctx.session, ctx.call = inputs
    out, lse, kept, number, _ = output
    ctx.rope_dim = k_rope.shape[2]
    ctx.owner = find_session(ctx.session)  # stays alive until the backward pass has run
    own = () if ctx.owner.settings.split.plan.keeps_exchanged else (q, latent, k_rope)
    ctx.save_for_backward(out, lse, kept, number, op_key, w_k, w_v, *own)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *others: None) -> tuple[Tensor | None, ...]:
    out, lse, kept, number, op_key, w_k, w_v, *own = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)  # other ranks may need this rank's part of the backward pass
    gradients = torch.ops.startrail.latent_attention_backward(
        dout, own, [w_k, w_v], out, lse, kept, number, ctx.rope_dim, op_key, ctx.session, ctx.call, dlse
    )
    return (*gradients, None, None, None)


latent_attention.register_autograd(_backward, setup_context=_save)
