"""Slots of sequences with different numbers of rows. Pure functions, as in slots.py.

A head's rows are always among its first ``kept`` slots, or fill budget + 1 slots but for one: then a mask needs
nothing but counts, and none where all sequences have as many.
"""

from collections.abc import Sequence

import mlx.core as mx
from mlx.utils import tree_map

from h2o_core import H2OConfig, H2OState, init
from h2o_core.state import emptied
from h2o_mlxlm.backend import Backend
from h2o_mlxlm.slots import Slots, capacity, packed, rows_first, widened


def visibility(rows: Sequence[int], n_tokens: int) -> mx.array | None:
    """Say which rows each query of the next call may attend to.

    Args:
        rows: Rows that each sequence has per head before the call.
        n_tokens: N, padding included.

    Returns:
        True where visible, [B, 1, N, W], W = max(rows) + N; None if every row is, but for the chunk's own
        rows right of the query. A padding query sees padding, so that no query is without a row.
    """
    most = max(rows)
    if min(rows) == most:
        return None
    kept, column = mx.array(list(rows))[:, None, None, None], mx.arange(most + n_tokens)
    if n_tokens == 1:
        # One row goes to the first empty slot.
        return column <= kept
    own = column - most
    return (column < kept) | ((own >= 0) & (own <= mx.arange(n_tokens)[:, None]))


def settled(config: H2OConfig, backend: Backend, slots: Slots, over: Sequence[bool], n_rows: int) -> Slots:
    """Keep the best ``budget`` rows of the sequences that are ``over``, and all of the others, rows first.

    Args:
        config: Budget, protection.
        backend: Who finds the best.
        slots: The slots after a call, its mass in the scores.
        over: Sequences that hold more than ``budget`` tokens and to which the budget applies.
        n_rows: The most rows that any sequence keeps; so many slots are left.
    """
    if any(over):
        state = slots.state
        stays = mx.put_along_axis(
            mx.zeros(state.positions.shape, mx.bool_), backend.survivors(config, state), mx.array(True), -1
        )
        slots = slots._replace(state=emptied(state, mx.array(list(over))[:, None, None] & ~stays))
    return rows_first(slots, n_rows)


def chosen(slots: Slots, sequences: Sequence[int], n_rows: int) -> Slots:
    """Take sequences out, in the given order; ``n_rows`` is the most that any of them has."""
    at = mx.array(list(sequences), mx.int32)
    keys, values, state = slots
    taken = Slots(keys.of(at), values.of(at), tree_map(lambda x: x[at], state))
    return packed(taken, n_rows)


def of_heads(slots: Slots, heads: Sequence[int]) -> Slots:
    """Take KV heads out, in the given order."""
    at = mx.array(list(heads), mx.int32)
    keys, values, state = slots
    extras = tuple(x[:, at] for x in state.extras)
    scores, totals, positions = (x[:, at] for x in (state.scores, state.totals, state.positions))
    return Slots(keys.of_heads(at), values.of_heads(at), H2OState(scores, totals, positions, state.seen, extras))


def padded(figure: mx.array, width: int, missing: float) -> mx.array:
    """Widen a figure of each row [B, H, n] on the right."""
    more = [(0, 0), (0, 0), (0, width - figure.shape[-1])]
    return mx.pad(figure, more, constant_values=mx.array(missing, figure.dtype))


def joined(parts: Sequence[tuple[Slots | None, int, int]]) -> Slots | None:
    """Put batches behind one another, in as many slots as the widest needs.

    Args:
        parts: For each batch its slots, None if it has seen nothing; its sequences; the most rows of any.

    Raises:
        ValueError: Heads, widths or dtypes differ.
    """
    present = [packed(slots, n_rows) for slots, _, n_rows in parts if slots is not None]
    if not present:
        return None
    kinds = {(slots.keys.kind, slots.values.kind) for slots in present}
    if len(kinds) > 1:
        raise ValueError(
            f"caches of one batch have equal heads, widths and dtypes, got {sorted(map(str, kinds))} for keys and "
            "values: batch the caches of one model"
        )
    width = max(map(capacity, present))
    rest = iter(present)
    full = [widened(_none(present[0], batch) if slots is None else next(rest), width) for slots, batch, _ in parts]
    state: H2OState = tree_map(lambda *x: mx.concatenate(list(x)), *[slots.state for slots in full])
    first, *others = full
    keys, values = (getattr(first, x).joined([getattr(slots, x) for slots in others]) for x in ("keys", "values"))
    return Slots(keys, values, state)


def per_sequence(numbers: Sequence[int]) -> mx.array:
    """Shape a number for each sequence to go with [B, H, C]."""
    return mx.array(list(numbers), mx.int32)[:, None, None]


def lengths_of(numbers: Sequence[int] | None) -> mx.array | None:
    """Put the real tokens of each sequence into the array that core takes."""
    return None if numbers is None else mx.array(list(numbers), mx.int32)


def _none(like: Slots, batch: int) -> Slots:
    """Slots, none so far, of sequences that have seen nothing."""
    extras = tuple(mx.zeros((batch, x.shape[1], 0, *x.shape[3:]), mx.float32) for x in like.state.extras)
    state = init(batch, like.keys.kind[0])._replace(extras=extras)
    return Slots(like.keys.none(batch), like.values.none(batch), state)


def heads_at(x: mx.array, heads: Sequence[int]) -> mx.array:
    """Take heads of an array [B, H, ...]; neighbours are not copied."""
    first, n = heads[0], len(heads)
    if list(heads) == list(range(first, first + n)):
        return x if n == x.shape[1] else x[:, first : first + n]
    return x[:, mx.array(list(heads))]
