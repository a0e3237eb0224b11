"""Defaults of the benchmarks' options. Imports nothing, so that ``--help`` needs no torch."""

MACHINES = ("4x8", "8x4", "16x2", "4x4", "2x8")  # those of the claims first
MINUTES = 25.0
ENGINE_PLANS = "u8,2x1/u4,1x2/u4,2x2/u2,2x4,star2,1x8"
HOST_PLANS = "1x8,u8,u4/1x2"
