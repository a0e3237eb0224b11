"""What a module does outside of its blocks: it may pass tokens from block to block, but not use them where they are
split, since each rank has only some of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from startrail._compat import tree_leaves
from startrail.integrations.splitting.calls import AttentionMode, TorchCall, calling_module, is_users
from startrail.integrations.splitting.refusals import SHOWN, RefusedError, by_itself

# Methods that say something about a tensor, but nothing of what is in it.
DESCRIBING = (
    "__hash__", "data_ptr", "dim", "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point",
    "is_inference", "is_signed", "stride", "storage_offset", "type", "untyped_storage",
)  # fmt: skip
SHAPE: Any = Tensor.shape
COUNTING = ("__len__", "nelement", "numel", "size")


class Outside(AttentionMode):
    """Inside, split tokens are watched between blocks. Their shape is answered as on one process.

    ``attention``: the modules that attended outside of blocks, each with its number of tokens. ``used``: what was done
    with split tokens, other than passing them on.
    """

    def __init__(self, is_outside: Callable[[], bool]) -> None:
        super().__init__(self._note)
        self._is_outside = is_outside
        self._split: Any = WeakIdKeyDictionary()  # (dimension of tokens, number of all tokens) of each
        self.attention: list[tuple[str, int]] = []
        self.used: list[str] = []

    def watch(self, x: Tensor, dim: int, tokens: int) -> None:
        self._split[x] = dim, tokens

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._is_outside():
            return function(*args, **(kwargs or {}))
        if self._split:
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x in self._split]
            if given:
                return self._pass_on(function, given, args, kwargs or {})
        return super().__torch_function__(function, types, args, kwargs)

    def _note(self, call: TorchCall) -> Tensor:
        if call.q.shape[-2] == call.k.shape[-2]:
            self.attention.append((name_of_caller(), call.q.shape[-2]))
        return call.run()

    def _pass_on(self, function: Any, given: list[Tensor], args: Any, options: dict[str, Any]) -> Any:
        x, name = given[0], getattr(function, "__name__", str(function))
        dim, tokens = self._split[x]
        if name == "register_hook" and not is_users(args[1]):
            return function(*args, **options)
        if function == SHAPE.__get__ or name in COUNTING:
            whole = torch.empty(x.shape, device="meta").narrow(dim, 0, 1)
            whole = whole.expand([tokens if index == dim else -1 for index in range(x.dim())])
            return function(whole, *args[1:], **options)
        before = identity(x)
        self.used.append(f"{name_of_caller()} calls {name}")
        result = function(*args, **options)
        results = [y for y in tree_leaves(result) if isinstance(y, Tensor)]
        describes = bool(results) or name == "__get__" or name in DESCRIBING
        if describes and all(identity(y) == before for y in (x, *results)):  # the same tensor, or a view of it
            self.used.pop()
            for y in results:
                self._split[y] = dim, tokens
        return result

    def check(self, module: nn.Module, output: Any, blocks: list[str], world: int) -> None:
        """Raises ``RefusedError`` if split tokens were used, or are part of the result, or were kept."""
        split = {id(x) for x in self._split}
        if any(id(x) in split for x in tree_leaves(output)):
            self.used.append(f"{type(module).__name__} returns them")
        for each in module.modules():
            for name, value in vars(each).items():
                if not name.startswith("_") and any(id(x) in split for x in tree_leaves(value)):
                    self.used.append(f"{each._startrail_name} keeps them as {name}")
        if self.used:
            raise self._refusal(module, blocks, world)

    def explain(self, module: nn.Module, blocks: list[str], world: int, error: Exception) -> None:
        """Raises ``RefusedError`` if that explains an error."""
        if self.used:
            raise self._refusal(module, blocks, world) from error

    def _refusal(self, module: nn.Module, blocks: list[str], world: int) -> RefusedError:
        listed = repr(blocks if len(blocks) <= SHOWN else [*blocks[:SHOWN], "..."])
        return RefusedError(
            f"{type(module).__name__}: tokens are used between blocks, where each rank has some of them: "
            f"{self.used[0]}. Tokens that go from block to block stay split: name the blocks, attention={listed}; "
            f"{by_itself(world)}"
        )


def identity(x: Tensor) -> tuple[object, ...]:
    """Equal for a tensor and itself, unless it was changed."""
    return x.data_ptr(), x.shape, 0 if x.is_inference() else x._version


def name_of_caller() -> str:
    return str(getattr(calling_module(nn.Module()), "_startrail_name", "a module"))
