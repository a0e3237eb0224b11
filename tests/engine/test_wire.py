"""A form of messages that tensors do not have themselves: with a scale for each row, as payloads in FP8 would need."""

import pytest
import torch

import startrail
from startrail.engine.wire import Wire
from startrail.launch.local import run_local
from startrail.schedule.sizes import Field, Sizes
from tests.helpers import tensors

LENGTH = 96
PLAIN = Sizes.fields


def fields(sizes, kind, tokens):
    """A scale before each tensor that travels in the wire dtype."""
    scales = [(Field(field.shape[:3], True),) if not field.wide else () for field in PLAIN(sizes, kind, tokens)]
    plain = PLAIN(sizes, kind, tokens)
    return tuple(field for scale, tensor in zip(scales, plain, strict=True) for field in (*scale, tensor))


def encoded(wire, kind, tensors):
    """Powers of two, so that nothing is rounded."""
    travel = []
    for field, x in zip(PLAIN(wire.sizes, kind, 1), tensors, strict=True):
        if field.wide:
            travel.append(x)
        else:
            scale = torch.ldexp(torch.ones(()), torch.frexp(x.abs().amax(-1)).exponent)
            travel += [scale, x / scale[..., None]]
    return tuple(travel)


def decoded(wire, kind, views):
    views, found = iter(views), []
    for field in PLAIN(wire.sizes, kind, 1):
        found.append(next(views) if field.wide else next(views)[..., None] * next(views))
    return tuple(found)


def add(wire, kind, views, sums):
    total = [x.clone() for x in decoded(wire, kind, views)]
    sums.add_to(total)
    for view, x in zip(views, encoded(wire, kind, tuple(total)), strict=True):
        view.copy_(x)


def use_scales():
    Sizes.fields, Wire.encoded, Wire.decoded, Wire.add = fields, encoded, decoded, add


@pytest.mark.parametrize("plan", ["1x4", "2x2,keep=all", "star2", "u2/1x2,groups=2", "1x2/u2,exchange=twice", "u4"])
def test_another_form_of_payloads_changes_the_wire_and_the_sizes_only(plan):
    def on_rank(rank, scaled):
        if scaled:
            use_scales()
        sp, results = startrail.SequenceParallel(plan), []
        for mask in (dict(causal=True), dict(causal=True, window=5)):
            sequence = sp.sequence(LENGTH)
            q, k, v, dout = (sequence.shard(x, 2) for x in tensors(LENGTH))
            inputs = [x.requires_grad_() for x in (q, k, v)]
            out = sequence.attention(*inputs, **mask)
            results += [out.detach(), *torch.autograd.grad(out, inputs, dout)]
        return results, sum(lane["bytes"] for lane in sp.traffic().values())

    for (plain, few), (scaled, more) in zip(
        run_local(lambda rank: on_rank(rank, False), 4), run_local(lambda rank: on_rank(rank, True), 4), strict=True
    ):
        assert all(torch.equal(x, y) for x, y in zip(plain, scaled, strict=True))
        assert more > few
