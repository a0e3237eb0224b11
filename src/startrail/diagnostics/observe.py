"""Runs a training step and records what ``verify`` compares: loss, gradients, buffers, modes, and attention calls.

Attention is recorded where a step calls ``Sequence.attention`` and, on one process, where it calls torch's
``scaled_dot_product_attention``. Two calls can then be compared by the pairs that see each other, however their masks
were passed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from startrail._compat import tree_leaves
from startrail.agreement.digest import digest
from startrail.engine.arguments import read_call, read_latent_call
from startrail.geometry.layout import Layout
from startrail.integrations.splitting.calls import TorchCall, argument_names
from startrail.parallel import SequenceParallel
from startrail.schedule.program import closed_form
from startrail.schedule.values import PASSES
from startrail.sequence import Sequence

MAX_LENGTH = 4096  # of sequences whose masks are recorded: a mask has the square of it
Gradients = dict[str, Tensor]


class AttentionRecord(NamedTuple):
    """One attention call. ``visible`` (batch or 1, length, length) is True where a query (row) sees a key (column), and
    None if that is not known. ``unsplit``: the layer, if torch's attention was called on a rank, so that nothing was
    sent. ``counts`` (length,): how often each key counts, if not once."""

    visible: Tensor | None
    scale: float
    softcap: float | None
    sinks: bool
    dtype: torch.dtype
    unsplit: str | None = None
    tokens: int = 0
    bytes: int = 0  # that this rank sends in both passes, or would send if the call were split
    counts: Tensor | None = None


@dataclass
class Observed:
    """What a step did to a model. ``buffers`` are those that are saved with it, ``constants`` the others.
    ``training``: the mode of each module when it was last called. ``layout`` is that of the last sequence that
    attended, or that was used at all. ``called``: methods of sequences. ``dropout``: some activations were dropped
    (recorded on one process only). ``arguments``: the tensors that the model was first called with, as (shape, digest).
    ``results``: the shapes of what each module first returned."""

    loss: float
    gradients: Gradients
    buffers: dict[str, Tensor]
    training: dict[str, bool]
    constants: dict[str, Tensor] = field(default_factory=dict)
    attention: list[AttentionRecord] = field(default_factory=list)
    layout: Layout | None = None
    called: set[str] = field(default_factory=set)
    dropout: bool = False
    arguments: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    results: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """The least precise dtype of attention, and at most float32: losses and norms are computed in it."""
        return max((torch.float32, *(one.dtype for one in self.attention)), key=lambda x: torch.finfo(x).eps)


@dataclass
class Results:
    """What a step gave in the model's own dtype, and in a more precise one if it runs in that. Of ranks: rank 0's."""

    native: Observed
    precise: Observed | None
    precise_dtype: torch.dtype | None

    @property
    def best(self) -> Observed:
        return self.precise or self.native


@dataclass
class RankResults(Results):
    """``losses`` are those of all ranks, ``unequal`` the parameters whose gradients differ between ranks,
    ``alike`` the ranks that have the same ones, and ``arguments`` the arguments of the model that differ."""

    losses: list[float]
    unequal: list[str]
    alike: list[list[int]]
    arguments: list[str] = field(default_factory=list)


def observe(
    step: Callable[[], Any], model: nn.Module, one_process: bool, sp: SequenceParallel | None = None
) -> Observed:
    """Run ``step``, which trains ``model`` and returns the loss."""
    observed = Observed(0.0, {}, {}, {})
    names = {id(module): name for name, module in model.named_modules()}
    recorder = _CallRecorder(observed, names, one_process, sp)
    hooks = [  # of all modules: a layer whose projection has hooks of its own would not send latents
        register_module_forward_pre_hook(partial(_record_mode, observed, names)),
        register_module_forward_hook(partial(_record_results, observed, names)),
        model.register_forward_pre_hook(partial(_record_arguments, observed), with_kwargs=True),
    ]
    torch.manual_seed(1)
    try:
        with recorded_attention(observed), recorder:
            loss = step()
    finally:
        for hook in hooks:
            hook.remove()
    if not isinstance(loss, int | float) and not (isinstance(loss, Tensor) and loss.numel() == 1):
        given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise ValueError(f"the step must return the loss, a number or a tensor with one element; it returned {given}")
    observed.loss = float(loss.detach() if isinstance(loss, Tensor) else loss)
    observed.gradients = gradients(model)
    saved = model.state_dict(keep_vars=True)
    for name, x in model.named_buffers():
        (observed.buffers if name in saved else observed.constants)[name] = _whole(x).clone()
    return observed


def _record_arguments(observed: Observed, model: nn.Module, args: Any, kwargs: Any) -> None:
    if observed.arguments:
        return
    for name, x in argument_names(model, args, kwargs).items():
        if isinstance(x, Tensor):
            observed.arguments[name] = tuple(x.shape), int(digest(x))


def _record_mode(observed: Observed, names: Mapping[int, str], module: nn.Module, args: Any) -> None:
    if id(module) in names:
        observed.training[names[id(module)]] = module.training


def _record_results(observed: Observed, names: Mapping[int, str], module: nn.Module, args: Any, output: Any) -> None:
    if id(module) in names:
        shapes = [tuple(x.shape) for x in tree_leaves(output) if isinstance(x, Tensor)]
        observed.results.setdefault(names[id(module)], shapes)


def gradients(model: nn.Module) -> Gradients:
    """The gradient of every trainable parameter, whole and in float64."""
    return {
        _plain_name(name): (torch.zeros_like(_whole(x)) if x.grad is None else _whole(x.grad)).double()
        for name, x in model.named_parameters()
        if x.requires_grad
    }


def _plain_name(name: str) -> str:
    """A parameter's name without what DDP and checkpoint wrappers add."""
    return name.removeprefix("module.").replace("_checkpoint_wrapped_module.", "")


def _whole(x: Tensor) -> Tensor:
    whole: Any = x.full_tensor() if hasattr(x, "full_tensor") else x
    return whole.detach()


@contextmanager
def changed_attention(change: Callable[..., Any], method: str = "attention") -> Iterator[None]:
    """Within, ``change(original, sequence, q, k, v, **options)`` replaces ``Sequence.attention``, or another method."""
    original = getattr(Sequence, method)
    parameters = signature(original).parameters.values()
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD][1:]

    def attention(sequence: Sequence, *tensors: Tensor, **options: Any) -> Any:
        tensors += tuple(options.pop(name) for name in names[len(tensors) :])
        if torch.compiler.is_compiling():
            return original(sequence, *tensors, **options)
        return change(original, sequence, *tensors, **options)

    with patch.object(Sequence, method, attention):
        yield


@contextmanager
def recorded_attention(observed: Observed) -> Iterator[None]:
    """Record the calls of ``Sequence.attention`` and ``Sequence.latent_attention``."""

    def record(original: Any, sequence: Sequence, *tensors: Tensor, **options: Any) -> Any:
        result = original(sequence, *tensors, **options)
        given = {name: x for name, x in options.items() if name not in ("return_lse", "return_largest")}
        read = read_call if len(tensors) == 3 else read_latent_call
        call = read(*tensors, **given)
        visible = None
        if sequence.length <= MAX_LENGTH:
            mask = sequence._state.batch.boundaries.apply(call.mask)
            keys = torch.arange(sequence.length)
            visible = torch.zeros(1, sequence.length, sequence.length, dtype=torch.bool)
            for each in mask.staircases:
                ends = torch.tensor([each.visible(query, sequence.length) for query in range(sequence.length)])
                visible |= (keys >= ends[:, :1]) & (keys < ends[:, 1:])
        out = result[0] if isinstance(result, tuple) else result
        sinks = given.get("sinks") is not None
        scale = call.scale_for(tensors[0].shape[-1])
        passes = sequence.promised_traffic(*tensors, mask=call.mask).values()
        sent = sum(sum(levels.values()) for levels in passes)
        observed.attention.append(AttentionRecord(visible, scale, call.softcap, sinks, out.dtype, bytes=sent))
        observed.layout = sequence._layout
        return result

    with ExitStack() as stack:
        for context in (changed_attention(record), changed_attention(record, "latent_attention")):
            stack.enter_context(context)
        for name in ("shard", "scan", "conv1d", "halo"):
            stack.enter_context(_noted(name, observed))
        yield


def _noted(name: str, observed: Observed) -> AbstractContextManager[Any]:
    """Within, ``observed`` learns of calls of this method."""
    original = getattr(Sequence, name)

    def call(sequence: Sequence, *arguments: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling():
            observed.called.add(name)
            observed.layout = observed.layout or sequence._layout
        return original(sequence, *arguments, **options)

    return patch.object(Sequence, name, call)


class _CallRecorder(TorchFunctionMode):
    """Records torch's own attention, and on one process whether anything is dropped."""

    def __init__(
        self, observed: Observed, names: dict[int, str], one_process: bool, sp: SequenceParallel | None
    ) -> None:
        super().__init__()
        self._observed, self._names, self._one_process, self._sp = observed, names, one_process, sp

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is F.scaled_dot_product_attention:
            call = TorchCall.of(*args, **(kwargs or {}))
            if self._one_process:
                self._observed.attention.append(_record_of(call))
                self._observed.dropout |= call.dropout > 0
            elif call.q.shape[-2] == call.k.shape[-2]:
                self._observed.attention.append(self._unsplit(call))
        elif self._one_process and function is F.dropout:
            rate, training = [*args[1:], *(kwargs or {}).values()][:2]
            self._observed.dropout |= training and rate > 0
        return result

    def _unsplit(self, call: TorchCall) -> AttentionRecord:
        frame: Any = sys._getframe(2)
        while frame is not None and id(frame.f_locals.get("self")) not in self._names:
            frame = frame.f_back
        layer = "the model" if frame is None else self._names[id(frame.f_locals["self"])] or "the model"
        promised = 0
        if self._sp is not None and call.q.dim() == 4:
            sizes, plan = self._sp.sizes(call.q, call.k, call.v), self._sp.plan
            sent = [closed_form(plan, self._sp.world, self._sp.rank, pass_, sizes.by_kind) for pass_ in PASSES]
            promised = round(sum(map(sum, sent)))
        return _record_of(call)._replace(visible=None, unsplit=layer, tokens=call.q.shape[-2], bytes=promised)


def _record_of(call: TorchCall) -> AttentionRecord:
    scale = call.q.shape[-1] ** -0.5 if call.scale is None else call.scale
    return AttentionRecord(_visible_in(call), scale, None, False, call.q.dtype)


def _visible_in(call: TorchCall) -> Tensor | None:
    rows, columns = call.q.shape[-2], call.k.shape[-2]
    if rows != columns or rows > MAX_LENGTH:
        return None
    whole = torch.ones(1, rows, columns, dtype=torch.bool)
    if call.causal:
        return whole.tril()
    if call.mask is None:
        return whole
    mask = call.mask.detach().cpu()
    if mask.is_floating_point():
        low = torch.finfo(mask.dtype).min / 2
        if bool(((mask != 0) & (mask > low)).any()):
            return None  # a bias, not a mask
        mask = mask > low
    mask = mask[(None,) * (4 - mask.dim())]
    mask = mask.expand(*mask.shape[:2], rows, columns)
    return mask[:, 0] if bool((mask == mask[:, :1]).all()) else None
