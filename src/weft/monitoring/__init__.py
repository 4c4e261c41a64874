"""A run as numbers: logged, timed, profiled, watched, and rendered as a page.

log.py          `log`, and trackers made of trackers: `every`, `chosen`, `averaged`
log_start.py    `log_start`: what a program is that begins or resumes a run
values.py       what a value may be: a number, a text, an `Image`, `Histogram`, `Table`, `Figure`, `Artifact`, `HParams`
trackers/       where the numbers are written
progress.py     `progress`: a bar in a terminal, lines elsewhere; one for all ranks
logger.py       `logger`: Python's logging with the rank in it
throughput.py   `throughput`: samples, tokens and steps per second, time spent waiting for data, MFU
flops.py        floating-point operations of a function, and what a device can do
profiler.py     `profile`: torch's profiler on a schedule, one trace per rank
peak_memory.py  `peak_memory` by kind; memory given back; what is in memory, as a file
measured.py     `probe_results`: what probes have measured so far
health.py       `watch_health`: NaN, infinite and jumping losses, and where they arose
run_ledger/     `ledger`: what happened in each step, so that two runs can be compared
report/         the folders of one or several runs as one page of HTML

Nothing here changes what is computed. A rank communicates where the docstring says so, and nowhere else.

Tested by: tests/monitoring
"""

from weft.monitoring.flops import count_flops, peak_flops
from weft.monitoring.health import Finding, Health, watch_health
from weft.monitoring.log import averaged, chosen, every, log
from weft.monitoring.log_start import log_start
from weft.monitoring.logger import logger
from weft.monitoring.measured import probe_results
from weft.monitoring.peak_memory import PeakMemory, peak_memory, release_memory, save_memory_snapshot
from weft.monitoring.profiler import Profile, profile
from weft.monitoring.progress import progress
from weft.monitoring.report import write_report
from weft.monitoring.run_ledger import Ledger, ledger
from weft.monitoring.throughput import Throughput, throughput
from weft.monitoring.trackers.files import csv, jsonl
from weft.monitoring.trackers.libraries import aim, clearml, comet, dvclive, mlflow, swanlab, trackio, wandb
from weft.monitoring.trackers.lifetime import RunTracker, closing, in_background
from weft.monitoring.trackers.tensorboard import EventFile, tensorboard
from weft.monitoring.values import Artifact, Figure, Histogram, HParams, Image, Table, Tracker, numbers_of

__all__ = [
    "Artifact",
    "EventFile",
    "Figure",
    "Finding",
    "HParams",
    "Health",
    "Histogram",
    "Image",
    "Ledger",
    "PeakMemory",
    "Profile",
    "RunTracker",
    "Table",
    "Throughput",
    "Tracker",
    "aim",
    "averaged",
    "chosen",
    "clearml",
    "closing",
    "comet",
    "count_flops",
    "csv",
    "dvclive",
    "every",
    "in_background",
    "jsonl",
    "ledger",
    "log",
    "log_start",
    "logger",
    "mlflow",
    "numbers_of",
    "peak_flops",
    "peak_memory",
    "probe_results",
    "profile",
    "progress",
    "release_memory",
    "save_memory_snapshot",
    "swanlab",
    "tensorboard",
    "throughput",
    "trackio",
    "wandb",
    "watch_health",
    "write_report",
]
