"""How much a text repeats itself, from its tokens alone.

Two things are told apart. A *collapse* is degenerate: "th th th th". A *loop* says the same sentences again,
which small models do by themselves, with the full cache too.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

WINDOW = 100
COLLAPSE, LOOP = 0.1, 0.5
LONGEST_PERIOD = 4


def distinct(tokens: Sequence[int], n: int) -> float:
    """The share of n-grams that differ from all others before them; 1 if there is none."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def _windows(tokens: Sequence[int], start: int = 0) -> Iterator[Sequence[int]]:
    """All windows of ``WINDOW`` tokens from ``start`` on; the whole text if it is shorter."""
    for i in range(start, max(start, len(tokens) - WINDOW) + 1):
        yield tokens[i : i + WINDOW]


def least_variety(tokens: Sequence[int], start: int = 0) -> float:
    """The smallest share of distinct 4-grams over all windows of 100 tokens."""
    return min(distinct(window, 4) for window in _windows(tokens, start))


def longest_run(tokens: Sequence[int]) -> int:
    """The most times in a row that one token comes."""
    return max((len(list(run)) for _, run in groupby(tokens)), default=0)


def collapses(tokens: Sequence[int], start: int = 0) -> bool:
    """Say whether some window of 100 tokens is degenerate.

    It is if fewer than 0.1 of its 4-grams are distinct and, for some period of at most 4 tokens, at least nine
    in ten of its tokens equal the one a period before.
    """
    return any(distinct(w, 4) < COLLAPSE and _has_short_period(w) for w in _windows(tokens, start))


def loops(tokens: Sequence[int], start: int = 0) -> bool:
    """Say whether fewer than half of the 4-grams of some window of 100 tokens are distinct."""
    return least_variety(tokens, start) < LOOP


def _has_short_period(window: Sequence[int]) -> bool:
    for period in range(1, LONGEST_PERIOD + 1):
        equal = [a == b for a, b in zip(window, window[period:], strict=False)]
        if equal and sum(equal) >= 0.9 * len(equal):
            return True
    return False
