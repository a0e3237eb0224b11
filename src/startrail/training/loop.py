"""The training loop of one rank. All ranks run the same loop; rank 0 displays and records it.

A step's loss is the sum over all ranks and passes, divided by the total number of labels (or of patch values). Losses
and gradients therefore equal those of one process, whatever the plan, the number of ranks and the passes per step.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from startrail.launch.heartbeat import Heartbeat
from startrail.parallel import SequenceParallel
from startrail.training import footprint, sharding
from startrail.training.checkpoints.saving import Checkpoints
from startrail.training.display import Summary
from startrail.training.forecast import make_forecast
from startrail.training.ranks import (
    TrainingError,
    check_same_data,
    max_over_ranks,
    raise_together,
    sum_over_ranks,
    together,
)
from startrail.training.record import RunRecord
from startrail.training.tasks import compute_dtype, make_task

if TYPE_CHECKING:
    from startrail.launch.signals import Stop
    from startrail.training.display import Display, Metrics
    from startrail.training.recipes import Recipe

BETAS = (0.9, 0.95)
ATTENTION_GRACE_SECONDS = 10.0  # attention waits this much longer than the heartbeat monitor, which names the rank


class Trainer:
    """One run in the current process group. All ranks make one and ``run`` it. Raises ``ValueError`` on all ranks,
    before anything is written, if the recipe, its data or its checkpoint is wrong."""

    def __init__(
        self, recipe: Recipe, device: torch.device, display: Display, stop: Stop, heartbeat: Heartbeat | None = None
    ) -> None:
        self.recipe, self.device, self.stop = recipe, device, stop
        self.heartbeat = heartbeat or Heartbeat()
        self.world, self.lead = dist.get_world_size(), dist.get_rank() == 0
        recipe.check_world(self.world)
        mesh = sharding.make_mesh(recipe.data_parallel, device.type)
        self.data_rank = mesh["data"].get_local_rank()
        with together():
            _check_folders(recipe)
            job = recipe.job(str(compute_dtype(recipe, device)).removeprefix("torch."), device.type)
            timeout = 60 * recipe.wait_minutes + ATTENTION_GRACE_SECONDS
            shares = "measured" if recipe.shares == "measured" else None
            self.sp = SequenceParallel(
                recipe.plan, mesh=mesh["sequence"], job=job, layout=recipe.layout, timeout=timeout, shares=shares
            )
            self.task: Any = make_task(recipe, self.sp, device)
            description = self.task.describe() if self.lead else ""
            digest = self.task.data.digest()
            self.task.load(0)  # so that a mistake in the data is found now, on every rank
            self.forecast = make_forecast(recipe, job, self.sp, self.task, description, self.world)
        check_same_data(self.task.data_size, digest)
        self.checkpoints = Checkpoints(recipe, self.task.data_size, stop)
        writers = self.world if recipe.zero else 1
        self.begin = self.checkpoints.prepare(round(self.forecast.memory.checkpoint) * writers)
        self.record = RunRecord(recipe, display, self.forecast)
        with together():
            if self.lead:
                self.record.open(self.begin)
        if device.type == "cpu":
            footprint.return_large_blocks()
        self.baseline = footprint.resident_bytes() if device.type == "cpu" else 0  # the program without a model
        footprint.reset_peak(device)
        self.model: Any = sharding.build_model(recipe, device)
        self.optimizer = _optimizer(self.model, recipe)
        if self.begin:
            self.checkpoints.load(self.model, self.optimizer)

    def run(self) -> bool:
        """Train to the recipe's last step; return False if a signal stopped it earlier."""
        try:
            self.record.display.start(self.recipe, self.begin, self.forecast)
            return self.begin >= self.recipe.steps or self._run()
        finally:
            self.record.close()
            self.checkpoints.release()
            self.heartbeat.stop()

    def _run(self) -> bool:
        recipe = self.recipe
        held_out: dict[int, float] = {}
        seconds = waited = 0.0
        done, stopped = self.begin, not self._evaluate(self.begin, held_out)
        while done < recipe.steps and not stopped:
            metrics, sums = self._measured_step(done)
            done += 1
            seconds += metrics["seconds"]
            waited += metrics["waiting"] * metrics["seconds"]
            stopped = bool(sums["stop"])
            if not stopped and (_is_due(done, recipe.evaluate_every) or done == recipe.steps):
                stopped = not self._evaluate(done, held_out)
                if done in held_out:
                    metrics["held_out"] = held_out[done]
            self.record.step(metrics, self._peak())
            if sums["failed"]:
                raise_together(TrainingError(self.record.problem) if self.record.problem else None)
                self.checkpoints.wait()
            if _is_due(done, recipe.save_every) and done < recipe.steps and not stopped:
                self.checkpoints.save(done, self.model, self.optimizer)
        if done > self.begin:
            self.checkpoints.save(done, self.model, self.optimizer)
        self.checkpoints.wait()
        finished = done == recipe.steps
        self.record.finish(
            Summary(
                done=done,
                steps=done - self.begin,
                tokens=(done - self.begin) * recipe.tokens_per_step,
                seconds=seconds,
                waiting=waited / seconds if seconds else 0.0,
                held_out=held_out,
                peak=max_over_ranks(self._peak()),
                baseline=self.baseline,
                sample=self._sample() if finished and not stopped and recipe.sample else "",
                stopped=not finished,
                forecast=self.forecast,
            )
        )
        return finished

    def _peak(self) -> float:
        """Bytes that training has added to this rank."""
        return footprint.peak_bytes(self.device) - self.baseline

    def _measured_step(self, step: int) -> tuple[Metrics, dict[str, float]]:
        """One update, traced if the recipe asks for it: its metrics, and the counters that ``_step`` has summed."""
        start = time.perf_counter()
        with self.record.traced(self.sp, self.data_rank, step + 1):
            loss, norm, sums = self._step(step)
        seconds = time.perf_counter() - start
        metrics = dict(
            step=step + 1,
            loss=loss,
            gradient_norm=norm,
            learning_rate=self.recipe.rate(step),
            seconds=seconds,
            tokens_per_second=self.recipe.tokens_per_step / seconds,
            waiting=sums["waiting"] / self.world / seconds,
            sent={name: sums[name] / self.world for name in self.forecast.traffic},
        )
        if not (math.isfinite(loss) and math.isfinite(norm)):
            metrics["skipped"] = True
            text = f"step {step + 1}: loss {loss}, gradient norm {norm}"
            if self.recipe.on_nan == "stop":
                raise TrainingError(
                    f"{text}; stopped before the parameters changed; {self._save_finite(step)} (--on-nan skip "
                    "continues instead)"
                )
            self.record.display.note(f"{text}: skipped")
        return metrics, sums

    def _save_finite(self, step: int) -> str:
        """Save the parameters after ``step`` steps, since the next one failed, unless they are not finite themselves.
        Returns a clause for the error message."""
        self.checkpoints.wait()
        parts = (x.to_local() if isinstance(x, DTensor) else x for x in self.model.parameters())
        finite = all(bool(part.isfinite().all()) for part in parts)
        if sum_over_ranks([float(not finite)])[0]:
            return "they are not finite themselves, so nothing was saved"
        if step > self.begin and not self.checkpoints.has(step):
            self.checkpoints.save(step, self.model, self.optimizer)
            self.checkpoints.wait()
        return f"those of step {step} are saved" if step else "no step was completed"

    def _step(self, step: int) -> tuple[float, float, dict[str, float]]:
        """One update: return the loss, the gradient norm, and the other counters summed over all ranks."""
        recipe = self.recipe
        if self.device.type == "cpu":
            footprint.trim_heap()  # of the last step, an evaluation or a checkpoint
        self.sp.reset_counters()
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        self.heartbeat.advance(step + 1)
        batches, problem = self._load(range(step * recipe.accumulate, (step + 1) * recipe.accumulate))
        self.heartbeat.advance(step + 1)
        counted, failed = sum_over_ranks([sum(float(batch.counted) for batch in batches), float(problem is not None)])
        if failed:
            self._end_unread(problem)
        loss, norm = self._gradients(step, batches, counted).tolist()  # the only time the host waits for a GPU
        self.heartbeat.advance(step + 1)
        traffic = self.sp.traffic()
        numbers = dict(
            loss=loss,
            waiting=self.sp.timings()["waiting"],
            stop=float(self.stop.requested),
            failed=float(self.checkpoints.failed or bool(self.record.problem)),
            **{name: float(traffic[name]["bytes"]) if name in traffic else 0.0 for name in self.forecast.traffic},
        )
        sums = dict(zip(numbers, sum_over_ranks(list(numbers.values())), strict=True))
        self.sp.check()  # a lost peer must not change the parameters, nor what is saved of them
        if math.isfinite(sums["loss"]) and math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return sums["loss"], norm, sums

    def _gradients(self, step: int, batches: list[Any], counted: float) -> torch.Tensor:
        """Compute and clip the gradients of this step; return this rank's share of the loss, and the gradient norm."""
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in batches:
            self.heartbeat.advance(step + 1)
            share = self.task.loss_sum(self.model, batch) / max(counted, 1.0)
            sharding.backward(self.model, share)
            loss += share.detach()
        sharding.finish_gradients(self.model)
        norm = sharding.clip_gradients(self.model.parameters(), self.recipe.clip)
        return torch.stack((loss, norm.double()))

    def _load(self, passes: range, held_out: bool = False) -> tuple[list[Any], ValueError | None]:
        """Return this group's batches of these passes, or the reason that this rank cannot read them."""
        indices = [number * self.recipe.data_parallel + self.data_rank for number in passes]
        try:
            return [self.task.load(index, held_out) for index in indices], None
        except ValueError as error:
            return [], error

    def _end_unread(self, problem: ValueError | None) -> None:
        """End the run on all ranks because some cannot read their data, after the pending checkpoint is written."""
        self.checkpoints.wait()
        raise_together(TrainingError(problem) if problem else None)

    def _evaluate(self, step: int, held_out: dict[int, float]) -> bool:
        """Store the mean loss of the held-out batches in ``held_out``; return False if a signal interrupts it. Ranks
        exchange signals before every batch: an evaluation can take longer than a scheduler's grace period."""
        total = counted = 0.0
        for number in range(self.recipe.evaluate_batches):
            self.heartbeat.advance(step)
            batches, problem = self._load(range(number, number + 1), held_out=True)
            failed, stop = sum_over_ranks([float(problem is not None), float(self.stop.requested)])
            if failed:
                self._end_unread(problem)
            if stop:
                return False
            with torch.no_grad():
                total += self.task.loss_sum(self.model, batches[0]).item()
            counted += batches[0].counted
            sharding.free_gathered(self.model)
        if self.recipe.evaluate_batches:
            total, counted = sum_over_ranks([total, counted])
            held_out[step] = total / max(counted, 1.0)
        return True

    def _sample(self) -> str:
        try:
            raise_together(self._load(range(1), held_out=True)[1])  # the prompt may come from it
            text: str = self.task.show(self.model, Path(self.recipe.out))
        except (OSError, ValueError) as error:  # the run itself succeeded, and the model is saved
            text = f"no sample: {error}"
        sharding.free_gathered(self.model)
        return text


def _check_folders(recipe: Recipe) -> None:
    data, out = Path(recipe.data), Path(recipe.out)
    if data.is_dir() and out.resolve().is_relative_to(data.resolve()):
        raise ValueError(f"out {recipe.out!r} lies inside data {recipe.data!r}: the run would read what it writes")


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _optimizer(model: torch.nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only. Fused: a Python loop over sharded parameters costs more than the update."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [dict(params=matrices, weight_decay=recipe.weight_decay), dict(params=others, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=BETAS, fused=True)
