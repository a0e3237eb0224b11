"""A stand-in for a CUDA stream on CPUs: operations are queued, and the host runs ahead of them.

    with LazyStream() as stream:
        y = x @ x        # queued; y's memory is allocated, and filled later
        y.tolist()       # reads a value: the host waits for everything before it

Views and allocations happen at once, as on a GPU. Everything else runs in order in the stream's thread, on the inputs'
values at that time.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from startrail.engine import halo, latents, scan
from startrail.engine import op as ops

_active: LazyStream | None = None
OPS = (
    ops.attention, ops.attention_backward, latents.latent_attention, latents.latent_attention_backward,
    halo.gather_halo, halo.return_halo, scan.carry_states, scan.carry_states_back,
)  # fmt: skip
BODIES = {op._name: op._init_fn for op in OPS}
AT_ONCE = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach_")  # no kernels

BELOW_VERSIONS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def run(task: Callable[[], Any], writes: Sequence[torch.Tensor] = ()) -> None:
    """Queue ``task``, which writes to some tensors, on the current stream. Run it at once if no stream is active."""
    if _active is None or threading.current_thread() is _active.thread:
        task()
    else:
        _active.queue(task, writes)


@contextmanager
def second_stream() -> Iterator[None]:
    """On another stream, which has nothing to do: what is queued here waits for nothing on the current one."""
    global _active
    with _disable_current_modes():
        active, _active = _active, None
        try:
            yield
        finally:
            _active = active


class LazyEvent:
    """Completed once everything before it on the current stream is. Without a stream there is nothing to wait for."""

    def __init__(self) -> None:
        self.done = threading.Event()
        run(self.done.set)

    def query(self) -> bool:
        return self.done.is_set()

    def synchronize(self) -> None:
        self.done.wait()


class LazyStream(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._tasks: deque[tuple[Callable[[], Any], Counter[int]]] = deque()
        self._changed = threading.Condition()
        self._running = self._depth = 0
        self._written: Counter[int] = Counter()  # tensors by their memory, how often queued tasks write to them
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def __enter__(self) -> LazyStream:
        global _active
        _active = self
        self._depth += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        global _active
        super().__exit__(*error)
        self._depth -= 1
        if self._depth == 0:
            self.synchronize()
            _active = None

    def queue(self, task: Callable[[], Any], writes: Sequence[torch.Tensor] = ()) -> None:
        memory = Counter(_memory(writes))
        with self._changed:
            self._tasks.append((task, memory))
            self._running += 1
            self._written += memory
            self._changed.notify_all()

    @property
    def unfinished(self) -> int:
        return self._running

    def synchronize(self) -> None:
        with self._changed:
            while self._running:
                self._changed.wait()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._tasks:
                    self._changed.wait()
                task, memory = self._tasks.popleft()
            try:
                with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(BELOW_VERSIONS):
                    task()  # as in the mode, which queued it
            except BaseException as error:
                self._error = self._error or error
            del task
            with self._changed:
                self._running -= 1
                self._written -= memory
                self._changed.notify_all()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "startrail":  # its body queues
            if self._written.keys() & _memory([x for x in args if getattr(x, "dtype", None) == torch.int64]):
                self.synchronize()  # the sequence's key is made by the host, which would not have queued it
            with self:
                return BODIES[func._schema.name.partition("::")[2]](*args, **kwargs)
        if func._can_decompose():  # such as to(), which is a view or a copy
            with self:
                return func.decompose(*args, **kwargs)
        schema = func._schema
        writes = [x.alias_info is not None and x.alias_info.is_write for x in schema.arguments]
        tensors = [x for x in schema.returns if "Tensor" in str(x.type)]
        is_view = not any(writes) and any(x.alias_info is not None for x in schema.returns)
        if is_view or schema.name.partition("::")[2] in AT_ONCE:
            return func(*args, **kwargs)
        if len(tensors) != len(schema.returns):
            if self._written.keys() & _memory(tree_leaves((args, kwargs))):
                self.synchronize()
            return func(*args, **kwargs)
        if any(writes):
            written = self._outputs(func, args, kwargs)
            self.queue(lambda: func(*args, **kwargs), written)
            return written[0] if len(schema.returns) == 1 else tuple(written) if schema.returns else None
        meta = tree_map(lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, (args, kwargs))
        shapes = func(*meta[0], **{**meta[1], **({"device": "meta"} if "device" in kwargs else {})})
        out = tree_map(lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype), shapes)

        def compute() -> None:
            for target, source in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                target.copy_(source)

        self.queue(compute, tree_leaves(out))
        return out

    @staticmethod
    def _outputs(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """The tensors that an in-place op writes to, which it returns."""
        given = [kwargs.get(x.name, args[i] if i < len(args) else None) for i, x in enumerate(func._schema.arguments)]
        pairs = zip(func._schema.arguments, given, strict=True)
        return [value for x, value in pairs if x.alias_info is not None and x.alias_info.is_write]


def _memory(values: Sequence[Any]) -> list[int]:
    return [x.untyped_storage().data_ptr() for x in values if isinstance(x, torch.Tensor)]
