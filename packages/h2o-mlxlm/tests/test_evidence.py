"""Any scorer of core's in a model: what it keeps is what core keeps of the same queries, keys and values."""

import copy
import math
from dataclasses import dataclass, field
from itertools import accumulate

import mlx.core as mx
import pytest
from mlx_lm.models import gemma2
from mlx_lm.models.cache import KVCache

import h2o_mlxlm.attention as hook
from h2o_core import Recording, simulate
from h2o_core.conformance import TOLERANCE, Head
from h2o_core.scorer import Scorer, scorer_from, scorer_names
from h2o_core.scorers.noise import uniform
from h2o_core.scoring import scored
from h2o_mlxlm import H2OConfig, H2OKVCache, install, load_prompt_cache, make_prompt_cache, save_prompt_cache, uninstall
from h2o_mlxlm.inputs import inputs_from

BUDGET = 12
# Small enough to matter within a few tokens.
SCORERS = {
    **{name: name for name in scorer_names()},
    "snapkv": "snapkv window=4 pool=3",
    "morphkv": "morphkv window=5",
    "keyformer": "keyformer span=16",
    "cam": "cam targets=3",
    "by age": "h2o by_age=true",
    "by value": "h2o by_value=true",
}
CALLS = [20, 7, *[1] * 12, 6, *[1] * 6]


def config(scorer, **changes):
    return H2OConfig(**{"budget": BUDGET, "n_sink": 1, "grace": 2, "scorer": scorer_from(scorer)} | changes)


def tokens_of(n, key=0):
    return mx.random.randint(3, 260, (n,), key=mx.random.key(key)).tolist()


@pytest.fixture(scope="module")
def model(make_model):
    return make_model()


@pytest.fixture(scope="module")
def given(model):
    """Inputs of every scorer, made of another text."""
    made = {}

    def given(config):
        if config.scorer.name not in made:
            made[config.scorer.name] = inputs_from(model, tokens_of(30, 9), config)
        return made[config.scorer.name]

    return given


@pytest.fixture
def watched(monkeypatch):
    """What each cache is given: queries, keys, values, in the order of the calls."""
    seen, update, attend = {}, H2OKVCache.update_and_fetch, hook._attend

    def updated(self, keys, values):
        seen.setdefault(id(self), ([], [], []))
        seen[id(self)][1].append(keys)
        seen[id(self)][2].append(values)
        return update(self, keys, values)

    def attended(queries, keys, values, cache, scale, sinks):
        seen[id(cache)][0].append(queries)
        return attend(queries, keys, values, cache, scale, sinks)

    monkeypatch.setattr(H2OKVCache, "update_and_fetch", updated)
    monkeypatch.setattr(hook, "_attend", attended)
    return lambda cache: [mx.concatenate(x, axis=2) if x else None for x in seen[id(cache)]]


def fed(model, caches, tokens, calls):
    """Kept positions of each layer after each call."""
    kept, at = [], 0
    for n in calls:
        model(mx.array([tokens[at : at + n]]), cache=caches)
        kept.append([c.kept_positions for c in caches])
        at += n
    return kept


def as_sets(positions):
    return [{p for p in head if p >= 0} for head in positions.reshape(-1, positions.shape[-1]).tolist()]


def check_against(trace, cache, kept, layer, calls):
    for row, after in zip(accumulate(calls), kept, strict=True):
        wanted = trace.kept[0, row - 1]
        # While a prompt is held, nothing is said.
        if (wanted >= 0).any():
            assert as_sets(after[layer][0]) == as_sets(wanted), f"layer {layer} after {row} tokens"
    state = trace.state
    order = mx.argsort(state.positions.view(mx.uint32), axis=-1)[..., : cache.tokens_kept]
    scores = mx.take_along_axis(state.scores, order, axis=-1)
    assert mx.allclose(cache.scores, scores, rtol=1e-3, atol=20 * TOLERANCE[mx.float32])


@pytest.mark.parametrize(("name", "held"), [*((n, False) for n in SCORERS), ("snapkv", True), ("keyformer", True)])
def test_it_keeps_what_a_replay_keeps(name, held, model, given, watched):
    chosen = config(SCORERS[name], evict_during_prefill=not held)
    caches = make_prompt_cache(model, chosen, inputs=given(chosen))
    kept = fed(model, caches, tokens_of(sum(CALLS)), CALLS)
    for layer, cache in enumerate(caches):
        assert (cache.tokens_kept, cache.evictions) == (BUDGET, sum(CALLS) - BUDGET)
        q, k, v = watched(cache)
        recording = Recording(queries=q, keys=k, values=v, scale=model.layers[0].self_attn.scale)
        trace = simulate(recording, chosen, CALLS[0], chunk=CALLS[1:], inputs=cache.inputs or None)
        check_against(trace, cache, kept, layer, CALLS)


@pytest.mark.parametrize("name", ["keyformer", "by value"])
def test_keys_can_stand_in_for_queries(name, model, watched):
    chosen = config(SCORERS[name], queries="key")
    caches = make_prompt_cache(model, chosen)
    kept = fed(model, caches, tokens_of(sum(CALLS)), CALLS)
    for layer, cache in enumerate(caches):
        _, k, v = watched(cache)
        recording = Recording(queries=k, keys=k, values=v, scale=model.layers[0].self_attn.scale)
        check_against(simulate(recording, chosen, CALLS[0], chunk=CALLS[1:]), cache, kept, layer, CALLS)


class MergingHead(Head):
    """Leaves a victim's value to the rows behind it, by CaM's formula, if one token came and one row goes."""

    def call(self, queries, keys, values, sinks=None):
        self.alone = len(keys) == 1 and len(self.rows) == self.config.budget
        return super().call(queries, keys, values, sinks)

    def _evict_one(self):
        super()._evict_one()
        gone, scorer = self.evicted[-1], self.config.scorer
        later = sorted((r for r in self.rows if r.position > gone.position), key=lambda r: r.position)[: scorer.targets]
        mean = math.fsum(r.score for r in later) / len(later)
        lot = uniform(scorer.seed, mx.array(self.place), mx.array(gone.position)).item()
        if self.alone and lot * mean < gone.score:
            self.merged += 1
            for row in later:
                row.value = [a + b / len(later) for a, b in zip(row.value, gone.value, strict=True)]


@pytest.mark.parametrize("held", [False, True])
def test_what_goes_leaves_its_value_to_those_that_stay(held):
    chosen = config("cam targets=3", evict_during_prefill=not held)
    cache, heads = H2OKVCache(chosen), [MergingHead(chosen, 0.6) for _ in range(2)]
    for h, head in enumerate(heads):
        head.place, head.merged = h, 0
    # The last prompt token finds as many rows as the budget, or, held, more.
    for i, n in enumerate([8, 5 if held else 4, *[1] * 12, 3, *[1] * 4]):
        q, k, v = (mx.random.normal((1, h, n, 4), key=mx.random.key(10 * i + h)) * 2 for h in (4, 2, 3))
        v = v[:, :2]
        keys, values = cache.update_and_fetch(k, v)
        out = hook.scaled_dot_product_attention(q, keys, values, cache, 0.6, None if n == 1 else "causal")
        rows = [x[0].tolist() for x in (q, k, v)]
        calls = [(rows[0][2 * h : 2 * h + 2], rows[1][h], rows[2][h]) for h in range(2)]
        wanted = [out for head, call in zip(heads, calls, strict=True) for out in head.call(*call)]
        assert mx.allclose(out[0], mx.array(wanted), atol=1e-4)
        assert as_sets(cache.kept_positions[0]) == [set(head.kept()) for head in heads]
    assert all(head.merged > 3 for head in heads)


@pytest.mark.parametrize("scorer", ["cam merge=drop", "keyformer tau=0.0"])
def test_two_scorers_have_h2o_in_them_bit_for_bit(scorer, model):
    ours, h2o = (make_prompt_cache(model, config(s, decay=0.9)) for s in (scorer, "h2o"))
    tokens = tokens_of(sum(CALLS))
    kept, theirs = (fed(model, caches, tokens, CALLS) for caches in (ours, h2o))
    assert all(mx.array_equal(a, b) for x, y in zip(kept, theirs, strict=True) for a, b in zip(x, y, strict=True))
    assert all(mx.array_equal(a.scores, b.scores) for a, b in zip(ours, h2o, strict=True))


def check_like(cache, other, **tolerance):
    """The same rows, scores and extras, in order of position."""
    assert (cache.tokens_seen, cache.tokens_kept) == (other.tokens_seen, other.tokens_kept)
    a, b = cache._in_order(), other._in_order()
    assert mx.array_equal(a.positions, b.positions)
    for x, y in zip((a.scores, a.totals, *a.extras), (b.scores, b.totals, *b.extras), strict=True):
        assert mx.allclose(x, y, **tolerance) if tolerance else mx.array_equal(x, y)


@pytest.mark.parametrize("name", SCORERS)
def test_requests_together_are_as_they_are_alone(name, model, given):
    """Padded prompts, decoding, one that joins, one that leaves."""
    chosen, lengths = config(SCORERS[name]), (20, 9)
    inputs = given(chosen)
    alone = [make_prompt_cache(model, chosen, inputs=inputs) for _ in range(3)]
    texts = [tokens_of(40, key) for key in (1, 2, 3)]
    together = [first.merge([first, second]) for first, second in zip(*alone[:2], strict=True)]
    for cache in together:
        cache.prepare(lengths=list(lengths), right_padding=[0, 11])
    padded = mx.array([texts[0][:20], texts[1][:9] + [0] * 11])
    # The second has nothing in the second call.
    for part in (padded[:, :12], padded[:, 12:]):
        model(part, cache=together)
    for cache in together:
        cache.finalize()
    for caches, text, calls in zip(alone, texts, ([12, 8], [9], [14]), strict=True):
        fed(model, caches, text, calls)
    for cache, third in zip(together, copy.deepcopy(alone[2]), strict=True):
        cache.extend(third)
    at = [20, 9, 14]
    for step in range(7):
        rows = [2, 1] if step > 3 else [0, 1, 2]
        if step == 4:
            for cache in together:
                cache.filter([2, 1])
        logits = model(mx.array([[texts[i][at[i] + step]] for i in rows]), cache=together)
        for row, i in enumerate(rows):
            own = model(mx.array([[texts[i][at[i] + step]]]), cache=alone[i])
            assert mx.allclose(logits[row], own[0], atol=1e-3)
    for row, i in enumerate([2, 1]):
        for cache, own in zip(together, alone[i], strict=True):
            check_like(cache.extract(row), own, rtol=1e-3, atol=1e-3)
            assert own.evictions > 0


@pytest.mark.parametrize("name", ["snapkv", "by age"])
def test_a_request_that_has_seen_nothing_joins(name, model):
    alone = [make_prompt_cache(model, config(SCORERS[name])) for _ in range(2)]
    texts = [tokens_of(40, key) for key in (1, 2)]
    fed(model, alone[0], texts[0], [20])
    together = [first.merge([first, second]) for first, second in zip(*alone, strict=True)]
    model(mx.array([texts[0][20:27], texts[1][:7]]), cache=together)
    fed(model, alone[0], texts[0][20:], [7])
    fed(model, alone[1], texts[1], [7])
    for row, caches in enumerate(alone):
        for cache, own in zip(together, caches, strict=True):
            check_like(cache.extract(row), own, rtol=1e-3, atol=1e-3)


def test_requests_of_other_contexts_are_not_batched(model, given):
    chosen = config("kvzip")
    one, copied = (make_prompt_cache(model, chosen, inputs=given(chosen))[0] for _ in range(2))
    other = make_prompt_cache(model, chosen, inputs=inputs_from(model, tokens_of(20, 4), chosen))[0]
    one.merge([one, copy.deepcopy(copied)])
    with pytest.raises(ValueError, match=r"have the same inputs, got different reconstruction: batch the requests"):
        one.merge([one, other])


@pytest.mark.parametrize("name", ["snapkv", "morphkv", "scissorhands", "by age", "keydiff", "kvzip"])
def test_a_copy_and_a_saved_cache_go_on_bit_for_bit(name, model, given, tmp_path):
    chosen = config(SCORERS[name])
    caches = make_prompt_cache(model, chosen, inputs=given(chosen))
    tokens = tokens_of(40)
    fed(model, caches, tokens, [20, 1, 1])
    save_prompt_cache(tmp_path / "cache.safetensors", caches, model)
    others = copy.deepcopy(caches), load_prompt_cache(tmp_path / "cache.safetensors", model, inputs=given(chosen))
    for each in (caches, *others):
        fed(model, each, tokens[22:], [1, 5, 1])
    for cache, *same in zip(caches, *others, strict=True):
        assert len(cache._in_order().extras) == len(chosen.scorer.extras)
        for other in same:
            check_like(cache, other)
            assert mx.array_equal(cache.values, other.values)


def test_a_file_holds_no_inputs(model, given, tmp_path):
    chosen, file = config("qfilters"), tmp_path / "cache.safetensors"
    caches = make_prompt_cache(model, chosen, inputs=given(chosen))
    fed(model, caches, tokens_of(20), [20])
    save_prompt_cache(file, caches, model)
    with pytest.raises(ValueError, match="scorer 'qfilters' needs filters from the caller: give it in inputs"):
        load_prompt_cache(file, model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[..., :3], r"extras.0 must be mlx.core.float32 \[1, 2, 13, 4\], got"),
        (lambda x: x.astype(mx.float16), "extras.0 must be mlx.core.float32"),
        (lambda x: None, "its arrays must be extras.0, extras.1, keys"),
        (lambda x: x + 1, "an empty slot has no score"),
    ],
)
def test_extras_that_do_not_fit_are_refused(change, message, model):
    caches = make_prompt_cache(model, config("snapkv window=4"))
    fed(model, caches, tokens_of(20), [20])
    state = caches[0].state
    H2OKVCache.from_state(state)
    extra = change(state.pop("extras.0"))
    state |= {} if extra is None else {"extras.0": extra}
    with pytest.raises(ValueError, match=message):
        H2OKVCache.from_state(state)


@pytest.mark.parametrize("name", ["tova", "morphkv", "keyformer", "streaming_llm", "keydiff"])
def test_tokens_are_taken_back(name, model):
    caches, others = (make_prompt_cache(model, config(SCORERS[name], rewind=3)) for _ in range(2))
    tokens = tokens_of(40)
    for each, astray in ((caches, [4, 1, 1]), (others, [])):
        fed(model, each, tokens, [20, 1, 1, 1, 1])
        fed(model, each, tokens[30:], astray)
        for cache in each if astray else []:
            assert cache.trim(3) == 3
        fed(model, each, tokens[30:], [] if astray else [3])
    # Three of the four were taken back, and the fourth read with two others.
    for each, rest in ((caches, [1, 1]), (others, [1, 1])):
        assert each[0].tokens_seen == 27
        fed(model, each, tokens[35:], rest)
    for cache, other in zip(caches, others, strict=True):
        check_like(cache, other, rtol=1e-3, atol=1e-4)


def gemma():
    args = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}
    more = {"rms_norm_eps": 1e-5, "vocab_size": 64, "num_key_value_heads": 2}
    mx.random.seed(3)
    return gemma2.Model(gemma2.ModelArgs(model_type="gemma2", **args, **more))


@pytest.mark.parametrize("name", ["streaming_llm", "keydiff", "curdkv"])
def test_what_looks_at_no_attention_needs_no_hook(name, watched):
    model, chosen = gemma(), config(SCORERS[name])
    caches = make_prompt_cache(model, chosen)
    tokens = [t % 64 for t in tokens_of(sum(CALLS))]
    kept = fed(model, caches, tokens, CALLS)
    if name == "streaming_llm":
        newest = set(range(sum(CALLS) - BUDGET + 1, sum(CALLS)))
        assert as_sets(caches[1].kept_positions[0]) == [{0} | newest] * 2
        return
    _, k, v = watched(caches[0])
    recording = Recording(queries=k, keys=k, values=v, scale=1.0)
    check_against(simulate(recording, chosen, CALLS[0], chunk=CALLS[1:]), caches[0], kept, 0, CALLS)


def test_mlxs_own_attention_does_for_it_where_that_is_faster(model, monkeypatch):
    tokens, chosen = tokens_of(30), config("keydiff")
    logits, plain, times = [], hook.plain_attention, []
    monkeypatch.setattr(hook, "plain_attention", lambda *a, **k: (times.append(1), plain(*a, **k))[1])
    for on_cpu in (True, False):
        monkeypatch.setattr(hook, "_on_cpu", lambda on_cpu=on_cpu: on_cpu)
        caches = make_prompt_cache(model, chosen)
        fed(model, caches, tokens, [20, 1, 6, 1])
        logits.append(model(mx.array([tokens[28:29]]), cache=caches))
    assert mx.allclose(*logits, atol=1e-4)
    # Both layers, the second time.
    assert len(times) == 2 * 5


@dataclass(frozen=True)
class FirstNumbers(Scorer):
    """Looks at values and makes nothing of their size."""

    name: str = field(default="first numbers", init=False)

    @property
    def needs(self):
        return frozenset({"mass", "values"})

    def observe(self, config, state, evidence, n_tokens, lengths):
        return scored(state, evidence.mass.total + evidence.values[..., 0], lengths)


def test_a_steady_step_copies_no_buffer():
    """Evidence holds keys and values; it is gone before the next row is written."""
    cache = H2OKVCache(H2OConfig(budget=2048, scorer=FirstNumbers()))
    call = {n: [mx.random.normal((1, h, n, 64)) for h in (8, 8, 8)] for n in (2100, 1)}

    def attend(n):
        q, k, v = call[n]
        keys, values = cache.update_and_fetch(k, v)
        mx.eval(hook.scaled_dot_product_attention(q, keys, values, cache, 0.1, None if n == 1 else "causal"))

    for n in (2100, 1, 1):
        attend(n)
    mx.eval(cache.state)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(5):
        attend(1)
        assert cache._evidence is None
    assert mx.get_peak_memory() - before < cache.keys.nbytes / 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: make_prompt_cache(gemma(), config("tova")), "attend with code of their own.*looks at no attention"),
        (lambda m: make_prompt_cache(m, config("qfilters")), "needs filters from the caller: give it in inputs"),
        (
            lambda m: make_prompt_cache(m, config("tova"), inputs=[{"filters": mx.ones(1)}] * 2),
            "no input filters",
        ),
        (
            lambda m: make_prompt_cache(m, config("tova"), inputs=[{}]),
            "of which this model has 2, got 1: h2o_mlxlm",
        ),
        (lambda m: install(m, config("kvzip")), "needs reconstruction from the caller"),
        (lambda m: H2OKVCache(config("kvzip")), "needs reconstruction from the caller"),
        (
            lambda m: make_prompt_cache(m, config("tova"), heads="adaptive"),
            "scorer='h2o' alone, got {'name': 't",
        ),
        (
            lambda m: make_prompt_cache(gemma(), config("keydiff", rewind=2)),
            "rewind=2 hands a layer's call over",
        ),
        (
            lambda m: make_prompt_cache(m, config("h2o"), heads="adaptive", inputs=[{"filters": mx.ones(1)}] * 2),
            "scorer 'h2o' takes no input filters: it takes none",
        ),
    ],
)
def test_what_cannot_be_is_refused_at_construction(make, message, model):
    with pytest.raises(ValueError, match=message):
        make(model)


def test_layers_that_share_keys_take_the_default_alone(make_model):
    model = make_model()
    model.make_cache = lambda: [KVCache()]
    make_prompt_cache(model, config("h2o"))
    for name in ("tova", "streaming_llm"):
        with pytest.raises(ValueError, match=f"scorer '{name}' takes one attention a call, but llama attends to keys"):
            make_prompt_cache(model, config(name))


def test_a_model_with_a_scorer_installed_gives_fresh_caches(model, given):
    chosen = config("kvzip")
    install(model, chosen, inputs=given(chosen))
    try:
        first, second = model.make_cache(), model.make_cache()
        assert [c.config for c in first] == [chosen] * 2
        assert first[0] is not second[0]
        assert mx.array_equal(first[1].inputs["reconstruction"], given(chosen)[1]["reconstruction"])
    finally:
        uninstall(model)


@pytest.mark.parametrize("filters", [[1.0, 2.0], mx.full((2, 16), math.nan)], ids=["a list", "nan"])
def test_inputs_that_are_no_numbers_are_refused_before_the_model_runs(model, filters):
    with pytest.raises(ValueError, match="inputs are arrays of finite numbers, got filters="):
        make_prompt_cache(model, config("qfilters"), inputs=[{"filters": filters}] * 2)
