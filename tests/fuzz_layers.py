"""Random recurrences and convolutions over random ways to split a sequence, against one process:
``python -m tests.fuzz_layers --cases 500 --seed 0``.

Outputs, final states and the gradients of everything, bytes by closed form. In float32 the error is at most twice that
of one process. Everything about a case follows from its seed: repeat a failure with ``--seed N --cases 1``.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import startrail
from startrail.compile.call import compile_call
from startrail.compile.halo import Halo
from startrail.kernels.convolution import causal_conv1d
from startrail.launch.local import RankError, run_local
from tests.engine.splits import LAYOUTS, PACKINGS, SplitCase, random_split, scan_of
from tests.fuzz import _variants

WORLDS = tuple(range(1, 17))
BATCH = 60  # cases on one set of ranks
SHARED = 5  # seeds in a row with one plan and layout: connecting ranks takes longer than a case
PRODUCT_PLANS = {
    1: ["1x1"],
    2: ["1x2", "2x1", "u2"],
    3: ["1x3", "u3"],
    4: ["1x4", "2x2", "star2", "u2/1x2", "1x2/1x2"],
    6: ["1x2/1x3", "u2/1x3"],
    8: ["1x8", "u2/2x2", "1x2/1x2/1x2", "u2/1x2/2x1"],
    12: ["1x3/1x4"],
    16: ["4x4", "u4/1x4", "1x4/1x4", "1x2/1x2/2x2"],
}
STYLES = ("plain", "plain", "packed", "checkpointed", "recomputed", "on the host", "no gradients")
DECAYS = (0.0, 0.1, 3.0, 60.0)
ROUNDING = 16  # eps that a result of less than FEW numbers may always be off: one process may be lucky with those
FEW = 200
EXACT = {torch.float64: 1e-11, torch.float32: 3e-6}  # allowed in any case, as a part of the largest number


@dataclass(frozen=True)
class LayerCase:
    """``kind``: a recurrence, or conv1d of this ``width``. ``states``: which of the initial and the final ones are
    used. ``style``: "packed" cuts one sequence into documents later, "checkpointed" sends nothing again, "recomputed"
    does, "on the host" keeps saved tensors there."""

    seed: int
    split: SplitCase
    kind: str
    dtype: torch.dtype
    batch: int
    decay: float
    states: str
    style: str
    width: int


def random_case(seed: int, world: int | None = None) -> LayerCase:
    rng, shared = random.Random(seed), random.Random(seed // SHARED)
    world = world or shared.choice(WORLDS)
    plan, layout = str(shared.choice(_variants(world, 3))), shared.choice(LAYOUTS)
    split = random_split(rng, world, rng.choice((40, 250)), plan)
    return LayerCase(
        seed=seed,
        split=split._replace(layout=layout),
        kind=rng.choice(tuple(KINDS)),
        dtype=rng.choice((torch.float64, torch.float32)),
        batch=rng.randint(1, 3),
        decay=rng.choice(DECAYS),
        states=rng.choice(("none", "initial", "final", "both")),
        style=rng.choice(STYLES),
        width=rng.choice((1, 2, 4, 9)),
    )


def product() -> list[LayerCase]:
    """Each kind x plan x layout x packing on each world, with lengths, decays and all else at random."""
    cases = []
    for world, plans in PRODUCT_PLANS.items():
        for plan, layout, kind, packing in itertools.product(plans, LAYOUTS, KINDS, range(PACKINGS)):
            seed = 1_000_000 + len(cases)
            split = random_split(random.Random(seed), world, 60, plan, packing)
            cases.append(replace(random_case(seed), split=split._replace(layout=layout), kind=kind))
    return cases


# --- what each kind takes


def delta_inputs(case: LayerCase, tokens: int, rows: bool = False) -> tuple[list[Tensor], tuple[int, ...]]:
    q, k = torch.randn(2, case.batch, tokens, 2, 5).unbind()
    g = -case.decay * torch.rand(case.batch, tokens, 4, *([5] if rows else []))
    return [q, k, torch.randn(case.batch, tokens, 4, 3), g, 2 * torch.rand(case.batch, tokens, 4)], (4, 5, 3)


def kimi_inputs(case: LayerCase, tokens: int) -> tuple[list[Tensor], tuple[int, ...]]:
    return delta_inputs(case, tokens, rows=True)


def decayed_inputs(case: LayerCase, tokens: int) -> tuple[list[Tensor], tuple[int, ...]]:
    inputs, shape = delta_inputs(case, tokens)
    return inputs[:4], shape


def selective_inputs(case: LayerCase, tokens: int) -> tuple[list[Tensor], tuple[int, ...]]:
    x, b, c = (torch.randn(case.batch, tokens, n) for n in (4, 3, 3))
    return [x, torch.rand_like(x), -case.decay * torch.rand(4, 3), b, c], (4, 3)


def linear_inputs(case: LayerCase, tokens: int) -> tuple[list[Tensor], tuple[int, ...]]:
    a = (-case.decay * torch.rand(case.batch, tokens, 6)).exp()
    return [a, torch.randn(case.batch, tokens, 6)], (6,)


def conv_inputs(case: LayerCase, tokens: int) -> tuple[list[Tensor], tuple[int, ...]]:
    return [torch.randn(case.batch, tokens, 5), torch.randn(5, case.width), torch.randn(5)], ()


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gated_delta_rule": (delta_inputs, dict(normalize=True)),
    "kimi_delta_rule": (kimi_inputs, dict(normalize=True)),
    "decayed_attention": (decayed_inputs, dict(scale=0.7)),
    "selective_scan": (selective_inputs, {}),
    "linear_recurrence": (linear_inputs, {}),
    "conv1d": (conv_inputs, {}),
}


def per_token(case: LayerCase, inputs: list[Tensor], number: int) -> bool:
    """Whether this input, or the initial state after all of them, is sharded."""
    alone = {"selective_scan": (2,), "conv1d": (1, 2)}.get(case.kind, ())
    return number < len(inputs) and number not in alone


# --- one process, and ranks


def alone(case: LayerCase, inputs: list[Tensor], states: Tensor) -> list[Tensor]:
    """The outputs, and the states after documents."""
    outs, after = [], []
    for number, (start, stop) in enumerate(pairwise(case.split.documents)):
        own = [x[:, start:stop] if per_token(case, inputs, n) else x for n, x in enumerate(inputs)]
        if case.kind == "conv1d":
            outs.append(causal_conv1d(own[0].mT, *own[1:], "silu").mT)
            continue
        kernel, options = getattr(startrail, case.kind), KINDS[case.kind][1]
        state = states[:, number : number + 1] if case.states in ("initial", "both") else None
        out, state = kernel(*own, **options).run(state)
        outs.append(out)
        after.append(state)
    return [torch.cat(outs, 1), *([torch.cat(after, 1)] if case.states in ("final", "both") and after else [])]


def on_ranks(case: LayerCase, sequence: startrail.Sequence, inputs: list[Tensor], states: Tensor) -> list[Tensor]:
    if case.kind == "conv1d":
        return [sequence.conv1d(*inputs, "silu", dim=1)]
    given: dict[str, Any] = dict(initial_state=states) if case.states in ("initial", "both") else {}
    final = case.states in ("final", "both")
    options = KINDS[case.kind][1]
    found = sequence.scan(getattr(startrail, case.kind), *inputs, output_final_state=final, **given, **options)
    return list(found) if final else [found]


def promised_bytes(case: LayerCase, sequence: startrail.Sequence, gradients: bool) -> int:
    """What a rank sends, by closed form. A described cluster may decide how states travel."""
    sp = sequence.sp
    split, itemsize = case.split, case.dtype.itemsize
    if case.kind == "conv1d":
        if case.width == 1:
            return 0
        problem: Any = Halo(split.boundaries, 1, "", "", case.width - 1, 5 * case.batch, itemsize)
    else:
        shape = KINDS[case.kind][0](replace(case, batch=1), 1)[1]
        problem = scan_of(split.boundaries, case.kind, case.batch, shape, itemsize)
    call = compile_call(problem, sp._session.settings.split, sp.rank, sequence._layout)
    forward, backward = (sum(call.traffic(pass_)) for pass_ in problem.passes)
    return forward * (1 + (case.style == "recomputed")) + backward * gradients


def _on_host(run: Callable[..., Any], *values: Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return run(*values)


STYLED: dict[str, Callable[..., Any]] = {
    "checkpointed": partial(checkpoint, use_reentrant=False, context_fn=startrail.checkpoint_context),
    "recomputed": partial(checkpoint, use_reentrant=False),
    "on the host": _on_host,
}


def check(case: LayerCase, rank: int, parallels: dict[Any, startrail.SequenceParallel]) -> list[str]:
    torch.manual_seed(case.seed)
    split, documents = case.split, len(case.split.documents) - 1
    inputs, shape = KINDS[case.kind][0](case, split.length)
    states = torch.randn(case.batch, documents, *shape)
    truths = [[x.double().requires_grad_() for x in (*inputs, states)], [x.to(case.dtype) for x in (*inputs, states)]]
    key = split.plan, split.layout
    if key not in parallels:
        parallels[key] = startrail.SequenceParallel(split.plan, layout=split.layout, timeout=120)
    sp = parallels[key]
    documents_later = split.documents if case.style == "packed" else None
    sequence = sp.sequence(split.length, None if documents_later else split.documents, shares=split.shares)
    sequence = sequence.packed(documents_later) if documents_later else sequence
    gradients = case.style != "no gradients"
    results = []
    for *whole, start in truths:
        values = [x.detach().requires_grad_(gradients) for x in (*whole, start)]
        found = alone(case, values[:-1], values[-1])
        results.append((values, found))
    cotangents = [torch.randn(x.shape, dtype=torch.float64) for x in results[0][1]]
    expected, single = ([*found, *_grads(found, values, cotangents, gradients)] for values, found in results)
    local = [
        (sequence.shard(x.to(case.dtype), 1) if per_token(case, inputs, n) else x.to(case.dtype))
        .detach()
        .requires_grad_(gradients)
        for n, x in enumerate((*inputs, states))
    ]
    sp.reset_counters()

    def run(*values: Tensor) -> list[Tensor]:
        return on_ranks(case, sequence, list(values[:-1]), values[-1])

    found = STYLED.get(case.style, lambda run, *values: run(*values))(run, *local)
    own = [sequence.shard(cotangents[0], 1), *(x / sp.world for x in cotangents[1:])]
    grads = _grads(found, local, own, gradients)
    sent, promised = sum(level["bytes"] for level in sp.traffic().values()), promised_bytes(case, sequence, gradients)
    ours = [sequence.unshard(found[0], 1), *found[1:]]
    for n, grad in enumerate(grads):
        ours.append(sequence.unshard(grad, 1) if per_token(case, inputs, n) else _summed(sequence, grad))
    wrong = [] if sent == promised else [f"sent {sent} bytes, promised {promised}"]
    for n, (mine, true, one) in enumerate(zip(ours, expected, single, strict=True)):
        off, alone_off = ((x.double() - true).abs().amax().item() if x.numel() else 0.0 for x in (mine, one))
        allowed = max(2 * alone_off, EXACT[case.dtype] * max(1.0, true.abs().amax().item() if true.numel() else 0.0))
        if not off <= allowed:
            wrong.append(f"result {n} of {len(ours)} is {off:.2e} off, one process {alone_off:.2e}")
        mean, alone_mean, size = (x.double().square().mean().sqrt().item() for x in (mine - true, one - true, true))
        limit = 2 * alone_mean + (ROUNDING if true.numel() < FEW else 1) * torch.finfo(case.dtype).eps * size
        if case.dtype == torch.float32 and true.numel() and not mean <= limit:
            wrong.append(f"result {n} of {len(ours)} is {mean:.2e} off on average, one process {alone_mean:.2e}")
    return [f"seed {case.seed}, rank {rank}: {text}\n    {case}" for text in wrong]


def _grads(found: list[Tensor], values: list[Tensor], cotangents: list[Tensor], wanted: bool) -> list[Tensor]:
    """Those of all inputs, zeros where there is none."""
    if not wanted:
        return []
    given = [x.to(out.dtype) for x, out in zip(cotangents, found, strict=True)]
    grads = torch.autograd.grad(found, values, given, allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(values, grads, strict=True)]


def _summed(sequence: startrail.Sequence, grad: Tensor) -> Tensor:
    return sequence._gather(grad.unsqueeze(0), 0).sum(0)


def run(first_seed: int, count: int, progress: bool = False) -> list[str]:
    return run_cases([random_case(seed) for seed in range(first_seed, first_seed + count)], progress)


def run_cases(cases: list[LayerCase], progress: bool = False) -> list[str]:
    wrong, done = list[str](), 0
    for world in WORLDS:
        mine = [case for case in cases if case.split.world == world]
        for part in (mine[start : start + BATCH] for start in range(0, len(mine), BATCH)):
            wrong += _wrong(part)
            done += len(part)
            if progress:
                print(f"\r{done}/{len(cases)} cases, {len(wrong)} mistakes", end="", flush=True)
    return wrong


def _wrong(cases: list[LayerCase]) -> list[str]:
    def on_rank(rank: int) -> list[str]:
        parallels: dict[Any, startrail.SequenceParallel] = {}
        return [text for case in cases for text in check(case, rank, parallels)]

    try:
        return [text for texts in run_local(on_rank, cases[0].split.world, deadline=900) for text in texts or ()]
    except RankError as error:
        if len(cases) == 1:
            return [f"seed {cases[0].seed}: {cases[0]}\n    {error}"]
        return [text for case in cases for text in _wrong([case])] or [f"{len(cases)} cases together: {error}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = time.monotonic()
    wrong = run(options.seed, options.cases, progress=True)
    print(f"\n{options.cases} cases of layers in {time.monotonic() - start:.0f} s: {len(wrong)} mistakes")
    print("\n".join(wrong[:10]))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
