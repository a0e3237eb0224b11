"""Latents in the planner: the price of expanding them, against hand-worked numbers, and the choice between latents and
expanded keys."""

import re
from dataclasses import replace

import pytest

from startrail.compile.attention import Attention
from startrail.compile.latents import LatentAttention
from startrail.planner.answer import plan as ask
from startrail.planner.bounds import Bounds
from startrail.planner.candidates import options_of, plans_on
from startrail.planner.cluster import find_cluster
from startrail.planner.expanding import Expanding
from startrail.planner.predict import predict
from startrail.planner.pricing import ComputeTask, call_tasks, plan_prices
from startrail.planner.sparse.advice import price_row
from startrail.planner.sparse.predict import predict_sparse
from startrail.planner.workload import find_model, from_hugging_face, read_model
from startrail.schedule.plan import Plan
from startrail.schedule.program import closed_form
from startrail.schedule.values import BACKWARD, PASSES

EXPANDED = replace(Attention.of(16384, 1, 16, 16, 192, True), value_dim=128)  # of DeepSeek-V2-Lite
CALL = LatentAttention.from_expanded(EXPANDED, 512, 64)


def test_expansion_costs_its_products_and_its_copies():
    """One rank, one column: 2 x 512 x 16 x (128 + 128) FLOPs per token forward, as many and twice as many backward."""
    cluster = find_cluster("h100-8x8@1x1")
    ours, expanded = (predict(cluster, Plan.parse("1x1"), call) for call in (CALL, EXPANDED))
    product = 2 * 512 * 16 * 256 * 16384 / 620e12
    copies = 16384 * 16 * 320 * 2 / 2.6e12
    forward = ours.forward.seconds - expanded.forward.seconds
    assert forward == pytest.approx(product + 3 * copies + 4 * 10e-6)
    backward = ours.backward.seconds - expanded.backward.seconds
    assert 3 * product < backward < 3 * product + 12 * copies + 20 * 10e-6


@pytest.mark.parametrize("plan, columns", [("1x8", 8), ("2x4", 4), ("8x1", 1), ("u8", 1)])
def test_a_column_is_expanded_once_unless_many_are_held(plan, columns):
    """In the forward pass, where each column's rows follow each other; in the backward pass as often."""
    cluster, plan = find_cluster("h100-8x8@1x8"), Plan.parse(plan)
    prices, free = (plan_prices(cluster, plan, CALL) for _ in range(2))
    free.expand = lambda column: 0.0
    for pass_ in PASSES:
        spent = [
            sum(task.seconds for task in call_tasks(each, 8, 3, pass_) if isinstance(task, ComputeTask))
            for each in (prices, free)
        ]
        assert spent[0] - spent[1] == pytest.approx(columns * prices.expand(0))


def test_gradients_of_a_column_become_the_latents_once():
    """Also if its rows arrive one after the other, and if its results are returned one by one."""
    prices = plan_prices(find_cluster("h100-8x8@4x8"), Plan.parse("1x4/8x1,keep=all"), CALL)
    keys = []
    prices.contract = lambda count, new: keys.append(count) or 0.0
    call_tasks(prices, 32, 3, BACKWARD)
    assert keys == 4 * [CALL.length // 32]


def test_bytes_are_those_of_latents():
    cluster = find_cluster("h100-8x8@2x4")
    for text in ("1x8", "2x2/u2", "u2/1x4"):
        plan = Plan.parse(text)
        sizes = CALL.sizes_on(plan, 8)
        sent = predict(cluster, plan, CALL, all_ranks=True).sent
        total = sum(sum(closed_form(plan, 8, rank, pass_, sizes.by_kind)) for rank in range(8) for pass_ in PASSES)
        assert max(sent) <= total / 8 * 1.001, text
    ring = Plan.parse("1x8")
    ratio = CALL.expanded.sizes_on(ring, 8).nbytes("kv") / CALL.sizes_on(ring, 8).nbytes("kv")
    assert ratio == 16 * 320 / 576


def test_bounds_stay_below_the_simulated_time():
    cluster = find_cluster("h100-8x8@2x4")
    bounds = Bounds(cluster, CALL)
    for levels in plans_on(cluster, 16):
        for plan in list(options_of(levels))[:2] if isinstance(levels, Plan) else ():
            found = predict(cluster, plan, CALL)
            for bound, simulated in zip(bounds.of_plan(plan), (found.forward, found.backward), strict=True):
                assert bound.seconds <= simulated.seconds * (1 + 1e-9), plan


def test_windows_and_documents_are_priced():
    cluster, plan = find_cluster("h100-8x8@1x4"), Plan.parse("1x4")
    packed = replace(CALL, boundaries=replace(CALL.boundaries, documents=tuple(range(0, 16385, 4096))))
    alone = predict_sparse(cluster, plan, packed)
    assert alone.sent == (0.0, 0.0)
    window = replace(CALL, mask=replace(CALL.mask, window=512))
    direct, keys = (predict_sparse(cluster, plan, call) for call in (window, window.expanded))
    assert direct.sent[1] == pytest.approx(keys.sent[1] * 576 / 5120)


MODEL = dict(kind="gpt", vocab=1000, width=2048, layers=4, heads=16, head_dim=192, value_dim=128, hidden=1024)
LATENTS = dict(kv_rank=512, rope_dim=64)


def test_the_planner_chooses_between_latents_and_expanded_keys_and_says_why():
    model = read_model({**MODEL, **LATENTS}, "small", "small.toml")
    slow = ask("boxes-10gbe@4x8", model, "32k", top=1)
    assert slow.rows[0]["sends"] == "latents"
    assert {row["sends"] for row in slow.rows if row["why_not"] is None} == {"latents", "expanded keys"}
    about = dict(slow.reasons)["Latents"]
    assert "Absorbed queries" in about
    told = slow.why.replace("\n", " ")
    assert re.search(r"Attention sends .* as latents, and .* as expanded keys", told)
    assert re.search(r"The best plan with expanded keys, .* takes [\d.]+x as long", told)
    fast = ask("h100-8x8@1x8", model, "8k", top=1)
    assert fast.rows[0]["sends"] == "expanded keys"
    assert "costs more time than their bytes save" in fast.why
    plain = read_model(MODEL, "small", "small.toml")
    assert "Latents" not in dict(ask("h100-8x8@1x8", plain, "8k", top=1).reasons)


def test_deepseeks_plan_sends_a_seventieth_between_nodes():
    """Of what the same plan sends with expanded keys; plans with expanded keys send the least with heads over nodes."""
    found = ask("b200@32x8", find_model("deepseek-v3"), "128k", batch=4, top=1).result
    best, other = found.best, next(row for row in found.rows if row.sends == "expanded keys")
    alike = price_row(replace(best, training=replace(best.training, latents=False)))
    latents, same, heads = (row.step.by_attention[0] for row in (best, alike, other))
    assert (str(best.plan), best.sends) == ("1x8/1x8", "latents") and str(other.plan).startswith("u8/")
    assert same / latents == pytest.approx(128 * (192 + 128) / 576, rel=1e-3) and heads > 15 * latents


def test_models_with_latents():
    v3, lite = find_model("deepseek-v3"), find_model("deepseek-v2-lite")
    assert v3.projections == 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    assert 36e9 < v3.active_parameters < 39e9
    config = dict(
        model_type="deepseek_v2", hidden_size=2048, num_hidden_layers=27, num_attention_heads=16, vocab_size=102400,
        intermediate_size=10944, moe_intermediate_size=1408, n_routed_experts=64, num_experts_per_tok=6,
        n_shared_experts=2, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        q_lora_rank=None, num_key_value_heads=16,
    )  # fmt: skip
    assert from_hugging_face(config, lite.name, "config.json") == lite
    with pytest.raises(ValueError, match="rope_dim = 192 must be less than the width of keys, 192"):
        read_model({**MODEL, "kv_rank": 512, "rope_dim": 192}, "m", "m.toml")


def test_running_jobs_expand_first_where_links_are_fast_and_heads_few():
    """By the described cluster, the same for lengths up to the next power of two; never where little is sent."""
    plan, expanding = Plan.parse("1x2/1x4"), Expanding(find_cluster("h100-8x8@2x4"))
    assert expanding.first(plan, CALL)
    longer = replace(CALL, boundaries=replace(CALL.boundaries, documents=(0, 16000)))
    assert expanding.first(plan, longer) and len(expanding._known) == 1
    many = LatentAttention.from_expanded(replace(EXPANDED, heads=128, kv_heads=128), 512, 64)
    assert not expanding.first(plan, many)
    assert not Expanding(find_cluster("boxes-10gbe@2x4")).first(plan, CALL)
    for mask in (replace(CALL.mask, window=512), replace(CALL.mask, chunk=512)):
        assert not expanding.first(plan, replace(CALL, mask=mask))
    assert not expanding.first(plan, replace(CALL, dtype="float64"))
