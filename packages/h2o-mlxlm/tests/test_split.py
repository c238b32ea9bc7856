"""Heads with budgets of their own: each goes as in a cache where all heads have that budget."""

import copy
import json

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm import batch_generate, stream_generate
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import LRUPromptCache

from h2o_core import Mass
from h2o_mlxlm import (
    H2OConfig,
    H2OKVCache,
    SplitH2OKVCache,
    install,
    load,
    make_prompt_cache,
    pyramid,
    uninstall,
)
from h2o_mlxlm.attention import scaled_dot_product_attention
from h2o_mlxlm.cache import share
from h2o_mlxlm.speculative import check_caches

CONFIG = H2OConfig(budget=16, n_sink=1, grace=4, decay=0.9)
BUDGETS = [[8, 24], [20, 12]]


@pytest.fixture(scope="module")
def model(make_model):
    return make_model()


def attended(cache, q, k, v):
    keys, values = cache.update_and_fetch(k, v)
    return scaled_dot_product_attention(q, keys, values, cache, 0.3, "causal" if k.shape[2] > 1 else None)


def drawn(key, batch, heads, group, n, width=8, dtype=mx.float32):
    shapes = [(batch, heads * group, n, width), (batch, heads, n, width), (batch, heads, n, width)]
    return [mx.random.normal(s, dtype, key=mx.random.key(10 * key + i)) for i, s in enumerate(shapes)]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from([6, 9, 13, 40]), min_size=1, max_size=4),
    st.integers(1, 2),
    st.integers(1, 3),
    st.lists(st.sampled_from([1, 1, 1, 5, 20]), min_size=1, max_size=8),
    st.booleans(),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([mx.float32, mx.float16]),
)
def test_each_head_goes_as_one_of_equal_heads_with_its_budget(budgets, batch, group, calls, prefill, share, dtype):
    config = H2OConfig(20, n_sink=1, grace=10, evict_during_prefill=prefill, long_share=share)
    split = SplitH2OKVCache(config, budgets)
    # A window of half the mean is one of half of each.
    alone = [H2OKVCache(H2OConfig(b, 1, b // 2, evict_during_prefill=prefill, long_share=share)) for b in budgets]
    for i, n in enumerate(calls):
        qkv = drawn(i, batch, len(budgets), group, n, dtype=dtype)
        out = attended(split, *qkv)
        for head, cache in enumerate(alone):
            queries, near = slice(head * group, (head + 1) * group), 1e-5 if dtype == mx.float32 else 2e-3
            assert mx.allclose(out[:, queries], attended(cache, *qkv)[:, queries], atol=near)
    for head, cache in enumerate(alone):
        n = cache.size()
        assert split.kept_positions[:, head, :n].tolist() == cache.kept_positions[:, head].tolist()
        assert (split.kept_positions[:, head, n:] == -1).all()
        assert mx.allclose(split.scores[:, head, :n], cache.scores[:, head], atol=1e-5)
        assert mx.allclose(split.totals[:, head, :n], cache.totals[:, head], atol=1e-5)
    assert split.size() == max(c.size() for c in alone)


def test_its_books_add_up(model):
    caches = make_prompt_cache(model, CONFIG, heads=BUDGETS)
    assert [type(c) for c in caches] == [SplitH2OKVCache] * 2
    fresh = caches[0]
    assert (fresh.empty(), fresh.size(), fresh.nbytes, fresh.full_bytes, fresh.compression_ratio) == (True, 0, 0, 0, 1)
    assert (fresh.tokens_kept, fresh.evictions, fresh.kept_positions.size, fresh.make_mask(1)) == (0, 0, 0, None)
    model(mx.ones((3, 40), mx.int32), cache=caches)
    for cache, budgets in zip(caches, BUDGETS, strict=True):
        assert cache.tokens_kept.tolist() == [budgets] * 3
        assert cache.evictions.tolist() == [[40 - b for b in budgets]] * 3
        assert (cache.tokens_seen, cache.offset, cache.size(), cache.sequences) == (40, 40, max(budgets), 3)
        assert cache.compression_ratio == 40 / 16
        assert cache.kept_positions.shape == cache.scores.shape == cache.totals.shape == (3, 2, max(budgets))
        # Keys and values of 16 float32, scores, totals, positions, one empty slot a head; tokens seen by each cache.
        assert cache.nbytes == 3 * (32 + 2) * (2 * 16 * 4 + 12) + 2 * 3 * 4
        assert cache.full_bytes == 3 * 2 * 40 * 2 * 16 * 4
    few = make_prompt_cache(model, CONFIG, heads=BUDGETS)
    model(mx.ones((1, 5), mx.int32), cache=few)
    assert [(c.tokens_kept, c.evictions) for c in few] == [(5, 0)] * 2


def test_heads_of_one_budget_share_a_cache():
    cache = SplitH2OKVCache(CONFIG, [8, 24, 8, 24, 16])
    assert [(s.heads, s.cache.config.budget, s.cache.config.grace) for s in cache.shares] == [
        ((0, 2), 8, 2),
        ((1, 3), 24, 6),
        ((4,), 16, 4),
    ]


def test_equal_budgets_are_equal_heads(model):
    tokens = mx.random.randint(3, 260, (1, 50), key=mx.random.key(0))
    logits = [model(tokens, cache=make_prompt_cache(model, CONFIG, heads=heads)) for heads in ("equal", [[16, 16]] * 2)]
    assert mx.array_equal(*logits)


def test_a_cache_is_divided_as_if_it_had_been_from_the_start():
    config = H2OConfig(20, n_sink=1, grace=4, evict_during_prefill=False)
    whole, split = H2OKVCache(config), SplitH2OKVCache(config, [8, 30, 8])
    prompt = drawn(0, 2, 3, 2, 40)
    for cache in (whole, split):
        attended(cache, *prompt)
    divided, before = SplitH2OKVCache.of(whole, [8, 30, 8]), whole.kept_positions.tolist()
    for i in range(1, 12):
        step = drawn(i, 2, 3, 2, 1)
        assert mx.allclose(attended(divided, *step), attended(split, *step), atol=1e-5)
    assert divided.kept_positions.tolist() == split.kept_positions.tolist()
    assert divided.tokens_kept.tolist() == [[8, 30, 8]] * 2
    assert whole.kept_positions.tolist() == before
    with pytest.raises(ValueError, match="this cache is empty"):
        SplitH2OKVCache.of(H2OKVCache(config), [8, 8])


def test_generation_alone_and_batched(make_folder):
    model, tokenizer = load(str(make_folder()))
    prompts = [tokenizer.encode(text) for text in ("hello hello world " * 6, "12345 " * 20, "a b c")]
    try:
        install(model, CONFIG, heads=BUDGETS)
        alone = [[r.token for r in stream_generate(model, tokenizer, x, max_tokens=30)] for x in prompts]
        together = batch_generate(
            model, tokenizer, prompts, max_tokens=30, return_token_ids=True, return_prompt_caches=True
        )
    finally:
        uninstall(model)
    for tokens, expected, caches in zip(together.token_ids, alone, together.caches, strict=True):
        assert tokens == expected[: len(tokens)]
        assert [type(c) for c in caches] == [SplitH2OKVCache] * 2
        assert all((c.evictions > 0).all() for c in caches)
    assert sum(map(len, together.token_ids)) > 60


def test_the_servers_store_of_prompts_takes_it(model):
    store, caches = LRUPromptCache(max_size=2), make_prompt_cache(model, CONFIG, heads=BUDGETS)
    tokens = list(range(3, 43))
    model(mx.array([tokens]), cache=caches)
    store.insert_cache("model", tokens, caches)
    found, rest = store.fetch_nearest_cache("model", [*tokens, 50])
    assert rest == [50]
    assert [c.kept_positions.tolist() for c in found] == [c.kept_positions.tolist() for c in caches]


def test_an_interrupted_pass_is_noticed(model):
    caches = make_prompt_cache(model, CONFIG, heads=BUDGETS)
    model(mx.ones((1, 20), mx.int32), cache=caches)
    attended(caches[0], *drawn(0, 1, 2, 2, 1, 16))
    with pytest.raises(RuntimeError, match="the layers of this model have seen different tokens"):
        model(mx.ones((1, 1), mx.int32), cache=caches)


def test_a_step_scores_all_layers_in_one_go():
    # Four caches of two kinds: two configurations, in each of which two layers have one head.
    caches = [SplitH2OKVCache(CONFIG, [8, 24]) for _ in range(2)]
    share(caches)
    ledgers = {id(s.cache.ledger) for c in caches for s in c.shares}
    assert len(ledgers) == 1
    assert sorted(s.cache.layer for c in caches for s in c.shares) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("heads", "config", "error", "message"),
    [
        ([[8, 24]], CONFIG, ValueError, "heads has budgets for each layer.*this model has 2, got 1"),
        ([[8, 24.0]] * 2, CONFIG, TypeError, "budget of a head must be an integer.*got 24.0"),
        ([[8, 26]] * 2, CONFIG, ValueError, "budget=16 tokens on average at most, got budgets with a mean of 17.0"),
        ([[1, 16]] * 2, CONFIG, ValueError, "some heads keep 1 tokens where the mean is 16.*n_sink [+] grace must be"),
        ([[0, 16]] * 2, CONFIG, ValueError, "some heads keep 0 tokens.*budget must be between 1 and"),
        (BUDGETS, [CONFIG] * 2, ValueError, "divides the budget of one H2OConfig, got a list of 2"),
        (BUDGETS, H2OConfig(16, positions="rolling"), ValueError, "different ranks, got positions='rolling'"),
        (BUDGETS, H2OConfig(16, scorer="qfilters"), ValueError, "take no inputs, and scorer 'qfilters' needs"),
        ([[16, 16, 16]] * 2, CONFIG, ValueError, "budgets for 3 KV heads of H2O layer 0, of which llama has 2 here"),
        ([[16, 16], []], CONFIG, ValueError, "budgets for 0 KV heads of H2O layer 1"),
        ([16, 16], CONFIG, TypeError, r"heads must be a word, Needs, or .* got \[16, 16\]"),
        (["equal", "adaptive"], CONFIG, TypeError, "heads must be a word, Needs, or"),
        (None, CONFIG, TypeError, "heads must be a word, Needs, or .* got None"),
        (mx.ones((2, 2)), CONFIG, TypeError, "heads must be a word, Needs, or"),
        ("uneven", CONFIG, ValueError, "heads must be one of 'equal', 'adaptive', 'calibrated'.*got 'uneven'"),
    ],
)
def test_what_can_not_be_is_refused_at_construction(model, heads, config, error, message):
    with pytest.raises(error, match=message):
        make_prompt_cache(model, config, heads=heads)


def test_a_layer_with_other_heads_is_refused(model):
    caches = [SplitH2OKVCache(CONFIG, [16, 16, 16]) for _ in range(2)]
    with pytest.raises(ValueError, match="budgets of this layer are for 3 KV heads, got keys"):
        model(mx.ones((1, 3), mx.int32), cache=caches)


def test_mlx_lms_own_files_hold_it(model, tmp_path):
    path = str(tmp_path / "cache.safetensors")
    caches = make_prompt_cache(model, CONFIG, heads=BUDGETS)
    model(mx.arange(3, 43)[None], cache=caches)
    mlx_lm_cache.save_prompt_cache(path, caches)
    again = mlx_lm_cache.load_prompt_cache(path)
    assert [(type(c), c.budgets, c.config) for c in again] == [(SplitH2OKVCache, b, CONFIG) for b in BUDGETS]
    rows = mx.array([[5, 6]])
    assert mx.array_equal(model(rows, cache=again), model(rows, cache=caches))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"about": None}, "no state of a layer with divided heads"),
        ({"about": "{}"}, "no state of a layer with divided heads: KeyError"),
        ({"shares": 5}, "no state of a layer with divided heads: TypeError"),
        ({"heads": 5}, "no state of a layer with divided heads: TypeError"),
        ({"heads": [[0], [0]]}, "must hold each of the layer's heads once"),
        ({"heads": [[0], [True]]}, "must hold each of the layer's heads once"),
        ({"heads": []}, "must hold each of the layer's heads once"),
        ({"heads": [[0, 1]]}, "1 groups of heads need a cache each"),
        ({"heads": [[0, 2], [1]]}, r"cache of heads \(0, 2\) is of 1 heads"),
        ({"config": {}}, "its configuration has other fields"),
        ({"config": {"decay": 0.5}}, r"cache of heads \(0,\) is of 1 heads, or under settings of its own"),
    ],
    ids=str,
)
def test_a_state_that_does_not_fit_is_refused(model, change, message):
    caches = make_prompt_cache(model, CONFIG, heads=[[8, 24]] * 2)
    model(mx.arange(3, 43)[None], cache=caches)
    state = caches[0].state
    about = json.loads(state["about"])
    for name in about.keys() & change.keys():
        told = change[name]
        about[name] = about[name] | told if told and isinstance(told, dict) else told
    whole = {name: x for name, x in change.items() if name in state}
    with pytest.raises(ValueError, match=message):
        SplitH2OKVCache.from_state({"shares": state["shares"], "about": json.dumps(about)} | whole)


def test_groups_of_a_layer_have_seen_the_same(model):
    one, other = (make_prompt_cache(model, CONFIG, heads=[[8, 24]] * 2)[0] for _ in range(2))
    for cache, n in ((one, 9), (other, 8)):
        cache.update_and_fetch(mx.ones((1, 2, n, 16)), mx.ones((1, 2, n, 16)))
        for _, part in cache.shares:
            part.observe(Mass(mx.ones((1, 1, n)), mx.ones((1, 1, n))))
    parts = [one.state["shares"][0], other.state["shares"][1]]
    with pytest.raises(ValueError, match="2 groups of heads need a cache each, and the same tokens in all of them"):
        SplitH2OKVCache.from_state(one.state | {"shares": parts})


def test_caches_that_divide_otherwise_are_not_batched(model):
    one, other = (make_prompt_cache(model, CONFIG, heads=heads)[0] for heads in ([[8, 24]] * 2, [[16, 16]] * 2))
    for join in (lambda: SplitH2OKVCache.merge([one, other]), lambda: copy.deepcopy(one).extend(other)):
        with pytest.raises(ValueError, match="caches of one batch divide a layer alike"):
            join()
    three = make_prompt_cache(model, CONFIG, heads=[[24, 8]] * 2)[0]
    with pytest.raises(ValueError, match="caches of one batch have one configuration"):
        SplitH2OKVCache.merge([one, three])


def test_what_it_can_not_do_it_refuses(model):
    caches = make_prompt_cache(model, CONFIG, heads=BUDGETS)
    with pytest.raises(ValueError, match="quantised from its first token or not at all"):
        caches[0].to_quantized()
    with pytest.raises(ValueError, match="can't be trimmed"):
        caches[0].trim(1)
    with pytest.raises(ValueError, match="speculative decoding takes back"):
        check_caches(caches, 2)
    with pytest.raises(ValueError, match="got a list of 2"):
        make_prompt_cache(model, pyramid(CONFIG, 2), heads=BUDGETS)
