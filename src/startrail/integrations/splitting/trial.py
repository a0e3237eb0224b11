"""Tries a block of a model on made-up tokens: which arguments have one row per token, which attention calls it makes,
and whether it mixes tokens anywhere else.

The block runs twice, with attention replaced by a function of each token: on some tokens, and on a few of the same
tokens in another order. Every module's result must have the same rows, and gradients must be those of the same rows. No
gradient may flow between tokens, which finds changes too small to see. Positions that a block counts for itself,
convolutions, recurrences, pooling and norms over tokens all fail. So does what ranks cannot do as one process: random
numbers for each token, and results that the block keeps somewhere.

``try_block`` runs a block on 11 tokens and on 6. A block may treat a long sequence in another way, so ``try_length``
runs it on as many tokens as the whole sequence has, and on those of this rank. Neither sends anything.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from startrail._compat import TorchDispatchMode, tree_flatten, tree_leaves, tree_unflatten, unobserved
from startrail.integrations.splitting.calls import AttentionMode, TorchCall, calling_module, inner_forward
from startrail.integrations.splitting.refusals import NAME_OTHERS, RefusedError, mixing
from startrail.integrations.splitting.streams import StreamPart, Streams

FEW = {StreamPart.TOKENS: [4, 1, 9, 3, 7, 0], StreamPart.TEXT: [2, 0, 5]}  # rows of the first run that the second has
PROBED = 4  # the token whose gradients are taken
MAX_TRIALS = 256
# Of the tokens' tensor. Longer sequences are tried without gradients, and the longest on as many tokens as fit.
WITH_GRADIENTS, LARGEST = 2**22, 2**26


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
    sizes = {size for x in leaves if isinstance(x, Tensor) for size in x.shape}
    text = 7
    tokens = next(n for n in itertools.count(11, 2) if not sizes & {n, n + text})  # no other dimension is as large
    counts = {StreamPart.TOKENS: tokens, StreamPart.TEXT: text}
    refused: RefusedError | None = None
    failed: Exception | None = None
    with _undisturbed(block):
        for choice in itertools.islice(_choices(leaves, known), MAX_TRIALS):
            trial = _BlockTrial(block, leaves, spec, choice, counts, FEW)
            try:
                return trial.plan()
            except RefusedError as error:
                if refused is None:
                    refused = error
                    refused.alone = trial.attention_alone() if refused.but_attention else None
            except Exception as error:  # a wrong choice of rows fails anywhere
                failed = failed or (error if trial.has_attended or known is not None else None)
    if refused is not None:
        raise refused
    if failed is not None:
        reason = f"cannot be run on part of the tokens ({type(failed).__name__}: {failed})"
        raise RefusedError(f"{block._startrail_name}: {reason}. {NAME_OTHERS}") from failed
    return None


def try_length(block: nn.Module, args: Any, kwargs: Any, plan: BlockPlan, streams: Streams) -> None:
    """Raises ``RefusedError`` unless ``block`` treats the tokens of ``streams``, and this rank's, as it treated few."""
    leaves, spec = tree_flatten((args, kwargs))
    x = leaves[plan.stream.leaf]
    longest = max(1, LARGEST * x.shape[plan.stream.dim] // max(1, x.numel()))
    counts = {StreamPart.TOKENS: min(streams.tokens, longest), StreamPart.TEXT: streams.text}
    places = {part: streams.places(part) for part in counts}
    if streams.tokens > longest:  # too many for one rank: every so many of those that fit
        spacing = -(-streams.tokens // len(places[StreamPart.TOKENS]))
        places[StreamPart.TOKENS] = list(range(0, longest, spacing))
    for part, own in places.items():
        counts[part] += 0 < len(own) == counts[part]  # this rank has all: only by their number can rows be recognized
    choice = _RowChoice(plan.stream, plan.text, plan.inputs)
    text = f"with {counts[StreamPart.TOKENS]} tokens"
    with _undisturbed(block):
        trial = _BlockTrial(block, leaves, spec, choice, counts, places)
        try:
            found = trial.plan()
        except RefusedError as error:
            name, _, problem = str(error).partition(": ")
            refused = RefusedError(f"{name}: {text}, {problem}")
            refused.alone = trial.attention_alone() if error.but_attention else None
            raise refused from None
        except Exception as error:
            reason = f"cannot be run on part of the tokens ({type(error).__name__}: {error})"
            raise RefusedError(f"{block._startrail_name}: {text}, it {reason}. {NAME_OTHERS}") from error
    if found != plan:
        problem = f"{text}, it attends or returns tokens in another way than with few"
        raise RefusedError(f"{block._startrail_name}: {problem}. {NAME_OTHERS}")


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


class _TrialRun(NamedTuple):
    """One run of a block: its arguments, its results, those of every module in the order in which they finish, its
    attention calls, and the random numbers that it drew."""

    leaves: list[Any]
    outputs: list[Any]
    results: list[tuple[str, Tensor]]
    calls: list[_TrialCall]
    draws: list[tuple[str, object]]


class _BlockTrial:
    """Runs a block on ``counts`` rows of each part, and on those of these rows at ``places``."""

    def __init__(
        self, block: nn.Module, leaves: list[Any], spec: Any, choice: _RowChoice, counts: dict[StreamPart, int],
        places: dict[StreamPart, list[int]],
    ) -> None:  # fmt: skip
        self.block, self.spec, self.choice = block, spec, choice
        text, tokens = counts[StreamPart.TEXT], counts[StreamPart.TOKENS]
        of_text, of_tokens = places[StreamPart.TEXT], places[StreamPart.TOKENS]
        self.counts = {**counts, StreamPart.TEXT_FIRST: text + tokens, StreamPart.TEXT_LAST: text + tokens}
        self.places = {
            **places,
            StreamPart.TEXT_FIRST: of_text + [text + i for i in of_tokens],
            StreamPart.TEXT_LAST: of_tokens + [tokens + i for i in of_text],
        }
        self.has_attended = False
        self.given = self._made_up(leaves)
        size = self.given[choice.stream.leaf].numel()
        sharded = any(hasattr(x, "device_mesh") for x in block.parameters())  # FSDP communicates in the backward pass
        self.with_gradients = not sharded and size <= WITH_GRADIENTS
        self.of_all_modules = size <= WITH_GRADIENTS  # compare their results, not only the block's

    def plan(self) -> BlockPlan | None:
        """What both runs show; None if the block does not attend."""
        with _KeptTensors([self.given[rows.leaf] for rows in self.choice.rows]) as kept:
            plan = self._compared_runs()
        if plan is not None and (name := kept.of_module()):
            raise RefusedError(
                f"{name or self.name()}: keeps a tensor that it makes of its tokens, such as an auxiliary loss or what "
                "a hook noted. On ranks it would be of some tokens only: return it, or do not keep it"
            )
        return plan

    def _compared_runs(self) -> BlockPlan | None:
        with torch.inference_mode(False), torch.set_grad_enabled(self.with_gradients):
            first = self._run(self.given)
            if not first.calls:
                return None
            picked = list(self.given)
            for leaf, dim, part in self.choice.rows:
                picked[leaf] = self._pick(picked[leaf].detach(), dim, part).requires_grad_(picked[leaf].requires_grad)
            second = self._run(picked)
        if first.draws != second.draws:
            different = [one or other for one, other in zip_longest(first.draws, second.draws) if one != other]
            raise RefusedError(
                f"{different[0][0]}: draws random numbers for each token, as dropout does, but a rank has some of the "
                "tokens, and would draw others than one process: set dropout to 0",
                but_attention=True,
            )
        with torch.inference_mode(False), torch.enable_grad():  # the model's first call may be without gradients
            self._compare(first.results, second.results)
            kinds = self._kinds(first.calls, second.calls)
            outputs = self._output_rows(first.outputs, second.outputs)
            self._compare_gradients(first, second, outputs)
        return BlockPlan(self.choice.stream, self.choice.text, self.choice.rows, outputs, kinds)

    def attention_alone(self) -> list[str]:
        """The modules of the block that attend, if each of them can be split without the rest of the block."""
        arguments: dict[nn.Module, tuple[Any, Any]] = {}
        with ExitStack() as hooks:
            for module in self.block.modules():
                if module is not self.block:
                    hook = module.register_forward_pre_hook(
                        lambda *call: arguments.update({call[0]: call[1:]}), with_kwargs=True
                    )
                    hooks.enter_context(hook)
            calls = self._run(self.given).calls
        modules = list(dict.fromkeys(call.module for call in calls))
        try:
            plans = [try_block(module, *arguments[module]) for module in modules if module in arguments]
        except RefusedError:
            return []
        return [self.name(module) for module in modules] if len(plans) == len(modules) and all(plans) else []

    def name(self, module: nn.Module | None = None) -> str:
        return str((module or self.block)._startrail_name)

    # --- running

    def _made_up(self, leaves: list[Any]) -> list[Any]:
        """The arguments with as many rows of each part as ``counts`` says: random tokens, and rows of tables."""
        made = list(leaves)
        torch.manual_seed(0)
        streams = [each.leaf for each in (self.choice.stream, self.choice.text) if each is not None]
        with torch.inference_mode(False):
            for leaf, dim, part in self.choice.rows:
                x, count = leaves[leaf], self.counts[part]
                shape = [count if index == dim else size for index, size in enumerate(x.shape)]
                if leaf in streams or not x.shape[dim]:
                    made[leaf] = torch.randn(shape, device=x.device).to(x.dtype)
                else:
                    made[leaf] = x.detach().index_select(dim, torch.arange(count, device=x.device) % x.shape[dim])
            for leaf in streams:
                made[leaf] = made[leaf].requires_grad_()
        return made

    def _run(self, leaves: list[Any]) -> _TrialRun:
        results: list[tuple[str, Tensor]] = []
        calls: list[_TrialCall] = []

        def record(module: nn.Module, arguments: object, output: Any) -> None:
            results.extend((self.name(module), x) for x in tree_leaves(output) if isinstance(x, Tensor))

        def attend(call: TorchCall) -> Tensor:
            self.has_attended = True
            calls.append(_TrialCall(calling_module(self.block), call))
            return _per_token(call)

        args, kwargs = tree_unflatten(leaves, self.spec)
        torch.manual_seed(0)  # rows of the batch may be dropped at random
        with ExitStack() as hooks, _Draws(self.block) as draws:
            for module in self.block.modules() if self.of_all_modules else ():
                if module is not self.block:
                    hooks.enter_context(module.register_forward_hook(record))
            with AttentionMode(attend):
                output = inner_forward(self.block)(*args, **kwargs)
        after, spec = tree_flatten((args, kwargs))
        if spec != self.spec or any(x is not y for x, y in zip(after, leaves, strict=True)):
            raise RefusedError(f"{self.name()}: puts something into one of its arguments: return it instead")
        outputs = tree_leaves(output)
        results.extend((self.name(), x) for x in outputs if isinstance(x, Tensor))
        return _TrialRun(leaves, outputs, results, calls, draws.drawn)

    # --- comparing

    def _pick(self, x: Tensor, dim: int, part: StreamPart) -> Tensor:
        """The rows of the second run."""
        return x.index_select(dim, torch.tensor(self.places[part], dtype=torch.long, device=x.device))

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
        return [(different[0], part) for part in StreamPart if sizes == (self.counts[part], len(self.places[part]))]

    def _output_rows(self, first: list[Any], second: list[Any]) -> tuple[Rows, ...]:
        outputs = []
        for index, (x, y) in enumerate(zip(first, second, strict=True)):
            if isinstance(x, Tensor) and isinstance(y, Tensor):
                rows = self._rows(x, y)
                if rows is None:
                    text = f"{self.name()}: its result {tuple(x.shape)} does not have one row per token"
                    raise RefusedError(text, but_attention=True)
                outputs.append(Rows(index, *rows))
        if not any(rows.part is not StreamPart.TEXT for rows in outputs):
            raise RefusedError(f"{self.name()}: no result has one row per token", but_attention=True)
        return tuple(outputs)

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
        x, probed = self.given[leaf], self._probed(part)
        weights = [torch.linspace(0.5, 1.5, p.numel(), device=p.device).to(p.dtype).view_as(p) for p in probes]
        (grad,) = torch.autograd.grad(probes, x, weights, retain_graph=True, allow_unused=True)
        others = torch.tensor([i for i in range(x.shape[dim]) if i != probed], dtype=torch.long, device=x.device)
        return grad is not None and bool(grad.index_select(dim, others).any())

    def _probed(self, part: StreamPart) -> int:
        return PROBED % self.counts[StreamPart.TOKENS] + (
            self.counts[StreamPart.TEXT] if part is StreamPart.TEXT_FIRST else 0
        )

    def _compare_gradients(self, first: _TrialRun, second: _TrialRun, outputs: tuple[Rows, ...]) -> None:
        """The same rows of results must give the same rows of gradients: a hook may change them by all tokens'."""
        pairs = [(rows, first.outputs[rows.leaf], second.outputs[rows.leaf]) for rows in outputs]
        pairs = [pair for pair in pairs if pair[1].requires_grad and pair[2].requires_grad]
        if not pairs:
            return
        weights = [torch.randn(x.shape, device=x.device).to(x.dtype) for _, x, _ in pairs]
        picked = [self._pick(w, rows.dim, rows.part) for w, (rows, _, _) in zip(weights, pairs, strict=True)]
        streams = [each for each in (self.choice.stream, self.choice.text) if each is not None]
        given = [[run.leaves[each.leaf] for each in streams] for run in (first, second)]
        whole = torch.autograd.grad([x for _, x, _ in pairs], given[0], weights, allow_unused=True)
        part = torch.autograd.grad([y for _, _, y in pairs], given[1], picked, allow_unused=True)
        for rows, x, y in zip(streams, whole, part, strict=True):
            same = x is y is None or (x is not None and y is not None and _close(self._pick(x, *rows[1:]), y))
            if not same:
                raise mixing(self.name())

    def _kinds(self, first: list[_TrialCall], second: list[_TrialCall]) -> dict[str, list[Kind]]:
        """The kinds of all calls. Raises ``RefusedError`` for one that cannot be split."""
        kinds: dict[str, list[Kind]] = {}
        if [call.module for call in first] != [call.module for call in second]:
            raise RefusedError(f"{self.name()}: its attention calls depend on the number of tokens. {NAME_OTHERS}")
        for (module, one), (_, other) in zip(first, second, strict=True):
            name = self.name(module)
            queries, keys = (self._rows_of_call(*pair) for pair in ((one.q, other.q), (one.k, other.k)))
            whole_keys = one.k.shape == other.k.shape
            if queries is None or (keys is None and not whole_keys):
                tokens = self.counts[StreamPart.TOKENS]
                counts = f"{one.q.shape[-2]} queries and {one.k.shape[-2]} keys for {tokens} tokens"
                raise RefusedError(f"{name}: attention over {counts} is not attention over the sequence. {NAME_OTHERS}")
            kind = Kind(queries, None if whole_keys else keys)
            if kind.keys not in (None, queries) and kind != (StreamPart.TOKENS, StreamPart.TEXT):
                raise RefusedError(f"{name}: queries are {queries.value}, but keys are {keys and keys.value}")
            if problem := call_problem(one, kind):
                raise RefusedError(f"{name}: {problem}")
            if one.options != other.options:
                raise RefusedError(
                    f"{name}: attention's scale, is_causal or attn_mask depends on the number of tokens. {NAME_OTHERS}"
                )
            kinds.setdefault(name, []).append(kind)
        return kinds

    def _rows_of_call(self, x: Tensor, y: Tensor) -> StreamPart | None:
        return next((part for dim, part in [self._rows(x, y) or (0, None)] if dim == x.dim() - 2), None)


def _per_token(call: TorchCall) -> Tensor:
    """In place of attention: a function of each query's own token."""
    if call.q.shape[-2] != call.k.shape[-2]:
        return call._replace(dropout=0.0).run()
    repeats = call.q.shape[1] // call.k.shape[1] if call.k.dim() == 4 else 1
    k, v = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (call.k, call.v))
    return v + 0.5 * call.q.mean(-1, keepdim=True) + 0.25 * k.mean(-1, keepdim=True)


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


class _Draws(TorchDispatchMode):
    """Records which module draws random numbers, and the shape of what it draws."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self._block, self.drawn = block, list[tuple[str, object]]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        seeded = torch.Tag.nondeterministic_seeded in function.tags
        if seeded and "attention" not in str(function):  # whose dropout is an option of the call
            shapes = [tuple(x.shape) for x in tree_leaves(result) if isinstance(x, Tensor)]
            self.drawn.append((str(calling_module(self._block)._startrail_name), shapes))
        return result


class _KeptTensors(TorchFunctionMode):
    """Finds tensors that are computed from ``given`` inside, and still exist after everything else has gone."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self._of_tokens = WeakIdKeyDictionary(dict.fromkeys(given, ""))
        self._given = [ref(x) for x in given]

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        result = function(*args, **options)
        if any(isinstance(x, Tensor) and x in self._of_tokens for x in tree_leaves((args, options))):
            module = str(getattr(calling_module(nn.Module()), "_startrail_name", ""))
            for x in tree_leaves(result):
                if isinstance(x, Tensor) and x not in self._of_tokens:
                    self._of_tokens[x] = module
        return result

    def of_module(self) -> str | None:
        """The module that made such a tensor, or None if there is none."""
        given = {id(x()) for x in self._given}
        for _ in range(2):
            kept = [module for x, module in self._of_tokens.items() if id(x) not in given]
            if not kept:
                return None
            gc.collect()  # of cycles, which hooks make
        return kept[-1]


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
