"""Where packed documents go: bytes, work, tokens and pieces, against the placement by zones that came before."""

import json
import random
from itertools import accumulate

import pytest

from startrail.compile.explain import work_by_rank
from startrail.compile.problem import zone_levels
from startrail.geometry.placing import Item, Line, LinkCost, Rules, divide, items_of, pairs_of
from startrail.geometry.zones import make_layout
from startrail.schedule.plan import Plan
from tests.helpers import FULL
from validation.placement import BEFORE, KINDS, batch, measure, name_of, shortest_piece

FIGURES = json.loads(BEFORE.read_text())
RULES = Rules(LinkCost(), floor=4, most=10_000, group=(0, 0), ranks=1, even=1.0)


@pytest.mark.parametrize("nodes", [1, 4, 8] if FULL else [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_no_placement_is_worse_than_the_one_before(kind, nodes):
    for tokens in (8192, 32768):
        before, found = FIGURES[name_of(kind, nodes, tokens)][0], measure(batch(kind, nodes, tokens, 0), nodes)
        assert found.outer <= before[0] + 0.002
        assert found.tokens <= 1.02
        assert found.work <= 1.15 if (kind, tokens) in (("agents", 8192), ("books", 8192)) else 1.08


@pytest.mark.parametrize("kind", ["agents", "books"])
def test_long_documents_send_at_most_a_quarter_of_a_ring_between_nodes(kind):
    found = [measure(batch(kind, 4, 8192, seed), 4).outer for seed in range(4)]
    assert sum(found) / len(found) < 0.25


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
        assert shortest_piece(layout, documents) >= floor / 4


def test_one_document_in_a_row_is_cut_zigzag():
    parts = Line(items_of((0, 80), 1), RULES).cut([20.0] * 4, [1.0] * 4)
    assert [[(i.start, i.tokens) for i in part] for part in parts] == [
        [(70, 10), (0, 10)], [(60, 10), (10, 10)], [(50, 10), (20, 10)], [(30, 20)],
    ]  # fmt: skip
    assert {sum(item.work for item in part) for part in parts} == {pairs_of(0, 80) // 4}


def test_a_row_gives_parts_in_proportion_to_their_weights():
    parts = Line(items_of((0, 300, 400, 480), 1), RULES).cut([240.0, 120.0, 120.0], [2.0, 1.0, 1.0])
    assert [sum(item.tokens for item in part) for part in parts] == [240, 120, 120]
    whole = sum(item.work for part in parts for item in part)
    assert whole == sum(pairs_of(0, tokens) for tokens in (300, 100, 80))
    assert abs(sum(item.work for item in parts[0]) / whole - 0.5) < 0.02


def test_what_no_part_can_hold_is_spread():
    items = [Item(pairs_of(0, 400), 400, 0), *(Item(pairs_of(0, 20), 20, 400 + 20 * i) for i in range(20))]
    cheap = RULES._replace(link=LinkCost(1.0, 0.1), ranks=4, most=100)
    found = divide(items, [400, 400], [4.0, 4.0], cheap)
    assert found.spread == 1
    assert [sum(item.tokens for item in part) for part in found.parts] == [200, 200]


def test_the_shortest_piece_is_a_choice():
    documents = batch("books", 1, 8192, 1)
    for floor in (64, 2048):
        layout = make_layout("zones", zone_levels(Plan.parse("1x8"), 8), documents, None, floor)
        assert shortest_piece(layout, documents) >= floor
