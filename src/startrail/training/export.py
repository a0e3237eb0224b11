"""A checkpoint's model as one safetensors file, for other programs."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from startrail.training.saving import first_line, path_of, read_state, steps_in


def export(checkpoint: Path, target: Path) -> str:
    """Write a checkpoint's model as one safetensors file, with its recipe as metadata; says what was written.

    ``checkpoint`` may be a run's folder: its newest checkpoint then.
    """
    try:
        from safetensors.torch import save_file
    except ModuleNotFoundError:
        raise ValueError("export needs safetensors: pip install 'startrail[train]'") from None
    folder = checkpoint / "checkpoints"
    if steps := steps_in(folder):
        checkpoint = path_of(folder, steps[-1])
    state = read_state(checkpoint)
    if target.exists():
        raise ValueError(f"{target} exists already")
    partial = target.with_name(f".{target.name}.writing")
    try:
        tensors = _read_model(checkpoint)
        save_file(tensors, partial, metadata={"format": "pt", "recipe": json.dumps(state["recipe"])})
        partial.rename(target)
    except (Exception, CheckpointException) as error:  # unpickling a damaged file can raise anything
        partial.unlink(missing_ok=True)
        raise ValueError(f"cannot export {checkpoint} to {target}: {first_line(error)}") from error
    return f"{target}: {len(tensors)} tensors of step {state['step']}, {target.stat().st_size / 2**20:.1f} MiB"


def _read_model(checkpoint: Path) -> dict[str, torch.Tensor]:
    shapes = FileSystemReader(str(checkpoint)).read_metadata().state_dict_metadata
    tensors = {
        name.removeprefix("model."): torch.empty(item.size, dtype=item.properties.dtype)
        for name, item in shapes.items()
        if name.startswith("model.") and isinstance(item, TensorStorageMetadata)
    }
    with warnings.catch_warnings():  # that it reads in one process, which is meant
        warnings.simplefilter("ignore", UserWarning)
        load({"model": tensors}, checkpoint_id=str(checkpoint), no_dist=True)
    return tensors
