"""Checkpoints of a training run. May import ``agreement``, ``launch`` and ``training``'s recipes and collectives.

Start reading at ``saving``: its docstring shows the folder of a checkpoint.

- ``saving``: writes checkpoints in the background and resumes from the newest good one.
- ``contents``: tensors as bytes in files, for any number of ranks; verified before anything is loaded.
- ``export``: a checkpoint's model as one safetensors file.
"""
