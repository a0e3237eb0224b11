"""Attention over one sequence on 4 processes, against one process: torchrun --nproc-per-node 4 examples/first.py"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import startrail

dist.init_process_group()
torch.manual_seed(0)  # the same tensors on every rank
q, k, v = torch.randn(3, 1, 8, 1000, 64)  # (batch, heads, tokens, head dim)

sp = startrail.SequenceParallel("u2/1x2")  # heads over 2 ranks, rings of 2 inside
seq = sp.sequence(1000)  # once per batch
local = [seq.shard(x, dim=2) for x in (q, k, v)]  # this rank's tokens
out = seq.attention(*local, causal=True)  # autograd and torch.compile work
whole = seq.unshard(out, dim=2)  # all tokens again, in order

error = (whole - F.scaled_dot_product_attention(q, k, v, is_causal=True)).abs().max()
if sp.rank == 0:
    print(f"largest difference from one process: {error:.1e}")
    print(f"sent by rank 0: {sp.traffic()}")
dist.destroy_process_group()
