"""Schedules as data: what every rank sends, computes and merges, step by step; no torch.

``values`` and ``places`` are what they are made of, a ``family`` is one file (``nested``, ``star``), ``around`` puts
heads and groups around it, ``build`` gives the program of one rank, and ``player`` plays all ranks' programs.
"""
