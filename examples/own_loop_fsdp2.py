"""A plain model in your own training loop: startrail shards the sequence, FSDP2 the parameters, over the same ranks.

    torchrun --nproc-per-node 4 examples/own_loop_fsdp2.py

Five mistakes raise no error. The lines that avoid them are marked (1) to (5); ``startrail verify`` checks your model.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import startrail

WIDTH, HEADS, VOCAB = 64, 4, 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, sequence: startrail.Sequence) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = sequence.attention(q, k, v, causal=True)  # (batch, heads, local tokens, dim)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, longest: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(longest, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor, positions: Tensor, sequence: startrail.Sequence) -> Tensor:
        x = self.words(ids) + self.places(positions)  # (3) global positions
        for block in self.blocks:
            x = block(x, sequence)
        return self.head(x)


def main(plan: str = "auto", length: int = 250, steps: int = 10) -> list[float]:
    sp = startrail.SequenceParallel(plan, heads=HEADS)
    torch.manual_seed(0)  # (5) the same weights on every rank, before they are sharded
    model = Model(length)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        ids = (torch.arange(length) * (step % 3 + 1) % 50).unsqueeze(0)  # (5) the same data on every rank
        sequence = sp.sequence(length)
        labels = sequence.shard_labels(ids)  # (2) shifted before sharding, (3) padded with -100
        logits = model(sequence.shard(ids, 1), sequence.positions(), sequence)
        loss_sum = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
        loss = startrail.global_mean(
            loss_sum, (labels != -100).sum(), sp.group
        )  # (1) divided by the count of all ranks
        (startrail.gradient_factor(model) * loss).backward()  # (4) FSDP averages, but gradients must be summed
        sp.check()  # raises if a peer was lost during this step, before the weights change
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    dist.init_process_group()
    print(main())
    dist.destroy_process_group()
