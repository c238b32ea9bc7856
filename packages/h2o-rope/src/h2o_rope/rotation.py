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


_SMALLEST_TABLE = 256


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
        # A power of two, so that a cache that grows by a row at a time does not make a table a row.
        n = max(_SMALLEST_TABLE, 1 << (below - 1).bit_length())
        tables = _tables(_content(rotation), rotation.scale, n)
        cos, sin = (table[positions] for table in tables)
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


def _content(rotation: Rotation) -> tuple[float, ...]:
    """The frequencies as numbers: a copy of a rotation is another array, but has the same ones."""
    values = rotation.frequencies.tolist()
    return tuple(values)  # type: ignore[arg-type]


@lru_cache(maxsize=4)
def _tables(frequencies: tuple[float, ...], scale: float, n: int) -> tuple[mx.array, mx.array]:
    """cos and sin of the positions 0 … n − 1, one pair for all layers and copies of a model's caches."""
    rotation = Rotation(mx.array(frequencies, mx.float32), traditional=False, scale=scale)
    tables = _cos_sin(mx.arange(n, dtype=mx.int32), rotation)
    mx.eval(*tables)  # used again by other graphs, maybe on other threads
    return tables
