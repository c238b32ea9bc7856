"""The rules of a step, against the float64 oracle, over random shapes, dtypes, budgets and call sizes."""

import math

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_core import (
    H2OConfig,
    H2OState,
    admit,
    attend,
    decode_step,
    evict,
    grow,
    init,
    observe,
    occupied,
    pack,
    release,
    survivors,
    take,
    victims,
    visible,
)
from h2o_core.conformance import TOLERANCE, Head, Row, close, same_choice

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


class Cache:
    """The functions of a step in the order an adapter calls them, with plain key and value arrays."""

    def __init__(self, config, batch, n_heads, width, value_width, scale, dtype):
        self.config, self.scale = config, scale
        self.state = init(batch, n_heads)
        self.k = mx.zeros((batch, n_heads, 0, width), dtype)
        self.v = mx.zeros((batch, n_heads, 0, value_width), dtype)
        self.n_rows, self.holding = 0, not config.evict_during_prefill

    def _take(self, slots):
        self.k = mx.take_along_axis(self.k, slots[..., None], axis=2)
        self.v = mx.take_along_axis(self.v, slots[..., None], axis=2)

    def _append(self, k, v):
        self.k, self.v = mx.concatenate([self.k, k], axis=2), mx.concatenate([self.v, v], axis=2)

    def _empty_rows(self, n):
        return [mx.zeros((*x.shape[:2], n, x.shape[3]), x.dtype) for x in (self.k, self.v)]

    def call(self, q, k, v, sinks=None, split=False):
        n = k.shape[2]
        if n == 1:
            missing = self.n_rows + 1 - self.state.positions.shape[-1]
            if missing > 0:
                self.state = grow(self.state, self.n_rows + 1)
                self._append(*self._empty_rows(missing))
            self.state, slots = admit(self.state, 1)
            put = lambda rows, new: mx.put_along_axis(  # noqa: E731
                rows, mx.broadcast_to(slots[..., None], new.shape), new, axis=2
            )
            self.k, self.v = put(self.k, k), put(self.v, v)
        else:
            order = pack(self.state, self.n_rows)
            self.state = take(self.state, order)
            self._take(order)
            self.state, _ = admit(self.state, n)
            self._append(k, v)
        self.n_rows += n
        narrow = self.state.positions.shape[-1] <= self.config.budget + 1
        if n == 1 and narrow and not split and not self.holding:
            out, self.state, _ = decode_step(self.config, self.state, q, self.k, self.v, self.scale, sinks=sinks)
            self.n_rows = min(self.n_rows, self.config.budget)
            return out
        out, mass = attend(q, self.k, self.v, self.scale, self.config.decay, visible(self.state, n), sinks=sinks)
        self.state = observe(self.config, self.state, mass, n)
        self.holding = self.holding and n > 1
        if self.n_rows > self.config.budget and not self.holding:
            if narrow:
                self.state = release(self.config, self.state, victims(self.config, self.state))
            else:
                self.state, slots = evict(self.config, self.state)
                self._take(slots)
                self._append(*self._empty_rows(1))
            self.n_rows = self.config.budget
        return out

    def kept(self, b, h):
        return {p for p in self.state.positions[b, h].tolist() if p >= 0}

    def scores(self, b, h):
        """(score, total) of each position."""
        pairs = zip(self.state.scores[b, h].tolist(), self.state.totals[b, h].tolist(), strict=True)
        return dict(zip(self.state.positions[b, h].tolist(), pairs, strict=True))


@st.composite
def configs(draw, largest=12):
    budget = draw(st.integers(1, largest))
    n_sink = draw(st.integers(0, min(3, budget - 1)))
    grace = draw(st.integers(0, budget - 1 - n_sink))
    return H2OConfig(
        budget=budget,
        n_sink=n_sink,
        grace=grace,
        decay=draw(st.sampled_from([1.0, 0.98, 0.5])),
        long_share=draw(st.sampled_from([0.0, 0.3, 0.5, 1.0])),
        evict_during_prefill=draw(st.booleans()),
    )


def random_call(key, batch, n_heads, group, n, width, value_width, dtype):
    kq, kk, kv = mx.random.split(key, 3)
    # Large enough that attention is uneven.
    return (
        2 * mx.random.normal((batch, n_heads * group, n, width), key=kq).astype(dtype),
        2 * mx.random.normal((batch, n_heads, n, width), key=kk).astype(dtype),
        mx.random.normal((batch, n_heads, n, value_width), key=kv).astype(dtype),
    )


@settings(max_examples=60, deadline=None)
@given(
    config=configs(),
    dtype=st.sampled_from(DTYPES),
    batch=st.integers(1, 2),
    n_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    widths=st.sampled_from([(4, 4), (8, 3), (2, 6)]),
    calls=st.lists(st.integers(1, 9), min_size=1, max_size=10),
    with_sinks=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_every_call_does_what_the_oracle_does(config, dtype, batch, n_heads, group, widths, calls, with_sinks, seed):
    key = mx.random.key(seed)
    scale, tolerance = widths[0] ** -0.5, TOLERANCE[dtype]
    cache = Cache(config, batch, n_heads, *widths, scale, dtype)
    oracles = {(b, h): Head(config, scale) for b in range(batch) for h in range(n_heads)}
    sinks = mx.random.normal((n_heads * group,), key=key).astype(dtype) if with_sinks else None
    for n in calls:
        key, sub = mx.random.split(key)
        q, k, v = random_call(sub, batch, n_heads, group, n, *widths, dtype)
        out = cache.call(q, k, v, sinks)
        assert out.dtype == dtype
        q, k, v, out = (x.astype(mx.float32).tolist() for x in (q, k, v, out))
        logits = None if sinks is None else sinks.tolist()
        for (b, h), oracle in list(oracles.items()):
            gs = range(h * group, (h + 1) * group)
            gone_before = len(oracle.evicted)
            expected = oracle.call([q[b][g] for g in gs], k[b][h], v[b][h], logits and [logits[g] for g in gs])
            for g, rows in zip(gs, expected, strict=True):
                for ours, theirs in zip(out[b][g], rows, strict=True):
                    assert all(close(x, y, tolerance) for x, y in zip(ours, theirs, strict=True))
            recent = {row.position: row for row in oracle.rows + oracle.evicted[gone_before:]}
            kept, wanted = cache.kept(b, h), set(oracle.kept())
            assert same_choice(kept, wanted, recent, tolerance)
            if kept != wanted:
                del oracles[b, h]
                continue
            for position, (score, total) in cache.scores(b, h).items():
                row = recent.get(position, Row(position, (), ()))
                assert close(score, row.score, tolerance)
                assert close(total, row.total, tolerance)
            if not cache.holding:
                assert len(kept) == min(oracle.seen, config.budget)


def state_of(scores, positions, seen, totals=None):
    scores, totals = (mx.array([[x]], mx.float32) for x in (scores, totals or scores))
    return H2OState(scores, totals, mx.array([[positions]], mx.int32), mx.array([seen], mx.int32))


SCORES = st.one_of(st.sampled_from([0.0, 1.0, 3e38, math.nan, math.inf, -math.inf]), st.floats(0, 4, width=32))


def goes_first(config, numbers, positions, seen):
    """The position that goes from one head: the rule read aloud. numbers: {position: (score, total)}."""
    finite = {p: all(map(math.isfinite, numbers[p])) for p in positions}
    may_go = [p for p in positions if config.n_sink <= p <= seen - 1 - config.grace]
    places = int(config.long_share * (config.budget - config.n_sink - config.grace))
    by_total = sorted((p for p in may_go if finite[p]), key=lambda p: (numbers[p][1], p))
    long_term = by_total[len(by_total) - min(places, len(by_total)) :]
    rest = [p for p in may_go if p not in long_term]
    return min(rest, key=lambda p: (finite[p], numbers[p][0] if finite[p] else 0.0, p))


@settings(max_examples=200, deadline=None)
@given(config=configs(), more=st.integers(1, 9), data=st.data())
def test_selection_is_the_lowest_going_one_by_one(config, more, data):
    n = config.budget + more
    scores, totals = (data.draw(st.lists(SCORES, min_size=n, max_size=n)) for _ in range(2))
    positions = data.draw(st.permutations(range(n)))
    state = state_of(scores, positions, n, totals)

    numbers = dict(zip(positions, zip(scores, totals, strict=True), strict=True))
    expected = set(positions)
    for _ in range(more):
        expected.remove(goes_first(config, numbers, expected, n))

    after, slots = evict(config, state)
    assert set(after.positions[0, 0].tolist()) - {-1} == expected
    assert after.positions.shape[-1] == config.budget + 1
    assert slots[0, 0].tolist() == sorted(slots[0, 0].tolist())
    assert [positions[s] for s in slots[0, 0].tolist()] == after.positions[0, 0, :-1].tolist()
    if more == 1:
        slot = victims(config, state)
        assert set(positions) - {positions[slot.item()]} == expected
        assert set(release(config, state, slot).positions[0, 0].tolist()) - {-1} == expected


@settings(max_examples=60, deadline=None)
@given(config=configs(), more=st.integers(1, 9), seed=st.integers(0, 2**31))
def test_slot_order_does_not_matter(config, more, seed):
    n, key = config.budget + more, mx.random.key(seed)
    # Few distinct scores, so that ties decide.
    state = H2OState(
        mx.random.randint(0, 3, (2, 2, n), key=key).astype(mx.float32),
        mx.random.randint(0, 3, (2, 2, n), key=mx.random.key(seed + 1)).astype(mx.float32),
        mx.broadcast_to(mx.arange(n, dtype=mx.int32), (2, 2, n)),
        mx.array([n, n], mx.int32),
    )
    shuffled = take(state, mx.argsort(mx.random.normal((2, 2, n), key=key), axis=-1))
    plain, mixed = (mx.sort(evict(config, s)[0].positions, axis=-1) for s in (state, shuffled))
    assert mx.array_equal(plain, mixed)


def test_a_head_with_fewer_tokens_than_budget_keeps_them_all():
    config = H2OConfig(budget=3, n_sink=0, grace=0)
    ragged = state_of([5.0, 0, math.nan, 0, 0, 0], [4, -1, 0, -1, -1, -1], 5)
    after, _ = evict(config, ragged)
    assert after.positions[0, 0].tolist() == [4, 0, -1, -1]
    assert survivors(config, ragged)[0, 0, :2].tolist() == [0, 2]
    kept = release(config, ragged, victims(config, ragged))
    assert mx.array_equal(kept.positions, ragged.positions)


@settings(max_examples=30, deadline=None)
@given(
    calls=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    decay=st.sampled_from([1.0, 0.9]),
    seed=st.integers(0, 2**31),
)
def test_below_the_budget_one_call_equals_many(calls, decay, seed):
    config = H2OConfig(budget=100, decay=decay)
    q, k, v = random_call(mx.random.key(seed), 2, 2, 2, sum(calls), 8, 4, mx.float32)
    whole = Cache(config, 2, 2, 8, 4, 0.3, mx.float32)
    parts = Cache(config, 2, 2, 8, 4, 0.3, mx.float32)
    expected = whole.call(q, k, v)
    outs, at = [], 0
    for n in calls:
        outs.append(parts.call(*(x[:, :, at : at + n] for x in (q, k, v))))
        at += n
    assert mx.allclose(mx.concatenate(outs, axis=2), expected, atol=1e-5)
    n_rows = sum(calls)
    order = pack(parts.state, n_rows)
    assert mx.allclose(take(parts.state, order).scores, whole.state.scores, atol=1e-5)
    assert mx.allclose(take(parts.state, order).totals, whole.state.totals, atol=1e-5)
    assert mx.array_equal(take(parts.state, order).positions, whole.state.positions)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 40),
    old=st.integers(0, 20),
    group=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_each_query_adds_exactly_one_per_kv_head(n, old, group, dtype, seed):
    _, k, v = random_call(mx.random.key(seed), 2, 2, 1, n + old, 8, 8, dtype)
    q = random_call(mx.random.key(seed + 1), 2, 2, group, n, 8, 8, dtype)[0]
    _, mass = attend(q, k, v, 0.3, 0.9, mask="causal")
    assert mass.total.dtype == mass.decayed.dtype == mx.float32
    assert mx.allclose(mass.total.sum(axis=-1), mx.full((2, 2), float(n)), rtol=1e-5)
    assert mx.allclose(mass.decayed.sum(axis=-1), mx.full((2, 2), sum(0.9**i for i in range(n))), rtol=1e-5)


@settings(max_examples=30, deadline=None)
@given(n=st.integers(2, 30), old=st.integers(0, 9), block=st.integers(1, 400), seed=st.integers(0, 99))
def test_blocks_and_the_causal_rule_change_nothing(n, old, block, seed):
    import h2o_core.attention as module

    q, k, v = random_call(mx.random.key(seed), 1, 2, 2, n + old, 4, 4, mx.float32)
    state, _ = admit(admit(init(1, 2), old)[0] if old > 1 else init(1, 2), n if old > 1 else n + old)
    n = n if old > 1 else n + old
    expected = attend(q[:, :, -n:], k, v, 0.5, 0.9, visible(state, n))
    whole, module.BLOCK_ELEMENTS = module.BLOCK_ELEMENTS, block
    try:
        out, mass = attend(q[:, :, -n:], k, v, 0.5, 0.9, "causal")
    finally:
        module.BLOCK_ELEMENTS = whole
    assert mx.allclose(out, expected[0], atol=1e-5)
    assert all(mx.allclose(a, b, atol=1e-5) for a, b in zip(mass, expected[1], strict=True))


@pytest.mark.parametrize("n", [1, 5])
def test_padding_gives_no_mass_and_takes_no_slot(n):
    """A batch row with fewer real tokens is as it would be alone, and one with none is untouched."""
    config = H2OConfig(budget=30, decay=0.9)
    q, k, v = random_call(mx.random.key(3), 3, 2, 2, 4 + n, 4, 4, mx.float32)
    lengths = mx.array([n, max(n - 3, 0), 0], mx.int32)
    start, _ = admit(init(3, 2), 4)
    _, mass = attend(q[:, :, :4], k[:, :, :4], v[:, :, :4], 0.5, 0.9, "causal")
    start = observe(config, start, mass, 4)
    state, _ = admit(grow(start, 5) if n == 1 else start, n, lengths)
    out, mass = attend(q[:, :, 4:], k, v, 0.5, 0.9, visible(state, n, lengths), lengths)
    state = observe(config, state, mass, n, lengths)
    assert state.seen.tolist() == [4 + x for x in lengths.tolist()]
    assert mx.allclose(state.scores[2, :, :4], start.scores[2])
    assert mx.allclose(state.totals[2, :, :4], start.totals[2])
    assert occupied(state)[2].sum(axis=-1).tolist() == [4, 4]
    for b, real in enumerate(lengths.tolist()):
        if not real:
            continue
        rows = 4 + real
        one = tuple(x[b : b + 1, :, :rows] for x in (q, k, v))
        alone, single = attend(one[0][:, :, 4:], one[1], one[2], 0.5, 0.9, "causal")
        assert mx.allclose(out[b, :, :real], alone[0], atol=1e-6)
        assert mx.allclose(
            state.scores[b, :, :rows],
            mx.pad(start.scores[b], [(0, 0), (0, real)]) * 0.9**real + single.decayed[0],
            atol=1e-5,
        )
        totals = mx.pad(start.totals[b], [(0, 0), (0, real)]) + single.total[0]
        assert mx.allclose(state.totals[b, :, :rows], totals, atol=1e-5)


def test_long_sums_do_not_stop_growing_in_float16():
    """A sum kept in float16 stops at 2,048."""
    k = mx.zeros((1, 1, 1, 4), mx.float16)
    q = mx.zeros((1, 1, 3000, 4), mx.float16)
    _, mass = attend(q, k, k, 1.0, mask=mx.ones((1, 1, 3000, 1), mx.bool_))
    assert mass.total.item() == 3000.0


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 1], ids=["keys", "values"])
def test_keys_and_values_that_are_not_finite_evict_no_protected_row(number, where):
    config = H2OConfig(budget=8, n_sink=2, grace=3)
    state, kv = init(1, 1, 9), [mx.zeros((1, 1, 9, 4)) for _ in range(2)]
    for step in range(30):
        q, *new = (mx.random.normal((1, 1, 1, 4), key=mx.random.key(3 * step + i)) for i in range(3))
        if step == 10:
            new[where] = new[where] * number
        state, slots = admit(state, 1)
        kv = [
            mx.put_along_axis(x, mx.broadcast_to(slots[..., None], row.shape), row, 2)
            for x, row in zip(kv, new, strict=True)
        ]
        out, state, _ = decode_step(config, state, q, *kv, 0.5)
        kept = sorted(set(state.positions[0, 0].tolist()) - {-1})
        assert len(kept) == min(8, step + 1)
        assert set(range(min(2, step + 1))) | set(range(max(0, step - 2), step + 1)) <= set(kept)
    # It has gone, and with it what it did.
    assert mx.isfinite(out).all()
    assert 10 not in kept
