"""Recurrences around kernels of other libraries, which take states and return them: fla's and mamba-ssm's.

What a run does to a state, S' = M S + B, is found without looking inside. The delta rules are linear in values and
states together, so one call with the values [v | 0] and the state [0 | I] returns the state [B | M]. A second call
computes the outputs, with the states that have arrived.

Never run on hardware: tested with stand-ins that have the kernels' arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from startrail.kernels.accumulate import accumulator
from startrail.kernels.runs import Recurrence, check_states, lengths_of, name_of

FLA = {"chunk_gated_delta_rule": "fla.ops.gated_delta_rule", "chunk_kda": "fla.ops.kda"}


def suit_kernels(*tensors: Tensor) -> bool:
    """True if kernels of other libraries compute with such tensors: those of fla reject float32 and mixed dtypes."""
    (dtype, *others) = {x.dtype for x in tensors}
    return all(x.is_cuda for x in tensors) and dtype in (torch.float16, torch.bfloat16) and not others


@cache
def fla_kernel(name: str) -> Callable[..., Any] | None:
    """A function of fla, or None if it is not installed."""
    try:
        function: Callable[..., Any] = getattr(import_module(FLA[name]), name)
    except ImportError:
        return None
    return function


def around_mamba2(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, *,
    function: Callable[..., Any], chunk_size: int, lengths: Sequence[int] | None = None,
) -> AroundMamba2:  # fmt: skip
    """Mamba-2 by ``function``, mamba-ssm's ``mamba_chunk_scan_combined``. dt is after its bias and softplus."""
    return AroundMamba2(function, (x, dt, a, b, c), chunk_size, lengths_of(lengths, x))


class AroundDeltaRule(Recurrence):
    """`gated_delta_rule` or `kimi_delta_rule` by fla's ``chunk_gated_delta_rule`` or ``chunk_kda``. These take runs of
    one batch, so the batch's runs lie one after the other. ``options`` are theirs."""

    matrix = True

    def __init__(
        self, kernel: Callable[..., Any], tensors: Sequence[Tensor], options: dict[str, Any], lengths: Sequence[int]
    ) -> None:
        _, k, v, *_ = tensors
        self._kernel, self._options = kernel, options
        self._q, self._k, self._v, self._g, self._beta = (x.flatten(0, 1).unsqueeze(0) for x in tensors)
        ends = list(accumulate(len(v) * list(lengths), initial=0))
        self._ends = torch.tensor(ends, dtype=torch.int64, device=v.device)
        self.shape = len(v), len(lengths), v.shape[2], k.shape[3], v.shape[3]
        self.dtype = accumulator(v.dtype)

    def run(self, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        state = self._v.new_zeros(self.shape, dtype=self.dtype) if state is None else state
        check_states(state, self.shape)
        out, after = self._call(self._v, state)
        return out.unflatten(1, (self.shape[0], -1)).squeeze(0), after

    @property
    def transition(self) -> Tensor:
        return self._found[..., self.shape[4] :]

    @property
    def contribution(self) -> Tensor:
        return self._found[..., : self.shape[4]]

    def outputs(self, state: Tensor) -> Tensor:
        return self.run(state)[0]

    @cached_property
    def _found(self) -> Tensor:
        keys, values = self.shape[3:]
        one = torch.eye(keys, dtype=self.dtype, device=self._v.device)
        return self._call(F.pad(self._v, (0, keys)), F.pad(one, (values, 0)).expand(*self.shape[:4], -1))[1]

    def _call(self, values: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        found = self._kernel(
            self._q, self._k, values, g=self._g, beta=self._beta, initial_state=state.flatten(0, 1).contiguous(),
            output_final_state=True, cu_seqlens=self._ends, **self._options,
        )  # fmt: skip
        if not isinstance(found, tuple) or getattr(found[1], "shape", None) != (len(self._ends) - 1, *state.shape[2:]):
            raise ValueError(f"{name_of(self._kernel)} does not return (outputs, states after each run), as fla's do")
        return found[0], found[1].unflatten(0, self.shape[:2])


class AroundMamba2(Recurrence):
    """The kernel takes one run at a time: states of several can not be given to it."""

    matrix, moves = False, (1, 1)

    def __init__(
        self, kernel: Callable[..., Any], tensors: Sequence[Tensor], chunk_size: int, lengths: Sequence[int]
    ) -> None:
        x, dt, self._a, b, c = tensors
        self._kernel, self._chunk_size = kernel, chunk_size
        self._runs = list(zip(*(y.split(list(lengths), 1) for y in (x, dt, b, c)), strict=True))
        self.shape = len(x), len(lengths), x.shape[2], b.shape[3], x.shape[3]
        self.dtype = accumulator(x.dtype)

    def run(self, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        state = self._a.new_zeros(self.shape, dtype=self.dtype) if state is None else state
        check_states(state, self.shape)
        found = [self._call(run, before) for run, before in zip(self._runs, state.unbind(1), strict=True)]
        outs, after = zip(*found, strict=True)
        return torch.cat(outs, 1), torch.stack(after, 1)

    @property
    def transition(self) -> Tensor:
        decays = [(dt * self._a).sum(1).exp() for _, dt, _, _ in self._runs]
        return torch.stack(decays, 1).to(self.dtype)[..., None, None]

    @cached_property
    def contribution(self) -> Tensor:
        return self.run()[1]

    def outputs(self, state: Tensor) -> Tensor:
        return self.run(state)[0]

    def _call(self, run: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        x, dt, b, c = run
        options = dict(initial_states=state.mT.contiguous(), return_final_states=True)
        out, after = self._kernel(x, dt, self._a, b, c, self._chunk_size, **options)
        return out, after.mT
