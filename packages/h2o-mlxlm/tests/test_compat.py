"""The seed's names make our caches."""

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from h2o_core.scorer import scorer_names, scorer_of
from h2o_mlxlm import H2OConfig, H2OKVCache, KVCacheBuilder, KVCacheConfig, KVCacheFactory

SMALL = {"head_dim": 16, "h2o_budget": 24, "h2o_n_sink": 2, "h2o_grace": 5, "h2o_decay": 0.9}
OURS = {"budget": 24, "n_sink": 2, "grace": 5, "decay": 0.9, "long_share": 0.0}


def test_the_defaults_are_the_seeds():
    seed = KVCacheConfig()
    assert (seed.method, seed.h2o_budget, seed.h2o_n_sink, seed.h2o_grace, seed.h2o_decay) == ("h2o", 512, 4, 16, 0.98)
    assert seed.ours("true") == H2OConfig(grace=16, decay=0.98, long_share=0.0)


@pytest.mark.parametrize("default", ["true", "key"])
@pytest.mark.parametrize("asked", [None, "true", "key"])
def test_each_name_is_one_of_ours(default, asked):
    config = KVCacheConfig(**SMALL, h2o_queries=asked)
    assert config.ours(default) == H2OConfig(**OURS, queries=asked or default)


@pytest.mark.parametrize("method", scorer_names())
def test_a_method_is_the_scorer_of_its_name(method):
    assert KVCacheConfig(method=method).ours("true").scorer == scorer_of(method)
    assert KVCacheConfig(method="keyformer", keyformer_tau=0.0).ours("true").scorer.tau == 0
    assert KVCacheConfig(method="cam", cam_merge="drop").ours("key").scorer.merge == "drop"


def test_the_factory_makes_what_needs_no_hook():
    cache = KVCacheFactory.create(KVCacheConfig(**SMALL | {"method": "l2norm", "h2o_decay": 0.98}))
    for n in (40, 1, 1):
        rows = mx.random.normal((1, 2, n, 16))
        cache.update_and_fetch(rows, rows)
    assert (cache.tokens_kept, cache.evictions, cache.config.queries) == (24, 18, "true")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "best"}, "method must be one of 'cam', .*'tova', got 'best'"),
        ({"method": "snapkv", "h2o_decay": 0.9}, "decay is for scorers that sum mass, and 'snapkv' does not, got 0.9"),
        ({"cam_merge": "drop"}, "cam_merge is for method='cam', got method='h2o': leave it out"),
        ({"method": "cam", "cam_merge": "none"}, "merge of scorer 'cam' must be one of 'value', 'drop'"),
        ({"head_dim": 0}, "head_dim must be a positive integer, got 0"),
        ({"head_dim": 16.0}, "head_dim must be a positive integer, got 16.0"),
        ({"head_dim": True}, "head_dim must be a positive integer, got True"),
        ({"h2o_budget": 20}, "n_sink [+] grace must be below budget"),
        ({"h2o_decay": 2.0}, "decay must be in"),
        ({"h2o_queries": "both"}, "queries must be one of"),
        ({"h2o_queries": ""}, "queries must be one of"),
    ],
)
def test_a_bad_value_is_refused_at_construction(values, message):
    with pytest.raises(ValueError, match=message):
        KVCacheConfig(**values)


@pytest.mark.parametrize("changes", [{}, {"head_dim": None}], ids=["stated", "derived"])
def test_another_head_dim_than_the_models_is_refused(make_model, changes):
    with pytest.raises(ValueError, match=r"head_dim must be the model's own 16, got 128: set head_dim=16"):
        KVCacheBuilder.for_model(make_model(**changes), KVCacheConfig())


@pytest.mark.parametrize("asked", [None, "key"])
def test_for_model_gives_caches_that_evict_while_generating(make_model, asked):
    model = make_model()
    caches = KVCacheBuilder.for_model(model, KVCacheConfig(**SMALL, h2o_queries=asked))
    assert [c.config for c in caches] == [H2OConfig(**OURS, queries=asked or "true")] * 2
    tokens = [t for t, _ in generate_step(mx.arange(40), model, max_tokens=10, prompt_cache=caches)]
    assert len(tokens) == 10
    assert all(c.tokens_kept == 24 and c.evictions == c.tokens_seen - 24 > 20 for c in caches)


def test_the_factory_needs_no_model_and_no_hook():
    cache = KVCacheFactory.create(KVCacheConfig(**SMALL))
    assert isinstance(cache, H2OKVCache)
    assert (cache.config, cache.scale) == (H2OConfig(**OURS, queries="key"), 16**-0.5)
    for n in (40, 1, 1):
        rows = mx.random.normal((1, 2, n, 16))
        cache.update_and_fetch(rows, rows)
    assert (cache.tokens_kept, cache.evictions) == (24, 18)


def test_the_factory_obeys_h2o_queries():
    cache = KVCacheFactory.create(KVCacheConfig(**SMALL, h2o_queries="true"))
    rows = mx.zeros((1, 2, 40, 16))
    cache.update_and_fetch(rows, rows)
    with pytest.raises(RuntimeError, match="never got its attention reported"):
        cache.update_and_fetch(rows, rows)
