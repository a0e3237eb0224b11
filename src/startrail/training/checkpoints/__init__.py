"""Checkpoints of a training run. May import ``agreement``, ``launch`` and ``training``'s recipes and collectives.

Start reading at ``saving``: its docstring shows the folder of a checkpoint.

- ``saving``: writes checkpoints in the background and resumes from the newest good one.
- ``reading``: verifies a checkpoint, which may be damaged or crafted, before anything is loaded.
- ``pieces``: tensors as bytes in files, written and read by different numbers of ranks.
- ``export``: a checkpoint's model as one safetensors file.
"""
