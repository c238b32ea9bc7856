"""CurDKV: leverage of keys and values."""

from dataclasses import dataclass, field

import mlx.core as mx

from h2o_core._shapes import Float32
from h2o_core.config import H2OConfig
from h2o_core.evidence import Evidence, seen
from h2o_core.scorer import Scorer
from h2o_core.scoring import scored
from h2o_core.state import H2OState, occupied


@dataclass(frozen=True)
class CurDKV(Scorer):
    """Score a row by its share in the kept keys and in the kept values, so that equal keys part by their values.

        s_c = a_c · b_c,   a_c = |k_c G|² / Σ_j |k_j G|²,   b_c = |v_c G|² / Σ_j |v_j G|²

    The shares stand in for leverage scores, the row norms of the left singular vectors.

    Args:
        rank: Columns of the normal random matrix G, 0 to 1,024; 0 leaves G out. Keys and values have their own.
        combine: ``"product"``, ``"mean"``, ``"key"`` or ``"value"``.
        seed: Of G.

    Source:
        Sengupta et al., CurDKV (arXiv 2509.15038), its approximated leverage scores with a random projection, combined
        as a product. The paper scores the prompt once; here the rows that are kept compete at every call.
    """

    name: str = field(default="curdkv", init=False)
    rank: int = 20
    combine: str = "product"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_range("rank", 0, 1024)
        self._check_range("seed", 0, 2**32 - 1)
        self._check_choice("combine", ("product", "mean", "key", "value"))

    @property
    def needs(self) -> frozenset[str]:
        """Keys, values and a seed."""
        return frozenset({"keys", "values", "random"})

    def observe(
        self, config: H2OConfig, state: H2OState, evidence: Evidence, n_tokens: int, lengths: mx.array | None
    ) -> H2OState:
        """Take the shares."""
        key_seed, value_seed = mx.random.split(mx.random.key(self.seed))
        by_key = self._shares(state, seen(evidence.keys), key_seed)
        by_value = self._shares(state, seen(evidence.values), value_seed)
        combined = {"product": by_key * by_value, "mean": (by_key + by_value) / 2, "key": by_key, "value": by_value}
        return scored(state, combined[self.combine], lengths)

    def _shares(self, state: H2OState, rows: mx.array, key: mx.array) -> Float32[mx.array, "B H C"]:
        rows = rows.astype(mx.float32)
        if self.rank:
            rows = rows @ mx.random.normal((rows.shape[-1], self.rank), key=key)
        squares = mx.where(occupied(state), mx.square(rows).sum(axis=-1), 0.0)
        total = squares.sum(axis=-1, keepdims=True)
        return squares / mx.where(total > 0, total, 1.0)
