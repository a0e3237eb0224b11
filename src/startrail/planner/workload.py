"""The workload as data: a model and a run. ``models/*.toml`` are shipped; config.json of Hugging Face works too.

>>> model = find_model("gpt-7b")
>>> round(model.parameters / 1e9, 1), model.windows == (None,) * 32           # 32 layers with full attention
(6.9, True)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from typing import Any, NamedTuple

from startrail.compile.attention import Attention
from startrail.compile.latents import LatentAttention
from startrail.planner.cluster import DTYPES
from startrail.planner.sparse.documents import Documents, check_documents, document_ends, read_documents
from startrail.planner.units import (
    MAX_COUNT,
    MAX_SIZE,
    Fields,
    Table,
    check_keys,
    find_file,
    read_file,
    short_repr,
)

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
# Models with gated delta rules, all with gated attention, and what their configurations call the sizes.
HYBRIDS = frozenset(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"))
LINEAR_SIZES = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
MAX_LAYERS, MAX_HEADS = 10_000, 2**16
ZERO = (0, 2, 3)
COUNTS = ("length", "batch", "loss_chunk", "accumulate")  # of a run; files may say 128k
SWITCHES = ("recompute", "repeat_attention", "offload", "offload_states", "fp8", "tile_mlp")
# Hugging Face's decoders that the planner models, with a gated or a plain MLP. Others (state spaces, encoders, experts)
# could be read without an error and would be counted wrongly.
GATED = frozenset(
    ("llama", "mistral", "ministral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo", "olmo2")
    + ("olmo3", "cohere", "cohere2", "granite", "glm", "glm4", "smollm3", "exaone4", "seed_oss", "helium", "stablelm")
    + ("hunyuan_v1_dense", "ernie4_5", "qwen3_5_text", "minicpm3", "youtu")
)
# Mixtures of experts in all layers, with their keys for experts, active experts and the width of a shared one. (GLM's
# first layers are plain; counting them as mixtures changes its parameters by about 1 %.)
MIXTURES = {
    "mixtral": ("num_local_experts", "num_experts_per_tok", ""),
    "qwen2_moe": ("num_experts", "num_experts_per_tok", "shared_expert_intermediate_size"),
    "qwen3_moe": ("num_experts", "num_experts_per_tok", ""),
    "qwen3_next": ("num_experts", "num_experts_per_tok", "shared_expert_intermediate_size"),
    "qwen3_5_moe_text": ("num_experts", "num_experts_per_tok", "shared_expert_intermediate_size"),
    "glm4_moe": ("n_routed_experts", "num_experts_per_tok", ""),
    "glm4_moe_lite": ("n_routed_experts", "num_experts_per_tok", ""),
    "deepseek_v2": ("n_routed_experts", "num_experts_per_tok", ""),
    "deepseek_v3": ("n_routed_experts", "num_experts_per_tok", ""),
}
LATENT = frozenset(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"))
PLAIN = frozenset(("gpt2", "gptj", "gpt_neox", "phi", "starcoder2", "bloom", "nemotron", "arcee", "apertus"))


class Latents(NamedTuple):
    """What keys and values are expanded from: the width of the latent, and that of the part of the keys that all heads
    share. ``q_rank``: the width of what queries are expanded from, 0 if they are not."""

    rank: int
    rope_dim: int
    q_rank: int = 0


@dataclass(frozen=True)
class LinearLayers:
    """The gated delta rule in ``layers`` layers, each with a causal convolution of width ``conv`` before it.

    >>> qwen = find_model("qwen3.5-35b").linear
    >>> qwen.layers, qwen.state * 4 / 2**20, qwen.channels                              # 2 MiB in float32
    (30, 2.0, 8192)
    """

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int

    @property
    def state(self) -> int:
        """Numbers of a state."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def effect(self) -> int:
        """Numbers of M and B, which say what a run does to a state."""
        return self.state + self.value_heads * self.key_dim**2

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def projections(self, width: int) -> int:
        """Parameters of one layer: into the channels, a gate and two numbers per head, and out."""
        return width * (self.channels + 2 * self.value_heads * self.value_dim + 2 * self.value_heads)


@dataclass(frozen=True)
class Model:
    """A transformer's sizes. ``matrices``: of width x hidden per MLP, 3 if gated, else 2. ``windows``: the window of
    each layer with attention, None for full attention. ``linear``: the other layers. ``gate``: attention's output has
    one. ``modulated``: a DiT, whose blocks have 6 x width² more parameters.
    ``experts``: in each layer, of width ``hidden`` each (0: one MLP); ``active_experts`` compute a token, next to one
    of width ``shared_hidden`` that computes all tokens. ``value_dim``: the width of values if they are not as wide as
    keys (0: they are). ``latents``: of latent attention, or None."""

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
    experts: int = 0
    active_experts: int = 0
    shared_hidden: int = 0
    value_dim: int = 0
    latents: Latents | None = None
    linear: LinearLayers | None = None
    gate: bool = False

    @property
    def of_values(self) -> int:
        """The width of values."""
        return self.value_dim or self.head_dim

    @property
    def expansion(self) -> int:
        """Parameters of one layer that expand latents."""
        if self.latents is None:
            return 0
        return self.latents.rank * self.heads * (self.head_dim - self.latents.rope_dim + self.of_values)

    @property
    def projections(self) -> int:
        """Parameters of one layer's attention, or of what stands in its place; on average."""
        if self.linear is None:
            return self._attending
        total = len(self.windows) * self._attending + self.linear.layers * self.linear.projections(self.width)
        return total // self.layers

    @property
    def _attending(self) -> int:
        queries = (2 if self.gate else 1) * self.width * self.heads * self.head_dim
        outputs = self.width * self.heads * self.of_values
        if self.latents is None:
            return queries + outputs + self.width * self.kv_heads * (self.head_dim + self.of_values)
        rank, rope_dim, q_rank = self.latents
        queries = q_rank * (self.width + self.heads * self.head_dim) if q_rank else queries
        return queries + outputs + self.width * (rank + rope_dim) + self.expansion

    def attention(
        self, length: int, batch: int, dtype: str, tensor: int = 1, window: int | None = None,
        documents: tuple[int, ...] = (), latents: bool = True,
    ) -> Attention:  # fmt: skip
        """A layer's call on one of ``tensor`` neighbours. With ``latents``, keys and values travel as latents if the
        model has them."""
        heads = self.heads // tensor, self.kv_heads // tensor, self.head_dim
        call = Attention.of(length, batch, *heads, self.causal, dtype, window, documents)
        call = replace(call, value_dim=self.value_dim) if self.value_dim else call
        if self.latents is None or not latents:
            return call
        return LatentAttention.from_expanded(call, *self.latents[:2])

    @property
    def active_hidden(self) -> int:
        """The width of what computes one token in an MLP."""
        return (self.active_experts if self.experts else 1) * self.hidden + self.shared_hidden

    @property
    def mlp(self) -> int:
        """Parameters of an MLP that compute one token."""
        return self.matrices * self.width * self.active_hidden

    @property
    def per_layer(self) -> int:
        """Parameters of one layer."""
        mlp = self.matrices * self.width * ((self.experts or 1) * self.hidden + self.shared_hidden)
        router = self.experts * self.width
        return self.projections + mlp + router + (6 * self.width**2 if self.modulated else 0)

    @property
    def outside(self) -> int:
        """Parameters outside the layers."""
        return self.vocab * self.width * (1 if self.tied or self.modulated else 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.per_layer + self.outside

    @property
    def active_parameters(self) -> int:
        """Parameters that compute one token."""
        return self.layers * (self.projections + self.mlp) + self.outside


@dataclass(frozen=True)
class Run:
    """How the model is trained. ``batch``: sequences per step, over all data-parallel groups; ``accumulate``: parts in
    which a group computes its sequences, one after the other. ``gather``: the dtype in which FSDP sends parameters and
    gradients (default: ``dtype``). ``loss_chunk``: tokens per chunk of logits. ``tensor``: neighbouring ranks that hold
    the tokens of one rank together and split heads and MLP (tensor parallelism).

    ``recompute``: layers keep their input and attention's output; with ``repeat_attention`` only their input, so that
    attention is computed again, as Hugging Face does. ``offload``: those inputs are in host memory;
    ``offload_states``: so are parameters, gradients and moments, and the optimizer runs there. ``states``: the dtype of
    parameters, gradients and moments; ``residual``: that of the layers' inputs (default: ``states``). ``fp8``: matrix
    products of layers in FP8. ``tile_mlp``: the MLP is computed in chunks of tokens. ``documents``: how each sequence
    is packed, () for one document: a distribution's name, or lengths that are repeated and cut to fill it."""

    length: int
    batch: int = 1
    dtype: str = "bfloat16"
    recompute: bool = True
    zero: int = 3
    gather: str = ""
    loss_chunk: int = 1024
    accumulate: int = 1
    tensor: int = 1
    repeat_attention: bool = False
    offload: bool = False
    offload_states: bool = False
    states: str = "float32"
    residual: str = ""
    fp8: bool = False
    tile_mlp: bool = False
    documents: Documents = ()

    def __post_init__(self) -> None:
        for name, other in (("gather", self.dtype), ("residual", self.states)):
            if getattr(self, name) == "":
                object.__setattr__(self, name, other)
        fields = Fields(vars(self))
        for name in COUNTS:
            fields.integer(name, most=MAX_COUNT)
        fields.integer("tensor", most=MAX_HEADS)
        for name in ("dtype", "gather", "states", "residual"):
            fields.choice(name, tuple(DTYPES))
        for name in SWITCHES:
            fields.boolean(name)
        fields.choice("zero", ZERO)
        check_documents(self.documents)
        for name in ("repeat_attention", "offload"):
            if getattr(self, name) and not self.recompute:
                raise ValueError(f"{name} = true needs recompute = true: layers that keep everything repeat nothing")

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype]

    @property
    def document_ends(self) -> tuple[int, ...]:
        """cu_seqlens of a packed sequence; () for one document."""
        return document_ends(self.documents, self.length)


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
    known = ("description", *(field.name for field in dataclass_fields(Run)))
    fields = check_keys(table, known, ("length",), where)
    values = {key: value for key, value in table.items() if key != "description"}
    values |= {key: fields.count(key) for key in COUNTS if key in values}
    if "documents" in values:
        values["documents"] = read_documents(values["documents"], where)
    for key in ("gather", "residual"):
        if key in values:
            fields.choice(key, tuple(DTYPES))
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
    moe, latent = ("experts", "active_experts", "shared_hidden"), ("kv_rank", "rope_dim", "q_rank", "value_dim")
    optional = ("kv_heads", "head_dim", "tied", "window", "full_every", "linear", "gate", *moe, *latent)
    known = ("description", "kind", "vocab", *optional, *required)
    fields = check_keys(table, known, ("kind", *required), where)
    most = {"layers": MAX_LAYERS, "heads": MAX_HEADS}
    width, layers, heads, hidden = (fields.integer(key, most=most.get(key, MAX_SIZE)) for key in required)
    kind = fields.choice("kind", ("gpt", "dit"))
    kv_heads, tied = fields.integer("kv_heads", default=heads), fields.boolean("tied")
    if width % heads and "head_dim" not in table:
        raise ValueError(f"{where}: width = {width} is not a multiple of heads = {heads}")
    head_dim = fields.integer("head_dim", default=max(width // heads, 1), most=MAX_HEADS)
    experts = _experts(fields, *moe)
    if heads % kv_heads:
        raise ValueError(f"{where}: heads = {heads} is not a multiple of kv_heads = {kv_heads}")
    window = fields.integer("window", most=MAX_COUNT) if "window" in table else None
    every = fields.integer("full_every") if "full_every" in table else 0
    windows = tuple(None if every and (at + 1) % every == 0 else window for at in range(layers))
    linear = _linear(table["linear"], layers, f"{where}: linear") if "linear" in table else None
    windows = windows[: layers - linear.layers] if linear else windows
    vocab = fields.integer("vocab", least=0)
    if kind == "gpt" and not vocab:
        raise ValueError(f"{where}: 'vocab' is missing")
    sizes = vocab, width, layers, heads, kv_heads, head_dim, hidden, 3 if kind == "gpt" else 2
    of_latents, gate = _latents(fields, *latent, head_dim=head_dim), fields.boolean("gate")
    return Model(name, *sizes, tied, kind == "gpt", windows, kind == "dit", *experts, *of_latents, linear, gate)


def _linear(table: object, layers: int, where: str) -> LinearLayers:
    keys = ("key_heads", "value_heads", "key_dim", "value_dim", "conv")
    fields = check_keys(table, ("full_every", *keys), ("full_every", *keys), where)
    every = fields.integer("full_every", most=layers)
    sizes = [fields.integer(key, most=MAX_HEADS) for key in keys]
    if sizes[1] % sizes[0]:
        raise ValueError(f"{where}: value_heads = {sizes[1]} is not a multiple of key_heads = {sizes[0]}")
    return LinearLayers(layers - layers // every, *sizes)


def _latents(
    fields: Fields, rank: str, rope_dim: str, q_rank: str, value_dim: str, head_dim: int
) -> tuple[int, Latents | None]:
    """The width of values, 0 if it is that of keys, and what latents are like, by their keys."""
    values = fields.integer(value_dim, default=head_dim, most=MAX_HEADS)
    values = 0 if values == head_dim else values
    if rank not in fields.table:
        return values, None
    rope = fields.integer(rope_dim, most=MAX_HEADS)
    if rope >= head_dim:
        raise ValueError(f"{fields.prefix}{rope_dim} = {rope} must be less than the width of keys, {head_dim}")
    return values, Latents(fields.integer(rank), rope, fields.integer(q_rank) if q_rank in fields.table else 0)


def _experts(fields: Fields, total: str, active: str, shared: str) -> tuple[int, int, int]:
    """Experts, active experts and the width of shared ones, by their keys; zeros for a plain MLP."""
    if total not in fields.table:
        return 0, 0, 0
    experts = fields.integer(total)
    return experts, fields.integer(active, most=experts), fields.integer(shared, least=0)


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
    fields, kind = Fields(config, where), config.get("model_type", "")
    hybrid = isinstance(kind, str) and kind in HYBRIDS
    if config.get(key := "linear_num_key_heads") and not hybrid:
        raise ValueError(f"{where}: {key} = {short_repr(config[key])}: linear attention of {kind} is not supported")
    if not isinstance(kind, str) or kind not in GATED | PLAIN | MIXTURES.keys():
        names = ", ".join(sorted(GATED | PLAIN | MIXTURES.keys()))
        raise ValueError(f"{where}: model_type = {short_repr(kind)} is not modelled; the planner knows {names}")
    counted = next((key for key in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(key)), "")
    if counted and kind not in MIXTURES:
        raise ValueError(f"{where}: {counted} = {short_repr(config[counted])}: experts of {kind} are not supported")

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
    if config.get("kv_lora_rank") and kind not in LATENT:
        raise ValueError(f"{where}: kv_lora_rank = {config['kv_lora_rank']!r}: latents of {kind} are not supported")
    if kind in LATENT:
        head_dim, kv_heads = size("qk_nope_head_dim") + size("qk_rope_head_dim"), heads
    hidden, matrices = size("intermediate_size", "n_inner", default=4 * width), 2 if kind in PLAIN else 3
    experts = (0, 0, 0)
    if kind in MIXTURES:
        hidden, keys = size("moe_intermediate_size", default=hidden), MIXTURES[kind]
        experts = _experts(fields, *keys)
        if not experts[0]:
            raise ValueError(f"{where}: {keys[0]!r} is missing")
        shared = fields.integer("n_shared_experts", least=0) * hidden
        experts = (*experts[:2], experts[2] or shared)
    linear, config = _linear_layers(config, layers, where) if hybrid else (None, config)
    tied = fields.boolean("tie_word_embeddings")
    windows = _windows(Fields(config, where), layers - linear.layers if linear else layers, where)
    sizes = vocab, width, layers, heads, kv_heads, head_dim, hidden, matrices
    of_latents: tuple[int, Latents | None] = (0, None)
    if kind in LATENT:
        of_latents = _latents(
            fields, "kv_lora_rank", "qk_rope_head_dim", "q_lora_rank", "v_head_dim", head_dim=head_dim
        )
    return Model(name, *sizes, tied, True, windows, False, *experts, *of_latents, linear, hybrid)


def _linear_layers(config: Mapping[str, Any], layers: int, where: str) -> tuple[LinearLayers, Mapping[str, Any]]:
    """The layers with a gated delta rule, and the configuration of the others."""
    fields, kinds = Fields(config, where), config.get("layer_types")
    if kinds is None:
        every = fields.integer("full_attention_interval", default=4, most=layers)
        kinds = [LINEAR if (at + 1) % every else FULL for at in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or LINEAR not in kinds:
        raise ValueError(f"{where}: layer_types must list each of the {layers} layers, {LINEAR} among them")
    sizes = [fields.integer(f"linear_{key}", most=MAX_HEADS) for key in LINEAR_SIZES]
    others = [kind for kind in kinds if kind != LINEAR]
    return LinearLayers(layers - len(others), *sizes), {**config, "layer_types": others}


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
