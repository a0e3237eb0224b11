"""The examples run, learn, and give on four ranks what they give on one."""

import os
import runpy

import pytest
import torch

from startrail.local import run_local
from tests.helpers import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NEEDS = {
    "hf_causal_lm": ["transformers"],
    "rl_log_probs": ["transformers"],
    "trl_sft": ["transformers", "trl", "datasets"],
    "own_loop_fsdp2": [],
}


def test_examples_are_short_and_all_of_them_are_run():
    assert {path.stem for path in EXAMPLES} == set(NEEDS)
    assert all(len(path.read_text().splitlines()) < 80 for path in EXAMPLES)


@pytest.mark.parametrize("name", NEEDS)
def test_an_example_gives_on_four_ranks_what_it_gives_on_one(name):
    for package in NEEDS[name]:
        pytest.importorskip(package, reason=f"{package} is not installed")
    torch.set_num_threads(1)
    main = runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="example")["main"]

    def on_rank(rank, world):
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
        return main("u2/1x2" if world == 4 else "1x1")

    (alone,) = run_local(lambda rank: on_rank(rank, 1), 1)
    everyone = run_local(lambda rank: on_rank(rank, 4), 4)
    for ours in everyone:
        assert ours == pytest.approx(alone, rel=2e-4, abs=1e-6)
    if name != "rl_log_probs":
        assert alone[-1] < alone[0] - 0.3
