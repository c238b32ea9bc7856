"""The published variants: our configurations keep what loops written from the text keep."""

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_core import H2OConfig, simulate
from h2o_core.variants import (
    VARIANTS,
    algorithm_1,
    algorithm_1_oracle,
    from_zero_oracle,
    hidden_step_oracle,
    look_ahead_oracle,
    overwriting,
    overwriting_oracle,
    text_generation,
    text_generation_oracle,
)

# The same cases each time: a loop in float64 may part from float32 where two sums all but tie.
same_cases = settings(max_examples=25, deadline=None, derandomize=True)
seeds = st.integers(0, 999)


def attention_of(n_steps, seed):
    noise = 2 * mx.random.normal((1, n_steps, n_steps), key=mx.random.key(seed))
    return mx.softmax(mx.where(mx.tri(n_steps) > 0, noise, -mx.inf), axis=-1)


def kept_by(attention, config, **kwargs):
    trace = simulate(attention, config, **kwargs)
    return [[p for p in step if p >= 0] for step in trace.kept[:, 0].tolist()]


@same_cases
@given(n_steps=st.integers(2, 40), budget=st.integers(1, 9), seed=seeds)
def test_algorithm_1(n_steps, budget, seed):
    attention = attention_of(n_steps, seed)
    assert kept_by(attention, algorithm_1(budget)) == algorithm_1_oracle(attention[0].tolist(), budget)


@same_cases
@given(n_steps=st.integers(4, 40), budget=st.integers(2, 9), prompt_len=st.integers(2, 30), seed=seeds)
def test_text_generation_prunes_once_and_keeps_halves(n_steps, budget, prompt_len, seed):
    """mlx_lm's calls: the prompt but its last token, then one token a call; the authors': the prompt in one call."""
    attention, prompt_len = attention_of(n_steps, seed), min(prompt_len, n_steps - 1)
    recent = budget // 2
    expected = text_generation_oracle(attention[0].tolist(), budget - recent, recent, prompt_len + 1)
    ours = kept_by(attention, text_generation(budget), prompt_len=prompt_len)
    assert ours[prompt_len:] == expected[prompt_len:]
    # Pruning at the end of a prompt that is one call is the same.
    whole = H2OConfig(budget, n_sink=0, grace=recent, decay=1.0, long_share=0.0)
    assert kept_by(attention, whole, prompt_len=prompt_len + 1)[prompt_len:] == expected[prompt_len:]


@same_cases
@given(n_steps=st.integers(4, 40), seed=seeds, cut=st.integers(2, 18))
def test_pruning_once_does_not_depend_on_how_the_prompt_was_cut(n_steps, seed, cut):
    attention = attention_of(20 + n_steps, seed)
    whole = kept_by(attention, text_generation(6), prompt_len=20)
    parts = kept_by(attention, text_generation(6), prompt_len=cut, chunk=[20 - cut] if cut < 19 else [])
    assert parts[20:] == whole[20:]


@same_cases
@given(n_steps=st.integers(3, 40), budget=st.integers(2, 9), seed=seeds)
def test_overwriting_the_lowest_slot_is_a_budget_of_one_less(n_steps, budget, seed):
    attention = attention_of(n_steps, seed)
    ours = kept_by(attention, overwriting(budget))
    theirs = overwriting_oracle(attention[0].tolist(), budget)
    # What step t found, and its own token.
    assert [[*kept, t + 1] for t, kept in enumerate(ours[:-1])] == theirs[1:]


@same_cases
@given(n_steps=st.integers(2, 40), budget=st.integers(2, 9), data=st.data(), seed=seeds)
def test_the_listing_read_literally_freezes_on_any_attention(n_steps, budget, data, seed):
    """A new token has 0, all others more: whatever the attention is, it goes. Sinks change nothing, decay neither."""
    rows = attention_of(n_steps, seed)[0].tolist()
    n_sink = data.draw(st.integers(0, budget - 1))
    decay = data.draw(st.sampled_from([1.0, 0.98]))
    history = from_zero_oracle(rows, budget, n_sink, 0, decay)
    assert history[-1] == list(range(min(budget, n_steps)))


@same_cases
@given(heavy=st.integers(1, 4), recent=st.integers(1, 4), seed=seeds)
def test_the_simulations_masks_hide_a_token_for_one_step_and_ours_never_do(heavy, recent, seed):
    attention = attention_of(40, seed)
    shown = hidden_step_oracle(attention[0].tolist(), heavy, recent)
    # From the first step with a mask on, the token that has just left the recent window is not there.
    masked = range(heavy + recent + 1, 40)
    assert all(t - recent not in shown[t] for t in masked)
    # In ours a token that is not there never returns.
    ours = kept_by(attention, H2OConfig(heavy + recent, n_sink=0, grace=recent, decay=1.0, long_share=0.0))
    for t in range(1, 40):
        assert set(ours[t]) <= {*ours[t - 1], t}


def test_what_was_hidden_for_a_step_can_come_back():
    # Token 20 has most of every row from its own on.
    rows = [[0.9 if p == 20 else 0.1 / 20 for p in range(40)] if t >= 20 else [1 / (t + 1)] * 40 for t in range(40)]
    shown = hidden_step_oracle(rows, 4, 4)
    assert [20 in shown[t] for t in range(22, 28)] == [True, True, False, True, True, True]


def test_the_global_statistics_know_later_rows_and_take_tokens_back():
    # Token 0 is all that matters, at the end: the local rule has let it go by then.
    attention = mx.eye(8)[None]
    attention[0, 5:] = mx.zeros((8,))
    attention[0, 5:, 0] = 1.0
    assert all(0 in kept for kept in look_ahead_oracle(attention[0].tolist(), 2))
    assert 0 not in kept_by(attention, algorithm_1(2))[3]
    rows = attention_of(40, 3)[0].tolist()
    history = look_ahead_oracle(rows, 6)
    assert [len(kept) for kept in history] == [min(t + 1, 6) for t in range(40)]
    total = [sum(row[p] for row in rows) for p in range(40)]
    assert history[-1] == sorted(sorted(range(40), key=total.__getitem__)[-6:])


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_plain_sums_without_sinks(name):
    config = VARIANTS[name](10)
    assert (config.n_sink, config.decay, config.long_share, config.queries) == (0, 1.0, 0.0, "true")
    assert config.budget == (9 if name == "overwriting" else 10)
    assert config.grace == (5 if name == "text-generation" else 0)
    assert config.evict_during_prefill == (name != "text-generation")
