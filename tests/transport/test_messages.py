"""Common first mistakes raise errors that tell the user what to write instead; the messages of an exchange."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import startrail
from startrail.launch.local import run_local
from startrail.transport.gloo import Gloo
from tests.helpers import qkv


@pytest.mark.parametrize(
    "wrong, message",
    [
        (
            lambda s, q, k, v: s.attention(q.numpy(), k, v),
            "q must be a tensor, got ndarray: convert it with torch.from_numpy",
        ),
        (lambda s, q, k, v: s.sp.sequence(), r"^sequence\(length\) needs the number of tokens of the whole sequence$"),
        (lambda s, q, k, v: s.sp.sequence(q), r"whole number of tokens, got a tensor of shape \(1, 4, 16, 8\)$"),
        (
            lambda s, q, k, v: s.sp.sequence(list(range(99))),
            r"^length=\[0, 1, 2, 3, 4, 5, ...\] must be a whole number",
        ),
        (lambda s, q, k, v: s.attention(q, k, None), "v must be a tensor, got NoneType"),
        (lambda s, q, k, v: s.positions(q), r"positions takes a device, not a Tensor: write positions\(x.device\)"),
        (lambda s, q, k, v: s.shard(q.numpy(), 2), "need a tensor, got ndarray"),
        (lambda s, q, k, v: s.unshard([1, 2], 0), "need a tensor, got list"),
    ],
)
def test_errors_of_a_sequence_name_the_remedy(wrong, message):
    sequence = startrail.SequenceParallel("1x1").sequence(16)
    with pytest.raises(ValueError, match=message):
        wrong(sequence, *qkv())


def test_unknown_arguments_of_attention_raise_type_error():
    sequence, (q, k, v) = startrail.SequenceParallel("1x1").sequence(16), qkv()
    for positional in (torch.ones(16, 16), True):
        with pytest.raises(TypeError, match="takes 4 positional arguments but 5 were given"):
            sequence.attention(q, k, v, positional)
    for name in ("attn_mask", "is_causal", "colour"):
        with pytest.raises(TypeError, match=f"got an unexpected keyword argument '{name}'"):
            sequence.attention(q, k, v, **{name: True})


def test_mesh_and_group_are_not_interchangeable():
    mesh = DeviceMesh.__new__(DeviceMesh)
    with pytest.raises(ValueError, match="group must be a ProcessGroup, got DeviceMesh: write mesh="):
        startrail.SequenceParallel("1x1", mesh)
    with pytest.raises(ValueError, match="mesh must be a DeviceMesh, got tuple"):
        startrail.SequenceParallel("1x1", mesh=(2, 2))


def test_an_exchange_over_heads_has_one_group_and_posts_receives_early(monkeypatch):
    """gloo has a polling thread for each group, and sends nothing before the receive is posted."""
    posted, post = [], Gloo._post

    def noting(transport, posted_now, *others):
        posted.append({message.pieces[0].kind for message in posted_now.messages if not message.send})
        return post(transport, posted_now, *others)

    monkeypatch.setattr(Gloo, "_post", noting)

    def on_rank(rank):
        sp = startrail.SequenceParallel("u2/u2")
        sequence = sp.sequence(16)
        q, k, v = (sequence.shard(x, 2).requires_grad_() for x in qkv())
        sequence.attention(q, k, v).backward(torch.randn_like(q))
        return posted, len({lane.group for lane in sp._session._runner.transport.lanes.values()})

    expected = [{"q", "out"}, set(), {"do", "dq"}, set()], 1  # inputs with results, results
    assert run_local(on_rank, 4, deadline=60) == [expected] * 4
