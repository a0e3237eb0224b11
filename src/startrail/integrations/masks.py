"""What a mask of transformers lets a query see, read from the function that it is made of: transformers puts masks
together from few parts, and a part that is not known is refused by its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """What one kind of layer sees."""

    causal: bool = True
    window: int | None = None
    chunk: int | None = None

    def __str__(self) -> str:
        text = "causal" if self.causal else "full"
        text += "" if self.window is None else f" window {self.window}"
        return text + ("" if self.chunk is None else f" chunk {self.chunk}")


def kind_of(function: Any) -> Kind:
    """What a mask function of transformers lets a query see; ``ValueError`` names what is no staircase that we know."""
    if function is None:
        return Kind()
    name, inside = function.__qualname__, _closure(function)
    if name == "causal_mask_function":
        return Kind()
    if name == "bidirectional_mask_function":
        return Kind(causal=False)
    if name.startswith("sliding_window_overlay"):
        return Kind(causal=False, window=inside["sliding_window"])
    if name.startswith("sliding_window_bidirectional_overlay"):  # that many on either side
        return Kind(causal=False, window=inside["sliding_window"] + 1)
    if name.startswith("chunked_overlay"):
        return Kind(causal=False, chunk=inside["chunk_size"])
    if name.startswith("padding_mask_function"):  # shard_batch has cut it away
        return Kind(causal=False)
    if name.startswith("and_masks"):
        parts = [kind_of(part) for part in inside["mask_functions"]]
        windows = [part.window for part in parts if part.window is not None]
        chunks = [part.chunk for part in parts if part.chunk is not None]
        return Kind(any(part.causal for part in parts), min(windows, default=None), min(chunks, default=None))
    raise ValueError(f"its mask is made by {name}, which startrail does not know")


def _closure(function: Any) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}
