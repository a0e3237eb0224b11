"""``startrail verify`` on a plain model: each planted fault is named, and right set-ups are the same."""

import random
from dataclasses import replace

import pytest
import torch

from startrail.cli import main
from startrail.diagnostics.verify import judge, run_alone, run_rank, verify
from startrail.launch.local import run_local
from tests.diagnostics.batched import some_of, verdicts_of
from tests.diagnostics.plain_setups import FAULTS, RETRIED, RIGHT, of
from tests.helpers import FULL, refusal


def test_each_fault_has_its_name():
    names = some_of(FAULTS)
    found = dict(zip(names, verdicts_of([FAULTS[name][0] for name in names]), strict=True))
    wrong = {name: x.text for name, x in found.items() if x.same or FAULTS[name][1] not in x.text}
    assert wrong == {}
    assert len(FAULTS) >= 25


def test_right_setups_are_the_same():
    names = some_of(RIGHT)
    found = dict(zip(names, verdicts_of([RIGHT[name] for name in names]), strict=True))
    assert {name: verdict.text for name, verdict in found.items() if not verdict.same} == {}
    unseen = {name for name, verdict in found.items() if "cannot be seen" in verdict.text}
    assert unseen == {"no reference", "sinks"} & set(names)


def deviating(gradients, seed):
    """Gradients that are a little off: all of them, those of one parameter, or a few of its numbers."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    size, kind = 10 ** chance.uniform(-4, -2.3), ("all", "one", "few")[seed % 3]
    large = max(float(x.norm()) for x in gradients.values())
    names = [name for name, x in gradients.items() if float(x.norm()) > 0.01 * large and x.numel() > 20]
    chosen = names if kind == "all" else [chance.choice(names)]
    changed = dict(gradients)
    for name in chosen:
        noise = torch.randn(gradients[name].shape, generator=generator, dtype=torch.float64)
        if kind == "few":
            noise *= torch.rand(noise.shape, generator=generator) < 5 / noise.numel()
        changed[name] = gradients[name] + size * gradients[name].norm() / noise.norm().clamp(min=1e-9) * noise
    return changed


def test_small_deviations_that_no_known_fault_explains_have_no_name():
    torch.set_num_threads(1)
    make = of()
    ranks = run_local(lambda rank: run_rank(make, "1x4"), 4)[0]

    def on_rank(rank):
        texts, alone = [], run_alone(make)
        for seed in range(60 if FULL else 9):
            steps = (replace(each, gradients=deviating(each.gradients, seed)) for each in (ranks.native, ranks.precise))
            native, precise = steps
            texts.append(judge(make, alone, replace(ranks, native=native, precise=precise)).text)
        return texts

    texts = run_local(on_rank, 1)[0]
    assert [text for text in texts if "No known fault explains it" not in text] == []


def test_the_verdict_says_in_one_line_what_the_comparison_cannot_see():
    makes = {
        "mistakes that it makes there too, in a window": of(alone=True, window=8),  # instead of 9, on both sides
        "attention is in bfloat16 on ranks and in float32 on one process (autocast on one side": RIGHT[
            "autocast on ranks"
        ],
    }
    found = dict(zip(makes, verdicts_of(list(makes.values())), strict=True))
    wrong = {text: x.text for text, x in found.items() if not x.same or text not in x.text or "\n" in x.text}
    assert wrong == {}
    for right in verdicts_of([of(), RIGHT["autocast"]]):
        assert right.same and ";" not in right.text.partition("relative difference")[2]


@pytest.mark.parametrize("name", RETRIED)
def test_faults_that_show_in_a_second_run_are_named(name):
    make, text = RETRIED[name]
    verdict = verify(make, ranks=2)
    assert not verdict.same and text in verdict.text, verdict.text


SETUP = """
import sys
import torch
from dataclasses import dataclass
{top}

@dataclass
class Batch:
    x: "torch.Tensor"

def make():
    {lazy}
    model = torch.nn.Linear(4, 4)
    def step(model, x, sp):
        seq = sp.sequence(x.shape[1])
        q = model(seq.shard(x, 1)).unflatten(-1, (2, 2)).transpose(1, 2)
        loss = seq.attention(q, q, q, causal=True)[:, :, : sum(n for _, n in seq.runs)].square().sum()
        loss.backward()
        import startrail
        startrail.sum_gradients(model.parameters(), sp.group)
        return {value}
    return model, torch.randn(1, 8, 4), step
"""


@pytest.mark.parametrize(
    "top, lazy, value, code, text",
    [
        ("", "import neighbour", "loss", 0, "same: loss"),
        ("sys.path.insert(0, '/nowhere')", "from neighbour import ANSWER", "loss", 0, "same: loss"),
        ("", "", "float(loss)", 0, "same: loss"),
        (
            "",
            "",
            "None",
            1,
            "the step must return the loss, a number or a tensor with one element; it returned None",
        ),
        ("", "", "loss.expand(2)", 1, "it returned a tensor of shape (2,)"),
    ],
)
def test_files_with_neighbours_and_what_steps_return(top, lazy, value, code, text, tmp_path, capsys):
    (tmp_path / "neighbour.py").write_text("ANSWER = 42\n")
    (tmp_path / "mine.py").write_text(SETUP.format(top=top, lazy=lazy, value=value))
    assert main(["verify", f"{tmp_path / 'mine.py'}:make", "--ranks", "2"]) == code
    assert text in capsys.readouterr().out


@pytest.mark.parametrize(
    "source, options, text",
    [
        ("1 +", [], "SyntaxError"),
        ("raise KeyError('x')", [], "KeyError: 'x'"),
        ("def mkae(): pass", [], "has no function 'make'; it has mkae"),
        ("def make(a): pass", [], "must take no arguments: missing a required argument: 'a'"),
        (
            "def make(): return 1",
            [],
            "must return (model, batch), (model, batch, step) or (model, batch, step, refer",
        ),
        (SETUP.format(top="", lazy="", value="loss"), ["--plan", "auto"], "plan auto needs the number of heads"),
    ],
)
def test_mistakes_are_one_line(source, options, text, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(source)
    assert text in refusal(["verify", f"{tmp_path / 'mine.py'}:make", *options], capsys)
