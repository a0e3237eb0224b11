import pytest
import torch

from startrail.training.data.images import save_grid
from tests.helpers import write_words


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Some text and some images, the same for all tests of training runs."""
    folder = tmp_path_factory.mktemp("data")
    generator = torch.Generator().manual_seed(0)
    write_words(folder / "texts")
    for number in range(4):
        (folder / "images" / str(number)).mkdir(parents=True)
        save_grid(torch.rand(1, 3, 16, 16, generator=generator) * 2 - 1, folder / "images" / str(number) / "0.png", 1)
    return folder
