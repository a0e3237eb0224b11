"""What a user's type checker sees of the public API. `make lint` checks this file with `mypy --strict`.

A wrong type fails there, and so does a mistake that mypy no longer finds, because its `type: ignore` is then unused.
"""

from typing import assert_type

from torch import Tensor

from startrail import Mask, SequenceParallel


def attend(sp: SequenceParallel, x: Tensor, wanted: bool) -> None:
    sequence = sp.sequence(16, documents=[0, 5, 16])
    assert_type(sequence.attention(x, x, x, causal=True, window=4, scale=0.5), Tensor)
    assert_type(sequence.attention(x, x, x, mask=Mask(causal=True), return_lse=False), Tensor)
    assert_type(sequence.attention(x, x, x, return_lse=True), tuple[Tensor, Tensor])
    assert_type(sequence.attention(x, x, x, sinks=x, return_largest=True), tuple[Tensor, Tensor])
    assert_type(sequence.attention(x, x, x, return_lse=True, return_largest=True), tuple[Tensor, Tensor, Tensor])
    assert_type(sequence.attention(x, x, x, return_lse=wanted), Tensor | tuple[Tensor, ...])
    sequence.attention(x, x, x, colour=1)  # type: ignore[call-overload]
    sequence.attention(x, x, x, True)  # type: ignore[call-overload]
    sequence.attention(x, x, x, window="4")  # type: ignore[call-overload]
    sequence.length = 3  # type: ignore[misc]
