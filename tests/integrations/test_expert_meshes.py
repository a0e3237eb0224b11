"""Experts that FSDP shards over a mesh of their own, and copies over nodes, in transformers and torchtitan."""

import warnings

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'startrail[transformers]')")

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from transformers.distributed import DistributedConfig, expert_parallel, fsdp
from transformers.distributed import utils as of_transformers

import startrail
from startrail.integrations.transformers import attach, shard_batch
from startrail.launch.local import run_local
from startrail.step_checks import check_fsdp_meshes
from tests.helpers import error_of
from tests.integrations.one_process import BATCHES, compare, summed, truth_of
from tests.integrations.tiny import tiny

EXPERTS = [f"model.layers.{layer}.mlp.experts" for layer in range(2)]


def checked(model, group=None):
    """What the check says: an error, warnings, or nothing."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        text = error_of(lambda: check_fsdp_meshes(model, group))
    return [text] if text != "no error" else [str(each.message) for each in warned]


def as_transformers_does(model, config, mesh):
    """Its own functions, on a model that is there already."""
    model.config.distributed_config = config
    styles = {"": "ep_dispatch_experts", ".gate_up_proj": "grouped_gemm", ".down_proj": "grouped_gemm"}
    plan = {f"{name}{suffix}": style for suffix, style in reversed(styles.items()) for name in EXPERTS}
    expert_parallel.apply_expert_parallelism(model, mesh.get_mesh("ep"), mesh.get_mesh("tp"), plan)
    layers = {f"model.layers.{layer}": "reshard" for layer in range(2)}
    return fsdp.apply_fully_sharded_data_parallelism(model, mesh, layers, plan)


@pytest.mark.parametrize("settings", [
    dict(fsdp_size=4, ep_size=2), dict(fsdp_size=4, ep_size=4), dict(dp_replicate_size=2, fsdp_size=2, ep_size=2),
])  # fmt: skip
def test_experts_of_transformers(settings, monkeypatch):
    """Loss and gradients of one process. With copies over two nodes, each node has its own batch."""
    truth, batch = truth_of("qwen3-moe", BATCHES["uneven"]), BATCHES["uneven"]
    count = (batch["labels"][:, 1:] != -100).sum()
    nodes = settings.get("dp_replicate_size", 1)
    monkeypatch.setattr(of_transformers, "_bind_local_device", lambda *arguments: None)
    monkeypatch.setattr(of_transformers, "_ensure_torch_distributed", lambda *arguments: None)
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device("cpu"))

    def on_rank(rank):
        config = DistributedConfig(**settings)
        _, mesh = of_transformers.initialize_distributed_mesh(config)
        sp = startrail.SequenceParallel(f"u{4 // nodes}", mesh=mesh.get_mesh("fsdp"))
        model = as_transformers_does(attach(tiny("qwen3-moe"), sp), config, mesh)
        mine = batch if nodes == 1 else {name: x[rank // 2 : rank // 2 + 1] for name, x in batch.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss = model(**shard_batch(sp, **mine, num_items_in_batch=count)).loss
        (startrail.gradient_factor(model) * loss).backward()
        grads = {name: x.grad.full_tensor() for name, x in model.named_parameters()}
        return compare(summed(loss), grads, truth)

    assert run_local(on_rank, 4, deadline=100) == [[]] * 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.experts = nn.Linear(4, 4), nn.Linear(4, 8, bias=False)


def as_torchtitan_does(dims):
    """Its meshes: experts are sharded over ep, then over efsdp; sums are not divided."""
    names = ["dp_replicate"] if dims.dp_replicate > 1 else []
    model = Layer()
    whole = distribute_tensor(model.experts.weight.data, dims.get_mesh("ep"), [Shard(0)])
    model.experts.weight = nn.Parameter(whole)
    fully_shard(model.experts, mesh=dims.get_mesh([*names, "efsdp"]))
    fully_shard(model, mesh=dims.get_mesh([*names, "fsdp"]))
    for module in (model, model.experts):
        module.set_gradient_divide_factor(1.0)
    return model


def test_meshes_of_torchtitan(monkeypatch):
    pytest.importorskip("torchtitan", reason="torchtitan is not installed (`make setup` installs it)")
    monkeypatch.setattr(torch._utils, "_get_available_device_type", lambda: "cpu")
    from torchtitan.distributed import parallel_dims

    monkeypatch.setattr(parallel_dims, "device_type", "cpu")

    def on_rank(rank):
        found = []
        for replicas, ep in ((1, 4), (1, 8), (2, 2), (2, 4)):
            sizes = dict(dp_replicate=replicas, dp_shard=1, cp=8 // replicas, tp=1, pp=1, ep=ep, world_size=8)
            dims = parallel_dims.ParallelDims(**sizes, spmd_backend="partial_dtensor")
            dims.build_mesh()
            model = as_torchtitan_does(dims)
            found.append((checked(model, dims.get_mesh("cp").get_group()), startrail.gradient_factor(model)))
        return found

    assert run_local(on_rank, 8, deadline=100) == [[([], 1)] * 4] * 8


def sharded(mesh, experts, dense, divide=None):
    model = Layer()
    fully_shard(model.experts, mesh=mesh[experts])
    if divide:
        model.experts.set_gradient_divide_factor(divide)
    return fully_shard(model, mesh=dense)


def test_mistakes_and_experts_of_a_program_are_told_apart():
    def on_rank(rank):
        flat = init_device_mesh("cpu", (8,), mesh_dim_names=("dp_sp",))
        own = init_device_mesh("cpu", (4, 2), mesh_dim_names=("efsdp", "ep"))
        other = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "sp"))
        hsdp = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp_replicate", "fsdp"))
        group = other["sp"].get_group()
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        return {
            "experts": checked(sharded(own, "efsdp", flat, 8.0)),
            "divided by too little": checked(sharded(own, "efsdp", flat)),
            "no experts": checked(sharded(other, "dp", flat), group),
            "copies over nodes": checked(fully_shard(Layer(), mesh=hsdp), group),
            "data x sequence": checked(fully_shard(Layer(), mesh=other), group),
            "more than the sequence": checked(
                fully_shard(Layer(), mesh=other), dist.new_group(pair, use_local_synchronization=True)
            ),
        }

    for found in run_local(on_rank, 8, deadline=100):
        assert found["experts"] == found["copies over nodes"] == found["more than the sequence"] == []
        (text,) = found["divided by too little"]
        assert "by 4, and others by 8: call experts.set_gradient_divide_factor(8)" in text
        (text,) = found["no experts"]
        assert text.startswith("ValueError: FSDP reduces gradients over ranks") and "(dp), but a sequence" in text
        (text,) = found["data x sequence"]
        assert "keeps 2 copies of the parameters over dp and shards them over sp only (HSDP)" in text
