"""How a decode step's cost grows with budget, batch and heads, beside the least that reading its rows costs."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from h2o_mlxlm.benchmarks.layer import Shape
from h2o_mlxlm.benchmarks.step import step_times
from h2o_mlxlm.benchmarks.timing import check_points, fit
from h2o_mlxlm.benchmarks.variants import Variant
from h2o_mlxlm.circumstances import circumstances


def bandwidth(n_bytes: int = 2**28, n_repeats: int = 5) -> tuple[float, str]:
    """Measure how fast this device reads memory with mlx.

    A big float32 array [m, 4096] is summed, multiplied with a vector (each reads it once) and added to (reads it
    once, writes it once); the best of all runs counts, because a floor should be no higher than what can be had.

    Args:
        n_bytes: Size of the array; beyond any cache of the processor.
        n_repeats: Runs of each.

    Returns:
        Bytes per second, and the name of the operation that was fastest.
    """
    import mlx.core as mx

    x, vector = mx.ones((n_bytes // 4 // 4096, 4096)), mx.ones((4096, 1))
    mx.eval(x, vector)
    ways: dict[str, tuple[Callable[[], mx.array], int]] = {
        "sum": (lambda: x.sum(), 1),
        "matvec": (lambda: x @ vector, 1),
        "add": (lambda: x + 1, 2),
    }
    best, how = 0.0, ""
    for name, (operation, passes) in ways.items():
        for _ in range(n_repeats):
            start = time.perf_counter()
            mx.eval(operation())
            speed = passes * x.nbytes / (time.perf_counter() - start)
            if speed > best:
                best, how = speed, name
    return best, how


def measure(
    variants: Mapping[str, Variant],
    shape: Shape,
    budgets: Sequence[int],
    batches: Sequence[int],
    heads: Sequence[int],
    n_steps: int,
) -> Iterator[dict[str, Any]]:
    """Fit a line through the median step against each axis; the other two stay put.

    The floor is the time to read K and V once at the measured bandwidth: per slot, per sequence, per KV head.
    Where they fit in a processor's cache, a step can be faster than that. Unbounded variants hold ``budget`` rows
    here, so that all read the same.

    Args:
        variants: What to compare.
        shape: Of the layer.
        budgets: At least 3; batches and heads are varied at the middle one.
        batches: Sequences, at least 3 numbers.
        heads: KV heads, at least 3 numbers.
        n_steps: Steps timed for each median.
    """
    for values in (budgets, batches, heads):
        check_points(values)
    speed, how = bandwidth()
    middle = sorted(budgets)[len(budgets) // 2]
    axes = {
        "budget": [(b, shape, b) for b in budgets],
        "batch": [(n, replace(shape, batch=n), middle) for n in batches],
        "kv_heads": [(n, replace(shape, kv_heads=n), middle) for n in heads],
    }
    for axis, points in axes.items():
        medians = [_medians(variants, at, budget, n_steps) for _, at, budget in points]
        x, at, budget = points[-1]
        floor = 1e6 * budget * at.row_bytes / x / speed
        for name in variants:
            line = fit([x for x, _, _ in points], [1e3 * m[name] for m in medians])
            yield (
                {
                    "axis": axis,
                    "variant": name,
                    "points": " ".join(str(x) for x, _, _ in points),
                    "slope_us": round(line.slope, 4),
                    "slope_error_us": round(line.slope_error, 4),
                    "intercept_us": round(line.intercept, 2),
                    "floor_us": round(floor, 4),
                    "ratio": round(line.slope / floor, 2),
                    "bandwidth_gb_s": round(speed / 1e9, 2),
                    "bandwidth_by": how,
                    "middle_budget": middle,
                }
                | asdict(shape)
                | {"steps": n_steps}
                | circumstances()
            )


def _medians(variants: Mapping[str, Variant], shape: Shape, budget: int, n_steps: int) -> dict[str, float]:
    times = step_times(variants, shape, budget, n_steps, context=budget)
    return {name: statistics.median(values) for name, values in times.items()}
