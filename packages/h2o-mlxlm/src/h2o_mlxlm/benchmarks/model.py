"""A whole model's decode steps, for one sequence and for batches."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from h2o_mlxlm.benchmarks import workload
from h2o_mlxlm.benchmarks.timing import in_turns, summaries
from h2o_mlxlm.benchmarks.variants import Room, Variant
from h2o_mlxlm.circumstances import circumstances


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
    """Time decode steps after a prompt, in turns; each variant holds caches of its own.

    The tokens fed are the prompt's, over again, so that all do equal work.

    Args:
        variants: What to compare.
        model: The model.
        budgets: Tokens kept by the bounded variants.
        batches: Sequences, one measurement each.
        context: Tokens of the prompt.
        n_steps: Steps timed of each.
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
        steps[name] = partial(workload.decode, model, caches)

    def token(i: int) -> Any:
        place = i % tokens.shape[1]
        return tokens[:, place : place + 1]

    return in_turns(steps, n_steps, token)
