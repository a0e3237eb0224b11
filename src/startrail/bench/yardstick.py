"""What all benchmarks share: workloads, attention on one process to compare with, and results in a file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import startrail
from startrail.compile import attention as compiled
from startrail.planner.live import measure as live
from startrail.planner.live import placement
from startrail.schedule.plan import Plan
from startrail.schedule.sizes import Sizes

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Results = tuple[Tensor, Tensor, Tensor, Tensor]
Json = dict[str, Any]


@dataclass(frozen=True)
class Workload:
    """Forward + backward attention over one sequence, float32, with random cotangents; or a whole training step.

    ``model`` is empty for attention alone, or ``gpt`` or ``dit``: then the sizes are those of each of its ``layers``.
    ``window`` and ``documents`` (cu_seqlens) make attention alone sparse.
    """

    length: int
    q_heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    batch: int = 1
    model: str = ""
    layers: int = 1
    window: int | None = None
    documents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "documents", tuple(self.documents))  # a list if it comes from a file

    @property
    def call(self) -> compiled.Attention:
        """The call of attention without its tensors."""
        shape = self.length, self.batch, self.q_heads, self.kv_heads, self.head_dim
        return compiled.Attention.of(*shape, self.causal, "float32", self.window, self.documents)

    @property
    def mask(self) -> str:
        parts = ["causal" if self.causal else "full"]
        parts += [] if self.window is None else [f"window {self.window}"]
        parts += [f"{len(self.documents) - 1} documents"] if self.documents else []
        return ", ".join(parts)

    @property
    def name(self) -> str:
        """``MHA``, ``GQA 8:1`` (query heads per KV head), or the model's name."""
        if self.model:
            return {"gpt": "GPT step", "dit": "DiT step"}[self.model]
        return "MHA" if self.q_heads == self.kv_heads else f"GQA {self.q_heads // self.kv_heads}:1"

    def __str__(self) -> str:
        layers = f", {self.layers} layers" if self.model else ""
        heads = f"{self.q_heads}:{self.kv_heads} heads x {self.head_dim}"
        batch = f"{self.batch} x " if self.batch > 1 else ""
        return f"{self.name} {self.mask}, {batch}{self.length} tokens, {heads}{layers}"

    def sizes(self, plan: Plan, world: int) -> Sizes:
        """Raises ``ValueError`` if the plan cannot run this work on so many ranks."""
        plan.check_world(world)
        return self.call.sizes_on(plan, world)


def own_device() -> torch.device:
    """This rank's device. A process that is not a rank gets the CPU: it will fork ranks and must not use a GPU."""
    return placement.own_device() if dist.is_initialized() else torch.device("cpu")


def own_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on GPUs, as in training and as flash attention requires; float32 on CPUs."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def random_inputs(work: Workload, tokens: int) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of the output, for so many of the tokens of ``work``, on this rank's device."""
    device = own_device()
    heads = (work.q_heads, work.kv_heads, work.kv_heads, work.q_heads)
    sizes = ((work.batch, number, tokens, work.head_dim) for number in heads)
    return tuple(torch.randn(size, device=device, dtype=own_dtype(device)) for size in sizes)


def whole_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention on one process with the whole sequence."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def visible_attention(ends: Sequence[int], window: int | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention on one process, document by document, so that only visible blocks are computed. Tensors are
    split at once: the gradient of a slice would be as large as the whole."""
    lengths = [stop - start for start, stop in pairwise(ends)]
    documents = zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)
    return torch.cat([_in_document(window, *qkv) for qkv in documents], 2)


def _in_document(window: int | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if window is None or window >= q.shape[2]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    rows, keys = torch.arange(window).unsqueeze(1), torch.arange(2 * window)
    visible = (keys > rows) & (keys <= rows + window)  # in its own block of keys and the one before
    queries, keys_of, values = (x.split(window, 2) for x in (q, k, v))
    outs = [F.scaled_dot_product_attention(queries[0], keys_of[0], values[0], is_causal=True)]
    for at, own in enumerate(queries[1:], start=1):
        both = [torch.cat(x[at - 1 : at + 1], 2) for x in (keys_of, values)]
        outs.append(F.scaled_dot_product_attention(own, both[0], both[1], visible[: own.shape[2], : both[0].shape[2]]))
    return torch.cat(outs, 2)


def with_gradients(attention: Attention, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Results:
    """The result of ``attention``, and autograd's gradients of q, k and v for ``dout``."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    return out.detach(), dq, dk, dv


def record(file: Path | None, options: argparse.Namespace, started: float, rows: Sequence[Json]) -> None:
    """Write ``rows`` as JSON, if a file was asked for."""
    if file is None:
        return
    try:
        file.write_text(json.dumps({"meta": metadata(stated(options), started), "rows": rows}, indent=1))
    except OSError as error:
        raise ValueError(f"--json {file}: {error.strerror}") from None
    print(f"\n{file}")


def stated(options: argparse.Namespace) -> list[str]:
    """The options of a run, without what the command line keeps there for itself."""
    return [
        f"{name}={value}" for name, value in vars(options).items() if isinstance(value, bool | int | float | str | list)
    ]


def metadata(argv: Sequence[str], started: float) -> Json:
    """Machine, versions and options of the run."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(started)),
        "seconds": round(time.time() - started, 1),
        "arguments": list(argv),
        "processor": live.cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "startrail": startrail.__version__,
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted": _git("status", "--porcelain", "--", "src", "workshop").splitlines(),
        "load_at_start": os.getloadavg(),
    }


def _git(*arguments: str) -> str:
    """Its output in the clone that startrail runs from; nothing if it does not run from one."""
    root = Path(startrail.__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    return "" if done.returncode else done.stdout.strip()
