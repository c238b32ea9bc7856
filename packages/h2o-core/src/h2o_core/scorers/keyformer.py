"""Keyformer: noise on the logits, for what rises late."""

from dataclasses import dataclass, field

import mlx.core as mx

from h2o_core._shapes import Float32, Int32
from h2o_core.config import H2OConfig
from h2o_core.evidence import Evidence, seen
from h2o_core.scorer import Scorer
from h2o_core.scorers.noise import uniform
from h2o_core.scoring import accumulated
from h2o_core.state import H2OState


@dataclass(frozen=True)
class Keyformer(Scorer):
    """Score as H2O does, by the mass of probabilities with Gumbel noise ζ on their logits and a temperature τ.

        p' = softmax((log p + ζ) / τ),   ζ = −log(−log u)

    Softmax forgets what is added to all logits, so log p does for them. A token whose probability is 0 in float32 gets
    none. ``decay`` and ``long_share`` apply as for H2O.

    Args:
        tau: The temperature at position 0, 0 to 100. 0 leaves noise and temperature out: that is H2O.
        tau_end: The temperature from position ``span`` on, at least ``tau``.
        span: Positions over which the temperature rises, at least 1.
        seed: Of the noise, which is drawn anew for each query head, query and key.

    Source:
        Adnan et al., Keyformer (arXiv 2403.09054), section 3, temperature from 1 to 2. The paper's rises with the
        tokens generated, whose number it must know; ours with the query's position, the prompt's too.
    """

    name: str = field(default="keyformer", init=False)
    tau: float = 1.0
    tau_end: float = 2.0
    span: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_range("tau", 0.0, 100.0)
        self._check_range("tau_end", self.tau, 100.0)
        self._check_range("span", 1, 2**30)
        self._check_range("seed", 0, 2**32 - 1)

    @property
    def needs(self) -> frozenset[str]:
        """The mass, and a seed."""
        return frozenset({"mass", "random"} if self.tau else {"mass"})

    @property
    def sums(self) -> bool:
        """It does."""
        return True

    @property
    def disturbs(self) -> bool:
        """Yes, unless it is H2O."""
        return self.tau > 0

    def observe(
        self, config: H2OConfig, state: H2OState, evidence: Evidence, n_tokens: int, lengths: mx.array | None
    ) -> H2OState:
        """Add the mass up."""
        return accumulated(config, state, seen(evidence.mass), n_tokens, lengths)

    def disturbed(
        self,
        p: Float32[mx.array, "B H G n C"],
        queries: Int32[mx.array, "B n"],
        positions: Int32[mx.array, "B H C"],
    ) -> Float32[mx.array, "B H G n C"]:
        """Add noise and divide by the temperature; a row's sum stays as it is."""
        n_heads, group = p.shape[1:3]
        head = mx.arange(n_heads * group).reshape(n_heads, group, 1, 1)
        query = queries[:, None, None, :, None]
        noise = -mx.log(-mx.log(uniform(self.seed, head, query, positions[:, :, None, None])))
        tau = self.tau + (self.tau_end - self.tau) * mx.minimum(query.astype(mx.float32) / self.span, 1.0)
        shown = p > 0
        logits = mx.where(shown, (mx.log(mx.where(shown, p, 1.0)) + noise) / tau, -mx.inf)
        # A row without any mass has no softmax.
        changed = mx.softmax(mx.where(shown.any(axis=-1, keepdims=True), logits, 0.0), axis=-1)
        return changed * p.sum(axis=-1, keepdims=True)
