"""``AttentionCall``: what a layer asks of attention, apart from its tensors and its sequence."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from startrail.geometry.mask import Mask, Segment

FLAGS = ("max_logits", "sinks", "gradients")


@dataclass(frozen=True)
class AttentionCall:
    """``mask`` has no documents or blocks: those belong to the sequence. ``max_logits`` asks for the largest logit of
    each head. ``sinks`` are merged by each rank afterwards, but all ranks must have them. ``gradients``: a backward
    pass follows, in which all ranks must take part; the forward pass is the same without. The op takes a call as text,
    which round-trips:

    >>> call = AttentionCall(Mask(causal=True, window=4))
    >>> str(call), AttentionCall.parse(str(call)) == call
    ('causal=True, window=4, scale=None', True)
    """

    mask: Mask
    scale: float | None = None
    softcap: float | None = None
    max_logits: bool = False
    sinks: bool = False
    gradients: bool = field(default=False, compare=False)

    @cached_property
    def _hash(self) -> int:
        return hash((self.mask, self.scale, self.softcap, self.max_logits, self.sinks))

    def __hash__(self) -> int:
        """Computed once: it is needed for every call of a layer."""
        return self._hash

    def __str__(self) -> str:
        mask = self.mask
        text = f"causal={mask.causal}, window={mask.window}, scale={self.scale}"
        if mask.chunk is not None:
            text += f", chunk={mask.chunk}"
        if mask.steps:
            text += ", steps=" + " ".join(":".join(map(str, step)) for step in mask.steps)
        if self.softcap is not None:
            text += f", softcap={self.softcap}"
        return text + "".join(f", {name}=True" for name in FLAGS if getattr(self, name))

    @staticmethod
    @lru_cache(maxsize=256)
    def parse(text: str) -> AttentionCall:
        options = dict(part.split("=") for part in text.split(", "))
        given = {name: value for name, value in options.items() if value != "None"}
        window, chunk = (int(given[name]) if name in given else None for name in ("window", "chunk"))
        scale, softcap = (float(given[name]) if name in given else None for name in ("scale", "softcap"))
        steps = tuple(Segment(*map(int, step.split(":"))) for step in options.get("steps", "").split())
        mask = Mask(options["causal"] == "True", window, chunk=chunk, steps=steps)
        flags = (name in options for name in FLAGS)
        return AttentionCall(mask, scale, softcap, *flags)

    def without_gradients(self) -> AttentionCall:
        return replace(self, gradients=False)

    def scale_for(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else self.scale
