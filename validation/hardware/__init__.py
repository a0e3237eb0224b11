"""Predictions against figures that others published for real GPUs. ``fitting/`` holds figures that may be fitted to,
``judging/`` figures for judging only: ``fit`` cannot read them. Start with ``__main__`` (``make validate-hardware``)."""
