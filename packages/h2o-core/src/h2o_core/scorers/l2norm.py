"""L2 norm: short keys are attended to."""

from dataclasses import dataclass, field

import mlx.core as mx

from h2o_core.config import H2OConfig
from h2o_core.evidence import Evidence, seen
from h2o_core.scorer import Scorer
from h2o_core.scorers.sums import norms
from h2o_core.scoring import scored
from h2o_core.state import H2OState


@dataclass(frozen=True)
class L2Norm(Scorer):
    """Score a row by its key alone: the longest goes.

        s_c = −|k_c|

    A rotation keeps lengths, so the score of a row never changes.

    Source:
        Devoto et al. (arXiv 2406.11430). The paper leaves some layers whole; here every cache is bounded.
    """

    name: str = field(default="l2norm", init=False)

    @property
    def needs(self) -> frozenset[str]:
        """The keys."""
        return frozenset({"keys"})

    def observe(
        self, config: H2OConfig, state: H2OState, evidence: Evidence, n_tokens: int, lengths: mx.array | None
    ) -> H2OState:
        """Take the lengths."""
        return scored(state, -norms(seen(evidence.keys)), lengths)
