"""startrail next to Hugging Face's own context parallelism: no combination fails silently.

accelerate and Trainer shard batches and drop masks themselves; diffusers has its own attention.
"""

import os
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'startrail[transformers]')")
pytest.importorskip("accelerate", reason="accelerate is not installed (pip install 'startrail[transformers]')")

from accelerate import Accelerator, ParallelismConfig
from accelerate.big_modeling import _attach_context_parallel_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from transformers import Trainer, TrainingArguments

import startrail
from startrail.integrations.trainer import StarTrailMixin, StarTrailTrainer
from startrail.integrations.transformers import attach, shard_batch
from startrail.launch.local import run_local
from tests.helpers import error_of
from tests.integrations.tiny import families, tiny, tokens

IDS = tokens(1, 16)


def test_models_with_windows_chunks_and_sinks_run_although_other_splits_reject_them():
    """transformers says which of its models its own context parallelism would get wrong: dropping a layer's mask."""
    sp = startrail.SequenceParallel("1x1")
    refused = {name for name in families() if not tiny(name).supports_context_parallel}
    assert {"mistral", "gemma2", "gemma3", "gpt-oss", "llama4"} <= refused and "llama" not in refused
    for name in sorted(refused):
        with pytest.raises(ValueError, match="Context parallelism does not support attention layers"):
            _attach_context_parallel_hooks(tiny(name))
        assert attach(tiny(name), sp)(**shard_batch(sp, IDS, IDS)).loss.isfinite()


def test_the_hooks_that_drop_masks_are_found_before_and_after_attaching():
    sp = startrail.SequenceParallel("1x1")
    text = "ValueError: model.layers.0.self_attn: it attends without the mask that startrail made (accelerate's context"
    model = tiny("llama")
    _attach_context_parallel_hooks(model)
    assert error_of(lambda: attach(model, sp)).startswith(text)
    model = attach(tiny("llama"), sp)
    _attach_context_parallel_hooks(model)
    assert error_of(lambda: model(**shard_batch(sp, IDS, IDS))).startswith(text)


def test_trainers_that_also_split_sequences_or_split_none_are_rejected(tmp_path):
    """In a separate process: accelerate keeps its first settings for the whole process."""
    row = dict(input_ids=IDS[0], labels=IDS[0])
    options = dict(output_dir=str(tmp_path), use_cpu=True, report_to=[], max_steps=1, disable_tqdm=True)

    def on_rank(rank):
        sp, found = startrail.SequenceParallel("1x1"), []
        for name in ("cp_size", "sp_size"):
            arguments = TrainingArguments(**options)
            arguments.parallelism_config = SimpleNamespace(**{"cp_size": 1, "sp_size": 1, name: 2})
            found.append(error_of(lambda: StarTrailTrainer(tiny("llama"), arguments, sp=sp)))  # noqa: B023
        plain = Trainer(attach(tiny("llama"), sp), TrainingArguments(**options), train_dataset=[row])
        found.append(error_of(plain.train))
        os.environ["PARALLELISM_CONFIG_CP_SIZE"] = "4"
        found.append(error_of(lambda: StarTrailTrainer(tiny("llama"), args=TrainingArguments(**options), sp=sp)))
        return found

    ((cp, sp, plain, environment),) = run_local(on_rank, 1)
    assert cp == "ValueError: parallelism_config has cp_size=2, but sp shards the sequences: leave cp_size at 1"
    assert sp == "ValueError: parallelism_config has sp_size=2, but sp shards the sequences: leave sp_size at 1"
    assert "the model is attached to startrail: call model(**shard_batch" in plain
    assert "parallelism_config has cp_size=4" in environment


def test_trainers_own_hook_rejects_our_attention_so_ours_replaces_it():
    """StarTrailMixin needs its own hook: Trainer's accepts only SDPA."""
    sp = startrail.SequenceParallel("1x1")
    model = attach(tiny("llama"), sp)
    trainer = SimpleNamespace(accelerator=SimpleNamespace(parallelism_config=ParallelismConfig(cp_size=2)), sp=sp)
    inputs = dict(input_ids=IDS, labels=IDS)
    text = error_of(lambda: Trainer._prepare_context_parallel_inputs(trainer, model, dict(inputs)))
    assert "Context parallelism is supported only with SDPA attention, you are using startrail-" in text
    _, made = StarTrailMixin._prepare_context_parallel_inputs(trainer, model, dict(inputs))
    assert model(**made).loss.isfinite()


def test_accelerate_takes_no_other_backend_and_none_on_cpus():
    """accelerate has no plug-in interface today. This test fails if that changes."""
    assert "cp_backend must be one of ['torch']" in error_of(
        lambda: ParallelismConfig(cp_size=2, cp_backend="startrail")
    )

    def on_rank(rank):
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29535")
        refused = error_of(lambda: Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2)))
        # torch's context, which accelerate's maybe_context_parallel enters, cuts the batch in place: each rank its own
        sp = startrail.SequenceParallel("1x2", timeout=20)
        model, ids = attach(tiny("llama"), sp), IDS.clone()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))

        def step():
            with context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1], no_restore_buffers={ids}):
                model(**shard_batch(sp, ids, ids)).loss.backward()

        return refused, error_of(step)

    for refused, cut_twice in run_local(on_rank, 2):
        assert "ParallelismConfig is only compatible" in refused
        assert "they were given different data: all must shard the same batches" in cut_twice


# --- diffusers


def test_a_model_of_diffusers_is_refused_with_what_to_do():
    model = type("DiTTransformer2DModel", (torch.nn.Module,), {"__module__": "diffusers.models.transformers.dit"})()
    assert error_of(lambda: attach(model, startrail.SequenceParallel("1x1"))) == (
        "ValueError: attach needs a transformers model, got DiTTransformer2DModel: "
        "use startrail.integrations.diffusers.attach"
    )
