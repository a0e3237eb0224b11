"""A Hugging Face causal language model on long documents, sharded over all ranks.

    torchrun --nproc-per-node 4 examples/hf_causal_lm.py

The model is tiny and randomly initialized, so this runs anywhere without a download. With
``AutoModelForCausalLM.from_pretrained(...)``, the lines marked (*) stay the same.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import startrail
from startrail.integrations.transformers import attach, shard_batch

HEADS, KV_HEADS = 4, 2


def documents(length: int, steps: int):
    """Batches of (1, length) bytes of Python's standard library, the same on every rank (*)."""
    text = b"".join(path.read_bytes() for path in sorted(Path(argparse.__file__).parent.glob("*.py"))[:40])
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    for step in range(steps):
        yield data[step * length : (step + 1) * length].unsqueeze(0)


def main(plan: str = "auto", length: int = 512, steps: int = 10) -> list[float]:
    sp = startrail.SequenceParallel(plan, heads=HEADS, kv_heads=KV_HEADS)
    torch.manual_seed(0)  # the same weights on every rank (*)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, max_position_embeddings=length,
    )  # fmt: skip
    model = attach(LlamaForCausalLM(config), sp)  # (*)
    model.gradient_checkpointing_enable()  # does not recompute the distributed attention (*)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for ids in documents(length, steps):
        loss = model(**shard_batch(sp, input_ids=ids, labels=ids)).loss  # this rank's share (*)
        loss.backward()
        startrail.sum_gradients(model.parameters(), sp.group)  # with DDP or FSDP, use gradient_factor (*)
        sp.check()  # raises if a peer was lost during this step, before the weights change
        optimizer.step()
        optimizer.zero_grad()
        if sp.group is not None:
            dist.all_reduce(loss.detach_(), group=sp.group)  # the shares sum up to the loss (*)
        losses.append(loss.item())
        if sp.rank == 0:
            print(f"step {len(losses)}: loss {losses[-1]:.3f}", flush=True)
    return losses


if __name__ == "__main__":
    dist.init_process_group()
    main()
    dist.destroy_process_group()
