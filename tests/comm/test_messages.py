"""Mistakes that people make on the first day: each is told what to write instead."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import startrail
from tests.helpers import qkv


@pytest.mark.parametrize(
    "wrong, message",
    [
        (
            lambda s, q, k, v: s.attention(q, k, v, torch.ones(16, 16)),
            "got Tensor behind v: it takes no mask; say",
        ),
        (lambda s, q, k, v: s.attention(q, k, v, True), "everything else by name, but got bool behind v"),
        (lambda s, q, k, v: s.attention(q.numpy(), k, v), "q must be a tensor, got ndarray: torch.from_numpy makes"),
        (lambda s, q, k, v: s.attention(q, k, v, attn_mask=q), "has no argument attn_mask: say causal=True, .*mask="),
        (lambda s, q, k, v: s.attention(q, k, v, is_causal=True), "has no argument is_causal: write causal="),
        (lambda s, q, k, v: s.attention(q, k, v, colour=1), "has no argument colour: there is none such here"),
        (lambda s, q, k, v: s.sp.sequence(), r"^sequence\(length\) needs the number of tokens of the whole sequence$"),
        (lambda s, q, k, v: s.sp.sequence(q), r"whole number of tokens, got a tensor of shape \(1, 4, 16, 8\)$"),
        (
            lambda s, q, k, v: s.sp.sequence(list(range(99))),
            r"^length=\[0, 1, 2, 3, 4, 5, ...\] must be a whole number",
        ),
        (lambda s, q, k, v: s.attention(q, k, None), "v must be a tensor, got NoneType"),
        (lambda s, q, k, v: s.positions(q), r"positions takes a device, not a Tensor: .* write positions\(x.device\)"),
        (lambda s, q, k, v: s.shard(q.numpy(), 2), "need a tensor, got ndarray"),
        (lambda s, q, k, v: s.unshard([1, 2], 0), "need a tensor, got list"),
    ],
)
def test_a_sequence_says_what_to_write(wrong, message):
    sequence = startrail.SequenceParallel("1x1").sequence(16)
    with pytest.raises(ValueError, match=message):
        wrong(sequence, *qkv())


def test_a_mesh_is_no_group():
    mesh = DeviceMesh.__new__(DeviceMesh)
    with pytest.raises(ValueError, match="group must be a ProcessGroup, got DeviceMesh: write mesh="):
        startrail.SequenceParallel("1x1", mesh)
    with pytest.raises(ValueError, match="mesh must be a DeviceMesh, got tuple"):
        startrail.SequenceParallel("1x1", mesh=(2, 2))
