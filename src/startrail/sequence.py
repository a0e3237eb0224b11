"""``Sequence``: what all layers share about one batch. Make one per batch with ``SequenceParallel.sequence``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from startrail import hybrid
from startrail._compat import max_over_ranks
from startrail.agreement.errors import peer_errors
from startrail.engine.arguments import (
    AttentionCall,
    LatentShapes,
    check_tangents,
    is_int,
    read_call,
    read_latent_call,
    read_mask,
    shapes_of,
)
from startrail.engine.attention import compiled
from startrail.engine.gather_op import agree
from startrail.engine.latents import expand
from startrail.engine.tensors import check_value, read_dim
from startrail.schedule.program import lane_names
from startrail.step_checks import check_shifted

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from startrail.compile.call import CompiledCall
    from startrail.engine.op_key import SequenceState
    from startrail.geometry.layout import Layout, Runs
    from startrail.geometry.mask import Mask
    from startrail.kernels.runs import Recurrence
    from startrail.parallel import SequenceParallel


class AttentionOptions(TypedDict, total=False):
    """Options of ``Sequence.attention`` that do not change the type of what it returns, for its signatures."""

    causal: bool
    window: int | None
    chunk: int | None
    mask: Mask | None
    scale: float | None
    sinks: Tensor | None
    softcap: float | None


@dataclass(frozen=True, eq=False, repr=False)
class Sequence:
    """One sequence, split over the ranks of ``sp``. Its documents, if it is packed, do not see each other.

    >>> from startrail import SequenceParallel
    >>> sequence = SequenceParallel("1x1").sequence(5, documents=[0, 2, 5])
    >>> tokens = torch.arange(5).unsqueeze(0)
    >>> sequence.shard(tokens, dim=1).tolist(), sequence.positions().tolist()
    ([[0, 1, 2, 3, 4]], [0, 1, 2, 3, 4])
    >>> q = torch.randn(1, 4, 5, 8)
    >>> sequence.attention(q, q, q, causal=True).shape
    torch.Size([1, 4, 5, 8])
    """

    sp: SequenceParallel
    _state: SequenceState

    def __repr__(self) -> str:
        return f"Sequence({self._state.batch.boundaries}, {self.local} on rank {self.sp.rank} of {self.sp.world})"

    @property
    def _layout(self) -> Layout:
        return self._state.batch.layout

    @property
    def length(self) -> int:
        """The number of tokens of the whole sequence."""
        return self._layout.length

    @property
    def local(self) -> int:
        """The number of tokens that this rank holds, padding included."""
        return self._layout.counts[self.sp.rank]

    @property
    def documents(self) -> Tensor:
        """cu_seqlens on the host: (0, length) if nothing is packed."""
        return torch.tensor(self._state.batch.boundaries.documents)

    @property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """Runs (start, stop) of tokens that see each other."""
        return self._state.batch.boundaries.blocks

    @property
    def runs(self) -> Runs:
        """This rank's real tokens in the order in which it holds them, as (first position, count)."""
        runs = ((start, min(count, self.length - start)) for start, count in self.padded_runs)
        return tuple((start, count) for start, count in runs if count > 0)

    @property
    def padded_runs(self) -> Runs:
        """``runs`` with this rank's padding, which has positions beyond the sequence."""
        return self._layout.table[self.sp.rank]

    @property
    def document_runs(self) -> Runs:
        """``runs`` cut where documents begin: runs of one document each. Adjacent runs of a document are one."""
        return tuple(run for run in hybrid.held_runs(self) if run[0] < self.length)

    def packed(self, documents: Tensor | SequenceOf[int] | None) -> Sequence:
        """The same tokens on the same ranks with other documents: global cu_seqlens (0, ..., length). Documents of this
        sequence can be cut further, but not joined, because their tokens can be on different ranks. Both are about one
        batch: ranks that have sharded different data for either raise at their next call with the new one."""
        return self.sp._sequence(self.length, documents, self.blocks, self._state.batch.boundaries.shares, self._state)

    # --- tokens

    def shard(self, x: Tensor, dim: int, pad_value: float = 0) -> Tensor:
        """This rank's part of a tensor that every rank has in full, padded with ``pad_value`` if necessary. Zero is
        right for ids, since padding is never attended. For labels use ``shard_labels``, which pads with -100. Warns
        about labels (padded with -100) that are not shifted.

        Differentiable: the gradient is this rank's share and zero elsewhere. Sum it over the group for the full one.
        """
        dim = self._whole_dim("shard", x, dim, pad_value=pad_value)
        if not torch.compiler.is_compiling():
            self.sp._session.record_digest(self._state, x)
            check_shifted(self.sp, self._state, x, dim, pad_value)
        places = self._places(x.device)
        own = x.index_select(dim, places.clamp(max=self.length - 1))
        return own.masked_fill(_along(dim, places >= self.length, own), pad_value)

    def _whole_dim(self, operation: str, x: Tensor, dim: int, hint: str = "", **values: float) -> int:
        """``dim``, where ``x`` must have all tokens, and must be able to hold the ``values``. Nothing is sent, so this
        raises on this rank alone, and leaves a note for ranks whose next call waits for it."""
        try:
            dim = read_dim(x, dim)
            for name, value in values.items():
                check_value(name, value, x.dtype)
            if x.shape[dim] != self.length:
                raise ValueError(
                    f"a tensor of shape {tuple(x.shape)} has {x.shape[dim]} tokens in dimension {dim}, but the "
                    f"sequence has {self.length}{hint}"
                )
        except ValueError as error:
            self.sp._session.consensus.note_mistake(operation, error)
            raise
        return dim

    def identify(self, batch: int) -> None:
        """Number the batch that the next calls are about. Only for data that is not passed to ``shard``, because each
        rank reads its own tokens: ranks with different numbers raise at their next call, as they do if they have
        sharded different data."""
        if not torch.compiler.is_compiling():
            self.sp._session.record_digest(self._state, torch.tensor([batch]))

    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """The full tensor on every rank, in order and without padding: the inverse of ``shard``.

        Differentiable, as the exact adjoint: a shard's gradient is the sum of all ranks' gradients for it. If every
        rank computes the *same* loss from the result, divide that loss by the number of ranks.
        """
        arguments = f"dim={dim}"
        self._agree("unshard", self._alike(x, dim), arguments)
        dim = read_dim(x, dim)
        if x.shape[dim] != self.local:
            raise ValueError(
                f"a tensor of shape {tuple(x.shape)} has {x.shape[dim]} tokens in dimension {dim}, but each rank holds "
                f"{self.local} of this sequence"
            )
        batch, given = self._state.batch, x
        if missing := batch.layout.largest - self.local:  # gathering needs equally many from every rank
            x = F.pad(x, (*[0, 0] * (x.dim() - 1 - dim), 0, missing))
        gathered = self._gather(x, dim, self._alike(given, dim), "unshard", arguments)
        return gathered.index_select(dim, batch.token_order().to(x.device))

    def _alike(self, x: Any, dim: int) -> Any:
        """``x`` as all ranks have it, to be compared: without tokens, if ranks hold different numbers of them."""
        if self._state.batch.boundaries.shares and isinstance(x, Tensor) and -x.dim() <= dim < x.dim():
            return x.narrow(dim, 0, 0) if x.shape[dim] == self.local else x
        return x

    def _agree(self, operation: str, x: object, arguments: str) -> None:
        """Raise ``ValueError`` on all ranks unless all are about to run a collective with the same arguments. In a
        compiled graph, the collective itself does that."""
        if not torch.compiler.is_compiling():
            agree(x, self._state.op_key, self.sp._name, operation, arguments, _has_gradients(x))

    def _gather(
        self, x: Tensor, dim: int, given: Tensor | None = None, operation: str = "", arguments: str = ""
    ) -> Tensor:
        """The tensors ``x`` of all ranks, one after the other, for an ``operation`` on the tensor ``given``."""
        if self.sp.group is None or self.sp.world == 1:
            return x
        if not torch.compiler.is_compiling():
            operation = ""  # ranks have agreed on it
        # gloo has neither int16 nor float8
        is_known = x.dtype in (torch.int32, torch.int64) or x.is_complex() or (x.is_floating_point() and x.itemsize > 1)
        part, given = x.contiguous() if is_known else x.contiguous().view(torch.uint8), x if given is None else given
        gathered = torch.ops.startrail.gather_tokens(
            part, dim, self.sp.group.group_name, given, self._state.op_key, self.sp._name, operation, arguments,
            _has_gradients(given),
        )  # fmt: skip
        return gathered if is_known else gathered.contiguous().view(x.dtype)

    def _sum(self, x: Tensor) -> Tensor:
        """The sum of the tensors ``x`` of all ranks, which have agreed on them."""
        if self.sp.group is None or self.sp.world == 1:
            return x
        return torch.ops.startrail.add_up(x, self.sp.group.group_name, self.sp._name)

    def shard_labels(self, labels: Tensor, dim: int = 1, ignore_index: int = -100) -> Tensor:
        """This rank's next-token labels. ``labels`` are aligned with the tokens, and are most often the ids themselves.
        They are shifted over the whole sequence before it is split; the last token of each document and padding get
        ``ignore_index``. Shard labels that are already shifted with ``shard(labels, 1, -100)``.

        >>> from startrail import SequenceParallel
        >>> SequenceParallel("1x1").sequence(5, [0, 2, 5]).shard_labels(torch.tensor([[5, 6, 7, 8, 9]])).tolist()
        [[6, -100, 8, 9, -100]]
        """
        hint = ": pass the labels of all tokens, neither shifted nor split"
        dim = self._whole_dim("shard_labels", labels, dim, hint, ignore_index=ignore_index)
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
            raise ValueError(f"labels must be whole numbers, got {labels.dtype}")
        shifted = labels.roll(-1, dim).index_fill(dim, self.documents[1:].to(labels.device) - 1, ignore_index)
        return self.shard(shifted, dim, ignore_index)

    def roll(self, x: Tensor, shift: int, dim: int, fill_value: float = 0) -> Tensor:
        """``torch.roll`` along the whole sequence, for a tensor of this rank's tokens. With ``shift=-1`` every token
        gets the value of the next one (multi-token prediction), also across shards. Values from another document or
        from outside the sequence are replaced by ``fill_value``. Differentiable.

        >>> from startrail import SequenceParallel
        >>> SequenceParallel("1x1").sequence(5, [0, 2, 5]).roll(torch.arange(1, 6), -1, dim=0).tolist()
        [2, 0, 4, 5, 0]
        """
        arguments = f"shift={shift}, dim={dim}, fill_value={fill_value}"
        self._agree("roll", self._alike(x, dim), arguments)
        dim = read_dim(x, dim)
        if x.shape[dim] != self.local:
            raise ValueError(f"a tensor of shape {tuple(x.shape)} does not have {self.local} tokens in dimension {dim}")
        if not is_int(shift):
            raise ValueError(f"shift={shift!r} must be a whole number of tokens")
        check_value("fill_value", fill_value, x.dtype)
        moved = x
        if shift:
            offered, sources = self._state.batch.roll_sources(shift)
            own = x if self.local else torch.cat((x, x.new_zeros(*x.shape[:dim], 1, *x.shape[dim + 1 :])), dim)
            edges = own.index_select(dim, offered.to(x.device))
            edges = self._gather(edges, dim, self._alike(x, dim), "roll", arguments)
            moved = torch.cat((x, edges), dim).index_select(dim, sources.to(x.device))
        return moved.masked_fill(_along(dim, ~self._same_document(shift, x.device), x), fill_value)

    def _same_document(self, shift: int, device: torch.device) -> Tensor:
        """(local,) True if a token is not padding and the token ``shift`` before it belongs to the same document."""
        here = self._places()
        document = [torch.bucketize(position, self.documents, right=True) for position in (here, here - shift)]
        inside = (here < self.length) & (here >= shift) & (here - shift < self.length)
        return (inside & (document[0] == document[1])).to(device)

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """Global positions of this rank's tokens, for rotary and other position embeddings. Padding gets the last
        position."""
        if not isinstance(device, torch.device | str | None):
            raise ValueError(f"positions takes a device, not a {type(device).__name__}: write positions(x.device)")
        return self._places(device).clamp(max=self.length - 1)

    def _places(self, device: torch.device | str | None = None) -> Tensor:
        """Positions of this rank's tokens; those of padding are beyond the sequence."""
        return self._state.batch.positions.to(device)

    # --- traffic

    def compiled(
        self, *tensors: Tensor, causal: bool = False, window: int | None = None, chunk: int | None = None,
        mask: Mask | None = None,
    ) -> CompiledCall:  # fmt: skip
        """What attention with such shards runs on this rank: for each zone of its tokens, the plan or ``direct``. The
        ``tensors`` are q, k, v, or those of ``latent_attention``. Without v, values have the head dim of keys."""
        call, shapes = AttentionCall(read_mask(causal, window, chunk, mask)), shapes_of(*tensors)
        if isinstance(shapes, LatentShapes) and self._expands_first(shapes, call.mask):
            shapes = shapes.expanded
        return compiled(self.sp._session, self._state.batch, shapes, call)

    def promised_traffic(
        self, *tensors: Tensor, causal: bool = False, window: int | None = None, chunk: int | None = None,
        mask: Mask | None = None,
    ) -> dict[str, dict[str, int]]:  # fmt: skip
        """Bytes by level that this rank sends in each pass of a call with such shards, by closed form. Arguments as for
        ``compiled``."""
        call = self.compiled(*tensors, causal=causal, window=window, chunk=chunk, mask=mask)
        names = lane_names(self.sp._session.place)
        return {
            str(pass_): {name: sent for name, sent in zip(names, call.traffic(pass_), strict=True) if sent}
            for pass_ in call.problem.passes
        }

    # --- attention

    @overload
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *,
        return_lse: Literal[False] = ..., return_largest: Literal[False] = ..., **options: Unpack[AttentionOptions],
    ) -> Tensor: ...  # fmt: skip

    @overload
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *,
        return_lse: Literal[True], return_largest: Literal[False] = ..., **options: Unpack[AttentionOptions],
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    @overload
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *,
        return_lse: Literal[False] = ..., return_largest: Literal[True], **options: Unpack[AttentionOptions],
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    @overload
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *,
        return_lse: Literal[True], return_largest: Literal[True], **options: Unpack[AttentionOptions],
    ) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip

    @overload
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *,
        return_lse: bool = ..., return_largest: bool = ..., **options: Unpack[AttentionOptions],
    ) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *,
        causal: bool = False, window: int | None = None, chunk: int | None = None, mask: Mask | None = None,
        scale: float | None = None, sinks: Tensor | None = None, softcap: float | None = None,
        return_lse: bool = False, return_largest: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
        """Attention over the whole sequence, for this rank's queries.

        q: (batch, heads, local tokens, head dim). k and v can have fewer heads, and v a different head dim. Every rank
        of the group must make the call, with the same arguments except for the tokens.

        ``window`` w: query i sees keys j with i-j < w when causal, |i-j| < w otherwise. ``chunk`` c: query and key lie
        in the same run of c tokens. ``mask``: instead of these, a ``startrail.Mask`` made from slices. Documents and
        blocks belong to the sequence. ``sinks``: one logit per head, of an extra key whose value is zero; its gradient
        is this rank's share. ``softcap`` c: a logit x becomes c * tanh(x / c), except for the sink's. Raises
        ``ValueError`` if no kernel supports a softcap (GPUs without flash-attn).

        With ``return_lse`` it returns (out, lse); lse (batch, heads, local tokens) is the log-sum-exp of all logits,
        including the sink's, and has gradients. With ``return_largest`` it returns (out, largest): each head's largest
        logit over the batch and all ranks, before any softcap, without gradient. With both, (out, lse, largest).
        """
        with self._reading(q, k, v):
            call = read_call(
                q, k, v, causal=causal, window=window, chunk=chunk, mask=mask,
                scale=scale, sinks=sinks, softcap=softcap, max_logits=return_largest,
            )  # fmt: skip
        q, k, v = _autocast(q, k, v)
        key, name = self._state.op_key, self.sp._name
        out, lse, _, _, largest = torch.ops.startrail.attention(q, k, v, key, name, str(call))
        return self._results(out, lse, sinks, return_lse, largest if return_largest else None)

    @overload
    def latent_attention(
        self, q: Tensor, latent: Tensor, k_rope: Tensor, w_k: Tensor, w_v: Tensor, *,
        return_lse: Literal[False] = ..., return_largest: Literal[False] = ..., **options: Unpack[AttentionOptions],
    ) -> Tensor: ...  # fmt: skip

    @overload
    def latent_attention(
        self, q: Tensor, latent: Tensor, k_rope: Tensor, w_k: Tensor, w_v: Tensor, *,
        return_lse: bool = ..., return_largest: bool = ..., **options: Unpack[AttentionOptions],
    ) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip

    def latent_attention(
        self, q: Tensor, latent: Tensor, k_rope: Tensor, w_k: Tensor, w_v: Tensor, *,
        return_lse: bool = False, return_largest: bool = False, **options: Unpack[AttentionOptions],
    ) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
        """Multi-head latent attention (MLA) over the whole sequence: ``attention`` with keys [latent W_k ; k_rope] and
        values latent W_v, which travel as latents and are expanded where they are used.

        q: (batch, heads, local tokens, key dim + rope dim). latent: (batch, local tokens, rank), after its norm.
        k_rope: (batch, local tokens, rope dim), after rotary embeddings, shared by all heads; rope dim may be 0. w_k:
        (heads, key dim, rank) and w_v: (heads, value dim, rank), as ``nn.Linear`` has them. Options and results are
        those of ``attention``. The gradients of w_k and w_v are this rank's share: sum them over ranks like any
        weight's.

        >>> from startrail import SequenceParallel
        >>> sequence = SequenceParallel("1x1").sequence(5)
        >>> q, latent, k_rope = torch.randn(1, 4, 5, 12), torch.randn(1, 5, 16), torch.randn(1, 5, 4)
        >>> w_k, w_v = torch.nn.Linear(16, 4 * (8 + 6)).weight.view(4, 8 + 6, 16).split((8, 6), 1)
        >>> sequence.latent_attention(q, latent, k_rope, w_k, w_v, causal=True).shape
        torch.Size([1, 4, 5, 6])
        """
        tensors = q, latent, k_rope, w_k, w_v
        with self._reading(*tensors):
            call = read_latent_call(*tensors, max_logits=return_largest, **options)
        key, name = self._state.op_key, self.sp._name
        q, latent, k_rope, w_k, w_v = _autocast(*tensors)
        if self._expands_first(LatentShapes.of(q, latent, k_rope, w_k, w_v), call.mask):
            results = torch.ops.startrail.attention(q, *expand(latent, k_rope, w_k, w_v), key, name, str(call))
        else:
            results = torch.ops.startrail.latent_attention(q, latent, k_rope, w_k, w_v, key, name, str(call))
        out, lse, _, _, largest = results
        return self._results(out, lse, options.get("sinks"), return_lse, largest if return_largest else None)

    def _expands_first(self, shapes: LatentShapes, mask: Mask) -> bool:
        """True if the described cluster sends expanded keys faster than latents. Not asked while torch.compile traces,
        for which a rule would be one more constant of the batch."""
        if self.sp._expanding is None or torch.compiler.is_compiling():
            return False
        try:
            shapes.check()
            problem = shapes.problem(self._state.batch.boundaries, mask, shapes.dtype)
            return self.sp._expanding.first(self.sp.plan, problem)
        except ValueError:  # of shapes that do not fit, or not this plan: the op raises it on all ranks
            return False

    @contextmanager
    def _reading(self, *tensors: Tensor) -> Iterator[None]:
        """A ``ValueError`` while a call's arguments are read is raised on all ranks."""
        try:
            check_tangents("attention", *tensors)
            yield
        except ValueError as error:
            self.sp._session.refuse(str(error), self._state.op_key)

    def _results(
        self, out: Tensor, lse: Tensor, sinks: Tensor | None, return_lse: bool, largest: Tensor | None
    ) -> Tensor | tuple[Tensor, ...]:
        """What a call returns. ``largest``: the largest logits that this rank has computed, if they are asked for."""
        if sinks is not None:
            out, lse = _with_sinks(out, lse, sinks)
        results = (out, lse) if return_lse else (out,)
        if largest is not None:
            results = (*results, self._max_over_ranks(largest))
        return results if len(results) > 1 else out

    def _max_over_ranks(self, largest: Tensor) -> Tensor:
        group, largest = self.sp.group, largest.detach().amax(0)
        if group is None or self.sp.world == 1:
            return largest
        return _wait_for(lambda: max_over_ranks(largest, group), "the largest logits", group)

    # --- convolutions and recurrences

    def halo(self, x: Tensor, before: int, dim: int = 1) -> Tensor:
        """The ``before`` tokens before each of this rank's ``document_runs``, from whichever ranks hold them: for each
        run, zeros where its document begins less than ``before`` tokens earlier. x has this rank's tokens in ``dim``;
        the result has (runs, before) there instead. Any dtype. Differentiable.

        >>> from startrail import SequenceParallel
        >>> sequence = SequenceParallel("1x1").sequence(5, [0, 2, 5])
        >>> sequence.document_runs, sequence.halo(torch.arange(1, 6), before=2, dim=0).tolist()
        (((0, 2), (2, 3)), [[0, 0], [0, 0]])
        """
        return hybrid.halo(self, x, before, dim)

    def conv1d(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, *, dim: int = 2
    ) -> Tensor:
        """A causal depthwise convolution over the whole sequence, as ``causal_conv1d_fn`` of transformers computes it
        on one rank. No document sees another.

        x is (batch, channels, local tokens), or (batch, local tokens, channels) with ``dim=1``; ``weight`` (channels,
        width), whose last number is for the token itself; ``activation`` None, "silu" or "swish". Gradients of weight
        and bias are this rank's share, as those of any layer.
        """
        return hybrid.conv1d(self, x, weight, bias, activation, dim)

    @overload
    def scan(
        self, kernel: Callable[..., Recurrence], *tensors: Tensor,
        initial_state: Tensor | None = ..., output_final_state: Literal[False] = ..., **options: Any,
    ) -> Tensor: ...  # fmt: skip

    @overload
    def scan(
        self, kernel: Callable[..., Recurrence], *tensors: Tensor,
        initial_state: Tensor | None = ..., output_final_state: Literal[True], **options: Any,
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    def scan(
        self, kernel: Callable[..., Recurrence], *tensors: Tensor,
        initial_state: Tensor | None = None, output_final_state: bool = False, **options: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """A linear recurrence over the whole sequence, for this rank's tokens: the outputs of ``kernel(*tensors,
        **options)``, where ``kernel`` is ``startrail.gated_delta_rule``, for example. `startrail.hybrid` lists all.
        Every rank of the group must make the call, with the same arguments except for the tokens.

        Only states are sent: one where a document goes on at another rank, and one back in the backward pass.
        ``initial_state`` (batch, documents, ...) is the state before each document, the same on all ranks, zeros by
        default. With ``output_final_state`` it returns (outputs, the state after each document), on all ranks.
        """
        return hybrid.scan(self, kernel, tensors, initial_state, output_final_state, options)


def _wait_for(collective: Callable[[], Tensor], what: str, group: dist.ProcessGroup) -> Tensor:
    """The result of a functional collective. Raises ``PeerError`` that says ``what`` failed if a rank is gone."""
    if torch.compiler.is_compiling():
        return collective()
    with peer_errors(what, group):
        return collective()


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's dtype if it is enabled, as scaled_dot_product_attention takes them."""
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """The results with one more key in every row. Its logit is the head's sink, its value zero.

    It needs no other rank, so the row's owner merges it once. Autograd gives the sink its gradient, and lse the
    cotangent that the rest of the row needs.
    """
    logits = sinks.to(lse.dtype).view(1, -1, 1)
    # not sigmoid: its gradient is w (1 - w) with w rounded, which leaves few digits of a sink's small weight 1 - w
    weight = F.logsigmoid(lse - logits).exp()
    return (out * weight.unsqueeze(-1)).to(out.dtype), torch.logaddexp(lse, logits)


def _has_gradients(x: object) -> bool:
    return isinstance(x, Tensor) and torch.is_grad_enabled() and x.requires_grad


def _along(dim: int, values: Tensor, like: Tensor) -> Tensor:
    """One value per token, for a tensor that has its tokens in ``dim``."""
    return values.view([-1 if index == dim else 1 for index in range(like.dim())])
