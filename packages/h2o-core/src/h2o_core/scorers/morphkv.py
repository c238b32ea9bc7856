"""MorphKV: the attention of the last queries."""

from dataclasses import dataclass, field

import mlx.core as mx

from h2o_core.config import H2OConfig
from h2o_core.evidence import Evidence, seen
from h2o_core.scorers.windows import Windowed, slid
from h2o_core.scoring import scored
from h2o_core.state import H2OState


@dataclass(frozen=True)
class MorphKV(Windowed):
    """Score a row by what the last ``window`` queries gave it, so that an old heavy hitter is soon forgotten.

        s_c = Σ_w mean_g p[g, w, c]        or max_w with fusion "max"

    Args:
        window: Queries that count, 1 to 1,024.
        fusion: ``"sum"`` or ``"max"``.

    Source:
        Ghadia et al., MorphKV (arXiv 2503.00979), section 3: fused attention of the recent window, whose tokens are
        kept too (``grace``).
    """

    name: str = field(default="morphkv", init=False)
    window: int = 32
    fusion: str = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("fusion", ("sum", "max"))

    @property
    def extras(self) -> tuple[tuple[int, ...], ...]:
        """The window's rows."""
        return ((self.window,),)

    def observe(
        self, config: H2OConfig, state: H2OState, evidence: Evidence, n_tokens: int, lengths: mx.array | None
    ) -> H2OState:
        """Move the window on and fuse it."""
        recent = slid(state.extras[0], seen(evidence.rows), lengths)
        scores = recent.sum(axis=-1) if self.fusion == "sum" else recent.max(axis=-1)
        return scored(state, scores, lengths, (recent,))
