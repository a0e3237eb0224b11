"""Pipeline and sequence parallelism: stages of a plain model, each with its sequences split over two ranks.

    torchrun --nproc-per-node 4 examples/recipes/pipeline.py      # two stages x two ranks

Every microbatch is a row of packed documents, with lengths of its own. The lines marked (*) are startrail's.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

import startrail
from startrail.integrations.pipeline import Microbatches

WIDTH, HEADS, VOCAB, BLOCKS = 32, 4, 64, 4
LENGTH, DOCUMENTS = 96, ([0, 40, 96], [0, 7, 64, 96], [0, 96], [0, 33, 50, 96])  # of four microbatches


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, sequence: startrail.Sequence) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(sequence.attention(q, k, v, causal=True).transpose(1, 2).flatten(2))  # (*)
        return x + self.mlp(self.norm2(x))


class Stage(nn.Module):
    """Stage ``index`` of ``number`` of the model, which has the same weights on every rank."""

    def __init__(self, index: int, number: int, microbatches: Microbatches) -> None:
        super().__init__()
        torch.manual_seed(0)
        words, blocks, head = nn.Embedding(VOCAB, WIDTH), [Block() for _ in range(BLOCKS)], nn.Linear(WIDTH, VOCAB)
        own = range(BLOCKS * index // number, BLOCKS * (index + 1) // number)
        self.words, self.blocks = words if index == 0 else None, nn.ModuleDict({str(at): blocks[at] for at in own})
        self.head, self.microbatches = head if index == number - 1 else None, microbatches

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        sequence = self.microbatches[number]  # (*)
        x = x if self.words is None else self.words(x)
        for block in self.blocks.values():
            x = block(x, sequence)
        return x if self.head is None else self.head(x)


def step(plan: str = "1x2", rounds: int = 1) -> tuple[float, list[Stage]]:
    """The loss of one step, and this rank's stages with their gradients. ``rounds``: stages per rank (interleaved)."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "sp"))
    group, rank, number = mesh["pp"].get_group(), mesh["pp"].get_local_rank(), 2 * rounds
    sp = startrail.SequenceParallel(plan, mesh=mesh["sp"])  # (*)
    microbatches = Microbatches(sp, group)  # (*)
    stages = [Stage(index, number, microbatches) for index in range(rank, number, 2)]
    sequences = [sp.sequence(LENGTH, documents) for documents in DOCUMENTS]  # (*)
    ids = torch.randint(VOCAB, (len(DOCUMENTS), LENGTH), generator=torch.Generator().manual_seed(1))
    rows = [(sequence, row.unsqueeze(0)) for sequence, row in zip(sequences, ids, strict=True)]
    local = torch.cat([sequence.shard(row, 1) for sequence, row in rows])  # (*)
    labels = torch.cat([sequence.shard_labels(row) for sequence, row in rows])  # (*)
    count = (labels != -100).sum()
    dist.all_reduce(count, group=sp.group)

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100) / count

    def wrapped(index: int, stage: Stage) -> PipelineStage:
        inner = torch.empty(1, local.shape[1], WIDTH, requires_grad=True)
        given = local[:1] if index == 0 else inner
        made = torch.empty(1, local.shape[1], VOCAB, requires_grad=True) if index == number - 1 else inner
        return PipelineStage(stage, index, number, torch.device("cpu"), given, made, group=group)

    parts = [wrapped(index, stage) for index, stage in zip(range(rank, number, 2), stages, strict=True)]
    options = dict(n_microbatches=len(DOCUMENTS), loss_fn=loss_of, scale_grads=False)
    schedule = Schedule1F1B(parts[0], **options) if rounds == 1 else ScheduleInterleaved1F1B(parts, **options)
    losses: list[Tensor] = []
    numbers = microbatches.start(sequences)  # (*)
    schedule.step(*([local] if rank == 0 else []), number=numbers, target=labels, losses=losses, return_outputs=False)
    for stage in stages:
        startrail.sum_gradients(stage.parameters(), sp.group)  # (*)
    loss = torch.stack(losses).sum().detach() if losses else torch.zeros(())
    dist.all_reduce(loss)  # the last stage has shares of it
    return loss.item(), stages


if __name__ == "__main__":
    dist.init_process_group("gloo")
    loss, _ = step()
    print(f"rank {dist.get_rank()}: loss {loss:.4f}")
    dist.destroy_process_group()
