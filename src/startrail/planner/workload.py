"""The workload as data: a model and a run. ``models/*.toml`` are shipped; config.json of Hugging Face works too.

>>> model = find_model("gpt-7b")
>>> round(model.parameters / 1e9, 1), model.windows == (None,) * 32           # 32 layers with full attention
(6.9, True)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from startrail.planner.cluster import DTYPES
from startrail.planner.units import (
    MAX_COUNT,
    MAX_SIZE,
    Fields,
    Table,
    check_keys,
    find_file,
    read_file,
    short_repr,
    suggestion,
)

FULL, SLIDING = "full_attention", "sliding_attention"
MAX_LAYERS, MAX_HEADS = 10_000, 2**16
ZERO = (0, 2, 3)
COUNTS = ("length", "batch", "loss_chunk")  # of a run; files may say 128k
# Hugging Face's decoders that the planner models, with a gated or a plain MLP. Others (state spaces, encoders, experts)
# could be read without an error and would be counted wrongly.
GATED = frozenset(
    ("llama", "mistral", "ministral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo", "olmo2")
    + ("olmo3", "cohere", "cohere2", "granite", "glm", "glm4", "smollm3", "exaone4", "seed_oss", "helium", "stablelm")
    + ("hunyuan_v1_dense", "ernie4_5")
)
PLAIN = frozenset(("gpt2", "gptj", "gpt_neox", "phi", "starcoder2", "bloom", "nemotron", "arcee", "apertus"))


@dataclass(frozen=True)
class Model:
    """A transformer's sizes. ``matrices``: of width x hidden per MLP, 3 if gated, else 2. ``windows``: each layer's
    attention window, None for full attention. ``modulated``: a DiT, whose blocks have 6 x width² more parameters."""

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
    def projections(self) -> int:
        """Parameters of one layer's attention."""
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
    """How the model is trained. ``batch``: sequences per step, over all data-parallel groups. ``gather``: the dtype in
    which FSDP sends parameters and gradients. ``loss_chunk``: tokens per chunk of logits."""

    length: int
    batch: int = 1
    dtype: str = "bfloat16"
    recompute: bool = True
    zero: int = 3
    gather: str = "float32"
    loss_chunk: int = 1024

    def __post_init__(self) -> None:
        fields = Fields(vars(self))
        for name in COUNTS:
            fields.integer(name, most=MAX_COUNT)
        for name in ("dtype", "gather"):
            fields.choice(name, tuple(DTYPES))
        fields.boolean("recompute")
        fields.choice("zero", ZERO)

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype]


def check_heads(heads: object, kv_heads: object) -> None:
    for value in (heads, kv_heads):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_HEADS:
            limits = f"of at least 1 and at most {MAX_HEADS}"
            raise ValueError(f"heads={heads!r}, kv_heads={kv_heads!r} must be whole numbers {limits}")
    if heads % kv_heads:  # type: ignore[operator]
        raise ValueError(f"{heads} query heads are not a multiple of {kv_heads} key/value heads")


@dataclass(frozen=True)
class Job:
    """A running job's description of itself, so that ``auto`` plans like ``startrail plan``. The run's batch is that of
    all ``data_parallel`` groups."""

    model: Model
    run: Run
    data_parallel: int = 1


def read_run(table: Table, where: str) -> Run:
    known = ("description", "length", "batch", "dtype", "recompute", "zero", "gather", "loss_chunk")
    fields = check_keys(table, known, ("length",), where)
    values = {key: value for key, value in table.items() if key != "description"}
    values |= {key: fields.count(key) for key in COUNTS if key in values}
    try:
        return Run(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def find_model(name: str) -> Model:
    """A shipped model by name, or one from a file: .toml, or Hugging Face's config.json."""
    path = find_file(name, "models", "model")
    path = path / "config.json" if path.is_dir() else path
    if path.suffix == ".json":
        return from_hugging_face(read_file(path), path.parent.name or path.stem, str(path))
    return read_model(read_file(path), path.stem, path.name)


def read_model(table: Table, name: str, where: str) -> Model:
    required = ("width", "layers", "heads", "hidden")
    known = ("description", "kind", "vocab", "kv_heads", "tied", "window", "full_every", *required)
    fields = check_keys(table, known, ("kind", *required), where)
    most = {"layers": MAX_LAYERS, "heads": MAX_HEADS}
    width, layers, heads, hidden = (fields.integer(key, most=most.get(key, MAX_SIZE)) for key in required)
    kind = fields.choice("kind", ("gpt", "dit"))
    kv_heads, tied = fields.integer("kv_heads", default=heads), fields.boolean("tied")
    if width % heads:
        raise ValueError(f"{where}: width = {width} is not a multiple of heads = {heads}")
    if heads % kv_heads:
        raise ValueError(f"{where}: heads = {heads} is not a multiple of kv_heads = {kv_heads}")
    window = fields.integer("window", most=MAX_COUNT) if "window" in table else None
    every = fields.integer("full_every") if "full_every" in table else 0
    windows = tuple(None if every and (at + 1) % every == 0 else window for at in range(layers))
    vocab = fields.integer("vocab", least=0)
    if kind == "gpt" and not vocab:
        raise ValueError(f"{where}: 'vocab' is missing")
    sizes = vocab, width, layers, heads, kv_heads, width // heads, hidden, 3 if kind == "gpt" else 2
    return Model(name, *sizes, tied=tied, causal=kind == "gpt", windows=windows, modulated=kind == "dit")


def from_hugging_face(config: Mapping[str, Any], name: str, where: str) -> Model:
    """A decoder's sizes from its config.json, with the window of every layer.

    >>> config = dict(model_type="llama", hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
    ...     num_key_value_heads=2, intermediate_size=96, vocab_size=100, sliding_window=16,
    ...     layer_types=["sliding_attention", "sliding_attention", "full_attention"])
    >>> from_hugging_face(config, "mine", "config.json").windows
    (16, 16, None)
    """
    if config.get("text_config") is not None:
        config = config["text_config"]
        if not isinstance(config, Mapping):
            raise ValueError(f"{where}: text_config = {short_repr(config)} is not a table of keys")
    config = {key: value for key, value in config.items() if value is not None}
    unsupported = dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), "mixtures of experts are")
    unsupported |= {"kv_lora_rank": "latent attention is", "linear_num_key_heads": "linear attention is"}
    for key, what in unsupported.items():
        if config.get(key):
            raise ValueError(f"{where}: {key} = {short_repr(config[key])}: {what} not supported")
    fields, kind = Fields(config, where), config.get("model_type", "")
    if not isinstance(kind, str) or kind not in GATED | PLAIN:
        names = suggestion(str(kind), sorted(GATED | PLAIN), "choose from")
        raise ValueError(f"{where}: model_type = {short_repr(kind)} is not a supported decoder{names}")

    def size(*keys: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        key = next((key for key in keys if key in config), None)
        if key is None and default is None:
            raise ValueError(f"{where}: {keys[0]!r} is missing")
        return default if key is None and default is not None else fields.integer(str(key), most=most)

    width, layers = size("hidden_size", "n_embd"), size("num_hidden_layers", "n_layer", most=MAX_LAYERS)
    heads = size("num_attention_heads", "n_head", most=MAX_HEADS)
    kv_heads = size("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ValueError(f"{where}: num_attention_heads = {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if width % heads and "head_dim" not in config:
        raise ValueError(f"{where}: hidden_size = {width} is not a multiple of num_attention_heads = {heads}")
    head_dim, vocab = size("head_dim", default=width // heads), size("vocab_size")
    hidden, matrices = size("intermediate_size", "n_inner", default=4 * width), 3 if kind in GATED else 2
    tied, windows = fields.boolean("tie_word_embeddings"), _windows(fields, layers, where)
    sizes = vocab, width, layers, heads, kv_heads, head_dim, hidden, matrices
    return Model(name, *sizes, tied=tied, causal=True, windows=windows)


def _windows(fields: Fields, layers: int, where: str) -> tuple[int | None, ...]:
    """The window of each layer. Newer configurations list the type of every layer, older ones give a rule."""
    config = fields.table
    window = fields.integer("sliding_window", most=MAX_COUNT) if "sliding_window" in config else None
    sliding = fields.boolean("use_sliding_window", window is not None)
    pattern = fields.integer("sliding_window_pattern", default=MAX_SIZE)  # layers between full ones
    first = fields.integer("max_window_layers", least=0)
    if (kinds := config.get("layer_types")) is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise ValueError(f"{where}: layer_types must list each of the {layers} layers")
        for kind in kinds:
            if kind not in (FULL, SLIDING):
                raise ValueError(f"{where}: layer_types: layers of type {short_repr(kind)} are not supported")
        if SLIDING in kinds and window is None:
            raise ValueError(f"{where}: {SLIDING} layers need sliding_window")
        return tuple(window if kind == SLIDING else None for kind in kinds)
    if window is None or not sliding:
        return (None,) * layers
    first = first if "use_sliding_window" in config else 0
    return tuple(window if at >= first and (at + 1) % pattern else None for at in range(layers))
