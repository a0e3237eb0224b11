"""``Sequence``: what all layers share about one batch. Made once a batch by ``SequenceParallel.sequence``."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from startrail.comm.errors import peer_errors
from startrail.engine.call import AttentionCall, option_problem, type_problem
from startrail.geometry.layout import Runs
from startrail.geometry.mask import Mask

if TYPE_CHECKING:
    from startrail.engine.batch import BatchGeometry
    from startrail.parallel import SequenceParallel

IDS = (torch.int32, torch.int64)  # dtypes of tokens


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
    holds them, as (first position, count). ``blocks`` are the runs (start, stop) of tokens that see each other.
    """

    sp: SequenceParallel
    length: int
    local: int
    blocks: tuple[tuple[int, int], ...]
    _name: str
    _tokens: BatchGeometry
    _known_as: Tensor
    _looked: int | None  # when its ids were looked at last, if they were

    def __init__(self, sp: SequenceParallel, name: str, tokens: BatchGeometry, known_as: Tensor) -> None:
        self.__dict__.update(sp=sp, length=tokens.length, local=tokens.layout.local, blocks=tokens.blocks)
        self.__dict__.update(_name=name, _tokens=tokens, _looked=None)
        self._be_known_as(known_as)

    def _be_known_as(self, known_as: Tensor) -> None:
        # as torch._dynamo.maybe_mark_dynamic does, whose import takes seconds: batches differ in their documents
        known_as._dynamo_weak_dynamic_indices = {0}  # type: ignore[attr-defined]
        self.__dict__["_known_as"] = known_as

    def _look_at(self, ids: Tensor) -> None:
        """Have the calls to come say which data they are on. A new tensor: backward passes still have the old one."""
        number, before, *marks = self._known_as.tolist()
        if (found := self.sp._runtime.look_at(ids, before != 0, self._looked)) is not None:
            digest, looked = found
            if looked is not None:
                self.__dict__["_looked"] = looked
            if digest != before:
                self._be_known_as(torch.tensor((number, digest, *marks), device="cpu"))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Sequence cannot be changed: {name} stays as it is; make another with sp.sequence()")

    def __repr__(self) -> str:
        return f"Sequence({self._tokens}, {self.local} on rank {self.sp.rank} of {self.sp.world})"

    def packed(self, documents: Tensor | SequenceOf[int] | None) -> Sequence:
        """The same sequence cut into documents: global cu_seqlens (0, ..., length)."""
        return self.sp.sequence(self.length, documents, self.blocks)

    @property
    def documents(self) -> Tensor:
        return torch.tensor(self._tokens.documents)

    @property
    def runs(self) -> Runs:
        layout = self._tokens.layout
        return tuple(run for chunk in layout.chunks[self.sp.rank] if (run := layout.run(chunk))[1])

    # --- tokens

    def shard(self, x: Tensor, dim: int, pad_value: float = 0) -> Tensor:
        """This rank's part of a tensor that every rank has whole, padded with ``pad_value`` where it must be. Zero is
        right for ids, whose padding nobody looks at, but is a label like any other: ``shard_labels`` pads with -100.

        Differentiable: the gradient is this rank's share, zero elsewhere; sum it over the group for the whole.
        """
        dim, layout = _dim(x, dim), self._tokens.layout
        if x.shape[dim] != self.length:
            raise ValueError(
                f"a tensor of shape {tuple(x.shape)} has {x.shape[dim]} tokens in dimension {dim}, but the sequence "
                f"has {self.length}"
            )
        if x.dtype in IDS and not torch.compiler.is_compiling():
            self._look_at(x)
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
        return torch.cat(self._all_chunks(x, dim, layout.chunk), dim).narrow(dim, 0, self.length)

    def _all_chunks(self, x: Tensor, dim: int, each: int) -> list[Tensor]:
        """What all ranks have of every chunk, ``each`` tokens of it, in the order of the chunks."""
        held = [chunk for rank in self._tokens.layout.chunks for chunk in rank]
        if self.sp.group is not None and self.sp.world > 1:
            x = x.contiguous()
            if torch.compiler.is_compiling():
                x = funcol.wait_tensor(funcol.all_gather_single_autograd(x, dim, self.sp.group))
            else:
                x = _Gathered.apply(x, dim, self.sp.group)
        return [x.narrow(dim, held.index(chunk) * each, each) for chunk in range(len(held))]

    def shard_labels(self, labels: Tensor, dim: int = 1, ignore_index: int = -100) -> Tensor:
        """This rank's labels of next tokens, from labels that stand where their tokens stand (most often the ids
        themselves): shifted over the whole sequence before it is cut, ``ignore_index`` where a document ends and where
        there is padding. Labels that are shifted already belong in ``shard(labels, 1, -100)``.

        >>> from startrail import SequenceParallel
        >>> SequenceParallel("1x1").sequence(5, [0, 2, 5]).shard_labels(torch.tensor([[5, 6, 7, 8, 9]])).tolist()
        [[6, -100, 8, 9, -100]]
        """
        dim = _dim(labels, dim)
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
            raise ValueError(f"labels must be whole numbers, got {labels.dtype}")
        if labels.shape[dim] != self.length:
            raise ValueError(
                f"labels of shape {tuple(labels.shape)} have {labels.shape[dim]} tokens in dimension {dim}, but the "
                f"sequence has {self.length}: give the labels of all tokens, not shifted and not cut"
            )
        shifted = labels.roll(-1, dim).index_fill(dim, self.documents[1:].to(labels.device) - 1, ignore_index)
        return self.shard(shifted, dim, ignore_index)

    def roll(self, x: Tensor, shift: int, dim: int, fill_value: float = 0) -> Tensor:
        """``torch.roll`` along the whole sequence for a tensor of this rank's tokens: with ``shift=-1`` every token
        gets what the next one has (multi-token prediction), also over the edges of shards. What would come from another
        document, or from before the beginning or after the end, is ``fill_value``. Differentiable.

        >>> from startrail import SequenceParallel
        >>> SequenceParallel("1x1").sequence(5, [0, 2, 5]).roll(torch.arange(1, 6), -1, dim=0).tolist()
        [2, 0, 4, 5, 0]
        """
        dim, layout = _dim(x, dim), self._tokens.layout
        if x.shape[dim] != self.local:
            raise ValueError(f"a tensor of shape {tuple(x.shape)} does not have {self.local} tokens in dimension {dim}")
        amount = abs(shift)
        if amount > layout.chunk:
            raise ValueError(f"shift {shift} is more than the {layout.chunk} tokens of a chunk of this sequence")
        mine = x.split(layout.chunk, dim)
        edge = 0 if shift < 0 else layout.chunk - amount  # the tokens that a neighbour needs
        edges = self._all_chunks(torch.cat([part.narrow(dim, edge, amount) for part in mine], dim), dim, amount)
        nothing = torch.zeros_like(mine[0].narrow(dim, 0, amount))
        parts = []
        for chunk, part in zip(layout.chunks[self.sp.rank], mine, strict=True):
            neighbour = chunk + (1 if shift < 0 else -1)
            other = edges[neighbour] if 0 <= neighbour < len(edges) else nothing
            kept = part.narrow(dim, amount if shift < 0 else 0, layout.chunk - amount)
            parts.append(torch.cat((kept, other) if shift < 0 else (other, kept), dim))
        shape = [1] * x.dim()
        shape[dim] = self.local
        return torch.where(self._same_document(shift, x.device).view(shape), torch.cat(parts, dim), fill_value)

    def _same_document(self, shift: int, device: torch.device) -> Tensor:
        """(local,) whether a token is a real one and ``shift`` tokens before it is another of its document."""
        layout = self._tokens.layout
        starts = [chunk * layout.chunk for chunk in layout.chunks[self.sp.rank]]
        here = torch.cat([torch.arange(start, start + layout.chunk) for start in starts])
        number = [torch.bucketize(position, self.documents, right=True) for position in (here, here - shift)]
        inside = (here < self.length) & (here >= shift) & (here - shift < self.length)
        return (inside & (number[0] == number[1])).to(device)

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
        chunk: int | None = None,
        mask: Mask | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
        return_lse: bool = False,
        return_largest: bool = False,
        **unknown: object,
    ) -> Any:
        """Attention of the whole sequence, for this rank's queries.

        q: (batch, heads, local tokens, head dim); k, v may have fewer heads, and v another head dim. Every rank of the
        group must call it, with the same arguments but for the tokens.

        Who sees whom: ``window`` w, a query i sees keys j with i-j < w when causal, |i-j| < w otherwise; ``chunk`` c,
        they lie in the same run of c tokens; or ``mask``, a ``startrail.Mask`` made from slices. Documents and blocks
        are the sequence's. ``sinks``: for each head the logit of one more key whose value is zero; it gets this rank's
        share of its gradient. ``softcap`` c: a logit x counts as c * tanh(x / c), but for the sink's; refused where no
        kernel has it (GPUs without flash-attn).

        With ``return_lse`` it returns (out, lse); lse (batch, heads, local tokens), the logarithm of the sum of all
        exponentials (the sink's too), has gradients. With ``return_largest``, (out, largest): each head's largest
        logit over the whole batch and all ranks, before any softcap, without gradient. With both, (out, lse, largest).
        """
        problem = type_problem(q, k, v, causal, window, scale, others, unknown)
        if problem := problem or option_problem(q, chunk, sinks, softcap, mask):
            self.sp.refuse(problem, self._known_as)
        if mask is not None and (causal, window, chunk) != (False, None, None):
            self.sp.refuse(
                "mask says who sees whom: give causal, window and chunk to it, not beside it", self._known_as
            )
        if not torch.compiler.is_compiling() and any(forward_ad.unpack_dual(x).tangent is not None for x in (q, k, v)):
            raise ValueError("attention has no forward-mode derivative: q, k or v is a dual tensor")
        if q.device.type != "meta" and torch.is_autocast_enabled(q.device.type):  # as scaled_dot_product_attention does
            dtype = torch.get_autocast_dtype(q.device.type)
            q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
        if mask is None:
            mask = Mask(causal, window, chunk=chunk)
        scale, softcap = (None if x is None else float(x) for x in (scale, softcap))
        call = AttentionCall(mask.causal, mask.window, scale, mask.chunk, mask.steps, return_largest, softcap)
        out, lse, _, _, largest = torch.ops.startrail.attention(q, k, v, self._known_as, self._name, str(call))
        if sinks is not None:
            out, lse = _with_sinks(out, lse, sinks)
        results = (out, lse) if return_lse else (out,)
        if return_largest:
            results = (*results, self._largest_of_all(largest))
        return results if len(results) > 1 else out

    def _largest_of_all(self, largest: Tensor) -> Tensor:
        largest = largest.detach().amax(0)
        if self.sp.group is None or self.sp.world == 1:
            return largest
        group = self.sp.group
        return _together(lambda: funcol.all_reduce(largest, "max", group), "the largest logits")


class _Gathered(torch.autograd.Function):
    """All ranks' tensors one behind the other, as ``all_gather_single_autograd`` gives them; but a rank that is gone is
    a ``PeerError`` in the backward pass too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _together(lambda: funcol.all_gather_single(x, dim, group), "gathering tokens")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad, dim, group = grad.contiguous(), ctx.dim, ctx.group
        what = "the gradient of gathering tokens"
        return _together(lambda: funcol.reduce_scatter_single(grad, "sum", dim, group), what), None, None


def _together(collective: Callable[[], Tensor], what: str) -> Tensor:
    """What a functional collective gives; ``what`` it is for, should a rank be gone."""
    if torch.compiler.is_compiling():
        return funcol.wait_tensor(collective())
    with peer_errors(what):
        return funcol.wait_tensor(collective())


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """The results with one more key in every row: its logit is the head's sink, its value zero.

    It needs nobody else, so it is merged once, by the row's owner; autograd gives the sink its gradient, and lse the
    cotangent that the rest of the row needs.
    """
    logits = sinks.to(lse.dtype).view(1, -1, 1)
    # not sigmoid, whose gradient is w (1 - w) with w rounded: of a sink's small weight 1 - w few digits would be left
    weight = F.logsigmoid(lse - logits).exp()
    return (out * weight.unsqueeze(-1)).to(out.dtype), torch.logaddexp(lse, logits)


def _dim(x: Tensor, dim: int) -> int:
    if not isinstance(x, Tensor):
        raise ValueError(f"need a tensor, got {type(x).__name__}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim {dim} is not a dimension of a tensor of shape {tuple(x.shape)}")
    return dim % x.dim()
