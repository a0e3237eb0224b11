"""The search: against brute force, the plans it drops, and its speed."""

import re
import time
from dataclasses import replace
from itertools import product

import pytest

from startrail.planner.answer import plan as ask
from startrail.planner.candidates import options_of, plans_on
from startrail.planner.cluster import find_cluster
from startrail.planner.operate import fits
from startrail.planner.predict import predict
from startrail.planner.rows import DoesNotFitError
from startrail.planner.search import search
from startrail.planner.step import Training
from startrail.planner.units import parse_count, shipped
from startrail.planner.workload import Run, find_model, from_hugging_face
from startrail.schedule.plan import Plan
from tests.helpers import FULL
from tests.planner.shapes import CALL, LLAMA, SMALL, altered


def test_well_known_plans_are_always_among_the_rows():
    found = search(SMALL, find_model("gpt-3b"), Run(length=65536))
    assert {row.role for row in found.rows} >= {"ring", "star2", "star4", "USP", "double ring", "Ulysses"}
    assert found.missing == ()
    assert found.best.seconds <= 1.005 * min(row.seconds for row in found.rows)  # the simplest of tied plans


@pytest.mark.parametrize(
    "cluster, model, reasons",
    [
        (
            "pcie-8",
            "gpt-tiny",
            {"USP": "and a group has 8 GPUs", "double ring": "needs two levels", "star4": "4² = 16"},
        ),
        ("a100-4x8", "dit-1b", {"Ulysses": "24 query heads cannot be split over u32"}),
        ("a100-4x8@4x7", "gpt-tiny", {"USP": "4 key/value heads cannot be split inside a node of 7", "star4": "16"}),
    ],
)
def test_a_well_known_plan_that_cannot_be_used_is_a_row_with_its_reason(cluster, model, reasons):
    answer = ask(cluster, model, 65536)
    rows = {row["role"]: row for row in answer.rows if row["why_not"] is not None}
    for role, reason in reasons.items():
        assert reason in rows[role]["why_not"]
        assert rows[role]["seconds"] is None and rows[role]["memory"] is None
        title = rows[role]["plan"] if rows[role]["plan"] == role else f"{rows[role]['plan']} ({role})"
        assert f"{title}: {rows[role]['why_not']}" in " ".join(str(answer).split())
    assert {row["role"] for row in answer.rows} >= {"ring", "star2", "star4", "USP", "double ring", "Ulysses"}
    assert set(answer.rows[0]) == set(answer.rows[-1])
    assert answer.rows[0]["why_not"] is None


def test_the_search_finds_what_brute_force_finds():
    cluster, run = find_cluster("a100-4x8@2x4"), Run(length=65536)
    model = replace(find_model("gpt-tiny"), width=1024, hidden=2816, heads=8, kv_heads=2, head_dim=128)
    found = search(cluster, model, run)
    training, best = Training(cluster, model, run), float("inf")
    for plan in plans_on(cluster, model.heads):
        for variant in options_of(plan) if isinstance(plan, Plan) else ():
            try:
                training.memory(variant)
            except ValueError:
                continue
            seconds = training.step(variant, lambda call, variant=variant: predict(cluster, variant, call)).seconds
            best = min(best, seconds)
    assert found.best.seconds <= best * 1.011


def test_plans_that_do_not_fit_are_dropped_with_reason_and_count():
    answer = ask("a100-4x8", "gpt-7b", "512k")
    assert sum(answer.result.dropped.values()) > 100
    (star4,) = (row for row in answer.rows if row["role"] == "star4")
    assert re.search(r"needs \d+\.\d GB, more than the limit of 33.3 GB", star4["why_not"])
    assert "Dropped: " in str(answer)


def test_a_batch_may_be_split_over_groups():
    answer = ask("a100-4x8", "gpt-3b", "32k", batch=8)
    assert answer.rows[0]["data_parallel"] > 1


TENSORS = list(product(shipped("clusters"), shipped("models"), (1, 2, 3, 4, 8, 16)))


@pytest.mark.parametrize("cluster, model, tensor", TENSORS if FULL else TENSORS[::13])
def test_tensor_parallelism_has_an_answer_or_a_true_reason(cluster, model, tensor):
    spec, sizes = find_cluster(cluster), find_model(model)
    run = Run(length=65536, dtype=next(iter(spec.device.rates)), tensor=tensor)
    if any(number % tensor for number in (sizes.heads, sizes.kv_heads, spec.levels[-1].size)):
        with pytest.raises(
            ValueError, match=f"^tensor = {tensor} must divide {sizes.heads} query and {sizes.kv_heads} "
        ):
            search(spec, sizes, run, top=2)
    elif not fits(spec, sizes, run):
        with pytest.raises(DoesNotFitError, match=r"^[^\n]* does not fit cluster [^\n]*$") as caught:
            search(spec, sizes, run, top=2)
        if hint := re.search("; it would fit with ([^;]*)", str(caught.value)):
            settings = dict(setting.split(" = ") for setting in hint[1].split(" and "))
            changes = {name: {"true": True, "3": 3}.get(value, value) for name, value in settings.items()}
            assert fits(spec, sizes, replace(run, **changes))
    else:
        for row in search(spec, sizes, run, top=2).rows:
            row.plan.check_world(spec.world // tensor)
            assert (sizes.heads // tensor) % row.plan.heads == 0
            assert row.step.memory.total <= row.step.memory.limit


def test_less_bandwidth_or_memory_is_never_faster():
    model, run = find_model("gpt-3b"), Run(length=2**17)
    cluster = find_cluster("a100-4x8")
    best = search(cluster, model, run).best.seconds
    assert search(cluster.faster(0, 0.5), model, run).best.seconds >= best
    assert search(cluster, model, run, memory=11e9).best.seconds >= best * 0.999


def test_sliding_layers_compute_less():
    long = altered(CALL, length=2**16)
    for text in ("1x16", "u4/2x2"):
        calls = long, altered(long, window=2048)
        whole, sliding = (predict(SMALL, Plan.parse(text), call, all_ranks=True) for call in calls)
        assert sliding.seconds - sliding.waiting < 0.7 * (whole.seconds - whole.waiting), text
        assert sliding.sent == whole.sent


def test_the_error_for_a_batch_that_does_not_fit_names_one_that_does():
    with pytest.raises(ValueError, match=r"does not fit cluster a100-4x8.*; a batch of \d+ would fit; "):
        search(find_cluster("a100-4x8"), find_model("gpt-7b"), Run(2**17, batch=64), data_parallel=1)


SLIDING = LLAMA | dict(
    hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336,
    vocab_size=128256, sliding_window=4096, sliding_window_pattern=4,
)  # fmt: skip


@pytest.mark.parametrize(
    "cluster, model, length, limit",
    [
        ("h100-8x8", "gpt-7b", "512k", 1.0),
        ("h100-8x8", "sliding", "512k", 1.0),
        ("nvl72", "llama3-8b", "1M", 2.0),  # 288 GPUs, and many ways to divide 72
        ("h100-8x8@2048x8", "llama3-70b", "1M", 10.0),
        ("h100-8x8@2047x8", "llama3-70b", "1M", 10.0),
        *([("nvl72@228x72", "llama3-70b", "1M", 10.0), ("h100-8x8@2048x8", "sliding", "1M", 10.0)] if FULL else []),
    ],
)
def test_planning_is_fast(cluster, model, length, limit):
    """On one core; the better of two runs, because other tests share it."""
    described = from_hugging_face(SLIDING, "mine", "config.json") if model == "sliding" else find_model(model)
    times = []
    for _ in range(2):
        start = time.process_time()
        search(find_cluster(cluster), described, Run(length=parse_count(length)))
        times.append(time.process_time() - start)
        if times[-1] < limit:
            break
    assert min(times) < limit
