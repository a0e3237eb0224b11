"""The recipe for accelerate, read from docs/integrations.md, with DDP on two ranks: the weights of one process."""

import os
import re

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'startrail[transformers]')")
pytest.importorskip("accelerate", reason="accelerate is not installed (pip install 'startrail[transformers]')")

from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import startrail
from startrail.integrations.transformers import attach, shard_batch
from startrail.launch.local import run_local
from tests.helpers import ROOT
from tests.integrations.tiny import differences, tiny, tokens

ROWS = [dict(input_ids=row, labels=row) for row in tokens(6, 37)]


def weights(model):
    return {name: x.detach() for name, x in model.named_parameters()}


def test_the_recipe_gives_the_weights_of_one_process():
    torch.set_num_threads(1)
    alone = tiny("llama")
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-3)
    for batch in DataLoader(ROWS, batch_size=2):
        alone(**batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    page = (ROOT / "docs" / "integrations.md").read_text()
    (recipe,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "Accelerator()" in block)

    def on_rank(rank):
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29536", ACCELERATE_USE_CPU="true")
        model = tiny("llama")
        names = dict(startrail=startrail, attach=attach, shard_batch=shard_batch, model=model)
        names |= dict(optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), loader=DataLoader(ROWS, batch_size=2))
        exec(recipe.replace('"u2/1x2"', '"1x2"'), names)
        assert isinstance(names["model"], DistributedDataParallel) and names["groups"] == 1
        return differences(weights(model), weights(alone), 1e-6)

    assert run_local(on_rank, 2) == [[]] * 2
