"""Random modules made of common parts are attached or refused by name, never silently different."""

from __future__ import annotations

import random
import weakref
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import startrail
from startrail._compat import tree_leaves, unobserved
from startrail.integrations.modules import attach
from startrail.launch.local import run_local
from tests.helpers import FULL, error_of
from tests.integrations import odd_modules as odd
from tests.integrations.odd_modules import WIDTH, OddModel
from tests.integrations.plain_modules import Block, Stack

SEEDS = 500 if FULL else 40
PLAIN = dict(
    layer="ours", attention="plain", causal=False, mlp="plain", norm="layer", change="scaled", keeps="nothing",
    drop=0.0, post_norm=False, rate=0.0, depth=2, flow="loop", pool="tokens", hook="none", token=False,
    root_dropout=0.0, scale=False,
)  # fmt: skip
Call = tuple[bool, int]  # training or not, and the number of tokens
CALLS: tuple[list[Call], ...] = (
    [(True, 18)], [(True, 40)], [(True, 21), (True, 130)], [(False, 24), (True, 24)], [(True, 130), (True, 33)],
)  # fmt: skip


class Case(NamedTuple):
    parts: dict[str, Any]
    calls: list[Call]

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return OddModel(self.parts).double()


def random_case(seed: int) -> Case:
    """Common parts, and up to two odd ones."""
    chance = random.Random(seed)
    parts = dict(
        layer="torch" if chance.random() < 0.1 else "ours",
        attention=chance.choice(odd.ATTENTION), mlp=chance.choice(list(odd.MLPS)), norm=chance.choice(list(odd.NORMS)),
        change=chance.choice(odd.PER_TOKEN), keeps=chance.choice(odd.KEEPS), flow=chance.choice(odd.FLOWS),
        pool=chance.choice(list(odd.POOLS)), hook=chance.choice(list(odd.HOOKS)), causal=chance.random() < 0.5,
        drop=chance.choice((0.0, 0.0, 0.3)), post_norm=chance.random() < 0.3, rate=0.0, depth=chance.choice((1, 2, 3)),
        token=chance.random() < 0.3, root_dropout=chance.choice((0.0, 0.2)), scale=chance.random() < 0.3,
    )  # fmt: skip
    odd_ones = dict(
        attention=odd.ODD_ATTENTION, mlp=list(odd.ODD_MLPS), norm=list(odd.ODD_NORMS), keeps=odd.ODD_KEEPS,
        flow=odd.ODD_FLOWS, hook=list(odd.ODD_HOOKS), rate=(0.2,),
        change=[name for name in odd.CHANGES if name not in odd.PER_TOKEN],
    )  # fmt: skip
    for name in chance.sample(sorted(odd_ones), chance.choice((0, 0, 0, 1, 1, 1, 2))):
        parts[name] = chance.choice(odd_ones[name])
    return Case(parts, list(chance.choice(CALLS)))


class Step(NamedTuple):
    results: list[Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def run_call(model: Any, index: int, call: Call, sp: Any = None) -> Step:
    """One call, and in training its backward pass. What the model keeps in attributes and lists is in the loss."""
    training, length = call
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(2, length, WIDTH, generator=generator, dtype=torch.float64)
    torch.manual_seed(index)
    model.train(training)
    model.zero_grad()
    model.noted.clear()
    with torch.set_grad_enabled(training):
        results = [x for x in tree_leaves(model(x)) if isinstance(x, Tensor)]
    kept = [vars(module).get("aux") for module in model.modules()]
    results += [x.square().mean() for x in tree_leaves([kept, model.noted]) if isinstance(x, Tensor)]
    if training:
        weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in results]
        sum((x * weight).sum() for x, weight in zip(results, weights, strict=True)).backward()
        if sp is not None:
            startrail.sum_gradients(model.parameters(), sp.group, check=False)
    gradients = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in model.named_parameters()}
    return Step([x.detach() for x in results], gradients, {name: x.double() for name, x in model.named_buffers()})


def difference(ours: Step, truth: Step) -> str | None:
    if [x.shape for x in ours.results] != [x.shape for x in truth.results]:
        return f"shapes {[tuple(x.shape) for x in ours.results]}, not {[tuple(x.shape) for x in truth.results]}"
    largest = max(float(x.norm()) for x in truth.gradients.values())
    pairs = [
        (f"result {index}", *each, 0.0) for index, each in enumerate(zip(ours.results, truth.results, strict=True))
    ]
    pairs += [(name, ours.gradients[name], x, 1e-3 * largest) for name, x in truth.gradients.items()]
    pairs += [(name, ours.buffers[name], x, 0.0) for name, x in truth.buffers.items()]
    for name, x, y, least in pairs:
        off = float((x - y).norm())
        if not off <= 1e-9 * max(float(y.norm()), least, 1e-3):
            return f"{name} differs by {off:.0e} of {float(y.norm()):.0e}"
    return None


def outcome(case: Case, sp: Any) -> str:
    """What this rank makes of a module: "attached", "refused: ..." with the reason, or what is wrong."""
    alone, split = case.model(), attach(case.model(), sp)
    names = [name for name, _ in split.named_modules() if name] + [type(split).__name__]
    for index, call in enumerate(case.calls):
        truth = run_call(alone, index, call)
        try:
            found = run_call(split, index, call, sp)
        except ValueError as error:
            name, _, reason = str(error).partition(": ")
            return f"refused: {reason}" if name in names else f"raises in call {index}: {error}"
        except Exception as error:
            return f"raises in call {index}: {type(error).__name__}: {error}"
        if different := difference(found, truth):
            return f"is different in call {index}: {different}"
    return "attached"


def outcomes(cases: list[Case], plan: str = "1x2") -> list[tuple[str, ...]]:
    """Of each case, on all ranks."""
    torch.set_num_threads(1)

    def on_rank(rank: int) -> list[str]:
        sp = startrail.SequenceParallel(plan, timeout=60)
        return [outcome(case, sp) for case in cases]

    ranks = run_local(on_rank, startrail.Plan.parse(plan).size, deadline=6000 if FULL else 600)
    return list(zip(*ranks, strict=True))


def test_random_modules_are_attached_or_refused_but_never_different():
    cases = [random_case(seed) for seed in range(SEEDS)]
    found = outcomes(cases)
    kinds = Counter(each[0].partition(":")[0] for each in found)
    print(f"of {SEEDS} modules: {dict(kinds)}")
    wrong = [
        (seed, set(each), {name: x for name, x in case.parts.items() if x != PLAIN[name]}, case.calls)
        for seed, (case, each) in enumerate(zip(cases, found, strict=True))
        if len(set(each)) > 1 or not each[0].startswith(("attached", "refused"))
    ]
    assert wrong == []
    assert min(kinds["attached"], kinds["refused"]) >= 0.3 * SEEDS


def test_common_parts_attach():
    kinds = dict(
        attention=odd.ATTENTION, mlp=odd.MLPS, norm=odd.NORMS, change=odd.PER_TOKEN, keeps=odd.KEEPS, flow=odd.FLOWS,
        hook=odd.HOOKS, drop=(0.3,), root_dropout=(0.2,), layer=("torch",), post_norm=(True,), token=(True,),
    )  # fmt: skip
    names = [(kind, name) for kind, options in kinds.items() for name in dict.fromkeys(options)]
    cases = [Case({**PLAIN, kind: name, "pool": "tokens and mean"}, [(True, 27), (False, 40)]) for kind, name in names]
    found = dict(zip(names, outcomes(cases, "u2/1x2"), strict=True))
    assert {name: each for name, each in found.items() if set(each) != {"attached"}} == {}


MIXES = "a token's result depends on other tokens"
BETWEEN = "tokens are used between blocks, where each rank has some of them: OddModel "
ODD = {  # how each is refused; all were attached and different, or ended in an error of torch
    ("attention", "window above 12", 24): "with 24 tokens, an attn_mask (24, 24) cannot be split",
    ("attention", "window above 30", 40): "with 40 tokens, an attn_mask (40, 40) cannot be split",
    ("attention", "extra token above 100", 130): "with 130 tokens, attention over 131 queries and 131 keys for 130",
    ("attention", "scale by length", 24): "attention's scale, is_causal or attn_mask depends on the number of tokens",
    ("attention", "queries by length", 130): f"with 130 tokens, {MIXES}",
    ("change", "mean above 100", 130): f"with 130 tokens, {MIXES}",
    ("change", "top tokens", 40): f"with 40 tokens, {MIXES}",
    ("change", "clipped gradient", 24): MIXES,
    ("flow", "quantile noted", 24): BETWEEN + "calls quantile",
    ("flow", "deep supervision", 24): BETWEEN + "calls mean",
    ("flow", "each twice, mean between", 24): BETWEEN + "calls mean",
    ("flow", "hidden states", 24): BETWEEN + "returns them",
    ("flow", "skips", 24): BETWEEN + "calls add",
    ("flow", "sum of hidden", 24): BETWEEN + "calls stack",
    ("flow", "tokens noted", 24): BETWEEN + "keeps them as noted",
    ("flow", "list of the module", 24): "keeps a tensor with a gradient as noted, such as an auxiliary loss",
    ("hook", "mean noted on blocks", 24): "its hook _forward.<locals>.<lambda>.<locals>.<lambda> would see some",
    ("hook", "tokens noted inside", 24): "keeps a tensor that it makes of its tokens",
    ("hook", "gradient scaled inside", 24): MIXES,
    ("keeps", "mean in attribute", 24): "keeps a tensor that it makes of its tokens, such as an auxiliary loss",
    ("keeps", "sum in a list", 24): "keeps a tensor that it makes of its tokens, such as an auxiliary loss",
    ("mlp", "dropout", 24): "draws random numbers for each token, as dropout does",
    ("mlp", "experts, load kept", 24): "keeps a tensor that it makes of its tokens",
}


def test_odd_parts_are_refused_by_name():
    """Also one that shows only in a second, longer call."""
    cases = [Case({**PLAIN, kind: name, "depth": 3}, [(True, length)]) for kind, name, length in ODD]
    cases += [Case({**PLAIN, "change": "mean above 100"}, [(True, 40), (True, 130)])]
    starts = [*ODD.values(), f"with 130 tokens, {MIXES}"]
    found = zip(starts, outcomes(cases), strict=True)
    wrong = {start: set(each) for start, each in found if not all(x.startswith(f"refused: {start}") for x in each)}
    assert wrong == {}


def test_blocks_that_are_called_by_themselves_are_refused():
    """Their gradients would count once per rank."""

    def on_rank(rank: int) -> tuple[str, bool]:
        model, x = attach(Stack(Block()), startrail.SequenceParallel("1x2")), torch.randn(1, 8, WIDTH)
        with torch.no_grad():
            right = bool(model.blocks[0](x).isfinite().all())
        return error_of(lambda: model.blocks[0](x)), right

    assert {text.partition(": call")[0] for text, right in run_local(on_rank, 2) if right} == {
        "RefusedError: blocks.0: is called by itself"
    }


@pytest.mark.parametrize("function", [torch.exp, torch.tanh, lambda x: x.softmax(-1), lambda x: x.norm(dim=-1)])
def test_what_trials_compute_is_freed(function):
    """Also what an operation saves for its own backward pass."""
    with unobserved():
        result = function(torch.randn(4, 4, requires_grad=True))
    alive = weakref.ref(result)
    del result
    assert alive() is None
