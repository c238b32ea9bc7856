"""Rotate rows at arbitrary positions, by a kernel: the signatures of ``h2o_rope`` and their results.

One launch reads each row once and writes it once; the reference makes cos and sin of every row in device memory, or a
table of them.
"""

import mlx.core as mx
import mlx.nn as nn

from h2o_metal._shapes import Float, Int32
from h2o_metal.kernel import launch
from h2o_rope import Rotation
from h2o_rope.moves import as_rotation, checked


def rotate(
    x: Float[mx.array, "B H n D"],
    positions: Int32[mx.array, "..."],
    rope: Rotation | nn.Module,
    below: int | None = None,
) -> Float[mx.array, "B H n D"]:
    """Rotate each row to its position, as ``h2o_rope.rotate`` does.

    Args:
        x: Unrotated rows. Dims behind the rotated ones are left alone.
        positions: Position of each row, of shape [B, H, n] or one that broadcasts to it.
        rope: A model's RoPE module, or the ``Rotation`` that ``rotation_of`` made from it.
        below: Not needed here: an angle costs a kernel less than looking it up.

    Returns:
        Rotated rows in x's dtype.

    Raises:
        RuntimeError: There is neither Metal nor CUDA here.
        TypeError: Positions are not integers, or ``rope`` is neither a module nor a rotation.
        ValueError: Positions don't broadcast to the rows, or the rows are narrower than the rotation.
    """
    rotation = as_rotation(rope)
    return _turned(x, None, positions, rotation, before=rotation.factor)


def derotate(
    x: Float[mx.array, "B H n D"], positions: Int32[mx.array, "..."], rope: Rotation | nn.Module
) -> Float[mx.array, "B H n D"]:
    """Undo ``rotate``, as ``h2o_rope.derotate`` does.

    Args:
        x: Rows that were rotated to ``positions``.
        positions: See ``rotate``.
        rope: See ``rotate``.

    Returns:
        Unrotated rows in x's dtype, without the family's factor.

    Raises:
        RuntimeError: See ``rotate``.
        TypeError: See ``rotate``.
        ValueError: See ``rotate``.
    """
    rotation = as_rotation(rope)
    return _turned(x, positions, None, rotation, after=rotation.factor)


def rerotate(
    x: Float[mx.array, "B H n D"],
    old: Int32[mx.array, "..."],
    new: Int32[mx.array, "..."],
    rope: Rotation | nn.Module,
) -> Float[mx.array, "B H n D"]:
    """Move rows from position ``old`` to position ``new``, as ``h2o_rope.rerotate`` does.

    Args:
        x: Rows that were rotated to ``old``.
        old: Position of each row now; see ``rotate``.
        new: Position of each row then; see ``rotate``.
        rope: See ``rotate``.

    Returns:
        Rows in x's dtype.

    Raises:
        RuntimeError: See ``rotate``.
        TypeError: See ``rotate``.
        ValueError: See ``rotate``.
    """
    return _turned(x, old, new, as_rotation(rope))


def _turned(
    x: mx.array,
    old: mx.array | None,
    new: mx.array | None,
    rotation: Rotation,
    before: float = 1.0,
    after: float = 1.0,
) -> mx.array:
    width, n_pairs = x.shape[-1], rotation.frequencies.shape[0]
    unused = mx.zeros((1,), mx.int32)
    old_positions, new_positions = (unused if p is None else _spread(p, x, rotation) for p in (old, new))
    if x.size == 0:
        return x
    inputs = {
        "x": x,
        "old_positions": old_positions,
        "new_positions": new_positions,
        "frequencies": rotation.frequencies,
        "numbers": mx.array([rotation.scale, before, after], mx.float32),
    }
    template: dict[str, int | bool | mx.Dtype] = {
        "T": x.dtype,
        "WIDTH": width,
        "TRADITIONAL": rotation.traditional,
        "BACK": old is not None,
        "FORTH": new is not None,
    }
    # A thread for each pair, and one for each element that is copied.
    threads = n_pairs + width - 2 * n_pairs
    n_rows = x.size // width
    return launch("h2o_rotate", inputs, {"out": (x.shape, x.dtype)}, template, (n_rows, 1), threads)[0]


def _spread(positions: mx.array, x: mx.array, rotation: Rotation) -> mx.array:
    return mx.broadcast_to(checked(x, positions, rotation), x.shape[:-1])
