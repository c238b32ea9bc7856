"""The angles against RoFormer's formula in float64, in plain Python."""

import math

import mlx.core as mx
import mlx.nn as nn
import pytest

from h2o_rope import Rotation, derotate, rotate, rotation_of

D, BASE = 16, 10000.0
HALF = D // 2
POSITIONS = (0, 1, 2, 77, 4095, 4096, 65537, 131072)
U = 2.0**-24  # float32's unit roundoff


def roformer(row, position, frequencies, traditional, scale=1.0):
    """Rotate one row as equation 34 of arXiv 2104.09864 says, in Python's float64."""
    out = list(row)
    for i, frequency in enumerate(frequencies):
        a, b = (2 * i, 2 * i + 1) if traditional else (i, i + len(frequencies))
        cos, sin = math.cos(position * scale * frequency), math.sin(position * scale * frequency)
        out[a], out[b] = row[a] * cos - row[b] * sin, row[a] * sin + row[b] * cos
    return out


def test_frequencies_are_the_formula_s():
    ours = rotation_of(nn.RoPE(D, base=BASE)).frequencies.tolist()
    for i, frequency in enumerate(ours):
        # exp(z) with z rounded three times: relative error 3u · |z|, plus exp's own
        z = 2 * i / D * math.log(BASE)
        assert abs(frequency / BASE ** (-2 * i / D) - 1) <= U * (3 * z + 2)


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
def test_an_angle_is_rounded_once_per_product_and_nothing_else(traditional, scale):
    rotation = rotation_of(nn.RoPE(D, traditional, base=BASE, scale=scale))
    frequencies = rotation.frequencies.tolist()
    x = mx.random.normal((1, 1, len(POSITIONS), D), key=mx.random.key(0))
    ours = rotate(x, mx.array(POSITIONS), rotation)[0, 0].tolist()
    largest = mx.abs(x).max().item()
    for row, position, got in zip(x[0, 0].tolist(), POSITIONS, ours, strict=True):
        expected = roformer(row, position, frequencies, traditional, scale)
        # Products: position · scale (with scale itself rounded) and · frequency. Then cos, sin, products, sum.
        rounded = 1 if scale == 1.0 else 3
        bound = (rounded * position * scale + 6) * U * math.sqrt(2) * largest
        assert max(abs(a - b) for a, b in zip(got, expected, strict=True)) <= bound


@pytest.mark.parametrize("traditional", [False, True])
def test_where_float32_holds_the_angle_exactly_so_do_we_at_any_position(traditional):
    rotation = Rotation(mx.array([2.0**-i for i in range(HALF)]), traditional)
    x = mx.random.normal((1, 1, len(POSITIONS), D), key=mx.random.key(1))
    keys = rotate(x, mx.array(POSITIONS), rotation)
    for row, position, got in zip(x[0, 0].tolist(), POSITIONS, keys[0, 0].tolist(), strict=True):
        expected = roformer(row, position, rotation.frequencies.tolist(), traditional)
        largest = max(abs(v) for v in row)
        assert max(abs(a - b) for a, b in zip(got, expected, strict=True)) <= 6 * U * math.sqrt(2) * largest
    assert mx.allclose(derotate(keys, mx.array(POSITIONS), rotation), x, atol=2e-6)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_angles_do_not_know_the_rows_dtype(dtype):
    rotation = rotation_of(nn.RoPE(D))
    x = mx.random.normal((1, 1, len(POSITIONS), D), key=mx.random.key(2)).astype(dtype)
    at = mx.array(POSITIONS)
    assert mx.array_equal(rotate(x, at, rotation), rotate(x.astype(mx.float32), at, rotation).astype(dtype))


def test_a_rotation_needs_frequencies_and_a_layout_only():
    assert Rotation(mx.ones(4), False)[2:] == (1.0, 1.0)
