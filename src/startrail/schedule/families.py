"""The families of schedules: a third one is one new file, and its row here."""

from startrail.schedule.family import Family
from startrail.schedule.nested import NESTED
from startrail.schedule.star import STAR

FAMILIES: tuple[Family, ...] = (NESTED, STAR)  # the first is that of plans without levels of shards
