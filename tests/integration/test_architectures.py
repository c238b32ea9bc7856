"""Which architectures the adapter serves, and how. H2O_WRITE_DOCS=1 rewrites docs/architectures.md."""

import os
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache
from mlx_lm.models.cache import make_prompt_cache as plain_cache

from h2o_mlxlm import (
    AdaptiveH2OKVCache,
    H2OConfig,
    H2OKVCache,
    bounded_layers,
    install,
    integration,
    make_prompt_cache,
    uninstall,
)
from h2o_mlxlm.backend import REFERENCE
from h2o_mlxlm.suitability import NO_ROLLING, PLACE_MATTERS

from .architectures import ALL, ARCHITECTURES, ATTENTION, FULL, REFUSED, VOCABULARY, build

DOCS = Path(__file__).parents[2] / "docs" / "architectures.md"
PROMPT, NEW = 50, 30
LARGE, SMALL = H2OConfig(budget=512), H2OConfig(budget=24, n_sink=4, grace=8)

HYBRID = tuple(a for a in ARCHITECTURES if a.layers == ATTENTION)
COVERS = {(): ALL, (RotatingKVCache,): FULL, (ArraysCache,): ATTENTION}


def tokens(n):
    mx.random.seed(5)
    return mx.random.randint(0, VOCABULARY, (n,))


def caches(model, arch, config=LARGE, heads="equal", budgets=None, **changes):
    """All caches of the model, and those that are ours; of these budgets, or all of one."""
    queries = "true" if arch.true_queries else "key"
    changed = H2OConfig(**{**vars(config), "queries": queries, **changes})
    changed = changed if budgets is None else [replace(changed, budget=budget) for budget in budgets]
    made = make_prompt_cache(model, changed, partial=arch.layers == ATTENTION, heads=heads)
    return made, [c for c in made if isinstance(c, (H2OKVCache, AdaptiveH2OKVCache))]


def budgets_of(model):
    """One of its own for each layer."""
    return [24 + 3 * ((-1) ** i) * i for i in range(bounded_layers(model))]


def logits(model, cache):
    """Of a prompt in two chunks and of six single tokens after it."""
    prompt = tokens(46)[None]
    ends = [25, *range(40, 47)]
    calls = zip([0, *ends], ends, strict=False)
    return mx.concatenate([model(prompt[:, start:end], cache=cache) for start, end in calls], axis=1)


def close(got, expected):
    scale = mx.abs(expected).max().item()
    np.testing.assert_allclose(np.array(got), np.array(expected), atol=1e-4 * scale, rtol=0)


def generate(model, cache):
    steps = generate_step(tokens(PROMPT), model, max_tokens=NEW, prompt_cache=cache, prefill_step_size=16)
    assert len(list(steps)) == NEW


def label(arch):
    """The name; and the last word of the note where one file is here twice."""
    twin = [a.name for a in ARCHITECTURES].count(arch.name) > 1
    return f"{arch.name}-{arch.note.split()[-1]}" if twin and arch.note else arch.name


every = pytest.mark.parametrize("arch", ARCHITECTURES, ids=label)


@every
def test_below_the_budget_the_logits_are_the_models_own(arch):
    model = build(arch.name, arch.args)
    expected = logits(model, plain_cache(model))
    made, ours = caches(model, arch, decay=1.0)
    close(logits(model, made), expected)
    assert COVERS[tuple({type(c) for c in made} - {H2OKVCache})] == arch.layers
    for cache in ours:
        given = np.array(cache.scores.sum(axis=-1)) / cache.tokens_seen
        if arch.mass is None:
            assert (given < 0.999).all()
        else:
            np.testing.assert_allclose(given, arch.mass, rtol=1e-4)


@every
@pytest.mark.parametrize("queries", ["true", "key", "true, fused"])
def test_a_small_budget_holds_in_generation(arch, queries, monkeypatch):
    if "fused" in queries:
        # As a back end with kernels goes: a decode step in one function, over all slots.
        monkeypatch.setattr(integration, "backend_of", lambda name: REFERENCE._replace(name="fused", fused=True))
    queries = queries.split(",")[0] if arch.true_queries else "key"
    model = build(arch.name, arch.args)
    made, ours = caches(model, arch, SMALL, decay=1.0, queries=queries)
    generate(model, made)
    for cache in ours:
        assert cache.tokens_kept == SMALL.budget
        assert cache.evictions == cache.tokens_seen - SMALL.budget > 0
        scores = np.array(cache.scores)
        assert np.isfinite(scores).all()
        assert (scores > 0).all()
        assert (scores.sum(axis=-1) <= (arch.mass or 1.0) * cache.tokens_seen * 1.001).all()


@every
def test_layers_hold_different_numbers_or_it_is_refused(arch):
    model = build(arch.name, arch.args)
    budgets = budgets_of(model)
    if arch.ragged and len(set(budgets)) > 1:
        with pytest.raises(ValueError, match=f"for it {arch.ragged}.*use one configuration for all layers"):
            caches(model, arch, SMALL, budgets=budgets)
        return
    made, ours = caches(model, arch, SMALL, budgets=budgets)
    generate(model, made)
    assert [c.tokens_kept for c in ours] == budgets
    assert all(c.evictions == c.tokens_seen - c.tokens_kept > 0 for c in ours)


@every
def test_heads_share_the_places_of_a_layer_or_it_is_refused(arch):
    model = build(arch.name, arch.args)
    if arch.ragged:
        with pytest.raises(ValueError, match=r'heads="(adaptive|equal)"'):
            caches(model, arch, SMALL, heads="adaptive")
        return
    made, ours = caches(model, arch, heads="adaptive")
    close(logits(model, made), logits(model, plain_cache(model)))
    made, ours = caches(model, arch, SMALL, heads="adaptive")
    generate(model, made)
    for cache in ours:
        n_heads = len(cache.heads[0])
        assert (cache.kept_positions >= 0).sum().item() == n_heads * SMALL.budget < n_heads * cache.tokens_seen


@every
def test_rolling_positions_work_or_are_refused(arch):
    model = build(arch.name, arch.args)
    if arch.rolling:
        with pytest.raises(ValueError, match=f'{arch.rolling}.*use positions="original"'):
            caches(model, arch, positions="rolling")
        return
    close(logits(model, caches(model, arch, positions="rolling")[0]), logits(model, plain_cache(model)))
    budgets = [SMALL.budget] * bounded_layers(model) if arch.ragged else budgets_of(model)
    made, ours = caches(model, arch, SMALL, budgets=budgets, positions="rolling")
    generate(model, made)
    assert [c.offset for c in ours] == budgets


@every
def test_tokens_that_can_be_taken_back_come_one_by_one_or_are_refused(arch):
    model = build(arch.name, arch.args)
    if arch.layers != ALL or not arch.true_queries or len(plain_cache(model)) != len(model.layers):
        with pytest.raises(ValueError, match=r"rewind=4 needs|rewind needs"):
            caches(model, arch, rewind=4)
        return
    made, ours = caches(model, arch, rewind=4)
    if arch.name == "stablelm":  # converts its keys after its cache has seen them
        with pytest.raises(ValueError, match="must attend to the keys and values that its cache returned"):
            logits(model, made)
        return
    close(logits(model, made), logits(model, plain_cache(model)))
    assert {c.trim(4) for c in ours} == {4}


@pytest.mark.parametrize("arch", [a for a in ARCHITECTURES if not a.rolling], ids=label)
def test_rolling_knows_the_models_rotation(arch):
    model = build(arch.name, arch.args)
    # Were all layers rotated by one layer's offset, budgets that differ would show it.
    budgets = [SMALL.budget] * bounded_layers(model) if arch.ragged else budgets_of(model)
    made, ours = caches(model, arch, SMALL, budgets=budgets, positions="rolling")
    for n in (12, 16, 12):
        model(mx.full((1, n), 7), cache=made)
    # Keys of one token, repeated, differ in their rotation alone: derotated they are equal. Behind sink
    # logits, or in a model with a state, the place of a token shows in more than its rotation.
    for cache in ours[: 1 if arch.mass is None else 0 if arch.layers == ATTENTION else None]:
        assert cache.keys.shape[2] == cache.config.budget + 12
        close(cache.keys, mx.broadcast_to(cache.keys[:, :, :1], cache.keys.shape))


def test_key_queries_change_no_logits():
    arch = ARCHITECTURES[0]
    model = build(arch.name, arch.args)
    close(logits(model, caches(model, arch, queries="key")[0]), logits(model, plain_cache(model)))


@pytest.mark.parametrize("arch", [a for a in ARCHITECTURES if not a.true_queries], ids=label)
def test_attention_of_its_own_asks_for_key_queries(arch):
    with pytest.raises(ValueError, match=r'attend with code of their own.*queries="key"'):
        caches(build(arch.name, arch.args), arch, queries="true")


@pytest.mark.parametrize("arch", HYBRID, ids=label)
def test_layers_with_a_state_ask_for_partial(arch):
    with pytest.raises(ValueError, match=r"keep ArraysCache.*partial=True"):
        make_prompt_cache(build(arch.name, arch.args), LARGE)


@pytest.mark.parametrize("refused", REFUSED, ids=label)
@pytest.mark.parametrize("queries", ["true", "key"])
def test_what_cannot_work_is_refused(refused, queries):
    with pytest.raises(ValueError, match=f"{refused.why}.*use mlx_lm's own cache"):
        make_prompt_cache(build(refused.name, refused.args), H2OConfig(queries=queries), partial=True)


@pytest.mark.parametrize("name", [*NO_ROLLING, *PLACE_MATTERS])
def test_the_lists_name_files_of_mlx_lm(name):
    assert import_module(f"mlx_lm.models.{name}").Model


@pytest.mark.parametrize("arch", [a for a in ARCHITECTURES if a.name == "llama"], ids=label)
def test_a_prompt_of_embeddings_is_the_prompt_of_its_tokens(arch):
    model, runs = build(arch.name, arch.args), []
    embeddings = model.model.embed_tokens(tokens(PROMPT))
    for prompt, given in ((tokens(PROMPT), {}), (mx.array([], mx.int32), {"input_embeddings": embeddings})):
        made, ours = caches(model, arch, SMALL)
        steps = generate_step(prompt, model, max_tokens=NEW, prompt_cache=made, prefill_step_size=16, **given)
        text = [token for token, _ in steps]
        assert all(c.evictions == PROMPT + NEW - SMALL.budget > 0 for c in ours)
        runs.append((text, [c.kept_positions.tolist() for c in ours]))
    assert runs[0] == runs[1]


def test_models_of_one_file_do_not_disturb_each_other():
    plain, ours = build("llama", {}), build("llama", {"num_attention_heads": 8})
    expected = logits(plain, plain_cache(plain))
    install(ours, SMALL)
    bounded = plain_cache(ours)
    generate(ours, bounded)
    assert {c.tokens_kept for c in bounded} == {SMALL.budget}
    close(logits(plain, plain_cache(plain)), expected)
    assert [type(c) for c in plain_cache(plain)] == [KVCache, KVCache]


@pytest.mark.parametrize("arch", [ARCHITECTURES[0], HYBRID[0]], ids=label)
def test_uninstall_restores_the_models_own_caches(arch):
    model = build(arch.name, arch.args)
    own = [type(c) for c in plain_cache(model)]
    install(model, SMALL, partial=True)
    install(model, LARGE, partial=True)
    assert H2OKVCache in {type(c) for c in plain_cache(model)}
    uninstall(model)
    uninstall(model)
    assert [type(c) for c in plain_cache(model)] == own


def page():
    rows = [
        (
            a.name,
            a.layers,
            "yes" if a.true_queries else 'no: `"key"`',
            f"no: {a.rolling}" if a.rolling else "yes",
            f"no: {a.ragged}" if a.ragged else "yes",
            a.note,
        )
        for a in ARCHITECTURES
    ]
    rows += [(r.name, "none", "no", "no", "no", r.why) for r in REFUSED]
    head = ("architecture", "H2O layers", '`queries="true"`', '`positions="rolling"`', "ragged budgets", "note")
    lines = [head, ("---",) * len(head), *sorted(rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def test_docs_show_this_table():
    if os.environ.get("H2O_WRITE_DOCS") == "1":
        DOCS.write_text(page())
    assert DOCS.read_text() == page()
