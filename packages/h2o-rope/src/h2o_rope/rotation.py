"""Rotate rows at arbitrary positions, undo it, and move rows from one position to another."""

from typing import NamedTuple

import mlx.core as mx

from h2o_rope._shapes import Float, Float32, Int32


class Rotation(NamedTuple):
    """What a RoPE module does to a row, without the module.

    A pair of numbers at index i turns by the angle ``position · frequencies[i]``.
    """

    frequencies: Float32[mx.array, " R"]  # radians per position; the first 2R dims of a row are rotated
    traditional: bool  # pairs are (2i, 2i+1) if True, (i, i+R) if False


def rotate(
    x: Float[mx.array, "B H n D"], positions: Int32[mx.array, "..."], rotation: Rotation
) -> Float[mx.array, "B H n D"]:
    """Rotate each row to its position.

        (a, b) → (a cos θ − b sin θ, a sin θ + b cos θ),  θ = position · frequency

    Args:
        x: Rows. Dims behind the rotated ones are left alone.
        positions: Position of each row, of shape [B, H, n] or one that broadcasts to it.
        rotation: From ``rotation_of``.

    Returns:
        Rotated rows in x's dtype; angles and products are float32 whatever it is.

    Source:
        Su et al., RoFormer (arXiv 2104.09864), section 3.2.

    >>> quarter = Rotation(mx.array([mx.pi / 2]), traditional=False)
    >>> mx.abs(rotate(mx.array([[[[1.0, 0.0]]]]), mx.array([[[1]]], mx.int32), quarter)).round(3).tolist()
    [[[[0.0, 1.0]]]]
    """
    angle = positions[..., None].astype(mx.float32) * rotation.frequencies
    cos, sin = mx.cos(angle), mx.sin(angle)
    half = rotation.frequencies.shape[0]
    turned, rest = x[..., : 2 * half].astype(mx.float32), x[..., 2 * half :]
    if rotation.traditional:
        a, b = turned[..., ::2], turned[..., 1::2]
    else:
        a, b = turned[..., :half], turned[..., half:]
    pair = [a * cos - b * sin, a * sin + b * cos]
    if rotation.traditional:
        turned = mx.stack(pair, axis=-1).reshape(turned.shape)
    else:
        turned = mx.concatenate(pair, axis=-1)
    return mx.concatenate([turned.astype(x.dtype), rest], axis=-1)


def derotate(
    x: Float[mx.array, "B H n D"], positions: Int32[mx.array, "..."], rotation: Rotation
) -> Float[mx.array, "B H n D"]:
    """Undo ``rotate``: the rows as they were before they were rotated to ``positions``."""
    return rotate(x, -positions, rotation)


def rerotate(
    x: Float[mx.array, "B H n D"],
    old: Int32[mx.array, "..."],
    new: Int32[mx.array, "..."],
    rotation: Rotation,
) -> Float[mx.array, "B H n D"]:
    """Move rows from position ``old`` to position ``new``, in one rotation by the difference."""
    return rotate(x, new - old, rotation)
