"""The folder of a run as one page of HTML, with nothing else to load.

reading.py   what trackers wrote: JSON lines, CSV, event files of TensorBoard
events.py    the last of these
traces.py    what profiles say: the operations that took most time
charts.py    numbers over steps as SVG
page.py      everything on one page

`weft report DIR` is the command; `write_report(folder)` is what it does.
"""

from weft.reporting.page import render, write_report
from weft.reporting.reading import Run, read

__all__ = ["Run", "read", "render", "write_report"]
