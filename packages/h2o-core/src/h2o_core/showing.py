"""What a replay shows a scorer: the evidence of a call, from recorded attention."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from h2o_core._shapes import Float32
from h2o_core.attention import Mass, decay_weights
from h2o_core.config import H2OConfig
from h2o_core.evidence import Evidence, check_inputs, seen, widened
from h2o_core.rows import Recording
from h2o_core.scorer import Scorer
from h2o_core.state import H2OState, occupied

_RECORDED = frozenset({"queries", "keys", "values"})


def check(scorer: Scorer, recorded: Recording | None, inputs: Mapping[str, mx.array] | None) -> None:
    """Check before a replay that its scorer will get what it needs.

    Raises:
        ValueError: Something is missing; the message says what, and where it comes from.
    """
    missing = [name for name in sorted(scorer.needs & _RECORDED) if getattr(recorded, name, None) is None]
    if missing:
        there = "attention alone" if getattr(recorded, "queries", None) is None else "queries and keys alone"
        raise ValueError(
            f"scorer {scorer.name!r} needs {', '.join(missing)}, and this trace has {there}: pass a Recording with "
            "queries, keys and values, which h2o-mlxlm trace --what qkv records"
        )
    check_inputs(scorer, inputs)


def attended(
    config: H2OConfig, state: H2OState, rows: Float32[mx.array, "B H G N W"]
) -> tuple[Evidence, Float32[mx.array, "B H N"]]:
    """Show the attention of rows of a call, over the tokens held and renormalised.

    Args:
        config: Its scorer and decay.
        state: The rows' own tokens admitted, and none after them.
        rows: Recorded attention.

    Returns:
        The evidence, and the share of each row that fell on tokens held.
    """
    n, scorer = rows.shape[3], config.scorer
    place = mx.maximum(state.positions, 0)[:, :, None, None]
    held = mx.where(occupied(state)[:, :, None, None], mx.take_along_axis(rows, place, axis=-1), 0.0)
    total = held.sum(axis=-1, keepdims=True)
    each = mx.where(total > 0, held / mx.where(total > 0, total, 1.0), 0.0)
    p = each.mean(axis=2)
    last = p[:, :, -scorer.n_rows :] if scorer.n_rows else None
    if scorer.disturbs:
        queries = state.seen[:, None] - n + mx.arange(n, dtype=mx.int32)
        p = scorer.disturbed(each, queries, state.positions).mean(axis=2)
    mass = decay_weights(n, (config.decay, 1.0), None)[:, None] @ p
    return Evidence(Mass(mass[:, :, 0], mass[:, :, 1]), last), total[..., 0].mean(axis=2)


def continued(config: H2OConfig, before: Evidence, after: Evidence, n_after: int) -> Evidence:
    """Join what two parts of a call showed, the second of ``n_after`` rows."""
    new = seen(after.mass)
    before = widened(before, new.total.shape[-1])
    old = seen(before.mass)
    mass = Mass(old.decayed * config.decay**n_after + new.decayed, old.total + new.total)
    rows = after.rows
    if before.rows is not None and rows is not None:
        rows = mx.concatenate([before.rows, rows], axis=2)[:, :, -config.scorer.n_rows :]
    return after._replace(mass=mass, rows=rows)


def completed(
    scorer: Scorer,
    evidence: Evidence,
    state: H2OState,
    n_tokens: int,
    n_seen: int,
    recorded: Recording | None,
    inputs: Mapping[str, mx.array] | None,
) -> Evidence:
    """Add what else the scorer needs of a call of ``n_tokens`` that is over, the last of ``n_seen``."""
    found: dict[str, Any] = {"given": dict(inputs)} if inputs else {}
    place = mx.maximum(state.positions, 0)[..., None]
    for name in scorer.needs & _RECORDED:
        x: mx.array = getattr(recorded, name)
        x = x if x.ndim == 4 else x[None]
        found[name] = x[:, :, n_seen - n_tokens : n_seen] if name == "queries" else mx.take_along_axis(x, place, axis=2)
    return evidence._replace(**found)
