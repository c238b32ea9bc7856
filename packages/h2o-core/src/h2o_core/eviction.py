"""Who goes: the lowest score among the rows that may, and what stays when several must go."""

from collections.abc import Mapping

import mlx.core as mx

from h2o_core._shapes import Bool, Float, Float32, Integer
from h2o_core.attention import attend
from h2o_core.config import H2OConfig
from h2o_core.evidence import gather
from h2o_core.scorer import Scorer
from h2o_core.scoring import observe
from h2o_core.state import H2OState, emptied, grow, occupied, take, visible

_FIRST_TO_GO, _LAST_TO_GO, _POSITIONS = -(2**63), 2**63 - 1, 2**32


def protected(config: H2OConfig, state: H2OState) -> Bool[mx.array, "B H C"]:
    """Say which rows may not go: sinks (position < n_sink) and the ``grace`` newest positions."""
    newest = state.seen[:, None, None] - 1
    return (state.positions < config.n_sink) | (state.positions > newest - config.grace)


def _rank(config: H2OConfig, state: H2OState, empty: int) -> Integer[mx.array, "B H C"]:
    """Order rows by who goes first: not finite, then by score; long-term rows and protected ones last.

    Unique integers of a value and, below it, the position, so that nothing depends on the order of slots. Ties
    are real: a decayed weight underflows to 0.

    Args:
        config: Protection and places for long-term rows.
        state: The state.
        empty: The rank of an empty slot.
    """
    held, stays = occupied(state), protected(config, state)
    finite = mx.isfinite(state.scores) & mx.isfinite(state.totals)
    positions = state.positions.astype(mx.int64)
    if config.n_long:
        rank = mx.where(held & finite & ~stays, _ordered(state.totals) + positions, _FIRST_TO_GO)
        # Where fewer compete than there are places, the last place is at _FIRST_TO_GO.
        stays = stays | ((rank >= _nth_largest(rank, config.n_long)) & (rank > _FIRST_TO_GO))
    by_score = _ordered(mx.where(finite, state.scores, -mx.inf)) + positions
    return mx.where(held, mx.where(stays, _LAST_TO_GO - _POSITIONS + positions, by_score), empty)


def _ordered(values: Float32[mx.array, "B H C"]) -> Integer[mx.array, "B H C"]:
    """Integers in the order of the values, with room for a position below each."""
    bits = values.view(mx.int32)
    # The bits of a float order as an integer does, but for negative ones, which count backwards.
    return mx.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(mx.int64) * _POSITIONS


def _nth_largest(rank: Integer[mx.array, "B H C"], n: int) -> Integer[mx.array, "B H 1"]:
    at = max(0, rank.shape[-1] - n)
    return mx.partition(rank, at, axis=-1)[..., at : at + 1]


def victims(config: H2OConfig, state: H2OState) -> Integer[mx.array, "B H 1"]:
    """Find the row that goes from each head: lowest score, then lowest position.

    Rows that are protected, or among the ``n_long`` with the largest totals, don't go.

    Returns:
        The slot of the victim.
    """
    return mx.argmin(_rank(config, state, _LAST_TO_GO), axis=-1, keepdims=True)


def release(config: H2OConfig, state: H2OState, slots: Integer[mx.array, "B H 1"]) -> H2OState:
    """Empty the given slots of the heads that hold more than ``budget`` tokens."""
    over = occupied(state).sum(axis=-1, keepdims=True) > config.budget
    return emptied(state, over & (mx.arange(state.positions.shape[-1]) == slots))


def survivors(config: H2OConfig, state: H2OState) -> Integer[mx.array, "B H K"]:
    """Find the ``budget`` rows that stay, as if the lowest went one by one with the scores as they are.

    Heads that hold fewer rows than ``budget`` get empty slots behind them.

    Returns:
        Slots, those that hold a token first and in slot order.
    """
    held = occupied(state)
    rank = _rank(config, state, _FIRST_TO_GO)
    kept = held & (rank >= _nth_largest(rank, config.budget))
    slot = mx.arange(state.positions.shape[-1])
    # Then empty ones, and last the rows that go.
    group = mx.where(kept, 0, mx.where(held, 2, 1))
    return mx.argsort(slot + slot.size * group, axis=-1)[..., : config.budget]


def evict(config: H2OConfig, state: H2OState) -> tuple[H2OState, Integer[mx.array, "B H K"]]:
    """Keep the best ``budget`` rows of each head, after a call that left more slots than budget + 1.

    Returns:
        The state with budget + 1 slots, the last one empty, and the slots its first ``budget`` came from:
        the caller gathers keys and values by them and puts a row of zeros behind.
    """
    slots = survivors(config, state)
    return grow(take(state, slots), config.budget + 1), slots


def check_keeps_values(scorer: Scorer) -> None:
    """Check that a whole step can be done for a scorer in one function.

    Raises:
        ValueError: It merges values, of which the function has no new ones to return.
    """
    if scorer.merges:
        raise ValueError(
            f"decode_step changes no values, and scorer {scorer.name!r} merges them: call attend, gather, observe, "
            "victims, merged and release"
        )


def decode_step(
    config: H2OConfig,
    state: H2OState,
    q: Float[mx.array, "B Hq 1 D"],
    k: Float[mx.array, "B H C D"],
    v: Float[mx.array, "B H C Dv"],
    scale: float,
    sinks: Float[mx.array, " Hq"] | None = None,
    given: Mapping[str, mx.array] | None = None,
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
        given: The caller's inputs, for a scorer that needs any.

    Returns:
        The output, the state after the step, and the slot that was lowest; it has been emptied in the
        heads that held more than ``budget`` tokens.

    Raises:
        ValueError: The scorer merges values, which this leaves as they are, or an input is missing.
    """
    check_keeps_values(config.scorer)
    shown = visible(state, 1)
    out, mass = attend(q, k, v, scale, config.decay, shown, sinks=sinks)
    evidence = gather(config, state, mass, q, k, v, scale, shown, sinks=sinks, given=given)
    state = observe(config, state, evidence, 1)
    slots = victims(config, state)
    return out, release(config, state, slots), slots


def merged(
    config: H2OConfig,
    state: H2OState,
    v: Float[mx.array, "B H C Dv"],
    slots: Integer[mx.array, "B H 1"],
) -> Float[mx.array, "B H C Dv"]:
    """Leave in the other rows' values what the scorer merges of those that ``release`` is about to empty.

        v_c ← v_c + w_c · v_victim

    Args:
        config: Whose scorer merges, and the budget.
        state: After ``observe``, before ``release``.
        v: Values of all slots.
        slots: The victims. A head that holds no more than ``budget`` tokens merges nothing.
    """
    over = occupied(state).sum(axis=-1, keepdims=True) > config.budget
    weights = mx.where(over, config.scorer.shares(state, slots), 0.0)[..., None]
    gone = mx.take_along_axis(v, slots[..., None], axis=2).astype(mx.float32)
    # An empty slot's values may be anything finite, but what weighs nothing must leave a row as it is, bit for bit.
    return mx.where(weights > 0, v.astype(mx.float32) + weights * gone, v).astype(v.dtype)
