"""A call in parts: one for each zone of the rank's tokens, with its own program, sizes and tiles."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from startrail.engine.batch import BatchGeometry
from startrail.engine.part_run import Inputs, PassPart
from startrail.engine.wire import Wire
from startrail.geometry.mask import Mask
from startrail.kernels import Kernel
from startrail.routing.route import ZoneRoute
from startrail.schedule.sizes import aligned
from startrail.schedule.values import Pass
from startrail.transport.process_groups import HIDDEN_CHANNELS, hidden_lanes


def make_parts(
    geometry: BatchGeometry, routes: Sequence[ZoneRoute], pass_: Pass, mask: Mask, kernel: Kernel, dtype: torch.dtype,
    wire_dtype: torch.dtype,
) -> tuple[PassPart, ...]:  # fmt: skip
    """The parts of a pass. Their kept pieces lie one after the other in the kept bytes, in both passes alike."""
    parts: list[PassPart] = []
    start = 0
    for route in routes:
        program = route.program(pass_)
        kept = route.sizes.kept_slices(program.kept, start)
        start = max((aligned(part.stop) for part in kept.values()), default=start)
        tiles = geometry.tiles(mask, kernel.costs, route, program)
        direct_level = None if route.fetches is None or route.zone.size == 1 else route.zone.level
        wire = wire_of(route, dtype, wire_dtype, kernel.rows_first)
        parts.append(PassPart(program, wire, kept, tiles, route.start, direct_level, {}))
    return tuple(parts)


def wire_of(route: ZoneRoute, dtype: torch.dtype, wire_dtype: torch.dtype, rows_first: bool) -> Wire:
    """The pieces of a zone as tensors. Members that split heads sort the tokens of all of them by position."""
    chunk, places = 1, tuple[tuple[int, ...], ...]()
    if route.chosen.heads > 1:
        place = route.chosen.place(route.zone.size, route.member)
        chunk, places = route.zone.places(place.shard_ranks(place.shard))
    return Wire(route.sizes, dtype, wire_dtype, chunk, places, rows_first)


def sm_margin(parts: Sequence[PassPart]) -> int:
    """The multiprocessors that transfers hold while blocks are computed. Direct lanes are not counted: what they carry
    is small, and on its way at the start of a pass."""
    return HIDDEN_CHANNELS * len(hidden_lanes([part.program for part in parts if part.direct_level is None]))


def inputs_of(part: PassPart, inputs: Inputs) -> Inputs:
    """The part's tokens of the caller's tensors, as its ranks see them."""
    wire, tokens = part.wire, part.wire.sizes.local
    own = {kind: tuple(x.narrow(2, part.start, tokens) for x in xs) for kind, xs in inputs.items()}
    if "q" in own:
        q, (k, v) = wire.rounded(own["q"][0]), map(wire.rounded, own["kv"])
        own |= {"q": (q,), "kv": wire.with_copies(k, v)}
    return own


def join_parts(results: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The results of all tokens from those of each part."""
    return results[0] if len(results) == 1 else tuple(torch.cat(xs, 2) for xs in zip(*results, strict=True))
