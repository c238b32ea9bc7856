"""Rotate rows at arbitrary positions, undo it, and move rows from one position to another.

The public doors: arguments are checked here, once; the arithmetic is rotation's.
"""

import mlx.core as mx
import mlx.nn as nn

from h2o_rope._shapes import Float, Int32
from h2o_rope.families import rotation_of
from h2o_rope.rotation import Rotation, turn


def rotate(
    x: Float[mx.array, "B H n D"],
    positions: Int32[mx.array, "..."],
    rope: Rotation | nn.Module,
    below: int | None = None,
) -> Float[mx.array, "B H n D"]:
    """Rotate each row to its position, as ``rope(x, offset)`` does for consecutive ones.

        (a, b) → factor · (a cos θ − b sin θ, a sin θ + b cos θ),  θ = (position · scale) · frequency

    Args:
        x: Unrotated rows. Dims behind the rotated ones are left alone.
        positions: Position of each row in tokens, of shape [B, H, n] or one that broadcasts to it. Up to
            2^24; from there float32 can't tell neighbours apart, here and in mlx.
        rope: A model's RoPE module, or the ``Rotation`` that ``rotation_of`` made from it.
        below: A bound that the caller vouches for: all positions are in [0, below). Then angles are made
            once per position and remembered, which is several times faster and gives the same numbers.

    Returns:
        Rotated rows in x's dtype; angles and products are float32 whatever it is.

    Raises:
        TypeError: Positions are not integers, or ``rope`` is neither a module nor a rotation.
        ValueError: Positions don't broadcast to the rows, the rows are narrower than the rotation, or the
            module's family can't be moved (see ``rotation_of``).

    Source:
        Su et al., RoFormer (arXiv 2104.09864), section 3.2.

    >>> quarter = Rotation(mx.array([mx.pi / 2]), traditional=False)
    >>> mx.abs(rotate(mx.array([[[[1.0, 0.0]]]]), mx.array([[[1]]]), quarter)).round(3).tolist()
    [[[[0.0, 1.0]]]]
    """
    rotation = as_rotation(rope)
    positions = checked(x, positions, rotation)
    head, rest = _split(x, rotation)
    return _join(turn(head * _factor(x, rotation), positions, rotation, below=below), rest)


def derotate(
    x: Float[mx.array, "B H n D"], positions: Int32[mx.array, "..."], rope: Rotation | nn.Module
) -> Float[mx.array, "B H n D"]:
    """Undo ``rotate``: the rows as they were before they were rotated to ``positions``.

    Args:
        x: Rows that were rotated to ``positions``, by ``rotate`` or by the model.
        positions: See ``rotate``.
        rope: See ``rotate``.

    Returns:
        Unrotated rows in x's dtype, without the family's factor.

    Raises:
        TypeError: See ``rotate``.
        ValueError: See ``rotate``.
    """
    rotation = as_rotation(rope)
    positions = checked(x, positions, rotation)
    head, rest = _split(x, rotation)
    return _join(turn(head, positions, rotation, back=True) / _factor(x, rotation), rest)


def rerotate(
    x: Float[mx.array, "B H n D"],
    old: Int32[mx.array, "..."],
    new: Int32[mx.array, "..."],
    rope: Rotation | nn.Module,
) -> Float[mx.array, "B H n D"]:
    """Move rows from position ``old`` to position ``new``; a family's factor stays on them as it is.

    Back and forth in float32, with one rounding to x's dtype at the end: a single turn by the difference
    would miss the model's own angle, which is rounded at ``old`` and at ``new``. Each call rounds anew, so
    rows that move again and again drift; keep unrotated rows and ``rotate`` them instead.

    Args:
        x: Rows that were rotated to ``old``.
        old: Position of each row now; see ``rotate``.
        new: Position of each row then; see ``rotate``.
        rope: See ``rotate``.

    Returns:
        Rows in x's dtype.

    Raises:
        TypeError: See ``rotate``.
        ValueError: See ``rotate``.
    """
    rotation = as_rotation(rope)
    old, new = checked(x, old, rotation), checked(x, new, rotation)
    head, rest = _split(x, rotation)
    return _join(turn(turn(head, old, rotation, back=True), new, rotation), rest)


def rope_remap_positions(
    keys: Float[mx.array, "B H n D"], positions: Int32[mx.array, "... n"], rope: Rotation | nn.Module
) -> tuple[Float[mx.array, "B H n D"], Int32[mx.array, "... n"]]:
    """Close the gaps that evictions left: each head's rows move to 0, 1, 2, … in the order of their positions.

    Args:
        keys: Rows that were rotated to ``positions``, in any order.
        positions: Position of each row, no two alike in a head; the last axis is n. See ``rotate``.
        rope: See ``rotate``.

    Returns:
        The rows, where they were, and their new positions.

    Raises:
        TypeError: See ``rotate``.
        ValueError: See ``rotate``.

    >>> rope, x = nn.RoPE(4), mx.ones((1, 1, 3, 4))
    >>> kept = mx.array([[[9, 0, 4]]])
    >>> rope_remap_positions(rotate(x, kept, rope), kept, rope)[1].tolist()
    [[[2, 0, 1]]]
    """
    ranks = mx.argsort(mx.argsort(positions, axis=-1), axis=-1).astype(mx.int32)
    return rerotate(keys, positions, ranks, rope), ranks


def as_rotation(rope: Rotation | nn.Module) -> Rotation:
    """Take a rotation as it is, or out of a model's module."""
    return rope if isinstance(rope, Rotation) else rotation_of(rope)


def checked(x: mx.array, positions: mx.array, rotation: Rotation) -> mx.array:
    """Return positions as int32, if they and the rows fit the rotation; for every back end's doors.

    Raises:
        TypeError: See ``rotate``.
        ValueError: See ``rotate``.
    """
    if not isinstance(positions, mx.array) or not mx.issubdtype(positions.dtype, mx.integer):
        kind = positions.dtype if isinstance(positions, mx.array) else type(positions).__name__
        raise TypeError(f"positions are an mx.array of integers, got {kind}: pass mx.array(..., mx.int32)")
    rows, width = x.shape[:-1], 2 * rotation.frequencies.shape[0]
    pairs = zip(reversed(positions.shape), reversed(rows), strict=False)
    if positions.ndim > len(rows) or any(p not in (1, n) for p, n in pairs):
        raise ValueError(
            f"positions need the shape of the rows {rows} or one that broadcasts to it, got {positions.shape}"
        )
    if x.shape[-1] < width:
        raise ValueError(f"this rotation turns {width} dims, the rows have {x.shape[-1]}: pass whole keys")
    return positions.astype(mx.int32)


def _factor(x: mx.array, rotation: Rotation) -> mx.array | float:
    """The factor as the model multiplies by it: rounded to the rows' dtype."""
    return 1.0 if rotation.factor == 1.0 else mx.array(rotation.factor, x.dtype).astype(mx.float32)


def _split(x: mx.array, rotation: Rotation) -> tuple[mx.array, mx.array]:
    """The rotated dims in float32, and the others."""
    width = 2 * rotation.frequencies.shape[0]
    return x[..., :width].astype(mx.float32), x[..., width:]


def _join(head: mx.array, rest: mx.array) -> mx.array:
    return mx.concatenate([head.astype(rest.dtype), rest], axis=-1)
