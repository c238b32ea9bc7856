import math
from itertools import combinations

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import h2o_core.rows as module
from h2o_core import H2OConfig, simulate, summarize
from h2o_core.summaries import ages, frozen, optimum


def attention_of(n_heads, n_steps, seed):
    """Powers of two, so that ties are real."""
    raw = 2.0 ** mx.random.randint(-2, 3, (2, n_heads, n_steps, n_steps), key=mx.random.key(seed)) * mx.tri(n_steps)
    return raw / raw.sum(axis=-1, keepdims=True)


def naive_best(row, t, held):
    """Overlap and mass: every set of as many tokens before t is tried."""
    sets = [set(s) for s in combinations(range(t), len(held))]
    mass = {frozenset(s): math.fsum(row[p] for p in s) for s in sets}
    most = max(mass.values())
    best = [s for s in sets if mass[frozenset(s)] > most - 1e-6]
    return max(len(s & held) for s in best) / max(len(held), 1) if held else 1.0, most + row[t]


@settings(max_examples=25, deadline=None)
@given(
    budget=st.integers(2, 4),
    n_heads=st.integers(1, 2),
    group=st.integers(1, 2),
    batched=st.booleans(),
    prompt_len=st.integers(1, 6),
    elements=st.sampled_from([1, 1 << 22]),
    seed=st.integers(0, 999),
)
def test_a_replay_is_measured_as_the_naive_loops_do(budget, n_heads, group, batched, prompt_len, elements, seed):
    n_steps = 9
    attention = attention_of(n_heads * group, n_steps, seed)
    given = attention if batched else attention[0]
    trace = simulate(given, H2OConfig(budget, n_sink=0, grace=1), prompt_len, n_heads)
    whole, module.BLOCK_ELEMENTS = module.BLOCK_ELEMENTS, elements
    try:
        best = optimum(trace, given)
    finally:
        module.BLOCK_ELEMENTS = whole
    measured = [*best, ages(trace), frozen(trace), trace.kept, trace.retained]
    overlap, mass, age, freeze, kept, retained = ((x if batched else x[None]).tolist() for x in measured)
    mean = attention.reshape(2, n_heads, group, n_steps, n_steps).mean(axis=2).tolist()
    for b in range(2 if batched else 1):
        for h in range(n_heads):
            held = set()
            for t in range(n_steps):
                if held or t == 0:
                    ours, most = naive_best(mean[b][h][t], t, held)
                    assert overlap[b][t][h] == pytest.approx(ours, abs=1e-6)
                    assert mass[b][t][h] == pytest.approx(most, abs=1e-5)
                    assert mass[b][t][h] >= retained[b][t][h] - 1e-5
                else:
                    assert math.isnan(overlap[b][t][h])
                held = {p for p in kept[b][t][h] if p >= 0}
                if held:
                    assert age[b][t][h] == pytest.approx(t - sum(held) / len(held), abs=1e-4)
                    first = set(range(min(budget, t + 1)))
                    assert freeze[b][t][h] == pytest.approx(len(held & first) / len(first))
                else:
                    assert math.isnan(age[b][t][h])
                    assert math.isnan(freeze[b][t][h])


def test_the_summary_is_of_the_steps_counted():
    attention = attention_of(2, 30, 5)
    trace = simulate(attention, H2OConfig(8, n_sink=1, grace=2), prompt_len=12)
    summary = summarize(trace, attention, start=12)
    assert mx.allclose(summary.retained, trace.retained[:, 12:].mean(axis=1))
    assert mx.allclose(summary.best, optimum(trace, attention).retained[:, 12:].mean(axis=1))
    assert mx.array_equal(summary.age, ages(trace)[:, -1])
    assert all(x.shape == (2, 2) for x in summary)
    # The steps of the prompt that have no kept set are left out.
    assert mx.isfinite(summarize(trace, attention).overlap).all()


def test_what_does_not_fit_is_refused():
    attention = attention_of(2, 8, 0)[0]
    with pytest.raises(ValueError, match="simulate with keep_positions=True"):
        ages(simulate(attention, H2OConfig(4, 0, 0), keep_positions=False))
    trace = simulate(attention, H2OConfig(4, 0, 0))
    for other in (attention[:, :5, :5], attention[:1], attention[None]):
        with pytest.raises(ValueError, match="the trace is of 8 steps and 2 KV heads, the attention"):
            optimum(trace, other)
