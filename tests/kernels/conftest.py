import pytest
import torch

from tests.kernels.stand_ins import use_stand_ins


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The tensors are tiny: threads would only slow them down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def stand_in_ops(monkeypatch):
    use_stand_ins(monkeypatch)
