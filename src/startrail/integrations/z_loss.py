"""The z loss of a language model, over the tokens of all ranks.

Bamba adds ``weight * mean(logsumexp(logits) ** 2)`` to its loss, which keeps logits small. A mean of the ranks' means
is not the mean over all tokens. So ranks add up one number, how many tokens they have, and each takes its own tokens'
part of the mean: the *sum* over ranks is the loss of one process. Padding is not counted (transformers counts it).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import PreTrainedModel

from startrail.integrations.routers import sum_over
from startrail.parallel import SequenceParallel

NAME = "z_loss_coefficient"  # of the model, copied from its config


class ZLoss:
    """``counted`` is 1 for those of this rank's tokens that the mean is over."""

    def __init__(self, sp: SequenceParallel, weight: float, counted: Tensor) -> None:
        tokens = counted.sum(dtype=torch.float64).view(1)
        sum_over(sp, tokens, "the z loss")
        self.counted, self.factor = counted, weight / tokens[0].clamp(min=1)

    def add(self, output: Any, counted: Tensor) -> Any:
        """``output`` of the model for some of this rank's tokens, with their part of the loss."""
        z = output.logits.logsumexp(-1).to(output.loss.dtype).square()
        return type(output)(**{**output, "loss": output.loss + self.factor.to(z.dtype) * (z * counted).sum()})


def of_call(model: PreTrainedModel, attached: Any) -> ZLoss | None:
    """The z loss that a call of an attached model with labels adds, if it adds one."""
    weight = getattr(model, NAME, 0.0)
    if not weight or attached.context is None:
        return None
    if torch.compiler.is_compiling():
        raise ValueError("compile the layers of a model with a z loss, not the whole")
    return ZLoss(attached.sp, weight, attached.context.counted())


def without(model: PreTrainedModel, forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` of the model without its own z loss. It returns no tuple, whatever it is asked for."""

    def call(**options: Any) -> Any:
        with silenced(model):
            return forward(**{**options, "return_dict": True})

    return call


def silenced(model: PreTrainedModel) -> AbstractContextManager[object]:
    """Inside, the model adds no z loss."""
    return patch.object(model, NAME, 0.0) if hasattr(model, NAME) else nullcontext()


def in_one_process(model: PreTrainedModel, logits: Tensor) -> Tensor:
    """What the model adds to its loss, a mean over all ``logits``."""
    return getattr(model, NAME, 0.0) * logits.float().logsumexp(-1).square().mean()
