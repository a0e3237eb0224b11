"""CUDA kernels without a GPU: functions with the signatures of ATen's and flash-attn's ops that compute with the
reference, and raise for whatever the real kernels would crash on or silently get wrong."""

import itertools
import types
from functools import partial

import torch
from torch.overrides import TorchFunctionMode

from startrail import _compat
from startrail.geometry.mask import Mask
from startrail.kernels import Partial, cuda
from startrail.kernels.base import TileMask
from startrail.kernels.flash_ops import FlashOps, flash_attn_ops
from startrail.kernels.reference import ReferenceKernel
from tests.geometry.test_mask import fa2_window

REFERENCE = ReferenceKernel()
SCALE, SOFTCAP = 0.3, 1.5
HALF = (torch.float16, torch.bfloat16)
HEADS = [(4, 4), (4, 2), (4, 1)]
KINDS = {"full": (17, 33), "causal": (33, 33), "masked": (17, 33), "aligned": (64, 32)}


# --- ATen's ops


def check_sides(q, k, v, *others, narrow=False):
    """``narrow``: values, and what has their width, may be narrower than keys."""
    for x, width in ((q, q), (k, q), (v, v), *((x, v) for x in others)):
        assert x.dtype == q.dtype
        assert x.stride(-1) == 1
        assert x.shape[-1] == (width if narrow else q).shape[-1]
        assert not any(step % 8 for step in (x.shape[-1], x.storage_offset(), *x.stride()[:-1])), "misaligned"


def check_flash_lse(lse, q):
    assert lse.dtype == torch.float32
    assert lse.shape == q.shape[:3]
    assert lse.is_contiguous()


def wide(*tensors):
    return [x.double() for x in tensors]


def flash_forward(
    query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None,
    kernel=REFERENCE, narrow=False,
):  # fmt: skip
    check_sides(query, key, value, narrow=narrow)
    assert (dropout_p, return_debug_mask) == (0.0, False)
    out, lse = kernel.forward_tile(*wide(query, key, value), TileMask(is_causal, None, scale))
    empty = torch.empty(0)
    return out.to(query.dtype), lse.float(), None, None, query.shape[2], key.shape[2], empty, empty, empty


def flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    philox_seed, philox_offset, *, scale=None, kernel=REFERENCE, narrow=False,
):  # fmt: skip
    check_sides(query, key, value, grad_out, out, narrow=narrow)
    check_flash_lse(logsumexp, query)
    assert (cum_seq_q, cum_seq_k, max_q, max_k, dropout_p) == (None, None, query.shape[2], key.shape[2], 0.0)
    sides = wide(grad_out, query, key, value, out, logsumexp)
    return tuple(grad.to(query.dtype) for grad in kernel.backward_tile(*sides, TileMask(is_causal, None, scale)))


def cudnn_forward(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale,
):  # fmt: skip
    assert attn_bias is None and compute_log_sumexp
    rest = dropout_p, is_causal, return_debug_mask
    out, lse, *rest = flash_forward(query, key, value, *rest, scale=scale, narrow=True)
    return out, lse.unsqueeze(-1), *rest


def cudnn_backward(
    grad_out, query, key, value, out, logsumexp, seed, offset, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
    is_causal, *, scale,
):  # fmt: skip
    assert attn_bias is None and logsumexp.shape[3:] == (1,)
    rest = cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, seed, offset
    return flash_backward(grad_out, query, key, value, out, logsumexp.squeeze(-1), *rest, scale=scale, narrow=True)


def check_bands(q, k, v, *others):
    """Flash attention's requirements for (..., rows, heads, dim)."""
    for x in (q, k, v, *others):
        assert x.dtype == q.dtype
        assert not any(step % 8 for step in (x.shape[-1], x.storage_offset(), *x.stride()[:-1])), "misaligned"
        assert x.stride(-1) == 1


def band_blocks(q, k, cum_seq_q, cum_seq_k, max_q, max_k, left, right):
    """Rows, keys and what is visible of each rectangle: aligned at the last row and key, in the window that
    FlashAttention 2 makes of the one it is given."""
    if cum_seq_q is None:
        cuts = [(0, q.shape[1]), (0, k.shape[1])]
    else:
        assert q.dim() == 3 and cum_seq_q.dtype == cum_seq_k.dtype == torch.int32
        cuts = [tuple(cum_seq_q.tolist()), tuple(cum_seq_k.tolist())]
        assert (cuts[0][-1], cuts[1][-1]) == (q.shape[0], k.shape[0])
    lengths = [[b - a for a, b in itertools.pairwise(ends)] for ends in cuts]
    assert [max(side) for side in lengths] == [max_q, max_k]
    left, right = fa2_window(left, right, max_q, max_k)
    for (q0, q1), (k0, k1) in zip(*(itertools.pairwise(ends) for ends in cuts), strict=True):
        row, key = torch.arange(q1 - q0).unsqueeze(1) + (k1 - k0) - (q1 - q0), torch.arange(k1 - k0)
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool)
        if left >= 0:
            seen &= key >= row - left
        if right >= 0:
            seen &= key <= row + right
        yield slice(q0, q1), slice(k0, k1), seen


def bands_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale,
    window_size_left, window_size_right, kernel=REFERENCE,
):  # fmt: skip
    check_bands(query, key, value)
    assert (dropout_p, is_causal, return_debug_mask) == (0.0, False, False)
    out, lse = torch.zeros_like(query), torch.zeros(*query.shape[:-3], query.shape[-2], query.shape[-3])
    blocks = band_blocks(query, key, cum_seq_q, cum_seq_k, max_q, max_k, window_size_left, window_size_right)
    for rows, keys, seen in blocks:
        sides = query[..., rows, :, :], key[..., keys, :, :], value[..., keys, :, :]
        sides = [x.transpose(-2, -3).double().view(-1, x.shape[-2], x.shape[-3], x.shape[-1]) if x.dim() == 4
                 else x.transpose(0, 1).double().unsqueeze(0) for x in sides]  # fmt: skip
        part, sums = kernel.forward_tile(*sides, TileMask(False, seen, scale))
        out[..., rows, :, :] = (part if query.dim() == 4 else part[0]).transpose(-2, -3).to(query.dtype)
        sums = sums.masked_fill(sums.isneginf(), float("inf"))  # its sign of a row that saw no key
        lse[..., rows] = (sums if query.dim() == 4 else sums[0]).float()
    return out, lse, torch.empty(2), torch.empty(0), torch.empty(0)


def bands_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
    unused, *, scale, window_size_left, window_size_right, kernel=REFERENCE,
):  # fmt: skip
    check_bands(query, key, value, grad_out, out)
    assert logsumexp.dtype == torch.float32 and logsumexp.is_contiguous()
    assert logsumexp.shape == (*query.shape[:-3], query.shape[-2], query.shape[-3])
    assert (dropout_p, is_causal) == (0.0, False)
    one = query.dim() == 3
    sides = [x.unsqueeze(0) if one else x for x in (grad_out, query, key, value, out)]
    dout, q, k, v, o = (x.transpose(1, 2).double() for x in sides)
    sums = (logsumexp.unsqueeze(0) if one else logsumexp).double()
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    blocks = band_blocks(query, key, cum_seq_q, cum_seq_k, max_q, max_k, window_size_left, window_size_right)
    for rows, keys, seen in blocks:
        side = dout[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], o[:, :, rows], sums[:, :, rows]
        found = kernel.backward_tile(*side, TileMask(False, seen, scale))
        for grad, part, where in zip(grads, found, (rows, keys, keys), strict=True):
            grad[:, :, where] += part
    grads = [grad.transpose(1, 2).to(query.dtype) for grad in grads]
    return tuple(grad[0] for grad in grads) if one else tuple(grads)


def check_efficient(q, k, v, bias):
    """Equal heads, and a bias that is aligned; returns the mask that it stands for."""
    assert q.shape[1] == k.shape[1] == v.shape[1]
    if bias is None:
        return None
    assert bias.dtype == q.dtype
    assert bias.shape == (*q.shape[:3], k.shape[2])
    assert bias.stride(3) == 1
    assert not any(step % 16 for step in bias.stride()[:3])
    assert bool(((bias == 0) | (bias == float("-inf"))).all())
    return bias[0, 0] == 0


def efficient_forward(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
):  # fmt: skip
    check_sides(query, key, value, narrow=True)
    mask = check_efficient(query, key, value, attn_bias)
    assert compute_log_sumexp
    assert dropout_p == 0.0
    out, lse = REFERENCE.forward_tile(*wide(query, key, value), TileMask(is_causal, mask, scale))
    rows = query.shape[2]
    padded = torch.full((*query.shape[:2], (rows + 31) // 32 * 32), float("inf"))
    padded[..., :rows] = lse
    return out.to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2), padded, torch.empty(0), torch.empty(0)


def efficient_backward(
    grad_out_, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p, grad_input_mask,
    is_causal=False, *, scale=None,
):  # fmt: skip
    check_sides(query, key, value, grad_out_, out, narrow=True)
    mask = check_efficient(query, key, value, attn_bias)
    rows, (heads, dim) = query.shape[2], (query.shape[1], value.shape[3])
    assert logsumexp.dtype == torch.float32
    assert logsumexp.shape == (*query.shape[:2], (rows + 31) // 32 * 32)
    assert logsumexp.stride(2) == 1
    assert not any(step % 8 for step in logsumexp.stride()[:2])
    assert bool((logsumexp[..., rows:] == float("inf")).all())
    assert out.stride()[1:] == (dim, heads * dim, 1), "the kernel assumes this row stride"
    assert (dropout_p, list(grad_input_mask)) == (0.0, [True, True, True, False])
    sides = wide(grad_out_, query, key, value, out, logsumexp[..., :rows])
    return (*(grad.to(query.dtype) for grad in REFERENCE.backward_tile(*sides, TileMask(is_causal, mask, scale))), None)


def swap(*tensors):
    return [x.transpose(1, 2) for x in tensors]


def _flash_attn_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left, window_size_right, softcap, alibi_slopes, return_softmax,
):  # fmt: skip
    """The signatures of flash-attn 2.7 to 2.8; layout (batch, rows, heads, dim). A softcap of zero is none."""
    assert alibi_slopes is None
    cuts = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    window = dict(window_size_left=window_size_left, window_size_right=window_size_right)
    options = dict(scale=softmax_scale, kernel=ReferenceKernel(softcap or None))
    if cu_seqlens_q is None and window == dict(window_size_left=-1, window_size_right=-1):
        out, lse, *_ = flash_forward(*swap(q, k, v), dropout_p, causal, return_softmax, **options)
        out = out.transpose(1, 2).contiguous()
    else:
        out, lse, *_ = bands_forward(q, k, v, *cuts, dropout_p, causal, return_softmax, **options, **window)
    return out, lse, torch.empty(0), torch.empty(2)


def _flash_attn_forward(q, k, v, **options):
    return _flash_attn_varlen_forward(q, k, v, None, None, q.shape[1], k.shape[1], **options)


def _flash_attn_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    assert (alibi_slopes, rng_state) == (None, None)
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    seed, cuts = torch.empty(2), (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    rest = (*cuts, dropout_p, causal, seed, seed)
    window = dict(window_size_left=window_size_left, window_size_right=window_size_right)
    options = dict(scale=softmax_scale, kernel=ReferenceKernel(softcap or None))
    if cu_seqlens_q is None and window == dict(window_size_left=-1, window_size_right=-1):
        grads = swap(*flash_backward(*swap(dout, q, k, v, out), softmax_lse, *rest, **options))
    else:
        grads = bands_backward(dout, q, k, v, out, softmax_lse, *rest, **options, **window)
    for given, side, grad in zip((dq, dk, dv), (q, k, v), grads, strict=True):
        assert (given.shape, given.dtype, given.stride(-1)) == (side.shape, side.dtype, 1)
        given.copy_(grad)
    return torch.empty(0)


def _flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, **options):
    cuts = None, None, q.shape[1], k.shape[1]
    return _flash_attn_varlen_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, *cuts, **options)


PACKAGE = types.SimpleNamespace(
    _flash_attn_forward=_flash_attn_forward,
    _flash_attn_backward=_flash_attn_backward,
    _flash_attn_varlen_forward=_flash_attn_varlen_forward,
    _flash_attn_varlen_backward=_flash_attn_varlen_backward,
)


def make(name, dtype):
    """A backend by name."""
    if name == "flash-attn":
        return cuda.FlashKernel(dtype, flash_attn_ops(PACKAGE), "attn")
    if name == "softcap":
        return cuda.FlashKernel(dtype, flash_attn_ops(PACKAGE, SOFTCAP), "attn", SOFTCAP)
    if name in ("FA3", "FA4"):
        newer = FlashOps(partial(flash_forward, narrow=True), partial(flash_backward, narrow=True), None, None)
        return cuda.FlashKernel(dtype, newer, name)
    return {"efficient": cuda.EfficientKernel, "flash": cuda.FlashKernel, "cudnn": cuda.CudnnKernel}[name](dtype)


def use_stand_ins(monkeypatch):
    """Replace ATen's ops for CUDA."""
    ops = (flash_forward, flash_backward, efficient_forward, efficient_backward, bands_forward, bands_backward)
    for op in (*ops, cudnn_forward, cudnn_backward):
        monkeypatch.setattr(_compat, "cuda_" + op.__name__, op)
    monkeypatch.setattr(_compat, "can_use_cudnn", lambda q, k, v, causal: True)


# --- fake CUDA tensors


def getitem(x, index):
    """Indexing by views, and by one tensor of places."""
    if isinstance(index, torch.Tensor):
        return torch.ops.aten.index.Tensor(x, [index])
    index = index if isinstance(index, tuple) else (index,)
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index = (*index[:at], *[slice(None)] * (x.dim() - len(index) + 1), *index[at + 1 :])
    dim = 0
    for each in index:
        if isinstance(each, slice):
            x, dim = torch.ops.aten.slice.Tensor(x, dim, each.start, each.stop), dim + 1
        else:
            x = torch.ops.aten.select.int(x, dim, each)
    return x


def setitem(x, index, value):
    if isinstance(index, torch.Tensor):
        torch.ops.aten.index_put_.default(x, [index], value)
    else:
        torch.ops.aten.copy_.default(getitem(x, index), value)


class WithoutDeviceGuard(TorchFunctionMode):
    """A CPU build of torch has no CUDA device guard, and a few methods want one even of a fake tensor."""

    REPLACED = {
        torch.Tensor.contiguous: torch.ops.aten.contiguous.default,
        torch.Tensor.__invert__: torch.ops.aten.bitwise_not.default,
        torch.Tensor.copy_: torch.ops.aten.copy_.default,
        torch.Tensor.__getitem__: getitem,
        torch.Tensor.__setitem__: setitem,
    }

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self.REPLACED.get(func, func)(*args, **(kwargs or {}))


# --- numbers

BLOCKS = {
    "documents": (Mask(True, None, (0, 3, 4, 20, 37, 40)), 1),
    "documents, not causal": (Mask(False, None, (0, 13, 37, 40)), 2),
    "a window": (Mask(True, 7), 1),
    "a window, both ways": (Mask(False, 7), 3),
    "a window over a whole neighbour": (Mask(True, 15), 1),
    "the same, both ways": (Mask(False, 15), 3),
    "documents in a window": (Mask(True, 7, (0, 3, 4, 20, 37, 40)), 2),
}


def tensors(rows, keys, heads, kv_heads, dim, dtype):
    """q, k, v, dout: views of (batch, rows, heads, dim), as models give them."""
    torch.manual_seed(0)
    sizes = [(rows, heads), (keys, kv_heads), (keys, kv_heads), (rows, heads)]
    return [torch.randn(2, length, count, dim).to(dtype).transpose(1, 2) for length, count in sizes]


def slice_of_longer(x):
    """The same values as rows 3 to -2 of a longer (batch, rows, heads, ...) tensor."""
    before, after = (x[:, :, :1].expand(-1, -1, n, *x.shape[3:]) for n in (3, 2))
    longer = torch.cat([before, x, after], 2).transpose(1, 2).contiguous().transpose(1, 2)
    return longer[:, :, 3:-2]


def check_numbers(kernel, kind, heads, kv_heads, dim):
    """A tile of a larger attention: its backward takes the out and lse of all keys, not of its own alone."""
    rows, keys = KINDS[kind]
    q, k, v, dout = tensors(rows, keys, heads, kv_heads, dim, kernel.dtype)
    causal, mask = kind == "causal", None
    if kind == "masked":
        mask = torch.rand(rows, keys) < 0.5
        mask[:, 5] = True
    expected = REFERENCE.forward_tile(*wide(q, k, v), TileMask(causal, mask, SCALE))
    everything = Partial(q.shape, torch.float64, q.device)
    everything.merge(*expected)
    others = tensors(rows, 19, heads, kv_heads, dim, torch.float64)[1:3]
    everything.merge(*REFERENCE.forward_tile(q.double(), *others, TileMask(False, None, SCALE)))
    out, lse = everything.out, everything.lse
    expected += REFERENCE.backward_tile(*wide(dout, q, k, v), out, lse, TileMask(causal, mask, SCALE))

    results = kernel.forward_tile(q, k, v, TileMask(causal, mask, SCALE))
    out, lse = slice_of_longer(out.float()), slice_of_longer(lse.float())
    results += kernel.backward_tile(dout, q, k, v, out, lse, TileMask(causal, mask, SCALE))
    tolerance = 5e-6 if kernel.dtype == torch.float32 else 4e-2
    for result, value in zip(results, expected, strict=True):
        torch.testing.assert_close(result.double(), value, atol=tolerance, rtol=tolerance)


def check_blocks(kernel, sides, tiles):
    """A block and its gradients against the reference, which sees bands as masks."""
    reference = ReferenceKernel(kernel.softcap)
    q, k, v, dout = (kernel.prepare(x) for x in sides)
    exact = [tile._replace(form="masked") if tile.form == "bands" else tile for tile in tiles]
    total = kernel.forward(q, k, v, tiles, SCALE)
    expected = reference.forward(*wide(q, k, v), exact, SCALE)
    torch.testing.assert_close(total.out.double(), expected.out, atol=5e-6, rtol=5e-6)
    torch.testing.assert_close(total.lse.double(), expected.lse, atol=5e-6, rtol=5e-6)
    grads = kernel.backward(dout, q, k, v, total.out, total.lse, tiles, SCALE)
    expected_grads = reference.backward(*wide(dout, q, k, v), expected.out, expected.lse, exact, SCALE)
    for grad, value in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad.value.double(), value.value, atol=1e-5, rtol=1e-5)
