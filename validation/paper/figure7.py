"""Figure 7's set-ups on 32 GPUs: star2 and star4 over Ring Attention as predicted, and our best plan."""

from startrail.planner.cluster import find_cluster
from startrail.planner.predict import predict
from startrail.planner.search import search
from startrail.planner.step import Training
from startrail.planner.topology import Machine
from startrail.planner.workload import Run, find_model
from startrail.schedule.plan import Plan

SETUPS = [
    ("a100-2x16", "gpt-3b", 65_536),
    ("a100-2x16", "gpt-3b", 131_072),
    ("a100-4x8", "gpt-3b", 65_536),
    ("a100-4x8", "gpt-3b", 131_072),
    ("h100-8x8@4x8", "gpt-7b", 65_536),
    ("h100-8x8@4x8", "gpt-7b", 131_072),
    ("a100-4x8", "dit-1b", 131_072),
    ("a100-4x8", "dit-1b", 524_288),
]
CLAIMS = {"gpt": "up to +77.12 %", "dit": "up to +114.33 %"}
NOTE = """
How to read it: tokens/s of a whole training step over Ring Attention's with the same model, in percent. "across" deals
neighbouring places to different nodes, so that teams span nodes; the paper's scheduler chooses between such placements,
and the better of both is what its claim is about. Assumed: bfloat16, ZeRO-3 whose parameters and gradients travel in
bfloat16, all but attention recomputed, one sequence a step, and the cluster files' rates, none of which we measured.

Where they agree: on the A100 clusters the better starC is predicted to gain about what the paper claims for GPT:
star4 on 4x8, star2 on 2x16. Where not: on the H100 cluster more is predicted than claimed. There every GPU has an
adapter of its own, and Ring Attention's hop leaves a node over one of the eight: 34 MB in 0.75 ms, eight times the
compute of a block at 64k tokens. A ring that spreads its hops over all adapters would be much nearer. For the DiT
less is predicted than claimed: at 512k tokens Ring Attention's links and its compute are nearly balanced at the
speeds assumed, so there is little to win, and starC must gather and place keys before its first block, which nothing
hides. A network slower than the stated 100 Gbit/s a node, or less overlap in the ring that the paper compares with,
would bring the prediction to the claim.

"""


def figure7() -> list[str]:
    lines = ["| cluster | model | tokens | star2 | star4 | star2 across | star4 across | the paper | our best | plan |"]
    lines += ["|" + " --- |" * 10]
    best: dict[str, float] = {"gpt": 0.0, "dit": 0.0}
    ahead = []
    for name, model_name, length in SETUPS:
        cluster, model = find_cluster(name), find_model(model_name)
        run = Run(length=length, gather="bfloat16")
        training = Training(cluster, model, run)
        order = Machine(cluster.levels[0].size, cluster.levels[1].size).interleaved()

        def gain(text: str, across: bool, training: Training = training, order: tuple[int, ...] = order) -> float:
            def seconds(text: str, across: bool) -> float:
                plan = Plan.parse(text)
                where = order if across else None
                return training.step(plan, lambda call: predict(training.cluster, plan, call, order=where)).seconds

            return seconds("1x32", False) / seconds(text, across) - 1

        stars = [gain(text, across) for across in (False, True) for text in ("star2", "star4")]
        found = search(cluster, model, run).best
        ours = gain(str(found.plan), False)
        kind = model_name.partition("-")[0]
        best[kind] = max(best[kind], *stars)
        ahead.append(ours - max(stars))
        cells = [f"{value:+.0%}" for value in stars]
        lines.append(
            f"| {name} | {model_name} | {length // 1024}k | {' | '.join(cells)} | {CLAIMS[kind]} | {ours:+.0%} | "
            f"`{found.plan}` |"
        )
    lines += ["", *NOTE.strip("\n").split("\n")]
    lines += [
        "",
        f"Highest predicted gain of starC: GPT {best['gpt']:+.1%} (paper: up to +77.12 %), DiT {best['dit']:+.1%}",
    ]
    lines[-1] += f" (paper: up to +114.33 %). Our best plan is ahead of the best starC by {min(ahead):.0%} to "
    lines[-1] += f"{max(ahead):.0%} of ring's speed."
    return lines
