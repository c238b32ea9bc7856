"""KVzip: what the model needs to say its context again."""

from dataclasses import dataclass, field

import mlx.core as mx

from h2o_core.config import H2OConfig
from h2o_core.evidence import Evidence, seen
from h2o_core.scorer import Scorer
from h2o_core.scorers.snapkv import ranked_last
from h2o_core.scorers.windows import arrived
from h2o_core.scoring import scored
from h2o_core.state import H2OState


@dataclass(frozen=True)
class KVzip(Scorer):
    """Score the prompt's rows by how much a pass that repeats the context relies on each.

    The pass is the caller's: ``reconstruction`` is, for each token of the context, the largest attention that it
    received while the model repeated the context, float32 [H, T] or [B, H, T]. A row takes its score when it arrives,
    and keeps it. Tokens from T on score by position, above all others, so the context's lowest rows make room for them.

    Source:
        Kim et al., KVzip (arXiv 2505.23416), section 3. It shares one budget among all heads and layers; here each
        has its own.
    """

    name: str = field(default="kvzip", init=False)

    @property
    def needs(self) -> frozenset[str]:
        """The caller's pass."""
        return frozenset({"reconstruction"})

    def observe(
        self, config: H2OConfig, state: H2OState, evidence: Evidence, n_tokens: int, lengths: mx.array | None
    ) -> H2OState:
        """Look the new rows up."""
        mass = seen(evidence.given)["reconstruction"].astype(mx.float32)
        n_known, shape = mass.shape[-1], state.positions.shape
        if mass.ndim not in (2, 3) or mass.shape[-2] != shape[1] or (mass.ndim == 3 and mass.shape[0] != shape[0]):
            raise ValueError(
                f"reconstruction must be [H, T] or [B, H, T] with B={shape[0]} and H={shape[1]}, got shape {mass.shape}"
            )
        scores = ranked_last(state)
        if n_known:
            at = mx.clip(state.positions, 0, n_known - 1)
            known = mx.take_along_axis(mx.broadcast_to(mass, (*shape[:2], n_known)), at, axis=-1)
            scores = mx.where(state.positions < n_known, known, scores)
        return scored(state, mx.where(arrived(state, n_tokens, lengths), scores, state.scores), lengths)
