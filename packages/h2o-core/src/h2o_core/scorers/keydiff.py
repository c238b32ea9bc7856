"""KeyDiff: keys unlike the others."""

from dataclasses import dataclass, field

import mlx.core as mx

from h2o_core._shapes import Float, Float32
from h2o_core.config import H2OConfig
from h2o_core.evidence import Evidence, seen
from h2o_core.scorer import Scorer
from h2o_core.scorers.sums import norms
from h2o_core.scoring import scored
from h2o_core.state import H2OState, occupied


@dataclass(frozen=True)
class KeyDiff(Scorer):
    """Score a row by how little its key is like the mean of the keys that are kept.

        s_c = −cos(k_c, mean_j k_j / |k_j|)

    Source:
        Park et al., KeyDiff (arXiv 2504.15364), section 3. The mean is of the keys that are kept, as in its blocks.
    """

    name: str = field(default="keydiff", init=False)

    @property
    def needs(self) -> frozenset[str]:
        """The keys."""
        return frozenset({"keys"})

    def observe(
        self, config: H2OConfig, state: H2OState, evidence: Evidence, n_tokens: int, lengths: mx.array | None
    ) -> H2OState:
        """Compare with the mean."""
        directions = _directions(seen(evidence.keys))
        held = occupied(state)[..., None]
        anchor = mx.where(held, directions, 0.0).sum(axis=2, keepdims=True) / mx.maximum(held.sum(axis=2), 1)[..., None]
        return scored(state, -(directions * _directions(anchor)).sum(axis=-1), lengths)


def _directions(rows: Float[mx.array, "B H C D"]) -> Float32[mx.array, "B H C D"]:
    """Rows of length 1; those of length 0 stay so."""
    return rows.astype(mx.float32) / mx.maximum(norms(rows), 1e-12)[..., None]
