"""The chunked cross-entropy against F.cross_entropy, and the other losses on a single rank."""

import pytest
import torch
import torch.nn.functional as F

from startrail import losses
from startrail.launch.local import run_local
from startrail.losses import chunked_cross_entropy, global_mean, next_tokens, sum_gradients
from tests.helpers import LiveBytes


def problem(dtype=torch.float64, batch=2, tokens=9, width=5, vocab=11):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(batch, tokens, width, dtype=dtype, generator=generator).requires_grad_()
    weight = torch.randn(vocab, width, dtype=dtype, generator=generator).requires_grad_()
    labels = torch.randint(vocab, (batch, tokens), generator=generator)
    labels[0, 3:6] = -100
    return hidden, weight, labels


@pytest.mark.parametrize("chunk", [1, 4, 18, 1000])
def test_loss_and_gradients_match_cross_entropy(chunk):
    hidden, weight, labels = problem()
    upstream = torch.tensor(-1.7, dtype=torch.float64)
    loss_sum, count = chunked_cross_entropy(hidden, weight, labels, chunk)
    ours = torch.autograd.grad(loss_sum, (hidden, weight), upstream)
    truth = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), reduction="sum")
    theirs = torch.autograd.grad(truth, (hidden, weight), upstream)
    assert count == (labels != -100).sum() == 15
    for a, b in zip((loss_sum, *ours), (truth, *theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_gradcheck_and_partial_gradients():
    hidden, weight, labels = problem(tokens=5)
    assert torch.autograd.gradcheck(lambda h, w: chunked_cross_entropy(h, w, labels, 3)[0], (hidden, weight))
    (only,) = torch.autograd.grad(chunked_cross_entropy(hidden, weight.detach(), labels, 3)[0], hidden)
    both = torch.autograd.grad(chunked_cross_entropy(hidden, weight, labels, 3)[0], (hidden, weight))
    assert torch.equal(only, both[0])
    (only,) = torch.autograd.grad(chunked_cross_entropy(hidden.detach(), weight, labels, 3)[0], weight)
    assert torch.equal(only, both[1])
    with torch.no_grad():
        assert not chunked_cross_entropy(hidden, weight, labels, 3)[0].requires_grad


def test_no_tensor_as_large_as_the_logits_is_ever_made():
    hidden, weight, labels = problem(batch=1, tokens=64, width=4, vocab=32)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    with Watch():
        chunked_cross_entropy(hidden, weight, labels, 8)[0].backward()
    assert largest == max(8 * 32, 64 * 4)


@pytest.mark.parametrize("used", ["log_probs", "entropy", "kl", "all"])
def test_memory_of_next_tokens_does_not_grow_with_the_tokens(used):
    """Apart from the inputs' gradients and one number per token: only a chunk's logits exist, whatever is used."""
    vocab, width, chunk, extra = 512, 4, 16, {}
    for tokens in (64, 1024):
        hidden, weight, labels = problem(torch.float32, 1, tokens, width, vocab)
        with LiveBytes() as memory:
            found = next_tokens(hidden, weight, labels, reference=(hidden, weight), chunk=chunk)
            parts = found if used == "all" else [getattr(found, used)]
            sum(part.sum() for part in parts).backward()
        extra[tokens] = memory.peak
    logits = 4 * vocab * chunk
    assert extra[1024] - extra[64] < 4 * (1024 - 64) * (2 * width + 16) < 60 * logits
    assert extra[64] < 12 * logits + 4 * (vocab * width * 4 + 64 * 32)


def test_next_tokens_in_autocast_and_bfloat16():
    hidden, weight, labels = problem(torch.float32, tokens=30)
    exact = next_tokens(hidden.double(), weight.double(), labels, chunk=7)
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight)]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            found = next_tokens(*inputs, labels, chunk=7)
        (found.log_probs.sum() + found.entropy.sum()).backward()
        assert [x.grad.dtype for x in inputs] == [dtype] * 2 and found.entropy.dtype == torch.float32
        assert (found.log_probs - exact.log_probs).norm() < 2e-2 * exact.log_probs.norm()


def test_bfloat16_sums_in_float32():
    hidden, weight, labels = problem(torch.bfloat16, tokens=300)
    loss_sum, _ = chunked_cross_entropy(hidden, weight, labels, 7)
    grads = torch.autograd.grad(loss_sum, (hidden, weight))
    precise = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    truth, _ = chunked_cross_entropy(*precise, labels, 7)
    exact = torch.autograd.grad(truth, precise)
    assert loss_sum.dtype == torch.float32
    assert abs(loss_sum / truth - 1) < 1e-2
    for ours, theirs in zip(grads, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - theirs).norm() < 1e-2 * theirs.norm()


def test_autocast_keeps_the_parameters_dtype():
    hidden, weight, labels = problem(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss_sum, _ = chunked_cross_entropy(hidden, weight, labels, 4)
    loss_sum.backward()
    assert (loss_sum.dtype, hidden.grad.dtype, weight.grad.dtype) == (torch.float32,) * 3


def test_without_labels_the_loss_is_zero_not_nan():
    hidden, weight, labels = problem()
    loss_sum, count = chunked_cross_entropy(hidden, weight, torch.full_like(labels, -100), 4)
    loss = global_mean(loss_sum, count)
    loss.backward()
    assert (count, loss, hidden.grad.abs().max(), weight.grad.abs().max()) == (0, 0, 0, 0)


def test_one_process_needs_no_process_group():
    parameter = torch.nn.Parameter(torch.tensor([1.0, 3.0]))
    loss = global_mean(parameter.sum(), torch.tensor(2))
    loss.backward()
    sum_gradients([parameter])
    assert loss.item() == 2.0
    assert parameter.grad.tolist() == [0.5, 0.5]


def test_mistakes_say_what_was_given():
    hidden, weight, labels = problem()
    with pytest.raises(ValueError, match="chunk 0 must be at least 1"):
        chunked_cross_entropy(hidden, weight, labels, 0)
    with pytest.raises(ValueError, match=r"hidden \(2, 9, 5\), weight \(11, 5\) and labels \(2, 8\) do not fit"):
        chunked_cross_entropy(hidden, weight, labels[:, 1:], 4)


def test_counts_beyond_the_range_of_the_losss_dtype():
    """A float16 holds at most 65,504."""
    loss_sum = torch.tensor(30_000.0, dtype=torch.float16, requires_grad=True)
    loss = global_mean(loss_sum, 120_000)
    loss.backward()
    assert loss.dtype == torch.float16 and loss.item() == 0.25
    assert loss_sum.grad.item() == pytest.approx(1 / 120_000, rel=2e-2), "where one step of float16 is 6e-8"


def test_sum_gradients_of_tied_and_of_sparse_parameters(monkeypatch):
    """One that comes twice is summed once, also in another bucket. An embedding's rows differ between ranks."""
    monkeypatch.setattr(losses, "BUCKET_BYTES", 1)

    def on_rank(rank):
        table = torch.nn.Embedding(4, 2, sparse=True)
        table(torch.tensor([rank, 2])).sum().backward()
        tied = torch.nn.Parameter(torch.ones(2))
        tied.grad = torch.full((2,), rank + 1.0)
        losses.sum_gradients([tied, table.weight, tied], check=False)
        return tied.grad.tolist(), table.weight.grad[:, 0].tolist()

    assert run_local(on_rank, 2) == [([3.0, 3.0], [1.0, 1.0, 2.0, 0.0])] * 2
