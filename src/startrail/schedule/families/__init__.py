"""The families of schedules. A new family is one new file and one entry in ``FAMILIES``.

May import the other modules of ``schedule``. Start reading at ``base``, the interface; ``nested`` has nested concentric
rings, ``star`` the paper's schedule.
"""

from startrail.schedule.families.base import Family
from startrail.schedule.families.nested import NESTED
from startrail.schedule.families.star import STAR

FAMILIES: tuple[Family, ...] = (NESTED, STAR)  # the first also builds plans that have heads levels only
