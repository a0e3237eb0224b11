"""Ways to look at a schedule; no torch."""

from startrail.view.text import fitting, show

__all__ = ["fitting", "show"]
