"""What cannot be split, what to do about it, and what that costs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from startrail.integrations.splitting.streams import StreamPart, Streams

SHOWN = 8  # names that an error lists
NAME_OTHERS = "To run it on all tokens on every rank, name the others in modules.attach(..., attention=[...])"


class RefusedError(ValueError):
    """A block that cannot be split; the text names the module.

    ``but_attention``: what is wrong lies outside of its attention. ``alone``: the modules that attend inside it, if
    each can be split without the rest of the block; None if that was not tried.
    """

    def __init__(self, text: str, *, but_attention: bool = False) -> None:
        super().__init__(text)
        self.but_attention = but_attention
        self.alone: list[str] | None = None

    def with_remedy(
        self, block: str, last_of_run: dict[str, str], world: int, leaves: list[Any], streams: Streams | None
    ) -> RefusedError:
        """With what to do instead of splitting ``block``, and its cost. ``leaves``: of its arguments."""
        if self.alone is None:
            return self
        alike = [name for name, last in last_of_run.items() if last == last_of_run.get(block)]
        x = next(x for x in leaves if isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 3)
        parts = 1.0 if streams is None else streams.tokens / streams.local(StreamPart.TOKENS)
        num_bytes = round(parts * x.numel() * x.element_size())
        if not self.alone:
            return RefusedError(
                f"{self}. If the block's attention were a module of its own that gets positions as an argument, you "
                f"could name it in modules.attach(..., attention=[...]); {by_itself(world, num_bytes)}"
            )
        names = [other + name.removeprefix(block) for other in alike for name in self.alone]
        listed = repr(names if len(names) <= SHOWN else [*names[:SHOWN], "..."])
        return RefusedError(
            f"{self}. Its attention can, if you name it and all else that is to be split: modules.attach(..., "
            f"attention={listed}); {by_itself(world, num_bytes)}"
        )


def mixing(name: str) -> RefusedError:
    return RefusedError(
        f"{name}: a token's result depends on other tokens, or on their number, outside attention (a recurrence, a "
        "convolution, pooling, or positions counted from 0): it cannot be split",
        but_attention=True,
    )


def by_itself(world: int, num_bytes: int | None = None) -> str:
    """What naming modules costs; ``num_bytes`` are those of a module's result, if known."""
    amount = "its result" if num_bytes is None else f"{num_bytes:,d} bytes"
    return (
        f"each named module is then split by itself, and gathers {amount} per call and pass; all else runs on all "
        f"tokens on every rank instead of 1/{world} of them, in memory and compute"
    )
