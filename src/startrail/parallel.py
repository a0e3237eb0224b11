"""``SequenceParallel``: the object that a user creates once. It makes sequences, and reports traffic and timings."""

from __future__ import annotations

import os
import reprlib
import sys
from collections.abc import Sequence as SequenceOf
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from startrail._compat import default_timeout, dtype_name, without_bound_device
from startrail.compile.attention import Attention
from startrail.compile.call import compile_call
from startrail.compile.explain import explain
from startrail.compile.problem import Split
from startrail.engine import op
from startrail.engine.arguments import is_int, read_boundaries, read_mask, read_shares, shapes_of
from startrail.engine.attention import sizes_of
from startrail.engine.session import Session, Settings
from startrail.engine.wire import DTYPES
from startrail.geometry.zones import check_layout
from startrail.planner.auto import plan_for_heads, plan_for_job
from startrail.planner.expanding import Expanding
from startrail.planner.live.choose import choose
from startrail.planner.live.measure import measure_shares
from startrail.planner.live.placement import find_machine
from startrail.planner.sparse.rule import described_for, rule_for, scan_rule
from startrail.planner.workload import Job, check_heads
from startrail.schedule.plan import Plan
from startrail.schedule.sizes import Sizes
from startrail.schedule.walk import EventHook
from startrail.sequence import Sequence

if TYPE_CHECKING:
    from startrail.engine.op_key import SequenceState

MAX_TIMEOUT_SECONDS = 10**9  # timedelta overflows at a few times that


class SequenceParallel:
    """Exact attention over sequences that are split over the ranks of a group.

    >>> sp = SequenceParallel("1x1")                      # one process: no process group needed
    >>> sequence = sp.sequence(5)                         # once per batch
    >>> q = sequence.shard(torch.randn(1, 4, 5, 8), dim=2)
    >>> sequence.attention(q, q, q, causal=True).shape
    torch.Size([1, 4, 5, 8])

    ``plan`` is a ``Plan``, its text form, or ``"auto"``, which asks the planner. ``"auto"`` needs the model's ``heads``
    (and ``kv_heads`` if there are fewer); ``head_dim`` and the ``length`` of sequences improve its choice. Or pass a
    ``job`` (a ``planner.workload.Job``: model, run and data-parallel groups): the plan is then the one that ``startrail
    plan`` finds, which fits the memory. All ranks of all groups of the job must call this together. ``cluster`` is the
    name or file of a cluster description (also: the environment variable STARTRAIL_CLUSTER). Without one, the cluster
    is measured once.

    The sequence axis is ``group`` (default: the whole world), or ``mesh``: a DeviceMesh whose dimensions together form
    the sequence axis. ``wire_dtype`` is the dtype of messages (default: that of the inputs); sums are always kept in
    float32 or wider. ``layout`` says which tokens a rank owns: ``zones`` keeps each packed document on as few ranks as
    can share its work evenly, ``zigzag`` and ``contiguous`` cut the whole sequence. For a narrow mask, fetching only
    the visible keys (`direct`) replaces the plan if it sends fewer bytes or, if a cluster is described, is faster in
    simulation; ``sparse=False`` always uses the plan. Likewise, ``latent_attention`` sends expanded keys where those
    are faster on the described cluster. Set ``windows`` if most layers have windows or chunks: tokens are
    then laid out so that neighbours share a node. That makes such layers cheap, but cuts layers that see everything
    into more and smaller blocks.
    ``shares`` says which part of every sequence's tokens and work each rank gets: one positive number per rank, or
    ``"measured"``: all ranks measure together how fast they are, which takes about as long as ``auto`` takes.
    ``shortest_piece``: packed documents are not cut into pieces of fewer tokens, which kernels compute slowly, if that
    can be helped (default: 512, or a 16th of a rank's tokens if that is less).
    ``timeout`` (seconds) limits every wait for a peer (default: the group's own).
    ``check_every_call`` compares the arguments of all ranks on every call, not only on the first with a signature or a
    sequence (also: the environment variable STARTRAIL_CHECK_EVERY_CALL=1).
    """

    def __init__(
        self,
        plan: Plan | str = "auto", group: dist.ProcessGroup | None = None, mesh: DeviceMesh | None = None, *,
        heads: int | None = None, kv_heads: int | None = None, head_dim: int | None = None, length: int | None = None,
        job: Job | None = None, cluster: str | None = None, layout: str = "zones",
        sparse: bool = True, windows: bool = False, wire_dtype: torch.dtype | None = None, timeout: float | None = None,
        check_every_call: bool | None = None, shares: SequenceOf[float] | str | None = None,
        shortest_piece: int | None = None,
    ) -> None:  # fmt: skip
        check_layout(layout)
        if shortest_piece is not None and not (is_int(shortest_piece) and shortest_piece >= 1):
            raise ValueError(f"shortest_piece={shortest_piece!r} must be a whole number of tokens, at least 1")
        if wire_dtype is not None and wire_dtype not in DTYPES:
            raise ValueError(f"wire_dtype {wire_dtype} is not one of {', '.join(map(str, DTYPES))}")
        if timeout is not None and not (isinstance(timeout, int | float) and 0 < timeout < MAX_TIMEOUT_SECONDS):
            raise ValueError(f"timeout={timeout!r} must be a number of seconds greater than 0")
        for name, given, kind in (("group", group, dist.ProcessGroup), ("mesh", mesh, DeviceMesh)):
            if given is not None and not isinstance(given, kind):
                hint = ": write mesh=" if isinstance(given, DeviceMesh) else ""
                raise ValueError(f"{name} must be a {kind.__name__}, got {type(given).__name__}{hint}")
        if group is not None and mesh is not None:
            raise ValueError("pass group= or mesh=, not both")
        if check_every_call is None:
            check_every_call = os.environ.get("STARTRAIL_CHECK_EVERY_CALL", "") not in ("", "0")
        self.layout, self.wire_dtype = layout, wire_dtype
        self.group = _group_of(group, mesh)
        ranks = tuple(dist.get_process_group_ranks(self.group)) if self.group else (0,)
        self.world = len(ranks)
        self.rank = dist.get_rank(self.group) if self.group else 0
        if isinstance(plan, str) and plan.strip() == "auto":
            self.plan = self._auto_plan(ranks, heads, kv_heads, head_dim, length, job, cluster)
        elif isinstance(plan, str | Plan):
            self.plan = Plan.parse(plan) if isinstance(plan, str) else plan
        else:
            raise ValueError(f"plan {plan!r} must be a Plan or its text form, such as '2x2/u8'")
        self.plan.check_world(self.world)
        self.shares = self._read_shares(shares)
        limit = timedelta(seconds=timeout) if timeout is not None else default_timeout(self.group)
        described = cluster or os.environ.get("STARTRAIL_CLUSTER", "")
        rule = rule_for(described, self.world)
        sparse_rule, in_rank_order = bool(sparse) and rule, False
        split = Split(self.plan, self.world, layout, sparse_rule, in_rank_order, scan_rule(rule), shortest_piece)
        known = described_for(described, self.world)
        self._expanding = None if known is None else Expanding(known)
        self._session = Session(Settings(split, wire_dtype, limit, check_every_call), ranks, self.rank)
        if windows:
            self.expect_windows()
        self._name = op.register(self._session)

    def _auto_plan(
        self, ranks: tuple[int, ...], heads: int | None, kv_heads: int | None, head_dim: int | None,
        length: int | None, job: Job | None, cluster: str | None,
    ) -> Plan:  # fmt: skip
        group, asking = self.group, ranks
        if job is not None:
            if not isinstance(job, Job):
                raise ValueError(f"job must be a Job, got {type(job).__name__}")
            ask = partial(plan_for_job, job=job)
            if job.data_parallel > 1:
                group, asking = dist.group.WORLD, tuple(range(dist.get_world_size()))
        elif heads is not None:
            kv_heads = heads if kv_heads is None else kv_heads
            check_heads(heads, kv_heads)
            ask = partial(plan_for_heads, heads=heads, kv_heads=kv_heads, head_dim=head_dim, length=length)
        else:
            raise ValueError('plan "auto" needs the model\'s heads: SequenceParallel("auto", heads=32, kv_heads=8)')
        machine, found = find_machine(group, asking)
        plan, reason = choose(group, machine, ask, cluster)
        if ranks[self.rank] == 0:  # once, even if several groups share a job
            print(f"startrail: {found}: {reason}", file=sys.stderr)
        return plan

    def _read_shares(self, shares: SequenceOf[float] | str | None) -> tuple[float, ...] | None:
        if not isinstance(shares, str):
            read_shares(shares, self.world)
            return None if shares is None else tuple(map(float, shares))
        if shares != "measured":
            raise ValueError(f"shares={shares!r} must be 'measured', or one positive number per rank")
        measured = measure_shares(self.group)
        if self.rank == 0:
            print(f"startrail: shares measured: {', '.join(f'{share:g}' for share in measured)}", file=sys.stderr)
        return measured

    def __repr__(self) -> str:
        return f"SequenceParallel({self.plan}, rank {self.rank} of {self.world}, {self.layout})"

    def sequence(
        self,
        length: int | None = None,
        documents: Tensor | SequenceOf[int] | None = None,
        blocks: Tensor | SequenceOf[tuple[int, int]] | None = None,
        shares: SequenceOf[float] | None = None,
    ) -> Sequence:
        """Make one per batch, and call ``shard``, ``positions``, ``attention`` and ``unshard`` on it.

        ``documents``: global cu_seqlens (0, ..., length) of packed documents, which do not see each other. ``blocks``:
        runs (start, stop) of tokens that see each other even if a layer is causal or has a window, such as images in a
        text or the prefix of a prefix-LM. ``shares``: one positive number per rank (default: those of this instance).
        Ranks get tokens in proportion, for example half as many on a rank that is half as fast. Every rank must make
        the same sequences, and those of one length in the same order.
        """
        try:
            weights = read_shares(self.shares if shares is None else shares, self.world)
        except ValueError as error:
            self._session.refuse(str(error))
        return self._sequence(length, documents, blocks, weights)

    def _sequence(
        self, length: int | None, documents: Tensor | SequenceOf[int] | None,
        blocks: Tensor | SequenceOf[tuple[int, int]] | None, shares: tuple[int, ...],
        parent: SequenceState | None = None,
    ) -> Sequence:  # fmt: skip
        """A sequence with its own layout, or with the tokens of ``parent`` on the same ranks."""
        if self._session.closed:
            raise ValueError("this SequenceParallel is closed")
        if length is None or not is_int(length) or length < 1:
            self._session.refuse(_wrong_length(length))
        placed = None if parent is None else parent.batch.boundaries
        placement = () if placed is None else placed.placement or placed.documents
        try:
            boundaries = read_boundaries(length, documents, blocks, placement, shares)
        except ValueError as error:
            self._session.refuse(str(error))
        return Sequence(self, self._session.make_sequence(boundaries, parent))

    def expect_windows(self) -> None:
        """Lay out sequences as with ``windows=True``. All ranks must call it, before the first sequence is made; after
        that it does nothing. ``integrations.transformers.attach`` calls it if most layers have a window or chunks."""
        self._session.expect_windows()

    def explain(
        self, length: int, documents: Tensor | SequenceOf[int] | None = None, *, heads: int,
        kv_heads: int | None = None, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16, batch: int = 1,
        causal: bool = True, window: int | None = None, chunk: int | None = None,
    ) -> str:  # fmt: skip
        """How a layer is computed on this rank: its zones, and for each the plan or ``direct``, with the bytes sent. It
        does not communicate.

        >>> print(SequenceParallel("1x1").explain(5, [0, 2, 5], heads=4, window=2))
        5 tokens in 2 documents on 1 rank: 5 per rank, 0.0 % padding, busiest rank 1.00 x the mean work if causal
        tokens of rank 0       ranks  runs     sent per rank by level, forward + backward
        5 (100 %)              1      alone    nothing
        """
        wire = dtype if self.wire_dtype is None else self.wire_dtype
        own, sent = (dtype_name(x) for x in (dtype, wire))
        boundaries = read_boundaries(length, documents, None, shares=read_shares(self.shares, self.world))
        mask = read_mask(causal, window, chunk)
        kv_heads = heads if kv_heads is None else kv_heads
        problem = Attention(boundaries, batch, own, sent, mask, heads, kv_heads, head_dim)
        return explain(compile_call(problem, self._session.settings.split, self.rank))

    # --- errors and the end

    def check(self) -> None:
        """Call this on all ranks before ``optimizer.step()``. With NCCL, it either returns on all ranks, once attention
        is known to have received everything on all of them, or raises ``PeerError`` on all. Then drop the step.

        On a GPU, the host runs ahead of the device and may learn of a lost peer too late. The device does not use what
        was not received (results are NaN), but only ``check`` tells the host in time to keep the weights. It waits for
        the current stream. A rank that dies or loses torch.distributed's store does not return, though others may. On
        gloo, every call raises on its own, and ``check`` returns immediately.
        """
        self._session.check()

    def close(self) -> None:
        """Close the connections to other ranks. Call it on all ranks. Later calls raise.

        Without it, NCCL's communicators stay open until the same ranks make new ones, or until
        ``dist.destroy_process_group()``: closing one waits for its other ranks, which garbage collection must not do.
        """
        self._session.close()

    def __enter__(self) -> SequenceParallel:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Close, after an error without waiting for the other ranks."""
        self._session.close(error)

    # --- counters

    def traffic(self) -> dict[str, dict[str, int]]:
        """Bytes and messages that this rank has sent, by level of the plan, since the last reset."""
        lanes = self._session.counters.traffic.items()
        return {name: {"bytes": lane.bytes, "hops": lane.hops} for name, lane in sorted(lanes)}

    def timings(self) -> dict[str, float]:
        """Seconds spent in attention, and how many of them this rank spent waiting for transfers."""
        counters = self._session.counters
        return {"total": counters.total.seconds(), "waiting": counters.waiting.seconds()}

    def reset_counters(self) -> None:
        self._session.counters.reset()

    def on_event(self, hook: EventHook | None) -> None:
        """Call ``hook`` after every event of every pass on this rank; None removes it. On a GPU, times are those of the
        host, which runs ahead. `startrail.view.trace.EventRecorder` is such a hook."""
        self._session.counters.on_event = hook

    def sizes(self, *tensors: Tensor) -> Sizes:
        """The sizes of the pieces of a call with such shards, q, k, v or those of ``latent_attention``, and the peak
        memory of its passes. Without v, values have the head dim of keys."""
        return sizes_of(self._session.settings, shapes_of(*tensors))

    def __deepcopy__(self, memo: object) -> SequenceParallel:
        """A copied model uses the same lanes."""
        return self

    def __reduce__(self) -> str:
        raise ValueError("SequenceParallel belongs to its process and cannot be pickled: make a new one from its plan")


def _wrong_length(length: object) -> str:
    if length is None:
        return "sequence(length) needs the number of tokens of the whole sequence"
    if isinstance(length, Tensor):
        return f"sequence(length) needs a whole number of tokens, got a tensor of shape {tuple(length.shape)}"
    return f"length={reprlib.repr(length)} must be a whole number of tokens, length >= 1"


def _group_of(group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """The process group of the sequence axis; None for a single process."""
    if mesh is not None:
        if mesh.ndim == 1:
            return mesh.get_group()
        with without_bound_device():  # splitting it off the world's communicator would take all its ranks
            return dist.new_group(mesh.mesh.flatten().tolist(), use_local_synchronization=True)
    if group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    launched = os.environ.get("WORLD_SIZE", "1")
    if group is None and launched not in ("", "1"):
        raise ValueError(f"WORLD_SIZE is {launched}: call torch.distributed.init_process_group first")
    return group
