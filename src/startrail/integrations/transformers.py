"""Hugging Face transformers: a causal language model whose attention runs over all ranks, in three lines::

    sp = startrail.SequenceParallel("auto", heads=32, kv_heads=8)
    model = attach(AutoModelForCausalLM.from_pretrained(...), sp)
    loss = model(**shard_batch(sp, input_ids=ids, labels=labels)).loss      # this rank's share of one process's loss

``attach`` gives the model an attention function and a mask function of its own, under a name of their own, so that two
models with two plans live side by side. It then asks the model for one forward pass of a few tokens, in which every
layer says what it wants: its mask, its scale, sinks, and whatever else it passes on. What cannot be run is refused
there, with the layer's name, and so is a model whose loss does not take labels that are already shifted.

The mask function does not make a mask. It returns a ``Seen``, which the model hands to its layers as if it were one:
the batch's sequence, and what this kind of layer sees of it. So a layer that is recomputed later in the backward pass
sees the batch that it saw before.
"""

from __future__ import annotations

import copy
import itertools
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from startrail.checkpoint import checkpoint_context
from startrail.first_steps import GradientWatch, check_same_parameters
from startrail.integrations.batches import IGNORE, Shared, shard_batch
from startrail.integrations.masks import Kind, kind_of
from startrail.parallel import SequenceParallel
from startrail.training.loss import gradient_factor

__all__ = ["attach", "detach", "gradient_factor", "shard_batch"]

TESTED = (5, 22)  # major, minor
TRIED_TOKENS = 4
# What models pass on to every layer although it is not attention's business.
IRRELEVANT = {
    "cache_position",
    "labels",
    "logits_to_keep",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "shift_labels",
    "use_cache",
}

_numbers = itertools.count()
_warned: set[str] = set()


@dataclass(frozen=True)
class Seen:
    """What the mask function returns in place of a mask. ``shared`` is None while a model is tried."""

    shared: Shared | None
    kind: Kind


class Attached:
    """What a model and its functions share. ``kinds`` are those of its masks, by what tells them apart when they are
    made; ``asked`` is what the layers ask for while the model is tried, else None."""

    def __init__(self, sp: SequenceParallel) -> None:
        self.sp = sp
        self.name = f"startrail-{next(_numbers)}"
        self.kinds: dict[tuple[object, ...], Kind] = {}
        self.shared: Shared | None = None
        self.asked: list[tuple[str, str | None]] | None = None
        self.before: dict[int, str | None] = {}
        self.hooks: list[Any] = []
        self.steps = 0

    # --- what transformers calls

    def mask(self, *arguments: Any, mask_function: Callable[..., Any] | None = None, **options: Any) -> Seen:
        key = (options.get("local_size"), "allow_is_bidirectional_skip" in options, bool(options.get("use_vmap")))
        if self.asked is not None:
            kind = kind_of(mask_function)
            if self.kinds.setdefault(key, kind) != kind:
                raise ValueError(f"masks of {kind} and {self.kinds[key]} cannot be told apart")
            return Seen(None, kind)
        if key not in self.kinds:
            raise ValueError(f"a mask that the model did not ask for when it was attached: {key}")
        return Seen(self.shared, self.kinds[key])

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: object,
        dropout: float = 0.0,
        scaling: float | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Attention of one layer: (batch, heads, tokens, dim) in, (batch, tokens, heads, dim) out."""
        if self.asked is not None:
            problem = _problem(query, key, attention_mask, dropout, others)
            self.asked.append((str(getattr(module, "_startrail_name", type(module).__name__)), problem))
            return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None
        problem = _problem(query, key, attention_mask, dropout, others)
        if problem is None and attention_mask.shared is None:  # type: ignore[attr-defined]
            problem = "the model was called without a batch: model(**shard_batch(sp, ...))"
        if problem is not None:
            raise ValueError(f"{getattr(module, '_startrail_name', type(module).__name__)}: {problem}")
        assert isinstance(attention_mask, Seen) and attention_mask.shared is not None
        kind, shared = attention_mask.kind, attention_mask.shared
        sequence, chunk = shared.chunked(kind.chunk)
        out = sequence.attention(
            query, key, value, causal=kind.causal, window=kind.window, chunk=chunk, scale=scaling, sinks=s_aux
        )
        return out.transpose(1, 2).contiguous(), None  # some models take views of it

    def before_forward(
        self, watch: GradientWatch, model: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Take the batch's sequence out of what the model gets; in the first steps, check what could go wrong."""
        self.shared = options.pop("startrail", None)
        if self.asked is None and self.shared is None:
            raise ValueError(
                "the model is attached to startrail: call model(**shard_batch(sp, input_ids=..., labels=...)), or "
                "detach(model) first"
            )
        if self.asked is None and self.steps < 2 and model.training and not torch.compiler.is_compiling():
            self.steps += 1
            check_same_parameters(model.named_parameters(), self.sp.group)
            watch.begin()
        return arguments, options


def attach(model: PreTrainedModel, sp: SequenceParallel, *, check: bool = True) -> PreTrainedModel:
    """Let ``model`` attend over all ranks of ``sp``, and return it.

    ``ValueError`` names what cannot be run, and the layer. ``check``: in the first two training steps, compare the
    ranks' parameters, and find out whether gradients are averaged that should be summed.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"attach needs a transformers model, got {type(model).__name__}")
    if hasattr(model, "_startrail"):
        raise ValueError(f"the model is attached already, to {model._startrail.sp}; detach(model) first")
    _warn_of_version()
    _refuse_by_config(model)
    attached = Attached(sp)
    _own_configs(model)
    for name, module in model.named_modules():
        module._startrail_name = name or type(module).__name__
    found = weakref.ref(attached)  # the registry must not keep the model's plan alive
    AttentionInterface.register(attached.name, _method(found, "attend"))
    AttentionMaskInterface.register(attached.name, _method(found, "mask"))
    weakref.finalize(attached, _unregister, attached.name)
    for config in _configs(model):
        attached.before[id(config)] = config._attn_implementation
        config._attn_implementation_internal = attached.name
    model._startrail = attached
    try:
        _try(model, attached)
    except BaseException:
        detach(model)
        raise
    watch = GradientWatch(model)
    attached.steps = 0 if check else 2
    attached.hooks.append(
        model.register_forward_pre_hook(partial(_before_forward, found, watch), with_kwargs=True, prepend=True)
    )
    if check:
        attached.hooks.append(model.register_forward_hook(partial(_watch_loss, watch)))
    _keep_attention_when_recomputing(model)
    return model


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """The model as it was, for generation on one process."""
    attached: Attached | None = model.__dict__.pop("_startrail", None)
    if attached is None:
        raise ValueError("the model is not attached")
    for config in _configs(model):
        config._attn_implementation_internal = attached.before[id(config)]
    for hook in attached.hooks:
        hook.remove()
    model.__dict__.pop("gradient_checkpointing_enable", None)
    return model


# --- refusing


def _problem(query: Tensor, key: Tensor, mask: object, dropout: float, others: dict[str, Any]) -> str | None:
    """Why a layer cannot be run, or None."""
    if not isinstance(mask, Seen):
        return f"it attends under {type(mask).__name__} in place of a mask that startrail made"
    if key.shape[2] != query.shape[2]:
        return f"{query.shape[2]} queries and {key.shape[2]} keys: a cache, or attention to something that is not split"
    if dropout:
        return f"attention dropout {dropout}: set it to 0 in the model's config"
    kind = mask.kind
    for name, given in others.items():
        if name in IRRELEVANT or given is None or given is False:
            continue
        if name == "sliding_window" and given == kind.window:
            continue
        if name == "is_causal" and given == kind.causal:
            continue
        if name in ("softcap", "position_bias"):
            return f"{name}: no kernel here can do it"
        return f"it passes {name}={given if not isinstance(given, Tensor) else tuple(given.shape)} to attention"
    return None


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
    """Ask every layer what it wants, with one forward pass of a few tokens in which nothing is attended."""
    owners = {module._startrail_name for module in model.modules() if _is_attention(module)}
    attached.asked = []
    device = next(model.parameters()).device
    ids = torch.arange(TRIED_TOKENS, device=device).unsqueeze(0) % 2
    labels = torch.tensor([[1, 0, 1, IGNORE]], device=device)
    options = dict(labels=labels, shift_labels=labels, num_items_in_batch=7, use_cache=False)
    training = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model.train()
            found = model(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=ids * 0 + 3, **options)
    except ValueError:
        raise
    except Exception as error:  # whatever a model trips over that expects a mask of another kind
        raise ValueError(f"{type(model).__name__} cannot run with startrail: {_why(error)}") from error
    finally:
        asked, attached.asked = attached.asked, None
        for module, was in training:
            module.training = was
    for name, problem in asked:
        if problem:
            raise ValueError(f"{name}: {problem}")
    if not asked:
        raise ValueError(
            f"no layer of {type(model).__name__} asks for attention through transformers' AttentionInterface"
        )
    silent = owners - {name for name, _ in asked}
    if silent:
        raise ValueError(f"{sorted(silent)[0]} does not ask for attention through transformers' AttentionInterface")
    if device.type != "meta" and found.loss is not None:
        logits = found.logits.float().reshape(-1, found.logits.shape[-1])
        expected = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum") / 7
        if not torch.allclose(found.loss.float(), expected, rtol=1e-3, atol=1e-5):
            raise ValueError(
                f"{type(model).__name__}: its loss is not the sum over shift_labels divided by num_items_in_batch "
                f"({found.loss.item():.4f}, expected {expected.item():.4f}): take its logits, and a loss of your own"
            )


def _why(error: Exception) -> str:
    if "'Seen'" in str(error):
        return "a layer calculates with its mask (a position bias such as ALiBi, or attention of its own)"
    return f"{type(error).__name__}: {error}"


def _is_attention(module: nn.Module) -> bool:
    """Whether a module projects to queries, keys and values: the innermost one whose name says attention."""
    here = "attention" in type(module).__name__.lower() and any(True for _ in module.parameters())
    return here and not any("attention" in type(child).__name__.lower() for child in module.children())


def _warn_of_version() -> None:
    version = transformers.__version__
    if tuple(int(part) for part in version.split(".")[:2]) != TESTED and version not in _warned:
        _warned.add(version)
        warnings.warn(
            f"startrail was tested with transformers {TESTED[0]}.{TESTED[1]}, this is {version}: `startrail verify` "
            "tells whether your model is right",
            stacklevel=3,
        )


# --- arrangements


def _configs(model: PreTrainedModel) -> list[PretrainedConfig]:
    """Every config that a module of the model reads, once."""
    found: dict[int, PretrainedConfig] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            found[id(config)] = config
    return list(found.values())


def _own_configs(model: PreTrainedModel) -> None:
    """Models made from one config object share it: what is set for one would be set for all."""
    memo: dict[int, Any] = {}
    copies = {id(config): copy.deepcopy(config, memo) for config in _configs(model)}
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
    found: weakref.ref[Attached],
    watch: GradientWatch,
    model: nn.Module,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    attached = found()
    return None if attached is None else attached.before_forward(watch, model, arguments, options)


def _watch_loss(watch: GradientWatch, model: nn.Module, arguments: object, output: Any) -> None:
    loss = getattr(output, "loss", None)
    if watch.active and isinstance(loss, Tensor) and loss.requires_grad:
        loss.register_hook(watch.see_loss)


def _unregister(name: str) -> None:
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(name, None)


def _keep_attention_when_recomputing(model: PreTrainedModel) -> None:
    """Activation checkpointing, now or later, recomputes everything but the distributed attention."""
    enable = type(model).gradient_checkpointing_enable

    def enabled(gradient_checkpointing_kwargs: dict[str, Any] | None = None, **others: Any) -> None:
        options = {**(gradient_checkpointing_kwargs or {}), "use_reentrant": False, "context_fn": checkpoint_context}
        enable(model, options, **others)

    model.gradient_checkpointing_enable = enabled
    if getattr(model, "is_gradient_checkpointing", False):
        enabled()
