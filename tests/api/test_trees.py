"""A packed prefix tree against its rows, from the root to each leaf, in one process: loss and all gradients."""

from functools import partial
from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F

import startrail
from startrail.launch.local import run_local

WORDS, WIDTH, HEADS, DIM = 11, 24, 4, 6
# Two trees, depth first. An inner node's last token is the first of its children, which predicts what follows in each.
PARENTS = [-1, 0, 1, 1, 0, 0, -1, 6, 6]
LENGTHS = [29, 7, 12, 5, 17, 1, 8, 3, 6]
PLANS = ("1x4", "2x2", "u2/1x2", "u4", "star2", "direct")


def make_ids() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    own = [torch.randint(WORDS, (length,), generator=generator) for length in LENGTHS]
    for node, parent in enumerate(PARENTS):
        if parent >= 0:
            own[node][0] = own[PARENTS.index(parent)][0]  # of the first child
    return torch.cat(own)


def ways() -> list[list[int]]:
    """The nodes from the root to each leaf."""
    found = []
    for node in range(len(PARENTS)):
        if node not in PARENTS:
            way = [node]
            while PARENTS[way[0]] >= 0:
                way.insert(0, PARENTS[way[0]])
            found.append(way)
    return found


def parameters() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"embedding": (WORDS, WIDTH), "out": (WORDS, WIDTH)}
    for layer in range(2):
        shapes |= {f"qkv{layer}": (3 * HEADS * DIM, WIDTH), f"proj{layer}": (WIDTH, HEADS * DIM)}
        shapes |= {f"mlp{layer}": (WIDTH, WIDTH)}
    return {
        name: (torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.4).requires_grad_()
        for name, shape in shapes.items()
    }


def rotated(x, positions):
    angles = positions[:, None] * 10.0 ** -torch.arange(DIM // 2, dtype=torch.float64)
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)


def losses(weights, ids, positions, labels, attend):
    """(tokens,), 0 where there is no label."""
    x = weights["embedding"][ids]
    for layer in range(2):
        q, k, v = (x @ weights[f"qkv{layer}"].T).view(1, -1, 3, HEADS, DIM).permute(2, 0, 3, 1, 4)
        out = attend(rotated(q, positions), rotated(k, positions), v)
        x = x + out.transpose(1, 2).flatten(2)[0] @ weights[f"proj{layer}"].T
        x = x + (x @ weights[f"mlp{layer}"].T).tanh()
    return F.cross_entropy(x @ weights["out"].T, labels, reduction="none", ignore_index=-100)


def rows_in_one_process():
    """The loss of all rows, and the gradients."""
    ids, weights, total = make_ids().split(LENGTHS), parameters(), 0.0
    for way in ways():
        row = torch.cat([ids[node] for node in way])
        labels = torch.cat((row[1:], torch.tensor([-100])))
        positions = torch.arange(len(row), dtype=torch.float64)
        causal = partial(F.scaled_dot_product_attention, is_causal=True)
        total = total + losses(weights, row, positions, labels, causal).sum()
    return total.item(), torch.autograd.grad(total, list(weights.values()))


@pytest.mark.parametrize("documents", [None, (0, sum(LENGTHS[:6]), sum(LENGTHS))])
def test_a_packed_tree_is_its_rows(documents):
    loss, gradients = rows_in_one_process()
    leaves_below = torch.zeros(len(LENGTHS))
    for way in ways():
        leaves_below[way] += 1
    ends = [*accumulate(LENGTHS, initial=0)]
    ids, total = make_ids(), ends[-1]
    labels = torch.cat((ids[1:], torch.tensor([-100])))
    for node, (_, end) in enumerate(pairwise(ends)):
        if node not in PARENTS:
            labels[end - 1] = -100
    mask = startrail.Mask.tree(PARENTS, LENGTHS)
    positions = torch.tensor(startrail.Mask.tree_positions(PARENTS, LENGTHS), dtype=torch.float64)
    weight_of = leaves_below.repeat_interleave(torch.tensor(LENGTHS))

    def on_rank(rank):
        found = []
        for plan in PLANS:
            seq = startrail.SequenceParallel(plan).sequence(total, documents)
            weights = parameters()
            own = (seq.shard(ids, 0), seq.shard(positions, 0), seq.shard(labels, 0, pad_value=-100))
            each = losses(weights, *own, partial(seq.attention, mask=mask))
            mine = (each * seq.shard(weight_of, 0)).sum()
            found.append((mine.item(), torch.autograd.grad(mine, list(weights.values()))))
        return found

    for plan, of_ranks in zip(PLANS, zip(*run_local(on_rank, 4), strict=True), strict=True):
        assert sum(mine for mine, _ in of_ranks) == pytest.approx(loss, rel=1e-13), plan
        for name, truth, *parts in zip(parameters(), gradients, *(grads for _, grads in of_ranks), strict=True):
            assert (sum(parts) - truth).abs().max() < 1e-11 * truth.abs().max(), (plan, name)
