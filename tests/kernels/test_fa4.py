"""FlashAttention 4 without the package: one with its signatures (4.0.0.beta27) that computes with the reference."""

import inspect
import sys
import types

import pytest
import torch

from startrail.geometry.bands import bands_of
from startrail.geometry.tiles import segments_of
from startrail.kernels import cuda
from tests.kernels import stand_ins

PATH = "flash_attn.cute.interface"


def window(causal, left, right):
    """As ATen writes it; a causal call is a window that ends at the diagonal."""
    return dict(window_size_left=-1 if left is None else left,
                window_size_right=0 if causal else -1 if right is None else right)  # fmt: skip


def _flash_attn_fwd(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
    max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None,
    window_size_left=None, window_size_right=None, learnable_sink=None, tile_mn=None, num_splits=1, return_lse=False,
    out=None,
):  # fmt: skip
    assert return_lse and -1 not in (window_size_left, window_size_right)
    out, lse, *_ = stand_ins.bands_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, False, False, scale=softmax_scale,
        **window(causal, window_size_left, window_size_right),
    )  # fmt: skip
    return out, lse, None, None


def _flash_attn_bwd(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
    window_size_right=None, m_block_size=64, *, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
    max_seqlen_q=None, max_seqlen_k=None, deterministic=False,
):  # fmt: skip
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    seed = torch.empty(2)
    return stand_ins.bands_backward(
        dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, False, seed, seed,
        scale=softmax_scale, **window(causal, window_size_left, window_size_right),
    )  # fmt: skip


@pytest.fixture
def kernel(monkeypatch):
    """The backend as if the package were installed."""
    package = types.SimpleNamespace(_flash_attn_fwd=_flash_attn_fwd, _flash_attn_bwd=_flash_attn_bwd)
    parents = {name: types.ModuleType(name) for name in ("flash_attn", "flash_attn.cute")}
    for name, module in {**parents, PATH: package}.items():
        monkeypatch.setitem(sys.modules, name, module)
    cuda._newer_flash.cache_clear()
    yield lambda dtype: cuda.FlashKernel(dtype, cuda._newer_flash("FA4", PATH), "FA4")
    cuda._newer_flash.cache_clear()
    cuda._cu_seqlens_on.cache_clear()


@pytest.mark.parametrize("kind", ["full", "causal", "aligned"])
def test_further_results_of_a_call_are_ignored(kernel, kind):
    """A forward pass returns four; torch's own adapter expects two."""
    for heads, kv_heads in stand_ins.HEADS:
        stand_ins.check_numbers(kernel(torch.bfloat16), kind, heads, kv_heads, 64)


@pytest.mark.parametrize("block", stand_ins.BLOCKS)
def test_documents_and_windows(kernel, block):
    mask, _ = stand_ins.BLOCKS[block]
    tiles = bands_of(segments_of(mask, ((0, 40),), ((0, 40),)))
    stand_ins.check_blocks(kernel(torch.float32), stand_ins.tensors(40, 40, 4, 2, 16, torch.float64), tiles)


def test_another_package_of_that_name_is_ignored(monkeypatch):
    parents = {name: types.ModuleType(name) for name in ("flash_attn", "flash_attn.cute", PATH)}
    for name, module in parents.items():
        monkeypatch.setitem(sys.modules, name, module)
    cuda._newer_flash.cache_clear()
    assert cuda._newer_flash("FA4", PATH) is None
    cuda._newer_flash.cache_clear()


def test_torchs_own_adapter_still_expects_two_results():
    """If it takes more results, we no longer need our own."""
    from torch.nn.attention import _fa4

    assert "out, lse = module._flash_attn_fwd(" in inspect.getsource(_fa4._fa4_run_forward)
