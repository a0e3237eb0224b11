"""Ways to look at a schedule; no torch."""

from startrail.view.text import show

__all__ = ["show"]
