"""``startrail verify`` on a plain model: each planted fault is named, and right set-ups are the same."""

import pytest

from startrail.cli import main
from startrail.diagnostics.verify import verify
from tests.diagnostics.batched import some_of, verdicts_of
from tests.diagnostics.plain_setups import FAULTS, RETRIED, RIGHT
from tests.helpers import refusal


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
