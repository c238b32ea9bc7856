"""Reading kernel text without a parser: comments out of the way, and the barriers in it."""

import re
from typing import NamedTuple

_SKIPPED = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_BARRIER = re.compile(r"(?:\bmetal\s*::\s*)?\b(?:threadgroup|simdgroup)_barrier\s*\(")


class Barrier(NamedTuple):
    """A barrier call in a kernel's text: its line (from 1), its text, and where that begins and ends."""

    line: int
    text: str
    begin: int
    end: int


def blank(text: str) -> str:
    """Return ``text`` as blanks of the same shape: line breaks stay."""
    return re.sub(r"[^\n]", " ", text)


def masked(text: str) -> str:
    """Return ``text`` with comments and strings blanked; every other character keeps its place."""
    return _SKIPPED.sub(lambda found: blank(found.group()), text)


def line_of(text: str, position: int) -> int:
    """Return the line, counted from 1, that a position of the text is in."""
    return text.count("\n", 0, position) + 1


def _closing(text: str, opening: int) -> int:
    depth = 0
    for i in range(opening, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    raise ValueError(f"line {line_of(text, opening)}: the barrier's parenthesis is not closed")


def barriers(source: str) -> list[Barrier]:
    """List the calls of threadgroup_barrier and simdgroup_barrier in a kernel's text, in their order.

    Comments don't count. A helper's barrier is in the header: ask for the header's barriers too.
    """
    code = masked(source)
    found = []
    for match in _BARRIER.finditer(code):
        end = _closing(code, match.end() - 1)
        found.append(Barrier(line_of(code, match.start()), source[match.start() : end], match.start(), end))
    return found


def without_barrier(source: str, i: int) -> str:
    """Return the kernel's text without barrier ``i`` of `barriers`; every line keeps its number.

    A test that removes each in turn and requires a fault shows that each barrier is needed, and that it would be
    missed: ``pytest.raises(MslError)``.

    Raises:
        IndexError: there is no such barrier.
    """
    found = barriers(source)
    if not 0 <= i < len(found):
        raise IndexError(f"the text has {len(found)} barriers, got {i}")
    # The call goes, its semicolon stays: an empty statement, also where the call was all of an if.
    return source[: found[i].begin] + blank(found[i].text) + source[found[i].end :]
