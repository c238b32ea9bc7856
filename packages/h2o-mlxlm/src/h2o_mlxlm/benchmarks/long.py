"""Many tokens through one set of caches: does a step stay as cheap, and memory as level, as at the start?"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from h2o_mlxlm.benchmarks import workload
from h2o_mlxlm.benchmarks.timing import fit
from h2o_mlxlm.benchmarks.variants import Room, Variant
from h2o_mlxlm.circumstances import circumstances

MIB = 2**20


def measure(
    variants: Mapping[str, Variant], model: Any, budgets: Sequence[int], n_tokens: int, window: int
) -> Iterator[dict[str, Any]]:
    """Generate greedily; a row for each window of tokens, then one for each phase of the cache.

    A window is ``below`` while its tokens all fit in the budget, ``above`` when each of them makes one go,
    ``across`` in between. For ``below`` and ``above``, from 4 windows on, the last row says how the time of a token
    moved: the last window's over the second's (the first compiles), and the slope of a line through the windows
    from the second on.

    Args:
        variants: What to run, one after the other.
        model: The model.
        budgets: Tokens kept.
        n_tokens: Tokens generated.
        window: Tokens of a window.
    """
    for budget in budgets:
        for name, variant in variants.items():
            rows = []
            for row in _windows(variant, model, budget, n_tokens, window):
                rows.append(row)
                yield {"kind": "window", "variant": name, "budget": budget} | row | circumstances()
            for phase in ("below", "above"):
                of_phase = [row for row in rows if row["phase"] == phase]
                if len(of_phase) >= 4:
                    yield {"kind": "fit", "variant": name, "budget": budget} | _fitted(of_phase) | circumstances()


def _windows(variant: Variant, model: Any, budget: int, n_tokens: int, window: int) -> Iterator[dict[str, Any]]:
    import mlx.core as mx

    caches = variant.make(Room(budget, workload.head_dim_of(model), model))
    token = workload.tokens_for(model, 1)
    for start in range(0, n_tokens - window + 1, window):
        began = time.perf_counter()
        for _ in range(window):
            token = workload.decode(model, caches, token)
        elapsed = time.perf_counter() - began
        stop = start + window
        yield {
            "phase": "below" if variant.grows or stop <= budget else "above" if start >= budget else "across",
            "first": start,
            "last": stop,
            "ms_per_token": round(1e3 * elapsed / window, 4),
            "active_mib": round(mx.get_active_memory() / MIB, 4),
        }


def _fitted(rows: list[dict[str, Any]]) -> dict[str, Any]:
    times = [row["ms_per_token"] for row in rows]
    line = fit([row["last"] for row in rows[1:]], times[1:])
    return {
        "phase": rows[0]["phase"],
        "last_over_second": round(times[-1] / times[1], 3),
        "slope_us_per_1000": round(1e6 * line.slope, 3),
        "slope_error_us_per_1000": round(1e6 * line.slope_error, 3),
        "memory_growth_mib": round(rows[-1]["active_mib"] - rows[1]["active_mib"], 4),
    }
