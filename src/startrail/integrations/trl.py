"""TRL's GRPO, RLOO, DPO and reward modelling on sequences that are sharded over ranks::

    class LongGRPOTrainer(StarTrailPolicyMixin, GRPOTrainer):
        pass

    trainer = LongGRPOTrainer(model, rewards, args=arguments, train_dataset=data, sp=sp)

TRL treats the ranks as data parallel: each generates completions for prompts of its own and scores them. To train, the
ranks of a sequence take turns: all of them compute the log-probabilities of one rank's rows, each for its own tokens,
get them whole, and compute TRL's loss from them; then those of the next rank's rows. So a step is that of plain TRL on
as many ranks, but a rank stores activations of its share of ``per_device_train_batch_size`` rows only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel, TrainingArguments

from startrail.agreement.errors import peer_errors
from startrail.agreement.gather import gather_values
from startrail.integrations.batch import shard_batch
from startrail.integrations.trainer import CheckBeforeStep, check_other_parallelism
from startrail.integrations.transformers import attach, detached
from startrail.integrations.without_logits import FUSED
from startrail.parallel import SequenceParallel

TRAINERS = ("DPOTrainer", "GRPOTrainer", "RewardTrainer", "RLOOTrainer")  # others may take means over ranks (KTO's KL)
REFUSED = {  # arguments of TRL's trainers: a value that is fine, and what is wrong with others
    "precompute_ref_log_probs": (False, "runs before the model is split"),
    "use_adaptive_entropy": (False, "would adapt once for each rank's rows, not once per step: set entropy_coef"),
    "top_entropy_quantile": (1.0, "would take the quantile of each rank's rows by itself"),
}


class StarTrailPolicyMixin:
    """Mixin for TRL's ``GRPOTrainer``, ``RLOOTrainer``, ``DPOTrainer`` and ``RewardTrainer``. It attaches the model and
    its reference."""

    sp: SequenceParallel

    def __init__(self, *arguments: Any, sp: SequenceParallel, **options: Any) -> None:
        if not any(kind.__name__ in TRAINERS for kind in type(self).__mro__):
            bases = ", ".join(kind.__name__ for kind in type(self).__bases__ if kind is not StarTrailPolicyMixin)
            raise ValueError(f"StarTrailPolicyMixin is for {', '.join(TRAINERS)}, not for {bases}")
        for given in (*arguments, *options.values()):
            if isinstance(given, TrainingArguments):
                _check_arguments(given)
        self.sp = sp
        self._sharing = False  # True while all ranks of the sequence have the same rows
        super().__init__(*arguments, **options)
        trainer: Any = self
        if trainer.compute_metrics is not None:
            raise ValueError("compute_metrics needs all logits, but a rank has only those of its tokens")
        trainer.args.prediction_loss_only = True
        for model in (trainer.model, getattr(trainer, "ref_model", None)):
            if model is not None:
                _WholeCalls(sp).install(trainer.accelerator.unwrap_model(model))
        if hasattr(self, "_tp_size"):  # by which TRL divides the tokens that all ranks count
            self._tp_size *= sp.world
        trainer.add_callback(CheckBeforeStep(sp))

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: object = None) -> Tensor:
        """A training step on the rows of all ranks of the sequence, one rank's after the other's."""
        model.train()
        batches = self._of_all_ranks(self._prepare_inputs(inputs))
        step = self.__dict__.get("_step")  # GRPO and RLOO count calls, and generate after some
        losses = []
        for number, batch in enumerate(batches, 1):
            if step is not None:
                self._step = step
            waits = number < len(batches) and isinstance(model, DistributedDataParallel)
            with model.no_sync() if waits else nullcontext(), self._share():  # type: ignore[operator]
                losses.append(super().training_step(model, batch, num_items_in_batch))  # type: ignore[misc]
        return torch.stack(losses).mean()

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs if self._sharing else super()._prepare_inputs(inputs)  # type: ignore[misc]

    def _generate(self, *arguments: Any, **options: Any) -> Any:
        trainer: Any = self
        with detached(trainer.accelerator.unwrap_model(trainer.model)):
            return super()._generate(*arguments, **options)  # type: ignore[misc]

    def compute_loss(self, model: nn.Module, *arguments: Any, **options: Any) -> Any:
        return self._in_turns(partial(super().compute_loss, model), arguments, options)  # type: ignore[misc]

    def _get_per_token_logps_and_entropies(self, model: nn.Module, *arguments: Any, **options: Any) -> Any:
        compute = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        return self._in_turns(partial(compute, model), arguments, options)

    def _in_turns(self, function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The function's result for this rank's arguments. All ranks of the sequence call it together, with the
        arguments of one rank after those of the other."""
        if self._sharing:
            return function(*arguments, **options)
        results = []
        for of_rank, options_of_rank in self._of_all_ranks((arguments, options)):
            with self._share():
                results.append(function(*of_rank, **options_of_rank))
        return results[self.sp.rank]

    def _of_all_ranks(self, given: Any) -> list[Any]:
        """What each rank of the sequence has ``given``, with its tensors on this rank's device."""
        if self.sp.world == 1:
            return [given]
        return gather_values(given, self.sp.group, self.accelerator.device)  # type: ignore[attr-defined]

    @contextmanager
    def _share(self) -> Iterator[None]:
        self._sharing = True
        try:
            yield
        finally:
            self._sharing = False


class _WholeCalls:
    """Hooks with which a model takes a whole batch, the same on all ranks, and returns whole results, as TRL calls it.
    Results have a gradient for this rank's tokens: gradients of parameters have to be summed over ranks."""

    def __init__(self, sp: SequenceParallel) -> None:
        self.sp = sp
        self.places: Tensor | None = None  # of this rank's tokens in the batch of the call, counted from 1
        self.shape = torch.Size()

    def install(self, model: nn.Module) -> None:
        base: Any = model if isinstance(model, PreTrainedModel) else model.get_base_model()  # type: ignore[operator]
        scores = getattr(base, "score", None)  # of a reward model, which then takes that of each row's last token
        split = base if scores is None else base.base_model
        if hasattr(split, "_startrail"):
            raise ValueError("the model is attached already: pass it as it was, the trainer attaches it")
        attach(model if scores is None else split, self.sp, check=False)
        split.register_forward_pre_hook(self.shard, with_kwargs=True, prepend=True)
        if scores is None:
            base.register_forward_hook(self.join)
        else:
            scores.register_forward_hook(self.join_scores)

    def shard(self, model: nn.Module, arguments: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        self.places = None
        if model.get_output_embeddings() is not None and not options.get(FUSED):  # type: ignore[operator]
            return None
        if arguments:
            (options["input_ids"],) = arguments
        ids = options["input_ids"]
        places = torch.arange(1, ids.numel() + 1, device=ids.device).view_as(ids)
        local = shard_batch(self.sp, **options, places=places)
        self.places, self.shape = local.pop("places"), ids.shape
        return (), local

    def join(self, model: nn.Module, arguments: object, output: Any) -> Any:
        if self.places is None:
            return None
        shape = self.places.shape
        whole = self._joined({name: x for name, x in output.items() if x.shape == shape})
        values = {name: x[:, :-1] for name, x in whole.items()}  # a row's last token predicts nothing
        if output.aux_loss is not None:
            values["aux_loss"] = self._mean(output.aux_loss)
        return type(output)(**values)

    def join_scores(self, score: nn.Module, arguments: object, output: Tensor) -> Tensor:
        return self._joined({"scores": output.squeeze(-1)})["scores"].unsqueeze(-1)

    def _joined(self, per_token: dict[str, Tensor]) -> dict[str, Tensor]:
        """(rows, tokens) of the whole batch."""
        assert self.places is not None
        places, count = self.places.flatten(), self.shape.numel() + 1
        own = places.new_zeros(count, dtype=torch.bool).index_fill(0, places, True)
        parts = {name: x.new_zeros(count).index_put((places,), x.flatten()) for name, x in per_token.items()}
        whole = self._sum(torch.stack([x.detach().double() for x in parts.values()]))
        return {
            name: torch.where(own, x, of_ranks.to(x.dtype))[1:].view(self.shape)
            for (name, x), of_ranks in zip(parts.items(), whole, strict=True)
        }

    def _mean(self, x: Tensor) -> Tensor:
        part = x / self.sp.world
        return part + (self._sum(part.detach().clone()) - part.detach())

    def _sum(self, x: Tensor) -> Tensor:
        if self.sp.world > 1:
            with peer_errors("joining log-probabilities", self.sp.group):
                dist.all_reduce(x, group=self.sp.group)
        return x


def _check_arguments(arguments: TrainingArguments) -> None:
    check_other_parallelism(arguments)
    if arguments.deepspeed_plugin is not None:
        raise ValueError("DeepSpeed changes the weights after each rank's turn, not after all: use DDP or FSDP2")
    for name, (fine, problem) in REFUSED.items():
        if (value := getattr(arguments, name, fine)) != fine:
            raise ValueError(f"{name}={value} {problem}: leave it at {fine} with a split sequence")
