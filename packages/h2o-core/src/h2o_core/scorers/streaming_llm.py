"""StreamingLLM: attention sinks and the newest tokens."""

from dataclasses import dataclass, field

import mlx.core as mx

from h2o_core.config import H2OConfig
from h2o_core.evidence import Evidence
from h2o_core.scorer import Scorer
from h2o_core.scoring import scored
from h2o_core.state import H2OState


@dataclass(frozen=True)
class StreamingLLM(Scorer):
    """Score a row by its position: the oldest goes, but for the ``n_sink`` first.

    Source:
        Xiao et al., StreamingLLM (arXiv 2309.17453), section 3.2. That its keys sit at their places in the cache is
        ``positions="rolling"``.
    """

    name: str = field(default="streaming_llm", init=False)

    def observe(
        self, config: H2OConfig, state: H2OState, evidence: Evidence, n_tokens: int, lengths: mx.array | None
    ) -> H2OState:
        """Take the positions."""
        return scored(state, recency(state), lengths)


def recency(state: H2OState) -> mx.array:
    """Positions as scores. Above 2^24 neighbours tie as float32, and then the lower goes all the same."""
    return state.positions.astype(mx.float32)
