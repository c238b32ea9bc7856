"""A whole model's decode steps, for one sequence and for batches."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from h2o_mlxlm.benchmarks import workload
from h2o_mlxlm.benchmarks.timing import in_turns, summaries
from h2o_mlxlm.benchmarks.variants import Room, Variant
from h2o_mlxlm.circumstances import circumstances

TURN = 10
"""Tokens that a variant generates before the next has its turn."""


def measure(
    variants: Mapping[str, Variant],
    model: Any,
    budgets: Sequence[int],
    batches: Sequence[int],
    context: int,
    n_steps: int,
    baseline: str,
    chunk: int,
) -> Iterator[dict[str, Any]]:
    """Time decode steps after a prompt, in turns of ``TURN``; each variant holds caches of its own.

    The steps of a turn follow one another as mlx_lm's do, each built while the one before is computed, so that a
    time is what a user waits for a token. The text is greedy, and what it says does not change what it costs.

    Args:
        variants: What to compare.
        model: The model.
        budgets: Tokens kept by the bounded variants.
        batches: Sequences, one measurement each.
        context: Tokens of the prompt.
        n_steps: Steps timed of each, rounded up to whole turns.
        baseline: The variant that ratios refer to.
        chunk: Prompt tokens a call.
    """
    for budget in budgets:
        for batch in batches:
            times = _times(variants, model, budget, workload.tokens_for(model, context, batch), n_steps, chunk)
            for row in summaries(times, baseline):
                row |= {"budget": budget, "batch": batch, "context": context, "steps": n_steps}
                yield row | {"tokens_per_s": round(1e3 * batch / row["median_ms"], 1)} | circumstances()


def _times(
    variants: Mapping[str, Variant], model: Any, budget: int, tokens: Any, n_steps: int, chunk: int
) -> dict[str, list[float]]:
    steps = {}
    for name, variant in variants.items():
        caches = variant.make(Room(budget, workload.head_dim_of(model), model))
        workload.prefill(model, caches, tokens, chunk)
        steps[name] = partial(workload.generate, model, caches, TURN)

    def token(i: int) -> Any:
        place = i % tokens.shape[1]
        return tokens[:, place : place + 1]

    times = in_turns(steps, math.ceil(n_steps / TURN), token, warm_up=2)
    return {name: [time / TURN for time in of_turns] for name, of_turns in times.items()}
