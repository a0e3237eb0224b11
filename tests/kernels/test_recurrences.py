"""Recurrences in chunks against one token after the other in float64: outputs, states and the gradients of all."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from startrail.kernels import elementwise
from startrail.kernels.convolution import causal_conv1d
from startrail.kernels.elementwise import BLOCK, BLOCK_CHUNK, linear_recurrence, selective_scan
from startrail.kernels.recurrences import decayed_attention, gated_delta_rule, kimi_delta_rule
from startrail.kernels.runs import CHUNK
from tests.helpers import worst

DECAYS = (0.0, 0.1, 3.0, 60.0)  # the largest per token; with the last, a chunk keeps nothing of the state before it

# --- what each kind takes, and what one token of it does to a state: the reference


def heads_input(chance, batch, tokens, decay, rows=False):
    key_heads, sharing, dim, width = (chance.randint(1, most) for most in (2, 3, 9, 7))
    heads = key_heads * sharing
    q, k = torch.randn(2, batch, tokens, key_heads, dim).unbind()
    g = -decay * torch.rand(batch, tokens, heads, *([dim] if rows else []))
    beta = 2 * torch.rand(batch, tokens, heads)
    return [q, k, torch.randn(batch, tokens, heads, width), g, beta], (heads, dim, width)


def delta_token(state, q, k, v, g, beta):
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    state = state * g.exp().reshape(*g.shape[:2], -1, 1)
    error = v - torch.einsum("bhk,bhkv->bhv", k, state)
    state = state + torch.einsum("bhk,bhv->bhkv", k, beta.unsqueeze(-1) * error)
    return state, torch.einsum("bhk,bhkv->bhv", q * q.shape[-1] ** -0.5, state)


def decayed_token(state, q, k, v, g):
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    state = state * g.exp()[..., None, None] + torch.einsum("bhk,bhv->bhkv", k, v)
    return state, torch.einsum("bhk,bhkv->bhv", 0.7 * q, state)


def linear_input(chance, batch, tokens, decay):
    shape = [chance.randint(1, 6) for _ in range(chance.randint(0, 2))]
    a = (-decay * torch.rand(batch, tokens, *shape)).exp()
    a[:, chance.randrange(tokens)] = 0  # as RG-LRU has it where a document begins
    return [a, torch.randn(batch, tokens, *shape)], tuple(shape)


def linear_token(state, a, b):
    state = a * state + b
    return state, state


def selective_input(chance, batch, tokens, decay):
    channels, states = chance.randint(1, 6), chance.randint(1, 5)
    x, b, c = (torch.randn(batch, tokens, n) for n in (channels, states, states))
    return [x, torch.rand_like(x), -decay * torch.rand(channels, states), b, c], (channels, states)


def selective_token(state, x, dt, a, b, c):
    state = (dt.unsqueeze(-1) * a).exp() * state + (dt * x).unsqueeze(-1) * b.unsqueeze(1)
    return state, (state * c.unsqueeze(1)).sum(-1)


def without_beta(*arguments):
    inputs, shape = heads_input(*arguments)
    return inputs[:4], shape


KINDS = {
    "gated delta rule": (heads_input, partial(gated_delta_rule, normalize=True), delta_token),
    "kimi delta rule": (partial(heads_input, rows=True), partial(kimi_delta_rule, normalize=True), delta_token),
    "decayed attention": (without_beta, partial(decayed_attention, scale=0.7), decayed_token),
    "linear recurrence": (linear_input, linear_recurrence, linear_token),
    "selective scan": (selective_input, selective_scan, selective_token),
}


def reference(token, inputs, states, lengths):
    """Outputs, and the state after each run, one token after the other. ``selective_scan``'s a has no tokens."""
    outs, after, first = [], [], 0
    for run, length in enumerate(lengths):
        state = states[:, run]
        for number in range(first, first + length):
            of_token = [x if x.dim() == 2 and token is selective_token else x[:, number] for x in inputs]
            state, out = token(state, *of_token)
            outs.append(out)
        after.append(state)
        first += length
    return torch.stack(outs, 1), torch.stack(after, 1)


def multiply(recurrence, transition, state):
    return transition @ state if recurrence.matrix else transition * state


def random_lengths(chance, tokens):
    """Runs, some of them empty."""
    cuts = sorted(chance.choices(range(tokens + 1), k=chance.choice((0, 1, 2, 5))))
    return [stop - start for start, stop in zip([0, *cuts], [*cuts, tokens], strict=True)]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", KINDS)
def test_a_recurrence_is_that_of_one_token_after_the_other(kind, seed, monkeypatch):
    """Also from what runs do to a state: S' = M S + B, and the outputs with what that has computed."""
    monkeypatch.setattr(elementwise, "BLOCK", 50)
    chance = random.Random(seed)
    torch.manual_seed(seed)
    make, kernel, token = KINDS[kind]
    tokens = chance.choice((1, 2, 63, 64, 65, chance.randint(1, 300)))
    inputs, shape = make(chance, chance.randint(1, 3), tokens, chance.choice(DECAYS))
    lengths = random_lengths(chance, tokens)
    state = torch.randn(inputs[0].shape[0], len(lengths), *shape)
    values = [x.double().requires_grad_() for x in (*inputs, state)]
    *inputs, state = values
    expected = reference(token, inputs, state, lengths)
    cotangents = [torch.randn_like(x) for x in expected]
    grads = torch.autograd.grad(expected, values, cotangents)
    allowed = 1e-12 * max(1.0, *(x.abs().max().item() for x in (*expected, *grads)))

    assert worst(kernel(*inputs, lengths=lengths).run(state), expected) <= allowed
    recurrence = kernel(*inputs, lengths=lengths)
    moved = multiply(recurrence, recurrence.transition, state) + recurrence.contribution
    for found in (recurrence.run(state), (recurrence.outputs(state), moved)):
        assert worst(found, expected) <= allowed
        assert worst(torch.autograd.grad(found, values, cotangents, retain_graph=True), grads) <= allowed


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_runs_one_after_the_other_are_the_whole(kind, seed):
    """What a scan over ranks does: a chain over the runs gives each its state. Gradients go through the chain."""
    chance = random.Random(100 + seed)
    torch.manual_seed(100 + seed)
    make, kernel, _ = KINDS[kind]
    tokens = chance.randint(2, 300)
    inputs, shape = make(chance, 2, tokens, chance.choice(DECAYS))
    lengths = random_lengths(chance, tokens)
    values = [x.double().requires_grad_() for x in (*inputs, torch.randn(2, 1, *shape))]
    *inputs, first = values
    expected = kernel(*inputs).run(first)
    cotangents = [torch.randn_like(x) for x in expected]
    grads = torch.autograd.grad(expected, values, cotangents)
    recurrence = kernel(*inputs, lengths=lengths)
    moves, adds = recurrence.transition.unbind(1), recurrence.contribution.unbind(1)
    states = [first.squeeze(1)]
    for of_run, added in zip(moves, adds, strict=True):
        states.append(multiply(recurrence, of_run, states[-1]) + added)
    found = recurrence.outputs(torch.stack(states[:-1], 1)), states[-1].unsqueeze(1)
    allowed = 1e-12 * max(1.0, *(x.abs().max().item() for x in (*expected, *grads)))
    assert worst(found, expected) <= allowed
    assert worst(torch.autograd.grad(found, values, cotangents), grads) <= allowed


@pytest.mark.parametrize("kind", KINDS)
def test_float32_stays_accurate_over_long_runs_and_bfloat16_comes_back(kind):
    torch.manual_seed(0)
    make, kernel, _ = KINDS[kind]
    for decay in DECAYS:
        inputs, _ = make(random.Random(5), 1, 2000, decay)
        narrow = [x.requires_grad_() for x in inputs]
        wide = [x.detach().double().requires_grad_() for x in inputs]
        results = []
        for values in (narrow, wide):
            out, after = kernel(*values).run()
            results.append([out, after, *torch.autograd.grad((out.square().sum(), after.square().sum()), values)])
        for found, expected in zip(*results, strict=True):
            assert found.isfinite().all()
            assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
    out, after = kernel(*(x.detach().bfloat16() for x in inputs)).run()
    assert (out.dtype, after.dtype) == (torch.bfloat16, torch.float32)


class CountingMode(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_python_loops_over_chunks_and_not_over_tokens(kind):
    make, kernel, _ = KINDS[kind]
    counts = []
    for tokens in (2048, 4096):
        inputs, _ = make(random.Random(0), 1, tokens, 0.1)
        with CountingMode() as mode:
            kernel(*inputs).run()
        counts.append(mode.count)
    steps = 2 * BLOCK_CHUNK * (2048 // BLOCK) if kind == "selective scan" else 2048 // CHUNK
    assert counts[1] - counts[0] <= 15 * steps


def test_no_tokens_leave_the_state_alone():
    for make, kernel, _ in KINDS.values():
        inputs, shape = make(random.Random(0), 2, 1, 0.1)
        state = torch.randn(2, 1, *shape)
        nothing = kernel(*(x if make is selective_input and x.dim() == 2 else x[:, :0] for x in inputs))
        out, after = nothing.run(state)
        assert out.shape[1] == 0 and torch.equal(after, state)
        assert torch.equal(multiply(nothing, nothing.transition, state) + nothing.contribution, state)


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_are_refused(kind):
    make, kernel, _ = KINDS[kind]
    inputs = [x.requires_grad_() for x in make(random.Random(0), 1, 5, 0.1)[0]]
    with pytest.raises(ValueError, match="recurrences have no second derivatives"):
        torch.autograd.grad(kernel(*inputs).run()[0].square().sum(), inputs, create_graph=True)


def test_mistakes_are_named():
    q, v, g = torch.zeros(1, 6, 2, 4), torch.zeros(1, 6, 4, 3), torch.zeros(1, 6, 4)
    x, a = torch.zeros(1, 6, 2), torch.zeros(2, 3)
    for call, message in (
        (lambda: gated_delta_rule(q, q, v, g, g[:, :, :2]), r"beta has shape \(1, 6, 2\), expected \(1, 6, 4\)"),
        (lambda: gated_delta_rule(q, q[..., :3], v, g, g), r"k \(1, 6, 2, 3\) .* with q and k alike"),
        (lambda: decayed_attention(q, q, v[:, :, :3], g[:, :, :3]), "3 value heads are not a multiple of 2 key heads"),
        (lambda: kimi_delta_rule(q, q, v, g, g), r"g has shape \(1, 6, 4\), expected \(1, 6, 4, 4\)"),
        (lambda: gated_delta_rule(q, q, v, g, g, lengths=[3, 4]), r"lengths \[3, 4\] add up to 7, but there are 6"),
        (lambda: decayed_attention(q, q, v, g).run(torch.zeros(1, 4, 4, 3)), r"expected \(1, 1, 4, 4, 3\)"),
        (lambda: selective_scan(x, x, a, v[:, :, 0], v[:, :, 0]).run(x), r"the state has .* expected \(1, 1, 2, 3\)"),
        (lambda: linear_recurrence(x, x[:, :5]), r"a \(1, 6, 2\) and b \(1, 5, 2\)"),
        (lambda: selective_scan(x, x, a, x, x), "b and c must be"),
        (lambda: causal_conv1d(x, a), r"x \(1, 6, 2\) and weight \(2, 3\) do not have the same channels"),
        (lambda: causal_conv1d(x.mT, a, history=x.mT), r"history has shape \(1, 2, 6\), expected \(1, 2, 2\)"),
        (lambda: causal_conv1d(x.mT, a, activation="gelu"), "activation 'gelu' is not None, silu or swish"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("width", [1, 2, 4, 9])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_convolution_with_history_is_a_part_of_the_whole(width, activation):
    """Against a sum written out, with the gradients of the tokens before as well."""
    torch.manual_seed(width)
    for tokens in (1, 3, 40):
        x, history = torch.randn(2, 5, tokens), torch.randn(2, 5, width - 1)
        values = [y.double().requires_grad_() for y in (x, torch.randn(5, width), torch.randn(5), history)]
        x, weight, bias, history = values
        whole = torch.cat((history, x), 2)
        expected = bias.unsqueeze(1) + sum(
            weight[:, place, None] * whole[:, :, place : place + tokens] for place in range(width)
        )
        expected = expected if activation is None else F.silu(expected)
        found = causal_conv1d(x, weight, bias, activation, history)
        cotangent = torch.randn_like(found)
        given = values if width > 1 else values[:3]  # then there is no history
        grads = [torch.autograd.grad(out, given, cotangent) for out in (found, expected)]
        assert worst([found, *grads[0]], [expected, *grads[1]]) <= 1e-12
