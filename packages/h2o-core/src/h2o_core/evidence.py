"""What a scorer looks at after a call, beyond the mass: gathered for the scorers that need it, and for no other."""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, TypeVar

import mlx.core as mx

from h2o_core import attention
from h2o_core._shapes import Bool, Float, Float32, Int32
from h2o_core.attention import Mass, decay_weights, masked_softmax, weighted
from h2o_core.config import H2OConfig
from h2o_core.scorer import Scorer
from h2o_core.state import H2OState


class Evidence(NamedTuple):
    """What a call showed. None where the scorer does not need it.

    C are the slots that were attended to; ``observe`` takes it that further ones were empty.
    """

    mass: Mass | None = None
    rows: Float32[mx.array, "B H W C"] | None = None  # attention of the last W real queries, oldest first, group's mean
    queries: Float[mx.array, "B Hq N D"] | None = None  # of the call
    keys: Float[mx.array, "B H C D"] | None = None  # as they were attended to
    values: Float[mx.array, "B H C Dv"] | None = None
    given: dict[str, mx.array] | None = None  # the caller's inputs


def gather(
    config: H2OConfig,
    state: H2OState,
    mass: Mass | None,
    q: Float[mx.array, "B Hq N D"],
    k: Float[mx.array, "B H C D"],
    v: Float[mx.array, "B H C Dv"],
    scale: float,
    mask: Bool[mx.array, "B _ N C"] | Literal["causal"] | None = None,
    lengths: Int32[mx.array, " B"] | None = None,
    sinks: Float[mx.array, " Hq"] | None = None,
    given: Mapping[str, mx.array] | None = None,
) -> Evidence:
    """Gather what the configuration's scorer needs of a call.

    For H2O that is the mass, and no work. Rows are attended to once more, but for a single query, whose mass is its
    row; so is everything where a scorer changes probabilities. Memory is bounded as in ``attend``.

    Args:
        config: Whose scorer asks; its decay.
        state: After ``admit``, of C slots or more.
        mass: What ``attend`` returned; None where the scorer needs none.
        q: Queries of the call.
        k: Keys of all slots, as they were attended to.
        v: Values of all slots.
        scale: As for ``attend``, and so are ``mask``, ``lengths`` and ``sinks``.
        mask: See ``scale``.
        lengths: See ``scale``.
        sinks: See ``scale``.
        given: The caller's inputs, by name.

    Raises:
        ValueError: An input is missing, or the scorer takes no such input.
    """
    scorer: Scorer = config.scorer
    if scorer.plain and not given:
        return Evidence(mass)
    check_inputs(scorer, given)
    if scorer.disturbs:
        mass = _disturbed(config, state, q, k, scale, mask, lengths, sinks)
    rows = None
    if "rows" in scorer.needs:
        alone = mass is not None and q.shape[2] == 1 and lengths is None
        rows = seen(mass).total[:, :, None] if alone else last_rows(scorer.n_rows, q, k, scale, mask, lengths, sinks)
    return Evidence(
        mass=mass,
        rows=rows,
        queries=q if "queries" in scorer.needs else None,
        keys=k if "keys" in scorer.needs else None,
        values=v if "values" in scorer.needs else None,
        given=dict(given) if given else None,
    )


T = TypeVar("T")


def seen(x: T | None) -> T:
    """Read a part of the evidence that the scorer needs, so that it is there.

    Raises:
        ValueError: It is not.
    """
    if x is None:
        raise ValueError("a scorer reads what it does not name in needs: add it there")
    return x


def check_inputs(scorer: Scorer, given: Mapping[str, mx.array] | None) -> None:
    """Check that the caller gives what a scorer needs of him, and no more.

    Raises:
        ValueError: An input is missing, or the scorer takes no such input.
    """
    names, wanted = set(given or ()), scorer.inputs
    if missing := sorted(wanted - names):
        raise ValueError(f"scorer {scorer.name!r} needs {', '.join(missing)} from the caller: give it in inputs")
    if unknown := sorted(names - wanted):
        takes = ", ".join(sorted(wanted)) or "none"
        raise ValueError(f"scorer {scorer.name!r} takes no input {', '.join(unknown)}: it takes {takes}")


def widened(evidence: Evidence, n_slots: int) -> Evidence:
    """The evidence over all slots, those that nobody attended to among them."""
    mass, rows, keys, values = evidence.mass, evidence.rows, evidence.keys, evidence.values
    return evidence._replace(
        mass=None if mass is None else Mass(*(_padded(x, 2, n_slots) for x in mass)),
        rows=None if rows is None else _padded(rows, 3, n_slots),
        keys=None if keys is None else _padded(keys, 2, n_slots),
        values=None if values is None else _padded(values, 2, n_slots),
    )


def _padded(x: mx.array, axis: int, n_slots: int) -> mx.array:
    missing = n_slots - x.shape[axis]
    return mx.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)]) if missing else x


def last_rows(
    n_rows: int,
    q: Float[mx.array, "B Hq N D"],
    k: Float[mx.array, "B H C D"],
    scale: float,
    mask: Bool[mx.array, "B _ N C"] | Literal["causal"] | None = None,
    lengths: Int32[mx.array, " B"] | None = None,
    sinks: Float[mx.array, " Hq"] | None = None,
) -> Float32[mx.array, "B H W C"]:
    """Attend with the last queries alone.

    Returns:
        Probabilities of the last W = min(n_rows, N) real queries, oldest first, averaged over the group. A
        sequence with fewer has rows of 0 in front.
    """
    n_queries, most = q.shape[2], min(n_rows, q.shape[2])
    if lengths is None:
        mask = mask[:, :, -most:] if isinstance(mask, mx.array) else mask
        parts = _each_block(q[:, :, -most:], k, scale, mask, sinks, lambda p, start, stop: p.mean(axis=2))
        return mx.concatenate(parts, axis=2)
    index = lengths[:, None] - most + mx.arange(most)
    at = mx.maximum(index, 0)[:, None, :, None]
    if not isinstance(mask, mx.array):
        own = (
            _own(0, n_queries, n_queries, k.shape[2])
            if mask == "causal"
            else mx.ones((n_queries, k.shape[2]), mx.bool_)
        )
        mask = own[None, None]
    mask = mx.broadcast_to(mask, (q.shape[0], *mask.shape[1:]))
    queries, mask = mx.take_along_axis(q, at, axis=2), mx.take_along_axis(mask, at, axis=2)
    parts = _each_block(queries, k, scale, mask, sinks, lambda p, start, stop: p.mean(axis=2))
    return mx.where((index >= 0)[:, None, :, None], mx.concatenate(parts, axis=2), 0.0)


def _disturbed(
    config: H2OConfig,
    state: H2OState,
    q: mx.array,
    k: mx.array,
    scale: float,
    mask: mx.array | Literal["causal"] | None,
    lengths: mx.array | None,
    sinks: mx.array | None,
) -> Mass:
    """The mass of changed probabilities."""
    n_queries, positions = q.shape[2], state.positions[..., : k.shape[2]]
    real = n_queries if lengths is None else lengths[:, None]
    at = state.seen[:, None] - real + mx.arange(n_queries, dtype=mx.int32)
    weights = decay_weights(n_queries, (config.decay, 1.0), lengths) * (k.shape[1] / q.shape[1])

    def summed(p: mx.array, start: int, stop: int) -> mx.array:
        p = config.scorer.disturbed(p, at[:, start:stop], positions)
        return weighted(p.flatten(2, 3), weights[..., start:stop])

    mass = sum(_each_block(q, k, scale, mask, sinks, summed), mx.array(0.0))
    return Mass(mass[:, :, 0], mass[:, :, 1])


def _each_block(
    q: Float[mx.array, "B Hq N D"],
    k: Float[mx.array, "B H C D"],
    scale: float,
    mask: Bool[mx.array, "B _ N C"] | Literal["causal"] | None,
    sinks: Float[mx.array, " Hq"] | None,
    take: Callable[[mx.array, int, int], mx.array],
) -> list[mx.array]:
    """What is taken from the probabilities [B, H, G, n, C] of each block of queries, one block alive at a time."""
    batch, n_query_heads, n_queries, width = q.shape
    n_heads, n_rows = k.shape[1:3]
    grouped = (q.astype(mx.float32) * scale).reshape(batch, n_heads, -1, n_queries, width)
    keys = k.astype(mx.float32).swapaxes(-1, -2)
    block = max(1, attention.BLOCK_ELEMENTS // (batch * n_query_heads * n_rows))
    taken: list[mx.array] = []
    for start in range(0, n_queries, block):
        stop = min(start + block, n_queries)
        rows = grouped[..., start:stop, :].flatten(2, 3)
        if taken:
            rows = mx.depends([rows], taken[-1:])[0]
        logits = mx.unflatten(rows @ keys, 2, (-1, stop - start))
        shown = _own(start, stop, n_queries, n_rows) if isinstance(mask, str) else mask
        if isinstance(mask, mx.array):
            shown = mask[:, :, None, start:stop]
        taken.append(take(masked_softmax(logits, shown, sinks), start, stop))
    return taken


def _own(start: int, stop: int, n_queries: int, n_rows: int) -> Bool[mx.array, "n C"]:
    """What queries start … stop − 1 of a causal call see: the last N rows are the queries' own."""
    return mx.arange(n_rows) <= mx.arange(start, stop)[:, None] + (n_rows - n_queries)
