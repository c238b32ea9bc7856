"""Positions of each row's own, drift, the seed's remap, and what the doors refuse."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from h2o_rope import derotate, rerotate, rope_remap_positions, rotate, rotation_of

ON_CPU = mx.default_device() == mx.Device(mx.cpu)  # Metal's own rope has fast cos and sin, good to 2⁻¹³


def test_each_row_has_a_position_of_its_own():
    rope = nn.RoPE(8)
    x = mx.random.normal((2, 2, 3, 8), key=mx.random.key(1))
    positions = mx.random.randint(0, 50, (2, 2, 3), key=mx.random.key(2))
    ours = rotate(x, positions, rope)
    for b in range(2):
        for h in range(2):
            for i in range(3):
                one = rope(x[b : b + 1, h : h + 1, i : i + 1], offset=positions[b, h, i].item())
                assert mx.allclose(ours[b, h, i], one[0, 0, 0], atol=1e-6 if ON_CPU else 1e-3)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (1, 1, 3), (2, 1, 1), (1, 2, 3), (2, 2, 1)])
def test_positions_broadcast(shape):
    x = mx.random.normal((2, 2, 3, 8), key=mx.random.key(3))
    positions = mx.random.randint(0, 50, shape, key=mx.random.key(4))
    whole = mx.broadcast_to(positions, (2, 2, 3))
    assert mx.array_equal(rotate(x, positions, nn.RoPE(8)), rotate(x, whole, nn.RoPE(8)))


def test_no_rows_and_strided_rows():
    rope = nn.RoPE(8)
    assert rotate(mx.zeros((1, 2, 0, 8)), mx.zeros((1, 2, 0), mx.int32), rope).shape == (1, 2, 0, 8)
    x = mx.random.normal((1, 5, 2, 8), key=mx.random.key(5)).transpose(0, 2, 1, 3)
    at = mx.arange(5, dtype=mx.int32)
    assert mx.array_equal(rotate(x, at, rope), rotate(mx.contiguous(x), at, rope))


# Drift

# The unit roundoff of each dtype.
ROUNDOFF = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}


def far(ours, exact):
    """The largest difference, in units of roundoff of the largest value."""
    difference = mx.abs(ours.astype(mx.float32) - exact).max().item()
    return difference / (ROUNDOFF[ours.dtype] * mx.abs(exact).max().item())


@pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
def test_rows_rotated_from_their_unrotated_form_do_not_drift(dtype):
    """10,000 moves are each within the same bound; a chain of 1,000 is far outside of it.

    The bound: what the model makes is rounded to its dtype, so is the unrotated row, so is the row that comes
    out: three roundings, at √2 each, for a value turns into its partner. Below that, float32's own: 6 roundings
    a rotation.
    """
    rotation = rotation_of(nn.RoPE(64))
    exact = mx.random.normal((1, 1, 1, 64), key=mx.random.key(6))
    arrived, moves = 5000, mx.random.randint(0, 256, (10000,), key=mx.random.key(7))
    key = rotate(exact, mx.array([arrived]), rotation).astype(dtype)
    bound = 3 * 2**0.5 + (2 * 6 if dtype == mx.float32 else 0)

    unrotated = mx.broadcast_to(derotate(key, mx.array([arrived]), rotation), (1, 1, 10000, 64))
    wide = mx.broadcast_to(exact, (1, 1, 10000, 64))
    from_unrotated = far(rotate(unrotated, moves, rotation), rotate(wide, moves, rotation))
    assert from_unrotated <= bound

    at = mx.array([arrived])
    for i in range(1000):
        key, at = rerotate(key, at, moves[i : i + 1], rotation), moves[i : i + 1]
        if i % 50 == 0:
            mx.eval(key)
    chained = far(key, rotate(exact, at, rotation))
    assert chained > 2 * bound


# The seed's remap

HEADS, SEEN, HALF = 3, 40, 8


def fingerprints():
    """Rows that no other equals: whole numbers up to 2¹², whose last pair does not rotate."""
    h, p, d = mx.arange(HEADS)[:, None, None], mx.arange(SEEN)[:, None], mx.arange(2 * HALF)
    return (1 + h * SEEN * 2 * HALF + p * 2 * HALF + d).astype(mx.float32)[None]


def survivors(drop):
    """Positions [1, H, n] after each head lost ``drop`` rows of its own, out of the middle too, in any order."""
    kept = [mx.random.permutation(mx.arange(4, SEEN), key=mx.random.key(h))[drop:] for h in range(HEADS)]
    sinks = mx.broadcast_to(mx.arange(4), (HEADS, 4))
    return mx.concatenate([mx.stack(kept), sinks], axis=-1)[None].astype(mx.int32)


@pytest.mark.parametrize("traditional", [False, True])
def test_after_an_interior_eviction_every_survivor_derotates_to_its_unrotated_value(traditional):
    rotation = rotation_of(nn.RoPE(2 * HALF, traditional))
    rotation = rotation._replace(frequencies=mx.concatenate([rotation.frequencies[:-1], mx.zeros(1)]))
    still = [2 * HALF - 2, 2 * HALF - 1] if traditional else [HALF - 1, 2 * HALF - 1]
    rows, offset = fingerprints(), 3000
    keys = rotate(rows, offset + mx.arange(SEEN, dtype=mx.int32), rotation)
    at = survivors(drop=12)
    held, unrotated = (mx.take_along_axis(x, at[..., None], axis=2) for x in (keys, rows))
    for _ in range(2):  # the second finds no gaps, and changes nothing
        held, at = rope_remap_positions(held, at + offset, rotation)
        offset = 0
        assert mx.array_equal(mx.sort(at, axis=-1), mx.broadcast_to(mx.arange(at.shape[-1]), at.shape))
        back = derotate(held, at, rotation)
        assert mx.abs(back - unrotated).max() <= 1e-6 * mx.abs(unrotated).max()
        # Whole numbers come back as themselves: no row, head or pair took another's place.
        assert mx.array_equal(mx.round(back), unrotated)
        # Exact arithmetic gives exact rows: where nothing turns, and to the row that is at 0.
        assert mx.array_equal(back[..., still], unrotated[..., still])
        first = at == 0
        assert mx.array_equal(mx.where(first[..., None], held, 0), mx.where(first[..., None], back, 0))
    assert mx.array_equal(mx.argsort(at, axis=-1), mx.argsort(unrotated[..., 0], axis=-1))


# Doors


def test_the_doors_name_what_does_not_fit():
    x, rope = mx.ones((1, 2, 3, 8)), nn.RoPE(8)
    for move in (rotate, derotate, lambda *args: rerotate(args[0], args[1], *args[1:])):
        with pytest.raises(TypeError, match=r"positions are an mx.array of integers, got mlx.core.float32"):
            move(x, mx.zeros((1, 2, 3)), rope)
        with pytest.raises(TypeError, match=r"integers, got list: pass mx.array"):
            move(x, [0, 1, 2], rope)
        for shape in ((4,), (2, 2, 3), (1, 1, 2, 3)):
            with pytest.raises(ValueError, match=r"shape of the rows \(1, 2, 3\) or one that broadcasts to it, got \("):
                move(x, mx.zeros(shape, mx.int32), rope)
        with pytest.raises(ValueError, match=r"turns 16 dims, the rows have 8"):
            move(x, mx.array([0]), nn.RoPE(16))
        with pytest.raises(TypeError, match=r"the RoPE module that a model calls, got int"):
            move(x, mx.array([0]), 8)


def test_looked_up_angles_are_the_same_numbers():
    """``below`` is a promise about positions; it changes the time and nothing else."""
    for rope in (nn.RoPE(16), nn.RoPE(16, traditional=True, base=500.0, scale=0.25)):
        x = mx.random.normal((2, 3, 40, 24), key=mx.random.key(3))
        positions = mx.random.randint(0, 300, (2, 3, 40), key=mx.random.key(4))
        for below in (300, 511, 512, 513):
            assert mx.array_equal(rotate(x, positions, rope, below=below), rotate(x, positions, rope))
