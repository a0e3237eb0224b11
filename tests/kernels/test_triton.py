"""The fused kernels, in Triton's interpreter or on a GPU if there is one, against torch's own operations."""

import os
import re
import subprocess
import sys

import pytest
import torch

from startrail.kernels import accumulate, base, rearrange
from startrail.kernels.accumulate import Partial, Sum
from startrail.kernels.fused import fused_on
from startrail.kernels.rearrange import Chunks

fused = pytest.importorskip("startrail.kernels.triton_kernels", reason="Triton is not installed: pip install triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = (torch.bfloat16, torch.float16)

# In a process of its own: where the interpreter was chosen nothing can be compiled.
COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from startrail.kernels import triton_kernels as kernels

POINTERS = {
    "_merge": dict(
        out="*fp32", lse="*fp64", **{f"new{i}": "*bf16" for i in range(4)}, **{f"lse{i}": "*fp32" for i in range(4)}
    ),
    "_add": dict(total="*fp32", **{f"new{i}": "*bf16" for i in range(4)}),
    "_rearrange": dict(
        places="*i64", **{f"to{i}": "*bf16" for i in range(3)}, **{f"source{i}": "*fp32" for i in range(3)}
    ),
    "_row_sums": dict(dout="*bf16", out="*bf16", sums="*fp32"),
    "_surrogate_out": dict(dout="*bf16", delta="*fp32", out="*bf16", limit="fp32"),
}
for name, pointers in POINTERS.items():
    kernel = getattr(kernels, name)
    elements = kernels.MERGED_ELEMENTS if name in ("_merge", "_add", "_rearrange") else kernels.ELEMENTS
    constants = dict(PICKS=3, COUNT=4, FIRST=False, ROWS=elements // 128, DIM=128, TO_WHOLE=False, FROM_WHOLE=True)
    constants |= {f"{key}{i}": constants[key] for key in ("ROWS", "DIM") for i in range(3)}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    types = {key: "constexpr" if key in constants else pointers.get(key, "i32") for key in kernel.arg_names}
    print(f"kernel {name}", flush=True)
    triton.compile(ASTSource(kernel, types, constants), target=GPUTarget("cuda", 90, 32))
"""


def rows(shape, dtype, seed=0):
    """(batch, heads, rows, dim) as flash attention returns it: a view of (batch, rows, heads, dim)."""
    batch, heads, length, dim = shape
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, heads, dim, generator=generator).to(DEVICE, dtype).transpose(1, 2)


def test_fused_kernels_are_used_on_gpus():
    assert fused_on(torch.device("cuda", 1)) is fused
    assert fused_on(torch.device("cpu")) is None


@pytest.mark.parametrize("dtype", [torch.float32, *HALF, torch.float64])
@pytest.mark.parametrize("dim", [20, 64])
def test_merging(dtype, dim):
    """Rows that saw no key on one side or both, a slice of the rows, and sums in float32 or wider."""
    acc = accumulate.accumulator(dtype)
    shape = (2, 3, 37, dim)
    ours, plain = Partial(shape, acc, DEVICE), Partial(shape, acc, DEVICE)
    for seed, part in enumerate((slice(None), slice(5, 30), slice(None))):
        out = rows(shape, dtype, seed)[:, :, part]
        lse = 3 * torch.randn(out.shape[:3], generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        lse[:, :, 3:7] = float("-inf")
        lse[:, 1, -2:] = float("-inf")
        out = out.masked_fill((lse == float("-inf")).unsqueeze(-1), 0)
        plain.merge(out, lse, part)
        fused.merge(ours.out[:, :, part], ours.lse[:, :, part], [(out, lse)])
    assert torch.equal(ours.lse == float("-inf"), plain.lse == float("-inf"))
    torch.testing.assert_close(ours.lse, plain.lse, atol=1e-14, rtol=1e-14)
    torch.testing.assert_close(ours.out, plain.out, atol=1e-6 if acc == torch.float32 else 1e-14, rtol=1e-6)


@pytest.mark.parametrize("count, dtype", [(3, torch.float16), (6, torch.bfloat16)])
def test_results_that_wait_are_merged_at_once(count, dtype, monkeypatch):
    """All rows and a part of them, in turn; every merge reads and writes the running result once."""
    launches, merge = [], fused.merge
    monkeypatch.setattr(fused, "merge", lambda *arguments: (launches.append(len(arguments[2])), merge(*arguments)))
    shape = (1, 2, 37, 20)
    ours, plain = (Partial(shape, torch.float32, DEVICE) for _ in range(2))
    for seed in range(count):
        for part in (slice(20, 37), slice(0, 37)):
            out = rows(shape, dtype, seed)[:, :, part]
            lse = 3 * torch.randn(out.shape[:3], generator=torch.Generator().manual_seed(seed)).to(DEVICE)
            lse[:, :, 3:7] = float("-inf")
            out = out.masked_fill((lse == float("-inf")).unsqueeze(-1), 0)
            plain.merge(out, lse, part)
            with monkeypatch.context() as patch:
                patch.setattr(accumulate, "fused_on", lambda device: fused)
                ours.merge(out, lse, part, donated=True)
    with monkeypatch.context() as patch:
        patch.setattr(accumulate, "fused_on", lambda device: fused)
        found = ours.out, ours.lse
    assert sum(launches) == 2 * count and max(launches) == min(count, 4)
    assert len(launches) <= 2 * -(-count // 4) + 1, "a first result of all rows may have to come first"
    torch.testing.assert_close(found[1], plain.lse, atol=1e-14, rtol=1e-14)
    torch.testing.assert_close(found[0], plain.out, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("count", [3, 6])
def test_gradients_that_wait_are_added_at_once(count, monkeypatch):
    """To the bit, if they are all of the same rows: they are added one after the other."""
    shape = (1, 2, 37, 20)
    ours, plain = (Sum(shape, torch.float32, DEVICE) for _ in range(2))
    parts = Sum(shape, torch.float32, DEVICE), Sum(shape, torch.float32, DEVICE)
    for seed in range(count):
        grad = rows(shape, torch.bfloat16, seed)
        plain.add(grad)
        parts[0].add(grad)
        parts[0].add(grad[:, :, 20:], slice(20, 37))
        with monkeypatch.context() as patch:
            patch.setattr(accumulate, "fused_on", lambda device: fused)
            ours.add(grad, donated=True)
            parts[1].add(grad, donated=True)
            parts[1].add(grad[:, :, 20:], slice(20, 37), donated=True)
    with monkeypatch.context() as patch:
        patch.setattr(accumulate, "fused_on", lambda device: fused)
        found = ours.value, parts[1].value
    assert torch.equal(found[0], plain.value)
    torch.testing.assert_close(found[1], parts[0].value, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("added", ["nothing", "all rows", "some rows", "both"])
def test_a_sum_is_added_to_that_of_a_peer_and_rounded_once(dtype, added, monkeypatch):
    """To the bit as if the peer's were added to ours in float32, and then sent. Not in bfloat16, to which Triton's
    interpreter cuts numbers off."""
    shape = (1, 2, 37, 20)
    grads = [rows(shape, dtype, seed) for seed in (1, 2)]
    totals = []
    for is_fused in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(accumulate, "fused_on", lambda device, is_fused=is_fused: fused if is_fused else None)
            ours, peer = Sum(shape, torch.float32, DEVICE), rows(shape, dtype)
            if added in ("all rows", "both"):
                ours.add(grads[0].clone(), donated=True)
            if added in ("some rows", "both"):
                ours.add(grads[1][:, :, 20:], slice(20, 37), donated=True)
            ours.add_to(peer)
        totals.append(peer)
    expected = rows(shape, dtype).float()
    if added in ("all rows", "both"):
        expected += grads[0]
    if added in ("some rows", "both"):
        sums = grads[0].float() * (added == "both")
        sums[:, :, 20:] += grads[1][:, :, 20:]
        expected = rows(shape, dtype).float() + sums
    assert all(torch.equal(total, expected.to(dtype)) for total in totals)


def test_results_with_other_strides_are_copied():
    """A launch takes the strides of all results once."""
    shape = 2, 3, 37, 20
    outs = [rows(shape, torch.float16, seed) for seed in range(3)]
    lses = [torch.randn(shape[:3], generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    others = [outs[0], outs[1].contiguous(), outs[2].transpose(2, 3).contiguous().transpose(2, 3)]
    other_lses = [lses[0], lses[1].transpose(0, 2).contiguous().transpose(0, 2), lses[2]]
    found = []
    for news, new_lses in ((outs, lses), (others, other_lses)):
        out, lse, total = torch.empty(shape), torch.empty(shape[:3], dtype=torch.float64), torch.empty(shape)
        fused.merge(out, lse, list(zip(news, new_lses, strict=True)), first=True)
        fused.add(total, news, first=True)
        found.append((out, lse, total))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert len({x.stride() for x in others}) == 3


def test_launches_have_few_arguments():
    """Each costs the host time: 47 and 27 before."""
    numbers = {kernel: len(getattr(fused, kernel).arg_names) for kernel in ("_merge", "_add")}
    assert numbers == {"_merge": 29, "_add": 21}


class Launched:
    """Stands in for a kernel, and notes its grid."""

    def __getitem__(self, grid):
        self.grid = grid
        return lambda *arguments, **constants: None


@pytest.mark.parametrize("kernel", ["_merge", "_add", "_row_sums", "_surrogate_out"])
def test_many_short_sequences_fit_into_a_grid(kernel, monkeypatch):
    """Beyond its first dimension, a grid has at most 65,535 programs: fewer than this batch's entries x heads."""
    launched = Launched()
    monkeypatch.setattr(fused, kernel, launched)
    x, lse = torch.empty(8, dtype=torch.bfloat16).expand(4096, 32, 2, 8), torch.empty(2).expand(4096, 32, 2)
    calls = {
        "_merge": lambda: fused.merge(x, lse, [(x, lse)]),
        "_add": lambda: fused.add(x, [x], False),
        "_row_sums": lambda: fused.row_sums(x, x, torch.float32),
        "_surrogate_out": lambda: fused.surrogate_out(x, lse, 1),
    }
    calls[kernel]()
    programs, *others = launched.grid
    assert programs >= 4096 * 32 and max(others, default=1) <= 65_535


EVERY, HALF_OF_THEM, MIDDLE = (0, 37), (20, 37), (5, 20)


@pytest.mark.parametrize("arrived", [0, 1])
@pytest.mark.parametrize("added", [
    [], [EVERY], [HALF_OF_THEM], [EVERY, HALF_OF_THEM], [EVERY, MIDDLE, MIDDLE], [MIDDLE, HALF_OF_THEM],
    [EVERY, *4 * [HALF_OF_THEM]], [EVERY, *7 * [HALF_OF_THEM]], 3 * [EVERY], 4 * [EVERY], 7 * [EVERY],
])  # fmt: skip
def test_a_sum_is_written_to_its_place_and_rounded_once(added, arrived, monkeypatch):
    """Whole numbers, whose sums float32 holds exactly and float16 rounds: to the bit as the exact sum."""
    shape, stored = (1, 2, 37, 20), []

    def numbers():
        return torch.randint(-2000, 2000, shape).to(torch.float16)

    grads, others = [numbers() for _ in added], [numbers().float() for _ in range(arrived)]
    exact = sum(others, torch.zeros(shape, dtype=torch.float64))
    for (start, stop), grad in zip(added, grads, strict=True):
        exact[:, :, start:stop] += grad[:, :, start:stop]
    for is_fused in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(accumulate, "fused_on", lambda device, is_fused=is_fused: fused if is_fused else None)
            ours, target = Sum(shape, torch.float32, DEVICE), torch.empty(shape, dtype=torch.float16)
            for (start, stop), grad in zip(added, grads, strict=True):
                ours.add(grad[:, :, start:stop].clone(), slice(start, stop), donated=True)
            ours.store(target, others)
        stored.append(target)
    assert torch.equal(stored[0], exact.half()) and torch.equal(stored[1], exact.half())


@pytest.mark.parametrize(
    "dtype, wire", [(torch.float32, torch.float16), (torch.float64, torch.float32), (HALF[0],) * 2]
)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_copies_of_an_exchange_are_one_launch_per_three_tensors(dtype, wire, count, monkeypatch):
    """To the bit as torch's copies: heads to ranks, tokens of ranks to whole pieces, and back, with a cast."""
    launches, launch = [], fused._rearrange.run
    monkeypatch.setattr(fused._rearrange, "run", lambda *given, **more: (launches.append(1), launch(*given, **more)))
    ranks, batch, length, chunk = 4, 2, 6, 3
    order = torch.randperm(ranks * length // chunk, generator=torch.Generator().manual_seed(count))
    chunks = Chunks(order.view(ranks, -1).to(DEVICE), chunk)
    sizes = [(3, 20), (1, 64), (2,), (5, 1)][:count]  # heads and dim; or one number per row
    results = []
    for is_fused in (False, True):
        generator = torch.Generator().manual_seed(0)
        monkeypatch.setattr(rearrange, "fused_on", lambda device, is_fused=is_fused: fused if is_fused else None)

        def made(*shape, dtype=dtype, generator=generator):
            return torch.randn(shape, generator=generator).to(DEVICE, dtype)

        given = [made(batch, length, ranks * heads, *dim).transpose(1, 2) for heads, *dim in sizes]
        shares = [x.unflatten(1, (ranks, -1)).movedim(1, 0) for x in given]
        parts = [made(ranks, batch, heads, length, *dim, dtype=wire) for heads, *dim in sizes]
        wholes = [made(batch, heads, ranks * length, *dim, dtype=wire) for heads, *dim in sizes]
        wide = [made(batch, ranks * length, heads, *dim).transpose(1, 2) for heads, *dim in sizes]
        other = [torch.zeros_like(x) for x in parts]
        back = [torch.zeros_like(x) for x in given]
        rearrange.copy_parts([*zip(parts, shares, strict=True)])
        rearrange.join_tokens([*zip(wholes, parts, strict=True)], chunks)
        rearrange.split_tokens([*zip(other, wide, strict=True)], chunks)
        pairs = [(x.unflatten(1, (ranks, -1)).movedim(1, 0), y) for x, y in zip(back, other, strict=True)]
        rearrange.copy_parts(pairs)
        results.append([*parts, *wholes, *other, *back])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    assert len(launches) == 4 * (1 if count <= 3 else 2)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF, torch.float64])
@pytest.mark.parametrize("dim", [20, 64])
def test_row_sums(dtype, dim):
    dout, out = rows((2, 3, 37, dim), dtype), rows((2, 3, 37, dim), dtype, seed=1)
    acc = accumulate.accumulator(dtype)
    torch.testing.assert_close(fused.row_sums(dout, out, acc), base.row_sums(dout, out, acc), atol=0, rtol=2e-7)
    gaps = rows((1, 2, 9, 2 * dim), dtype)[..., ::2]
    torch.testing.assert_close(fused.row_sums(gaps, gaps, acc), base.row_sums(gaps, gaps, acc), atol=0, rtol=2e-7)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF, torch.float64])
@pytest.mark.parametrize("dim", [1, 2, 20, 64])
def test_surrogate_out(dtype, dim):
    dout = rows((2, 3, 37, dim), dtype).clone()
    dout[:, :, 4] = 0
    dout[:, :, 5, 1:] = 0
    delta = rows((2, 3, 37, 1), accumulate.accumulator(dtype), seed=1).squeeze(-1) * 4
    delta[:, :, 4] = 0
    picks = min(dim, 1 if torch.finfo(dtype).eps < 1e-6 else 3)
    ours, plain = fused.surrogate_out(dout, delta, picks), base.surrogate_out(dout, delta)
    assert ours.dtype == dtype
    assert not ours[:, :, 4].any()
    sums = [(dout.double() * x.double()).sum(-1) for x in (ours, plain)]
    error = [(x - delta).abs()[:, :, 6:] for x in sums]
    # the interpreter cuts numbers off where it makes bfloat16 of them, where hardware rounds: a bit a number is lost
    assert error[0].max() <= (2 ** (picks + 1) if dtype == torch.bfloat16 else 1.01) * error[1].max() + 1e-12
    if dtype != torch.bfloat16:
        close = 1e-2 if dtype == torch.float16 else 1e-6
        torch.testing.assert_close(ours, plain, atol=close, rtol=close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nan_and_infinity_are_kept(dtype):
    """Rows with NaN or an infinite sum give NaN, and so do merges with them."""
    special = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0], device=DEVICE)
    dout, delta = rows((1, 1, 4, 16), dtype).clone(), special.view(1, 1, 4)
    for x in (fused.surrogate_out(dout, delta, 1), base.surrogate_out(dout, delta)):
        assert (dout.float() * x.float()).sum(-1).isnan().tolist() == [[[True, True, True, False]]]
    first, second = special.repeat_interleave(4).view(1, 1, 16), special.repeat(4).view(1, 1, 16)
    out = rows((1, 1, 16, 4), dtype)
    ours, plain = (Partial(out.shape, torch.float32, DEVICE) for _ in range(2))
    for lse in (first, second):
        plain.merge(out, lse)
        fused.merge(ours.out, ours.lse, [(out, lse)])
    torch.testing.assert_close(ours.lse, plain.lse, equal_nan=True)
    assert torch.equal(ours.out.isnan(), plain.out.isnan())


def test_compiled_for_an_h100_no_kernel_runs_out_of_registers(tmp_path):
    """As ptxas reports without a GPU: with too many elements per program, registers would spill to memory."""
    nvidia = pytest.importorskip("triton.backends.nvidia", reason="Triton here is not for NVIDIA's GPUs")
    ptxas = next(iter(nvidia.__path__)) + "/bin/ptxas"
    if not os.access(ptxas, os.X_OK):
        pytest.skip(f"there is no {ptxas}")
    own = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DUMP_PTXAS_LOG": "1", "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env={**os.environ, **own}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = {}
    for text in done.stdout.split("kernel ")[1:]:
        (stack,) = re.findall(r"(\d+) bytes stack frame", text)
        (registers,) = re.findall(r"Used (\d+) registers", text)
        found[text.splitlines()[0]] = int(stack), int(registers)
    assert len(found) == 5
    assert all(stack == 0 and registers <= 168 for stack, registers in found.values()), found
