"""The training loop of one rank. Every rank runs the same; the first one tells what happens.

A step's loss is the sum over all ranks and passes, divided by all that they counted together, so losses and gradients
are those of one process with all the tokens, whatever the plan, the number of ranks and the passes in a step.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers and FSDP need it: better now, once, than later on every forked rank
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from startrail.launch.heartbeat import Heartbeat
from startrail.launch.signals import Stop
from startrail.parallel import SequenceParallel
from startrail.schedule.plan import Plan
from startrail.schedule.program import closed_form, lane_names
from startrail.schedule.values import PASSES
from startrail.training import memory
from startrail.training.checkpoints.saving import Checkpoints, TrainingError, steps_in
from startrail.training.collectives import check_same_data, max_over_ranks, raise_together, sum_over_ranks
from startrail.training.display import Display, Summary
from startrail.training.estimate import NOTHING, estimate
from startrail.training.metrics import Records
from startrail.training.recipes import Recipe
from startrail.training.sharding import (
    backward,
    build_model,
    clip_gradients,
    data_by_sequence,
    finish_gradients,
    forget_gathered,
)
from startrail.training.tasks import compute_dtype, make_task

BETAS = (0.9, 0.95)
SECOND = 10.0  # seconds that attention waits for a peer longer than whoever watches the ranks, who can name it


class Trainer:
    """One run in the process group that is there. All ranks make one and ``run`` it.

    ``ValueError`` for mistakes in the recipe, its data or its checkpoint, on all ranks, before anything is written.
    """

    def __init__(
        self, recipe: Recipe, device: torch.device, display: Display, stop: Stop, heartbeat: Heartbeat | None = None
    ) -> None:
        self.recipe, self.device, self.display, self.stop = recipe, device, display, stop
        self.heartbeat = heartbeat or Heartbeat()
        self.world, self.lead, self.folder = dist.get_world_size(), dist.get_rank() == 0, Path(recipe.out)
        recipe.check_world(self.world)
        mesh = data_by_sequence(recipe.data_parallel, device.type)
        self.data_rank = mesh["data"].get_local_rank()
        problem, data = None, 0
        try:
            _check_apart(recipe)
            self.sp = SequenceParallel(
                recipe.plan,
                mesh=mesh["sequence"],
                layout=recipe.layout,
                job=recipe.job(str(compute_dtype(recipe, device)).removeprefix("torch.")),
                timeout=60 * recipe.wait_minutes + SECOND,
            )
            self.task: Any = make_task(recipe, self.sp, device)
            self.about = self.task.describe() if self.lead else ""
            data = self.task.data_digest
            first = self.task.load(0)  # on every rank: all must make the same sequences
            self.expected = estimate(recipe, self.task, self.world, first) if self.lead else NOTHING
            self.traffic = self._promised()
        except ValueError as error:
            problem = str(error)
        raise_together(problem)
        check_same_data(self.task.data_size, data)
        self.checkpoints = Checkpoints(self.folder / "checkpoints", recipe, self.task.data_size)
        self.begin = self.checkpoints.prepare(self.expected.checkpoint * (self.world if recipe.zero else 1))
        self.records = self._records()
        if device.type == "cpu":
            memory.return_large_blocks()
        self.before = memory.resident_bytes() if device.type == "cpu" else 0  # the program itself
        memory.reset_peak(device)
        self.model: Any = build_model(recipe, device)
        self.optimizer = _optimizer(self.model, recipe)
        if self.begin:
            self.checkpoints.load(self.model, self.optimizer)

    def run(self) -> bool:
        """Train to the recipe's last step; False if a signal stopped it before."""
        try:
            if self.lead:
                self.display.start(self.recipe, self.begin, self.about, str(self.sp.plan), self.world, self.expected)
            return self.begin >= self.recipe.steps or self._run()
        finally:
            self.records.close()
            self.checkpoints.release()
            self.heartbeat.stop()

    def _run(self) -> bool:
        recipe = self.recipe
        held_out: dict[int, float] = {}
        spent = waited = 0.0
        done, stopped = self.begin, not self._evaluate(self.begin, held_out)
        while done < recipe.steps and not stopped:
            step, start = done, time.perf_counter()
            loss, norm, sums = self._step(step)
            seconds = time.perf_counter() - start
            spent, waited, done = spent + seconds, waited + sums["waiting"] / self.world, step + 1
            metrics = dict(
                step=done,
                loss=loss,
                gradient_norm=norm,
                learning_rate=recipe.rate(step),
                seconds=seconds,
                tokens_per_second=recipe.tokens_per_step / seconds,
                waiting=sums["waiting"] / self.world / seconds,
                sent={name: sums[name] / self.world for name in self.traffic["ours"]},
            )
            if not (math.isfinite(loss) and math.isfinite(norm)):
                metrics["skipped"] = True
                text = f"step {done}: loss {loss}, gradient norm {norm}"
                if recipe.on_nan == "stop":
                    kept = self._save_good(step)
                    raise TrainingError(f"{text}; stopped before the parameters changed, {kept} (on_nan skip goes on)")
                self.display.note(f"{text}: skipped")
            stopped = bool(sums["stop"])
            if not stopped and (_due(done, recipe.evaluate_every) or done == recipe.steps):
                stopped = not self._evaluate(done, held_out)
                if done in held_out:
                    metrics["held_out"] = held_out[done]
            self.records.write(metrics)
            self.display.step(metrics)
            if sums["failed"]:
                raise_together(self.records.problem, TrainingError)
                self.checkpoints.wait()
            if _due(done, recipe.save_every) and done < recipe.steps and not stopped:
                self.checkpoints.save(done, self.model, self.optimizer)
        if done > self.begin:
            self.checkpoints.save(done, self.model, self.optimizer)
        self.checkpoints.wait()
        peak = max_over_ranks(memory.peak_bytes(self.device) - self.before)
        finished = done == recipe.steps
        sample = self._sample() if finished and not stopped and recipe.sample else ""
        self.display.finish(
            Summary(
                done=done,
                steps=done - self.begin,
                tokens=(done - self.begin) * recipe.tokens_per_step,
                seconds=spent,
                waiting=waited / spent if spent else 0.0,
                held_out=held_out,
                traffic=self.traffic,
                peak=peak,
                before=self.before,
                expected=self.expected.total,
                sample=sample,
                stopped=not finished,
            )
        )
        return finished

    def _save_good(self, step: int) -> str:
        """After ``step`` steps the next one failed: keep what they made, unless that is what is broken; says which."""
        self.checkpoints.wait()
        good = all(bool(part.isfinite().all()) for part in _local(self.model))
        if sum_over_ranks([float(not good)])[0]:
            return "which are not finite themselves: nothing was saved"
        if step > self.begin and step not in steps_in(self.checkpoints.folder):
            self.checkpoints.save(step, self.model, self.optimizer)
            self.checkpoints.wait()
        return f"and those of step {step} are saved" if step else "which are those of the start"

    def _records(self) -> Records:
        """Only the first rank writes."""
        problem, records = None, Records()
        try:
            if self.lead:
                records.open(self.folder, self.recipe, self.begin)
        except (ValueError, OSError) as error:
            problem = str(error)
        raise_together(problem)
        return records

    def _step(self, step: int) -> tuple[float, float, dict[str, float]]:
        """One update: the loss, the norm of its gradient, and sums over all ranks of what else happened."""
        recipe = self.recipe
        if self.device.type == "cpu":
            memory.trim_heap()  # what the last step, an evaluation or a checkpoint left
        self.sp.reset_counters()
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        self.heartbeat.advance(step + 1)
        batches, problem = self._load(range(step * recipe.accumulate, (step + 1) * recipe.accumulate))
        mine = [float(sum(batch.counted for batch in batches)), float(problem is not None)]
        self.heartbeat.advance(step + 1)
        counted, failed = sum_over_ranks(mine)
        if failed:
            self._give_up(problem)
        loss, norm = self._gradients(step, batches, counted).tolist()  # the only time that the host waits for a GPU
        self.heartbeat.advance(step + 1)
        traffic = self.sp.traffic()
        numbers = dict(
            loss=loss,
            waiting=self.sp.timings()["waiting"],
            stop=float(self.stop.requested),
            failed=float(self.checkpoints.failed or self.records.problem is not None),
            **{name: float(traffic[name]["bytes"]) if name in traffic else 0.0 for name in self.traffic["ours"]},
        )
        sums = dict(zip(numbers, sum_over_ranks(list(numbers.values())), strict=True))
        if math.isfinite(sums["loss"]) and math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return sums["loss"], norm, sums

    def _gradients(self, step: int, batches: list[Any], counted: float) -> torch.Tensor:
        """Give the parameters the gradients of this step, clipped: this rank's share of the loss and their norm."""
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in batches:
            self.heartbeat.advance(step + 1)
            share = self.task.loss_sum(self.model, batch) / max(counted, 1.0)
            backward(self.model, share)
            loss += share.detach()
        finish_gradients(self.model)
        return torch.stack((loss, clip_gradients(self.model.parameters(), self.recipe.clip).double()))

    def _load(self, passes: range, held_out: bool = False) -> tuple[list[Any], str | None]:
        """This group's batches of these passes, or why this rank cannot read them."""
        indices = [number * self.recipe.data_parallel + self.data_rank for number in passes]
        try:
            return [self.task.load(index, held_out) for index in indices], None
        except ValueError as error:
            return [], str(error)

    def _give_up(self, problem: str | None) -> None:
        """End the run on all ranks because some cannot read their data, once the checkpoint under way is there."""
        self.checkpoints.wait()
        raise_together(problem, TrainingError)

    def _evaluate(self, step: int, held_out: dict[int, float]) -> bool:
        """Put the mean loss of held-out batches, the same every time, into ``held_out``; False if a signal came first.

        Ranks ask each other before every batch: an evaluation can be longer than a scheduler waits.
        """
        total = counted = 0.0
        for number in range(self.recipe.evaluate_batches):
            self.heartbeat.advance(step)
            batches, problem = self._load(range(number, number + 1), held_out=True)
            mine = [float(problem is not None), float(self.stop.requested)]
            failed, stop = sum_over_ranks(mine)
            if failed:
                self._give_up(problem)
            if stop:
                return False
            with torch.no_grad():
                total += self.task.loss_sum(self.model, batches[0]).item()
            counted += batches[0].counted
            forget_gathered(self.model)
        if self.recipe.evaluate_batches:
            total, counted = sum_over_ranks([total, counted])
            held_out[step] = total / max(counted, 1.0)
        return True

    def _sample(self) -> str:
        try:
            raise_together(self._load(range(1), held_out=True)[1])  # a prompt may come from there
            text: str = self.task.show(self.model, self.folder)
        except (OSError, ValueError) as error:  # it is the model that counts, and that is saved
            text = f"no sample: {error}"
        forget_gathered(self.model)
        return text

    def _promised(self) -> dict[str, dict[str, float]]:
        """What attention sends in one step, by level, on the average rank: by our plan and by Ring Attention."""
        sizes, world = self.sp.sizes(*self.task.queries_and_keys()), self.sp.world
        calls = self.recipe.config.layers * self.recipe.accumulate
        promised = {}
        for name, plan in (("ours", self.sp.plan), ("ring", Plan.parse(f"1x{world}"))):
            by_kind = replace(sizes, plan=plan).by_kind
            passes = [closed_form(plan, world, rank, pass_, by_kind) for rank in range(world) for pass_ in PASSES]
            sent = (calls * sum(level) / world for level in zip(*passes, strict=True))
            promised[name] = dict(zip(lane_names(plan.place(world, 0)), sent, strict=True))
        return promised


def _check_apart(recipe: Recipe) -> None:
    data, out = Path(recipe.data), Path(recipe.out)
    if data.is_dir() and out.resolve().is_relative_to(data.resolve()):
        raise ValueError(f"out {recipe.out!r} lies inside data {recipe.data!r}: the run would read what it writes")


def _local(model: torch.nn.Module) -> list[torch.Tensor]:
    """What this rank holds of the parameters."""
    held = (parameter.detach() for parameter in model.parameters())
    return [part.to_local() if isinstance(part, DTensor) else part for part in held]


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _optimizer(model: torch.nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW; only matrices decay. Fused: one by one, sharded parameters cost more Python than arithmetic."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [
        dict(params=matrices, weight_decay=recipe.weight_decay),
        dict(params=others, weight_decay=0.0),
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=BETAS, fused=True)
