"""Packing a global batch: every document once, sequences that fit, equal work at the same time; and its sampler."""

import random
import re
from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader

import startrail
from startrail.geometry.distributions import document_lengths
from startrail.geometry.packing import EVEN, PackedSampler, _pack, _spread, pack
from tests.helpers import ROOT
from validation.packing import efficiencies

RANKS, TOKENS = 8, 4096
PAGES = "docs/guides/documents.md", "validation/packing.md"


def all_documents(packing):
    return sorted(chain.from_iterable(documents for step in packing.steps for documents in step))


@pytest.mark.parametrize("seed", range(30))
def test_every_document_is_packed_once_where_it_fits(seed):
    chance = random.Random(seed)
    ranks, tokens, groups = (chance.choice(of) for of in ([1, 3, 8], [1, 7, 1000], [1, 2, 5]))
    lengths = [chance.randint(1, ranks * tokens) for _ in range(chance.choice([groups, groups + 1, 100]))]
    even = chance.choice([1.0, 100.0, 1e9])
    packing = pack(lengths, ranks, tokens, groups=groups, even=even)
    assert all_documents(packing) == list(range(len(lengths)))
    for step, of_step, work in zip(packing.steps, packing.tokens, packing.work, strict=True):
        assert len(step) == groups
        for documents, in_all, its_work in zip(step, of_step, work, strict=True):
            own = [lengths[number] for number in documents]
            assert sum(own) == in_all <= packing.capacity == ranks * tokens
            assert its_work == pytest.approx(sum(n + n * n / even for n in own))
    assert packing == pack(lengths, ranks, tokens, groups=groups, even=even)


def test_documents_that_nearly_fill_their_sequences_get_more_of_them():
    packing = pack([5, 5, 5], ranks=1, tokens_per_rank=8)  # 15 tokens, but no two documents share 8
    assert len(packing.steps) == 3 and str(packing) == (
        "3 documents in 3 x 1 sequences, 62% of 8 tokens filled, groups work 100% of the time"
    )


@pytest.mark.parametrize("seed", range(20))
def test_sequences_are_as_few_as_fit(seed):
    """Each document goes where there is least weight and room; with one pass fewer, there would be no room."""
    chance = random.Random(seed)
    groups, capacity = chance.choice([1, 2, 5]), 100
    least = chance.choice([1, 20, 51])
    lengths = [chance.randint(least, chance.choice([least, 60, capacity])) for _ in range(chance.randint(groups, 200))]
    passes = len(pack(lengths, 4, 25, groups=groups).steps)
    assert passes == 1 or _pack(lengths, range(len(lengths)), groups, passes - 1, capacity, EVEN) is None
    sizes = sorted(lengths, reverse=True)
    weights = [chance.choice([1.0, float(size), size * size / 7]) for size in sizes]
    for bins in (groups * passes, len(sizes)):
        filled, expected = [(0.0, 0, at) for at in range(bins)], [[] for _ in range(bins)]
        for place, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
            fitting = [each for each in filled if each[1] + size <= capacity]
            if not fitting:
                expected = None
                break
            before, tokens, at = min(fitting)
            filled[at] = before + weight, tokens + size, at
            expected[at].append(place)
        assert _spread(sizes, weights, bins, capacity) == expected


@pytest.mark.parametrize("name", ["pretraining", "agents"])
def test_groups_wait_less_than_with_first_fit_and_megatrons_rule(name):
    lengths = [min(n, RANKS * TOKENS) for n in document_lengths(name, 16 * 32 * TOKENS, seed=5)]
    first_fit, megatron, per_node, whole = efficiencies(lengths, TOKENS)
    assert per_node > max(first_fit, megatron, 0.9) and whole > 0.95


def test_the_guide_shows_the_table_of_the_simulation():
    tables = [re.findall(r"(?m)^\| .*%.*\|$", (ROOT / path).read_text()) for path in PAGES]
    assert tables[0] == tables[1] and len(tables[0]) == 4


def sampler_of(group=0, **options):
    lengths = document_lengths("pretraining", 40 * RANKS * TOKENS, seed=2)
    lengths = [min(n, RANKS * TOKENS) for n in lengths]
    return PackedSampler(lengths, RANKS, TOKENS, **{"groups": 2, "group": group, "steps": 3, **options}), lengths


def test_groups_share_an_epoch_of_batches_that_follow_its_order():
    samplers = [sampler_of(group)[0] for group in range(2)]
    lengths, packings = sampler_of()[1], list(samplers[0].packings(0))
    sequences = [list(sampler) for sampler in samplers]
    assert sequences == [[list(step[g]) for packing in packings for step in packing.steps] for g in range(2)]
    seen = [number for packing in packings for number in all_documents(packing)]
    assert len(seen) == len(set(seen)) > len(lengths) - 6, "only what is too little for a last batch is left out"
    order = list(range(len(lengths)))
    random.Random("0 0").shuffle(order)
    for packing in packings:
        taken, order = order[: len(all_documents(packing))], order[len(all_documents(packing)) :]
        assert sorted(taken) == all_documents(packing), "documents of a step follow each other in the epoch's order"
        assert len(packing.steps) == 3
    assert min(packing.filled for packing in packings[:-1]) > 0.85
    assert list(samplers[0]) != sequences[0], "the next epoch has another order"


def test_a_sampler_resumes_anywhere_also_in_a_data_loader():
    whole, lengths = sampler_of(group=1, seed=3)
    documents = [torch.full((length,), number) for number, length in enumerate(lengths)]

    def loader(sampler):
        return DataLoader(documents, batch_sampler=sampler, collate_fn=lambda own: torch.cat(own).unique().tolist())

    first, second = list(loader(whole)), list(loader(whole))
    for taken in (0, 1, 4, len(first)):
        stopped, _ = sampler_of(group=1, seed=3)
        rest = iter(stopped)
        assert [next(rest) for _ in range(taken)] == first[:taken]
        resumed, _ = sampler_of(group=1, seed=3)
        resumed.load_state_dict(stopped.state_dict())
        assert list(loader(resumed)) == first[taken:]
        assert list(loader(resumed)) == second


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(lengths=[4, 9]), "document 1 has 9 tokens, but a sequence has at most 2 ranks x 4 tokens per rank = 8"),
        (dict(lengths=[4, 0]), "document 1 has 0 tokens; it needs at least 1"),
        (dict(lengths=[4, 1.5]), "lengths must be whole numbers of tokens, one per document"),
        (dict(lengths=[]), "0 documents are too few"),
        (dict(lengths=[1], groups=2), "1 documents are too few"),
        (dict(ranks=0), "ranks=0 must be a whole number, ranks >= 1"),
        (dict(tokens_per_rank=True), "tokens_per_rank=True must be a whole number"),
        (dict(even=0), "even=0 must be a number of tokens greater than 0"),
        (dict(even=float("nan")), "even=nan must be"),
    ],
)
def test_mistakes_are_one_line_errors(arguments, message):
    arguments = {"lengths": [4, 4], "ranks": 2, "tokens_per_rank": 4, **arguments}
    for function in (startrail.pack, startrail.PackedSampler):
        with pytest.raises(ValueError, match=message) as raised:
            function(**arguments)
        assert "\n" not in str(raised.value)


def test_mistakes_with_a_sampler():
    with pytest.raises(ValueError, match="group=2 is not one of 0 to 1, the 2 groups"):
        sampler_of(group=2)
    with pytest.raises(ValueError, match=r"the state is that of .* 2 groups, .*, not of .* 1 groups"):
        sampler_of(groups=1)[0].load_state_dict(sampler_of()[0].state_dict())
    with pytest.raises(ValueError, match="sequences=-1 must be a whole number, sequences >= 0"):
        sampler_of()[0].load_state_dict(sampler_of()[0].state_dict() | {"sequences": -1})
