import math

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import h2o_core.rows as module
from h2o_core import Rows
from h2o_core.rows import rows_of, softmax_rows


@settings(max_examples=20, deadline=None)
@given(
    n_steps=st.integers(1, 12),
    n_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    batch=st.sampled_from([(), (1,), (2,)]),
    dtype=st.sampled_from([mx.float32, mx.float16]),
    elements=st.sampled_from([1, 50, 1 << 22]),
    seed=st.integers(0, 99),
)
def test_softmax_rows_are_the_naive_loop(n_steps, n_heads, group, batch, dtype, elements, seed):
    key = mx.random.key(seed)
    q = mx.random.normal((*batch, n_heads * group, n_steps, 4), key=key).astype(dtype)
    k = mx.random.normal((*batch, n_heads, n_steps, 4), key=mx.random.key(seed + 1)).astype(dtype)
    whole, module.BLOCK_ELEMENTS = module.BLOCK_ELEMENTS, elements
    try:
        made = softmax_rows(q, k, 0.7)
        p = made.whole()
        assert sum(block.shape[-2] for block in made) == n_steps
    finally:
        module.BLOCK_ELEMENTS = whole
    assert (p.shape, p.dtype) == (made.shape, mx.float32)
    assert p.shape == (*batch, n_heads * group, n_steps, n_steps)
    qs, ks, ps = (x.astype(mx.float32).reshape(-1, *x.shape[-2:]).tolist() for x in (q, k, p))
    for h, rows in enumerate(ps):
        keys = ks[h // group]
        for t, row in enumerate(rows):
            weights = [math.exp(0.7 * sum(a * b for a, b in zip(qs[h][t], keys[i], strict=True))) for i in range(t + 1)]
            expected = [w / sum(weights) for w in weights] + [0.0] * (n_steps - t - 1)
            assert row == pytest.approx(expected, abs=1e-5)


def test_rows_are_made_when_they_are_read_and_again():
    calls = []

    def make(start, stop):
        calls.append((start, stop))
        return mx.ones((2, stop - start, stop))

    rows = Rows((2, 3, 3), make)
    assert calls == []
    assert len(list(rows)) == len(list(rows)) == 1
    assert calls == [(0, 3), (0, 3)]


def test_a_block_is_bounded_whatever_the_length():
    rows = Rows((8, 4096, 4096), lambda start, stop: mx.zeros((8, stop - start, stop)))
    assert rows.block * 8 * 4096 == module.BLOCK_ELEMENTS
    assert Rows((1, 1 << 24, 1 << 24), rows.make).block == 1


def test_an_array_is_rows_of_itself():
    array = mx.random.normal((2, 5, 5))
    rows = rows_of(array)
    assert rows_of(rows) is rows
    assert mx.array_equal(rows.whole(), array)
