"""Any module that calls ``F.scaled_dot_product_attention``: a plain GPT, a vision transformer, an encoder::

    model = attach(model, sp)
    loss = F.cross_entropy(model(images), classes)      # whole inputs and results, the same on every rank
    loss.backward()
    startrail.sum_gradients(model.parameters(), sp.group)

The module is called as on one process. Its blocks, the modules of a ``ModuleList`` or ``Sequential`` that attend, run
on this rank's tokens; all else, such as embeddings, class tokens, position tables, pooling and the loss, sees all
tokens. In the first call each block is tried on made-up tokens, a few and as many as the call has. A block that mixes
tokens outside attention, or whose attention cannot be split, is refused by name. So is a module that uses tokens
between blocks, where each rank has some of them.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TypeVar

from torch import nn

from startrail.integrations.splitting.calls import unwrap, wrap
from startrail.integrations.splitting.regions import AttachedModule, run_block, run_root
from startrail.parallel import SequenceParallel

__all__ = ["attach", "detach"]

Module = TypeVar("Module", bound=nn.Module)


def attach(
    module: Module, sp: SequenceParallel, attention: str | SequenceOf[str] = "auto", *, check: bool = True
) -> Module:
    """Split the tokens of ``module``'s blocks over the ranks of ``sp``, and return it.

    ``attention``: the names of the modules to split, blocks or attention modules, each split separately; "auto" finds
    the blocks. Every rank calls the module with the same arguments and computes the same loss from its whole result.
    *Sum* the gradients over ranks. With ``check``, the first two steps compare parameters, arguments and losses, and
    reject tensors with gradients that are kept and not returned.

    A module that cannot be split raises ``ValueError`` in its first call.
    """
    attached = AttachedModule(sp, whole_text=False, splits_blocks=True, strict=attention == "auto")
    prepare(module, attached, check)
    names = dict(module.named_modules())
    if attention != "auto":
        chosen = [attention] if isinstance(attention, str) else list(attention)
        for name in chosen:
            if not name or name not in names:
                detach(module)
                raise ValueError(f"{type(module).__name__} has no module {name!r}: see named_modules()")
            attached.last_of_run[name] = name
            wrap(names[name], run_block)
    else:
        wrap_blocks(module, attached)
    return module


def detach(module: Module) -> Module:
    """Undo ``attach``, and return the module."""
    if not isinstance(module.__dict__.get("_startrail"), AttachedModule):
        raise ValueError("the module is not attached to startrail")
    for each in module.modules():
        unwrap(each)
    return module


def prepare(module: nn.Module, attached: AttachedModule, check: bool) -> None:
    """Give every module its name and ``attached``, and wrap the module itself."""
    if not isinstance(module, nn.Module):
        raise ValueError(f"attach needs a torch.nn.Module, got {type(module).__name__}")
    for name, each in module.named_modules():
        if "_startrail" in each.__dict__:
            raise ValueError(f"{name or 'the module'} is already attached to {each._startrail.sp}; detach it first")
    if not check:
        attached.first_steps.skip()
    for name, each in module.named_modules():
        each._startrail, each._startrail_name = attached, name or type(module).__name__
    wrap(module, run_root)


def wrap_blocks(module: nn.Module, attached: AttachedModule) -> None:
    """Wrap the modules of all lists. Consecutive ones of one class keep their tokens split."""
    for blocks in module.modules():
        if not isinstance(blocks, nn.ModuleList | nn.Sequential):
            continue
        last: nn.Module | None = None
        for block in reversed(list(blocks)):
            last = block if last is None or type(last) is not type(block) else last
            if "_startrail_forward" not in block.__dict__:
                attached.last_of_run[str(block._startrail_name)] = str(last._startrail_name)
                wrap(block, run_block)
