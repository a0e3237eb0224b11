"""What a pass costs the host and the GPU, counted on fake tensors and a fake process group, with the CUDA backends and
fused kernels that count themselves: kernels launched, host reads (none), and memory against the formula."""

from collections import Counter
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import startrail
from startrail.cli import main
from startrail.compile.problem import Boundaries
from startrail.engine import attention
from startrail.engine.arguments import AttentionCall, Shapes
from startrail.engine.attention import AttentionKernel, AttentionRequest
from startrail.geometry.mask import Mask
from startrail.kernels import accumulate, base, cuda, rearrange
from startrail.schedule.program import build_program
from startrail.schedule.values import BACKWARD, FORWARD
from startrail.schedule.walk import walk_of
from startrail.transport import counters
from tests.helpers import LiveBytes
from tests.kernels.stand_ins import WithoutDeviceGuard

aten = torch.ops.aten
VIEWS = (
    *("view", "slice", "select", "transpose", "permute", "unsqueeze", "squeeze", "expand", "detach", "alias", "split"),
    *("as_strided", "unbind", "narrow", "empty", "new_empty", "unflatten", "flatten", "movedim"),
    *("device", "promote_types", "sym_", "prim"),
)
TRANSFERS = ("send", "recv_", "alltoall_base_")
COPIES = ("_to_copy", "copy_")
READS = (aten._local_scalar_dense.default, aten.item.default, aten.nonzero.default, aten.equal.default)


BLOCK = 512  # what CUDA's caching allocator rounds up to


def copies_between_devices(out, x, source=None, non_blocking=False, **options):
    """True if a copy between host and GPU blocks the host."""
    devices = {each.device.type for each in (out, x, source) if isinstance(each, torch.Tensor)}
    return len(devices) > 1 and not non_blocking


class Launches(LiveBytes):
    """Counts ops that would be kernels on a GPU, and the peak bytes of the caching allocator. Raises if the host reads
    a value from the device."""

    def __init__(self, given=()):
        super().__init__(given, BLOCK)
        self.counts = Counter()
        self.copied_bytes = 0  # read and written

    @property
    def kernels(self):
        return sum(count for name, count in self.counts.items() if name not in TRANSFERS)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        name = func._schema.name.partition("::")[2]
        if func in READS or (name in COPIES and copies_between_devices(out, *args, **(kwargs or {}))):
            raise AssertionError(f"the host waits for {name}")
        if not name.startswith(VIEWS):
            self.counts[name] += 1
        if name == "copy_":
            self.copied_bytes += args[0].nbytes + args[1].nbytes
        return out


class Fused:
    """A stand-in for the Triton kernels, one launch each."""

    def __init__(self):
        self.merged_bytes = self.summed_bytes = 0

    def merge(self, out, lse, results, first):
        out.neg_()
        read = sum(new.nbytes for new, _ in results) + (0 if first else out.nbytes)
        self.merged_bytes += read + out.nbytes

    def add(self, total, grads, first):
        total.neg_()
        self.summed_bytes += sum(grad.nbytes for grad in grads) + total.nbytes * (1 if first else 2)

    def rearrange(self, pairs, chunks, join):
        for first in range(0, len(pairs), 3):
            pairs[first][0].neg_()

    def row_sums(self, dout, out, dtype):
        return dout.new_empty(dout.shape[:3], dtype=dtype).neg_()

    def surrogate_out(self, dout, delta, picks):
        return torch.empty_like(dout).neg_()


@contextmanager
def fake_world(world):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_a_fake_process_group_runs_calls():
    with fake_world(8):
        for plan in ("1x8", "u8", "u4/1x2", "2x2/u2,keep=all"):
            sp = startrail.SequenceParallel(plan)
            q, k, v = (torch.randn(1, 8, 16, 8).requires_grad_() for _ in range(3))
            sequence = sp.sequence(8 * 16)
            out = sequence.attention(q, k, v, causal=True)
            torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
            sent = {name: lane["bytes"] for name, lane in sp.traffic().items()}
            promised = Counter()
            for part in sequence.promised_traffic(q, k, causal=True).values():
                promised.update(part)
            assert sent == promised


@pytest.fixture
def fused_kernels(monkeypatch):
    """The CUDA backends, with fused kernels."""
    fused = Fused()
    for module in (accumulate, base, rearrange):
        monkeypatch.setattr(module, "fused_on", lambda device: fused)
    monkeypatch.setattr("startrail.engine.attention.kernel_for", lambda device, dtype, *_: cuda.FlashKernel(dtype))
    cuda._cu_seqlens_on.cache_clear()
    yield fused
    cuda._cu_seqlens_on.cache_clear()  # fake ones


def run(plan, documents=None, passes=2, device="cpu", **mask):
    """Launches of one forward and one backward pass on 8 ranks: 8k tokens per rank, 16 heads x 128, bfloat16."""
    with fake_world(8):
        sp = startrail.SequenceParallel(plan)
        session, mode = sp._session, FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            q, k, v, dout = (torch.empty(1, 16, 8192, 128, dtype=torch.bfloat16, device=device) for _ in range(4))
        op_key = session.make_sequence(Boundaries(tuple(documents or (0, 8 * 8192)))).op_key
        shapes, call = Shapes.of(q, k, v), AttentionCall(Mask(**mask))
        requests = [
            AttentionRequest(*given)
            for given in ((FORWARD, shapes, call), (BACKWARD, shapes, call, torch.tensor((0, 1))))
        ]
        for _ in range(passes):  # the first one makes what later ones use again
            started = [session.start_pass(request, op_key) for request in requests]
            with mode, Launches((q, k, v)) as forward:
                kept = q.new_empty(started[0].prepared.kept_bytes, dtype=torch.uint8)
                (result,) = run_pass(started[0], {"q": (q,), "kv": (k, v)}, shapes, kept)
                lse, out = result["out"]
            with mode, Launches((q, k, v, dout, lse, out, kept)) as backward:
                inputs = {"do": (lse, base.row_sums(dout, out, torch.float32), dout)}
                if not sp.plan.keeps_exchanged:
                    inputs |= {"q": (q,), "kv": (k, v)}
                run_pass(started[1], inputs, shapes, kept)
        return forward, backward, session._runner.pool.allocated, sp.sizes(q, k)


def run_pass(started, given, shapes, kept):
    prepared = started.prepared
    inputs = [attention._own_inputs(part, given) for part in prepared.passes[started.request.pass_].parts]
    return started.run(AttentionKernel(prepared, started.request.pass_, shapes), inputs, kept)


@pytest.mark.parametrize(
    "plan, forward, backward",
    [("1x8", 17, 43), ("u8", 7, 10), ("u4/1x2", 10, 18), ("2x4", 21, 53), ("u2/2x2,keep=all", 16, 29)],
)
def test_launches_of_a_pass_are_pinned_and_the_host_reads_nothing(plan, forward, backward, fused_kernels):
    """Kernels without the transfers. 1x8 forward: 8 of flash attention, 3 merges of up to 4 results, 4 copies, and 2
    that mark results of aborted transfers."""
    found = run(plan, causal=True)
    assert (found[0].kernels, found[1].kernels) == (forward, backward), (found[0].counts, found[1].counts)


@pytest.mark.parametrize("plan, causal, expected", [("1x8", False, 28), ("1x8", True, 21), ("u8", True, 0)])
def test_merged_bytes_are_pinned(plan, causal, expected, fused_kernels):
    """Per element of a rank's output in one forward pass. One merge after the other, 1x8 would take 76, or 41 if it is
    causal: rank 0 then sees all later shards with half of its rows."""
    run(plan, passes=1, causal=causal)
    assert fused_kernels.merged_bytes / (16 * 8192 * 128) == expected


@pytest.mark.parametrize("plan, expected", [("1x8", 179), ("u8", 0), ("2x4", 194.125)])
def test_bytes_of_adding_up_gradients_are_pinned(plan, expected, fused_kernels):
    """Sums and copies of one backward pass, per element of a rank's queries. A ring adds its gradients to those of a
    peer where they arrived, and sends them on, without an accumulator in float32 and a copy; the last sum is written
    where the caller gets it: 311 before. The copies of an exchange are not counted: `rearrange` reads and writes each
    tensor once."""
    _, backward, *_ = run(plan, passes=1, causal=True)
    assert (fused_kernels.summed_bytes + backward.copied_bytes) / (16 * 8192 * 128) == expected


@pytest.mark.parametrize(
    "documents, window, forward, backward",
    [(tuple(range(0, 65537, 512)), None, 1, 1), (None, 1024, 2, 2), (tuple(range(0, 65537, 128)), 100, 1, 1)],
)
def test_documents_and_the_window_of_a_block_take_one_call(documents, window, forward, backward, fused_kernels):
    """With 8k tokens per rank: 128 documents, 512 documents in a window, or a window that reaches one neighbour."""
    found = run("1x8", documents, causal=True, window=window)
    assert found[0].counts["_flash_attention_forward"] == forward
    assert found[1].counts["_flash_attention_backward"] == backward
    assert not found[0].counts["_scaled_dot_product_flash_attention"]
    assert not any("efficient" in name for name in found[0].counts + found[1].counts)


@pytest.mark.parametrize("plan, exchanges, messages", [("u8", (2, 2), (0, 0)), ("u4/1x2", (2, 2), (1, 2))])
def test_a_head_exchange_is_one_all_to_all(plan, exchanges, messages, fused_kernels):
    """One for the inputs and one for the results; the other messages belong to the ring."""
    found = run(plan, causal=True)
    counts = {name: tuple(part.counts[name] for part in found[:2]) for name in TRANSFERS}
    assert counts == {"alltoall_base_": exchanges, "send": messages, "recv_": messages}


def test_a_kind_of_call_is_prepared_once(monkeypatch):
    prepared, plain = [], AttentionRequest.prepare

    def prepare(request, *arguments):
        prepared.append(request.pass_)
        return plain(request, *arguments)

    monkeypatch.setattr(AttentionRequest, "prepare", prepare)
    with fake_world(8):
        sequence = startrail.SequenceParallel("u4/1x2").sequence(8 * 16)
        compiled = []
        for _ in range(3):  # layers
            q, k, v = (torch.randn(1, 8, 16, 8).requires_grad_() for _ in range(3))
            sequence.attention(q, k, v, causal=True).sum().backward()
            compiled.append(walk_of.cache_info().misses)
    assert prepared == [FORWARD], "for both passes"
    assert compiled[0] == compiled[-1], "and messages are made once"


def test_groups_of_heads_share_buffers():
    """Eight groups take a seventh of what one takes: some pieces are there twice, while a group's heads are exchanged
    and those of another are computed."""
    taken = {}
    for groups in (1, 2, 4, 8):
        with fake_world(8):
            sp = startrail.SequenceParallel(f"u8,groups={groups},exchange=twice")
            q, k, v = (torch.randn(1, 64, 16, 8).requires_grad_() for _ in range(3))
            sp.sequence(8 * 16).attention(q, k, v, causal=True).sum().backward()
            taken[groups] = sp._session.runner_on(torch.device("cpu")).pool.allocated
    assert 0 < taken[8] == taken[4] / 2 == taken[2] / 4 < taken[1] / 6.5


@pytest.mark.parametrize("plan", ["1x8", "u8", "u4/1x2"])
def test_the_host_never_waits_for_a_copy_to_the_gpu(plan, fused_kernels, monkeypatch):
    """Not even the first pass: places of chunks and cu_seqlens are copied asynchronously, and nothing comes back."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(counters, "_event", lambda device: None)
    with WithoutDeviceGuard():
        found = run(plan, tuple(range(0, 65537, 512)), passes=1, device="cuda", causal=True)
    assert found[0].counts["_flash_attention_forward"], "documents are bands there"
    assert found[0].counts["_to_copy"]


@pytest.mark.parametrize(
    "plan", ["1x8", "u8", "u4/1x2", "2x4", "4x2", "8x1", "u2/2x2,keep=all", "u8,groups=2,exchange=twice"]
)
def test_memory_of_a_pass_is_within_the_formula(plan, fused_kernels):
    """As the caching allocator counts it, including buffers that are kept for later passes."""
    forward, backward, _, sizes = run(plan, passes=1, causal=True)
    kept = -(-sizes.kept_bytes(build_program(sizes.plan, 8, 0, FORWARD).kept) // BLOCK) * BLOCK
    assert sizes.peak_bytes(FORWARD, 8) / 4 < forward.peak - kept < sizes.peak_bytes(FORWARD, 8)
    _, backward, pool, _ = run(plan, causal=True)
    assert sizes.peak_bytes(BACKWARD, 8) / 4 < backward.peak + pool < sizes.peak_bytes(BACKWARD, 8)


def test_the_host_time_benchmark_runs(capsys):
    """The times themselves are not checked: this machine is shared."""
    assert main(["bench", "engine", "--host", "--plans", "1x8,u4/1x2", "--calls", "3"]) == 0
    first, second, _, *rows = capsys.readouterr().out.strip().splitlines()
    assert "host time per call in ms" in first and "minimum and median of 3 calls" in second
    *rows, of_batch, of_logits = rows
    assert [row.split()[0] for row in rows] == ["1x8", "u4/1x2"]
    for row in rows:
        forward, median, backward, last, batch = map(float, row.split()[1:])
        assert 0 < forward <= median and 0 < backward <= last and batch > 0
    assert "4000 documents" in of_batch and "largest logits" in of_logits
    assert not dist.is_initialized()
