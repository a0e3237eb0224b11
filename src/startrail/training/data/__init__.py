"""Text and images for training, the same samples with any plan and number of ranks. May import the public API.

Start reading at ``text``: every rank reads only its part of each sequence.

- ``text``, ``images``: batches for a GPT and for a DiT.
- ``digits``: drawn digits, the images of ``dit-tiny``.
- ``streams``, ``tokenizing``: tokens in memory-mapped files, and the cache of a tokenizer's ids.
- ``sources``, ``seeds``: finding and holding out files; random numbers by key.
"""
