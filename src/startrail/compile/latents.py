"""Latent attention (MLA): attention whose keys and values travel compressed, as one narrow latent per token.

All heads expand their keys and values from the same latent, k = [latent W_k ; k_rope] and v = latent W_v. So the "kv"
piece is (latent ; k_rope), of a single head, and "dkv" is its gradient. Everything else is as in `attention`: the
plans, the masks, the choice of keys on demand, the proof. A rank expands the pieces that it computes with, for its
heads.

>>> call = replace(Attention.of(4096, 1, 16, 16, 192, causal=True), value_dim=128)
>>> problem = LatentAttention.from_expanded(call, rank=512, rope_dim=64)
>>> problem.sizes(Plan.parse("1x8"), local=512).by_kind["kv"]       # 512 tokens x 576 x 2 bytes
589824
>>> problem.expanded.sizes(Plan.parse("1x8"), local=512).by_kind["kv"]   # 16 heads x (192 + 128)
5242880
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from startrail.compile.attention import Attention
from startrail.schedule.plan import Plan
from startrail.schedule.program import Program
from startrail.schedule.sizes import ITEMSIZES, Field, Sizes
from startrail.schedule.values import BACKWARD, Block, Pass

HELD_EXPANSIONS = 2  # shards whose keys and values a kernel holds expanded at a time


def ends_of_columns(program: Program) -> frozenset[Block]:
    """The last of the blocks in a row that have the same column: the gradients of its keys and values are added up
    until then, and become the latent's at once, also if that is sent before the next block.

    >>> from startrail.schedule.program import build_program
    >>> program = build_program(Plan.parse("2x2,keep=all"), 4, 0, BACKWARD)
    >>> for step in program.steps[:4]: print(step)
    post do1<1@0 do0>1@0 | 0x2
    1x2
    post dkv0<2@0 dkv2>2@0 | 1x0
    post dq0<1@0 dq1>1@0 | 0x0
    >>> sorted(map(str, ends_of_columns(program)))
    ['0x0', '1x2']
    """
    ends, last = [], None
    for step in program.steps:
        sent = {(post.piece.shard, post.piece.group) for post in step.posts if post.send and post.piece.kind == "dkv"}
        if last is not None and (last.column, last.group) in sent:
            ends.append(last)
            last = None
        for block in step.blocks:
            if last is not None and (last.column, last.group) != (block.column, block.group):
                ends.append(last)
            last = block
    return frozenset(ends if last is None else [*ends, last])


@dataclass(frozen=True)
class LatentAttention(Attention):
    """``rank`` is the width of the latent, ``rope_dim`` that of the part of the keys that all heads share. ``kv_heads``
    is 1: all heads share the latent."""

    rank: int = 512
    rope_dim: int = 64

    @classmethod
    def from_expanded(cls, call: Attention, rank: int, rope_dim: int) -> LatentAttention:
        """``call`` with keys and values that travel as latents."""
        shape = call.heads, 1, call.head_dim, call.value_dim
        return cls(call.boundaries, call.batch, call.dtype, call.wire, call.mask, *shape, rank, rope_dim)

    @property
    def expanded(self) -> Attention:
        """The same attention with keys and values that are expanded by their owner, and travel so."""
        shape = self.heads, self.heads, self.head_dim, self.value_dim
        return Attention(self.boundaries, self.batch, self.dtype, self.wire, self.mask, *shape)

    @property
    def absorbed(self) -> Attention:
        """The same attention with queries that absorb the expansion: all heads attend to the latents themselves."""
        return replace(self.expanded, kv_heads=1, head_dim=self.rank + self.rope_dim, value_dim=self.rank)

    def sizes(self, plan: Plan, local: int) -> LatentSizes:
        itemsize, wire = ITEMSIZES[self.dtype], ITEMSIZES[self.wire or self.dtype]
        shape = self.batch, self.heads, 1, self.head_dim
        return LatentSizes(plan, local, *shape, itemsize, wire, self.value_dim, (), self.rank, self.rope_dim)

    def __str__(self) -> str:
        return f"latents of {self.rank} + {self.rope_dim}, {super().__str__()}"


@dataclass(frozen=True)
class LatentSizes(Sizes):
    """Each rank that computes some of the heads gets a copy of the latents. Groups split the batch; if it is too small,
    they split the heads, and each gets a copy, too."""

    rank: int = 512
    rope_dim: int = 64

    @cached_property
    def copies(self) -> int:
        plan = self.plan
        splits_heads = self.batch % plan.groups > 0 and self.q_heads % (plan.heads * plan.groups) == 0
        return plan.heads * (plan.groups if splits_heads else 1)

    @cached_property
    def split_heads(self) -> bool:
        return self.copies == self.plan.heads * self.plan.groups

    def fields(self, kind: str, tokens: int) -> tuple[Field, ...]:
        if kind not in BACKWARD.by_column:
            return super().fields(kind, tokens)
        batch = self.batch if self.split_heads else self.batch // self.plan.groups
        return (Field((batch, 1, tokens, self.rank + self.rope_dim), kind in self.plan.running_sums),)

    def heads_of(self, head: int, group: int) -> slice:
        """The heads that head rank ``head`` computes for a piece of a group.

        >>> call = replace(Attention.of(64, 1, 8, 8, 192, causal=True), value_dim=128)
        >>> problem = LatentAttention.from_expanded(call, rank=512, rope_dim=64)
        >>> problem.sizes(Plan.parse("u2/1x2,groups=2"), local=16).heads_of(head=1, group=1)
        slice(6, 8, None)
        """
        share = self.q_heads // self.copies
        first = (head * (self.copies // self.plan.heads) + (group if self.split_heads else 0)) * share
        return slice(first, first + share)

    @property
    def expanded_bytes(self) -> int:
        """Bytes of the keys and values of a whole piece in the dtype of accumulators, for a rank's heads. Some kernels
        take values as wide as keys only."""
        batch, heads, tokens = self.shapes("q", self.tokens)[0][:3]
        return batch * heads * tokens * 2 * max(self.head_dim, self.out_dim) * self._wide

    @property
    def weight_bytes(self) -> int:
        """Bytes of W_k and W_v in the dtype of accumulators."""
        return self.q_heads * (self.head_dim - self.rope_dim + self.out_dim) * self.rank * self._wide

    def peak_bytes(self, pass_: Pass, world: int) -> int:
        """As for attention, and: the expanded keys and values of ``HELD_EXPANSIONS`` pieces, and of one while it is
        made. The backward pass adds up their gradients for one piece at a time, holds those of a tile meanwhile, and
        rearranges them for a matrix product. Both hold the weights as the kernel takes them, and the backward pass also
        their gradients, and those from one piece."""
        expansions = HELD_EXPANSIONS + (1 if pass_.is_forward else 3)
        weights = 1 if pass_.is_forward else 3
        return super().peak_bytes(pass_, world) + expansions * self.expanded_bytes + weights * self.weight_bytes
