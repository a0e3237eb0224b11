"""Activation checkpointing: layers that never repeat distributed attention, and modules that run in chunks of tokens.

>>> import torch
>>> from torch.utils.checkpoint import checkpoint
>>> x = torch.ones(2, requires_grad=True)
>>> y = checkpoint(torch.sin, x, use_reentrant=False, context_fn=checkpoint_context)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from startrail.engine import gather_op as _gather
from startrail.engine import halo as _halo
from startrail.engine import latents as _latents
from startrail.engine import op as _op
from startrail.engine import scan as _scan


def checkpoint_context() -> Any:
    """Pass as ``context_fn``: the backward pass recomputes everything except attention, and what other layers get from
    other ranks. Their results are saved."""
    ops = torch.ops.startrail
    # importing these modules registers the ops
    assert _op.attention and _latents.latent_attention and _halo.gather_halo and _scan.carry_states and _gather.add_up
    saved = [ops.attention, ops.latent_attention, ops.gather_halo, ops.carry_states, ops.add_up]
    return create_selective_checkpoint_contexts([op.default for op in saved])


def in_chunks(
    module: nn.Module, function: Callable[..., Tensor], x: Tensor, *per_token: Tensor, chunk: int, summed: bool = False
) -> Tensor:
    """``function(x, *per_token)`` on ``chunk`` tokens at a time: x (1, tokens, width), per_token (1, tokens). The
    function uses the parameters of ``module``, and computes each token independently. Results are concatenated, or
    added if ``summed``. The backward pass recomputes each chunk, so only one chunk's activations exist at a time.
    Gradients of parameters are added up in float32 or wider.

    >>> layer, x = nn.Linear(2, 3), torch.randn(1, 5, 2)
    >>> torch.allclose(in_chunks(layer, layer, x, chunk=2), layer(x))
    True
    """
    if torch.is_grad_enabled() and not _must_be_called_as_it_is(module):
        named = dict(module.named_parameters())
        settings = (module, function, chunk, summed, tuple(named), len(per_token))
        return _InChunks.apply(settings, x, *per_token, *named.values())
    run: Callable[..., Tensor] = function
    if torch.is_grad_enabled():
        run = partial(checkpoint, function, use_reentrant=False, context_fn=checkpoint_context)
    return _join([run(*part) for part in _parts((x, *per_token), chunk)], summed)


def _must_be_called_as_it_is(module: nn.Module) -> bool:
    """True if FSDP gathers the parameters of a part of ``module`` whenever that is called, if a part draws random
    numbers, which ``checkpoint`` repeats, or if an adapter of peft replaces a parameter while its layer runs."""
    return any(
        (isinstance(part, FSDPModule | FullyShardedDataParallel) and part is not module)
        or (isinstance(part, nn.Dropout) and part.p > 0 and part.training)
        or hasattr(part, "parameter_name")
        for part in module.modules()
    )


def _parts(tensors: tuple[Tensor, ...], chunk: int) -> Iterator[tuple[Tensor, ...]]:
    for start in range(0, tensors[0].shape[1], chunk):
        yield tuple(tensor[:, start : start + chunk] for tensor in tensors)


def _join(results: list[Tensor], summed: bool) -> Tensor:
    return torch.stack(results).sum(0) if summed else torch.cat(results, 1)


class _WithParameters(nn.Module):
    """Calls a function while the parameters of ``module`` are replaced (``functional_call``)."""

    def __init__(self, module: nn.Module, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.module = module
        self.__dict__["function"] = function  # not as a submodule, if it is one

    def forward(self, *arguments: Tensor) -> Tensor:
        result: Tensor = self.__dict__["function"](*arguments)
        return result


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: tuple[Any, ...], *tensors: Tensor) -> Tensor:
        _, function, chunk, summed, _, num_per_token = settings
        kind = tensors[0].device.type
        ctx.settings = settings
        ctx.autocast = dict(dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind))
        ctx.save_for_backward(*tensors)
        return _join([function(*part) for part in _parts(tensors[: 1 + num_per_token], chunk)], summed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Parameters are replaced by detached ones, so that their hooks run once, for the whole gradient."""
        module, function, chunk, summed, names, num_per_token = ctx.settings
        x, *rest = ctx.saved_tensors  # read once, or ``checkpoint`` raises
        per_token, saved = rest[:num_per_token], rest[num_per_token:]
        need_x, *need = ctx.needs_input_grad[1:2] + ctx.needs_input_grad[2 + num_per_token :]
        parameters = [x.detach().requires_grad_(needed) for x, needed in zip(saved, need, strict=True)]
        call = _WithParameters(module, function)
        replaced = {f"module.{name}": parameter for name, parameter in zip(names, parameters, strict=True)}
        grad_x = torch.empty_like(x) if need_x else None
        totals: list[Tensor | None] = [None] * len(parameters)
        start = 0
        for part_of_x, *others in _parts((x, *per_token), chunk):
            part_of_x = part_of_x.detach().requires_grad_(need_x)
            wanted = [y for y in (part_of_x, *parameters) if y.requires_grad]
            rows = slice(start, start + part_of_x.shape[1])
            start = rows.stop
            with torch.enable_grad(), torch.autocast(x.device.type, **ctx.autocast):
                out = functional_call(call, replaced, (part_of_x, *others))
            found = torch.autograd.grad(out, wanted, upstream if summed else upstream[:, rows], allow_unused=True)
            grads = dict(zip(map(id, wanted), found, strict=True))
            if grad_x is not None:
                grad_x[:, rows] = grads[id(part_of_x)]
            for index, parameter in enumerate(parameters):
                totals[index] = _add(totals[index], grads.get(id(parameter)))
        total = (None if y is None else y.to(p.dtype) for y, p in zip(totals, parameters, strict=True))
        return (None, grad_x, *(None,) * num_per_token, *total)


def _add(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return total
    precise = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    return precise if total is None else total.add_(precise)
