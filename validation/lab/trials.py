"""The trials: some to fit the lab's figures on, and others, on other machines, to predict.

Ring Attention communicates 4 to 24 times as long as it computes. Two cores that also compute cannot emulate links
faster than about 400 Mbit/s, or 2 Gbit/s over all nodes: the trial would measure the emulation. A window or documents
leave little to compute, so there the links are slower: Ring Attention would communicate 16 or 64 times as long.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from startrail.bench.yardstick import Workload
from startrail.geometry.distributions import document_lengths
from workshop.trials.cases import Contender, Trial

MHA = Workload(length=960, q_heads=16, kv_heads=16, head_dim=32, causal=True, batch=4)
FULL = replace(MHA, length=768, causal=False)
GQA = replace(MHA, length=1280, kv_heads=2)
GQA_FULL = replace(FULL, length=1024, kv_heads=2)
WINDOW = replace(MHA, length=1920, window=48)
LENGTHS = document_lengths("pretraining", 1920, seed=1, scale=0.01)  # the longest possible one just fits
PACKED = replace(MHA, length=1920, documents=(0, *accumulate(LENGTHS)))

# Seconds of compute alone on the machine that lab.toml describes, by work and ranks: the planner chooses before any
# measurement and must assume the rate of the links.
ALONE = {(MHA, 8): 0.12, (FULL, 8): 0.07}
ALONE |= {(MHA, 16): 0.16, (FULL, 16): 0.09, (GQA, 16): 0.19, (GQA_FULL, 16): 0.18}
ALONE |= {(MHA, 32): 0.21, (FULL, 32): 0.12, (GQA_FULL, 32): 0.20}


def trial(work: Workload, pressure: float, plans: str, slow_node: bool = False) -> Trial:
    """The links' rate depends on ring, whether it is a contender or not."""
    contenders = tuple(Contender(text, "heads", plan=text) for text in plans.split())
    return Trial(work, contenders, pressure, repeats=5, seconds=32.0, slow_node=slow_node, at_least=2)


# Machines of 8 ranks, for which there are no predictions.
CALIBRATION = {"2x4": [trial(MHA, 8.0, "1x8 u8 2x1/u4 u2/1x4"), trial(FULL, 4.0, "1x8 u8 1x2/2x2 u2/2x2,groups=2")]}

PREDICTED = {
    "2x8": [
        trial(MHA, 16.0, "1x16 star2 1x2/u8 u2/u8 u2/u4/1x2,keep=all,groups=2"),
        trial(GQA_FULL, 4.0, "1x16 1x2/u8 1x2/2x4 u2/u8"),
    ],
    "4x4": [
        trial(FULL, 8.0, "1x16 star4 1x4/u4 2x2/u4,keep=all u4/1x4,groups=2"),
        trial(GQA, 4.0, "1x16 1x4/u4 2x2/u4 u4/2x2"),
        trial(MHA, 8.0, "1x16 1x4/u4 2x2/u4,keep=all u4/u4"),
        trial(WINDOW, 64.0, "1x4/1x4 u4/1x4"),
        trial(PACKED, 16.0, "1x4/1x4 u4/u4"),
    ],
    "4x8": [
        trial(MHA, 8.0, "1x32 star4 1x4/u8 2x2/u8 u4/u2/1x4,keep=all,groups=2"),
        trial(FULL, 8.0, "1x4/u8 2x2/u8,keep=all u4/u2/1x4,keep=all,groups=2 u4/2x4"),
        trial(WINDOW, 64.0, "1x4/1x8 u4/2x4"),
        trial(PACKED, 16.0, "1x4/u8 u4/u2/1x4"),
        trial(FULL, 8.0, "star4 2x2/u8 u4/u2/1x4,keep=all,groups=2", slow_node=True),
    ],
    "8x4": [
        trial(MHA, 16.0, "1x8/u4 2x4/u4,keep=all u8/1x4,keep=all,groups=2 u8/u2/1x2"),
        trial(GQA_FULL, 4.0, "1x8/u4 2x4/u4 u8/2x2"),
    ],
    "16x2": [
        trial(MHA, 16.0, "1x16/u2 4x4/u2,keep=all u16/1x2"),
        trial(FULL, 24.0, "1x16/u2 4x4/u2,keep=all u16/1x2,keep=all,groups=2"),
    ],
}
QUICK = {"2x4": CALIBRATION["2x4"][:1], "4x4": [PREDICTED["4x4"][0], PREDICTED["4x4"][-1]]}
