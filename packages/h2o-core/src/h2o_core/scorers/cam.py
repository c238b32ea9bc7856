"""CaM: what goes leaves its value to those that stay."""

from dataclasses import dataclass, field

import mlx.core as mx

from h2o_core._shapes import Float32, Integer
from h2o_core.config import H2OConfig
from h2o_core.evidence import Evidence, seen
from h2o_core.scorer import Scorer
from h2o_core.scorers.noise import uniform
from h2o_core.scoring import accumulated
from h2o_core.state import EMPTY, H2OState


@dataclass(frozen=True)
class CaM(Scorer):
    """Score as H2O does; the victim's value goes, by chance, into those of the ``targets`` kept rows that follow it.

        v_j ← v_j + b · v_victim / m,   b ~ Bernoulli(min(1, s_victim / mean_j s_j))

    over the m = min(targets, rows there are) next positions. Who goes, and when, is H2O's to say: ``merge="drop"`` is
    H2O. Only a call of one token merges; what a longer call lets go is dropped, as the paper's decoding has it.

    Args:
        merge: ``"value"``, or ``"drop"`` to merge nothing.
        targets: Rows that a value is shared among, 1 to 1,024.
        seed: Of the chance, which depends on head and position.

    Source:
        Zhang et al., CaM (ICML 2024), algorithm 1 and equation 14; 32 targets as in the authors' program,
        github.com/zyxxmu/cam. Victims there are another method's to choose, often the row that leaves the recent one,
        and masses are not decayed; here both are H2O's.
    """

    name: str = field(default="cam", init=False)
    merge: str = "value"
    targets: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("merge", ("value", "drop"))
        self._check_range("targets", 1, 1024)
        self._check_range("seed", 0, 2**32 - 1)

    @property
    def needs(self) -> frozenset[str]:
        """The mass, and a seed."""
        return frozenset({"mass", "random"} if self.merges else {"mass"})

    @property
    def sums(self) -> bool:
        """It does."""
        return True

    @property
    def merges(self) -> bool:
        """Yes, unless it is H2O."""
        return self.merge == "value"

    def observe(
        self, config: H2OConfig, state: H2OState, evidence: Evidence, n_tokens: int, lengths: mx.array | None
    ) -> H2OState:
        """Add the mass up."""
        return accumulated(config, state, seen(evidence.mass), n_tokens, lengths)

    def shares(self, state: H2OState, victim: Integer[mx.array, "B H 1"]) -> Float32[mx.array, "B H C"]:
        """Share the victim's value among the rows that follow it."""
        gone = mx.take_along_axis(state.positions, victim, axis=-1)
        later = (state.positions > gone) & (gone != EMPTY)
        # Places by position among those that follow.
        ordered = mx.argsort(mx.argsort(mx.where(later, state.positions, 2**31 - 1), axis=-1), axis=-1)
        targets = later & (ordered < self.targets)
        count = mx.maximum(targets.sum(axis=-1, keepdims=True), 1)
        mean = mx.where(targets, state.scores, 0.0).sum(axis=-1, keepdims=True) / count
        score = mx.take_along_axis(state.scores, victim, axis=-1)
        head = mx.arange(state.positions.shape[1])[:, None]
        # Not a quotient: a mean of 0 would make it no number.
        happens = uniform(self.seed, head, gone) * mean < score
        return mx.where(targets & happens, 1.0 / count, 0.0)
