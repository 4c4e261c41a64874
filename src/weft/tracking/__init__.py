"""Numbers of a run: averaged over the ranks, written by the main one, to any callable `(values, step=)`.

logging.py   `log`, and trackers made of trackers: `every`, `chosen`, `averaged`
kinds.py     what a value may be: a number, a text, or one of `Image`, `Histogram`, `HParams`
files.py     `jsonl`, `csv`
events.py    `tensorboard`
progress.py  `progress`: a bar in a terminal, lines elsewhere; one for all ranks
messages.py  `logger`: Python's logging with the rank in it
"""

from weft.tracking.events import EventFile, tensorboard
from weft.tracking.files import csv, jsonl
from weft.tracking.kinds import Histogram, HParams, Image, Tracker, numbers_of
from weft.tracking.logging import averaged, chosen, every, log
from weft.tracking.messages import logger
from weft.tracking.progress import progress

__all__ = [
    "EventFile",
    "HParams",
    "Histogram",
    "Image",
    "Tracker",
    "averaged",
    "chosen",
    "csv",
    "every",
    "jsonl",
    "log",
    "logger",
    "numbers_of",
    "progress",
    "tensorboard",
]
