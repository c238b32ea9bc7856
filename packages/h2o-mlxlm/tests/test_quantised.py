"""Caches whose rows are quantised: each is a plain cache that is given rows as they come out of store."""

import copy
import math

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import make_prompt_cache as plain_cache

from h2o_core.conformance import TOLERANCE, Head, same_choice
from h2o_mlxlm import H2OConfig, H2OKVCache, install, make_prompt_cache, scaled_dot_product_attention, uninstall
from h2o_mlxlm.backend import REFERENCE
from h2o_mlxlm.forms import forms
from h2o_rope import derotate, rotate, rotation_of

D, SCALE = 32, 0.4
SMALL = H2OConfig(budget=12, n_sink=2, grace=3, decay=0.9)
FORMS = [(8, 32), (4, 32), ((8, 4), 32), ((4, None), 32)]
CALLS = [9, 1, 1, 8, *[1] * 30, 5, 1, 1]


@pytest.fixture(scope="module")
def model(make_model):
    return make_model(head_dim=D)


def drawn(key, n, batch=1, dtype=mx.float32, width=D):
    keys = mx.random.split(mx.random.key(key), 3)
    heads = (4, 2, 2)
    return [(2 * mx.random.normal((batch, h, n, width), key=k)).astype(dtype) for h, k in zip(heads, keys, strict=True)]


def quantised(config, form, rotation=None):
    return H2OKVCache(config, SCALE, rotation, kv_bits=form[0], kv_group_size=form[1])


def attend(cache, q, k, v):
    mask = cache.make_mask(q.shape[2])
    return scaled_dot_product_attention(q, *cache.update_and_fetch(k, v), cache, SCALE, mask)


def through(form, keys, values):
    """Keys and values as they come out of store."""
    return [p.opened(p.closed(x)) for p, x in zip(forms(*form, "per_token"), (keys, values), strict=True)]


def check_alike(cache, other):
    assert cache.kept_positions.tolist() == other.kept_positions.tolist()
    assert mx.allclose(cache.scores, other.scores, atol=1e-5)
    assert mx.allclose(cache.totals, other.totals, atol=1e-5)


@pytest.mark.parametrize("queries", ["true", "key"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_it_attends_scores_and_evicts_by_what_is_stored(form, queries):
    """At each step the outputs, kept positions and scores of a float64 cache that holds the stored rows."""
    config = H2OConfig(budget=12, n_sink=2, grace=3, decay=0.9, queries=queries)
    cache, parted = quantised(config, form), set()
    heads = [Head(config, SCALE) for _ in range(2)]
    for i, n in enumerate(CALLS):
        q, k, v = drawn(i, n)
        # A key that asks finds itself first: small ones leave something for the others.
        k = k * (0.15 if queries == "key" else 1)
        out = attend(cache, q, k, v)
        stored = [x[0].tolist() for x in through(form, k, v)]
        for h, head in enumerate(heads):
            before, asking = len(head.evicted), q[0, 2 * h : 2 * h + 2].tolist()
            attending = copy.deepcopy(head) if queries == "key" else head
            expected = attending.call(asking, stored[0][h], stored[1][h])
            if queries == "key":
                head.call([stored[0][h]], stored[0][h], stored[1][h])
            if h in parted:
                continue
            assert mx.allclose(out[0, 2 * h : 2 * h + 2], mx.array(expected), atol=1e-4)
            recent = {row.position: row for row in head.rows + head.evicted[before:]}
            kept, wanted = cache.kept_positions[0, h].tolist(), head.kept()
            assert same_choice(set(kept), set(wanted), recent, TOLERANCE[mx.float32])
            if kept != wanted:
                parted.add(h)
                continue
            ours = dict(zip(kept, cache.scores[0, h].tolist(), strict=True))
            assert all(math.isclose(ours[p], recent[p].score, rel_tol=1e-4, abs_tol=1e-5) for p in kept)
    assert not parted
    assert cache.evictions == sum(CALLS) - 12


@pytest.mark.parametrize("form", [(8, 32), (4, 32)], ids=str)
def test_rolling_keys_are_stored_unrotated(form):
    rope = rotation_of(nn.RoPE(D))
    config = H2OConfig(budget=12, n_sink=2, grace=3, decay=0.9, positions="rolling")
    cache, plain = quantised(config, form, rope), H2OKVCache(config, SCALE, rope)
    for i, n in enumerate(CALLS):
        q, k, v = drawn(i, n)
        places = cache.offset + mx.arange(n, dtype=mx.int32)
        turned, values = through(form, derotate(k, places, rope), v)
        # The plain cache derotates what it is given, which then is what the other has in store.
        expected = attend(plain, q, rotate(turned, places, rope), values)
        assert mx.allclose(attend(cache, q, k, v), expected, atol=1e-4)
        check_alike(cache, plain)
    assert cache.evictions > 0


def test_turning_quantises_once_more():
    """Keys that turn are off by two roundings, those that come later by one; values are not touched."""
    rope = rotation_of(nn.RoPE(D))
    auto = quantised(H2OConfig(budget=64, positions="auto", trained_length=100), (8, 32), rope)
    exact = H2OKVCache(H2OConfig(budget=64, positions="rolling"), SCALE, rope)
    for i, n in enumerate([40, 20, 1, 1]):
        q, k, v = drawn(i, n)
        attend(auto, q, k, v)
        attend(exact, q, k, v)
    auto._end_call()
    stored, true = auto._slots.keys.opened(62), exact._slots.keys.opened(62)
    step = mx.abs(true).max().item() * 2 / 255
    off = mx.abs(stored - true)
    assert off[:, :, 60:].max().item() <= 1.1 * step
    assert 0 < off[:, :, :60].max().item() <= 2.5 * step
    assert auto._counts[0].rolling


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_step_changes_the_bits_of_the_victims_slot_alone(form):
    cache = quantised(SMALL, form)
    attend(cache, *drawn(0, 30, batch=2))
    attend(cache, *drawn(0, 1, batch=2))
    for i in range(40):
        cache._end_call()
        keys, values, before = cache._slots
        old = [mx.array(x) for x in (*keys.arrays, *values.arrays)]
        q, k, v = drawn(i, 1, batch=2)
        attend(cache, q * (1, 0.1)[i % 2], k * (1, 100, 1e-3)[i % 3], v * (100, 1e-3, 1)[i % 3])
        cache._end_call()
        free = (before.positions < 0)[..., None]
        assert free.sum().item() == 4
        for x, y in zip((*cache._slots.keys.arrays, *cache._slots.values.arrays), old, strict=True):
            assert not mx.any((x != y) & ~free)
    assert cache.evictions == 31 + 40 - 12


# Bytes of a row's numbers beside those in the model's dtype: bits/width of the dtype, and two numbers a group.
@pytest.mark.parametrize(("dtype", "size"), [(mx.float32, 4), (mx.float16, 2), (mx.bfloat16, 2)], ids=str)
@pytest.mark.parametrize(("bits", "group"), [(8, 64), (8, 32), (4, 128), (4, 64), (4, 32)])
def test_bytes_are_as_claimed(bits, group, dtype, size):
    cache = quantised(H2OConfig(budget=24, n_sink=2, grace=4), (bits, group))
    attend(cache, *drawn(0, 40, dtype=dtype, width=128))
    attend(cache, *drawn(1, 1, dtype=dtype, width=128))
    row = 128 * bits / 8 + 128 // group * 2 * size
    assert cache.nbytes == 2 * 25 * (2 * row + 4 + 4 + 4) + 4
    assert cache.full_bytes == 41 * 2 * 2 * 128 * size
    keys, values = cache.keys_and_values()
    assert (keys.dtype, values.dtype, keys.shape[-1]) == (dtype, dtype, 128)


def alone(model, caches, tokens, n):
    """Greedy tokens of one request, fed as BatchGenerator feeds it: chunks, the last token alone, each answer."""
    for start in range(0, len(tokens) - 1, 8):
        model(mx.array([tokens[start : min(start + 8, len(tokens) - 1)]]), cache=caches)
    answers = [tokens[-1]]
    for _ in range(n + 1):
        answers.append(mx.argmax(model(mx.array([answers[-1:]]), cache=caches)[:, -1], axis=-1).item())
    return answers[1:-1]


def test_requests_join_and_leave(model):
    """Each keeps what it keeps alone, for the same scores."""
    install(model, SMALL, kv_bits=8, kv_group_size=32)
    prompts, n = [mx.random.randint(3, 260, (n,), key=mx.random.key(n)).tolist() for n in (3, 40, 1, 23)], 20
    try:
        generator = BatchGenerator(model, prefill_step_size=8, completion_batch_size=3)
        uids = generator.insert(prompts, max_tokens=[n] * 4)
        tokens, last = {uid: [] for uid in uids}, {}
        while len(last) < 4:
            for response in generator.next_generated():
                tokens[response.uid].append(response.token)
                if response.finish_reason is not None:
                    last[response.uid] = response.prompt_cache
    finally:
        uninstall(model)
    for uid, prompt in zip(uids, prompts, strict=True):
        caches = make_prompt_cache(model, SMALL, kv_bits=8, kv_group_size=32)
        assert alone(model, caches, prompt, n) == tokens[uid]
        for cache, other in zip(last[uid], caches, strict=True):
            assert (type(cache), cache.forms) == (H2OKVCache, other.forms)
            assert (cache.tokens_seen, cache.tokens_kept, cache.evictions > 0) == (other.tokens_seen, 12, True)
            # Keys of a batch differ in their last bits, which now and then is a step of 8 bits.
            assert cache.kept_positions.tolist() == other.kept_positions.tolist()
            assert mx.allclose(cache.scores, other.scores, atol=1e-2)


def test_a_copy_and_a_restored_state_go_on_alike(model):
    caches = make_prompt_cache(model, SMALL, kv_bits=(8, 4), kv_group_size=32)
    first = [t for t, _ in generate_step(mx.arange(50), model, max_tokens=20, prompt_cache=caches)]
    copies, restored = copy.deepcopy(caches), [H2OKVCache.from_state(c.state) for c in caches]
    last, runs = mx.array(first[-1:]), []
    for some in (caches, copies, restored):
        runs.append([t for t, _ in generate_step(last, model, max_tokens=20, prompt_cache=some)])
        assert some[0].evictions >= 50 + 20 + 20 - 12
    assert runs[0] == runs[1] == runs[2]
    for cache, again in zip(caches, restored, strict=True):
        assert [len(cache.keys), [x.shape[-1] for x in cache.keys]] == [3, [8, 1, 1]]
        assert [x.shape[-1] for x in cache.values] == [4, 1, 1]
        for x, y in zip((*cache.keys, *cache.values), (*again.keys, *again.values), strict=True):
            assert mx.array_equal(x, y)


def test_models_that_set_keys_set_them_as_they_are_stored(model):
    """Some tie them to other arrays: nothing may be quantised a second time."""
    caches = make_prompt_cache(model, SMALL, kv_bits=4, kv_group_size=32)
    model(mx.arange(30)[None], cache=caches)
    before = [mx.array(x) for x in (*caches[0].keys, *caches[0].values)]
    caches[0].keys = mx.depends(caches[0].keys, mx.ones(1))
    caches[0].values = mx.depends(caches[0].values, mx.ones(1))
    for x, y in zip((*caches[0].keys, *caches[0].values), before, strict=True):
        assert mx.array_equal(x, y)


def test_mlx_lm_takes_it_for_no_cache_of_its_own(model):
    """It attends through our function, and asking mlx_lm for kv_bits says where to ask."""
    caches = make_prompt_cache(model, SMALL, kv_bits=8, kv_group_size=32)
    assert not hasattr(caches[0], "bits")
    assert not hasattr(caches[0], "group_size")
    tokens = generate_step(mx.arange(9), model, prompt_cache=caches, kv_bits=8, quantized_kv_start=0)
    with pytest.raises(ValueError, match=r"from its first token or not at all.*make_prompt_cache\(.*kv_bits=8\)"):
        next(tokens)


def test_with_room_for_all_it_is_close_to_the_full_cache(model):
    tokens = mx.random.randint(0, 250, (1, 40), key=mx.random.key(3))
    full = model(tokens, cache=plain_cache(model))
    off = []
    for bits in (8, 4):
        caches = make_prompt_cache(model, H2OConfig(budget=64), kv_bits=bits, kv_group_size=32)
        off.append(mx.square(model(tokens, cache=caches) - full).mean().sqrt().item())
    # Steps of a 15th of a group's range in place of a 255th.
    assert 0 < off[0] < 0.05 * mx.square(full).mean().sqrt().item()
    assert 17 / 1.5 < off[1] / off[0] < 17 * 1.5


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ((5, 64), "kv_bits must be None or 8 or 4, or a pair of them for keys and values, got 5"),
        ((4.0, 64), "got 4.0"),
        (((8, 4, 4), 64), r"got \(8, 4, 4\)"),
        ((8, 48), "kv_group_size must be 32 or 64 or 128, or a pair of them for keys and values, got 48"),
        ((8, (32, 16)), r"got \(32, 16\)"),
        ((None, 32), "kv_group_size=32 and .* do nothing without kv_bits: pass kv_bits=8 or 4 as well"),
    ],
)
def test_forms_that_there_are_none_of_are_refused(model, form, message):
    with pytest.raises(ValueError, match=message):
        quantised(SMALL, form)
    with pytest.raises(ValueError, match=message):
        install(model, SMALL, kv_bits=form[0], kv_group_size=form[1])


def test_groups_that_do_not_divide_a_head_are_refused(model, make_model):
    with pytest.raises(ValueError, match=r"keys have a head size of 32, which groups .*=64 don't divide"):
        make_prompt_cache(model, SMALL, kv_bits=8)
    with pytest.raises(ValueError, match=r"values have a head size of 32.*: use 32"):
        install(model, SMALL, kv_bits=(None, 8))
    assert "make_cache" not in vars(model)
    with pytest.raises(ValueError, match=r"head size of 16.*leave kv_bits out with this model"):
        make_prompt_cache(make_model(), SMALL, kv_bits=4, kv_group_size=32)
    # Without a model the first call shows it, and leaves the cache as it was.
    cache = quantised(SMALL, (8, 64))
    with pytest.raises(ValueError, match="head size of 32, which groups of kv_group_size=64"):
        cache.update_and_fetch(*drawn(0, 5)[1:])
    attend(cache, *drawn(0, 5, width=64))
    with pytest.raises(ValueError, match=r"keys of one cache keep batch.*it holds \(1, 2, 64\).*brings \(1, 2, 32\)"):
        cache.update_and_fetch(*drawn(0, 5)[1:])


def test_one_batch_has_one_form():
    caches = [quantised(SMALL, (bits, 32)) for bits in (8, 4)]
    for cache in caches:
        attend(cache, *drawn(0, 5))
    with pytest.raises(ValueError, match=r"store rows in one form, got .*bits=8.*bits=4.*batch the requests"):
        H2OKVCache.merge(caches)


# In blocks: KIVI and GEAR


BLOCKS = [(4, "kivi"), (8, "kivi"), (4, "gear")]


def in_blocks(config, form, rotation=None):
    return H2OKVCache(config, SCALE, rotation, kv_bits=form[0], kv_group_size=32, kv_quantizer=form[1])


def opened(cache):
    return {
        name: [dict(zip(p, r, strict=True)) for p, r in zip(positions, rows, strict=True)]
        for name, store in (("keys", cache._slots.keys), ("values", cache._slots.values))
        for positions, rows in [(cache._slots.state.positions[0].tolist(), store.opened()[0].tolist())]
    }


class StoredHead(Head):
    """A float64 cache that attends to its kept rows as the other has them in store at that moment."""

    def __init__(self, config, scale):
        super().__init__(config, scale)
        self.keys, self.values = {}, {}

    def look(self, keys, values):
        for row in self.rows:
            row.key, row.value = keys[row.position], values[row.position]


@pytest.mark.parametrize("queries", ["true", "key"])
@pytest.mark.parametrize("form", BLOCKS, ids=str)
def test_blocks_are_attended_to_as_they_are_stored(form, queries):
    config = H2OConfig(budget=70, n_sink=2, grace=8, decay=0.9, queries=queries)
    cache, plain, at = in_blocks(config, form), [StoredHead(config, SCALE) for _ in range(2)], 0
    for i, n in enumerate([80, *[1] * 40, 9, 1, 1]):
        q, k, v = drawn(i, n)
        k, shown = k * (0.15 if queries == "key" else 1), cache.make_mask(n)
        keys, values = cache.update_and_fetch(k, v)
        out = scaled_dot_product_attention(q, keys, values, cache, SCALE, shown)
        # What the call was shown, by position; then the oracle's own attention over it.
        positions = cache._slots.state.positions[0].tolist()
        for h, head in enumerate(plain):
            seen = [dict(zip(positions[h], x[0, h].tolist(), strict=False)) for x in (keys, values)]
            head.look(*[{row.position: x[row.position] for row in head.rows} for x in seen])
            new = [[x[at + j] for j in range(n)] for x in seen]
            attending = copy.deepcopy(head) if queries == "key" else head
            expected = attending.call(q[0, 2 * h : 2 * h + 2].tolist(), *new)
            assert mx.allclose(out[0, 2 * h : 2 * h + 2], mx.array(expected), atol=1e-4)
            if queries == "key":
                head.call([new[0]], *new)
            assert cache.kept_positions[0, h].tolist() == head.kept()
        at += n
    assert cache.evictions == at - 70
    assert cache._slots.keys.n_blocks > 1


def test_a_block_goes_when_no_row_of_it_is_left_and_its_holes_are_counted():
    """Under recency every old block empties; the first holds the sinks and stays, holes and all."""
    config = H2OConfig(budget=100, n_sink=2, grace=97)
    cache, sizes = in_blocks(config, (4, "kivi")), []
    attend(cache, *drawn(0, 120))
    for i in range(200):
        attend(cache, *drawn(i, 1))
        sizes.append((cache.nbytes, cache._slots.keys.n_blocks))
    # Of the newest 98 rows 32 to 63 are recent: the rest lies in 2 or 3 blocks, and the sinks in the first.
    assert {blocks for _, blocks in sizes} == {2, 3, 4}
    recent = cache._slots.keys.recent.shape[2]
    block = 2 * (32 * D // 2) + D * 2 * 4 + 32 * 2 * 4  # keys and values; scales by channel and by token
    slots = 101 * (4 + 4 + 4 + 4 + 4)  # scores, totals, positions, and a place for the key and for the value
    assert cache.nbytes == 2 * (sizes[-1][1] * block + recent * 2 * D * 4 + slots) + 4


@pytest.mark.parametrize("form", BLOCKS[::2], ids=str)
def test_rolling_keys_are_in_blocks_unrotated(form):
    """What a call is shown are the stored rows, each turned to its place among its head's."""
    rope = rotation_of(nn.RoPE(D))
    cache = in_blocks(H2OConfig(budget=70, n_sink=2, grace=8, positions="rolling"), form, rope)
    for i, n in enumerate([80, *[1] * 40]):
        q, k, v = drawn(i, n)
        mask = cache.make_mask(n)
        shown = cache.update_and_fetch(k, v)
        positions = cache._slots.state.positions
        ranks = mx.array([[sorted(head).index(p) for p in head] for head in positions[0].tolist()], mx.int32)
        assert mx.allclose(shown[0], rotate(cache._slots.keys.opened(), ranks[None], rope), atol=1e-4)
        scaled_dot_product_attention(q, *shown, cache, SCALE, mask)
    assert cache.evictions == 50
    assert cache._slots.keys.n_blocks > 1


@pytest.mark.parametrize("form", BLOCKS[::2], ids=str)
def test_requests_in_blocks_join_and_leave(model, form):
    """Rows that were in a block before come out of a batch as they went in, and all go on past the budget."""
    config, how = H2OConfig(budget=70, n_sink=2, grace=8), {"kv_bits": form[0], "kv_group_size": 32}
    caches = [make_prompt_cache(model, config, kv_quantizer=form[1], **how) for _ in range(3)]
    for some, n in zip(caches, (150, 40, 100), strict=True):
        model(mx.random.randint(3, 260, (1, n), key=mx.random.key(n)), cache=some)
        mx.eval([c.state for c in some])
    before = [opened(some[0]) for some in caches]
    batch = [type(layer[0]).merge(layer) for layer in zip(*caches, strict=True)]
    for i in range(3):
        alone = batch[0].extract(i)
        after = opened(alone)
        for name in ("keys", "values"):
            for was, now in zip(before[i][name], after[name], strict=True):
                assert {p: r for p, r in was.items() if p >= 0} == {p: r for p, r in now.items() if p >= 0}
    for i in range(60):
        logits = model(mx.array([[i], [i + 1], [i + 2]]), cache=batch)
    assert mx.isfinite(logits).all()
    batch[0].filter([0, 2])
    assert (batch[0].tokens_kept, batch[0].evictions.tolist()) == (70, [150 - 10, 100 - 10])


def test_a_copy_in_blocks_goes_on_alike_and_no_state_of_them_is_taken(model):
    how = {"kv_bits": (4, 8), "kv_group_size": 32, "kv_quantizer": "gear"}
    caches = make_prompt_cache(model, H2OConfig(budget=70, n_sink=2, grace=8), **how)
    model(mx.random.randint(3, 260, (1, 120), key=mx.random.key(1)), cache=caches)
    with pytest.raises(ValueError, match="kv_quantizer='gear' can't be saved: rows in blocks stay in the process"):
        H2OKVCache.from_state(caches[0].state)
    copies, outs = copy.deepcopy(caches), []
    for some in (caches, copies):
        for i in range(50):
            logits = model(mx.array([[i]]), cache=some)
        outs.append(logits)
        assert some[0]._slots.keys.n_blocks > 1
    assert mx.array_equal(outs[0], outs[1])


def test_what_blocks_cannot_do_is_refused(model):
    rope = rotation_of(nn.RoPE(D))
    auto = H2OConfig(positions="auto", trained_length=2048)
    with pytest.raises(ValueError, match=r'blocks of keys are written once: use kv_quantizer="per_token"'):
        in_blocks(auto, (4, "kivi"), rope)
    with pytest.raises(ValueError, match="kv_quantizer must be one of 'per_token', 'kivi', 'gear', got 'best'"):
        make_prompt_cache(model, SMALL, kv_bits=4, kv_group_size=32, kv_quantizer="best")
    with pytest.raises(ValueError, match="kv_quantizer='kivi' do nothing without kv_bits"):
        make_prompt_cache(model, SMALL, kv_quantizer="kivi")
    # Keys' groups lie along tokens, so that a width they don't divide is none of theirs.
    make_prompt_cache(model, SMALL, kv_bits=(4, None), kv_group_size=64, kv_quantizer="kivi")
    with pytest.raises(ValueError, match=r"values have a head size of 32, which groups of kv_group_size=64"):
        make_prompt_cache(model, SMALL, kv_bits=4, kv_quantizer="kivi")


@pytest.mark.parametrize("quantizer", ["per_token", "kivi"])
def test_a_step_in_one_launch_is_the_same_step(quantizer):
    """A fused back end is shown every slot, empty ones too, which open to something finite."""
    config, how = H2OConfig(budget=70, n_sink=2, grace=8), {"kv_bits": 8, "kv_group_size": 32}
    fused = REFERENCE._replace(name="fused", fused=True)
    caches = [H2OKVCache(config, SCALE, None, b, kv_quantizer=quantizer, **how) for b in (fused, REFERENCE)]
    for i, n in enumerate([40, *[1] * 90]):
        q, k, v = drawn(i, n)
        ours, theirs = (attend(cache, q, k, v) for cache in caches)
        assert mx.allclose(ours, theirs, atol=1e-5)
    check_alike(*caches)
    assert caches[0].evictions == 60
