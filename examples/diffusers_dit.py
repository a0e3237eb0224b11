"""A diffusion transformer of diffusers on long image sequences, split over all ranks.

    torchrun --nproc-per-node 4 examples/diffusers_dit.py

The model is tiny and the images are made up, so this runs anywhere without a download. With
``DiTTransformer2DModel.from_pretrained(...)``, the lines marked (*) stay the same.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import DDIMScheduler, DiTTransformer2DModel

import startrail
from startrail.integrations.diffusers import attach

HEADS, CLASSES = 4, 2


def images(step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stripes along one of two directions, the same on every rank of a sequence (*)."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(0, CLASSES, (4,), generator=generator)
    stripes = torch.sin(torch.arange(size) * 0.8).expand(size, size)
    return torch.stack([stripes if label else stripes.T for label in labels]).unsqueeze(1).repeat(1, 4, 1, 1), labels


def main(plan: str = "auto", size: int = 32, steps: int = 12) -> list[float]:
    sp = startrail.SequenceParallel(plan, heads=HEADS)
    torch.manual_seed(0)  # the same weights, noise and timesteps on every rank of a sequence (*)
    model = DiTTransformer2DModel(
        num_attention_heads=HEADS, attention_head_dim=16, in_channels=4, num_layers=2, sample_size=size, patch_size=2,
        num_embeds_ada_norm=CLASSES, norm_num_groups=4,
    )  # fmt: skip
    attach(model, sp)  # (*)
    model.enable_gradient_checkpointing()  # does not recompute the distributed attention (*)
    scheduler = DDIMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        clean, labels = images(step, size)
        noise, timestep = torch.randn_like(clean), torch.randint(0, 100, (len(clean),))
        noisy = scheduler.add_noise(clean, noise, timestep)
        result = model(noisy, timestep=timestep, class_labels=labels).sample  # whole, on every rank (*)
        loss = F.mse_loss(result, noise)
        loss.backward()
        startrail.sum_gradients(model.parameters(), sp.group)  # with DDP or FSDP, use gradient_factor (*)
        sp.check()  # raises if a peer was lost during this step, before the weights change
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if sp.rank == 0:
            print(f"step {len(losses)}: loss {losses[-1]:.3f}", flush=True)
    return losses


if __name__ == "__main__":
    dist.init_process_group()
    main()
    dist.destroy_process_group()
