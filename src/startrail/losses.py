"""Losses over a sequence that is sharded over ranks: sums, divided once by the token count of all ranks.

The usual mistake is to average on each rank and then over ranks. Say one rank has 3 tokens with losses 1, 2, 3 and the
other, mostly padding, has 1 token with loss 6. The mean loss is 12 / 4 = 3, but the mean of means is (2 + 6) / 2 = 4,
which gives the last token's gradient three times the weight of the others. A rank without tokens gives 0 / 0. The right
way, with or without our trainer::

    loss_sum, count = chunked_cross_entropy(hidden, weight, labels, chunk=1024)
    loss = global_mean(loss_sum, count, group)          # 3.0 on both ranks
    loss.backward()
    sum_gradients(model.parameters(), group)            # now the gradients of one process with all 4 tokens

``group`` contains all ranks whose gradients are summed: the sequence axis, times the data axis if there is one.

FSDP and DDP reduce gradients themselves and divide the sum by their number of ranks W. With them, leave out
``sum_gradients`` and call ``(gradient_factor(model) * loss).backward()``, which multiplies by W. (FSDP2's
``set_gradient_divide_factor(1.0)`` works as well, but only for the module it is called on, not for submodules that are
sharded separately.)
"""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.weak import WeakTensorKeyDictionary

from startrail._compat import fsdp_meshes
from startrail.agreement.digest import digest
from startrail.agreement.errors import peer_errors
from startrail.agreement.gather import gather_tensors
from startrail.step_checks import (
    CHECKED_STEPS,
    check_gradients,
    check_same_parameters,
    is_sharded,
    unchecked_parameters,
)
from startrail.transport.torch_collectives import agree

BUCKET_BYTES = 32 * 2**20
MEAN = 1  # torch's number for reduction="mean"


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of ``hidden @ weight.T``, summed over the tokens, and the number of tokens with a label.

    Only the logits of ``chunk`` tokens exist at a time: the forward pass computes their gradients too, and the backward
    pass only scales them. hidden (..., width), weight (vocab, width), labels (...).

    >>> hidden, weight = torch.zeros(3, 2, requires_grad=True), torch.eye(2)
    >>> loss_sum, count = chunked_cross_entropy(hidden, weight, torch.tensor([0, 1, -100]), chunk=2)
    >>> round(loss_sum.item(), 4), count.item()      # two even choices: ln 2 = 0.6931 each
    (1.3863, 2)
    >>> loss_sum.backward()
    >>> hidden.grad.tolist()                         # probabilities (0.5, 0.5) minus the label; zero if ignored
    [[-0.5, 0.5], [0.5, -0.5], [0.0, 0.0]]
    """
    if has_torch_function((hidden, weight, labels)):  # so that a TorchFunctionMode sees it as one function
        options = dict(chunk=chunk, ignore_index=ignore_index)
        return handle_torch_function(chunked_cross_entropy, (hidden, weight, labels), hidden, weight, labels, **options)
    if chunk < 1:
        raise ValueError(f"chunk {chunk} must be at least 1")
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and labels {tuple(labels.shape)} do not fit: "
            "need (..., width), (vocab, width), (...)"
        )
    loss_sum = _ChunkedCrossEntropy.apply(hidden.flatten(0, -2), weight, labels.flatten(), chunk, ignore_index)
    return loss_sum, (labels != ignore_index).sum()


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, ignore_index: int) -> Tensor:
        precise = torch.promote_types(hidden.dtype, torch.float32)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        loss_sum = hidden.new_zeros((), dtype=precise)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=precise) if need_weight else None
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            ignored = (labels[rows] == ignore_index).unsqueeze(1)
            target = labels[rows].unsqueeze(1).masked_fill(ignored, 0)
            logits = (hidden[rows] @ weight.T).to(precise)
            log_total = logits.logsumexp(1, keepdim=True)
            loss_sum += (log_total - logits.gather(1, target)).masked_fill(ignored, 0).sum()
            if grad_hidden is None and grad_weight is None:
                continue
            # in place: from here on, logits hold their gradient, the probabilities minus 1 at the label
            logits.sub_(log_total).exp_().scatter_add_(1, target, logits.new_full((), -1).expand(target.shape))
            gradient = logits.masked_fill_(ignored, 0).to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = gradient @ weight
            if grad_weight is not None:
                grad_weight += gradient.T @ hidden[rows]
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        return loss_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        grads = (None if grad is None else grad * upstream.to(grad.dtype) for grad in ctx.saved_tensors)
        return (*grads, None, None, None)


class NextTokens(NamedTuple):
    """One number per token, 0 where the label is ignored. ``kl`` is KL(policy || reference), exact over the vocabulary;
    None without a reference."""

    log_probs: Tensor
    entropy: Tensor
    kl: Tensor | None


def next_tokens(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, reference: tuple[Tensor, Tensor] | None = None,
    chunk: int = 1024, temperature: float = 1.0, ignore_index: int = -100,
) -> NextTokens:  # fmt: skip
    """The log-probability of each label and the entropy, under the logits ``hidden @ weight.T / temperature``, with
    gradients. hidden (..., width), weight (vocab, width), labels (...) as from ``seq.shard_labels``. ``reference`` is
    the (hidden, weight) of another policy, which gets no gradient.

    >>> result = next_tokens(torch.zeros(1, 2, 4), torch.randn(8, 4), torch.tensor([[3, -100]]))
    >>> [round(x, 4) for x in (*result.log_probs[0].tolist(), *result.entropy[0].tolist())]     # ln 8 = 2.0794
    [-2.0794, 0.0, 2.0794, 0.0]
    """
    if chunk < 1:
        raise ValueError(f"chunk {chunk} must be at least 1")
    if temperature <= 0:
        raise ValueError(f"temperature {temperature} must be greater than 0")
    shapes = [hidden.shape[:-1], *([reference[0].shape[:-1]] if reference else [])]
    if any(shape != labels.shape for shape in shapes) or hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and labels {tuple(labels.shape)} do not fit: "
            "need (..., width), (vocab, width), (...), and a reference hidden like them"
        )
    other = (None, None) if reference is None else (reference[0].detach().flatten(0, -2), reference[1].detach())
    results = _NextTokens.apply(
        hidden.flatten(0, -2), weight, labels.flatten(), *other, chunk, temperature, ignore_index
    )
    log_probs, entropy, kl = results
    shape = labels.shape
    return NextTokens(log_probs.view(shape), entropy.view(shape), None if kl is None else kl.view(shape))


class _NextTokens(torch.autograd.Function):
    """Both passes compute the logits of one chunk of tokens at a time, so only one chunk's exist, whichever results a
    loss uses. (``torch.utils.checkpoint`` keeps recomputed tensors alive until all of them are used.)"""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, other_hidden: Tensor | None,
        other_weight: Tensor | None, chunk: int, temperature: float, ignore_index: int,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        kind = hidden.device.type
        ctx.set_materialize_grads(False)
        ctx.settings = chunk, temperature, ignore_index
        ctx.autocast = dict(dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind))
        ctx.save_for_backward(hidden, weight, labels, other_hidden, other_weight)
        precise = torch.promote_types(hidden.dtype, torch.float32)
        log_probs, entropy, kl = (torch.zeros(len(labels), dtype=precise, device=hidden.device) for _ in range(3))
        for rows in _chunks(labels, chunk):
            log_p, counted, target = _log_probs(hidden, weight, labels, rows, ctx.settings)
            p = log_p.exp()
            log_probs[rows] = log_p.gather(1, target).squeeze(1).masked_fill(~counted, 0)
            entropy[rows] = (p * log_p).sum(1).neg().masked_fill(~counted, 0)
            if other_hidden is not None and other_weight is not None:
                log_q = _log_probs(other_hidden, other_weight, labels, rows, ctx.settings)[0]
                kl[rows] = (p * (log_p - log_q)).sum(1).masked_fill(~counted, 0)
        return log_probs, entropy, None if other_hidden is None else kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        """With p the probabilities, the gradients to logits are: of a log-probability, 1 at the label minus p; of the
        entropy H, -p (log p + H); of KL, p (log p - log q - KL)."""
        hidden, weight, labels, other_hidden, other_weight = ctx.saved_tensors
        chunk, temperature, _ = ctx.settings
        precise = torch.promote_types(hidden.dtype, torch.float32)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=precise) if need_weight else None
        with torch.autocast(hidden.device.type, **ctx.autocast):
            for rows in _chunks(labels, chunk):
                log_p, counted, target = _log_probs(hidden, weight, labels, rows, ctx.settings)
                to_log_probs, to_entropy, to_kl = (None if x is None else x[rows].unsqueeze(1) for x in upstream)
                p = log_p.exp()
                slope = torch.zeros_like(p)  # the gradient to logits is p (slope - its mean), and more at the label
                if to_entropy is not None:
                    slope -= to_entropy * log_p
                if to_kl is not None:
                    log_q = _log_probs(other_hidden, other_weight, labels, rows, ctx.settings)[0]
                    slope += to_kl * (log_p - log_q)
                gradient = p * (slope - (p * slope).sum(1, keepdim=True))
                if to_log_probs is not None:
                    gradient -= to_log_probs * p
                    gradient.scatter_add_(1, target, to_log_probs.to(gradient.dtype))
                gradient = gradient.masked_fill_(~counted.unsqueeze(1), 0).div_(temperature).to(hidden.dtype)
                if grad_hidden is not None:
                    grad_hidden[rows] = (gradient @ weight).to(hidden.dtype)
                if grad_weight is not None:
                    grad_weight += gradient.T @ hidden[rows]
        return (grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *(None,) * 6)


def _chunks(rows: Tensor, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, len(rows), chunk)]


def _log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, rows: slice, settings: tuple[int, float, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probabilities of all tokens of the vocabulary; whether each row counts; and its label (rows, 1)."""
    _, temperature, ignore_index = settings
    precise = torch.promote_types(hidden.dtype, torch.float32)
    counted = labels[rows] != ignore_index
    log_p = ((hidden[rows] @ weight.T).to(precise) / temperature).log_softmax(1)
    return log_p, counted, labels[rows].masked_fill(~counted, 0).unsqueeze(1)


def global_mean(loss_sum: Tensor, count: Tensor | int, group: dist.ProcessGroup | None = None) -> Tensor:
    """The mean loss over the tokens of all ranks of ``group``, to call ``backward`` on.

    Its value is the same on every rank. Its gradient is this rank's share: *sum* the gradients over the group
    (``sum_gradients``) to get those of one process. Ranks without tokens contribute zero; if no rank has any, the
    loss is 0. ``group=None`` is the whole world, or this process alone if there is no process group.

    In the first steps, raises ``ValueError`` if ``loss_sum`` is a mean, if the optimizer gets gradients that were
    averaged or not summed, or if ranks have different weights.

    >>> w = torch.tensor(2.0, requires_grad=True)
    >>> losses = w * torch.tensor([1.0, 2.0, 3.0])
    >>> loss = global_mean(losses.sum(), 3)
    >>> loss.backward()
    >>> loss.item(), w.grad.item()
    (4.0, 2.0)
    """
    single = not (dist.is_available() and dist.is_initialized())
    wrong_count = [] if isinstance(count, Real) or _shape(count) == () else [f"a count {_shape(count)}"]
    if not single and not torch.compiler.is_compiling():
        dtype, device = (loss_sum.dtype, loss_sum.device) if isinstance(loss_sum, Tensor) else ("", torch.device("cpu"))
        agree("global_mean", [f"a loss {_shape(loss_sum)} {dtype}", *wrong_count], group, device)
    if _shape(loss_sum) != ():
        raise ValueError(f"loss_sum must be one number, the sum over this rank's tokens: got {_shape(loss_sum)}")
    if wrong_count:
        raise ValueError(f"count must be one number, of this rank's tokens with a label: got {_shape(count)}")
    new = [] if single else unchecked_parameters(loss_sum)
    numbers = (loss_sum, count, bool(new), _is_mean(loss_sum))
    totals = torch.stack([torch.as_tensor(x, device=loss_sum.device).detach().double() for x in numbers])
    if not single:
        with peer_errors("global_mean", group):
            dist.all_reduce(totals, group=group)
    everywhere, counted = totals[0], totals[1].clamp(min=1)
    share = loss_sum / counted  # in float64: a count may be too large for float16
    share = share.to(loss_sum.dtype) if loss_sum.is_floating_point() else share
    mean = share + ((everywhere / counted).to(share.dtype) - share).detach()
    if new and totals[3] > 0 and totals[1] > dist.get_world_size(group):
        raise ValueError(
            "loss_sum is a mean over this rank's tokens, which global_mean divides by their number once more: pass "
            "their sum, such as F.cross_entropy(logits, labels, reduction='sum')"
        )
    if not single and mean.requires_grad:
        check_gradients(mean, new, bool(new) and int(totals[2]) == dist.get_world_size(group), group, group)
    return mean


def _shape(number: object) -> tuple[int, ...] | str:
    return tuple(number.shape) if isinstance(number, Tensor) else type(number).__name__


def _is_mean(loss: Tensor) -> bool:
    """True if a mean over several numbers was the last operation."""
    node: Any = loss.grad_fn
    if type(node).__name__ in ("MeanBackward0", "MeanBackward1"):
        return int(node._saved_self_sym_numel) > 1
    return getattr(node, "_saved_reduction", None) == MEAN


def gradient_factor(model: torch.nn.Module) -> int:
    """Multiply the loss by this before ``backward`` to make DDP or FSDP sum gradients over ranks: the number of ranks
    that they average over, or the factor that ``set_gradient_divide_factor`` has set. 1 for a model that is wrapped in
    neither: call ``sum_gradients`` instead.

    >>> gradient_factor(torch.nn.Linear(2, 2))
    1
    """
    for module in model.modules():
        if type(module).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
            return int(dist.get_world_size(module.process_group))  # type: ignore[arg-type]
    return max((int(mesh.divisor) for mesh in fsdp_meshes(model)), default=1)


def sum_gradients(
    parameters: Iterable[torch.nn.Parameter], group: dist.ProcessGroup | None = None, check: bool = True
) -> None:
    """Replace every gradient with its sum over the ranks of ``group``, in buckets of about 32 MiB.

    A parameter without a gradient contributes zero, since another rank may have one. Parameters that tensor parallelism
    shards over other ranks than those of ``group`` are summed shard by shard. Raises ``ValueError`` on all ranks
    if they have different numbers or shapes of parameters. ``check``: the first two times, make sure that all ranks
    have the same parameters, and that the gradients have not been reduced already.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    parameters = list({id(x): x for x in parameters}.values())  # a tied one may come twice
    odd = [type(x).__name__ for x in parameters if not isinstance(x, Tensor)]
    described = [f"a {name}, not a parameter" for name in odd[:1]]
    described = described or [f"{tuple(x.shape)} {x.dtype}{'' if x.requires_grad else ' frozen'}" for x in parameters]
    checks = check and bool(parameters) and not odd and _num_checks.setdefault(parameters[0], 0) < CHECKED_STEPS
    if checks:
        described[0] += ", checked"  # by other collectives, which all ranks must run
    device = parameters[0].device if parameters and not odd else torch.device("cpu")
    agree("sum_gradients", described, group, device)
    if odd:
        raise ValueError(f"sum_gradients takes parameters, such as model.parameters(), got a {odd[0]}")
    with peer_errors("sum_gradients", group):
        if checks:
            _num_checks[parameters[0]] += 1
            _check_gradients(parameters, group)
        _sum_gradients(parameters, group)


def _sum_gradients(parameters: list[torch.nn.Parameter], group: dist.ProcessGroup | None) -> None:
    buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_sparse:  # of an embedding, with other rows on other ranks
            parameter.grad = parameter.grad.to_dense()
        bucket = buckets.setdefault((parameter.dtype, parameter.device), [])
        bucket.append(_local(parameter.grad))
        if sum(grad.nbytes for grad in bucket) >= BUCKET_BYTES:
            _sum_bucket(bucket, group)
            bucket.clear()
    for bucket in buckets.values():
        if bucket:
            _sum_bucket(bucket, group)


# How many times a model's gradients have been checked, keyed by its first parameter.
_num_checks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _check_gradients(parameters: list[torch.nn.Parameter], group: dist.ProcessGroup | None) -> None:
    ranks = set(dist.get_process_group_ranks(group or dist.group.WORLD))
    sharded: list[Any] = [x for x in parameters if is_sharded(x)]
    if any(len(ranks & set(x.device_mesh.mesh.flatten().tolist())) > 1 for x in sharded):
        raise ValueError(
            "these parameters are sharded by FSDP, which reduces their gradients itself: leave out sum_gradients, and "
            "call (startrail.gradient_factor(model) * loss).backward()"
        )
    check_same_parameters(((f"{i} {tuple(x.shape)}", x) for i, x in enumerate(parameters)), group)
    grads = [_local(x.grad) for x in parameters if x.grad is not None]
    own = torch.stack([digest(grad) for grad in grads]).sum() if grads else torch.zeros((), dtype=torch.long)
    size = torch.stack([grad.abs().max().double() for grad in grads]).max() if grads else torch.zeros(())
    all_ranks = gather_tensors(torch.stack([own, (size > 0).long()]), group, "sum_gradients")
    if len(all_ranks) > 1 and all(bool(x[1]) and x[0] == all_ranks[0][0] for x in all_ranks):
        raise ValueError(
            "gradients are the same on all ranks before they are summed: DDP has averaged them already, or every rank "
            "has the same tokens. With DDP leave out sum_gradients, and call (startrail.gradient_factor(model) * loss)"
            ".backward()"
        )


def _local(gradient: Any) -> Tensor:
    """This rank's part of a gradient, if tensor parallelism shards it: the same memory."""
    local: Tensor = gradient.to_local() if is_sharded(gradient) else gradient
    return local


def _sum_bucket(grads: list[Tensor], group: dist.ProcessGroup | None) -> None:
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    dist.all_reduce(flat, group=group)
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))
