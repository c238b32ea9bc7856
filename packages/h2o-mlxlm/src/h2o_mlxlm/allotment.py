"""How the places of a layer are divided among its heads."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from h2o_core import H2OConfig


def least(config: H2OConfig) -> int:
    """Count the places that each head has whatever the others hold: sinks, recent window, half of the others."""
    fixed = config.n_sink + config.grace
    return fixed + (config.budget - fixed + 1) // 2


def allot(config: H2OConfig, rows: Sequence[tuple[mx.array, mx.array]]) -> list[int]:
    """Divide H · ``budget`` places among the H heads of one sequence.

    First come the ``least`` best rows of each head, sinks and recent window foremost; then, over all heads, the
    rows with the highest scores. Each query gives every head a mass of 1, so scores of different heads compare.
    A score that is not finite comes last. Of equal scores, those of lower heads come first.

    Args:
        config: Budget of a head on average, protection.
        rows: For each head the positions held, int32 [n], and their scores, float32 [n]. Heads may hold different
            numbers of rows, each of them more than it has places now.

    Returns:
        Places of each head.

    Source:
        Feng et al., Ada-KV (arXiv 2407.11550), Algorithm 1. Departures: the safeguard there is a mean of these places
        and equal ones (α = 0.2), here a floor, so that what is kept is the best there is above it; scores are ours,
        decayed over all queries so far, not the attention of an observation window.
    """
    worths = [_worths(config, *head) for head in rows]
    total = config.budget * len(worths)
    last = mx.sort(mx.concatenate(worths))[-total]
    # They become shapes, so here the graph is evaluated.
    counts: Any = mx.stack([mx.stack([(worth > last).sum(), (worth == last).sum()]) for worth in worths]).tolist()
    left = total - sum(better for better, _ in counts)
    places = []
    for better, ties in counts:
        taken = min(ties, left)
        left -= taken
        places.append(better + taken)
    return places


def _worths(config: H2OConfig, positions: mx.array, scores: mx.array) -> mx.array:
    """Rank a head's rows against those of other heads, best first: infinite for those whose place is sure."""
    stays = (positions < config.n_sink) | (positions > positions.max() - config.grace)
    worth = mx.where(stays, mx.inf, mx.where(mx.isfinite(scores), scores, -mx.inf))
    return mx.where(mx.arange(worth.size) < least(config), mx.inf, mx.sort(worth)[::-1])
