"""What a rotation is, and its arithmetic on float32 rows. Checks nothing and knows no module: see ``moves``."""

from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from h2o_rope._shapes import Float32, Int32


class Rotation(NamedTuple):
    """What a RoPE module does to a row, without the module.

    A pair of numbers at index i is multiplied by ``factor`` and turned by the angle
    ``(position · scale) · frequencies[i]``, in radians.
    """

    frequencies: Float32[mx.array, " R"]  # radians per position; the first 2R dims of a row are rotated
    traditional: bool  # pairs are (2i, 2i+1) if True, (i, i+R) if False
    factor: float = 1.0  # yarn's mscale, longrope's scale: on the rotated dims, whatever the position
    scale: float = 1.0  # linear scaling; apart from the frequencies, for mlx rounds position · scale first


_TABLE_STEP = 256


class _Same:
    """A rotation that equals itself alone, so that tables can be remembered by it; arrays have no such equality."""

    def __init__(self, rotation: Rotation) -> None:
        self.rotation = rotation
        self._identity = (id(rotation.frequencies), *rotation[1:])

    def __hash__(self) -> int:
        return hash(self._identity)

    def __eq__(self, other: object) -> bool:
        # Both hold their array, so neither id can have been used again.
        return isinstance(other, _Same) and self._identity == other._identity


def turn(
    rows: Float32[mx.array, "*rows W"],
    positions: Int32[mx.array, "..."],
    rotation: Rotation,
    back: bool = False,
    below: int | None = None,
) -> Float32[mx.array, "*rows W"]:
    """Turn rows of W = 2R numbers by the angles of their positions, or back by the same angles.

        (a, b) → (a cos θ − b sin θ, a sin θ + b cos θ),  θ = (position · scale) · frequency

    All in float32 and in the order of ``mx.fast.rope``, so that both round an angle alike: at position
    131,072 an angle is known to 0.008 radians only, and another order would be off by as much.

    Args:
        rows: Rows of the rotated dims alone.
        positions: Position of each row, of shape [*rows] or one that broadcasts to it.
        rotation: Its ``factor`` is not applied.
        back: True undoes the turn: cos and sin are the same numbers, sin with the other sign.
        below: If given, all positions are in [0, below), and each one's angles are made once and looked up:
            the same numbers, for a fraction of the time where many rows share few positions.

    Returns:
        Turned rows.

    Source:
        Su et al., RoFormer (arXiv 2104.09864), section 3.2.
    """
    if below is None:
        cos, sin = _cos_sin(positions, rotation)
    else:
        # In steps, so that a cache that grows by a row at a time does not make a table a row.
        cos, sin = (table[positions] for table in _table(_Same(rotation), -(-below // _TABLE_STEP) * _TABLE_STEP))
    if back:
        sin = -sin
    if rotation.traditional:
        a, b = rows[..., ::2], rows[..., 1::2]
        return mx.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(rows.shape)
    a, b = mx.split(rows, 2, axis=-1)
    return mx.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def _cos_sin(positions: Int32[mx.array, "..."], rotation: Rotation) -> tuple[mx.array, mx.array]:
    angle = (positions.astype(mx.float32) * rotation.scale)[..., None] * rotation.frequencies
    return mx.cos(angle), mx.sin(angle)


@lru_cache(maxsize=4)
def _table(same: _Same, n: int) -> tuple[mx.array, mx.array]:
    """cos and sin of the positions 0 … n − 1. The layers of a model share one rotation, and so one table."""
    tables = _cos_sin(mx.arange(n, dtype=mx.int32), same.rotation)
    mx.eval(*tables)  # used again by other graphs, maybe on other threads
    return tables
