"""Attention with mass against h2o_core's, for one query and for chunks."""

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import h2o_core
from h2o_core.conformance import TOLERANCE
from h2o_metal import attention, kernel
from mslemu import options

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
# The output of a chunk is mx.fast's own, which on a CPU rounds logits and probabilities to a 16-bit dtype.
CHUNK_TOLERANCE = {mx.float32: 2e-5, mx.float16: 8e-3, mx.bfloat16: 6e-2}


def arrays(helpers, seed, batch, n_heads, group, n_queries, n_rows, width, value_width, dtype):
    return (
        2 * helpers.normal(seed, batch, n_heads * group, n_queries, width, dtype=dtype),
        helpers.normal(seed + 1, batch, n_heads, n_rows, width, dtype=dtype),
        helpers.normal(seed + 2, batch, n_heads, n_rows, value_width, dtype=dtype),
    )


def assert_same(helpers, q, k, v, *rest, tolerance=TOLERANCE):
    (out, mass), (expected, wanted) = (module.attend(q, k, v, *rest) for module in (attention, h2o_core))
    assert out.dtype == v.dtype
    assert helpers.largest_difference(out, expected) <= tolerance[v.dtype]
    for ours, theirs in zip(mass, wanted, strict=True):
        assert ours.dtype == mx.float32
        assert helpers.largest_difference(ours, theirs) <= TOLERANCE[mx.float32]


@pytest.mark.parametrize("n_rows", [1, 31, 32, 33, 97, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_one_query(backend, helpers, n_rows, dtype, masked):
    q, k, v = arrays(helpers, n_rows, 2, 2, 2, 1, n_rows, 64, 64, dtype)
    mask = (mx.random.uniform(shape=(2, 1, 1, n_rows)) < 0.6) | (mx.arange(n_rows) == 0) if masked else None
    sinks = helpers.normal(9, 4, dtype=dtype) if masked else None
    with kernel.launches() as ran:
        assert_same(helpers, q, k, v, 0.125, 0.9, mask, None, sinks)
    assert ran == ["h2o_attend_one"]


def test_one_query_over_shared_heads_takes_two_launches(backend, helpers, monkeypatch):
    monkeypatch.setattr(attention, "WHOLE", 32)
    monkeypatch.setattr(attention, "PART", 32)
    q, k, v = arrays(helpers, 0, 1, 2, 2, 1, 97, 64, 64, mx.float16)
    mask = mx.random.uniform(shape=(1, 2, 1, 97), key=mx.random.key(0)) < 0.5
    with kernel.launches() as ran:
        assert_same(helpers, q, k, v, 0.125, 0.9, mask, None, helpers.normal(9, 4))
    assert ran == ["h2o_attend_part", "h2o_attend_merge"]


@pytest.mark.parametrize("n_queries", [1, 3])
def test_values_of_no_width_give_mass_alone(backend, helpers, n_queries):
    q, k, _ = arrays(helpers, 0, 1, 2, 1, n_queries, 7, 64, 1, mx.float32)
    assert_same(helpers, q, k, k[..., :0], 0.125, 1.0, "causal")


@pytest.mark.parametrize(
    ("n_queries", "old", "head"),
    [
        (31, 0, (mx.float32, 1, 64, 64)),
        (32, 65, (mx.float16, 2, 80, 80)),
        (33, 1, (mx.bfloat16, 4, 96, 96)),
        (97, 3, (mx.float16, 1, 128, 128)),
        (64, 64, (mx.float32, 2, 192, 128)),
        (2, 126, (mx.bfloat16, 16, 256, 256)),
        (1000, 24, (mx.float32, 1, 8, 8)),
    ],
    ids=str,
)
def test_a_causal_chunk(backend, helpers, n_queries, old, head):
    dtype, group, width, value_width = head
    q, k, v = arrays(helpers, n_queries, 1, 1, group, n_queries, n_queries + old, width, value_width, dtype)
    with kernel.launches() as ran:
        assert_same(helpers, q, k, v, width**-0.5, 0.98, "causal", tolerance=CHUNK_TOLERANCE)
    assert ran == ["h2o_softmax_rows", "h2o_column_mass"]


@settings(max_examples=50, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 2), st.just(2)),
    n_queries=st.integers(1, 70),
    old=st.integers(0, 70),
    kind=st.sampled_from(["none", "causal", "one mask", "a mask for each head"]),
    decay=st.sampled_from([1.0, 0.9]),
    padded=st.booleans(),
    with_sinks=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_any_chunk(backend, helpers, dtype, sizes, n_queries, old, kind, decay, padded, with_sinks, seed):
    batch, n_heads, group = sizes
    q, k, v = arrays(helpers, seed, batch, n_heads, group, n_queries, n_queries + old, 8, 4, dtype)
    mask = {"none": None, "causal": "causal"}.get(kind)
    if "mask" in kind:
        shape = (batch, n_heads if "each" in kind else 1, n_queries, n_queries + old)
        mask = mx.random.uniform(shape=shape, key=mx.random.key(seed)) < 0.5
        mask = mask | (mx.arange(n_queries + old) == 0)
    keys = mx.random.key(seed + 1)
    lengths = mx.random.randint(0, n_queries + 1, (batch,), key=keys).astype(mx.int32) if padded else None
    sinks = helpers.normal(seed, n_heads * group, dtype=dtype) if with_sinks else None
    assert_same(helpers, q, k, v, 0.35, decay, mask, lengths, sinks, tolerance=CHUNK_TOLERANCE)


@pytest.mark.parametrize("n_real", [0, 1])
def test_a_chunk_of_one_query(backend, helpers, n_real):
    q, k, v = arrays(helpers, 5, 1, 2, 2, 1, 1, 64, 64, mx.float32)
    lengths = mx.array([n_real], mx.int32)
    with kernel.launches() as ran:
        assert_same(helpers, q, k, v, 0.125, 0.9, "causal", lengths)
    assert ran == ["h2o_softmax_rows", "h2o_column_mass"]


def test_padding_as_an_adapter_shows_it(backend, helpers):
    config = h2o_core.H2OConfig(budget=90, decay=0.9)
    state, _ = h2o_core.admit(h2o_core.init(3, 2), 40)
    lengths = mx.array([9, 4, 0], mx.int32)
    state, _ = h2o_core.admit(state, 9, lengths)
    q, k, v = arrays(helpers, 4, 3, 2, 2, 9, 49, 64, 64, mx.float32)
    assert_same(helpers, q, k, v, 0.125, config.decay, h2o_core.visible(state, 9, lengths), lengths)


def test_large_logits_lose_nothing(backend, helpers):
    """Each query still adds 1: a log-sum-exp of 3,000 in one float32 would be off by 1e-4."""
    q, k, v = arrays(helpers, 2, 1, 1, 1, 40, 40, 64, 64, mx.float32)
    _, mass = attention.attend(200 * q, k, v, 1.0, 1.0, "causal")
    assert abs(mass.total.sum().item() - 40) < 40 * 2e-6


def test_a_chunk_is_read_where_it_lies(backend, helpers):
    q = helpers.normal(1, 2, 20, 4, 64, dtype=mx.float16).swapaxes(1, 2)
    k = helpers.normal(2, 2, 90, 2, 128, dtype=mx.float16).swapaxes(1, 2)[:, :, 5:55:2, ::2]
    v = helpers.normal(3, 2, 2, 50, 64, dtype=mx.float16)[:, :, :25]
    lengths = mx.array([20, 0, 7, 0], mx.int32)[::2]
    assert_same(helpers, q, k, v, 0.125, 0.9, "causal", lengths, tolerance=CHUNK_TOLERANCE)


@pytest.mark.parametrize("backend", ["emulator"], indirect=True)
@pytest.mark.parametrize("order", ["tree", "ascending", "descending"])
@pytest.mark.parametrize("schedule", ["reverse", "shuffled"])
def test_no_order_of_threads_matters(backend, helpers, schedule, order):
    q, k, v = arrays(helpers, 3, 1, 1, 2, 70, 130, 8, 4, mx.float32)
    with options(schedule=schedule, simd_order=order, seed=5):
        assert_same(helpers, q, k, v, 0.35, 0.9, "causal")
