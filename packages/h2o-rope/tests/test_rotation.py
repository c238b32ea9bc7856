"""The oracle is the module itself: rope(x, offset)."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.rope_utils import initialize_rope

from h2o_rope import derotate, rerotate, rotate, rotation_of

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPES = {
    "default": lambda traditional: nn.RoPE(16, traditional, base=10000.0),
    "linear": lambda traditional: nn.RoPE(16, traditional, base=500.0, scale=0.25),
    "llama3": lambda traditional: initialize_rope(16, 5e5, traditional, LLAMA3, 512),
}
# Of a row's largest value, 3 or so. At 100,000 radians float32 knows an angle to 0.004.
TOLERANCE = {mx.float32: 1e-5, mx.float16: 6e-3, mx.bfloat16: 5e-2}


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("family", ROPES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dims", [16, 24])
def test_rows_go_where_the_module_puts_them(family, traditional, dtype, dims):
    rope = ROPES[family](traditional)
    rotation = rotation_of(rope)
    x = mx.random.normal((2, 3, 5, dims), key=mx.random.key(0)).astype(dtype)
    for offset in (0, 1, 77, 4000):
        positions = offset + mx.arange(5, dtype=mx.int32)[None, None]
        # Its own rounding of a large angle in float32 is the module's limit, and ours.
        near = TOLERANCE[dtype] + (1e-3 if offset > 1000 else 0)
        expected = rope(x, offset=offset)
        assert rotate(x, positions, rotation).dtype == dtype
        for ours, theirs in [
            (rotate(x, positions, rotation), expected),
            (derotate(expected, positions, rotation), x),
            (rerotate(expected, positions, positions + 9, rotation), rope(x, offset=offset + 9)),
        ]:
            assert mx.abs(ours - theirs).max().item() <= near * mx.abs(x).max().item()


def test_each_row_has_a_position_of_its_own():
    rope = nn.RoPE(8)
    x = mx.random.normal((2, 2, 3, 8), key=mx.random.key(1))
    positions = mx.random.randint(0, 50, (2, 2, 3), key=mx.random.key(2))
    ours = rotate(x, positions, rotation_of(rope))
    for b in range(2):
        for h in range(2):
            for i in range(3):
                one = rope(x[b : b + 1, h : h + 1, i : i + 1], offset=positions[b, h, i].item())
                assert mx.allclose(ours[b, h, i], one[0, 0, 0], atol=1e-5)


def test_an_unknown_family_is_refused_by_name():
    dynamic = initialize_rope(16, 1e4, False, {"type": "dynamic", "factor": 2.0}, 512)
    with pytest.raises(ValueError, match=r'DynamicNTKScalingRoPE can.t be moved.*positions="original"'):
        rotation_of(dynamic)
