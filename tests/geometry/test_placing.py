"""Where packed documents go: bytes, work, tokens and pieces, against the placement by zones that came before."""

import json
import random
from itertools import accumulate
from math import inf

import pytest

from startrail.compile.explain import work_by_rank
from startrail.compile.problem import zone_levels
from startrail.geometry.line import Line
from startrail.geometry.pieces import UNEVEN, UNHIDDEN, Group, Item, LinkCost, items_of, pairs_of, time_of
from startrail.geometry.placing import divide
from startrail.geometry.zones import make_layout
from startrail.schedule.plan import Plan
from tests.helpers import FULL
from validation.placement import BEFORE, KINDS, NODES, SEEDS, TOKENS, batch, figures, measure, name_of, shortest_piece

FIGURES = json.loads(BEFORE.read_text())


def group_of(rooms, weights, ranks=1, link=None, most=10_000, even=0.0):
    return Group(rooms, weights, (0, 0), ranks, link or LinkCost(), floor=4, most=most, even=even, padding=100.0)


@pytest.mark.parametrize("nodes", NODES if FULL else [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_no_placement_sends_more_than_the_one_before(kind, nodes):
    for tokens in TOKENS:
        found, before = figures(kind, nodes, tokens), FIGURES[name_of(kind, nodes, tokens)]
        for seed, (now, old) in enumerate(zip(found, before, strict=True)):
            documents = len(batch(kind, nodes, tokens, seed)) - 1
            assert now.outer <= old[0] * 1.001  # other documents of the same lengths are padded otherwise
            assert now.work <= (1.08 if documents >= 2 * nodes else 1.12)
            assert now.tokens <= (1.02 if documents >= 2 * nodes else 1.035)
            assert now.shortest == 0 or now.shortest >= 512


@pytest.mark.parametrize("nodes", [4, 8])
@pytest.mark.parametrize("kind", ["agents", "books"])
def test_long_documents_send_at_most_a_quarter_of_what_one_would(kind, nodes):
    """Where nodes share keys by a ring, on average; with heads over 4 nodes, it sends a third of a ring's bytes."""
    plan = f"1x{nodes}/1x8"
    dense = measure((0, 8192 * 8 * nodes), nodes, plan).outer
    found = [measure(batch(kind, nodes, 8192, seed), nodes, plan).outer for seed in range(SEEDS)]
    assert dense > 0.99 and sum(found) / len(found) <= dense / 4


@pytest.mark.parametrize("text, world", [("u4/1x8", 32), ("1x32", 32), ("2x2/1x2/u2", 16)])
def test_random_batches_are_balanced_and_pieces_are_not_too_short(text, world):
    for seed in range(20 if FULL else 5):
        chance = random.Random(seed)
        lengths = [
            chance.randint(1, chance.choice([500, 5_000, 20_000])) for _ in range(chance.randint(2 * world, 600))
        ]
        documents = (0, *accumulate(lengths))
        layout = make_layout("zones", zone_levels(Plan.parse(text), world), documents)
        work = work_by_rank(layout, documents)
        assert layout == make_layout("zones", zone_levels(Plan.parse(text), world), documents)
        assert layout.largest * world <= 1.05 * documents[-1]
        assert max(work) * world <= 1.2 * sum(work)
        floor = min(512, documents[-1] // world // 16)
        assert shortest_piece(map(layout.runs, range(world)), documents) >= floor / 4


def test_one_document_in_a_row_is_cut_zigzag():
    parts = Line(items_of((0, 80), 1), group_of([20.0] * 4, [1.0] * 4)).cut()
    assert [[(i.start, i.tokens) for i in part] for part in parts] == [
        [(70, 10), (0, 10)], [(60, 10), (10, 10)], [(50, 10), (20, 10)], [(30, 20)],
    ]  # fmt: skip
    assert {sum(item.work for item in part) for part in parts} == {pairs_of(0, 80) // 4}


def test_a_row_gives_parts_in_proportion_to_their_weights():
    parts = Line(items_of((0, 300, 400, 480), 1), group_of([240.0, 120.0, 120.0], [2.0, 1.0, 1.0])).cut()
    assert [sum(item.tokens for item in part) for part in parts] == [240, 120, 120]
    whole = sum(item.work for part in parts for item in part)
    assert whole == sum(pairs_of(0, tokens) for tokens in (300, 100, 80))
    assert abs(sum(item.work for item in parts[0]) / whole - 0.5) < 0.02


def test_what_no_part_can_hold_is_spread():
    items = [Item(pairs_of(0, 400), 400, 0), *(Item(pairs_of(0, 20), 20, 400 + 20 * i) for i in range(20))]
    work = sum(item.work for item in items) / 8
    found = divide(items, group_of([400, 400], [4.0, 4.0], 4, LinkCost(1.0, 0.1), most=100, even=work))
    assert found.spread == 1
    assert [sum(item.tokens for item in part) for part in found.parts] == [200, 200]


def test_documents_that_can_be_divided_evenly_are_not_cut():
    """Filled one after the other, the longest first, parts are too uneven; swaps of documents balance them."""
    chance = random.Random(1)
    lengths = [n + chance.randint(-20, 20) for n in (900, 800, 700, 500, 400, 300, 200, 100) * 4]
    lengths.sort(reverse=True)
    room, ends = sum(lengths) / 4, [0, *accumulate(lengths)]
    items = [Item(pairs_of(0, n), n, start) for n, start in zip(lengths, ends, strict=False)]
    even = 1.04 * sum(item.work for item in items) / 32
    group = group_of([room] * 4, [8.0] * 4, 8, even=even)._replace(slack=0.008 * room / 8)
    found = divide(items, group)
    assert not found.spread and all(item.cut is None for part in found.parts for item in part)
    for part in found.parts:
        assert sum(item.work for item in part) <= 8 * even and sum(item.tokens for item in part) <= 1.008 * room


def test_the_predicted_time_of_a_cut_document():
    """Two parts of one rank. The second holds the end of a document of 100 tokens, and so fetches the first 60."""
    head, tail = Item(pairs_of(0, 100), 100, 0).split(60, (0, 0))
    group = group_of([50.0, 50.0], [1.0, 1.0], link=LinkCost(10.0, 0.5), even=2000.0)
    work = UNEVEN * (pairs_of(60, 40) - 2000)
    assert tail.work == pairs_of(60, 40) and head.work + tail.work == pairs_of(0, 100)
    expected = 2000 + work + UNHIDDEN * (10 * 60 + 10 * 30) / 2 + 100 * 10  # 10 tokens of padding
    assert time_of([[head], [tail]], [], group) == pytest.approx(expected)
    assert time_of([[head], [tail]], [], group._replace(most=99)) == inf


def test_what_is_spread_outside_counts_as_work_inside():
    """If most of the work is there already, uneven documents on the ranks of a node cost little: none is cut."""
    items = [Item(pairs_of(0, n), n, 100 * i) for i, n in enumerate((100, 96, 92, 88))]
    mean = sum(item.work for item in items) / 4
    alone = divide(items, group_of([94.0] * 4, [1.0] * 4, even=mean))
    inside = divide(items, group_of([94.0] * 4, [1.0] * 4, even=100 * mean)._replace(placed=99 * mean))
    assert inside.time < 1.1 * 100 * mean < 110 * alone.time


@pytest.mark.parametrize("kind", ["agents", "pretraining"])
def test_slow_links_carry_less_and_fast_ones_even_out_the_work(kind):
    slow, fast = ([measure(batch(kind, 4, 8192, seed), 4, "1x4/1x8", ((8, fetch), (1, 50.0))) for seed in range(SEEDS)]
                  for fetch in (30_000.0, 30.0))  # fmt: skip
    assert sum(each.outer for each in slow) < 0.8 * sum(each.outer for each in fast)
    assert sum(each.work for each in slow) > sum(each.work for each in fast)


def test_the_shortest_piece_is_a_choice():
    documents = batch("books", 1, 8192, 1)
    for floor in (64, 2048):
        layout = make_layout("zones", zone_levels(Plan.parse("1x8"), 8), documents, None, floor)
        assert shortest_piece(map(layout.runs, range(8)), documents) >= floor
