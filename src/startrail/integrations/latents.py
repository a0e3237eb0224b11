"""Latent attention (MLA) in transformers: layers that expand their keys and values in one method send latents instead.

All families with latent attention have a method ``expand_kv(kv_nope, k_rot)``, called right before attention. While a
model is attached, it returns ``CompressedKeys``, which the layer passes on, and attention expands keys and values where
they are used. A layer is recognised by what its method computes, tried on a few made-up numbers. Others send expanded
keys, and a warning says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from startrail._compat import module_hooks
from startrail.sequence import Sequence

INSTEAD = "sends expanded keys and values instead of latents"
KEY, ROPE, VALUE, RANK, HEADS, TOKENS = 3, 2, 4, 5, 2, 6  # of the made-up numbers


class CompressedUseError(AttributeError, TypeError):
    """A layer did something with its compressed keys or values other than pass them to attention."""


def _refuse(*_: object, **__: object) -> Any:
    raise CompressedUseError("the layer computes with its expanded keys or values")


@dataclass(frozen=True)
class CompressedKeys:
    """Stands in for a layer's keys, and for its values: what they are expanded from, and their ``shape``."""

    latent: Tensor
    k_rope: Tensor
    w_k: Tensor
    w_v: Tensor
    shape: tuple[int, ...]

    __getattr__ = __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __torch_function__ = staticmethod(_refuse)


def attend(sequence: Sequence, query: Tensor, key: Any, value: Any, **options: Any) -> Tensor:
    """Attention of a layer's queries to its keys, which may be compressed."""
    if isinstance(key, CompressedKeys):
        return sequence.latent_attention(query, key.latent, key.k_rope, key.w_k, key.w_v, **options)
    return sequence.attention(query, key, value, **options)


def install(model: nn.Module, probe: Callable[[], None]) -> None:
    """Let layers with latent attention send latents, as far as ``probe`` finds that they pass them on to attention.
    Warns about each kind of layer that cannot."""
    problems = {}
    for module in layers(model):
        if (problem := layer_problem(module)) is None:
            # a bound method, so that a copy of the model has one bound to the copy
            module.expand_kv = MethodType(_compress, module)  # type: ignore[assignment]
        else:
            problems[type(module).__name__] = problem
    for name, problem in problems.items():
        _warn(name, problem)
    try:
        with warnings.catch_warnings():  # the probe hooks into all modules for a moment
            warnings.filterwarnings("ignore", f".*{INSTEAD}")
            probe()
    except ValueError as error:
        if not isinstance(error.__cause__, CompressedUseError):
            raise
        remove(model)
        _warn(type(model).__name__, str(error.__cause__))
        probe()


def remove(model: nn.Module) -> None:
    for module in filter(_sends, model.modules()):
        del module.__dict__["expand_kv"]


def _sends(module: nn.Module) -> bool:
    """True if ``install`` has replaced the layer's ``expand_kv``."""
    return getattr(module.__dict__.get("expand_kv"), "__func__", None) is _compress


def layers(model: nn.Module) -> Iterator[nn.Module]:
    """The layers with latent attention."""
    return (module for module in model.modules() if hasattr(module, "kv_b_proj"))


def describe(model: nn.Module) -> tuple[str, ...]:
    """What the layers with latent attention send."""
    sent = ("latents" if _sends(module) else "expanded keys of latents" for module in layers(model))
    return tuple(dict.fromkeys(sent))


def layer_problem(module: nn.Module) -> str | None:
    """The reason why a layer cannot send latents, or None."""
    if not callable(getattr(type(module), "expand_kv", None)):
        return "it does not expand its keys and values in a method expand_kv"
    if "expand_kv" in module.__dict__ and not _sends(module):
        return "its expand_kv is not that of its class"
    if not _is_known(type(module)):
        return "its expand_kv is not keys [latent W_k ; k_rope] and values latent W_v"
    return _projection_problem(module.kv_b_proj)


def _projection_problem(projection: object) -> str | None:
    """The reason why a layer's projection is not a plain product with a weight that this rank has, or None."""
    if type(projection) is not nn.Linear:
        return f"its kv_b_proj is a {type(projection).__name__} of {type(projection).__module__}"
    if projection.bias is not None:
        return "its kv_b_proj has a bias"
    if module_hooks(projection):
        return "its kv_b_proj has hooks, which may gather or exchange something"
    return None


def _is_known(kind: type[nn.Module]) -> bool:
    """True if the method of this class computes what ``latent_attention`` does. It is called with made-up numbers."""
    count = HEADS * (KEY + VALUE) * RANK
    weight = torch.arange(count, dtype=torch.float64, device="cpu").sin().view(-1, RANK)
    numbers = torch.arange(TOKENS * (RANK + ROPE), dtype=torch.float64, device="cpu").cos().view(1, 1, TOKENS, -1)
    latent, k_rope = numbers.split((RANK, ROPE), 3)
    widths = dict(qk_nope_head_dim=KEY, qk_rope_head_dim=ROPE, v_head_dim=VALUE, kv_lora_rank=RANK, num_heads=HEADS)
    layer = SimpleNamespace(kv_b_proj=lambda x: F.linear(x, weight), **widths)
    try:
        keys, values = kind.expand_kv(layer, latent, k_rope)  # type: ignore[attr-defined]
        w_k, w_v = weight.view(HEADS, -1, RANK).split((KEY, VALUE), 1)
        expected = torch.cat((torch.einsum("bxtr,hdr->bhtd", latent, w_k), k_rope.expand(-1, HEADS, -1, -1)), 3)
        return torch.allclose(keys, expected) and torch.allclose(values, torch.einsum("bxtr,hdr->bhtd", latent, w_v))
    except Exception:  # it needs more of the layer, or takes other arguments
        return False


def _compress(module: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Any, Any]:
    """In place of ``expand_kv``. A layer that is not attached at the moment, or whose projection is not a plain one any
    more (adapters, sharded weights), expands."""
    weight, problem = module.kv_b_proj.weight, _projection_problem(module.kv_b_proj)
    if problem is None and isinstance(weight, DTensor):
        problem = "its kv_b_proj is sharded"
    attached = str(module.config._attn_implementation).startswith("startrail-")
    if problem is not None or not attached:
        if attached:
            _warn(type(module).__name__, str(problem))
        return type(module).expand_kv(module, kv_nope, k_rot)
    weights = weight.view(-1, module.qk_nope_head_dim + module.v_head_dim, weight.shape[1])
    w_k, w_v = weights.split((module.qk_nope_head_dim, module.v_head_dim), 1)
    latent, k_rope = kv_nope.squeeze(1), k_rot.squeeze(1).to(kv_nope.dtype)
    (batch, tokens, _), heads = latent.shape, len(weights)
    widths = w_k.shape[1] + k_rope.shape[2], w_v.shape[1]
    keys, values = (
        CompressedKeys(latent, k_rope, w_k, w_v, (batch, heads, tokens, width)) for width in widths
    )  # fmt: skip
    return keys, values


def _warn(name: str, problem: str) -> None:
    if not torch.compiler.is_compiling():
        warnings.warn(f"{name} {INSTEAD}: {problem}", stacklevel=2)
