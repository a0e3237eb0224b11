"""Images for a DiT: random crops as patches, this rank's part of them, and the noise of each image.

Crops, flips, noise and times depend only on the seed and the sample's number, so every rank of every plan works on the
same images, and a run resumes with the next index.

>>> from startrail import SequenceParallel
>>> sequence = SequenceParallel("1x1").sequence(16 * 16)
>>> data = ImageData("photos", sequence, size=32, patch=2, batch=2)
>>> batch = data.batch(3)
>>> batch.patches.shape, batch.first                     # 16 x 16 patches of 3 x 2 x 2 numbers; samples 6 and 7
(torch.Size([2, 256, 12]), 6)
>>> noise, time = draw_noise(sequence, 0, range(6, 8), patch_dim=12)
>>> noise.shape, time.shape
(torch.Size([2, 256, 12]), torch.Size([2]))
"""

from __future__ import annotations

import importlib.util
import io
import zlib
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from startrail.sequence import Sequence
from startrail.training.data.sources import check_count, check_split, find_files, generator_of, held_out, names_of
from startrail.training.files import replace_file
from startrail.training.models.dit import patchify

if TYPE_CHECKING:
    from PIL.Image import Image

# files of the package scikit-image, of which nothing else is used
PHOTOS = (
    "astronaut.png", "brick.png", "chelsea.png", "coffee.png", "grass.png", "gravel.png", "hubble_deep_field.jpg",
    "motorcycle_left.png", "retina.jpg", "rocket.jpg",
)  # fmt: skip
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
SMALLEST_CROP = 0.5  # of the shorter side
HELD_OUT_STRIP = 4  # the right quarter of every image is held out if there are too few images
CACHED_IMAGES = 32  # all photos of both splits, shrunk to the size that the smallest crop needs
DRAWN_SAMPLES = {"train": 50_000, "held-out": 5_000}
GAP = 2  # pixels between the images of a grid

NUM_DIGITS = 10
# One row of a glyph per number; the highest of five bits is the leftmost pixel.
GLYPHS = (
    (14, 17, 17, 17, 17, 17, 14),
    (4, 12, 4, 4, 4, 4, 14),
    (14, 17, 1, 6, 8, 16, 31),
    (14, 17, 1, 6, 1, 17, 14),
    (2, 6, 10, 18, 31, 2, 2),
    (31, 16, 30, 1, 1, 17, 14),
    (6, 8, 16, 30, 17, 17, 14),
    (31, 1, 2, 4, 8, 8, 8),
    (14, 17, 17, 14, 17, 17, 14),
    (14, 17, 17, 15, 1, 2, 12),
)
HEIGHTS = (0.66, 0.84)  # of the image
SHIFT = 0.06  # of the image, each way
GROUND = -0.85


@dataclass(frozen=True)
class ImageBatch:
    """This rank's part of a batch of images; ``sequence`` gives positions and attention over an image's patches."""

    patches: Tensor  # (batch, local tokens, 3 * patch * patch) float32 in [-1, 1]; padding is 0
    labels: Tensor  # (batch,) class of each image
    real: Tensor  # (local tokens,) False for padding
    sequence: Sequence
    first: int  # number of the first image sample, for ``draw_noise``


class ImageData:
    """Crops of ``size`` x ``size`` pixels at random scales and places, half of them flipped. Their patches, row by row,
    are the tokens of ``sequence``.

    ``source`` is a folder whose subfolders are the classes; a folder without subfolders, a file or a glob, which is one
    class; ``"photos"``: ten photographs from the package scikit-image, each one class; or ``"digits"``: drawn digits
    (see `draw_digit`), neither cropped nor flipped. Every epoch uses every image once, in a new order.

    ``split`` is ``"train"`` or ``"held-out"``: a twentieth of the images, or if there are fewer than 20, the right
    quarter of each.
    """

    def __init__(
        self,
        source: str,
        sequence: Sequence,
        *,
        size: int,
        patch: int,
        batch: int = 1,
        seed: int = 0,
        split: str = "train",
    ) -> None:
        for name, value in (("size", size), ("patch", patch), ("batch", batch)):
            check_count(name, value)
        check_split(split)
        if size % patch:
            raise ValueError(f"size {size} is not a multiple of patch {patch}")
        side = size // patch
        if sequence.length != side**2:
            raise ValueError(f"an image has {side} x {side} = {side**2} patches, the sequence {sequence.length} tokens")
        self._source, self._sequence, self._split = source, sequence, split
        self._size, self._patch, self._batch, self._seed = size, patch, batch, seed
        if source == "digits":
            self.num_classes, self.num_samples = NUM_DIGITS, DRAWN_SAMPLES[split]
            return
        _require_pillow()
        files, labels = _classes(source)
        self.num_classes = 1 + max(labels)
        chosen = held_out(names_of(files), [1] * len(files))
        self._images = [
            (file, label)
            for number, (file, label) in enumerate(zip(files, labels, strict=True))
            if not chosen or (number in chosen) == (split == "held-out")
        ]
        self._strip = "all" if chosen else split
        self.num_samples = len(self._images)

    def batch(self, index: int) -> ImageBatch:
        """Batch ``index``, from 0 without limit."""
        check_count("index", index, least=0)
        first = index * self._batch
        images, labels = zip(*(self._sample(number) for number in range(first, first + self._batch)), strict=True)
        patches = self._sequence.shard(patchify(torch.stack(images), self._patch), 1)
        real = self._sequence.shard(torch.ones(self._sequence.length, dtype=torch.bool), 0)
        return ImageBatch(patches, torch.tensor(labels), real, self._sequence, first)

    def _sample(self, number: int) -> tuple[Tensor, int]:
        """A crop or drawing (3, size, size) in [-1, 1], and its class."""
        if self._source == "digits":
            return draw_digit(self._seed, self._split, number % self.num_samples, self._size)
        epoch, place = divmod(number, self.num_samples)
        path, label = self._images[int(_order(self.num_samples, self._seed, epoch)[place])]
        image = _load(path, self._strip, int(self._size / SMALLEST_CROP))
        scale, x, y, flip = torch.rand(4, generator=generator_of(self._seed, "crop", number)).tolist()
        side = min(image.size) * (SMALLEST_CROP + (1 - SMALLEST_CROP) * scale)
        left, top = x * (image.width - side), y * (image.height - side)
        crop = _pixels(image.resize((self._size, self._size), box=(left, top, left + side, top + side)))
        return (crop.flip(2) if flip < 0.5 else crop) / 127.5 - 1, label

    def digest(self) -> int:
        """A hash of the names and sizes of some files."""
        if self._source == "digits":
            return zlib.crc32(repr(("digits", self._seed, self.num_samples)).encode())
        files = [file for file, _ in self._images[:: max(1, self.num_samples // 1024)]]
        return zlib.crc32(repr([names_of(files), *(file.stat().st_size for file in files)]).encode())

    def describe(self) -> str:
        """One line: the images, the classes and the sequence length."""
        if self._source == "digits":
            return (
                f"digits, {self._split}: {self.num_samples:,} drawings of {self._size} x {self._size} pixels, "
                f"{self.num_classes} classes, {self._sequence.length:,} patches"
            )
        which = {"all": "", "train": " (left three quarters)", "held-out": " (right quarter)"}[self._strip]
        return (
            f"{self._source}, {self._split}: {self.num_samples:,} images{which}, {self.num_classes:,} classes, "
            f"crops of {self._size} x {self._size} pixels, {self._sequence.length:,} patches"
        )


def draw_noise(sequence: Sequence, seed: int, samples: SequenceOf[int], patch_dim: int) -> tuple[Tensor, Tensor]:
    """This rank's part of the noise of some samples, (batch, local tokens, patch dim), and their times, (batch,). Every
    rank draws the full noise of an image and takes its part, so the numbers do not depend on the plan."""
    noise, times = [], []
    for sample in samples:
        generator = generator_of(seed, "noise", sample)
        times.append(torch.rand((), generator=generator))
        noise.append(sequence.shard(torch.randn(sequence.length, patch_dim, generator=generator), 0))
    return torch.stack(noise), torch.stack(times)


def save_grid(images: Tensor, path: str | Path, columns: int) -> None:
    """Write (n, 3, height, width) in [-1, 1] as one PNG with ``columns`` images per row; values are clamped."""
    check_count("columns", columns)
    if images.dim() != 4 or images.shape[1] != 3 or 0 in images.shape:
        raise ValueError(f"a grid needs images (n, 3, height, width), got {tuple(images.shape)}")
    _require_pillow()
    from PIL import Image

    framed = F.pad(images.detach().float().cpu().nan_to_num(), (0, GAP, 0, GAP), value=1.0)
    rows = -(-len(framed) // columns)
    missing = framed.new_ones(rows * columns - len(framed), *framed.shape[1:])
    tiles = torch.cat((framed, missing)).unflatten(0, (rows, columns))  # row, column, channel, y, x
    grid = tiles.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)[:-GAP, :-GAP]
    pixels = ((grid.clamp(-1, 1) + 1) * 127.5).round().byte().contiguous()
    picture = io.BytesIO()
    Image.frombytes("RGB", (pixels.shape[1], pixels.shape[0]), bytes(pixels.flatten().tolist())).save(picture, "PNG")
    try:
        replace_file(Path(path), picture.getvalue())
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error


def read_grid(path: str | Path, columns: int, size: int) -> Tensor:
    """The images of a grid that ``save_grid`` wrote, shrunk to ``size`` pixels, (n, 3, size, size) in [-1, 1]."""
    _require_pillow()
    from PIL import Image

    try:
        with Image.open(path) as file:
            pixels = _pixels(file.convert("RGB")).float() / 127.5 - 1
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    side, left = divmod(pixels.shape[2] + GAP, columns)
    rows, rest = divmod(pixels.shape[1] + GAP, side)
    if left or rest or side - GAP < size:
        raise ValueError(f"{path} is not a grid of {columns} square images per row")
    tiles = F.pad(pixels, (0, GAP, 0, GAP)).unflatten(2, (columns, side)).unflatten(1, (rows, side))
    images = tiles.permute(1, 3, 0, 2, 4).flatten(0, 1)[..., : side - GAP, : side - GAP]
    return F.interpolate(images, (size, size), mode="area")


@lru_cache(2)
def _order(count: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(count, generator=generator_of(seed, "epoch", epoch))


def _classes(source: str) -> tuple[list[Path], list[int]]:
    """The images and their class numbers, which follow the order of the class names."""
    if source == "photos":
        files = _photos()
        return files, list(range(len(files)))
    files = [file for file in find_files(source) if file.suffix.lower() in SUFFIXES]
    if not files:
        raise ValueError(f"source {source!r} has no images ({', '.join(SUFFIXES)})")
    folder = Path(source).expanduser()
    paths = [file.relative_to(folder).parts if folder.is_dir() else (file.name,) for file in files]
    loose = [file for file, path in zip(files, paths, strict=True) if len(path) == 1]
    if len(loose) == len(files):
        return files, [0] * len(files)
    if loose:
        raise ValueError(f"the subfolders of {source!r} are its classes, but {str(loose[0])!r} is not in any of them")
    names = sorted({path[0] for path in paths})
    return files, [names.index(path[0]) for path in paths]


def _photos() -> list[Path]:
    spec = importlib.util.find_spec("skimage")  # found, not imported: only its files are needed
    if spec is None or spec.origin is None:
        raise ValueError("source 'photos' needs the package scikit-image: pip install 'startrail[images]'")
    files = [Path(spec.origin).parent / "data" / name for name in PHOTOS]
    if missing := [str(file) for file in files if not file.is_file()]:
        raise ValueError(f"this version of scikit-image has no {', '.join(missing)}")
    return files


def _require_pillow() -> None:
    if importlib.util.find_spec("PIL") is None:
        raise ValueError("images need the package pillow: pip install 'startrail[images]'")


@lru_cache(CACHED_IMAGES)
def _load(path: Path, strip: str, side: int) -> Image:
    """Load an image, or its training or held-out strip, upright, in RGB, its shorter side shrunk to ``side``."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as file:
            if file.mode.startswith(("I", "F")):  # Pillow would clamp them at 255
                raise ValueError(f"its mode is {file.mode}, which has more than 8 bits per channel")
            image = ImageOps.exif_transpose(file).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # Pillow's errors for bad files
        raise ValueError(f"cannot read the image {path}: {error}") from error
    border = image.width - image.width // HELD_OUT_STRIP
    if strip != "all":  # cut before shrinking, so that no pixel contributes to both strips
        left, right = (0, border) if strip == "train" else (border, image.width)
        image = image.crop((left, 0, right, image.height))
    shrink = min(image.size) / side
    if shrink > 1:
        image = image.resize((max(side, round(image.width / shrink)), max(side, round(image.height / shrink))))
    return image


def _pixels(image: Image) -> Tensor:
    """(3, height, width), 0 to 255."""
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, 3).permute(2, 0, 1)


# --- drawn digits


def draw_digit(seed: int, split: str, number: int, size: int) -> tuple[Tensor, int]:
    """Sample ``number`` of a split, (3, size, size) in [-1, 1], and its digit; digits take turns."""
    label = number % NUM_DIGITS
    random = torch.rand(4, generator=generator_of(seed, "digit", split, number))
    scale, x, y, hue = random.tolist()
    height = round(size * (HEIGHTS[0] + scale * (HEIGHTS[1] - HEIGHTS[0])))
    width = max(round(height * 5 / 7), 1)
    rows = torch.tensor([[row >> bit & 1 for bit in (4, 3, 2, 1, 0)] for row in GLYPHS[label]], dtype=torch.float32)
    ink = F.interpolate(rows[None, None], (height, width), mode="bilinear")[0, 0]
    ink = ((ink - 0.25) * 2).clamp(0, 1)  # sharper edges
    top, left = ((size - side) / 2 + (2 * at - 1) * SHIFT * size for side, at in ((height, y), (width, x)))
    canvas = torch.zeros(size, size)
    top, left = (min(max(round(at), 0), size - side) for at, side in ((top, height), (left, width)))
    canvas[top : top + height, left : left + width] = ink
    colour = _bright(hue).view(3, 1, 1)
    return GROUND + canvas * (colour - GROUND), label


def _bright(hue: float) -> Tensor:
    """A saturated colour in [-1, 1]."""
    channels = torch.tensor([0.0, 1 / 3, 2 / 3])
    return (1.2 * (2 * torch.pi * (channels - hue)).cos() + 0.4).clamp(-1, 1)
