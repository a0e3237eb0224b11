"""Hugging Face transformers: run the attention of a causal language model over all ranks, in three lines::

    sp = startrail.SequenceParallel("auto", heads=32, kv_heads=8)
    model = attach(AutoModelForCausalLM.from_pretrained(...), sp)
    loss = model(**shard_batch(sp, input_ids=ids, labels=labels)).loss      # this rank's share of one process's loss

``attach`` registers an attention function and a mask function for the model under a unique name, so two models can use
two plans at the same time. It then probes the model with a forward pass of a few tokens, in which every layer shows its
mask, scale, sinks and other arguments. It rejects, by name, layers that cannot run, models that mix tokens outside
attention, and models whose loss does not take labels that are already shifted.

The mask function returns a ``MaskPlaceholder`` instead of a mask: the batch's context, and which keys this kind of
layer sees. The model passes it to its layers, so a layer that is recomputed in the backward pass gets the batch of its
forward pass.
"""

from __future__ import annotations

import copy
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from startrail.agreement.errors import peer_errors
from startrail.checkpoint import checkpoint_context
from startrail.integrations import latents, layer_masks, probe, recurrent, routers, tiles, vision, without_logits
from startrail.integrations.batch import IGNORE, BatchContext, shard_batch
from startrail.integrations.layer_masks import LayerKind, MaskPlaceholder
from startrail.integrations.probe import PositionRule
from startrail.integrations.versions import is_checkpointing, warn_if_untested
from startrail.losses import gradient_factor
from startrail.offload import HostOffload
from startrail.parallel import SequenceParallel
from startrail.step_checks import (
    CHECKED_STEPS,
    check_fsdp_meshes,
    check_gradients,
    check_same_parameters,
    unchecked_parameters,
)
from startrail.transport.torch_collectives import agree

__all__ = ["attach", "detach", "detached", "gradient_factor", "shard_batch"]

Model = TypeVar("Model", bound=nn.Module)

_numbers = itertools.count()


class Attached:
    """State shared by a model, its copies, and the functions registered for it.

    ``kinds`` are the kinds of its masks, by the arguments with which masks are made, and ``softcaps`` those of its
    layers. ``probed`` has the name and the problem of each layer while the model is probed, else None.
    ``original_attention`` is the attention that each config had before.
    """

    def __init__(self, sp: SequenceParallel) -> None:
        self.sp, self.name = sp, f"startrail-{next(_numbers)}"
        self.kinds: dict[tuple[object, ...], LayerKind] = {}
        self.softcaps: set[float] = set()
        self.context: BatchContext | None = None
        self.probed: list[tuple[str, str | None]] | None = None
        self.original_attention: dict[str, str | None] = {}
        self.positions = PositionRule.INDEX
        self.logits = self.wants_logits = False  # by default, and in this call
        self.layers: str | None = None  # the part of the model that computes what its head gets
        self.loss_chunk: int | None = None  # tokens whose logits are computed at a time; None: by the vocabulary
        self.announced = False  # what that saves
        self.offload = False
        self.tiled = False  # MLPs
        self.router_loss, self.knows_router_loss = ExitStack(), False
        self.paused = False  # inside ``detached``
        self.steps = 0
        self.checking = False  # True during the first training steps

    def __deepcopy__(self, memo: object) -> Attached:
        """A copied model keeps the name, and so the functions."""
        return self

    # --- called by transformers

    def mask(
        self, *arguments: Any, mask_function: Callable[..., Any] | None = None, recurrent: bool = False, **options: Any
    ) -> MaskPlaceholder:
        if recurrent:  # of a layer that is not attention
            return MaskPlaceholder(self.context, LayerKind())
        key = (options.get("local_size"), "allow_is_bidirectional_skip" in options, bool(options.get("use_vmap")))
        if self.probed is not None:
            kind = layer_masks.read_layer_kind(mask_function)
            if self.kinds.setdefault(key, kind) != kind:
                raise ValueError(f"cannot distinguish the masks {kind} and {self.kinds[key]}")
            return MaskPlaceholder(None, kind)
        if not torch.compiler.is_compiling():
            kind = layer_masks.read_layer_kind(mask_function)
            if kind.blocks and self.context is not None:
                self.context.check_blocks(layer_masks.find_blocks(mask_function))
            return MaskPlaceholder(self.context, kind)
        if key not in self.kinds:
            raise ValueError(f"the model requests a mask that it did not request in attach: {key}")
        return MaskPlaceholder(self.context, self.kinds[key])

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
        problem = layer_masks.layer_problem(query, key, attention_mask, dropout, others)
        name = str(getattr(module, "_startrail_name", type(module).__name__))
        if self.probed is not None:
            if softcap is not None:
                self.softcaps.add(softcap)
                problem = problem or layer_masks.softcap_problem(query, softcap)
            problem = problem or layer_masks.heads_problem(module, query.shape[1], self.sp.plan)
            self.probed.append((name, problem))
            return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None
        problem = problem or self._batch_problem(attention_mask.context, attention_mask.kind, s_aux)
        if problem is not None:
            raise ValueError(f"{name}: {problem}")
        kind, context = attention_mask.kind, attention_mask.context
        sequence, chunk = context.sequence_for(kind.chunk)
        options: dict[str, Any] = dict(scale=scaling, sinks=s_aux, softcap=softcap)
        options |= dict(causal=kind.causal, window=kind.window, chunk=chunk)
        out = latents.attend(sequence, query, key, value, **options)
        if context.fully_masked is not None:
            out = out.masked_fill(context.fully_masked.view(1, 1, -1, 1), 0)
        return out.transpose(1, 2).contiguous(), None  # some models take views of it

    def _batch_problem(self, context: BatchContext | None, kind: LayerKind, sinks: Tensor | None) -> str | None:
        if context is None:
            return (
                "called without a batch: call the whole model that is attached, model(**shard_batch(sp, ...)), not a "
                "part of it"
            )
        if kind.blocks and kind.window is not None:
            longest = max((stop - start for start, stop in context.sequence.blocks), default=0)
            if longest > kind.window:
                return f"an image of {longest} tokens is longer than the layer's window of {kind.window}: not supported"
        if context.fully_masked is not None and sinks is None and "eager" in self.original_attention.values():
            return (
                "a label is predicted from padding on the left, which sees all keys in transformers' eager attention: "
                f"set the label of each row's first token to {IGNORE}"
            )
        return None

    def before_forward(
        self, model: PreTrainedModel, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Remove what is for startrail from the model's arguments; in the first training steps, compare parameters."""
        if self.paused:
            self.wants_logits, self.checking = True, False
            return arguments, options
        self.context = options.pop("startrail", None)
        self.wants_logits = options.pop("logits", self.logits)
        if self.probed is None and self.context is None:
            raise ValueError(
                "the model is attached to startrail: call model(**shard_batch(sp, input_ids=..., labels=...)), or "
                "detach(model) first"
            )
        if self.context is not None:
            _check_nothing_added(self.context, options)
            self._set_positions(model, self.context, options)
        if self.context is not None and self.context.whole is not None and vision.language_model_name(model) is None:
            raise ValueError(f"{type(model).__name__} takes no images: leave pixel_values out of shard_batch")
        if torch.compiler.is_compiling() and self.context is not None and self.context.whole is not None:
            raise ValueError("compile the layers of a vision-language model, not the whole: its masks depend on images")
        if options.setdefault("use_cache", False):
            raise ValueError("use_cache=True: a sharded sequence has no cache; leave it out, or detach(model) first")
        self.checking = self.probed is None and self.steps < CHECKED_STEPS and model.training
        self.checking = self.checking and not torch.compiler.is_compiling()
        if self.checking:
            self.steps += 1
            if self.sp.world > 1:
                wanted = f"output_router_logits={routers.is_wanted(model, options)}"
                agree("calling the model", [wanted], self.sp.group, model.device)
            check_same_parameters(model.named_parameters(), self.sp.group)
            if self.steps == 1:
                check_fsdp_meshes(model, self.sp.group)
        if self.context is not None and routers.is_wanted(model, options):
            self._replace_router_loss(model, self.context, options)
        return arguments, options

    def _set_positions(self, model: nn.Module, context: BatchContext, options: dict[str, Any]) -> None:
        """Give a batch that came without positions those that the model would have counted."""
        if self.positions is PositionRule.OWN and not context.has_positions:
            raise ValueError(
                f"{type(model).__name__} does not count positions from 0: pass position_ids= to shard_batch, as one "
                "process would count them"
            )
        if self.positions is PositionRule.MASK and context.unpadded_positions is not None:
            options["position_ids"] = context.unpadded_positions

    def check_router_loss(self, model: PreTrainedModel, fused: bool = False) -> None:
        """Raises ``ValueError`` if the routers' auxiliary loss cannot be computed."""
        if self.tiled:
            raise ValueError("tile_mlp hides the routers from their auxiliary loss: set output_router_logits=False")
        if not self.knows_router_loss and (problem := routers.problem(model, fused)) is not None:
            raise ValueError(problem)
        self.knows_router_loss = True

    def _replace_router_loss(self, model: PreTrainedModel, context: BatchContext, options: dict[str, Any]) -> None:
        """Until the end of this call, the routers' auxiliary loss is that of all ranks' tokens."""
        if torch.compiler.is_compiling():
            raise ValueError("compile the layers of a model with a routers' auxiliary loss, not the whole")
        fused = bool(options.get(without_logits.FUSED))
        self.check_router_loss(model, fused)
        # a model's own loss is summed over ranks; TRL adds the auxiliary one to a loss that is averaged
        factor = self.sp.world if fused else 1
        loss = partial(routers.balancing_loss, partial(routers.sum_over, self.sp), context.counted(), factor)
        for replacement in routers.replaced(model, loss):
            self.router_loss.enter_context(replacement)

    def after_forward(self, model: nn.Module, arguments: object, output: object) -> None:
        """Forget the batch: a part of the model that is called later would run on its tokens."""
        self.context = None
        self.router_loss.close()


def attach(
    model: Model, sp: SequenceParallel, *, check: bool = True, logits: bool = False, tile_mlp: int | None = None,
    offload: bool = False, latents: bool = True,
) -> Model:  # fmt: skip
    """Make ``model`` attend over all ranks of ``sp``, and return it. It may have adapters of peft, before or after.

    The loss is computed on chunks of tokens, and logits are not returned unless there are no labels or the call asks
    for them, ``model(**batch, logits=True)``. ``logits=True`` here makes every call return them.

    Two options save memory at the cost of more compute. ``tile_mlp`` runs each MLP on this many tokens at a time and
    recomputes it in the backward pass. ``offload`` recomputes layers (gradient checkpointing) from their inputs, which
    are kept in host memory.

    Models with latent attention (MLA) send latents, which are expanded where they are used. ``latents=False`` sends
    expanded keys and values instead, and so do layers that cannot, with a warning.

    Raises ``ValueError`` with the reason and the layer if the model cannot run. With ``check``, the first two training
    steps compare parameters between ranks, and raise if gradients are averaged instead of summed.
    """
    base = model if isinstance(model, PreTrainedModel) else _inside_adapters(model)
    if base is None:
        package = "diffusers" if type(model).__module__.startswith("diffusers.") else "modules"
        hint = f"use startrail.integrations.{package}.attach" if isinstance(model, nn.Module) else "pass the model"
        raise ValueError(f"attach needs a transformers model, got {type(model).__name__}: {hint}")
    if hasattr(base, "_startrail"):
        raise ValueError(f"the model is already attached to {base._startrail.sp}; detach(model) first")
    _attach(base, sp, check, logits, tile_mlp, offload, latents)
    return model


def _attach(
    model: PreTrainedModel, sp: SequenceParallel, check: bool, logits: bool, tile_mlp: int | None, offload: bool,
    sends_latents: bool,
) -> None:  # fmt: skip
    warn_if_untested()
    _refuse_parts_elsewhere()
    if not vision.is_tested(model):
        raise ValueError(_other_vision_model(model, sp))
    probe.check_config(model)
    if _is_mostly_narrow(model):
        sp.expect_windows()
    attached = Attached(sp)
    _copy_configs(model)
    for name, module in model.named_modules():
        module._startrail_name = name or type(module).__name__
    AttentionInterface.register(attached.name, _weak_method(attached, "attend"))
    AttentionMaskInterface.register(attached.name, _weak_method(attached, "mask"))
    weakref.finalize(attached, _unregister, attached.name)
    language_model = vision.text_model(model)
    configs = _configs(language_model)
    attached.original_attention = {name: config._attn_implementation for name, config in configs.items()}
    for config in configs.values():
        config._attn_implementation_internal = attached.name
    model._startrail, model._startrail_hooks = attached, []
    attached.logits, attached.offload = logits, offload
    try:
        without_logits.install(model)
        if tile_mlp is not None:
            tiles.tile_mlps(model, language_model, tile_mlp)
            attached.tiled = True
        if routers.is_wanted(model, {}):
            attached.check_router_loss(model)
        model._startrail_hooks += recurrent.install(model, language_model, attached)
        run_probe = partial(probe.probe, model, attached)
        if sends_latents:
            latents.install(language_model, run_probe)
        else:
            run_probe()
    except BaseException:
        detach(model)
        raise
    attached.steps = 0 if check else CHECKED_STEPS
    # the model, not ``attached``, holds the hooks' handles: a copy of the model has its own
    before = model.register_forward_pre_hook(attached.before_forward, with_kwargs=True, prepend=True)
    model._startrail_hooks += [before, model.register_forward_hook(attached.after_forward, always_call=True)]
    if language_model is not model:
        split = partial(vision.split_inputs, attached)
        model._startrail_hooks.append(language_model.register_forward_pre_hook(split, with_kwargs=True, prepend=True))
    if check and sp.world > 1:
        model._startrail_hooks.append(model.register_forward_hook(_watch_loss))
    # a bound method, so that a copy of the model has one bound to the copy
    model.gradient_checkpointing_enable = MethodType(_enable_checkpointing, model)
    if offload or is_checkpointing(model):
        model.gradient_checkpointing_enable()


def _other_vision_model(model: PreTrainedModel, sp: SequenceParallel) -> str:
    """Why a model with images, sound or video is refused, and whether its language model would run alone."""
    name, kind = vision.language_model_name(model), model.config.model_type
    tested = ", ".join(vision.TESTED)
    refused = f"{type(model).__name__}: of the models with more than text, only {tested} run, not {kind}"
    try:
        detach(attach(model.get_submodule(name), sp, check=False))
    except ValueError as error:
        return f"{refused}; nor does its language model: {error}"
    return (
        f"{refused}. Its language model does: attach(model.{name}, sp), embed images and text on all ranks, and call "
        f"model.{name}(**shard_batch(sp, inputs_embeds=..., position_ids=...))"
    )


def _is_mostly_narrow(model: PreTrainedModel) -> bool:
    """True if more layers have a window or chunks than not."""
    config: Any = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or [
        "sliding_attention" * bool(getattr(config, "sliding_window", None))
    ]
    return 2 * sum(kind in ("sliding_attention", "chunked_attention") for kind in kinds) > len(kinds)


def _inside_adapters(model: Any) -> PreTrainedModel | None:
    """The model of transformers inside one of peft, or None. Raises ``ValueError`` if its adapters cannot be split."""
    for config in getattr(model, "peft_config", {}).values():
        if config.is_prompt_learning:
            raise ValueError(
                f"{config.peft_type.value} puts tokens of its own before those of every rank: use an adapter of the "
                "weights, such as LoRA"
            )
    base = model.get_base_model() if hasattr(model, "get_base_model") else None
    return base if isinstance(base, PreTrainedModel) else None


def _check_nothing_added(context: BatchContext, options: dict[str, Any]) -> None:
    """Raise ``ValueError`` if an adapter that was added after ``attach`` puts tokens before this rank's."""
    remedy = "prompt tuning and its like cannot be split; use an adapter of the weights, such as LoRA"
    if options.get("past_key_values") is not None:
        raise ValueError(f"past_key_values hold tokens before those of every rank: {remedy}")
    embeddings = options.get("inputs_embeds")
    if context.whole is None and embeddings is not None and embeddings.shape[1] != context.sequence.local:
        raise ValueError(
            f"the model gets {embeddings.shape[1]} tokens, but this rank's part of the batch has "
            f"{context.sequence.local}: {remedy}"
        )


def detach(model: Model) -> Model:
    """Undo ``attach``, for example to generate on one process, and return the model."""
    base, attached = _attached_base(model)
    del base._startrail
    for name, config in _configs(vision.text_model(base)).items():
        config._attn_implementation_internal = attached.original_attention[name]
    for hook in base.__dict__.pop("_startrail_hooks"):
        hook.remove()
    without_logits.remove(base)
    tiles.untile_mlps(base)
    latents.remove(base)
    recurrent.remove(attached)
    base.__dict__.pop("gradient_checkpointing_enable", None)
    return model


@contextmanager
def detached(model: Model) -> Iterator[Model]:
    """Inside, ``model`` runs whole on this rank, for example to generate, and takes ordinary arguments::

    with detached(model):
        ids = model.generate(prompt)
    """
    base, attached = _attached_base(model)
    configs = _configs(vision.text_model(base))
    attached.paused = True
    try:
        for name, config in configs.items():
            config._attn_implementation_internal = attached.original_attention[name]
        yield model
    finally:
        attached.paused = False
        for config in configs.values():
            config._attn_implementation_internal = attached.name


def _attached_base(model: Any) -> tuple[Any, Attached]:
    base = model if isinstance(model, PreTrainedModel) else _inside_adapters(model)
    if base is None or not hasattr(base, "_startrail"):
        raise ValueError("the model is not attached to startrail")
    return base, base._startrail


# --- configs, hooks and registered functions


def _configs(model: PreTrainedModel) -> dict[str, PretrainedConfig]:
    """Every config of the model's modules, by the name of the first module that has it."""
    configs: dict[int, tuple[str, PretrainedConfig]] = {}
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            configs.setdefault(id(config), (name, config))
    return dict(configs.values())


def _copy_configs(model: PreTrainedModel) -> None:
    """Give the model its own configs. Models made from one config share it, and would share the attention too."""
    memo: dict[int, Any] = {}
    copies = {id(config): copy.deepcopy(config, memo) for config in _configs(model).values()}
    for module in model.modules():
        if id(getattr(module, "config", None)) in copies:
            module.config = copies[id(module.config)]


def _weak_method(attached: Attached, name: str) -> Callable[..., Any]:
    """A function that calls a method, for transformers' registry. It does not keep ``attached`` and its plan alive."""
    reference = weakref.ref(attached)

    def call(*arguments: Any, **options: Any) -> Any:
        attached = reference()
        assert attached is not None, "the model keeps it alive"
        return getattr(attached, name)(*arguments, **options)

    return call


def _refuse_parts_elsewhere() -> None:
    """Make the attention functions of transformers raise if they get this rank's part of a batch: a model that is not
    attached, such as a reference, would attend to these tokens only, without an error."""
    functions = AttentionInterface._global_mapping
    for name, function in functions.items():
        if getattr(function, "__module__", "").startswith("transformers.") and not hasattr(function, "__wrapped__"):
            functions[name] = _refusing_parts(function)


def _refusing_parts(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def attend(module: nn.Module, *arguments: Any, **options: Any) -> Any:
        if options.get("startrail") is not None:
            raise ValueError(
                f"{type(module).__name__}: the batch is this rank's part of a sequence, but the model is not attached: "
                "attach(model, sp) every model that gets it, also a reference model"
            )
        return function(module, *arguments, **options)

    return attend


def _watch_loss(model: PreTrainedModel, arguments: object, output: Any) -> None:
    loss = getattr(output, "loss", None)
    loss = loss if isinstance(loss, Tensor) and loss.requires_grad else None
    new, agreed = [], False
    if model._startrail.checking:
        new = [] if loss is None else unchecked_parameters(loss)
        ready = torch.tensor(float(bool(new)), device=model.device)
        with peer_errors("comparing which gradients can be checked"):
            dist.all_reduce(ready, op=dist.ReduceOp.MIN)
        agreed = bool(ready)
    if loss is not None:
        check_gradients(loss, new, agreed, None, model._startrail.sp.group)


def _unregister(name: str) -> None:
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(name, None)


def _enable_checkpointing(
    model: PreTrainedModel, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **others: Any
) -> None:
    """``gradient_checkpointing_enable`` that recomputes everything except the distributed attention."""
    options = {**(gradient_checkpointing_kwargs or {}), "use_reentrant": False, "context_fn": checkpoint_context}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # 5.23 deprecates this name, but calls overrides of it
        type(model).gradient_checkpointing_enable(model, options, **others)
    if model._startrail.offload:
        offload = HostOffload()
        for module in model.modules():
            if "_gradient_checkpointing_func" in module.__dict__:
                module._gradient_checkpointing_func = partial(_inside, offload, module._gradient_checkpointing_func)


def _inside(context: HostOffload, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    with context:
        return function(*arguments, **options)
