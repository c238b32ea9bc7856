"""Requests that run together: each keeps what it keeps alone, however they join, are padded and leave."""

import copy
import math
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm import batch_generate
from mlx_lm.generate import BatchGenerator, PromptProcessingBatch
from mlx_lm.models.cache import KVCache, LRUPromptCache

import h2o_mlxlm.attention
import h2o_mlxlm.cache
from h2o_core.conformance import TOLERANCE, Head, close, same_choice
from h2o_mlxlm import H2OConfig, H2OKVCache, install, load, make_prompt_cache, scaled_dot_product_attention, uninstall
from h2o_mlxlm.ledger import Ledger

BUDGET, STEP, SCALE = 12, 8, 0.6
CONFIGS = {
    "original": {},
    "rolling": {"positions": "rolling"},
    "key": {"queries": "key"},
    "key, rolling": {"queries": "key", "positions": "rolling"},
    "held": {"evict_during_prefill": False},
    "auto": {"positions": "auto", "trained_length": 45},
}
LENGTHS = (3, 40, 1, 12, 23, 2)


def config(**changes):
    return H2OConfig(budget=BUDGET, n_sink=2, grace=3, **changes)


@pytest.fixture(scope="module")
def model(make_model):
    return make_model()


@pytest.fixture(autouse=True)
def _nothing_installed(model):
    yield
    uninstall(model)


@pytest.fixture
def batches(monkeypatch):
    """The offsets of every call to a cache of ours, as they were when it came."""
    seen, update = [], H2OKVCache.update_and_fetch

    def watched(self, keys, values):
        seen.append(self.offset)
        return update(self, keys, values)

    monkeypatch.setattr(H2OKVCache, "update_and_fetch", watched)
    return seen


def prompt(n, key=0):
    return mx.random.randint(3, 260, (n,), key=mx.random.key(1000 * key + n)).tolist()


def alone(model, caches, tokens, n, step=STEP):
    """Greedy tokens of one request, fed as BatchGenerator feeds it: chunks, the last token alone, each answer."""
    for start in range(0, len(tokens) - 1, step):
        model(mx.array([tokens[start : min(start + step, len(tokens) - 1)]]), cache=caches)
        mx.eval([c.state for c in caches])
    answers = [tokens[-1]]
    for _ in range(n + 1):
        answers.append(mx.argmax(model(mx.array([answers[-1:]]), cache=caches)[:, -1], axis=-1).item())
    return answers[1:-1]


def check_like(caches, others):
    """The same tokens seen and kept, and the same scores, in every layer and head.

    Sums of rows of another shape differ in their last bits, so near-ties could part two caches; the fixed
    prompts here have none. ``test_each_sequence_is_the_oracles`` allows for them.
    """
    for cache, other in zip(caches, others, strict=True):
        assert isinstance(cache.offset, int)
        assert (cache.tokens_seen, cache.tokens_kept, cache.offset) == (
            other.tokens_seen,
            other.tokens_kept,
            other.offset,
        )
        assert cache.kept_positions.tolist() == other.kept_positions.tolist()
        assert mx.allclose(cache.scores, other.scores, atol=1e-4)
        assert mx.allclose(cache.totals, other.totals, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_batch_generate_gives_each_prompt_what_it_gets_alone(name, model, tiny_folder, batches):
    install(model, config(**CONFIGS[name]))
    prompts, n = [prompt(length) for length in LENGTHS], [30, 20, 25, 5, 10, 30]
    results = batch_generate(
        model,
        load(str(tiny_folder))[1],
        prompts,
        max_tokens=n,
        return_token_ids=True,
        return_prompt_caches=True,
        prefill_step_size=STEP,
        prefill_batch_size=4,
    )
    assert all(isinstance(offset, mx.array) for offset in batches)
    assert any(len(set(offset.tolist())) > 1 for offset in batches)
    for i, (tokens, many) in enumerate(zip(prompts, n, strict=True)):
        caches = make_prompt_cache(model, config(**CONFIGS[name]))
        expected = alone(model, caches, tokens, many)
        # A "stop" token ends a request in the batch.
        got = results.token_ids[i]
        assert got == expected[: len(got)]
        if len(got) == many:
            check_like(results.caches[i], caches)
            assert all(c.evictions > 0 for c in results.caches[i])
    assert max(map(len, results.token_ids)) == 30


def test_the_mask_alone_is_enough_where_attention_is_not_ours(model, monkeypatch):
    """With queries="key" no hook is needed, in a batch either."""
    install(model, config(queries="key"))
    monkeypatch.setattr(h2o_mlxlm.attention, "_on_cpu", lambda: False)
    plain = h2o_mlxlm.attention.plain_attention
    monkeypatch.setattr(h2o_mlxlm.attention, "plain_attention", counted := counting(plain))
    outs, caches = served(model, [(prompt(n), 15) for n in (3, 30, 9)])
    monkeypatch.undo()
    for i, n in enumerate((3, 30, 9)):
        fresh = make_prompt_cache(model, config(queries="key"))
        assert outs[i] == alone(model, fresh, prompt(n), 15)
        check_like(caches[i], fresh)
    assert counted.calls > 0


def served(model, requests, caches=None, **options):
    """Run requests (prompt, n) through a BatchGenerator: tokens and final caches, in order."""
    generator = BatchGenerator(model, prefill_step_size=STEP, **options)
    uids = generator.insert([p for p, _ in requests], max_tokens=[n for _, n in requests], caches=caches)
    outs, last = {uid: [] for uid in uids}, {}
    while responses := generator.next_generated():
        for r in responses:
            outs[r.uid].append(r.token)
            if r.finish_reason is not None:
                last[r.uid] = r.prompt_cache
    generator.close()
    return [outs[uid] for uid in uids], [last[uid] for uid in uids]


REQUEST = st.tuples(st.integers(1, 30), st.integers(1, 14))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.lists(REQUEST, min_size=2, max_size=6),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from(["original", "rolling"]),
)
def test_requests_join_and_leave_in_any_order(model, requests, at_once, prefilled, positions):
    install(model, config(positions=positions))
    requests = [(prompt(length, key=i), n) for i, (length, n) in enumerate(requests)]
    outs, last = served(model, requests, completion_batch_size=at_once, prefill_batch_size=prefilled)
    for (tokens, n), out, caches in zip(requests, outs, last, strict=True):
        fresh = make_prompt_cache(model, config(positions=positions))
        assert out == alone(model, fresh, tokens, n)
        check_like(caches, fresh)


def test_a_second_turn_goes_on_where_the_first_ended(model):
    """Caches of other lengths, one of them fresh, one full, join with what they hold."""
    held = config(evict_during_prefill=False)
    install(model, held)
    first = [(prompt(n, key=1), 8) for n in (30, 2)]
    outs, caches = served(model, first)
    second = [(prompt(n, key=2), 20) for n in (5, 17, 25)]
    again, last = served(model, second, caches=[*caches, make_prompt_cache(model, held)])
    for i, (tokens, n) in enumerate(second):
        fresh = make_prompt_cache(model, held)
        if i < 2:
            assert alone(model, fresh, *first[i]) == outs[i]
        assert alone(model, fresh, tokens, n) == again[i]
        check_like(last[i], fresh)
    # The caches that were given stay as they were.
    assert [c[0].tokens_seen for c in caches] == [38, 10]


def test_a_prompt_kept_at_the_end_of_a_segment_serves_again(model):
    """As mlx_lm's server does: the caches of a shared beginning are put aside and later requests take copies."""
    install(model, config())
    store, shared = LRUPromptCache(), prompt(18)
    generator = BatchGenerator(model, prefill_step_size=STEP)
    uids = generator.insert_segments([[shared, prompt(6)], [prompt(30)]], max_tokens=[20, 20])
    while True:
        prompts, answers = generator.next()
        ended = [r.uid for r in prompts if r.end_of_segment and r.uid == uids[0] and not r.end_of_prompt]
        for caches, tokens in generator.extract_cache(ended).values():
            store.insert_cache("model", list(tokens), caches)
        if not prompts and not answers:
            break
    for key in (1, 2):
        caches, rest = store.fetch_nearest_cache("model", shared + prompt(9, key=key))
        assert rest == prompt(9, key=key)
        (out,), (last,) = served(model, [(rest, 20)], caches=[caches])
        fresh = make_prompt_cache(model, config())
        for start in range(0, len(shared), STEP):
            model(mx.array([shared[start : start + STEP]]), cache=fresh)
        assert alone(model, fresh, rest, 20) == out
        check_like(last, fresh)


def test_requests_taken_out_midway_leave_the_others_alone(model):
    install(model, config())
    generator = BatchGenerator(model, prefill_step_size=STEP, max_tokens=25)
    uids = generator.insert([prompt(n) for n in (20, 4, 11)])
    outs = {uid: [] for uid in uids}
    for step in range(200):
        responses = generator.next_generated()
        if step == 10:
            taken = generator.remove([uids[1]], return_prompt_caches=True)
            (late,) = generator.insert([prompt(33)])
            outs[late] = []
        if not responses:
            break
        for r in responses:
            if r.uid in outs:
                outs[r.uid].append(r.token)
    for uid, n in zip([uids[0], uids[2], late], (20, 11, 33), strict=True):
        assert outs[uid] == alone(model, make_prompt_cache(model, config()), prompt(n), 25)
    caches, tokens = taken[uids[1]]
    fresh = make_prompt_cache(model, config())
    alone(model, fresh, prompt(4), len(tokens) - 4)
    check_like(caches, fresh)


@pytest.mark.parametrize("name", CONFIGS)
def test_chunks_in_which_a_sequence_has_nothing(model, name):
    """The longer prompts run on in chunks of their own, the others stay as they are."""
    install(model, config(**CONFIGS[name]))
    lengths = (4, 40, 17, 9)
    caches = [make_prompt_cache(model, config(**CONFIGS[name])) for _ in lengths]
    batch = PromptProcessingBatch(model, list(range(4)), caches, prefill_step_size=STEP)
    batch.prompt([prompt(n) for n in lengths])
    assert batch.prompt_cache[0].tokens_seen.tolist() == list(lengths)
    batch.prompt([[7], [], [8, 9], [10]])  # one token a call would be a call without padding
    for i, (n, more) in enumerate(zip(lengths, ([7], [], [8, 9], [10]), strict=True)):
        fresh = make_prompt_cache(model, config(**CONFIGS[name]))
        for start in range(0, n, STEP):
            model(mx.array([prompt(n)[start : start + STEP]]), cache=fresh)
        if more:
            model(mx.array([more]), cache=fresh)
        check_like([c.extract(i) for c in batch.prompt_cache], fresh)


@pytest.mark.parametrize("name", CONFIGS)
def test_sequences_change_places_in_mid_decode(model, name):
    """Nothing that is remembered from one step to the next may stay with the old place."""
    each = [make_prompt_cache(model, config(**CONFIGS[name])) for _ in range(2)]
    tokens = mx.random.randint(3, 260, (2, 60), key=mx.random.key(3))
    for i, caches in enumerate(each):
        model(tokens[i : i + 1, :20], cache=caches)
    together = [first.merge([first, second]) for first, second in zip(*each, strict=True)]
    order = [0, 1]
    for at in range(20, 60):
        logits = model(tokens[:, at : at + 1][mx.array(order)], cache=together)
        for row, i in enumerate(order):
            assert mx.allclose(logits[row], model(tokens[i : i + 1, at : at + 1], cache=each[i])[0], atol=1e-3)
        if at % 7 == 0:
            order = order[::-1]
            for cache in together:
                cache.filter([1, 0])
    for row, i in enumerate(order):
        check_like([c.extract(row) for c in together], each[i])
        assert each[i][0].evictions > 0


def test_layers_with_a_window_batch_beside_ours(make_model):
    model = make_model(layer_types=["sliding_attention", "full_attention"], sliding_window=10)
    install(model, config())
    requests = [(prompt(n), 20) for n in (3, 25, 14)]
    outs, last = served(model, requests)
    assert [type(c).__name__ for c in last[0]] == ["RotatingKVCache", "H2OKVCache"]
    for (tokens, n), out, caches in zip(requests, outs, last, strict=True):
        fresh = make_prompt_cache(model, config())
        assert out == alone(model, fresh, tokens, n)
        check_like(caches[1:], fresh[1:])
        assert caches[1].evictions > 0


# At the level of one cache


def rows(key, batch, n, n_heads=2, width=4, group=2):
    kq, kk, kv = mx.random.split(mx.random.key(key), 3)
    return (
        mx.random.normal((batch, n_heads * group, n, width), key=kq) * 2,
        mx.random.normal((batch, n_heads, n, width), key=kk),
        mx.random.normal((batch, n_heads, n, width), key=kv),
    )


def attend(cache, q, k, v):
    mask = cache.make_mask(q.shape[2])
    keys, values = cache.update_and_fetch(k, v)
    return scaled_dot_product_attention(q, keys, values, cache, SCALE, mask)


class Oracle:
    """One sequence: the float64 heads, and whether a near-tie has parted them from the cache."""

    def __init__(self, config):
        self.heads = [Head(config, SCALE) for _ in range(2)]
        self.parted = False

    def call(self, q, k, v, n):
        self.recent = [len(head.evicted) for head in self.heads]
        if not n:
            return None
        q, k, v = (x[:, :n].tolist() for x in (q, k, v))
        return [out for h, head in enumerate(self.heads) for out in head.call(q[2 * h : 2 * h + 2], k[h], v[h])]

    def check(self, cache, i):
        seen, kept = (x if isinstance(x, int) else x[i].item() for x in (cache.tokens_seen, cache.tokens_kept))
        positions, scores, totals = (x[i].tolist() for x in (cache.kept_positions, cache.scores, cache.totals))
        for h, head in enumerate(self.heads):
            assert (seen, kept) == (head.seen, len(head.rows))
            assert positions[h][kept:] == [-1] * (len(positions[h]) - kept)
            ours, theirs = set(positions[h][:kept]), set(head.kept())
            recent = {row.position: row for row in head.rows + head.evicted[self.recent[h] :]}
            assert same_choice(ours, theirs, recent, TOLERANCE[mx.float32])
            self.parted = self.parted or ours != theirs
            if not self.parted:
                for p, score, total in zip(positions[h][:kept], scores[h], totals[h], strict=False):
                    assert close(score, recent[p].score, 1e-4)
                    assert close(total, recent[p].total, 1e-4)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("call"), st.integers(1, 9), st.lists(st.integers(0, 9), min_size=8, max_size=8)),
        st.tuples(st.just("decode"), st.integers(1, 6)),
        st.tuples(st.just("join"), st.integers(0, 12), st.integers(0, 3)),
        st.tuples(st.just("leave"), st.integers(0, 7)),
        st.tuples(st.just("copy"), st.sampled_from(["copy", "state", "extract"])),
    ),
    min_size=4,
    max_size=10,
)


ONE_IS_PADDING = [("call", 1, [1, 0]), ("call", 1, [0, 1]), ("call", 1, [0, 1])]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(STEPS, st.booleans())
@example([*ONE_IS_PADDING, ("decode", 6), *ONE_IS_PADDING], True)
@example([("call", 9, [9, 4]), *ONE_IS_PADDING, ("join", 4, 0), ("call", 1, [0, 1, 0]), ("decode", 6)], False)
def test_each_sequence_is_the_oracles(steps, evict_during_prefill):
    """Calls padded in any way, sequences that come and go: outputs, kept rows, scores of the float64 loop."""
    small = H2OConfig(budget=6, n_sink=1, grace=2, decay=0.9, evict_during_prefill=evict_during_prefill)
    cache, key = H2OKVCache.merge([H2OKVCache(small), H2OKVCache(small)]), 0
    oracles = [Oracle(small), Oracle(small)]

    def call(cache, oracles, n, lengths):
        nonlocal key
        key += 1
        q, k, v = rows(key, len(oracles), n)
        if lengths is not None:
            cache.prepare(lengths=lengths, right_padding=[n - m for m in lengths])
        out = attend(cache, q, k, v)
        cache.finalize()
        for i, oracle in enumerate(oracles):
            real = n if lengths is None else lengths[i]
            expected = oracle.call(q[i], k[i], v[i], real)
            if real and not oracle.parted:
                assert mx.allclose(out[i][:, :real], mx.array(expected), atol=1e-4)
        for i, oracle in enumerate(oracles):
            oracle.check(cache, i)

    for kind, *step in [*steps, ("decode", 8)]:
        if kind == "call":
            n, lengths = step[0], [min(m, step[0]) for m in step[1][: len(oracles)]]
            if any(lengths):
                call(cache, oracles, n, lengths)
        elif kind == "decode":
            for _ in range(step[0]):
                call(cache, oracles, 1, None)
        elif kind == "join" and len(oracles) < 5:
            new, theirs = H2OKVCache(small), Oracle(small)
            for n in [step[0]] * (step[0] > 0) + [1] * step[1]:
                call(new, [theirs], n, None)
            cache.extend(H2OKVCache.merge([new]))
            oracles.append(theirs)
        elif kind == "leave" and len(oracles) > 1:
            keep = [i for i in range(len(oracles)) if i != step[0] % len(oracles)][::-1]
            cache.filter(keep)
            oracles = [oracles[i] for i in keep]
        elif step[0] == "copy":
            cache = copy.deepcopy(cache)
        elif step[0] == "state":
            cache = H2OKVCache.from_state(cache.state)
        elif step[0] == "extract":
            cache = H2OKVCache.merge([cache.extract(i) for i in range(len(oracles))])
        assert cache.offset.tolist() == [o.heads[0].seen for o in oracles]
    for i, oracle in enumerate(oracles):
        assert oracle.heads[0].evicted or oracle.heads[0].seen <= 6
        for h, head in enumerate(oracle.heads):
            if not oracle.parted:
                gone = math.fsum(row.total for row in head.evicted)
                assert close(cache.totals[i, h].sum().item() + gone, head.seen, 1e-4)


def filled(n, budget=6, batch=1, **changes):
    """A cache after one call of n tokens, or a fresh one."""
    cache = H2OKVCache(H2OConfig(budget=budget, n_sink=1, grace=2, **changes))
    if n:
        attend(cache, *rows(n, batch, n))
    return cache


def counting(function):
    def counted(*args, **kwargs):
        counted.calls += 1
        return function(*args, **kwargs)

    counted.calls = 0
    return counted


def test_one_sequence_merged_goes_on_as_before(monkeypatch):
    """Its offset is an array, and decode past the budget is the same one function as without a batch."""
    single = filled(9)
    merged = H2OKVCache.merge([single])
    assert merged.offset.tolist() == [9]
    monkeypatch.setattr(Ledger, "turn", turned := counting(Ledger.turn))
    for i in range(20):
        assert merged.make_mask(1) is None
        assert mx.allclose(attend(merged, *rows(i, 1, 1)), attend(single, *rows(i, 1, 1)), atol=1e-6)
    assert turned.calls == 2 * 19
    assert merged.offset.tolist() == [29]
    assert merged.kept_positions.tolist() == single.kept_positions.tolist()
    assert type(merged.extract(0).offset) is int


def test_steady_decode_of_a_batch_needs_no_mask_and_copies_nothing(monkeypatch):
    cache = H2OKVCache.merge([filled(9), filled(2), filled(30)])
    monkeypatch.setattr(Ledger, "turn", turned := counting(Ledger.turn))
    monkeypatch.setattr(h2o_mlxlm.calls, "settled", settled := counting(h2o_mlxlm.calls.settled))
    masks = []
    for i in range(12):
        masks.append(cache.make_mask(1) is not None)
        attend(cache, *rows(i, 3, 1))
        assert cache.keys.shape[2] == 7
    # The shortest has room for four more; its fifth is the first to fill all slots, and evicts.
    assert masks == [True] * 4 + [False] * 8
    assert (turned.calls, settled.calls) == (7, 0)
    assert cache.evictions.tolist() == [15, 8, 36]


def test_figures_are_numbers_or_one_for_each_sequence():
    cache = H2OKVCache.merge([filled(9), filled(0), filled(3)])
    assert (cache.tokens_seen.tolist(), cache.tokens_kept.tolist()) == ([9, 0, 3], [6, 0, 3])
    assert (cache.evictions.tolist(), cache.size(), cache.empty()) == ([3, 0, 0], 6, False)
    assert cache.compression_ratio == 12 / 9
    # Keys and values, scores, totals and positions of 6 slots; tokens seen; offsets.
    assert cache.nbytes == 3 * 2 * 6 * (2 * 4 + 3) * 4 + 3 * 4 + 3 * 4
    assert cache.full_bytes == 12 * 2 * (4 + 4) * 4
    assert cache.kept_positions[1].tolist() == [[-1] * 6] * 2
    assert cache.kept_positions[2].tolist() == [[0, 1, 2, -1, -1, -1]] * 2
    assert cache.totals[2].sum(axis=-1).tolist() == pytest.approx([3, 3])
    cache.filter([2, 0])
    assert (cache.offset.tolist(), cache.size()) == ([3, 9], 6)
    cache.filter([0])
    assert (cache.tokens_seen, cache.offset.tolist(), cache.size(), cache.keys.shape[2]) == (3, [3], 3, 3)
    fresh = H2OKVCache.merge([filled(0), filled(0)])
    assert (fresh.empty(), fresh.tokens_seen, fresh.offset.tolist(), fresh.nbytes) == (True, 0, [0, 0], 0)
    fresh.extend(cache)
    assert fresh.tokens_seen.tolist() == [0, 0, 3]
    assert fresh.extract(1).tokens_seen == 0


def test_a_cache_of_several_equal_sequences_joins_too():
    cache = filled(5, batch=2)
    cache.extend(filled(3))
    assert cache.offset.tolist() == [5, 5, 3]
    assert cache.extract(1).kept_positions.tolist() == filled(5, batch=2).kept_positions[1:].tolist()


def test_what_has_been_taken_out_can_go_on_in_another_thread(model):
    install(model, config())
    with ThreadPoolExecutor(1) as pool:
        (out,), (caches,) = pool.submit(served, model, [(prompt(20), 5)]).result()
    fresh = make_prompt_cache(model, config())
    assert alone(model, fresh, prompt(20), 5) == out
    assert alone(model, caches, [9], 5) == alone(model, fresh, [9], 5)


def test_what_can_not_be_batched_is_refused():
    with pytest.raises(ValueError, match=r"one configuration, got H2OConfig\(budget=6.* and H2OConfig\(budget=7"):
        H2OKVCache.merge([filled(3), filled(3, budget=7)])
    with pytest.raises(TypeError, match="takes no others, got KVCache"):
        H2OKVCache.merge([filled(3), KVCache()])
    half = H2OKVCache(filled(3).config)
    attend(half, *(x.astype(mx.float16) for x in rows(0, 1, 3)))
    with pytest.raises(ValueError, match=r"equal heads, widths and dtypes, got .*float16.*float32"):
        H2OKVCache.merge([filled(3), half])
    cache = H2OKVCache.merge([filled(3), filled(0)])
    with pytest.raises(ValueError, match=r"padded on the right, got left_padding=\[0, 2\]"):
        cache.prepare(left_padding=[0, 2])
    with pytest.raises(ValueError, match=r"got lengths=None for right_padding=\[0, 2\] and 2 sequences"):
        cache.prepare(right_padding=[0, 2])
    with pytest.raises(ValueError, match=r"got lengths=\[1, 2, 3\] for right_padding=\[2, 1, 0\] and 2 sequences"):
        cache.prepare(lengths=[1, 2, 3], right_padding=[2, 1, 0])
    with pytest.raises(ValueError, match="it has 2, the call brings 3; filter or extend"):
        attend(cache, *rows(0, 3, 1))
    cache.prepare(left_padding=[0, 0], lengths=[1, 3], right_padding=[2, 0])
    attend(cache, *rows(0, 2, 3))
    with pytest.raises(RuntimeError, match=r"call finalize\(\) before more come"):
        attend(cache, *rows(0, 2, 1))
    cache.finalize()
    attend(cache, *rows(0, 2, 1))
    assert cache.tokens_seen.tolist() == [5, 4]


def test_a_padded_prompt_survives_being_saved_halfway():
    cache = H2OKVCache.merge([filled(3), filled(9)])
    cache.prepare(lengths=[2, 7], right_padding=[5, 0])
    attend(cache, *rows(0, 2, 4))
    restored = H2OKVCache.from_state(cache.state)
    for other in (cache, restored):
        attend(other, *rows(1, 2, 3))
        other.finalize()
        attend(other, *rows(2, 2, 1))
    assert restored.tokens_seen.tolist() == [6, 17]
    assert restored.kept_positions.tolist() == cache.kept_positions.tolist()
