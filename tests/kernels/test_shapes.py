"""A kernel of another version or vendor that returns results of other shapes raises: merges would broadcast them."""

import pytest
import torch

from startrail.geometry.tiles import Tile
from startrail.kernels import CpuKernel, cuda, kernel_for
from startrail.kernels.flash_ops import FlashOps
from startrail.kernels.reference import ReferenceKernel
from tests.kernels import stand_ins

KERNELS = ["cpu", "reference", "efficient", "flash", "flash-attn", "cudnn"]
TILES = {
    "full": Tile(0, 24, 0, 24, "full"),
    "causal": Tile(0, 24, 0, 24, "causal"),
    "bands": Tile(0, 24, 0, 24, "bands", window=(-1, 0), packs=((10, 10), (14, 14))),
}
WRONG_FORWARD = {
    "lse of a transposed block": lambda out, lse: (out, lse.transpose(1, 2)),
    "lse with one more dimension": lambda out, lse: (out, lse.unsqueeze(-1)),
    "lse of all heads in one": lambda out, lse: (out, lse[:, :1]),
    "lse that is padded": lambda out, lse: (out, torch.nn.functional.pad(lse, (0, 8))),
    "out of a transposed block": lambda out, lse: (out.transpose(1, 2), lse),
    "out of one entry of the batch": lambda out, lse: (out[:1], lse),
    "out that is padded": lambda out, lse: (torch.nn.functional.pad(out, (0, 8)), lse),
}
WRONG_BACKWARD = {
    "dq of a transposed block": lambda dq, dk, dv: (dq.transpose(1, 2), dk, dv),
    "dk of repeated heads": lambda dq, dk, dv: (dq, dk.repeat_interleave(2, 1), dv),
    "dv of one entry of the batch": lambda dq, dk, dv: (dq, dk, dv[:1]),
}


@pytest.fixture(params=KERNELS)
def kernel(request, stand_in_ops):
    if request.param in ("cpu", "reference"):
        return CpuKernel(torch.float32) if request.param == "cpu" else ReferenceKernel()
    return stand_ins.make(request.param, torch.float32)


def run(kernel, tile):
    q, dout = torch.randn(2, 2, 4, 24, 16)
    k, v = torch.randn(2, 2, 2, 24, 16)
    q, k, v, dout = (kernel.prepare(x) for x in (q, k, v, dout))
    partial = kernel.forward(q, k, v, [tile], 0.3)
    return kernel.backward(dout, q, k, v, partial.out, partial.lse.to(q.dtype), [tile], 0.3)


@pytest.mark.parametrize("tile", ["full", "causal"])
@pytest.mark.parametrize("wrong", WRONG_FORWARD)
def test_a_forward_tile_of_another_shape_raises(kernel, wrong, tile):
    run(kernel, TILES[tile])
    plain = kernel.forward_tile
    kernel.forward_tile = lambda *given: WRONG_FORWARD[wrong](*plain(*given))
    with pytest.raises(ValueError, match=rf"kernel {kernel.name} returned {wrong.split()[0]} \("):
        run(kernel, TILES[tile])


@pytest.mark.parametrize("wrong", WRONG_BACKWARD)
def test_a_backward_tile_of_another_shape_raises(kernel, wrong):
    plain = kernel.backward_tile
    kernel.backward_tile = lambda *given: WRONG_BACKWARD[wrong](*plain(*given))
    with pytest.raises(ValueError, match=rf"kernel {kernel.name} returned {wrong.split()[0]} \("):
        run(kernel, TILES["full"])


def test_lse_of_packed_documents_as_aotriton_returns_it_raises(stand_in_ops):
    """On ROCm it is (documents, heads, the longest document), not (heads, all rows)."""
    kernel = stand_ins.make("flash", torch.float32)
    run(kernel, TILES["bands"])

    def as_aotriton(q, *given, **options):
        out, lse, *_ = kernel_ops.bands_forward(q, *given, **options)
        parts = lse.split([10, 14], -1)
        return out, torch.stack([torch.nn.functional.pad(part, (0, 14 - part.shape[-1])) for part in parts])

    kernel_ops = kernel.ops
    kernel.ops = FlashOps(kernel_ops.forward, kernel_ops.backward, as_aotriton, kernel_ops.bands_backward)
    with pytest.raises(ValueError, match=r"kernel cuda-flash returned lse \(2, 2, 4, 14\) instead of \(2, 4, 24\)"):
        run(kernel, TILES["bands"])


def test_rocm_is_refused_with_a_line_that_says_how_to_try_it(monkeypatch):
    """An MI300X says that its compute capability is (9, 4), like a Hopper's."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    device = torch.device("cuda")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        with pytest.raises(ValueError, match=r"not run on AMD GPUs \(ROCm 7\.0\).*check all") as raised:
            kernel_for(device, dtype, 128)
        assert "\n" not in str(raised.value)
    monkeypatch.setenv(cuda.TRY_ROCM, "1")
    for dtype in (torch.bfloat16, torch.float32):
        kernel = kernel_for(device, dtype, 128)
        assert kernel.name == "cuda-efficient" and "unproven" in kernel.reason
