import mlx.core as mx
import pytest

import h2o_core.rows as module
from h2o_core import H2OConfig, simulate, summarize
from h2o_core.generators import GENERATORS, needles, recency, shift, uniform, zipf


def received(made, step):
    """The mean row of a step."""
    return made.attention.whole()[:, step].mean(axis=0)


@pytest.mark.parametrize("name", GENERATORS)
def test_rows_are_causal_and_sum_to_one(name):
    made = GENERATORS[name](n_steps=100, n_heads=2)
    p = made.attention.whole()
    assert p.shape == made.attention.shape == (2, 100, 100)
    assert mx.allclose(p.sum(axis=-1), mx.ones((2, 100)), atol=1e-5)
    assert p.min().item() >= 0
    assert mx.array_equal(p, p * mx.tri(100))
    assert list(made.truth) == sorted(made.truth)
    assert all(h.position <= h.start < h.stop <= 100 for h in made.truth)


@pytest.mark.parametrize("name", GENERATORS)
def test_a_seed_is_a_trace_however_it_is_cut(name, monkeypatch):
    first = GENERATORS[name](n_steps=40, n_heads=2, seed=3, noise=1.0)
    whole = first.attention.whole()
    again = GENERATORS[name](n_steps=40, n_heads=2, seed=3, noise=1.0)
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 1)
    assert again.truth == first.truth
    assert mx.allclose(again.attention.whole(), whole, atol=1e-6)
    assert not mx.allclose(GENERATORS[name](n_steps=40, n_heads=2, seed=4, noise=1.0).attention.whole(), whole)


def test_zipf_has_the_shares_it_says():
    made = zipf(200, 1, n_heavy=8, share=0.6, exponent=1.0, noise=0.0)
    row = received(made, 199).tolist()
    background = 0.4 / 200
    for heavy in made.truth:
        assert row[heavy.position] == pytest.approx(heavy.share + background, abs=1e-5)
    shares = sorted((h.share for h in made.truth), reverse=True)
    assert sum(shares) == pytest.approx(0.6)
    assert [shares[0] / s for s in shares] == pytest.approx(range(1, 9))


def test_a_shift_moves_the_mass_to_what_arrives_after_it():
    made = shift(200, 1, n_heavy=8, share=0.6)
    p = made.attention.whole()[0]
    old, new = [h for h in made.truth if h.stop == 100], [h for h in made.truth if h.stop == 200]
    assert len(old) == len(new) == 8
    assert all(h.position < 50 for h in old)
    assert all(100 <= h.position < 150 for h in new)
    on = lambda step, heavies: p[step][mx.array([h.position for h in heavies])].sum().item()  # noqa: E731
    assert on(99, old) > 0.6
    assert on(199, new) > 0.6
    assert on(199, old) < 0.2


def test_needles_are_asked_for_once():
    made = needles(200, 1, n_needles=5, share=0.8)
    p = made.attention.whole()[0]
    for needle in made.truth:
        assert needle.stop == needle.start + 1
        assert needle.position < 100 <= needle.start
        column = p[:, needle.position]
        assert column[needle.start].item() > 0.8
        assert mx.where(mx.arange(200) == needle.start, 0.0, column)[100:].max().item() < 0.3


def test_recency_and_uniform_are_their_formulas():
    row = received(recency(50, 1, length=10.0, floor=0.1), 49)
    weights = mx.exp((mx.arange(50) - 49) / 10.0) + 0.1
    assert mx.allclose(row, weights / weights.sum(), atol=1e-6)
    assert mx.allclose(received(uniform(50, 1), 49), mx.full((50,), 1 / 50))


def test_a_cache_that_scores_keeps_heavy_hitters_that_a_window_loses():
    made = zipf(300, 2, n_heavy=8)
    scored, window = (H2OConfig(32, n_sink=0, grace=grace, decay=0.98, long_share=0.0) for grace in (8, 31))
    kept = set(simulate(made.attention, scored).kept[-1, 0].tolist())
    # What the lightest of eight receives, 2.7 % of a row, is within the noise.
    heaviest = sorted(made.truth, key=lambda heavy: heavy.share)[4:]
    assert {heavy.position for heavy in heaviest} <= kept
    ours, theirs = (summarize(simulate(made.attention, c), made.attention, 32).retained for c in (scored, window))
    assert (ours > theirs + 0.1).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: zipf(n_steps=0), "n_steps and n_heads must be at least 1, got 0 and 4"),
        (lambda: zipf(n_heavy=0), "from 1 to 256 tokens can be planted in 256 steps, got 0"),
        (lambda: needles(8, n_needles=5), "from 1 to 4 tokens can be planted in 4 steps, got 5"),
        (lambda: shift(share=1.0), "share must be between 0 and 1, got 1.0"),
    ],
)
def test_what_can_not_be_planted_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
