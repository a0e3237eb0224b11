"""Supervised fine-tuning with TRL on packed sequences, sharded over all ranks.

    torchrun --nproc-per-node 4 examples/trl_sft.py

Put ``StarTrailMixin`` before TRL's trainer (or any other ``Trainer``); everything else is plain TRL.
"""

import tempfile

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import startrail
from startrail.integrations.trainer import StarTrailMixin

WORDS = ["<pad>", "<eos>", "?", *"abcdefghijklmnopqrstuvwxyz", " ", ".", "\n"]


class LongSFTTrainer(StarTrailMixin, SFTTrainer):
    """TRL's trainer, with sequences sharded over the ranks of ``sp``."""


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single letters, so that nothing is downloaded."""
    letters = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="?"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>", unk_token="?")


def main(plan: str = "auto", steps: int = 6) -> list[float]:
    sp = startrail.SequenceParallel(plan, heads=4, kv_heads=2)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    texts = [f"the ring of {count} ranks turns. " * (1 + count % 3) for count in range(60)]
    data = Dataset.from_dict({"text": texts})
    arguments = SFTConfig(
        output_dir=tempfile.mkdtemp(), max_steps=steps, per_device_train_batch_size=1, gradient_accumulation_steps=2,
        packing=True, padding_free=True, max_length=128, learning_rate=5e-3, logging_steps=1, report_to=[],
        use_cpu=not torch.cuda.is_available(), save_strategy="no", disable_tqdm=True, bf16=False,
        gradient_checkpointing=True, average_tokens_across_devices=True,
    )  # fmt: skip
    trainer = LongSFTTrainer(
        LlamaForCausalLM(config),
        arguments,
        train_dataset=data,
        eval_dataset=data.select(range(8)),
        processing_class=tokenizer(),
        sp=sp,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*losses, trainer.evaluate()["eval_loss"]]


if __name__ == "__main__":
    dist.init_process_group()
    print(main())
    dist.destroy_process_group()
