"""Views of schedules: ``text`` prints one as a grid of steps and ranks, ``svg`` draws a plan's concentric rings, and
``page`` writes an HTML page that plays schedules (``startrail show``), which ``server`` makes live. No torch.

May import ``schedule``, ``geometry``, ``compile`` and ``planner``. Start reading at ``text.show``. The
page's scripts are in ``assets/``; they draw what ``recording`` writes down. ``trace`` writes and compares traces,
``plots`` and ``plan_plot`` draw plots, ``chain`` the way of states, ``forms`` latents next to keys. ``matrix`` finds
who computes each cell of attention.
"""

from startrail.view.chain import chain_svg, chain_text
from startrail.view.forms import forms_svg, forms_text
from startrail.view.text import fitting, show, show_batch

__all__ = ["chain_svg", "chain_text", "fitting", "forms_svg", "forms_text", "show", "show_batch"]
