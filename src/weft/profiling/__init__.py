"""Where time, memory and numbers go: traces, throughput, peak memory, the origin of a NaN.

traces.py      `profile`: torch's profiler on a schedule, one trace per rank
speed.py       `throughput`: samples, tokens and steps per second, time spent waiting for data, MFU
flops.py       floating-point operations of a function, and what a device can do
memory.py      `peak_memory` by kind; memory given back; what is in memory, as a file
health.py      `watch_health`: NaN, infinite and jumping losses, and where they arose

Nothing here changes what is computed. A rank communicates where the docstring says so, and nowhere else.
"""

from weft.profiling.flops import count_flops, peak_flops
from weft.profiling.health import Finding, Health, watch_health
from weft.profiling.memory import PeakMemory, peak_memory, release_memory, save_memory_snapshot
from weft.profiling.speed import Throughput, throughput
from weft.profiling.traces import Profile, profile

__all__ = [
    "Finding",
    "Health",
    "PeakMemory",
    "Profile",
    "Throughput",
    "count_flops",
    "peak_flops",
    "peak_memory",
    "profile",
    "release_memory",
    "save_memory_snapshot",
    "throughput",
    "watch_health",
]
