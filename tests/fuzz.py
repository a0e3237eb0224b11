"""Random plans x shapes x masks against float64: ``make fuzz``, or ``python -m tests.fuzz --cases 500 --seed 0``.

Cases of one world size share a set of forked ranks. Everything about a case follows from its seed, so a failure is
repeated with ``--seed N --cases 1``. One case in ten is run once more with numbers that are not finite, and one in ten
with latents instead of keys and values.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial
from math import lcm

import torch
import torch.distributed as dist
from torch import Tensor

from startrail.diagnostics.exactness import check_cases
from startrail.diagnostics.reference import CALL_STYLES, Case, limiting_dtype, visible_pairs
from startrail.engine.arguments import LatentShapes
from startrail.engine.wire import DTYPES
from startrail.geometry.mask import Mask
from startrail.launch.local import RankError, run_local
from startrail.planner.auto import plan_for_heads
from startrail.planner.cluster import find_cluster
from startrail.schedule.families.base import Heads
from startrail.schedule.families.star import STAR
from startrail.schedule.plan import Plan, plans_for, variants_of
from tests.failed_cases import FAILED_CASES
from tests.helpers import FULL, any_slices, random_slices

WORLDS = (1, 2, 3, 4, 5, 6, 8, 9, 12)
BATCH = 50  # cases on one set of ranks
SHARED = 5  # seeds in a row with one plan, layout and wire: connecting ranks takes longer than a case
DEADLINE = 1800.0  # seconds for a set of ranks
JOBS = 2  # sets of ranks at once: where one computes its truths, the other's ranks run
MOST_PAIRS = 2**22  # of queries and keys in all heads: the dense truths of a few huge cases would take most of the time


def random_case(seed: int) -> Case:
    rng, shared = random.Random(seed), random.Random(seed // SHARED)
    world = shared.choice(WORLDS)
    plans = _variants(world, shared.choice([2, 3]))
    stars = [plan for plan in plans if plan.family is STAR]  # few among so many
    plan = shared.choice(stars if stars and shared.random() < 0.2 else plans)
    plan = replace(plan, groups=shared.choice([1, 1, 1, 2, 3])) if shared.random() < 0.95 else Plan.parse("direct")
    unit = lcm(plan.heads, rng.choice([1, 2, 3]))
    q_heads = unit * rng.choice([1, 2, 4])
    kv_heads = rng.choice([h for h in range(1, q_heads + 1) if q_heads % h == 0])
    batch = plan.groups * rng.choice([1, 2])  # groups can always fall back on the batch
    length = rng.choice([1, 2, rng.randint(3, 40), rng.randint(41, 400), 64 * world])
    while batch * q_heads * length**2 > MOST_PAIRS:
        length //= 2
    documents = None
    if rng.random() < 0.5:
        kind = rng.choice(["some", "some", "ones", "giant"])  # one token each; one giant and many tiny documents
        few = sorted(rng.choices(range(length + 1), k=rng.choice([0, 1, 4, 15])))
        documents = {"some": (0, *few), "ones": range(length), "giant": (0, *range(length * 3 // 4, length))}[kind]
        documents = (*documents, length)
    layer = random_layer(rng, length)
    case = Case(
        plan=str(plan),
        world=world,
        length=length,
        batch=batch,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=rng.choice([1, 8, 16, 33, 64]),
        dtype=rng.choice([torch.float32] * 4 + [torch.bfloat16, torch.float16, torch.float64]),
        wire_dtype=shared.choice([None] * 5 + list(DTYPES)),
        causal=rng.random() < 0.6,
        window=rng.choice([None, None, 1, rng.randint(2, 50), rng.randint(51, 500)]),
        documents=documents,
        layout=shared.choice(["zones", "zones", "zigzag", "contiguous"]),
        scale=rng.choice([None, None, 0.05, 0.7, 1.0]),
        value_dim=rng.choice([None, None, None, 1, 24]),
        sinks=rng.random() < 0.2,
        lse=rng.random() < 0.2,
        softcap=rng.choice([None] * 6 + [0.5, 3.0]),
        seed=seed,
        call_style=rng.choice([style for style in (*CALL_STYLES, "plain") if style != "compiled" or world <= 4]),
        windows=shared.random() < 0.3,
        **layer,
    )
    if case.slices and rng.random() < 0.8:  # most often slices are the whole mask
        case = replace(case, causal=False, window=None, documents=None)
    return replace(case, **random_placement(random.Random(f"{seed} placement"), case))


def random_placement(rng: random.Random, case: Case) -> dict:
    """What not every batch has: ranks of different speed, and documents that another sequence was made with."""
    placement: dict = {}
    if rng.random() < 0.2:
        placement["shares"] = tuple(rng.choice([1.0, 0.5, 0.9, 0.01]) for _ in range(case.world))
    if case.documents and rng.random() < 0.3:
        inner = case.documents[1:-1]
        placement["packed_from"] = (0, *sorted(rng.sample(inner, rng.randint(0, len(inner)))), case.length)
    return placement


def random_layer(rng: random.Random, length: int) -> dict:
    """What not every model has: chunks, blocks, or slices."""
    kind = rng.choice(["plain"] * 5 + ["chunk", "blocks", "slices"])
    if kind == "chunk":
        return dict(chunk=rng.choice([1, rng.randint(2, 40), rng.randint(41, 400)]))
    ends = sorted(rng.sample(range(length + 1), min(length + 1, 2 * rng.randint(1, 3)) // 2 * 2))
    if kind == "blocks":
        return dict(blocks=tuple(zip(ends[::2], ends[1::2], strict=True)))
    if kind == "slices":
        return dict(slices=tuple(rng.choice([random_slices, any_slices])(rng, length)))
    return {}


@cache
def _variants(world: int, max_levels: int) -> list[Plan]:
    return [variant for plan in plans_for(world, max_levels) for variant in variants_of(plan)]


def run(first_seed: int, count: int, progress: bool = False) -> list[str]:
    """Texts of what went wrong, with the seed and the case."""
    return _search(_wrong, [random_case(seed) for seed in range(first_seed, first_seed + count)], progress)


def not_finite(first_seed: int, count: int, progress: bool = False) -> list[str]:
    """The same with NaN and infinities in q, k, v and dout: they come out where they do in one process."""
    cases = [replace(random_case(seed), slices=(), softcap=None) for seed in range(first_seed, first_seed + count)]
    return _search(partial(_compared, _spoilt, _unlike_alone), cases, progress)


def latents(first_seed: int, count: int, progress: bool = False) -> list[str]:
    """The same in float64 with keys and values that travel as latents: out, all gradients and bytes."""
    changes = dict(dtype=torch.float64, wire_dtype=None, softcap=None)
    cases = [replace(random_case(seed), **changes) for seed in range(first_seed, first_seed + count)]
    cases = [replace(case, head_dim=max(case.head_dim, 2)) for case in cases]
    return _search(partial(_compared, _latent, _unlike_expanded), cases, progress)


def _search(check: Callable[[list[Case]], list[str]], cases: list[Case], progress: bool) -> list[str]:
    """What ``check`` finds; it is given cases of one world size, those of one plan together: it is connected once."""
    cases = sorted(cases, key=lambda case: (case.plan, case.layout, case.windows, str(case.wire_dtype)))
    by_world = [[case for case in cases if case.world == world] for world in reversed(WORLDS)]
    parts = [mine[index : index + BATCH] for mine in by_world for index in range(0, len(mine), BATCH)]
    wrong, done, start = [], 0, time.monotonic()
    with ProcessPoolExecutor(JOBS, multiprocessing.get_context("fork")) as pool:
        for part, texts in zip(parts, pool.map(check, parts), strict=True):
            wrong += texts
            done += len(part)
            if progress:
                print("".join(f"\n{text}" for text in texts), end="\n" if texts else "")
                print(f"\r{done}/{len(cases)} cases, {len(wrong)} wrong, {time.monotonic() - start:.0f} s", end="")
                sys.stdout.flush()
    if progress:
        print()
    return wrong


def _wrong(cases: list[Case]) -> list[str]:
    try:
        reports = check_cases(cases, DEADLINE)
    except RankError as error:
        return _one_by_one(_wrong, cases, error)
    return [_found(case, text) for case, report in zip(cases, reports, strict=True) for text in report.verdict()]


def _one_by_one(check: Callable[[list[Case]], list[str]], cases: list[Case], error: RankError) -> list[str]:
    """After ranks have died: whose fault it was."""
    if len(cases) == 1:
        return [_found(cases[0], str(error))]
    alone = [text for case in cases for text in check([case])]
    return alone or [f"seeds {', '.join(str(case.seed) for case in cases)} together, none of them alone:\n    {error}"]


def _found(case: Case, text: str) -> str:
    return f"seed {case.seed}: {case}\n    {text}"


# --- numbers that are not finite

Truth = dict[str, Tensor]


def _compared(make: Callable[[Case], tuple], unlike: Callable[..., list[str]], cases: list[Case]) -> list[str]:
    """What ``unlike`` finds on any rank, given a case and what ``make`` makes of it."""
    torch.set_num_threads(1)
    data = [make(case) for case in cases]

    def on_rank(rank: int) -> list[str]:
        pairs = zip(cases, data, strict=True)
        return [_found(case, f"rank {rank}: {text}") for case, given in pairs for text in unlike(case, *given)]

    try:
        return [text for texts in run_local(on_rank, cases[0].world, DEADLINE) for text in texts or ()]
    except RankError as error:
        return _one_by_one(partial(_compared, make, unlike), cases, error)


def _spoilt(case: Case) -> tuple[list[Tensor], Truth, Truth]:
    """q, k, v, dout with a few bad numbers, and what one process makes of them at least and at most.

    A key that a query does not see has weight zero, and zero times infinity is NaN: whether that is added up depends on
    how a kernel cuts the mask. So there are two truths in plain math: one that never touches such pairs, and one that
    touches all. Ours must not be finite where the first is not, and must be finite where the second is.
    """
    rng, generator = random.Random(case.seed), torch.Generator().manual_seed(case.seed)
    dim = case.head_dim if case.value_dim is None else case.value_dim
    shapes = [(case.q_heads, case.head_dim), (case.kv_heads, case.head_dim), (case.kv_heads, dim), (case.q_heads, dim)]
    dtype = limiting_dtype(case)
    tensors = [torch.randn(case.batch, h, case.length, d, generator=generator).to(dtype) for h, d in shapes]
    for x in rng.sample(tensors, rng.choice([1, 1, 2])):
        for _ in range(rng.choice([1, 1, 2])):
            place = tuple(rng.randrange(size) for size in x.shape)
            x[place] = rng.choice([float("nan"), float("inf"), float("-inf")])
    seen, scale = visible_pairs(case), case.head_dim**-0.5 if case.scale is None else case.scale
    wide = [x.double() for x in tensors]
    truths = (_plain_math(*wide, scale, seen, touched) for touched in (seen, torch.ones_like(seen)))
    return [x.to(case.dtype) for x in tensors], *truths


def _plain_math(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, scale: float, seen: Tensor, touched: Tensor) -> Truth:
    """out, dq, dk, dv, with NaN for everything that is not finite."""
    kv_heads = k.shape[1]
    k, v = (x.repeat_interleave(q.shape[1] // kv_heads, 1) for x in (k, v))
    weights = (q @ k.mT * scale).masked_fill(~seen, float("-inf")).softmax(-1).where(touched, 0.0)
    dweights = (dout @ v.mT).where(touched, 0.0)
    delta = (weights * dweights).sum(-1, keepdim=True)
    dscores = (weights * (dweights - delta) * scale).where(touched, 0.0)
    dk, dv = _product(dscores.mT, q, touched.mT), _product(weights.mT, dout, touched.mT)
    dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in (dk, dv))
    return {"out": _product(weights, v, touched), "dq": _product(dscores, k, touched), "dk": dk, "dv": dv}


def _product(weights: Tensor, x: Tensor, touched: Tensor) -> Tensor:
    """weights @ x over the pairs that are touched, NaN where one of them is not finite."""
    bad = (~weights.isfinite()).any(-1, keepdim=True) | (touched.double() @ (~x.isfinite()).double() > 0)
    clean = (each.nan_to_num(0.0, 0.0, 0.0) for each in (weights, x))
    return torch.matmul(*clean).masked_fill(bad, float("nan"))


def _unlike_alone(case: Case, tensors: list[Tensor], least: Truth, most: Truth) -> list[str]:
    sequence = case.sequence(case.parallel())
    q, k, v, dout = (sequence.shard(x, 2) for x in tensors)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = sequence.attention(*inputs, causal=case.causal, window=case.window, chunk=case.chunk, scale=case.scale)
    grads = torch.autograd.grad(out, inputs, dout)
    wrong = []
    if tensors[2].isfinite().all() and out.isinf().any():
        wrong.append("out is infinite, not NaN, though all values are finite")
    for name, mine in zip(least, (out, *grads), strict=True):
        if not mine.numel():
            continue
        low, high = (sequence.shard(truth[name], 2) for truth in (least, most))
        finite, should_be = mine.isfinite(), low.isfinite()
        lost, gained = (finite & ~should_be).sum().item(), (~finite & high.isfinite()).sum().item()
        if lost or gained:
            wrong.append(f"{name}: {lost} numbers are finite that should not be, {gained} are not that should be")
        allowed = max(1e-4, 16 * torch.finfo(limiting_dtype(case)).eps) * (1 + low.nan_to_num().abs().max())
        off = (mine.double() - low).abs()[finite & should_be]
        if (off > allowed).any():
            wrong.append(f"{name}: {off.max().item():.2e} off, allowed {allowed:.2e}")
    return wrong


# --- latents

LATENT_RANK = 5


def _latent(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """q, latent, k_rope, w_k, w_v and a cotangent; out and the gradients of one process."""
    generator, heads = torch.Generator().manual_seed(case.seed), case.q_heads
    rope, value = case.head_dim // 3, case.value_dim or case.head_dim  # of the narrowest heads, no rotary part
    shapes = [(case.batch, heads, case.length, case.head_dim), (case.batch, case.length, LATENT_RANK)]
    shapes += [(case.batch, case.length, rope), (heads, case.head_dim - rope, LATENT_RANK), (heads, value, LATENT_RANK)]
    own = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    q, latent, k_rope, w_k, w_v = own
    dout = torch.randn(case.batch, heads, case.length, value, generator=generator, dtype=torch.float64)
    k = torch.einsum("btr,hdr->bhtd", latent, w_k)
    k = torch.cat((k, k_rope.unsqueeze(1).expand(-1, heads, -1, -1)), 3)
    v = torch.einsum("btr,hdr->bhtd", latent, w_v)
    seen, scale = visible_pairs(case), case.head_dim**-0.5 if case.scale is None else case.scale
    with torch.no_grad():
        truth = _plain_math(q, k, v, dout, scale, seen, seen)
    grads = torch.autograd.grad((k, v), own[1:], (truth["dk"], truth["dv"]))
    return [*(x.detach() for x in own), dout], [truth["out"], truth["dq"], *grads]


def _unlike_expanded(case: Case, tensors: list[Tensor], truth: list[Tensor]) -> list[str]:
    sp = case.parallel()
    sequence = case.sequence(sp)
    dims = (2, 2, 1, 1, None, None)  # of the tokens of out, q, latent, k_rope, w_k, w_v

    def shard(x: Tensor, dim: int | None) -> Tensor:
        return x.clone() if dim is None else sequence.shard(x, dim)

    inputs = [shard(x, dim).requires_grad_() for x, dim in zip(tensors[:5], dims[1:], strict=True)]
    options = dict(mask=Mask(case.causal, case.window, chunk=case.chunk, steps=case.mask.steps), scale=case.scale)
    out = sequence.latent_attention(*inputs, **options)
    grads = list(torch.autograd.grad(out, inputs, shard(tensors[5], 2)))
    for weight in grads[3:]:  # this rank's share
        dist.all_reduce(weight)
    wrong, real = [], sequence.shard(torch.ones(case.length), 0)
    for name, dim, mine, whole in zip(("out", *LatentShapes._fields), dims, (out, *grads), truth, strict=False):
        off = (mine - shard(whole, dim)).abs()
        off = off if dim is None else off.movedim(dim, -1) * real  # not padding
        if off.numel() and not off.max() <= 1e-9 * (1 + whole.abs().max()):  # a rank may hold no token
            wrong.append(f"{name}: {off.max().item():.2e} off")
    passes = sequence.promised_traffic(*inputs, mask=options["mask"]).values()
    promised = {name: sum(levels.get(name, 0) for levels in passes) for levels in passes for name in levels}
    sent = {name: lane["bytes"] for name, lane in sp.traffic().items() if lane["bytes"]}
    return wrong if sent == promised else [*wrong, f"sent {sent}, the closed form gives {promised}"]


def test_a_smaller_run():
    assert not run(first_seed=10_000, count=60 if FULL else 20)


def test_cases_that_failed_before():
    assert not _search(_wrong, FAILED_CASES[:: 1 if FULL else 3], progress=False)


def test_numbers_that_are_not_finite():
    assert not not_finite(first_seed=20_000, count=20 if FULL else 10)


def test_latents():
    assert not latents(first_seed=30_000, count=30 if FULL else 10)


def test_random_cases_cover_every_feature():
    """The search is no use if it never meets the hard parts."""
    cases = [random_case(seed) for seed in range(500)]
    plans = [Plan.parse(case.plan) for case in cases]
    assert {case.world for case in cases} == set(WORLDS)
    assert all(any(test(p) for p in plans) for test in (
        lambda p: p.family is STAR, lambda p: len(p.shard_levels) > 1, lambda p: p.groups > 1,
        lambda p: p.heads > 1 and p.shard_levels, lambda p: len(p.head_levels) > 1,
        lambda p: isinstance(p.levels[0], Heads) and p.shard_levels,
        lambda p: any(isinstance(level, Heads) for level in p.levels[1:-1]),
        lambda p: isinstance(p.levels[0], Heads) and p.family is STAR,
        lambda p: p.keep == "all", lambda p: p.keep == "queries", lambda p: p.backward == "queries",
    ))  # fmt: skip
    assert any(case.documents and case.window and case.causal for case in cases)
    slices = [case for case in cases if case.slices and not (case.causal or case.window or case.documents)]
    assert sum(not visible_pairs(case).any(1).all() for case in slices) > 15, "rows that see nothing"
    for name in (
        "chunk",
        "blocks",
        "slices",
        "value_dim",
        "sinks",
        "lse",
        "softcap",
        "windows",
        "shares",
        "packed_from",
    ):
        assert sum(bool(getattr(case, name)) for case in cases) > 15, name
    assert all(sum(case.call_style == style for case in cases) > 15 for style in CALL_STYLES)
    assert {case.call_style for case in cases} == set(CALL_STYLES)
    assert {case.wire_dtype for case in cases} == {None, *DTYPES}
    assert any(len(p.levels) == 3 and p.size == 12 for p in plans if p.family is not STAR)
    assert plan_for_heads(find_cluster("a100-4x8@2x4"), 8, 2).plan.size == 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start, tenth = time.monotonic(), -(-options.cases // 10)
    wrong = run(options.seed, options.cases, progress=True)
    wrong += [text for more in (not_finite, latents) for text in more(options.seed, tenth, progress=True)]
    found = f"{len(wrong)} mistakes" if wrong else "nothing found"
    print(f"{options.cases} cases, {tenth} of them with numbers that are not finite, {tenth} with latents, in", end=" ")
    print(f"{time.monotonic() - start:.0f} s: {found}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
