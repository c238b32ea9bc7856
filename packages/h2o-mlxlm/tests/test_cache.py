"""H2OKVCache: its contract with mlx_lm, its books, its memory and what it refuses."""

import copy
import sys
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache
from mlx_lm.models.cache import make_prompt_cache as plain_cache

from h2o_mlxlm import H2OConfig, H2OKVCache, install, make_prompt_cache, scaled_dot_product_attention, uninstall
from h2o_rope import Rotation, rotation_of
from h2o_rope.rotation import _tables

SMALL = H2OConfig(budget=24, n_sink=2, grace=4)


@pytest.fixture(scope="module")
def model():
    mx.random.seed(0)
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=64,
    )
    return llama.Model(args)


def rows(key, n, batch=1, n_heads=2, width=8, value_width=8, group=2, dtype=mx.float32):
    kq, kk, kv = mx.random.split(mx.random.key(key), 3)
    return (
        mx.random.normal((batch, n_heads * group, n, width), key=kq).astype(dtype),
        mx.random.normal((batch, n_heads, n, width), key=kk).astype(dtype),
        mx.random.normal((batch, n_heads, n, value_width), key=kv).astype(dtype),
    )


def attend(cache, q, k, v, **kwargs):
    mask = cache.make_mask(q.shape[2], return_array=False, window_size=None)
    keys, values = cache.update_and_fetch(k, v)
    return scaled_dot_product_attention(q, keys, values, cache, 0.3, mask, **kwargs)


def generated(model, caches, prompt, n, step=512):
    return [t for t, _ in generate_step(prompt, model, max_tokens=n, prompt_cache=caches, prefill_step_size=step)]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("value_width", [8, 3])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_below_the_budget_attention_is_mlxs(dtype, value_width, with_sinks):
    ours, plain = H2OKVCache(H2OConfig(budget=64)), KVCache()
    sinks = {"sinks": mx.array([0.5, -1.0, 0.0, 2.0], dtype)} if with_sinks else {}
    for i, n in enumerate([9, 1, 1, 5, 1]):
        q, k, v = rows(i, n, batch=2, value_width=value_width, dtype=dtype)
        out, expected = attend(ours, q, k, v, **sinks), attend(plain, q, k, v, **sinks)
        assert out.dtype == dtype
        assert mx.allclose(out, expected, atol={mx.float32: 1e-5, mx.float16: 3e-3, mx.bfloat16: 2e-2}[dtype])


def test_its_books_add_up():
    cache = H2OKVCache(H2OConfig(budget=24, n_sink=2, grace=4, decay=1.0))
    assert (cache.empty(), cache.nbytes, cache.full_bytes, cache.size(), cache.compression_ratio) == (True, 0, 0, 0, 1)
    attend(cache, *rows(0, 40, value_width=6, dtype=mx.float16))
    for i in range(60):
        attend(cache, *rows(i, 1, value_width=6, dtype=mx.float16))
    assert not cache.empty()
    assert (cache.tokens_seen, cache.tokens_kept, cache.size(), cache.offset) == (100, 24, 24, 100)
    assert (cache.evictions, cache.compression_ratio) == (76, 100 / 24)
    # Keys, values (float16) with one empty slot; scores, positions; tokens seen.
    assert cache.nbytes == 2 * 25 * (8 + 6) * 2 + 2 * 25 * (4 + 4 + 4) + 4
    assert cache.full_bytes == 100 * 2 * (8 + 6) * 2
    positions, scores = cache.kept_positions, cache.scores
    assert positions.shape == scores.shape == (1, 2, 24)
    assert (positions.dtype, scores.dtype) == (mx.int32, mx.float32)
    for head in positions[0].tolist():
        assert head == sorted(set(head))
        assert head[:2] == [0, 1]
        assert head[-4:] == [96, 97, 98, 99]
    assert not hasattr(cache, "__len__")


@pytest.mark.parametrize("positions", ["original", "rolling"])
@pytest.mark.parametrize("queries", ["true", "key"])
def test_batch_rows_are_as_they_are_alone(model, positions, queries):
    config = H2OConfig(budget=24, n_sink=2, grace=4, positions=positions, queries=queries)
    tokens = mx.random.randint(0, 64, (3, 70), key=mx.random.key(5))

    def run(rows):
        caches, outs, at = make_prompt_cache(model, config), [], 0
        for n in [30, 10, *[1] * 30]:
            outs.append(model(rows[:, at : at + n], cache=caches))
            at += n
        return mx.concatenate(outs, axis=1), [c.kept_positions for c in caches]

    together, kept = run(tokens)
    for b in range(3):
        alone, kept_alone = run(tokens[b : b + 1])
        assert mx.allclose(together[b], alone[0], atol=1e-4)
        for ours, theirs in zip(kept, kept_alone, strict=True):
            assert mx.array_equal(ours[b], theirs[0])


def test_held_prefill_does_not_depend_on_chunks(model):
    config = H2OConfig(budget=24, n_sink=2, grace=4, evict_during_prefill=False)
    prompt = mx.random.randint(0, 64, (101,), key=mx.random.key(6))
    kept = []
    for step in (100, 50, 34, 2):
        caches = make_prompt_cache(model, config)
        for start in range(0, 100, step):
            model(prompt[None, start : min(start + step, 100)], cache=caches)
            assert caches[0].tokens_kept == min(start + step, 100)
        model(prompt[None, 100:], cache=caches)
        assert caches[0].tokens_kept == 24
        kept.append([c.kept_positions for c in caches])
    for other in kept[1:]:
        assert all(mx.array_equal(a, b) for a, b in zip(kept[0], other, strict=True))


@pytest.mark.parametrize("positions", ["original", "rolling"])
def test_turns_go_on_past_the_budget(model, positions):
    config = H2OConfig(budget=24, n_sink=2, grace=4, positions=positions)
    caches = make_prompt_cache(model, config)
    for turn in range(4):
        prompt = mx.random.randint(0, 64, (30,), key=mx.random.key(turn))
        generated(model, caches, prompt, 9, step=7)
        assert caches[0].tokens_kept == 24
        assert caches[0].offset == (caches[0].tokens_seen if positions == "original" else 24)
    assert caches[0].tokens_seen >= 4 * 39


def test_auto_turns_at_the_step_it_must(model):
    """Original up to the trained length, then rolling, and the same kept rows go on."""
    config = H2OConfig(budget=24, n_sink=2, grace=4, positions="auto", trained_length=64)
    auto, original = make_prompt_cache(model, config), make_prompt_cache(model, SMALL)
    tokens = mx.random.randint(0, 64, (1, 200), key=mx.random.key(8))
    at = 0
    for n in [20, 5, *[1] * 19]:
        # 44 seen and a largest call of 20 still fit into 64.
        assert auto[0].offset == at
        chunk = tokens[:, at : at + n]
        assert mx.array_equal(model(chunk, cache=auto), model(chunk, cache=original))
        at += n
    assert at == 44
    model(tokens[:, at : at + 1], cache=auto)
    assert [c.offset for c in auto] == [24, 24]
    for i in range(at + 1, 200):
        model(tokens[:, i : i + 1], cache=auto)
        assert [c.offset for c in auto] == [24, 24]
    model(tokens[:, :20], cache=auto)
    with pytest.raises(ValueError, match="trained_length=64, but a call of 41 tokens at 24 goes beyond"):
        model(tokens[:, :41], cache=auto)


def test_turning_changes_nothing_but_positions():
    """Keys stored rotated and derotated later are the keys that a rolling cache stores."""
    rope = nn.RoPE(8)
    rotation = rotation_of(rope)
    auto = H2OKVCache(H2OConfig(budget=64, positions="auto", trained_length=100), rotation=rotation)
    rolling = H2OKVCache(H2OConfig(budget=64, positions="rolling"), rotation=rotation)
    for i, n in enumerate([40, 20, 1, 1]):
        q, k, v = rows(i, n)
        k = rope(k, offset=auto.offset)
        assert auto.offset == rolling.offset  # nothing is evicted, so both are tokens seen
        attend(auto, q, k, v)
        attend(rolling, q, k, v)
    assert (auto.keys.shape, auto.offset) == (rolling.keys.shape, 62)
    assert mx.allclose(auto.keys, rolling.keys, atol=1e-5)
    assert mx.array_equal(auto.kept_positions, rolling.kept_positions)


def test_rolling_keeps_no_second_copy_of_the_keys():
    """By its books, and by what the process holds."""
    held = {}
    for positions in ("original", "rolling"):
        cache = H2OKVCache(H2OConfig(budget=512, positions=positions), rotation=rotation_of(nn.RoPE(64)))
        wide = {"n_heads": 8, "width": 64, "value_width": 64, "group": 1, "dtype": mx.float16}
        _tables.cache_clear()  # of angles; all layers share them
        mx.clear_cache()
        before = mx.get_active_memory()
        for i in range(3):
            mx.eval(attend(cache, *rows(i, 400, **wide)), attend(cache, *rows(i, 1, **wide)), cache.state)
        for i in range(5):
            mx.eval(attend(cache, *rows(i, 1, **wide)))
        assert cache.evictions > 0
        mx.eval(cache.state)
        _tables.cache_clear()
        mx.clear_cache()
        held[positions] = (cache.nbytes, mx.get_active_memory() - before)
    books, process = (held["rolling"][i] / held["original"][i] for i in range(2))
    assert 1 < books <= 1.1
    assert process <= 1.1


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_rolling_does_not_drift(dtype):
    """After 10,000 evictions a sink's key is within one rounding of the exact key at its position."""
    rope = nn.RoPE(64)
    config = H2OConfig(budget=32, n_sink=4, grace=8, positions="rolling", queries="key")
    cache = H2OKVCache(config, rotation=rotation_of(rope))
    first, later = (mx.random.normal((1, 1, 8, 64), key=mx.random.key(i)).astype(dtype) for i in (1, 2))
    for i in range(1255):
        row = first if i == 0 else later
        keys, _ = cache.update_and_fetch(rope(row, offset=cache.offset), row)
        if i % 50 == 0:
            mx.eval(cache.state)
    assert cache.evictions == 1255 * 8 - 32
    # The last call shows the kept rows and then its own; sinks stay first among them.
    sinks = keys[:, :, :4].astype(mx.float32)
    exact = rope(first[:, :, :4].astype(mx.float32), offset=0)
    # A key is rounded three times: as the model rotates it, as it is stored, as it is read.
    step = {mx.float32: 1e-5, mx.float16: 2**-11, mx.bfloat16: 2**-8}[dtype]
    assert mx.abs(sinks - exact).max().item() <= 3 * step * mx.abs(exact).max().item()


@pytest.mark.parametrize("positions", ["original", "rolling"])
def test_a_copy_and_a_restored_state_go_on_alike(model, positions):
    config = H2OConfig(budget=24, n_sink=2, grace=4, positions=positions)
    caches = make_prompt_cache(model, config)
    generated(model, caches, mx.arange(50) % 64, 20)
    copies = copy.deepcopy(caches)
    restored = [H2OKVCache.from_state(c.state) for c in caches]
    assert [c.config for c in restored] == [config] * 2
    expected = generated(model, caches, mx.array([3]), 20)
    assert generated(model, copies, mx.array([3]), 20) == expected
    assert generated(model, restored, mx.array([3]), 20) == expected
    assert mx.array_equal(restored[1].scores, caches[1].scores)
    assert mx.array_equal(restored[1].totals, caches[1].totals)


def test_a_fresh_state_can_be_restored():
    restored = H2OKVCache.from_state(H2OKVCache(SMALL).state)
    assert restored.empty()
    assert restored.config == SMALL


@pytest.mark.parametrize(("budget", "steps"), [(256, 5000), (10_000, 2000)])
def test_memory_is_level(model, budget, steps):
    """Below the budget scores could pile up unevaluated, since decode evaluates logits alone."""
    caches, levels = make_prompt_cache(model, H2OConfig(budget=budget)), []
    tokens = generate_step(mx.arange(300) % 64, model, max_tokens=steps, prompt_cache=caches)
    for i, _ in enumerate(tokens):
        if i % 500 == 99 or i == steps - 1:
            own = sum(c.nbytes for c in caches)
            mx.eval([c.state for c in caches])
            mx.synchronize()
            mx.clear_cache()
            levels.append(mx.get_active_memory() - own)
    assert caches[0].tokens_seen >= 300 + steps - 1
    assert max(levels) - min(levels) < 2**20, levels


def test_memory_is_level_when_nothing_asks_for_it(model):
    """As above, but no property is read and no state evaluated on the way."""
    caches = make_prompt_cache(model, H2OConfig(budget=10_000))
    levels = []
    for i, _ in enumerate(generate_step(mx.arange(9), model, max_tokens=1500, prompt_cache=caches)):
        if i in (500, 1400):
            mx.clear_cache()
            levels.append(mx.get_active_memory())
    grown = levels[1] - levels[0]
    # The caches' own buffers grow by four steps of 256 slots of 2 × 8 floats, score and position.
    own = 2 * 4 * 256 * 2 * (2 * 8 * 4 + 8)
    assert grown < own + 2**20


def test_a_steady_step_copies_no_buffer():
    cache = H2OKVCache(H2OConfig(budget=2048))
    mx.eval(attend(cache, *rows(0, 2100, n_heads=8, width=64, value_width=64, group=1)), cache.state)
    for i in range(3):
        mx.eval(attend(cache, *rows(i, 1, n_heads=8, width=64, value_width=64, group=1)))
    mx.eval(cache.state)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for i in range(20):
        mx.eval(attend(cache, *rows(i, 1, n_heads=8, width=64, value_width=64, group=1)))
    assert cache.keys.nbytes > 4 * 2**20
    assert mx.get_peak_memory() - before < cache.keys.nbytes / 4


def test_a_model_without_the_hook_raises_at_the_next_call():
    cache = H2OKVCache(SMALL)
    _, k, v = rows(0, 5)
    cache.update_and_fetch(k, v)
    with pytest.raises(RuntimeError, match=r'never got its attention reported.*install.*queries="key"'):
        cache.update_and_fetch(k, v)
    with pytest.raises(RuntimeError, match="never got its attention reported"):
        _ = cache.state


def test_key_queries_need_no_hook():
    cache = H2OKVCache(H2OConfig(budget=24, n_sink=2, grace=4, queries="key"))
    for i in range(40):
        keys, _ = cache.update_and_fetch(*rows(i, 1)[1:])
        assert keys.shape[2] <= 25
    assert cache.evictions == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 2}, r"keys of one cache keep batch.*it holds \(1, 2, 8\).*brings \(2, 2, 8\)"),
        ({"dtype": mx.float16}, r"float32, the call brings .*float16"),
        ({"value_width": 4}, r"values of one cache keep batch"),
        ({"n_heads": 1}, r"keys of one cache keep batch"),
    ],
)
def test_a_call_that_contradicts_the_ones_before_is_refused(change, message):
    cache = H2OKVCache(SMALL)
    attend(cache, *rows(0, 5))
    with pytest.raises(ValueError, match=message):
        cache.update_and_fetch(*rows(1, 1, **change)[1:])


def test_masks_that_it_did_not_make_are_refused():
    cache = H2OKVCache(SMALL)
    q, k, v = rows(0, 5)
    mask = cache.make_mask(5, return_array=True)
    keys, values = cache.update_and_fetch(k, v)
    with pytest.raises(ValueError, match=r"mask it did not make, got one of shape \(5, 5\) for 5 queries"):
        scaled_dot_product_attention(q, keys, values, cache, 0.3, mx.array(mask))
    ours = scaled_dot_product_attention(q, keys, values, cache, 0.3, mask)
    assert mx.allclose(ours, scaled_dot_product_attention(q, keys, values, KVCache(), 0.3, "causal"), atol=1e-5)
    with pytest.raises(ValueError, match="window of 4 tokens, but this cache shows it 6 rows"):
        cache.make_mask(1, window_size=4)
    assert cache.make_mask(1, window_size=64) is None


@pytest.mark.parametrize("mask", ["sliding", None])
def test_what_is_not_causal_is_refused(mask):
    cache = H2OKVCache(SMALL)
    q, k, v = rows(0, 5)
    keys, values = cache.update_and_fetch(k, v)
    with pytest.raises(ValueError, match="mask it did not make"):
        scaled_dot_product_attention(q, keys, values, cache, 0.3, mask)


def test_what_it_cannot_do_it_says(model):
    cache = H2OKVCache(SMALL)
    assert not cache.is_trimmable()
    with pytest.raises(ValueError, match="can't be trimmed"):
        cache.trim(3)
    with pytest.raises(ValueError, match=r'positions="rolling" needs the rotation'):
        H2OKVCache(H2OConfig(positions="rolling"))
    with pytest.raises(ValueError, match=r'positions="auto" needs trained_length, got None'):
        H2OKVCache(H2OConfig(positions="auto"), rotation=rotation_of(nn.RoPE(8)))
    with pytest.raises(ValueError, match="empty: it has no rows"):
        cache.keys_and_values()
    caches = make_prompt_cache(model, SMALL)
    tokens = generate_step(mx.arange(9), model, prompt_cache=caches, kv_bits=4, quantized_kv_start=0)
    with pytest.raises(ValueError, match=r"asked for kv_bits=4\).*make_prompt_cache\(model, config, kv_bits=4\)"):
        next(tokens)


def test_scores_that_are_not_finite_evict_no_sink(model):
    """A row of infinite keys gives nan masses everywhere; sinks and the newest stay."""
    cache = H2OKVCache(SMALL)
    attend(cache, *rows(0, 30))
    q, k, v = rows(1, 1)
    attend(cache, q, k * mx.inf, v)
    for i in range(30):
        attend(cache, *rows(i, 1))
    for head in cache.kept_positions[0].tolist():
        assert len(head) == 24
        assert head[:2] == [0, 1]
        assert head[-4:] == [57, 58, 59, 60]


def test_every_generation_gets_fresh_caches(model):
    install(model, SMALL)
    try:
        first = [t for t, _ in generate_step(mx.arange(40) % 64, model, max_tokens=30)]
        assert [t for t, _ in generate_step(mx.arange(40) % 64, model, max_tokens=30)] == first
        one, two = plain_cache(model), plain_cache(model)
        assert isinstance(one[0], H2OKVCache)
        assert one[0] is not two[0]
        assert one[0].config == SMALL
        other = H2OConfig(budget=32, n_sink=2, grace=4)
        install(model, other)
        assert plain_cache(model)[0].config == other
        assert make_prompt_cache(model, SMALL)[0].config == SMALL
    finally:
        uninstall(model)
    assert type(plain_cache(model)[0]) is KVCache


def test_the_rotation_is_data():
    rotation = Rotation(mx.ones((4,)), traditional=True)
    cache = copy.deepcopy(H2OKVCache(H2OConfig(positions="rolling"), rotation=rotation))
    assert cache.rotation.traditional is True
    assert H2OKVCache(H2OConfig(), rotation=rotation).rotation is None


def test_several_positions_a_token_cannot_roll():
    scaling = {"type": "mrope", "mrope_section": [1, 1, 2]}
    args = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48, "num_attention_heads": 4}
    args |= {"rms_norm_eps": 1e-5, "vocab_size": 64, "rope_scaling": scaling}
    several = llama.Model(llama.ModelArgs(model_type="llama", **args))
    with pytest.raises(ValueError, match=r'several positions a token \(M-RoPE\): use positions="original"'):
        make_prompt_cache(several, H2OConfig(positions="rolling"))
    assert isinstance(make_prompt_cache(several, H2OConfig())[0], H2OKVCache)


def test_auto_takes_the_trained_length_from_the_model_or_asks(model):
    args = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48, "num_attention_heads": 4}
    args |= {"rms_norm_eps": 1e-5, "vocab_size": 64}
    trained = llama.Model(llama.ModelArgs(model_type="llama", max_position_embeddings=4096, **args))
    assert make_prompt_cache(trained, H2OConfig(positions="auto"))[0].config.trained_length == 4096
    given = H2OConfig(positions="auto", trained_length=1000)
    assert make_prompt_cache(trained, given)[0].config == given
    with pytest.raises(ValueError, match="budget=4096, trained_length=4096"):
        make_prompt_cache(trained, H2OConfig(budget=4096, positions="auto"))
    with pytest.raises(ValueError, match="how long llama was trained for, and its arguments do not say"):
        make_prompt_cache(model, H2OConfig(positions="auto"))


def in_a_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@pytest.mark.parametrize("positions", ["original", "rolling"])
@pytest.mark.parametrize("queries", ["true", "key"])
def test_a_cache_goes_on_in_another_thread(model, positions, queries):
    """An unevaluated array can be evaluated by the thread that made it alone, so none may be left over."""
    config = H2OConfig(budget=24, n_sink=2, grace=4, positions=positions, queries=queries)

    def turn(caches):
        return generated(model, caches, mx.arange(30) % 64, 20)

    caches, alone = make_prompt_cache(model, config), make_prompt_cache(model, config)
    expected = [turn(alone), turn(alone), turn(alone)]
    assert [in_a_thread(lambda: turn(caches)), turn(caches), in_a_thread(lambda: turn(caches))] == expected
    assert caches[1].kept_positions.tolist() == alone[1].kept_positions.tolist()


def test_two_threads_generate_at_once(model):
    install(model, SMALL)
    try:
        prompts = [mx.arange(start, start + 40) % 64 for start in (0, 7)]
        expected = [[t for t, _ in generate_step(p, model, max_tokens=40)] for p in prompts]
        with ThreadPoolExecutor(2) as pool:
            at_once = list(pool.map(lambda p: [t for t, _ in generate_step(p, model, max_tokens=40)], prompts))
        assert at_once == expected
    finally:
        uninstall(model)


def test_asking_for_caches_never_uninstalls_for_a_moment(model):
    install(model, SMALL)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            made = list(pool.map(lambda _: type(plain_cache(model)[0]), range(2000)))
    finally:
        sys.setswitchinterval(interval)
        uninstall(model)
    assert set(made) == {H2OKVCache}


def test_a_failed_install_leaves_the_one_before(model):
    install(model, SMALL)
    try:
        with pytest.raises(ValueError, match="how long llama was trained for"):
            install(model, H2OConfig(positions="auto"))
        assert plain_cache(model)[0].config == SMALL
    finally:
        uninstall(model)


def test_a_configuration_of_another_kind_is_refused(model):
    with pytest.raises(TypeError, match="config must be an H2OConfig, got 64"):
        make_prompt_cache(model, 64)


def test_attention_reported_after_its_call_is_refused():
    cache = H2OKVCache(SMALL)
    q, k, v = rows(0, 5)
    keys, values = cache.update_and_fetch(k, v)
    scaled_dot_product_attention(q, keys, values, cache, 0.3, "causal")
    assert cache.scores.shape == (1, 2, 5)
    with pytest.raises(RuntimeError, match="whose call has ended"):
        scaled_dot_product_attention(q, keys, values, cache, 0.3, "causal")
