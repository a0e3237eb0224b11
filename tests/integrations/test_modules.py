"""Plain modules on 2, 4 and 8 ranks: losses and gradients of one process, and refusals by name."""

import ast
import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import startrail
from startrail.integrations.modules import attach, detach
from startrail.launch.local import run_local
from tests.helpers import error_of
from tests.integrations.plain_modules import GPT, VOCAB, WIDTH, Attention, Block, Mixed, Stack, ViT, encoder
from tests.integrations.split_runs import mistakes

IDS = torch.arange(2 * 27).view(2, 27) * 7 % VOCAB


def gpt(dtype, recompute=False):
    return GPT(recompute).to(dtype), lambda model: model(IDS, IDS.roll(-1, 1))[1]


def vit(dtype):
    model, x = ViT().to(dtype), torch.randn(2, 3, 10, 10, dtype=torch.float64).to(dtype)
    return model, lambda model: F.cross_entropy(model(x), torch.tensor([1, 3]))


def torch_encoder(dtype, batch_first=True):
    model, (x, target) = encoder(batch_first).to(dtype), torch.randn(2, 3, 21, WIDTH, dtype=torch.float64).to(dtype)
    x, target = (x, target) if batch_first else (x.transpose(0, 1), target.transpose(0, 1))
    return model, lambda model: F.mse_loss(model(x), target)


def convolving(dtype):
    """Blocks with a convolution next to their attention, which is refused."""
    conv = lambda: Mixed(lambda x, conv: conv(x.mT).mT, nn.Conv1d(WIDTH, WIDTH, 3, padding=1))  # noqa: E731
    model, (x, target) = Stack(conv(), conv()).to(dtype), torch.randn(2, 2, 27, WIDTH, dtype=torch.float64).to(dtype)
    return model, lambda model: F.mse_loss(model(x), target)


def attach_as_told(model, sp):
    """By the error of a first call on a few tokens."""
    text = error_of(lambda: attach(model, sp)(torch.zeros(1, 8, WIDTH, dtype=next(model.parameters()).dtype)))
    return attach(detach(model), sp, ast.literal_eval(re.search(r"attention=(\[.*?\])", text)[1]))


MAKES = {
    "gpt": gpt,
    "gpt recomputed": lambda dtype: gpt(dtype, True),
    "gpt, attention alone": gpt,
    "vit": vit,
    "encoder": torch_encoder,
    "encoder, tokens first": lambda dtype: torch_encoder(dtype, False),
    "convolutions": convolving,
}
NAMES = [f"inside.blocks.{index}.attention" for index in range(2)]
ATTACHERS = dict.fromkeys(MAKES, attach) | {
    "gpt, attention alone": lambda model, sp: attach(model, sp, NAMES),
    "convolutions": attach_as_told,
}


@pytest.mark.parametrize(
    "names, plans",
    [
        (["gpt", "vit", "encoder"], [("u2", torch.float32)]),
        (list(MAKES), [("1x4", torch.float32), ("u2/1x2", torch.float64)]),
        (["gpt", "vit", "encoder"], [("2x2/u2", torch.float64)]),
    ],
    ids=["2 ranks", "4 ranks", "8 ranks"],
)
def test_losses_and_gradients_are_those_of_one_process(names, plans):
    assert mistakes({name: MAKES[name] for name in names}, plans, ATTACHERS) == []


def losses_of(model, optimizer, after, steps=20):
    losses = []
    for step in range(steps):
        ids = (IDS + step) % VOCAB
        loss = model(ids, ids.roll(-1, 1))[1]
        loss.backward()
        after(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_training_copies_wrappers_and_restoring():
    """20 steps with AdamW stay together with one process; a copy, DDP and FSDP2 do the same."""
    torch.set_num_threads(1)

    def model():
        torch.manual_seed(0)
        return GPT().double()

    def train(made, after=lambda model: None, factor=1):
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
        if factor == 1:
            return losses_of(made, optimizer, after)
        scaled = lambda *arguments: [x * factor for x in made(*arguments)]  # noqa: E731
        return [loss / factor for loss in losses_of(scaled, optimizer, after, steps=3)]

    alone = train(model())

    def on_rank(rank):
        sp = startrail.SequenceParallel("u2/1x2")
        summed = lambda made: startrail.sum_gradients(made.parameters(), sp.group)  # noqa: E731
        first = attach(model(), sp)
        found = {"copy": train(copy.deepcopy(first), summed), "attached": train(first, summed)}
        wrapped = DistributedDataParallel(attach(model(), sp))
        found["DDP"] = train(wrapped, factor=startrail.gradient_factor(wrapped))
        sharded = attach(model(), sp)
        for block in sharded.inside["blocks"]:
            fully_shard(block)
        fully_shard(sharded)
        found["FSDP2"] = train(sharded, factor=startrail.gradient_factor(sharded))
        detach(first)
        left = [key for module in first.modules() for key in vars(module) if "startrail" in key or key == "forward"]
        return found, left, error_of(lambda: detach(first))

    for found, left, again in run_local(on_rank, 4):
        for name, losses in found.items():
            assert losses == pytest.approx(alone[: len(losses)], rel=1e-9), name
        assert left == [] and "not attached" in again


class Outside(nn.Module):
    """Attention that is in no list of blocks."""

    def __init__(self):
        super().__init__()
        self.first, self.blocks = Attention(), nn.ModuleList([Block()])

    def forward(self, x):
        return self.first(self.blocks[0](x))


def masked(mask):
    def mix(x):
        q = x.unflatten(2, (4, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask(x)).transpose(1, 2).flatten(2)

    return Mixed(mix)


def windowed(x):
    """Attention within halves of the tokens, which makes up what a few made-up tokens lack."""
    q = F.pad(x, (0, 0, 0, x.shape[1] % 2)).unflatten(1, (2, -1)).flatten(0, 1).unsqueeze(1)
    return F.scaled_dot_product_attention(q, q, q).unflatten(0, (-1, 2)).flatten(1, 3)[:, : x.shape[1]]


class Shifted(nn.Module):
    """Attention that is not a module of its own."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q = self.inside(x).unsqueeze(1)
        return F.scaled_dot_product_attention(q, q, q).squeeze(1) + x.roll(1, 1)


COST = "all else runs on all tokens on every rank instead of 1/1 of them, in memory and compute"
ALONE = (
    "it cannot be split. Its attention can, if you name it and all else that is to be split: modules.attach(..., "
    "attention=['blocks.0.attention']); each named module is then split by itself, and gathers 4,608 bytes per call "
    f"and pass; {COST}"
)
OTHERS = "To run it on all tokens on every rank, name the others in modules.attach(..., attention=[...])"
NAMED = f"attention=[...]; each named module is then split by itself, and gathers its result per call and pass; {COST}"
REFUSED = {  # beginnings and ends of errors
    ("blocks.0.others.0: a token's result depends on other tokens", ALONE): [
        Stack(Mixed(lambda x, conv: 1e-9 * conv(x.mT).mT, nn.Conv1d(WIDTH, WIDTH, 3, padding=1))),
        Stack(Mixed(lambda x, gru: gru(x)[0], nn.GRU(WIDTH, WIDTH, batch_first=True))),
        Stack(Mixed(lambda x, linear: linear(x.mean(1, keepdim=True)).sigmoid() * x, nn.Linear(WIDTH, WIDTH))),
        Stack(Mixed(lambda x, norm: norm(x.mT).mT, nn.BatchNorm1d(WIDTH))),
        Stack(Mixed(lambda x, linear: linear(x + torch.arange(x.shape[1]).unsqueeze(1)), nn.Linear(WIDTH, WIDTH))),
    ],
    ("blocks.0: a token's result depends on other tokens", ALONE): [
        Stack(Mixed(lambda x: 1e-12 * x.roll(1, 1))),
        Stack(Mixed(lambda x: (x @ x.mT).softmax(-1) @ x)),
    ],
    (
        "blocks.0: a token's result depends on other tokens",
        "it cannot be split. If the block's attention were a module of its own that gets positions as an argument, you "
        "could name it in modules.attach(..., attention=[...]); each named module is then split by itself, and gathers "
        f"4,608 bytes per call and pass; {COST}",
    ): [Stack(Shifted())],
    ("blocks.0: an attn_mask (11, 11) cannot be split: use is_causal=True, or leave it out", OTHERS): [
        Stack(masked(lambda x: torch.ones(x.shape[1], x.shape[1]).tril().bool())),
        Stack(masked(lambda x: torch.ones(x.shape[1], x.shape[1], dtype=torch.bool))),
    ],
    ("blocks.0: its attn_mask hides keys", "remove padding from the batch"): [
        Stack(masked(lambda x: (torch.arange(x.shape[1]) > 2).expand(2, 1, 1, -1)))
    ],
    ("blocks.0: attention over", OTHERS): [Stack(Mixed(windowed))],
    ("blocks.0.attention: attention dropout 0.1", "set it to 0"): [Stack(Block(dropout_p=0.1))],
    ("blocks.1: its tokens are not what the block before it returned", NAMED): [
        Stack(Block(), Block(), between=lambda x: x - x.mean(1, keepdim=True)),
        Stack(Block(), Block(), between=lambda x: x.sub_(x.detach().mean(1, keepdim=True))),
    ],
    ("first: attends to 24 tokens, but is not in a list of blocks", NAMED): [Outside()],
    ("Sequential: no block calls F.scaled_dot_product_attention", NAMED): [nn.Sequential(nn.Linear(WIDTH, WIDTH))],
}


def test_what_cannot_be_split_is_refused_by_name_with_what_to_do_and_its_cost():
    sp, x = startrail.SequenceParallel("1x1"), torch.randn(2, 24, WIDTH)
    wrong = []
    for (start, end), modules in REFUSED.items():
        for index, module in enumerate(modules):
            found = error_of(lambda module=module: attach(module, sp)(x))
            right = found.partition(": ")[2].startswith(start) and found.endswith(end)
            wrong += [] if right else [(start, end, index, found)]
    assert wrong == []


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_first_call_may_be_without_gradients(mode):
    model, x = Stack(Block(causal=True)), torch.randn(2, 24, WIDTH)
    alone = model(x)
    attach(model, startrail.SequenceParallel("1x1"))
    with mode():
        torch.testing.assert_close(model(x), alone)
    torch.testing.assert_close(model(x), alone)
