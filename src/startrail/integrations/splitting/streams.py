"""Two streams of tokens in one sequence: the tokens themselves, and text next to them that attends jointly.

Both streams of a model such as SD3 or Flux form one startrail sequence, text first. Each rank holds its part of that
sequence: some text, which may be none, and some tokens. Every rank's parts add up to equally many, and padding counts
as tokens, so attention needs nothing new. With ``whole_text`` every rank holds all of the text, but attends only for
its own part of it, and then gathers the results. A rank without any rows of a stream gets one that is ignored, because
some models cannot reshape a tensor without rows.

All operations are exact adjoints in the backward pass: if every rank's loss is its share, the sum of all ranks'
gradients is the gradient of one process, for parameters inside and outside of the split alike.
"""

from __future__ import annotations

from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

from startrail._compat import unobserved, without_torch_functions
from startrail.integrations.splitting.calls import torch_attention
from startrail.parallel import SequenceParallel


class StreamPart(Enum):
    """The rows of a tensor, or the queries and keys of an attention call."""

    TOKENS = "tokens"
    TEXT = "text"
    TEXT_FIRST = "text, then tokens"
    TEXT_LAST = "tokens, then text"


class Streams:
    """One batch's ``tokens`` and ``text`` tokens, split over the ranks of ``sp``."""

    def __init__(self, sp: SequenceParallel, tokens: int, text: int = 0, whole_text: bool = False) -> None:
        self.sequence = sp.sequence(text + tokens)
        self.tokens, self.text, self.whole_text = tokens, text, whole_text
        ranks = [
            [start + i for start, count in self.sequence._layout.table[rank] for i in range(count)]
            for rank in range(sp.world)
        ]
        for places in ranks:
            assert places == sorted(places), "text comes first on each rank"
            own = [place - text for place in places if place >= text]
            if len(own) == tokens and own[-1] >= tokens:  # a shard could not be told from the whole
                raise ValueError(
                    f"{tokens} tokens and {text} of text are too few for {sp.world} ranks: use fewer ranks or a longer "
                    "sequence"
                )
        self._text_of_ranks = [[place for place in places if place < text] for places in ranks]
        own_tokens = [place - text for place in ranks[sp.rank] if place >= text]
        self._num_text, self._num_tokens = len(self._text_of_ranks[sp.rank]), len(own_tokens)  # that are not ignored
        self._own_text = torch.tensor(self._text_of_ranks[sp.rank] or [0] * bool(text), dtype=torch.long)
        self._own_tokens = torch.tensor(own_tokens or [0])

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of tokens and of text."""
        return self.tokens, self.text

    def whole(self, part: StreamPart) -> int:
        """The number of rows on one process."""
        return {StreamPart.TOKENS: self.tokens, StreamPart.TEXT: self.text}.get(part, self.tokens + self.text)

    def local(self, part: StreamPart) -> int:
        """The number of rows on this rank."""
        text = self.text if self.whole_text else len(self._own_text)
        return {StreamPart.TOKENS: len(self._own_tokens), StreamPart.TEXT: text}.get(part, len(self._own_tokens) + text)

    def places(self, part: StreamPart) -> list[int]:
        """The rows of tokens, or of text, that this rank has; padding repeats the last token."""
        if part is StreamPart.TEXT:
            return list(range(self.text)) if self.whole_text else self._own_text.tolist()
        return self._own_tokens.clamp(max=self.tokens - 1).tolist()

    def shard(self, x: Tensor, dim: int, part: StreamPart) -> Tensor:
        """This rank's rows of a tensor that every rank has in full."""
        if x.shape[dim] != self.whole(part):
            raise ValueError(
                f"a tensor of shape {tuple(x.shape)} has {x.shape[dim]} rows in dimension {dim}, but the sequence has "
                f"{self.whole(part)} ({part.value})"
            )
        if part in (StreamPart.TEXT_FIRST, StreamPart.TEXT_LAST):
            text, tokens = self._apart(x, dim, part, self.text)
            return self._joined(
                self.shard(text, dim, StreamPart.TEXT), self.shard(tokens, dim, StreamPart.TOKENS), dim, part
            )
        if part is StreamPart.TEXT:
            return x if self.whole_text else x.index_select(dim, self._own_text.to(x.device))
        own = self._own_tokens.to(x.device)
        padding = (own >= self.tokens).view([-1 if index == dim % x.dim() else 1 for index in range(x.dim())])
        return x.index_select(dim, own.clamp(max=self.tokens - 1)).masked_fill(padding, 0)

    def unshard(self, x: Tensor, dim: int, part: StreamPart) -> Tensor:
        """The full tensor on every rank: the inverse of ``shard``."""
        if part in (StreamPart.TEXT_FIRST, StreamPart.TEXT_LAST):
            text, tokens = self._apart(x, dim, part, self.local(StreamPart.TEXT))
            return self._joined(
                self.unshard(text, dim, StreamPart.TEXT), self.unshard(tokens, dim, StreamPart.TOKENS), dim, part
            )
        if part is StreamPart.TEXT:
            return x if self.whole_text else self._gather_text(x, dim)
        x = x.narrow(dim, 0, self._num_tokens)
        shape = [self._num_text if index == dim % x.dim() else size for index, size in enumerate(x.shape)]
        with unobserved():  # ranks may exchange more messages in a pass that is recomputed
            both = self.sequence.unshard(torch.cat([x.new_zeros(shape), x], dim) if self.text else x, dim)
        return both.narrow(dim, self.text, self.tokens)

    def _gather_text(self, x: Tensor, dim: int) -> Tensor:
        """All text, where ranks hold different numbers of rows."""
        dim %= x.dim()  # with a negative one, torch gathers a batch of one row in another order
        x, longest = x.narrow(dim, 0, self._num_text), max(map(len, self._text_of_ranks))
        pad = [0, 0] * (x.dim() - 1 - dim) + [0, longest - x.shape[dim]]
        with unobserved():
            rows = self.sequence._gather(F.pad(x, pad), dim)
        place = {p: rank * longest + i for rank, own in enumerate(self._text_of_ranks) for i, p in enumerate(own)}
        return rows.index_select(dim, torch.tensor([place[p] for p in range(self.text)], device=x.device))

    def _apart(self, x: Tensor, dim: int, part: StreamPart, text: int) -> tuple[Tensor, Tensor]:
        """Text and tokens of a tensor that has ``text`` rows of text."""
        rest = x.shape[dim] - text
        if part is StreamPart.TEXT_FIRST:
            return x.narrow(dim, 0, text), x.narrow(dim, text, rest)
        return x.narrow(dim, rest, text), x.narrow(dim, 0, rest)

    def _joined(self, text: Tensor, tokens: Tensor, dim: int, part: StreamPart) -> Tensor:
        return torch.cat([text, tokens] if part is StreamPart.TEXT_FIRST else [tokens, text], dim)

    # --- attention, (batch, heads, rows, head dim)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, part: StreamPart, *, causal: bool = False, scale: float | None = None
    ) -> Tensor:
        """Self-attention of the whole sequence's ``part``, for this rank's rows of it."""
        if q.shape[-2] != self.local(part):
            raise ValueError(
                f"attention over {q.shape[-2]} rows, but this rank holds {self.local(part)} ({part.value})"
            )
        heads = q.shape[1]
        if missing := -heads % self.sequence.sp.plan.heads:  # more heads, of zeros, so that they can be split evenly
            k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
            q, k, v = (F.pad(x, (0, 0, 0, 0, 0, missing)) for x in (q, k, v))
        return self._attention(q, k, v, part, causal, scale)[:, :heads]

    def _attention(
        self, q: Tensor, k: Tensor, v: Tensor, part: StreamPart, causal: bool, scale: float | None
    ) -> Tensor:
        if not self.text:
            return self.sequence.attention(q, k, v, causal=causal, scale=scale)
        if part is StreamPart.TEXT and self.whole_text:
            with without_torch_functions():
                return torch_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
        if part in (
            StreamPart.TOKENS,
            StreamPart.TEXT,
        ):  # the other stream takes part as a document of its own, of zeros
            sequence = self.sequence.packed([0, self.text, self.text + self.tokens])
            q, k, v = (self._with_zeros(x, part) for x in (q, k, v))
        else:
            sequence = self.sequence
            q, k, v = (self._in_order(x, part) for x in (q, k, v))
        out = sequence.attention(q, k, v, causal=causal, scale=scale)
        text, tokens = self._apart(out, -2, StreamPart.TEXT_FIRST, self._num_text)
        if self.whole_text and part is not StreamPart.TOKENS:
            text = self._gather_text(text, -2)
        text, tokens = self._filled(text, StreamPart.TEXT), self._filled(tokens, StreamPart.TOKENS)
        if part in (StreamPart.TOKENS, StreamPart.TEXT):
            return text if part is StreamPart.TEXT else tokens
        return self._joined(text, tokens, -2, part)

    def _in_order(self, x: Tensor, part: StreamPart) -> Tensor:
        """This rank's own text, then its tokens."""
        text, tokens = self._apart(x, -2, part, self.local(StreamPart.TEXT))
        if self.whole_text:
            text = text.index_select(-2, self._own_text.to(x.device))
        return torch.cat([text.narrow(-2, 0, self._num_text), tokens.narrow(-2, 0, self._num_tokens)], -2)

    def _with_zeros(self, x: Tensor, part: StreamPart) -> Tensor:
        own, other = (self._num_text, self._num_tokens)[:: 1 if part is StreamPart.TEXT else -1]
        parts = [x.narrow(-2, 0, own), x.new_zeros(*x.shape[:-2], other, x.shape[-1])]
        return torch.cat(parts if part is StreamPart.TEXT else parts[::-1], -2)

    def _filled(self, x: Tensor, part: StreamPart) -> Tensor:
        """With a row of zeros in place of the one that is ignored."""
        return F.pad(x, (0, 0, 0, self.local(part) - x.shape[-2])) if x.shape[-2] < self.local(part) else x
