"""Extend a model's context from 1,024 to 32,768 tokens: LoRA on packed documents, each row split over all ranks.

    torchrun --nproc-per-node 4 examples/long_sft/train.py        # or: make long-context

A small model first learns to look up facts in documents of up to 1,024 tokens. Then its positions are stretched (YaRN),
and adapters are trained on long documents. docs/guides/long-context.md explains every step.
"""

import argparse
import copy
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from facts import VOCABULARY, Row, packed
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

import startrail
from startrail.integrations.transformers import attach, shard_batch
from startrail.view.plots import Series, line_chart, page_text

SHORT, LONG, FACTOR = 1024, 32_768, 32
HEADS, KV_HEADS, BINS = 2, 1, 8  # BINS: of the depth of a fact


def small_model() -> Qwen2ForCausalLM:
    """Two layers: the first sees a few tokens, the second all of them."""
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=32, layer_types=["sliding_attention", "full_attention"],
        use_sliding_window=True, sliding_window=16, max_position_embeddings=SHORT, initializer_range=0.1,
        rope_parameters=dict(rope_type="default", rope_theta=10_000.0), tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    torch.nn.init.normal_(model.model.embed_tokens.weight)
    return model


def stretched(model: Qwen2ForCausalLM, factor: int) -> Qwen2ForCausalLM:
    """The same weights with a context ``factor`` times as long (YaRN)."""
    config = copy.deepcopy(model.config)
    theta, config.max_position_embeddings = config.rope_parameters["rope_theta"], SHORT * factor
    config.rope_parameters = dict(
        rope_type="yarn", rope_theta=theta, factor=float(factor), original_max_position_embeddings=SHORT
    )
    longer = Qwen2ForCausalLM(config)
    longer.load_state_dict(model.state_dict())
    return longer


class Run:
    """What the stages share. ``say`` prints on the first rank."""

    def __init__(self, sp: startrail.SequenceParallel) -> None:
        self.sp, self.started = sp, time.time()

    def say(self, text: str) -> None:
        if self.sp.rank == 0:
            print(f"{time.time() - self.started:4.0f} s  {text}", flush=True)

    def sharded(self, row: Row) -> dict:
        return shard_batch(self.sp, row.ids, row.labels, position_ids=row.positions, depth=row.depth)

    def train(self, name: str, model, steps: int, rate: float, tokens: int, shortest: int, longest: int) -> None:
        """Steps on packed rows of ``tokens``. Documents become longer in the second quarter of the steps."""
        optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=rate, weight_decay=0.0)
        warm_up = max(1, min(30, steps // 4))
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (step + 1) / warm_up, 1.1 - step / steps)
            doublings = (longest // shortest).bit_length() - 1
            cap = shortest * 2 ** int(doublings * min(1.0, max(0.0, 4 * (step + 1) / steps - 1)))
            batch = self.sharded(packed(tokens, shortest, cap, seed=step))
            batch.pop("depth")
            loss = model(**batch).loss  # this rank's share
            loss.backward()
            startrail.sum_gradients(model.parameters(), self.sp.group)
            self.sp.check()  # raises if a peer was lost during this step, before the weights change
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % max(1, steps // 10) == 0:
                loss = loss.detach()
                dist.all_reduce(loss, group=self.sp.group)  # the shares sum up to the loss
                self.say(f"{name}: step {step + 1} of {steps}, documents of up to {cap:,} tokens, loss {loss:.3f}")

    @torch.no_grad()
    def accuracy(self, model, length: int, rows: int) -> list[float]:
        """The share of values that are right in documents of ``length`` tokens, by the depth of the fact."""
        counts = torch.zeros(2, BINS)
        for row in range(rows):
            batch = self.sharded(packed(length, length, length, seed=10**6 + row))
            depth, targets = batch.pop("depth"), batch.pop("shift_labels")
            for name in ("labels", "num_items_in_batch"):
                batch.pop(name)
            right = model(**batch).logits.argmax(-1) == targets
            asked = depth >= 0
            bins = depth[asked] * BINS // length
            counts[0].index_add_(0, bins, right[asked].float())
            counts[1].index_add_(0, bins, torch.ones(len(bins)))
        dist.all_reduce(counts, group=self.sp.group)
        return (counts[0] / counts[1]).tolist()


def mean(found: list[float]) -> float:
    known = [x for x in found if x == x]  # no fact may stand at the very end
    return sum(known) / len(known)


def main(
    plan: str = "u2/1x2", short_steps: int = 450, long_steps: int = 16, long: int = LONG, out: str = ""
) -> list[float]:
    sp = startrail.SequenceParallel(plan, heads=HEADS, kv_heads=KV_HEADS)
    run, rows = Run(sp), 4
    torch.manual_seed(0)  # the same weights on every rank
    model = small_model()
    run.train("pretraining", attach(model, sp), short_steps, 4e-3, 4 * SHORT, 32, SHORT)
    found = {"before": run.accuracy(model, long, rows)}
    short = mean(run.accuracy(model, SHORT, rows))
    run.say(f"before: {short:.0%} right at {SHORT:,} tokens, {mean(found['before']):.0%} at {long:,}")
    startrail.integrations.transformers.detach(model)
    longer = stretched(model, long // SHORT)
    adapted = get_peft_model(
        longer, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    )
    attach(adapted, sp)
    found["positions stretched"] = run.accuracy(adapted, long, rows)
    run.say(f"positions stretched: {mean(found['positions stretched']):.0%} right at {long:,}")
    run.train("LoRA", adapted, long_steps, 2e-3, long, long // 8, long)
    found["after LoRA"] = run.accuracy(adapted, long, rows)
    run.say(f"after LoRA: {mean(found['after LoRA']):.0%} right at {long:,}")
    if out and sp.rank == 0:
        adapted.save_pretrained(Path(out) / "adapter")
        draw(found, long, Path(out))
        run.say(f"{out}/report.html")
    return [short, *map(mean, found.values())]


def draw(found: dict[str, list[float]], length: int, folder: Path) -> None:
    series = [
        Series(f"{name}: {mean(bins):.0%}", [((at + 0.5) * length / BINS, 100 * x) for at, x in enumerate(bins)])
        for name, bins in found.items()
    ]
    chart = line_chart(
        series, "depth of the fact (tokens)", f"facts retrieved (%) from {length:,} tokens", from_zero=True
    )
    (folder / "report.html").write_text(
        page_text("Longer context", ["<h1>Facts retrieved, by their depth</h1>", chart])
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore", FutureWarning)  # of peft with transformers 5.23
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", default="runs/long-context", help="folder of the plot and the adapter (default %(default)s)"
    )
    dist.init_process_group("gloo")
    *_, after = main(out=parser.parse_args().out)
    dist.destroy_process_group()
    if after < 0.9:
        raise SystemExit(f"only {after:.0%} of the facts are retrieved: expected more than 90%")
