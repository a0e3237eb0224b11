"""Drawn digits, and the classifier that reads what a DiT paints."""

import torch

from startrail import SequenceParallel
from startrail.cli import main
from startrail.training.data.images import NUM_DIGITS, ImageData, draw_digit, read_grid, save_grid
from startrail.training.models.configs import DIT_CONFIGS
from startrail.training.models.dit import DiT, sample


def test_digits_depend_on_seed_split_and_number_only():
    first, label = draw_digit(0, "train", 23, 16)
    assert label == 3 and torch.equal(first, draw_digit(0, "train", 23, 16)[0])
    others = [draw_digit(1, "train", 23, 16), draw_digit(0, "held-out", 23, 16), draw_digit(0, "train", 33, 16)]
    assert all(not torch.equal(first, image) for image, _ in others)
    sequence = SequenceParallel("1x1").sequence(64)
    data = ImageData("digits", sequence, size=16, patch=2, batch=4, seed=0)
    assert data.batch(2).labels.tolist() == [8, 9, 0, 1] and data.num_classes == NUM_DIGITS
    assert data.digest() != ImageData("digits", sequence, size=16, patch=2, seed=1).digest()
    assert "digits, train: 50,000 drawings of 16 x 16 pixels, 10 classes, 64 patches" in data.describe()


def test_a_grid_reads_back_and_the_classifier_recognises_the_requested_digits(tmp_path, capsys):
    images = torch.stack([draw_digit(5, "train", number, 16)[0] for number in range(100)])
    large = images.repeat_interleave(4, -1).repeat_interleave(4, -2)
    save_grid(large, tmp_path / "samples.png", 10)
    assert (read_grid(tmp_path / "samples.png", 10, 16) - images).abs().max() < 0.01
    assert main(["recognise", str(tmp_path)]) == 0
    assert "of 100 samples show the requested digit" in capsys.readouterr().out
    save_grid(large.roll(1, 0), tmp_path / "samples.png", 10)  # every image is now one column further
    assert main(["recognise", str(tmp_path)]) == 1
    assert " 0% of 100 samples" in capsys.readouterr().out
    assert main(["recognise", str(tmp_path / "nowhere")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_guidance_moves_away_from_the_velocity_without_a_class():
    torch.manual_seed(0)
    config = DIT_CONFIGS["dit-tiny"]
    model = DiT(config).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    noise, labels = torch.randn(2, config.tokens, config.patch_dim).double(), torch.tensor([1, 2])
    inputs = torch.arange(config.tokens), torch.nn.functional.scaled_dot_product_attention, 1
    none = torch.full_like(labels, config.classes)
    plain, free = sample(model, noise, labels, *inputs), sample(model, noise, none, *inputs)
    guided = sample(model, noise, labels, *inputs, guidance=3.0)
    torch.testing.assert_close(guided, free + 3 * (plain - free))
    assert not torch.allclose(plain, free)
