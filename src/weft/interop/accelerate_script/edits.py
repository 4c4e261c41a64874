"""Exact edits of a source text: what is not edited keeps every character."""

from __future__ import annotations

import ast
import bisect
from collections.abc import Iterable, Sequence

__all__ = ["Edits"]


class Edits:
    """Replacements of parts of a source text, recorded in any order and applied at the end.

    A replacement of a node swallows those inside it; `text` of the inner nodes brings them along.
    """

    def __init__(self, source: str, tree: ast.AST) -> None:
        self.source = source
        self.lines = source.splitlines(keepends=True)
        self._starts = [0]
        for line in self.lines:
            self._starts.append(self._starts[-1] + len(line))
        self._texts: dict[tuple[int, int], str] = {}
        self._above: dict[int, list[str]] = {}
        self._shifts: dict[int, int] = {}
        texts = (n for n in ast.walk(tree) if isinstance(n, (ast.Constant, ast.JoinedStr)) and n.end_lineno)
        # The later lines of texts in triple quotes are never moved.
        self._fixed = {line for n in texts for line in range(n.lineno + 1, (n.end_lineno or n.lineno) + 1)}

    def _at(self, line: int, column: int) -> int:
        characters = len(self.lines[line - 1].encode()[:column].decode())
        return self._starts[line - 1] + characters

    def span(self, node: ast.AST) -> tuple[int, int]:
        """First and last character of a node."""
        where = node.lineno, node.col_offset, node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]
        return self._at(where[0], where[1]), self._at(where[2], where[3])

    def text(self, node: ast.AST) -> str:
        """The text of a node, with the edits inside it."""
        start, end = self.span(node)
        return self._rendered(start, end)

    def indent(self, node: ast.stmt) -> str:
        """The spaces before a statement."""
        return " " * node.col_offset

    def replace(self, node: ast.AST, text: str) -> None:
        """Replace a node, and all edits inside it."""
        start, end = self.span(node)
        self.keep(node)
        self._texts[start, end] = text

    def keep(self, node: ast.AST) -> None:
        """Forget the edits inside a node."""
        self._forget(*self.span(node))

    def _forget(self, start: int, end: int) -> None:
        for each in [each for each in self._texts if start <= each[0] and each[1] <= end]:
            del self._texts[each]

    def replace_span(self, start: int, end: int, text: str) -> None:
        """Replace some characters."""
        self._texts[start, end] = text

    def replace_part(self, node: ast.AST, length: int, text: str) -> None:
        """Replace the first characters of a node."""
        start, _ = self.span(node)
        self._texts[start, start + length] = text

    def statement(self, node: ast.stmt, lines: Sequence[str], *, alone: bool = False) -> None:
        """Replace a statement by some, or by none; `alone`: nothing else is in its block."""
        if lines or alone:
            self.replace(node, ("\n" + self.indent(node)).join(lines or ["pass"]))
            return
        self.remove_lines(node.lineno, node.end_lineno or node.lineno)

    def remove_lines(self, first: int, last: int) -> None:
        """Remove whole lines."""
        start, end = self._starts[first - 1], self._starts[last]
        self._forget(start, end)
        self._texts[start, end] = ""

    def above(self, line: int, text: str) -> None:
        """Put a line above another one."""
        self._above.setdefault(line, []).append(text)

    def shift(self, lines: Iterable[int], by: int) -> None:
        """Move lines to the right, or with a negative number to the left."""
        for line in lines:
            self._shifts[line] = self._shifts.get(line, 0) + by

    def result(self) -> str:
        """The source with all edits."""
        edits = [(start, 1, end, self._moved(start, text)) for (start, end), text in self._texts.items()]
        for line, texts in self._above.items():
            edits.append((self._starts[line - 1], -1, self._starts[line - 1], "".join(f"{text}\n" for text in texts)))
        for line, by in self._shifts.items():
            start, text = self._starts[line - 1], self.lines[line - 1]
            inside = any(first < start < last for first, last in self._texts)
            gone = (start, self._starts[line]) in self._texts
            if by and text.strip() and line not in self._fixed and not inside and not gone:
                have = len(text) - len(text.lstrip(" "))
                edits.append((start, 0, start + min(max(-by, 0), have), " " * max(by, 0)))
        return _applied(self.source, 0, len(self.source), sorted(edits))

    def _rendered(self, start: int, end: int) -> str:
        inside = [(a, 1, b, text) for (a, b), text in self._texts.items() if start <= a and b <= end]
        return _applied(self.source, start, end, sorted(inside))

    def _moved(self, start: int, text: str) -> str:
        by = self._shifts.get(bisect.bisect_right(self._starts, start), 0)
        first, *rest = text.split("\n")
        moved = [line[-by:] if by < 0 and line[:-by].isspace() else " " * max(by, 0) + line for line in rest]
        return "\n".join([first, *(new if old.strip() else old for old, new in zip(rest, moved, strict=True))])


def _applied(source: str, start: int, end: int, edits: Sequence[tuple[int, int, int, str]]) -> str:
    pieces, at = [], start
    for first, _, last, text in edits:
        pieces += [source[at:first], text]
        at = max(at, last)
    return "".join([*pieces, source[at:end]])
