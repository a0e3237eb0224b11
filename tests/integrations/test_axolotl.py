"""The plugin for axolotl in docs/integrations.md, with axolotl's own builder and trainer: the weights of one process.

axolotl pins other versions of transformers, accelerate and TRL: `make test-axolotl` puts them before the others.
"""

import os

import pytest
import torch

pytest.importorskip("axolotl", reason="axolotl is not installed (`make test-axolotl` does that)")

from axolotl.core.builders.causal import HFCausalTrainerBuilder
from axolotl.integrations.base import PluginManager
from axolotl.integrations.config import merge_input_args
from axolotl.monkeypatch.data.batch_dataset_fetcher import apply_multipack_dataloader_patch
from axolotl.utils.config import prepare_plugins
from axolotl.utils.dict import DictDefault
from axolotl.utils.trainer import calculate_total_num_steps
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from startrail.launch.local import run_local
from tests.helpers import ROOT, write_tokenizer
from tests.integrations.tiny import differences, tiny, tokens

PLUGIN = "axolotl_plugin.StarTrailPlugin"
ROWS = [row[: 20 + 2 * index] for index, row in enumerate(tokens(8, 40).tolist())]
COLUMNS = dict(
    input_ids=ROWS,
    labels=ROWS,
    attention_mask=[[1] * len(row) for row in ROWS],
    position_ids=[list(range(len(row))) for row in ROWS],
    length=[len(row) for row in ROWS],
)


@pytest.mark.parametrize("packing, world", [(True, 2), (False, 4)])
def test_the_plugin_gives_the_weights_of_one_process(packing, world, tmp_path, monkeypatch):
    """On four ranks, two groups of two train on batches of their own."""
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
    for ours in run_local(lambda rank: on_rank(rank, world), world):
        assert differences(ours, alone, 1e-6) == []


def config(packing, world, folder):
    """What axolotl reads from a file."""
    plugin = dict(plugins=[PLUGIN], startrail_plan="1x2", startrail_ranks=2) if world > 1 else {}
    return DictDefault(
        output_dir=str(folder), model_config_type="llama", sequence_len=64, num_epochs=2, gradient_accumulation_steps=1,
        micro_batch_size=1 if world == 4 else 2, batch_size=max(2, world), world_size=world, learning_rate=1e-3,
        optimizer="adamw_torch", lr_scheduler="constant", seed=42, weight_decay=0.0, max_grad_norm=1.0, val_set_size=0,
        dataset_num_proc=1, include_tkps=True, sample_packing=packing, sample_packing_group_size=1000,
        sample_packing_bin_size=200, pad_to_sequence_len=False, max_steps=3 if packing else None,
        attn_decontaminates_packing=packing,  # follows from attn_implementation: sdpa
        **plugin,
    )  # fmt: skip


def trained(settings, tokenizer):
    """As `axolotl train` does it, with a model and a dataset of our own."""
    prepare_plugins(settings)
    data = Dataset.from_dict(COLUMNS)
    if settings.plugins:
        assert PluginManager.get_instance().load_datasets(settings, preprocess=False) is None
    steps = settings.max_steps or calculate_total_num_steps(settings, data)
    model = tiny("llama")
    builder = HFCausalTrainerBuilder(settings, model, PreTrainedTokenizerFast(tokenizer_file=tokenizer, pad_token="?"))
    builder.train_dataset = data
    builder.build(steps).train()
    return {name: x.detach() for name, x in model.named_parameters()}


def test_the_plugin_refuses_axolotls_context_parallelism(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples" / "recipes")
    settings = DictDefault(plugins=[PLUGIN], context_parallel_size=2)
    prepare_plugins(settings)
    _, schema = merge_input_args()
    assert {"startrail_plan", "startrail_ranks", "context_parallel_size"} <= schema.model_fields.keys()
    with pytest.raises(ValueError, match="context_parallel_size=2: leave it at 1"):
        PluginManager.get_instance().get_trainer_cls(settings)
