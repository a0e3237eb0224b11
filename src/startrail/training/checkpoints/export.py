"""A checkpoint's model for other programs: one safetensors file, or a folder that transformers loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from startrail.training.checkpoints.contents import (
    OWN_NAMES,
    SavedState,
    checkpoint_path,
    checkpoints_of,
    empty_tensors,
    read_state,
    steps_in,
)
from startrail.training.files import first_line
from startrail.training.models.configs import GPTConfig
from startrail.training.models.gpt import NORM_EPS
from startrail.training.recipes import Recipe

MODEL_PREFIX = "model."

# Names of a GPT's parameters, and what transformers' Llama, the same architecture, calls them.
LLAMA_NAMES = {
    "embedding": "model.embed_tokens",
    "blocks": "model.layers",
    "attention_norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}


def export(checkpoint: Path, target: Path) -> str:
    """Write a checkpoint's model and return a line about it. A ``target`` that ends in ``.safetensors`` is one file
    with our names and the recipe as metadata. Any other is a folder with a GPT as a Llama: what
    ``AutoModelForCausalLM.from_pretrained`` loads. ``checkpoint`` may be the folder of a run: then its newest good
    checkpoint is used."""
    try:
        from safetensors.torch import save_file
    except ModuleNotFoundError:
        raise ValueError("export needs safetensors: pip install 'startrail[train]'") from None
    state, skipped = _newest_good(checkpoint)
    if target.exists():
        raise ValueError(f"{target} already exists")
    as_file = target.suffix == ".safetensors"
    config = None if as_file else llama_config(state.recipe)
    partial = target.with_name(f".{target.name}.writing")
    try:
        tensors = empty_tensors(state.tensors, MODEL_PREFIX)
        state.read_into(tensors)
        named = {name.removeprefix(MODEL_PREFIX): tensor for name, tensor in tensors.items()}
        if as_file:
            save_file(named, partial, metadata={"format": "pt", "recipe": json.dumps(state.recipe.as_dict())})
        else:
            partial.mkdir()
            (partial / "config.json").write_text(json.dumps(config, indent=2))
            llama = {llama_name(name): tensor for name, tensor in named.items()}
            save_file(llama, partial / "model.safetensors", metadata={"format": "pt"})
        partial.rename(target)
    except Exception as error:  # safetensors has its own exceptions
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)
        raise ValueError(f"cannot export {state.path} to {target}: {first_line(error)}") from error
    size = sum(path.stat().st_size for path in [target, *target.glob("*")] if path.is_file())
    done = f"{target}: {len(tensors)} tensors of step {state.step}, {size / 2**20:.1f} MiB"
    return "\n".join([*skipped, done])


def llama_name(name: str) -> str:
    """
    >>> llama_name("blocks.3.query.weight"), llama_name("norm.weight")
    ('model.layers.3.self_attn.q_proj.weight', 'model.norm.weight')
    """
    return ".".join(LLAMA_NAMES.get(part, part) for part in name.split("."))


def llama_config(recipe: Recipe) -> dict[str, Any]:
    """The ``config.json`` of a recipe's model."""
    config = recipe.config
    if not isinstance(config, GPTConfig):
        raise ValueError(f"{recipe.name} is not a GPT: export it to a file that ends in .safetensors")
    if config.attention_every > 1:
        raise ValueError(
            f"{recipe.name} has gated delta nets, and a Llama has none: export it to a file that ends in .safetensors"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab,
        "hidden_size": config.width,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "max_position_embeddings": recipe.length,
        "rms_norm_eps": NORM_EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base},
        "rope_theta": config.rotary_base,  # where transformers before 5 looks
        "tie_word_embeddings": config.tied,
        "torch_dtype": "float32",
    }


def _newest_good(checkpoint: Path) -> tuple[SavedState, list[str]]:
    """The state of a good checkpoint, and why newer ones were skipped."""
    folder = checkpoints_of(checkpoint)
    paths = [(checkpoint_path(folder, step), OWN_NAMES) for step in reversed(steps_in(folder))]
    problems: list[str] = []
    for path, own in paths or [(checkpoint, 0)]:
        try:
            return read_state(path, own), [f"{problem}; used the one before it" for problem in problems]
        except ValueError as error:
            problems.append(str(error))
    raise ValueError(problems[0])
