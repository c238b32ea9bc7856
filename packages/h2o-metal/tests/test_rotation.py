"""Rotation against h2o_rope, over layouts, widths, families and positions."""

import mlx.core as mx
import mlx.nn as nn
import pytest

import h2o_rope
from h2o_metal import kernel, rotation
from h2o_rope import Rotation

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
HALF = [10000.0 ** (-2 * i / 64) for i in range(32)]
ROTATIONS = {
    "half-split": nn.RoPE(64),
    "traditional": nn.RoPE(64, traditional=True),
    "partial": nn.RoPE(20, scale=0.3),
    "partial traditional": nn.RoPE(16, traditional=True),
    "a factor": Rotation(mx.array(HALF), False, 1.2079441),
    "one pair": Rotation(mx.array([1.0]), True, 0.7),
}
# One rounding of the dtype: a sum of two products may be fused on one side.
TOLERANCE = {mx.float32: 1e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}
POSITIONS = mx.array([0, 1, 2, 77, 4095, 65537, 131072])


def same(helpers, ours, theirs):
    assert ours.dtype == theirs.dtype
    return (
        helpers.largest_difference(ours, theirs) <= {mx.float32: 1e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}[ours.dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROTATIONS)
def test_rows_turn_as_the_reference_turns_them(backend, helpers, name, dtype):
    rope = ROTATIONS[name]
    x = helpers.normal(1, 2, 3, len(POSITIONS), 64, dtype=dtype)
    each = mx.random.randint(0, 9000, (2, 3, len(POSITIONS)), key=mx.random.key(2))
    with kernel.launches() as ran:
        assert same(helpers, rotation.rotate(x, POSITIONS, rope), h2o_rope.rotate(x, POSITIONS, rope))
        assert same(helpers, rotation.rotate(x, each, rope, below=9000), h2o_rope.rotate(x, each, rope))
        assert same(helpers, rotation.derotate(x, each, rope), h2o_rope.derotate(x, each, rope))
        assert same(helpers, rotation.rerotate(x, each, POSITIONS, rope), h2o_rope.rerotate(x, each, POSITIONS, rope))
    assert ran == ["h2o_rotate"] * 4


@pytest.mark.parametrize("n", [1, 31, 32, 33, 97, 1000])
def test_any_number_of_rows(backend, helpers, n):
    x, at = helpers.normal(n, 1, 2, n, 80), mx.arange(n, dtype=mx.int32)[None, None]
    rope = nn.RoPE(80)
    assert same(helpers, rotation.rotate(x, at, rope), h2o_rope.rotate(x, at, rope))


def test_there_and_back_is_where_it_was(backend, helpers):
    x, rope = helpers.normal(1, 1, 2, 7, 64), ROTATIONS["a factor"]
    assert mx.allclose(rotation.derotate(rotation.rotate(x, POSITIONS, rope), POSITIONS, rope), x, atol=1e-6)


def test_no_rows_are_no_work(backend):
    x = mx.zeros((1, 2, 0, 64))
    with kernel.launches() as ran:
        assert rotation.rotate(x, mx.zeros((1, 2, 0), mx.int32), nn.RoPE(64)).shape == x.shape
    assert not ran


def test_what_does_not_fit_is_refused(backend):
    x = mx.zeros((1, 1, 2, 8))
    with pytest.raises(TypeError, match=r"positions are an mx.array of integers, got mlx.core.float32"):
        rotation.rotate(x, mx.array([0.0, 1.0]), nn.RoPE(8))
    with pytest.raises(TypeError, match=r"got list"):
        rotation.derotate(x, [0, 1], nn.RoPE(8))
    with pytest.raises(ValueError, match=r"turns 16 dims, the rows have 8"):
        rotation.rerotate(x, mx.array([0, 1]), mx.array([1, 2]), nn.RoPE(16))
    with pytest.raises(ValueError, match=r"need the shape of the rows \(1, 1, 2\).*got \(3,\)"):
        rotation.rotate(x, mx.array([0, 1, 2]), nn.RoPE(8))
