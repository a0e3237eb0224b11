"""Options that today's models need besides a causal mask: staircases, sinks, lse, another value dim, roll."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import startrail
from startrail.diagnostics.reference import Case
from startrail.launch.local import run_local
from tests.engine import plans
from tests.helpers import as_rank, error_of, qkv

OPTIONS = {
    "chunk": dict(causal=True, chunk=24),
    "prefix": dict(causal=True, blocks=((0, 35),)),
    "images": dict(causal=True, window=10, blocks=((5, 20), (45, 77)), documents=(0, 30, 101)),
    "slices": dict(slices=((0, 25, 0, 25), (25, 60, 0, 25), (60, 101, 0, 101, 1))),
    "sinks and a window": dict(slices=((0, 30, 0, 30, 1), (30, 101, 1, 101, 1, 1), (30, 101, 0, 4))),
    "tree": dict(
        slices=(
            (0, 40, 0, 40, 1),
            (40, 60, 40, 60, 1),
            (60, 75, 60, 75, 1),
            (75, 101, 75, 101, 1),
            (40, 101, 0, 40),
            (60, 75, 40, 60),
        ),
        kv_heads=2,
    ),
    "sinks": dict(causal=True, window=30, sinks=True),
    "lse": dict(causal=True, lse=True),
    "sinks and lse": dict(sinks=True, lse=True, dtype=torch.bfloat16),
    "narrow values": dict(causal=True, value_dim=8, kv_heads=2),
    "wide values": dict(causal=True, value_dim=40, sinks=True, lse=True),
    "softcap": dict(causal=True, softcap=1.5, kv_heads=2),
    "softcap, window, documents": dict(causal=True, softcap=0.7, window=30, documents=(0, 40, 101), kv_heads=4),
    "softcap, sinks, lse": dict(softcap=2.0, sinks=True, lse=True, value_dim=8, scale=1.0),
    "softcap in half precision": dict(causal=True, softcap=1.5, dtype=torch.bfloat16),
    "softcap in float64": dict(causal=True, softcap=1.5, kv_heads=2, sinks=True, lse=True, dtype=torch.float64),
    "float64": dict(causal=True, value_dim=8, sinks=True, lse=True, chunk=64, dtype=torch.float64),
}


def test_options_are_exact_under_every_kind_of_plan():
    cases = [
        Case(plan, 4, length=101, batch=2, q_heads=8, seed=seed + 20, **{"kv_heads": 8, **options})
        for plan in plans.OPTIONS
        for seed, options in enumerate(OPTIONS.values())
    ]
    for case, report in zip(cases, plans.run(cases), strict=True):
        if case.dtype == torch.float64:
            assert max(error.worst for error in report.errors.values()) < 2e-13


def test_a_cotangent_of_lse_only():
    """dout is zero but delta is not: `surrogate_out` needs a nonzero dout."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 4, 50, 8, dtype=torch.float64, generator=generator) for _ in range(3)]
    dlse = torch.randn(1, 4, 50, dtype=torch.float64, generator=generator)
    dlse[:, :, 7] = 0
    q, k = (x.clone().requires_grad_() for x in whole[:2])
    scores = (q @ k.mT * 8**-0.5).masked_fill(~torch.ones(50, 50, dtype=torch.bool).tril(), float("-inf"))
    truth = torch.autograd.grad(scores.logsumexp(-1), (q, k), dlse)

    def on_rank(rank):
        worst = []
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            sequence = startrail.SequenceParallel("u2/1x2").sequence(50)
            inputs = [sequence.shard(x, 2).to(dtype).requires_grad_() for x in whole]
            _, lse = sequence.attention(*inputs, causal=True, return_lse=True)
            dq, dk, dv = torch.autograd.grad(lse, inputs, sequence.shard(dlse, 2).to(lse.dtype))
            errors = [(x.double() - sequence.shard(y, 2)).abs().max() for x, y in zip((dq, dk), truth, strict=True)]
            worst.append(max(*errors, dv.abs().max().double()).item())
        return worst

    for wide, single, half in run_local(on_rank, 4):
        assert wide < 1e-12 and single < 2e-6 and half < 5e-2


def test_an_unused_lse_costs_nothing_in_the_backward_pass(monkeypatch):
    def nudge_zero_rows(*tensors):
        raise AssertionError("lse has no cotangent")

    monkeypatch.setattr("startrail.engine.attention.nudge_zero_rows", nudge_zero_rows)
    inputs = [x.requires_grad_() for x in qkv()]
    out, _ = startrail.SequenceParallel("1x1").sequence(16).attention(*inputs, return_lse=True)
    assert all(grad.any() for grad in torch.autograd.grad(out.square().sum(), inputs))


def test_roll_and_labels_across_shards_and_documents():
    for length, documents in ((21, [0, 21]), (21, [0, 1, 9, 10, 21]), (40, [0, 17, 40])):
        whole = torch.randn(2, length, 3, generator=torch.Generator().manual_seed(1))
        cotangent = torch.randn(2, length, 3, generator=torch.Generator().manual_seed(2))
        ids = torch.arange(1, length + 1).expand(2, -1)
        number = torch.bucketize(torch.arange(length), torch.tensor(documents)[1:], right=True)

        def rolled(x, shift, number=number):
            kept = (number == number.roll(shift)).clone()
            kept[:shift] = False if shift > 0 else kept[:shift]
            if shift < 0:
                kept[shift:] = False
            return torch.where(kept.view(1, -1, 1), x.roll(shift, 1), 7.0)

        def on_rank(rank, length=length, documents=documents, whole=whole, cotangent=cotangent, ids=ids, rolled=rolled):
            wrong = []
            for plan in ("u2/1x2", "1x4"):
                sequence = startrail.SequenceParallel(plan).sequence(length, documents)
                for shift in (-1, 1, -2):
                    x = sequence.shard(whole, 1).requires_grad_()
                    y = sequence.roll(x, shift, 1, 7.0)
                    (grad,) = torch.autograd.grad(y, x, sequence.shard(cotangent, 1))
                    once = whole.clone().requires_grad_()
                    (true,) = torch.autograd.grad(rolled(once, shift), once, cotangent)
                    if not torch.equal(sequence.unshard(y, 1), rolled(whole, shift)):
                        wrong.append((plan, shift, "values"))
                    if not torch.equal(sequence.unshard(grad, 1), true):
                        wrong.append((plan, shift, "gradients"))
                labels = sequence.shard_labels(ids)
                again = sequence.roll(sequence.shard(ids, 1), -1, 1, -100)
                if not torch.equal(labels, again) or (not (labels[:, -1:] == -100).any() and rank == 0):
                    wrong.append((plan, labels.tolist(), again.tolist()))
            return wrong

        assert run_local(on_rank, 4) == [[]] * 4


def test_next_tokens_match_full_logits():
    generator = torch.Generator().manual_seed(0)
    hidden, other = torch.randn(2, 2, 30, 16, dtype=torch.float64, generator=generator)
    weight = torch.randn(50, 16, dtype=torch.float64, generator=generator)
    labels = torch.randint(50, (2, 30), generator=generator)
    labels[:, 25:] = -100
    cotangents = torch.randn(3, 2, 30, dtype=torch.float64, generator=generator)

    def whole(hidden, weight):
        log_p, log_q = ((h @ w.T / 0.7).log_softmax(-1) for h, w in ((hidden, weight), (other, weight.detach())))
        counts = labels != -100
        chosen = log_p.gather(2, labels.clamp(min=0).unsqueeze(2)).squeeze(2)
        parts = (
            chosen,
            -(log_p.exp() * log_p).sum(-1),
            F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1),
        )
        return torch.stack([part * counts for part in parts])

    def ours(hidden, weight):
        return torch.stack(
            startrail.next_tokens(hidden, weight, labels, reference=(other, weight), chunk=7, temperature=0.7)
        )

    found = []
    for function in (whole, ours):
        inputs = [x.clone().requires_grad_() for x in (hidden, weight)]
        made = function(*inputs)
        found.append([made, *torch.autograd.grad(made, inputs, cotangents)])
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(*found, strict=True))
    for change in (dict(chunk=0), dict(temperature=0.0), dict(labels=labels[:, :3])):
        with pytest.raises(ValueError, match=r"chunk 0|temperature 0.0|do not fit"):
            startrail.next_tokens(**{"hidden": hidden, "weight": weight, "labels": labels, **change})


def test_wrong_options_raise():
    sequence = startrail.SequenceParallel("1x1").sequence(16)
    q, k, v = qkv()
    mask = startrail.Mask.from_slices([(0, 16, 0, 16, True)])
    for options, message in [
        (dict(chunk=2.5), "chunk=2.5 must be a whole number"),
        (dict(chunk=0), "chunk=0 must be at least 1"),
        (dict(softcap=0.0), "softcap=0.0 must be None or a finite number greater than 0"),
        (dict(softcap=float("inf")), "softcap=inf must be"),
        (dict(softcap="50"), "softcap='50' must be"),
        (dict(softcap=True), "softcap=True must be"),
        (dict(sinks=torch.zeros(3)), "sinks must hold one number for each of the 4 query heads"),
        (dict(sinks=[1.0] * 4), "sinks must be a tensor"),
        (dict(mask=mask, causal=True), "pass either mask= or causal/window/chunk, not both"),
        (dict(mask="causal"), "mask must be a startrail.Mask, got str"),
        (dict(mask=startrail.Mask(documents=(0, 16))), "documents and blocks belong to the sequence"),
        (dict(mask=startrail.Mask.from_slices([(0, 17, 0, 16)])), "slices end at 17, but the sequence has 16"),
    ]:
        assert message in error_of(lambda: sequence.attention(q, k, v, **options))  # noqa: B023
    sp = sequence.sp
    for blocks, message in [([(0, 17)], "blocks end at 17"), ([(3, 2)], "in order"), ("ab", "pairs (start, stop)")]:
        assert message in error_of(lambda: sp.sequence(16, blocks=blocks))  # noqa: B023
    transposed = [x.transpose(1, 2) for x in (q, k, v)]
    assert "these look like (batch, tokens, heads, dim)" in error_of(lambda: sequence.attention(*transposed))
    assert "neither shifted nor split" in error_of(lambda: sequence.shard_labels(torch.zeros(1, 8, dtype=torch.long)))
    assert "labels must be whole numbers" in error_of(lambda: sequence.shard_labels(torch.zeros(1, 16)))
    ints = torch.zeros(4, dtype=torch.int64)
    assert "fill_value=0.5 is not a value of torch.int64" in error_of(
        lambda: as_rank(0, 4).sequence(16).roll(ints, 3, dim=0, fill_value=0.5)
    )


def test_ranks_with_different_data_raise_on_the_first_call():
    def on_rank(rank):
        sp = startrail.SequenceParallel("1x2", timeout=20)
        sequence = sp.sequence(16)
        sequence.shard(torch.arange(16) + rank, 0)
        first = error_of(lambda: sequence.attention(*qkv(8)))
        dist.barrier()
        sp = startrail.SequenceParallel("1x2", timeout=20)
        sequence = sp.sequence(16)
        sequence.shard(torch.arange(16), 0)
        return first, error_of(lambda: sequence.attention(*qkv(8)))

    for first, second in run_local(on_rank, 2, deadline=60):
        assert "they were given different data" in first and "data digest" in first
        assert second == "no error"


def test_sum_gradients_raises_if_they_are_reduced_already():
    def on_rank(rank):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2)
        model(torch.ones(1, 2) * (rank + 1)).sum().backward()
        for x in model.parameters():
            dist.all_reduce(x.grad)
        first = error_of(lambda: startrail.sum_gradients(model.parameters()))
        torch.manual_seed(rank)
        other = torch.nn.Linear(2, 2)
        other(torch.ones(1, 2)).sum().backward()
        return first, error_of(lambda: startrail.sum_gradients(other.parameters()))

    for reduced, different in run_local(on_rank, 2, deadline=60):
        assert "gradients are the same on all ranks before they are summed" in reduced
        assert "parameter 0 (2, 2) is not the same on all ranks" in different


def test_the_gradient_of_a_sink_with_little_weight_is_accurate():
    """It is a multiple of 1 - w, where w is the weight of the other keys: rounding w would leave few digits."""
    torch.manual_seed(0)
    q, k, v, dout = torch.randn(4, 1, 2, 64, 16)
    sequence, grads = startrail.SequenceParallel("1x1").sequence(64), []
    for dtype in (torch.float32, torch.float64):
        sinks = torch.tensor([-6.0, -9.0], dtype=dtype, requires_grad=True)
        out = sequence.attention(*(x.to(dtype) for x in (q, k, v)), sinks=sinks)
        grads += torch.autograd.grad(out, sinks, dout.to(dtype))
    assert ((grads[0] - grads[1]) / grads[1]).abs().max() < 1e-5
