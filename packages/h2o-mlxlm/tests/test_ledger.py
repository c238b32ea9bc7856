"""Layers that keep their scores in one go keep the very scores that they keep alone."""

import copy

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_core import H2OConfig
from h2o_mlxlm import scaled_dot_product_attention
from h2o_mlxlm.cache import H2OKVCache, share
from h2o_mlxlm.ledger import Ledger

CONFIG = H2OConfig(8, n_sink=1, grace=2, decay=0.9, long_share=0.4)


def call(cache, seed, n=1, heads=2):
    keys, values, queries = (mx.random.normal((1, heads, n, 4), key=mx.random.key(3 * seed + i)) for i in range(3))
    mask = cache.make_mask(n)
    return scaled_dot_product_attention(queries, *cache.update_and_fetch(keys, values), cache, 0.5, mask)


def layers(configs, together):
    caches = [H2OKVCache(config, backend="reference") for config in configs]
    if together:
        share(caches)
    return caches


def run(caches, sizes):
    """The calls of a model: each goes through all layers."""
    return [call(cache, 1000 * i + j, n) for i, n in enumerate(sizes) for j, cache in enumerate(caches)]


def same(one, other):
    for ours, theirs in zip(one, other, strict=True):
        for name in ("kept_positions", "scores", "totals"):
            assert mx.array_equal(getattr(ours, name), getattr(theirs, name))


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.lists(st.sampled_from([1, 1, 1, 1, 3, 12]), min_size=3, max_size=25),
    budgets=st.lists(st.sampled_from([8, 8, 6]), min_size=1, max_size=4),
)
def test_together_is_as_alone(sizes, budgets):
    configs = [H2OConfig(budget, n_sink=1, grace=2, decay=0.9) for budget in budgets]
    together, alone = layers(configs, True), layers(configs, False)
    assert all(mx.array_equal(a, b) for a, b in zip(run(together, sizes), run(alone, sizes), strict=True))
    same(together, alone)


@pytest.fixture
def done(monkeypatch):
    """How often a ledger has done what was left."""
    times = []
    plain = Ledger._do

    def counted(self, like):
        times.append(like)
        return plain(self, like)

    monkeypatch.setattr(Ledger, "_do", counted)
    return times


def test_one_go_ends_the_step_of_all_layers(done):
    run(layers([CONFIG] * 5, True), [8, 1, 1, 1, 1])
    # The first call of one token fills the slots and leaves a step to do, as does each after it.
    assert len(done) == 3


def test_what_has_been_looked_at_meanwhile_is_done_again():
    """A layer whose call was ended by a reader, before or between the others, goes on from what it has."""
    together, alone = layers([CONFIG] * 3, True), layers([CONFIG] * 3, False)
    for caches in (together, alone):
        run(caches, [9, 1, 1])
    assert mx.array_equal(together[1].scores, alone[1].scores)
    outs = [[], []]
    for caches, out in zip((together, alone), outs, strict=True):
        out.append(call(caches[0], 50))
        # By now the ledger has done the step of the third layer, which has not been called yet.
        assert caches[2].scores.shape == (1, 2, 8)
        out.extend(call(cache, 51) for cache in caches[1:])
    assert all(mx.array_equal(a, b) for a, b in zip(*outs, strict=True))
    same(together, alone)


def test_copies_share_a_ledger_of_their_own(done):
    caches = layers([CONFIG] * 3, True)
    run(caches, [9, 1, 1])
    copied = copy.deepcopy(caches)
    assert len({id(cache.ledger) for cache in copied}) == 1
    assert copied[0].ledger is not caches[0].ledger
    for each in (caches, copied):
        for i in range(3):
            run(each, [1] * (i + 1))
    same(caches, copied)
    # The copies' first step is left in no ledger, so each does its own; from the second on they go together.
    assert len(done) == 1 + 6 + (3 + 5)


def test_a_second_list_in_the_same_ledger_disturbs_nothing():
    """As merged caches are, which begin as shallow copies of the first."""
    first, alone = layers([CONFIG] * 2, True), layers([CONFIG] * 2, False)
    second = [copy.copy(cache) for cache in first]
    for i in range(15):
        for j, (one, two, three) in enumerate(zip(first, second, alone, strict=True)):
            n = 9 if i == 0 else 1
            outs = [call(cache, 100 * i + j, n) for cache in (one, two, three)]
            assert mx.array_equal(outs[0], outs[2])
            assert mx.array_equal(outs[1], outs[2])
    same(first, alone)
    same(second, alone)
