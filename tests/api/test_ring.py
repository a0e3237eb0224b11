"""The plain ring gives the results of one process: out, dq, dk and dv, as exact as the engine's."""

from __future__ import annotations

import pytest
import torch

from startrail.diagnostics.reference import Case, Error, make_data
from startrail.diagnostics.rounding import Floor
from startrail.geometry.layout import LAYOUTS
from startrail.geometry.mask import Mask
from startrail.launch.local import run_local
from startrail.ring import RingAttention, pass_on, visible_by_hop

torch.set_num_threads(1)


@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_a_plain_ring_is_exact_forward_and_backward(world, causal):
    """Against float64, with random cotangents, grouped heads, and no more error than the engine is allowed."""
    case = Case(f"1x{world}", world, length=60 * world, q_heads=4, kv_heads=2, causal=causal, seed=world)
    data = make_data(case)
    layout = LAYOUTS["zigzag" if causal else "contiguous"](range(world), case.length)

    def on_rank(rank):
        def shard(x):
            return torch.cat([x[:, :, start : start + count] for start, count in layout.runs(rank)], 2)

        q, k, v = (shard(x).requires_grad_() for x in data.inputs[:3])
        out = RingAttention.apply(q, k, v, visible_by_hop(layout, Mask(causal)), pass_on)
        results = (out, *torch.autograd.grad(out, (q, k, v), shard(data.inputs[3])))
        return [
            Error.of(mine, shard(data.exact[name]), Floor(*map(shard, data.floor[name])))
            for name, mine in zip(data.exact, results, strict=True)
        ]

    for rank, errors in enumerate(run_local(on_rank, world, deadline=60)):
        for name, error in zip(data.exact, errors, strict=True):
            allowed = 2 * data.yardstick[name].worst
            assert error.excess <= allowed, f"rank {rank}: {name} is off by {error.excess:.1e}, allowed {allowed:.1e}"
