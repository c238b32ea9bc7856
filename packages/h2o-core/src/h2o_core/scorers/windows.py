"""The last queries' rows, kept with the slots, so that a window is the same whatever the calls were."""

import mlx.core as mx

from h2o_core._shapes import Float32, Int32
from h2o_core.scorer import Scorer
from h2o_core.state import H2OState


class Windowed(Scorer):
    """What scorers share that look at the last ``window`` queries' rows."""

    window: int  # 1 to 1,024

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_range("window", 1, 1024)

    @property
    def needs(self) -> frozenset[str]:
        """The last rows."""
        return frozenset({"rows"})

    @property
    def n_rows(self) -> int:
        """The window."""
        return self.window


def slid(
    recent: Float32[mx.array, "B H C W"], rows: Float32[mx.array, "B H M C"], lengths: Int32[mx.array, " B"] | None
) -> Float32[mx.array, "B H C W"]:
    """Put a call's rows behind those before it, and keep the last W.

    Args:
        recent: Rows of queries before the call, oldest first; 0 for a token that came later.
        rows: Of the last M queries of the call, oldest first.
        lengths: Real tokens of each sequence: of fewer than M, only the last so many rows are real.
    """
    size, new = recent.shape[-1], rows.shape[2]
    both = mx.concatenate([recent, rows.swapaxes(-1, -2)], axis=-1)
    if lengths is None:
        return both[..., new:]
    # Counted from the end: the real new rows, then the old ones.
    back, real = mx.arange(size - 1, -1, -1), mx.minimum(lengths, new)[:, None]
    at = mx.where(back < real, size + new - 1 - back, size - 1 - back + real)
    return mx.take_along_axis(both, mx.broadcast_to(at[:, None, None], recent.shape), axis=-1)


def own_positions(state: H2OState, n_queries: int) -> Int32[mx.array, "B M"]:
    """Positions of the last queries that have been seen."""
    return state.seen[:, None] - n_queries + mx.arange(n_queries, dtype=mx.int32)


def arrived(state: H2OState, n_tokens: int, lengths: Int32[mx.array, " B"] | None) -> mx.array:
    """Say which rows came in this call, bool [B, H, C]."""
    real = n_tokens if lengths is None else lengths[:, None, None]
    return state.positions >= state.seen[:, None, None] - real
