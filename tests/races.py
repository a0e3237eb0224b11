"""Finds races between streams: what a GPU may do in another order than the host posts it.

One rank's passes run on a fake process group, with the CUDA kernels' shapes, the class for NCCL, and stand-ins for what
needs a GPU. Tensors have no data: they are on "meta", or fake ones on ``cuda:0``, which is slower. A ``Trace`` notes
every read and write by its byte range, with a vector clock for each stream: the one that computes, those of the program
(``torch.cuda.Stream``), one per communicator, and the host. Two accesses race if they overlap, one of them writes, and
neither is ordered before the other.

- A kernel starts after everything on its stream, and after what the host has done before it launched it.
- An operation of a communicator runs on its stream: after those before it, and after what the current stream had when
  it was posted. ``wait()`` orders the current stream after it, and tells the host nothing.
- The host learns from an event's ``query()`` that all before it is done, but only when it asks a second time.
- Memory that is freed is used again at once by the stream that allocated it, or after all that the streams have which
  ``record_stream`` names: a race if another one still uses it. NCCL keeps tensors until they have been waited for.

``check_posts`` takes what all ranks posted: the nth message to a peer must have the size of the peer's nth receive, and
all must end even if every post blocks the host (as with ``CUDA_LAUNCH_BLOCKING=1``, or when a kernel is loaded).
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from startrail import SequenceParallel, offload
from startrail.bench.host import fake_group
from startrail.engine import attention, buffers, runner, wire
from startrail.engine.arguments import read_call
from startrail.engine.op_key import OpKey
from startrail.kernels import accumulate, base, cuda, rearrange
from startrail.transport import counters, nccl, opening, process_groups
from tests.kernels.stand_ins import WithoutDeviceGuard
from tests.lazy_stream import BODIES

HOST_DEVICE = torch.device("cpu")
MAIN, HOST = "the main stream", "the host"
READING, CONNECTING = "the stream that reads digests", "the stream that connects"
NO_KERNEL = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")

Clock = dict[str, int]


class Access(NamedTuple):
    tick: int
    what: str


class Memory:
    """One allocation: who read and wrote which bytes."""

    def __init__(self, device: str, stream: str) -> None:
        self.device, self.stream = device, stream
        self.accesses: dict[tuple[int, int, bool, str], Access] = {}  # by first and last byte, is a write, stream
        self.recorded: set[str] = set()  # streams that the allocator waits for
        self.num_posted = 0  # operations of NCCL that hold it


class Event:
    """``query()`` is true the second time, or after ``synchronize()``."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.clock, self.asked = trace, dict(trace.clocks[trace.current]), False

    def query(self) -> bool:
        if not self.asked:
            self.asked = True
            return False
        self.synchronize()
        return True

    def synchronize(self) -> None:
        self.trace.join(HOST, self.clock)


class Stream:
    """Stands in for ``torch.cuda.Stream``."""

    def __init__(self, trace: Trace, name: str) -> None:
        self.trace, self.name = trace, name
        trace.clocks.setdefault(name, {name: 0})

    @property
    def cuda_stream(self) -> int:
        return hash(self.name)

    def wait_stream(self, other: Stream) -> None:
        self.trace.join(self.name, self.trace.clocks[other.name])


class Work:
    """An operation of a communicator. It keeps its tensors until it has been waited for."""

    def __init__(self, trace: Trace, clock: Clock, held: Sequence[Memory]) -> None:
        self.trace, self.clock, self.held, self.asked = trace, clock, held, False

    def wait(self, timeout: object = None) -> bool:
        self.trace.join(self.trace.current, self.clock)
        for memory in self.held:
            memory.num_posted -= 1
        self.held = ()
        return True

    def is_completed(self) -> bool:
        self.asked, before = True, self.asked
        return before

    def exception(self) -> None:
        return None

    def get_future_result(self) -> torch.futures.Future[int]:
        return torch.futures.Future()


class Post(NamedTuple):
    """An operation as its group posted it: of messages (whether sent, peer, bytes), or of all its members."""

    group: tuple[tuple[int, ...], str]  # members and name
    messages: tuple[tuple[bool, int, int], ...]
    what: str = "messages"


class Group:
    """Stands in for a process group of NCCL."""

    def __init__(self, trace: Trace, members: Sequence[int], name: str) -> None:
        self.trace, self.key, self.stream = trace, (tuple(members), name), f"NCCL's stream of {name}"
        self.batch: list[tuple[bool, int, Tensor]] = []

    def _start_coalescing(self, device: torch.device) -> None:
        self.batch = []

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> None:
        self.batch.append((True, peer, tensors[0]))

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> None:
        self.batch.append((False, peer, tensors[0]))

    def _end_coalescing(self, device: torch.device) -> Work:
        messages = tuple((send, self.key[0][peer], x.nbytes) for send, peer, x in self.batch)
        uses = [(x, not send, "a send" if send else "a receive") for send, _, x in self.batch]
        return self._post(Post(self.key, messages), uses)

    def all_to_all_single(self, output: Tensor, given: Tensor, *others: object) -> Work:
        post = Post(self.key, (), f"an all-to-all of {given.nbytes} bytes")
        return self._post(post, [(given, False, post.what), (output, True, post.what)])

    def allreduce(self, tensors: Sequence[Tensor], options: object) -> Work:
        post = Post(self.key, (), f"an all-reduce of {tensors[0].nbytes} bytes")
        return self._post(post, [(tensors[0], True, post.what)])

    def _post(self, post: Post, uses: Sequence[tuple[Tensor, bool, str]]) -> Work:
        trace = self.trace
        trace.posts.append(post)
        clock = trace.tick(self.stream, trace.clocks[trace.current], trace.clocks[HOST])
        for x, writes, what in uses:
            trace.access(x, writes, self.stream, what)
        held = [trace.memory_of(x) for x, _, _ in uses]
        for memory in held:
            memory.num_posted += 1
        return Work(trace, clock, held)


class Trace(TorchDispatchMode):
    """``races`` and ``posts`` are what it found, ``num_accesses`` how much it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.clocks: dict[str, Clock] = {MAIN: {MAIN: 0}, HOST: {HOST: 0}}
        self.streams = [MAIN]  # the current one is the last
        self.memories: dict[int, Memory] = {}
        self.races: list[str] = []
        self.posts: list[Post] = []
        self.num_accesses = self.num_streams = 0

    @property
    def current(self) -> str:
        return self.streams[-1]

    def join(self, stream: str, *others: Clock) -> None:
        """What comes next on ``stream`` is ordered after these."""
        clock = self.clocks.setdefault(stream, {stream: 0})
        for other in others:
            for name, tick in other.items():
                if clock.get(name, 0) < tick:
                    clock[name] = tick

    def tick(self, stream: str, *others: Clock) -> Clock:
        self.join(stream, *others)
        self.clocks[stream][stream] += 1
        return dict(self.clocks[stream])

    # --- memory

    def memory_of(self, x: Tensor, is_new: bool = False) -> Memory:
        storage = x.untyped_storage()
        memory = self.memories.get(storage._cdata)
        if memory is None:
            memory = self.memories[storage._cdata] = Memory(x.device.type, self.current if is_new else MAIN)
            weakref.finalize(storage, self._free, storage._cdata).atexit = False
        return memory

    def _free(self, number: int) -> None:
        memory = self.memories.pop(number)
        if memory.device == "cpu" or memory.num_posted:  # pinned memory waits for the streams of its copies
            return
        clocks = [self.clocks[name] for name in (memory.stream, *memory.recorded)]  # what the allocator waits for
        for (_, _, _, stream), (tick, what) in memory.accesses.items():
            if stream != HOST and all(clock.get(stream, 0) < tick for clock in clocks):
                self.races.append(f"memory of {memory.stream} is freed during {what} on {stream}")

    def record_stream(self, x: Tensor, stream: Stream) -> None:
        self.memory_of(x).recorded.add(stream.name)

    def access(self, x: Tensor, writes: bool, stream: str, what: str) -> None:
        """``stream`` reads or writes all bytes of ``x`` at its present time."""
        if x.numel() == 0:
            return
        size = x.element_size()
        low = x.storage_offset() * size
        high = low + (sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1) * size
        clock, accesses = self.clocks[stream], self.memory_of(x).accesses
        self.num_accesses += 1
        for key, (tick, before) in list(accesses.items()):
            first, last, wrote, other = key
            if first < high and low < last:
                if clock.get(other, 0) >= tick:
                    if writes and low <= first and last <= high:
                        del accesses[key]  # what comes later is ordered after this write, or races with it
                elif writes or wrote:
                    self.races.append(f"{what} on {stream} and {before} on {other}: bytes {low}:{high}, {first}:{last}")
        accesses[low, high, writes, stream] = Access(clock[stream], what)

    def launch(self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor], on_host: bool = False) -> None:
        """A kernel on the current stream, or something that the host does."""
        stream = HOST if on_host else self.current
        self.tick(stream, self.clocks[HOST])
        for tensors, is_write in ((reads, False), (writes, True)):
            for x in tensors:
                self.access(x, is_write, stream, what)

    # --- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "startrail":
            with self:
                return BODIES[func._schema.name.partition("::")[2]](*args, **kwargs)
        if func.namespace == "aten" and func._can_decompose():  # such as to(), which is a view or a copy
            with self:
                return func.decompose(*args, **kwargs)
        out = _to_host(func, args, kwargs)
        if out is None:
            out = func(*args, **kwargs)
        schema, name = func._schema, func._schema.name.partition("::")[2]
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if name in NO_KERNEL:
            for x in made:
                self.memory_of(x, is_new=True)
        elif made and not any(x.alias_info is not None and not x.alias_info.is_write for x in schema.returns):
            given = [kwargs.get(x.name, args[i] if i < len(args) else None) for i, x in enumerate(schema.arguments)]
            reads, writes = [], []
            for argument, value in zip(schema.arguments, given, strict=True):
                is_written = argument.alias_info is not None and argument.alias_info.is_write
                (writes if is_written else reads).extend(x for x in tree_leaves(value) if isinstance(x, Tensor))
            for x in made:
                self.memory_of(x, is_new=True)
            on_host = all(x.device.type == "cpu" for x in (*reads, *writes, *made))
            self.launch(name, reads, [*writes, *made], on_host)
        return out


def _to_host(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The result of a copy to the host, which "meta" does not support."""
    aten = torch.ops.aten
    if func is aten._to_copy.default and args[0].is_meta and kwargs.get("device") == HOST_DEVICE:
        return torch.empty_like(args[0], device=HOST_DEVICE)
    return args[0] if func is aten.copy_.default and args[1].is_meta and not args[0].is_meta else None


class Fused:
    """The fused kernels, as what they read and write."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def merge(self, out: Tensor, lse: Tensor, results: Sequence[tuple[Tensor, Tensor]], first: bool) -> None:
        reads = [x for pair in results for x in pair]
        self.trace.launch("merge", reads if first else [*reads, out, lse], [out, lse])

    def add(self, total: Tensor, grads: Sequence[Tensor], first: bool) -> None:
        self.trace.launch("add", grads if first else [*grads, total], [total])

    def rearrange(self, pairs: Sequence[tuple[Tensor, Tensor]], chunks: Any, join: bool) -> None:
        places = [] if chunks is None else [chunks.places]
        self.trace.launch("rearrange", [*(x for _, x in pairs), *places], [x for x, _ in pairs])

    def row_sums(self, dout: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
        made = dout.new_empty(dout.shape[:3], dtype=dtype)
        self.trace.launch("row_sums", [dout, out], [made])
        return made

    def surrogate_out(self, dout: Tensor, delta: Tensor, picks: int) -> Tensor:
        made = torch.empty_like(dout)
        self.trace.launch("surrogate_out", [dout, delta], [made])
        return made


def _read_digest(trace: Trace, result: Any) -> Callable[[Any], Any]:
    """The host reads a comparison's result."""

    def read(comparison: Any) -> Any:
        if comparison.extremes.device.type != "cpu":
            comparison.start_read()
            comparison._event.synchronize()
        trace.launch("reading a digest", [comparison.extremes], [], on_host=True)
        return result

    return read


@contextmanager
def traced(fused: bool = True, fake: bool = False) -> Iterator[Trace]:
    """Everything of this process is traced. ``fused``: with the fused kernels. ``fake``: tensors are fake ones."""
    trace, read_plainly = Trace(), OpKey.from_tensor
    names = iter(range(1, 1000))
    sides = {"reading": Stream(trace, READING), "connecting": Stream(trace, CONNECTING)}

    @contextmanager
    def use(stream: Stream) -> Iterator[None]:
        trace.streams.append(stream.name)
        yield
        trace.streams.pop()

    def make_group(members: Sequence[int], name: str, *others: object) -> Group:
        return Group(trace, members, name.rpartition("/")[2])

    def new_stream(device: object = None) -> Stream:
        return Stream(trace, f"stream {next(names)}")

    def read_key(tensor: Tensor) -> OpKey:
        with _disable_current_modes():
            return read_plainly(tensor)

    def make_kernel(device: object, dtype: torch.dtype, *others: object) -> cuda.EfficientKernel:
        return cuda.EfficientKernel(dtype) if dtype == torch.float32 else cuda.FlashKernel(dtype)

    patches: list[tuple[Any, str, Any]] = [
        (process_groups, "make_group", make_group),
        (process_groups, "backend_for", lambda device: "fake"),
        (nccl, "record_event", lambda device: Event(trace)),
        (nccl, "watch", lambda transport: None),
        (nccl, "run_within", lambda seconds, function: function() or True),  # in this thread, which is traced
        (nccl.DeviceComparison, "is_same", _read_digest(trace, True)),
        (nccl.DeviceComparison, "least", _read_digest(trace, 1)),
        (counters, "_event", lambda device: None),
        (torch.cuda, "device", lambda device: nullcontext()),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "Stream", new_stream),
        (torch.cuda, "stream", use),
        (torch.cuda, "current_stream", lambda device=None: Stream(trace, trace.current)),
        *((module, "used_on", trace.record_stream) for module in (offload, nccl)),
        (nccl, "side_stream", lambda device, purpose: sides[purpose]),
        (attention, "kernel_for", make_kernel),
        (OpKey, "from_tensor", read_key),
    ]
    for module in (buffers, cuda, runner, wire):
        patches.append((module, "current_stream_id", lambda device: hash(trace.current)))
    kernels = Fused(trace) if fused else None
    patches += [(module, "fused_on", lambda device: kernels) for module in (accumulate, base, rearrange)]
    with ExitStack() as stack:
        for target, name, value in patches:
            stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(mock.patch.dict(opening.CLASSES, fake=nccl.Nccl))
        stack.enter_context(mock.patch.dict(process_groups._parked, clear=True))
        cuda._cu_seqlens_on.cache_clear()
        stack.callback(cuda._cu_seqlens_on.cache_clear)
        if fake:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(trace)
        if fake:
            stack.enter_context(WithoutDeviceGuard())
        yield trace


def of_all_ranks(trace: Trace) -> str:
    """The stream of the communicator that compares calls."""
    return next(name for name in trace.clocks if name.endswith(" of all"))


HEAD_DIM, LENGTH = 8, 96


class Case(NamedTuple):
    """What to run. ``streams``: passes take turns on that many streams of the program, which nothing orders."""

    options: dict[str, Any]  # of attention
    documents: Sequence[int] | None = None
    dtype: torch.dtype = torch.bfloat16
    fused: bool = True
    fake: bool = False
    streams: int = 0


def attend(trace: Trace, sp: SequenceParallel, case: Case) -> None:
    """A forward and a backward pass, between which and after which the program may overwrite what it gave."""
    with _disable_current_modes():
        sequence, heads = sp.sequence(LENGTH, case.documents), 4 * sp.plan.heads * sp.plan.groups
    shape, device = (2, heads, sequence.local, HEAD_DIM), "cuda" if case.fake else "meta"
    q, k, v, dout = (torch.empty(shape, dtype=case.dtype, device=device) for _ in range(4))
    trace.launch("the model", [], [q, k, v, dout])
    own = sequence._state.op_key, sp._name, str(read_call(q, k, v, **case.options))
    out, lse, kept, number, _ = BODIES["attention"](q, k, v, *own)
    if case.fake:
        number = SimpleNamespace(tolist=lambda: [*sp._session.consensus.call_id])
    qkv = [] if sp.plan.keeps_exchanged else [q, k, v]
    grads = BODIES["attention_backward"](dout, qkv, out, lse, kept, number, heads, HEAD_DIM, *own, None)
    trace.launch("the model", [out, *grads], [q, k, v, dout])


def trace_rank(
    plan: str, world: int, rank: int, case: Case, program: Callable[[Trace, SequenceParallel, Case], None] = attend
) -> Trace:
    """One rank runs ``program`` twice, so that the second time reuses the buffers of the first, on each stream."""
    with fake_group(rank, world), traced(case.fused, case.fake) as trace:
        sp = SequenceParallel(plan)
        streams = [torch.cuda.Stream() for _ in range(case.streams)]
        for number in range(2 * max(1, len(streams))):
            with torch.cuda.stream(streams[number % len(streams)]) if streams else nullcontext():
                program(trace, sp, case)
        sp.close()
    return trace


# --- what all ranks posted


def check_posts(of_ranks: Sequence[Sequence[Post]]) -> str | None:
    """What is wrong with the posts of all ranks, each of which blocks its rank until it has ended; or None."""
    at = [0] * len(of_ranks)
    started: dict[object, list[object]] = defaultdict(list)  # sizes of messages and texts of collectives, in order
    needs: list[list[tuple[object, int, object]]] = [[] for _ in of_ranks]

    def start(rank: int) -> None:
        """Post this rank's next operation, and note what it waits for: the nth post of whom, and its size."""
        needs[rank] = []
        if at[rank] == len(of_ranks[rank]):
            return
        group, messages, what = of_ranks[rank][at[rank]]
        for send, peer, nbytes in messages:
            ends = (rank, peer) if send else (peer, rank)
            started[group, *ends, send].append(nbytes)
            needs[rank].append(((group, *ends, not send), len(started[group, *ends, send]), nbytes))
        if not messages:
            started[group, rank].append(what)
            needs[rank] += [((group, member), len(started[group, rank]), what) for member in group[0]]

    for rank in range(len(of_ranks)):
        start(rank)
    moved = True
    while moved:
        moved = False
        for rank in range(len(of_ranks)):
            while at[rank] < len(of_ranks[rank]) and all(len(started[key]) >= count for key, count, _ in needs[rank]):
                for key, count, expected in needs[rank]:
                    if started[key][count - 1] != expected:
                        return f"rank {rank}: {expected} meets {started[key][count - 1]} in {key}"
                at[rank], moved = at[rank] + 1, True
                start(rank)
    stuck = [rank for rank in range(len(of_ranks)) if at[rank] < len(of_ranks[rank])]
    return f"ranks {stuck} wait forever: {of_ranks[stuck[0]][at[stuck[0]]]}" if stuck else None
