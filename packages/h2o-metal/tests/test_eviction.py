"""The decode step and eviction against h2o_core, over sizes, dtypes, budgets, ties and what is not finite."""

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import h2o_core
from h2o_core import H2OConfig
from h2o_metal import attention, eviction, kernel
from mslemu import launches, options

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
# dtype, G, D, Dv
HEADS = [
    (mx.float32, 1, 64, 64),
    (mx.float16, 2, 80, 80),
    (mx.bfloat16, 4, 96, 96),
    (mx.float16, 7, 128, 128),
    (mx.float32, 3, 192, 128),
    (mx.bfloat16, 16, 256, 256),
    (mx.float16, 8, 64, 96),
]
SLOTS = [1, 31, 32, 33, 97, 1000]


def problem(helpers, seed, batch, n_heads, n_slots, head, with_sinks=False):
    dtype, group, width, value_width = head
    q = 2 * helpers.normal(seed, batch, n_heads * group, 1, width, dtype=dtype)
    k = helpers.normal(seed + 1, batch, n_heads, n_slots, width, dtype=dtype)
    v = helpers.normal(seed + 2, batch, n_heads, n_slots, value_width, dtype=dtype)
    return q, k, v, width**-0.5, 2 * helpers.normal(seed + 3, n_heads * group, dtype=dtype) if with_sinks else None


def both_steps(config, state, q, k, v, scale, sinks=None):
    return [step(config, state, q, k, v, scale, sinks) for step in (eviction.decode_step, h2o_core.decode_step)]


def config_for(n_slots, share=0.4):
    budget = max(1, n_slots - 1)
    return H2OConfig(budget=budget, n_sink=min(4, budget // 3), grace=min(16, budget // 3), long_share=share)


@pytest.mark.parametrize("n_slots", SLOTS)
@pytest.mark.parametrize("head", HEADS, ids=str)
def test_a_step_is_the_reference_s(backend, helpers, head, n_slots):
    batch, n_heads = (1, 1) if n_slots == 1000 else (2, 3)
    state = helpers.random_state(n_slots, batch, n_heads, n_slots)
    args = problem(helpers, n_slots, batch, n_heads, n_slots, head, with_sinks=head[1] % 2 == 1)
    with kernel.launches() as ran:
        helpers.assert_same_step(*both_steps(config_for(n_slots), state, *args))
    assert ran == ["h2o_decode"]


@pytest.mark.parametrize("scorer", ["tova", {"name": "morphkv", "window": 3}, "keyformer", "l2norm"])
def test_another_scorer_takes_no_kernel_of_h2o_s(backend, helpers, scorer):
    config = H2OConfig(budget=12, n_sink=2, grace=3, scorer=scorer)
    extras = h2o_core.init(2, 3, 13, scorer=config.scorer).extras
    state = helpers.random_state(5, 2, 3, 13)._replace(extras=extras)
    args = problem(helpers, 5, 2, 3, 13, (mx.float32, 2, 8, 8))
    with kernel.launches() as ran:
        ours, theirs = both_steps(config, state, *args)
        # The victim is chosen by a kernel as well.
        helpers.assert_same_step(ours, theirs)
    assert "h2o_decode" not in ran
    assert all(helpers.largest_difference(a, b) < 1e-5 for a, b in zip(ours[1].extras, theirs[1].extras, strict=True))


def test_evict_carries_a_scorer_s_arrays(backend, helpers):
    config = H2OConfig(budget=9, n_sink=2, grace=3, scorer={"name": "snapkv", "window": 2})
    extras = (helpers.normal(1, 2, 3, 14, 2), helpers.normal(2, 2, 3, 14))
    state = helpers.random_state(3, 2, 3, 14)._replace(extras=extras)
    (ours, _), (theirs, _) = eviction.evict(config, state), h2o_core.evict(config, state)
    assert len(ours.extras) == 2
    assert all(mx.array_equal(a, b) for a, b in zip(ours.extras, theirs.extras, strict=True))
    assert not ours.extras[0][:, :, 9:].any()


@pytest.mark.parametrize("n_slots", [101, 1000, 8193])
@pytest.mark.parametrize("head", [(mx.float32, 2, 64, 64), (mx.bfloat16, 4, 16, 32)], ids=str)
def test_a_step_over_shared_heads_takes_two_launches(backend, helpers, monkeypatch, head, n_slots):
    if n_slots <= attention.WHOLE:
        monkeypatch.setattr(attention, "WHOLE", 64)
        monkeypatch.setattr(attention, "PART", 33)
    state = helpers.random_state(n_slots, 1, 2, n_slots, empty=0.1)
    args = problem(helpers, n_slots, 1, 2, n_slots, head, with_sinks=True)
    with kernel.launches() as ran:
        helpers.assert_same_step(*both_steps(config_for(n_slots), state, *args))
    assert ran == ["h2o_attend_part", "h2o_decode_merge"]


def test_a_part_that_holds_nothing_adds_nothing(backend, helpers, monkeypatch):
    monkeypatch.setattr(attention, "WHOLE", 16)
    monkeypatch.setattr(attention, "PART", 16)
    state = helpers.random_state(0, 1, 1, 64)
    hole = mx.arange(64) >= 32
    scores, totals = (mx.where(hole, 0.0, x) for x in (state.scores, state.totals))
    state = state._replace(scores=scores, totals=totals, positions=mx.where(hole, -1, state.positions))
    args = problem(helpers, 0, 1, 1, 64, (mx.float32, 2, 64, 64))
    helpers.assert_same_step(*both_steps(config_for(64), state, *args))


def test_a_long_head_is_one_launch_where_there_are_many(backend, helpers):
    state = helpers.random_state(3, attention.BUSY, 1, 1100)
    args = problem(helpers, 3, attention.BUSY, 1, 1100, (mx.float16, 1, 8, 8))
    with kernel.launches() as ran:
        helpers.assert_same_step(*both_steps(config_for(1100), state, *args))
    assert ran == ["h2o_decode"]


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 70)),
    room=st.integers(-5, 5),
    share=st.sampled_from([0.0, 0.3, 1.0]),
    decay=st.sampled_from([1.0, 0.98, 0.5]),
    empty=st.sampled_from([0.0, 0.3]),
    strange=st.sampled_from([0.0, 0.1]),
    with_sinks=st.booleans(),
    data=st.data(),
    seed=st.integers(0, 2**20),
)
def test_any_step_is_the_reference_s(
    backend, helpers, dtype, sizes, room, share, decay, empty, strange, with_sinks, data, seed
):
    batch, n_heads, n_slots = sizes
    budget = max(1, n_slots + room)
    n_sink = data.draw(st.integers(0, min(3, budget - 1)))
    grace = data.draw(st.integers(0, budget - 1 - n_sink))
    config = H2OConfig(budget=budget, n_sink=n_sink, grace=grace, decay=decay, long_share=share)
    state = helpers.random_state(seed, batch, n_heads, n_slots, empty=empty, strange=strange, more_seen=seed % 3)
    args = problem(helpers, seed, batch, n_heads, n_slots, (dtype, 3, 8, 6), with_sinks)
    helpers.assert_same_step(*both_steps(config, state, *args))


@settings(max_examples=60, deadline=None)
@given(
    n_slots=st.sampled_from([1, 2, 7, 8, 31, 32, 33, 97, 300, 1000]),
    budget=st.integers(1, 400),
    protected=st.tuples(st.integers(0, 5), st.integers(0, 20)),
    share=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    distinct=st.sampled_from([0, 1, 2, 3]),
    empty=st.sampled_from([0.0, 0.3, 0.9]),
    strange=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**20),
)
def test_selection_is_exactly_the_reference_s(
    backend, helpers, n_slots, budget, protected, share, distinct, empty, strange, seed
):
    """Same state in, so ties and all: the same slots out."""
    n_sink = min(protected[0], budget - 1)
    config = H2OConfig(budget=budget, n_sink=n_sink, grace=min(protected[1], budget - 1 - n_sink), long_share=share)
    state = helpers.random_state(seed, 2, 2, n_slots, distinct, empty, strange)
    victims, expected = eviction.victims(config, state), h2o_core.victims(config, state)
    assert victims.dtype == expected.dtype
    assert mx.array_equal(victims, expected)
    if n_slots >= budget:
        (ours, slots), (theirs, expected) = eviction.evict(config, state), h2o_core.evict(config, state)
        assert slots.dtype == expected.dtype
        assert mx.array_equal(slots, expected)
        assert mx.array_equal(eviction.survivors(config, state), expected)
        assert all(mx.array_equal(x, y, equal_nan=True) for x, y in zip(ours[:4], theirs[:4], strict=True))


@pytest.mark.parametrize("n_slots", SLOTS)
def test_selection_of_any_size(backend, helpers, n_slots):
    """Sizes at which a SIMD-group, a threadgroup and a thread's share end, with ties."""
    config = H2OConfig(budget=n_slots // 2 + 1, n_sink=0, grace=0, long_share=0.4)
    state = helpers.random_state(n_slots, 1, 2, n_slots, distinct=3)
    assert mx.array_equal(eviction.victims(config, state), h2o_core.victims(config, state))
    assert mx.array_equal(eviction.evict(config, state)[1], h2o_core.evict(config, state)[1])


@pytest.mark.parametrize("values", [[-0.0, 0.0, 0.0, -0.0], [-1.0, 1e-45, -1e-45, 3e38], [0.5] * 4])
def test_numbers_order_as_the_reference_orders_them(backend, values):
    row = mx.array([[values]], mx.float32)
    state = h2o_core.H2OState(row, row, mx.array([[[3, 1, 0, 2]]], mx.int32), mx.array([4], mx.int32))
    for share in (0.0, 1.0):
        config = H2OConfig(budget=2, n_sink=0, grace=0, long_share=share)
        assert mx.array_equal(eviction.evict(config, state)[1], h2o_core.evict(config, state)[1])
        assert mx.array_equal(eviction.victims(config, state), h2o_core.victims(config, state))


def test_nothing_held_is_nothing_to_lose(backend):
    state = h2o_core.init(1, 2, capacity=9)
    config = H2OConfig(budget=3, n_sink=0, grace=0)
    assert eviction.victims(config, state).tolist() == [[[0], [0]]]
    after, slots = eviction.evict(config, state)
    assert slots.tolist() == [[[0, 1, 2]] * 2]
    assert after.positions.tolist() == [[[-1] * 4] * 2]


def test_rows_are_read_where_they_lie(backend, helpers):
    """K and V as mlx_lm has them: a slice of a larger buffer, heads and tokens swapped, a state that broadcasts."""
    config, state = config_for(40), helpers.random_state(5, 2, 3, 40)
    q = helpers.normal(1, 2, 1, 6, 64, dtype=mx.float16).swapaxes(1, 2)
    k = helpers.normal(2, 2, 90, 3, 128, dtype=mx.float16).swapaxes(1, 2)[:, :, 5:85:2, ::2]
    v = helpers.normal(3, 2, 3, 256, 64, dtype=mx.float16)[:, :, :40]
    state = state._replace(
        positions=mx.broadcast_to(state.positions[:1, :1], (2, 3, 40)),
        seen=mx.broadcast_to(state.seen[:1], (2,)),
        scores=state.scores.swapaxes(0, 1).swapaxes(0, 1),
    )
    helpers.assert_same_step(*both_steps(config, state, q, k, v, 0.125))


def test_what_is_not_a_number_goes_the_reference_s_way(backend, helpers):
    config, state = config_for(33), helpers.random_state(7, 1, 2, 33)
    q, k, v, scale, _ = problem(helpers, 7, 1, 2, 33, (mx.float32, 2, 64, 64))
    k[0, 0, 4, 3] = mx.nan
    helpers.assert_same_step(*both_steps(config, state, q, k, v, scale))


def test_heads_too_large_for_a_threadgroup_take_more_launches(backend, helpers):
    config, state = config_for(33), helpers.random_state(8, 1, 1, 33)
    args = problem(helpers, 8, 1, 1, 33, (mx.float32, 2, 40, 300), with_sinks=True)
    assert not attention.fits(*args[:3])
    with kernel.launches() as ran:
        helpers.assert_same_step(*both_steps(config, state, *args))
    assert ran == ["h2o_softmax_rows", "h2o_column_mass", "h2o_victims"]


@pytest.mark.parametrize(("group", "widest"), [(32, 110), (16, 350)])
def test_what_fits_just_fits(backend, helpers, group, widest):
    """The emulator refuses a threadgroup of more than 32 KB, as Metal does."""
    config, state = config_for(9), helpers.random_state(2, 1, 1, 9)
    args = problem(helpers, 2, 1, 1, 9, (mx.float32, group, widest, 8))
    assert attention.fits(*args[:3])
    with kernel.launches() as ran:
        helpers.assert_same_step(*both_steps(config, state, *args))
    assert ran == ["h2o_decode"]
    assert not attention.fits(*problem(helpers, 2, 1, 1, 9, (mx.float32, group, widest + 1, 8))[:3])


@pytest.mark.parametrize("backend", ["emulator"], indirect=True)
@pytest.mark.parametrize("order", ["tree", "ascending", "descending"])
@pytest.mark.parametrize("schedule", ["forward", "reverse", "shuffled"])
def test_no_order_of_threads_matters(backend, helpers, schedule, order):
    config, state = config_for(300, 0.5), helpers.random_state(9, 1, 2, 300, distinct=3)
    args = problem(helpers, 9, 1, 2, 300, (mx.float16, 2, 80, 80))
    with options(schedule=schedule, simd_order=order, seed=3):
        helpers.assert_same_step(*both_steps(config, state, *args), victims_too=False)
        assert mx.array_equal(eviction.evict(config, state)[1], h2o_core.evict(config, state)[1])


@pytest.mark.parametrize("backend", ["emulator"], indirect=True)
def test_each_number_of_keys_and_values_is_read_once(backend, helpers):
    """What 64 more dims cost a slot: a read of each key and value, one of four for a query, and one for a share.

    A compiler may keep a thread's copy of a key and its sum in memory: 4 more accesses, which count as well.
    """
    accesses = {}
    for width in (64, 128):
        for n_slots in (128, 256):
            state = helpers.random_state(1, 1, 1, n_slots)
            args = problem(helpers, 1, 1, 1, n_slots, (mx.float32, 1, width, width))
            with launches() as ran:
                eviction.decode_step(H2OConfig(budget=512), state, *args[:4])
            (accesses[width, n_slots],) = (launch.accesses for launch in ran)
    a_slot = [(accesses[width, 256] - accesses[width, 128]) / 128 for width in (64, 128)]
    assert 0 <= a_slot[1] - a_slot[0] - 64 * (1 + 1 / 4 + 1 + 1) <= 64 * 4
