"""Images: crops, classes, noise and grids are the same on every rank; and what is refused."""

import sys

import pytest
import torch
from PIL import Image

import startrail
from startrail.training.data.images import ImageData, draw_noise, save_grid
from startrail.training.models.dit import unpatchify
from tests.helpers import as_rank

ONE = startrail.SequenceParallel("1x1")


def image_data(source="photos", *, sp=ONE, size, patch, **options):
    """The data of whole images on the ranks of ``sp``."""
    return ImageData(str(source), sp.sequence((size // patch) ** 2), size=size, patch=patch, **options)


def colour(tmp_path, name, rgb, size=(40, 30)):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, rgb).save(path)
    return path


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("plan, world", [("1x1", 1), ("1x2", 2), ("2x2", 4), ("u2/1x2", 4), ("1x5", 5)])
def test_ranks_have_the_shards_of_one_process(plan, world, layout):
    """9 x 9 patches pad every number of ranks but one."""
    arguments = dict(size=36, patch=4, batch=3, seed=2)
    whole = image_data(**arguments).batch(4)
    noise, time = draw_noise(whole.sequence, 7, range(12, 15), 48)
    assert (whole.patches.shape, whole.sequence.length, whole.first) == ((3, 81, 48), 81, 12)
    assert whole.patches.dtype == torch.float32 and whole.patches.min() >= -1 and whole.patches.max() <= 1
    assert whole.real.all()
    counted = 0
    for rank in range(world):
        batch = image_data(sp=as_rank(rank, world, layout, plan), **arguments).batch(4)
        sequence = batch.sequence
        assert torch.equal(batch.patches, sequence.shard(whole.patches, 1))
        assert torch.equal(batch.labels, whole.labels)
        own_noise, own_time = draw_noise(sequence, 7, range(batch.first, batch.first + 3), 48)
        assert torch.equal(own_noise, sequence.shard(noise, 1)) and torch.equal(own_time, time)
        counted += batch.real.sum()
    assert counted == 81


def test_noise_belongs_to_the_sample():
    sequence = ONE.sequence(16)
    noise, time = draw_noise(sequence, 0, range(200), 12)
    assert torch.equal(draw_noise(sequence, 0, [5], 12)[0][0], noise[5])
    assert not torch.equal(draw_noise(sequence, 1, [5], 12)[0][0], noise[5])
    assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.02
    assert time.min() >= 0 and time.max() < 1 and abs(time.mean() - 0.5) < 0.1


def test_every_epoch_shows_every_photo_once_in_new_crops():
    data = image_data(size=16, patch=2, batch=10)
    assert data.num_classes == data.num_samples == 10
    first, second = data.batch(0), data.batch(1)
    for batch in (first, second):
        assert sorted(batch.labels.tolist()) == list(range(10))
    assert first.labels.tolist() != second.labels.tolist()
    for label in range(10):
        crops = [batch.patches[batch.labels == label] for batch in (first, second)]
        assert not torch.equal(*crops)
    again = image_data(size=16, patch=2, batch=10).batch(1)
    assert torch.equal(again.patches, second.patches) and torch.equal(again.labels, second.labels)
    assert data.describe() == (
        "photos, train: 10 images (left three quarters), 10 classes, crops of 16 x 16 pixels, 64 patches"
    )


def test_subfolders_are_classes(tmp_path):
    colour(tmp_path, "b/deep/one.png", (255, 0, 0))
    colour(tmp_path, "a/two.JPG", (0, 255, 0))
    colour(tmp_path, "c/three.webp", (0, 0, 255), size=(1, 1))
    (tmp_path / "notes.txt").write_text("no image")
    data = image_data(tmp_path, size=4, patch=2, batch=3)
    assert data.num_classes == 3
    batch = data.batch(0)
    images = unpatchify(batch.patches, 2, 2, 2)
    assert {int(label): int(images[i].mean((1, 2)).argmax()) for i, label in enumerate(batch.labels)} == {
        0: 1,
        1: 0,
        2: 2,
    }
    colour(tmp_path, "loose.png", (0, 0, 0))
    with pytest.raises(ValueError, match=r"subfolders of .* are its classes, but '.*loose.png' is not in any of them"):
        image_data(tmp_path, size=4, patch=2)


def test_a_folder_without_subfolders_a_glob_and_a_file_are_one_class(tmp_path):
    for number in range(3):
        colour(tmp_path, f"{number}.png", (number, 0, 0))
    for source, images in ((tmp_path, 3), (tmp_path / "[01].png", 2), (tmp_path / "2.png", 1)):
        data = image_data(source, size=4, patch=4)
        assert (data.num_classes, data.num_samples) == (1, images)
    digests = [image_data(tmp_path / f"[{which}].png", size=4, patch=4).digest() for which in ("01", "01", "02")]
    assert digests[0] == digests[1] != digests[2], "other files, as many"


def test_held_out_data_are_whole_images_or_the_right_quarter_of_few(tmp_path):
    for number in range(40):
        colour(tmp_path, f"many/{number}.png", (number, 0, 0))
    reds = []
    for split, images in (("train", 38), ("held-out", 2)):
        batch = image_data(tmp_path / "many", size=2, patch=2, batch=images, split=split).batch(0)
        reds.append({round(red) for red in ((batch.patches[:, 0, 0] + 1) * 127.5).tolist()})
    assert len(reds[0]) == 38 and len(reds[1]) == 2 and not reds[0] & reds[1]

    picture = Image.new("RGB", (403, 200), (255, 255, 255))
    picture.paste((0, 0, 0), (403 - 403 // 4, 0, 403, 200))
    picture.save(tmp_path / "few.png")
    for split, value in (("train", 1), ("held-out", -1)):
        data = image_data(tmp_path / "few.png", size=8, patch=2, batch=50, split=split)
        assert (data.batch(0).patches == value).all(), "no pixel of the other part has a share in any crop"


def test_a_picture_is_turned_upright_and_loses_its_transparency(tmp_path):
    picture = Image.new("RGBA", (20, 60), (255, 0, 0, 128))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be seen turned by 90 degrees: 60 wide, 20 high, and its bottom is then at the left
    picture.paste((0, 0, 255, 255), (0, 30, 20, 60))
    picture.save(tmp_path / "turned.png", exif=exif)
    data = image_data(tmp_path / "turned.png", size=2, patch=2, batch=8, split="held-out")
    assert (data.batch(0).patches[:, 0].view(8, 3, 4).mean(2).argmax(1) == 0).all(), "the right quarter is the top, red"


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(source="/no/such"), "source '/no/such' is not an existing folder, file or glob"),
        (dict(size=30, patch=4), "size 30 is not a multiple of patch 4"),
        (dict(size=0), "size 0 must be an integer of at least 1"),
        (dict(patch=-2), "patch -2 must be an integer of at least 1"),
        (dict(batch=0), "batch 0 must be an integer of at least 1"),
        (dict(split="valid"), "split 'valid' is not one of train, held-out"),
        (dict(source=__file__), r"has no images \(.bmp, "),
        (dict(size=30), "an image has 15 x 15 = 225 patches, the sequence 256 tokens"),
    ],
)
def test_mistakes_are_refused_with_their_values(change, message):
    with pytest.raises(ValueError, match=message):
        ImageData(**{"source": "photos", "sequence": ONE.sequence(256), "size": 32, "patch": 2, **change})


def test_a_file_that_is_no_image_and_a_bad_index_are_refused(tmp_path):
    whole = colour(tmp_path, "whole.png", (1, 2, 3), size=(300, 300)).read_bytes()
    for body in (b"", b"no image", whole[:200]):
        (tmp_path / "bad.png").write_bytes(body)
        with pytest.raises(ValueError, match=r"cannot read the image .*bad.png: "):
            image_data(tmp_path / "bad.png", size=4, patch=2).batch(0)
    Image.new("I;16", (4, 4), 30_000).save(tmp_path / "wide.png")
    with pytest.raises(ValueError, match=r"wide.png: its mode is I;16, which has more than 8 bits"):
        image_data(tmp_path / "wide.png", size=4, patch=2).batch(0)
    with pytest.raises(ValueError, match="index -3 must be an integer of at least 0"):
        image_data(size=4, patch=2).batch(-3)


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "skimage", None)
    with pytest.raises(ValueError, match=r"'photos' needs the package scikit-image: pip install 'startrail\[images\]'"):
        image_data(size=4, patch=2)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ValueError, match=r"images need the package pillow: pip install 'startrail\[images\]'"):
        image_data(size=4, patch=2)


def test_a_grid_has_its_images_row_by_row(tmp_path):
    images = torch.linspace(-1, 1, 5).view(5, 1, 1, 1).expand(5, 3, 4, 6).clone()
    images[4, 0] = 9.0  # cut off
    images[4, 1] = torch.nan
    save_grid(images, tmp_path / "grid.png", columns=3)
    with Image.open(tmp_path / "grid.png") as grid:
        assert (grid.size, grid.mode) == ((3 * 6 + 2 * 2, 2 * 4 + 2), "RGB")
        assert [grid.getpixel((8 * i + 1, 1)) for i in range(3)] == [(0, 0, 0), (64, 64, 64), (128, 128, 128)]
        assert [grid.getpixel((8 * i + 1, 7)) for i in range(3)] == [(191, 191, 191), (255, 128, 255), (255, 255, 255)]
    with pytest.raises(ValueError, match=r"a grid needs images \(n, 3, height, width\), got \(5, 1, 4, 6\)"):
        save_grid(images[:, :1], tmp_path / "grid.png", columns=3)
    with pytest.raises(ValueError, match="columns 0 must be an integer of at least 1"):
        save_grid(images, tmp_path / "grid.png", columns=0)
    with pytest.raises(ValueError, match=r"cannot write .*grid.png: No such file or directory"):
        save_grid(images, tmp_path / "nowhere" / "grid.png", columns=3)
