"""Each scorer against a naive loop over one head in Python floats, written from the papers' text."""

import math
from dataclasses import dataclass, field

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_core import (
    H2OConfig,
    H2OState,
    Recording,
    decode_step,
    init,
    simulate,
    victims,
)
from h2o_core.conformance import close
from h2o_core.eviction import merged
from h2o_core.scorers.expected_attention import statistics_from
from h2o_core.scorers.noise import uniform
from h2o_core.scorers.qfilters import filters_from
from h2o_core.scorers.windows import slid

T, D, H, G, SCALE = 40, 4, 2, 2, 0.5

CASES = [
    ("h2o", {}),
    ("h2o", {"by_age": True}),
    ("h2o", {"by_value": True}),
    ("streaming_llm", {}),
    ("tova", {}),
    ("l2norm", {}),
    ("morphkv", {"window": 5}),
    ("morphkv", {"window": 3, "fusion": "max"}),
    ("scissorhands", {"window": 6}),
    ("snapkv", {"window": 4, "pool": 3}),
    ("snapkv", {"window": 3, "pool": 5, "pooling": "max"}),
    ("kvzip", {}),
    ("keydiff", {}),
    ("qfilters", {}),
    ("expected_attention", {"epsilon": 0.01}),
    ("curdkv", {"rank": 0}),
    ("curdkv", {"rank": 3, "combine": "mean", "seed": 5}),
    ("curdkv", {"rank": 0, "combine": "key"}),
    ("keyformer", {"tau": 0.7, "tau_end": 1.5, "span": 20, "seed": 3}),
    ("cam", {}),
]
IDS = [" ".join([name, *(f"{k}={v}" for k, v in given.items())]) for name, given in CASES]


def dot(a, b):
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def norm(a):
    return math.sqrt(dot(a, a))


def softmax(logits):
    top = max(logits.values())
    weights = {p: math.exp(x - top) for p, x in logits.items()}
    total = math.fsum(weights.values())
    return {p: w / total for p, w in weights.items()}


def mean_of(rows):
    return {p: math.fsum(row[p] for row in rows) / len(rows) for p in rows[0]}


@dataclass
class Naive:
    """One KV head of one sequence, its scores from the method of that name below."""

    config: H2OConfig
    queries: list
    keys: list
    values: list
    given: dict
    head: int
    held: list = field(default_factory=list)
    scores: dict = field(default_factory=dict)
    memory: dict = field(default_factory=dict)  # a method's own
    history: list = field(default_factory=list)  # every row, {position: mean over the group}
    new: list = field(default_factory=list)  # (step, a row for each query head) of the call

    def call(self, start, stop):
        self.new = []
        for t in range(start, stop):
            self.held.append(t)
            rows = [softmax({p: SCALE * dot(q[t], self.keys[p]) for p in self.held}) for q in self.queries]
            self.new.append((t, rows))
            self.history.append(mean_of(rows))
        self.scores = getattr(self, self.config.scorer.name)(self.config.scorer, stop - 1)
        before = list(self.held)
        while len(self.held) > self.config.budget:
            may_go = [p for p in self.held if self.config.n_sink <= p < stop - self.config.grace]
            self.held.remove(min(may_go, key=lambda p: (self.scores[p], p)))
        return before

    def window(self, size):
        return self.history[-size:]

    def sums(self, row_of=lambda t, rows: mean_of(rows), weight=lambda p: 1.0):
        sums = self.memory.setdefault("sums", {})
        for t, rows in self.new:
            for p in sums:
                sums[p] *= self.config.decay
            for p, x in row_of(t, rows).items():
                sums[p] = sums.get(p, 0.0) + x * weight(p)
        return {p: sums[p] for p in self.held}

    def h2o(self, s, now):
        sums = self.sums(weight=lambda p: norm(self.values[p]) if s.by_value else 1.0)
        most = {p: math.fsum(self.config.decay**j for j in range(now - p + 1)) for p in self.held}
        return {p: sums[p] / most[p] for p in sums} if s.by_age else sums

    def cam(self, s, now):
        return self.sums()

    def keyformer(self, s, now):
        def disturbed(t, rows):
            tau = s.tau + (s.tau_end - s.tau) * min(1.0, t / s.span)
            out = []
            for g, row in enumerate(rows):
                u = {p: naive_uniform(s.seed, self.head * G + g, t, p) for p in row}
                out.append(softmax({p: (math.log(x) - math.log(-math.log(u[p]))) / tau for p, x in row.items()}))
            return mean_of(out)

        return self.sums(disturbed)

    def streaming_llm(self, s, now):
        return {p: float(p) for p in self.held}

    def tova(self, s, now):
        return {p: self.history[-1][p] for p in self.held}

    def l2norm(self, s, now):
        return {p: -norm(self.keys[p]) for p in self.held}

    def morphkv(self, s, now):
        fuse = math.fsum if s.fusion == "sum" else max
        return {p: fuse(row.get(p, 0.0) for row in self.window(s.window)) for p in self.held}

    def scissorhands(self, s, now):
        return {p: -sum(p in row and row[p] < 1 / len(row) for row in self.window(s.window)) for p in self.held}

    def snapkv(self, s, now):
        final = self.memory.setdefault("final", {})
        over = bool(final)
        mass = {p: math.fsum(row.get(p, 0.0) for row in self.window(s.window)) / s.window for p in self.held}
        order, side, scores = sorted(self.held), s.pool // 2, {}
        for i, p in enumerate(order):
            near = [mass[x] for x in order[max(0, i - side) : i + side + 1]]
            pooled = math.fsum(near) / s.pool if s.pooling == "mean" else max(near)
            scores[p] = final.get(p, p + 2.0 if over or p > now - s.window else pooled)
        if over or len(self.new) == 1:
            final.update(scores)
        return scores

    def kvzip(self, s, now):
        known = self.given["reconstruction"][self.head]
        return {p: known[p] if p < len(known) else p + 2.0 for p in self.held}

    def keydiff(self, s, now):
        units = {p: [x / norm(self.keys[p]) for x in self.keys[p]] for p in self.held}
        anchor = [math.fsum(units[p][d] for p in units) for d in range(D)]
        return {p: -dot(units[p], anchor) / norm(anchor) for p in self.held}

    def qfilters(self, s, now):
        return {p: dot(self.keys[p], self.given["filters"][self.head]) for p in self.held}

    def expected_attention(self, s, now):
        rows = []
        for g in range(self.head * G, self.head * G + G):
            mean, cov = self.given["query_mean"][g], self.given["query_cov"][g]
            spread = {p: dot([dot(row, self.keys[p]) for row in cov], self.keys[p]) for p in self.held}
            rows.append(softmax({p: dot(mean, self.keys[p]) + spread[p] / 2 for p in self.held}))
        expected = mean_of(rows)
        return {p: (expected[p] + s.epsilon) * norm(self.values[p]) for p in self.held}

    def curdkv(self, s, now):
        def shares(rows, key):
            columns = mx.random.normal((D, s.rank), key=key).T.tolist() if s.rank else None
            seen = {p: [dot(rows[p], c) for c in columns] if columns else rows[p] for p in self.held}
            total = math.fsum(dot(x, x) for x in seen.values())
            return {p: dot(x, x) / total for p, x in seen.items()}

        a, b = (shares(x, key) for x, key in zip((self.keys, self.values), mx.random.split(mx.random.key(s.seed))))  # noqa: B905
        of = {"product": lambda p: a[p] * b[p], "mean": lambda p: (a[p] + b[p]) / 2, "key": lambda p: a[p]}
        return {p: of[s.combine](p) for p in self.held}


def naive_uniform(seed, *counters):
    """The same in Python integers."""

    def mixed(w):
        w ^= w >> 16
        w = w * 0x85EBCA6B & 0xFFFFFFFF
        w ^= w >> 13
        w = w * 0xC2B2AE35 & 0xFFFFFFFF
        return w ^ w >> 16

    word = mixed(seed)
    for counter, odd in zip(counters, (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D), strict=False):
        word = mixed(word ^ (counter * odd & 0xFFFFFFFF))
    return ((word >> 9) + 0.5) / 2**23


def recorded(seed, n_steps=T):
    q, k, v = (
        2 * mx.random.normal((n, n_steps, D), key=key)
        for n, key in zip((H * G, H, H), mx.random.split(mx.random.key(seed), 3), strict=True)
    )
    return Recording(queries=q, keys=k, values=v, scale=SCALE, n_kv_heads=H)


def inputs_of(recording, n_known=12):
    return {
        "filters": filters_from(recording.queries, H),
        "reconstruction": mx.random.uniform(shape=(H, n_known), key=mx.random.key(9)),
        **statistics_from(recording.queries, SCALE),
    }


def config_of(name, parameters, **more):
    return H2OConfig(8, n_sink=1, grace=2, scorer={"name": name, **parameters}, **more)


@pytest.mark.parametrize("calls", [[1] * T, [11, 1, *[1] * 28], [9, 8, 1, 1, 5, 1, 1, 9, 1, 1, 1, 1, 1]], ids=len)
@pytest.mark.parametrize(("name", "parameters"), CASES, ids=IDS)
def test_the_scores_are_the_naive_ones(name, parameters, calls):
    config, recording = config_of(name, parameters), recorded(len(calls))
    inputs = {n: x for n, x in inputs_of(recording).items() if n in config.scorer.inputs}
    trace = simulate(recording, config, calls[0], chunk=calls[1:], inputs=inputs)
    q, k, v = (x.tolist() for x in (recording.queries, recording.keys, recording.values))
    plain = {n: x.tolist() for n, x in inputs.items()}
    for h in range(H):
        naive, at = Naive(config, q[h * G : h * G + G], k[h], v[h], plain, h), 0
        for n in calls:
            naive.call(at, at + n)
            at += n
            ours = [p for p in trace.kept[at - 1, h].tolist() if p >= 0]
            assert ours == sorted(naive.held), f"after {at} tokens"
        positions, scores = trace.state.positions[0, h].tolist(), trace.state.scores[0, h].tolist()
        assert all(close(scores[positions.index(p)], naive.scores[p], 2e-5) for p in naive.held)


@pytest.mark.parametrize(
    ("name", "parameters"), [c for c in CASES[1:] if c[0] != "cam"], ids=[i for i in IDS[1:] if i != "cam"]
)
def test_it_keeps_what_h2o_does_not(name, parameters):
    recording, config = recorded(7), config_of(name, parameters)
    inputs = {n: x for n, x in inputs_of(recording).items() if n in config.scorer.inputs}
    h2o = simulate(recording, config_of("h2o", {}), 12)
    assert not mx.array_equal(simulate(recording, config, 12, inputs=inputs).kept[-1], h2o.kept[-1])


@pytest.mark.parametrize("name", ["cam", "keyformer"])
@pytest.mark.parametrize("rule", [{"decay": 0.9}, {"decay": 1.0, "long_share": 0.5}])
def test_two_scorers_have_h2o_in_them(name, rule):
    """Decay and grace included, bit for bit."""
    parameters = {"cam": {"merge": "drop"}, "keyformer": {"tau": 0.0, "seed": 8}}[name]
    recording = recorded(2)
    ours, theirs = (
        simulate(recording, config_of(n, own, **rule), 9, chunk=[3, 1, 1, 6])
        for n, own in ((name, parameters), ("h2o", {}))
    )
    assert ours.state.extras == theirs.state.extras == ()
    assert all(mx.array_equal(a, b) for a, b in zip(ours[:3] + ours.state[:4], theirs[:3] + theirs.state[:4]))  # noqa: B905


def test_streaming_llm_keeps_exactly_sinks_and_the_newest():
    config = H2OConfig(10, n_sink=3, grace=2, scorer="streaming_llm")
    kept = simulate(recorded(4), config, 15).kept
    for t in range(14, T):
        assert kept[t, 0].tolist() == [0, 1, 2, *range(t - 6, t + 1)]


def test_the_noise_is_the_words_of_python_and_spread_evenly():
    q, k = mx.arange(40)[:, None], mx.arange(100)
    ours = uniform(7, mx.array(3), q, k)
    assert ours.tolist() == [[naive_uniform(7, 3, i, j) for j in range(100)] for i in range(40)]
    assert 0 < ours.min().item() < 0.01
    assert 0.99 < ours.max().item() < 1
    assert abs(ours.mean().item() - 0.5) < 0.02
    lag = ours[:, 1:] - 0.5
    assert abs((lag * (ours[:, :-1] - 0.5)).mean().item()) < 0.005


def test_filters_point_where_queries_do_whatever_sign_the_decomposition_has():
    direction = mx.array([3.0, 0, -4.0, 0]) / 5
    for sign in (1, -1):
        strength = mx.random.normal((G * H, 500, 1), key=mx.random.key(1)) + 3
        q = sign * strength * direction + 0.1 * mx.random.normal((G * H, 500, 4), key=mx.random.key(2))
        found = filters_from(q, H)
        assert mx.allclose(found, mx.broadcast_to(sign * direction, (H, 4)), atol=0.02)
    with pytest.raises(ValueError, match="n_kv_heads must divide the 4 query heads, got 3"):
        filters_from(q, 3)


def test_statistics_are_mean_and_covariance_of_scaled_queries():
    q = mx.random.normal((2, 3, 50, D), key=mx.random.key(3))  # two sequences of three heads
    found = statistics_from(q, 0.3)
    for g in range(3):
        rows = [[0.3 * x for x in row] for b in range(2) for row in q[b, g].tolist()]
        mean = [math.fsum(c) / 100 for c in zip(*rows, strict=True)]
        cov = [[math.fsum((r[i] - mean[i]) * (r[j] - mean[j]) for r in rows) / 100 for j in range(D)] for i in range(D)]
        assert mx.allclose(found["query_mean"][g], mx.array(mean), atol=1e-6)
        assert mx.allclose(found["query_cov"][g], mx.array(cov), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "inputs", "message"),
    [
        ("kvzip", {}, "scorer 'kvzip' needs reconstruction from the caller"),
        ("tova", {"filters": mx.zeros((H, D))}, "scorer 'tova' takes no input filters: it takes none"),
        (
            "kvzip",
            {"reconstruction": mx.zeros((H + 1, 5))},
            r"reconstruction must be \[H, T\] or .* got shape \(3, 5\)",
        ),
        ("qfilters", {"filters": mx.zeros((D, H))}, r"filters must be \[H, D\] = \[2, 4\], got shape \(4, 2\)"),
        (
            "expected_attention",
            {"query_mean": mx.zeros((4, D)), "query_cov": mx.zeros((4, D, 3))},
            "query_mean and query_cov must be",
        ),
    ],
)
def test_a_wrong_input_is_named(name, inputs, message):
    with pytest.raises(ValueError, match=message):
        simulate(recorded(1), config_of(name, {}), inputs=inputs)


def test_each_sequence_has_a_reconstruction_of_its_own_and_none_is_recency():
    config, one = config_of("kvzip", {}), recorded(6)
    both = Recording(*(None if x is None else mx.stack([x, x]) for x in one[:4]), SCALE, H)
    known = mx.random.uniform(shape=(2, H, 12), key=mx.random.key(2))
    together = simulate(both, config, 12, inputs={"reconstruction": known})
    for b in range(2):
        alone = simulate(one, config, 12, inputs={"reconstruction": known[b]})
        assert mx.array_equal(together.kept[b], alone.kept)
    assert not mx.array_equal(together.kept[0, 12], together.kept[1, 12])
    nothing = simulate(one, config, 12, inputs={"reconstruction": known[0, :, :0]})
    newest = simulate(one, config_of("streaming_llm", {}), 12)
    assert mx.array_equal(nothing.kept, newest.kept)


def test_what_a_trace_lacks_is_named():
    attention = recorded(1).rows().whole()
    with pytest.raises(ValueError, match="'l2norm' needs keys, and this trace has attention alone: pass a Recording"):
        simulate(attention, config_of("l2norm", {}), n_kv_heads=H)
    with pytest.raises(ValueError, match="'curdkv' needs values, and this trace has queries and keys alone"):
        simulate(recorded(1)._replace(values=None), config_of("curdkv", {}))
    assert simulate(attention, config_of("tova", {}), n_kv_heads=H).kept is not None


@settings(max_examples=60, deadline=None)
@given(
    calls=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=8),
    size=st.integers(1, 7),
    padded=st.booleans(),
)
def test_a_window_is_the_last_real_rows_whatever_the_calls(calls, size, padded):
    seen, recent, number = [[0.0] * size, [0.0] * size], mx.zeros((2, 1, 1, size)), 0
    for n, *real in calls:
        real = [min(r, n) for r in real] if padded else [n, n]
        m, rows = min(size, n), []
        for b in range(2):
            own = [float(number := number + 1) for _ in range(real[b])]
            seen[b] += own
            rows.append([[[-1.0]] * (m - min(m, real[b])) + [[x] for x in own[-m:]]])
        recent = slid(recent, mx.array(rows), mx.array(real, mx.int32) if padded else None)
        assert recent[:, 0, 0].tolist() == [x[-size:] for x in seen]


@pytest.mark.parametrize(("targets", "seed"), [(3, 0), (3, 1), (3, 2), (64, 3)])
def test_cam_shares_the_victims_value_among_the_rows_behind_it(targets, seed):
    config = H2OConfig(8, n_sink=0, grace=0, scorer={"name": "cam", "targets": targets, "seed": seed})
    keys = mx.random.split(mx.random.key(seed))
    positions = mx.argsort(mx.random.uniform(shape=(1, H, 9), key=keys[0]), axis=-1).astype(mx.int32) * 3
    # The victim comes early, and its mass is half of the others' or nearly theirs.
    scores = mx.where(positions == 6, 0.8, 1 + mx.random.uniform(shape=(1, H, 9), key=keys[1]))
    state = H2OState(scores, scores, positions, mx.array([30], mx.int32))
    slots = victims(config, state)
    values = mx.random.normal((1, H, 9, D), key=mx.random.key(seed + 10))
    found, happened = merged(config, state, values, slots), 0
    for h in range(H):
        positions, scores, slot = state.positions[0, h].tolist(), state.scores[0, h].tolist(), slots[0, h, 0].item()
        behind = sorted(p for p in positions if p > positions[slot])[:targets]
        mean = math.fsum(scores[positions.index(p)] for p in behind) / len(behind)
        happens = naive_uniform(seed, h, positions[slot]) < scores[slot] / mean
        happened += happens
        expected = values[0, h].tolist()
        for p in behind if happens else ():
            row = expected[positions.index(p)]
            expected[positions.index(p)] = [x + y / len(behind) for x, y in zip(row, expected[slot], strict=True)]
        assert mx.allclose(found[0, h], mx.array(expected), atol=1e-6)
    assert mx.array_equal(found, values) == (not happened)
    fits = H2OConfig(9, n_sink=0, grace=0, scorer=config.scorer)
    assert mx.array_equal(merged(fits, state, values, slots), values)


def test_cam_merges_as_often_as_the_masses_say():
    """A victim with half of the others' mass leaves its value every second time."""
    config = H2OConfig(4, n_sink=0, grace=0, scorer="cam")
    n = 400
    positions = mx.broadcast_to(mx.arange(n)[None, :, None] * 5 + mx.arange(5), (1, n, 5)).astype(mx.int32)
    scores = mx.broadcast_to(mx.array([0.5, 1, 1, 1, 1]), (1, n, 5))
    state = H2OState(scores, scores, positions, mx.array([5 * n], mx.int32))
    share = config.scorer.shares(state, mx.zeros((1, n, 1), mx.int32)).sum(axis=-1)
    assert set(share.flatten().tolist()) == {0.0, 1.0}
    assert abs(share.mean().item() - 0.5) < 0.06


def test_a_whole_step_is_refused_where_values_change():
    state = init(1, 1, 5)
    with pytest.raises(ValueError, match="decode_step changes no values, and scorer 'cam' merges them"):
        decode_step(H2OConfig(4, n_sink=0, grace=0, scorer="cam"), state, *[mx.zeros((1, 1, 1, 2))] * 3, 1.0)
