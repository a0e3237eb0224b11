"""``Kernel``, a backend: attention of one query shard to one key/value shard, forward and backward.

``visible`` is the block's list of tiles (see `geometry.tiles`). A backend computes one tile: full, causal, or under a
boolean mask. Everything else is here: slicing, anticausal squares by reversing both sides, and adding up tiles.

The backward pass of a block takes the *global* out and lse of its rows, so block gradients simply add up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from startrail.geometry.tiles import Costs, Tile
from startrail.kernels.accumulate import Partial, Sum, accumulator
from startrail.kernels.device import on_device
from startrail.kernels.fused import fused_on


class TileMask(NamedTuple):
    """The visible part of a rectangle. ``causal`` is for squares only; ``boolean`` (rows, keys) is True where visible.
    Backends that support bands get ``packs`` instead: (rows, keys) one after the other under a ``window`` (see
    `geometry.bands`)."""

    causal: bool
    boolean: Tensor | None
    scale: float
    window: tuple[int, int] = (-1, -1)
    packs: tuple[tuple[int, int], ...] = ()


ForwardTile = Callable[[Tensor, Tensor, Tensor, TileMask], tuple[Tensor, Tensor]]
BackwardTile = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, TileMask], tuple[Tensor, Tensor, Tensor]]

MAX_WIDENED_ELEMENTS = 2**18  # at a time, from the inputs' dtype to float64
MAX_HELD_LOGITS, MAX_HELD_LOGITS_ON_GPU = 2**22, 2**26  # by backends that write out their logits


class Kernel(ABC):
    """A backend. Shapes: q, dout, out (batch, heads, rows, dim); k, v (batch, kv heads, keys, dim); lse (batch, heads,
    rows), float32 or wider. ``heads`` is a multiple of ``kv heads``; no side is ever empty.

    ``costs`` decide how its blocks are cut into tiles. ``reason`` says why this backend was chosen. With a ``softcap``
    c, a logit x becomes c * tanh(x / c); lse and gradients are those of the capped logits. ``sm_margin``: the
    multiprocessors of a GPU that transfers hold while blocks are computed. ``rows_first``: messages hold (batch, rows,
    heads, dim). ``compiles``: its first calls compile something. ``rows_first`` is the same for all backends of one
    device type and dtype, because ranks may choose different ones."""

    name: str
    costs = Costs()
    reason = ""
    softcap: float | None = None
    sm_margin = 0
    rows_first = False
    compiles = False

    @abstractmethod
    def prepare(self, x: Tensor) -> Tensor:
        """``x`` as this backend needs it: in its dtype, with a dense last dimension."""

    def prepare_dout(self, x: Tensor) -> Tensor:
        """``prepare`` for dout, and so for the rows' out, which all blocks of a row share in the backward pass."""
        return self.prepare(x)

    def widths(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        """How wide this backend takes queries and keys, and values: narrower ones are padded with zeros, which change
        no logit and no result. Tensors of these widths are never padded again."""
        widest = max(head_dim, value_dim)
        return widest, widest

    @abstractmethod
    def forward_tile(self, q: Tensor, k: Tensor, v: Tensor, tile_mask: TileMask) -> tuple[Tensor, Tensor]:
        """out and lse of a rectangle."""

    @abstractmethod
    def backward_tile(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile_mask: TileMask
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of a rectangle, from the global out and lse of its rows."""

    def select_forward(self, q: Tensor, k: Tensor) -> ForwardTile:
        """The function that computes the tiles of a block with these values: ``forward_tile``, unless it would get them
        wrong."""
        return self.forward_tile

    def select_backward(self, out: Tensor, lse: Tensor) -> BackwardTile:
        """Likewise for ``backward_tile``."""
        return self.backward_tile

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Sequence[Tile], scale: float, into: Partial | None = None
    ) -> Partial:
        """Attend, and merge the result into ``into`` (a new ``Partial`` if not given)."""
        if into is None:
            into = Partial((*q.shape[:3], v.shape[3]), accumulator(q.dtype), q.device)
        forward_tile = self.select_forward(q, k)
        of_keys, of_values = self.widths(q.shape[3], v.shape[3])
        q, k, v = pad_width(q, of_keys), pad_width(k, of_keys), pad_width(v, of_values)
        for tile in visible:
            rows, keys = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
            qt, kt, vt = _rows_of(q, rows), _rows_of(k, keys), _rows_of(v, keys)
            tile_mask, flip = _tile_mask(tile, q.device, scale)
            if flip:
                qt, kt, vt = qt.flip(2), kt.flip(2), vt.flip(2)
            out, lse = forward_tile(qt, kt, vt, tile_mask)
            self._check_shapes(("out", out, (*qt.shape[:3], vt.shape[3])), ("lse", lse, qt.shape[:3]))
            if flip:
                out, lse = out.flip(2), lse.flip(2)
            into.merge(out[..., : into.shape[3]], lse, rows, donated=True)
        return into

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        visible: Sequence[Tile], scale: float, into: tuple[Sum, Sum, Sum] | None = None,
    ) -> tuple[Sum, Sum, Sum]:  # fmt: skip
        """Gradients of one block, added to the sums (dq, dk, dv) in ``into``."""
        if into is None:
            dtype = accumulator(q.dtype)
            into = Sum(q.shape, dtype, q.device), Sum(k.shape, dtype, k.device), Sum(v.shape, dtype, v.device)
        backward_tile = self.select_backward(out, lse)
        of_keys, of_values = self.widths(q.shape[3], v.shape[3])
        q, k = pad_width(q, of_keys), pad_width(k, of_keys)
        v, dout, out = pad_width(v, of_values), pad_width(dout, of_values), pad_width(out, of_values)
        for tile in visible:
            rows, keys = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
            tile_mask, flip = _tile_mask(tile, q.device, scale)
            dt, qt, ot, lt = (_rows_of(x, rows) for x in (dout, q, out, lse))
            kt, vt = _rows_of(k, keys), _rows_of(v, keys)
            if flip:
                dt, qt, kt, vt, ot, lt = (x.flip(2) for x in (dt, qt, kt, vt, ot, lt))
            grads = backward_tile(dt, qt, kt, vt, ot, lt, tile_mask)
            self._check_shapes(*zip(("dq", "dk", "dv"), grads, (qt.shape, kt.shape, vt.shape), strict=True))
            for total, grad, part in zip(into, grads, (rows, keys, keys), strict=True):
                total.add((grad.flip(2) if flip else grad)[..., : total.shape[3]], part, donated=True)
        return into

    def _check_shapes(self, *results: tuple[str, Tensor, Sequence[int]]) -> None:
        """Another version or build of a kernel may return other shapes, with which merges would broadcast."""
        for name, x, shape in results:
            if x.shape != shape:
                raise ValueError(
                    f"kernel {self.name} returned {name} {tuple(x.shape)} instead of {tuple(shape)}: startrail does "
                    "not know this version of it"
                )


def row_chunks(q: Tensor, keys: int) -> Iterator[slice]:
    """The rows of ``q`` in parts that are small enough to write out their logits.

    >>> list(row_chunks(torch.zeros(1, 2, 5, 8), keys=2**20))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    batch, heads, rows, _ = q.shape
    held = MAX_HELD_LOGITS_ON_GPU if q.device.type == "cuda" else MAX_HELD_LOGITS  # there, launches cost more
    step = max(1, held // (batch * heads * keys))
    return (slice(row, min(row + step, rows)) for row in range(0, rows, step))


def _rows_of(x: Tensor, rows: slice) -> Tensor:
    """Some rows of ``x``. Most tiles are whole blocks: skip the view, which costs the host as much as a launch."""
    return x if rows.stop - rows.start == x.shape[2] else x[:, :, rows]


def row_sums(dout: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """``delta = sum(dout * out)`` of every row, rounded once. A few heads at a time, to keep wide copies small."""
    if (fused := fused_on(dout.device)) is not None:
        with on_device(dout.device):  # unlike the other fused kernels, this one runs outside of a pass
            return fused.row_sums(dout, out, dtype)
    heads = max(1, MAX_WIDENED_ELEMENTS * dout.shape[1] // max(1, dout.numel()))
    if heads >= dout.shape[1]:
        return torch.linalg.vecdot(dout.double(), out.double()).to(dtype)
    pairs = zip(dout.split(heads, 1), out.split(heads, 1), strict=True)
    return torch.cat([torch.linalg.vecdot(d.double(), o.double()).to(dtype) for d, o in pairs], 1)


def surrogate_out(dout: Tensor, delta: Tensor) -> Tensor:
    """A substitute for ``out`` with the same row sums ``delta = sum(dout * out)``, which is all that a backward kernel
    uses of it.

    A message then carries one number per row instead of the whole output. The sum is placed where dout is largest, so
    that the kernel rounds nothing when it adds the row up again. In half precision the next two largest elements take
    the remainder. A row with dout = 0 has delta = 0. If delta is not finite, the sum is NaN.

    >>> surrogate_out(torch.tensor([3.0, 4.0]), torch.tensor(5.0))
    tensor([0.0000, 1.2500])
    """
    picks = min(dout.shape[-1], 1 if torch.finfo(dout.dtype).eps < 1e-6 else 3)
    if (fused := fused_on(dout.device)) is not None:
        return fused.surrogate_out(dout, delta, picks)
    out, rest, size = torch.zeros_like(dout), delta.unsqueeze(-1), dout.abs()
    limit = torch.finfo(dout.dtype).max
    for pick in range(picks):
        place = size.argmax(-1, keepdim=True)
        value = dout.gather(-1, place).to(delta.dtype)
        part = (rest / value).clamp(-limit, limit).where(value != 0, 0).where(rest.isfinite(), torch.nan).to(dout.dtype)
        out.scatter_(-1, place, part)
        if pick + 1 < picks:
            size.scatter_(-1, place, -1)  # do not pick it again
            rest = rest - value * part
    return out


def nudge_zero_rows(dout: Tensor, delta: Tensor) -> Tensor:
    """``dout`` with a tiny number in each row of zeros whose ``delta`` is not zero, so that `surrogate_out` can
    represent it.

    With a cotangent of lse, delta can differ from zero where dout is zero. The number is so much smaller than delta
    that rounding removes its effect on the gradients. Rows whose delta is not finite stay as they are.

    >>> nudge_zero_rows(torch.zeros(1, 2), torch.ones(1)).tolist() == [[2.0**-46, 0.0]]
    True
    """
    info = torch.finfo(dout.dtype)
    part = 2.0**-12 if dout.dtype == torch.float16 else min(info.eps**2, 2.0**-40)
    least = info.tiny * info.eps if dout.dtype == torch.float16 else info.tiny
    size, place = dout.abs().max(-1, keepdim=True)
    wanted = delta.unsqueeze(-1) * part
    number = wanted.abs().clamp(min=least).copysign(wanted).to(dout.dtype)
    number = number.where((size < wanted.abs()) & wanted.isfinite(), dout.gather(-1, place))
    return dout.scatter(-1, place, number)


def pad_width(x: Tensor, width: int) -> Tensor:
    """``x`` with zeros up to ``width`` in its last dimension."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _tile_mask(tile: Tile, device: torch.device, scale: float) -> tuple[TileMask, bool]:
    """A tile's mask, and whether to reverse both sides first."""
    if tile.form == "bands":
        return TileMask(False, None, scale, tile.window, tile.packs), False
    if tile.form == "masked":
        return TileMask(False, boolean_mask(tile, device), scale), False
    return TileMask(tile.form != "full", None, scale), tile.form == "anticausal"


def boolean_mask(tile: Tile, device: torch.device) -> Tensor:
    """(rows, keys), True where visible."""
    low, high = row_bounds(tile, device)
    keys = torch.arange(tile.k0, tile.k1, device=device)
    return (keys >= low.unsqueeze(1)) & (keys < high.unsqueeze(1))


def row_bounds(tile: Tile, device: torch.device) -> tuple[Tensor, Tensor]:
    """The keys [low, high) that each row of a tile sees."""
    if tile.bounds:
        pairs = [(s, torch.arange(s.q1 - s.q0, device=device)) for s in tile.bounds]
        return torch.cat([s.low + t * s.dlow for s, t in pairs]), torch.cat([s.high + t * s.dhigh for s, t in pairs])
    rows = torch.arange(tile.k0, tile.k0 + tile.q1 - tile.q0, device=device)
    low = rows if tile.form == "anticausal" else torch.full_like(rows, tile.k0)
    return low, rows + 1 if tile.form == "causal" else torch.full_like(rows, tile.k1)
