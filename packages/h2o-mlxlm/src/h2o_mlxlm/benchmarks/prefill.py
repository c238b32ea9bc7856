"""A whole model's prefill, in chunks as mlx_lm's ``generate_step`` runs it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from h2o_mlxlm.benchmarks import workload
from h2o_mlxlm.benchmarks.timing import in_turns, summaries
from h2o_mlxlm.benchmarks.variants import Room, Variant
from h2o_mlxlm.circumstances import circumstances

MIB = 2**20


def measure(
    variants: Mapping[str, Variant],
    model: Any,
    budgets: Sequence[int],
    prompts: Sequence[int],
    n_repeats: int,
    baseline: str,
    chunk: int,
) -> Iterator[dict[str, Any]]:
    """Time prompts, in turns, each with fresh caches; the first turn is not counted.

    ``peak_mib`` is the most memory that a run had in use beyond what was held before it (weights, that is).

    Args:
        variants: What to compare.
        model: The model.
        budgets: Tokens kept by the bounded variants.
        prompts: Tokens of a prompt, one measurement each.
        n_repeats: Runs timed of each.
        baseline: The variant that ratios refer to.
        chunk: Prompt tokens a call.
    """
    for n_tokens in prompts:
        for budget in budgets:
            peaks: dict[str, int] = {}
            times = _times(variants, model, budget, n_tokens, n_repeats, chunk, peaks)
            for row in summaries(times, baseline):
                row |= {"budget": budget, "prompt": n_tokens, "chunk": chunk, "repeats": n_repeats}
                row |= {"tokens_per_s": round(1e3 * n_tokens / row["median_ms"], 1)}
                yield row | {"peak_mib": round(peaks[row["variant"]] / MIB, 2)} | circumstances()


def _times(
    variants: Mapping[str, Variant],
    model: Any,
    budget: int,
    n_tokens: int,
    n_repeats: int,
    chunk: int,
    peaks: dict[str, int],
) -> dict[str, list[float]]:
    import mlx.core as mx

    tokens = workload.tokens_for(model, n_tokens)
    room = Room(budget, workload.head_dim_of(model), model)

    def runner(name: str) -> Any:
        def run(held: int) -> None:
            workload.prefill(model, variants[name].make(room), tokens, chunk)
            peaks[name] = max(peaks.get(name, 0), mx.get_peak_memory() - held)

        return run

    def draw(_: int) -> int:
        mx.synchronize()
        mx.reset_peak_memory()
        return mx.get_active_memory()

    return in_turns({name: runner(name) for name in variants}, n_repeats, draw, warm_up=1)
