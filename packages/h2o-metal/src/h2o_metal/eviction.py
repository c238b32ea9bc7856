"""The decode step and eviction, by kernels: the signatures of ``h2o_core.eviction`` and their results."""

from collections.abc import Mapping
from functools import lru_cache

import mlx.core as mx

from h2o_core import H2OConfig, H2OState, gather, grow, observe, release, take, visible
from h2o_core.eviction import check_keeps_values
from h2o_metal._shapes import Float, Integer
from h2o_metal.attention import Heads, attend, attend_parts, fits, heads_of, numbers_of, sinks_or_none, template_of
from h2o_metal.kernel import launch


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
    """Attend, observe and evict for one token that ``admit`` has given its slot, as ``h2o_core.decode_step`` does.

    One launch, ``h2o_decode``. Where a head has more than ``attention.WHOLE`` slots and there are fewer than
    ``attention.BUSY`` heads, two: ``h2o_attend_part`` and ``h2o_decode_merge``. Keys and values are read once
    either way, and where they lie. Heads that don't fit into a threadgroup (``attention.fits``), and scorers other
    than H2O's own, take the kernels of a chunk, with small steps of mlx between, and keys are read three times.

    Args:
        config: Budget, protection, decay.
        state: The state after ``admit`` of one token.
        q: Queries of the new token.
        k: Keys, the new row in its slot; of any strides.
        v: Values, likewise.
        scale: Factor on the logits.
        sinks: Sink logits.
        given: The caller's inputs, for a scorer that needs any.

    Returns:
        The output, the state after the step in fresh buffers, and the slot that was lowest; it has been emptied in
        the heads that held more than ``budget`` tokens.

    Raises:
        RuntimeError: There is neither Metal nor CUDA here.
        ValueError: As ``h2o_core.decode_step`` does.
    """
    if not config.scorer.plain or not fits(q, k, v):
        return _in_steps(config, state, q, k, v, scale, sinks, given)
    heads = heads_of(q, k, v)
    inputs = {
        "q": q,
        "k": k,
        "v": v if heads.value_width else k,
        "sinks": sinks_or_none(sinks),
        "positions": state.positions,
        "seen": state.seen,
        "scores": state.scores,
        "totals": state.totals,
        "numbers": numbers_of(scale, config.decay),
        "limits": _limits(config),
    }
    outputs = _stepped(heads, v.dtype)
    template = template_of(heads, v, sinks is not None)
    groups = (1, heads.batch * heads.n_heads)
    if heads.parts == 1:
        made = launch("h2o_decode", inputs, {**outputs, "logits": heads.logits}, template, groups)
    else:
        found = attend_parts(heads, inputs, v)
        rest = {name: x for name, x in inputs.items() if name not in ("q", "k", "v")}
        template["PARTS"] = heads.parts
        made = launch("h2o_decode_merge", {**found, **rest}, outputs, template, groups)
    out, scores, totals, positions, victim = made[:5]
    return out[..., : heads.value_width], H2OState(scores, totals, positions, state.seen), victim


def victims(config: H2OConfig, state: H2OState) -> Integer[mx.array, "B H 1"]:
    """Find the row that goes from each head, as ``h2o_core.victims`` does, in one launch.

    Returns:
        The slot of the victim.

    Raises:
        RuntimeError: There is neither Metal nor CUDA here.
    """
    batch, n_heads, _ = state.positions.shape
    outputs = {"victim": ((batch, n_heads, 1), mx.uint32)}
    return launch("h2o_victims", _ranked(config, state), outputs, {}, groups=(1, batch * n_heads))[0]


def survivors(config: H2OConfig, state: H2OState) -> Integer[mx.array, "B H K"]:
    """Find the ``budget`` rows that stay, as ``h2o_core.survivors`` does, in one launch.

    Returns:
        Slots, those that hold a token first and in slot order.

    Raises:
        RuntimeError: There is neither Metal nor CUDA here.
    """
    return evict(config, state)[1]


def evict(config: H2OConfig, state: H2OState) -> tuple[H2OState, Integer[mx.array, "B H K"]]:
    """Keep the best ``budget`` rows of each head, as ``h2o_core.evict`` does, in one launch.

    Returns:
        The state with budget + 1 slots, the last one empty, and the slots its first ``budget`` came from:
        the caller gathers keys and values by them and puts a row of zeros behind.

    Raises:
        RuntimeError: There is neither Metal nor CUDA here.
    """
    batch, n_heads, n_slots = state.positions.shape
    shape = (batch, n_heads, config.budget + 1)
    outputs: dict[str, tuple[tuple[int, ...], mx.Dtype]] = {
        "new_scores": (shape, mx.float32),
        "new_totals": (shape, mx.float32),
        "new_positions": (shape, mx.int32),
        "kept": ((batch, n_heads, min(config.budget, n_slots)), mx.uint32),
    }
    scores, totals, positions, kept = launch(
        "h2o_evict", _ranked(config, state), outputs, {}, groups=(1, batch * n_heads)
    )
    extras = grow(take(state, kept), config.budget + 1).extras if state.extras else ()
    return H2OState(scores, totals, positions, state.seen, extras), kept


def _in_steps(
    config: H2OConfig,
    state: H2OState,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    sinks: mx.array | None,
    given: Mapping[str, mx.array] | None,
) -> tuple[mx.array, H2OState, mx.array]:
    check_keeps_values(config.scorer)
    shown = visible(state, 1)
    out, mass = attend(q, k, v, scale, config.decay, shown, sinks=sinks)
    state = observe(config, state, gather(config, state, mass, q, k, v, scale, shown, None, sinks, given), 1)
    slots = victims(config, state)
    return out, release(config, state, slots), slots


def _stepped(heads: Heads, dtype: mx.Dtype) -> dict[str, tuple[tuple[int, ...], mx.Dtype]]:
    return {
        "out": (heads.out, dtype),
        "new_scores": (heads.state, mx.float32),
        "new_totals": (heads.state, mx.float32),
        "new_positions": (heads.state, mx.int32),
        "victim": ((*heads.state[:2], 1), mx.uint32),
    }


def _ranked(config: H2OConfig, state: H2OState) -> dict[str, mx.array]:
    return {"scores": state.scores, "totals": state.totals, "positions": state.positions, "seen": state.seen} | {
        "limits": _limits(config)
    }


# Decode asks for the same ones in every layer and step.
@lru_cache(maxsize=64)
def _limits(config: H2OConfig) -> mx.array:
    return mx.array([config.budget, config.n_sink, config.grace, config.n_long], mx.int32)
