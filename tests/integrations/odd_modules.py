"""Parts that users make modules of, plain and odd, by name: an ``OddModel`` is made of one of each kind."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.integrations.plain_modules import WIDTH, Attention

HEADS = 4

# --- what a block does to its tokens besides attention and an MLP: (batch, tokens, width) to the same


def _shifted(x: Tensor) -> Tensor:
    return x + 0.1 * x.roll(1, 1)


def _above(length: int, change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: change(x) if x.shape[1] > length else x


def _below(length: int, change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: change(x) if x.shape[1] < length else x


def _less_mean(x: Tensor) -> Tensor:
    return x - 0.5 * x.mean(1, keepdim=True)


def _quantile_gate(x: Tensor) -> Tensor:
    score = x.norm(dim=-1, keepdim=True)
    return x * (1 + (score > score.quantile(0.9, dim=1, keepdim=True)))


def _without_outliers(x: Tensor) -> Tensor:
    return x.clamp(max=float(x.detach().flatten(1).quantile(0.99)))


def _top_tokens(x: Tensor) -> Tensor:
    """The largest 5 % of tokens count more: none of a few."""
    count = x.shape[1] // 20
    score = x.detach()[..., :8].norm(dim=-1)
    least = score.topk(count, 1).values[:, -1:] if count else torch.inf
    return torch.where((score >= least).unsqueeze(-1), x * torch.linspace(1, 2, x.shape[2]), x)


def _without_least(x: Tensor) -> Tensor:
    """The token with the smallest first value is dropped."""
    first = x[..., :1].detach()
    return torch.where(first < first.quantile(0.02, dim=1, keepdim=True), torch.zeros_like(x), x)


def _straight_through(x: Tensor) -> Tensor:
    mean = x.mean(1, keepdim=True)
    return x + mean - mean.detach()


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / grad.norm()


def _hooked(x: Tensor) -> Tensor:
    x = x * 1
    if x.requires_grad:
        x.register_hook(lambda grad: grad / (1e-3 + grad.norm()))
    return x


def _pooled(x: Tensor) -> Tensor:
    return F.avg_pool1d(x.mT, 1 + x.shape[1] // 16, 1)[..., :1].mT + x if x.shape[1] >= 16 else x


def _noise(x: Tensor) -> Tensor:
    return x + 0.1 * torch.randn_like(x)


def _conditional_max(x: Tensor) -> Tensor:
    largest = x.detach().abs().max()
    return x / largest if largest > 6 else x


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda x: 1.1 * x,
    "rms": lambda x: x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt(),
    "softmax over channels": lambda x: x + x.softmax(-1),
    "in place": lambda x: (x * 1).add_(0.5),
    "top channels": lambda x: x * (x >= x.topk(8, -1).values[..., -1:]),
    "quantile of channels": lambda x: x.clamp(max=x.quantile(0.9, dim=-1, keepdim=True)),
    "less mean": _less_mean,
    "max": lambda x: x + 0.1 * x.amax(1, keepdim=True),
    "softmax over tokens": lambda x: x + x.softmax(1),
    "cumulated": lambda x: x + 0.1 * x.cumsum(1) / x.shape[1],
    "shifted": _shifted,
    "sorted": lambda x: x + 0.1 * x.sort(1).values,
    "deviation": lambda x: x / (1 + x.std(1, keepdim=True)),
    "by length": lambda x: x / math.log(1 + x.shape[1]),
    "first token": lambda x: x + 0.1 * x[:, :1],
    "flipped": lambda x: x + x.flip(1),
    "quantile": lambda x: x - x.quantile(0.5, dim=1, keepdim=True),
    "gate by quantile": _quantile_gate,
    "without outliers": _without_outliers,
    "top tokens": _top_tokens,
    "without the least": _without_least,
    "straight through": _straight_through,
    "clipped gradient": _Clipped.apply,
    "hooked gradient": _hooked,
    "pooled when long": _pooled,
    "noise": _noise,
    "conditional max": _conditional_max,
    "detached mean": lambda x: x + x.detach().mean(1, keepdim=True),
    **{f"mean above {length}": _above(length, _less_mean) for length in (9, 12, 30, 50, 100)},
    **{f"shifted above {length}": _above(length, _shifted) for length in (20, 100)},
    **{f"mean below {length}": _below(length, _less_mean) for length in (8, 20)},
}
PER_TOKEN = ("scaled", "rms", "softmax over channels", "in place", "top channels", "quantile of channels")

# --- attention


class OddAttention(Attention):
    """``kind``: what it does to queries, keys, values or options."""

    def __init__(self, kind: str, causal: bool) -> None:
        super().__init__(HEADS if kind != "grouped" else 6, 2 if kind == "grouped" else HEADS, causal=causal)
        if kind == "grouped":
            self.inside, self.kv_heads, self.dim = nn.Linear(WIDTH, 10 * self.dim), 2, WIDTH // 6
        self.kind, self.causal = kind, causal
        self.extra = nn.Parameter(torch.randn(1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        kind, length = self.kind, x.shape[1]
        if (kind == "extra token above 100" and length > 100) or kind == "extra token":
            x = torch.cat([self.extra.expand(len(x), -1, -1), x], 1)
        parts = self.inside(x).unflatten(2, (-1, self.dim)).transpose(1, 2)
        q, k, v = parts.split([self.heads, self.kv_heads, self.kv_heads], 1)
        options = dict(self.options)
        window = {"window above 12": 12, "window above 30": 30}.get(kind)
        if window is not None and length > window:
            distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
            options |= dict(attn_mask=distance.abs() < window, is_causal=False)
        elif kind == "normed":
            q, k = F.normalize(q, dim=-1) * 3, F.normalize(k, dim=-1)
        elif kind == "scale by length":
            options["scale"] = math.log(length) / 4
        elif kind == "scale above 30" and length > 30:
            options["scale"] = 0.1
        elif kind == "causal above 30" and length > 30:
            options["is_causal"] = True
        elif kind == "queries by length" and length > 30:
            q = q * math.log(length, 30)
        elif kind == "mean key":
            k = k - k.mean(2, keepdim=True)
        elif kind == "dropout":
            options["dropout_p"] = 0.2 if self.training else 0.0
        elif kind == "pooled keys" and length > 30:
            k, v = (F.avg_pool1d(x.flatten(0, 1).mT, 2).mT.unflatten(0, x.shape[:2]) for x in (k, v))
            options["is_causal"] = False
        out = F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2)
        return self.outside(out)[:, -length:]


ATTENTION = ("plain", "plain", "grouped", "normed")
ODD_ATTENTION = (
    "window above 12", "window above 30", "scale by length", "scale above 30", "causal above 30", "mean key", "dropout",
    "queries by length", "pooled keys", "extra token above 100", "extra token",
)  # fmt: skip

# --- MLPs


class Experts(nn.Module):
    """Each token by the best of four; ``kind`` may keep a loss, or let an expert take a limited number of tokens."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.router, self.kind = nn.Linear(WIDTH, 4), kind
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("load", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        best = scores.argmax(-1)
        counts = F.one_hot(best, 4).sum((0, 1))
        if self.kind == "loss kept":
            self.aux = (counts / counts.sum() * scores.mean((0, 1))).sum()
        elif self.kind == "load kept":
            self.load.add_(counts)
        elif self.kind == "scores kept":
            self.scores = scores
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            chosen = best == index
            if self.kind == "capacity":
                chosen = chosen & (chosen.cumsum(1) <= max(1, x.shape[1] // 4))
            out = out + chosen.unsqueeze(-1) * expert(x) * scores[..., index : index + 1]
        return out


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(20, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, x = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * x)


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.mT).mT


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0]


MLPS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(nn.Linear(WIDTH, 40), nn.GELU(), nn.Linear(40, WIDTH)),
    "gated": Gated,
    "experts": lambda: Experts(""),
    "closed gate": lambda: nn.Sequential(nn.Linear(WIDTH, 40), nn.GELU(), _zero(nn.Linear(40, WIDTH))),
}
ODD_MLPS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(WIDTH, 40), nn.Dropout(0.2), nn.Linear(40, WIDTH)),
    "convolved": Convolved,
    "recurrent": Recurrent,
    **{
        f"experts, {kind}": lambda kind=kind: Experts(kind)
        for kind in ("loss kept", "load kept", "scores kept", "capacity")
    },
}


def _zero(linear: nn.Linear) -> nn.Linear:
    nn.init.zeros_(linear.weight)
    return linear


NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.LayerNorm(WIDTH),
    "rms": lambda: nn.RMSNorm(WIDTH),
    "none": nn.Identity,
}


class Across(nn.Module):
    """A norm over the tokens' dimension."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.mT).mT


ODD_NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: Across(nn.BatchNorm1d(WIDTH)),
    "group": lambda: Across(nn.GroupNorm(2, WIDTH)),
    "instance": lambda: Across(nn.InstanceNorm1d(WIDTH)),
}

# --- blocks


class OddBlock(nn.Module):
    """A block of parts by name. ``drop``: the rate at which a row of the batch skips it. ``keeps``: what it keeps."""

    def __init__(self, parts: dict[str, Any]) -> None:
        super().__init__()
        self.parts = parts
        self.attention = OddAttention(parts["attention"], parts["causal"])
        self.mlp = {**MLPS, **ODD_MLPS}[parts["mlp"]]()
        norm = {**NORMS, **ODD_NORMS}[parts["norm"]]
        self.norms = nn.ModuleList(norm() for _ in range(2))
        self.change, self.table = CHANGES[parts["change"]], {}

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        given = x
        if self.parts["post_norm"]:
            x = self.norms[0](x + self.attention(x))
            x = self.norms[1](x + self.mlp(x))
        else:
            x = x + self._kept(self.attention(self.norms[0](x)))
            x = x + self.mlp(self.norms[1](x))
        if self.parts["drop"] and self.training:
            x = torch.where(torch.rand(len(x), 1, 1) < self.parts["drop"], given, x)
        if scale is not None:
            x = x * (1 + 0.1 * scale)
        keeps = self.parts["keeps"]
        if keeps == "mean in attribute":
            self.aux = x.mean()
        elif keeps == "tokens in attribute":
            self.aux = x
        elif keeps == "sum in a list":
            self.parts["list"].append(x.square().mean())
        elif keeps == "counter":
            self.calls = getattr(self, "calls", 0) + 1
        elif keeps == "table" and x.shape[2] not in self.table:
            self.table[x.shape[2]] = torch.linspace(0, 1, x.shape[2], dtype=x.dtype)
        elif keeps == "first values":
            x = x + self.parts["list"][0] if self.parts["list"] else x
            self.parts["list"][:] = [x]
        if keeps == "table":
            x = x * self.table[x.shape[2]]
        return self.change(x)

    def _kept(self, x: Tensor) -> Tensor:
        if self.parts["keeps"] == "attention's mean":
            self.aux = x.mean((0, 1)).square().sum()
        return x


def torch_layer(dropout: float, norm_first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout, batch_first=True, norm_first=norm_first)


KEEPS = ("nothing", "nothing", "counter", "table")
ODD_KEEPS = ("mean in attribute", "tokens in attribute", "sum in a list", "attention's mean", "first values")

# --- the module around the blocks


POOLS: dict[str, Callable[[Tensor], Any]] = {
    "mean": lambda x: x.mean(1),
    "first": lambda x: x[:, 0],
    "max": lambda x: x.amax(1),
    "quantile": lambda x: x.quantile(0.7, dim=1),
    "logsumexp": lambda x: x.logsumexp(1),
    "weighted": lambda x: (x * x[..., :1].softmax(1)).sum(1),
    "tokens": lambda x: x,
    "tokens and mean": lambda x: (x, x.mean(1)),
    "dictionary": lambda x: {"tokens": x, "mean": x.mean(1)},
}


class Flow:
    """What a model does with tokens between its blocks and behind them; ``results``: what it returns besides."""

    def __init__(self, model: OddModel) -> None:
        self.model, self.kept, self.results = model, list[Tensor](), list[Tensor]()

    def keep(self, x: Tensor) -> Tensor:
        self.kept.append(x)
        return x

    def give(self, x: Tensor, result: Tensor) -> Tensor:
        self.results.append(result)
        return x

    def note(self, x: Tensor, noted: Tensor) -> Tensor:
        self.model.noted.append(noted)
        return x

    def note_attribute(self, x: Tensor) -> Tensor:
        self.model.aux = x.square().mean()
        return x

    def hook(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: grad / grad.norm())
        return x

    def read_shape(self, x: Tensor) -> Tensor:
        assert x.shape[2] == WIDTH and len(x) and x.dtype.is_floating_point
        return x

    def from_skips(self, x: Tensor) -> Tensor:
        """As in a U-Net: the second half of the blocks gets what went into the first half."""
        rest = self.model.parts["depth"] - len(self.kept)
        return self.keep(x + self.kept[rest - 1] if rest <= len(self.kept) else x)


def _mean(x: Tensor) -> Tensor:
    return x.mean(1, keepdim=True)


BETWEEN: dict[str, Callable[[Flow, Tensor], Tensor]] = {  # after every block
    "shape read": Flow.read_shape,
    "skips": Flow.from_skips,
    "attribute of the module": Flow.note_attribute,
    "gradient hook": Flow.hook,
    "mean between": lambda flow, x: x - _mean(x),
    "normed between": lambda flow, x: F.layer_norm(x, (WIDTH,)),
    "clamped by quantile": lambda flow, x: x.clamp_(max=float(x.detach().flatten().quantile(0.95))),
    "hidden states": lambda flow, x: flow.give(x, x),
    "deep supervision": lambda flow, x: flow.give(x, flow.model.head(x.mean(1))),
    "shape used": lambda flow, x: flow.give(x, flow.model.places[:, : x.shape[1]].sum(1) / x.shape[1]),
    "mean noted": lambda flow, x: flow.note(x, x.mean()),
    "quantile noted": lambda flow, x: flow.note(x, x.quantile(0.5, dim=1)),
    "losses noted": lambda flow, x: flow.note(x, flow.model.head(x).square().mean()),
    "tokens noted": lambda flow, x: flow.note(x, x),
    "sum of hidden": lambda flow, x: flow.keep(x),
    "mean added later": lambda flow, x: flow.give(x, flow.keep(_mean(x))),
    "each twice, mean between": lambda flow, x: flow.give(x, flow.keep(_mean(x))),
}
BEHIND: dict[str, Callable[[Flow, Tensor], Tensor]] = {  # after all blocks
    "scaled": lambda flow, x: 2 * x,
    "twice": lambda flow, x: flow.model.all_blocks(x),
    "twice, mean between": lambda flow, x: flow.model.all_blocks(x + _mean(x)),
    "reversed, mean between": lambda flow, x: flow.model.all_blocks(x + _mean(x)),
    "nested": lambda flow, x: flow.model.more[0](x),
    "two stacks": lambda flow, x: flow.model.other[0](x),
    "added back": lambda flow, x: x + flow.model.blocks[0](x),
    "list of the module": lambda flow, x: flow.note(x, x.square().mean()),
    "sum of hidden": lambda flow, x: torch.stack(flow.kept).sum(0),
    "mean added later": lambda flow, x: x + sum(flow.kept),
    "each twice, mean between": lambda flow, x: x + sum(flow.kept),
}
FLOWS = (
    "loop", "loop", "sequential", "nested", "scaled", "checkpointed", "twice", "repeated", "shape read", "two stacks",
)  # fmt: skip
ODD_FLOWS = ("early exit", "reversed", *sorted((BETWEEN.keys() | BEHIND.keys()) - set(FLOWS)))

# --- hooks: on a model, its first block, and that block's first module


def _on_each(model: OddModel) -> None:
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, args: model.noted.append(args[0].mean()))


def _forward(
    of: Callable[[OddModel], nn.Module], change: Callable[[OddModel, Any], Any]
) -> Callable[[OddModel], object]:
    return lambda model: of(model).register_forward_hook(lambda module, args, out: change(model, out))


def _backward(of: Callable[[OddModel], nn.Module], change: Callable[[Tensor], Tensor]) -> Callable[[OddModel], object]:
    return lambda model: of(model).register_full_backward_hook(lambda module, grads, _: (change(grads[0]), *grads[1:]))


def _block(model: OddModel) -> nn.Module:
    return model.blocks[0]


def _inside(model: OddModel) -> nn.Module:
    return model.blocks[0].mlp if model.parts["layer"] == "ours" else model.blocks[0].linear1


HOOKS: dict[str, Callable[[OddModel], object]] = {
    "none": lambda model: None,
    "doubling inside": _forward(_inside, lambda model, out: 2 * out),
}
ODD_HOOKS: dict[str, Callable[[OddModel], object]] = {
    "harmless on blocks": _forward(_block, lambda model, out: None),
    "mean noted on blocks": _forward(_block, lambda model, out: model.noted.append(out.mean())),
    "mean added on blocks": _forward(_block, lambda model, out: out + _mean(out)),
    "mean noted before blocks": _on_each,
    "mean taken from gradients of blocks": _backward(_block, lambda grad: grad - _mean(grad)),
    "tokens noted inside": _forward(_inside, lambda model, out: model.noted.append(out)),
    "mean added inside": _forward(_inside, lambda model, out: out + _mean(out)),
    "gradient scaled inside": _backward(_inside, lambda grad: grad / grad.norm()),
    "noted behind blocks": _forward(lambda model: model.last, lambda model, out: model.noted.append(out[:, 0])),
}

# --- the module around the blocks


class OddModel(nn.Module):
    """``parts``: by name, what it is made of. ``noted``: what hooks and its own code keep besides its results."""

    def __init__(self, parts: dict[str, Any]) -> None:
        super().__init__()
        self.parts, self.noted, flow = parts, [], parts["flow"]
        blocks = [self._block() for _ in range(parts["depth"])]
        blocks = blocks[:1] * len(blocks) if flow == "repeated" else blocks
        self.first, self.last, self.head = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)
        self.places, self.token = nn.Parameter(torch.randn(1, 400, WIDTH)), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.blocks = nn.Sequential(*blocks) if flow == "sequential" else nn.ModuleList(blocks)
        if flow == "nested":
            self.more = nn.ModuleList([nn.Sequential(self._block(), nn.LayerNorm(WIDTH))])
        if flow == "two stacks":
            self.other = nn.ModuleList([nn.TransformerEncoderLayer(WIDTH, HEADS, 32, 0.0, batch_first=True)])
        self.dropout = nn.Dropout(parts["root_dropout"])
        {**HOOKS, **ODD_HOOKS}[parts["hook"]](self)

    def _block(self) -> nn.Module:
        if self.parts["layer"] == "ours":
            return OddBlock({**self.parts, "list": self.noted})
        first = not self.parts["post_norm"]
        return nn.TransformerEncoderLayer(WIDTH, HEADS, 32, self.parts["rate"], batch_first=True, norm_first=first)

    def forward(self, x: Tensor) -> Any:
        parts, flow = self.parts, Flow(self)
        x = self.first(x) + self.places[:, : x.shape[1]]
        if parts["token"]:
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        x = self.all_blocks(self.dropout(x), BETWEEN.get(parts["flow"]), flow)
        x = BEHIND.get(parts["flow"], lambda flow, x: x)(flow, x)
        found = POOLS[parts["pool"]](self.last(x))
        return (found, flow.results) if flow.results else found

    def all_blocks(
        self, x: Tensor, between: Callable[[Flow, Tensor], Tensor] | None = None, flow: Flow | None = None
    ) -> Tensor:
        name = self.parts["flow"]
        if name == "sequential":
            return self.blocks(x)
        given = (self.token,) if self.parts["scale"] and self.parts["layer"] == "ours" else ()
        blocks = list(self.blocks)[:: -1 if name.startswith("reversed") and flow is not None else 1]
        for block in blocks[: -1 if name == "early exit" and not self.training else None]:
            x = checkpoint(block, x, *given, use_reentrant=False) if name == "checkpointed" else block(x, *given)
            if between is not None:
                x = between(flow, x)
            if name.startswith("each twice"):
                x = block(x, *given)
        return x
