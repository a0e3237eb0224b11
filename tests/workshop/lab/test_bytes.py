"""Bytes that the engine says it sent between nodes are those that the nodes' interfaces saw."""

import pytest
import torch
import torch.distributed as dist

import startrail
from workshop import lab

pytestmark = pytest.mark.skipif(lab.available() is not None, reason=f"no lab: {lab.available()}")

LENGTH = 4 * 768
DENSE = ["1x2/u2", "2x1/1x2", "1x2/2x1", "2x1/u2,keep=all", "u2/1x2", "u2/2x1,groups=2", "u2/u2"]
PACKED = (0, 1900, 2100, 2300, 2500, 2700, 2900, LENGTH)  # one document for all ranks, the others whole
# plan, documents, mask, and how the tokens of the outermost zone are attended
CASES = [
    *((plan, None, {}, plan) for plan in DENSE),
    ("1x2/u2", PACKED, {"causal": True}, "direct"),
    ("u2/1x2", PACKED, {"causal": True}, "direct"),
    ("1x2/1x2", None, {"causal": True, "window": 300}, "direct"),
    ("u2/1x2", PACKED, {"causal": True, "window": 100}, "direct"),
]


def test_bytes_on_the_interfaces_equal_the_closed_form():
    """Two nodes of two ranks. The outer level crosses the nodes' link, the inner one must not, whatever they are, and
    whatever the mask and the documents leave to send."""

    def on_rank(rank):
        found = []
        for plan, documents, mask, chosen in CASES:
            sp = startrail.SequenceParallel(plan)
            sequence = sp.sequence(LENGTH, documents)
            q, k, v = (torch.randn(1, 4, sequence.local, 32, requires_grad=True) for _ in range(3))
            routes = sequence.compiled(q, k, v, **mask).parts
            assert str(routes[0].chosen) == chosen and (documents is None or routes[-1].zone.size < 4)

            def run(sequence=sequence, qkv=(q, k, v), mask=mask):
                out = sequence.attention(*qkv, **mask)
                torch.autograd.grad(out, qkv, torch.randn_like(out))

            run()  # groups connect and ranks agree here
            sp.reset_counters()
            dist.barrier()
            before = lab.own_link_bytes()["sent"]
            dist.barrier()
            run()
            dist.barrier()
            seen = lab.own_link_bytes()["sent"] - before
            sent = sp.traffic().get("level 0", {"bytes": 0})["bytes"]
            assert sent == sum(part.get("level 0", 0) for part in sequence.promised_traffic(q, k, v, **mask).values())
            of_nodes = torch.zeros(2, dtype=torch.int64)
            of_nodes[rank // 2] = sent
            dist.all_reduce(of_nodes)
            found.append((plan, mask, seen / of_nodes[rank // 2].item()))
            dist.barrier()
        return found

    # a paced link: without a limit the kernel resends packets that were only late, and counts them twice
    with lab.Cluster(nodes=2, ranks_per_node=2, link="200mbit") as cluster:
        for ratios in cluster.call(on_rank, deadline=120):
            assert all(1.0 <= ratio <= 1.03 for *_, ratio in ratios), ratios
