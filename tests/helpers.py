"""Helpers for several test files: inputs, references, errors, texts, tokenizers, and programs to start."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import startrail
from startrail.cli import main
from startrail.schedule.plan import Plan

ROOT = Path(__file__).resolve().parents[1]
FULL = os.environ.get("STARTRAIL_TEST_ALL") == "1"  # make test-all: whole products instead of pairs


def covering(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """A few tuples with one value of each factor, in which any two values of two factors occur together. ``make
    test-all`` gets the whole product.

    >>> covering("ab", "xy", "01")
    [('a', 'x', '0'), ('a', 'y', '1'), ('b', 'x', '1'), ('b', 'y', '0')]
    """
    product = list(itertools.product(*factors))
    pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in product}
    left, chosen = set().union(*pairs.values()), []
    while left:
        chosen.append(max(product, key=lambda case: len(pairs[case] & left)))
        left -= pairs[chosen[-1]]
    return product if FULL else chosen


# --- attention


def qkv(
    tokens: int = 16, heads: int = 4, kv_heads: int = 4, dim: int = 8, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """q, k, v with one batch row, for calls whose numbers do not matter."""
    return [torch.randn(1, h, tokens, dim).to(dtype) for h in (heads, kv_heads, kv_heads)]


def tensors(
    length: int, heads: int = 4, kv_heads: int = 2, dim: int = 16, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[Tensor]:
    """The whole q, k, v and a cotangent of the output, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, h, length, dim) for h in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def random_slices(rng: random.Random, length: int) -> list[tuple[int, ...]]:
    """Slices (q0, q1, k0, k1, causal) of which no end decreases. Some queries have none."""
    ends = sorted(rng.sample(range(length + 1), min(length + 1, rng.choice([2, 2, 2, 3, 4, 9]))))
    if rng.random() < 0.3:
        ends = [0, *ends[1:-1], length]  # no gap at either side
    slices: list[tuple[int, ...]] = []
    low, high = 0, 1
    for q0, q1 in pairwise(ends):
        if rng.random() < 0.25 and (slices or q1 < ends[-1]):
            continue  # these queries see nothing
        first = rng.choice([high, rng.randint(high, length)])  # the end of the first query's keys
        causal = rng.random() < 0.7 and first + q1 - q0 - 1 <= length
        low = rng.choice([low, rng.randint(low, first - 1)])
        high = first + q1 - q0 - 1 if causal else first
        slices.append((q0, q1, low, high, int(causal)))
    return slices


def any_slices(rng: random.Random, length: int) -> list[tuple[int, ...]]:
    """Slices (q0, q1, k0, k1, causal, inverse) that most often need several staircases."""
    slices = []
    for _ in range(rng.choice([1, 2, 3, 6, 12])):
        (q0, q1), (k0, k1) = (sorted(rng.sample(range(length + 1), 2)) for _ in range(2))
        causal, inverse = rng.choice([0, 1]), rng.choice([0, 1])
        if causal and inverse and k1 - k0 < q1 - q0:
            q0, q1, k0, k1 = k0, k1, q0, q1
        slices.append((q0, q1, k0, k1, causal, inverse))
    return slices


def dense(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any) -> list[Tensor]:
    """out, dq, dk, dv by torch's own attention in float64 on one process. ``options`` go to it."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())]


def worst(ours: Iterable[Tensor], truth: Iterable[Tensor]) -> float:
    """The largest difference of any element."""
    return max((a.double() - b).abs().max().item() for a, b in zip(ours, truth, strict=True))


def document_numbers(length: int, documents: Sequence[int] | None) -> Tensor:
    """The document of each token, (length,); ``documents`` are cu_seqlens."""
    return torch.bucketize(torch.arange(length), torch.tensor(documents or (0, length))[1:], right=True)


def causal_mask(length: int, documents: Sequence[int] | None) -> Tensor:
    """True where a query (row) sees a key (column): not later, and in the same document. (length, length)"""
    number = document_numbers(length, documents)
    return (number.unsqueeze(1) == number).tril()


def gradient_mistakes(
    ours: Mapping[str, Tensor], truth: Mapping[str, Tensor], allowed: float, least: float = 0.0
) -> list[str]:
    """A line for each gradient whose worst element is off by more than ``allowed`` of its root mean square.

    A root mean square below ``least`` counts as that, for gradients that are zero.
    """
    wrong = []
    for name, true in truth.items():
        error = ((ours[name] - true).abs().max() / true.square().mean().sqrt().clamp(min=least)).item()
        if not error <= allowed:  # written so that NaN fails
            wrong.append(f"gradient of {name}: worst error {error:.1e} of its root mean square")
    return wrong


# --- memory


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are made inside and still alive, and their ``peak``. ``given`` tensors do not
    count; sizes are rounded up to whole blocks."""

    def __init__(self, given: Iterable[Tensor] = (), block: int = 1) -> None:
        super().__init__()
        self.given, self.block = {x.untyped_storage()._cdata for x in given}, block
        self.live: dict[int, tuple[Any, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            storage = x.untyped_storage() if isinstance(x, Tensor) else None
            if storage is not None and storage._cdata not in self.given:
                size = -(-storage.nbytes() // self.block) * self.block
                self.live[storage._cdata] = StorageWeakRef(storage), size
        self.live = {key: (ref, size) for key, (ref, size) in self.live.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return out


# --- ranks and errors


def as_rank(rank: int, world: int, layout: str = "zones", plan: str | None = None) -> startrail.SequenceParallel:
    """What shards and counts as one rank of several does, without the others; a plain ring, unless ``plan`` says so."""
    sp = startrail.SequenceParallel("1x1", layout=layout)
    sp.rank, sp.world, sp.plan = rank, world, Plan.parse(plan or f"1x{world}")
    session = sp._session
    session.place, session.rank = sp.plan.place(world, rank), rank
    session.settings = replace(session.settings, split=replace(session.settings.split, plan=sp.plan, world=world))
    return sp


def error_of(function: Callable[[], object]) -> str:
    """``"ValueError: ..."`` or ``"PeerError: ..."``, as ``function`` raises it, or ``"no error"``. No text may show
    places in the source of torch."""
    text = "no error"
    try:
        function()
    except (ValueError, startrail.PeerError) as error:
        text = f"{type(error).__name__}: {error}"
    assert not re.search(r"\.(cc|cpp|h|hpp):\d+|/pytorch/", text), text
    return text


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Wait until ``condition`` is true; False if it is not in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def holders_of(networks: list[int]) -> list[str]:
    """File descriptors, of any process, that keep one of these network namespaces alive."""
    names, found = {f"net:[{inode}]" for inode in networks}, []
    for path in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(path) in names:
                found.append(str(path))
        except OSError:
            continue  # it closed meanwhile
    return found


# --- texts


def write_bytes(folder: Path, sizes: Sequence[int], seed: int = 0) -> str:
    """Files of random bytes in subfolders; the zero byte, which is also padding, is as likely as any other."""
    chance = random.Random(seed)
    for number, size in enumerate(sizes):
        path = folder / f"{number % 3}" / f"{number:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(chance.randbytes(size))
    return str(folder)


def write_words(folder: Path, files: int = 40, seed: int = 0) -> str:
    """Files of 60 and more words that look a little like a program: something that a small model can learn."""
    words = ["for", "each", "step", "in", "ring:", "send()", "\n", "x = 1", "(", ")", "team", "wait"]
    chance = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        (folder / f"{number:02d}.txt").write_text(" ".join(chance.choices(words, k=60 + number)))
    return str(folder)


def write_tokenizer(path: Path, ids: Mapping[str, int], longest: int | None = None) -> str:
    """A tokenizer of whole words and single spaces, ``"?"`` for all others; it may ask to cut texts to ``longest``."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel(dict(ids), unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s"), "isolated")
    if longest is not None:
        made.enable_truncation(longest)
    made.save(str(path))
    return str(path)


# --- programs


def refusal(argv: Sequence[str], capture: Any) -> str:
    """The one line that the command line prints when it rejects ``argv``; ``capture`` is pytest's capsys or capfd."""
    assert main(list(argv)) == 2
    out, error = capture.readouterr()
    assert (out, error.count("\n")) == ("", 1), out + error
    return error


def free_port() -> int:
    """A port to listen on at loopback, below those that the system gives to others meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def fork_ranks(
    world: int, run: Callable[[], object], log: Path, leave: Callable[[int], object] = os._exit, seconds: float = 300.0
) -> list[int]:
    """Fork processes with the environment of torchrun's ranks, ``run`` in each, and return their exit codes. Their
    output goes to ``log``. Starts in a moment, where torchrun and its ranks import everything again.

    ``leave`` gets what ``run`` returned (0 for None, 1 after an exception), and ends the process. Ranks that take
    longer than ``seconds`` are killed.
    """
    port, children = free_port(), []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                sys.stdout = sys.stderr = open(log, "a", buffering=1)  # noqa: SIM115, the process ends with it
                for descriptor in (1, 2):
                    os.dup2(sys.stdout.fileno(), descriptor)
                faulthandler.enable()
                places = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, MASTER_PORT=port)
                os.environ.update({name: str(value) for name, value in places.items()})
                os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
                code = int(run() or 0)
            except BaseException:
                traceback.print_exc()
            leave(code)
        children.append(child)
    statuses: dict[int, int] = {}

    def all_ended() -> bool:
        ended = [os.waitpid(child, os.WNOHANG) for child in children if child not in statuses]
        statuses.update((child, status) for child, status in ended if child)
        return len(statuses) == world

    if not eventually(all_ended, seconds):
        for child in set(children) - statuses.keys():
            os.kill(child, signal.SIGKILL)
        eventually(all_ended)
    return [os.waitstatus_to_exitcode(statuses[child]) for child in children]


def torchrun(ranks: int, *options: str) -> list[str]:
    """The beginning of a command that runs a module on local ranks: ``[*torchrun(2), "-m", "startrail.cli", ...]``."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *options]


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Start a program with its output in pipes."""
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
