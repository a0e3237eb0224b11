"""Predictions against figures that others published for real GPUs. ``fitting/`` holds figures that may be fitted to,
``judging/`` figures for judging only, which ``fit`` cannot read. Start with ``__main__`` (make validate-hardware)."""
