"""Expected attention: what queries to come would give on average."""

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
class ExpectedAttention(Scorer):
    """Score a row by the attention that it can expect of queries whose mean μ and covariance Σ are known.

        z_c = exp(μ·k_c + k_c Σ k_c / 2),   s_c = (mean_g z_gc / Σ_j z_gj + epsilon) · |v_c|

    ``query_mean`` [Hq, D] and ``query_cov`` [Hq, D, D] are the caller's: of queries times the factor on the logits, at
    the positions where they will be. ``statistics_from`` estimates them from queries as they were.

    Args:
        epsilon: Added before values weigh in, at least 0: then a row without attention counts for its value.

    Source:
        Devoto et al., Expected Attention (arXiv 2510.00636): the closed form for a normal distribution of queries.
        The paper weighs a value after the output projection, which a cache does not see; here it is the value itself.
    """

    name: str = field(default="expected_attention", init=False)
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_range("epsilon", 0.0, 1.0)

    @property
    def needs(self) -> frozenset[str]:
        """Keys, values, and the caller's statistics."""
        return frozenset({"keys", "values", "query_mean", "query_cov"})

    def observe(
        self, config: H2OConfig, state: H2OState, evidence: Evidence, n_tokens: int, lengths: mx.array | None
    ) -> H2OState:
        """Expect."""
        keys, given = seen(evidence.keys).astype(mx.float32), seen(evidence.given)
        n_heads, width = keys.shape[1], keys.shape[3]
        mean, cov = (given[name].astype(mx.float32) for name in ("query_mean", "query_cov"))
        if mean.shape[0] % n_heads or mean.shape != (len(mean), width) or cov.shape != (len(mean), width, width):
            raise ValueError(
                f"query_mean and query_cov must be [Hq, D] and [Hq, D, D] with Hq a multiple of {n_heads} and "
                f"D={width}, got shapes {mean.shape} and {cov.shape}"
            )
        k = keys[:, :, None]  # [B, H, G, C, D]
        mean, cov = mx.unflatten(mean, 0, (n_heads, -1)), mx.unflatten(cov, 0, (n_heads, -1))
        logits = (k @ mean[..., None])[..., 0] + ((k @ cov) * k).sum(axis=-1) / 2
        p = mx.softmax(mx.where(occupied(state)[:, :, None], logits, -mx.inf), axis=-1).mean(axis=2)
        return scored(state, (p + self.epsilon) * norms(seen(evidence.values)), lengths)


def statistics_from(queries: Float[mx.array, "*b Hq T D"], scale: float) -> dict[str, Float32[mx.array, "Hq ..."]]:
    """Estimate ``query_mean`` and ``query_cov`` from queries as they were rotated; a batch counts as one.

    Rotations to come are not averaged over, for which one would have to know the model's.

    Args:
        queries: Of a text long enough to be typical.
        scale: Factor on the logits.
    """
    n_heads, n_steps, width = queries.shape[-3:]
    q = queries.astype(mx.float32).reshape(-1, n_heads, n_steps, width).swapaxes(0, 1).flatten(1, 2) * scale
    mean = q.mean(axis=1)
    spread = q - mean[:, None]
    return {"query_mean": mean, "query_cov": spread.swapaxes(-1, -2) @ spread / q.shape[1]}
