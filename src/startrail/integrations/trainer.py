"""Trains, evaluates, accumulates and saves with ``Trainer`` of transformers, on sequences sharded over ranks.

    trainer = StarTrailTrainer(model, arguments, train_dataset=data, sp=sp)
    trainer.train()

Put ``StarTrailMixin`` before any class derived from ``Trainer``, such as TRL's ``SFTTrainer``. All ranks of a sequence
get the same batches. With more ranks than ``sp`` has, each group gets its own. The loss is global: summed over the
labels of all ranks and accumulation steps, and divided by their number.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from startrail.agreement.errors import peer_errors
from startrail.agreement.gather import gather_tensors
from startrail.integrations.batch import IGNORE, count_labels, shard_batch
from startrail.integrations.transformers import attach
from startrail.parallel import SequenceParallel


class StarTrailMixin:
    """Mixin for a ``Trainer`` class: shards sequences over the ranks of ``sp`` and attaches the model to it."""

    sp: SequenceParallel

    def __init__(self, *arguments: Any, sp: SequenceParallel, **options: Any) -> None:
        for given in (*arguments, *options.values()):
            if isinstance(given, TrainingArguments):
                check_other_parallelism(given)
        self.sp = sp
        super().__init__(*arguments, **options)
        trainer: Any = self
        self._num_groups, self._group_index = _groups(sp, trainer.args.device)
        if not trainer.args.average_tokens_across_devices:
            raise ValueError(
                "average_tokens_across_devices=False would average losses that must be summed: leave it True"
            )
        if trainer.compute_metrics is not None or trainer.label_smoother is not None:
            raise ValueError(
                "compute_metrics and label smoothing need all logits, but a rank has only those of its tokens"
            )
        if trainer.compute_loss_func is not None:
            raise ValueError(
                "compute_loss_func would get the logits of this rank's tokens, with labels that are shifted already: "
                "leave it out"
            )
        trainer.args.prediction_loss_only = True
        trainer.add_callback(CheckBeforeStep(sp))
        unwrapped = trainer.accelerator.unwrap_model(trainer.model)
        base = unwrapped.get_base_model() if hasattr(unwrapped, "get_base_model") else unwrapped  # PEFT
        if not hasattr(base, "_startrail"):
            attach(unwrapped, sp)
        if not trainer.model_accepts_loss_kwargs:
            raise ValueError(
                f"{type(base).__name__} does not take num_items_in_batch, by which its loss must be divided"
            )

    def _get_dataloader(self, *arguments: Any, **options: Any) -> DataLoader[Any]:
        """A loader with the same batches for all ranks of a sequence."""
        accelerator = self.accelerator  # type: ignore[attr-defined]
        prepare = accelerator.prepare

        def prepare_loader(loader: DataLoader[Any]) -> DataLoader[Any]:
            settings = accelerator.dataloader_config
            prepared = prepare_data_loader(
                loader,
                accelerator.device,
                num_processes=self._num_groups,
                process_index=self._group_index,
                put_on_device=True,
                rng_types=list(accelerator.rng_types or ()),
                even_batches=settings.even_batches,
                use_seedable_sampler=settings.use_seedable_sampler,
                data_seed=settings.data_seed,
            )
            prepared.begin = partial(_begin, prepared, self.sp.world)
            return prepared

        accelerator.prepare = prepare_loader
        try:
            return super()._get_dataloader(*arguments, **options)  # type: ignore[misc]
        finally:
            accelerator.prepare = prepare

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor | None:
        """The number of labels in all batches of a training step, over all groups. At least 1: a step without labels
        changes nothing."""
        if not batch_samples or "labels" not in batch_samples[0]:
            return None
        return self._count_labels(batch_samples, device).clamp(min=1)

    def _count_labels(self, batches: list[Any], device: torch.device) -> Tensor:
        names = ("labels", "shift_labels")
        count = sum(count_labels(**{name: x[name] for name in names if name in x}) for x in batches)
        total = torch.tensor(count, device=device)
        if self._num_groups > 1:
            with peer_errors("counting labels"):
                dist.all_reduce(total)
            total //= self.sp.world
        return total

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """The sequences of a step: all ranks of a group have the same."""
        size: int = self._train_batch_size  # type: ignore[attr-defined]
        return size * args.gradient_accumulation_steps * self._num_groups

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """This rank's share of a batch; ``Trainer`` adds up all ranks."""
        whole: int = super().floating_point_ops(inputs)  # type: ignore[misc]
        return whole // self.sp.world

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Count the tokens of a batch once per group, not once per rank."""
        state = self.state  # type: ignore[attr-defined]
        before = state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # type: ignore[misc]
        state.num_input_tokens_seen = before + (state.num_input_tokens_seen - before) // self.sp.world

    def _prepare_context_parallel_inputs(
        self, model: nn.Module, inputs: dict[str, Any]
    ) -> tuple[Callable[[], Any], dict[str, Any]]:
        return nullcontext, shard_batch(self.sp, **inputs)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: object = None
    ) -> tuple[Tensor | None, None, None]:
        """The loss of one evaluation batch. Trainers override this (TRL's does not shard batches), but all of them take
        the loss from ``compute_loss``, and decide there what the loss of a batch without any label is."""
        trainer: Any = self
        inputs = trainer._prepare_inputs(inputs)
        if inputs.get("labels") is None:
            return None, None, None
        inputs = self._without_repeated_rows(inputs)
        count = self._count_labels([inputs], trainer.args.device)
        whole_step = patch.object(trainer, "current_gradient_accumulation_steps", 1, create=True)  # as TRL divides
        with torch.no_grad(), trainer.compute_loss_context_manager(), whole_step:
            loss = trainer.compute_loss(model, shard_batch(self.sp, **inputs), num_items_in_batch=count)
        loss = loss.detach()
        if dist.is_initialized():  # the same on all ranks: trainers drop some of the last batch's
            with peer_errors("adding up the loss of an evaluation batch"):
                dist.all_reduce(loss)
            loss /= dist.get_world_size()
        return loss, None, None

    def _without_repeated_rows(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The last batch of an evaluation without labels of rows that accelerate repeats, so that every group has as
        many."""
        trainer: Any = self
        loader, batch_size = trainer.accelerator.gradient_state, trainer.args.eval_batch_size
        if self._num_groups == 1 or not loader.end_of_dataloader or loader.remainder <= 0:
            return inputs
        labels = {name: x.clone() for name, x in inputs.items() if name in ("labels", "shift_labels")}
        rows = max(loader.remainder // self.sp.world - self._group_index * batch_size, 0)
        for x in labels.values():
            if len(x) == batch_size or not rows:  # else rows are joined, and it is unknown where one ends
                x[rows:] = IGNORE
        return {**inputs, **labels}


class StarTrailTrainer(StarTrailMixin, Trainer):  # type: ignore[misc]
    """``Trainer`` on sequences sharded over the ranks of ``sp``."""


class CheckBeforeStep(TrainerCallback):  # type: ignore[misc]
    """Raises before the optimizer changes the weights if attention's results of the step cannot be used."""

    def __init__(self, sp: SequenceParallel) -> None:
        self.sp = sp

    def on_pre_optimizer_step(self, *arguments: Any, **options: Any) -> None:
        self.sp.check()


def _begin(loader: Any, ranks: int) -> None:
    """``begin`` of accelerate's loader. The ``remainder`` is how many of the values that it gathers in the last batch
    count: one per row, and all ranks of a group have the same rows."""
    type(loader).begin(loader)
    if loader.remainder > 0:
        loader.remainder *= ranks


def check_other_parallelism(arguments: TrainingArguments) -> None:
    """Refuse accelerate's own sequence parallelism, set by ``parallelism_config`` or by the environment."""
    config = arguments.parallelism_config
    for name in ("cp_size", "sp_size"):
        size = os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1") if config is None else getattr(config, name)
        if int(size) > 1:
            raise ValueError(f"parallelism_config has {name}={size}, but sp shards the sequences: leave {name} at 1")


def _groups(sp: SequenceParallel, device: torch.device) -> tuple[int, int]:
    """The number of groups with different batches, and the index of this rank's."""
    if not dist.is_initialized() or dist.get_world_size() == sp.world:
        return 1, 0
    assert sp.group is not None
    first = dist.get_process_group_ranks(sp.group)[0]
    own = torch.tensor([first, sp.world], device=device)  # NCCL takes tensors on no other device
    sizes = dict(sorted(x.tolist() for x in gather_tensors(own, None, "counting groups of ranks")))
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{size} from rank {first}" for first, size in sizes.items())
        raise ValueError(f"every sequence needs the same number of ranks, got {listed}")
    return len(sizes), [*sizes].index(first)
