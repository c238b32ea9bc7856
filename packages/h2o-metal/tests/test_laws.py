"""Whole runs of kernels alone: calls of any size against core's float64 oracle, and long decoding against core."""

import math

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import h2o_core
from h2o_core import H2OConfig, admit, grow, init, observe, pack, take, visible
from h2o_core.conformance import TOLERANCE, Head, Row, close, same_choice
from h2o_metal import attention, eviction, kernel

SCALE = 8**-0.5


class Cache:
    """The functions of a step in the order an adapter calls them, with plain key and value arrays."""

    def __init__(self, steps, config, batch, n_heads, dtype):
        self.attend, self.decode_step, self.evict = steps
        self.config, self.state = config, init(batch, n_heads)
        self.k = self.v = mx.zeros((batch, n_heads, 0, 8), dtype)
        self.n_rows = 0

    def _keep(self, slots, more=0):
        pad = [(0, 0), (0, 0), (0, more), (0, 0)]
        self.k, self.v = (mx.pad(mx.take_along_axis(x, slots[..., None], axis=2), pad) for x in (self.k, self.v))

    def call(self, q, k, v):
        n = k.shape[2]
        if n == 1:
            width = self.state.positions.shape[-1]
            if width < self.n_rows + 1:
                self.state = grow(self.state, width + 1)
                self.k, self.v = (mx.pad(x, [(0, 0), (0, 0), (0, 1), (0, 0)]) for x in (self.k, self.v))
            self.state, slots = admit(self.state, 1)
            put = [(x, mx.broadcast_to(slots[..., None], new.shape), new) for x, new in ((self.k, k), (self.v, v))]
            self.k, self.v = (mx.put_along_axis(*each, axis=2) for each in put)
            out, self.state, _ = self.decode_step(self.config, self.state, q, self.k, self.v, SCALE)
        else:
            order = pack(self.state, self.n_rows)
            self.state, _ = admit(take(self.state, order), n)
            self._keep(order)
            self.k, self.v = mx.concatenate([self.k, k], axis=2), mx.concatenate([self.v, v], axis=2)
            out, mass = self.attend(q, self.k, self.v, SCALE, self.config.decay, "causal")
            self.state = observe(self.config, self.state, mass, n)
            if self.n_rows + n > self.config.budget:
                self.state, slots = self.evict(self.config, self.state)
                self._keep(slots, more=1)
        self.n_rows = min(self.n_rows + n, self.config.budget)
        return out

    def rows(self, b, h):
        """{position: (score, total)} of one head."""
        numbers = zip(*(x[b, h].tolist() for x in self.state[:3]), strict=True)
        return {position: (score, total) for score, total, position in numbers if position >= 0}


KERNELS = (attention.attend, eviction.decode_step, eviction.evict)
REFERENCE = (h2o_core.attend, h2o_core.decode_step, h2o_core.evict)


def random_call(seed, n, dtype, batch=1, n_heads=2, group=2):
    keys = mx.random.split(mx.random.key(seed), 3)
    shapes = [(batch, n_heads * group, n, 8), (batch, n_heads, n, 8), (batch, n_heads, n, 8)]
    return [(2 * mx.random.normal(s, key=key)).astype(dtype) for s, key in zip(shapes, keys, strict=True)]


@settings(max_examples=25, deadline=None)
@given(
    budget=st.integers(3, 12),
    share=st.sampled_from([0.0, 0.5, 1.0]),
    decay=st.sampled_from([1.0, 0.9]),
    dtype=st.sampled_from([mx.float32, mx.float16, mx.bfloat16]),
    calls=st.lists(st.integers(1, 9), min_size=1, max_size=10),
    seed=st.integers(0, 2**20),
)
def test_every_call_does_what_the_oracle_does(backend, budget, share, decay, dtype, calls, seed):
    config = H2OConfig(budget=budget, n_sink=1, grace=1, decay=decay, long_share=share)
    cache = Cache(KERNELS, config, 1, 2, dtype)
    oracles, tolerance = {h: Head(config, SCALE) for h in range(2)}, TOLERANCE[dtype]
    for i, n in enumerate(calls):
        call = random_call(seed + i, n, dtype)
        out = cache.call(*call)
        q, k, v, out = (x.astype(mx.float32).tolist()[0] for x in (*call, out))
        for h, oracle in list(oracles.items()):
            gone_before = len(oracle.evicted)
            expected = oracle.call(q[2 * h : 2 * h + 2], k[h], v[h])
            if n == 1:  # a chunk's output is mx.fast's
                heads = zip(out[2 * h : 2 * h + 2], expected, strict=True)
                pairs = [pair for one, other in heads for pair in zip(one[0], other[0], strict=True)]
                assert all(close(x, y, tolerance) for x, y in pairs)
            recent = {row.position: row for row in oracle.rows + oracle.evicted[gone_before:]}
            rows, wanted = cache.rows(0, h), set(oracle.kept())
            assert same_choice(set(rows), wanted, recent, tolerance)
            assert len(rows) == min(oracle.seen, budget)
            if set(rows) != wanted:
                del oracles[h]
                continue
            for position, (score, total) in rows.items():
                row = recent.get(position, Row(position, (), ()))
                assert close(score, row.score, tolerance)
                assert close(total, row.total, tolerance)


@pytest.mark.parametrize(("dtype", "decay"), [(mx.float32, 1.0), (mx.float16, 0.98)], ids=str)
def test_512_steps_do_not_drift(backend, dtype, decay):
    config = H2OConfig(budget=48, n_sink=2, grace=8, decay=decay, long_share=0.3)
    ours, theirs = (Cache(steps, config, 1, 2, dtype) for steps in (KERNELS, REFERENCE))
    first = random_call(10_000, 40, dtype)
    ours.call(*first), theirs.call(*first)
    with kernel.launches() as ran:
        for step in range(512):
            call = random_call(step, 1, dtype)
            out, expected = ours.call(*call), theirs.call(*call)
            gap = mx.abs(out.astype(mx.float32) - expected.astype(mx.float32)).max().item()
            assert gap <= 5 * TOLERANCE[dtype]
            # The numbers are random, so no two rows all but tie: who is kept must agree to the end.
            assert mx.array_equal(ours.state.positions, theirs.state.positions)
    assert ran == ["h2o_decode"] * 512
    for h in range(2):
        rows, wanted = ours.rows(0, h), theirs.rows(0, h)
        assert len(rows) == 48
        for position, numbers in wanted.items():
            assert all(close(x, y, 1e-5) for x, y in zip(rows[position], numbers, strict=True))
        assert all(math.isfinite(x) for numbers in rows.values() for x in numbers)


@settings(max_examples=15, deadline=None)
@given(n_slots=st.integers(2, 80), seed=st.integers(0, 2**20))
def test_slot_order_and_batch_make_up_do_not_matter(backend, helpers, n_slots, seed):
    config = H2OConfig(budget=max(1, n_slots - 1), n_sink=0, grace=0, long_share=0.5)
    state = helpers.random_state(seed, 2, 2, n_slots, distinct=3)
    q, k, v = (helpers.normal(seed + i, 2, h, n, 8) for i, (h, n) in enumerate([(6, 1), (2, n_slots), (2, n_slots)]))
    k = mx.zeros_like(k)  # each row gets the same mass, so that ties decide
    order = mx.argsort(mx.random.normal((2, 2, n_slots), key=mx.random.key(seed)), axis=-1)
    rows = [mx.take_along_axis(x, order[..., None], axis=2) for x in (k, v)]
    out, after, _ = eviction.decode_step(config, state, q, k, v, 0.3)
    mixed_out, mixed, _ = eviction.decode_step(config, take(state, order), q, *rows, 0.3)
    assert mx.allclose(out, mixed_out, atol=1e-5)
    assert mx.array_equal(mx.sort(after.positions, axis=-1), mx.sort(mixed.positions, axis=-1))
    alone = h2o_core.H2OState(*(x[1:] for x in state))
    one_out, one, _ = eviction.decode_step(config, alone, q[1:], k[1:], v[1:], 0.3)
    assert mx.array_equal(one_out, out[1:])
    assert all(mx.array_equal(x, y[1:]) for x, y in zip(one[:4], after[:4], strict=True))


def test_mass_is_one_for_each_query(backend):
    state, _ = admit(init(1, 2), 33)
    q, k, v = random_call(1, 33, mx.bfloat16)
    _, mass = attention.attend(q, k, v, SCALE, 0.9, visible(state, 33))
    assert mx.allclose(mass.total.sum(axis=-1), mx.full((1, 2), 33.0), rtol=1e-5)
    assert mx.allclose(mass.decayed.sum(axis=-1), mx.full((1, 2), sum(0.9**i for i in range(33))), rtol=1e-5)
