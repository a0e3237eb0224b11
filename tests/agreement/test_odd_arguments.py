"""Whatever an argument of a call is, on all ranks or on one: a result, or one line that says what is wrong, on every
rank and long before the timeout. The next call is right."""

import random
import time

import torch
import torch.distributed as dist

import startrail
from startrail.launch.local import run_local
from tests.helpers import FULL, error_of, tensors, worst

LENGTH, LOCAL, TIMEOUT = 24, 12, 60
CASES = 600 if FULL else 160
ODD = [
    *(None, True, 3, -1, 2.5, float("nan"), 10**20, "x", "2", b"x", [], [1, 2], [None], {}, (0,), float, object()),
    *(torch.float16, torch.tensor(2)),
]


def odd_values(right):
    """What may be given instead. (On one rank, a tensor on no device would be no call at all.)"""
    if not isinstance(right, torch.Tensor):
        return ODD
    values = [*ODD, right.detach().numpy(), right.tolist(), right[None]]
    values += [right[:0], right[..., 1:], right.to_sparse()] if right.dim() else []
    values += [right[:, :0], right[:, 1:], right.mT] if right.dim() > 1 else []
    return values + [right.to(dtype) for dtype in (torch.int64, torch.bool, torch.float16, torch.complex64)]


def calls(sp):
    """Each call, and right arguments for it."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return torch.randn(*shape, generator=generator)

    def sequence():
        return sp.sequence(LENGTH, [0, 7, LENGTH])

    def scan(q, k, v, g, beta, **options):
        return sequence().scan(startrail.gated_delta_rule, q, k, v, g, beta, **options)

    def attend(made):
        return made.attention(*torch.zeros(3, 1, 2, LOCAL, 4))

    qkv = {name: numbers(1, 2, LOCAL, 4) for name in "qkv"}
    by_token = {name: numbers(1, LOCAL, 2, 4) for name in "qkv"}
    gates = dict(g=-numbers(1, LOCAL, 2).abs(), beta=numbers(1, LOCAL, 2).sigmoid())
    latents = dict(q=numbers(1, 2, LOCAL, 5), latent=numbers(1, LOCAL, 5), k_rope=numbers(1, LOCAL, 2))
    weights = dict(w_k=numbers(2, 3, 5), w_v=numbers(2, 4, 5))
    options = dict(causal=True, window=None, scale=None, sinks=None, softcap=None)
    x, ids = numbers(1, LOCAL, 3), torch.arange(LENGTH).view(1, LENGTH)
    return {
        "attention": (lambda **a: sequence().attention(**a), dict(**qkv, **options, chunk=None, mask=None)),
        "latent_attention": (lambda **a: sequence().latent_attention(**a), {**latents, **weights, **options}),
        "halo": (lambda **a: sequence().halo(**a), dict(x=x, before=2, dim=1)),
        "conv1d": (
            lambda **a: sequence().conv1d(**a),
            dict(x=numbers(1, 3, LOCAL), weight=numbers(3, 4), bias=numbers(3), activation="silu", dim=2),
        ),
        "scan": (scan, dict(**by_token, **gates, initial_state=None)),
        "unshard": (lambda **a: sequence().unshard(**a), dict(x=x, dim=1)),
        "roll": (lambda **a: sequence().roll(**a), dict(x=x, shift=1, dim=1, fill_value=0)),
        "shard": (lambda **a: sequence().shard(**a), dict(x=numbers(1, LENGTH, 3), dim=1, pad_value=0)),
        "shard_labels": (lambda **a: sequence().shard_labels(**a), dict(labels=ids, dim=1, ignore_index=-100)),
        "sequence": (
            lambda **a: attend(sp.sequence(**a)),
            dict(length=LENGTH, documents=[0, 7, LENGTH], blocks=[(0, 3)], shares=None),
        ),
        "packed": (lambda **a: attend(sp.sequence(LENGTH).packed(**a)), dict(documents=[0, 7, LENGTH])),
        "global_mean": (startrail.global_mean, dict(loss_sum=torch.tensor(3.0), count=2)),
        "sum_gradients": (lambda x: startrail.sum_gradients([x]), dict(x=torch.nn.Parameter(torch.ones(2)))),
    }


def cases():
    """(call, argument, number of the odd value), each on all ranks or on one."""
    made = calls(startrail.SequenceParallel("1x1"))
    every = [
        (call, name, number, everywhere)
        for call, (_, given) in made.items()
        for name, right in given.items()
        for number in range(len(odd_values(right)))
        for everywhere in (True, False)
    ]
    return random.Random(0).sample(every, CASES)


def is_right(sp):
    q, k, v, _ = tensors(LENGTH)
    sequence = sp.sequence(LENGTH)
    out = sequence.attention(*(sequence.shard(x, 2) for x in (q, k, v)), causal=True)
    kv_groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(kv_groups, 1) for x in (k, v))
    truth = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    return worst([out], [sequence.shard(truth, 2).to(out.dtype)]) < 2e-6


def test_odd_arguments_give_a_result_or_one_clear_line_on_every_rank():
    chosen = cases()

    def on_rank(rank):
        sp, found = startrail.SequenceParallel("1x2", timeout=TIMEOUT), []
        for call, name, number, everywhere in chosen:
            function, given = calls(sp)[call]
            if everywhere or rank == 1:
                given = given | {name: odd_values(given[name])[number]}
            start = time.monotonic()
            text = error_of(lambda: function(**given))  # noqa: B023
            seconds = time.monotonic() - start
            dist.barrier()
            found.append((text, seconds, error_of(lambda: is_right(sp) or 1 / 0)))
            dist.barrier()
        return found

    refused = 0
    for case, *both in zip(chosen, *run_local(on_rank, 2, deadline=900), strict=True):
        for text, seconds, after in both:
            refused += text != "no error"
            known = text.startswith(("no error", "ValueError: ", "PeerError: "))
            assert known and "\n" not in text and len(text) < 900, (case, text)
            assert seconds < TIMEOUT / 2 and after == "no error", (case, text, seconds, after)
    assert refused > CASES, "most of these values are wrong"
