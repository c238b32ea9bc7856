import itertools
import math

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import h2o_core.rows as module
from h2o_core import H2OConfig, Rows, simulate
from h2o_core.conformance import close


def call_ends(n_steps, prompt_len, chunk):
    """The size of the call that ends at each step where one ends."""
    sizes = itertools.chain(
        [prompt_len], itertools.repeat(chunk) if isinstance(chunk, int) else [*chunk, *[1] * n_steps]
    )
    ends, at = {}, 0
    for n in sizes:
        if at >= n_steps:
            return ends
        stop = min(at + n, n_steps)
        ends[stop - 1], at = stop - at, stop
    return ends


def naive(rows, config, prompt_len, chunk=1):
    """One KV head, [G][T][T] floats: kept, retained and evicted per step, from the definition."""
    ends = call_ends(len(rows[0]), prompt_len, chunk)
    scores, totals = {}, {}
    kept, retained, evicted = [], [], []
    n_steps = len(rows[0])
    holding = not config.evict_during_prefill
    for t in range(n_steps):
        last_of_call = t in ends
        visible = [*scores, t]
        scores = {p: s * config.decay for p, s in scores.items()} | {t: 0.0}
        totals[t] = 0.0
        share = 0.0
        for row in rows:
            held = math.fsum(row[t][p] for p in visible)
            share += held / len(rows)
            for p in visible:
                if held > 0:
                    scores[p] += row[t][p] / held / len(rows)
                    totals[p] += row[t][p] / held / len(rows)
        retained.append(share)
        if ends.get(t) == 1:
            holding = False
        gone = []
        while last_of_call and not holding and len(scores) > config.budget:
            open_rows = [p for p in scores if config.n_sink <= p <= t - config.grace]
            old = sorted(open_rows, key=lambda p: (totals[p], p), reverse=True)[: config.n_long]
            gone.append(min(set(open_rows) - set(old), key=lambda p: (scores[p], p)))
            del scores[gone[-1]]
        fits = last_of_call and len(scores) <= config.budget
        kept.append(sorted(scores) if fits else [])
        single = len(gone) == 1 and ends[t] == 1
        evicted.append(gone[0] if single else -1)
    return kept, retained, evicted


@st.composite
def cases(draw):
    budget = draw(st.integers(2, 8))
    n_sink = draw(st.integers(0, min(2, budget - 1)))
    config = H2OConfig(
        budget=budget,
        n_sink=n_sink,
        grace=draw(st.integers(0, budget - 1 - n_sink)),
        decay=draw(st.sampled_from([1.0, 0.9])),
        long_share=draw(st.sampled_from([0.0, 0.5])),
        evict_during_prefill=draw(st.booleans()),
    )
    n_steps = draw(st.integers(1, 24))
    chunk = draw(st.one_of(st.just(1), st.integers(1, 9), st.lists(st.integers(1, 9), max_size=4)))
    return config, n_steps, draw(st.integers(1, n_steps)), chunk


@settings(max_examples=80, deadline=None)
@given(
    case=cases(),
    n_heads=st.integers(1, 2),
    group=st.integers(1, 2),
    batched=st.booleans(),
    block=st.one_of(st.none(), st.integers(1, 9)),
    seed=st.integers(0, 2**31),
)
def test_a_replay_is_the_naive_loop(case, n_heads, group, batched, block, seed):
    config, n_steps, prompt_len, chunk = case
    # Powers of two: exact in float32, so that ties are real.
    raw = 2.0 ** mx.random.randint(-2, 3, (2, n_heads * group, n_steps, n_steps), key=mx.random.key(seed))
    raw = raw * mx.tri(n_steps)
    attention = raw / raw.sum(axis=-1, keepdims=True)
    given = attention if batched else attention[0]
    # In one array, or as an iterator that shows each block's tokens so far.
    cuts = range(0, n_steps, block or n_steps)
    blocks = given if block is None else (given[..., at : at + block, : min(at + block, n_steps)] for at in cuts)
    trace = simulate(blocks, config, prompt_len, n_heads, chunk=chunk)
    assert trace.state.positions.shape[:2] == (len(attention) if batched else 1, n_heads)
    trace = [x if batched else x[None] for x in trace[:3]]
    rows = attention.tolist()
    for b in range(2 if batched else 1):
        for h in range(n_heads):
            kept, retained, evicted = naive(rows[b][h * group : (h + 1) * group], config, prompt_len, chunk)
            ours = [[p for p in step if p >= 0] for step in trace[0][b, :, h].tolist()]
            assert (
                all(close(x, y, 1e-5) for x, y in zip(trace[1][b, :, h].tolist(), retained, strict=True))
                or ours != kept
            )
            for t, (mine, theirs) in enumerate(zip(ours, kept, strict=True)):
                if mine != theirs:
                    # float32 and float64 may part on a tie made by rounding; never on the first eviction
                    assert t > config.budget
                    break
            else:
                assert trace[2][b, :, h].tolist() == evicted


@pytest.mark.parametrize(
    ("shape", "prompt_len", "heads", "message"),
    [
        ((2, 4, 5), 1, None, "attention must be .* got shape"),
        ((4, 4), 1, None, "attention must be .* got shape"),
        ((2, 0, 0), 1, None, "T at least 1"),
        ((2, 4, 4), 5, None, "prompt_len must be between 1 and T=4, got 5"),
        ((2, 4, 4), 0, None, "prompt_len must be between 1 and T=4, got 0"),
        ((3, 4, 4), 1, 2, "n_kv_heads must divide the 3 query heads, got 2"),
    ],
)
def test_bad_input_is_named(shape, prompt_len, heads, message):
    with pytest.raises(ValueError, match=message):
        simulate(mx.zeros(shape), H2OConfig(4, 0, 0), prompt_len, heads)


def test_a_row_without_held_mass_adds_none():
    attention = mx.eye(6)[None]
    attention[0, 5] = mx.array([0, 0, 0, 1.0, 0, 0])
    trace = simulate(attention, H2OConfig(budget=2, n_sink=0, grace=0, decay=1.0))
    # Each token attends to itself; the tie on mass goes to the lowest position.
    assert trace.kept[4, 0].tolist() == [3, 4]
    assert trace.retained[:, 0].tolist() == [1.0] * 6
    assert trace.evicted[:, 0].tolist() == [-1, -1, 0, 1, 2, 5]


def test_positions_are_optional():
    assert simulate(mx.eye(3)[None], H2OConfig(2, 0, 0), keep_positions=False).kept is None


@pytest.mark.parametrize("chunk", [0, -1, [2, 0], [1.5]])
def test_a_bad_chunk_is_named(chunk):
    with pytest.raises(ValueError, match=r"chunk must be a number of rows, or a list of them, each at least 1, got"):
        simulate(mx.eye(3)[None], H2OConfig(2, 0, 0), chunk=chunk)


@pytest.mark.parametrize(
    ("blocks", "prompt_len", "message"),
    [
        ([], 1, "at least one row, got none"),
        ([mx.ones((1, 1))], 1, r"a block of rows must be \[Hq, n, W\] or"),
        ([mx.ones((1, 1, 1)), mx.ones((1, 2, 2))], 1, r"\[1, 2, W\] with W at least 3, the tokens so far"),
        ([mx.ones((1, 1, 1)), mx.ones((2, 1, 2))], 1, r"\[1, 1, W\] with W at least 2"),
        ([mx.ones((1, 1, 1))], 2, "prompt_len must be between 1 and T=1, got 2"),
    ],
)
def test_bad_blocks_are_named(blocks, prompt_len, message):
    with pytest.raises(ValueError, match=message):
        simulate(iter(blocks), H2OConfig(2, 0, 0), prompt_len)


def test_a_long_trace_is_read_once_and_never_held(monkeypatch):
    """4 heads of 1,024 steps would be 16 MiB; a block is 1."""
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 1 << 18)
    n_steps, n_heads = 1024, 4
    made = []

    def make(start, stop):
        made.append(start)
        row = 1.0 / mx.arange(start + 1, stop + 1)[:, None]
        return mx.broadcast_to(mx.tri(stop - start, stop, start) * row, (n_heads, stop - start, stop))

    config = H2OConfig(budget=256, n_sink=4, grace=16)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    trace = simulate(Rows((n_heads, n_steps, n_steps), make), config, keep_positions=False)
    assert mx.get_peak_memory() - before < 8 << 20
    assert made == list(range(0, n_steps, 64))
    assert trace.state.seen.tolist() == [n_steps]
    assert (trace.state.positions >= 0).sum(axis=-1).tolist() == [[256] * n_heads]


def test_what_is_left_of_scores_and_what_went_is_what_was_seen():
    """With decay 1 every step adds 1, shared by those held."""
    rows = mx.softmax(mx.where(mx.tri(50) > 0, mx.random.normal((2, 50, 50), key=mx.random.key(1)), -mx.inf), axis=-1)
    trace = simulate(rows, H2OConfig(60, n_sink=4, grace=16, decay=1.0))
    assert mx.allclose(trace.state.totals.sum(axis=-1), mx.full((1, 2), 50.0), rtol=1e-5)
    assert mx.array_equal(trace.state.totals, trace.state.scores)
