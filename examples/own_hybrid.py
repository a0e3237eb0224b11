"""A hybrid model of your own: gated delta nets, latent attention, and a training loop.

    torchrun --nproc-per-node 4 examples/own_hybrid.py
    startrail verify examples/own_hybrid.py:make --ranks 4

Five mistakes raise no error. The lines that avoid them are marked (1) to (5); ``startrail verify`` checks your model.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import startrail

WIDTH, HEADS, DIM, RANK, ROPE, VOCAB = 64, 4, 16, 32, 8, 128


class Delta(nn.Module):
    """A gated delta net: a convolution over 4 tokens, then a recurrence. Only 3 tokens and a state cross ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gates = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 2 * HEADS)
        self.window, self.out = nn.Parameter(torch.randn(3 * WIDTH, 4) / 2), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, seq: startrail.Sequence) -> Tensor:
        mixed = seq.conv1d(self.qkv(x), self.window, activation="silu", dim=1)
        q, k, v = mixed.unflatten(-1, (3, HEADS, DIM)).unbind(2)
        decay, beta = self.gates(x).chunk(2, -1)
        y = seq.scan(startrail.gated_delta_rule, q, k, v, -F.softplus(decay), beta.sigmoid(), normalize=True)
        return self.out(y.flatten(2))


class Latent(nn.Module):
    """Latent attention: keys and values of all heads are expanded from one latent per token, which is what travels."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.down = nn.Linear(WIDTH, HEADS * (DIM + ROPE)), nn.Linear(WIDTH, RANK + ROPE)
        self.norm, self.up = nn.RMSNorm(RANK), nn.Linear(RANK, HEADS * 2 * DIM, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, seq: startrail.Sequence) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, DIM + ROPE)).transpose(1, 2)
        latent, shared = self.down(x).split((RANK, ROPE), -1)  # rotary embeddings would take seq.positions()
        w_k, w_v = self.up.weight.view(HEADS, 2 * DIM, RANK).chunk(2, 1)
        y = seq.latent_attention(q, self.norm(latent), shared, w_k, w_v, causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.layers = nn.ModuleList([Delta(), Delta(), Delta(), Latent()])
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in self.layers)

    def forward(self, ids: Tensor, seq: startrail.Sequence) -> Tensor:
        x = self.words(ids)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x), seq)
        return self.head(x)


def make():
    """For ``startrail verify``: a model, a packed batch, and the step below."""
    torch.manual_seed(0)  # (5) the same weights and the same batch on every rank
    return Model(), (torch.arange(200).unsqueeze(0) * 7 % 50, [0, 60, 70, 200]), step


def step(model: Model, batch: tuple[Tensor, list[int]], sp: startrail.SequenceParallel) -> Tensor:
    ids, documents = batch
    seq = sp.sequence(ids.shape[1], documents)
    labels = seq.shard_labels(ids)  # (2) shifted before sharding, (3) padded with -100
    logits = model(seq.shard(ids, 1), seq)
    loss_sum = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss = startrail.global_mean(loss_sum, (labels != -100).sum(), sp.group)  # (1) divided by the count of all ranks
    loss.backward()
    startrail.sum_gradients(model.parameters(), sp.group)  # (4)
    return loss


def main(plan: str = "auto", steps: int = 20) -> list[float]:
    sp = startrail.SequenceParallel(plan, heads=HEADS)
    model, batch, _ = make()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(steps):
        losses.append(step(model, batch, sp).item())
        sp.check()  # raises if a peer was lost during this step, before the weights change
        optimizer.step()
        optimizer.zero_grad()
    return losses


if __name__ == "__main__":
    dist.init_process_group()
    print(main())
    dist.destroy_process_group()
