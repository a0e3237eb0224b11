"""The recipe for torchtitan in docs/integrations.md, with its own trainer: loss and gradients of one process."""

import copy
import os
import shlex
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule

from startrail.launch.local import run_local
from tests.helpers import ROOT, error_of
from tests.integrations.tiny import InFloat64, differences, gradients, tokens

DOCUMENTS = [[40], [31, 9], [40]]  # by row; some must be split over two ranks
IDS = tokens(3, 41)
POSITIONS = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in DOCUMENTS])
BATCH = {"input": IDS[:, :-1], "positions": POSITIONS}, IDS[:, 1:]


@pytest.fixture
def recipe(monkeypatch):
    """The recipe as a module. torchtitan assumes CUDA if there is no accelerator: here the CPU is one."""
    monkeypatch.setattr(torch._utils, "_get_available_device_type", lambda: "cpu")
    pytest.importorskip("torchtitan", reason="torchtitan is not installed (`make setup` installs it)")
    monkeypatch.syspath_prepend(ROOT / "examples" / "recipes")
    import torchtitan_llama

    return torchtitan_llama


def test_the_command_of_the_recipe(recipe):
    from torchtitan.config import ConfigManager

    command = recipe.__doc__.split("\n\n")[1].replace("\\\n", " ")
    _, arguments = command.split("torchtitan.train")
    config = ConfigManager().parse_args(shlex.split(arguments))
    assert type(config) is recipe.StarTrailTrainer.Config
    assert config.plan == "u4" and config.parallelism.context_parallel_degree == 4


@pytest.mark.parametrize("kind", ["llama3", "qwen3 with experts"])
def test_the_recipe_gives_the_loss_and_gradients_of_one_process(kind, recipe, tmp_path, monkeypatch):
    """Llama 3 with tensor parallelism, and a mixture whose experts are sharded over pairs of the sequence's ranks."""
    torch.set_num_threads(1)
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x)  # experts round to it, and so would amplify differences

    def on_rank(rank):
        from torchtitan.models.common.moe import GroupedExperts

        os.environ.update(RANK=str(rank), WORLD_SIZE="4", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="4")
        config = (small_config if kind == "llama3" else small_mixture)(recipe, tmp_path)
        alone = None if rank else single_process_model(config)
        trainer = on_cpu(recipe, config)
        (model,) = trainer.model_parts
        meshes = {name: x.device_mesh.mesh_dim_names for name, x in unwrapped(model)}
        assert all(("ep" in mesh) == ("experts" in name) for name, mesh in meshes.items())
        weights = {name: x.full_tensor() for name, x in unwrapped(model)}
        trainer.train_step(trainer.batch_generator(trainer.dataloader))
        moved = sent(trainer)
        trainer.sp.reset_counters()
        _, _, others = trainer.post_dataloading_process(*BATCH)
        q, k = (torch.randn(1, heads, others["attention_masks"].local, 16, requires_grad=True) for heads in (8, 2))
        others["attention_masks"].attention(q, k, k, causal=True).sum().backward()
        assert 0 < 2 * sent(trainer) == moved, "each of the two layers attends once per pass"
        ours = {name: x.grad.full_tensor() for name, x in unwrapped(model)}
        ours["loss"] = torch.tensor(trainer.metrics_processor.log.call_args.args[1])
        if alone is None:
            return []
        alone.load_state_dict(weights, strict=False)
        single = one_process(alone)
        monkeypatch.setattr(GroupedExperts, "_grouped_mm", grouped_mm)  # torch's is for less precise numbers only
        with InFloat64():
            truth = one_process(alone.double())
        assert ours.keys() == truth.keys() and len(ours) == (18 if kind == "llama3" else 24)
        return differences(ours, truth, 2e-6, single)

    assert run_local(on_rank, 4) == [[]] * 4


def test_the_new_backend_waits_for_an_fsdp_of_plain_tensors(recipe, tmp_path):
    """When this fails, torchtitan's default backend may run on this torch: write the recipe for it."""

    def on_rank(rank):
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
        config = small_config(recipe, tmp_path)
        config.parallelism.spmd_backend, config.parallelism.tensor_parallel_degree = "spmd_types", 1
        return error_of(lambda: on_cpu(recipe, config))

    for text in run_local(on_rank, 2):
        assert text.startswith("ValueError: When dp_mesh_dims is provided, all parameters must be DTensors"), text


def small_config(recipe, folder):
    """torchtitan's smallest Llama 3, with two layers and grouped heads."""
    from torchtitan.models.common.config_utils import make_gqa_config
    from torchtitan.models.llama3 import config_registry

    config = recipe.with_startrail(config_registry.llama3_debugmodel())
    model = config.model_spec.model
    del model.layers[2:]
    for layer in model.layers:
        old = layer.attention
        layer.attention = make_gqa_config(
            dim=old.dim, n_heads=old.n_heads, n_kv_heads=4, wqkv_param_init=old.wo.param_init,
            wo_param_init=old.wo.param_init, inner_attention=old.inner_attention, fuse_qkv=True, rope=old.rope,
        )  # fmt: skip
    config.parallelism.context_parallel_degree = config.parallelism.tensor_parallel_degree = 2
    return with_sizes(config, "1x2", folder)


def small_mixture(recipe, folder):
    """torchtitan's Qwen3 with 8 experts, which ranks 0, 1 and 2, 3 have between them."""
    from torchtitan.models.common import CosSinRoPE
    from torchtitan.models.qwen3 import _build_qwen3_moe_layers, config_registry

    config = recipe.with_startrail(config_registry.qwen3_moe_debug())
    model = config.model_spec.model
    model.layers[:] = _build_qwen3_moe_layers(
        n_layers=2, dim=model.dim, n_heads=8, n_kv_heads=2, head_dim=16, moe_hidden_dim=32, num_experts=8, top_k=2,
        attn_backend="flex", rope=CosSinRoPE.Config(dim=16, max_seq_len=4096), moe_comm_backend="standard",
    )  # fmt: skip
    config.parallelism.context_parallel_degree, config.parallelism.expert_parallel_degree = 4, 2
    return with_sizes(config, "u2/1x2", folder)


def with_sizes(config, plan, folder):
    config.plan, config.dump_folder = plan, str(folder)
    config.training.seq_len, config.training.local_batch_size = POSITIONS.shape[1], len(POSITIONS)
    config.training.mixed_precision_param = "float32"
    config.training.max_norm = 1e9
    config.validator.enable = False
    return config


def on_cpu(recipe, config):
    """The trainer, without what needs a GPU, a tokenizer or a dataset."""
    from torchtitan.distributed import ParallelDims

    class Trainer(recipe.StarTrailTrainer):
        def init_distributed(self):  # the ranks are connected already
            return ParallelDims.from_config(self.config.parallelism, dist.get_world_size())

    memory = MagicMock(device_name="CPU")
    memory.get_peak_stats.return_value = SimpleNamespace(max_reserved_gib=0, max_reserved_pct=0)
    config.metrics = SimpleNamespace(build=lambda **options: MagicMock(device_memory_monitor=memory))
    config.tokenizer = SimpleNamespace(build=lambda **options: None)
    config.dataloader = SimpleNamespace(build=lambda **options: [BATCH])
    trainer = Trainer(config)
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it reduces
    return trainer


def single_process_model(config):
    """The same model with torchtitan's attention for one process."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    model = copy.deepcopy(config.model_spec.model)
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    built = model.build()
    built.init_states()
    return built


def one_process(model):
    """Loss and gradients, document by document."""
    model.zero_grad()
    loss = 0.0
    for ids, lengths in zip(IDS, DOCUMENTS, strict=True):
        for x, labels in zip(ids[:-1].split(lengths), ids[1:].split(lengths), strict=True):
            logits = model(x.unsqueeze(0), torch.arange(len(x)).unsqueeze(0))
            loss = loss + F.cross_entropy(logits[0], labels, reduction="sum") / POSITIONS.numel()
    loss.backward()
    return {**gradients(model), "loss": loss.detach()}


def grouped_mm(experts, *, A, B_t, offs):  # noqa: N803
    rows = A.tensor_split(offs[:-1].tolist())
    return torch.cat([x @ weight for x, weight in zip(rows, B_t, strict=True)])


def sent(trainer):
    return sum(level["bytes"] for level in trainer.sp.traffic().values())


def unwrapped(model):
    """Parameters by the names that they have without activation checkpointing."""
    return [(name.replace("_checkpoint_wrapped_module.", ""), x) for name, x in model.named_parameters()]
