"""Q-Filters: where queries point."""

from dataclasses import dataclass, field

import mlx.core as mx

from h2o_core._shapes import Float, Float32
from h2o_core.config import H2OConfig
from h2o_core.evidence import Evidence, seen
from h2o_core.scorer import Scorer
from h2o_core.scoring import scored
from h2o_core.state import H2OState


@dataclass(frozen=True)
class QFilters(Scorer):
    """Score a row by its key's share in the one direction that queries have in common.

        s_c = k_c · u

    ``filters`` are the caller's: the directions u, float32 [H, D], turned so that queries have a positive share.
    ``filters_from`` estimates them from queries.

    Source:
        Godey et al., Q-Filters (arXiv 2503.02812), section 3.
    """

    name: str = field(default="qfilters", init=False)

    @property
    def needs(self) -> frozenset[str]:
        """The keys, and the caller's filters."""
        return frozenset({"keys", "filters"})

    def observe(
        self, config: H2OConfig, state: H2OState, evidence: Evidence, n_tokens: int, lengths: mx.array | None
    ) -> H2OState:
        """Project."""
        keys, filters = seen(evidence.keys).astype(mx.float32), seen(evidence.given)["filters"].astype(mx.float32)
        if filters.shape != (keys.shape[1], keys.shape[3]):
            raise ValueError(f"filters must be [H, D] = [{keys.shape[1]}, {keys.shape[3]}], got shape {filters.shape}")
        return scored(state, (keys @ filters[:, :, None])[..., 0], lengths)


def filters_from(queries: Float[mx.array, "*b Hq T D"], n_kv_heads: int) -> Float32[mx.array, "H D"]:
    """Estimate filters: the first right singular vector of each query head, turned to its queries, the group's mean.

    Args:
        queries: As rotated, of a text long enough to be typical; a batch counts as one.
        n_kv_heads: H.

    Raises:
        ValueError: H does not divide the query heads.

    Source:
        Q-Filters, section 3: calibration.
    """
    *_, n_heads, n_steps, width = queries.shape
    if n_heads % n_kv_heads:
        raise ValueError(f"n_kv_heads must divide the {n_heads} query heads, got {n_kv_heads}")
    q = queries.astype(mx.float32).reshape(-1, n_heads, n_steps, width).swapaxes(0, 1).flatten(1, 2)
    # Right singular vectors of q are eigenvectors of q'q, which is small.
    _, vectors = mx.linalg.eigh(q.swapaxes(-1, -2) @ q, stream=mx.cpu)
    first = vectors[..., -1]
    # A singular vector has no sign of its own; queries have.
    turned = mx.where((q.mean(axis=1) * first).sum(axis=-1, keepdims=True) < 0, -first, first)
    return mx.unflatten(turned, 0, (n_kv_heads, -1)).mean(axis=1)
