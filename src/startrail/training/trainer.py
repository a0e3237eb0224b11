"""The training loop of one rank. All ranks run the same loop; rank 0 displays and records it.

A step's loss is the sum over all ranks and passes, divided by the total number of labels (or of patch values). Losses
and gradients therefore equal those of one process, whatever the plan, the number of ranks and the passes per step.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from startrail._compat import load_dynamo
from startrail.agreement.gather import gather_texts
from startrail.launch.heartbeat import Heartbeat
from startrail.launch.signals import Stop
from startrail.parallel import SequenceParallel
from startrail.planner.memory import LIBRARY_BYTES, estimate_memory
from startrail.schedule.plan import Plan
from startrail.schedule.program import closed_form, lane_names
from startrail.schedule.values import PASSES
from startrail.training import memory, sharding
from startrail.training.checkpoints.reading import steps_in
from startrail.training.checkpoints.saving import Checkpoints, TrainingError
from startrail.training.collectives import check_same_data, max_over_ranks, raise_together, sum_over_ranks
from startrail.training.display import Display, Summary
from startrail.training.files import replace_file
from startrail.training.metrics import MetricsFile
from startrail.training.recipes import Recipe
from startrail.training.report import RunPage
from startrail.training.tasks import compute_dtype, make_task
from startrail.view.trace import EventRecorder, Record, chrome_trace

load_dynamo()

BETAS = (0.9, 0.95)
ATTENTION_GRACE_SECONDS = 10.0  # attention waits this much longer than the heartbeat monitor, which names the rank


class Trainer:
    """One run in the current process group. All ranks make one and ``run`` it. Raises ``ValueError`` on all ranks,
    before anything is written, if the recipe, its data or its checkpoint is wrong."""

    def __init__(
        self, recipe: Recipe, device: torch.device, display: Display, stop: Stop, heartbeat: Heartbeat | None = None
    ) -> None:
        self.recipe, self.device, self.display, self.stop = recipe, device, display, stop
        self.heartbeat = heartbeat or Heartbeat()
        self.world, self.lead, self.folder = dist.get_world_size(), dist.get_rank() == 0, Path(recipe.out)
        recipe.check_world(self.world)
        mesh = sharding.make_mesh(recipe.data_parallel, device.type)
        self.data_rank = mesh["data"].get_local_rank()
        problem, digest = None, 0
        try:
            _check_folders(recipe)
            job = recipe.job(str(compute_dtype(recipe, device)).removeprefix("torch."), device.type)
            options: Any = dict(layout=recipe.layout, timeout=60 * recipe.wait_minutes + ATTENTION_GRACE_SECONDS)
            self.sp = SequenceParallel(recipe.plan, mesh=mesh["sequence"], job=job, **options)
            self.task: Any = make_task(recipe, self.sp, device)
            self.description = self.task.describe() if self.lead else ""
            digest = self.task.data.digest()
            self.task.load(0)  # so that a mistake in the data is found now, on every rank
            libraries = LIBRARY_BYTES if device.type == "cpu" else 0
            self.expected = estimate_memory(job, self.sp.plan, self.world, libraries=libraries)
            self.traffic = self._predicted_traffic()
        except ValueError as error:
            problem = str(error)
        raise_together(problem)
        check_same_data(self.task.data_size, digest)
        self.checkpoints = Checkpoints(self.folder / "checkpoints", recipe, self.task.data_size, stop)
        self.begin = self.checkpoints.prepare(round(self.expected.checkpoint) * (self.world if recipe.zero else 1))
        self.metrics_file = self._open_metrics()
        self.page = RunPage(recipe, self.sp.plan, self.world, self.description, self.expected.total)
        if device.type == "cpu":
            memory.return_large_blocks()
        self.baseline = memory.resident_bytes() if device.type == "cpu" else 0  # the program without a model
        memory.reset_peak(device)
        self.model: Any = sharding.build_model(recipe, device)
        self.optimizer = _optimizer(self.model, recipe)
        if self.begin:
            self.checkpoints.load(self.model, self.optimizer)

    def run(self) -> bool:
        """Train to the recipe's last step; return False if a signal stopped it earlier."""
        try:
            if self.lead:
                self.display.start(
                    self.recipe, self.begin, self.description, str(self.sp.plan), self.world, self.expected
                )
            return self.begin >= self.recipe.steps or self._run()
        finally:
            self.metrics_file.close()
            self.checkpoints.release()
            self.heartbeat.stop()

    def _run(self) -> bool:
        recipe = self.recipe
        held_out: dict[int, float] = {}
        seconds_spent = waited = 0.0
        done, stopped = self.begin, not self._evaluate(self.begin, held_out)
        while done < recipe.steps and not stopped:
            step, start = done, time.perf_counter()
            with self._traced(step + 1):
                loss, norm, sums = self._step(step)
            seconds = time.perf_counter() - start
            seconds_spent, done = seconds_spent + seconds, step + 1
            waited += sums["waiting"] / self.world
            metrics = dict(
                step=done,
                loss=loss,
                gradient_norm=norm,
                learning_rate=recipe.rate(step),
                seconds=seconds,
                tokens_per_second=recipe.tokens_per_step / seconds,
                waiting=sums["waiting"] / self.world / seconds,
                sent={name: sums[name] / self.world for name in self.traffic["plan"]},
            )
            if not (math.isfinite(loss) and math.isfinite(norm)):
                metrics["skipped"] = True
                text = f"step {done}: loss {loss}, gradient norm {norm}"
                if recipe.on_nan == "stop":
                    saved = self._save_finite(step)
                    raise TrainingError(
                        f"{text}; stopped before the parameters changed; {saved} (--on-nan skip continues instead)"
                    )
                self.display.note(f"{text}: skipped")
            stopped = bool(sums["stop"])
            if not stopped and (_is_due(done, recipe.evaluate_every) or done == recipe.steps):
                stopped = not self._evaluate(done, held_out)
                if done in held_out:
                    metrics["held_out"] = held_out[done]
            self.metrics_file.write(metrics)
            self.display.step(metrics)
            if self.lead and self.page.is_due:
                self._write_page(memory.peak_bytes(self.device) - self.baseline)
            if sums["failed"]:
                raise_together(self.metrics_file.problem, TrainingError)
                self.checkpoints.wait()
            if _is_due(done, recipe.save_every) and done < recipe.steps and not stopped:
                self.checkpoints.save(done, self.model, self.optimizer)
        if done > self.begin:
            self.checkpoints.save(done, self.model, self.optimizer)
        self.checkpoints.wait()
        return self._finish(done, stopped, seconds_spent, waited, held_out)

    def _finish(self, done: int, stopped: bool, seconds: float, waited: float, held_out: dict[int, float]) -> bool:
        """Report how the run ended. Returns True if all steps are done."""
        recipe, steps = self.recipe, done - self.begin
        peak = max_over_ranks(memory.peak_bytes(self.device) - self.baseline)
        finished = done == recipe.steps
        sample = self._sample() if finished and not stopped and recipe.sample else ""
        if self.lead:
            self._write_page(peak, sample, "finished" if finished else "stopped")
        summary = Summary(
            done=done,
            steps=steps,
            tokens=steps * recipe.tokens_per_step,
            seconds=seconds,
            waiting=waited / seconds if seconds else 0.0,
            held_out=held_out,
            traffic=self.traffic,
            peak=peak,
            baseline=self.baseline,
            expected=self.expected.total,
            sample=sample,
            stopped=not finished,
        )
        self.display.finish(summary)
        return finished

    def _write_page(self, peak: float, sample: str = "", state: str = "running") -> None:
        self.page.write(peak, sample, state)
        if self.page.problem:
            self.display.note(self.page.problem)

    @contextmanager
    def _traced(self, step: int) -> Iterator[None]:
        """Trace the attention of ``recipe.trace``'s step on the ranks of the first data-parallel group."""
        if step != self.recipe.trace:
            yield
            return
        recorder = EventRecorder(self.sp.rank)
        dist.barrier()
        origin = time.perf_counter()  # clocks of several nodes differ
        self.sp.on_event(recorder)
        try:
            yield
        finally:
            self.sp.on_event(None)
        records = [record._replace(start=record.start - origin, end=record.end - origin) for record in recorder.records]
        texts = gather_texts(json.dumps([self.data_rank, self.sp.rank, records]))
        if self.lead:
            found = [json.loads(text) for text in texts]
            by_rank = [
                [Record(*entry) for entry in own] for group, _, own in sorted(found, key=lambda f: f[:2]) if not group
            ]
            title = f"{self.sp.plan} on {self.sp.world} ranks: {self.recipe.name}, step {step}, measured"
            path = self.folder / "trace.json"
            try:
                replace_file(path, json.dumps(chrome_trace(by_rank, title)).encode())
                self.display.note(f"wrote {path}: open it in https://ui.perfetto.dev or compare it (startrail trace)")
            except OSError as error:
                self.display.note(f"{path} could not be written: {error.strerror}")

    def _save_finite(self, step: int) -> str:
        """Save the parameters after ``step`` steps, since the next one failed, unless they are not finite themselves.
        Returns a clause for the error message."""
        self.checkpoints.wait()
        parts = (x.to_local() if isinstance(x, DTensor) else x for x in self.model.parameters())
        finite = all(bool(part.isfinite().all()) for part in parts)
        if sum_over_ranks([float(not finite)])[0]:
            return "they are not finite themselves, so nothing was saved"
        if step > self.begin and step not in steps_in(self.checkpoints.folder):
            self.checkpoints.save(step, self.model, self.optimizer)
            self.checkpoints.wait()
        return f"those of step {step} are saved" if step else "no step was completed"

    def _open_metrics(self) -> MetricsFile:
        """Only rank 0 writes."""
        problem, metrics_file = None, MetricsFile()
        try:
            if self.lead:
                metrics_file.open(self.folder, self.recipe, self.begin)
        except (ValueError, OSError) as error:
            problem = str(error)
        raise_together(problem)
        return metrics_file

    def _step(self, step: int) -> tuple[float, float, dict[str, float]]:
        """One update: return the loss, the gradient norm, and the other counters summed over all ranks."""
        recipe = self.recipe
        if self.device.type == "cpu":
            memory.trim_heap()  # of the last step, an evaluation or a checkpoint
        self.sp.reset_counters()
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        self.heartbeat.advance(step + 1)
        batches, problem = self._load(range(step * recipe.accumulate, (step + 1) * recipe.accumulate))
        self.heartbeat.advance(step + 1)
        counted, failed = sum_over_ranks([sum(float(batch.counted) for batch in batches), float(problem is not None)])
        if failed:
            self._raise_load_error(problem)
        loss, norm = self._gradients(step, batches, counted).tolist()  # the only time the host waits for a GPU
        self.heartbeat.advance(step + 1)
        traffic = self.sp.traffic()
        numbers = dict(
            loss=loss,
            waiting=self.sp.timings()["waiting"],
            stop=float(self.stop.requested),
            failed=float(self.checkpoints.failed or self.metrics_file.problem is not None),
            **{name: float(traffic[name]["bytes"]) if name in traffic else 0.0 for name in self.traffic["plan"]},
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

    def _load(self, passes: range, held_out: bool = False) -> tuple[list[Any], str | None]:
        """Return this group's batches of these passes, or the reason that this rank cannot read them."""
        indices = [number * self.recipe.data_parallel + self.data_rank for number in passes]
        try:
            return [self.task.load(index, held_out) for index in indices], None
        except ValueError as error:
            return [], str(error)

    def _raise_load_error(self, problem: str | None) -> None:
        """End the run on all ranks because some cannot read their data, after the pending checkpoint is written."""
        self.checkpoints.wait()
        raise_together(problem, TrainingError)

    def _evaluate(self, step: int, held_out: dict[int, float]) -> bool:
        """Store the mean loss of the held-out batches in ``held_out``; return False if a signal interrupts it. Ranks
        exchange signals before every batch: an evaluation can take longer than a scheduler's grace period."""
        total = counted = 0.0
        for number in range(self.recipe.evaluate_batches):
            self.heartbeat.advance(step)
            batches, problem = self._load(range(number, number + 1), held_out=True)
            failed, stop = sum_over_ranks([float(problem is not None), float(self.stop.requested)])
            if failed:
                self._raise_load_error(problem)
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
            text: str = self.task.show(self.model, self.folder)
        except (OSError, ValueError) as error:  # the run itself succeeded, and the model is saved
            text = f"no sample: {error}"
        sharding.free_gathered(self.model)
        return text

    def _predicted_traffic(self) -> dict[str, dict[str, float]]:
        """Bytes that attention sends per step and level on the average rank, with this plan and with Ring Attention."""
        sizes, world = self.sp.sizes(*self.task.queries_and_keys()), self.sp.world
        calls = self.recipe.config.layers * self.recipe.accumulate
        predicted = {}
        for name, plan in (("plan", self.sp.plan), ("ring", Plan.parse(f"1x{world}"))):
            by_kind = replace(sizes, plan=plan).by_kind
            passes = [closed_form(plan, world, rank, pass_, by_kind) for rank in range(world) for pass_ in PASSES]
            sent = (calls * sum(level) / world for level in zip(*passes, strict=True))
            predicted[name] = dict(zip(lane_names(plan.place(world, 0)), sent, strict=True))
        return predicted


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
