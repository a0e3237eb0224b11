"""Recipes: all settings of a training run as data, and the named recipes. No torch.

>>> recipe = find("gpt-tiny").with_({"steps": "10", "width": "64"})       # fields of the run or of its model
>>> recipe.steps, recipe.config.width
(10, 64)
>>> recipe.with_({"stepz": "5"})
Traceback (most recent call last):
ValueError: no field 'stepz'; did you mean 'steps'?

A recipe file, TOML or JSON, names a recipe to start from and the fields to change::

    recipe = "gpt-tiny"
    steps = 500
    data = "my/texts"
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from startrail.geometry.zones import check_layout
from startrail.planner.units import read_file
from startrail.planner.workload import Job, LinearLayers, Model, Run
from startrail.schedule.plan import Plan
from startrail.training.models.configs import DIT_CONFIGS, GPT_CONFIGS, DiTConfig, GPTConfig

CHOICES: dict[str, tuple[object, ...]] = {
    "zero": (0, 2, 3),
    "precision": ("auto", "float32", "bfloat16"),
    "device": ("auto", "cpu", "cuda"),
    "on_nan": ("stop", "skip"),
    "shares": ("equal", "measured"),
}
CURVE = ("steps", "warmup", "learning_rate", "final_rate")  # the fields that decide the learning rate of a step
MAY_BE_ZERO = ("evaluate_every", "evaluate_batches", "save_every", "sample", "trace", "warmup")


def _field(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True)
class Recipe:
    """One training run. ``config`` selects GPT or DiT; its fields can be changed like all others."""

    name: str
    config: GPTConfig | DiTConfig
    data: str = _field("", "text: stdlib, a folder, a file or a glob; images: digits, photos or a folder")
    length: int | None = _field(None, "context length of text in tokens (an image has rows x columns)")
    tokenizer: str | None = _field(None, "a Hugging Face tokenizers file (default: bytes)")
    packed: bool = _field(False, "pack several documents, masked from each other, into a context")
    batch: int = _field(1, "sequences or images per pass of one data-parallel group")
    accumulate: int = _field(1, "passes per step")
    plan: str = _field("auto", "how ranks share a sequence: 1x8, u2/2x2, 2x2/u2, star2, u8 or auto")
    layout: str = _field("zones", "which tokens a rank gets: zones, zigzag or contiguous")
    shares: str = _field("equal", "equal tokens per rank, or measured: in proportion to the ranks' speeds")
    data_parallel: int = _field(1, "groups of ranks that train on different sequences")
    ranks: int = _field(8, "local ranks to start (ignored under torchrun)")
    device: str = _field("auto", "cpu, cuda, or auto: cuda if there is a GPU per rank")
    zero: int = _field(3, "0: nothing sharded; 2: gradients and optimizer state; 3: parameters too")
    recompute: bool = _field(True, "activation checkpointing: recompute all of a block except attention")
    offload: bool = _field(False, "keep the inputs of recomputed blocks in host memory")
    precision: str = _field("auto", "float32, bfloat16 (autocast), or auto: bfloat16 if the GPU supports it")
    loss_chunk: int = _field(1024, "tokens whose logits are in memory at a time")
    steps: int = _field(1000, "total optimizer steps")
    learning_rate: float = _field(3e-4, "peak learning rate, after the warm-up")
    final_rate: float = _field(0.1, "the cosine decays to this fraction of the peak")
    warmup: int = _field(20, "steps of linear warm-up")
    weight_decay: float = _field(0.1, "weight decay of matrices")
    clip: float = _field(1.0, "maximum global gradient norm")
    seed: int = _field(0, "seed of parameters, data order, noise and samples")
    on_nan: str = _field("stop", "stop at, or skip, a step whose loss or gradient is not finite")
    evaluate_every: int = _field(50, "steps between held-out losses (0: at the start and the end only)")
    evaluate_batches: int = _field(4, "held-out passes of each data-parallel group (0: never)")
    save_every: int = _field(50, "steps between checkpoints (0: at the end only)")
    keep_checkpoints: int = _field(2, "number of checkpoints to keep")
    resume: bool = _field(True, "resume from the newest checkpoint in out, if there is one")
    out: str = _field("", "output folder for checkpoints, metrics and samples")
    wait_minutes: float = _field(10.0, "minutes to wait for a rank that hangs before the run ends")
    tensorboard: bool = _field(False, "also write TensorBoard events to out")
    guidance: float = _field(2.0, "classifier-free guidance of generated images (1: none)")
    trace: int = _field(0, "the step whose attention to trace into out/trace.json, for Perfetto (0: none)")
    sample: int = _field(120, "tokens of text, or sampler steps of images, to generate at the end (0: none)")

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.type in ("int", "int | None") and value is not None and item.name != "seed":
                least = 0 if item.name in MAY_BE_ZERO or item.name in CHOICES else 1
                if value < least:
                    raise ValueError(f"{item.name} {value} must be at least {least}")
            if item.type == "float" and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{item.name} {value} must be a finite number of at least 0")
            if item.name in CHOICES and value not in CHOICES[item.name]:
                raise ValueError(f"{item.name} {value!r} is not one of {', '.join(map(str, CHOICES[item.name]))}")
        if not self.wait_minutes:
            raise ValueError("wait_minutes 0 would end the run immediately: it must be more than 0")
        check_layout(self.layout)
        if self.plan != "auto":
            Plan.parse(self.plan)
        if isinstance(self.config, GPTConfig) and self.length is None:
            raise ValueError(f"recipe {self.name}: a GPT needs length, its context in tokens")
        if isinstance(self.config, DiTConfig):
            for name in ("length", "tokenizer", "packed"):
                if getattr(self, name):
                    raise ValueError(f"{name} applies to text only; an image of a DiT has rows x columns tokens")
            if self.config.rows != self.config.columns or self.config.channels != 3:
                raise ValueError(
                    f"images must be square with 3 channels: set channels {self.config.channels} to 3, and rows "
                    f"{self.config.rows} = columns {self.config.columns}"
                )
        if self.offload and not self.recompute:
            raise ValueError("offload moves the inputs of recomputed blocks: it needs recompute")
        if not self.out:
            object.__setattr__(self, "out", f"runs/{self.name}")
        if not self.data:
            object.__setattr__(self, "data", "stdlib" if isinstance(self.config, GPTConfig) else "photos")

    @property
    def tokens(self) -> int:
        """Tokens per sequence."""
        return self.config.tokens if isinstance(self.config, DiTConfig) else self.length or 0

    @property
    def tokens_per_step(self) -> int:
        return self.tokens * self.batch * self.accumulate * self.data_parallel

    def job(self, dtype: str, device: str = "cpu") -> Job:
        """This run, computed in ``dtype`` on this type of device, as the planner describes jobs."""
        config = self.config
        sizes = config.width, config.layers, config.heads, config.kv_heads, config.head_dim
        windows = (None,) * config.layers
        if isinstance(config, GPTConfig):
            rest, heads = config.layers - config.attention_layers, (config.kv_heads, config.heads)
            linear = LinearLayers(rest, *heads, config.head_dim, config.head_dim, config.conv_width) if rest else None
            windows, vocab, hidden = windows[: config.attention_layers], config.vocab, config.hidden
            model = Model(self.name, vocab, *sizes, hidden, 3, config.tied, True, windows, linear=linear)
        else:
            model = Model(self.name, 0, *sizes, 4 * config.width, 2, False, False, windows, modulated=True)
        batch = self.batch * self.data_parallel
        offload = self.offload and device != "cpu"  # there, everything is in host memory
        run = Run(self.tokens, batch, dtype, self.recompute, self.zero, "float32", self.loss_chunk, offload=offload)
        return Job(model, run, self.data_parallel)

    def check_world(self, world: int) -> None:
        """Raise ``ValueError`` unless ``world`` ranks form data-parallel groups that fit the plan."""
        if world % self.data_parallel:
            raise ValueError(f"{world} ranks are not a multiple of data_parallel {self.data_parallel}")
        if self.plan != "auto":
            Plan.parse(self.plan).check_world(world // self.data_parallel)

    def with_(self, changes: Mapping[str, object]) -> Recipe:
        """A copy with changed fields, given as texts or values. An unknown field raises, with the nearest name."""
        values = self.as_dict()
        names = [name for name in values if name != "name"]
        for given, value in changes.items():
            name = given.replace("-", "_")
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1) or [n for n in names if n.startswith(name)]
                raise ValueError(f"no field {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
            values[name] = value
        return self.of_dict(values)

    def as_dict(self) -> dict[str, Any]:
        """All fields, including the model's; ``find(name).with_`` and ``of_dict`` accept them."""
        run = asdict(self)
        return {**run.pop("config"), **run}

    @classmethod
    def of_dict(cls, values: Mapping[str, object]) -> Recipe:
        """The recipe of an ``as_dict``, also of another version: a field that this one lacks is ignored, and one that
        it has added has its default.

        >>> Recipe.of_dict(find("gpt-tiny").as_dict()) == find("gpt-tiny")
        True
        """
        config = GPTConfig if "vocab" in values else DiTConfig
        if missing := {item.name for item in fields(config) if item.default is MISSING} - values.keys():
            raise ValueError(f"recipe has no {min(missing)}")

        def known(owner: type) -> dict[str, Any]:
            items = (item for item in fields(owner) if item.name in values and item.name != "config")
            return {item.name: _read(item.name, str(item.type), values[item.name]) for item in items}

        return cls(**{"name": "unnamed", **known(cls)}, config=config(**known(config)))

    def rate(self, step: int) -> float:
        """The learning rate of step 0, 1, ...: linear warm-up, then a cosine down to ``final_rate`` of the peak.

        >>> recipe = find("gpt-tiny").with_(dict(steps=6, warmup=2, learning_rate=1.0, final_rate=0.0))
        >>> [round(recipe.rate(step), 2) for step in range(6)]
        [0.5, 1.0, 1.0, 0.85, 0.5, 0.15]
        """
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        share = (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * (self.final_rate + (1 - self.final_rate) * share)

    def curve_change(self, old: Recipe, step: int) -> str | None:
        """Describe how the learning rate changes when a run of ``old`` resumes at ``step`` with this recipe, or None.

        >>> old = find("gpt-tiny").with_(dict(steps=100, warmup=0, learning_rate=1.0, final_rate=0.0))
        >>> old.with_({"steps": 200}).curve_change(old, step=50)
        'steps was 100, is 200: the learning rate of step 51 is 0.854 instead of 0.5, and ends at 6.17e-05 in step 200'
        """
        other = next((number for number in range(step, self.steps) if self.rate(number) != old.rate(number)), None)
        if other is None:
            return None
        pairs = {name: (getattr(old, name), getattr(self, name)) for name in CURVE}
        changes = [f"{name} was {before}, is {now}" for name, (before, now) in pairs.items() if before != now]
        return (
            f"{', '.join(changes)}: the learning rate of step {other + 1} is {self.rate(other):.3g} instead of "
            f"{old.rate(other):.3g}, and ends at {self.rate(self.steps - 1):.3g} in step {self.steps}"
        )


def _read(name: str, annotation: str, value: object) -> object:
    """Convert a text or a value to the type in a field's annotation."""
    kind, optional = annotation.removesuffix(" | None"), annotation.endswith(" | None")
    if optional and value in (None, "none"):
        return None
    texts = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    with suppress(ValueError):
        if kind == "bool" and (isinstance(value, bool) or str(value).lower() in texts):
            return texts[str(value).lower()]
        if kind == "int" and not isinstance(value, bool | float):
            return int(str(value).replace("_", ""))
        if kind == "float" and not isinstance(value, bool):
            return float(str(value))
        if kind == "str" and isinstance(value, str):
            return value
    expected = {"bool": "true or false", "int": "an integer", "float": "a number", "str": "a string"}[kind]
    raise ValueError(f"{name} {value!r} is not {expected}")


def find(name: str) -> Recipe:
    """The named recipe, or the one in a .toml or .json file."""
    if name in RECIPES:
        return RECIPES[name]
    path = Path(name)
    if path.suffix not in (".toml", ".json"):
        near = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; choose {', '.join(RECIPES)}, or a .toml or .json file"
        raise ValueError(f"no recipe {name!r}{hint}")
    changes = read_file(path)
    base = changes.pop("recipe", "gpt-tiny")
    if not isinstance(base, str) or base not in RECIPES:
        raise ValueError(f"{path}: recipe {base!r} is not one of {', '.join(RECIPES)}")
    try:
        return replace(RECIPES[base], name=path.stem, out="").with_(changes)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


_LONG: dict[str, Any] = dict(length=131_072, ranks=64, steps=10_000, warmup=500, save_every=250, evaluate_every=250)

# The tiny ones learn something visible in two minutes on two cores. The paper's sizes are for clusters. The DiT works
# on pixels where SD3 works on latents, so its patches are larger, to give a 1024 x 1024 image the same token count.
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "gpt-tiny", GPT_CONFIGS["gpt-tiny"], length=2048, plan="2x2/u2", steps=120, zero=2, recompute=False,
            learning_rate=1.5e-3, warmup=20, evaluate_every=40,
        ),
        Recipe(
            "gpt-hybrid-tiny", GPT_CONFIGS["gpt-hybrid-tiny"], length=2048, plan="2x2/u2", steps=120, zero=2,
            recompute=False, learning_rate=1.5e-3, warmup=20, evaluate_every=40,
        ),
        Recipe(
            "dit-tiny", replace(DIT_CONFIGS["dit-tiny"], layers=2, rows=8, columns=8), data="digits", batch=32, ranks=4,
            plan="2x1/u2", steps=600, zero=0, recompute=False, learning_rate=4e-3, warmup=20, evaluate_every=100,
            sample=40,
        ),
        Recipe("gpt-3b", GPT_CONFIGS["gpt-3b"], learning_rate=1.6e-4, **_LONG),
        Recipe("gpt-7b", GPT_CONFIGS["gpt-7b"], learning_rate=1.2e-4, **_LONG),
        Recipe(
            "dit-1b", replace(DIT_CONFIGS["dit-1b"], channels=3, patch=16), batch=8, learning_rate=1e-4, sample=50,
            **{**_LONG, "length": None, "ranks": 32},
        ),
    )
}  # fmt: skip
