"""Taking tokens back: as if they had never been seen, or an error that says why not."""

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.models import gemma3_text, llama
from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

from h2o_core.conformance import TOLERANCE, Head, close, same_choice
from h2o_mlxlm import H2OConfig, H2OKVCache, make_prompt_cache, scaled_dot_product_attention
from h2o_mlxlm.backend import REFERENCE
from h2o_mlxlm.benchmarks import memory
from h2o_mlxlm.benchmarks.layer import Shape
from h2o_mlxlm.benchmarks.variants import VARIANTS
from h2o_mlxlm.counts import Count
from h2o_rope import rotation_of

R, H, G, D = 3, 2, 2, 8
ROPE = nn.RoPE(D, base=100.0)
SCALE = 0.9
# The reference's functions, called as a fused back end's are.
FUSED = REFERENCE._replace(name="fused", fused=True)


def config(budget=12, **changes):
    return H2OConfig(**{"budget": budget, "n_sink": 2, "grace": 3, "rewind": R, **changes})


def fresh(config=None, backend=REFERENCE):
    return H2OKVCache(config or globals()["config"](), SCALE, rotation_of(ROPE), backend)


def rows(seed, n, batch=1, dtype=mx.float32):
    keys = mx.random.split(mx.random.key(seed), 3)
    shapes = [(batch, H * G, n, D), (batch, H, n, D), (batch, H, n, D)]
    return [mx.random.normal(s, key=key).astype(dtype) for s, key in zip(shapes, keys, strict=True)]


def call(cache, given):
    """One call of a layer: rotate at the cache's offset, write, attend."""
    q, k, v = given
    q, k = ROPE(q, offset=cache.offset), ROPE(k, offset=cache.offset)
    mask = cache.make_mask(q.shape[2])
    return scaled_dot_product_attention(q, *cache.update_and_fetch(k, v), cache, SCALE, mask)


def everything(cache):
    """All that a cache knows of its tokens, bit for bit, whatever their slots."""
    slots = mx.argsort(cache.state["positions"].view(mx.uint32), axis=-1)[..., : cache.size(), None]
    kept = [mx.take_along_axis(x, slots, axis=2) for x in (cache.keys, cache.values)]
    figures = (cache.tokens_seen, cache.tokens_kept, cache.offset, cache.evictions, cache.size())
    arrays = [*kept, cache.kept_positions, cache.scores, cache.totals, cache.state["seen"]]
    return [x.tolist() if isinstance(x, mx.array) else x for x in (*arrays, *figures)], cache._counts


# A call of stay + go tokens, of which the last are taken back; more than R + 1 tokens stay.
CALLS = st.one_of(
    st.tuples(st.integers(0, R + 1), st.integers(0, R)).filter(lambda c: 0 < sum(c) <= R + 1),
    st.tuples(st.integers(R + 2, 20), st.just(0)),
)
CHANGES = {
    "plain": {},
    "two quotas": {"decay": 0.8, "long_share": 0.5},
    "held": {"evict_during_prefill": False},
    "rolling": {"positions": "rolling"},
    "rolling, held": {"positions": "rolling", "evict_during_prefill": False},
    "auto": {"positions": "auto", "trained_length": 40},
}
STARTS = {"alone": (), "two": (), "of one length": (9, 9), "of three lengths": (2, 20, 9)}


def started(start, config, backend):
    lengths = STARTS[start]
    if not lengths:
        return fresh(config, backend)
    alone = [fresh(config, backend) for _ in lengths]
    for i, (cache, n) in enumerate(zip(alone, lengths, strict=True)):
        call(cache, rows(900 + i, n))
    return H2OKVCache.merge(alone)


@settings(deadline=None, max_examples=45, derandomize=True)
@given(
    calls=st.lists(CALLS, min_size=1, max_size=14),
    name=st.sampled_from(list(CHANGES)),
    start=st.sampled_from(list(STARTS)),
    fused=st.booleans(),
)
@example([(0, 3), (1, 0), (20, 0), (0, 3), (1, 2)], "plain", "alone", False)  # from nothing, and back to it
@example([(20, 0), (0, 3), (1, 2), (0, 1), (1, 0)], "held", "alone", False)  # the end of a held prompt, there and back
@example([(18, 0), (4, 0), (0, 1), (0, 3), (1, 3), (4, 0), (0, 2)], "auto", "alone", False)  # the turn, there and back
@example([(1, 2)] * 12, "rolling", "of three lengths", True)
def test_tokens_taken_back_were_never_seen(calls, name, start, fused):
    """Bit for bit a cache that has never seen them, at every step."""
    chosen, backend = config(**CHANGES[name]), FUSED if fused else REFERENCE
    ours, never = started(start, chosen, backend), started(start, chosen, backend)
    batch = len(STARTS[start]) or (2 if start == "two" else 1)
    for i, (stay, go) in enumerate(calls):
        given = rows(i, stay + go, batch)
        out = call(ours, given)
        # One by one or at once: it is the same.
        assert sum(ours.trim(n) for n in ([1] * go if i % 2 else [go])) == go
        if stay:
            expected = call(never, [x[:, :, :stay] for x in given])
            assert mx.array_equal(out[:, :, :stay], expected)
        assert ours.empty() == never.empty()
        if not ours.empty():
            assert everything(ours) == everything(never)


class Oracle(Head):
    """The naive head, which holds during parts of a prompt, and is copied before each token that may go."""

    def part(self, queries, keys, values, prefill):
        holding, chosen = self.holding and prefill, self.config
        if holding:
            self.config = replace(chosen, budget=10**6)
        out = self.call(queries, keys, values)
        self.config, self.holding = chosen, holding or (self.holding and len(keys) > 1)
        return out


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    calls=st.lists(st.tuples(st.sampled_from([1, 1, 1, 2, 3, 5, 16]), st.integers(0, R)), min_size=2, max_size=10),
    budget=st.integers(6, 14),
    rewind=st.integers(1, 5),
    decay=st.sampled_from([1.0, 0.9]),
    long_share=st.sampled_from([0.0, 0.5]),
    holds=st.booleans(),
    fused=st.booleans(),
)
@example([(16, 0), (16, 3), (3, 3), (2, 1)], 8, 4, 0.9, 0.0, True, False)
@example([(16, 0), (1, 0), (1, 1), (1, 2), (1, 3), (3, 0)], 8, 4, 0.9, 0.0, False, False)  # over the same tokens again
@example([(15, 0), (1, 0), (5, 2)], 12, 4, 0.9, 0.0, True, True)  # held a little past the budget
def test_it_is_the_oracle_that_goes_back_to_a_copy(calls, budget, rewind, decay, long_share, holds, fused):
    """Calls of any size, of which any tokens are taken back, against float64 and whole copies."""
    chosen = H2OConfig(budget, 1, 2, decay, long_share, evict_during_prefill=not holds, rewind=rewind)
    ours, tolerance = fresh(chosen, FUSED if fused else REFERENCE), 5 * TOLERANCE[mx.float32]
    heads, copies = [Oracle(chosen, SCALE) for _ in range(H)], []
    for i, (n, back) in enumerate(calls):
        q, k, v = rows(50 + i, n)
        turned = [ROPE(x, offset=ours.offset)[0].tolist() for x in (q, k)]
        out, before = call(ours, [q, k, v])[0], [len(head.evicted) for head in heads]
        outs = [[] for _ in range(H * G)]
        lead = max(n - rewind, 0)
        for a, b in [(0, lead)] * (lead > 0) + [(j, j + 1) for j in range(lead, n)]:
            copies = [*copies, copy.deepcopy(heads)] if b - a == 1 else []
            for h, head in enumerate(heads):
                group = [turned[0][g][a:b] for g in range(h * G, h * G + G)]
                made = head.part(group, turned[1][h][a:b], v[0, h, a:b].tolist(), n > rewind + 1)
                for g, part in enumerate(made):
                    outs[h * G + g] += part
        for h, head in enumerate(heads):
            recent = {row.position: row for row in head.rows + head.evicted[before[h] :]}
            kept = set(ours.kept_positions[0, h].tolist())
            assert same_choice(kept, set(head.kept()), recent, tolerance)
            if kept != set(head.kept()):
                return  # a near-tie: from here on they differ
        assert mx.allclose(out, mx.array(outs), atol=1e-4)
        copies = copies[-rewind:]
        back = min(back, len(copies))
        assert ours.trim(back) == back
        if back:
            heads, copies = copies[-back], copies[:-back]
        assert ours.tokens_seen == heads[0].seen
        if ours.empty():
            continue
        for h, head in enumerate(heads):
            held = {row.position: row for row in head.rows}
            assert ours.kept_positions[0, h].tolist() == sorted(held)
            for name in ("score", "total"):
                found = getattr(ours, name + "s")[0, h].tolist()
                assert all(
                    close(x, getattr(held[p], name), tolerance) for p, x in zip(sorted(held), found, strict=True)
                )


@pytest.mark.parametrize("positions", ["rolling", "auto"])
@pytest.mark.parametrize("start", ["alone", "of three lengths"])
def test_a_call_of_several_is_as_many_calls_where_keys_roll(positions, start):
    """Its queries are rotated before rows go, so that they stand further on than each would alone."""
    chosen = config(16, positions=positions, trained_length=30 if positions == "auto" else None, rewind=5)
    ours, one_by_one = started(start, chosen, REFERENCE), started(start, chosen, REFERENCE)
    for i in range(14):
        given = rows(i, 4, len(STARTS[start]) or 1)
        out = call(ours, given)
        single = [call(one_by_one, [x[:, :, j : j + 1] for x in given]) for j in range(4)]
        assert mx.allclose(out, mx.concatenate(single, axis=2), atol=1e-5)
        assert ours.kept_positions.tolist() == one_by_one.kept_positions.tolist()
        assert mx.allclose(ours.scores, one_by_one.scores, atol=1e-5)
    assert mx.array(ours.evictions).min().item() > 20
    assert mx.array_equal(mx.array(ours.offset), mx.array(one_by_one.offset))


def test_a_held_prompt_is_one_whose_calls_are_longer_than_decoding():
    """Without a draft one token ends it; with one a call of the last token and the drafted ones does."""
    cache = fresh(config(8, evict_during_prefill=False))
    for i, n in enumerate([20, R + 2, 9]):
        call(cache, rows(i, n))
    assert (cache.tokens_kept, cache.evictions) == (20 + R + 2 + 9, 0)
    call(cache, rows(9, R + 1))
    assert (cache.tokens_kept, cache.evictions) == (8, 20 + R + 2 + 9 + R + 1 - 8)
    assert cache.trim(R) == R
    assert cache.tokens_kept == 8


def test_the_turn_comes_where_it_comes_without_a_draft():
    turned = []
    for n in (1, R + 1):
        cache = fresh(config(positions="auto", trained_length=40))
        while not cache._counts[0].rolling:
            call(cache, rows(cache.tokens_seen, n))
        turned.append(cache.tokens_seen)
    assert turned[0] == 40 - R
    assert turned[1] - R - 1 < turned[0] <= turned[1]


@pytest.mark.parametrize("n", [R + 1, -1, 100])
def test_more_than_it_remembers_is_refused_and_nothing_has_changed(n):
    cache = fresh()
    call(cache, rows(0, 20))
    before = everything(cache)
    with pytest.raises(ValueError, match=rf"from 0 to {R} tokens now, got {n}: it remembers the newest rewind={R}"):
        cache.trim(n)
    assert everything(cache) == before
    assert cache.trim(0) == 0
    assert everything(cache) == before
    assert cache.trim(R) == R
    with pytest.raises(ValueError, match="from 0 to 0 tokens now, got 1"):
        cache.trim(1)
    with pytest.raises(TypeError, match="integer number of tokens, got True"):
        cache.trim(True)


def test_mlx_lms_own_functions_take_tokens_back(make_model):
    model = make_model()
    caches = make_prompt_cache(model, config())
    model(mx.arange(30)[None], cache=caches)
    assert can_trim_prompt_cache(caches)
    assert trim_prompt_cache(caches, 2) == 2
    assert [c.tokens_seen for c in caches] == [28, 28]
    never = make_prompt_cache(model, config())
    assert not can_trim_prompt_cache(make_prompt_cache(model, config(rewind=0)))
    # The same calls of the layers: 27 tokens, then one by one.
    for cache in never:
        cache.config = config(rewind=1)
    model(mx.arange(28)[None], cache=never)
    assert [c.tokens_seen for c in never] == [28, 28]
    assert all(c.trim(1) == 1 and c.tokens_seen == 27 for c in (*caches, *never))


def test_without_rewind_it_says_how_to_get_it():
    cache = fresh(config(rewind=0))
    call(cache, rows(0, 20))
    assert not cache.is_trimmable()
    with pytest.raises(ValueError, match=r"rewind=0 can't be trimmed \(asked for 2 tokens\).*H2OConfig\(rewind=2\)"):
        cache.trim(2)


FORGETS = {
    "loaded": lambda cache: H2OKVCache.from_state(cache.state),
    "merged": lambda cache: H2OKVCache.merge([cache, cache]),
    "extracted": lambda cache: H2OKVCache.merge([cache, cache]).extract(1),
    "extended": lambda cache: cache.extend(copy.deepcopy(cache)) or cache,
    "filtered": lambda cache: cache.filter([0]) or cache,
    "keys set": lambda cache: setattr(cache, "keys", cache.keys + 0) or cache,
    "values set": lambda cache: setattr(cache, "values", cache.values + 0) or cache,
}


@pytest.mark.parametrize("way", FORGETS)
def test_what_it_has_forgotten_can_not_be_taken_back_but_what_comes_can(way):
    cache = fresh()
    call(cache, rows(0, 20))
    other = FORGETS[way](cache)
    assert other.is_trimmable()
    with pytest.raises(ValueError, match=r"from 0 to 0 tokens now, got 1.*made or loaded and since it joined or left"):
        other.trim(1)
    before, batch = everything(other), other.keys.shape[0]
    call(other, rows(1, 2, batch))
    assert other.trim(2) == 2
    assert everything(other) == before


@pytest.mark.parametrize("name", ["plain", "held", "auto"])
@pytest.mark.parametrize("backend", [REFERENCE, FUSED], ids=lambda b: b.name)
@pytest.mark.parametrize("back", [0, 2])
def test_nothing_is_left_over_for_another_thread(name, backend, back):
    """An unevaluated array can be evaluated by the thread that made it alone."""
    cache, other = (fresh(config(**CHANGES[name]), backend) for _ in range(2))
    for c in (cache, other):
        mx.eval(call(c, rows(0, 36)), c.state)
        mx.eval(call(c, rows(1, 3)))
        c.trim(back)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: mx.eval(call(cache, rows(2, 3)), cache.state)).result()
    call(other, rows(2, 3))
    assert cache.evictions > 20
    assert everything(cache) == everything(other)


def test_attention_after_tokens_were_taken_back_is_refused():
    cache = fresh()
    call(cache, rows(0, 20))
    q, k, v = rows(1, 1)
    shown = cache.update_and_fetch(k, v)
    scaled_dot_product_attention(q, *shown, cache, SCALE, None)
    cache.trim(1)
    with pytest.raises(RuntimeError, match="whose call has ended"):
        scaled_dot_product_attention(q, *shown, cache, SCALE, None)


def test_a_copy_remembers_for_itself():
    cache = fresh()
    call(cache, rows(0, 20))
    other = copy.deepcopy(cache)
    assert cache.trim(2) == 2
    call(cache, rows(1, 2))
    assert (other.tokens_seen, other.trim(3), other.tokens_seen, cache.tokens_seen) == (20, 3, 17, 20)


def test_padding_is_refused():
    cache = H2OKVCache.merge([fresh(), fresh()])
    cache.prepare(lengths=[4, 4], right_padding=[0, 0])
    with pytest.raises(ValueError, match=r"no padding, got rewind=3, right_padding=\[0, 2\].*rewind=0"):
        cache.prepare(lengths=[6, 4], right_padding=[0, 2])
    out = call(cache, rows(0, 6, 2))
    assert out.shape == (2, H * G, 6, D)


def test_back_to_nothing_any_rows_may_come():
    cache = fresh()
    call(cache, rows(0, 2))
    assert cache.trim(2) == 2
    assert (cache.empty(), cache.nbytes, cache.offset, cache.size()) == (True, 0, 0, 0)
    call(cache, rows(0, 2, batch=3, dtype=mx.float16))
    assert cache.keys.shape[0] == 3


@pytest.mark.parametrize("ask", [lambda c: c.state, lambda c: c.trim(1), lambda c: c.nbytes, lambda c: c.scores])
def test_a_call_that_was_never_attended_to_says_so(ask):
    cache = fresh()
    call(cache, rows(0, 20))
    _, k, v = rows(1, 3)
    cache.update_and_fetch(k, v)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="never got its attention reported"):
            ask(cache)
    with pytest.raises(RuntimeError, match="never got its attention reported"):
        cache.update_and_fetch(k[:, :, :1], v[:, :, :1])


@pytest.mark.parametrize("after", [1, 2])
def test_an_interruption_between_parts_leaves_it_unusable_and_it_says_so(after):
    cache = fresh()
    call(cache, rows(0, 20))
    q, k, v = rows(1, 3)
    parts = cache.parts(q, *cache.update_and_fetch(k, v))
    for _, part in zip(range(after), parts, strict=False):
        cache.observe(cache.backend.attend(*part, SCALE, 0.95)[1])
    with pytest.raises(RuntimeError, match="never got its attention reported"):
        call(cache, rows(2, 1))


def test_attention_to_other_keys_or_once_more_is_refused():
    cache = fresh()
    q, k, v = rows(1, 3)
    keys, values = cache.update_and_fetch(k, v)
    with pytest.raises(ValueError, match="with rewind=3 a layer must attend to the keys and values that its cache"):
        scaled_dot_product_attention(q, keys + 0, values, cache, SCALE, "causal")
    scaled_dot_product_attention(q, keys, values, cache, SCALE, "causal")
    with pytest.raises(RuntimeError, match="attends twice to one cache"):
        scaled_dot_product_attention(q, keys, values, cache, SCALE, "causal")


def test_a_call_that_contradicts_the_ones_before_is_refused_before_it_waits():
    cache = fresh()
    call(cache, rows(0, 20))
    _, k, v = rows(1, 3, batch=2)
    with pytest.raises(ValueError, match="keys of one cache keep batch"):
        cache.update_and_fetch(k, v)
    assert cache.trim(1) == 1


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_its_bytes_are_the_formulas(batch, dtype):
    plain, ours = (fresh(config(24, rewind=rewind)) for rewind in (0, R))
    for cache in (plain, ours):
        for i, n in enumerate([40, 3, 1]):
            call(cache, rows(i, n, batch, dtype))
    row = batch * H * (4 + 2 * D * dtype.size)
    of_one = batch * H * 12 * 25 + 4 * batch + row
    assert ours.nbytes - plain.nbytes == R * of_one + row
    ours.trim(1)
    assert ours.nbytes - plain.nbytes == (R - 1) * of_one + row


def test_the_end_of_a_held_prompt_is_in_its_bytes():
    cache = fresh(config(8, evict_during_prefill=False))
    call(cache, rows(0, 40))
    call(cache, rows(1, 1))
    rows_of_prompt = 2 * 40 * H * D * 4
    assert cache.nbytes > rows_of_prompt
    call(cache, rows(2, R))
    assert cache.nbytes < rows_of_prompt


@pytest.mark.parametrize("n_tokens", [32, 64, 300])
def test_the_process_holds_what_nbytes_says(n_tokens, monkeypatch):
    monkeypatch.setitem(VARIANTS, "h2o", VARIANTS["h2o-rewind"])
    in_use, said = memory.held(Shape(2, 2, 64), 64, n_tokens)
    assert said <= in_use <= said + memory.KIB


def test_a_model_whose_layers_share_a_cache_is_refused(make_model, monkeypatch):
    model = make_model()
    one = llama.Model.layers.fget(model)[:1]
    monkeypatch.setattr(type(model), "make_cache", lambda self: plain_caches(one), raising=False)
    with pytest.raises(ValueError, match="rewind=3 needs a cache for each layer, but llama has 1 caches for 2 layers"):
        make_prompt_cache(model, config())
    assert len(make_prompt_cache(model, config(rewind=0))) == 1


def plain_caches(layers):
    from mlx_lm.models.cache import KVCache

    return [KVCache() for _ in layers]


def test_a_model_with_layers_that_forget_is_refused():
    args = gemma3_text.ModelArgs(
        model_type="gemma3_text",
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=64,
        sliding_window=16,
        sliding_window_pattern=2,
    )
    with pytest.raises(ValueError, match=r"rewind=3 needs every layer .* keep RotatingKVCache.*use rewind=0"):
        make_prompt_cache(gemma3_text.Model(args), config())


def test_a_count_of_part_of_a_call_goes_by_the_whole():
    chosen = config(8, evict_during_prefill=False)
    held = Count(seen=20, kept=20, largest=20, holding=True)
    assert held.after(chosen, 1, whole=9).holding
    assert held.after(chosen, 1, whole=9).kept == 21
    assert held.after(chosen, 1, whole=R + 1) == Count(21, 8, 20, False)
    assert held.after(chosen, 0, whole=0) == held
