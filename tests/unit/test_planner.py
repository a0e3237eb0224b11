import pytest

from startrail.cluster import Machine
from startrail.planner import auto_plan


@pytest.mark.parametrize(
    "world, per_node, q_heads, kv_heads, plan",
    [
        (1, 1, 8, 8, "u1"),
        (8, 8, 8, 8, "u8"),
        (32, 8, 32, 32, "2x2/u8"),  # four nodes: two teams of two
        (32, 8, 64, 8, "1x4/u8"),  # few key/value heads: pass them round, which costs little
        (16, 4, 3, 3, "2x2/2x2"),  # heads that cannot be split: nested rings inside the node too
        (6, 4, 6, 6, "u6"),  # nodes that the ranks do not fill evenly count as one
    ],
)
def test_fewest_bytes_over_the_nodes_then_inside(world, per_node, q_heads, kv_heads, plan):
    chosen, why = auto_plan(Machine.of_world(world, per_node), q_heads, kv_heads)
    assert str(chosen) == plan, why
    assert f"auto chose {plan}" in why
    chosen.check_world(world)
