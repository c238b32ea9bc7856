"""Saved prompt caches on the real models: going on after a reload is going on, bit for bit."""

import mlx.core as mx
import pytest

from h2o_mlxlm import H2OConfig, H2OKVCache, load_prompt_cache, make_prompt_cache, save_prompt_cache

from .architectures import ARCHITECTURES, build
from .conftest import texts

WAYS = {
    "original": {},
    "rolling": {"positions": "rolling"},
    "held": {"evict_during_prefill": False},
    "key": {"queries": "key"},
}


def rows(tokenizer, n):
    return mx.array([tokenizer.encode(text[:1000])[:n] for text in list(texts().values())[:2]])


def reloaded(caches, model, tmp_path):
    save_prompt_cache(tmp_path / "cache.safetensors", caches, model)
    return load_prompt_cache(tmp_path / "cache.safetensors", model)


def gone_on(model, caches, tokens, n):
    """Logits of a call of three tokens, then of greedy ones, one a call."""
    out = [model(tokens, cache=caches)[:, -1]]
    for _ in range(n):
        out.append(model(mx.argmax(out[-1], axis=-1)[:, None], cache=caches)[:, -1])
        mx.eval(out[-1])
    return mx.stack(out)


@pytest.mark.parametrize("way", WAYS)
def test_generation_goes_on_after_evictions(model, tmp_path, way):
    """Two texts side by side, saved in the middle; beside it the same without a file."""
    tokens, config = rows(model.tokenizer, 55), H2OConfig(budget=32, decay=0.98, **WAYS[way])
    plain, caches = (make_prompt_cache(model.model, config) for _ in range(2))
    for each in (plain, caches):
        calls = [tokens[:, :48]] if way == "held" else [tokens[:, :48], *tokens[:, 48:52].split(4, axis=1)]
        for call in calls:
            mx.eval(model.model(call, cache=each), [c.state for c in each] if call.shape[1] > 1 else [])
    if way == "held":
        assert caches[0].tokens_kept == 48
    else:
        assert caches[0].evictions == 52 - 32
    again = reloaded(caches, model.model, tmp_path)
    assert [c.config for c in again] == [config] * len(model.model.layers)
    expected = gone_on(model.model, plain, tokens[:, 52:], 3)
    assert mx.array_equal(gone_on(model.model, again, tokens[:, 52:], 3), expected)
    for a, b in zip(again, plain, strict=True):
        assert (a.evictions, a.tokens_kept) == (b.evictions, 32)
        assert mx.array_equal(a.kept_positions, b.kept_positions)
        assert mx.array_equal(a.scores, b.scores)
        assert mx.array_equal(a.totals, b.totals)


def test_a_batch_goes_on_in_the_middle_of_a_padded_prompt(model, tmp_path):
    tokens = rows(model.tokenizer, 60)
    alone = [make_prompt_cache(model.model, H2OConfig(budget=32)) for _ in range(2)]
    mx.eval(model.model(tokens[:1, :40], cache=alone[0]))
    caches = [H2OKVCache.merge(both) for both in zip(*alone, strict=True)]
    for cache in caches:
        cache.prepare(lengths=[5, 12], right_padding=[7, 0])
    mx.eval(model.model(tokens[:, 40:48], cache=caches))
    again = reloaded(caches, model.model, tmp_path)
    outs = []
    for each in (caches, again):
        mx.eval(model.model(tokens[:, 48:52], cache=each))
        for cache in each:
            cache.finalize()
        outs.append(gone_on(model.model, each, tokens[:, 52:53], 2))
    assert mx.array_equal(*outs)
    assert again[0].tokens_seen.tolist() == [48, 15]


def test_a_file_of_a_model_with_another_weight_is_refused(model, tmp_path):
    caches = make_prompt_cache(model.model, H2OConfig(budget=32))
    save_prompt_cache(tmp_path / "a", caches, model.model)
    layer = model.model.layers[0].self_attn.k_proj
    weight = layer.weight
    layer.weight = mx.where(mx.arange(weight.size).reshape(weight.shape) == 5, 0, weight)
    try:
        with pytest.raises(ValueError, match=r"saved with model '[0-9a-f]{16}', and this one is '[0-9a-f]{16}'"):
            load_prompt_cache(tmp_path / "a", model.model)
    finally:
        layer.weight = weight
    assert load_prompt_cache(tmp_path / "a", model.model)[-1].empty()


@pytest.mark.parametrize("arch", ARCHITECTURES, ids=lambda a: f"{a.name} {a.note}".strip())
def test_every_architecture_goes_on(arch, tmp_path):
    model, tokens = build(arch.name, arch.args), mx.arange(46)[None]
    config = H2OConfig(budget=24, n_sink=4, grace=8, queries="true" if arch.true_queries else "key")
    caches = make_prompt_cache(model, config, partial=True)
    mx.eval(model(tokens, cache=caches), model(tokens[:, :1], cache=caches))
    again = reloaded(caches, model, tmp_path)
    assert [type(c) for c in again] == [type(c) for c in caches]
    for call in (tokens[:, :3], tokens[:, 3:4]):
        assert mx.array_equal(model(call, cache=again), model(call, cache=caches))
    assert any(isinstance(c, H2OKVCache) and c.evictions == 51 - 24 for c in again)
