"""Predictions for packed documents and windows: the engine's programs, bytes and tiles."""

import pytest

from startrail.compile.attention import Attention
from startrail.geometry.distributions import document_lengths
from startrail.planner import block_tiles
from startrail.planner.cluster import find_cluster
from startrail.planner.predict import predict
from startrail.planner.pricing import PostTask
from startrail.planner.sparse.documents import document_ends
from startrail.planner.sparse.predict import SparseCall, predict_call, predict_sparse
from startrail.schedule.plan import Plan
from startrail.schedule.values import PASSES
from tests.planner.shapes import altered

CLUSTERS = {name: find_cluster(f"{name}@2x4") for name in ("lab", "h100-8x8")}
LENGTHS = tuple(document_lengths("pretraining", 4000, seed=3, scale=1 / 64))
PLANS = ("1x8", "1x2/u4", "u2/2x2,groups=2", "2x1/1x4,keep=all", "star2")


def call_on(cluster, documents=(), window=None, length=4000):
    dtype = "float32" if cluster.cores else "bfloat16"
    ends = document_ends(documents, length)
    return Attention.of(length, 1, 8, 4, 64, causal=True, dtype=dtype, window=window, documents=ends)


def sent_by_lane(tasks, lanes):
    sent = [0] * lanes
    for task in tasks:
        if isinstance(task, PostTask):
            for message in task.messages:
                if message.send:
                    sent[message.lane % lanes] += message.nbytes
    return sent


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
@pytest.mark.parametrize(
    "documents, window, expected",
    [
        (LENGTHS, None, {"8 ranks", "4 ranks", "1 ranks"}),
        ((), 100, {"direct"}),
        (LENGTHS, 60, {"direct", "1 ranks"}),
        ((4000,), None, {"8 ranks"}),
    ],
)
def test_bytes_are_those_of_the_routes_and_every_rank_ends(cluster, documents, window, expected):
    call = call_on(cluster, documents, window)
    programs = set()
    for text in PLANS:
        plan = Plan.parse(text)
        priced, lanes = SparseCall(cluster, plan, call), len(plan.levels)
        for pass_ in PASSES:
            for rank, tasks in enumerate(priced.tasks(pass_)):
                routes = priced.call.parts(priced.split, priced.layout, rank)
                assert [r.start for r in routes] == [r.start for r, _ in priced.routes[rank]]
                promised = [sum(level) for level in zip(*(route.traffic(pass_) for route in routes), strict=True)]
                assert sent_by_lane(tasks, lanes) == promised
                programs |= {"direct" if route.demand else f"{route.zone.size} ranks" for route in routes}
        found = predict_sparse(cluster, plan, call)  # raises if a rank never ends
        assert found.forward.seconds > 0
        assert found.backward.seconds > found.forward.seconds
    assert expected <= programs


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
@pytest.mark.parametrize("text", PLANS)
def test_without_documents_and_window_it_is_the_dense_prediction(cluster, text):
    call, plan = call_on(cluster, length=4096), Plan.parse(text)
    dense, found = predict(cluster, plan, call, all_ranks=True), predict_sparse(cluster, plan, call)
    assert found.sent == pytest.approx(dense.sent)
    assert found.seconds == pytest.approx(dense.seconds, rel=0.01)


def test_a_node_sends_only_what_others_see():
    """1x8 with window w: each of the two cuts between the nodes' halves of a zigzag needs w - 1 keys."""
    cluster, window = CLUSTERS["lab"], 100
    found = predict_sparse(cluster, Plan.parse("1x2/1x4"), call_on(cluster, length=4096, window=window))
    per_token = 2 * 4 * 64 * 4  # keys and values, 4 heads of 64 numbers of 4 bytes
    crossings = 2 * (window - 1)
    assert found.forward.sent[0] * 8 == crossings * per_token
    assert found.backward.sent[0] * 8 == 2 * crossings * per_token  # keys again, and their gradients


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
def test_blocks_of_the_middle_shards_stand_for_all(cluster, monkeypatch):
    plan, call = Plan.parse("1x8"), call_on(cluster, LENGTHS)
    exact = predict_sparse(cluster, plan, call)
    monkeypatch.setattr(block_tiles, "MAX_SHARDS", 2)
    assert predict_sparse(cluster, plan, call).seconds == pytest.approx(exact.seconds, rel=0.1)


def test_large_worlds_take_windows_but_no_documents():
    cluster, call = find_cluster("h100-8x8@64x8"), call_on(CLUSTERS["h100-8x8"], window=100, length=8192)
    plan = Plan.parse("u4/1x16/1x8")
    assert predict_call(cluster, plan, call) == predict(cluster, plan, call)
    with pytest.raises(ValueError, match="documents can be planned for up to 256 ranks per group, not 512"):
        predict_call(cluster, plan, altered(call, documents=(0, 100, 8192)))


def test_pairs_count_documents():
    call = Attention.of(10, 1, 1, 1, 1, causal=True, documents=(0, 4, 10))
    assert call.pairs == 10 + 21
    assert altered(call, window=2).pairs == (4 + 3) + (6 + 5)
    assert altered(call, causal=False).pairs == 16 + 36
