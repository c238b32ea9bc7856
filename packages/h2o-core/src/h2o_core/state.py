"""What changes: scores, positions and counts of the kept rows, and how new rows get their slots.

Pure functions over an immutable state. Nothing here ranks, evicts or touches keys and values.
"""

from typing import NamedTuple

import mlx.core as mx

from h2o_core._shapes import Bool, Float32, Int32, Integer
from h2o_core.scorer import Scorer

EMPTY = -1
"""The position of a slot that holds no token."""


class H2OState(NamedTuple):
    """The kept tokens of B sequences and H KV heads in C slots. Slots are in no particular order."""

    scores: Float32[mx.array, "B H C"]  # mass received, decayed; 0 where the slot is empty
    totals: Float32[mx.array, "B H C"]  # mass received in all, never decayed; 0 where the slot is empty
    positions: Int32[mx.array, "B H C"]  # absolute place in the sequence; EMPTY where the slot is empty
    seen: Int32[mx.array, " B"]  # tokens seen so far
    extras: tuple[Float32[mx.array, "B H C *_"], ...] = ()  # a scorer's own; 0 where the slot is empty


def init(batch: int, n_kv_heads: int, capacity: int = 0, *, scorer: Scorer | None = None) -> H2OState:
    """Make the state of sequences that have seen nothing.

    Args:
        batch: Sequences, B.
        n_kv_heads: KV heads, H.
        capacity: Empty slots to begin with, C.
        scorer: Whose extras there are; None for a scorer without.

    Returns:
        A state with scores, totals and extras 0, positions EMPTY and seen 0.

    >>> init(1, 2, capacity=3).positions.shape
    (1, 2, 3)
    """
    shape = (batch, n_kv_heads, capacity)
    return H2OState(
        scores=mx.zeros(shape, mx.float32),
        totals=mx.zeros(shape, mx.float32),
        positions=mx.full(shape, EMPTY, mx.int32),
        seen=mx.zeros((batch,), mx.int32),
        extras=() if scorer is None else tuple(mx.zeros((*shape, *more), mx.float32) for more in scorer.extras),
    )


def occupied(state: H2OState) -> Bool[mx.array, "B H C"]:
    """Say which slots hold a token."""
    return state.positions >= 0


def grow(state: H2OState, capacity: int) -> H2OState:
    """Add empty slots on the right until there are ``capacity``, which is at least C."""
    more = [(0, 0), (0, 0), (0, capacity - state.positions.shape[-1])]
    extras = tuple(mx.pad(x, [*more, *[(0, 0)] * (x.ndim - 3)]) for x in state.extras)
    return state._replace(
        scores=mx.pad(state.scores, more),
        totals=mx.pad(state.totals, more),
        positions=mx.pad(state.positions, more, constant_values=mx.array(EMPTY, mx.int32)),
        extras=extras,
    )


def emptied(state: H2OState, gone: Bool[mx.array, "B H C"]) -> H2OState:
    """Empty the slots where ``gone``."""
    scores, totals = (mx.where(gone, 0.0, x) for x in (state.scores, state.totals))
    extras = tuple(mx.where(along(gone, x), 0.0, x) for x in state.extras)
    return state._replace(scores=scores, totals=totals, positions=mx.where(gone, EMPTY, state.positions), extras=extras)


def along(slots: mx.array, extra: mx.array) -> mx.array:
    """Shape x [B, H, C] to go with what has more axes behind them."""
    return slots.reshape(*slots.shape, *[1] * (extra.ndim - slots.ndim))


def take(state: H2OState, slots: Integer[mx.array, "B H M"]) -> H2OState:
    """Keep the given slots, in the given order."""
    return state._replace(
        scores=mx.take_along_axis(state.scores, slots, axis=-1),
        totals=mx.take_along_axis(state.totals, slots, axis=-1),
        positions=mx.take_along_axis(state.positions, slots, axis=-1),
        extras=tuple(mx.take_along_axis(x, along(slots, x), axis=2) for x in state.extras),
    )


def pack(state: H2OState, n_rows: int) -> Integer[mx.array, "B H M"]:
    """Find the first ``n_rows`` slots when those that hold a token come first, each group in slot order.

    Args:
        state: The state.
        n_rows: At least the largest number of tokens that any head holds, at most C.

    Returns:
        Slots, for ``take`` and for the key and value rows alike.
    """
    capacity = state.positions.shape[-1]
    slot = mx.arange(capacity)
    return mx.argsort(mx.where(occupied(state), slot, slot + capacity), axis=-1)[..., :n_rows]


def admit(
    state: H2OState,
    n_tokens: int,
    lengths: Int32[mx.array, " B"] | None = None,
    slots: Integer[mx.array, "B H 1"] | None = None,
) -> tuple[H2OState, Integer[mx.array, "B H N"]]:
    """Give slots to the rows of a call.

    One token goes to the first empty slot, of which every head must have one (``grow`` makes them). Several
    tokens go behind the last slot, so that the chunk's rows stand together and in order; the caller packs
    first, so that no empty slot is left between. A fresh row has score, total and extras 0: its own attention
    comes in ``observe``.

    Args:
        state: The state before the call.
        n_tokens: N, rows of this call, at least 1.
        lengths: Real tokens of each sequence in this call, the rest being padding on the right;
            None if all N are real. A padding row leaves its slot empty.
        slots: An empty slot of each head for a call of one token, where it is known; None looks for the first.

    Returns:
        The state with the new rows and ``seen`` advanced, and the slot of each row.
    """
    batch, n_heads, capacity = state.positions.shape
    index = mx.arange(n_tokens, dtype=mx.int32)
    new = state.seen[:, None] + index
    if lengths is not None:
        new = mx.where(index < lengths[:, None], new, EMPTY)
    new = mx.broadcast_to(new[:, None], (batch, n_heads, n_tokens))
    seen = state.seen + (n_tokens if lengths is None else lengths)
    if n_tokens == 1:
        slot = mx.arange(capacity)
        if slots is None:
            slots = mx.argmin(mx.where(occupied(state), capacity, slot), axis=-1, keepdims=True)
        hit = slot == slots
        scores, totals = (mx.where(hit, 0.0, x) for x in (state.scores, state.totals))
        extras = tuple(mx.where(along(hit, x), 0.0, x) for x in state.extras)
        return H2OState(scores, totals, mx.where(hit, new, state.positions), seen, extras), slots
    slots = mx.broadcast_to(index + capacity, new.shape)
    fresh = mx.zeros(new.shape, mx.float32)
    scores, totals = (mx.concatenate([x, fresh], axis=-1) for x in (state.scores, state.totals))
    extras = tuple(mx.concatenate([x, mx.zeros((*new.shape, *x.shape[3:]), mx.float32)], axis=2) for x in state.extras)
    return H2OState(scores, totals, mx.concatenate([state.positions, new], axis=-1), seen, extras), slots


def visible(state: H2OState, n_tokens: int, lengths: Int32[mx.array, " B"] | None = None) -> Bool[mx.array, "B H N C"]:
    """Say which slots each query of the call may attend to: those of tokens no later than itself.

    Args:
        state: The state after ``admit``.
        n_tokens: N, queries of this call.
        lengths: As given to ``admit``.

    Returns:
        True where query i may attend to slot c. A padding query sees what its sequence's last real query
        sees, so that no row is without a key.
    """
    real = n_tokens if lengths is None else lengths[:, None]
    first = state.seen[:, None] - real
    query = mx.minimum(first + mx.arange(n_tokens), state.seen[:, None] - 1)
    row = state.positions[:, :, None]
    return (row >= 0) & (row <= query[:, None, :, None])
