"""Saved prompt caches: generation goes on bit for bit, and a file that was tampered with is one clear error."""

import copy
import json
import math
import random
import subprocess
import sys
from dataclasses import replace

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.gemma3_text import Model as Gemma
from mlx_lm.models.gemma3_text import ModelArgs as GemmaArgs
from mlx_lm.models.jamba import Model as Jamba
from mlx_lm.models.jamba import ModelArgs as JambaArgs

from h2o_mlxlm import H2OConfig, H2OKVCache, SplitH2OKVCache, load_prompt_cache, make_prompt_cache, save_prompt_cache
from h2o_mlxlm.persistence import NAME
from h2o_mlxlm.safetensors_file import read_arrays

SMALL = H2OConfig(budget=12, n_sink=2, grace=3, decay=0.98)
OTHER = replace(SMALL, queries="key")
WAYS = {
    "original": {},
    "rolling": {"positions": "rolling"},
    "auto": {"positions": "auto", "trained_length": 20},
    "key": {"queries": "key", "positions": "rolling"},
    "held": {"evict_during_prefill": False},
    "shared": {"long_share": 0.5},
}


@pytest.fixture(scope="module")
def model(make_model):
    return make_model()


@pytest.fixture(scope="module")
def gemma():
    """Two layers with a window of 8 before each that attends to everything."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 32, "num_attention_heads": 2}
    more = {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 40, "sliding_window_pattern": 3}
    mx.random.seed(0)
    return Gemma(GemmaArgs(model_type="gemma3_text", sliding_window=8, **sizes, **more))


@pytest.fixture(scope="module")
def jamba():
    """State-space layers before each that attends."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 32, "num_attention_heads": 2}
    kinds = {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2}
    more = {"mamba_d_conv": 4, "mamba_d_state": 8, "mamba_expand": 2, "num_experts": 2, "num_experts_per_tok": 1}
    rest = {"num_key_value_heads": 1, "vocab_size": 40, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
    args = sizes | kinds | more | rest
    mx.random.seed(0)
    return Jamba(JambaArgs(model_type="jamba", mamba_dt_rank=2, mamba_proj_bias=False, mamba_conv_bias=True, **args))


def fed(model, caches, *calls):
    """Logits after calls of so many tokens each, rows of the same tokens."""
    out = []
    for i, n in enumerate(calls):
        out.append(model(mx.array([[(7 * i + 3 * j) % 40 for j in range(n)]]), cache=caches)[:, -1])
        mx.eval(out[-1])
    return mx.stack(out)


def saved(caches, model, folder, **options):
    save_prompt_cache(folder / "cache.safetensors", caches, model, **options)
    assert [path.name for path in folder.iterdir()] == ["cache.safetensors"]
    return load_prompt_cache(folder / "cache.safetensors", model)


def check_equal(caches, others):
    for a, b in zip(caches, others, strict=True):
        assert type(a) is type(b)
        x, y = dict(tree_flatten(a.state)), dict(tree_flatten(b.state))
        assert x.keys() == y.keys()
        assert all(mx.array_equal(x[n], y[n]) if isinstance(x[n], mx.array) else x[n] == y[n] for n in x)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    st.sampled_from(list(WAYS)),
    st.integers(5, 14),
    st.integers(0, 2),
    st.integers(0, 2),
    st.sampled_from([0.98, 0.5, 1.0]),
    st.sampled_from([0, 0, 1, 5]),
    st.lists(st.sampled_from([1, 1, 1, 2, 5, 13]), min_size=1, max_size=10),
    st.lists(st.sampled_from([1, 1, 4]), min_size=1, max_size=5),
)
def test_going_on_after_a_reload_is_going_on(
    model, tmp_path_factory, way, budget, sink, grace, decay, more, before, after
):
    """With one configuration for all layers, or ``more`` for the second."""
    fields = dict(WAYS[way])
    if way == "auto":
        # Turning is in time if the largest call comes first.
        before, fields["trained_length"] = [13, *before], 30
    first = H2OConfig(budget=budget, n_sink=sink, grace=grace, decay=decay, **fields)
    configs = [first, replace(first, budget=budget + more)]
    plain, caches = (make_prompt_cache(model, configs) for _ in range(2))
    assert mx.array_equal(fed(model, plain, *before), fed(model, caches, *before))
    again = saved(caches, model, tmp_path_factory.mktemp("saved"))
    assert [c.config for c in again] == configs
    assert mx.array_equal(fed(model, again, *after), fed(model, plain, *after))
    check_equal(again, plain)


SPLIT = [[12, 8], [9, 19]]


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.sampled_from(["original", "held", "shared", "rewind"]),
    st.lists(st.integers(6, 20), min_size=4, max_size=4),
    st.lists(st.sampled_from([1, 1, 1, 2, 5, 13]), min_size=1, max_size=10),
    st.lists(st.sampled_from([1, 1, 4]), min_size=1, max_size=5),
)
def test_heads_of_different_budgets_go_on_too(model, tmp_path_factory, way, budgets, before, after):
    config = H2OConfig(budget=20, n_sink=2, grace=10, **WAYS.get(way, {"rewind": 2}))
    heads = [budgets[:2], budgets[2:]]
    plain, caches = (make_prompt_cache(model, config, heads=heads) for _ in range(2))
    assert mx.array_equal(fed(model, plain, *before), fed(model, caches, *before))
    again = saved(caches, model, tmp_path_factory.mktemp("saved"))
    assert [(type(c), c.config, c.budgets) for c in again] == [(SplitH2OKVCache, config, layer) for layer in heads]
    assert {c.ledger for layer in again for _, c in layer.shares} == {again[0].shares[0].cache.ledger}
    assert mx.array_equal(fed(model, again, *after), fed(model, plain, *after))
    check_equal(again, plain)


def test_a_batch_of_heads_of_different_budgets_goes_on(model, tmp_path):
    alone = [make_prompt_cache(model, SMALL, heads=SPLIT) for _ in range(2)]
    for caches, n in zip(alone, (17, 4), strict=True):
        fed(model, caches, n)
    caches = [SplitH2OKVCache.merge(layer) for layer in zip(*alone, strict=True)]
    again = saved(caches, model, tmp_path)
    rows = mx.array([[5], [6]])
    assert mx.array_equal(model(rows, cache=again), model(rows, cache=caches))
    check_equal(again, caches)


@pytest.mark.parametrize("calls", [(5,), (30, 1, 1), (1,) * 20, (9, 4, 1)], ids=str)
def test_layers_with_a_window_go_on_too(gemma, tmp_path, calls):
    caches = make_prompt_cache(gemma, SMALL)
    fed(gemma, caches, *calls)
    again = saved(caches, gemma, tmp_path)
    assert [type(c).__name__ for c in again] == ["RotatingKVCache", "RotatingKVCache", "H2OKVCache"]
    assert mx.array_equal(fed(gemma, again, 1, 1, 3, 1), fed(gemma, caches, 1, 1, 3, 1))
    check_equal(again, caches)


def test_state_space_layers_go_on_too(jamba, tmp_path):
    caches = make_prompt_cache(jamba, SMALL, partial=True)
    fed(jamba, caches, 9, 5, 1)
    again = saved(caches, jamba, tmp_path)
    assert [type(c).__name__ for c in again] == ["ArraysCache", "H2OKVCache"] * 2
    assert mx.array_equal(fed(jamba, again, 1, 3, 1), fed(jamba, caches, 1, 3, 1))


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_goes_on_in_the_middle_of_a_padded_prompt(model, tmp_path, way):
    config = H2OConfig(budget=12, n_sink=2, grace=3, **WAYS[way])
    alone = [make_prompt_cache(model, config) for _ in range(3)]
    for caches, n in zip(alone, (17, 4, 0), strict=True):
        _ = fed(model, caches, n) if n else None
    caches = [H2OKVCache.merge(layer) for layer in zip(*alone, strict=True)]
    for cache in caches:
        cache.prepare(lengths=[3, 9, 1], right_padding=[6, 0, 8])
    rows = mx.array([[(11 * b + j) % 40 for j in range(9)] for b in range(3)])
    mx.eval(model(rows[:, :5], cache=caches))
    again = saved(caches, model, tmp_path)
    outs = []
    for either in (caches, again):
        out = [model(rows[:, 5:], cache=either)]
        for cache in either:
            cache.finalize()
        out += [model(rows[:, i : i + 1], cache=either) for i in range(4)]
        outs.append(mx.concatenate(out, axis=1))
    assert mx.array_equal(*outs)
    check_equal(again, caches)
    assert caches[0].tokens_seen.tolist() == [24, 17, 5]


@pytest.mark.parametrize("way", WAYS)
def test_an_empty_cache_can_be_saved(model, tmp_path, way):
    caches = make_prompt_cache(model, H2OConfig(budget=12, n_sink=2, grace=3, **WAYS[way]))
    again = saved(caches, model, tmp_path)
    assert all(c.empty() for c in again)
    assert mx.array_equal(fed(model, again, 15, 1, 1), fed(model, caches, 15, 1, 1))


def test_a_sequence_that_has_seen_nothing_in_a_batch(model, tmp_path):
    """Alone in its batch it has slots, none in number."""
    full = make_prompt_cache(model, SMALL)
    fed(model, full, 5)
    caches = [H2OKVCache.merge(both) for both in zip(full, make_prompt_cache(model, SMALL), strict=True)]
    for cache in caches:
        cache.filter([1])
    again = saved(caches, model, tmp_path)
    assert again[0].keys.shape[2] == 0
    assert mx.array_equal(fed(model, again, 15, 1, 1), fed(model, caches, 15, 1, 1))


def test_metadata_come_back_as_they_are(model, tmp_path):
    caches, path = make_prompt_cache(model, SMALL), tmp_path / "no ending"
    texts = {"a.b": "x", "0": "ü\n", "": ""}
    save_prompt_cache(str(path), caches, model, texts)
    assert load_prompt_cache(str(path), model, return_metadata=True)[1] == texts
    save_prompt_cache(path, caches, model)
    assert load_prompt_cache(path, model, return_metadata=True)[1] == {}


# mlx_lm's own functions


@pytest.mark.parametrize("way", WAYS)
def test_mlx_lms_save_and_load_work(model, tmp_path, way):
    config, path = H2OConfig(budget=12, n_sink=2, grace=3, decay=0.98, **WAYS[way]), str(tmp_path / "a.safetensors")
    for calls in [(17, 1, 1), ()]:
        caches = make_prompt_cache(model, config)
        _ = fed(model, caches, *calls) if calls else None
        mlx_lm_cache.save_prompt_cache(path, caches, {"model": "tiny"})
        again, texts = mlx_lm_cache.load_prompt_cache(path, return_metadata=True)
        assert texts == {"model": "tiny"}
        assert [c.config for c in again] == [c.config for c in caches]
        assert mx.array_equal(fed(model, again, 1, 4, 1), fed(model, caches, 1, 4, 1))
        check_equal(again, caches)


def test_any_name_of_ours_makes_mlx_lms_load_know_the_class(model, tmp_path):
    caches, path = make_prompt_cache(model, SMALL), str(tmp_path / "a.safetensors")
    mlx_lm_cache.save_prompt_cache(path, caches)
    code = "from mlx_lm.models.cache import load_prompt_cache as read; print(type(read(sys.argv[1])[1]))"
    known = [sys.executable, "-c", f"import sys; from h2o_mlxlm import load; {code}", path]
    assert "H2OKVCache" in subprocess.run(known, capture_output=True, text=True, check=True).stdout


def test_what_mlx_lms_load_reads_is_checked_as_well(model, tmp_path):
    caches, path = make_prompt_cache(model, SMALL), str(tmp_path / "a.safetensors")
    fed(model, caches, 17, 1)
    mlx_lm_cache.save_prompt_cache(path, caches)
    arrays, texts = mx.load(path, return_metadata=True)
    mx.save_safetensors(path, arrays | {"1.positions": arrays["1.positions"] + 1}, texts)
    with pytest.raises(ValueError, match="positions are -1 or below the tokens seen"):
        mlx_lm_cache.load_prompt_cache(path)


# What can't be saved


def test_what_cannot_be_loaded_is_not_saved(model, gemma, tmp_path):
    path = tmp_path / "cache.safetensors"
    caches, others = make_prompt_cache(model, SMALL), make_prompt_cache(model, SMALL)
    fed(model, caches, 5)
    fed(model, others, 6)
    split = make_prompt_cache(model, SMALL, heads=SPLIT)
    empty, gemmas = make_prompt_cache(model, SMALL), make_prompt_cache(gemma, SMALL)
    cases = [
        ([empty[0], H2OKVCache.merge([empty[1], empty[1]])], {}, "its layers have not seen the same tokens"),
        ([caches[0], others[1]], {}, "its layers have not seen the same tokens"),
        (caches[:1], {}, "it has 1 H2O caches, and this model has 2"),
        ([*caches[:1], mlx_lm_cache.KVCache()], {}, "it has 1 H2O caches, and this model has 2"),
        (
            [*caches[:1], *make_prompt_cache(model, H2OConfig())[:1]],
            {},
            "its arrays are not those of this model's caches",
        ),
        ([*caches[:1], H2OKVCache(SMALL, kv_bits=8)], {}, "in one way, got 2 ways in 2 of them"),
        ([*caches[:1], *make_prompt_cache(model, OTHER)[:1]], {}, "layers differ in budget, .* got queries="),
        ([*caches[:1], *make_prompt_cache(model, SMALL)[:1]], {}, "its arrays are not those of this model's caches"),
        ([caches[0], split[1]], {}, "H2O caches of one kind, got both"),
        ([mlx_lm_cache.KVCache()] * 2, {}, "in one way, got 0 ways in 0 of them"),
        ([mlx_lm_cache.CacheList(*caches)], {}, "got CacheList, whose state nobody checks"),
        (caches, {"model": gemma}, "it has 2 H2O caches, and this model has 1"),
        ([*caches[:1], *gemmas[:2]], {"model": gemma}, "its caches are .*, and this model has 3: RotatingKVCache"),
    ]
    for given_, changes, message in cases:
        with pytest.raises(ValueError, match=message):
            save_prompt_cache(path, given_, **{"model": model, **changes})
    with pytest.raises(TypeError, match=r"metadata must be names and texts, got \{'a': 1\}"):
        save_prompt_cache(path, caches, model, {"a": 1})
    assert not list(tmp_path.iterdir())


def test_a_batch_of_layers_with_a_window_is_saved_one_by_one(gemma, tmp_path):
    caches = make_prompt_cache(gemma, SMALL)
    fed(gemma, caches, 5)
    merged = [type(c).merge([c, c]) for c in caches]
    with pytest.raises(ValueError, match="got BatchRotatingKVCache, whose state nobody checks"):
        save_prompt_cache(tmp_path / "a", merged, gemma)
    saved([c.extract(1) for c in merged], gemma, tmp_path)


def test_a_failure_leaves_the_old_file_and_nothing_else(model, tmp_path, monkeypatch):
    caches, path = make_prompt_cache(model, SMALL), tmp_path / "cache.safetensors"
    saved(caches, model, tmp_path)
    before = path.read_bytes()
    fed(model, caches, 5)

    def full(*_):
        (next(tmp_path.glob(".saving-*")) / "part.safetensors").write_bytes(before[:9])
        raise RuntimeError("no space left")

    monkeypatch.setattr(mx, "save_safetensors", full)
    with pytest.raises(OSError, match=r"can't write .*cache\.safetensors: no space left"):
        save_prompt_cache(path, caches, model)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        save_prompt_cache(tmp_path / "none" / "a", caches, model)


# What can't be loaded


def forged(path, arrays, about, name=NAME):
    mx.save_safetensors(str(path), arrays, {name: about if isinstance(about, str) else json.dumps(about)})


@pytest.fixture(scope="module")
def good(model, tmp_path_factory):
    """A file of a cache that has evicted, and its parts."""
    path = tmp_path_factory.mktemp("good") / "cache.safetensors"
    caches = make_prompt_cache(model, H2OConfig(budget=12, n_sink=2, grace=3, positions="rolling"))
    fed(model, caches, 17, 1)
    save_prompt_cache(path, caches, model, {"by": "a test"})
    arrays, texts = read_arrays(path)
    return path, arrays, json.loads(texts[NAME])


def refused(path, model, message=None):
    with pytest.raises(ValueError, match=message) as caught:
        load_prompt_cache(path, model)
    assert type(caught.value) is ValueError
    assert str(caught.value).startswith(f"{path} is no prompt cache of this model: ")
    assert len(str(caught.value)) < 1000


def test_another_model_is_refused(good, make_model, gemma):
    path, _, about = good
    message = f"saved with model '{about['model']}', and this one is"
    refused(path, make_model(rope_theta=1e5), message)
    refused(path, gemma, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format must be 1, got 2: it was written by another version"),
        ({"format": True}, "format must be 1, got True"),
        ({"model": None}, "saved with model None"),
        ({"extra": 1}, "its description must have classes, configs"),
        ({"configs": []}, "its configurations are no list"),
        ({"configs": {}}, "its configurations are no list"),
        ({"configs": [[], []]}, "its configuration has other fields"),
        ({"classes": ["H2OKVCache"]}, r"its caches are \['H2OKVCache'\], and this model has 2"),
        ({"classes": ["H2OKVCache", "LRUPromptCache"]}, "LRUPromptCache"),
        ({"classes": 5}, "its caches are 5"),
        ({"scalars": []}, "its metadata or scalars"),
        ({"scalars": {}}, "its arrays are not those"),
        ({"scalars": {"0.keys": 1}}, "its metadata or scalars"),
        ({"scalars": {"0.about": "{}", "99999999999.about": "{}"}}, "its arrays are not those"),
        ({"scalars": {"0.about": 5, "1.about": 5}}, "0.about is int, and this model has str"),
        ({"metadata": {"a": 1}}, "its metadata or scalars"),
    ],
    ids=str,
)
def test_a_description_that_does_not_fit_is_refused(good, model, tmp_path, change, message):
    _, arrays, about = good
    forged(tmp_path / "a.safetensors", arrays, about | change)
    refused(tmp_path / "a.safetensors", model, message)


@pytest.mark.parametrize("about", ["", "{", "[" * 100_000, "5", '{"format": 1e999}', "NaN"], ids=lambda x: x[:9])
def test_a_description_that_is_none_is_refused(good, model, tmp_path, about):
    forged(tmp_path / "a.safetensors", good[1], about)
    refused(tmp_path / "a.safetensors", model)


def test_a_file_of_mlx_lms_is_refused(model, tmp_path):
    path = tmp_path / "a.safetensors"
    mlx_lm_cache.save_prompt_cache(str(path), make_prompt_cache(model, SMALL))
    refused(path, model, "not written by h2o_mlxlm's save_prompt_cache; mlx_lm's files are for mlx_lm's")
    forged(path, {}, "{}", "another")
    refused(path, model, "not written by")


def test_a_configuration_other_than_the_layers_is_refused(good, model, tmp_path):
    _, arrays, about = good
    for change in ({"budget": 13}, {"decay": 0.5}, {"positions": "original"}, {"queries": "key"}):
        # Of both layers, and of one.
        for configs in ([c | change for c in about["configs"]], [about["configs"][0], about["configs"][1] | change]):
            forged(tmp_path / "a.safetensors", arrays, about | {"configs": configs})
            refused(tmp_path / "a.safetensors", model)
    huge = [c | {"decay": 10**400} for c in about["configs"]]
    forged(tmp_path / "a.safetensors", arrays, about | {"configs": huge})
    refused(tmp_path / "a.safetensors", model, r"decay must be in \(0, 1\], got 1000")
    for name in ("scale", "rotation"):
        own = {key: json.loads(text) for key, text in about["scalars"].items()}
        for state in own.values():
            state[name] = 10**400 if name == "scale" else [False, 10**400, 1.0]
        forged(tmp_path / "a.safetensors", arrays, about | {"scalars": {k: json.dumps(x) for k, x in own.items()}})
        refused(tmp_path / "a.safetensors", model, "this is no state that an H2O cache can have")
    for configs in (about["configs"][:1], about["configs"] * 2):
        forged(tmp_path / "a.safetensors", arrays, about | {"configs": configs})
        refused(tmp_path / "a.safetensors", model, r"it has \d H2O caches, and this model has 2")


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        (None, "its caches are .*SplitH2OKVCache"),
        ([], "its caches are .*SplitH2OKVCache"),
        ({}, "its budgets of heads are no list"),
        ([[], []], "its budgets of heads are no list"),
        ([5, 5], "its budgets of heads are no list"),
        ([[12, 8], [9, "x"]], "its budgets of heads must be whole numbers from 1"),
        ([[12, 8], [9, True]], "its budgets of heads must be whole numbers from 1"),
        ([[12, 8], [9, 2**40]], "its budgets of heads must be whole numbers from 1"),
        ([[12, 8]], "heads has budgets for each layer with an H2O cache, of which this model has 2, got 1"),
        ([[12, 8], [9, 19, 8]], "heads has budgets for 3 KV heads of H2O layer 1, of which llama has 2 here"),
        ([[12, 8], [19, 9]], "layer 1 is no SplitH2OKVCache"),
        ([[12, 8], [9, 18]], "layer 1 is no SplitH2OKVCache"),
        ([[12, 8], [9, 2]], "some heads keep 2 tokens where the mean is 12"),
        ([[12, 12], [9, 9]], "its arrays are not those of this model's caches"),
        ([[48, 8], [9, 19]], "got budgets with a mean of"),
    ],
    ids=str,
)
def test_budgets_of_heads_that_do_not_fit_are_refused(model, tmp_path, heads, message):
    caches = make_prompt_cache(model, SMALL, heads=SPLIT)
    fed(model, caches, 30, 1)
    path = tmp_path / "a.safetensors"
    save_prompt_cache(path, caches, model)
    arrays, texts = read_arrays(path)
    forged(path, arrays, json.loads(texts[NAME]) | {"heads": heads})
    refused(path, model, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"1.keys": lambda x: x[:, :1]}, "1.keys is mlx.core.float32"),
        ({"1.values": lambda x: x.astype(mx.float16)}, "1.values is mlx.core.float16"),
        ({"1.keys": lambda x: mx.concatenate([x, x])}, "values has 1 along B, and 2 are expected"),
        ({"0.frequencies": lambda x: x * 2}, "layer 0 is no H2OKVCache"),
        ({"0.positions": lambda x: x[..., :1]}, "positions has 1 along C, and 13 are expected"),
    ],
    ids=["heads", "dtype", "batch", "frequencies", "slots"],
)
def test_arrays_that_this_model_cannot_have_are_refused(good, model, tmp_path, change, message):
    _, arrays, about = good
    forged(tmp_path / "a.safetensors", arrays | {name: f(arrays[name]) for name, f in change.items()}, about)
    refused(tmp_path / "a.safetensors", model, message)


@pytest.mark.parametrize("offset", [-1, 0, 5, 7, 2**40])
def test_a_windows_counts_are_checked(gemma, tmp_path, offset):
    path = tmp_path / "a.safetensors"
    caches = make_prompt_cache(gemma, SMALL)
    fed(gemma, caches, 6)
    save_prompt_cache(path, caches, gemma)
    arrays, texts = read_arrays(path)
    about = json.loads(texts[NAME])
    names = {name: x for name, x in about["scalars"].items() if name.startswith("0.")}
    assert list(names.values()) == [6, 0, 8, 6]
    for name in names:
        forged(path, arrays, about | {"scalars": about["scalars"] | {name: offset}})
        if names[name] != offset:
            refused(path, gemma, "layer 0 is no RotatingKVCache that this model can have after 6 tokens")


def test_every_cut_is_refused(good, model, tmp_path):
    whole, path = good[0].read_bytes(), tmp_path / "a.safetensors"
    for n in [*range(0, 20), *range(20, len(whole), 997), len(whole) - 1]:
        path.write_bytes(whole[:n])
        refused(path, model)
    path.write_bytes(whole + b"\0")
    refused(path, model, "and there are")
    with pytest.raises(FileNotFoundError):
        load_prompt_cache(tmp_path / "none", model)
    with pytest.raises(OSError, match="directory"):
        load_prompt_cache(tmp_path, model)


def lawful(cache, finite=True):
    """Check that calls can have made a cache, by loops over its numbers; of ``finite`` rows."""
    c, state = cache.config, cache.state
    counts = json.loads(state["about"])["counts"]
    numbers = {name: x.astype(mx.float32).tolist() for name, x in state.items() if isinstance(x, mx.array)}
    for b, heads in enumerate(state["positions"].tolist()):
        seen, kept, _, holding, _ = counts[b if cache._batched else 0]
        assert numbers["seen"][b] == seen
        assert kept == (seen if holding else min(seen, c.budget))
        for h, slots in enumerate(heads):
            held = [p for p in slots if p != -1]
            assert len(held) == len(set(held)) == kept
            assert all(0 <= p < seen for p in held)
            assert {p for p in range(seen) if p < c.n_sink or p > seen - 1 - c.grace} <= set(held)
            assert slots[:kept] == held or len(slots) == c.budget + 1 == kept + 1
            for i, p in enumerate(slots):
                score, total = (numbers[name][b][h][i] for name in ("scores", "totals"))
                assert (score, total) == (0, 0) if p == -1 else not (score < 0 or total < 0)
                rows = [x for name in ("keys", "values") for x in numbers[name][b][h][i]]
                assert p >= 0 or not finite or all(map(math.isfinite, rows))


NUMBERS = [0, 1, -1, 2, 12, 13, 18, 2**31, 2**62, -(2**40), 10**400, 0.5, float("nan"), float("inf")]
ODD = [*NUMBERS, None, True, False, "", "x", [], {}, [[]], {"a": 1}]


def changed_tree(draw, tree):
    """The tree with one leaf or branch replaced, dropped or doubled."""
    if isinstance(tree, str) and tree.startswith("{") and draw.random() < 0.9:
        return json.dumps(changed_tree(draw, json.loads(tree)))
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree))) if isinstance(tree, list) else []
    if not keys or draw.random() < 0.2:
        return draw.choice(ODD)
    key, tree = draw.choice(keys), copy.copy(tree)
    if draw.random() < 0.1:
        del tree[key]
    elif isinstance(tree, list) and draw.random() < 0.1:
        tree.insert(key, tree[key])
    else:
        tree[key] = changed_tree(draw, tree[key])
    return tree


def changed_arrays(draw, arrays):
    """The arrays with one changed in a number, its shape, its dtype or its name."""
    name = draw.choice(sorted(arrays))
    x = arrays[name]
    how = draw.randrange(6)
    if how < 3:
        flat, at = x.flatten(), draw.randrange(x.size)
        value = draw.choice(
            [-1, 0, 1, 5, 17, 18, 10**9, -(10**9), *([mx.nan, mx.inf, 0.5] if x.dtype == mx.float32 else [])]
        )
        flat[at : at + draw.choice([1, 2, 40])] = mx.array(value, x.dtype)
        return arrays | {name: flat.reshape(x.shape)}
    if how == 3:
        other = [x[:0], x[..., :-1], x[None], x.flatten(), mx.concatenate([x, x], -1), mx.array(3)]
        return arrays | {name: draw.choice(other)}
    if how == 4:
        return arrays | {
            name: x.astype(draw.choice([mx.float16, mx.bfloat16, mx.int32, mx.uint32, mx.bool_, mx.float32]))
        }
    rest = {n: a for n, a in arrays.items() if n != name}
    return rest if draw.random() < 0.5 else rest | {draw.choice(["9.keys", "0.more", "", "0." * 3000, "0.keys.0"]): x}


def changed_bytes(draw, whole):
    """The file with a few bytes changed, most of them in its header."""
    data = bytearray(whole)
    for _ in range(draw.randrange(1, 4)):
        data[draw.randrange(8 + int.from_bytes(whole[:8], "little") if draw.random() < 0.8 else len(data))] ^= (
            1 << draw.randrange(8)
        )
    return bytes(data)


def test_whatever_is_changed_in_a_file_is_refused_or_still_a_lawful_cache(good, model, tmp_path):
    source, arrays, about = good
    whole, path, draw, said, taken = source.read_bytes(), tmp_path / "a.safetensors", random.Random(7), [], 0
    for i in range(450):
        if i % 3 == 0:
            forged(path, arrays, changed_tree(draw, about))
        elif i % 3 == 1:
            forged(path, changed_arrays(draw, arrays), about)
        else:
            path.write_bytes(changed_bytes(draw, whole))
        try:
            caches = load_prompt_cache(path, model)
        except ValueError as error:
            said.append(f"{type(error).__name__} {error}")
            continue
        taken += 1
        for cache in caches:
            lawful(cache)
        # A held row may be what a model overflowed to; once evicted, it stays in its slot until the next one comes.
        finite = all(mx.isfinite(x).all().item() for cache in caches for x in (cache.keys, cache.values))
        fed(model, caches, 1, 1)
        for cache in caches:
            lawful(cache, finite)
    assert all(text.startswith(f"ValueError {path} is no prompt cache of this model: ") for text in said)
    assert len(said) > 300
    assert taken > 30
