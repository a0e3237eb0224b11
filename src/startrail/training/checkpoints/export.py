"""A checkpoint's model as one safetensors file, for other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from startrail.training.checkpoints.pieces import empty_tensors, read_into
from startrail.training.checkpoints.saving import checkpoint_path, first_line, read_state, steps_in

MODEL_PREFIX = "model."


def export(checkpoint: Path, target: Path) -> str:
    """Write a checkpoint's model as one safetensors file with its recipe as metadata; return a line about it.
    ``checkpoint`` may be the folder of a run: then its newest good checkpoint is used."""
    try:
        from safetensors.torch import save_file
    except ModuleNotFoundError:
        raise ValueError("export needs safetensors: pip install 'startrail[train]'") from None
    checkpoint, state, skipped = _newest_good(checkpoint)
    if target.exists():
        raise ValueError(f"{target} already exists")
    partial = target.with_name(f".{target.name}.writing")
    try:
        tensors = empty_tensors(state["tensors"], MODEL_PREFIX)
        read_into(tensors, state["tensors"], checkpoint)
        named = {name.removeprefix(MODEL_PREFIX): tensor for name, tensor in tensors.items()}
        save_file(named, partial, metadata={"format": "pt", "recipe": json.dumps(state["recipe"])})
        partial.rename(target)
    except Exception as error:  # safetensors has its own exceptions
        partial.unlink(missing_ok=True)
        raise ValueError(f"cannot export {checkpoint} to {target}: {first_line(error)}") from error
    done = f"{target}: {len(tensors)} tensors of step {state['step']}, {target.stat().st_size / 2**20:.1f} MiB"
    return "\n".join([*skipped, done])


def _newest_good(checkpoint: Path) -> tuple[Path, dict[str, Any], list[str]]:
    """Return the checkpoint, its state, and the reasons that newer ones were skipped."""
    folder = checkpoint / "checkpoints"
    paths = [checkpoint_path(folder, step) for step in reversed(steps_in(folder))] or [checkpoint]
    problems: list[str] = []
    for path in paths:
        try:
            return path, read_state(path), [f"{problem}; used the one before it" for problem in problems]
        except ValueError as error:
            problems.append(str(error))
    raise ValueError(problems[0])
