"""Pipeline parallelism (``torch.distributed.pipelining``) with the sequence of every stage split over its own ranks::

    mesh = init_device_mesh("cuda", (stages, ranks), mesh_dim_names=("pp", "sp"))
    sp = startrail.SequenceParallel("u2/1x2", mesh=mesh["sp"])
    microbatches = Microbatches(sp, mesh["pp"].get_group())
    ...                                     # a stage's forward pass takes ``number``: sequence = microbatches[number]
    numbers = microbatches.start([sp.sequence(length, documents) for documents in of_microbatches])
    schedule.step(*inputs, number=numbers, target=labels)

Every microbatch has documents of its own. A schedule splits tensors along their first dimension, so each call of a
stage gets its microbatch's number, by which it finds the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
import torch.distributed as dist
from torch import Tensor

from startrail._compat import device_of_group
from startrail.agreement.gather import gather_texts
from startrail.parallel import SequenceParallel
from startrail.sequence import Sequence


class Microbatches:
    """The sequences of a step's microbatches, on each rank of every stage. ``pipeline`` has one rank of every stage:
    those that pass the same tokens on. Raises ``ValueError`` on all of them if they do not split sequences alike."""

    def __init__(self, sp: SequenceParallel, pipeline: dist.ProcessGroup) -> None:
        self.pipeline, self.device = pipeline, device_of_group(pipeline)
        self.sequences: list[Sequence] = []
        self._compare("plan", f"{sp.plan} on rank {sp.rank} of {sp.world}, {sp.layout}")

    def start(self, sequences: SequenceOf[Sequence]) -> Tensor:
        """Begin a step with these. Returns their numbers, to be passed to the schedule. All microbatches must have
        equally many tokens per rank, because stages receive into buffers of one size."""
        cuts = "; ".join(str(sequence.documents.tolist()) for sequence in sequences)
        self._compare("documents", f"{len(sequences)} microbatches with documents {cuts}")
        of_ranks = [sequence._layout.counts for sequence in sequences]
        self._compare("tokens", f"{sorted(set(of_ranks))} tokens by rank")
        if not sequences:
            raise ValueError("a step needs at least one microbatch, got none")
        for rank, counts in enumerate(zip(*of_ranks, strict=True)):  # of all ranks, so that all raise
            if len(set(counts)) > 1:
                got = " or ".join(map(str, sorted(set(counts))))
                raise ValueError(
                    f"microbatches must have equally many tokens on a rank, got {got} on rank {rank}: pad the sequences"
                )
        self.sequences = list(sequences)
        return torch.arange(len(sequences))

    def __getitem__(self, number: Tensor) -> Sequence:
        started = len(self.sequences)
        if number.numel() != 1 or not 0 <= int(number) < started:
            raise ValueError(
                f"a stage runs microbatches {number.tolist()} at once, but {started} were started: call start() before "
                "each step, and give the schedule as many microbatches"
            )
        return self.sequences[int(number)]

    def _compare(self, what: str, mine: str) -> None:
        """Raise ``ValueError`` on all ranks of the pipeline unless they have the same text."""
        texts = gather_texts(mine, self.pipeline, self.device)
        if len(set(texts)) > 1:
            of_stages = "; ".join(f"stage rank {at}: {text}" for at, text in enumerate(texts))
            raise ValueError(f"the stages of a pipeline must have the same {what}: {of_stages}")
