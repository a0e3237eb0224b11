"""Views of schedules: ``text`` prints one as a grid of steps and ranks, ``svg`` draws a plan's concentric rings, and
``page`` writes an HTML page that plays schedules (``startrail show``), which ``serve`` makes live. No torch.

May import ``schedule``, ``geometry``, ``routing`` and ``planner``. Start reading at ``text.show``; ``batch`` prints
what runs for a mask. The page's scripts are in ``assets/``; they draw what ``recording`` writes down. ``trace`` writes
and compares traces, ``plots`` and ``plan_plot`` draw plots, and ``matrix`` finds who computes each cell of attention.
"""

from startrail.view.batch import show_batch
from startrail.view.text import fitting, show

__all__ = ["fitting", "show", "show_batch"]
