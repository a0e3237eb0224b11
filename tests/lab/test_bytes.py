"""Bytes that the engine says it sent between nodes are those that the nodes' interfaces saw."""

import pytest
import torch
import torch.distributed as dist

import startrail
from startrail import lab

pytestmark = pytest.mark.skipif(lab.available() is not None, reason=f"no lab: {lab.available()}")


def test_bytes_on_the_interfaces_equal_the_closed_form():
    """Two nodes of two ranks. The outer level crosses the nodes' link, the inner one must not, whatever they are."""
    plans = ["1x2/u2", "2x1/1x2", "1x2/2x1", "2x1/u2,keep=all", "u2/1x2", "u2/2x1,groups=2", "u2/u2"]

    def on_rank(rank):
        found = []
        for plan in plans:
            sp = startrail.SequenceParallel(plan)
            sequence = sp.sequence(4 * 768)
            q, k, v = (torch.randn(1, 4, 768, 32, requires_grad=True) for _ in range(3))
            out = sequence.attention(q, k, v)  # groups connect and ranks agree here
            torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
            sp.reset_counters()
            dist.barrier()
            before = lab.own_link_bytes()["sent"]
            dist.barrier()
            out = sequence.attention(q, k, v)
            torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
            dist.barrier()
            seen = lab.own_link_bytes()["sent"] - before
            sent = torch.tensor(sp.traffic()["level 0"]["bytes"])
            promised = sum(part["level 0"] for part in sp.promised_traffic(q, k).values())
            assert sent == promised
            dist.all_reduce(sent)  # both nodes send the same
            found.append(seen / (sent.item() / 2))
            dist.barrier()
        return found

    # a paced link: without a limit the kernel resends packets that were only late, and counts them twice
    with lab.Cluster(nodes=2, ranks_per_node=2, link="200mbit") as cluster:
        for ratios in cluster.call(on_rank, deadline=120):
            assert all(1.0 <= ratio <= 1.03 for ratio in ratios), ratios
