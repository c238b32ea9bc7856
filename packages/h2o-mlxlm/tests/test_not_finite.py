"""Keys and values that are not finite: sinks and the newest stay, and the cache is well again once they have gone."""

import math

import mlx.core as mx
import pytest

from h2o_mlxlm import H2OConfig, H2OKVCache, scaled_dot_product_attention

BUDGET, SINKS, GRACE, CALLS = 16, 2, 4, 48


def rows(key, n):
    parts = mx.random.split(mx.random.key(key), 3)
    return [mx.random.normal((2, heads, n, 8), key=part) for heads, part in zip((4, 2, 2), parts, strict=True)]


def attend(cache, q, k, v):
    mask = cache.make_mask(q.shape[2])
    keys, values = cache.update_and_fetch(k, v)
    return scaled_dot_product_attention(q, keys, values, cache, 0.3, mask)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("where", ["keys", "values", "sink key"])
@pytest.mark.parametrize("n", [1, 3], ids=["one", "several"])
@pytest.mark.parametrize("settings", [{}, {"long_share": 0.35}, {"queries": "key"}], ids=str)
def test_they_evict_neither_sinks_nor_the_newest(number, where, n, settings):
    cache = H2OKVCache(H2OConfig(budget=BUDGET, n_sink=SINKS, grace=GRACE, **settings))
    for call in range(CALLS):
        q, k, v = rows(call, n)
        if call == (0 if where == "sink key" else 12):
            bad = mx.full((1, 1, 1, 1), number)  # in one head of one sequence
            x = mx.pad(bad, [(0, 1), (0, 1), (0, n - 1), (0, 7)])
            k, v = (k, v + x) if where == "values" else (k + x, v)
        out = attend(cache, q, k, v)
        seen, held = (call + 1) * n, min(BUDGET, (call + 1) * n)
        for head in cache.kept_positions.reshape(-1, held).tolist():
            assert head == sorted(set(head))
            assert head[:SINKS] == list(range(min(SINKS, held)))[:SINKS]
            assert head[-GRACE:] == list(range(max(0, seen - GRACE), seen))
    assert cache.evictions == CALLS * n - BUDGET
    assert mx.isfinite(out[0, 2:]).all()
    assert mx.isfinite(out[1]).all()
    if where != "sink key":  # that one is never evicted, so its head stays ill
        assert mx.isfinite(out).all()
        # The sinks' own scores stay what they are; they stand for nothing.
        assert mx.isfinite(cache.scores[..., SINKS:]).all()
