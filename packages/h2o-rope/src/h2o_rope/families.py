"""A rotation from a live RoPE module of mlx or mlx_lm, or a refusal that says why."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from h2o_rope.rotation import Rotation


def rotation_of(rope: nn.Module) -> Rotation:
    """Read the rotation out of a RoPE module.

    Args:
        rope: The module that a model calls as ``rope(x, offset=...)``.

    Returns:
        Its angles and layout. A factor on the rotated values, which some families have, is not part of
        it: the model applies that once.

    Raises:
        ValueError: This family is not known, so its keys can't be moved; ``positions="original"`` needs
            no rotation and works with it.

    >>> rotation_of(nn.RoPE(64, base=10000.0)).frequencies.shape
    (32,)
    """
    family = f"{type(rope).__module__}.{type(rope).__qualname__}"
    if family not in FAMILIES:
        raise ValueError(
            f"keys rotated by {family} can't be moved to other positions: known are "
            f'{", ".join(sorted(FAMILIES))}; use positions="original" with this model'
        )
    return FAMILIES[family](rope)


def _default(rope: nn.RoPE) -> Rotation:
    """Default and linear: base^(−2i/d), position times ``scale``. Source: mlx.nn.RoPE."""
    steps = mx.arange(0, rope.dims, 2, dtype=mx.float32) / rope.dims
    return Rotation(rope.scale * mx.power(mx.array(rope.base, mx.float32), -steps), rope.traditional)


def _from_periods(rope: nn.Module) -> Rotation:
    """Families whose module holds one period per pair in ``_freqs``."""
    return Rotation(1.0 / rope._freqs.astype(mx.float32), rope.traditional)


# By module and class: classes of one name and different formulas exist in mlx_lm.
FAMILIES: dict[str, Callable[..., Rotation]] = {
    "mlx.nn.layers.positional_encoding.RoPE": _default,
    "mlx_lm.models.rope_utils.Llama3RoPE": _from_periods,
}
