"""What a replay came to: mass retained, how near to the best possible, how old the kept tokens are, what froze."""

from typing import NamedTuple

import mlx.core as mx

from h2o_core._shapes import Float, Float32, Int32
from h2o_core.rows import Recording, Rows, causal, rows_of
from h2o_core.simulation import Trace


class Optimum(NamedTuple):
    """Each step beside the best set of that size for it. NaN where the step before has no kept set."""

    overlap: Float32[mx.array, "*b T H"]  # share of the tokens held that are in a best set
    retained: Float32[mx.array, "*b T H"]  # share of the step's row that a best set would have held


class Summary(NamedTuple):
    """One number a KV head, over the steps counted; the last two after the last step."""

    retained: Float32[mx.array, "*b H"]  # mean share of attention that fell on tokens held
    overlap: Float32[mx.array, "*b H"]  # mean of ``Optimum.overlap``
    best: Float32[mx.array, "*b H"]  # mean of ``Optimum.retained``
    age: Float32[mx.array, "*b H"]  # mean steps since the tokens kept arrived
    frozen: Float32[mx.array, "*b H"]  # share of the first ``budget`` tokens that never went


def optimum(trace: Trace, attention: Float[mx.array, "*b Hq T T"] | Rows | Recording) -> Optimum:
    """Compare what was held at each step with the best that as many tokens could have done for it.

    The best set of a step knows the step's row: the new token, and of the tokens before it the k with the most
    mass (mean over the group), k the number held after the step before. No cache can have it at every step,
    since what has gone can't come back. Of several best sets the one nearest to what was held counts.

    Args:
        trace: With ``kept``.
        attention: What was replayed, in one array or as rows that can be read again.

    Raises:
        ValueError: The trace has no positions, or is of other attention.
    """
    kept, rows = _kept(trace), rows_of(attention)
    n_steps, n_heads = trace.retained.shape[-2:]
    if rows.shape[:-3] != trace.retained.shape[:-2] or rows.shape[-1] != n_steps or rows.shape[-3] % n_heads:
        raise ValueError(
            f"the trace is of {n_steps} steps and {n_heads} KV heads, the attention {rows.shape}: "
            "give the attention that was replayed"
        )
    # What each step found there: [*b, H, T, K].
    held = mx.pad(kept, [*[(0, 0)] * (kept.ndim - 3), (1, 0), (0, 0), (0, 0)], constant_values=mx.array(-1, mx.int32))
    held = held[..., :-1, :, :].swapaxes(-2, -3)
    parts, start = [], 0
    for block in rows:
        stop = start + block.shape[-2]
        grouped = mx.unflatten(block.astype(mx.float32), -3, (n_heads, -1)).mean(axis=-3)
        parts.append(mx.stack([*_best(grouped, held[..., start:stop, :], start)]))
        mx.eval(parts[-1])
        start = stop
    overlap, retained = mx.concatenate(parts, axis=-1).swapaxes(-1, -2)
    return Optimum(overlap, retained)


def _best(
    p: Float32[mx.array, "*b H n W"], held: Int32[mx.array, "*b H n K"], start: int
) -> tuple[Float32[mx.array, "*b H n"], Float32[mx.array, "*b H n"]]:
    """Overlap and mass of the best set, for rows from ``start``."""
    n, width = p.shape[-2:]
    step = mx.arange(start, start + n)
    before = causal(start, start + n, width) & (mx.arange(width) != step[:, None])
    count = (held >= 0).sum(axis=-1)
    size = min(held.shape[-1], width)
    # Descending, the ``size`` largest: nothing but tokens before the step can be among the first ``count``.
    top = -mx.sort(mx.partition(-mx.where(before, p, -1.0), size - 1, axis=-1)[..., :size], axis=-1)
    counted = mx.arange(size) < count[..., None]
    least = mx.take_along_axis(top, mx.maximum(count - 1, 0)[..., None], axis=-1)
    ours = mx.where(held >= 0, mx.take_along_axis(p, mx.clip(held, 0, width - 1), axis=-1), -1.0)
    # Those that tie with the least are as good as each other, as many as fit.
    places = count - (counted & (top > least)).sum(axis=-1)
    hits = (ours > least).sum(axis=-1) + mx.minimum(((ours == least) & (held >= 0)).sum(axis=-1), places)
    own = mx.take_along_axis(p, mx.broadcast_to(step[:, None], (*p.shape[:-1], 1)), axis=-1)[..., 0]
    known = (count > 0) | (step == 0)
    overlap = mx.where(count > 0, hits / mx.maximum(count, 1), 1.0)
    mass = mx.where(counted, top, 0.0).sum(axis=-1) + own
    return mx.where(known, overlap, mx.nan), mx.where(known, mass, mx.nan)


def ages(trace: Trace) -> Float32[mx.array, "*b T H"]:
    """Mean steps since the tokens kept after each step arrived; NaN where there is no kept set."""
    kept = _kept(trace)
    step = mx.arange(kept.shape[-3])[:, None, None]
    count = (kept >= 0).sum(axis=-1)
    total = mx.where(kept >= 0, step - kept, 0).sum(axis=-1)
    return mx.where(count > 0, total / mx.maximum(count, 1), mx.nan)


def frozen(trace: Trace) -> Float32[mx.array, "*b T H"]:
    """Share of the first ``budget`` tokens that are still kept after each step; NaN where there is no kept set.

    A cache whose share stays at 1 never let a later token in.
    """
    kept = _kept(trace)
    budget = kept.shape[-1]
    early = ((kept >= 0) & (kept < budget)).sum(axis=-1)
    first = mx.minimum(mx.arange(1, kept.shape[-3] + 1), budget)[:, None]
    return mx.where((kept >= 0).any(axis=-1), early / first, mx.nan)


def summarize(trace: Trace, attention: Float[mx.array, "*b Hq T T"] | Rows | Recording, start: int = 0) -> Summary:
    """Sum a replay up in five numbers a head.

    Args:
        trace: With ``kept``.
        attention: What was replayed.
        start: First step counted: the prompt's length leaves the prompt out.

    >>> from h2o_core import H2OConfig, simulate
    >>> uniform = mx.tri(40)[None] / mx.arange(1, 41)[:, None]
    >>> summary = summarize(simulate(uniform, H2OConfig(10, n_sink=0, grace=0, decay=1.0)), uniform)
    >>> summary.frozen.item(), round(summary.retained.item(), 3), round(summary.overlap.item(), 3)
    (1.0, 0.621, 1.0)
    """
    best = optimum(trace, attention)
    return Summary(
        retained=trace.retained[..., start:, :].mean(axis=-2),
        overlap=_mean(best.overlap[..., start:, :]),
        best=_mean(best.retained[..., start:, :]),
        age=ages(trace)[..., -1, :],
        frozen=frozen(trace)[..., -1, :],
    )


def _mean(x: Float32[mx.array, "*b T H"]) -> Float32[mx.array, "*b H"]:
    """The mean over the steps that are no NaN."""
    known = ~mx.isnan(x)
    return mx.where(known, x, 0.0).sum(axis=-2) / known.sum(axis=-2)


def _kept(trace: Trace) -> Int32[mx.array, "*b T H K"]:
    if trace.kept is None:
        raise ValueError("the trace has no kept positions: simulate with keep_positions=True")
    return trace.kept
