"""The folders of one or several runs as one page of HTML, with nothing else to load.

run.py            what was found of a run
read_run.py       what trackers wrote: JSON lines, CSV, event files of TensorBoard
trace_events.py   what profiles say: the operations that took most time
rehearsals.py     what `weft rehearse` found: memory by kind, messages by axis
lost_replicas.py  who was lost in an elastic job, and who joined
head.py           each start of a run, and the numbers one asks for first
charts.py         which series share a chart, and in which unit
page.py           everything on one page

`page.js` draws the charts with plotly, `page.css` is how the page looks. `weft report DIR` is the command;
`write_report(folder)` is what it does.

Tested by: tests/monitoring/test_report.py, tests/monitoring/test_report_rehearsals.py
"""

from weft.monitoring.report.page import render, write_report
from weft.monitoring.report.read_run import read
from weft.monitoring.report.run import Run

__all__ = ["Run", "read", "render", "write_report"]
