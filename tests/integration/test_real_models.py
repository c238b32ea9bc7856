"""What holds for every real model: text, loss, embeddings, threads, ragged budgets, kernels."""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.models.cache import make_prompt_cache as plain_cache

import h2o_metal.kernel
import mslemu
from h2o_metal.kernel import launches
from h2o_mlxlm import (
    H2OConfig,
    bounded_layers,
    calibrated_config,
    calibrated_layers,
    install,
    make_prompt_cache,
    pyramid,
    uninstall,
)

from .conftest import MISTRAL, least_variety, prompt_of, texts, windows

UNIGRAM = 5.55  # loss on scripture.txt of the best guess that looks at nothing, in the small model's tokens


def generated(model, prompt, n, **settings):
    return [token for token, _ in generate_step(prompt, model.model, max_tokens=n, **settings)]


@pytest.mark.parametrize("config", [H2OConfig(budget=1024), H2OConfig(budget=1024, positions="rolling")], ids=str)
def test_with_room_for_all_the_text_is_mlx_lms_own(model, config):
    prompt = prompt_of(model)
    expected = generated(model, prompt, 200)
    install(model.model, config)
    try:
        ours = generated(model, prompt, 200)
    finally:
        uninstall(model.model)
    assert len(ours) == 200
    assert ours == expected


def sizes(model):
    """Tokens of context, scored tokens and budget, by what the model was trained for."""
    context = min(1024, model.model.args.max_position_embeddings // 2)
    return context, context // 8, context // 8


def losses(model, caches, one_by_one=True):
    """Mean loss of the scored tokens of each text, in nats, fed one token per call."""
    context, scored, _ = sizes(model)
    rows = windows(model, context + scored + 1)
    for start in range(0, context, 512):
        model.model.model(rows[:, start : min(start + 512, context)], cache=caches)  # without logits, half the work
        mx.eval([c.state for c in caches])
    step, lost = (1 if one_by_one else scored), []
    for start in range(context, context + scored, step):
        logits = model.model(rows[:, start : start + step], cache=caches)
        target = rows[:, start + 1 : start + step + 1, None]
        lost.append(mx.logsumexp(logits, -1) - mx.take_along_axis(logits, target, -1)[..., 0])
        mx.eval(lost[-1])
    return mx.concatenate(lost, axis=1).mean(axis=1)


def test_loss_lies_between_the_full_cache_and_recency_where_context_matters(model):
    """The short form of ``h2o-mlxlm eval loss``, written without it."""
    context, scored, budget = sizes(model)
    # Nothing is ever evicted, so one call for all scored tokens gives what one token per call does.
    full = losses(model, plain_cache(model.model), one_by_one=False)
    caches = make_prompt_cache(model.model, H2OConfig(budget=budget))
    ours = losses(model, caches) - full
    recency = losses(model, [RotatingKVCache(budget, keep=4) for _ in model.model.layers]) - full
    print(f"\n{model.name}: full {full.mean().item():.3f}; loss above full at a budget of {budget}, each row and mean")
    for name, row in (("H2O", ours), ("recency", recency)):
        print(f"{name:>9} " + " ".join(f"{x:.3f}" for x in [*row.tolist(), row.mean().item()]))
    assert all(c.evictions == context + scored - budget for c in caches)
    if model.name == "mistral":
        # So small a model looks at little but its last words: recency costs it nothing (0.00), H2O a little (0.08).
        assert abs(recency.mean().item()) < 0.05
        assert 0 < ours.mean().item() < 0.15
        assert full.mean().item() < UNIGRAM - 1
    else:
        assert 0 < ours.mean().item() < recency.mean().item()
        config = calibrated_config(budget)
        by_layers = make_prompt_cache(model.model, calibrated_layers(model.model, config))
        by_heads = make_prompt_cache(model.model, config, heads="calibrated")
        of_layers, of_heads = ((losses(model, c) - full).mean().item() for c in (by_layers, by_heads))
        for by_need in (by_layers, by_heads):
            held = sum((c.kept_positions >= 0).sum().item() for c in by_need)
            assert held <= sum((c.kept_positions >= 0).sum().item() for c in caches)
        print(f"by layers {of_layers:.3f}, by heads {of_heads:.3f}")
        # Needs were measured on other texts.
        assert min(of_heads, of_layers) > 0
        assert max(of_heads, of_layers) < 0.7 * ours.mean().item()


def test_a_prompt_of_embeddings_is_the_prompt_of_its_tokens(model):
    prompt, config = prompt_of(model), H2OConfig(budget=24, n_sink=2, grace=6)
    embeddings = model.model.model.embed_tokens(prompt)
    runs = []
    for tokens, given in ((prompt, {}), (mx.array([], mx.int32), {"input_embeddings": embeddings})):
        caches = make_prompt_cache(model.model, config)
        text = generated(model, tokens, 12, prompt_cache=caches, prefill_step_size=16, **given)
        assert all(c.evictions == len(prompt) + 12 - 24 > 0 for c in caches)
        runs.append((text, [c.kept_positions.tolist() for c in caches]))
    assert runs[0] == runs[1]


def test_two_threads_do_not_mix(model):
    prompt = prompt_of(model)

    def run(start):
        caches = make_prompt_cache(model.model, H2OConfig(budget=16, n_sink=2, grace=4))
        text = generated(model, prompt[start:], 10, prompt_cache=caches)
        assert caches[0].evictions > 0
        return text, [c.kept_positions.tolist() for c in caches]

    expected = [run(0), run(5)]
    assert expected[0] != expected[1]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, (0, 5))) == expected


def prose(model, n):
    return mx.array(model.tokenizer.encode(texts()["prose"][:2000])[:n])


@pytest.mark.parametrize("shape", ["pyramid", "adaptive"])
def test_ragged_budgets_add_up(model, shape):
    config, n_heads = H2OConfig(budget=64), model.model.args.num_key_value_heads
    n_layers = bounded_layers(model.model)
    given = pyramid(config, n_layers) if shape == "pyramid" else config
    caches = make_prompt_cache(model.model, given, heads="adaptive" if shape == "adaptive" else "equal")
    new = generated(model, prose(model, 150), 24, prompt_cache=caches)
    print(model.tokenizer.decode(new))
    assert len(new) == 24
    if model.name == "smollm2":  # the small one repeats itself with any cache
        assert least_variety(new, window=24) >= 0.5
    held = [(c.kept_positions[0] >= 0).sum(axis=-1).tolist() for c in caches]
    assert sum(map(sum, held)) == n_layers * n_heads * 64
    assert all(c.tokens_seen >= 173 for c in caches)
    if shape == "adaptive":
        assert {sum(heads) for heads in held} == {n_heads * 64}
        assert sum(len(set(heads)) > 1 for heads in held) > n_layers / 2
    else:
        assert held == sorted(held, reverse=True)
        assert held[0][0] > 1.5 * held[-1][0]


def test_kernels_give_the_references_tokens(model, monkeypatch):
    """The text of the Metal kernels, on the emulator: one launch a layer and decode step."""
    monkeypatch.setattr(h2o_metal.kernel, "builder", mslemu.metal_kernel)
    prompt, tokens = prose(model, 40), {}
    for backend in ("reference", "metal"):
        caches = make_prompt_cache(model.model, H2OConfig(budget=24), backend=backend)
        with launches() as ran:
            steps = generate_step(prompt, model.model, max_tokens=8, prompt_cache=caches)
            tokens[backend] = [int(token) for token, _ in islice(steps, 4)]
        assert caches[0].evictions >= 15
    assert tokens["metal"] == tokens["reference"]
    n_layers = len(caches)
    assert {name: ran.count(name) / n_layers for name in set(ran)} == {
        "h2o_softmax_rows": 1,
        "h2o_column_mass": 1,
        "h2o_evict": 1,
        "h2o_decode": caches[0].tokens_seen - (len(prompt) - 1),
    }


def test_the_small_model_writes_like_its_book(mistral):
    """Sampled, far past the budget: greedy, so small a model repeats itself with any cache."""
    caches = make_prompt_cache(mistral.model, H2OConfig(budget=48))
    mx.random.seed(0)
    tokens = mx.repeat(prompt_of(mistral)[None], 8, axis=0)
    written = []
    for _ in range(160):
        tokens = mx.random.categorical(mistral.model(tokens, cache=caches)[:, -1] / 0.8)[:, None]
        written.append(tokens)
    rows = mx.concatenate(written, axis=1).tolist()
    assert all(c.tokens_kept == 48 and c.evictions > 100 for c in caches)
    known = set(re.findall(r"[A-Za-z]+", texts()["scripture"]))
    # The first and the last word may be cut.
    words = [word for row in rows for word in re.findall(r"[A-Za-z]+", mistral.tokenizer.decode(row))[1:-1]]
    print(mistral.tokenizer.decode(rows[0]))
    share = sum(word in known for word in words) / len(words)
    print(f"{share:.2f} of {len(words)} words are in Genesis, {len(set(words))} different ones")
    assert share > 0.7
    assert len(set(words)) > 100


def test_models_named_in_the_environment_are_tested_too(tmp_path):
    other = shutil.copytree(MISTRAL, tmp_path / "other")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", "-rA", __file__]
    command += ["-k", "embeddings and other"]
    environment = os.environ | {"H2O_TEST_MODELS": str(other)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    test = test_a_prompt_of_embeddings_is_the_prompt_of_its_tokens.__name__
    assert f"PASSED tests/integration/test_real_models.py::{test}[{other}]" in done.stdout
