"""What a user's type checker sees of the public API."""

import os
import re
import subprocess
import sys

import pytest

from tests.helpers import ROOT

SNIPPET = """
from torch import Tensor
from startrail import Mask, SequenceParallel

def attend(sp: SequenceParallel, x: Tensor, wanted: bool) -> None:
    sequence = sp.sequence(16, documents=[0, 5, 16])
    reveal_type(sequence.attention(x, x, x, causal=True, window=4, scale=0.5))
    reveal_type(sequence.attention(x, x, x, mask=Mask(causal=True), return_lse=False))
    reveal_type(sequence.attention(x, x, x, return_lse=True))
    reveal_type(sequence.attention(x, x, x, sinks=x, return_largest=True))
    reveal_type(sequence.attention(x, x, x, softcap=30.0, return_lse=True, return_largest=True))
    reveal_type(sequence.attention(x, x, x, return_lse=wanted))
    sequence.attention(x, x, x, colour=1)
    sequence.attention(x, x, x, True)
    sequence.attention(x, x, x, window="4")
    sequence.length = 3
"""
EXPECTED = [
    'Revealed type is "Tensor"',
    'Revealed type is "Tensor"',
    'Revealed type is "tuple[Tensor, Tensor]"',
    'Revealed type is "tuple[Tensor, Tensor]"',
    'Revealed type is "tuple[Tensor, Tensor, Tensor]"',
    'Revealed type is "Tensor | tuple[Tensor, ...]"',
    'Unexpected keyword argument "colour"',
    'No overload variant of "attention" of "Sequence" matches argument types "Tensor", "Tensor", "Tensor", "bool"',
    'No overload variant of "attention" of "Sequence" matches argument types "Tensor", "Tensor", "Tensor", "str"',
    'Property "length" defined in "Sequence" is read-only',
]


def test_mypy_knows_what_attention_takes_and_returns(tmp_path):
    pytest.importorskip("mypy")
    path = tmp_path / "users.py"
    path.write_text(SNIPPET)
    stub = tmp_path / "stubs" / "torch"  # reading all of torch takes half a minute without a cache
    stub.mkdir(parents=True)
    for name in ("__init__", "distributed"):
        (stub / f"{name}.pyi").write_text(
            "from typing import Any\nclass Tensor: ...\ndef __getattr__(name: str) -> Any: ...\n"
        )
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", "--cache-dir", str(tmp_path), str(path)]
    env = {**os.environ, "MYPYPATH": f"{stub.parent}:{ROOT / 'src'}"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    found = {}
    for line, text in re.findall(r"users\.py:(\d+): (?:error|note): (.*)", done.stdout):
        found.setdefault(int(line), text.replace("torch.", ""))
    assert len(found) == len(EXPECTED), done.stdout + done.stderr
    assert all(text.startswith(start) for text, start in zip(found.values(), EXPECTED, strict=True)), found
