"""Tries a block of a model on a few made-up tokens: which arguments have one row per token, which attention calls it
makes, and whether it mixes tokens anywhere else.

The block runs twice, with attention replaced by a function of each token: on some tokens, and on a few of the same
tokens in another order. Every module's result must have the same rows, and no gradient may flow between tokens, which
finds changes too small to see. Positions that a block counts for itself, convolutions, recurrences, pooling and norms
over tokens all fail. Nothing is sent, and the cost does not depend on the length of the sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from startrail._compat import tree_flatten, tree_unflatten, unobserved
from startrail.integrations.splitting.refusals import NAME_OTHERS, RefusedError, mixing
from startrail.integrations.splitting.sdpa import AttentionMode, TorchCall, calling_module
from startrail.integrations.splitting.streams import StreamPart
from startrail.integrations.splitting.wrapping import inner_forward

PICKED = {StreamPart.TOKENS: [4, 1, 9, 3, 7], StreamPart.TEXT: [2, 0, 5]}  # rows of the first run that the second has
PROBED = 4  # the token whose gradients are taken
MAX_TRIALS = 256


class Rows(NamedTuple):
    """Where a tensor of a block's arguments or results has its rows: the leaf's index, the dimension, and the part."""

    leaf: int
    dim: int
    part: StreamPart


class Kind(NamedTuple):
    """An attention call: the part that ``queries`` are of, and ``keys``, or None if every rank has all keys."""

    queries: StreamPart
    keys: StreamPart | None


class BlockPlan(NamedTuple):
    """What the trial found. ``stream``, ``text``: the leaves of the tokens and of joint text. ``kinds``: the calls of
    each module that attends, by its name."""

    stream: Rows
    text: Rows | None
    inputs: tuple[Rows, ...]
    outputs: tuple[Rows, ...]
    kinds: dict[str, list[Kind]]


class Known(NamedTuple):
    """What is known about a block's arguments because tokens were split before: the rows of each part that this rank
    has, those of the whole sequence, and the order of text and tokens in joint attention."""

    local: dict[StreamPart, int]
    whole: dict[StreamPart, int]
    order: StreamPart | None


def try_block(block: nn.Module, args: Any, kwargs: Any, known: Known | None = None) -> BlockPlan | None:
    """How to split ``block``, called with these arguments; None if it does not attend.

    Raises ``RefusedError`` if the block attends, but cannot be split.
    """
    leaves, spec = tree_flatten((args, kwargs))
    refused: RefusedError | None = None
    failed: Exception | None = None
    with _undisturbed(block):
        for choice in itertools.islice(_choices(leaves, known), MAX_TRIALS):
            trial = _BlockTrial(block, leaves, spec, choice)
            try:
                return trial.plan() if trial.attends() else None
            except RefusedError as error:
                if refused is None:
                    refused = error
                    refused.alone = trial.attention_alone() if refused.but_attention else None
            except Exception as error:  # a wrong choice of rows fails anywhere
                failed = failed or (error if trial.calls or known is not None else None)
    if refused is not None:
        raise refused
    if failed is not None:
        reason = f"cannot be run on part of the tokens ({type(failed).__name__}: {failed})"
        raise RefusedError(f"{block._startrail_name}: {reason}. {NAME_OTHERS}") from failed
    return None


class _RowChoice(NamedTuple):
    stream: Rows
    text: Rows | None
    rows: tuple[Rows, ...]  # including those two


def _choices(leaves: list[Any], known: Known | None) -> Iterator[_RowChoice]:
    """What the arguments may mean, the likeliest first: those that least is split of. Arguments of one shape are most
    often alike, but by chance a table of positions can have the shape of a batch's timesteps."""
    yield from _choices_of_tables(leaves, known, alike=True)
    yield from _choices_of_tables(leaves, known, alike=False)


def _choices_of_tables(leaves: list[Any], known: Known | None, alike: bool) -> Iterator[_RowChoice]:
    floating = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 3]
    for stream in _streams(leaves, floating, known):
        x, dim = leaves[stream.leaf], stream.dim
        others = [i for i in floating if i != stream.leaf and _shape_without(leaves[i], dim) == _shape_without(x, dim)]
        texts = [Rows(i, dim, StreamPart.TEXT) for i in others]
        if known is not None:
            count = known.local.get(StreamPart.TEXT)
            texts = [each for each in texts if leaves[each.leaf].shape[dim] == count]
        for text in texts if known is not None and texts else (None, *texts):
            sizes = {(StreamPart.TOKENS, x.shape[dim])}
            if known is not None:
                sizes = {*known.local.items(), *known.whole.items()}
            elif text is not None:
                rows = leaves[text.leaf].shape[dim]
                joint = x.shape[dim] + rows
                sizes |= {(StreamPart.TEXT, rows), (StreamPart.TEXT_FIRST, joint), (StreamPart.TEXT_LAST, joint)}
            fixed = [each for each in (stream, text) if each is not None]
            for tables in _tables(leaves, {each.leaf for each in fixed}, sizes, alike):
                yield _RowChoice(stream, text, (*fixed, *tables))


def _streams(leaves: list[Any], floating: list[int], known: Known | None) -> Iterator[Rows]:
    """Which argument may be the tokens, and in which dimension."""
    if known is not None:
        parts = [StreamPart.TOKENS, *([] if known.order is None else [known.order])]
        places = itertools.product(parts, (1, 0), floating)
        yield from (Rows(i, dim, part) for part, dim, i in places if leaves[i].shape[dim] == known.local.get(part))
    elif floating:
        yield from (Rows(floating[0], dim, StreamPart.TOKENS) for dim in (1, 0))


def _shape_without(x: Tensor, dim: int) -> list[int]:
    return [size for index, size in enumerate(x.shape) if index != dim]


def _tables(
    leaves: list[Any], taken: set[int], sizes: set[tuple[StreamPart, int]], alike: bool
) -> Iterator[tuple[Rows, ...]]:
    """Each choice of the other arguments that have rows. ``alike``: all arguments of one shape have the same."""
    tensors = [index for index, x in enumerate(leaves) if index not in taken and isinstance(x, Tensor)]
    by_shape: dict[object, list[int]] = {}
    for index in tensors:
        by_shape.setdefault(leaves[index].shape if alike else index, []).append(index)
    if not alike and len(by_shape) == len({leaves[index].shape for index in tensors}):
        return  # all have been tried
    options = []
    for group in by_shape.values():
        dims = enumerate(leaves[group[0]].shape)
        matches = [(dim, part) for dim, size in dims for part in StreamPart if (part, size) in sizes]
        options.append([(), *([Rows(index, dim, part) for index in group] for dim, part in matches)])
    for chosen in itertools.product(*options):
        yield tuple(itertools.chain(*chosen))


class _TrialCall(NamedTuple):
    module: nn.Module
    attention: TorchCall


class _BlockTrial:
    """Both runs of a block with one choice of rows."""

    def __init__(self, block: nn.Module, leaves: list[Any], spec: Any, choice: _RowChoice) -> None:
        self.block, self.spec, self.choice = block, spec, choice
        self.calls: list[_TrialCall] = []
        avoided = {size for x in leaves if isinstance(x, Tensor) for size in x.shape}
        first = next(n for n in itertools.count(11, 2) if not avoided & {n, n + 7})
        self.sizes = {StreamPart.TOKENS: first, StreamPart.TEXT: 7}
        self.leaves = self._made_up(leaves)

    def attends(self) -> bool:
        """Run on some tokens; False if the block does not attend."""
        sharded = any(
            hasattr(x, "device_mesh") for x in self.block.parameters()
        )  # FSDP communicates in the backward pass
        with torch.inference_mode(False), torch.set_grad_enabled(not sharded):
            self.first, self.results = self._run(self.leaves)
        self.first_calls, self.calls = self.calls, []
        return bool(self.first_calls)

    def plan(self) -> BlockPlan:
        picked = list(self.leaves)
        for leaf, dim, part in self.choice.rows:
            picked[leaf] = self._pick(picked[leaf].detach(), dim, part)
        with torch.no_grad():
            again, results = self._run(picked)
        with torch.inference_mode(False), torch.enable_grad():  # the model's first call may be without gradients
            self._compare(self.results, results)
        kinds = self._kinds()
        outputs = []
        for index, (x, y) in enumerate(zip(self.first, again, strict=True)):
            if isinstance(x, Tensor) and isinstance(y, Tensor):
                rows = self._rows(x, y)
                if rows is None:
                    text = f"{self.name()}: its result {tuple(x.shape)} does not have one row per token"
                    raise RefusedError(text, but_attention=True)
                outputs.append(Rows(index, *rows))
        if not any(rows.part is not StreamPart.TEXT for rows in outputs):
            raise RefusedError(f"{self.name()}: no result has one row per token", but_attention=True)
        return BlockPlan(self.choice.stream, self.choice.text, self.choice.rows, tuple(outputs), kinds)

    def attention_alone(self) -> list[str]:
        """The modules of the block that attend, if each of them can be split without the rest of the block."""
        modules = list(dict.fromkeys(call.module for call in self.first_calls))
        given: dict[nn.Module, tuple[Any, Any]] = {}
        with ExitStack() as hooks:
            for each in modules:
                hook = each.register_forward_pre_hook(lambda *call: given.update({call[0]: call[1:]}), with_kwargs=True)
                hooks.enter_context(hook)
            self._run(self.leaves)
        try:
            plans = [try_block(each, *given[each]) for each in modules if each is not self.block]
        except RefusedError:
            return []
        return [self.name(each) for each in modules] if len(plans) == len(modules) and all(plans) else []

    def name(self, module: nn.Module | None = None) -> str:
        return str((module or self.block)._startrail_name)

    # --- running

    def _made_up(self, leaves: list[Any]) -> list[Any]:
        made = list(leaves)
        torch.manual_seed(0)
        with torch.inference_mode(False):
            for leaf, dim, part in self.choice.rows:
                x, count = leaves[leaf], self._count(part)
                shape = [count if index == dim else size for index, size in enumerate(x.shape)]
                if leaf in (self.choice.stream.leaf, self.choice.text and self.choice.text.leaf) or not x.shape[dim]:
                    made[leaf] = torch.randn(shape, device=x.device).to(x.dtype)
                else:
                    made[leaf] = x.detach().index_select(dim, torch.arange(count, device=x.device) % x.shape[dim])
            stream = self.choice.stream.leaf
            made[stream] = made[stream].requires_grad_()
        return made

    def _count(self, part: StreamPart) -> int:
        return self.sizes[part] if part in self.sizes else sum(self.sizes.values())

    def _run(self, leaves: list[Any]) -> tuple[list[Any], list[tuple[str, Tensor]]]:
        """The results, and those of every module in the order in which they finish."""
        found: list[tuple[str, Tensor]] = []

        def record(module: nn.Module, arguments: object, output: Any) -> None:
            found.extend((self.name(module), x) for x in tree_flatten(output)[0] if isinstance(x, Tensor))

        args, kwargs = tree_unflatten(leaves, self.spec)
        torch.manual_seed(0)  # a model may drop labels at random
        with ExitStack() as hooks:
            for module in self.block.modules():
                if module is not self.block:
                    hooks.enter_context(module.register_forward_hook(record))
            with AttentionMode(self._attend, without_dropout=True):
                output = inner_forward(self.block)(*args, **kwargs)
        leaves = tree_flatten(output)[0]
        found.extend((self.name(), x) for x in leaves if isinstance(x, Tensor))
        return leaves, found

    def _attend(self, call: TorchCall) -> Tensor:
        """A function of each query's own token."""
        self.calls.append(_TrialCall(calling_module(self.block), call))
        if call.q.shape[-2] != call.k.shape[-2]:
            return call._replace(dropout=0.0).run()
        repeats = [1] * call.v.dim()
        if call.v.dim() == 4:
            repeats[1] = call.q.shape[1] // call.v.shape[1]
        return call.v.repeat(repeats) + 0.5 * call.q.mean(-1, keepdim=True)

    # --- comparing

    def _pick(self, x: Tensor, dim: int, part: StreamPart) -> Tensor:
        """The rows of the second run."""
        text, tokens = PICKED[StreamPart.TEXT], PICKED[StreamPart.TOKENS]
        picked = {
            StreamPart.TOKENS: tokens,
            StreamPart.TEXT: text,
            StreamPart.TEXT_FIRST: text + [self.sizes[StreamPart.TEXT] + i for i in tokens],
            StreamPart.TEXT_LAST: tokens + [self.sizes[StreamPart.TOKENS] + i for i in text],
        }[part]
        return x.index_select(dim, torch.tensor(picked, device=x.device))

    def _rows(self, x: Tensor, y: Tensor) -> tuple[int, StreamPart] | None:
        """The dimension and the part of the rows; None if no dimension matches."""
        for dim, part in self._possible(x, y):
            if _close(self._pick(x, dim, part), y):
                return dim, part
        return None

    def _possible(self, x: Tensor, y: Tensor) -> list[tuple[int, StreamPart]]:
        if x.dim() != y.dim():
            return []
        different = [dim for dim in range(x.dim()) if x.shape[dim] != y.shape[dim]]
        if len(different) != 1:
            return []
        sizes = x.shape[different[0]], y.shape[different[0]]
        counts = {part: len(self._pick(torch.arange(self._count(part)), 0, part)) for part in StreamPart}
        return [(different[0], part) for part in StreamPart if sizes == (self._count(part), counts[part])]

    def _compare(self, first: list[tuple[str, Tensor]], second: list[tuple[str, Tensor]]) -> None:
        probes: list[tuple[str, Tensor]] = []
        for (name, x), (_, y) in zip(first, second, strict=False):
            if x.dim() < 3:  # such as the tokens of one expert
                continue
            rows = self._rows(x, y)
            pooled = x.shape == y.shape and not _close(x, y)
            if pooled or (rows is None and self._possible(x, y)):
                raise mixing(name)
            if rows is not None and rows[1] is not StreamPart.TEXT and x.requires_grad:
                probes.append((name, x.select(rows[0], self._probed(rows[1]))))
        if probes and self._leaks([x for _, x in probes]):
            raise mixing(next(name for name, x in probes if self._leaks([x])))

    def _leaks(self, probes: list[Tensor]) -> bool:
        """True if a token's results have a gradient with respect to another token."""
        leaf, dim, part = self.choice.stream
        x, probed = self.leaves[leaf], self._probed(part)
        weights = [torch.linspace(0.5, 1.5, p.numel(), device=p.device).to(p.dtype).view_as(p) for p in probes]
        (grad,) = torch.autograd.grad(probes, x, weights, retain_graph=True, allow_unused=True)
        others = torch.tensor([i for i in range(x.shape[dim]) if i != probed], device=x.device)
        return grad is not None and bool(grad.index_select(dim, others).any())

    def _probed(self, part: StreamPart) -> int:
        return PROBED + (self.sizes[StreamPart.TEXT] if part is StreamPart.TEXT_FIRST else 0)

    def _kinds(self) -> dict[str, list[Kind]]:
        """The kinds of all calls. Raises ``RefusedError`` for one that cannot be split."""
        kinds: dict[str, list[Kind]] = {}
        if len(self.first_calls) != len(self.calls):
            raise RefusedError(f"{self.name()}: the number of attention calls depends on the number of tokens")
        for (module, first), (_, second) in zip(self.first_calls, self.calls, strict=True):
            name = self.name(module)
            queries, keys = (self._rows_of_call(*pair) for pair in ((first.q, second.q), (first.k, second.k)))
            whole_keys = first.k.shape == second.k.shape
            if queries is None or (keys is None and not whole_keys):
                tokens = self._count(StreamPart.TOKENS)
                counts = f"{first.q.shape[-2]} queries and {first.k.shape[-2]} keys for {tokens} tokens"
                raise RefusedError(f"{name}: attention over {counts} is not attention over the sequence. {NAME_OTHERS}")
            kind = Kind(queries, None if whole_keys else keys)
            if kind.keys not in (None, queries) and kind != (StreamPart.TOKENS, StreamPart.TEXT):
                raise RefusedError(f"{name}: queries are {queries.value}, but keys are {keys and keys.value}")
            problem = call_problem(first, kind)
            if problem is not None:
                raise RefusedError(f"{name}: {problem}")
            kinds.setdefault(name, []).append(kind)
        return kinds

    def _rows_of_call(self, x: Tensor, y: Tensor) -> StreamPart | None:
        return next((part for dim, part in [self._rows(x, y) or (0, None)] if dim == x.dim() - 2), None)


def call_problem(call: TorchCall, kind: Kind) -> str | None:
    """Why a call cannot be computed on ranks, or None."""
    if call.dropout:
        return f"attention dropout {call.dropout} is not supported: set it to 0"
    if call.q.dim() not in (3, 4):
        return f"attention needs queries (batch, heads, tokens, dim), got {tuple(call.q.shape)}"
    if kind.keys is None:
        return None if not call.causal else "causal attention to keys outside the sequence"
    if call.mask is not None and not (kind.keys is kind.queries and call.is_key_mask()):
        hint = f"use is_causal=True, or leave it out if it hides nothing. {NAME_OTHERS}"
        return f"an attn_mask {tuple(call.mask.shape)} cannot be split: {hint}"
    if call.causal and kind != (StreamPart.TOKENS, StreamPart.TOKENS) and kind.queries is not StreamPart.TEXT_FIRST:
        return f"causal attention over {kind.queries.value}"
    heads, kv_heads = (x.shape[1] if x.dim() == 4 else 1 for x in (call.q, call.k))
    if heads != kv_heads and kv_heads != 1 and not call.gqa:
        return f"{heads} query heads and {kv_heads} key heads need enable_gqa=True"
    if call.q.shape[0] != call.k.shape[0] or call.k.shape[0] != call.v.shape[0]:
        return f"queries and keys have different batches, {call.q.shape[0]} and {call.k.shape[0]}"
    return None


def _close(x: Tensor, y: Tensor) -> bool:
    """True if both are equal except for rounding."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if not x.is_floating_point():
        return bool((x == y).all())
    before, after = x.detach().double(), y.detach().double()
    return bool((after - before).norm() <= 32 * torch.finfo(x.dtype).eps * before.norm())


@contextmanager
def _undisturbed(block: nn.Module) -> Iterator[None]:
    """Inside, random numbers are drawn, buffers are changed and tensors are saved without effect. Parameters that are
    zero have other values."""
    buffers = [(x, x.detach().clone()) for x in block.buffers()]
    zeros = [x for x in block.parameters() if not hasattr(x, "device_mesh") and not bool(x.any())]
    devices = {x.device for x in block.parameters() if x.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)), unobserved():
        try:
            for x in zeros:  # gates that begin closed would hide what is behind them
                x.data.normal_(0, 0.1)
            yield
        finally:
            for x in zeros:
                x.data.zero_()
            for buffer, before in buffers:
                buffer.data.copy_(before)
