"""Set-ups of modules for ``verify``: models of diffusers, plain modules, and faults of layers and arguments."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import startrail
from tests.integrations.plain_modules import GPT, ViT

LENGTH, WIDTH = 24, 16


def gpt():
    ids = torch.arange(27).view(1, 27) * 5 % 31
    return GPT(), {"ids": ids, "targets": ids.roll(-1, 1)}


def vit():
    return ViT(), {"x": torch.randn(2, 3, 10, 10), "target": torch.randn(2, 5)}


def dit():
    from tests.integrations.tiny_diffusers import dit

    model, batch = dit()
    return model, {**batch, "target": torch.randn_like(batch["hidden_states"])}


def noise_differs():
    from startrail.integrations.diffusers import attach

    model, batch = dit()

    def step(model, batch, sp):
        attach(model, sp)
        given = {name: x for name, x in batch.items() if name != "target"}
        noisy = given["hidden_states"] + torch.randn(
            batch["target"].shape, generator=torch.Generator().manual_seed(sp.rank)
        )
        loss = F.mse_loss(model(**{**given, "hidden_states": noisy}).sample, batch["target"])
        loss.backward()
        startrail.sum_gradients(model.parameters(), sp.group)
        return loss

    return model, batch, step


class Net(nn.Module):
    """Two layers of attention, a recurrent one and a timestep. ``attend`` is None for torch's own attention."""

    def __init__(self, recurrent: bool = False) -> None:
        super().__init__()
        self.inside = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.time, self.text = nn.Linear(1, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True) if recurrent else None

    def forward(self, x: Tensor, timestep: Tensor, text: Tensor, attends: list) -> Tensor:
        x = x + self.time(timestep.view(-1, 1, 1).to(x.dtype)) + self.text(text)
        for layer, attend in zip(self.inside, attends, strict=True):
            q, k, v = layer(x).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            x = x + attend(q, k, v).transpose(1, 2).flatten(2)
        return x if self.gru is None else self.gru(x)[0]


def make(unsplit: bool = False, recurrent: bool = False, timestep: bool = False, text: int = 1, data: bool = False):
    torch.manual_seed(0)
    tensors = [
        torch.randn(1, LENGTH, WIDTH),
        torch.tensor([3]),
        torch.randn(1, 1, WIDTH),
        torch.randn(1, LENGTH, WIDTH),
    ]

    def step(model, batch, sp):
        seq = sp.sequence(LENGTH)
        x, t, caption, target = batch
        shard = lambda each: seq.shard(each, 1)  # noqa: E731
        attends = [seq.attention, F.scaled_dot_product_attention if unsplit else seq.attention]
        out = model(shard(x), t + (sp.rank if timestep else 0), caption, attends)
        loss = startrail.global_mean(
            F.mse_loss(out, shard(target), reduction="sum"), target.numel() // sp.world, sp.group
        )
        loss.backward()
        if data:  # reduced as if the ranks were two data-parallel groups
            halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
            startrail.sum_gradients(model.parameters(), halves[sp.rank % 2], check=False)
            return loss
        startrail.sum_gradients(model.parameters(), sp.group)
        for x in model.text.parameters():
            x.grad *= text
        return loss

    def reference(model, batch):
        x, t, caption, target = batch
        loss = F.mse_loss(model(x, t, caption, [F.scaled_dot_product_attention] * 2), target)
        loss.backward()
        return loss

    return Net(recurrent), tensors, step, reference


TEXT = 6


class Joint(nn.Module):
    """Image tokens attend to themselves, then jointly with tokens of text."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.alone, self.joint = (nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))

    def forward(self, text: Tensor, image: Tensor, attends: list) -> Tensor:
        x = self.image(image)
        x = torch.cat([self.text(text), x + self.attend(self.alone, x, attends[0])], 1)
        return self.head(x + self.attend(self.joint, x, attends[1]))

    def attend(self, layer: nn.Module, x: Tensor, attend) -> Tensor:
        q, k, v = layer(x).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return attend(q, k, v).transpose(1, 2).flatten(2)


def joint(text_counts, in_sequence: bool = False, counted: bool = False):
    """Every rank has all of the text. ``text_counts(rank)``: its weight in the loss. ``in_sequence``: its keys are part
    of each rank's shard. ``counted``: the loss is divided by the number of tokens on ranks."""
    torch.manual_seed(0)
    tensors = [torch.randn(1, n, WIDTH) for n in (TEXT, LENGTH, TEXT + LENGTH)]

    def step(model, batch, sp):
        text, image, target = batch
        seq = sp.sequence(LENGTH)

        def whole(x):
            return torch.cat([x[:, :, :TEXT], seq.unshard(x[:, :, TEXT:], 2)], 2)

        both = sp.sequence(sp.world * (TEXT + seq.local))
        attend = (
            both.attention if in_sequence else lambda q, k, v: F.scaled_dot_product_attention(q, whole(k), whole(v))
        )
        out = model(text, seq.shard(image, 1), [seq.attention, attend])
        losses = (out - torch.cat([target[:, :TEXT], seq.shard(target[:, TEXT:], 1)], 1)).square()
        loss = text_counts(sp.rank) * losses[:, :TEXT].sum() + losses[:, TEXT:].sum()
        count = losses.numel() if counted else target.numel() / sp.world
        loss = startrail.global_mean(loss, count, sp.group)
        loss.backward()
        startrail.sum_gradients(model.parameters(), sp.group)
        return loss

    def reference(model, batch):
        out = model(*batch[:2], [F.scaled_dot_product_attention] * 2)
        weight = torch.ones(TEXT + LENGTH, 1, dtype=out.dtype)
        weight[:TEXT] = 1.0 if text_counts(0) else 0.0
        loss = (weight * (out - batch[2]).square()).mean()
        loss.backward()
        return loss

    return Joint(), tensors, step, reference


IN_LOSS = "counted once per rank: the gradient of the result of the model for its first 6 of 30 tokens"
IN_SEQUENCE = (
    "in the sequence once per rank: attention runs over 48 tokens instead of 30, 6 of them 4 times; shard these "
)
RIGHT = [gpt, vit, dit, make, lambda: joint(lambda rank: rank == 0)]
FAULTS = {
    "attention was not split in 1 of 2 calls (the model): each rank attended to its own tokens only": lambda: make(
        unsplit=True
    ),
    "recurrent layer gru ran on shards": lambda: make(recurrent=True),
    "timestep differs between ranks of a sequence: timestep of the model": lambda: make(timestep=True),
    "gradients are reduced over ranks 0, 2 and over ranks 1, 3 only, but all of them share a sequence: DDP or FSDP "
    "over the data-parallel group alone": lambda: make(data=True),
    "such as text tokens, is counted once per rank: the gradient of the result of text is 4 times": lambda: make(
        text=4
    ),
    IN_LOSS: lambda: joint(lambda rank: 1, counted=True),
    IN_SEQUENCE: lambda: joint(lambda rank: 0, in_sequence=True),
    IN_SEQUENCE + "as well": lambda: joint(lambda rank: 1, in_sequence=True, counted=True),
}
