"""``Sequence``: what all layers share about one batch. Made once a batch by ``SequenceParallel.sequence``."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.autograd import forward_ad

from startrail.arguments import Call, wrong_kind
from startrail.layout import Runs

if TYPE_CHECKING:
    from startrail.parallel import SequenceParallel
    from startrail.tokens import Tokens


class Sequence:
    """One sequence of ``length`` tokens, cut into ``documents`` that do not see each other, split over the ranks of
    ``sp``.

    >>> from startrail import SequenceParallel
    >>> sequence = SequenceParallel("1x1").sequence(5, documents=[0, 2, 5])
    >>> tokens = torch.arange(5).unsqueeze(0)
    >>> sequence.shard(tokens, dim=1).tolist(), sequence.positions().tolist()
    ([[0, 1, 2, 3, 4]], [0, 1, 2, 3, 4])
    >>> q = torch.randn(1, 4, 5, 8)
    >>> sequence.attention(q, q, q, causal=True).shape
    torch.Size([1, 4, 5, 8])

    ``local`` is the number of tokens that every rank holds, padding included. ``documents`` are cu_seqlens as a tensor
    on the host, (0, length) where nothing is packed. ``runs`` are this rank's real tokens in the order in which it
    holds them, as (first position, count).
    """

    sp: SequenceParallel
    length: int
    local: int
    _name: str
    _tokens: Tokens
    _known_as: Tensor

    def __init__(self, sp: SequenceParallel, name: str, tokens: Tokens, known_as: Tensor) -> None:
        # as torch._dynamo.maybe_mark_dynamic does, whose import takes seconds: batches differ in their documents
        known_as._dynamo_weak_dynamic_indices = {0}  # type: ignore[attr-defined]
        self.__dict__.update(
            sp=sp, length=tokens.length, local=tokens.layout.local, _name=name, _tokens=tokens, _known_as=known_as
        )

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Sequence cannot be changed: {name} stays as it is; make another with sp.sequence()")

    def __repr__(self) -> str:
        return f"Sequence({self._tokens}, {self.local} on rank {self.sp.rank} of {self.sp.world})"

    def packed(self, documents: Tensor | SequenceOf[int] | None) -> Sequence:
        """The same sequence cut into documents: global cu_seqlens (0, ..., length)."""
        return self.sp.sequence(self.length, documents)

    @property
    def documents(self) -> Tensor:
        return torch.tensor(self._tokens.documents)

    @property
    def runs(self) -> Runs:
        layout = self._tokens.layout
        return tuple(run for chunk in layout.chunks[self.sp.rank] if (run := layout.run(chunk))[1])

    # --- tokens

    def shard(self, x: Tensor, dim: int, pad_value: float = 0) -> Tensor:
        """This rank's part of a tensor that every rank has whole, padded with ``pad_value`` where it must be.

        Differentiable: the gradient is this rank's share, zero elsewhere; sum it over the group for the whole.
        """
        dim, layout = _dim(x, dim), self._tokens.layout
        if x.shape[dim] != self.length:
            raise ValueError(
                f"a tensor of shape {tuple(x.shape)} has {x.shape[dim]} tokens in dimension {dim}, but the sequence "
                f"has {self.length}"
            )
        parts = []
        for chunk in layout.chunks[self.sp.rank]:
            start, count = layout.run(chunk)
            parts.append(x.narrow(dim, start, count))
            if count < layout.chunk:
                shape = (*x.shape[:dim], layout.chunk - count, *x.shape[dim + 1 :])
                parts.append(x.new_full(shape, pad_value))
        return torch.cat(parts, dim)

    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """The whole tensor on every rank, in order and without padding: the inverse of ``shard``.

        Differentiable, as the exact adjoint: a shard's gradient is the sum over ranks of the gradients that they
        have for it. If every rank computes the *same* loss from the result, divide that loss by the number of ranks.
        """
        dim, layout = _dim(x, dim), self._tokens.layout
        if x.shape[dim] != self.local:
            raise ValueError(
                f"a tensor of shape {tuple(x.shape)} has {x.shape[dim]} tokens in dimension {dim}, but a rank holds "
                f"{self.local} of this sequence"
            )
        if self.sp.group is not None and self.sp.world > 1:
            x = funcol.wait_tensor(funcol.all_gather_single_autograd(x.contiguous(), dim, self.sp.group))
            places = {chunk: i for i, chunk in enumerate(chunk for rank in layout.chunks for chunk in rank)}
            x = torch.cat([x.narrow(dim, places[c] * layout.chunk, layout.chunk) for c in range(len(places))], dim)
        return x.narrow(dim, 0, self.length)

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """Global positions of this rank's tokens, for rotary and other position embeddings. Padding repeats the last
        position."""
        if not isinstance(device, torch.device | str | None):
            raise ValueError(
                f"positions takes a device, not a {type(device).__name__}: the sequence knows its tokens; "
                "write positions(x.device)"
            )
        layout = self._tokens.layout
        chunks = [
            torch.arange(c * layout.chunk, (c + 1) * layout.chunk, device=device) for c in layout.chunks[self.sp.rank]
        ]
        return torch.cat(chunks).clamp_(max=self.length - 1)

    # --- attention

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *others: object,
        causal: bool = False,
        window: int | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Attention of the whole sequence, for this rank's queries.

        q: (batch, heads, local tokens, head dim); k, v may have fewer heads. ``window`` w: a query i sees keys j with
        i-j < w when causal, |i-j| < w otherwise. Every rank of the group must call it, with the same arguments but for
        the tokens.
        """
        if problem := wrong_kind(q, k, v, causal, window, scale, others):
            self.sp.refuse(problem, self._known_as)
        if not torch.compiler.is_compiling() and any(forward_ad.unpack_dual(x).tangent is not None for x in (q, k, v)):
            raise ValueError("attention has no forward-mode derivative: q, k or v is a dual tensor")
        if q.device.type != "meta" and torch.is_autocast_enabled(q.device.type):  # as scaled_dot_product_attention does
            dtype = torch.get_autocast_dtype(q.device.type)
            q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
        call = str(Call(causal, window, None if scale is None else float(scale)))
        out, *_ = torch.ops.startrail.attention(q, k, v, self._known_as, self._name, call)
        return out


def _dim(x: Tensor, dim: int) -> int:
    if not isinstance(x, Tensor):
        raise ValueError(f"need a tensor, got {type(x).__name__}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim {dim} is not a dimension of a tensor of shape {tuple(x.shape)}")
    return dim % x.dim()
