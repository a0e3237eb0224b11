"""Text and images for training, the same samples with any plan and number of ranks. May import the public API.

Start reading at ``texts``: every rank reads only its part of each sequence.

- ``texts``: batches for a GPT, from files as bytes or as a tokenizer's ids, which are cached.
- ``images``: batches for a DiT, from files or of drawn digits.
- ``sources``: finding and holding out files, random numbers by key.
"""
