"""Transformers of diffusers: train and sample with the sequence split over all ranks, in two lines::

    transformer = attach(DiTTransformer2DModel(...), sp)
    loss = F.mse_loss(transformer(noisy, timestep=t, class_labels=y).sample, noise)
    loss.backward()
    startrail.sum_gradients(transformer.parameters(), sp.group)

Every rank calls the transformer with the same arguments (so all ranks of a sequence draw the same noise and timesteps)
and gets the whole result. A model's own ``_cp_plan`` says where its tokens are split and gathered. Without one, as in
DiT and SD3, or with one that splits masks or single layers, they are split in front of the first block and gathered
behind the last. Any number of tokens and heads works. Text next to image tokens is split as well, or kept whole on
every rank; both are exact.
"""

from __future__ import annotations

import inspect
from functools import partial
from types import MethodType
from typing import Any, Literal

from diffusers import ModelMixin
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from startrail._compat import in_backward
from startrail.checkpoint import checkpoint_context
from startrail.integrations import modules
from startrail.integrations.splitting.refusals import RefusedError
from startrail.integrations.splitting.regions import AttachedModule
from startrail.integrations.splitting.streams import StreamPart
from startrail.parallel import SequenceParallel

__all__ = ["attach", "detach"]

Splits = dict[str | int, Any]


def attach(
    transformer: Any, sp: SequenceParallel, *, text: Literal["split", "whole"] = "split", check: bool = True
) -> Any:
    """Split the sequence of ``transformer`` over the ranks of ``sp``, and return it.

    ``text``: whether text that attends jointly with the image is split over ranks too, or kept whole on each. *Sum* the
    gradients over ranks. With ``check``, the first two steps compare parameters, noise, timesteps and losses between
    the ranks of a sequence, and data between data-parallel groups.

    A transformer that cannot be split raises ``ValueError``, here or in its first call, with the module's name.
    """
    if not issubclass(type(transformer), ModelMixin):
        raise ValueError(
            f"attach needs a model of diffusers, got {type(transformer).__name__}: for other modules use "
            "startrail.integrations.modules.attach"
        )
    if text not in ("split", "whole"):
        raise ValueError(f"text={text!r} must be 'split' or 'whole'")
    plan = _plan_of(transformer)
    attached = AttachedModule(sp, whole_text=text == "whole", splits_blocks=plan is None, strict=True)
    modules.prepare(transformer, attached, check)
    transformer.__dict__["_startrail_hooks"] = []
    try:
        modules.wrap_blocks(transformer, attached)
        for name, entry in (plan or {}).items():
            transformer._startrail_hooks.extend(_follow(attached, transformer, name, entry))
    except BaseException:
        detach(transformer)
        raise
    transformer.enable_gradient_checkpointing = MethodType(_enable_checkpointing, transformer)
    if getattr(transformer, "is_gradient_checkpointing", False):
        transformer.enable_gradient_checkpointing()
    return transformer


def detach(transformer: Any) -> Any:
    """Undo ``attach``, and return the transformer."""
    modules.detach(transformer)
    for hook in transformer.__dict__.pop("_startrail_hooks"):
        hook.remove()
    transformer.__dict__.pop("enable_gradient_checkpointing", None)
    return transformer


def _enable_checkpointing(transformer: Any, gradient_checkpointing_func: Any = None) -> None:
    """``enable_gradient_checkpointing`` that recomputes everything except the distributed attention."""
    saving = partial(checkpoint, use_reentrant=False, context_fn=checkpoint_context)
    type(transformer).enable_gradient_checkpointing(transformer, gradient_checkpointing_func or saving)


# --- a model's own plan


def _plan_of(transformer: Any) -> dict[str, Any] | None:
    """The model's ``_cp_plan`` if it splits tokens once and gathers them once; else None, and its blocks are tried."""
    plan: dict[str, Any] | None = getattr(transformer, "_cp_plan", None)
    arguments = [str(name) for entry in (plan or {}).values() if isinstance(entry, dict) for name in entry]
    gathers = [entry for entry in (plan or {}).values() if not isinstance(entry, dict)]
    simple = len(gathers) == 1 and not any("*" in name for name in plan or {})
    return plan if simple and not any("mask" in name for name in arguments) else None


def _follow(attached: AttachedModule, transformer: Any, name: str, entry: Any) -> list[Any]:
    """Hooks that split and gather what an entry of a plan says."""
    module = transformer.get_submodule(name)
    if isinstance(entry, ContextParallelOutput):
        return [module.register_forward_hook(partial(_gather, attached, entry))]
    if not isinstance(entry, dict) or not all(isinstance(each, ContextParallelInput) for each in entry.values()):
        raise RefusedError(
            f"{type(transformer).__name__}: its _cp_plan has an entry for {name!r} that is not supported"
        )
    if not name:
        attached.before_root = partial(_split_arguments, attached, entry)
        return []
    return [
        module.register_forward_pre_hook(partial(_split_arguments, attached, entry), with_kwargs=True),
        module.register_forward_hook(partial(_split_results, attached, entry)),
    ]


def _is_text(name: str) -> bool:
    return any(word in name for word in ("encoder", "txt", "text"))


def _split_arguments(attached: AttachedModule, entry: Splits, module: nn.Module, args: Any, kwargs: Any) -> Any:
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    found = {}
    for name, how in entry.items():
        x = bound.arguments.get(str(name))
        if not how.split_output and isinstance(x, Tensor) and how.expected_dims in (None, x.dim()):
            found[str(name)] = x, how.split_dim
    bound.arguments.update(_split(attached, module, found))
    return bound.args[1:], bound.kwargs


def _split_results(attached: AttachedModule, entry: Splits, module: nn.Module, arguments: object, output: Any) -> Any:
    outputs = [output] if isinstance(output, Tensor) else list(output)
    found = {}
    for index, how in entry.items():
        if how.split_output and how.expected_dims in (None, outputs[int(index)].dim()):
            found[str(index)] = outputs[int(index)], how.split_dim
    for name, x in _split(attached, module, found).items():
        outputs[int(name)] = x
    return outputs[0] if isinstance(output, Tensor) else tuple(outputs)


def _split(attached: AttachedModule, module: nn.Module, found: dict[str, tuple[Tensor, int]]) -> dict[str, Tensor]:
    """This rank's rows of each tensor, which is given with its dimension of tokens."""
    if not found or not (attached.call is not None or in_backward()):
        return {}
    streams = attached.current()
    if streams is None:
        sizes: dict[bool, set[int]] = {True: set(), False: set()}
        for name, (x, dim) in found.items():
            sizes[_is_text(name)].add(x.shape[dim])
        if len(sizes[False]) != 1 or len(sizes[True]) > 1:
            shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, (x, _) in found.items())
            raise RefusedError(f"{module._startrail_name}: cannot tell tokens from text among {shapes}")
        assert attached.call is not None
        streams = attached.call.open(sizes[False].pop(), sizes[True].pop() if sizes[True] else 0)
    split = {}
    for name, (x, dim) in found.items():
        part = StreamPart.TEXT if _is_text(name) else StreamPart.TOKENS
        split[name] = x if x.shape[dim] == streams.local(part) else streams.shard(x, dim, part)
    return split


def _gather(
    attached: AttachedModule, entry: ContextParallelOutput, module: nn.Module, arguments: object, x: Tensor
) -> Tensor:
    streams = attached.current()
    if streams is None:
        return x
    whole = streams.unshard(x, entry.gather_dim, StreamPart.TOKENS)
    if attached.call is not None:
        attached.call.streams = None
    return whole
