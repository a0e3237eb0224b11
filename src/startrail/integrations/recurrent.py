"""Recurrent layers and short convolutions of transformers models: while a model is attached, they run over all ranks.

Such a layer calls functions of its modeling file where tokens meet, ``causal_conv1d_fn`` for example. While a model of
the file is attached, these seams are replaced (`seams.py` has the table). Inside an attached layer, the replacement
runs on the batch's sequence; everywhere else it is the function that it replaces.

A layer gets its batch as attention does, by a ``MaskPlaceholder`` in place of its mask, so a layer that is recomputed
in the backward pass has the batch of its forward pass.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet, finalize

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface

from startrail.integrations.layer_masks import UNUSED_ARGUMENTS, MaskPlaceholder
from startrail.integrations.seams import SEAMS, Runs, computes, find, fused_kernel

if TYPE_CHECKING:
    from startrail.integrations.transformers import Attached

MASKS = "create_recurrent_attention_mask"  # of a modeling file, which makes the masks of these layers


class Frame(NamedTuple):
    """A layer that is running. ``runs`` is None if it is not attached at the moment."""

    layer: nn.Module
    runs: Runs | None
    called: set[str]  # its seams so far


class _Frames(threading.local):
    def __init__(self) -> None:
        self.running: list[Frame] = []  # of this thread, outermost first


_frames = _Frames()
_originals: dict[str, dict[str, Any]] = {}  # what has been replaced, of each modeling file by its name
_users: dict[str, WeakSet[Attached]] = {}


class EachToken:
    """Stands in for a sequence while a model is probed: what a token gets depends on all of its own inputs, and on no
    other token."""

    def conv1d(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        if activation not in (None, "silu", "swish"):
            raise ValueError(f"a convolution with activation {activation!r} is not supported")
        out = x * weight[:, -1:] + (0 if bias is None else bias.unsqueeze(1))
        return out if activation is None else F.silu(out)

    def scan(self, kernel: Callable[..., Any], *tensors: Tensor, **options: Any) -> Tensor:
        like = tensors[2] if tensors[0].dim() == 4 else tensors[0]
        each = [x.to(like.dtype).flatten(2).mean(2) for x in tensors if x.shape[:2] == like.shape[:2]]
        per_token = torch.stack(each).sum(0)
        return like + per_token.view(*like.shape[:2], *[1] * (like.dim() - 2))


def layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, tuple[str, ...]]]:
    """The layers that call seams: each with its modeling file, and the seams of its forward pass."""
    for module in model.modules():
        kind = _kind(module)
        if names := _seams_of(kind):
            yield module, kind.__module__, names


def is_layer(module: nn.Module) -> bool:
    return bool(_seams_of(_kind(module)))


def _kind(module: nn.Module) -> type:
    """The class that has the module's forward pass."""
    return next(kind for kind in type(module).__mro__ if "forward" in kind.__dict__)


@functools.cache
def _seams_of(kind: type) -> tuple[str, ...]:
    modeling = sys.modules.get(kind.__module__)
    code = getattr(inspect.unwrap(kind.__dict__["forward"]), "__code__", None)
    used = {f"{kind.__name__}.forward", *(code.co_names if code else ())}
    return tuple(name for name in SEAMS if name in used and modeling is not None and find(modeling, name) is not None)


def describe(model: nn.Module) -> tuple[str, ...]:
    """What the layers are, for each kind of them."""
    kinds = {type(layer): names for layer, _, names in layers(model)}
    labels = ([SEAMS[name].label for name in names if SEAMS[name].label] for names in kinds.values())
    return tuple(dict.fromkeys(" + ".join(each) for each in labels))


def install(model: nn.Module, language_model: nn.Module, attached: Attached) -> list[Any]:
    """Replace the seams of the modeling files whose layers are in ``language_model`` as soon as ``model`` runs. Returns
    the handles of hooks.

    Raises ``ValueError`` if a seam does not compute what startrail would in its place."""
    found = list(layers(language_model))
    for layer, modeling, names in found:
        for name in names:
            if not computes(sys.modules[modeling], name):
                raise ValueError(
                    f"{layer._startrail_name}: {name} of {modeling} does not compute what startrail would in its place "
                    f"(transformers {transformers.__version__}): it cannot be split"
                )
    if not found:
        return []
    files = {modeling for _, modeling, _ in found}
    known = {name for modeling in files for name in vars(sys.modules[modeling])}
    gives_mask = not any(name.startswith("create_") and name.endswith("_mask") for name in known)
    handles = [model.register_forward_pre_hook(partial(_begin, attached, files, gives_mask), with_kwargs=True)]
    for layer, _, names in found:
        handles.append(layer.register_forward_pre_hook(partial(_enter, attached), with_kwargs=True))
        handles.append(layer.register_forward_hook(partial(_leave, attached, names), always_call=True))
    finalize(attached, restore)
    return handles


def remove(attached: Attached) -> None:
    for users in _users.values():
        users.discard(attached)
    restore()


def restore() -> None:
    """Put back the seams of modeling files of which no model is attached."""
    for modeling in [modeling for modeling in _originals if not _users[modeling]]:
        for name, original in _originals.pop(modeling).items():
            _set(sys.modules[modeling], name, original)


def _replace(modeling: str) -> None:
    if modeling in _originals:
        return
    originals = {name: find(sys.modules[modeling], name) for name in (MASKS, *SEAMS)}
    _originals[modeling] = {name: original for name, original in originals.items() if original is not None}
    for name, original in _originals[modeling].items():
        _set(sys.modules[modeling], name, _mask_maker(original) if name == MASKS else _dispatcher(name, original))


def _set(modeling: Any, name: str, function: Any) -> None:
    owner, _, own = name.rpartition(".")
    setattr(getattr(modeling, owner) if owner else modeling, own, function)


def _mask_maker(original: Callable[..., Any]) -> Callable[..., Any]:
    """For an attached model, a placeholder of the batch instead of a mask."""

    @functools.wraps(original)
    def make(config: Any, *arguments: Any, **options: Any) -> Any:
        name = str(config._attn_implementation)
        if not name.startswith("startrail-"):
            return original(config, *arguments, **options)
        return AttentionMaskInterface._global_mapping[name](recurrent=True)

    return make


def _dispatcher(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    function = SEAMS[name].function
    parameters = inspect.signature(function).parameters
    takes_any = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in parameters.values())

    @functools.wraps(original)
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def call(*arguments: Any, **options: Any) -> Any:
        frame = _frames.running[-1] if _frames.running else None
        if frame is None or frame.runs is None:
            return original(*arguments, **options)
        frame.called.add(name)
        given = {key: x for key, x in options.items() if takes_any or key in parameters}
        if "fused" in parameters and not isinstance(frame.runs, EachToken):
            given["fused"] = fused_kernel(original, next(iter((*arguments, *options.values()))))
        for key in options.keys() - given.keys() - UNUSED_ARGUMENTS:
            x = options[key]
            if x is not None and x is not False:
                shown = tuple(x.shape) if isinstance(x, Tensor) else x
                raise ValueError(f"{frame.layer._startrail_name}: unsupported argument to {name}: {key}={shown}")
        return function(frame.runs, *arguments, **given)

    return call


def _begin(
    attached: Attached, files: set[str], gives_mask: bool, model: nn.Module, arguments: Any, options: dict[str, Any]
) -> Any:
    """``gives_mask``: the model makes no masks, its layers get the one that it is given."""
    for modeling in files:
        _users.setdefault(modeling, WeakSet()).add(attached)
        _replace(modeling)  # ``detach`` of a copy of the model may have restored it
    if gives_mask and not attached.paused:
        options = {**options, "attention_mask": attached.mask(recurrent=True)}
    return arguments, options


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _enter(attached: Attached, layer: nn.Module, arguments: Any, options: dict[str, Any]) -> Any:
    """The layer's mask says which batch it runs on; it gets a real mask of this rank's tokens, or None, instead."""
    if attached.paused:
        _frames.running.append(Frame(layer, None, set()))
        return None
    context = next((x.context for x in (*arguments, *options.values()) if isinstance(x, MaskPlaceholder)), None)
    if context is None and attached.probed is None:
        raise ValueError(
            f"{layer._startrail_name}: called without a batch: call the whole model that is attached, "
            "model(**shard_batch(sp, ...)), not a part of it"
        )
    mask, runs = None, EachToken() if context is None else context.sequence
    if context is not None and context.fully_masked is not None:
        mask = ~context.fully_masked.unsqueeze(0)
    _frames.running.append(Frame(layer, runs, set()))
    arguments = tuple(mask if isinstance(x, MaskPlaceholder) else x for x in arguments)
    return arguments, {key: mask if isinstance(x, MaskPlaceholder) else x for key, x in options.items()}


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _leave(attached: Attached, names: tuple[str, ...], layer: nn.Module, arguments: object, output: object) -> None:
    if not _frames.running or _frames.running[-1].layer is not layer:  # something else failed before it began
        return
    frame = _frames.running.pop()
    missing = [name for name in names if SEAMS[name].label and name not in frame.called]
    if output is None or frame.runs is None:
        return
    problem = None
    if missing:
        problem = f"it does not call {missing[0]} of its modeling file, or another library has replaced that function"
    if attached.probed is not None:
        attached.probed.append((str(layer._startrail_name), problem))
    elif problem is not None:
        raise ValueError(f"{layer._startrail_name}: {problem}")
