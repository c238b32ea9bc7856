"""A rotation from a live RoPE module of mlx or mlx_lm, or a refusal that says why.

To add a family: a function that reads a ``Rotation`` from its module, a line in ``FAMILIES``, and its case in
``tests/test_families.py``, where the module itself is the oracle.
"""

import math
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from h2o_rope.rotation import Rotation


def rotation_of(rope: nn.Module) -> Rotation:
    """Read the rotation out of a RoPE module.

    Args:
        rope: The module that a model calls as ``rope(x, offset=...)``.

    Returns:
        Its angles, layout, factor and scale.

    Raises:
        TypeError: This is no module. Some models (nanochat, talkie) rotate in a function of their own.
        ValueError: This family is not known, or has no rotation that can be undone, and why;
            ``positions="original"`` needs none and works with it.

    >>> rotation_of(nn.RoPE(64, base=10000.0)).frequencies.shape
    (32,)
    """
    if not isinstance(rope, nn.Module):
        raise TypeError(
            f"a rotation is read from the RoPE module that a model calls, got {type(rope).__name__}: "
            'a model that has none, but rotates in a function, works with positions="original"'
        )
    family = f"{type(rope).__module__}.{type(rope).__qualname__}"
    if family in FAMILIES:
        rotation = FAMILIES[family](rope)
        mx.eval(rotation.frequencies)  # a graph could be evaluated by the thread that made it alone
        return rotation
    why = REFUSED.get(family, f"that family is not known; known are {', '.join(sorted(FAMILIES))}")
    raise ValueError(
        f"keys rotated by {family} can't be moved to other positions, for {why}; "
        'use positions="original" with this model, which works'
    )


def _default(rope: nn.RoPE) -> Rotation:
    """Default and linear: base^(−i/R) for pair i of R, position times ``scale``.

    As exp(−i · (log base / R)), which is how mlx makes them; another way differs in the last bit, and at
    position 131,072 by 0.02 radians. Source: mlx.nn.RoPE and ``rope`` in mlx/fast.cpp.
    """
    half = rope.dims // 2
    step = mx.array(math.log(rope.base), mx.float32) / half
    return Rotation(mx.exp(mx.arange(0, -half, -1, dtype=mx.float32) * step), rope.traditional, scale=rope.scale)


def _llama3(rope: nn.Module) -> Rotation:
    """One period (over 2π) per pair, stretched where long. Source: Llama3RoPE in mlx_lm.models.rope_utils."""
    return Rotation(_frequencies(rope), rope.traditional)


def _yarn(rope: nn.Module) -> Rotation:
    """Periods between two stretches, and mscale. Source: YarnRoPE; Peng et al. (arXiv 2309.00071), section 3.4."""
    return Rotation(_frequencies(rope), rope.traditional, float(rope.mscale))


def _deepseek_yarn(rope: nn.Module) -> Rotation:
    """Yarn in DeepSeek's layout. Source: DeepseekV2YarnRotaryEmbedding in mlx_lm.models.deepseek_v2."""
    return Rotation(_frequencies(rope), True, float(rope.mscale))


def _longrope(rope: nn.Module) -> Rotation:
    """One stretch per pair; mlx_lm uses the long ones for any length. Source: SuScaledRoPE; arXiv 2402.13753."""
    return Rotation(_frequencies(rope), False, float(rope._scale))


def _proportional(rope: nn.Module) -> Rotation:
    """Infinite periods for the pairs that don't rotate: frequency 0. Source: ProportionalRoPE in rope_utils."""
    return Rotation(_frequencies(rope), rope.traditional)


def _ntk_alpha(rope: nn.Module) -> Rotation:
    """A base that is larger from the start, and no dynamic one. Source: DynamicNTKAlphaRoPE in mlx_lm's hunyuan."""
    return Rotation(_frequencies(rope), False)


def _frequencies(rope: nn.Module) -> mx.array:
    """What mlx makes of a module's ``_freqs``, which are periods over 2π."""
    return mx.reciprocal(rope._freqs.astype(mx.float32))


_BY_LENGTH = "its base depends on the sequence's length, so earlier keys were turned at other frequencies"

# By module and class: classes of one name and different formulas exist in mlx_lm.
FAMILIES: dict[str, Callable[..., Rotation]] = {
    "mlx.nn.layers.positional_encoding.RoPE": _default,
    "mlx_lm.models.rope_utils.Llama3RoPE": _llama3,
    "mlx_lm.models.rope_utils.YarnRoPE": _yarn,
    "mlx_lm.models.rope_utils.SuScaledRoPE": _longrope,
    "mlx_lm.models.rope_utils.ProportionalRoPE": _proportional,
    "mlx_lm.models.deepseek_v2.DeepseekV2YarnRotaryEmbedding": _deepseek_yarn,
    "mlx_lm.models.hunyuan.DynamicNTKAlphaRoPE": _ntk_alpha,
    "mlx_lm.models.hunyuan_v1_dense.DynamicNTKAlphaRoPE": _ntk_alpha,
}
REFUSED: dict[str, str] = {
    "mlx_lm.models.rope_utils.DynamicNTKScalingRoPE": _BY_LENGTH,
    "mlx_lm.models.internlm3.DynamicNTKScalingRoPE": _BY_LENGTH,
    "mlx_lm.models.muse_spark.VisionRoPE2D": "a row has more than one position there, its height and its width",
}
