"""Schedules as data: what every rank sends, computes and merges, step by step; no torch.

``build_program`` is the one door: it gives the program of one rank. ``check`` proves all ranks' programs together.
"""

from startrail.schedule.build import build_program
from startrail.schedule.memory import last_uses
from startrail.schedule.places import Place
from startrail.schedule.traffic import closed_form, count_sends, lane_names
from startrail.schedule.values import INPUTS, RESULTS, Block, Merge, Piece, Program, Step, Transfer

__all__ = [
    "INPUTS",
    "RESULTS",
    "Block",
    "Merge",
    "Piece",
    "Place",
    "Program",
    "Step",
    "Transfer",
    "build_program",
    "closed_form",
    "count_sends",
    "lane_names",
    "last_uses",
]
