"""The families of schedules: a third one is one new file, and its row here."""

from startrail.schedule.families.base import Family
from startrail.schedule.families.nested import NESTED
from startrail.schedule.families.star import STAR

FAMILIES: tuple[Family, ...] = (NESTED, STAR)  # the first is that of plans without levels of shards
