"""Sequence parallelism for models that others wrote: Hugging Face transformers and its Trainer, diffusers, any module.

May import the public API and the packages below it. Start with ``transformers``: ``attach`` and ``shard_batch``.

- ``batch``: an ordinary, padded or packed batch as this rank's arguments
- ``probe``: what ``attach`` checks before a model runs, and its refusals
- ``without_logits``, ``tiles``: the loss and MLPs in chunks of tokens
- ``vision``: vision-language models, whose language model's inputs are split
- ``layer_masks``, ``token_mixing``: what a layer's attention sees, and whether tokens mix outside attention
- ``trainer``: ``StarTrailTrainer``, and ``StarTrailMixin`` for classes derived from ``Trainer``
- ``trl``: ``StarTrailPolicyMixin`` for TRL's trainers that compare log-probabilities
- ``routers``: the auxiliary loss of mixtures of experts, over all ranks
- ``automodel``: NeMo Automodel's contract for splitting batches
- ``pipeline``: the sequences of a pipeline's microbatches
- ``survey``: ``startrail models``, which tries every family of the installed transformers
- ``versions``: the tested versions of transformers, and where they differ
- ``modules``: any module that calls ``F.scaled_dot_product_attention``; ``diffusers``: its transformers
- ``splitting``: what those two share: part of a model on part of the tokens
"""
