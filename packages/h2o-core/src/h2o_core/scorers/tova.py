"""TOVA: the attention of the last query."""

from dataclasses import dataclass, field

import mlx.core as mx

from h2o_core.config import H2OConfig
from h2o_core.evidence import Evidence, seen
from h2o_core.scorer import Scorer
from h2o_core.scoring import scored
from h2o_core.state import H2OState


@dataclass(frozen=True)
class Tova(Scorer):
    """Score a row by the attention that the newest query gave it; nothing is remembered.

        s_c = mean_g p[g, last, c]

    Source:
        Oren et al., TOVA (arXiv 2401.06104). The paper averages over all heads of a layer, which then
        drop the same token; here each KV head has its own mean.
    """

    name: str = field(default="tova", init=False)

    @property
    def needs(self) -> frozenset[str]:
        """The last row."""
        return frozenset({"rows"})

    @property
    def n_rows(self) -> int:
        """One."""
        return 1

    def observe(
        self, config: H2OConfig, state: H2OState, evidence: Evidence, n_tokens: int, lengths: mx.array | None
    ) -> H2OState:
        """Take the row."""
        return scored(state, seen(evidence.rows)[:, :, -1], lengths)
