"""Runs part of a model on part of the tokens: what ``modules`` and ``diffusers`` share.

A module is called as on one process, with the same arguments on every rank. In front of its first block, the tokens are
split; behind the last one they are gathered, so that everything before and after sees all tokens. Inside, attention
runs over all ranks. Each block is first tried on a few tokens (``trial``).

Every rank returns the whole result, and its gradients are one process's divided by the number of ranks: the *sum* over
ranks is right for all parameters, those of the blocks, which see some tokens, and those of the rest, which see all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from startrail._compat import in_backward, tree_flatten, tree_unflatten
from startrail.comm.agreement import agree
from startrail.comm.digest import digest
from startrail.comm.gather import gather_tensors
from startrail.comm.sanity import CHECKED_STEPS, check_same_parameters
from startrail.integrations.splitting.refusals import RefusedError, by_itself
from startrail.integrations.splitting.sdpa import AttentionMode, TorchCall, calling_module
from startrail.integrations.splitting.streams import StreamPart, Streams
from startrail.integrations.splitting.trial import BlockPlan, Kind, Known, call_problem, try_block
from startrail.integrations.splitting.wrapping import argument_names, inner_forward, wrap
from startrail.parallel import SequenceParallel

UNEQUAL = 1e-3  # relative difference between ranks of a result's gradient


class AttachedModule:
    """State of a module, shared by its copies.

    ``streams`` are those of the running call while its tokens are split. ``plans`` are those of the blocks, by name and
    kinds of arguments. ``whole``: modules that attended outside of the split in the first call.
    """

    def __init__(self, sp: SequenceParallel, *, whole_text: bool, splits_blocks: bool, strict: bool) -> None:
        self.sp, self.whole_text = sp, whole_text
        self.splits_blocks = splits_blocks  # else the model says itself where tokens are split
        self.strict = strict  # attention over whole sequences is an error
        self.last_of_run: dict[str, str] = {}  # the last of consecutive blocks, by the name of each
        self.plans: dict[tuple[object, ...], BlockPlan | None] = {}
        self.order: StreamPart | None = None  # of text and tokens in joint attention
        self.streams: Streams | None = None
        self.last: Streams | None = None
        self.running = self.inside_block = self.trying = False
        self.end: tuple[object, ...] | None = None  # identifies the tokens that the last block returned
        self.whole: list[tuple[str, int]] = []
        self.random_differs = False  # ranks have different states of random number generators
        self.inputs: dict[str, Tensor] = {}
        self.has_run = False
        self.steps = {True: 0, False: 0}  # checked calls in training, and in evaluation
        self.before_root: Callable[..., Any] | None = None  # splits the arguments of the model itself
        self.recomputed: Streams | None = None  # of the call whose backward pass runs

    def __deepcopy__(self, memo: object) -> AttachedModule:
        return self

    def current(self) -> Streams | None:
        """The streams of the call that is running, or that is recomputed in the backward pass."""
        return self.streams if self.running or not in_backward() else self.recomputed

    @property
    def _by_itself(self) -> str:
        return by_itself(self.sp.world)

    def open(self, tokens: int, text: int) -> Streams:
        streams = self.streams = self.last = Streams(self.sp, tokens, text, self.whole_text)
        for x in self.inputs.values():
            self.sp._runtime.record_digest(streams.sequence._state, x)
        return streams

    # --- blocks

    def run_block(self, block: Any, args: Any, kwargs: Any) -> Any:
        if self.inside_block or not (self.running or in_backward()):
            return _run_attention(block, *args, **kwargs)
        streams, name = self.current(), block._startrail_name
        leaves, spec = tree_flatten((args, kwargs))
        plan = self._plan(block, args, kwargs, leaves, spec, streams)
        if plan is None:
            if streams is not None and self.splits_blocks:
                raise RefusedError(
                    f"{name}: runs between blocks whose tokens are split, but does not attend: name the blocks to "
                    f"split in attention=[...]; {self._by_itself}"
                )
            return inner_forward(block)(*args, **kwargs)
        if self.splits_blocks:
            streams = self._split_arguments(name, plan, leaves, streams)
            args, kwargs = tree_unflatten(leaves, spec)
        with self._in_block(), AttentionMode(self._unknown_attention):
            output = _run_attention(block, *args, **kwargs)
        if not self.splits_blocks:
            return output
        assert streams is not None
        return self._gather_results(name, plan, output, streams)

    def _plan(
        self, block: nn.Module, args: Any, kwargs: Any, leaves: list[Any], spec: Any, streams: Streams | None
    ) -> BlockPlan | None:
        kinds = tuple(x.dim() if isinstance(x, Tensor) else type(x) for x in leaves)
        key = (block._startrail_name, str(spec), kinds)
        if key not in self.plans and self.running:
            self.plans[key] = self._try(block, args, kwargs, streams)
        plan = self.plans.get(key)
        if plan is not None and block.__dict__.get("_startrail_plan") is not plan:  # of a copy, not yet
            self._follow(block, plan)
        return plan

    def _follow(self, block: nn.Module, plan: BlockPlan) -> None:
        """Wrap the modules of ``block`` that attend."""
        block.__dict__["_startrail_plan"] = plan
        for module in block.modules():
            kinds = plan.kinds.get(str(module._startrail_name))
            if kinds is not None:
                if "_startrail_forward" not in module.__dict__:
                    wrap(module, _run_attention)
                module.__dict__["_startrail_kinds"] = kinds
                joint = [
                    kind.queries for kind in kinds if kind.queries in (StreamPart.TEXT_FIRST, StreamPart.TEXT_LAST)
                ]
                self.order = joint[0] if joint else self.order

    def _try(self, block: nn.Module, args: Any, kwargs: Any, streams: Streams | None) -> BlockPlan | None:
        """What a trial finds, the same on all ranks."""
        known = None
        if streams is not None:
            parts = list(StreamPart) if streams.text else [StreamPart.TOKENS]
            known = Known({p: streams.local(p) for p in parts}, {p: streams.whole(p) for p in parts}, self.order)
        if next(block.children(), None) is None:
            return None
        plan, refused = None, None
        with self._in_block(trying=True):
            try:
                plan = try_block(block, args, kwargs, known)
            except RefusedError as error:
                leaves, name = tree_flatten((args, kwargs))[0], str(block._startrail_name)
                refused = error.with_remedy(name, self.last_of_run, self.sp.world, leaves, streams)
        if self.sp.world > 1:
            found = [str(kind) for calls in (plan.kinds.values() if plan else ()) for kind in calls]
            device = next((x.device for x in block.parameters()), torch.device("cpu"))
            agree(f"trying {block._startrail_name}", [str(refused or found)], self.sp.group, device)
        if refused is not None:
            raise refused
        return plan

    def _split_arguments(self, name: str, plan: BlockPlan, leaves: list[Any], streams: Streams | None) -> Streams:
        x = leaves[plan.stream.leaf]
        if streams is None:
            text = 0 if plan.text is None else leaves[plan.text.leaf].shape[plan.text.dim]
            streams = self.open(x.shape[plan.stream.dim], text)
        elif self.running and self.end != _identity(x):
            raise RefusedError(
                f"{name}: its tokens are not what the block before it returned. Only tokens that go from block to "
                "block stay split: name the modules to split by themselves in attention=[...]; " + self._by_itself
            )
        for leaf, dim, part in plan.inputs:
            if leaves[leaf].shape[dim] != streams.local(part):
                leaves[leaf] = streams.shard(leaves[leaf], dim, part)
        return streams

    def _gather_results(self, name: str, plan: BlockPlan, output: Any, streams: Streams) -> Any:
        leaves, spec = tree_flatten(output)
        if self.last_of_run[name] != name:
            rows = next(rows for rows in plan.outputs if rows.part is not StreamPart.TEXT)
            self.end = _identity(leaves[rows.leaf])
            return output
        for leaf, dim, part in plan.outputs:
            leaves[leaf] = streams.unshard(leaves[leaf], dim, part)
        if self.running:
            self.streams = None
        return tree_unflatten(leaves, spec)

    @contextmanager
    def _in_block(self, trying: bool = False) -> Iterator[None]:
        self.inside_block, self.trying = True, trying
        try:
            yield
        finally:
            self.inside_block = self.trying = False

    # --- attention

    def attend(self, call: TorchCall, kind: Kind, module: nn.Module, streams: Streams) -> Tensor:
        """One call of a module inside a block."""
        problem = call_problem(call, kind)
        if problem is None and call.mask is not None and kind.keys is not None:
            hides = (~call.mask if call.mask.dtype == torch.bool else call.mask != 0).any()
            problem = "its attn_mask hides keys: remove padding from the batch" if bool(hides) else None
        if problem is not None:
            self.sp._runtime.refuse(f"{module._startrail_name}: {problem}", streams.sequence._state.op_key)
        if kind.keys is None:
            return call.run()
        q, k, v = (x if x.dim() == 4 else x.unsqueeze(1) for x in (call.q, call.k, call.v))
        if kind.keys is StreamPart.TEXT and kind.queries is not StreamPart.TEXT:
            k, v = (streams.unshard(x, -2, StreamPart.TEXT) for x in (k, v))
            out = TorchCall(q, k, v, None, 0.0, False, call.scale, True).run()
        else:
            out = streams.attention(q, k, v, kind.queries, causal=call.causal, scale=call.scale)
        return out if call.q.dim() == 4 else out.squeeze(1)

    def _unknown_attention(self, call: TorchCall) -> Tensor:
        raise RefusedError(f"{_name_of_caller()}: calls attention differently than when its block was first called")

    def note_whole(self, call: TorchCall) -> Tensor:
        """Attention outside of the split."""
        if call.q.shape[-2] == call.k.shape[-2]:
            self.whole.append((_name_of_caller(), call.q.shape[-2]))
        return call.run()

    def check_all_split(self, module: nn.Module) -> None:
        """After a call: raises ``RefusedError`` unless attention was split and the result is whole."""
        if self.streams is not None:
            raise RefusedError(
                f"{type(module).__name__}: the tokens are still split at the end: the last block was not called. Name "
                f"those to split in attention=[...]; {self._by_itself}"
            )
        if self.last is None:
            where = f", and {self.whole[0][0]} attends outside of lists of blocks" if self.whole else ""
            raise RefusedError(
                f"{type(module).__name__}: no block calls F.scaled_dot_product_attention{where}. Blocks are the "
                "modules of a ModuleList or Sequential; name other modules in attention=[...]; " + self._by_itself
            )
        for name, count in self.whole:
            if self.strict and 2 * count > self.last.tokens:
                raise RefusedError(
                    f"{name}: attends to {count} tokens, but is not in a list of blocks, and would run whole on every "
                    f"rank: name the modules to split in attention=[...]; {self._by_itself}"
                )

    # --- checks of the first calls

    def check_inputs(self, module: nn.Module) -> bool:
        """Compare parameters and arguments between ranks. True if this is one of the first training steps."""
        training = module.training and torch.is_grad_enabled()
        if self.steps[training] >= CHECKED_STEPS or self.sp.world == 1 or not self.inputs:
            return False
        self.steps[training] += 1
        if training:
            check_same_parameters(module.named_parameters(), self.sp.group)
        device = next(iter(self.inputs.values())).device
        described = [f"{name} {tuple(x.shape)} {x.dtype}" for name, x in self.inputs.items()]
        agree("comparing arguments", described, self.sp.group, device)
        own = torch.stack([digest(x).to(device) for x in (*self.inputs.values(), _random_state(device))])
        ranks = gather_tensors(own, self.sp.group, "comparing arguments")
        for index, name in enumerate(self.inputs):
            different = [rank for rank, of_rank in enumerate(ranks) if of_rank[index] != ranks[0][index]]
            if different:
                raise ValueError(
                    f"{name} differs between ranks of a sequence (rank {different[0]} from rank 0): all ranks need the "
                    "same data, noise and timesteps; draw them from a generator with the same seed"
                )
        self.random_differs = any(of_rank[-1] != ranks[0][-1] for of_rank in ranks)
        if training and dist.get_world_size() > self.sp.world:
            self._check_groups(own)
        return training

    def check_random(self, before: Tensor | None) -> None:
        """Raises ``ValueError`` if the call drew random numbers, and ranks did not draw the same."""
        if before is not None and self.random_differs and not torch.equal(before, _random_state(before.device)):
            raise ValueError(
                "the model draws random numbers (dropout, or dropped labels), but the ranks of a sequence are seeded "
                "differently: set the same seed on all of them"
            )

    def _check_groups(self, own: Tensor) -> None:
        group = torch.tensor([min(dist.get_process_group_ranks(self.sp.group))], device=own.device)
        ranks = gather_tensors(torch.cat([group, own[:1]]), None, "comparing data-parallel groups")
        of_groups = {int(first): int(data) for first, data in ranks}
        if len(set(of_groups.values())) < len(of_groups):
            name = next(iter(self.inputs))
            raise ValueError(
                f"{name} is the same in several data-parallel groups: seed data and noise with the number of the group"
            )

    def check_gradient(self, name: str, grad: Tensor) -> None:
        """Raises ``ValueError`` on all ranks if they compute different losses from the whole result."""
        x = grad.detach().double().flatten()
        weights = torch.linspace(0.5, 1.5, len(x), device=x.device, dtype=x.dtype)
        ranks = gather_tensors(torch.stack([x.norm(), x @ weights]), self.sp.group, "comparing gradients")
        largest = max(float(of_rank[0]) for of_rank in ranks)
        if any(float((of_rank - ranks[0]).norm()) > UNEQUAL * largest for of_rank in ranks):
            raise ValueError(
                f"ranks of a sequence compute different losses from the result of {name}: noise, targets or timesteps "
                "differ between ranks, or each rank uses part of the result. All must compute the same loss"
            )


def _identity(x: Tensor) -> tuple[object, ...]:
    """Equal for a tensor and itself, unless it was changed."""
    return x.data_ptr(), x.shape, 0 if x.is_inference() else x._version


def _random_state(device: torch.device) -> Tensor:
    return (torch.cuda if device.type == "cuda" else torch.random).get_rng_state().to(device)


def _name_of_caller() -> str:
    return str(getattr(calling_module(nn.Module()), "_startrail_name", "a module"))


# --- wrapped modules


def _run_attention(module: Any, *args: Any, **kwargs: Any) -> Any:
    """``forward`` of a module that attends inside a block."""
    attached: AttachedModule = module._startrail
    streams = attached.current()
    if streams is None or attached.trying or "_startrail_kinds" not in module.__dict__:
        return inner_forward(module)(*args, **kwargs)
    kinds = iter(module._startrail_kinds)

    def attend(call: TorchCall) -> Tensor:
        kind = next(kinds, None)
        return attached._unknown_attention(call) if kind is None else attached.attend(call, kind, module, streams)

    with AttentionMode(attend):
        return inner_forward(module)(*args, **kwargs)


def run_block(module: Any, *args: Any, **kwargs: Any) -> Any:
    """``forward`` of a block."""
    return module._startrail.run_block(module, args, kwargs)


def run_root(module: Any, *args: Any, **kwargs: Any) -> Any:
    """``forward`` of the attached module."""
    attached: AttachedModule = module._startrail
    named = argument_names(module, args, kwargs)
    leaves = {name: x for name, x in named.items() if isinstance(x, Tensor) and x.device.type != "meta"}
    attached.inputs = leaves
    checking = attached.check_inputs(module)
    random = _random_state(next(iter(leaves.values())).device) if checking else None
    attached.streams, attached.last, attached.whole, attached.running = None, None, [], True
    try:
        if attached.before_root is not None:
            args, kwargs = attached.before_root(module, args, kwargs)
        if attached.has_run:
            output = inner_forward(module)(*args, **kwargs)
        else:
            with AttentionMode(attached.note_whole):
                output = inner_forward(module)(*args, **kwargs)
        attached.check_all_split(module)
        attached.check_random(random)
        attached.has_run = True
    finally:
        attached.running, attached.streams, attached.inputs = False, None, {}
    return _shares(attached, type(module).__name__, output, checking)


def _shares(attached: AttachedModule, name: str, output: Any, checking: bool) -> Any:
    """The results, whose gradients are divided by the number of ranks."""
    leaves, spec = tree_flatten(output)
    for index, x in enumerate(leaves):
        if not isinstance(x, Tensor | int | float | str | None):
            raise RefusedError(
                f"{name}: returns a {type(x).__name__}: return tensors, or tuples or dictionaries of them"
            )
        if isinstance(x, Tensor) and x.requires_grad:
            leaves[index] = _Share.apply(x, attached, name if checking else None)
    return tree_unflatten(leaves, spec)


class _Share(torch.autograd.Function):
    """The same tensor. Its gradient is divided by the number of ranks, and first compared if ``name`` is given.

    Autograd runs a call's nodes in the reverse order of the forward pass, so this one comes before the call's blocks,
    and after the blocks of later calls: blocks that are recomputed belong to the last call whose node has run.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, attached: AttachedModule, name: str | None) -> Tensor:
        ctx.attached, ctx.name, ctx.streams = attached, name, attached.last
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.attached.recomputed = ctx.streams
        if ctx.name is not None:
            ctx.attached.check_gradient(ctx.name, grad)
        return grad / ctx.attached.sp.world, None, None
