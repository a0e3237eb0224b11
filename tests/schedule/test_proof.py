"""Proofs of schedules without data, and the traffic figures of the paper."""

import multiprocessing
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product

import pytest

from startrail.schedule.plan import KEEPS, Plan, plans_for, variants_of
from startrail.schedule.program import Program, build_program, closed_form, traffic_at
from startrail.schedule.proof import ScheduleError, check_memory, prove_programs
from startrail.schedule.values import BACKWARD, FORWARD, PASSES, Pass, Piece, Step
from tests.engine.plans import features
from tests.helpers import FULL

PROVE_ALL = bool(os.environ.get("STARTRAIL_PROVE_ALL"))
MHA = {"q": 1.0, "kv": 2.0, "do": 1.0, "out": 1.0, "dq": 1.0, "dkv": 2.0}
UNIT_SIZES = {"q": 3.0, "kv": 5.0, "out": 7.0, "do": 11.0, "dq": 13.0, "dkv": 17.0}  # any distinct sizes will do


def prove_plan(plan: Plan, world: int, passes: Sequence[Pass] = PASSES) -> None:
    """Raise ``ScheduleError`` unless the passes of ``plan`` on ``world`` ranks pass every check."""
    for pass_ in passes:
        programs = [build_program.__wrapped__(plan, world, rank, pass_) for rank in range(world)]
        prove_programs(programs)
        for program in programs:
            _check_traffic(program)
            check_memory(program)


def _check_traffic(program: Program) -> None:
    sent = [0.0] * len(program.place.sizes)
    for post, size in program.sends(UNIT_SIZES):
        sent[post.lane] += size
    expected = traffic_at(program.plan, program.place, program.pass_, UNIT_SIZES)
    if any(abs(a - b) > 1e-6 for a, b in zip(sent, expected, strict=True)):
        raise ScheduleError(f"{program}: sends {sent} by level, but the closed form is {expected}")


def variants_to_prove(plan: Plan) -> list[Plan]:
    """Every backward form and every ``keep`` that changes the programs; every ``keep`` in the full suite."""
    keeps = KEEPS if PROVE_ALL or FULL else plan.family.useful_keeps(plan)
    return [variant for variant in variants_of(plan) if variant.keep in keeps]


def covering(plans: Iterable[Plan], world: int) -> list[Plan]:
    """Some plans with every feature that one of ``plans`` has, such as a ring inside a team."""
    sample, met = [], set[str]()
    for plan in plans:
        if new := features(str(plan), world) - met:
            sample.append(plan)
            met |= new
    return sample


def prove(world: int, levels: int, every: int | None = 1) -> tuple[str, int, int]:
    """Prove the plans with up to ``levels`` levels, and one in ``every`` of those with exactly ``levels``, in all
    variants; with None instead, a sample that covers all features. Variants share one forward pass except for what it
    keeps. Returns the problem if there is one, the number of plans proven and the number of plans."""
    plans = list(plans_for(world, levels))
    deepest = [plan for plan in plans if len(plan.levels) == levels]
    if every is None:
        sample = covering(plans, world)
    else:
        sample = [plan for plan in plans if len(plan.levels) < levels] + deepest[world % every :: every]
    try:
        for plan in sample:
            for variant in variants_to_prove(plan):
                changes_forward = variant == plan or (variant.keep != "none" and world <= 16)
                prove_plan(variant, world, PASSES if changes_forward else (BACKWARD,))
            if world <= 12:
                prove_plan(replace(plan, groups=2), world)
                prove_plan(replace(plan, groups=3, keep="all"), world)
    except ScheduleError as error:
        return str(error), len(sample), len(plans)
    return "", len(sample), len(plans)


def prove_all(cases: list[tuple[int | None, ...]]) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        results = pool.starmap(prove, cases, chunksize=1)
    assert not any(problem for problem, _, _ in results), "\n".join(problem for problem, _, _ in results)
    proven, total = (sum(result[index] for result in results) for index in (1, 2))
    print(f"{proven} of {total} plans proven, each with all its backward forms and keeps")


def test_prove_one_level_plans_up_to_32_ranks():
    """Above 16 ranks, sizes with several divisors or a square among them; `make test-all` proves all, and 64 ranks."""
    worlds = (64, *range(32, 0, -1)) if FULL else (32, 27, 18, *range(16, 0, -1))
    prove_all([(world, 1) for world in worlds])


def test_prove_plans_with_more_levels():
    """On 12 ranks and more, plans that cover all kinds of levels and neighbours; `make test-all` proves all of two."""
    large = [(16, 2), (12, 2), (18, 3, 40)] if FULL else [(16, 2, None), (12, 2, None)]
    prove_all([*large, (8, 3), (9, 2), (6, 3), (4, 3)])


@pytest.mark.skipif(not PROVE_ALL, reason="make prove: takes a quarter of an hour")
def test_prove_every_two_level_plan_and_many_of_three_levels_up_to_64_ranks():
    prove_all([(world, 3, 1 if world <= 16 else 16) for world in range(64, 0, -1)])


def test_keeps_that_are_not_useful_do_not_change_the_programs():
    """So it suffices to prove the useful ones."""
    for world, levels in ((64, 1), (32, 1), (12, 2), (9, 2), (8, 3), (6, 3)):
        for plan in plans_for(world, levels):
            useful = plan.family.useful_keeps(plan)
            for keep in [keep for keep in KEEPS if keep not in useful]:
                equivalent = [other for other in KEEPS[: KEEPS.index(keep)] if other in useful][-1]
                for pass_, rank in product(PASSES, (0, world - 1)):
                    variants = [replace(plan, keep=name) for name in (equivalent, keep)]
                    first, second = (build_program.__wrapped__(variant, world, rank, pass_) for variant in variants)
                    assert (first.steps, first.given, first.kept) == (second.steps, second.given, second.kept)
                    assert closed_form(variants[0], world, rank, pass_, MHA) == closed_form(
                        variants[1], world, rank, pass_, MHA
                    )


def test_head_ranks_exchange_directly_over_the_lane_of_the_outermost_difference():
    """u2/1x2/u2, rank 5 = (1, 0, 1): 0 and 1 are across the outer level, 4 across the inner one."""
    program = build_program(Plan.parse("u2/1x2/u2"), 8, 5, FORWARD)
    sent = {
        (post.peer, post.lane) for step in program.steps for post in step.posts if post.send and program.is_part(post)
    }
    assert sent == {(0, 0), (1, 0), (4, 2)}


@pytest.mark.parametrize(
    "plan, world, shards",
    [
        ("u4/1x8", 32, (6.0, 42.0)),  # 2 x 3/4 x 4 across nodes; a ring of kv, kv and dkv inside
        ("u4/u8", 32, (6.0, 1.75)),
        ("u8/1x4", 32, (7.0, 18.0)),
        ("u16/1x2", 32, (7.5, 6.0)),
        ("u2/2x2/u4", 32, (4.0, 11.0, 3.0)),
    ],
)
def test_traffic_of_heads_across_nodes(plan, world, shards):
    """Forward + backward, MHA, by level: fewer than 8 shards cross the nodes, whatever their number."""
    forms = [closed_form(Plan.parse(plan), world, 3, pass_, MHA) for pass_ in PASSES]
    assert tuple(map(sum, zip(*forms, strict=True))) == shards


def test_a_far_exchange_overlaps_with_the_previous_group():
    """Its exchange is posted before the previous group's blocks, and that group's results before its blocks."""
    steps = build_program(Plan.parse("u2/1x2,groups=3"), 4, 0, BACKWARD).steps

    def first(test):
        return next(index for index, step in enumerate(steps) if test(step))

    for group in range(2):
        posted = first(lambda step, g=group: any(str(post.piece) == f"do0.{g + 1}" for post in step.posts))
        computed = first(lambda step, g=group: any(block.group == g for block in step.blocks))
        returned = first(
            lambda step, g=group: any(post.piece == Piece("dkv", 0, g) and post.lane == 0 for post in step.posts)
        )
        following = first(lambda step, g=group: any(block.group == g + 1 for block in step.blocks))
        assert posted < computed < returned < following


def test_forward_traffic_of_the_paper():
    """P = 16, C = 2: ring P2P of 12 shards (Ring Attention: 30), 4 sub-rings of 4; collectives 4(C-1), placement 2C."""
    program = build_program(Plan.parse("star2"), 16, 5, FORWARD)
    place = program.place
    team = {place.rank_of(place.shard // 2 * 2 + x) for x in range(2)}
    by_use = {"team": 0.0, "placement": 0.0, "ring": 0.0}
    for index, step in enumerate(program.steps):
        for post in step.posts:
            if post.send:
                use = "team" if post.peer in team else "placement" if index == 1 else "ring"
                by_use[use] += MHA[post.piece.kind]
    assert by_use == {"team": 4.0, "placement": 4.0, "ring": 12.0}
    assert closed_form(Plan.parse("1x16"), 16, 0, FORWARD, MHA)[0] == 30.0
    peers = [{post.peer for step in build_program(Plan.parse("star2"), 16, rank, FORWARD).steps[2:-2]
              for post in step.posts if post.send and post.piece.kind == "kv"} for rank in range(16)]  # fmt: skip
    rings = set()
    for start in range(16):
        ring, rank = [start], next(iter(peers[start]))
        while rank != start:
            ring.append(rank)
            (rank,) = peers[rank]
        rings.add(frozenset(ring))
    assert sorted(map(len, rings)) == [4, 4, 4, 4]


@pytest.mark.parametrize(
    "plan, world, kinds, mates",
    [
        ("1x8", 8, ("kv", "dkv"), 0),
        ("1x8,keep=all", 8, ("dkv",), 0),
        ("1x8,backward=queries", 8, ("q", "do", "dq"), 0),
        ("star2", 32, ("q", "do", "dq"), 1),
    ],
)
def test_rings_send_to_their_neighbours_only(plan, world, kinds, mates):
    """If a ring spans several nodes, any other path would cross more links. A star also sends to its team mates."""
    program = build_program(Plan.parse(plan), world, 5, BACKWARD)
    posts = [post for step in program.steps for post in step.posts if post.send and post.piece.kind in kinds]
    assert {post.piece.kind for post in posts} == set(kinds)
    assert len({post.peer for post in posts}) == 1 + mates


def test_groups_overlap():
    """The second group's receives are posted before the first group's blocks, and its blocks precede the merges of the
    first group's results."""
    steps = build_program(Plan.parse("2x2/u2,groups=2"), 8, 0, BACKWARD).steps

    first, second = ([i for i, step in enumerate(steps) if any(b.group == g for b in step.blocks)] for g in (0, 1))
    posted = [i for i, step in enumerate(steps) if any(str(post) == "kv2.1<4@0" for post in step.posts)]
    merged = [i for i, step in enumerate(steps) if any(merge.piece.group == 0 for merge in step.merges)]
    assert max(posted) < min(first) <= max(first) < min(second) <= max(second) < min(merged)


@pytest.mark.parametrize(
    "plan, world, late", [("1x4/8x1,keep=all", 32, 2), ("4x4/2x1,keep=all", 32, 2), ("2x2,keep=all", 4, 1)]
)
def test_the_last_results_to_arrive_hide_under_all_blocks_that_are_left(plan, world, late):
    """Own gradients of keys are merged after the last block: as many as may be on their way at the same time."""
    steps = build_program(Plan.parse(plan), world, 0, BACKWARD).steps
    last = max(index for index, step in enumerate(steps) if step.blocks)
    posted = [i for i, step in enumerate(steps) for post in step.posts if str(post.piece) == "dkv0" and not post.send]
    merged = [i for i, step in enumerate(steps) for merge in step.merges if str(merge.piece) == "dkv0"]
    assert sum(index < last < merge for index, merge in zip(posted, merged, strict=True)) == late


def test_llama_30b_volumes_of_the_paper():
    """Width 6656, 65,536 tokens, P = 64, C = 4, bf16, one layer, in GiB."""
    shard = 65536 / 64 * 6656 * 2 / 2**30
    ring = closed_form(Plan.parse("1x64"), 64, 0, FORWARD, MHA)[0] * shard
    assert round(ring, 3) == 1.600
    assert round(2 * 64 * shard, 3) == 1.625  # the paper's figure counts P hops
    team, hops = 4, 64 // 16
    collectives, p2p = 4 * (team - 1) * shard, 2 * team * (hops - 1) * shard
    assert (round(collectives, 3), round(p2p, 3)) == (0.152, 0.305)
    total = closed_form(Plan.parse("star4"), 64, 5, FORWARD, MHA)[0] * shard
    assert abs(total - (collectives + p2p + 2 * team * shard)) < 1e-12
    assert round(p2p + 2 * team * shard, 3) == 0.406


@pytest.mark.parametrize(
    "plan, world, shards",
    [("1x4/u8", 32, 6 + 12), ("2x2/u8", 32, 4 + 7), ("2x2/u8,keep=all", 32, 4 + 4), ("4x1/u8", 32, 6 + 9)],
)
def test_shards_sent_across_four_nodes(plan, world, shards):
    """Forward + backward, MHA: USP sends 18, 2x2/u8 sends 11, and 8 with keep=all."""
    passes = (closed_form(Plan.parse(plan), world, 0, pass_, MHA)[0] for pass_ in PASSES)
    assert sum(passes) == shards


def test_one_program_of_16384_ranks_builds_in_half_a_second():
    times = []
    for _ in range(3):  # this thread's own time: other programs may use the core
        start = time.thread_time()
        program = build_program.__wrapped__(Plan.parse("64x32/u8"), 16384, 777, FORWARD)
        times.append(time.thread_time() - start)
    assert min(times) < 0.5
    assert sum(len(step.blocks) for step in program.steps) == 64 * 32
    assert sum(size for post, size in program.sends(MHA) if post.lane == 0) == 63 * 2 + 31 * 2


def broken_programs(change):
    programs = [build_program(Plan.parse("2x2"), 4, rank, FORWARD) for rank in range(4)]
    steps = list(programs[1].steps)
    programs[1] = replace(programs[1], steps=tuple(change(steps)))
    return programs


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda steps: [steps[0]._replace(blocks=()), *steps[1:]], "lacking the blocks of shards"),
        (lambda steps: [steps[0], steps[1], *steps[1:]], "a second time"),
        (lambda steps: [steps[0]._replace(posts=steps[0].posts[:-1]), *steps[1:]], "deadlock|pending transfers"),
        (lambda steps: steps[:-1], "lacking the blocks of shards"),
        (lambda steps: [Step(steps[0].posts[::-1], steps[0].blocks), *steps[1:]], None),
        (
            lambda steps: [steps[0]._replace(posts=steps[0].posts[2:]), *steps[1:]],
            "neither has it nor has posted a receive for it",
        ),
    ],
)
def test_broken_programs_are_detected(change, message):
    programs = broken_programs(change)
    if message is None:  # the order within a batch does not matter
        prove_programs(programs)
        return
    with pytest.raises(ScheduleError, match=message) as caught:
        prove_programs(programs)
    assert "rank 1" in str(caught.value) or "-->" in str(caught.value)


def test_a_needed_piece_without_a_posted_receive_is_detected():
    programs = [build_program(Plan.parse("1x2"), 2, rank, FORWARD) for rank in range(2)]
    first, second = programs[0].steps
    late = replace(programs[0], steps=(first._replace(posts=()), second._replace(posts=first.posts)))
    prove_programs([late, programs[1]])  # late, but not stuck: the second step posts the receive that its block needs
    stuck = replace(programs[0], steps=(second, first))
    with pytest.raises(ScheduleError, match="needs kv1, but neither has it"):
        prove_programs([stuck, programs[1]])


def test_lanes_that_wait_for_each_other_are_a_deadlock():
    """A GPU may not have room for two lanes' kernels at once, so all ranks must use lanes in the same order."""

    def apart(program, first):
        step, *rest = program.steps
        steps = [step._replace(posts=tuple(post for post in step.posts if (post.lane == first) == now), blocks=blocks)
                 for now, blocks in ((True, ()), (False, step.blocks))]  # fmt: skip
        return replace(program, steps=(*steps, *rest))

    programs = [build_program(Plan.parse("1x2/2x1"), 4, rank, FORWARD) for rank in range(4)]
    for lane in (0, 1):
        prove_programs([apart(program, lane) for program in programs])
    with pytest.raises(ScheduleError, match="deadlock"):
        prove_programs([apart(program, lane) for program, lane in zip(programs, (0, 1, 1, 0), strict=True)])


def test_pieces_have_a_text_form():
    assert str(Piece("kv", 3, 0)) == "kv3"
    assert str(Piece("kv", 3, 1)) == "kv3.1"
