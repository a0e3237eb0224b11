"""A vision transformer in plain PyTorch, with no code for startrail in it, on long sequences of patches.

    torchrun --nproc-per-node 4 examples/plain_vit.py

``attach`` finds the blocks, which call ``F.scaled_dot_product_attention``, and splits their tokens over all ranks. The
rest sees all tokens. The images are made up. With a model and images of your own, the lines marked (*) stay the same.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import startrail
from startrail.integrations.modules import attach

WIDTH, HEADS, SIZE = 32, 4, 26  # 13 x 13 patches


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.inputs, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inputs(self.norms[0](x)).unflatten(2, (3 * HEADS, -1)).transpose(1, 2).chunk(3, 1)
        x = x + self.output(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(1, WIDTH, 2, 2), nn.Linear(WIDTH, 2)
        self.places = nn.Parameter(0.1 * torch.randn(1, (SIZE // 2) ** 2, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Noise, brighter in one of two classes, the same on every rank of a sequence (*)."""
    generator = torch.Generator().manual_seed(step)
    classes = torch.randint(0, 2, (8,), generator=generator)
    return torch.randn(8, 1, SIZE, SIZE, generator=generator) + classes.view(-1, 1, 1, 1), classes


def main(plan: str = "auto", steps: int = 8) -> list[float]:
    sp = startrail.SequenceParallel(plan, heads=HEADS)
    torch.manual_seed(0)  # the same weights on every rank (*)
    model = attach(ViT(), sp)  # (*)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        images, classes = batch(step)
        loss = F.cross_entropy(model(images), classes)  # whole inputs and results, the same on every rank (*)
        loss.backward()
        startrail.sum_gradients(model.parameters(), sp.group)  # with DDP or FSDP, use gradient_factor (*)
        sp.check()  # raises if a peer was lost during this step, before the weights change
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    dist.init_process_group()
    losses = main()
    if dist.get_rank() == 0:
        print("losses:", *(f"{loss:.3f}" for loss in losses))
    dist.destroy_process_group()
