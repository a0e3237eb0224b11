"""The plugin for axolotl in docs/integrations.md, with axolotl's own builder and trainer: the weights of one process.

axolotl pins other versions of transformers, accelerate and TRL: `make test-axolotl` puts them before the others.
"""

import os

import pytest
import torch

pytest.importorskip("axolotl", reason="axolotl is not installed (`make test-axolotl` does that)")

from axolotl.core.builders.causal import HFCausalTrainerBuilder
from axolotl.monkeypatch.data.batch_dataset_fetcher import apply_multipack_dataloader_patch
from axolotl.utils.config import prepare_plugins
from axolotl.utils.dict import DictDefault
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from startrail.launch.local import run_local
from tests.helpers import ROOT, write_tokenizer
from tests.integrations.tiny import differences, tiny, tokens

ROWS = [row[: 20 + 2 * index] for index, row in enumerate(tokens(8, 40).tolist())]
COLUMNS = dict(
    input_ids=ROWS,
    labels=ROWS,
    attention_mask=[[1] * len(row) for row in ROWS],
    position_ids=[list(range(len(row))) for row in ROWS],
    length=[len(row) for row in ROWS],
)


@pytest.mark.parametrize("packing", [False, True])
def test_the_plugin_gives_the_weights_of_one_process(packing, tmp_path, monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setenv("AXOLOTL_DO_NOT_TRACK", "1")
    monkeypatch.syspath_prepend(ROOT / "examples" / "recipes")
    if packing:
        apply_multipack_dataloader_patch()  # as axolotl does when it loads a model

    def on_rank(rank, world):
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29537", ACCELERATE_USE_CPU="true")
        return trained(config(packing, world, tmp_path), write_tokenizer(tmp_path / f"{rank}.json", {"?": 0, "a": 1}))

    (alone,) = run_local(lambda rank: on_rank(rank, 1), 1)
    assert len(differences(dict(tiny("llama").named_parameters()), alone, 1e-6)) == len(alone), "all weights change"
    for ours in run_local(lambda rank: on_rank(rank, 2), 2):
        assert differences(ours, alone, 1e-6) == []


def config(packing, world, folder):
    """What axolotl reads from a file, for three steps."""
    plugin = dict(plugins=["axolotl_plugin.StarTrailPlugin"], startrail_plan="1x2") if world > 1 else {}
    return DictDefault(
        output_dir=str(folder), model_config_type="llama", sequence_len=64, max_steps=3, micro_batch_size=2, num_epochs=2,
        gradient_accumulation_steps=1, learning_rate=1e-3, optimizer="adamw_torch", lr_scheduler="constant", seed=42,
        weight_decay=0.0, max_grad_norm=1.0, val_set_size=0, dataset_num_proc=1, include_tkps=True,
        sample_packing=packing, pad_to_sequence_len=False, sample_packing_group_size=1000, sample_packing_bin_size=200,
        attn_decontaminates_packing=packing,  # follows from attn_implementation: sdpa
        **plugin,
    )  # fmt: skip


def trained(settings, tokenizer):
    prepare_plugins(settings)
    model = tiny("llama")
    builder = HFCausalTrainerBuilder(settings, model, PreTrainedTokenizerFast(tokenizer_file=tokenizer, pad_token="?"))
    builder.train_dataset = Dataset.from_dict(COLUMNS)
    builder.build(3).train()
    return {name: x.detach() for name, x in model.named_parameters()}
