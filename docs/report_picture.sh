#!/usr/bin/env bash
# Makes the picture of a report in README, docs/_static/report.png: trains examples/train_lm.py on two ranks, and takes
# a screenshot of its report. Needs weft with the extra `examples` on the PATH, and Chromium (apt-get install chromium).
# Usage: docs/report_picture.sh [picture] [options of train_lm.py]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
picture=$(realpath "${1:-$root/docs/_static/report.png}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" && ln -s "$root/examples" examples  # the report names the command: with no folder of this machine
weft launch -n 2 examples/train_lm.py --log-every 10 "${@:2}"
# Without a sandbox, which root cannot have: the page is our own.
chromium --headless --no-sandbox --hide-scrollbars --window-size=1200,1370 --virtual-time-budget=10000 \
  --screenshot="$picture" "file://$work/runs/train_lm/report.html"
