"""The text of a module: comments blanked, positions to lines, and lists split at their commas."""

from __future__ import annotations

import re
from bisect import bisect_right

from attn4.emulator.ptx.errors import PtxError

IDENTIFIER = r"[A-Za-z_$%][\w$]*"
STATEMENT = r'[^\s;"][^;"]*(?:"[^"\n]*"[^;"]*)*|'
"""A statement up to its semicolon, or nothing: a regular expression."""

_COMMENT = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/|/\*', re.DOTALL)
_BRACKETS = re.compile(r"[\[\]{}(),]")
_CLOSES = {"[": "]", "{": "}", "(": ")"}


class Source:
    """PTX text without comments. Positions in it give the same lines as in the original."""

    def __init__(self, text: str) -> None:
        self._newlines = [match.start() for match in re.finditer("\n", text)]
        self.text = _COMMENT.sub(self._blank, text.rstrip("\0"))
        # Blanks replaced comments one for one but for the newlines kept, so positions moved.
        self._newlines = [match.start() for match in re.finditer("\n", self.text)]

    def _blank(self, match: re.Match[str]) -> str:
        found = match.group()
        if found[0] == '"':
            return found
        if found == "/*":
            raise PtxError("a comment does not end", self.line(match.start()))
        return " " + "\n" * found.count("\n")

    def line(self, position: int) -> int:
        """The line, from 1, of a position in ``text``."""
        return bisect_right(self._newlines, position - 1) + 1

    def next_line(self, position: int) -> int:
        """The line of the first thing that is not blank, at or behind ``position``."""
        rest = re.compile(r"\s*").match(self.text, position)
        return self.line(rest.end() if rest else position)

    @property
    def last_line(self) -> int:
        """The line of the end of the text."""
        return self.line(len(self.text.rstrip()))


def split(text: str, line: int) -> list[str]:
    """What stands between the commas of ``text`` that no bracket encloses, stripped; nothing for blank text.

    Raises ``PtxError`` for brackets that do not match and for an element that is missing.
    """
    if not text or text.isspace():
        return []
    parts = (
        text.split(",") if "{" not in text and "[" not in text and "(" not in text else _nested(text, line)
    )
    parts = [part.strip() for part in parts]
    if "" in parts:
        raise PtxError("something is missing beside a comma", line)
    return parts


def _nested(text: str, line: int) -> list[str]:
    parts: list[str] = []
    closers: list[str] = []
    start = 0
    for match in _BRACKETS.finditer(text):
        found = match.group()
        if found == ",":
            if not closers:
                parts.append(text[start : match.start()])
                start = match.end()
        elif found in _CLOSES:
            closers.append(_CLOSES[found])
        elif not closers or closers.pop() != found:
            raise PtxError(f"{found} closes nothing", line)
    if closers:
        raise PtxError(f"{closers[-1]} is missing", line)
    parts.append(text[start:])
    return parts
