"""The schedule families. To add a family, add one file and one entry in ``FAMILIES``.

May import the other modules of ``schedule``. Start reading at ``base``, the interface. ``nested`` builds nested
concentric rings, ``star`` the schedule of the StarTrail paper, ``direct`` sends just the keys that a mask shows.
"""

from startrail.schedule.families.base import Family
from startrail.schedule.families.direct import DIRECT
from startrail.schedule.families.nested import NESTED
from startrail.schedule.families.star import STAR

FAMILIES: tuple[Family, ...] = (NESTED, STAR, DIRECT)  # the first also builds plans with heads levels only
