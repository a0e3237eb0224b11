"""The routers' auxiliary loss of a mixture of experts, over the tokens of all ranks.

With f the share of assignments and p the mean probability of each of E experts, over all tokens and layers, the loss is
E * sum(f * p). Neither is a mean of the ranks' means, and a product of sums is not a sum of products. But f has no
gradient, and the loss is linear in p: so ranks add up E + 1 numbers, the assignments and the number of tokens, and each
takes its own tokens' part of p. The *sum* over ranks of the losses, and of the gradients, is that of one process.

A model's forward pass looks the function up in its own Python module, where it is replaced while the model runs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.mixtral import modeling_mixtral

from startrail.agreement.errors import peer_errors
from startrail.parallel import SequenceParallel
from startrail.transport.torch_collectives import agree

NAME = "load_balancing_loss_func"


def balancing_loss(
    add_up: Callable[[Tensor], None], mask: Tensor | None, factor: int, gate_logits: Any,
    num_experts: int = 0, top_k: int = 2, attention_mask: object = None,
) -> Tensor | int:  # fmt: skip
    """This rank's part of the loss, times ``factor``. ``mask`` is 1 for those of its tokens that count, and ``add_up``
    replaces numbers by their sums over all ranks. The other arguments are those of the models' function."""
    if not isinstance(gate_logits, tuple) or not gate_logits:
        return 0
    device = gate_logits[0].device
    counts = torch.zeros(num_experts + 1, dtype=torch.float64, device=device)  # the last: tokens, once per layer
    dtype = torch.promote_types(gate_logits[0].dtype, torch.float32)
    probabilities = torch.zeros(num_experts, dtype=dtype, device=device)
    for logits in gate_logits:
        weights = logits.to(device).softmax(-1)
        counted = torch.ones_like(weights[:, 0]) if mask is None else mask.reshape(-1).to(weights)
        chosen = weights.topk(top_k, dim=-1).indices
        counts[:-1].scatter_add_(0, chosen.flatten(), counted.repeat_interleave(top_k).double())
        counts[-1] += counted.sum()
        probabilities = probabilities + (weights * counted.unsqueeze(1)).sum(0, dtype=dtype)
    add_up(counts)
    slope = factor * num_experts * counts[:-1] / counts[-1].clamp(min=1).square()
    return (slope.to(dtype) * probabilities).sum()


def sum_over(sp: SequenceParallel, counts: Tensor, operation: str = "the routers' auxiliary loss") -> None:
    """Replace ``counts`` by their sums over the ranks of a sequence."""
    if sp.world > 1:
        agree(operation, [f"{len(counts)} counts"], sp.group, counts.device)
        with peer_errors(operation, sp.group):
            dist.all_reduce(counts, group=sp.group)


def replaced(model: PreTrainedModel, loss: Callable[..., Any]) -> list[Any]:
    """Patches that put ``loss`` where the forward pass of ``model``, and TRL's, look the function up."""
    return [patch.object(module, NAME, loss) for module in {*_modules(model), modeling_mixtral}]


def is_wanted(model: PreTrainedModel, options: dict[str, Any]) -> bool:
    """True if a call with these arguments computes the loss."""
    asked = options.get("output_router_logits")
    return bool(getattr(model.config.get_text_config(), "output_router_logits", False) if asked is None else asked)


def problem(model: PreTrainedModel, fused: bool = False) -> str | None:
    """Why the auxiliary loss of ``model`` cannot be computed on ranks, or None: it must be the one above. ``fused``:
    TRL computes it, for every model with Mixtral's function."""
    functions = [getattr(module, NAME) for module in ([modeling_mixtral] if fused else _modules(model))]
    name, remedy = type(model).__name__, "set output_router_logits=False"
    if not functions:
        return f"{name} has no routers' auxiliary loss that is known: {remedy}"
    if list(inspect.signature(functions[0]).parameters) == ["gate_logits", "num_experts", "top_k", "attention_mask"]:
        generator = torch.Generator().manual_seed(0)
        logits = tuple(torch.randn(6, 5, generator=generator) for _ in range(2))
        mask = torch.tensor([[1, 1, 1, 0, 1, 1]])
        ours = balancing_loss(lambda counts: None, mask, 1, logits, 5, 2)
        if torch.allclose(torch.as_tensor(ours), torch.as_tensor(functions[0](logits, 5, 2, mask)), rtol=1e-5):
            return None
    return f"{name}: its routers' auxiliary loss is unlike that of other models: {remedy}"


def _modules(model: PreTrainedModel) -> list[ModuleType]:
    modules = (sys.modules.get(kind.__module__) for kind in type(model).__mro__)
    return [module for module in dict.fromkeys(modules) if module is not None and hasattr(module, NAME)]
