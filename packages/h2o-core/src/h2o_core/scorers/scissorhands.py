"""Scissorhands: how often a row was below the average."""

from dataclasses import dataclass, field

import mlx.core as mx

from h2o_core.config import H2OConfig
from h2o_core.evidence import Evidence, seen
from h2o_core.scorers.windows import Windowed, own_positions, slid
from h2o_core.scoring import scored
from h2o_core.state import H2OState, occupied


@dataclass(frozen=True)
class Scissorhands(Windowed):
    """Score a row by how seldom it got less than an even share: what mattered once will matter again.

        s_c = −Σ_w [mean_g p[g, w, c] < 1 / n_w]

    with n_w the rows that query w saw. Many rows tie, and then the lower position goes.

    Args:
        window: Queries that count, 1 to 1,024. The paper's is 400; each slot holds so many numbers.

    Source:
        Liu et al., Scissorhands (arXiv 2305.17118), algorithm 2. It drops several tokens at a time when
        its buffer is full; ours one, as they come.
    """

    name: str = field(default="scissorhands", init=False)
    window: int = 64

    @property
    def extras(self) -> tuple[tuple[int, ...], ...]:
        """Whether each query of the window gave less than an even share."""
        return ((self.window,),)

    def observe(
        self, config: H2OConfig, state: H2OState, evidence: Evidence, n_tokens: int, lengths: mx.array | None
    ) -> H2OState:
        """Move the window on and count it."""
        rows = seen(evidence.rows)
        query = own_positions(state, rows.shape[2])[:, None, :, None]
        shown = occupied(state)[:, :, None] & (state.positions[:, :, None] <= query)
        even = 1.0 / mx.maximum(shown.sum(axis=-1, keepdims=True), 1)
        below = mx.where(shown & (rows < even), 1.0, 0.0)
        recent = slid(state.extras[0], below, lengths)
        return scored(state, -recent.sum(axis=-1), lengths, (recent,))
