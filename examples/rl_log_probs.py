"""Log-probabilities, entropy and KL of one long sequence for a policy gradient, without storing all logits.

torchrun --nproc-per-node 4 examples/rl_log_probs.py
"""

import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

import startrail
from startrail.integrations.transformers import attach, shard_batch


def main(plan: str = "auto", length: int = 333) -> tuple[float, float, float]:
    """The policy's loss, its mean entropy, and its mean KL from the reference."""
    sp = startrail.SequenceParallel(plan, heads=4, kv_heads=2)
    config = Qwen3Config(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    torch.manual_seed(0)
    policy, reference = (attach(Qwen3ForCausalLM(config), sp) for _ in range(2))
    ids = torch.randint(512, (1, length), generator=torch.Generator().manual_seed(1))
    advantages = torch.randn(1, length, generator=torch.Generator().manual_seed(2))  # one per token of the answer
    labels = ids.clone()
    labels[:, : length // 3] = -100  # the prompt is not learnt

    batch = shard_batch(sp, input_ids=ids, labels=labels)
    sequence, targets = batch["startrail"].sequence, batch.pop("shift_labels")
    batch.pop("labels")
    with torch.no_grad():
        before = reference(**batch, output_hidden_states=True, logits_to_keep=1).hidden_states[-1]
    hidden = policy(**batch, output_hidden_states=True, logits_to_keep=1).hidden_states[-1]
    seen = startrail.next_tokens(
        hidden, policy.lm_head.weight, targets, reference=(before, reference.lm_head.weight), chunk=64
    )
    count = (targets != -100).sum()
    mine = sequence.roll(sequence.shard(advantages, 1), -1, dim=1)  # an advantage belongs to the predicted token
    policy_sum = -(seen.log_probs * mine).sum() - 0.01 * seen.entropy.sum() + 0.05 * seen.kl.sum()
    loss = startrail.global_mean(policy_sum, count, sp.group)
    loss.backward()
    startrail.sum_gradients(policy.parameters(), sp.group)
    means = [startrail.global_mean(x.detach().sum(), count, sp.group) for x in (seen.entropy, seen.kl)]
    return loss.item(), means[0].item(), means[1].item()


if __name__ == "__main__":
    dist.init_process_group()
    print(main())
    dist.destroy_process_group()
