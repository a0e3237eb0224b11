"""``python -m validation.scaling``: weak scaling to 16,384 GPUs with fixed tokens per GPU, as a figure and a table.

The sequence grows with the cluster, and so does attention's arithmetic. The figure shows model FLOP utilisation (MFU),
which is flat where communication stays hidden. All values are simulated; nothing of this size was run.
"""

import sys
import time
from pathlib import Path

from startrail.planner.cluster import find_cluster
from startrail.planner.predict import predict
from startrail.planner.rows import Row
from startrail.planner.step import Training
from startrail.planner.workload import Run, find_model
from startrail.schedule.plan import Plan

TOKENS = 4096  # per GPU
NODES = (2, 8, 32, 128, 512, 2048)
MODEL = "gpt-7b"
HEADS = 32


def contenders(nodes: int) -> dict[str, str]:
    """Plans for nodes of 8 GPUs. "heads outermost" splits heads over nodes first and nests rings over the rest."""
    team = 1
    while 4 * team * team <= nodes:
        team *= 2
    head_nodes = min(nodes, HEADS)
    ring_nodes = nodes // head_nodes
    inner = 1
    while 4 * inner * inner <= ring_nodes:
        inner *= 2
    between = f"/{inner}x{ring_nodes // inner}" if ring_nodes > 1 else ""
    inside = "1x8" if HEADS // head_nodes < 8 else "u8"
    return {
        "ring": f"1x{8 * nodes}",
        "star4": "star4",
        "USP": f"1x{nodes}/u8",
        "nested": f"{team}x{nodes // team}/u8",
        "heads outermost": f"u{head_nodes}{between}/{inside}",
    }


def utilisation(text: str, nodes: int) -> float:
    plan = Plan.parse(text)
    cluster, model = find_cluster(f"h100-8x8@{nodes}x8"), find_model(MODEL)
    training = Training(cluster, model, Run(TOKENS * cluster.world, gather="bfloat16"))
    return Row(plan, training, training.step(plan, lambda call: predict(cluster, plan, call))).mfu


def main() -> int:
    curves: dict[str, list[float]] = {}
    lines = ["# Weak scaling", ""]
    lines += [f"{MODEL}, {TOKENS} tokens per GPU, H100 nodes of 8 with 400 Gbit/s per GPU: predicted MFU.", ""]
    lines += ["| GPUs | tokens | " + " | ".join(contenders(2)) + " |", "|" + " --- |" * 7]
    for nodes in NODES:
        cells = []
        for name, text in contenders(nodes).items():
            if sys.stderr.isatty():
                print(f"\r{nodes} nodes: {name:20s}", end="", file=sys.stderr, flush=True)
            curves.setdefault(name, []).append(utilisation(text, nodes))
            cells.append(f"{curves[name][-1]:.1%} `{text}`")
        lines.append(f"| {8 * nodes} | {TOKENS * 8 * nodes / 2**20:g} M | {' | '.join(cells)} |")
    folder = Path(__file__).parent
    (folder / "scaling.md").write_text("\n".join(lines) + f"\n\n{time.strftime('%Y-%m-%d')}\n")
    print("\n".join(lines))
    draw(curves, folder / "scaling.png")
    return 0


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Draw the figure; nothing without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name, values in curves.items():
        axes.plot([8 * nodes for nodes in NODES], values, marker="o", label=name)
    axes.set(xscale="log", xlabel=f"GPUs ({TOKENS} tokens each)", ylabel="predicted MFU", ylim=(0, None))
    axes.set_xticks([8 * nodes for nodes in NODES], [f"{8 * nodes:,}" for nodes in NODES])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
