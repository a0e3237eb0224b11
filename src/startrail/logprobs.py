"""What a policy says of the next tokens of a long sequence: log-probabilities, entropy, and its distance from another
policy, for reinforcement learning and distillation. Logits exist for ``chunk`` tokens at a time only, forward and
backward; with a sequence that is split over ranks, each rank does this for its own tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class NextTokens(NamedTuple):
    """One number a token, 0 where the label is ignored. ``kl`` is KL(policy || reference), exact over the vocabulary,
    or None without a reference."""

    log_probs: Tensor
    entropy: Tensor
    kl: Tensor | None


def next_tokens(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    reference: tuple[Tensor, Tensor] | None = None,
    chunk: int = 1024,
    temperature: float = 1.0,
    ignore_index: int = -100,
) -> NextTokens:
    """Of the logits ``hidden @ weight.T / temperature``: the log-probability of each label, and the entropy, with
    gradients. hidden (..., width), weight (vocab, width), labels (...): those of ``seq.shard_labels``. ``reference`` is
    the (hidden, weight) of another policy, which gets no gradient.

    >>> seen = next_tokens(torch.zeros(1, 2, 4), torch.randn(8, 4), torch.tensor([[3, -100]]))
    >>> [round(x, 4) for x in (*seen.log_probs[0].tolist(), *seen.entropy[0].tolist())]     # ln 8 = 2.0794
    [-2.0794, 0.0, 2.0794, 0.0]
    """
    if chunk < 1:
        raise ValueError(f"chunk {chunk} must be at least 1")
    if temperature <= 0:
        raise ValueError(f"temperature {temperature} must be more than 0")
    shapes = [hidden.shape[:-1], *([reference[0].shape[:-1]] if reference else [])]
    if any(shape != labels.shape for shape in shapes) or hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and labels {tuple(labels.shape)} do not fit: "
            "need (..., width), (vocab, width), (...), and a reference hidden like them"
        )
    flat, targets = hidden.flatten(0, -2), labels.flatten()
    other = None if reference is None else (reference[0].detach().flatten(0, -2), reference[1].detach())
    parts = []
    for start in range(0, len(flat), chunk):
        rows = slice(start, start + chunk)
        theirs = (None, None) if other is None else (other[0][rows], other[1])
        parts.append(
            checkpoint(
                _of_chunk,
                flat[rows],
                weight,
                targets[rows],
                *theirs,
                temperature,
                ignore_index,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        )
    log_probs, entropy, kl = (torch.cat(column).view(labels.shape) for column in zip(*parts, strict=True))
    return NextTokens(log_probs, entropy, None if reference is None else kl)


def _of_chunk(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    other_hidden: Tensor | None,
    other_weight: Tensor | None,
    temperature: float,
    ignore_index: int,
) -> tuple[Tensor, Tensor, Tensor]:
    precise = torch.promote_types(hidden.dtype, torch.float32)
    log_p = ((hidden @ weight.T).to(precise) / temperature).log_softmax(-1)
    counts = labels != ignore_index
    chosen = log_p.gather(1, labels.masked_fill(~counts, 0).unsqueeze(1)).squeeze(1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(-1)
    kl = torch.zeros_like(entropy)
    if other_hidden is not None and other_weight is not None:
        log_q = ((other_hidden @ other_weight.T).to(precise) / temperature).log_softmax(-1)
        kl = (p * (log_p - log_q)).sum(-1)
    zero = torch.zeros((), dtype=precise, device=hidden.device)
    chosen, entropy, kl = (torch.where(counts, x, zero) for x in (chosen, entropy, kl))
    return chosen, entropy, kl
