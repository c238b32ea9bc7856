"""Replay an attention trace through a configuration: what would have been kept, and what it received."""

from typing import NamedTuple

import mlx.core as mx

from h2o_core._shapes import Float, Float32, Int32
from h2o_core.attention import Mass, decay_weights
from h2o_core.config import H2OConfig
from h2o_core.eviction import evict, release, victims
from h2o_core.scoring import observe
from h2o_core.state import EMPTY, H2OState, admit, grow, init, occupied

_STEP = 64  # slots added at a time while the budget is not reached


class Trace(NamedTuple):
    """What a replay saw. H KV heads, T steps; with a batch every array has a leading B axis."""

    kept: Int32[mx.array, "*b T H K"] | None  # positions held after each step, ascending, EMPTY behind them
    retained: Float32[mx.array, "*b T H"]  # share of the step's row that fell on tokens held
    evicted: Int32[mx.array, "*b T H"]  # the position that went in that step, EMPTY if none


def simulate(
    attention: Float[mx.array, "*b Hq T T"],
    config: H2OConfig,
    prompt_len: int = 1,
    n_kv_heads: int | None = None,
    keep_positions: bool = True,
) -> Trace:
    """Replay recorded attention through a bounded cache.

    The first ``prompt_len`` rows are one call, then each row is a call. The cache sees a query head's row
    restricted to the tokens that its KV head holds, the new one included, and renormalised to 1, as a
    softmax over the held keys gives; a row whose held mass is 0 adds none.

    Args:
        attention: Probabilities, causal, each row summing to 1.
        config: The cache to simulate. Its ``queries`` and ``positions`` play no part: the attention is
            given.
        prompt_len: Rows of the first call, 1 to T.
        n_kv_heads: H, a divisor of Hq; None for one KV head per query head.
        keep_positions: False leaves ``Trace.kept`` out, which grows with T.

    Returns:
        The trace. Within a first call of several tokens there are no steps, so its rows have ``kept`` only
        at the last and no ``evicted``. With ``evict_during_prefill=False``, ``kept`` is EMPTY while more
        than ``budget`` tokens are held, and so is ``evicted`` where several go at once.

    Raises:
        ValueError: A shape, ``prompt_len`` or ``n_kv_heads`` does not fit.

    >>> trace = simulate(mx.tri(8)[None] / mx.arange(1, 9)[:, None], H2OConfig(4, n_sink=1, grace=1))
    >>> trace.kept[-1, 0].tolist()
    [0, 1, 2, 7]
    """
    batched = attention if attention.ndim == 4 else attention[None]
    _check(batched, prompt_len, n_kv_heads)
    batch, n_query_heads, n_steps, _ = batched.shape
    n_heads = n_kv_heads or n_query_heads
    grouped = batched.astype(mx.float32).reshape(batch, n_heads, -1, n_steps, n_steps)

    state = init(batch, n_heads)
    kept, retained, evicted = [], [], []
    holding = not config.evict_during_prefill
    for start in [0, *range(prompt_len, n_steps)]:
        n = prompt_len if start == 0 else 1
        state, share = _attended(config, state, grouped[:, :, :, start : start + n])
        holding = holding and n > 1
        before = state
        if not holding:
            state = _bounded(config, state)
        nothing = [mx.full((batch, n_heads, config.budget), EMPTY, mx.int32)] * (n - 1)
        kept += [*nothing, _held(config, state)] if keep_positions else []
        retained += [share[..., i] for i in range(n)]
        evicted += [row[..., 0] for row in nothing] + [_only_gone(before, state, n)]
        mx.eval(state, kept[-1:], retained[-1], evicted[-1])
    squeeze = attention.ndim == 3
    return Trace(
        kept=_stacked(kept, squeeze) if keep_positions else None,
        retained=_stacked(retained, squeeze),
        evicted=_stacked(evicted, squeeze),
    )


def _stacked(steps: list[mx.array], squeeze: bool) -> mx.array:
    stacked = mx.stack(steps, axis=1)
    return stacked[0] if squeeze else stacked


def _attended(
    config: H2OConfig, state: H2OState, rows: Float32[mx.array, "B H G N T"]
) -> tuple[H2OState, Float32[mx.array, "B H N"]]:
    """Admit and observe one call; also the share of each row that fell on tokens held."""
    n = rows.shape[3]
    if n == 1 and bool(occupied(state).all()):
        state = grow(state, state.positions.shape[-1] + _STEP)
    state, _ = admit(state, n)
    place = mx.maximum(state.positions, 0)[:, :, None, None]
    held = mx.where(occupied(state)[:, :, None, None], mx.take_along_axis(rows, place, axis=-1), 0.0)
    total = held.sum(axis=-1, keepdims=True)
    p = mx.where(total > 0, held / mx.where(total > 0, total, 1.0), 0.0).mean(axis=2)
    mass = decay_weights(n, (config.decay, 1.0), None)[:, None] @ p
    return observe(config, state, Mass(mass[:, :, 0], mass[:, :, 1]), n), total[..., 0].mean(axis=2)


def _bounded(config: H2OConfig, state: H2OState) -> H2OState:
    """The state with at most ``budget`` tokens per head."""
    if state.positions.shape[-1] > config.budget + 1:
        return evict(config, state)[0]
    return release(config, state, victims(config, state))


def _held(config: H2OConfig, state: H2OState) -> Int32[mx.array, "B H K"]:
    """Positions held, ascending, EMPTY behind; all EMPTY while more than ``budget`` are held."""
    last = 2**31 - 1
    ordered = mx.sort(mx.where(occupied(state), state.positions, last), axis=-1)
    missing = max(0, config.budget + 1 - ordered.shape[-1])
    ordered = mx.pad(ordered, [(0, 0), (0, 0), (0, missing)], constant_values=mx.array(last, mx.int32))
    fits = ordered[..., config.budget :][..., :1] == last
    return mx.where(fits & (ordered != last), ordered, EMPTY)[..., : config.budget]


def _only_gone(before: H2OState, after: H2OState, n: int) -> Int32[mx.array, "B H"]:
    """The position that went, if exactly one did in a call of one token; else EMPTY."""
    gone = occupied(before).sum(axis=-1) - occupied(after).sum(axis=-1)
    total = _position_sum(before) - _position_sum(after)
    return mx.where((gone == 1) & (n == 1), total, EMPTY).astype(mx.int32)


def _position_sum(state: H2OState) -> mx.array:
    return mx.maximum(state.positions, 0).astype(mx.int64).sum(axis=-1)


def _check(attention: mx.array, prompt_len: int, n_kv_heads: int | None) -> None:
    if attention.ndim != 4 or attention.shape[-1] != attention.shape[-2] or attention.shape[-1] == 0:
        raise ValueError(
            f"attention must be [Hq, T, T] or [B, Hq, T, T] with T at least 1, got shape {attention.shape}"
        )
    n_query_heads, n_steps = attention.shape[1:3]
    if not 1 <= prompt_len <= n_steps:
        raise ValueError(f"prompt_len must be between 1 and T={n_steps}, got {prompt_len}")
    if n_kv_heads is not None and (n_kv_heads < 1 or n_query_heads % n_kv_heads):
        raise ValueError(f"n_kv_heads must divide the {n_query_heads} query heads, got {n_kv_heads}")
