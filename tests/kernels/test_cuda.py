"""The CUDA backends without a GPU: real ops on fake CUDA tensors for shapes, dtypes and devices, and stand-ins on CPU
for numbers."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from startrail import _compat
from startrail.geometry.bands import bands_of
from startrail.geometry.mask import Mask, Segment
from startrail.geometry.tiles import Tile, segments_of, tiles_of
from startrail.kernels import CpuKernel, base, cuda, pad_width
from startrail.kernels.base import TileMask, row_chunks, row_sums, surrogate_out
from startrail.kernels.flash_ops import flash_attn_ops
from tests.kernels.stand_ins import (
    BLOCKS,
    HALF,
    HEADS,
    KINDS,
    REFERENCE,
    SCALE,
    SOFTCAP,
    WithoutDeviceGuard,
    check_blocks,
    check_numbers,
    make,
    tensors,
    wide,
)
from workshop.peers import fake_flash_attn

# --- shapes, dtypes and devices

BACKENDS = [("efficient", dtype) for dtype in (torch.float32, *HALF)]
BACKENDS += [(name, dtype) for name in ("flash", "flash-attn", "cudnn") for dtype in HALF]


@pytest.mark.parametrize("heads, kv_heads", HEADS[:2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name, dtype", BACKENDS)
def test_real_ops_take_fake_cuda_tensors(name, dtype, kind, heads, kv_heads, monkeypatch):
    monkeypatch.setattr(_compat, "can_use_cudnn", lambda q, k, v, causal: q.shape[3] <= 128)
    kernel = make(name, dtype)
    rows, keys = KINDS[kind]
    for dim in (20, 64, 72, 128, 256):
        with FakeTensorMode(), WithoutDeviceGuard():
            q, dout = (torch.empty(2, rows, heads, dim, dtype=dtype, device="cuda").transpose(1, 2) for _ in range(2))
            k, v = (torch.empty(2, kv_heads, keys, dim, dtype=dtype, device="cuda") for _ in range(2))
            mask = torch.empty(rows, keys, dtype=torch.bool, device="cuda") if kind == "masked" else None
            out, lse = kernel.forward_tile(q, k, v, TileMask(kind == "causal", mask, SCALE))
            grads = kernel.backward_tile(dout, q, k, v, out.float(), lse, TileMask(kind == "causal", mask, SCALE))
        assert (lse.shape, lse.dtype, lse.device.type) == ((2, heads, rows), torch.float32, "cuda")
        for result, side in zip((out, *grads), (q, q, k, v), strict=True):
            assert (result.shape, result.dtype, result.device) == (side.shape, dtype, side.device)


@pytest.mark.parametrize("packs", [((17, 33),), ((9, 20), (8, 13))])
@pytest.mark.parametrize("dtype", HALF)
def test_real_bands_take_fake_cuda_tensors(dtype, packs):
    kernel = make("flash", dtype)
    with FakeTensorMode(allow_non_fake_inputs=True), WithoutDeviceGuard():
        q, dout = (torch.empty(2, 4, 17, 64, dtype=dtype, device="cuda") for _ in range(2))
        k, v = (torch.empty(2, 2, 33, 64, dtype=dtype, device="cuda") for _ in range(2))
        tile_mask = TileMask(False, None, SCALE, (8, 0), packs)
        out, lse = kernel.forward_tile(q, k, v, tile_mask)
        grads = kernel.backward_tile(dout, q, k, v, out.float(), lse, tile_mask)
    cuda._cu_seqlens_on.cache_clear()  # fake ones
    assert (lse.shape, lse.dtype) == ((2, 4, 17), torch.float32)
    for result, side in zip((out, *grads), (q, q, k, v), strict=True):
        assert (result.shape, result.dtype, result.device) == (side.shape, dtype, side.device)


@pytest.mark.parametrize("name", ["flash", "flash-attn"])
def test_a_masked_tile_never_reaches_flash(name, stand_in_ops, monkeypatch):
    kernel = make(name, torch.bfloat16)
    monkeypatch.setattr(kernel, "_forward", None)
    monkeypatch.setattr(kernel, "_backward", None)
    check_numbers(kernel, "masked", 4, 2, 64)


# --- numbers


@pytest.mark.parametrize("dim", [20, 64, 72])
@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["efficient", "flash", "flash-attn", "cudnn"])
def test_numbers(name, dtype, kind, heads, kv_heads, dim, stand_in_ops):
    check_numbers(make(name, dtype), kind, heads, kv_heads, dim)


@pytest.mark.parametrize("name", ["efficient", "flash", "flash-attn", "cudnn"])
def test_whole_blocks(name, stand_in_ops):
    tiles = [
        Tile(0, 9, 0, 9, "causal"),
        Tile(9, 20, 0, 13, "full"),
        Tile(20, 27, 9, 16, "anticausal"),
        Tile(27, 40, 3, 30, "masked", (Segment(27, 33, 3, 1, 10, 1), Segment(33, 40, 9, 0, 30, 0))),
        Tile(0, 40, 28, 30, "full"),
    ]
    check_blocks(make(name, torch.float32), tensors(40, 30, 4, 2, 20, torch.float64), tiles)


@pytest.mark.parametrize("name", ["efficient", "flash", "flash-attn", "cudnn", "FA3", "FA4"])
def test_latent_attentions_values_are_padded_for_few_kernels(name, stand_in_ops, monkeypatch):
    """Keys of 192 with values of 128. Tensors as wide as ``widths`` says are not padded again."""
    kernel = make(name, torch.float32)
    q, k, v, dout = tensors(40, 30, 4, 2, 192, torch.float64)
    tiles = [Tile(0, 9, 0, 9, "causal"), Tile(9, 20, 0, 13, "full"), Tile(20, 40, 28, 30, "full")]
    check_blocks(kernel, (q, k, v[..., :128], dout[..., :128]), tiles)
    assert kernel.widths(192, 128) == ((192, 192) if name in ("flash", "flash-attn") else (192, 128))
    assert kernel.widths(64, 80) == ((64, 80) if name == "efficient" else (80, 80))
    sides = q, k, pad_width(v[..., :128], kernel.widths(192, 128)[1])
    monkeypatch.setattr(base, "F", None)
    kernel.forward(*(kernel.prepare(x) for x in sides), tiles, SCALE)


def test_windows_and_documents_of_latent_attention_on_cudnn(stand_in_ops):
    """FlashAttention 2 computes them, with wider values."""
    tiles = bands_of(segments_of(BLOCKS["documents in a window"][0], ((0, 40),), ((0, 40),)))
    q, k, v, dout = tensors(40, 40, 4, 2, 192, torch.float64)
    check_blocks(make("cudnn", torch.float32), (q, k, v[..., :128], dout[..., :128]), tiles)


@pytest.mark.parametrize("name", ["efficient", "flash", "flash-attn", "cudnn"])
def test_misaligned_views_and_an_expanded_gradient_are_copied(name, stand_in_ops):
    kernel = make(name, torch.float32)
    q, k, v = (x.contiguous()[..., 1:] for x in tensors(17, 33, 4, 2, 65, torch.float32)[:3])
    shifted = torch.randn(k.numel() + 3)[3:].view(k.shape)  # contiguous, but starts between two aligned addresses
    dout = torch.ones(()).expand(q.shape)
    out, lse = kernel.forward_tile(q, shifted, v, TileMask(False, None, SCALE))
    grads = kernel.backward_tile(dout, q, shifted, v, out, lse, TileMask(False, None, SCALE))
    sides = wide(q, shifted, v)
    expected = REFERENCE.backward_tile(dout.double(), *sides, *wide(out, lse), TileMask(False, None, SCALE))
    for grad, value in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad.double(), value, atol=5e-6, rtol=5e-6)


def test_prepare_gives_the_kernels_dtype_and_a_dense_last_dimension():
    x = torch.randn(1, 2, 8, 3).transpose(2, 3)
    prepared = make("flash", torch.bfloat16).prepare(x)
    assert (prepared.dtype, prepared.stride(-1)) == (torch.bfloat16, 1)
    assert torch.equal(prepared, x.bfloat16())
    assert make("efficient", torch.float32).prepare(prepared).dtype == torch.float32


@pytest.mark.parametrize("name", ["efficient", "flash", "flash-attn", "cudnn"])
@pytest.mark.parametrize("shape", [(1, 3, 4, 8), (1, 2, 0, 8)])
def test_blocks_that_do_not_fit_raise(name, shape):
    with pytest.raises(ValueError, match="block kernel"):
        make(name, torch.float32).forward_tile(
            torch.randn(1, 4, 4, 8), *torch.randn(2, *shape), TileMask(False, None, SCALE)
        )


@pytest.mark.parametrize("name", ["flash", "flash-attn", "softcap"])
@pytest.mark.parametrize("block", BLOCKS)
def test_flash_attention_handles_documents_and_windows_itself(name, block, stand_in_ops):
    """A shard with itself and with another: as bands they take few calls and give the same numbers."""
    mask, most = BLOCKS[block]
    whole, outer, inner = ((0, 40),), ((0, 10), (30, 10)), ((10, 20),)
    for own, other in ((whole, whole), (outer, inner), (inner, outer), (outer, outer), (whole, outer), (whole, inner)):
        tiles = bands_of(segments_of(mask, own, other))
        assert not any(tile.form == "masked" for tile in tiles)
        check_blocks(make(name, torch.float32), tensors(40, 40, 4, 2, 16, torch.float64), tiles)
        if (own, other) == (whole, whole):
            assert len(tiles) <= most


def test_a_gpu_masks_what_a_cpu_cuts_into_tiles():
    """A call costs an H100 as much as 3 million pairs, and a CPU as much as 16 thousand."""
    mask, whole = Mask(True, None, tuple(range(0, 601, 100))), ((0, 600),)
    gpu, cpu = (len(tiles_of(mask, whole, whole, kernel.costs.call)) for kernel in (cuda.EfficientKernel, CpuKernel))
    assert (gpu, cpu) == (3, 6)


@pytest.mark.parametrize("form", ["full", "causal", "anticausal"])
def test_flash_attn_supports_a_softcap(form, stand_in_ops):
    """Whole rectangles; windows and documents are above. Its reference is held to float64 in test_options."""
    tiles = [Tile(0, 30, 0, 30, form), Tile(30, 40, 0, 30, "full")]
    check_blocks(make("softcap", torch.float32), tensors(40, 30, 4, 2, 20, torch.float64), tiles)


def test_the_benchmarks_stand_in_supports_a_softcap_but_no_windows():
    kernel = cuda.FlashKernel(torch.float32, flash_attn_ops(fake_flash_attn, SOFTCAP), "attn", SOFTCAP)
    sides = tensors(40, 40, 4, 2, 16, torch.float64)
    check_blocks(kernel, sides, [Tile(0, 40, 0, 40, "causal")])
    with pytest.raises(NotImplementedError, match="no windows"):
        check_blocks(kernel, sides, bands_of(segments_of(Mask(True, 7), ((0, 40),), ((0, 40),))))


def test_cudnn_computes_what_torch_lets_it_and_flash_the_rest(stand_in_ops, monkeypatch):
    used = []
    for name in ("flash_forward", "flash_backward", "cudnn_forward", "cudnn_backward"):
        op = getattr(_compat, f"cuda_{name}")
        monkeypatch.setattr(_compat, f"cuda_{name}", lambda *a, op=op, name=name, **b: used.append(name) or op(*a, **b))
    monkeypatch.setattr(_compat, "can_use_cudnn", lambda q, k, v, causal: not causal)
    kernel = make("cudnn", torch.bfloat16)
    check_numbers(kernel, "full", 4, 2, 64)
    check_numbers(kernel, "causal", 4, 2, 64)
    assert used == ["cudnn_forward", "cudnn_backward", "flash_forward", "flash_backward"]


def test_flash_attention_3_leaves_multiprocessors_to_transfers(monkeypatch):
    """Torch's own adapter passes the margin on, in every forward call: rectangles, causal tiles and documents."""
    from torch.nn.attention import _fa3

    margins = []

    def fwd(q, k, v, *rest):
        margins.append(rest[-1])
        lse = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
        return torch.empty_like(q), torch.empty(lse), None, None

    monkeypatch.setattr(_fa3, "_FA3_CUDA_FWD", fwd)
    monkeypatch.setattr(_fa3, "_fa3_forward_support_error", lambda *arguments, **options: None)
    monkeypatch.setattr(_fa3, "_fa3_import_module", lambda path: None)
    kernel = cuda.FlashKernel(torch.bfloat16, cuda.FlashOps(*_compat.fa3_ops("flash_attn_interface")), "FA3")
    q, k, v, _ = tensors(32, 32, 4, 2, 64, torch.bfloat16)
    before = torch._C._get_sm_carveout_experimental()
    for margin in (0, 16):
        kernel.sm_margin = margin
        for causal in (False, True):
            kernel.forward_tile(q, k, v, TileMask(causal, None, SCALE))
        for packs in (((32, 32),), ((20, 20), (12, 12))):
            kernel.forward_tile(q, k, v, TileMask(False, None, SCALE, (5, 0), packs))
    assert margins == [0] * (2 + 1 + 2) + [16] * (2 + 1 + 2)
    assert torch._C._get_sm_carveout_experimental() == before, "for our calls only"


def test_atens_flash_backward_copies_neither_dout_nor_out(stand_in_ops, monkeypatch):
    """It makes both dense (batch, rows, heads, dim); so are they for all blocks of a row, and no other package's."""
    dense, plain = [], _compat.cuda_flash_backward

    def backward(dout, q, k, v, out, *rest, **options):
        dense.append([x.transpose(1, 2).is_contiguous() for x in (dout, out)])
        return plain(dout, q, k, v, out, *rest, **options)

    monkeypatch.setattr(_compat, "cuda_flash_backward", backward)
    kernel = make("flash", torch.bfloat16)
    q, k, v, dout = (x.contiguous() for x in tensors(32, 32, 4, 2, 64, torch.bfloat16))
    out, lse = kernel.forward_tile(q, k, v, TileMask(True, None, SCALE))
    rows = kernel.prepare_dout(dout)
    stand_in = kernel.prepare(surrogate_out(rows, row_sums(rows, out, torch.float32)))
    kernel.backward(rows, q, k, v, stand_in, lse, [Tile(0, 32, 0, 32, "causal")], SCALE)
    assert dense == [[True, True]]
    assert make("flash-attn", torch.bfloat16).prepare_dout(dout) is dout


def test_largest_logits_take_few_launches_on_a_gpu():
    """A block of 8k x 8k tokens and 16 heads is 2**30 logits: 16 parts, where 2**22 at a time would be 256."""
    with FakeTensorMode(), WithoutDeviceGuard():
        q = torch.empty(1, 16, 8192, 128, dtype=torch.bfloat16, device="cuda")
        assert len(list(row_chunks(q, 8192))) == 16
        assert len(list(row_chunks(q.cpu(), 8192))) == 256
