"""The recipe for accelerate in docs/integrations.md, with DDP on two ranks: the weights of one process."""

import os

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'startrail[hf]')")
pytest.importorskip("accelerate", reason="accelerate is not installed (pip install 'startrail[hf]')")

from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import startrail
from startrail.integrations.transformers import attach, shard_batch
from startrail.launch.local import run_local
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

    def on_rank(rank):
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29536")
        accelerator = Accelerator(cpu=True)
        sp = startrail.SequenceParallel("1x2")
        model = attach(tiny("llama"), sp)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        wrapped, optimizer = accelerator.prepare(model, optimizer)
        assert isinstance(wrapped, DistributedDataParallel)
        loader = DataLoader(ROWS, batch_size=2)
        for batch in prepare_data_loader(loader, accelerator.device, num_processes=1, process_index=0):
            loss = wrapped(**shard_batch(sp, **batch)).loss
            accelerator.backward(startrail.gradient_factor(wrapped) * loss)
            sp.check()
            optimizer.step()
            optimizer.zero_grad()
        return differences(weights(model), weights(alone), 1e-6)

    assert run_local(on_rank, 2) == [[]] * 2
