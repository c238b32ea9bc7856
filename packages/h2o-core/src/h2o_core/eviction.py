"""Who goes: the lowest score among the unprotected rows, and what stays when several must go."""

import mlx.core as mx

from h2o_core._shapes import Bool, Float, Float32, Integer
from h2o_core.attention import attend
from h2o_core.config import H2OConfig
from h2o_core.scoring import observe
from h2o_core.state import EMPTY, H2OState, grow, occupied, take, visible

_LAST = 2**31 - 1


def protected(config: H2OConfig, state: H2OState) -> Bool[mx.array, "B H C"]:
    """Say which rows may not go: sinks (position < n_sink) and the ``grace`` newest positions."""
    newest = state.seen[:, None, None] - 1
    return (state.positions < config.n_sink) | (state.positions > newest - config.grace)


def _rank_by(config: H2OConfig, state: H2OState) -> Float32[mx.array, "B H C"]:
    """The score to rank by: protected rows last, scores that are not finite first."""
    finite = mx.where(mx.isfinite(state.scores), state.scores, -mx.inf)
    return mx.where(protected(config, state), mx.inf, finite)


def victims(config: H2OConfig, state: H2OState) -> Integer[mx.array, "B H 1"]:
    """Find the row that goes from each head: lowest score, then lowest position.

    Ties are real: a decayed weight underflows to 0. The lowest slot would make the result depend on the
    order of slots.

    Returns:
        The slot of the victim.
    """
    rank = mx.where(occupied(state), _rank_by(config, state), mx.inf)
    lowest = rank == rank.min(axis=-1, keepdims=True)
    candidate = lowest & occupied(state)
    return mx.argmin(mx.where(candidate, state.positions, _LAST), axis=-1, keepdims=True)


def release(config: H2OConfig, state: H2OState, slots: Integer[mx.array, "B H 1"]) -> H2OState:
    """Empty the given slots of the heads that hold more than ``budget`` tokens."""
    over = occupied(state).sum(axis=-1, keepdims=True) > config.budget
    gone = over & (mx.arange(state.positions.shape[-1]) == slots)
    return state._replace(scores=mx.where(gone, 0.0, state.scores), positions=mx.where(gone, EMPTY, state.positions))


def survivors(config: H2OConfig, state: H2OState) -> Integer[mx.array, "B H K"]:
    """Find the ``budget`` rows that stay, as if the lowest went one by one with the scores as they are.

    Thresholds on score and then on position, and no order among equals, so that no sort has to be stable.
    Heads that hold fewer rows than ``budget`` get empty slots behind them.

    Returns:
        Slots, those that hold a token first and in slot order.
    """
    capacity = state.positions.shape[-1]
    n_gone = capacity - config.budget
    # Empty slots have the lowest rank and the lowest position, so they go before any token.
    rank = mx.where(occupied(state), _rank_by(config, state), -mx.inf)
    least = mx.sort(rank, axis=-1)[..., n_gone : n_gone + 1]
    tied = rank == least
    n_tied_gone = n_gone - (rank < least).sum(axis=-1, keepdims=True)
    ordered = mx.sort(mx.where(tied, state.positions, _LAST), axis=-1)
    oldest = mx.take_along_axis(ordered, n_tied_gone, axis=-1)
    kept = (rank > least) | (tied & (state.positions >= oldest))
    slot = mx.arange(capacity)
    group = mx.where(kept & occupied(state), 0, mx.where(occupied(state), 2, 1))
    return mx.argsort(slot + capacity * group, axis=-1)[..., : config.budget]


def evict(config: H2OConfig, state: H2OState) -> tuple[H2OState, Integer[mx.array, "B H K"]]:
    """Keep the best ``budget`` rows of each head, after a call that left more slots than budget + 1.

    Returns:
        The state with budget + 1 slots, the last one empty, and the slots its first ``budget`` came from:
        the caller gathers keys and values by them and puts a row of zeros behind.
    """
    slots = survivors(config, state)
    return grow(take(state, slots), config.budget + 1), slots


def decode_step(
    config: H2OConfig,
    state: H2OState,
    q: Float[mx.array, "B Hq 1 D"],
    k: Float[mx.array, "B H C D"],
    v: Float[mx.array, "B H C Dv"],
    scale: float,
    sinks: Float[mx.array, " Hq"] | None = None,
) -> tuple[Float[mx.array, "B Hq 1 Dv"], H2OState, Integer[mx.array, "B H 1"]]:
    """Attend, observe and evict for one token that ``admit`` has given its slot.

    The reference of the fused kernel: one function, so that a back end can do it in one launch.

    Args:
        config: Budget, protection, decay.
        state: The state after ``admit`` of one token; C is at most budget + 1.
        q: Queries of the new token.
        k: Keys, the new row in its slot.
        v: Values, likewise.
        scale: Factor on the logits.
        sinks: Sink logits, see ``attend``.

    Returns:
        The output, the state after the step, and the slot that was lowest; it has been emptied in the
        heads that held more than ``budget`` tokens.
    """
    out, mass = attend(q, k, v, scale, config.decay, visible(state, 1), sinks=sinks)
    state = observe(config, state, mass, 1)
    slots = victims(config, state)
    return out, release(config, state, slots), slots
