"""The arithmetic of scorers that sum mass up."""

import mlx.core as mx

from h2o_core._shapes import Float32
from h2o_core.attention import Mass
from h2o_core.config import H2OConfig
from h2o_core.evidence import Evidence, seen
from h2o_core.scoring import accumulated
from h2o_core.state import H2OState, occupied


def added(
    config: H2OConfig,
    state: H2OState,
    evidence: Evidence,
    n_tokens: int,
    lengths: mx.array | None,
    by_value: bool = False,
) -> H2OState:
    """Add the mass to the scores, each row's times the length of its value where that counts."""
    mass = seen(evidence.mass)
    if by_value:
        weight = norms(seen(evidence.values))
        mass = Mass(mass.decayed * weight, mass.total * weight)
    return accumulated(config, state, mass, n_tokens, lengths)


def divided(decay: float, state: H2OState) -> Float32[mx.array, "B H C"]:
    """The score over what it would be if every query that saw the row had given it all: Σ decay^j, j ≤ age."""
    age = (state.seen[:, None, None] - state.positions).astype(mx.float32)
    most = age if decay == 1 else (1 - mx.power(mx.array(decay, mx.float32), age)) / (1 - decay)
    return mx.where(occupied(state), state.scores / most, 0.0)


def norms(rows: mx.array) -> Float32[mx.array, "B H C"]:
    """Length of each row of keys or values."""
    return mx.sqrt(mx.square(rows.astype(mx.float32)).sum(axis=-1))
