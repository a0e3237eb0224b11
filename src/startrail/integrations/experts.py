"""How many tokens each expert of a mixture gets, for metrics and for balancing without a loss::

    counts = ExpertCounts(model)          # of an attached model
    model(**batch).loss.backward()
    counts.total()                        # {"model.layers.0.mlp.experts": tensor([311, 207, ...]), ...}

A router does not always choose the experts with the largest logits: DeepSeek's, Ernie's and MiniMax's add a bias, or
choose groups first. So what is counted is what experts are called with.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from startrail.agreement.errors import peer_errors
from startrail.transport.torch_collectives import agree

CHOSEN = ("top_k_index", "router_indices", "selected_experts")  # what models call the argument: (tokens, choices)


class ExpertCounts:
    """Counts the choices for the tokens of whole sequences. Padding does not count, nor does a layer that is recomputed
    in the backward pass. ``remove`` ends it."""

    def __init__(self, model: Any) -> None:
        base = model if hasattr(model, "_startrail") or not hasattr(model, "get_base_model") else model.get_base_model()
        if not hasattr(base, "_startrail"):
            raise ValueError("the model is not attached to startrail: attach(model, sp) first")
        self.attached = base._startrail
        self.counts: dict[str, Tensor] = {}
        self.counted: dict[str, int] = {}  # of a batch's tokens, by layer: tile_mlp calls experts several times
        self.hooks = [base.register_forward_pre_hook(lambda *_: self.counted.clear())]
        for name, module in base.named_modules():
            if (argument := _argument_with_choices(module)) is not None:
                number = int(getattr(module, "num_experts", 0))  # others may be chosen, if ranks share the experts
                self.counts[name] = torch.zeros(number, dtype=torch.long, device=base.device)
                count = partial(self._count, name, argument)
                self.hooks.append(module.register_forward_pre_hook(count, with_kwargs=True))
        if not self.counts:
            raise ValueError(f"{type(base).__name__} calls no experts with their choices ({', '.join(CHOSEN)})")

    def _count(self, name: str, argument: str, module: nn.Module, arguments: Any, options: dict[str, Any]) -> None:
        context = self.attached.context
        if context is None:  # recomputed, or a whole batch
            return
        chosen = inspect.signature(type(module).forward).bind(module, *arguments, **options).arguments[argument]
        start = self.counted.get(name, 0)
        self.counted[name] = start + len(chosen)
        real = context.counted().flatten()[start : start + len(chosen)].to(chosen.device).bool()
        found = torch.bincount(chosen[real].flatten(), minlength=len(self.counts[name]))
        self.counts[name] = found + nn.functional.pad(
            self.counts[name].to(found.device), (0, len(found) - len(self.counts[name]))
        )

    def total(self) -> dict[str, Tensor]:
        """The counts of each layer over all ranks of the sequence, since the last call of this."""
        own, sp = self.counts, self.attached.sp
        self.counts = {name: torch.zeros_like(x) for name, x in own.items()}
        if sp.world == 1:
            return own
        operation, device = "counting the tokens of experts", next(iter(own.values())).device
        lengths = torch.tensor([len(x) for x in own.values()], device=device)
        agree(operation, [f"{len(own)} layers"], sp.group, device)
        with peer_errors(operation, sp.group):
            dist.all_reduce(lengths, op=dist.ReduceOp.MAX, group=sp.group)
            padded = [
                nn.functional.pad(x.to(device), (0, int(length) - len(x)))
                for x, length in zip(own.values(), lengths, strict=True)
            ]
            whole = torch.cat(padded)
            dist.all_reduce(whole, group=sp.group)
        return dict(zip(own, whole.split(lengths.tolist()), strict=True))

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()


def _argument_with_choices(module: nn.Module) -> str | None:
    names = list(inspect.signature(type(module).forward).parameters)
    return names[2] if len(names) > 2 and names[2] in CHOSEN else None
