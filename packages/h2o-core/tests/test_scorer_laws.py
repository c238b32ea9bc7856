"""The laws that every scorer keeps: one matrix, on the steps that an adapter takes."""

import mlx.core as mx
import pytest

from h2o_core import (
    H2OConfig,
    Recording,
    admit,
    attend,
    gather,
    grow,
    init,
    observe,
    pack,
    simulate,
    survivors,
    take,
    victims,
    visible,
)
from h2o_core.eviction import merged
from h2o_core.scorer import scorer_names
from h2o_core.scorers.expected_attention import statistics_from
from h2o_core.scorers.qfilters import filters_from
from h2o_core.state import emptied

B, H, G, D, SCALE = 3, 2, 2, 6, 0.4
SMALL = {"window": 4, "span": 16, "targets": 3, "pool": 3}
SCORERS = [*scorer_names(), "h2o by_age", "h2o by_value"]


def config_of(text, **settings):
    from h2o_core.scorer import scorer_kind

    name, *flags = text.split()
    known = scorer_kind(name).__dataclass_fields__
    parameters = {n: x for n, x in SMALL.items() if n in known} | dict.fromkeys(flags, True)
    return H2OConfig(9, n_sink=1, grace=2, scorer={"name": name, **parameters}, **settings)


def made(batch, n, seed=0):
    keys = mx.random.split(mx.random.key(seed), 3)
    return [2 * mx.random.normal((batch, heads, n, D), key=key) for heads, key in zip((H * G, H, H), keys, strict=True)]


def inputs_of(config):
    q = made(1, 60, 99)[0]
    found = {
        "filters": filters_from(q, H),
        "reconstruction": mx.random.uniform(shape=(H, 14), key=mx.random.key(5)),
        **statistics_from(q, SCALE),
    }
    return {n: x for n, x in found.items() if n in config.scorer.inputs}


class Steps:
    """Sequences of different lengths; every call leaves each head's rows first."""

    def __init__(self, config, batch, shuffle=None):
        self.config, self.given, self.shuffle = config, inputs_of(config), shuffle
        self.state = init(batch, H, scorer=config.scorer)
        self.k = self.v = mx.zeros((batch, H, 0, D))
        self.holding = [not config.evict_during_prefill] * batch

    def call(self, q, k, v, lengths=None):
        batch, n = q.shape[0], q.shape[2]
        self._slots(k, v, n, lengths)
        shown = visible(self.state, n, lengths)
        out, mass = attend(q, self.k, self.v, SCALE, self.config.decay, shown, lengths)
        evidence = gather(
            self.config, self.state, mass, q, self.k, self.v, SCALE, shown, lengths, given=self.given or None
        )
        self.state = observe(self.config, self.state, evidence, n, lengths)
        self._check_empty()
        real = [n] * batch if lengths is None else lengths.tolist()
        self.holding = [h and r != 1 for h, r in zip(self.holding, real, strict=True)]
        if self.config.scorer.merges and n == 1:
            self.v = merged(self.config, self.state, self.v, victims(self.config, self.state))
        stays = mx.put_along_axis(
            mx.zeros(self.state.positions.shape, mx.bool_), survivors(self.config, self.state), mx.array(True), -1
        )
        apply = mx.array([not h and r > 0 for h, r in zip(self.holding, real, strict=True)])[:, None, None]
        self.state = emptied(self.state, apply & ~stays)
        self._check_empty()
        # What is left of a row is nobody's business.
        held = (self.state.positions >= 0)[..., None]
        self.k, self.v = (mx.where(held, x, 7.0) for x in (self.k, self.v))
        return out

    def _check_empty(self):
        empty = self.state.positions < 0
        for x in (self.state.scores, self.state.totals, *self.state.extras):
            assert not mx.where(empty.reshape(*empty.shape, *[1] * (x.ndim - 3)), x, 0).any()

    def _slots(self, k, v, n, lengths):
        width = max((self.state.positions >= 0).sum(axis=-1).flatten().tolist(), default=0)
        order = pack(self.state, width)
        if self.shuffle is not None and width:
            self.shuffle, key = mx.random.split(self.shuffle)
            mixed = mx.argsort(mx.random.uniform(shape=order.shape, key=key), axis=-1)
            order = mx.take_along_axis(order, mixed, axis=-1)
        self.state = take(self.state, order)
        self.k, self.v = (mx.take_along_axis(x, order[..., None], axis=2) for x in (self.k, self.v))
        if n > 1:
            self.state, _ = admit(self.state, n, lengths)
            self.k, self.v = (mx.concatenate(pair, axis=2) for pair in ([self.k, k], [self.v, v]))
            return
        self.state, slots = admit(grow(self.state, width + 1), 1, lengths)
        pad = [(0, 0), (0, 0), (0, 1), (0, 0)]
        at = mx.broadcast_to(slots[..., None], k.shape)
        self.k, self.v = (mx.put_along_axis(mx.pad(x, pad), at, new, axis=2) for x, new in ((self.k, k), (self.v, v)))

    def kept(self, b=0):
        """For each head, {position: (score, value)} of sequence b."""
        rows = zip(*(x[b].tolist() for x in (self.state.positions, self.state.scores, self.v)), strict=True)
        return [{p: (s, v) for p, s, v in zip(*row, strict=True) if p >= 0} for row in rows]


def same(a, b):
    """The same positions; scores and values as near as two orders of summing leave them."""
    assert [sorted(x) for x in a] == [sorted(x) for x in b]
    for x, y in zip(a, b, strict=True):
        for p in x:
            assert mx.allclose(mx.array([x[p][0], *x[p][1]]), mx.array([y[p][0], *y[p][1]]), rtol=1e-4, atol=1e-5)


CALLS = [11, 1, 1, 4, *[1] * 10, 3, 1]


def run(steps, arrays, calls):
    at = 0
    for n in calls:
        yield steps.call(*(x[:, :, at : at + n] for x in arrays))
        at += n


@pytest.mark.parametrize("holding", [False, True])
@pytest.mark.parametrize("text", SCORERS)
def test_the_budget_sinks_and_the_newest_hold(text, holding):
    config, seen = config_of(text, evict_during_prefill=not holding), 0
    steps = Steps(config, 2)
    for n, _ in zip(CALLS, run(steps, made(2, sum(CALLS)), CALLS), strict=True):
        seen += n
        held = seen if holding and seen == CALLS[0] else min(seen, 9)
        for b in range(2):
            for head in steps.kept(b):
                assert len(head) == held
                assert {0, seen - 2, seen - 1} <= head.keys()
    assert seen > 9
    assert mx.isfinite(steps.state.scores).all()


@pytest.mark.parametrize("text", SCORERS)
def test_the_same_again_is_the_same_and_the_order_of_slots_is_nothing(text):
    arrays = made(1, sum(CALLS), 4)
    first, again, mixed = (Steps(config_of(text), 1, shuffle) for shuffle in (None, None, mx.random.key(6)))
    for _ in zip(*(run(steps, arrays, CALLS) for steps in (first, again, mixed)), strict=True):
        assert first.kept() == again.kept()
        same(first.kept(), mixed.kept())


@pytest.mark.parametrize("text", SCORERS)
def test_a_sequence_is_as_it_would_be_alone(text):
    """In a batch, with padding in its calls, and with calls that bring it nothing."""
    lengths = [[9, 5, 1], [4, 4, 4], [1, 1, 0], [1, 1, 1], [6, 2, 1], [1, 0, 1], *[[1, 1, 1]] * 8]
    arrays, together = made(B, 40, 8), Steps(config_of(text), B)
    alone, at = [Steps(config_of(text), 1) for _ in range(B)], [0] * B
    for real in lengths:
        n, parts = max(real), []
        for b in range(B):
            own = [x[b : b + 1, :, at[b] : at[b] + real[b]] for x in arrays]
            parts.append([mx.pad(x, [(0, 0), (0, 0), (0, n - real[b]), (0, 0)]) for x in own])
            if real[b]:
                alone[b].call(*own)
            at[b] += real[b]
        together.call(
            *(mx.concatenate(x) for x in zip(*parts, strict=True)), None if min(real) == n else mx.array(real, mx.int32)
        )
        for b in range(B):
            same(together.kept(b), alone[b].kept())


@pytest.mark.parametrize("text", SCORERS)
def test_a_replay_is_what_the_steps_do(text):
    """Whatever blocks the rows come in."""
    config, (q, k, v) = config_of(text), made(1, sum(CALLS), 11)
    steps = Steps(config, 1)
    list(run(steps, (q, k, v), CALLS))
    recording = Recording(queries=q[0], keys=k[0], values=v[0], scale=SCALE)
    whole = recording.rows().whole()
    blocks = (whole[:, at : at + 3] for at in range(0, sum(CALLS), 3))
    for attention in (recording, blocks):
        trace = simulate(
            attention, config, CALLS[0], H, chunk=CALLS[1:], inputs=inputs_of(config) or None, recorded=recording
        )
        scores = zip(trace.state.positions[0].tolist(), trace.state.scores[0].tolist(), strict=True)
        replayed = [{p: (s, []) for p, s in zip(*head, strict=True) if p >= 0} for head in scores]
        same([{p: (s, []) for p, (s, _) in head.items()} for head in steps.kept()], replayed)
