"""Each `fix:` line of the package is told to a test, which follows it."""

import ast
import collections

from tests.fix_lines.sites import ROOT, sites
from tests.fix_lines.told import site_of


def _told():
    """How often tests say that they are told each line."""
    said = collections.Counter()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text()
        if "tests.fix_lines.told" not in text:
            continue
        for call in ast.walk(ast.parse(text)):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in ("told", "printed"):
                file, words = (argument.value for argument in call.args[:2])
                said[site_of(file, words)] += 1
    return said


def test_every_fix_line_is_followed():
    said = _told()
    missing = [f"{s.file}:{s.first}: {s.ways - said[s]} of {s.ways}" for s in sites() if said[s] < s.ways]
    assert not missing, f"{len(missing)} of {len(sites())} places:\n" + "\n".join(missing)
