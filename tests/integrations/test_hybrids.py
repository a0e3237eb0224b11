"""Models with recurrences and convolutions: loss and all gradients of one process, and what is never run wrongly."""

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'startrail[hf]')")

import startrail
from startrail.integrations.transformers import attach
from startrail.launch.local import run_local
from tests.helpers import FULL
from tests.integrations.one_process import BATCHES, Truth, compare, many_ranks, one_process
from tests.integrations.tiny import InFloat64, hybrids, tiny

PLANS = {2: ["1x2"], 4: ["u2/1x2", "2x2"]}
ON_ALL_PLANS = ("qwen3-next", "nemotron-h", "lfm2", "jamba")
# RG-LRU's padding is not zero in one process: transformers gives these layers no mask
WITHOUT_PADDING = ("recurrent-gemma",)
KINDS = list(BATCHES) if FULL else ["packed", "left"]


def batches_of(name):
    return [kind for kind in KINDS if not (name in WITHOUT_PADDING and kind == "left")]


def families_of(plan):
    return hybrids() if FULL or plan == "u2/1x2" else ON_ALL_PLANS


@pytest.mark.parametrize("world", sorted(PLANS))
def test_loss_and_gradients_are_those_of_one_process(world):
    torch.set_num_threads(1)
    names = {name for plan in PLANS[world] for name in families_of(plan)}
    alone = {
        (name, kind): one_process(name, BATCHES[kind], torch.float64) for name in names for kind in batches_of(name)
    }

    def on_rank(rank):
        wrong = []
        for plan in PLANS[world]:
            sp = startrail.SequenceParallel(plan)
            for name in families_of(plan):
                model = attach(tiny(name, torch.float64), sp)
                for kind in batches_of(name):
                    loss, grads = alone[name, kind]
                    with InFloat64():
                        lines = compare(*many_ranks(model, sp, BATCHES[kind]), Truth(loss, grads, grads))
                    wrong += [f"{plan} {name} {kind}: {line}" for line in lines]
        return wrong

    assert run_local(on_rank, world) == [[]] * world
