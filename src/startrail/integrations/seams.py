"""Where layers of transformers mix tokens outside attention, and how startrail computes the same over all ranks.

A function of `SEAMS` takes ``runs``, then what the function of transformers takes that it replaces; ``fused`` is the
kernel of fla or mamba-ssm that this one calls on CUDA. ``runs`` is the batch's sequence; or `Alone`, to compare the two
on made-up numbers:

>>> from transformers.models.lfm2 import modeling_lfm2
>>> computes(modeling_lfm2, "causal_conv1d_fn")
True
"""

# ruff: noqa: N803  (arguments have the names that layers pass)

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from startrail.kernels.convolution import causal_conv1d
from startrail.kernels.elementwise import linear_recurrence, selective_scan
from startrail.kernels.opaque import around_mamba2, suit_kernels
from startrail.kernels.recurrences import decayed_attention, gated_delta_rule, kimi_delta_rule

BATCH, TOKENS, HEADS, DIM, WIDTH = 1, 5, 2, 4, 3  # of the made-up numbers
INFINITE = float("inf")


class Runs(Protocol):
    """The part of ``startrail.Sequence`` that seams use."""

    def conv1d(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor: ...

    def scan(self, kernel: Callable[..., Any], *tensors: Tensor, **options: Any) -> Any: ...


class Alone:
    """One run of tokens, on one rank."""

    conv1d = staticmethod(causal_conv1d)

    def scan(self, kernel: Callable[..., Any], *tensors: Tensor, **options: Any) -> Any:
        return kernel(*tensors, **options).run()[0]


def _convolution(
    runs: Runs, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    return runs.conv1d(hidden_states, weight, bias, activation)


def _delta_rule(
    rule: Callable[..., Any], runs: Runs, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
    chunk_size: int = 64, use_qk_l2norm_in_kernel: bool = False, fused: Callable[..., Any] | None = None,
) -> tuple[Tensor, None]:  # fmt: skip
    normalize = use_qk_l2norm_in_kernel
    return runs.scan(rule, query, key, value, g, beta, normalize=normalize, function=fused), None


def _mamba2(
    runs: Runs, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int = 64,
    D: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, INFINITE), fused: Callable[..., Any] | None = None,
) -> Tensor:  # fmt: skip
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = _precise((F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit))
    x = _precise(hidden_states)
    out: Tensor
    if fused is None or not dt.shape[1]:
        out = runs.scan(decayed_attention, C, B, x * dt.unsqueeze(-1), dt * A)
    else:
        out = runs.scan(around_mamba2, hidden_states, dt, A, B, C, function=fused, chunk_size=chunk_size)
    return out if D is None else out + D.unsqueeze(-1) * x


def _mamba1(
    runs: Runs, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False, use_mambapy: bool = False,
    use_associative_scan: bool = False,
) -> Tensor:  # fmt: skip
    dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype).unsqueeze(-1)
    dt = _precise(F.softplus(dt) if delta_softplus else dt)
    x = _precise(hidden_states)
    out: Tensor = runs.scan(selective_scan, x.mT, dt.mT, A, B.mT, C.mT).mT
    out = out if D is None else out + x * D.unsqueeze(-1)
    return out if z is None else out * F.silu(z)


def _in_parts(runs: Runs, *arguments: object, **options: object) -> None:
    """In place of a function that fuses a layer's seams into one. It computes nothing, so that the layer calls them."""


def _lightning(
    runs: Runs, layer: Any, hidden_states: Tensor, position_embeddings: object, attention_mask: Tensor | None
) -> tuple[Tensor, None]:
    """The forward pass of MiniMax's lightning attention, which is not a function of its own."""
    qkv = layer.act_fn(layer.qkv_proj(hidden_states))
    qkv = qkv if attention_mask is None else (qkv * attention_mask.unsqueeze(-1)).to(qkv.dtype)
    q, k, v = qkv.unflatten(-1, (layer.num_attention_heads, -1)).split(layer.head_dim, -1)
    decay = -layer.slope_rate.view(1, 1, -1).expand(v.shape[:3])
    out = layer.norm(runs.scan(decayed_attention, q, k, v, decay).flatten(2))
    return layer.out_proj(F.sigmoid(layer.output_gate(hidden_states)) * out), None


def _griffin(
    runs: Runs, layer: Any, input_states: Tensor, position_ids: Tensor, attention_mask: object, use_cache: bool = False
) -> tuple[Tensor, None]:
    """The forward pass of RecurrentGemma's recurrent block, whose convolution is a module."""
    conv, y = layer.conv_1d, layer.act_fn(layer.linear_y(input_states))
    x = runs.conv1d(layer.linear_x(input_states).mT, conv.weight.squeeze(1), conv.bias, None)
    return layer.linear_out(layer.rg_lru(x.mT, position_ids) * y), None


def _rg_lru(
    runs: Runs, layer: Any, hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, recurrent_states: None = None
) -> tuple[Tensor, None]:
    a = _precise(recurrent_gate * ~reset)
    return runs.scan(linear_recurrence, a, _precise(hidden_states)).to(hidden_states.dtype), None


def _precise(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Seam(NamedTuple):
    """``label`` is what `startrail models` calls it. ``made_up`` returns arguments to try it with, given the modeling
    file; None: there is nothing to compare."""

    function: Callable[..., Any]
    label: str = ""
    made_up: Callable[[Any], tuple[list[Any], dict[str, Any]]] | None = None


def _numbers(*shape: int) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(1, count + 1, dtype=torch.float32).mul(0.7).sin().view(shape)


def _of_convolution(_: Any) -> tuple[list[Any], dict[str, Any]]:
    return [_numbers(BATCH, DIM, TOKENS), _numbers(DIM, WIDTH)], dict(bias=_numbers(DIM), activation="silu")


def _of_delta_rule(_: Any, *decays: int) -> tuple[list[Any], dict[str, Any]]:
    q, k, v = (_numbers(BATCH, TOKENS, HEADS, DIM).roll(shift, 1) for shift in range(3))
    g, beta = -_numbers(BATCH, TOKENS, HEADS, *decays).abs(), _numbers(BATCH, TOKENS, HEADS).sigmoid()
    return [q, k, v], dict(g=g, beta=beta, use_qk_l2norm_in_kernel=True)


def _of_kimi_delta_rule(modeling: Any) -> tuple[list[Any], dict[str, Any]]:
    return _of_delta_rule(modeling, DIM)


def _of_mamba2(_: Any) -> tuple[list[Any], dict[str, Any]]:
    x, dt, b = (_numbers(BATCH, TOKENS, *shape) for shape in ((HEADS, DIM), (HEADS,), (1, WIDTH)))
    options = dict(chunk_size=4, D=_numbers(HEADS), dt_bias=_numbers(HEADS), dt_softplus=True, dt_limit=(0.1, 1.0))
    return [x, dt, -_numbers(HEADS).abs(), b, b.roll(1, 1)], options


def _of_mamba1(_: Any) -> tuple[list[Any], dict[str, Any]]:
    x, b = _numbers(BATCH, DIM, TOKENS), _numbers(BATCH, WIDTH, TOKENS)
    options = dict(D=_numbers(DIM), z=x.roll(2, 2), delta_bias=_numbers(DIM), delta_softplus=True)
    return [x, x.roll(1, 2), -_numbers(DIM, WIDTH).abs(), b, b.roll(1, 2)], options


def _layer(modeling: Any, layer: str, config: str, **sizes: int) -> nn.Module:
    """A layer of these sizes with made-up weights."""
    with torch.random.fork_rng(devices=[]):
        made = getattr(modeling, layer)(getattr(modeling, config)(**sizes), 0).float()
    for x in made.parameters():
        x.data = _numbers(*x.shape)
    return made


def _of_lightning(modeling: Any) -> tuple[list[Any], dict[str, Any]]:
    sizes = dict(hidden_size=8, num_attention_heads=HEADS, num_hidden_layers=2, block_size=4)
    made = _layer(modeling, "MiniMaxLightningAttention", "MiniMaxConfig", **sizes)
    return [made, _numbers(BATCH, TOKENS, 8), None, None], {}


def _of_griffin(modeling: Any) -> tuple[list[Any], dict[str, Any]]:
    sizes = dict(hidden_size=8, lru_width=8, num_attention_heads=HEADS, conv1d_width=WIDTH, num_hidden_layers=1)
    made = _layer(modeling, "RecurrentGemmaRecurrentBlock", "RecurrentGemmaConfig", **sizes)
    return [made, _numbers(BATCH, TOKENS, 8), torch.arange(TOKENS).view(1, -1), None], dict(use_cache=False)


def _of_rg_lru(_: Any) -> tuple[list[Any], dict[str, Any]]:
    x = _numbers(BATCH, TOKENS, DIM)
    return [None, x, x.sigmoid(), x > 0.9, None], {}


# By their names in a modeling file; with a dot, a method of one of its classes.
SEAMS = {
    "causal_conv1d_fn": Seam(_convolution, "convolution", _of_convolution),
    "torch_chunk_gated_delta_rule": Seam(partial(_delta_rule, gated_delta_rule), "gated delta rule", _of_delta_rule),
    "chunk_kimi_delta_attention": Seam(partial(_delta_rule, kimi_delta_rule), "Kimi delta rule", _of_kimi_delta_rule),
    "mamba2_chunk_scan": Seam(_mamba2, "Mamba-2", _of_mamba2),
    "mamba2_split_conv1d_scan_combined": Seam(_in_parts),
    "mamba_selective_scan": Seam(_mamba1, "Mamba-1", _of_mamba1),
    "mamba_inner_fn": Seam(_in_parts),
    "MiniMaxLightningAttention.forward": Seam(_lightning, "lightning attention", _of_lightning),
    "RecurrentGemmaRecurrentBlock.forward": Seam(_griffin, "convolution + RG-LRU", _of_griffin),
    "RecurrentGemmaRglru._rnn_scan": Seam(_rg_lru, "", _of_rg_lru),
}


def find(modeling: ModuleType, name: str) -> Any:
    """The seam of a modeling file, or None."""
    for part in name.split("."):
        modeling = getattr(modeling, part, None)  # type: ignore[assignment]
    return modeling


def fused_kernel(seam: Any, x: Tensor) -> Callable[..., Any] | None:
    """The kernel of fla or mamba-ssm that a seam calls for tensors such as x, or None. One of the hub replaces the
    seam's forward pass; one of an installed package is in the closure of its function."""
    if not suit_kernels(x):
        return None
    if isinstance(seam, nn.Module) and getattr(seam.forward, "__func__", None) is not type(seam).forward:
        return seam
    closure = inspect.getclosurevars(_function_of(seam)).nonlocals
    return closure.get("implementation") if closure.get("is_new_implementation") else None


def _function_of(seam: Any) -> Callable[..., Any]:
    """If the ``kernels`` library is installed, it has made each seam a module around its function."""
    found: Callable[..., Any] = seam
    if isinstance(seam, nn.Module):
        found = inspect.getclosurevars(type(seam).forward).nonlocals["func"]
    return found


def computes(modeling: ModuleType, name: str) -> bool:
    """True if a seam of this modeling file computes what startrail does in its place. Its function of torch operations
    is called with made-up numbers: in another version of transformers it may have become something else."""
    return _computes(modeling, name, inspect.unwrap(_function_of(find(modeling, name))))


@functools.cache
def _computes(modeling: ModuleType, name: str, theirs: Callable[..., Any]) -> bool:
    ours, _, made_up = SEAMS[name]
    if made_up is None:
        return True
    try:
        with torch.device("cpu"):
            arguments, options = made_up(modeling)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            pair = theirs(*arguments, **options), ours(Alone(), *arguments, **options)
        x, y = (found[0] if isinstance(found, tuple) else found for found in pair)
        return torch.allclose(x, y, rtol=1e-3, atol=1e-4)
    except Exception:  # it takes other arguments, or needs more of its file
        return False
