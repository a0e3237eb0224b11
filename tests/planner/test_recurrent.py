"""Layers with a recurrence: published sizes and speeds, bytes of the compiled calls, and what the answer says."""

from dataclasses import replace

import pytest

from startrail.compile.call import compile_call
from startrail.compile.halo import Halo
from startrail.compile.problem import Boundaries, Split
from startrail.compile.scan import Scan
from startrail.planner import recurrent
from startrail.planner.answer import plan as ask
from startrail.planner.auto import plan_for_job
from startrail.planner.cluster import find_cluster
from startrail.planner.predict import Prediction
from startrail.planner.recurrent import LinearCall, predict_linear
from startrail.planner.sparse.rule import rule_for, scan_rule
from startrail.planner.states import predict_rows
from startrail.planner.step import Training
from startrail.planner.workload import Job, Run, find_model, from_hugging_face, read_model
from startrail.schedule.families.base import Heads
from startrail.schedule.plan import Plan
from tests.helpers import error_of

QWEN = find_model("qwen3.5-35b")
CONFIG = dict(
    model_type="qwen3_5_moe", text_config=dict(
        model_type="qwen3_5_moe_text", hidden_size=2048, num_hidden_layers=40, num_attention_heads=16,
        num_key_value_heads=2, head_dim=256, vocab_size=248320, tie_word_embeddings=False, num_experts=256,
        num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512,
        full_attention_interval=4, linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_conv_kernel_dim=4,
    ),
)  # fmt: skip


def test_the_shipped_model_has_the_published_sizes():
    assert round(QWEN.parameters / 1e9, 1) == 34.7 and len(QWEN.windows) == 10
    assert replace(from_hugging_face(CONFIG, "x", "config.json"), name=QWEN.name) == QWEN
    listed = CONFIG["text_config"] | {"layer_types": ["linear_attention"] * 39 + ["full_attention"]}
    assert from_hugging_face(listed, "x", "config.json").linear.layers == 39


@pytest.mark.parametrize("change, text", [
    (dict(linear=3), "a table"),
    (dict(linear=dict(full_every=2)), "are missing"),
    (dict(linear=dict(full_every=2, key_heads=3, value_heads=4, key_dim=8, value_dim=8, conv=4)), "not a multiple"),
])  # fmt: skip
def test_mistakes_in_linear_layers_are_one_line(change, text):
    table = dict(kind="gpt", vocab=9, width=8, layers=4, heads=4, hidden=8) | change
    assert text in error_of(lambda: read_model(table, "x", "x.toml"))


def test_one_rank_is_as_fast_as_the_published_kernel():
    cluster = find_cluster("h100-8x8@1x1")
    for tokens, forward, backward in ((8192, 0.472e-3, 1.444e-3), (32768, 1.890e-3, 5.697e-3)):
        call = LinearCall(cluster, QWEN.linear, 1, (0, tokens), "bfloat16", 2)
        convolved = 2 * 8192 * 2 * tokens / cluster.device.copy
        calls = cluster.device.call
        assert call.own_seconds[0] - convolved - calls == pytest.approx(forward, rel=0.01)
        assert call.own_seconds[1] - 2 * convolved - calls == pytest.approx(backward, rel=0.01)
        assert call.predict(Plan.parse("1x1")).seconds == sum(call.own_seconds)


@pytest.mark.parametrize("plan", ["1x2/1x4", "1x8"])
def test_bytes_are_those_of_the_compiled_calls(plan):
    split, cluster = Split(Plan.parse(plan), 8), find_cluster("h100-8x8@2x4")
    boundaries = Boundaries((0, 100, 4096))
    for problem in (Scan(boundaries, 1, features=64, units=8, effect=128), Halo(boundaries, 1, "float32", "", 3, 10)):
        found = predict_rows(cluster, split, problem)
        for pass_, simulated in zip(problem.passes, (found.forward, found.backward), strict=True):
            sent = sum(sum(compile_call(problem, split, rank).traffic(pass_)) for rank in range(8))
            assert sum(simulated.sent) * 8 == pytest.approx(sent)


def test_the_engine_shares_units_where_that_is_faster():
    state = dict(features=32 * 128 * 128, units=32, effect=2 * 32 * 128 * 128)
    for shape, layout in (("2x4", "zigzag"), ("2x8", "zigzag"), ("4x8", "zigzag"), ("4x8", "contiguous")):
        cluster = find_cluster(f"h100-8x8@{shape}")
        nodes, ranks = (level.size for level in cluster.levels)
        split = Split(Plan.parse(f"1x{nodes}/1x{ranks}"), cluster.world, layout)
        problem = Scan(Boundaries((0, 2**16)), 1, **state)
        chain, chosen = (predict_rows(cluster, split, replace(problem, inner=inner)).seconds for inner in (1, None))
        assert chosen < 0.95 * chain, (shape, layout)


def test_a_described_cluster_decides_how_states_travel():
    state = dict(features=32 * 128 * 128, units=32, effect=2 * 32 * 128 * 128)
    problem, plan = Scan(Boundaries((0, 4096)), 1, **state), Plan.parse("1x4/1x8")
    for name, inner in (("h100-8x8@4x8", 8), ("lab@4x8", 1)):  # in the lab, every message takes time of two cores
        split = Split(plan, 32, scan=scan_rule(rule_for(name, 32)))
        assert compile_call(problem, split, 0).parts[0].table.inner == inner
    assert compile_call(problem, Split(plan, 32, scan=scan_rule(rule_for("", 32))), 0).parts[0].table.inner == 8


@pytest.mark.parametrize("text", ["1x16/1x4", "u16/1x4"])
def test_many_ranks_lie_on_a_line(text, monkeypatch):
    cluster, plan = find_cluster("h100-8x8@16x4"), Plan.parse(text)
    call = LinearCall(cluster, QWEN.linear, 1, (0, 2**18), "bfloat16", 2)
    exact = call.predict(plan)
    monkeypatch.setattr(recurrent, "MAX_RANKS", 32)
    line = predict_linear(call, plan, {})
    for one, other in ((line.forward, exact.forward), (line.backward, exact.backward)):
        assert one.seconds == pytest.approx(other.seconds, rel=0.02)
        assert one.sent == pytest.approx(other.sent, rel=0.001)


def test_a_step_has_every_layer():
    cluster = find_cluster("h100-8x8@1x8")
    run = Run(length=65536)
    plan, none = Plan.parse("1x8"), Prediction(*[SimulatedNothing] * 2)
    whole = Training(cluster, QWEN, run).step(plan, lambda call: none).seconds
    half = replace(QWEN, linear=replace(QWEN.linear, layers=15))
    training = Training(cluster, QWEN, run)
    of_layer = training.of_linear(plan).seconds + sum(training.dense_seconds)
    assert whole >= 30 * of_layer
    assert Training(cluster, half, run).step(plan, lambda call: none).seconds < whole


SimulatedNothing = recurrent.SimulatedPass(0.0, 0.0, (0.0, 0.0), (0.0, 0.0))


def test_the_answer_says_what_recurrences_take_and_whose_speeds_these_are():
    text = str(ask("h100-8x8@2x8", "qwen3.5-35b", "64k", top=1))
    assert "Each of the 30 layers without attention takes" in text
    assert "runs at the speeds of flash-linear-attention" in text.replace("\n           ", " ")
    text = str(ask("a100-4x8@2x8", "qwen3.5-35b", "64k", top=1, offload_states=True)).replace("\n           ", " ")
    assert "No speeds of their kernel are known for A100" in text


def test_auto_keeps_neighbouring_tokens_on_a_node_for_recurrences():
    """With heads over nodes, a state would cross links at every hop of its chain."""
    cluster, run = find_cluster("h100-8x8@4x8"), Run(length=32768)
    plans = [plan_for_job(cluster, Job(model, run)).plan for model in (QWEN, replace(QWEN, linear=None))]
    assert [isinstance(plan.levels[0], Heads) for plan in plans] == [False, True], plans
