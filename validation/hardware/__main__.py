"""``make validate-hardware``: predictions against figures published for real GPUs; a table, a plot and a verdict.

It also records the errors that the planner quotes as intervals, of figures that may be fitted to. It fits nothing.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from validation.errors import record
from validation.hardware.attention import AttentionCase, Ratio, ratios, read_cases
from validation.hardware.fit import FITTING, fitting_cases
from validation.hardware.latents import LatentRatios, read_latents
from validation.hardware.training import TrainingCase, read_training

HERE = Path(__file__).parent
JUDGING = HERE / "judging"
SIDES, RATIO, RING = 0.90, 0.10, 0.12  # targets: share on the right side, median error of ratios, ring on H100
RATES = {"fitting": (0.10, 0.25), "judging": (0.15, 0.35)}  # median and worst error of attention rates
STEPS, MEMORY, LATENTS = 0.10, 0.15, 0.15
NOT_PREDICTED = """
Not predicted: MagiAttention's own schedule and Megatron's hybrid context parallelism, which are not among our plans
and place documents by rules that the source does not state. Also not predicted: diffusers' inference steps, in which
attention is a small part, on GPUs (L20, 4090) whose attention kernels have no published speeds.
"""
REMARKS = """
What differs, and why:

- yunchang's Ring Attention is 15 to 19 % slower than predicted with as many KV heads as query heads; its GQA rows are
  within 2 %. Even transfers without any overlap would not explain the difference.
- Striped rings are predicted 3 to 7 % too fast.
- Packed documents: the publication's documents are not known, so others are drawn from its distribution (5 sequences;
  rates vary threefold between them). Ulysses and USP agree; the ring and all-gather, which cut every document over all
  GPUs, are predicted too fast. The time that a kernel's idle programs take was chosen by hand on these rows (without
  those for judging).
- USP and LoongTrain (and Ulysses, on 8 GPUs) are the same plan to the planner. With packed documents, their figures
  differ by up to 58 %; such pairs do not count as ratios between plans.
- Training steps are predicted 4 to 13 % too fast where attention dominates: long runs throttle, and hosts add time.
  (TRL later measured 380 instead of 364 s for its 8B model.) The Ulysses baseline of FPDT is faster than predicted: at
  512K tokens a causal kernel reaches the speed of a full one.
- EasyContext's step of 128K tokens is 33 % slower than its own steps of 64K, 512K and 700K tokens suggest; the source
  warns of variance. It is counted.
- Unexplained, and not counted: torchtitan's CP 4 and 8, which are 1.4 to 1.5 times as slow as predicted at the speed of
  its GPUs without context parallelism (CP 1 and 2 agree), and prime-rl's rings, 28 to 49 % slower than Ulysses on the
  same GPUs, where 3 to 8 % are predicted.
- prime-rl cannot have run all 46 layers: they would need 25 PFLOP/s from GPUs that have 8. Its row without context
  parallelism has the speed of 6 layers, and is therefore not counted.
- NeMo also counts the FLOPs of masked pairs, and Transformer Engine chooses cuDNN on H100. With the speeds published
  for cuDNN a few months later, its steps are predicted 12 to 36 % too fast; with those of FlashAttention 2, 8 to 13 %
  too slow.
- Steps for which something is inferred are part of the median of all steps, but not of the intervals.
- No training step or peak of memory is held out: how each was run, and the memory of gathered keys and of logits, were
  chosen with these figures in view. The judging figures were printed while the model was developed.
"""


def attention_lines(cases: list[AttentionCase]) -> list[str]:
    lines = ["| published by | plan | who runs it | GPUs | pass | published | predicted | off |", "|" + " --- |" * 8]
    for case in cases:
        predicted = case.predicted()
        figures = f"{case.published:.4g} {case.unit} | {predicted:.4g} | {predicted / case.published - 1:+.1%}"
        lines.append(
            f"| {case.group} | `{case.plan}` | {case.engine} | {case.cluster.world} | {case.passes} | {figures} |"
        )
    return lines


def ratio_lines(found: list[Ratio]) -> list[str]:
    lines = ["| published by | GPUs | pass | faster? | than | published | predicted | off |", "|" + " --- |" * 8]
    for ratio in found:
        if ratio.counts:
            one, other = ratio.one, ratio.other
            wrong = "" if ratio.right_side else " (wrong side)"
            figures = f"{ratio.published:.3f} | {ratio.predicted:.3f}{wrong} | {ratio.off:+.1%}"
            names = f"`{one.plan}` {one.engine} | `{other.plan}` {other.engine}"
            lines.append(f"| {one.group} | {one.cluster.world} | {one.passes} | {names} | {figures} |")
    return lines


def training_lines(cases: list[TrainingCase]) -> list[str]:
    lines = ["| step | plan | published | predicted | speed off | memory | predicted | off | |", "|" + " --- |" * 9]
    for case in cases:
        memory = " | | "
        if case.memory is not None:
            used = case.predicted_memory
            memory = f"{case.memory / 1e9:.1f} GB | {used / 1e9:.1f} GB | {used / case.memory - 1:+.1%}"
        seconds = f"{case.published:.4g} s | {case.step.seconds:.4g} s | {case.off:+.1%}"
        note = case.not_counted or (f"inferred: {case.inferred}" if case.inferred else "")
        lines.append(f"| {case.name} | `{case.plan}` | {seconds} | {memory} | {note} |")
    return lines


def judge_attention(name: str, cases: list[AttentionCase], found: list[Ratio]) -> list[tuple[str, bool]]:
    errors = [abs(case.predicted() / case.published - 1) for case in cases]
    sides = [ratio.right_side for ratio in found if ratio.counts]
    median, worst = RATES[name]
    middle = statistics.median(abs(ratio.off) for ratio in found)
    right = sum(sides) / len(sides)
    return [
        (f"{name}: faster plan predicted in {sum(sides)} of {len(sides)} pairs (at least {SIDES:.0%})", right >= SIDES),
        (f"{name}: median error of {len(found)} ratios {middle:.1%} (at most {RATIO:.0%})", middle <= RATIO),
        (
            f"{name}: median error of {len(errors)} attention rates {statistics.median(errors):.1%} (at most "
            f"{median:.0%}), worst {max(errors):.1%} (at most {worst:.0%})",
            statistics.median(errors) <= median and max(errors) <= worst,
        ),
    ]


def judge_rest(cases: list[AttentionCase], steps: list[TrainingCase]) -> list[tuple[str, bool]]:
    rings = [case for case in cases if case.plan == f"1x{case.cluster.world}" and case.group.startswith("Magi")]
    ring = max(abs(case.predicted() / case.published - 1) for case in rings)
    stated = [abs(case.off) for case in steps if not (case.inferred or case.not_counted)]
    memory = [abs(case.predicted_memory / case.memory - 1) for case in steps if case.memory is not None]
    return [
        (f"ring on 8 to 64 H100: worst error {ring:.1%} (at most {RING:.0%})", ring <= RING),
        (
            f"median error of {len(stated)} training steps (TRL, EasyContext, Automodel, FPDT) "
            f"{statistics.median(stated):.1%} (at most {STEPS:.0%})",
            statistics.median(stated) <= STEPS,
        ),
        (
            f"worst error of {len(memory)} peaks of memory {max(memory):.1%} (at most {MEMORY:.0%})",
            max(memory) <= MEMORY,
        ),
    ]


def judge_latents(found: LatentRatios) -> list[tuple[str, bool]]:
    text = f"worst error of two ratios between latents and expanded keys (pith-train) {found.worst:.1%}"
    return [(f"{text} (at most {LATENTS:.0%})", found.worst <= LATENTS)]


def other_medians(
    packed: list[AttentionCase], judged_packed: list[AttentionCase], steps: list[TrainingCase]
) -> Iterator[str]:
    for name, found in (("packed documents", packed), ("packed documents for judging", judged_packed)):
        errors = [abs(case.predicted() / case.published - 1) for case in found]
        middle = statistics.median(errors)
        yield f"median error of {len(errors)} rates with {name} {middle:.1%}, worst {max(errors):.1%}"
    counted = [abs(case.off) for case in steps if not case.not_counted]
    yield f"median error of all {len(counted)} training steps that are counted {statistics.median(counted):.1%}"


def scatter(path: Path, attention: dict[str, list[AttentionCase]], steps: list[TrainingCase]) -> None:
    """Predicted over published seconds; nothing without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 5))
    for marker, (label, found) in zip("o^v<", attention.items(), strict=True):
        xs = [case.seconds for case in found]
        ys = [case.predicted_seconds() / x for case, x in zip(found, xs, strict=True)]
        axes.scatter(xs, ys, s=16, marker=marker, label=label)
    for label, marker, listed in (("training steps", "s", False), ("training steps, not counted", "x", True)):
        found_steps = [case for case in steps if bool(case.not_counted) == listed]
        ys = [case.step.seconds / case.published for case in found_steps]
        axes.scatter([case.published for case in found_steps], ys, s=20, marker=marker, label=label)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.axhspan(0.9, 1.1, color="gray", alpha=0.15)
    axes.set(xscale="log", xlabel="published seconds", ylabel="predicted / published", ylim=(0.4, 1.6))
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    cases, judged = fitting_cases(), list(read_cases(JUDGING / "attention.toml"))
    packed, judged_packed = (list(read_cases(folder / "packed.toml")) for folder in (FITTING, JUDGING))
    steps = list(read_training(FITTING / "training.toml"))
    between = ratios([*cases, *packed])
    judged_between = ratios([*cases, *packed, *judged, *judged_packed], of=[*judged, *judged_packed])
    verdict = judge_attention("fitting", cases, between) + judge_attention("judging", judged, judged_between)
    latents = read_latents(FITTING / "latents.toml")
    verdict += judge_rest(cases, steps) + judge_latents(latents)
    met = all(fine for _, fine in verdict)
    record("attention", [case.predicted() / case.published - 1 for case in cases])
    record("step", [case.off for case in steps if not (case.inferred or case.not_counted)])
    text = [
        "# Predictions against figures published for real GPUs",
        "",
        f"{time.strftime('%Y-%m-%d')}. Others measured; ",
    ]
    text[-1] += "nothing was run on a GPU here. `fitting/` and `judging/` name every source."
    text += ["", *(f"- {line}{'' if fine else ': NOT met'}" for line, fine in verdict)]
    text += [
        f"- {'all targets met' if met else 'NOT all targets met'}",
        f"- without a target: {'; '.join(other_medians(packed, judged_packed, steps))}",
        *NOT_PREDICTED.splitlines(),
        *REMARKS.splitlines(),
    ]
    text += ["", "![Predicted over published](scatter.png)", ""]
    text += ["## Ratios between plans on the same hardware that differ by more than 5 %", "", *ratio_lines(between)]
    text += ["", "For judging only:", "", *ratio_lines(judged_between), "", "## Attention", "", *attention_lines(cases)]
    text += ["", "For judging only:", "", *attention_lines(judged), "", "## Packed documents", ""]
    text += [*attention_lines(packed), "", "For judging only:", "", *attention_lines(judged_packed), ""]
    text += ["## Training steps", "", *training_lines(steps), "", "## Latents against expanded keys", ""]
    inferred = f"{latents.bandwidth * 8 / 1e9:.0f} Gbit/s per GPU between nodes, {latents.rest * 1e3:.0f} ms"
    text += [f"{latents.source}: whole training steps. Inferred from its rows with expanded keys, because it states"]
    text += [f"neither: {inferred} per layer besides attention.", "", *latents.lines()]
    (HERE / "results.md").write_text("\n".join(text) + "\n")
    attention = {"attention, fitting": cases, "attention, judging": judged}
    attention |= {"packed documents, fitting": packed, "packed documents, judging": judged_packed}
    scatter(HERE / "scatter.png", attention, steps)
    print("\n".join(f"{'met   ' if fine else 'NOT MET'} {line}" for line, fine in verdict))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
