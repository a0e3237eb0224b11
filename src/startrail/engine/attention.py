"""Attention behind its op: what a call's tensors compile to, its kernel for blocks, and its two passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from startrail.agreement.consensus import rejoining
from startrail.compile.attention import AttentionPart
from startrail.compile.call import CompiledCall, compile_call, most_kept_bytes
from startrail.engine.arguments import AttentionCall, CallShapes, Shapes
from startrail.engine.batch import Batch
from startrail.engine.runner import BlockKernel, PartInputs, PartResults, PreparedPart, PreparedPass
from startrail.engine.session import Session, Settings
from startrail.engine.wire import Tensors, Wire
from startrail.kernels import (
    Kernel,
    Partial,
    Sums,
    accumulator,
    block_max_logits,
    kernel_for,
    nudge_zero_rows,
    pad_width,
    row_sums,
    surrogate_out,
)
from startrail.schedule.sizes import Sizes
from startrail.schedule.values import BACKWARD, FORWARD, PASSES, Block, Pass
from startrail.transport.process_groups import channels_under_compute

if TYPE_CHECKING:
    from startrail.geometry.blocks import BlockTiles


@dataclass(frozen=True, eq=False)
class PreparedAttention:
    """What calls of one kind run with on one batch."""

    detail: str
    parts: tuple[AttentionPart, ...]
    passes: dict[Pass, PreparedPass]
    kernels: dict[Pass, Kernel]
    tiles: tuple[BlockTiles, ...]
    scale: float
    kept_bytes: int


class AttentionRequest:
    """One pass of an attention call, as the op got it."""

    def __init__(self, pass_: Pass, shapes: CallShapes, call: AttentionCall, number: Tensor | None = None) -> None:
        self.pass_, self.shapes, self.call, self.forward_number = pass_, shapes, call, number
        self.device, self.gradients = shapes.device, call.gradients

    @property
    def key(self) -> object:
        return self.shapes, self.call

    @property
    def kind(self) -> object:
        return self.shapes.kind, self.call

    def prepare(self, session: Session, batch: Batch) -> PreparedAttention:
        shapes, call = self.shapes, self.call
        shapes.check()
        if shapes.tokens != batch.local:
            raise ValueError(_wrong_tokens(shapes, batch, session.settings.split.layout))
        value = compiled(session, batch, shapes, call)
        parts = tuple(part for part in value.parts if isinstance(part, AttentionPart))
        kernels = {pass_: _kernel_for(shapes, call.softcap, parts, pass_) for pass_ in PASSES}
        wire_dtype, kernel = wire_dtype_of(session.settings, shapes.dtype), kernels[FORWARD]
        wires = [Wire(part, shapes.dtype, wire_dtype, kernel.rows_first) for part in parts]
        passes = {pass_: PreparedPass(value, pass_, wires) for pass_ in PASSES}
        tiles = tuple(part.tiles(kernel.costs) for part in parts)
        alike = shapes.with_tokens(batch.layout.largest)  # ranks may hold different numbers of tokens
        detail = f"{alike}, {call.without_gradients()}, {batch.boundaries}, {session.settings}"
        kept = max(value.kept_bytes, kept_bytes(session, shapes))
        scale = call.scale_for(shapes.head_dim)
        return PreparedAttention(detail, parts, passes, kernels, tiles, scale, kept)


def _kernel_for(shapes: CallShapes, softcap: float | None, parts: Sequence[AttentionPart], pass_: Pass) -> Kernel:
    """The backend for one pass. It leaves multiprocessors to the transfers that run under its blocks. Lanes for keys on
    demand are not counted: what they carry is small, and is sent at the start of a pass."""
    kernel = kernel_for(shapes.device, shapes.dtype, shapes.head_dim, softcap, shapes.value_dim)
    kernel.sm_margin = channels_under_compute([part.program(pass_) for part in parts if part.demand_level is None])
    return kernel


def compiled(session: Session, batch: Batch, shapes: CallShapes, call: AttentionCall) -> CompiledCall:
    """What this rank runs for a call with such shards. Raises ``ValueError`` if the plan cannot run it."""
    problem = shapes.problem(batch.boundaries, call.mask, wire_dtype_of(session.settings, shapes.dtype))
    return compile_call(problem, session.settings.split, session.rank, batch.layout)


def _wrong_tokens(shapes: CallShapes, batch: Batch, layout: str) -> str:
    hint = "shard with sequence.shard(), which pads"
    if shapes.heads == batch.local:
        hint = "these look like (batch, tokens, heads, dim): transpose(1, 2) makes them (batch, heads, tokens, dim)"
    return (
        f"length {batch.layout.length} on {batch.layout.world} ranks gives {batch.local} local tokens per rank "
        f"({layout}), but this rank has {shapes.tokens}; {hint}"
    )


def wire_dtype_of(settings: Settings, dtype: torch.dtype) -> torch.dtype:
    """The dtype of messages. A single rank sends nothing and rounds nothing."""
    return dtype if settings.split.world == 1 else settings.wire_dtype or dtype


def sizes_of(settings: Settings, shapes: CallShapes) -> Sizes:
    """The sizes of a call with such shards if all ranks share all tokens. Raises ``ValueError`` if the plan cannot run
    it."""
    return shapes.whole(wire_dtype_of(settings, shapes.dtype)).sizes(settings.split.plan, shapes.tokens)


def kept_bytes(session: Session, shapes: CallShapes) -> int:
    """An upper bound of what a forward pass keeps, from the shapes of its tensors alone: while torch.compile traces, no
    documents are known. Other ranks' pieces are larger than this one's if their shares are."""
    if session.largest_share > 1:
        shapes = shapes.with_tokens(int(1.05 * session.largest_share * (shapes.tokens + 1)))  # this one may hold none
    return most_kept_bytes(session.settings.split, session.rank, sizes_of(session.settings, shapes))


# --- blocks


class AttentionKernel(BlockKernel):
    """Runs the blocks of one pass on a backend. ``max_logits`` (batch, heads) gets the largest logits if the caller
    asks for them."""

    def __init__(self, prepared: PreparedAttention, pass_: Pass, shapes: CallShapes, max_logits: bool = False) -> None:
        self.kernel, self.tiles, self.scale = prepared.kernels[pass_], prepared.tiles, prepared.scale
        self.shapes, self.acc = shapes, accumulator(shapes.dtype)
        self.of_keys, self.of_values = self.kernel.widths(shapes.head_dim, shapes.value_dim)
        self.max_logits: Tensor | None = None
        if max_logits:
            self.max_logits = torch.full(shapes.q[:2], float("-inf"), dtype=self.acc, device=shapes.device)
            self.extra_results = (self.max_logits,)

    @property
    def compiles(self) -> bool:  # type: ignore[override]
        return self.kernel.compiles

    def for_rehearsal(self) -> AttentionKernel:
        other = copy(self)
        other.max_logits = None if self.max_logits is None else self.max_logits.clone()
        return other

    def prepare(self, kind: str, tensors: Tensors) -> Tensors:
        """As the kernel takes them, and as wide. lse and delta, one number per row, stay in the accumulation dtype, as
        kernels expect."""
        if kind != "do":
            widths = (self.of_keys, self.of_values)
            return tuple(self.kernel.prepare(pad_width(x, width)) for x, width in zip(tensors, widths, strict=False))
        lse, delta, dout = tensors
        dout = self.kernel.prepare_dout(pad_width(dout, self.of_values))
        return dout, self.kernel.prepare(surrogate_out(dout, delta)), lse

    def new_result(self, kind: str, shapes: Sequence[Sequence[int]]) -> Partial | Sums:
        if kind == "out":
            return Partial(shapes[0], self.acc, self.shapes.device)
        return Sums(shapes, self.acc, self.shapes.device)

    def block(
        self, part: PreparedPart, block: Block, inputs: Sequence[Tensors], results: Sequence[Partial | Sums]
    ) -> None:
        visible = self.tiles[part.number](block.row, block.column)
        if part.program.pass_ is FORWARD:
            ((q,), (k, v)), (out,) = inputs, results
            assert isinstance(out, Partial)
            self.kernel.forward(q, k, v, visible, self.scale, out)
            if self.max_logits is not None:
                made = part.program.pass_.makes(block)[0]
                mine = part.wire.share(self.max_logits, made, part.place.head)
                mine.copy_(torch.maximum(mine, block_max_logits(q, k, visible, self.scale)))
            return
        ((q,), (dout, out_like, lse), (k, v)), (by_row, by_key) = inputs, results
        assert isinstance(by_row, Sums)
        assert isinstance(by_key, Sums)
        (dq,), (dk, dv) = by_row.sums, by_key.sums
        self.kernel.backward(dout, q, k, v, out_like, lse, visible, self.scale, (dq, dk, dv))

    def outputs(self, part: PreparedPart, kind: str) -> Tensors:
        """All heads of this rank's tokens, in the caller's dtype; of replicated heads, sums that are still partial."""
        sizes, tokens, dtype = _sizes(part), part.wire.local, self.shapes.dtype
        rows, keys = (sizes.batch, sizes.q_heads, tokens), (sizes.batch, sizes.kv_heads * sizes.copies, tokens)
        device = self.shapes.device
        if kind == "out":
            lse = torch.empty(rows, dtype=self.acc, device=device)
            return lse, torch.empty((*rows, sizes.out_dim), dtype=dtype, device=device)
        if kind == "dq":
            return (torch.empty((*rows, sizes.head_dim), dtype=dtype, device=device),)
        dtype = self.acc if sizes.copies > 1 else dtype
        widths = [width for *_, width in sizes.shapes(kind, tokens)]
        return tuple(torch.empty((*keys, width), dtype=dtype, device=device) for width in widths)


K = TypeVar("K", bound=AttentionKernel)
MakeKernel = Callable[[PreparedAttention, Pass, CallShapes, bool], K]


# --- passes


def forward(
    session: Session, q: Tensor, k: Tensor, v: Tensor, op_key: Tensor, call: AttentionCall
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out, lse, the bytes kept for the backward pass, the call's number, and this rank's largest logits."""
    request = AttentionRequest(FORWARD, Shapes.of(q, k, v), call)
    return run_forward(session, request, op_key, (q, k, v), AttentionKernel)


def backward(
    session: Session, dout: Tensor, qkv: list[Tensor], out: Tensor, lse: Tensor, kept: Tensor, number: Tensor,
    kv_heads: int, head_dim: int, op_key: Tensor, call: AttentionCall, dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv. ``qkv`` is empty if ``kept`` holds them, which it does after a head exchange. ``dlse`` is the
    cotangent of lse."""
    batch, heads, tokens, value_dim = out.shape
    widths = (heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim)
    q, k, v = ((batch, h, tokens, dim) for h, dim in widths)
    request = AttentionRequest(BACKWARD, Shapes(q, k, v, 3 * (out.dtype,), out.device), call, number)
    (dq, dk, dv), _ = run_backward(session, request, op_key, qkv, AttentionKernel, dout, out, lse, kept, dlse)
    return dq, dk, dv


@rejoining
def run_forward(
    session: Session, request: AttentionRequest, op_key: Tensor, tensors: Sequence[Tensor], make_kernel: MakeKernel[K]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The forward pass of a request on the caller's ``tensors``; returns what `forward` does."""
    call = request.call
    with session.call():
        started = session.start_pass(request, op_key)
        prepared = started.prepared
        kernel = make_kernel(prepared, FORWARD, request.shapes, call.max_logits)
        kept = torch.empty(prepared.kept_bytes, dtype=torch.uint8, device=request.device)
        given = request.shapes.inputs(*tensors)
        inputs = [_own_inputs(part, given) for part in prepared.passes[FORWARD].parts]
        results = [part["out"] for part in started.run(kernel, inputs, kept)]
        if not call.mask.hides_rows:
            for part, (lse, out) in zip(prepared.parts, results, strict=True):
                _poison_hidden_rows(part, out, lse)
        lse, out = _joined(prepared, results)
        largest = kernel.max_logits
        return out, lse, kept, started.number, lse.new_empty(0, 0) if largest is None else largest


@rejoining
def run_backward(
    session: Session, request: AttentionRequest, op_key: Tensor, tensors: Sequence[Tensor], make_kernel: MakeKernel[K],
    dout: Tensor, out: Tensor, lse: Tensor, kept: Tensor, dlse: Tensor | None,
) -> tuple[Tensors, K]:  # fmt: skip
    """The backward pass: the gradients of q and of the tensors of "kv", and the kernel that computed them. ``tensors``
    is empty if ``kept`` holds them. Each logit gets its weight's share of ``dlse``, so it is subtracted from delta."""
    with session.call():
        started = session.start_pass(request, op_key)
        prepared, wire = started.prepared, started.prepared.passes[BACKWARD].parts[0].wire
        dout = wire.rounded(dout)
        delta = row_sums(dout, out, wire.acc)
        if dlse is not None:
            delta = delta - dlse
            dout = nudge_zero_rows(dout, delta)
        given = {"do": (lse, delta, dout), **(request.shapes.inputs(*tensors) if tensors else {})}
        inputs = [_own_inputs(part, given) for part in prepared.passes[BACKWARD].parts]
        kernel = make_kernel(prepared, BACKWARD, request.shapes, False)
        results = started.run(kernel, inputs, kept)
        pairs = zip(prepared.passes[BACKWARD].parts, results, strict=True)
        return _joined(prepared, [_gradients(part, of_part) for part, of_part in pairs]), kernel


def _own_inputs(part: PreparedPart, given: PartInputs) -> PartInputs:
    """The part's tokens of the caller's tensors, as its ranks see them."""
    wire, start, tokens = part.wire, part.part.start, part.part.tokens
    inputs = dict(given)
    if tokens != given["do" if "do" in given else "q"][0].shape[2]:
        inputs = {kind: tuple(x.narrow(2, start, tokens) for x in tensors) for kind, tensors in given.items()}
    if missing := wire.local - tokens:
        inputs = {kind: tuple(_padded(x, missing) for x in tensors) for kind, tensors in inputs.items()}
    if "q" in inputs:
        (q,), keys = inputs["q"], tuple(wire.rounded(x) for x in inputs["kv"])
        if (copies := _sizes(part).copies) > 1:  # replicated key/value heads
            keys = tuple(x.repeat_interleave(copies, 1) for x in keys)
        inputs |= {"q": (wire.rounded(q),), "kv": keys}
    return inputs


def _sizes(part: PreparedPart) -> Sizes:
    assert isinstance(part.part, AttentionPart)
    return part.part.sizes


def _padded(x: Tensor, missing: int) -> Tensor:
    """Zeros after the tokens (batch, heads, tokens, ...)."""
    return F.pad(x, (0, missing) if x.dim() == 3 else (0, 0, 0, missing))


def _gradients(part: PreparedPart, results: PartResults) -> Tensors:
    """dq, dk, dv. The gradient of a replicated head is the sum of its copies' gradients."""
    sizes, (dq,), of_keys = _sizes(part), results["dq"], results["dkv"]
    if sizes.copies > 1:
        heads = sizes.kv_heads, sizes.copies
        of_keys = tuple(x.unflatten(1, heads).sum(2).to(part.wire.dtype) for x in of_keys)
    return dq, *of_keys


def _joined(prepared: PreparedAttention, results: Sequence[Tensors]) -> Tensors:
    """The results of all tokens from those of each part, without what only its programs see."""
    own = [
        tuple(x if x.shape[2] == part.tokens else x.narrow(2, 0, part.tokens) for x in tensors)
        for part, tensors in zip(prepared.parts, results, strict=True)
    ]
    if len(own) == 1:
        return tuple(x.contiguous() for x in own[0])
    return tuple(torch.cat(tensors, 2) for tensors in zip(*own, strict=True))


def _poison_hidden_rows(part: AttentionPart, out: Tensor, lse: Tensor) -> None:
    """Fill rows without any weight with NaN, as softmax does in one process. Every token sees itself, so all logits of
    such a row were -inf. Only on CPUs, where reading ``lse`` costs nothing."""
    if lse.device.type != "cpu" or not (hidden := lse.isneginf()).any():
        return
    real = sum(count for _, count in part.zone.runs_of((part.member,), part.length))  # without padding
    out[:, :, :real].masked_fill_(hidden[:, :, :real].unsqueeze(-1), float("nan"))
