"""SnapKV: what the end of the prompt looked at."""

from dataclasses import dataclass, field

import mlx.core as mx

from h2o_core._shapes import Float32
from h2o_core.config import H2OConfig
from h2o_core.evidence import Evidence, seen
from h2o_core.scorers.windows import Windowed, slid
from h2o_core.scoring import scored
from h2o_core.state import H2OState, occupied


@dataclass(frozen=True)
class SnapKV(Windowed):
    """Score the prompt's rows once, at its end, by what its last ``window`` queries gave them and their neighbours.

        s_c = pool over neighbours of c of mean_w mean_g p[g, w, c]

    The prompt ends with a sequence's first call of one token. From then on scores stay; the window's own tokens and
    later ones score by position, above all others: so the prompt's lowest rows make room for what is new, and the
    budget holds. (The paper keeps every token that is generated.) A call of several tokens before that, if it evicts,
    is scored as if the prompt ended with it.

    Args:
        window: The last queries that count, 1 to 1,024.
        pool: Rows that a pool spans, odd, 1 to 63; neighbours are the kept rows before and behind.
        pooling: ``"mean"`` or ``"max"``.

    Source:
        Li et al., SnapKV (arXiv 2404.14469), section 4; window, pool and mean are the defaults of the authors' program,
        github.com/FasterDecoding/SnapKV. It votes for each query head; ours share a KV head's mean.
    """

    name: str = field(default="snapkv", init=False)
    window: int = 32
    pool: int = 5
    pooling: str = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_range("pool", 1, 63)
        if self.pool % 2 == 0:
            raise ValueError(f"pool of scorer 'snapkv' must be odd, got {self.pool}: as many rows before as behind")
        self._check_choice("pooling", ("mean", "max"))

    @property
    def extras(self) -> tuple[tuple[int, ...], ...]:
        """The window's rows, and 1 where the score is for good."""
        return ((self.window,), ())

    @property
    def once(self) -> bool:
        """It is scored at its end."""
        return True

    def observe(
        self, config: H2OConfig, state: H2OState, evidence: Evidence, n_tokens: int, lengths: mx.array | None
    ) -> H2OState:
        """Score the prompt, or what came after it."""
        recent, final = state.extras
        recent = slid(recent, seen(evidence.rows), lengths)
        over = final.max(axis=-1, keepdims=True) > 0
        newest = state.seen[:, None, None] - 1
        late = over | (state.positions > newest - self.window)
        scores = mx.where(late, ranked_last(state), self._pooled(state, recent.mean(axis=-1)))
        scores = mx.where(final > 0, state.scores, scores)
        ends = n_tokens == 1 if lengths is None else (lengths == 1)[:, None, None]
        final = mx.where(occupied(state) & (over | ends), 1.0, 0.0)
        return scored(state, scores, lengths, (recent, final))

    def _pooled(self, state: H2OState, mass: Float32[mx.array, "B H C"]) -> Float32[mx.array, "B H C"]:
        """Pool over neighbours by position, wherever their slots are; beyond the ends is nothing."""
        # Read as unsigned, −1 is the largest: empty slots, without mass, come last.
        order = mx.argsort(state.positions.view(mx.uint32), axis=-1)
        n, side = mass.shape[-1], self.pool // 2
        padded = mx.pad(mx.take_along_axis(mass, order, axis=-1), [(0, 0), (0, 0), (side, side)])
        near = mx.stack([padded[..., i : i + n] for i in range(self.pool)])
        pooled = near.mean(axis=0) if self.pooling == "mean" else near.max(axis=0)
        return mx.take_along_axis(pooled, mx.argsort(order, axis=-1), axis=-1)


def ranked_last(state: H2OState) -> Float32[mx.array, "B H C"]:
    """Positions as scores that no mean of attention reaches."""
    return state.positions.astype(mx.float32) + 2.0
