"""Key and value rows beside core's state: what moves when a row comes or goes.

Pure functions, but ``written`` reuses a buffer that nobody else holds, as mlx does.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import mlx.core as mx

from h2o_core import H2OConfig, H2OState, Mass, admit, grow, init, observe, pack, release, take, victims
from h2o_core.scorer import Scorer
from h2o_mlxlm.backend import Backend
from h2o_mlxlm.forms import Form
from h2o_mlxlm.stores import Store, no_rows

STEP = 256
"""Slots added at a time below the budget, as mlx_lm's own cache does."""

CONFIGURATIONS = 2048
"""Compiled functions that are kept: budgets may differ in every head of every layer."""


class Slots(NamedTuple):
    """C slots per KV head."""

    keys: Store
    values: Store
    state: H2OState


class Row(NamedTuple):
    """What a slot of each head holds."""

    slot: mx.array  # [B, H, 1]
    keys: Store  # of one slot
    values: Store

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """What keys and values are stored in."""
        return *self.keys.arrays, *self.values.arrays


def none_yet(keys: mx.array, values: mx.array, forms: tuple[Form, Form], scorer: Scorer) -> Slots:
    """Make slots, none so far, for rows like these, with what the scorer keeps.

    Raises:
        ValueError: The rows can't be divided into groups of the size that is asked for.
    """
    for name, rows, form in zip(("keys", "values"), (keys, values), forms, strict=True):
        form.check_width(name, rows.shape[-1])
    return Slots(no_rows(keys, forms[0]), no_rows(values, forms[1]), init(*keys.shape[:2], scorer=scorer))


def arrays_of(state: H2OState) -> tuple[mx.array, ...]:
    """List what a state is made of, a scorer's own arrays included."""
    return *state[:4], *state.extras


def capacity(slots: Slots) -> int:
    """Count the slots of each head, C."""
    return slots.state.positions.shape[-1]


def packed(slots: Slots, n_rows: int) -> Slots:
    """Leave the first ``n_rows`` slots when those that hold a token come first; so many suffice for every head.

    As many slots as that have their rows first already, or there are no empty ones.
    """
    return slots if capacity(slots) == n_rows else rows_first(slots, n_rows)


def rows_first(slots: Slots, n_rows: int) -> Slots:
    """Do the same wherever the empty slots are."""
    order = pack(slots.state, n_rows)
    return _taken(slots, take(slots.state, order), order)


def written(
    slots: Slots,
    keys: mx.array,
    values: mx.array,
    n_rows: int,
    budget: int,
    lengths: mx.array | None = None,
    free: mx.array | None = None,
) -> tuple[Slots, mx.array]:
    """Put one token's rows into an empty slot, of which more are made if there is none.

    Args:
        slots: The slots before the call.
        keys: [B, H, 1, D].
        values: [B, H, 1, Dv].
        n_rows: The most rows that any head holds.
        budget: There are no more than budget + 1 slots, but where the budget does not apply yet.
        lengths: int32 [B], 0 for a sequence whose token is padding: it leaves its slot empty. None if all are real.
        free: An empty slot of each head [B, H, 1], where it is known.

    Returns:
        The slots, and which one of each head was taken [B, H, 1].
    """
    if capacity(slots) == n_rows:
        more = STEP if n_rows > budget else min(STEP, budget + 1 - n_rows)
        slots = widened(slots, n_rows + more)
    state, where = _admitted(slots.state, free) if lengths is None else admit(slots.state, 1, lengths)
    return replaced(slots, state, where, keys, values), where


def replaced(slots: Slots, state: H2OState, where: mx.array, keys: mx.array, values: mx.array) -> Slots:
    """Put one token's rows [B, H, 1, D] where a row has gone, as the state says already."""
    where = where[..., None]
    return Slots(slots.keys.put(where, keys), slots.values.put(where, values), state)


def vacant(slots: Slots) -> Row:
    """Read the slot that the next token's rows go to; there is an empty one in every head."""
    _, where = _admitted(slots.state, None)
    return Row(where, slots.keys.at(where), slots.values.at(where))


def restored(slots: Slots, state: H2OState, row: Row) -> Slots:
    """Undo ``written``: the state that it found, in as many slots as there are now, and the row it overwrote."""
    where = row.slot[..., None]
    keys, values = slots.keys.put_back(where, row.keys.arrays), slots.values.put_back(where, row.values.arrays)
    return Slots(keys, values, grow(state, slots.keys.n_slots))


@mx.compile
def _admitted(state: H2OState, free: mx.array | None) -> tuple[H2OState, mx.array]:
    return admit(state, 1, slots=free)


def appended(slots: Slots, keys: mx.array, values: mx.array, n_rows: int, lengths: mx.array | None = None) -> Slots:
    """Put the rows of several tokens behind the ``n_rows`` that heads hold at most; see ``written``."""
    slots = packed(slots, n_rows)
    state, _ = admit(slots.state, keys.shape[2], lengths)
    return Slots(slots.keys.appended(keys), slots.values.appended(values), state)


def scored(
    config: H2OConfig,
    backend: Backend,
    slots: Slots,
    mass: Mass,
    n_tokens: int,
    over: bool,
    lengths: mx.array | None = None,
) -> Slots:
    """End a call: its mass goes into the scores and, if heads are ``over`` the budget, the lowest go.

    Then there are budget + 1 slots, one of them empty.

    Args:
        config: Decay, budget, protection.
        backend: Who finds the lowest.
        slots: The slots that the call attended to.
        mass: Two float32 [B, H, M], M at most C: of the first M slots.
        n_tokens: Tokens of the call.
        over: Heads hold more than ``budget`` tokens and the budget applies.
        lengths: Real tokens of each sequence, int32 [B]; None if all are.
    """
    missing = capacity(slots) - mass.total.shape[-1]
    if missing:
        mass = Mass(*(mx.pad(x, [(0, 0), (0, 0), (0, missing)]) for x in mass))
    frees_one = over and capacity(slots) == config.budget + 1
    if n_tokens == 1 and lengths is None:
        if frees_one and backend.name == "reference":
            return slots._replace(state=_end_one(config)(slots.state, mass))
        state = _observe_one(config)(slots.state, mass)
    else:
        state = observe(config, slots.state, mass, n_tokens, lengths)
    slots = slots._replace(state=state)
    return bounded(config, backend, slots) if over else slots


def bounded(config: H2OConfig, backend: Backend, slots: Slots) -> Slots:
    """Let the lowest go of heads that hold more than ``budget``, which leaves budget + 1 slots, one of them empty."""
    if capacity(slots) == config.budget + 1:
        return slots._replace(state=release(config, slots.state, backend.victims(config, slots.state)))
    return evicted(config, backend, slots)


def evicted(config: H2OConfig, backend: Backend, slots: Slots) -> Slots:
    """Keep the best ``budget`` rows of each head, in budget + 1 slots, the last one empty."""
    state, order = backend.evict(config, slots.state)
    # The state has its empty slot already.
    return widened(_taken(slots, state, order), config.budget + 1)


@lru_cache(maxsize=CONFIGURATIONS)
def _observe_one(config: H2OConfig) -> Callable[[H2OState, Mass], H2OState]:
    return mx.compile(partial(observe, config, n_tokens=1))


@lru_cache(maxsize=CONFIGURATIONS)
def _end_one(config: H2OConfig) -> Callable[[H2OState, Mass], H2OState]:
    """As in ``Ledger``, without a next token."""

    def end(state: H2OState, mass: Mass) -> H2OState:
        state = observe(config, state, mass, 1)
        return release(config, state, victims(config, state))

    return mx.compile(end)


def ranks(slots: Slots, n_rows: int | mx.array, before: mx.array | None = None) -> mx.array:
    """Find the place of each row among its head's rows by position; 0 for an empty slot.

    Args:
        slots: The slots.
        n_rows: Rows that each head holds, one number or [B, 1, 1].
        before: The ranks of one call of one token earlier, if there were so many rows then. They spare a
            sort: one row has been replaced, so the newer ones have moved up by one.

    Returns:
        int32 [B, H, C].
    """
    positions = slots.state.positions
    if before is None or before.shape != positions.shape or n_rows != capacity(slots):
        order = mx.argsort(mx.argsort(positions, axis=-1), axis=-1).astype(mx.int32)
        return mx.maximum(order - (capacity(slots) - n_rows), 0)
    new = positions == positions.max(axis=-1, keepdims=True)
    gone = mx.where(new, before, 0).sum(axis=-1, keepdims=True)
    return mx.where(new, n_rows - 1, before - (before > gone))


def _taken(slots: Slots, state: H2OState, order: mx.array) -> Slots:
    return Slots(slots.keys.at(order), slots.values.at(order), state)


def widened(slots: Slots, width: int) -> Slots:
    """Add empty slots on the right, where there are fewer than ``width``; they are finite, for 0 · nan is nan."""
    return Slots(slots.keys.widened(width), slots.values.widened(width), grow(slots.state, width))
