"""Views of schedules: ``text`` prints one as a grid of steps and ranks, ``svg`` draws a plan's concentric rings, and
``page`` writes an HTML page that plays schedules (``startrail show``). No torch.

May import ``schedule``, ``geometry`` and ``planner``. Start reading at ``text.show``. The page's scripts are in
``assets/``; the programs that they draw come from ``encode``.
"""

from startrail.view.text import fitting, sees, show

__all__ = ["fitting", "sees", "show"]
