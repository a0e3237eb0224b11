"""torchtitan's trainer and its Llama 3 with startrail instead of its own context parallelism.

    torchrun --nproc-per-node 8 -m torchtitan.train --module torchtitan_llama --config llama3_8b \
        --parallelism.context_parallel_degree 4 --plan u4 --training.seq_len 131072

Start it in this file's folder, or put that folder on PYTHONPATH. ``context_parallel_degree`` stays torchtitan's: it makes
the mesh, gives all ranks of a sequence the same batches, and adds those ranks to FSDP's. startrail splits the tokens and
runs attention. torchtitan hands each layer a mask; here, that is the startrail sequence.
"""

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import override
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.llama3 import config_registry, parallelize
from torchtitan.protocols.module import Module
from torchtitan.trainer import Trainer

import startrail


class Attention(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, attention_masks: startrail.Sequence, **options: Any) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return attention_masks.attention(q, k, v, causal=True, scale=options["scale"]).transpose(1, 2)


@override(target=FlexAttention.Config, description="attention by startrail")
def attention(config: FlexAttention.Config) -> Attention.Config:
    return Attention.Config()  # without torchtitan's sharding, which would gather keys and values


class StarTrailTrainer(Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        plan: str = "auto"
        """startrail's plan for the ranks of one sequence."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        layer = self.model_config.first_attention
        heads = dict(heads=layer.n_heads, kv_heads=layer.n_kv_heads or layer.n_heads)
        self.sp = startrail.SequenceParallel(config.plan, mesh=self.parallel_dims.get_mesh("cp"), **heads)
        self.optimizers.register_step_pre_hook(lambda *_: self.sp.check())  # before the weights change

    def post_dataloading_process(self, inputs: dict[str, Tensor], labels: Tensor) -> tuple[Tensor, Tensor, dict]:
        """This rank's tokens. The rows of a batch become one sequence, in which a document begins at position 0."""
        tokens, positions, labels = (x.reshape(1, -1) for x in (inputs["input"], inputs["positions"], labels))
        starts = (positions[0] == 0).nonzero().flatten().tolist()
        sequence = self.sp.sequence(tokens.shape[1], documents=[*starts, tokens.shape[1]])
        labels = sequence.shard(labels, 1, IGNORE_INDEX)  # already shifted by torchtitan's loader
        self.ntokens_seen += labels.numel()
        return sequence.shard(tokens, 1), labels, dict(positions=sequence.shard(positions, 1), attention_masks=sequence)


def llama3_8b() -> StarTrailTrainer.Config:
    """torchtitan's own configuration, with this trainer and this attention."""
    return with_startrail(config_registry.llama3_8b())


def with_startrail(config: Trainer.Config) -> StarTrailTrainer.Config:
    config.override.imports.append(f"{__name__}.attention")
    parallelize.apply_cp_to_forward = lambda *_: None  # would put torchtitan's own into attention
    config.training.disable_cuda_graphs = True  # each batch has documents of its own
    return StarTrailTrainer.Config(**{field.name: getattr(config, field.name) for field in fields(config)})
