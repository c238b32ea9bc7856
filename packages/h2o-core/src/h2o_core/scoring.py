"""Mass into scores. Ranking and removal are eviction's."""

import mlx.core as mx

from h2o_core._shapes import Int32
from h2o_core.attention import Mass
from h2o_core.config import H2OConfig
from h2o_core.state import H2OState, occupied


def observe(
    config: H2OConfig,
    state: H2OState,
    mass: Mass,
    n_tokens: int,
    lengths: Int32[mx.array, " B"] | None = None,
) -> H2OState:
    """Add the mass of a call to the scores.

        scores ← scores · decay^n + decayed mass
        totals ← totals + total mass

    with n the sequence's real tokens in the call, so that one call of n tokens and n calls of one leave
    the same scores. A new token's own probability counts: it does not start at 0.

    Args:
        config: Gives ``decay``.
        state: The state after ``admit``.
        mass: What ``attend`` returned, made with the same decay.
        n_tokens: N, tokens of this call.
        lengths: Real tokens per sequence, None if all N are.

    Returns:
        The state with new scores and totals.

    Source:
        H2O (arXiv 2306.14048), Algorithm 1; the decay is an addition of this project's seed.
    """
    scores = state.scores
    if config.decay < 1:
        scores = scores * _faded(config.decay, n_tokens, lengths)
    # Where, not a sum, for empty slots: their mass is 0, but 0 must stay 0 when a score is not finite.
    held = occupied(state)
    return state._replace(
        scores=mx.where(held, scores + mass.decayed, 0.0),
        totals=mx.where(held, state.totals + mass.total, 0.0),
    )


def _faded(decay: float, n_tokens: int, lengths: Int32[mx.array, " B"] | None) -> float | mx.array:
    """decay^n, as one number where all sequences have n tokens."""
    if lengths is None:
        return decay**n_tokens
    return mx.power(mx.array(decay, mx.float32), lengths[:, None, None].astype(mx.float32))
