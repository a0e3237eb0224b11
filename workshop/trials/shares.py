"""``python -m workshop.trials.shares``: training on four emulated nodes, one of which computes at half speed, with
equal and with measured shares. Writes shares.md beside it.

Computing is paced: attention kernels and linear layers run, and then sleep until as much time has passed as a device of
a given speed takes, on the slow node one of half that speed. So the ranks do not compete for this machine's cores, as
long as these are faster than all emulated devices together. The measurement that decides shares is paced in the same
way. Losses are compared with one process.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from startrail.kernels.base import Kernel
from startrail.losses import chunked_cross_entropy, global_mean, sum_gradients
from startrail.parallel import SequenceParallel
from startrail.training.models.configs import GPTConfig
from startrail.training.models.gpt import GPT
from workshop.lab.cluster import Cluster

CONFIG = GPTConfig(vocab=256, width=128, layers=2, heads=4, kv_heads=4, hidden=384)
LENGTH = 2048
NODES, SLOW = 4, 3
SPEED = 1e9  # FLOP/s of a node


def paced(function: Callable[..., Any], flops: Callable[..., float], speed: float) -> Callable[..., Any]:
    """``function``, which takes as long as a device of this speed would."""

    def run(*arguments: Any, **options: Any) -> Any:
        end = time.perf_counter() + flops(*arguments) / speed
        result = function(*arguments, **options)
        time.sleep(max(0.0, end - time.perf_counter()))
        return result

    return run


def pace(speed: float) -> None:
    """Everything that computes for long, and what `planner.live.measure` times."""

    def forward(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, visible: Any, *rest: Any) -> float:
        return 4 * sum(tile.area for tile in visible) * q[:, :, 0].numel()

    def backward(kernel: Kernel, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, visible: Any,
                 *rest: Any) -> float:  # fmt: skip
        return 10 * sum(tile.area for tile in visible) * q[:, :, 0].numel()

    Kernel.forward = paced(Kernel.forward, forward, speed)  # type: ignore[method-assign]
    Kernel.backward = paced(Kernel.backward, backward, speed)  # type: ignore[method-assign]
    linear = lambda layer, x: 6 * x.numel() * layer.out_features  # noqa: E731, with its backward pass
    nn.Linear.forward = paced(nn.Linear.forward, linear, speed)  # type: ignore[method-assign]
    product = lambda a, b: 2 * a.numel() * b.shape[-1]  # noqa: E731
    Tensor.__matmul__ = paced(Tensor.__matmul__, product, speed)  # type: ignore[method-assign]


def train(sp: SequenceParallel, steps: int) -> tuple[list[float], list[float]]:
    """The losses and the seconds of all steps."""
    torch.manual_seed(0)
    model, losses, seconds = GPT(CONFIG), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number in range(steps):
        start = time.perf_counter()
        ids = torch.randint(CONFIG.vocab, (1, LENGTH), generator=torch.Generator().manual_seed(number))
        sequence = sp.sequence(LENGTH)
        hidden = model(sequence.shard(ids, 1), sequence.positions(), partial(sequence.attention, causal=True))
        labels = sequence.shard_labels(ids)
        loss_sum, count = chunked_cross_entropy(hidden, model.output_weight, labels, 1024)
        loss = global_mean(loss_sum, count, sp.group)
        optimizer.zero_grad()
        loss.backward()
        sum_gradients(model.parameters(), sp.group)
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    return losses, seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4, help="with each; the first one connects and is not counted")
    parser.add_argument("--plan", default="1x4")
    options = parser.parse_args()

    def on_rank(rank: int) -> tuple[Any, Any, Any]:
        torch.set_num_threads(1)
        pace(SPEED / 2 if rank == SLOW else SPEED)
        measured = SequenceParallel(options.plan, shares="measured")
        equal = SequenceParallel(options.plan)
        return measured.shares, train(equal, options.steps), train(measured, options.steps)

    truth, _ = train(SequenceParallel("1x1"), options.steps)
    with Cluster(nodes=NODES, ranks_per_node=1, link="200mbit") as cluster:
        (shares, (losses, seconds), (shared_losses, shared_seconds)), *_ = cluster.call(on_rank, deadline=600)
    before, after = (statistics.median(each[1:]) for each in (seconds, shared_seconds))
    off = max(abs(ours / one - 1) for mine in (losses, shared_losses) for ours, one in zip(mine, truth, strict=True))
    lines = ["# A node at half speed", "", f"{NODES} nodes of one rank, plan {options.plan}, {LENGTH:,} tokens, node "]
    lines[-1] += f"{SLOW} computes at half speed; median of {options.steps - 1} training steps."
    lines += [""]
    lines += ["| shares | step |", "| --- | --- |", f"| equal | {before:.2f} s |"]
    lines += [f"| measured: {', '.join(f'{share:g}' for share in shares)} | {after:.2f} s, {before / after:.2f}x |", ""]
    lines += [f"Losses of both differ from those of one process by at most {off:.1e}.", "", time.strftime("%Y-%m-%d")]
    text = "\n".join(lines) + "\n"
    Path(__file__).with_suffix(".md").write_text(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
