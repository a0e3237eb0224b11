"""Where there is no GPU, Triton's kernels run in its interpreter, which must be said before Triton is imported."""

import os
from importlib.util import find_spec

import torch

collect_ignore = [] if find_spec("triton") else ["src/startrail/kernels/triton_kernels.py"]
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
