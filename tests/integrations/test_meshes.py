"""Tensor parallelism, data x sequence x tensor meshes, selective checkpointing and distributed checkpoints."""

import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'startrail[transformers]')")

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import startrail
from startrail.integrations.transformers import attach, shard_batch
from startrail.launch.local import run_local
from tests.helpers import error_of
from tests.integrations.one_process import BATCHES, compare, many_ranks, summed, truth_of
from tests.integrations.tiny import tiny

LAYER = {
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}, "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel(),
}  # fmt: skip
HEAD = {"lm_head": ColwiseParallel(output_layouts=Replicate())}


def split_heads(model, mesh):
    for layer in model.model.layers:
        parallelize_module(layer, mesh, LAYER)
    return parallelize_module(model, mesh, HEAD)


def shard(model, mesh, **options):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def whole(model):
    return {
        name: x.grad.full_tensor() if hasattr(x.grad, "full_tensor") else x.grad for name, x in model.named_parameters()
    }


def policy(context, op, *arguments, **options):
    keep = op in (torch.ops.startrail.attention.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def test_meshes(tmp_path):
    """Each against one process, on one set of ranks. 4 query and 2 KV heads: 2 and 1 per rank after tensor parallelism,
    so that Ulysses replicates the KV head."""
    batch, truth = BATCHES["uneven"], truth_of("llama", BATCHES["uneven"])
    count = (batch["labels"][:, 1:] != -100).sum()

    def on_rank(rank):
        found = {}
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "sp", "tp"))
        sp = startrail.SequenceParallel("u2", mesh=mesh["sp"])
        both = mesh["dp", "sp"]._flatten("dp_sp")
        row = mesh["dp"].get_local_rank()
        mine = {name: x[row : row + 1] for name, x in batch.items()}

        # all three; the ranks of a tensor-parallel group have the same loss
        model = shard(attach(split_heads(tiny("llama"), mesh["tp"]), sp, tile_mlp=5), both)
        assert startrail.gradient_factor(model) == 4
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(**shard_batch(sp, **mine, num_items_in_batch=count)).loss
        (4 * loss).backward()
        found["dp x sp x tp"] = compare(summed(loss) / 2, whole(model), truth)
        optimizer.step()

        # sequence and tensor parallelism without FSDP: sum_gradients
        model = attach(split_heads(tiny("llama"), mesh["tp"]), sp)
        assert startrail.gradient_factor(model) == 1
        loss = model(**shard_batch(sp, **batch)).loss
        loss.backward()
        startrail.sum_gradients(model.parameters(), sp.group)
        found["sp x tp"] = compare(summed(loss) / 4, whole(model), truth)

        # heads that tensor parallelism leaves too few of
        refused = error_of(lambda: attach(split_heads(tiny("llama"), mesh["tp"]), startrail.SequenceParallel("u8")))

        # selective activation checkpointing with the user's own policy
        model = attach(tiny("llama"), sp)
        contexts = partial(create_selective_checkpoint_contexts, policy)
        for layer in model.model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)
        found["selective"] = compare(
            *(x / 4 if isinstance(x, float) else x for x in many_ranks(model, sp, batch)), truth
        )

        # FSDP over data and sequence: saved by ranks, loaded by one process
        model = shard(attach(tiny("llama"), sp), both)
        dcp.save({"model": model.state_dict()}, checkpoint_id=str(tmp_path / "dcp"))

        # a 2D mesh is HSDP, which is right, but holds more; a mesh without the sequence axis is wrong
        model = shard(attach(tiny("llama"), sp), mesh["dp", "sp"])
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            loss = model(**shard_batch(sp, **mine, num_items_in_batch=count)).loss
        (startrail.gradient_factor(model) * loss).backward()
        found["hsdp"] = compare(summed(loss) / 2, whole(model), truth)
        said = [str(x.message) for x in warned if "HSDP" in str(x.message)]
        model = shard(attach(tiny("llama"), sp), mesh["dp"])
        outside = error_of(lambda: model(**shard_batch(sp, **mine)))

        # nor does DDP over the data-parallel ranks reduce over those of a sequence
        for over in ("dp", "dp_sp"):
            group = mesh["dp"].get_group() if over == "dp" else both.get_group()
            model = DistributedDataParallel(attach(tiny("llama"), sp), process_group=group)
            loss = model(**shard_batch(sp, **mine, num_items_in_batch=count)).loss
            (startrail.gradient_factor(model) * loss).backward()
            found[over] = [error_of(torch.optim.SGD(model.parameters(), lr=0.1).step)]
        ddp, right = found.pop("dp"), found.pop("dp_sp")
        sequence = dist.get_process_group_ranks(sp.group)
        return {name: x for name, x in found.items() if x}, refused, said, outside, ddp, right, sequence

    for wrong, refused, said, outside, (ddp,), (right,), sequence in run_local(on_rank, 8):
        assert ddp.startswith(f"ValueError: gradients differ between ranks {sequence}, which share a sequence"), ddp
        assert right == "no error"
        assert wrong == {}
        assert "model.layers.0.self_attn: (heads / TP) % U must be 0: (4 / 2) % 8 = 2" in refused
        assert "leaves 2 of 4 query heads: use u1 or u2" in refused
        (text,) = said
        assert (
            "keeps 2 copies of the parameters over dp and shards them over sp only (HSDP): each rank holds 1/2" in text
        )
        assert "FSDP reduces gradients over ranks" in outside and "pass it the flattened mesh of both" in outside

    loaded = tiny("llama")
    expected = {name: x.clone() for name, x in loaded.state_dict().items()}
    for x in loaded.parameters():
        torch.nn.init.zeros_(x)
    state = {"model": loaded.state_dict()}
    dcp.load(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert all(torch.equal(x, expected[name]) for name, x in state["model"].items())
