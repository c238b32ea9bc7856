"""One layer's decode step: write a row, attend, score, evict."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from h2o_mlxlm.benchmarks import layer
from h2o_mlxlm.benchmarks.layer import Shape
from h2o_mlxlm.benchmarks.timing import in_turns, summaries
from h2o_mlxlm.benchmarks.variants import Room, Variant
from h2o_mlxlm.circumstances import circumstances


def measure(
    variants: Mapping[str, Variant],
    shape: Shape,
    budgets: Sequence[int],
    n_steps: int,
    baseline: str,
    context: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Time the decode step of full caches, in turns.

    Args:
        variants: What to compare.
        shape: Of the layer.
        budgets: Tokens kept by those that keep a bounded number.
        n_steps: Steps timed of each.
        baseline: The variant that ratios refer to.
        context: Rows that the unbounded ones hold at the first step; None is 4 times the budget.
    """
    for budget in budgets:
        rows_held = 4 * budget if context is None else context
        times = step_times(variants, shape, budget, n_steps, rows_held)
        for row in summaries(times, baseline):
            row |= {"budget": budget, "context": rows_held if variants[row["variant"]].grows else budget}
            yield row | asdict(shape) | {"steps": n_steps} | circumstances()


def step_times(
    variants: Mapping[str, Variant], shape: Shape, budget: int, n_steps: int, context: int
) -> dict[str, list[float]]:
    """Milliseconds of each step of each variant."""
    caches = full_caches(variants, shape, budget, context)
    steps = {name: partial(layer.call, cache) for name, cache in caches.items()}
    return in_turns(steps, n_steps, lambda _: layer.drawn(shape, 1))


def full_caches(variants: Mapping[str, Variant], shape: Shape, budget: int, context: int) -> dict[str, Any]:
    """Caches that hold all they may: one more token means that one goes, where the cache is bounded."""
    caches = {}
    for name, variant in variants.items():
        cache = caches[name] = variant.make(Room(budget, shape.head_dim))[0]
        layer.fill(cache, shape, context if variant.grows else budget, attend=not variant.grows)
        if not variant.grows:
            layer.call(cache, layer.drawn(shape, 1))
    return caches
