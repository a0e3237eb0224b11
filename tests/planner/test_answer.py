"""The answer as text and JSON, and ``startrail plan``, which prints it."""

import json
import re
from dataclasses import replace

import pytest

import startrail
from startrail.cli import main
from startrail.planner.answer import plan as ask
from startrail.planner.cluster import SlowMember, find_cluster, read_cluster
from startrail.planner.search import search
from startrail.planner.units import find_file, read_file
from startrail.planner.workload import Run, find_model
from startrail.schedule.plan import Plan
from tests.helpers import refusal


@pytest.mark.parametrize("share, advice", [(0.95, "keep it"), (0.02, "leave it out")])
def test_a_slow_node_is_named_with_advice(share, advice):
    cluster = replace(find_cluster("a100-4x8"), slow=(SlowMember(0, 2, bandwidth=share),))
    why = ask(cluster, "gpt-3b", "128k").why
    assert f"node 2 (bandwidth {share:.0%}, compute 100%)" in why
    assert "the other 3 nodes alone take" in why
    assert advice in why


def test_a_node_of_slower_devices_is_said_to_gain_from_shares():
    file = read_file(find_file("h100-8x8", "clusters", "cluster"))
    slow = [{"level": "node", "member": 1, "device": "a100-4x8"}]
    cluster = read_cluster({**file, "slow": slow}, "mixed", "mixed.toml").resized([2, 4])
    assert [round(cluster.speed(rank), 2) for rank in range(8)] == [1.0] * 4 + [0.35] * 4
    why = ask(cluster, "gpt-3b", "128k", top=1).why
    assert "node 1 (bandwidth 100%, compute 35%): at full speed" in why
    healthy, shared = re.search(
        r'would take ([\d.]+) s, and with shares="measured" 1x\S+ would take ([\d.]+) s', why
    ).groups()
    assert float(healthy) < float(shared) < 2 * float(healthy)  # its ranks are 0.68 as fast on average


def test_what_would_change_the_answer_is_a_new_search():
    """It is not limited to the rows of the first search."""
    cluster, model, run = find_cluster("a100-4x8"), find_model("gpt-7b"), Run(2**17)
    why = ask(cluster, model, run.length, top=1, memory="26 GB").why
    half = search(cluster, model, run, top=1, memory=13e9, known=False).best
    assert f"With half the memory, {half.name} becomes best (" in why
    twice = search(cluster.faster(0, 2.0), model, run, top=1, memory=26e9, known=False).best
    assert f"With twice the bandwidth between nodes, {twice.name} becomes best (" in why
    assert "With half the memory, no plan fits: " in ask(cluster, model, 4 * run.length, top=1).why


def test_the_best_plan_with_heads_outermost_is_a_row_with_its_reason():
    """On the paper's cluster it fits with headroom, and the text compares it with ring and star4."""
    answer = ask("a100-4x8", "gpt-7b", "512k")
    rows = {row["role"]: row for row in answer.rows}
    heads, ring = rows["heads outermost"], rows["ring"]
    assert heads["plan"].startswith("u4/") and "exchange=twice" in heads["plan"]
    assert heads["memory"] < 0.9 * 37e9 and heads["seconds"] > answer.rows[0]["seconds"]
    for text in (
        f"With heads over the nodes, the best is {heads['plan']}: ",
        f"{ring['seconds'] / heads['seconds']:.2f}x as fast as ring, ",
        f"x as fast as star4, 40.3 GB between nodes, {heads['memory'] / 1e9:.1f} GB per GPU. It is ",
        "slower than the fastest",
        "exchanged again in the backward pass",
    ):
        assert text in answer.why
    assert "heads outermost" not in [row["role"] for row in ask("h100-8x8@1x8", "llama3-8b", "128k").rows]


def test_rows_as_json(capsys):
    argv = ["plan", "--cluster", "a100-4x8", "--model", "gpt-3b", "--length", "64k", "--json", "--top", "2"]
    assert main(argv) == 0
    rows = json.loads(capsys.readouterr().out)
    for row in rows:
        for key in ("plan", "seconds", "low", "high", "tokens_per_second", "exposed", "bytes", "memory"):
            assert key in row
        assert row["low"] < row["seconds"] < row["high"]
        assert row["why_not"] is None
        assert set(row["bytes"]) == {"node", "gpu"}
        Plan.parse(row["plan"]).check_world(32)


def test_the_function_and_the_command_give_the_same_answer(capsys):
    answer = startrail.plan("a100-4x8", "gpt-3b", "64k")
    assert main(["plan", "--cluster", "a100-4x8", "--model", "gpt-3b", "--length", "65536"]) == 0
    text = capsys.readouterr().out
    assert text == f"{answer}\n"
    for part in ("step", "MFU", "wait", "nodes", "GPUs", "memory", "Runner-up", "twice the bandwidth between nodes"):
        assert part in text


def test_the_answer_for_the_papers_cluster_fits_a_screen():
    """The choice comes first, in a sentence, and it is the first plan of the table."""
    text = str(ask("a100-4x8", "gpt-7b", "512k"))
    lines = text.splitlines()
    assert len(lines) <= 50 and max(map(len, lines)) <= 100
    choice = next(line for line in lines if line.startswith("Use "))
    assert lines.index(choice) <= 3
    assert re.fullmatch(r"Use \S+: \S+ s per step, \S+x as fast as Ring Attention\.", choice)
    table = next(at for at, line in enumerate(lines) if line.split()[:3] == ["step", "MFU", "wait"])
    assert lines[table + 1].startswith(f"{choice.split()[1].rstrip(':')} (the choice)")
    assert text.count("(the choice)") == 1


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize(
    "cluster, options",
    [
        ("pcie-8", dict(model="gpt-tiny", length="64k")),
        ("a100-4x8@2x4", dict(model="gpt-3b", length="64k", documents="pretraining")),
        ("a100-4x8", dict(model="gpt-7b", length="512k", compare=["1x32", "u2/2x8", "1x31"])),
    ],
)
def test_every_line_of_text_fits_a_screen(cluster, options, slow):
    """Only the table may be wider, if plans with many options have long names."""
    spec = find_cluster(cluster)
    answer = ask(replace(spec, slow=(SlowMember(0, 0, bandwidth=0.5),)) if slow else spec, **options)
    text = str(answer).replace(answer.table, "")
    assert max(map(len, text.splitlines())) <= 100
    assert {about for about, _ in answer.reasons} >= {"Plan", "Why", "Cost", "Runner-up", "What if", "How sure"}
    assert all(sentence.endswith(".") and "\n" not in sentence for _, sentence in answer.reasons)


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--cluster", "a100-4x9"], "no cluster 'a100-4x9'; did you mean 'a100-4x8'?"),
        (["--cluster", "a100-4x8@4"], "'4' is not NODExGPU"),
        (["--cluster", "none.toml"], "none.toml: No such file or directory"),
        (["--model", "gpt-8b"], "no model 'gpt-8b'; did you mean 'gpt-"),
        (["--length", "-5"], "length = '-5' is not a whole number of at least 1"),
        (["--length", "9" * 320], "length = '99999"),
        (["--length", "16"], "length 16 has fewer tokens than cluster a100-4x8 has ranks, 32"),
        (["--length", "16M"], "tokens would"),
        (["--batch", "0"], "batch = '0' is not a whole number"),
        (["--memory", "much"], "memory = 'much' is not an amount of memory"),
        (["--memory", "0 GB"], "memory = '0 GB' is not between 1 MB and"),
        (["--top", "x"], "argument --top: 'x' is not a whole number"),
        (["--zero", "x"], "argument --zero: 'x' is not a whole number"),
        (["--zero", "1"], "zero = 1 is not one of 0, 2, 3"),
        (["--dtype", "float32"], "has no rates in float32; it has bfloat16"),
        (["--dtype", "int8"], "dtype = 'int8' is not one of"),
        (["--top", "0"], "top = 0 is not a whole number of at least 1"),
        (["--memory", "2 GB"], "does not fit cluster a100-4x8"),
        (["--cluster", "/dev/zero"], "/dev/zero: longer than the 1048576 characters"),
        (["--kernel", "fa4"], "kernel fa4 has no speeds for chip 'A100'; it has B200"),
        (["--kernel", "fa9"], "no kernel 'fa9'"),
        (["--tensor", "3"], "tensor = 3 must divide 32 query and 32 key/value heads and 8 GPUs"),
        (["--fp8"], "fp8 = true: device A100-SXM4-40GB has no fp8 rate"),
        (["--states", "int8"], "states = 'int8' is not one of float32, bfloat16, float16"),
        (["--price", "-1"], "price = -1.0 is not a price per device and hour"),
        (["--plan", "1y8"], "cannot read '1y8'"),
        (["--offload", "--no-recompute"], "offload = true needs recompute = true"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(argv, message, capsys):
    whole = ["plan", "--cluster", "a100-4x8", "--model", "gpt-7b", f"--length={64 * 1024}"]
    if argv[0] == "--length":
        argv = [f"--length={argv[1]}"]
    assert message in refusal([*whole, *argv], capsys)


def test_a_template_is_a_cluster_file(capsys, tmp_path):
    assert main(["plan", "--template"]) == 0
    (tmp_path / "my.toml").write_text(capsys.readouterr().out)
    assert find_cluster(str(tmp_path / "my.toml")).world == 64


def test_a_requested_plan_is_a_row_and_the_answer_explains_why_it_lost():
    answer = ask("a100-4x8", "gpt-3b", "64k", top=1, compare=["1x32", "u4/2x4", "1x31"])
    roles = {row["plan"]: row["role"] for row in answer.rows if "yours" in row["role"]}
    assert roles == {"1x32": "ring, yours", "u4/2x4": "yours", "1x31": "yours"}
    assert next(row for row in answer.rows if row["plan"] == "1x31")["why_not"]
    assert "Yours: 1x32 is " in answer.why and "% slower: it sends " in answer.why


def test_rings_of_others_are_rows_of_their_own():
    rows = {row["role"]: row["seconds"] for row in ask("h100-8x8@2x8", "llama3-8b", "128k", top=1).rows}
    assert rows["by ring-flash-attention"] > rows["ring"] and rows["by Transformer Engine"] > rows["ring"]


def test_the_answer_names_its_kernel_and_rules():
    answer = ask("h100-8x8", "llama3-8b", "128k", top=1, kernel="fa2")
    assert "FlashAttention 2 on H100 (arXiv 2407.08608, Figure 5)" in answer.why
    assert "Plans within 3% count as equal" in str(answer)
    assert ask("h100-8x8", "llama3-8b", "128k", top=1).rows[0]["seconds"] < answer.rows[0]["seconds"]


def test_an_answer_for_one_node_does_not_talk_about_nodes():
    text = str(ask("h100-8x8@1x8", "llama3-8b", "128k", top=2))
    assert "between GPUs" in text and "between nodes" not in text and " nodes " not in text


def test_doubtful_links_and_wide_gathers_are_noted():
    cluster = find_cluster("h100-8x8@2x8").faster(0, 8.0)
    assert "360 GB/s between nodes is more than adapters have; is it 360 Gbit/s?" in str(ask(cluster, "gpt-3b", "64k"))
    text = str(ask("a100-4x8", "gpt-7b", "64k", gather="float32", top=1))
    assert "with --gather bfloat16, " in text
    assert "boxes" in ask("boxes-10gbe", "gpt-tiny", "64k", top=1).why


def test_rows_are_sorted_or_the_answer_gives_the_reason():
    answer = ask("a100-4x8", "gpt-7b", "512k")
    first, *others = answer.result.rows
    assert first.step.memory.total <= 0.9 * 37e9
    if min(row.seconds for row in others) < 0.999 * first.seconds:
        assert "faster, which counts as equal, but" in answer.why
    assert "GB over the limit" in str(answer) and "The paper's schedule, star4, would take" in answer.why
