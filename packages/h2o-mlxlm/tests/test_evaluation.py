"""Measuring quality: methods, windows, loss, intervals, rows, variety, pass keys."""

import json
import math

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, RotatingKVCache

import h2o_mlxlm
from h2o_core import H2OConfig, Mass
from h2o_core.scorer import scorer_from, scorer_names, scorer_of
from h2o_mlxlm.cache import H2OKVCache
from h2o_mlxlm.evaluation import bootstrap, generation, loss, methods, retrieval, summary, variety, windows
from h2o_mlxlm.evaluation.methods import Variant, settings_of, variants
from h2o_mlxlm.evaluation.passes import chooser, continued, sizes
from h2o_mlxlm.evaluation.prompts import PROMPTS
from h2o_mlxlm.evaluation.random_mass import RandomKVCache
from h2o_mlxlm.evaluation.results import Rows, table
from h2o_mlxlm.identity import model_identity

SHAPE = loss.Shape(context=40, scored=20, batch=3, prefill_step_size=16)
SMALL = "n_sink=2 grace=4"


@pytest.fixture(scope="module")
def model(make_model):
    return make_model()


@pytest.fixture(scope="module")
def tiny(tiny_folder):
    return h2o_mlxlm.load(str(tiny_folder))


def rows_of_tokens(n_rows=3, length=60):
    return mx.random.randint(3, 200, (6, length), key=mx.random.key(1)).astype(mx.int32)[:n_rows]


def forced(model, caches, window):
    """Mean loss of the scored tokens by mlx_lm's own generation, made to choose the text's tokens."""
    targets = window[SHAPE.context :]
    chosen = iter([*targets, 0])
    steps = generate_step(
        mx.array(window[: SHAPE.context]),
        model,
        max_tokens=SHAPE.scored,
        sampler=lambda _: mx.array([next(chosen)]),
        prompt_cache=caches,
        prefill_step_size=SHAPE.prefill_step_size,
    )
    lost = [-logprobs[target].item() for target, (_, logprobs) in zip(targets, steps, strict=True)]
    return sum(lost) / SHAPE.scored


# Methods


def test_each_method_makes_its_caches_fresh_at_each_call(model):
    kinds = {"full": KVCache, "recency": RotatingKVCache, "h2o": H2OKVCache, "random": RandomKVCache}
    assert kinds.keys() <= methods.METHODS.keys()
    for variant in variants(list(kinds), [32], [SMALL]):
        caches, again = variant.caches(model), variant.caches(model)
        assert [type(c) for c in caches] == [kinds[variant.method]] * 2
        assert not {id(c) for c in caches} & {id(c) for c in again}
    assert [(c.max_size, c.keep) for c in Variant("recency", 32).caches(model)] == [(32, 4)] * 2
    assert Variant("h2o", 32, SMALL).caches(model)[0].config == H2OConfig(budget=32, n_sink=2, grace=4)
    # Lots that fade with time would favour the new.
    assert Variant("random", 32, "decay=0.5").caches(model)[0].config.decay == 1


def test_what_a_method_does_not_look_at_makes_no_variants():
    found = variants(["full", "recency", "h2o", "random"], [32, 48], [SMALL, "decay=0.5"], [0, 1])
    count = {name: sum(v.method == name for v in found) for name in methods.METHODS}
    assert [count[name] for name in ("full", "recency", "h2o", "random")] == [1, 2, 4, 8]
    assert len(set(found)) == len(found)
    assert sum(v.method == "full" for v in variants(["full"], [32], [""], [0, 1], sampled=True)) == 2


def test_a_method_can_be_imported(model, tmp_path, monkeypatch):
    (tmp_path / "some_library.py").write_text(
        "from mlx_lm.models.cache import RotatingKVCache\n"
        "def make(model, budget):\n    return (RotatingKVCache(budget) for _ in model.layers)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (variant,) = variants(["some_library:make"], [32], [SMALL, "decay=1"], [0, 1])
    assert [c.max_size for c in variant.caches(model)] == [32, 32]
    assert variant.columns["method"] == "some_library:make"


def test_settings_are_read_with_the_fields_types():
    text = "grace=8 decay=1 evict_during_prefill=False queries=key trained_length=none"
    values = settings_of(text)
    assert values == {
        "grace": 8,
        "decay": 1.0,
        "evict_during_prefill": False,
        "queries": "key",
        "trained_length": None,
    }
    assert [type(v) for v in values.values()] == [int, float, bool, str, type(None)]
    assert settings_of("positions=auto trained_length=99")["trained_length"] == 99
    # One way of writing them, or rows would not be found again.
    assert len(variants(["h2o"], [64], ["grace=8 decay=1", " decay=1.0  grace=8"])) == 1


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("window=3", "with a field of n_sink, grace, decay"),
        ("budget=3", "got 'budget=3'"),
        ("grace", "FIELD=VALUE"),
        ("grace=x", "grace must be a whole number, got 'x'"),
        ("grace=1.5", "grace must be a whole number, got '1.5'"),
        ("decay=x", "decay must be a number, got 'x'"),
        ("evict_during_prefill=maybe", "must be true or false, got 'maybe'"),
        ("decay=2", "budget 32: decay must be in"),
        ("queries=both", "queries must be one of"),
        ("grace=32", "n_sink \\+ grace must be below budget"),
    ],
)
def test_bad_settings_say_what_is_wrong(text, part):
    with pytest.raises(ValueError, match=part):
        variants(["h2o"], [32], [text])


def test_every_scorer_is_a_method(model):
    (variant,) = variants(["morphkv window=5"], [32], [SMALL])
    caches = variant.caches(model)
    assert [c.config for c in caches] == [H2OConfig(32, n_sink=2, grace=4, scorer=scorer_from("morphkv window=5"))] * 2
    assert variant.config != Variant("morphkv", 32, SMALL).config != Variant("h2o", 32, SMALL).config
    for name in scorer_names():
        if not scorer_of(name).inputs:
            variants([name], [32], [SMALL])
            continue
        with pytest.raises(ValueError, match=f"method '{name}' needs .* made from a text of your choice"):
            variants([name], [32], [SMALL])
    with pytest.raises(ValueError, match="lots stand in for the mass of scorer='h2o', got scorer='tova'"):
        RandomKVCache(H2OConfig(32, scorer="tova"), None, None, mx.random.key(0))


@pytest.mark.parametrize("name", ["best", "no_such_module:f", "json:no_such_function", "tova window=3", " "])
def test_an_unknown_method_says_so(name):
    with pytest.raises(ValueError, match=r"method|no parameter of scorer 'tova'"):
        variants([name], [32])


def test_other_defaults_are_another_configuration():
    def config(settings):
        return Variant("h2o", 64, settings).config

    assert config("") == config("grace=16") != config("grace=8")
    assert Variant("recency", 64).config == ""


def fed(caches, calls, heads=2, seed=0):
    """Keys and values of the calls go in, with a mass that would keep the oldest."""
    key = mx.random.key(seed)
    for n in calls:
        key, k = mx.random.split(key)
        x = mx.random.normal((2, heads, n, 4), key=k)
        keys, _ = caches.update_and_fetch(x, x)
        mass = mx.broadcast_to(mx.arange(keys.shape[2], 0, -1), keys.shape[:3]).astype(mx.float32)
        caches.observe(Mass(mass, mass))


@pytest.mark.parametrize("calls", [[40], [1] * 40, [16, 1, 3, 20]], ids=str)
def test_random_scores_are_drawn_once_a_token(calls):
    config = H2OConfig(budget=64, n_sink=0, grace=0, decay=1.0)
    cache = RandomKVCache(config, None, None, mx.random.key(3))
    drawn = {}
    for n in calls:
        fed(cache, [n])
        assert mx.array_equal(cache.scores, cache.totals)
        for i, score in enumerate(cache.scores[0, 1].tolist()):
            assert drawn.setdefault(i, score) == score
    assert len(set(drawn.values())) == 40
    assert 0 < min(drawn.values()) < max(drawn.values()) < 1


def test_random_keeps_the_highest_lots_and_any_place_alike():
    config = H2OConfig(budget=24, n_sink=2, grace=4, decay=1.0)
    kept = mx.zeros(100)
    for seed in range(40):
        cache = RandomKVCache(config, None, None, mx.random.key(seed))
        fed(cache, [60, *[1] * 40])
        assert cache.evictions == 76
        for head in cache.kept_positions.reshape(-1, 24):
            assert {0, 1, 96, 97, 98, 99} <= set(head.tolist())
            kept = kept.at[head].add(1)
    lots = kept[2:96].reshape(2, 47).sum(axis=1) / kept[2:96].sum()
    assert 0.4 < lots[0].item() < 0.6
    same = [RandomKVCache(config, None, None, mx.random.key(5)) for _ in range(2)]
    for cache in same:
        fed(cache, [60, *[1] * 40])
    assert mx.array_equal(same[0].kept_positions, same[1].kept_positions)


# Windows


def test_windows_are_the_texts_own_tokens_in_order(tiny):
    _, tokenizer = tiny
    text = "hello world, " * 30
    tokens = tokenizer.encode(text, add_special_tokens=False)
    found = windows.windows(tokenizer, "x", text, 3, 21)
    # Each begins as a text does, with this tokenizer's <|bos|>.
    assert found.tolist() == [[0, *tokens[i * 20 : (i + 1) * 20]] for i in range(3)]


def test_a_text_that_is_too_short_says_by_how_much(tiny):
    with pytest.raises(ValueError, match="'x' has 8 tokens, and 3 windows of 20 need 60"):
        windows.windows(tiny[1], "x", "abcdefgh", 3, 21)


def test_texts_are_named_by_their_files(tmp_path):
    (tmp_path / "a.txt").write_text("one", encoding="utf-8")
    assert windows.read_texts([str(tmp_path / "a.txt")]) == {"a": "one"}
    with pytest.raises(ValueError, match="a name of its own"):
        windows.read_texts([str(tmp_path / "a.txt"), str(tmp_path / "a.txt")])


# Loss


def test_the_full_cache_scores_the_right_tokens(model):
    tokens = rows_of_tokens()
    full = loss.full_cache(model, tokens, SHAPE)
    logits = model(tokens[:, :-1])
    logprobs = (logits - mx.logsumexp(logits, axis=-1, keepdims=True))[:, 39:]
    want = -mx.take_along_axis(logprobs, tokens[:, 40:, None], axis=-1)[..., 0]
    assert full.losses.shape == (3, 20)
    assert mx.allclose(full.losses, want, atol=1e-4)
    assert mx.allclose(full.logprobs.astype(mx.float32), logprobs, atol=2e-2)
    assert mx.array_equal(full.best, mx.argmax(logprobs, axis=-1))


@pytest.mark.parametrize("name", ["full", "h2o"])
def test_with_room_for_all_a_method_is_the_full_cache(model, name):
    tokens = rows_of_tokens()
    full = loss.full_cache(model, tokens, SHAPE)
    found = loss.bounded_cache(model, Variant(name, 64).caches(model), tokens, SHAPE, full)
    for row, want in zip(found, full.losses.mean(axis=1).tolist(), strict=True):
        assert row["agreement"] == 1
        assert abs(row["kl"]) < 1e-5
        assert row["loss"] == pytest.approx(want, abs=1e-4)
        assert row["above_full"] == pytest.approx(0, abs=1e-4)
        # All but the last token, whose successor is not scored.
        assert row["tokens_kept"] == 59


@pytest.mark.parametrize(
    "variant",
    [
        Variant("recency", 12),
        Variant("h2o", 12, SMALL),
        Variant("h2o", 12, f"{SMALL} evict_during_prefill=false"),
    ],
    ids=str,
)
def test_a_methods_loss_is_what_generation_gives(model, variant):
    tokens = rows_of_tokens()
    full = loss.full_cache(model, tokens, SHAPE)
    found = loss.bounded_cache(model, variant.caches(model), tokens, SHAPE, full)
    assert {row["tokens_kept"] for row in found} == {12}
    for window, row in zip(tokens.tolist(), found, strict=True):
        assert row["loss"] == pytest.approx(forced(model, variant.caches(model), window), abs=1e-4)
        assert row["full_loss"] == pytest.approx(forced(model, Variant("full").caches(model), window), abs=1e-4)
        assert row["above_full"] == row["loss"] - row["full_loss"]
        assert abs(row["above_full"]) > 1e-3
        assert row["kl"] > 1e-3


def test_divergence_by_hand():
    full = mx.log(mx.array([[0.5, 0.25, 0.25], [0.2, 0.3, 0.5]])).astype(mx.float16)
    ours = mx.log(mx.array([[0.25, 0.5, 0.25], [0.2, 0.3, 0.5]])) + 7
    lost, agreement, kl = loss._compared(ours, mx.array([1, 2]), full, mx.array([0, 2]))
    assert lost.tolist() == pytest.approx([math.log(2), math.log(2)], abs=1e-5)
    assert agreement.tolist() == [0, 1]
    assert kl.tolist() == pytest.approx([0.5 * math.log(2) - 0.25 * math.log(2), 0], abs=1e-3)


def test_bytes_and_tokens_are_per_window(model):
    caches = Variant("full").caches(model)
    model(rows_of_tokens(3, 20), cache=caches)
    # Two layers, keys and values, two heads of 16 float32, in steps of 256.
    assert sizes(caches, 3) == {"cache_bytes": 2 * 2 * 2 * 16 * 4 * 256, "tokens_kept": 20}


@pytest.fixture
def measured(model, tmp_path):
    """Measure into one folder: rows, and how often the model and the full cache ran."""

    def measured(names, monkeypatch, budgets=(12,), n_windows=3):
        ran = {"model": 0, "full": 0}
        real_call, real_full = type(model).__call__, loss.full_cache

        def call(self, *args, **kwargs):
            ran["model"] += 1
            return real_call(self, *args, **kwargs)

        def full(*args):
            ran["full"] += 1
            return real_full(*args)

        tokens = {"a": rows_of_tokens(n_windows), "b": rows_of_tokens(n_windows) + 1}
        runs = {name: loss.run_of("m", name, tokens[name], SHAPE) for name in tokens}
        rows = Rows(tmp_path / "rows.csv", loss.COLUMNS, loss.KEY)
        todo = list(loss.units(tokens, runs, variants(names, budgets, [SMALL]), SHAPE))
        with monkeypatch.context() as patch:
            patch.setattr(type(model), "__call__", call)
            patch.setattr(loss, "full_cache", full)
            loss.measure(model, todo, rows, loss.FullStore(tmp_path / "full", model, "m", SHAPE))
        return rows, runs, ran

    return measured


def test_a_second_run_runs_nothing_and_a_new_method_no_full_cache(measured, monkeypatch):
    rows, _, ran = measured(["recency"], monkeypatch)
    assert (len(list(rows)), ran["full"]) == (6, 2)
    _, _, ran = measured(["recency"], monkeypatch)
    assert ran == {"model": 0, "full": 0}
    rows, _, ran = measured(["recency", "h2o"], monkeypatch)
    assert (len(list(rows)), ran["full"]) == (12, 0)
    # For each text: 39 tokens of context in calls of 16, the last one alone, and 19 more.
    assert ran["model"] == 2 * (3 + 1 + 19)


def test_more_windows_keep_the_ones_there_are(measured, monkeypatch):
    measured(["recency"], monkeypatch, n_windows=3)
    rows, _, ran = measured(["recency"], monkeypatch, n_windows=6)
    assert (len(list(rows)), ran["full"]) == (12, 2)


def test_a_half_written_row_is_measured_again(measured, monkeypatch, tmp_path):
    measured(["recency"], monkeypatch)
    path = tmp_path / "rows.csv"
    whole = path.read_text()
    path.write_text(whole[:-9])
    rows, _, ran = measured(["recency"], monkeypatch)
    assert path.read_text() == whole
    assert (len(list(rows)), ran["full"], ran["model"]) == (6, 0, 23)


def test_the_summary_compares_with_recency_on_the_same_windows(measured, monkeypatch):
    rows, runs, _ = measured(["recency", "h2o"], monkeypatch)
    # A random model may be better off without its cache: make it a cost.
    rows = [row | {"above_full": str(float(row["above_full"]) + 2)} for row in rows]
    entries = summary.summarise(summary.gathered(rows, runs, 3))
    assert [e["method"] for e in entries] == ["recency", "h2o"]
    cells = [row for row in rows if row["method"] == "h2o"]
    above = {t: [float(r["above_full"]) for r in cells if r["text"] == t] for t in "ab"}
    ours = entries[1]
    assert ours["above_full"]["a"]["value"] == pytest.approx(sum(above["a"]) / 3)
    assert ours["mean"]["value"] == pytest.approx(sum(above["a"] + above["b"]) / 6)
    assert ours["perplexity"] == pytest.approx(math.exp(sum(float(r["loss"]) for r in cells) / 6))
    low, high = ours["mean"]["interval"]
    assert low < ours["mean"]["value"] < high
    assert entries[0]["share_of_recency"] == {"value": 1.0, "interval": (1.0, 1.0)}
    assert entries[0]["difference_to_recency"]["a"] == {"value": 0.0, "interval": (0.0, 0.0)}
    share = ours["share_of_recency"]["value"]
    assert share == pytest.approx(ours["mean"]["value"] / entries[0]["mean"]["value"])
    text = summary.loss_tables(entries)
    assert "share of recency" in text
    assert f"{ours['mean']['value']:.3f} [{low:.3f}, {high:.3f}]" in text


def test_no_share_of_what_costs_nothing(measured, monkeypatch):
    rows, runs, _ = measured(["recency", "h2o"], monkeypatch)
    rows = [row | {"above_full": "-0.5"} for row in rows]
    entries = summary.summarise(summary.gathered(rows, runs, 3))
    assert entries[1]["share_of_recency"] == {"value": None, "interval": None}
    assert "-0.500 [-0.500, -0.500]" in summary.loss_tables(entries)


def test_one_window_has_no_interval(measured, monkeypatch):
    rows, runs, _ = measured(["recency"], monkeypatch, n_windows=1)
    (entry,) = summary.summarise(summary.gathered(rows, runs, 1))
    assert entry["mean"]["interval"] is None


def test_seeds_are_averaged_window_by_window(measured, monkeypatch):
    rows, runs, _ = measured(["recency"], monkeypatch)
    rows = list(rows)
    more = [row | {"seed": "1", "kl": str(float(row["kl"]) + 1)} for row in rows]
    ((_, one),) = summary.gathered(rows, runs, 3).items()
    ((_, two),) = summary.gathered(rows + more, runs, 3).items()
    assert two["kl"]["a"] == pytest.approx([kl + 0.5 for kl in one["kl"]["a"]])


def test_rows_of_other_runs_and_defaults_are_left_out(measured, monkeypatch):
    rows, runs, _ = measured(["h2o"], monkeypatch)
    assert len(summary.gathered(rows, runs, 3)) == 1
    assert summary.gathered(rows, runs, 4) == {}
    assert summary.gathered(rows, dict.fromkeys(runs, "other"), 3) == {}
    assert summary.gathered([row | {"config": "other"} for row in rows], runs, 3) == {}
    assert summary.gathered([row | {"method": "gone"} for row in rows], runs, 3) == {}


def test_a_model_is_known_by_its_arguments_and_weights(make_model):
    first = make_model()
    assert model_identity(first) == model_identity(make_model())
    assert model_identity(make_model(rope_theta=1e5)) != model_identity(first)
    weight = first.model.layers[0].self_attn.k_proj
    weight.weight = weight.weight + 1
    assert model_identity(first) != model_identity(make_model())


# Intervals


def test_constants_have_no_width():
    drawn = bootstrap.draws([5, 3])
    samples = bootstrap.resampled([[0.3] * 5, [0.7] * 3], drawn)
    assert samples.shape == (2, bootstrap.N_RESAMPLES)
    for row, value in zip(samples, (0.3, 0.7), strict=True):
        low, high = bootstrap.interval(row)
        assert low == high == pytest.approx(value)


def test_intervals_by_hand():
    # Of two values each of 00, 01, 10, 11 comes a quarter of the time.
    (row,) = bootstrap.resampled([[0.0, 1.0]], bootstrap.draws([2]))
    assert sorted(set(row.tolist())) == [0.0, 0.5, 1.0]
    assert row.mean().item() == pytest.approx(0.5, abs=0.02)
    assert bootstrap.interval(row) == (0.0, 1.0)
    assert bootstrap.interval(mx.arange(41)) == (1.0, 39.0)
    assert bootstrap.interval(mx.arange(11)) == pytest.approx((0.25, 9.75))
    assert bootstrap.interval(bootstrap.ratio(mx.ones(3), mx.array([1.0, 0.0, 2.0]))) is None


def test_draws_are_within_texts_paired_and_seeded():
    first, again, other = bootstrap.draws([4, 9]), bootstrap.draws([4, 9]), bootstrap.draws([4, 9], 1)
    assert [x.max().item() for x in first] == [3, 8]
    assert all(mx.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not mx.array_equal(first[0], other[0])
    assert not mx.array_equal(*bootstrap.draws([4, 4]))


# Rows


def test_rows_survive_and_are_found_again(tmp_path):
    path = tmp_path / "new" / "rows.csv"
    rows = Rows(path, ["a", "b", "c"], ["a", "b"])
    rows.append([{"a": 0.5, "b": "x, y", "c": 1 / 3}, {"a": 0.0, "b": "two\nlines", "c": 2}])
    again = Rows(path, ["a", "b", "c"], ["a", "b"])
    assert (
        list(again)
        == list(rows)
        == [{"a": "0.5", "b": "x, y", "c": "0.3333333"}, {"a": "0", "b": "two lines", "c": "2"}]
    )
    assert {"a": 0.5, "b": "x, y"} in again
    assert {"a": 0.0, "b": "two\nlines"} in again
    assert {"a": 0.5, "b": "z"} not in again
    again.append([{"a": 0.5, "b": "x, y", "c": 9}])
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize("content", ["", "a,b", "a,b\n"])
def test_a_file_that_only_begins_is_no_obstacle(tmp_path, content):
    path = tmp_path / "rows.csv"
    path.write_text(content)
    Rows(path, ["a", "b"], ["a"]).append([{"a": 1, "b": 2}])
    assert path.read_text() == "a,b\n1,2\n"


def test_other_columns_are_refused(tmp_path):
    (tmp_path / "rows.csv").write_text("a,c\n1,2\n")
    with pytest.raises(ValueError, match="other columns"):
        Rows(tmp_path / "rows.csv", ["a", "b"], ["a"])


def test_a_table_has_columns():
    assert table(["x", "yy"], [["long", "1"], ["s", "22"]]) == "x     yy\nlong   1\ns     22"


# Variety


FRESH = list(range(300))


@pytest.mark.parametrize(
    ("tokens", "variety_", "collapse", "loop", "run"),
    [
        (FRESH, 1.0, False, False, 1),
        # Windows of 100 in period 20 have 20 of 97 4-grams.
        (list(range(20)) * 10, 20 / 97, False, True, 1),
        (list(range(60)) * 5, 60 / 97, False, False, 1),
        (FRESH + [7] * 120, 1 / 97, True, True, 120),
        (FRESH + [7, 8] * 60, 2 / 97, True, True, 1),
        (FRESH + [1, 2, 3, 4] * 30, 4 / 97, True, True, 1),
        # "occurs occurs … The The": two runs in one window.
        ([5] * 50 + [6] * 50, 5 / 97, True, True, 50),
        # Few 4-grams, but a phrase of seven tokens over and over.
        (list(range(7)) * 20, 7 / 97, False, True, 1),
        ([7] * 90, 1 / 87, True, True, 90),
        ([7], 1.0, False, False, 1),
    ],
)
def test_variety_of_known_texts(tokens, variety_, collapse, loop, run):
    assert variety.least_variety(tokens) == pytest.approx(variety_)
    assert (variety.collapses(tokens), variety.loops(tokens), variety.longest_run(tokens)) == (collapse, loop, run)


def test_what_happens_before_the_first_eviction_does_not_count():
    text = [7] * 120 + FRESH
    assert generation.measures(text, 0)["collapse"] == 1
    after = generation.measures(text, 120)
    assert (after["collapse"], after["loop"], after["longest_run"]) == (0, 0, 120)
    assert after["least_variety"] == pytest.approx(1 / 97)
    assert generation.measures(text, 9999)["collapse"] == 0


def test_shares_of_distinct_n_grams():
    assert [variety.distinct([1, 2, 1, 2, 1], n) for n in (1, 2, 3)] == [2 / 5, 2 / 4, 2 / 3]
    assert variety.distinct([1], 2) == 1


# Generation


def test_texts_are_mlx_lms_and_never_end(model):
    prompts = rows_of_tokens(2, 30)
    for row, prompt in enumerate(prompts):
        want = [t for t, _ in generate_step(prompt, model, max_tokens=20)]
        steps = list(continued(model, Variant("full").caches(model), prompts, 20, chooser(0, 0), 16))
        assert [step[row].item() for step in steps] == want
    barred = want[:3]
    steps = continued(model, Variant("full").caches(model), prompts, 20, chooser(0, 0, barred))
    assert not set(barred) & {t for step in steps for t in step.tolist()}


def test_lots_are_the_same_for_every_method_and_other_with_another_seed(model):
    def text(name, seed):
        caches = Variant(name, 64, "").caches(model)
        return [s.tolist() for s in continued(model, caches, rows_of_tokens(2, 30), 20, chooser(0.7, seed))]

    assert text("full", 1) == text("h2o", 1) == text("full", 1) != text("full", 2)


def test_prompts_run_in_batches_of_one_length():
    prompts = [[1] * 5, [2] * 4, [3] * 5, [4] * 5]
    todo = list(generation.units(prompts, [Variant("full")], "m", generation.Manner(batch=2)))
    assert [unit.numbers for unit in todo] == [(0, 2), (3,), (1,)]
    assert [len(set(map(len, unit.prompts))) for unit in todo] == [1, 1, 1]
    again = list(generation.units(prompts[:3], [Variant("full")], "m", generation.Manner(batch=4)))
    assert again[0].runs[0] == todo[0].runs[0]
    warm = [
        next(generation.units(prompts, [Variant("full")], "m", generation.Manner(batch=n, temp=1.0))) for n in (2, 4)
    ]
    assert warm[0].runs[0] != warm[1].runs[0]


def test_texts_have_names_of_their_own():
    many = variants(["full", "h2o", "random"], [32, 64], ["", "grace=8 decay=1"], [0, 1], "a/b")
    names = {generation.text_name(variant, n) for variant in many for n in (1, 2)}
    assert len(names) == 2 * len(many)
    assert not any("/" in name or " " in name for name in names)
    assert generation.text_name(Variant("h2o", 64), 3) == "h2o-64-03.txt"


def test_there_are_twenty_prompts():
    assert len(set(PROMPTS)) == 20


# Retrieval


@pytest.mark.parametrize("length", [420, 433])
def test_each_prompt_has_the_length_and_the_key_at_its_depth(tiny, length):
    _, tokenizer = tiny
    places = []
    for depth in (0, 0.5, 1):
        cell = retrieval.make_cell(tokenizer, "filler", retrieval.FILLER, depth, length, 3)
        assert {len(row.tokens) for row in cell.rows} == {length}
        assert len({row.key for row in cell.rows}) == 3
        for row in cell.rows:
            text = tokenizer.decode(row.tokens)
            needle = retrieval.NEEDLE.format(key=row.key)
            assert text.count(row.key) == 2
            assert text.startswith("[user]" + retrieval.INTRODUCTION)
            assert text.endswith(retrieval.QUESTION + "<|end|>[assistant]")
            before, after = text.split(needle)
            before = before.removeprefix("[user]" + retrieval.INTRODUCTION)
            after = after.removesuffix(retrieval.QUESTION + "<|end|>[assistant]")
            assert before == "" or before.endswith(".")
            assert (retrieval.FILLER * 9).startswith(before + after)
            places.append(len(before) / (len(before) + len(after)))
    assert places[:3] == [0] * 3
    assert 0.4 < places[3] < 0.6
    assert places[6:] > [0.9] * 3


def test_no_room_for_text_is_an_error(tiny):
    with pytest.raises(ValueError, match="a prompt of 50 tokens has no room for text"):
        retrieval.make_cell(tiny[1], "filler", "x", 0, 50)


def answering(monkeypatch, finds):
    """The answers name the key where ``finds(variant caches)`` says so; returns what was asked."""
    asked = []

    def answers(model, tokenizer, caches, cell, *_):
        asked.append((type(caches[0]), cell.depth))
        return [row.key if finds(caches[0], cell, i) else "12" for i, row in enumerate(cell.rows)]

    monkeypatch.setattr(retrieval, "_answers", answers)
    monkeypatch.setattr(retrieval, "sizes", lambda *_: {"cache_bytes": 0, "tokens_kept": 0})
    return asked


def test_only_what_the_full_cache_finds_counts(model, tmp_path, monkeypatch):
    cells = [
        retrieval.Cell("filler", depth, 50, tuple(retrieval.Row(f"1{i}", [i, int(10 * depth)]) for i in range(2)))
        for depth in (0.0, 0.5, 1.0)
    ]
    # The full cache finds nothing at 1, one of two at 0.5; the other finds the first everywhere.
    asked = answering(
        monkeypatch,
        lambda cache, cell, i: (cell.depth + i / 2) < 1 if type(cache) is KVCache else i == 0,
    )
    todo = list(retrieval.units(cells, [Variant("recency", 12)], "m", 8, 16))
    rows = Rows(tmp_path / "rows.csv", retrieval.COLUMNS, retrieval.KEY)
    retrieval.measure(model, None, todo, 8, 16, rows)
    assert asked == [
        (KVCache, 0.0),
        (RotatingKVCache, 0.0),
        (KVCache, 0.5),
        (RotatingKVCache, 0.5),
        (KVCache, 1.0),
    ]
    retrieval.measure(model, None, todo, 8, 16, Rows(rows.path, retrieval.COLUMNS, retrieval.KEY))
    assert len(asked) == 5
    full, recency = retrieval.summarise(rows, todo)
    assert [(c["found"], c["trials"]) for c in full["cells"]] == [(2, 2), (1, 2), (0, 2)]
    assert [(c["found"], c["trials"]) for c in recency["cells"]] == [(1, 2), (1, 1), (0, 0)]
    lines = retrieval.heat_maps([recency]).splitlines()
    assert lines == ["recency, budget 12, filler: 2 of 3", "depth   50", "0      1/2", "0.5    1/1", "1        -"]


def test_the_answers_are_the_models(tiny):
    model, tokenizer = tiny
    cell = retrieval.make_cell(tokenizer, "filler", retrieval.FILLER, 0.5, 420, 2)
    caches = Variant("full").caches(model)
    answers = retrieval._answers(model, tokenizer, caches, cell, 5, 64)
    for row, answer in zip(cell.rows, answers, strict=True):
        want = [t for t, _ in generate_step(mx.array(row.tokens), model, max_tokens=5)]
        assert answer == tokenizer.decode(want)
    assert json.dumps(answers)
