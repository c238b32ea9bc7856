"""Heads that share a layer's places; test_oracle.py has each step against a naive oracle."""

import copy

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm import batch_generate
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import LRUPromptCache

from h2o_mlxlm import AdaptiveH2OKVCache, H2OConfig, install, load, make_prompt_cache, uninstall
from h2o_mlxlm.allotment import allot, least

CONFIG = H2OConfig(budget=16, n_sink=1, grace=3, decay=0.9)


@pytest.fixture(scope="module")
def model(make_model):
    return make_model()


def tokens(*shape):
    return mx.random.randint(3, 260, shape, key=mx.random.key(sum(shape)))


def fed(model, caches, prompt, n):
    """The logits of a prompt [B, T] in two calls, then of n single tokens."""
    half = prompt.shape[1] - n - 9
    ends = [half, half + 9, *range(half + 10, prompt.shape[1] + 1)]
    calls = zip([0, *ends], ends, strict=False)
    return mx.concatenate([model(prompt[:, a:b], cache=caches) for a, b in calls], axis=1)


@settings(max_examples=60)
@given(st.data())
def test_places_go_to_the_best_rows_of_all_heads_above_a_floor(data):
    config = H2OConfig(budget=data.draw(st.integers(4, 12)), n_sink=1, grace=2)
    n_heads, scores = data.draw(st.integers(1, 4)), []
    numbers = st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, float("nan")])
    for _ in range(n_heads):
        n = data.draw(st.integers(config.budget + 2, config.budget + 9))
        scores.append(data.draw(st.lists(numbers, min_size=n, max_size=n)))
    # Of the first head alone the sinks are still held.
    rows = [(mx.arange(len(x), dtype=mx.int32) + (0 if h == 0 else 5), mx.array(x)) for h, x in enumerate(scores)]
    places = allot(config, rows)
    floor = config.n_sink + config.grace + -(-(config.budget - 3) // 2)
    assert least(config) == floor
    assert sum(places) == n_heads * config.budget
    assert all(floor <= n <= len(x) for n, x in zip(places, scores, strict=True))
    # No head gave up a better row than another kept beyond its floor.
    gone, kept = [-1.0], [9.0]
    for h, (n, x) in enumerate(zip(places, scores, strict=True)):
        sinks = 1 if h == 0 else 0
        rest = sorted([-0.5 if y != y else y for y in x[sinks : len(x) - 2]], reverse=True)
        gone += rest[n - 2 - sinks :]
        kept += rest[floor - 2 - sinks : n - 2 - sinks]
    assert min(kept) >= max(gone)


def test_its_books_add_up(model):
    caches = make_prompt_cache(model, CONFIG, heads="adaptive")
    assert [type(c) for c in caches] == [AdaptiveH2OKVCache] * 2
    fresh = caches[0]
    assert (fresh.empty(), fresh.size(), fresh.nbytes, fresh.full_bytes, fresh.compression_ratio) == (True, 0, 0, 0, 1)
    assert (fresh.tokens_kept, fresh.kept_positions.size, fresh.make_mask(1)) == (0, 0, None)
    fed(model, caches, tokens(3, 60), 20)
    uneven = 0
    for cache in caches:
        kept, gone = cache.tokens_kept, cache.evictions
        assert kept.shape == gone.shape == (3, 2)
        assert (cache.tokens_seen, cache.offset, cache.size()) == (60, 60, kept.max().item())
        assert kept.sum(axis=1).tolist() == [2 * 16] * 3
        assert (kept + gone).tolist() == [[60, 60]] * 3
        assert kept.min().item() >= least(CONFIG) == 10
        assert (cache.kept_positions >= 0).sum(axis=-1).tolist() == kept.tolist()
        assert cache.kept_positions.shape == cache.scores.shape == cache.totals.shape == (3, 2, cache.size())
        assert cache.compression_ratio == 60 / 16
        # Keys and values of 16 float32, scores, totals, positions: one empty slot a head; and the tokens seen.
        assert cache.nbytes == 3 * (2 * 16 + 2) * (2 * 16 * 4 + 3 * 4) + 3 * 2 * 4
        assert cache.nbytes == sum(head.nbytes for row in cache.heads for head in row)
        assert cache.full_bytes == 3 * 60 * 2 * 2 * 16 * 4
        uneven += len(set(kept.flatten().tolist())) > 1
    assert uneven
    equal = make_prompt_cache(model, CONFIG)
    fed(model, equal, tokens(3, 60), 20)
    assert [c.nbytes for c in caches] == [c.nbytes + 3 * 4 for c in equal]  # tokens seen, once a head


def test_before_anything_goes_it_is_the_full_cache(model):
    config = H2OConfig(budget=64)
    expected = fed(model, make_prompt_cache(model, config), tokens(2, 60), 20)
    caches = make_prompt_cache(model, config, heads="adaptive")
    assert mx.allclose(fed(model, caches, tokens(2, 60), 20), expected, atol=1e-4)
    assert (caches[0].tokens_kept, caches[0].evictions) == (60, 0)


def test_batch_rows_are_as_they_are_alone(model):
    prompts, together = tokens(3, 60), make_prompt_cache(model, CONFIG, heads="adaptive")
    logits = fed(model, together, prompts, 20)
    for b in range(3):
        alone = make_prompt_cache(model, CONFIG, heads="adaptive")
        assert mx.allclose(fed(model, alone, prompts[b : b + 1], 20)[0], logits[b], atol=1e-4)
        for ours, theirs in zip(alone, together, strict=True):
            assert ours.kept_positions[0].tolist() == theirs.kept_positions[b, :, : ours.size()].tolist()


def test_a_copy_a_restored_state_and_a_prompt_cache_go_on_alike(model):
    def go_on(caches):
        return [t for t, _ in generate_step(tokens(9), model, max_tokens=12, prompt_cache=caches)]

    caches = make_prompt_cache(model, CONFIG, heads="adaptive")
    fed(model, caches, tokens(1, 50), 5)
    kept = LRUPromptCache()
    kept.insert_cache("model", list(range(50)), copy.deepcopy(caches))
    stored, rest = kept.fetch_nearest_cache("model", list(range(59)))
    assert len(rest) == 9
    restored = [AdaptiveH2OKVCache.from_state(c.state) for c in caches]
    copies, expected = copy.deepcopy(caches), go_on(caches)
    for other in (copies, restored, stored):
        assert go_on(other) == expected
        for ours, theirs in zip(other, caches, strict=True):
            assert ours.config == CONFIG
            assert (ours.tokens_seen, ours.offset, ours.nbytes) == (theirs.tokens_seen, theirs.offset, theirs.nbytes)
            assert mx.array_equal(ours.kept_positions, theirs.kept_positions)
            assert mx.array_equal(ours.scores, theirs.scores)
    assert AdaptiveH2OKVCache.from_state(AdaptiveH2OKVCache(CONFIG).state).empty()


def test_requests_run_one_by_one(model, tiny_folder):
    """mlx_lm's server batches if every cache has ``merge``."""
    install(model, CONFIG, heads="adaptive")
    try:
        caches = model.make_cache()
        assert not any(hasattr(c, "merge") for c in caches)
        expected = [t for t, _ in generate_step(tokens(40), model, max_tokens=20)]
        steps = generate_step(tokens(40), model, max_tokens=20, prompt_cache=caches)
        assert [t for t, _ in steps] == expected
        assert all((c.kept_positions >= 0).sum().item() == 2 * 16 < 2 * c.tokens_seen for c in caches)
        with pytest.raises(ValueError, match=r"AdaptiveH2OKVCache.* does not yet support batching"):
            batch_generate(model, load(str(tiny_folder))[1], [[5, 6, 7]], max_tokens=2)
    finally:
        uninstall(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": "rolling"}, r"works with positions='original' alone, got 'rolling': .*heads=\"equal\""),
        ({"positions": "auto"}, "works with positions='original' alone, got 'auto'"),
        ({"queries": "key"}, "works with queries='true' alone, got 'key'"),
    ],
    ids=str,
)
def test_what_such_heads_cannot_do_is_refused(model, changes, message):
    config = H2OConfig(**changes)
    for make in (lambda: make_prompt_cache(model, config, heads="adaptive"), lambda: AdaptiveH2OKVCache(config)):
        with pytest.raises(ValueError, match=message):
            make()


def test_what_it_cannot_do_it_says(model):
    with pytest.raises(ValueError, match="heads must be one of 'equal', 'adaptive', 'calibrated', Needs, or"):
        make_prompt_cache(model, CONFIG, heads="uneven")
    caches = make_prompt_cache(model, CONFIG, heads="adaptive")
    assert not caches[0].is_trimmable()
    with pytest.raises(ValueError, match=r"can't be trimmed \(asked for 3 tokens\)"):
        caches[0].trim(3)
    with pytest.raises(ValueError, match=r"can't be quantised \(asked for kv_bits=4\)"):
        list(generate_step(tokens(9), model, prompt_cache=caches, kv_bits=4, quantized_kv_start=0))
    model(tokens(1, 9), cache=caches)
    with pytest.raises(ValueError, match=r"it holds \(1, 2, 16, 16, .*, the call brings \(2, 2, 16, 16,"):
        model(tokens(2, 9), cache=caches)
    row = mx.zeros((1, 2, 30, 16))
    with pytest.raises(ValueError, match=r"float32\), the call brings .*float16, .*float32\)"):
        caches[1].update_and_fetch(row.astype(mx.float16), row)
    caches[1].update_and_fetch(row, row)
    with pytest.raises(RuntimeError, match="never got its attention reported"):
        caches[1].update_and_fetch(row, row)
