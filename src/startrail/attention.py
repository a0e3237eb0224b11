"""``SequenceParallel``: what a user holds. It shards tokens, runs attention, and tells what that cost."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from startrail import op
from startrail.agree import Agreement, Board
from startrail.arguments import check_tensors, describe, wrong_kind
from startrail.cluster import Machine
from startrail.executor import Call, Executor
from startrail.kernels import Kernel, kernel_for, row_sums
from startrail.lanes import Counters, Lanes, tag_of
from startrail.layout import Layout, check_layout, layout_of_local
from startrail.mask import Mask, tiles_of
from startrail.plan import Plan
from startrail.planner import auto_plan
from startrail.schedule import Place, build_program, closed_form, lane_names
from startrail.wire import DTYPES, KINDS, Shapes

_boards: dict[tuple[int, ...], Iterator[int]] = {}  # how many instances each group of ranks has made so far


class SequenceParallel:
    """Exact attention over a sequence that is split over the ranks of a group.

    >>> sp = SequenceParallel("1x1")                      # one process: no process group needed
    >>> tokens = torch.arange(5).unsqueeze(0)
    >>> sp.shard(tokens, dim=1).tolist(), sp.positions(5).tolist()
    ([[0, 1, 2, 3, 4]], [0, 1, 2, 3, 4])
    >>> q = torch.randn(1, 4, 5, 8)
    >>> sp.attention(q, q, q, causal=True).shape
    torch.Size([1, 4, 5, 8])

    ``plan`` is a ``Plan``, its text form, or ``"auto"``. The sequence axis is ``group`` (default: the whole world), or
    ``mesh``: a DeviceMesh whose dimensions together are the sequence axis. ``wire_dtype`` is what travels (default: the
    inputs' dtype); sums are always kept in float32 or wider. ``timeout`` (seconds) limits every wait for a peer; the
    default is the group's own. ``check_every_call`` compares the arguments of all ranks on every call, not only on
    the first of its kind (also: the environment variable STARTRAIL_CHECK_EVERY_CALL=1).
    """

    def __init__(
        self,
        plan: Plan | str = "auto",
        group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        *,
        layout: str = "zigzag",
        wire_dtype: torch.dtype | None = None,
        timeout: float | None = None,
        check_every_call: bool | None = None,
    ) -> None:
        check_layout(layout)
        if wire_dtype is not None and wire_dtype not in DTYPES:
            raise ValueError(f"wire_dtype {wire_dtype} is not one of {', '.join(map(str, DTYPES))}")
        if timeout is not None and timeout <= 0:
            raise ValueError(f"timeout={timeout} must be more than 0 seconds")
        if group is not None and mesh is not None:
            raise ValueError("pass group= or mesh=, not both")
        self.layout, self.wire_dtype = layout, wire_dtype
        self._group = _group_of(group, mesh)
        self._timeout = timedelta(seconds=timeout) if timeout is not None else _timeout_of(self._group)
        self._ranks = tuple(dist.get_process_group_ranks(self._group)) if self._group else (0,)
        self.world = len(self._ranks)
        self.rank = dist.get_rank(self._group) if self._group else 0
        self._plan: Plan | None = None
        if not (isinstance(plan, str) and plan.strip() == "auto"):
            if not isinstance(plan, str | Plan):
                raise ValueError(f"plan {plan!r} must be a Plan or its text form, such as '2x2/u8'")
            self._plan = Plan.parse(plan) if isinstance(plan, str) else plan
            self._plan.check_world(self.world)
        if check_every_call is None:
            check_every_call = os.environ.get("STARTRAIL_CHECK_EVERY_CALL", "") not in ("", "0")
        members = zlib.crc32(repr(self._ranks).encode())
        number = next(_boards.setdefault(self._ranks, itertools.count()))
        self._board_name = f"startrail/{self._ranks[0]}-{members:x}/{number}"
        self._made = 0  # lanes so far
        self._agreement = Agreement(self._board(), check_every_call)
        self._agreement.watch()
        self._said: set[str] = set()
        self._counters = Counters()
        self._busy = threading.Lock()
        self._executors: dict[Plan, Executor] = {}
        self._agreed: dict[str, tuple[Shapes, Kernel]] = {}
        self._name = op.register(self)

    def __repr__(self) -> str:
        return f"SequenceParallel({self._plan or 'auto'}, rank {self.rank} of {self.world}, {self.layout})"

    # --- tokens

    def shard(self, x: Tensor, dim: int, pad_value: float = 0) -> Tensor:
        """This rank's part of a tensor that every rank has whole, padded with ``pad_value`` where it must be.

        Differentiable: the gradient is this rank's share, zero elsewhere; sum it over the group for the whole.
        """
        dim = _dim(x, dim)
        layout = Layout(self.layout, self.world, x.shape[dim])
        parts = []
        for chunk in layout.chunks(self.rank):
            start = min(chunk * layout.chunk, layout.length)
            count = min(layout.chunk, layout.length - start)
            parts.append(x.narrow(dim, start, count))
            if count < layout.chunk:
                shape = (*x.shape[:dim], layout.chunk - count, *x.shape[dim + 1 :])
                parts.append(x.new_full(shape, pad_value))
        return torch.cat(parts, dim)

    def unshard(self, x: Tensor, dim: int, length: int | None = None) -> Tensor:
        """The whole tensor on every rank, in order and without padding: the inverse of ``shard``.

        Differentiable, as the exact adjoint: a shard's gradient is the sum over ranks of the gradients that they
        have for it. If every rank computes the *same* loss from the result, divide that loss by the number of ranks.
        """
        dim = _dim(x, dim)
        layout = layout_of_local(self.layout, self.world, x.shape[dim], length)
        if self._group is not None and self.world > 1:
            x = funcol.wait_tensor(funcol.all_gather_single_autograd(x.contiguous(), dim, self._group))
            places = {c: i for i, c in enumerate(c for rank in range(self.world) for c in layout.chunks(rank))}
            x = torch.cat([x.narrow(dim, places[c] * layout.chunk, layout.chunk) for c in range(len(places))], dim)
        return x.narrow(dim, 0, layout.length)

    def positions(self, length: int, device: torch.device | str | None = None) -> Tensor:
        """Global positions of this rank's tokens, for rotary and other position embeddings. Padding repeats the last
        position."""
        layout = Layout(self.layout, self.world, length)
        chunks = [
            torch.arange(c * layout.chunk, (c + 1) * layout.chunk, device=device) for c in layout.chunks(self.rank)
        ]
        return torch.cat(chunks).clamp_(max=length - 1)

    # --- attention

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        window: int | None = None,
        documents: Tensor | Sequence[int] | None = None,
        length: int | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Attention of the whole sequence, for this rank's queries.

        q: (batch, heads, local tokens, head dim); k, v may have fewer heads. ``window`` w: a query i sees keys j with
        i-j < w when causal, |i-j| < w otherwise. ``documents``: global cu_seqlens (0, ..., length) of packed documents
        that do not see each other. ``length``: tokens of the sequence if it was padded (default: local tokens x ranks).
        Every rank of the group must call it, with the same arguments but for the tokens.
        """
        if problem := wrong_kind(q, k, v, window, documents, length, scale):
            self._refuse(problem)
        if documents is not None:
            documents = torch.as_tensor(documents)
        if not torch.compiler.is_compiling() and any(forward_ad.unpack_dual(x).tangent is not None for x in (q, k, v)):
            raise ValueError("attention has no forward-mode derivative: q, k or v is a dual tensor")
        if q.device.type != "meta" and torch.is_autocast_enabled(q.device.type):  # as scaled_dot_product_attention does
            dtype = torch.get_autocast_dtype(q.device.type)
            q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
        if scale is None:
            scale = max(q.shape[-1], 1) ** -0.5 if q.dim() else 1.0
        arguments = (causal, window, length, float(scale))
        out, _, _ = torch.ops.startrail.attention(q, k, v, documents, self._name, *arguments)
        return out

    def plan_for(self, q_heads: int, kv_heads: int) -> Plan:
        """The plan that a call with these heads runs: the given one, or what ``auto`` chooses."""
        if self._plan is not None:
            return self._plan
        if kv_heads < 1 or q_heads % kv_heads:
            raise ValueError(f"{q_heads} query heads are not a multiple of {kv_heads} key/value heads")
        plan, why = auto_plan(Machine.of_world(self.world, self._ranks_per_node), q_heads, kv_heads)
        if why not in self._said and self.rank == 0:
            print(f"startrail: {why}", file=sys.stderr)
        self._said.add(why)
        return plan

    # --- what happened

    def traffic(self) -> dict[str, dict[str, int]]:
        """Bytes and messages that this rank has sent, by level of the plan, since it was made or last reset."""
        return {name: {"bytes": lane.bytes, "hops": lane.hops} for name, lane in self._counters.traffic.items()}

    def timings(self) -> dict[str, float]:
        """Seconds in attention in all, and of those the seconds that this rank's program waited for transfers."""
        return {"total": self._counters.total, "waiting": self._counters.waiting}

    def reset_counters(self) -> None:
        self._counters.reset()

    def promised_traffic(self, q: Tensor, k: Tensor, length: int | None = None) -> dict[str, dict[str, int]]:
        """Bytes by level that each pass of a call with such shards must send, by closed form."""
        shapes = self.shapes_of(q, k, length)
        sizes = {kind: shapes.nbytes(kind) for kind in KINDS}
        names = lane_names(Place.of(shapes.plan, self.world, self.rank))
        return {
            direction: {
                name: round(amount)
                for name, amount in zip(
                    names, closed_form(shapes.plan, self.world, self.rank, direction, sizes), strict=True
                )
                if amount
            }
            for direction in ("forward", "backward")
        }

    # --- behind the op

    def shapes_of(self, q: Tensor, k: Tensor, length: int | None) -> Shapes:
        """The sizes of a call; ``ValueError`` if the plan cannot run it."""
        layout = layout_of_local(self.layout, self.world, q.shape[2], length)
        plan = self.plan_for(q.shape[1], k.shape[1])
        return Shapes(plan, layout, q.shape[0], q.shape[1], k.shape[1], q.shape[3], q.dtype, self.wire_dtype or q.dtype)

    def run_forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None,
        causal: bool,
        window: int | None,
        length: int | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        with self._alone():
            call, executor = self._call("forward", q, k, v, documents, causal, window, length, scale)
            shapes = call.shapes
            program = build_program(shapes.plan, self.world, self.rank, "forward")
            kept = torch.empty(shapes.kept_bytes(program.kept), dtype=torch.uint8, device=q.device)
            inputs = {"q": (q,), "kv": shapes.with_copies(k, v)}
            lse, out = self._run(executor, call, program, inputs, kept)["out"]
            return out, lse, kept

    def run_backward(
        self,
        dout: Tensor,
        qkv: list[Tensor],
        out: Tensor,
        lse: Tensor,
        kept: Tensor,
        documents: Tensor | None,
        kv_heads: int,
        causal: bool,
        window: int | None,
        length: int | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv or (out, out[:, :kv_heads], out[:, :kv_heads])  # without them, only their shapes matter here
        with self._alone():
            call, executor = self._call("backward", q, k, v, documents, causal, window, length, scale)
            shapes = call.shapes
            program = build_program(shapes.plan, self.world, self.rank, "backward")
            inputs: dict[str, tuple[Tensor, ...]] = {"do": (lse, row_sums(dout, out, shapes.acc), dout)}
            if qkv:
                inputs |= {"q": (q,), "kv": shapes.with_copies(k, v)}
            results = self._run(executor, call, program, inputs, kept)
            (dq,), (dk, dv) = results["dq"], results["dkv"]
            return dq, *shapes.without_copies(dk, dv)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Calls are numbered in the order in which they begin, which two threads would not keep on all ranks."""
        if not self._busy.acquire(blocking=False):
            raise ValueError("two threads call one SequenceParallel at once: give each thread an instance of its own")
        try:
            yield
        finally:
            self._busy.release()

    def _refuse(self, problem: str) -> None:
        """Raise on every rank: the others learn of it when they begin the same call."""
        self._agreement.start(problem)
        self._confirm(problem, problem)

    def _confirm(self, kind: str, problem: str | None) -> None:
        try:
            self._agreement.confirm(kind, problem)
        except ValueError:
            self._executors.clear()  # ranks that were already sending may have closed the lanes
            raise

    def _run(self, executor: Executor, *arguments: Any) -> dict[str, tuple[Tensor, ...]]:
        try:
            return executor.run(*arguments)
        except BaseException:
            self._executors.clear()  # its lanes may be closed: the next call makes new ones
            raise

    def _call(
        self,
        direction: str,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None,
        causal: bool,
        window: int | None,
        length: int | None,
        scale: float,
    ) -> tuple[Call, Executor]:
        """Check the arguments, agree on them with the other ranks if they are new, and find what runs them.

        A kind of call leaves out what packed documents it is about: they change with every batch, and comparing them
        each time would cost a round trip. But they are in the detail, and so in the messages' tags: ranks that
        disagree about anything never take each other's messages.
        """
        ends = None if documents is None else tuple(documents.tolist())
        packed = "" if ends is None else ", documents"
        kind = (
            f"{direction}: q {describe(q)}, k {describe(k)}, v {describe(v)}, causal={causal}, window={window}, "
            f"length={length}, scale={scale}{packed}"
        )
        problem = None
        try:
            shapes, kernel = self._agreed.get(kind) or self._check(q, k, v, length)
            mask = Mask(causal, window, ends)
            mask.check_length(shapes.layout.length)
            plan: object = shapes.plan
        except ValueError as error:
            problem, plan = str(error), self._plan or "auto"
        detail = f"{kind}{packed and f' {ends}'}, plan {plan}, {self.layout}, wire {self.wire_dtype}"
        number = self._agreement.start(detail)
        if problem or not self._agreement.knows(kind):
            self._confirm(kind, problem)
            self._agreed[kind] = shapes, kernel
        runs = cache(lambda shard: shapes.layout.runs(shard, shapes.plan.heads))
        call = Call(
            shapes,
            kernel,
            lambda row, column: tiles_of(mask, runs(row), runs(column)),
            scale,
            tag_of(f"{number} {detail}"),
            q.device,
        )
        return call, self._executor(shapes.plan)

    def _check(self, q: Tensor, k: Tensor, v: Tensor, length: int | None) -> tuple[Shapes, Kernel]:
        check_tensors(q, k, v)
        shapes = self.shapes_of(q, k, length)
        return shapes, kernel_for(q.device, q.dtype, q.shape[3])

    @cached_property
    def _ranks_per_node(self) -> int:
        """Ranks of this group on each node, from torchrun's local world size; all of them where that is not even."""
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        if local < 1:
            return self.world
        nodes = [rank // local for rank in self._ranks]
        counts = {nodes.count(node) for node in set(nodes)}
        return counts.pop() if len(counts) == 1 and nodes == sorted(nodes) else self.world

    def _executor(self, plan: Plan) -> Executor:
        if plan not in self._executors:
            lanes = None
            if self.world > 1:
                self._made += 1
                name = f"{self._board_name}/{self._made}"
                lanes = Lanes(Place.of(plan, self.world, self.rank), self._ranks, name, self._timeout)
            self._executors[plan] = Executor(lanes, self._agreement, self._counters)
        return self._executors[plan]

    def _board(self) -> Board | None:
        """Where the ranks of this group compare their calls; each group and each instance has a board of its own."""
        if self.world == 1:
            return None
        store = dist.distributed_c10d._get_default_store()
        return Board(PrefixStore(self._board_name, store), self.rank, self.world, self._timeout)

    def __deepcopy__(self, memo: object) -> SequenceParallel:
        """A copied model talks over the same lanes."""
        return self

    def __reduce__(self) -> str:
        raise ValueError("SequenceParallel belongs to its process and cannot be pickled; make a new one from its plan")


def _group_of(group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """The process group of the sequence axis; None where there is only one process."""
    if mesh is not None:
        if mesh.ndim == 1:
            return mesh.get_group()
        ranks = mesh.mesh.flatten().tolist()
        return dist.new_group(ranks, use_local_synchronization=True)
    if group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    launched = os.environ.get("WORLD_SIZE", "1")
    if group is None and launched not in ("", "1"):
        raise ValueError(f"WORLD_SIZE is {launched}: call torch.distributed.init_process_group first")
    return group


def _timeout_of(group: dist.ProcessGroup | None) -> timedelta:
    """How long the group's own operations may take."""
    if group is None:
        return dist.distributed_c10d.default_pg_timeout
    return group._get_backend(group._device_types[0]).options._timeout


def _dim(x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim {dim} is not a dimension of a tensor of shape {tuple(x.shape)}")
    return dim % x.dim()
