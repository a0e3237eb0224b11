"""A DiT: images as patches, conditioned on time and class by adaLN-zero; flow matching to train it, Euler to sample.

>>> from startrail.training.models.configs import DIT_CONFIGS
>>> config = DIT_CONFIGS["dit-tiny"]
>>> model = DiT(config)
>>> noise, everywhere = torch.randn(2, config.tokens, config.patch_dim), torch.arange(config.tokens)
>>> labels = torch.tensor([3, 7])
>>> patches = sample(model, noise, labels, everywhere, F.scaled_dot_product_attention, steps=2)
>>> unpatchify(patches, config.patch, config.rows, config.columns).shape
torch.Size([2, 3, 32, 32])
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from startrail.training.models.configs import DiTConfig
from startrail.training.models.transformer import Attention, Transformer, angles, merge_heads, split_heads

TIME_FREQUENCIES = 128


class DiT(Transformer):
    """Maps noisy patches to the velocity from image to noise."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.patches_in = nn.Linear(config.patch_dim, width)
        self.time = nn.Sequential(nn.Linear(2 * TIME_FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(config.classes + 1, width)  # the last one stands for no class
        self.blocks = nn.ModuleList(DiTBlock(config) for _ in range(config.layers))
        self.modulation = nn.Linear(width, 2 * width)
        self.patches_out = nn.Linear(width, config.patch_dim)
        self.reset_parameters()

    def reset_parameter(self, name: str, parameter: Tensor) -> None:
        """adaLN-zero: modulations and the last projection start at zero, so every block starts as the identity."""
        if parameter.dim() == 1 or "modulation" in name or "patches_out" in name:
            nn.init.zeros_(parameter)
        elif "label" in name:
            nn.init.normal_(parameter)  # as large as the time's part of the condition, or classes are learned late
        else:
            nn.init.xavier_uniform_(parameter)

    def forward(self, patches: Tensor, positions: Tensor, time: Tensor, label: Tensor, attention: Attention) -> Tensor:
        """(batch, n, patch dim) patches -> their velocities, for times (batch,) from 0, image, to 1, noise.
        ``positions`` (n,) count the patches of the grid row by row: ``sequence.positions()``."""
        x = self.patches_in(patches)
        x = x + grid_embedding(positions, self.config.columns, self.config.width).to(x.dtype)
        turn = angles(1000 * time, TIME_FREQUENCIES, 10_000.0)
        waves = torch.cat((turn.cos(), turn.sin()), dim=-1).to(patches.dtype)
        condition = F.silu(self.time(waves) + self.label(label)).unsqueeze(1)
        for block in self.blocks:
            x = block(x, condition, attention)
        shift, scale = self.modulation(condition).chunk(2, dim=-1)
        return self.patches_out(modulate(x, shift, scale))


class DiTBlock(nn.Module):
    """One layer: attention, then an MLP; the condition shifts and scales their inputs and gates their outputs."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        width = config.width
        self.head_dim = config.head_dim
        self.modulation = nn.Linear(width, 6 * width)
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, condition: Tensor, attention: Attention) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=-1)
        q, k, v = (split_heads(x, self.head_dim) for x in self.qkv(modulate(x, shift1, scale1)).chunk(3, dim=-1))
        x = x + gate1 * self.output(merge_heads(attention(q, k, v)))
        return x + gate2 * self.mlp(modulate(x, shift2, scale2))


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """adaLN: a layer norm whose scale and shift come from the condition."""
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def grid_embedding(positions: Tensor, columns: int, width: int) -> Tensor:
    """(n,) grid positions -> (n, width): one half for the row, one for the column, each sines and cosines.

    >>> grid_embedding(torch.tensor([0, 4]), columns=3, width=4).round(decimals=2).tolist()    # 4: row 1, column 1
    [[0.0, 1.0, 0.0, 1.0], [0.84, 0.54, 0.84, 0.54]]
    """
    row, column = (angles(x, width // 4, 10_000.0) for x in (positions // columns, positions % columns))
    return torch.cat((row.sin(), row.cos(), column.sin(), column.cos()), dim=-1)


def patchify(images: Tensor, patch: int) -> Tensor:
    """(batch, channels, height, width) -> (batch, patches row by row, channels * patch * patch).

    >>> patchify(torch.arange(8).reshape(1, 1, 2, 4), 2).tolist()
    [[[0, 1, 4, 5], [2, 3, 6, 7]]]
    """
    height, width = images.shape[-2:]
    if height % patch or width % patch:
        raise ValueError(f"an image of {height} x {width} pixels cannot be divided into patches of {patch} x {patch}")
    tiles = images.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # batch, channel, row, y, column, x
    return tiles.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpatchify(patches: Tensor, patch: int, rows: int, columns: int) -> Tensor:
    """The inverse of ``patchify``; needs all patches of the images: ``sequence.unshard`` them first."""
    if patches.shape[1] != rows * columns:
        raise ValueError(f"{patches.shape[1]} patches are not {rows} rows x {columns} columns = {rows * columns}")
    tiles = patches.unflatten(1, (rows, columns)).unflatten(3, (-1, patch, patch))
    return tiles.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


def flow_matching_loss(
    model: DiT,
    patches: Tensor,
    noise: Tensor,
    time: Tensor,
    label: Tensor,
    positions: Tensor,
    real: Tensor,
    attention: Attention,
) -> tuple[Tensor, Tensor]:
    """The squared error of the velocity, summed over this rank's real patches, and the number of summands.

    A patch moves along the line ``(1 - t) * patch + t * noise``, so its velocity is ``noise - patch``. All ranks of a
    sequence need the same ``time`` and ``label`` (batch,), and their parts of the same ``noise``. ``real`` (n,) is
    False for the padding of an uneven shard: ``sequence.shard(torch.ones(config.tokens), 0).bool()``. Pass both
    results to ``global_mean``.
    """
    t = time.to(patches.dtype).view(-1, 1, 1)
    velocity = model((1 - t) * patches + t * noise, positions, time, label, attention)
    error = (velocity - (noise - patches)).where(real.unsqueeze(-1), 0)
    dtype = torch.promote_types(error.dtype, torch.float32)
    return error.square().sum(dtype=dtype), real.sum() * (len(patches) * patches.shape[-1])


@torch.no_grad()
def sample(
    model: DiT,
    noise: Tensor,
    label: Tensor,
    positions: Tensor,
    attention: Attention,
    steps: int,
    guidance: float = 1.0,
) -> Tensor:
    """Generate patches (this rank's, if sharded) with ``steps`` equal Euler steps from noise at time 1 to time 0.
    ``guidance`` above 1 moves each velocity away from that without a class (classifier-free guidance)."""
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    patches = noise
    for step in range(steps, 0, -1):
        time = torch.full((len(noise),), step / steps, dtype=torch.float64, device=noise.device)
        velocity = model(patches, positions, time, label, attention)
        if guidance != 1.0:
            free = model(patches, positions, time, torch.full_like(label, model.config.classes), attention)
            velocity = free + guidance * (velocity - free)
        patches = patches - velocity / steps
    return patches
