import pytest

from startrail.planner.fewest_bytes import auto_plan, bytes_by_level
from startrail.planner.topology import Machine
from startrail.schedule.plan import Plan, plans_for, variants_of
from startrail.schedule.program import build_program
from startrail.schedule.sizes import key_copies
from startrail.schedule.values import PASSES


@pytest.mark.parametrize(
    "machine, q_heads, kv_heads, plan",
    [
        ("1x1", 8, 8, "u1"),
        ("1x8", 8, 8, "u8"),
        ("4x8", 32, 32, "u4/u8"),  # heads over the nodes, and inside them as far as they go
        ("4x8", 16, 16, "u4/u4/1x2,backward=queries"),
        ("4x8", 64, 8, "1x4/u8"),  # few key/value heads on few nodes: passing them round costs less
        ("16x8", 64, 8, "u16/2x4"),  # but not on many; more heads would repeat keys for every rank
        ("4x4", 3, 3, "2x2/2x2"),  # heads that cannot be split: nested rings inside the node too
        ("1x6", 6, 6, "u6"),
    ],
)
def test_fewest_bytes_over_the_nodes_then_inside(machine, q_heads, kv_heads, plan):
    chosen, why = auto_plan(Machine.parse(machine), q_heads, kv_heads)
    assert str(chosen) == plan, why
    assert f"auto chose {plan}" in why
    chosen.check_world(Machine.parse(machine).world)


def crossing(plan: Plan, machine: Machine, q_heads: int, kv_heads: int) -> float:
    """Shards that a rank sends to other nodes, counted in the programs of one node's ranks."""
    kv = 2 * kv_heads * key_copies(q_heads, kv_heads, plan.heads) / q_heads
    sizes = {"q": 1.0, "do": 1.0, "out": 1.0, "dq": 1.0, "kv": kv, "dkv": kv}
    return (
        sum(
            size
            for rank in range(machine.ranks_per_node)
            for pass_ in PASSES
            for post, size in build_program.__wrapped__(plan, machine.world, rank, pass_).sends(sizes)
            if machine.node(post.peer) != machine.node(rank)
        )
        / machine.ranks_per_node
    )


@pytest.mark.parametrize("nodes", [2, 4, 8, 16])
@pytest.mark.parametrize("q_heads, kv_heads", [(64, 8), (16, 16)])
def test_nothing_that_can_be_enumerated_sends_less_over_the_nodes(nodes, q_heads, kv_heads):
    """Brute force: all plans of up to three levels, also those whose levels do not follow the machine's."""
    machine = Machine(nodes, 2)
    chosen, _ = auto_plan(machine, q_heads, kv_heads)
    ours = crossing(chosen, machine, q_heads, kv_heads)
    assert abs(ours - bytes_by_level(chosen, machine, q_heads, kv_heads)[0]) < 1e-9
    plans = [plan for plan in plans_for(machine.world, max_levels=3) if q_heads % plan.heads == 0]
    assert len(plans) > 10
    forms = [Plan(plan.levels, backward=form) for plan in plans for form in plan.family.backwards]
    best = min(forms, key=lambda plan: crossing(plan, machine, q_heads, kv_heads))
    assert ours <= crossing(best, machine, q_heads, kv_heads) + 1e-9, f"{best} sends less than {chosen}"


def test_what_sends_less_than_auto_keeps_something_for_the_backward_pass():
    """Which costs memory in every layer, and so is not compared; the planner that knows the memory does."""
    machine = Machine(8, 2)
    chosen, _ = auto_plan(machine, 64, 8)
    ours = crossing(chosen, machine, 64, 8)
    plans = [plan for plan in plans_for(machine.world, max_levels=2) if 64 % plan.heads == 0]
    less = [
        variant for plan in plans for variant in variants_of(plan) if crossing(variant, machine, 64, 8) < ours - 1e-9
    ]
    assert less and all(variant.keep != "none" for variant in less)
    assert bytes_by_level(Plan.parse("1x8/u2,keep=all"), machine, 64, 8)[0] == 3.5
    assert (str(chosen), ours) == ("u8/1x2", 3.9375)
