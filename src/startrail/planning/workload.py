"""What is to be trained: a model and a run, as data. ``models/*.toml`` come along; Hugging Face's config.json is read.

>>> model = find_model("gpt-7b")
>>> round(model.parameters / 1e9, 1), model.layer_kinds           # 32 layers with full attention
(6.9, {None: 32})
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from startrail.planning.describe import Table, check_keys, choice, count, find_file, read_file, whole
from startrail.planning.hardware import DTYPES

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Model:
    """A transformer's sizes. ``matrices`` of width x hidden in an MLP: 3 if it is gated, else 2. ``windows``: by layer,
    how far a token sees, None if it sees everything. ``modulated``: a DiT, whose blocks have 6 x width more."""

    name: str
    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    matrices: int
    tied: bool
    causal: bool
    windows: tuple[int | None, ...]
    modulated: bool = False

    @property
    def layer_kinds(self) -> dict[int | None, int]:
        """How many layers have each window."""
        return dict(Counter(self.windows))

    @property
    def projections(self) -> int:
        """Numbers in the matrices of one layer's attention."""
        return self.width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def mlp(self) -> int:
        return self.matrices * self.width * self.hidden

    @property
    def per_layer(self) -> int:
        """Parameters of one layer."""
        return self.projections + self.mlp + (6 * self.width**2 if self.modulated else 0)

    @property
    def outside(self) -> int:
        """Parameters outside the layers."""
        return self.vocab * self.width * (1 if self.tied or self.modulated else 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.per_layer + self.outside


@dataclass(frozen=True)
class Run:
    """How it is trained. ``batch``: sequences in one step, over all data-parallel groups. ``gather``: the dtype in
    which FSDP's parameters and gradients travel. ``loss_chunk``: tokens whose logits exist at a time."""

    length: int
    batch: int = 1
    dtype: str = "bfloat16"
    recompute: bool = True
    zero: int = 3
    gather: str = "float32"
    loss_chunk: int = 1024

    def __post_init__(self) -> None:
        for name in ("length", "batch", "loss_chunk"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} = {value!r} is not a whole number of at least 1")
        for name in ("dtype", "gather"):
            if getattr(self, name) not in DTYPES:
                raise ValueError(f"{name} = {getattr(self, name)!r} is not one of {', '.join(DTYPES)}")
        if self.zero not in (0, 2, 3):
            raise ValueError(f"zero = {self.zero!r} is not one of 0, 2, 3")

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype]


def read_run(table: Table, where: str) -> Run:
    known = ("description", "length", "batch", "dtype", "recompute", "zero", "gather", "loss_chunk")
    check_keys(table, known, ("length",), where)
    values = {key: value for key, value in table.items() if key != "description"}
    try:
        for key in ("length", "batch", "loss_chunk"):
            if key in values:
                values[key] = count(values[key])
        if not isinstance(values.get("recompute", True), bool):
            raise ValueError(f"recompute = {values['recompute']!r} is not true or false")
        return Run(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def find_model(name: str) -> Model:
    """The model of that name, or in that file: one of ours (.toml), or Hugging Face's config.json."""
    path = find_file(name, "models", "model")
    if path.is_dir():
        path = path / "config.json"
    table = read_file(path)
    if path.suffix == ".json":
        return from_hugging_face(table, path.parent.name or path.stem, str(path))
    return read_model(table, path.stem, path.name)


def read_model(table: Table, name: str, where: str) -> Model:
    sizes = ("width", "layers", "heads", "hidden")
    known = ("description", "kind", "vocab", "kv_heads", "tied", "window", "full_every", *sizes)
    check_keys(table, known, ("kind", *sizes), where)
    width, layers, heads, hidden = (whole(table, key, where) for key in sizes)
    kind = choice(table, "kind", where, ("gpt", "dit"), "")
    kv_heads = whole(table, "kv_heads", where, default=heads)
    tied = table.get("tied", False)
    if not isinstance(tied, bool):
        raise ValueError(f"{where}: tied = {tied!r} is not true or false")
    _check_heads(where, width, heads, kv_heads)
    window = whole(table, "window", where) if "window" in table else None
    every = whole(table, "full_every", where) if "full_every" in table else 0
    windows = tuple(None if every and (at + 1) % every == 0 else window for at in range(layers))
    vocab = whole(table, "vocab", where, least=0)
    if kind == "gpt" and not vocab:
        raise ValueError(f"{where}: 'vocab' is missing")
    gated = 3 if kind == "gpt" else 2
    return Model(
        *(name, vocab, width, layers, heads, kv_heads, width // heads, hidden, gated, tied),
        causal=kind == "gpt", windows=windows, modulated=kind == "dit",
    )  # fmt: skip


def _check_heads(where: str, width: int, heads: int, kv_heads: int) -> None:
    if width % heads:
        raise ValueError(f"{where}: width = {width} is not a multiple of heads = {heads}")
    if heads % kv_heads:
        raise ValueError(f"{where}: heads = {heads} is not a multiple of kv_heads = {kv_heads}")


def from_hugging_face(config: Mapping[str, Any], name: str, where: str) -> Model:
    """A decoder's sizes from its config.json; sliding and full layers are told apart.

    >>> config = dict(model_type="llama", hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
    ...     num_key_value_heads=2, intermediate_size=96, vocab_size=100, sliding_window=16,
    ...     layer_types=["sliding_attention", "sliding_attention", "full_attention"])
    >>> from_hugging_face(config, "mine", "config.json").layer_kinds
    {16: 2, None: 1}
    """
    if isinstance(config.get("text_config"), Mapping):
        config = config["text_config"]
    for key, what in (
        ("num_local_experts", "mixtures of experts are"),
        ("num_experts", "mixtures of experts are"),
        ("n_routed_experts", "mixtures of experts are"),
        ("kv_lora_rank", "latent attention is"),
        ("linear_num_key_heads", "linear attention is"),
    ):
        if config.get(key):
            raise ValueError(f"{where}: {key} = {config[key]!r}: {what} not modelled")

    def size(*keys: str, default: int | None = None) -> int:
        key = next((key for key in keys if config.get(key) is not None), None)
        if key is None and default is None:
            raise ValueError(f"{where}: {keys[0]!r} is missing")
        return default if key is None and default is not None else whole(config, str(key), where)

    width, layers, heads = (
        size("hidden_size", "n_embd"),
        size("num_hidden_layers", "n_layer"),
        size("num_attention_heads", "n_head"),
    )
    kv_heads = size("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ValueError(f"{where}: num_attention_heads = {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = size("head_dim", default=width // heads)
    gated = config.get("model_type") not in ("gpt2", "gpt_neox", "opt", "bloom", "falcon", "phi", "starcoder2")
    return Model(
        *(name, size("vocab_size"), width, layers, heads, kv_heads, head_dim),
        *(size("intermediate_size", "n_inner", default=4 * width), 3 if gated else 2),
        tied=bool(config.get("tie_word_embeddings", False)),
        causal=True,
        windows=_windows(config, layers, where),
    )


def _windows(config: Mapping[str, Any], layers: int, where: str) -> tuple[int | None, ...]:
    """By layer, the window that it has: newer configurations name every layer's kind, older ones give a rule."""
    window = config.get("sliding_window")
    if window is not None:
        window = whole(config, "sliding_window", where)
    kinds = config.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise ValueError(f"{where}: layer_types must name each of the {layers} layers")
        for kind in kinds:
            if kind not in (FULL, SLIDING):
                raise ValueError(f"{where}: layers of type {kind!r} are not modelled")
        if SLIDING in kinds and window is None:
            raise ValueError(f"{where}: {SLIDING} layers need sliding_window")
        return tuple(window if kind == SLIDING else None for kind in kinds)
    if window is None or config.get("use_sliding_window") is False:
        return (None,) * layers
    if pattern := config.get("sliding_window_pattern"):
        return tuple(None if (at + 1) % pattern == 0 else window for at in range(layers))
    first = config.get("max_window_layers", 0) if config.get("use_sliding_window") else 0
    return tuple(window if at >= first else None for at in range(layers))
