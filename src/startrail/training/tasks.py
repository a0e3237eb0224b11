"""Training tasks: text with a GPT, images with a DiT.

A task loads this rank's part of a batch, computes its loss, and generates a sample at the end. Random numbers belong to
samples, not to ranks: noise and time of image 17, and so the loss, are the same with any plan and number of ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from startrail.losses import chunked_cross_entropy
from startrail.parallel import SequenceParallel
from startrail.training.data.images import ImageBatch, ImageData, draw_noise, save_grid
from startrail.training.data.sources import generator_of
from startrail.training.data.texts import TextBatch, TextData
from startrail.training.files import printable, replace_file
from startrail.training.models.configs import DiTConfig, GPTConfig
from startrail.training.models.dit import DiT, flow_matching_loss, sample, unpatchify
from startrail.training.models.gpt import GPT
from startrail.training.recipes import Recipe

PROMPT_TOKENS = 64
TEMPERATURE = 0.8
GRID_COLUMNS, GRID_ROWS = 10, 10  # a column per class
GRID_SIDE = 64  # pixels per image of the grid, at least
WITHOUT_CLASS = 0.1  # of the training images, whose class is hidden for classifier-free guidance


def compute_dtype(recipe: Recipe, device: torch.device) -> torch.dtype:
    """The dtype for the recipe's ``precision`` on this device; ``auto`` avoids bfloat16 on CPUs, where it is slower."""
    fast = device.type == "cuda" and torch.cuda.is_bf16_supported()
    narrow = recipe.precision == "bfloat16" or (recipe.precision == "auto" and fast)
    return torch.bfloat16 if narrow else torch.float32


class Task:
    """What both tasks share. ``sequence`` describes all samples. ``loss_sum`` is this rank's part of a batch's loss
    before the division by the ``counted`` of all ranks. All ranks must call ``show``, which generates a sample for a
    person to look at. ``data_size`` is the number of tokens or images to train on."""

    def __init__(self, recipe: Recipe, sp: SequenceParallel, device: torch.device) -> None:
        self.recipe, self.sequence, self.device = recipe, sp.sequence(recipe.tokens), device
        self.dtype = compute_dtype(recipe, device)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def queries_and_keys(self) -> tuple[Tensor, Tensor]:
        """Meta tensors with the shapes of this rank's queries and keys in one attention call."""
        config, local = self.recipe.config, self.sequence.local
        empty = partial(torch.empty, dtype=self.dtype, device="meta")
        shapes = ((self.recipe.batch, heads, local, config.head_dim) for heads in (config.heads, config.kv_heads))
        return empty(next(shapes)), empty(next(shapes))


class TextTask(Task):
    def __init__(self, recipe: Recipe, sp: SequenceParallel, device: torch.device) -> None:
        super().__init__(recipe, sp, device)
        assert isinstance(recipe.config, GPTConfig) and recipe.length is not None
        text = partial(TextData, recipe.data, self.sequence, batch=recipe.batch, seed=recipe.seed)
        text = partial(text, packed=recipe.packed, tokenizer=recipe.tokenizer)
        self.data = text(split="train")
        self.data_size = self.data.num_tokens
        self.held_out = self.data  # unused unless the recipe evaluates or samples
        if recipe.evaluate_batches or recipe.sample:
            try:
                self.held_out = text(split="held-out")
            except ValueError as error:
                raise ValueError(f"{error} (--evaluate-batches 0 --sample 0 need no held-out data)") from error
        if self.data.vocab > recipe.config.vocab:
            raise ValueError(f"the data has {self.data.vocab} tokens, but the model's vocab is {recipe.config.vocab}")

    def load(self, index: int, held_out: bool = False) -> TextBatch:
        batch = (self.held_out if held_out else self.data).batch(index)
        return replace(batch, tokens=batch.tokens.to(self.device), labels=batch.labels.to(self.device))

    def loss_sum(self, model: GPT, batch: TextBatch) -> Tensor:
        attention = partial(batch.sequence.attention, causal=True)
        with self.autocast():
            hidden = model(batch.tokens, batch.sequence.positions(self.device), attention, batch.sequence)
            return chunked_cross_entropy(hidden, model.output_weight, batch.labels, self.recipe.loss_chunk)[0]

    def describe(self) -> str:
        vocab = self.data.vocab
        return f"{self.data.describe()}; a uniform guess has loss ln {vocab} = {math.log(vocab):.2f}"

    @torch.no_grad()
    def show(self, model: GPT, folder: Path) -> str:
        """Continue a held-out prompt. Every rank computes the same: the text is short, and FSDP needs all ranks."""
        batch = self.load(0, held_out=True)
        tokens = batch.sequence.unshard(batch.tokens, 1)[:1, :PROMPT_TOKENS]
        dense = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
        generator = generator_of(self.recipe.seed, "text")
        for _ in range(self.recipe.sample):
            context = tokens[:, -self.recipe.tokens :]
            with self.autocast():
                hidden = model(context, torch.arange(context.shape[1], device=self.device), dense)
                logits = model.logits(hidden[:, -1]).float().cpu()[:, : self.data.vocab]
            if not logits.isfinite().all():
                raise ValueError("the model's logits are not finite")
            following = torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator)
            tokens = torch.cat((tokens, following.to(self.device)), dim=1)
        prompt, continuation = self.data.decode(tokens[0, :PROMPT_TOKENS]), self.data.decode(tokens[0, PROMPT_TOKENS:])
        if dist.get_rank() == 0:
            replace_file(folder / "sample.txt", (prompt + continuation).encode(errors="replace"))
        return printable(f"a held-out prompt, continued by the model after |:\n{prompt}|{continuation}")


@dataclass(frozen=True)
class NoisyImages(ImageBatch):
    """Images with their noise and times; ``counted`` numbers of them are not padding."""

    noise: Tensor
    time: Tensor
    counted: int


class ImageTask(Task):
    def __init__(self, recipe: Recipe, sp: SequenceParallel, device: torch.device) -> None:
        super().__init__(recipe, sp, device)
        assert isinstance(recipe.config, DiTConfig)
        self.config = recipe.config
        size, patch = self.config.rows * self.config.patch, self.config.patch
        images = partial(ImageData, recipe.data, self.sequence, size=size, patch=patch)
        self.data = images(batch=recipe.batch, seed=recipe.seed, split="train")
        self.data_size = self.data.num_samples
        self.held_out = images(batch=recipe.batch, seed=recipe.seed, split="held-out")
        if self.data.num_classes > self.config.classes:
            raise ValueError(f"the data has {self.data.num_classes} classes, but the model has {self.config.classes}")

    def load(self, index: int, held_out: bool = False) -> NoisyImages:
        batch = (self.held_out if held_out else self.data).batch(index)
        noise, time = self._noise("held-out" if held_out else "train", batch.first, len(batch.labels))
        counted = int(batch.real.sum()) * batch.patches.shape[0] * batch.patches.shape[2]
        labels = batch.labels if held_out else self._with_hidden_classes(batch.labels, batch.first)
        tensors = dict(patches=batch.patches, labels=labels, real=batch.real, noise=noise, time=time)
        on_device = {name: tensor.to(self.device) for name, tensor in tensors.items()}
        return NoisyImages(**on_device, sequence=batch.sequence, first=batch.first, counted=counted)

    def _with_hidden_classes(self, labels: Tensor, first: int) -> Tensor:
        """The class ``config.classes`` means none."""
        numbers = range(first, first + len(labels))
        draws = [torch.rand((), generator=generator_of(self.recipe.seed, "class", number)) for number in numbers]
        return labels.where(torch.stack(draws) >= WITHOUT_CLASS, self.config.classes)

    def _noise(self, purpose: str, first: int, count: int) -> tuple[Tensor, Tensor]:
        seed = generator_of(self.recipe.seed, purpose).initial_seed()
        return draw_noise(self.sequence, seed, range(first, first + count), self.config.patch_dim)

    def loss_sum(self, model: DiT, batch: NoisyImages) -> Tensor:
        positions, attention = batch.sequence.positions(self.device), batch.sequence.attention
        inputs = batch.patches, batch.noise, batch.time, batch.labels, positions, batch.real
        with self.autocast():
            return flow_matching_loss(model, *inputs, attention)[0]

    def describe(self) -> str:
        return f"{self.data.describe()}; the loss is the squared error of the velocity, predicted as 0 at first"

    def show(self, model: DiT, folder: Path) -> str:
        """Generate a grid of images; the classes take turns in each row."""
        number = GRID_COLUMNS * GRID_ROWS
        noise, _ = self._noise("grid", 0, number)
        labels = torch.arange(number, device=self.device) % self.data.num_classes
        positions, attention = self.sequence.positions(self.device), self.sequence.attention
        with self.autocast():
            options = self.recipe.sample, self.recipe.guidance
            patches = sample(model, noise.to(self.device), labels, positions, attention, *options)
        patches = self.sequence.unshard(patches, 1).cpu()
        images = unpatchify(patches, self.config.patch, self.config.rows, self.config.columns)
        zoom = max(1, GRID_SIDE // images.shape[-1])  # enlarge small images for viewing
        images = images.repeat_interleave(zoom, -1).repeat_interleave(zoom, -2)
        path = folder / "samples.png"
        if dist.get_rank() == 0:
            save_grid(images, path, GRID_COLUMNS)
        return f"{number} new images, {self.recipe.sample} Euler steps each, guidance {self.recipe.guidance:g}: {path}"


def make_task(recipe: Recipe, sp: SequenceParallel, device: torch.device) -> TextTask | ImageTask:
    return (TextTask if isinstance(recipe.config, GPTConfig) else ImageTask)(recipe, sp, device)


def make_model(config: GPTConfig | DiTConfig) -> GPT | DiT:
    return GPT(config) if isinstance(config, GPTConfig) else DiT(config)
