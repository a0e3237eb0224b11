"""Backends against each other and against float64, for all kinds of tiles, and the traps of ATen's CPU kernel."""

from collections import Counter

import pytest
import torch

from startrail.geometry.mask import Mask
from startrail.geometry.tiles import Tile, tiles_of
from startrail.kernels import cpu, kernel_for, surrogate_out
from startrail.kernels.cpu import CpuKernel, check_block
from startrail.kernels.reference import ReferenceKernel
from tests.helpers import tensors

MASKS = [
    Mask(),
    Mask(causal=True),
    Mask(causal=True, window=9),
    Mask(window=5),
    Mask(causal=True, window=150),
    Mask(window=170),
    Mask(causal=True, documents=(0, 3, 4, 60, 200, 300)),
    Mask(documents=(0, 100, 101, 300)),
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_cpu_agrees_with_the_reference_forward_and_backward(mask, kv_heads, dtype):
    q, k, v, dout = tensors(300, kv_heads=kv_heads, dtype=dtype)
    runs = ((0, 300),)
    visible = tiles_of(mask, runs, runs)
    results = []
    for kernel in (CpuKernel(dtype), ReferenceKernel()):
        q_, k_, v_, dout_ = (kernel.prepare(x) for x in (q, k, v, dout))
        partial = kernel.forward(q_, k_, v_, visible, 0.3)
        grads = kernel.backward(dout_, q_, k_, v_, partial.out, partial.lse.to(q_.dtype), visible, 0.3)
        results.append([partial.out, partial.lse, *(grad.value for grad in grads)])
    tolerance = 1e-12 if dtype == torch.float64 else 5e-6
    for ours, truth in zip(*results, strict=True):
        assert (ours.double() - truth).abs().max() < tolerance * truth[truth.isfinite()].abs().max().clamp(min=1)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_backward_from_delta_instead_of_out(mask):
    """Messages carry delta. Any out with the same row sums gives the same gradients, also where dout is zero."""
    q, k, v, dout = tensors(300, dtype=torch.float64)
    dout[:, :, 7] = 0
    visible = tiles_of(mask, ((0, 300),), ((0, 300),))
    kernel = CpuKernel(torch.float64)
    partial = kernel.forward(q, k, v, visible, 0.3)
    replaced = surrogate_out(dout, (dout * partial.out).sum(-1))
    assert replaced[:, :, 7].abs().max() == 0
    pairs = zip(
        kernel.backward(dout, q, k, v, partial.out, partial.lse, visible, 0.3),
        kernel.backward(dout, q, k, v, replaced, partial.lse, visible, 0.3),
        strict=True,
    )
    assert all((a.value - b.value).abs().max() < 1e-12 for a, b in pairs)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 4e-7), (torch.bfloat16, 1e-6), (torch.float16, 1e-6)])
def test_a_surrogate_out_sums_to_delta_also_in_half_precision(dtype, tolerance):
    dout = torch.randn(1000, 16, dtype=torch.float64).to(dtype)
    dout[:10, 1:] = 0  # one number left: then it carries all, to its own precision
    dout[10] = 0
    delta = torch.randn(1000) * 4
    delta[10] = 0
    sums = (dout.double() * surrogate_out(dout, delta).double()).sum(-1)
    error = (sums - delta).abs()
    assert error[10:].max() < 20 * tolerance and error[11:].square().mean().sqrt() < tolerance
    assert error[:10].max() <= 20 * torch.finfo(dtype).eps


def test_blocks_over_parts_of_the_keys_merge_to_the_whole():
    q, k, v, dout = tensors(300)
    kernel = ReferenceKernel()
    q, k, v, dout = (kernel.prepare(x) for x in (q, k, v, dout))
    whole = kernel.forward(q, k, v, tiles_of(Mask(), ((0, 300),), ((0, 300),)), 0.3)
    parts = None
    for start, stop in ((0, 1), (1, 130), (130, 300)):
        visible = tiles_of(Mask(), ((0, 300),), ((start, stop - start),))
        parts = kernel.forward(q, k[:, :, start:stop], v[:, :, start:stop], visible, 0.3, parts)
    assert (whole.out - parts.out).abs().max() < 1e-12
    assert (whole.lse - parts.lse).abs().max() < 1e-12


def test_rows_that_see_nothing_have_no_weight():
    kernel = CpuKernel(torch.float32)
    q, k, v, _ = tensors(300, kv_heads=4)
    visible = tiles_of(
        Mask(causal=True), ((0, 100), (400, 200)), ((100, 300),)
    )  # the first 100 rows see none of the keys
    partial = kernel.forward(q, k, v, visible, 0.3)
    assert torch.isinf(partial.lse[:, :, :100]).all()
    assert not partial.out[:, :, :100].any()
    before = partial.out.clone()
    partial.merge(torch.full_like(before, 7.0), torch.full(before.shape[:3], float("-inf")))
    assert torch.equal(partial.out, before), "merging nothing changes nothing, also where nothing was seen so far"


def test_blocks_that_the_kernel_gets_wrong_raise():
    q, k, v, _ = tensors(300, kv_heads=4)
    with pytest.raises(ValueError, match="does not fit"):
        check_block(q, k[:, :, :0], v[:, :, :0])
    with pytest.raises(ValueError, match="does not fit"):
        check_block(q, k[:, :3], v[:, :3])
    with pytest.raises(ValueError, match="last dimension must be dense"):
        check_block(q, k[..., ::2], v[..., ::2])
    assert CpuKernel(torch.float32).prepare(k[..., ::2]).stride(-1) == 1
    with pytest.raises(ValueError, match="no attention kernel for device"):
        kernel_for(torch.device("meta"), torch.float32, 64)


@pytest.mark.parametrize(
    "spoilt, value, bad",
    [
        # (dq, dk, dv) numbers that are not finite, of 64, 32 of them in the head that has the bad one
        ("k", float("inf"), (32, 32, 32)),
        ("q", float("nan"), (8, 32, 32)),  # one row, and so every key that it sees
        ("v", float("inf"), (32, 32, 0)),  # weights do not depend on values
        ("dout", float("nan"), (8, 32, 4)),
    ],
)
def test_gradients_of_values_that_are_not_finite_match_one_process(spoilt, value, bad):
    """ATen's kernel loses some NaNs and makes others."""
    given = dict(zip(("q", "k", "v", "dout"), (x[:1] for x in tensors(4, heads=2, dim=8)), strict=True))
    given["q"][0, 0, :, 0] = 1.0  # so that an infinite key is the largest of every row
    given[spoilt][0, 0, 1, 0] = value
    visible = tiles_of(Mask(), ((0, 4),), ((0, 4),))
    kernel = CpuKernel(torch.float32)
    q, k, v, dout = (given[name] for name in ("q", "k", "v", "dout"))
    partial = kernel.forward(q, k, v, visible, 0.3)
    out = surrogate_out(dout, (dout * partial.out).sum(-1))
    grads = kernel.backward(dout, q, k, v, out, partial.lse.float(), visible, 0.3)
    assert tuple((~grad.value.isfinite()).sum().item() for grad in grads) == bad


def test_an_infinite_key_of_another_document_spoils_one_number_of_a_row():
    """Two documents of two tokens under one mask. Where a key of -inf is visible, its logits are -inf, so nothing shows
    in out and lse; where it is hidden, they are +inf."""
    q, k, v, dout = (x[:1] for x in tensors(4, heads=2, dim=8))
    q[0, 0, :, 0], k[0, 0, 0, 0] = torch.tensor([1.0, 1.0, -1.0, -1.0]), float("-inf")
    visible = tiles_of(Mask(documents=(0, 2, 4)), ((0, 4),), ((0, 4),))
    assert [tile.form for tile in visible] == ["masked"]
    kernel = CpuKernel(torch.float32)
    partial = kernel.forward(q, k, v, visible, 0.3)
    out = surrogate_out(dout, (dout * partial.out).sum(-1))
    dq = kernel.backward(dout, q, k, v, out, partial.lse.float(), visible, 0.3)[0].value
    assert (~dq[0, 0, 2:].isfinite()).sum(-1).tolist() == [1, 1]


@pytest.mark.parametrize("rows, dim, calls", [(1024, 8, 5), (300, 32, 3), (300, 8, 1), (257, 32, 1), (128, 32, 1)])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_causal_square_is_computed_in_smaller_ones(rows, dim, calls, batch, monkeypatch):
    """Exactly, in as many calls as it has sizes, if it is large enough. ATen computes 512 keys at a time for up to 256
    rows, so what it computes is the rows of a call times all of its keys."""
    computed = Counter()

    def counted(name, op):
        def call(*given, **options):
            q, k = given[:2] if name == "forward" else given[1:3]
            computed[name] += 1
            computed[f"{name} pairs"] += q.shape[0] * q.shape[2] * k.shape[2]
            return op(*given, **options)

        return call

    for name in ("forward", "backward"):
        op = f"cpu_flash_{name}"
        monkeypatch.setattr(cpu, op, counted(name, getattr(cpu, op)))
    q, k, v, dout = (torch.randn(batch, heads, rows, dim, dtype=torch.float64) for heads in (4, 2, 2, 4))
    visible, results = [Tile(0, rows, 0, rows, "causal")], []
    for kernel in (CpuKernel(torch.float64), ReferenceKernel()):
        partial = kernel.forward(q, k, v, visible, 0.3)
        grads = kernel.backward(dout, q, k, v, partial.out, partial.lse, visible, 0.3)
        results.append([partial.out, partial.lse, *(grad.value for grad in grads)])
    assert all((ours - truth).abs().max() < 1e-12 for ours, truth in zip(*results, strict=True))
    assert computed["forward"] == computed["backward"] == (batch * calls if calls > 1 else 1)
    if rows == 1024:
        assert computed["forward pairs"] == computed["backward pairs"] < 1.07 * batch * rows * (rows + 1) / 2
