"""Hugging Face transformers: a causal language model whose attention runs over all ranks, in three lines::

    sp = startrail.SequenceParallel("auto", heads=32, kv_heads=8)
    model = attach(AutoModelForCausalLM.from_pretrained(...), sp)
    loss = model(**shard_batch(sp, input_ids=ids, labels=labels)).loss      # this rank's share of one process's loss

``attach`` gives the model an attention function and a mask function of its own, under a name of their own, so that two
models with two plans live side by side. It then asks the model for one forward pass of a few tokens, in which every
layer says what it wants: its mask, its scale, sinks, and whatever else it passes on. What cannot be run is refused
there, with the layer's name; so is a model in which tokens see each other without attention, or whose loss does not
take labels that are already shifted.

The mask function returns a ``MaskPlaceholder`` instead of a mask: the batch's sequence, and which keys this kind of
layer sees. The model passes it to its layers, so a layer that is recomputed in the backward pass gets the batch of its
forward pass.
"""

from __future__ import annotations

import copy
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from startrail.checkpoint import checkpoint_context
from startrail.comm.sanity import STEPS, check_same_parameters, unwatched, watch_gradients
from startrail.integrations.batch import IGNORE, Shared, shard_batch
from startrail.integrations.layer_masks import (
    LayerKind,
    MaskPlaceholder,
    MaskUseError,
    kind_of,
    problem_of,
    softcap_problem,
)
from startrail.integrations.token_mixing import seen_by_neighbours
from startrail.integrations.versions import is_checkpointing, warn_if_untested
from startrail.losses import gradient_factor
from startrail.parallel import SequenceParallel

__all__ = ["attach", "detach", "gradient_factor", "shard_batch"]

TRIED_TOKENS = 4

_numbers = itertools.count()


class Attached:
    """What a model, its copies, and its functions share. ``kinds`` are those of its masks, by what tells them apart
    when they are made, ``softcaps`` those of its layers; ``asked`` is what the layers ask for while the model is tried,
    else None; ``before`` is how its modules attended."""

    def __init__(self, sp: SequenceParallel) -> None:
        self.sp = sp
        self.name = f"startrail-{next(_numbers)}"
        self.kinds: dict[tuple[object, ...], LayerKind] = {}
        self.softcaps: set[float] = set()
        self.shared: Shared | None = None
        self.asked: list[tuple[str, str | None]] | None = None
        self.before: dict[str, str | None] = {}
        self.steps = 0
        self.checking = False  # whether the forward pass that runs is one of the first in training

    def __deepcopy__(self, memo: object) -> Attached:
        """A copied model asks for attention by the same name."""
        return self

    # --- what transformers calls

    def mask(self, *arguments: Any, mask_function: Callable[..., Any] | None = None, **options: Any) -> MaskPlaceholder:
        key = (options.get("local_size"), "allow_is_bidirectional_skip" in options, bool(options.get("use_vmap")))
        if self.asked is not None:
            kind = kind_of(mask_function)
            if self.kinds.setdefault(key, kind) != kind:
                raise ValueError(f"masks of {kind} and {self.kinds[key]} cannot be told apart")
            return MaskPlaceholder(None, kind)
        if key not in self.kinds:
            raise ValueError(f"a mask that the model did not ask for when it was attached: {key}")
        return MaskPlaceholder(self.shared, self.kinds[key])

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        s_aux: Tensor | None = None,
        softcap: float | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Attention of one layer: (batch, heads, tokens, dim) in, (batch, tokens, heads, dim) out."""
        problem = problem_of(query, key, attention_mask, dropout, others)
        if self.asked is not None:
            if softcap is not None:
                self.softcaps.add(softcap)
                problem = problem or softcap_problem(query, softcap)
            self.asked.append((str(getattr(module, "_startrail_name", type(module).__name__)), problem))
            return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None
        problem = problem or self._problem_with_batch(attention_mask, s_aux)
        if problem is not None:
            raise ValueError(f"{getattr(module, '_startrail_name', type(module).__name__)}: {problem}")
        kind, shared = attention_mask.kind, attention_mask.shared
        sequence, chunk = shared.chunked(kind.chunk)
        options: dict[str, Any] = dict(scale=scaling, sinks=s_aux, softcap=softcap)
        out = sequence.attention(query, key, value, causal=kind.causal, window=kind.window, chunk=chunk, **options)
        if shared.blind is not None:
            out = out.masked_fill(shared.blind.view(1, 1, -1, 1), 0)
        return out.transpose(1, 2).contiguous(), None  # some models take views of it

    def _problem_with_batch(self, seen: MaskPlaceholder, sinks: Tensor | None) -> str | None:
        if seen.shared is None:
            return "the model was called without a batch: model(**shard_batch(sp, ...))"
        if seen.shared.blind is not None and sinks is None and "eager" in self.before.values():
            return (
                "a label is learnt from padding on the left, which attends to everything in transformers' eager "
                "attention: give the first token of each row the label -100"
            )
        return None

    def before_forward(
        self, model: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Take the batch's sequence out of what the model gets; in the first steps, check what could go wrong."""
        self.shared = options.pop("startrail", None)
        if self.asked is None and self.shared is None:
            raise ValueError(
                "the model is attached to startrail: call model(**shard_batch(sp, input_ids=..., labels=...)), or "
                "detach(model) first"
            )
        self.checking = self.asked is None and self.steps < STEPS and model.training
        self.checking = self.checking and not torch.compiler.is_compiling()
        if self.checking:
            self.steps += 1
            check_same_parameters(model.named_parameters(), self.sp.group)
        return arguments, options


def attach(model: PreTrainedModel, sp: SequenceParallel, *, check: bool = True) -> PreTrainedModel:
    """Let ``model`` attend over all ranks of ``sp``, and return it.

    ``ValueError`` names what cannot be run, and the layer. ``check``: in the first two training steps, compare the
    ranks' parameters, and find out whether gradients are averaged that should be summed.
    """
    if not isinstance(model, PreTrainedModel):
        hint = ""
        if type(model).__module__.startswith("diffusers."):
            hint = " of diffusers: give its attention modules a processor of your own that calls sequence.attention"
        raise ValueError(f"attach needs a transformers model, got {type(model).__name__}{hint}")
    if hasattr(model, "_startrail"):
        raise ValueError(f"the model is attached already, to {model._startrail.sp}; detach(model) first")
    warn_if_untested()
    _refuse_by_config(model)
    attached = Attached(sp)
    _own_configs(model)
    for name, module in model.named_modules():
        module._startrail_name = name or type(module).__name__
    found = weakref.ref(attached)  # the registry must not keep the model's plan alive
    AttentionInterface.register(attached.name, _method(found, "attend"))
    AttentionMaskInterface.register(attached.name, _method(found, "mask"))
    weakref.finalize(attached, _unregister, attached.name)
    configs = _configs(model)
    attached.before = {name: config._attn_implementation for name, config in configs.items()}
    for config in configs.values():
        config._attn_implementation_internal = attached.name
    model._startrail, model._startrail_hooks = attached, []
    try:
        _try(model, attached)
    except BaseException:
        detach(model)
        raise
    attached.steps = 0 if check else STEPS
    # handles of hooks stay with the model: a copy of the model has its own
    model._startrail_hooks.append(model.register_forward_pre_hook(_before_forward, with_kwargs=True, prepend=True))
    if check and sp.world > 1:
        model._startrail_hooks.append(model.register_forward_hook(_watch_loss))
    # bound, so that a copy of the model acts on the copy
    model.gradient_checkpointing_enable = MethodType(_checkpointing_that_keeps_attention, model)
    if is_checkpointing(model):
        model.gradient_checkpointing_enable()
    return model


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """The model as it was, for generation on one process."""
    attached: Attached | None = model.__dict__.pop("_startrail", None)
    if attached is None:
        raise ValueError("the model is not attached")
    for name, config in _configs(model).items():
        config._attn_implementation_internal = attached.before[name]
    for hook in model.__dict__.pop("_startrail_hooks"):
        hook.remove()
    model.__dict__.pop("gradient_checkpointing_enable", None)
    return model


# --- refusing


def _refuse_by_config(model: PreTrainedModel) -> None:
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__}: a decoder that attends to an encoder's states is not supported")
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            f"{type(model).__name__}: the routers' auxiliary loss is of a rank's own tokens, not of all; set "
            "config.output_router_logits=False"
        )
    text = config.get_text_config(decoder=True)
    known = {"full_attention", "sliding_attention", "chunked_attention", None}
    for index, kind in enumerate(getattr(text, "layer_types", None) or ()):
        if kind not in known:
            reason = (
                "its state would have to pass from rank to rank" if "linear" in str(kind) else "it is not known here"
            )
            raise ValueError(f"{type(model).__name__}: layer {index} is {kind!r}: {reason}")


def _try(model: PreTrainedModel, attached: Attached) -> None:
    """Ask every layer what it wants, with forward passes of a few tokens in which nothing is attended."""
    owners = {module._startrail_name for module in model.modules() if _is_attention(module)}
    device = next(model.parameters()).device
    ids = torch.arange(TRIED_TOKENS, device=device).unsqueeze(0) % 2
    labels = torch.tensor([[1, 0, 1, IGNORE]], device=device)
    options = dict(labels=labels, shift_labels=labels, num_items_in_batch=7)

    def run(ids: Tensor, **options: Any) -> Any:
        mask, positions = torch.ones_like(ids), torch.full_like(ids, 3)
        return model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, **options)

    with _trying(model, attached):
        model.train()
        found = run(ids, **options)
        asked = attached.asked or []
    for name, problem in asked:
        if problem:
            raise ValueError(f"{name}: {problem}")
    if not asked:
        raise ValueError(
            f"no layer of {type(model).__name__} asks for attention through transformers' AttentionInterface"
        )
    silent = owners - {name for name, _ in asked}
    if silent:
        raise ValueError(
            f"{sorted(silent)[0]} does not ask for attention through transformers' AttentionInterface, or not for text"
        )
    with _trying(model, attached):
        model.eval()  # without dropout
        place = seen_by_neighbours(model, lambda ids: run(ids)[0])
    if place is not None:
        raise ValueError(
            f"{place}: a token's result depends on other tokens although nothing is attended (a recurrence, a "
            "convolution or a token shift): its state would have to pass from rank to rank"
        )
    if device.type != "meta" and getattr(found, "loss", None) is not None:
        logits = found.logits.float().reshape(-1, found.logits.shape[-1])
        expected = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum") / 7
        if not torch.allclose(found.loss.float(), expected, rtol=1e-3, atol=1e-5):
            raise ValueError(
                f"{type(model).__name__}: its loss is not the sum over shift_labels divided by num_items_in_batch "
                f"({found.loss.item():.4f}, expected {expected.item():.4f}): take its logits, and a loss of your own"
            )


@contextmanager
def _trying(model: PreTrainedModel, attached: Attached) -> Iterator[None]:
    """Inside, layers say what they want and attend to nothing; what a model trips over is a ``ValueError``."""
    training = [(module, module.training) for module in model.modules()]
    attached.asked = []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield
    except ValueError:
        raise
    except Exception as error:  # whatever a model trips over that expects a mask of another kind
        raise ValueError(f"{type(model).__name__} cannot run with startrail: {_why(error)}") from error
    finally:
        attached.asked = None
        for module, was in training:
            module.training = was


def _why(error: Exception) -> str:
    if isinstance(error, MaskUseError):
        return "a layer calculates with its mask (a position bias such as ALiBi, or attention of its own)"
    return f"{type(error).__name__}: {error}"


def _is_attention(module: nn.Module) -> bool:
    """Whether a module projects to queries, keys and values: the innermost one whose name says attention."""
    here = "attention" in type(module).__name__.lower() and any(True for _ in module.parameters())
    return here and not any("attention" in type(child).__name__.lower() for child in module.children())


# --- arrangements


def _configs(model: PreTrainedModel) -> dict[str, PretrainedConfig]:
    """Every config that a module of the model reads, once, by the first module that does."""
    found: dict[int, tuple[str, PretrainedConfig]] = {}
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            found.setdefault(id(config), (name, config))
    return dict(found.values())


def _own_configs(model: PreTrainedModel) -> None:
    """Models made from one config object share it: what is set for one would be set for all."""
    memo: dict[int, Any] = {}
    copies = {id(config): copy.deepcopy(config, memo) for config in _configs(model).values()}
    for module in model.modules():
        if id(getattr(module, "config", None)) in copies:
            module.config = copies[id(module.config)]


def _method(found: weakref.ref[Attached], name: str) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        attached = found()
        assert attached is not None, "a model that lives keeps what it is attached to"
        return getattr(attached, name)(*arguments, **options)

    return call


def _before_forward(
    model: PreTrainedModel, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return model._startrail.before_forward(model, arguments, options)


def _watch_loss(model: PreTrainedModel, arguments: object, output: Any) -> None:
    found = getattr(output, "loss", None)
    loss = found if isinstance(found, Tensor) and found.requires_grad else None
    new, agreed = [], False
    if model._startrail.checking:
        new = [] if loss is None else unwatched(loss)
        ready = torch.tensor(float(bool(new)), device=model.device)
        dist.all_reduce(ready, op=dist.ReduceOp.MIN)
        agreed = bool(ready)
    if loss is not None:
        watch_gradients(loss, new, agreed, None)


def _unregister(name: str) -> None:
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(name, None)


def _checkpointing_that_keeps_attention(
    model: PreTrainedModel, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **others: Any
) -> None:
    """``gradient_checkpointing_enable`` that recomputes everything but the distributed attention."""
    options = {**(gradient_checkpointing_kwargs or {}), "use_reentrant": False, "context_fn": checkpoint_context}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # 5.23 deprecates this name, but calls overrides of it
        type(model).gradient_checkpointing_enable(model, options, **others)
