"""H2O: the attention that a row has received."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from h2o_core.scorer import Scorer

if TYPE_CHECKING:
    import mlx.core as mx

    from h2o_core.config import H2OConfig
    from h2o_core.evidence import Evidence
    from h2o_core.state import H2OState


@dataclass(frozen=True)
class H2O(Scorer):
    """Score a row by the sum of the attention it has received, each token's worth decayed by ``decay``.

        s ← s · decay^n + Σ_i decay^(n−1−i) p_i        with decay 1 the paper's sum

    A sum favours what came early, which has had more queries. Over its age, it is a rate; times |v|, the weight of
    what the attention brought.

    Args:
        by_age: Divide by the queries that have seen the row, decayed likewise: Σ decay^j, j from 0 to its age.
        by_value: Multiply each probability by the length of the row's value.

    Source:
        Zhang et al., H2O (arXiv 2306.14048), section 4. ``by_value`` as in VATP (Guo et al., arXiv 2406.12335), with
        the L2 norm for its L1; ``by_age`` is the mean of RoCo (Ren and Zhu, arXiv 2402.06262), here of decayed sums.
    """

    name: str = field(default="h2o", init=False)
    by_age: bool = False
    by_value: bool = False

    @property
    def needs(self) -> frozenset[str]:
        """The mass, and values where they count."""
        return frozenset({"mass", "values"} if self.by_value else {"mass"})

    @property
    def extras(self) -> tuple[tuple[int, ...], ...]:
        """The sum itself, where the score is a mean."""
        return ((),) if self.by_age else ()

    @property
    def sums(self) -> bool:
        """It does."""
        return True

    def observe(
        self,
        config: "H2OConfig",
        state: "H2OState",
        evidence: "Evidence",
        n_tokens: int,
        lengths: "mx.array | None",
    ) -> "H2OState":
        """Add the mass up."""
        # Here: a configuration by default loads no mlx.
        from h2o_core.scorers.sums import added, divided

        if not self.by_age:
            return added(config, state, evidence, n_tokens, lengths, self.by_value)
        sums = added(config, state._replace(scores=state.extras[0]), evidence, n_tokens, lengths, self.by_value)
        return sums._replace(scores=divided(config.decay, sums), extras=(sums.scores,))
