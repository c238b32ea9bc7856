"""Budgets that differ from layer to layer: their total, what may differ, and masks that fit every layer."""

from fractions import Fraction

import mlx.core as mx
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from mlx_lm import batch_generate
from mlx_lm.generate import generate_step
from mlx_lm.models import gemma2

from h2o_mlxlm import (
    H2OConfig,
    H2OKVCache,
    attention,
    bounded_layers,
    install,
    load,
    make_prompt_cache,
    pyramid,
    uninstall,
)

STEP = 8


@pytest.fixture(scope="module")
def model(make_model):
    return make_model(num_hidden_layers=3)


def prompt(n):
    return mx.random.randint(3, 260, (n,), key=mx.random.key(n))


@given(st.integers(2, 300), st.integers(1, 90), st.floats(1, 60), st.integers(0, 8), st.integers(0, 80))
def test_a_pyramid_is_a_line_with_the_same_total(budget, n_layers, ratio, n_sink, grace):
    assume(n_sink + grace < budget)
    config = H2OConfig(budget=budget, n_sink=n_sink, grace=grace, decay=0.9, long_share=0.25)
    hitters = budget - n_sink - grace
    if ratio > 2 * hitters - 1:
        with pytest.raises(ValueError, match=f"ratio must be between 1 and {2 * hitters - 1}, .* got {ratio} with"):
            pyramid(config, n_layers, ratio)
        return
    layers = pyramid(config, n_layers, ratio)
    budgets = [c.budget for c in layers]
    assert sum(budgets) == budget * n_layers
    assert budgets == sorted(budgets, reverse=True)
    # The line by its two ends: bottom = ratio · top, and their mean is the mean.
    top = Fraction(2 * hitters) / (Fraction(ratio) + 1)
    bottom = Fraction(ratio) * top
    for i, c in enumerate(layers):
        exact = bottom - (bottom - top) * Fraction(i, n_layers - 1) if n_layers > 1 else Fraction(hitters)
        assert abs(c.budget - n_sink - grace - exact) < 1 + Fraction(1, 10**6)
        assert (c.n_sink, c.grace, c.decay, c.long_share) == (n_sink, grace, 0.9, 0.25)


@pytest.mark.parametrize("n_layers", [0, -1, 2.0, True])
def test_a_pyramid_has_layers(n_layers):
    with pytest.raises(ValueError, match=f"n_layers must be a whole number, at least 1, got {n_layers}"):
        pyramid(H2OConfig(), n_layers)


@pytest.mark.parametrize("ratio", [0.5, float("nan"), 1e9])
def test_a_pyramid_stands_on_its_base(ratio):
    with pytest.raises(ValueError, match="ratio must be between 1 and 759"):
        pyramid(H2OConfig(), 4, ratio)


def test_each_layer_keeps_its_own(model):
    configs = [H2OConfig(budget=10, n_sink=1, grace=2), H2OConfig(budget=40, decay=0.8), H2OConfig(budget=16, grace=8)]
    caches = make_prompt_cache(model, configs)
    list(generate_step(prompt(60), model, max_tokens=20, prompt_cache=caches, prefill_step_size=STEP))
    assert [c.config for c in caches] == configs
    assert [c.tokens_kept for c in caches] == [10, 40, 16]
    assert all(c.evictions == c.tokens_seen - c.config.budget > 0 for c in caches)
    equal = make_prompt_cache(model, H2OConfig(budget=22))
    list(generate_step(prompt(60), model, max_tokens=20, prompt_cache=equal, prefill_step_size=STEP))
    assert sum(c.nbytes for c in caches) == sum(c.nbytes for c in equal)


@pytest.mark.parametrize(
    ("config", "kind", "message"),
    [
        ([H2OConfig()] * 2, ValueError, r"of which this model has 3, got 2: pyramid\(config, 3\)"),
        ([], ValueError, "of which this model has 3, got 0"),
        ([H2OConfig(), 64, H2OConfig()], TypeError, "config must be an H2OConfig, got"),
        ("512", TypeError, "config must be an H2OConfig, got '512'"),
        (
            [H2OConfig(), H2OConfig(), H2OConfig(positions="rolling")],
            ValueError,
            r"layers differ in budget, .* alone, got positions='original', 'rolling': .* positions='original'",
        ),
        ([H2OConfig(queries="key"), H2OConfig(), H2OConfig()], ValueError, "alone, got queries='key', 'true'"),
        (
            [H2OConfig(evict_during_prefill=False), H2OConfig(), H2OConfig()],
            ValueError,
            "alone, got evict_during_prefill=False, True",
        ),
    ],
    ids=str,
)
def test_a_list_that_does_not_fit_is_refused(model, config, kind, message):
    assert bounded_layers(model) == 3
    with pytest.raises(kind, match=message):
        make_prompt_cache(model, config)


def test_where_mlx_lms_own_attention_decides_all_layers_hold_as_many():
    args = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}
    args |= {"rms_norm_eps": 1e-5, "vocab_size": 64, "num_key_value_heads": 2}
    capped = gemma2.Model(gemma2.ModelArgs(model_type="gemma2", **args))
    config = H2OConfig(queries="key")
    with pytest.raises(ValueError, match=r"all layers and heads of gemma2 .* code of its own.*one configuration for"):
        make_prompt_cache(capped, pyramid(config, 2))
    assert len(make_prompt_cache(capped, [config, config])) == 2


@pytest.mark.parametrize("queries", ["true", "key"])
@pytest.mark.parametrize("positions", ["original", "rolling"])
def test_a_batch_gives_each_prompt_what_it_gets_alone(model, tiny_folder, queries, positions):
    """The model makes one mask from its first layer, whose rows are neither those of the others nor as uneven."""
    base = H2OConfig(budget=24, n_sink=1, grace=2, queries=queries, positions=positions)
    configs = [H2OConfig(**{**vars(base), "budget": budget}) for budget in (8, 40, 20)]
    prompts, n = [prompt(length).tolist() for length in (3, 30, 12, 50)], 16
    alone = []
    for tokens in prompts:
        caches = make_prompt_cache(model, configs)
        steps = generate_step(mx.array(tokens), model, max_tokens=n, prompt_cache=caches, prefill_step_size=STEP)
        alone.append([token for token, _ in steps])
        assert all(c.tokens_kept == min(c.config.budget, c.tokens_seen) for c in caches)
    install(model, configs)
    try:
        settings = {"max_tokens": n, "return_token_ids": True, "return_prompt_caches": True, "prefill_step_size": STEP}
        results = batch_generate(model, load(str(tiny_folder))[1], prompts, **settings)
    finally:
        uninstall(model)
    for got, expected, caches in zip(results.token_ids, alone, results.caches, strict=True):
        assert got == expected[: len(got)]
        assert [c.tokens_kept for c in caches] == [min(c.config.budget, c.tokens_seen) for c in caches]
    assert max(map(len, results.token_ids)) == n


def test_mlxs_attention_gets_each_layers_own_mask(model, monkeypatch):
    """With a GPU, ``queries="key"`` leaves attention to mlx: its mask is the layer's, not the model's first."""
    configs = [H2OConfig(budget=budget, n_sink=1, grace=2, queries="key") for budget in (6, 40, 20)]

    def logits():
        alone = [make_prompt_cache(model, configs) for _ in range(2)]
        for caches, n in zip(alone, (10, 25), strict=True):
            model(prompt(n)[None], cache=caches)
        merged = [H2OKVCache.merge(list(pair)) for pair in zip(*alone, strict=True)]
        assert merged[0].make_mask(1) is None
        assert merged[1].make_mask(1) is not None
        return model(mx.array([[5], [7]]), cache=merged), model(mx.array([[5, 6], [7, 8]]), cache=merged)

    expected = logits()
    monkeypatch.setattr(attention, "_on_cpu", lambda: False)
    for got, want in zip(logits(), expected, strict=True):
        assert mx.allclose(got, want, atol=1e-4)
