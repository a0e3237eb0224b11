"""Runs part of a model on part of the tokens: what ``modules`` and ``diffusers`` share.

A module is called as on one process, with the same arguments on every rank. In front of its first block, the tokens are
split; behind the last one they are gathered, so that everything before and after sees all tokens. Inside, attention
runs over all ranks. Between blocks, tokens may only be passed on (``outside``). Each block is first tried on a few
tokens, and on as many as the sequence has (``trial``).

Every rank returns the whole result, and its gradients are one process's divided by the number of ranks: the *sum* over
ranks is right for all parameters, those of the blocks, which see some tokens, and those of the rest, which see all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from startrail._compat import in_backward, tree_flatten, tree_leaves, tree_unflatten
from startrail.agreement.gather import gather_texts
from startrail.integrations.splitting.calls import (
    AttentionMode,
    TorchCall,
    argument_names,
    inner_forward,
    users_hooks,
    wrap,
)
from startrail.integrations.splitting.first_steps import FirstSteps, check_nothing_kept, random_state
from startrail.integrations.splitting.outside import Outside, identity, name_of_caller
from startrail.integrations.splitting.refusals import RefusedError, by_itself
from startrail.integrations.splitting.streams import StreamPart, Streams
from startrail.integrations.splitting.trial import (
    BlockPlan,
    Kind,
    Known,
    Rows,
    call_problem,
    try_block,
    try_length,
)
from startrail.parallel import SequenceParallel
from startrail.transport.torch_collectives import agree

_Key = tuple[object, ...]  # what a block's plan depends on


class _Where(Enum):
    """What is running."""

    OUTSIDE = "outside of all blocks"
    BLOCK = "inside a block"
    TRIAL = "a block that is tried"


class AttachedModule:
    """What is known about a module, shared by its copies.

    ``splits_blocks``: tokens are split in front of blocks; else the model says itself where. ``strict``: attention over
    whole sequences is an error. ``plans`` are those of the blocks, by name, kinds of arguments and mode, each with the
    least and the most tokens that it was tried on.
    """

    def __init__(self, sp: SequenceParallel, *, whole_text: bool, splits_blocks: bool, strict: bool) -> None:
        self.sp, self.whole_text, self.splits_blocks, self.strict = sp, whole_text, splits_blocks, strict
        self.last_of_run: dict[str, str] = {}  # the last of consecutive blocks, by the name of each
        self.before_root: Callable[..., Any] | None = None  # splits the arguments of the model itself
        self.first_steps = FirstSteps(sp)
        self.plans: dict[_Key, BlockPlan | None] = {}
        self.tried: dict[_Key, tuple[int, int]] = {}
        self.text_order: StreamPart | None = None  # of text and tokens in joint attention
        self.call: Call | None = None  # that runs
        self._opened = _Opened()  # in the call whose backward pass runs
        self._again: Streams | None = None  # of what is recomputed
        self._where = _Where.OUTSIDE

    def __deepcopy__(self, memo: object) -> AttachedModule:
        return self

    def current(self) -> Streams | None:
        """The streams of the call that is running, or of the part that is recomputed in the backward pass."""
        if self.call is not None:
            return self.call.streams
        return self._again if in_backward() else None

    def begin_backward(self, opened: _Opened) -> None:
        """From now on, what is recomputed belongs to the call in which these streams were opened."""
        self._opened, self._again = opened, opened.last

    @contextmanager
    def recomputing(self, place: _Key) -> Iterator[None]:
        """In the backward pass, the streams inside are those in which a module ran at this ``place``."""
        before = self._again
        if self.call is None and in_backward():
            self._again = self._opened.at(place)
        try:
            yield
        finally:
            self._again = before

    def blocks(self) -> list[str]:
        """The names of the blocks that attend, as far as they have run."""
        return sorted({str(name) for (name, *_), plan in self.plans.items() if plan is not None})

    @contextmanager
    def within(self, where: _Where) -> Iterator[None]:
        before, self._where = self._where, where
        try:
            yield
        finally:
            self._where = before

    # --- blocks

    def run_block(self, block: Any, args: Any, kwargs: Any) -> Any:
        if self._where is not _Where.OUTSIDE:
            return _run_attention(block, *args, **kwargs)
        if self.call is None and not in_backward():
            if torch.is_grad_enabled() and self.sp.world > 1:
                raise RefusedError(
                    f"{block._startrail_name}: is called by itself: call the whole module, whose forward splits tokens "
                    "and counts gradients once"
                )
            return _run_attention(block, *args, **kwargs)
        with self.within(_Where.BLOCK), ExitStack() as inside:
            leaves, spec = tree_flatten((args, kwargs))
            place, key = _place(block, leaves), _key(block, leaves, spec)
            inside.enter_context(self.recomputing(place))
            plan = self._plan(key, block, leaves, spec)
            if self.splits_blocks and plan is not None:
                self._split_arguments(block._startrail_name, plan, leaves)
            if self.call is not None:
                self.call.opened.note(place, self.call.streams)
            if plan is None:
                return self._run_other(block, args, kwargs)
            self._try_length(key, plan, block, leaves, spec)
            args, kwargs = tree_unflatten(leaves, spec)
            with AttentionMode(_unknown_attention):
                output = _run_attention(block, *args, **kwargs)
            return self._gather_results(block._startrail_name, plan, output) if self.splits_blocks else output

    def _run_other(self, block: Any, args: Any, kwargs: Any) -> Any:
        """A module of a list that does not attend."""
        if self.current() is not None and self.splits_blocks:
            raise RefusedError(
                f"{block._startrail_name}: runs between blocks whose tokens are split, but does not attend: name the "
                f"blocks to split in attention=[...]; {by_itself(self.sp.world)}"
            )
        with self.within(_Where.OUTSIDE):
            return inner_forward(block)(*args, **kwargs)

    def _plan(self, key: _Key, block: nn.Module, leaves: list[Any], spec: Any) -> BlockPlan | None:
        if key not in self.plans and self.call is not None:
            self.plans[key] = self._try(block, leaves, spec)
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
                self.text_order = joint[0] if joint else self.text_order

    def _try(self, block: nn.Module, leaves: list[Any], spec: Any) -> BlockPlan | None:
        if next(block.children(), None) is None:
            return None
        known, streams = None, self.current()
        if streams is not None:
            parts = list(StreamPart) if streams.text else [StreamPart.TOKENS]
            known = Known({p: streams.local(p) for p in parts}, {p: streams.whole(p) for p in parts}, self.text_order)
        args, kwargs = tree_unflatten(leaves, spec)
        hooks = users_hooks(block)

        def attempt() -> BlockPlan | None:
            plan = try_block(block, args, kwargs, known)
            if plan is not None and hooks:
                raise RefusedError(
                    f"{block._startrail_name}: its hook {hooks[0]} would see some of the tokens on each rank: remove "
                    "it, or register it on the whole module"
                )
            return plan

        return self._agreed(block, leaves, attempt)

    def _try_length(self, key: _Key, plan: BlockPlan, block: Any, leaves: list[Any], spec: Any) -> None:
        """Try as many tokens as the sequence and this rank have, if that is more, or fewer, than any number before."""
        streams = self.current()
        if self.call is None or streams is None or self.sp.world == 1:
            return
        fewest, most = self.tried.get(key, (streams.tokens + 1, 0))
        local = streams.local(StreamPart.TOKENS)
        if fewest <= local and streams.tokens <= most:
            return
        args, kwargs = tree_unflatten(leaves, spec)
        self._agreed(block, leaves, lambda: try_length(block, args, kwargs, plan, streams))
        self.tried[key] = min(fewest, local), max(most, streams.tokens)

    def _agreed(self, block: nn.Module, leaves: list[Any], attempt: Callable[[], BlockPlan | None]) -> BlockPlan | None:
        """What an attempt finds. If one rank refuses the block, all do."""
        plan, refusal, name = None, "", str(block._startrail_name)
        with self.within(_Where.TRIAL):
            try:
                plan = attempt()
            except RefusedError as error:
                refusal = str(error.with_remedy(name, self.last_of_run, self.sp.world, leaves, self.current()))
        if self.sp.world > 1:
            device = next((x.device for x in block.parameters()), torch.device("cpu"))
            agree(f"trying {name}", [], self.sp.group, device)
            refusal = next(filter(None, gather_texts(refusal, self.sp.group, device)), "")
            found = [str(kind) for calls in (plan.kinds.values() if plan else ()) for kind in calls]
            if not refusal:
                agree(f"trying {name}", found, self.sp.group, device)
        if refusal:
            raise RefusedError(refusal)
        return plan

    def _split_arguments(self, name: str, plan: BlockPlan, leaves: list[Any]) -> None:
        x, streams = leaves[plan.stream.leaf], self.current()
        if streams is None:
            assert self.call is not None
            text = 0 if plan.text is None else leaves[plan.text.leaf].shape[plan.text.dim]
            streams = self.call.open(x.shape[plan.stream.dim], text)
        elif self.call is not None and self.call.end != identity(x):
            raise RefusedError(
                f"{name}: its tokens are not what the block before it returned. Only tokens that go from block to "
                f"block stay split: name the modules to split by themselves in attention=[...]; "
                f"{by_itself(self.sp.world)}"
            )
        for leaf, dim, part in plan.inputs:
            if leaves[leaf].shape[dim] != streams.local(part):
                leaves[leaf] = streams.shard(leaves[leaf], dim, part)

    def _gather_results(self, name: str, plan: BlockPlan, output: Any) -> Any:
        leaves, spec = tree_flatten(output)
        streams = self.current()
        assert streams is not None
        if self.last_of_run[name] != name:
            if self.call is not None:
                self.call.keep_split([(leaves[rows.leaf], rows) for rows in plan.outputs])
            return output
        for leaf, dim, part in plan.outputs:
            leaves[leaf] = streams.unshard(leaves[leaf], dim, part)
        if self.call is not None:
            self.call.streams = None
        return tree_unflatten(leaves, spec)

    # --- attention

    def attend(self, call: TorchCall, kind: Kind, module: nn.Module, streams: Streams) -> Tensor:
        """One call of a module inside a block."""
        problem = call_problem(call, kind)
        if problem is None and call.mask is not None and kind.keys is not None:
            hides = (~call.mask if call.mask.dtype == torch.bool else call.mask != 0).any()
            problem = "its attn_mask hides keys: remove padding from the batch" if bool(hides) else None
        if problem is not None:
            self.sp._session.refuse(f"{module._startrail_name}: {problem}", streams.sequence._state.op_key)
        if kind.keys is None:
            return call.run()
        q, k, v = (x if x.dim() == 4 else x.unsqueeze(1) for x in (call.q, call.k, call.v))
        if kind.keys is StreamPart.TEXT and kind.queries is not StreamPart.TEXT:
            k, v = (streams.unshard(x, -2, StreamPart.TEXT) for x in (k, v))
            out = TorchCall(q, k, v, None, 0.0, False, call.scale, True).run()
        else:
            out = streams.attention(q, k, v, kind.queries, causal=call.causal, scale=call.scale)
        return out if call.q.dim() == 4 else out.squeeze(1)


class _Opened:
    """The streams that a call has opened, and in which of them its modules ran. A call may split tokens several times,
    and other numbers of them: those of an image next to text, then both as one sequence."""

    def __init__(self) -> None:
        self.last: Streams | None = None
        self._at: dict[_Key, Streams | None] = {}
        self._unclear: set[_Key] = set()  # where a module ran in several, of different sizes

    def note(self, place: _Key, streams: Streams | None) -> None:
        """A module runs on the tokens of ``streams``, or outside of all."""
        known = self._at.setdefault(place, streams)
        if (known and known.sizes) != (streams and streams.sizes):
            self._unclear.add(place)

    def at(self, place: _Key) -> Streams | None:
        """The streams of a module that is recomputed."""
        if place in self._unclear:
            raise RefusedError(
                f"{place[0]}: is recomputed, but ran on different numbers of tokens in one call, which cannot be told "
                "apart: turn off gradient checkpointing for it"
            )
        return self._at.get(place, self.last)


class Call:
    """One call of an attached module, from its arguments to its results."""

    def __init__(self, attached: AttachedModule, inputs: dict[str, Tensor]) -> None:
        self._attached, self._inputs = attached, inputs
        self.streams: Streams | None = None  # while tokens are split
        self.opened = _Opened()
        self.end: tuple[object, ...] | None = None  # identifies the tokens that the last block returned
        self.outside = Outside(lambda: attached._where is _Where.OUTSIDE)

    def open(self, tokens: int, text: int) -> Streams:
        """Split the tokens from now on."""
        streams = self.streams = self.opened.last = Streams(self._attached.sp, tokens, text, self._attached.whole_text)
        for x in self._inputs.values():
            self._attached.sp._session.record_digest(streams.sequence._state, x)
        return streams

    def keep_split(self, results: list[tuple[Tensor, Rows]]) -> None:
        """The results of a block go on to the next one as they are."""
        assert self.streams is not None
        self.end = next(identity(x) for x, rows in results if rows.part is not StreamPart.TEXT)
        for x, rows in results:
            self.outside.watch(x, rows.dim, self.streams.whole(rows.part))

    def check_all_split(self, module: nn.Module, output: Any) -> None:
        """Raises ``RefusedError`` unless attention was split and the result is whole."""
        name, world = type(module).__name__, self._attached.sp.world
        if self.streams is not None:
            raise RefusedError(
                f"{name}: the tokens are still split at the end: the last block was not called. Name those to split in "
                f"attention=[...]; {by_itself(world)}"
            )
        whole = self.outside.attention
        if self.opened.last is None:
            where = f", and {whole[0][0]} attends outside of lists of blocks" if whole else ""
            raise RefusedError(
                f"{name}: no block calls F.scaled_dot_product_attention{where}. Blocks are the modules of a ModuleList "
                f"or Sequential; name other modules in attention=[...]; {by_itself(world)}"
            )
        self.outside.check(module, output, self._attached.blocks(), world)
        for caller, count in whole:
            if self._attached.strict and 2 * count > self.opened.last.tokens:
                raise RefusedError(
                    f"{caller}: attends to {count} tokens, but is not in a list of blocks, and would run whole on "
                    f"every rank: name the modules to split in attention=[...]; {by_itself(world)}"
                )


def _key(block: Any, leaves: list[Any], spec: Any) -> _Key:
    kinds = tuple(x.dim() if isinstance(x, Tensor) else type(x) for x in leaves)
    modes = tuple((module.training, len(users_hooks(module))) for module in block.modules())
    return block._startrail_name, str(spec), kinds, modes


def _unknown_attention(call: TorchCall) -> Tensor:
    raise RefusedError(f"{name_of_caller()}: calls attention differently than when its block was first called")


def _place(module: Any, leaves: list[Any]) -> _Key:
    """A module with the shapes of its arguments, which are the same when it is recomputed."""
    return module._startrail_name, *(x.shape for x in leaves if isinstance(x, Tensor))


# --- wrapped modules


def _run_attention(module: Any, *args: Any, **kwargs: Any) -> Any:
    """``forward`` of a module that attends inside a block."""
    attached: AttachedModule = module._startrail
    if attached._where is _Where.TRIAL or "_startrail_kinds" not in module.__dict__:
        return inner_forward(module)(*args, **kwargs)
    place = _place(module, tree_leaves((args, kwargs)))
    with attached.recomputing(place):
        streams = attached.current()
        if streams is None:
            return inner_forward(module)(*args, **kwargs)
        if attached.call is not None:
            attached.call.opened.note(place, streams)
        kinds = iter(module._startrail_kinds)

        def attend(call: TorchCall) -> Tensor:
            kind = next(kinds, None)
            return _unknown_attention(call) if kind is None else attached.attend(call, kind, module, streams)

        with AttentionMode(attend):
            return inner_forward(module)(*args, **kwargs)


def run_block(module: Any, *args: Any, **kwargs: Any) -> Any:
    """``forward`` of a block."""
    return module._startrail.run_block(module, args, kwargs)


def run_root(module: Any, *args: Any, **kwargs: Any) -> Any:
    """``forward`` of the attached module."""
    attached: AttachedModule = module._startrail
    named = argument_names(module, args, kwargs)
    inputs = {name: x for name, x in named.items() if isinstance(x, Tensor) and x.device.type != "meta"}
    checks_step = attached.first_steps.check_inputs(module, inputs)
    random = random_state(next(iter(inputs.values())).device) if checks_step else None
    call = attached.call = Call(attached, inputs)
    try:
        if attached.before_root is not None:
            args, kwargs = attached.before_root(module, args, kwargs)
        with call.outside:
            output = inner_forward(module)(*args, **kwargs)
        call.check_all_split(module, output)
    except RefusedError:
        raise
    except Exception as error:
        call.outside.explain(module, attached.blocks(), attached.sp.world, error)
        raise
    finally:
        attached.call = None
    attached.first_steps.check_random(random)
    if checks_step:
        check_nothing_kept(module)
    return _shares(attached, call.opened, type(module).__name__, output, checks_step)


def _shares(attached: AttachedModule, opened: _Opened, name: str, output: Any, checks_step: bool) -> Any:
    """The results, whose gradients are divided by the number of ranks."""
    leaves, spec = tree_flatten(output)
    for index, x in enumerate(leaves):
        if not isinstance(x, Tensor | int | float | str | None):
            raise RefusedError(
                f"{name}: returns a {type(x).__name__}: return tensors, or tuples or dictionaries of them"
            )
        if isinstance(x, Tensor) and x.requires_grad:
            leaves[index] = _Share.apply(x, attached, opened, name if checks_step else None)
    return tree_unflatten(leaves, spec)


class _Share(torch.autograd.Function):
    """The same tensor. Its gradient is divided by the number of ranks, and first compared if ``name`` is given.

    Autograd runs a call's nodes in the reverse order of the forward pass, so this one comes before the call's blocks,
    and after the blocks of later calls: blocks that are recomputed belong to the last call whose node has run.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, attached: AttachedModule, opened: _Opened, name: str | None) -> Tensor:
        ctx.attached, ctx.opened, ctx.name = attached, opened, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.attached.begin_backward(ctx.opened)
        if ctx.name is not None:
            ctx.attached.first_steps.check_gradient(ctx.name, grad)
        return grad / ctx.attached.sp.world, None, None, None
