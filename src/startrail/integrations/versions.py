"""The versions of transformers that startrail was tested with, and where they differ."""

from __future__ import annotations

import warnings

import transformers
from transformers import PreTrainedModel, masking_utils

TESTED = ((5, 22), (5, 23))  # (major, minor), oldest first; pyproject.toml requires the oldest

# Chunks of packed documents count from position 0 of each document since 5.23, from the first token of the row before.
CHUNKS_FOLLOW_POSITIONS = hasattr(masking_utils, "remap_positions_for_packed_sequence")

_warned: set[str] = set()


def warn_if_untested() -> None:
    """Warn once per version that was not tested."""
    version = transformers.__version__
    if tuple(int(part) for part in version.split(".")[:2]) not in TESTED and version not in _warned:
        _warned.add(version)
        tested = " and ".join(f"{major}.{minor}" for major, minor in TESTED)
        warnings.warn(
            f"startrail was tested with transformers {tested}, this is {version}: run `startrail verify` to check your "
            "model",
            stacklevel=3,
        )


def is_checkpointing(model: PreTrainedModel) -> bool:
    """True if the model recomputes activations. 5.23 renamed the property and deprecated its old name."""
    renamed = hasattr(type(model), "is_activation_checkpointing")
    return bool(model.is_activation_checkpointing if renamed else model.is_gradient_checkpointing)
