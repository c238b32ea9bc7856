"""Evidence into scores. Ranking and removal are eviction's."""

import mlx.core as mx

from h2o_core._shapes import Float32, Int32
from h2o_core.attention import Mass
from h2o_core.config import H2OConfig
from h2o_core.evidence import Evidence, widened
from h2o_core.scorer import SEEN, Scorer
from h2o_core.state import H2OState, along, occupied


def observe(
    config: H2OConfig,
    state: H2OState,
    evidence: Evidence | Mass,
    n_tokens: int,
    lengths: Int32[mx.array, " B"] | None = None,
) -> H2OState:
    """Turn what a call showed into scores, as the configuration's scorer has it.

    Args:
        config: Its scorer, and ``decay``.
        state: The state after ``admit``.
        evidence: What ``gather`` returned; for H2O as it is by default, the mass that ``attend`` returned will do, made
            with the same decay. It may be of the first slots alone, if nothing else was attended to.
        n_tokens: N, tokens of this call.
        lengths: Real tokens per sequence, None if all N are.

    Returns:
        The state with new scores, and with new totals and extras where the scorer has them.

    Raises:
        ValueError: The scorer needs what the evidence has not, or the state was made without the scorer.
    """
    scorer: Scorer = config.scorer
    if isinstance(evidence, Mass):
        if not scorer.plain:
            raise ValueError(f"scorer {scorer.name!r} needs more than mass: pass what h2o_core.gather returns")
        evidence = Evidence(evidence)
    _check(scorer, evidence)
    if len(state.extras) != len(scorer.extras):
        raise ValueError(
            f"scorer {scorer.name!r} keeps {len(scorer.extras)} arrays beside the scores, and the state has "
            f"{len(state.extras)}: make it with init(..., scorer=config.scorer)"
        )
    return scorer.observe(config, state, widened(evidence, state.positions.shape[-1]), n_tokens, lengths)


def accumulated(
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


def scored(
    state: H2OState,
    scores: Float32[mx.array, "B H C"],
    lengths: Int32[mx.array, " B"] | None,
    extras: tuple[mx.array, ...] = (),
) -> H2OState:
    """Put scores and extras in place of what was there: 0 in empty slots, and nothing new without a real token."""
    scores = mx.where(occupied(state), scores, 0.0)
    if lengths is not None:
        came = (lengths > 0)[:, None, None]
        scores = mx.where(came, scores, state.scores)
        extras = tuple(mx.where(along(came, x), x, old) for x, old in zip(extras, state.extras, strict=True))
    return state._replace(scores=scores, extras=extras)


def _faded(decay: float, n_tokens: int, lengths: Int32[mx.array, " B"] | None) -> float | mx.array:
    """decay^n, as one number where all sequences have n tokens."""
    if lengths is None:
        return decay**n_tokens
    return mx.power(mx.array(decay, mx.float32), lengths[:, None, None].astype(mx.float32))


def _check(scorer: Scorer, evidence: Evidence) -> None:
    there = {name for name in SEEN if getattr(evidence, name, None) is not None} | {"random", *(evidence.given or ())}
    if missing := sorted(scorer.needs - there):
        raise ValueError(
            f"scorer {scorer.name!r} needs {', '.join(missing)}, got none: pass what h2o_core.gather returns"
        )
