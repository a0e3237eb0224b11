"""Views of schedules: ``text`` prints one as a grid of steps and ranks, for ``startrail show``. No torch.

May import ``schedule``, ``geometry`` and ``planner``. Start reading at ``text.show``.
"""

from startrail.view.text import fitting, show

__all__ = ["fitting", "show"]
