"""torchtitan's trainer, Llama 3 and Qwen3 (also its mixtures) with startrail instead of its own context parallelism.

    torchrun --nproc-per-node 8 -m torchtitan.train --module torchtitan_llama --config llama3_8b \
        --parallelism.context_parallel_degree 4 --plan u4 --training.seq_len 131072
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import derive, override
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.llama3 import config_registry as llama3
from torchtitan.models.llama3 import parallelize as parallelize_llama3
from torchtitan.models.qwen3 import config_registry as qwen3
from torchtitan.models.qwen3 import parallelize as parallelize_qwen3
from torchtitan.protocols.module import Module
from torchtitan.trainer import Trainer

from startrail import Sequence, SequenceParallel

SAVED = SelectiveAC.get_save_ops
SelectiveAC.get_save_ops = lambda self: SAVED(self) | {torch.ops.startrail.attention.default}  # or it would run twice
for family in (parallelize_llama3, parallelize_qwen3):  # which would use torchtitan's own context parallelism
    family.apply_cp_to_forward = lambda *_: None


class Attention(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, **options: Any) -> Tensor:  # noqa: N803
        sequence: Sequence = options["attention_masks"]  # torchtitan hands this to every layer
        q, k, v = (x[:, : sequence.local].transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        out = sequence.attention(q, k, v, causal=True, scale=options["scale"]).transpose(1, 2)
        return F.pad(out, (0, 0, 0, 0, 0, q_BLNH.shape[1] - sequence.local))


@override(target=FlexAttention.Config)
def attention(config: FlexAttention.Config) -> Attention.Config:
    return derive(config, Attention.Config)  # with its sharding of heads, for tensor parallelism


class StarTrailTrainer(Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        plan: str = "auto"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        heads = self.model_config.first_attention.n_heads // self.parallel_dims.tp
        self.sp = SequenceParallel(config.plan, mesh=self.parallel_dims.get_mesh("cp"), heads=heads)
        self.optimizers.register_step_pre_hook(lambda *_: self.sp.check())  # before the weights change

    def post_dataloading_process(self, inputs: dict[str, Tensor], labels: Tensor) -> tuple[Tensor, Tensor, dict]:
        """This rank's tokens. Rows become one sequence, in which a document begins wherever a position is 0."""
        tokens, positions, labels = (x.reshape(1, -1) for x in (inputs["input"], inputs["positions"], labels))
        starts = (positions[0] == 0).nonzero().flatten().tolist()
        sequence = self.sp.sequence(tokens.shape[1], documents=[*starts, tokens.shape[1]])
        padding = -sequence.local % (getattr(self.config.loss, "num_chunks", 1) * self.parallel_dims.tp)
        values = (tokens, 0), (labels, IGNORE_INDEX), (positions, 0)  # the loader has shifted the labels
        tokens, labels, positions = (F.pad(sequence.shard(x, 1, y), (0, padding), value=y) for x, y in values)
        self.ntokens_seen += sequence.local
        return tokens, labels, dict(positions=positions, attention_masks=sequence)


def with_startrail(config: Trainer.Config) -> StarTrailTrainer.Config:
    config.override.imports.append(f"{__name__}.attention")
    config.parallelism.spmd_backend = "partial_dtensor"  # the default needs an FSDP newer than torch 2.13's
    config.training.disable_cuda_graphs = True  # documents differ from batch to batch
    return StarTrailTrainer.Config(**{field.name: getattr(config, field.name) for field in fields(config)})


def llama3_8b() -> StarTrailTrainer.Config:  # and so on, with torchtitan's own settings
    return with_startrail(llama3.llama3_8b())


def qwen3_30b_a3b() -> StarTrailTrainer.Config:  # with --parallelism.expert_parallel_degree
    return with_startrail(qwen3.qwen3_30b_a3b())
