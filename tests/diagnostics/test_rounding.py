"""What arithmetic may err: one process errs just so much, and nothing that is wrong is taken for it."""

from dataclasses import replace

import pytest
import torch

from startrail.diagnostics.exactness import check_cases
from startrail.diagnostics.reference import Case, Error, make_data
from startrail.engine import runtime
from startrail.kernels import Partial, Sum, accumulate
from startrail.kernels import max_logits as largest
from startrail.kernels.base import Kernel
from startrail.kernels.cpu import CpuKernel

SMALL = Case("1x2", 2, length=40, causal=True, sinks=True, lse=True, scale=0.7)
FEW = Case("1x2", 2, length=4, q_heads=2, kv_heads=1, head_dim=1, scale=1.0)
HALF = Case("1x2", 2, length=40, dtype=torch.bfloat16, scale=0.7)
WIDE = replace(SMALL, dtype=torch.float64)


@pytest.mark.parametrize(
    "case",
    [
        Case("1x1", 1, length=200, head_dim=64),
        Case("1x1", 1, length=200, head_dim=64, scale=1.0, causal=True),
        Case("1x1", 1, length=300, q_heads=8, kv_heads=1, head_dim=1, window=40),
        Case("1x1", 1, length=12, batch=20, head_dim=16, sinks=True, lse=True),
        Case("1x2", 2, length=200, head_dim=33, dtype=torch.float64),  # on one rank it is the truth itself
    ],
    ids=str,
)
def test_roundings_explain_what_one_process_errs(case):
    """Not fitted, and not far off: the errors of our kernel are 0.3 to 1 of the deviations that the counted
    roundings give them."""
    (report,) = check_cases([case])
    spreads = {name: error.spread for name, error in report.errors.items()}
    assert all(0.2 < spread < report.floor[name] for name, spread in spreads.items()), spreads
    assert max(spreads.values()) > 0.5, spreads


def narrow(x):
    return x.bfloat16().to(x.dtype)


def coarse(x):
    """With two bits less than bfloat16 has."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2**6).round() / 2**6, exponent)


def change_merges(change):
    def with_patch(patch):
        merge = Partial.merge
        patch(Partial, "merge", lambda self, out, lse, *rest, **kw: merge(self, *change(out, lse), *rest, **kw))

    return with_patch


def change_sums(change):
    def with_patch(patch):
        add = Sum.add
        patch(Sum, "add", lambda self, grad, *rest, **kw: add(self, change(grad), *rest, **kw))

    return with_patch


def lose_a_key(patch):
    forward = CpuKernel.forward_tile

    def forward_tile(self, q, k, v, look):
        if k.shape[2] > 2 and not look.causal and look.mask is None:
            k, v = k[:, :, 1:], v[:, :, 1:]
        return forward(self, q, k, v, look)

    patch(CpuKernel, "forward_tile", forward_tile)


def forget_the_sum_of_weights(patch):
    patch(accumulate.torch, "logaddexp", torch.maximum)


def round_delta(patch):
    rounded = runtime.row_sums
    patch(runtime, "row_sums", lambda *arguments: narrow(rounded(*arguments)))


def round_logits_of_the_backward_pass(patch):
    backward = Kernel.backward
    patch(Kernel, "backward", lambda self, dout, q, *rest, **kw: backward(self, dout, narrow(q), *rest, **kw))


def in_float32(patch):
    forward = CpuKernel.forward_tile

    def forward_tile(self, q, k, v, look):
        out, lse = forward(self, q.float(), k.float(), v.float(), look)
        return out.double(), lse.double()

    patch(CpuKernel, "forward_tile", forward_tile)


MISTAKES = {
    "a lost key": (lose_a_key, SMALL),
    "a merge that forgets to add up weights": (forget_the_sum_of_weights, SMALL),
    "a factor": (change_merges(lambda out, lse: (out * (1 + 1e-5), lse)), SMALL),
    "a factor of few": (change_merges(lambda out, lse: (out * (1 + 1e-5), lse)), FEW),
    "an lse that is off": (change_merges(lambda out, lse: (out, lse + 1e-4)), SMALL),
    "bfloat16 outputs": (change_merges(lambda out, lse: (narrow(out), lse)), SMALL),
    "bfloat16 outputs of few": (change_merges(lambda out, lse: (narrow(out), lse)), FEW),
    "bfloat16 gradients": (change_sums(narrow), SMALL),
    "bfloat16 gradients of few": (change_sums(narrow), FEW),
    "a bfloat16 delta": (round_delta, SMALL),
    "bfloat16 queries": (round_logits_of_the_backward_pass, SMALL),
    "a lost key in bfloat16": (lose_a_key, HALF),
    "bfloat16 outputs with two bits less": (change_merges(lambda out, lse: (coarse(out), lse)), HALF),
    "gradients of bfloat16 with a factor": (change_sums(lambda grad: grad * 1.02), HALF),
    "float32 for float64": (in_float32, WIDE),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_not_taken_for_roundings(monkeypatch, mistake):
    spoil, case = MISTAKES[mistake]
    (report,) = check_cases([case])
    assert not report.verdict()
    spoil(monkeypatch.setattr)
    (report,) = check_cases([case])
    assert report.verdict()


@pytest.mark.parametrize("wrong", [lambda x: x * (1 + 2.0**-22), lambda x: narrow(x), lambda x: x - 0.01])
def test_the_largest_logits_are_rounded_once(monkeypatch, wrong):
    case = Case("1x2", 2, length=64, head_dim=64, scale=1.0)
    assert case.with_max_logits and not check_cases([case])[0].verdict()
    exactly = largest._exactly
    monkeypatch.setattr(largest, "_exactly", lambda *arguments: wrong(exactly(*arguments)))
    assert any("largest" in text for text in check_cases([case])[0].verdict())


def test_errors_beyond_what_an_element_may_err_are_found_though_others_may_err_more():
    """Twenty deviations of an element that hardly errs are less than what another may err."""
    data = make_data(Case("1x1", 1, length=64, head_dim=64, scale=1.0))
    floor, exact = data.floor["dv"], data.exact["dv"]
    place = floor.deviation.flatten().argmin()
    spoilt = exact.flatten().clone()
    spoilt[place] += 20 * floor.deviation.flatten()[place]
    found = Error.of(spoilt.view_as(exact), exact, floor)
    assert found.excess == found.worst < floor.each.max()
