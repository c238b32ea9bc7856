"""Runs in turns, and what their times say. No mlx here: a step waits for its own result."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

WARM_UP = 10
"""Turns that are not counted: they compile and allocate."""


class Line(NamedTuple):
    """y ≈ intercept + slope · x."""

    slope: float
    intercept: float
    slope_error: float  # standard error of the slope


def in_turns(
    steps: Mapping[str, Callable[[Any], object]],
    n_turns: int,
    draw: Callable[[int], Any],
    warm_up: int = WARM_UP,
) -> dict[str, list[float]]:
    """Time variants A B A B …, so that a machine that slows down slows all of them.

    Args:
        steps: For each variant, a function that does the work and waits for it.
        n_turns: Times measured of each.
        draw: Makes the input of turn i, evaluated; called before each step and not timed.
        warm_up: Turns before the first that counts.

    Returns:
        Milliseconds of each variant; those of one place were measured side by side.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(warm_up + n_turns):
        for name, step in steps.items():
            given = draw(i)
            start = time.perf_counter()
            step(given)
            elapsed = time.perf_counter() - start
            if i >= warm_up:
                times[name].append(1e3 * elapsed)
    return times


def summaries(times: Mapping[str, Sequence[float]], baseline: str) -> list[dict[str, Any]]:
    """Sum up the times of each variant, and compare them with the baseline's.

    ``ratio`` is that of the medians; ``paired_ratio`` is the median over turns of the variant's time divided by
    the baseline's in the same turn, with its quartiles: what a machine that comes and goes disturbs least.

    Args:
        times: From ``in_turns``.
        baseline: A variant's name.
    """
    return [{"variant": name} | _summary(values, times[baseline], baseline) for name, values in times.items()]


def _summary(values: Sequence[float], base: Sequence[float], baseline: str) -> dict[str, Any]:
    paired = [a / b for a, b in zip(values, base, strict=True)]
    return {
        "median_ms": round(statistics.median(values), 4),
        "p10_ms": round(quantile(values, 0.1), 4),
        "p90_ms": round(quantile(values, 0.9), 4),
        "baseline": baseline,
        "ratio": round(statistics.median(values) / statistics.median(base), 3),
        "paired_ratio": round(statistics.median(paired), 3),
        "paired_q1": round(quantile(paired, 0.25), 3),
        "paired_q3": round(quantile(paired, 0.75), 3),
    }


def quantile(values: Sequence[float], q: float) -> float:
    """Return the value nearest to the share ``q`` of the way from the smallest to the largest.

    >>> quantile([3.0, 1.0, 2.0], 0.5)
    2.0
    """
    return sorted(values)[round(q * (len(values) - 1))]


def fit(x: Sequence[float], y: Sequence[float]) -> Line:
    """Fit a line by least squares.

        slope = Σ (x − x̄)(y − ȳ) / Σ (x − x̄)²,  error² = Σ residual² / ((n − 2) Σ (x − x̄)²)

    Args:
        x: See ``check_points``.
        y: As many.

    >>> fit([1, 2, 3], [2, 4, 6])
    Line(slope=2.0, intercept=0.0, slope_error=0.0)
    """
    check_points(x)
    slope, intercept = statistics.linear_regression(x, y)
    residual = sum((b - intercept - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    mean = statistics.fmean(x)
    error = math.sqrt(residual / (len(x) - 2) / sum((a - mean) ** 2 for a in x))
    return Line(slope, intercept, error)


def check_points(x: Sequence[float]) -> None:
    """Refuse places at which a line can't be fitted.

    Raises:
        ValueError: There are fewer than 3, or they are all the same.
    """
    if len(x) < 3 or len(set(x)) < 2:
        raise ValueError(f"a fitted line needs at least 3 points, not all at one place, got {list(x)}: give more")
