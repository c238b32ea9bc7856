"""Speculative decoding by mlx_lm on our caches: the tokens of the same cache without a draft, or a refusal."""

import sys

import mlx.core as mx
import mlx_lm
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache

from h2o_mlxlm import H2OConfig, H2OKVCache, install, load, make_prompt_cache, uninstall
from h2o_mlxlm.speculative import speculative_generate_step

N_TOKENS = 30
NEAR = 1e-3  # logits of the best two this near may change places: rows of another number are summed in another order
CHANGES = {
    "plain": {},
    "two quotas": {"decay": 0.9, "long_share": 0.5},
    "held": {"evict_during_prefill": False},
    "rolling": {"positions": "rolling"},
    "auto": {"positions": "auto", "trained_length": 48},
}


def config(rewind, budget=16, **changes):
    return H2OConfig(budget, n_sink=2, grace=4, rewind=rewind, **changes)


def joined(caches):
    """The caches of both models in one list, as mlx_lm takes them."""
    return [c for own in caches for c in own]


def alone(model, caches, prompt, step=16):
    """Greedy tokens, and by how much each was the best."""
    tokens, leads = [], []
    for token, logprobs in generate_step(
        prompt, model, max_tokens=N_TOKENS, prompt_cache=caches, prefill_step_size=step
    ):
        best = mx.sort(logprobs)[-2:].tolist()
        tokens.append(int(token))
        leads.append(best[1] - best[0])
    return tokens, leads


def drafted(model, draft, caches, prompt, n, step=16):
    """Greedy tokens, and which of them were drafted."""
    steps = speculative_generate_step(
        prompt,
        model,
        draft,
        num_draft_tokens=n,
        max_tokens=N_TOKENS,
        prompt_cache=caches,
        prefill_step_size=step,
    )
    found = [(int(token), from_draft) for token, _, from_draft in steps]
    return [t for t, _ in found], [d for _, d in found]


def same_until_a_near_tie(ours, expected, leads):
    """Compare two texts; where they part, the best two logits must have been near each other."""
    for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
        if a != b:
            print(f"near-tie at token {i}: {a} for {b}, ahead by {leads[i]:.1e}")
            return leads[i] < NEAR
    return True


@pytest.fixture(scope="module")
def models(make_model):
    """A model, and one that drafts: the same but for noise, so that it is right some of the time."""
    model, draft = make_model(num_hidden_layers=3), make_model(num_hidden_layers=3)
    for layer in draft.layers:
        w = layer.mlp.down_proj.weight
        layer.mlp.down_proj.weight = w + mx.random.normal(w.shape, key=mx.random.key(5)) * 0.03
    return model, draft


@settings(deadline=None, max_examples=15, derandomize=True)
@given(
    n=st.integers(1, 4),
    more=st.integers(0, 2),
    length=st.integers(1, 50),
    seed=st.integers(0, 1000),
    name=st.sampled_from(list(CHANGES)),
)
def test_a_draft_changes_no_token(models, n, more, length, seed, name):
    prompt = mx.random.randint(3, 260, (length,), key=mx.random.key(seed))
    model, draft = models
    chosen = config(n + more, **CHANGES[name])
    expected, leads = alone(model, make_prompt_cache(model, chosen), prompt)
    caches = [make_prompt_cache(m, chosen) for m in models]
    tokens, _ = drafted(model, draft, joined(caches), prompt, n)
    assert same_until_a_near_tie(tokens, expected, leads)
    assert {c.tokens_seen for c in caches[0]} <= {length + N_TOKENS - 1, length + N_TOKENS}
    assert all(c.tokens_kept == 16 and c.evictions == c.tokens_seen - 16 > 0 for c in joined(caches))


def test_what_is_drafted_is_partly_taken_and_as_much_is_taken_back(models, monkeypatch):
    """Up to all drafted tokens from the model's cache, one fewer from the draft's, which never saw the last."""
    trimmed, trim = {}, H2OKVCache.trim

    def watched(self, n):
        trimmed.setdefault(id(self), []).append(n)
        return trim(self, n)

    monkeypatch.setattr(H2OKVCache, "trim", watched)
    model, draft = models
    caches = [make_prompt_cache(m, config(4)) for m in models]
    _, from_draft = drafted(model, draft, joined(caches), mx.arange(3, 33), 4)
    assert 5 < sum(from_draft) < N_TOKENS - 5
    of_model, of_draft = (trimmed[id(own[0])] for own in caches)
    assert (max(of_model), max(of_draft)) == (4, 3)
    assert sum(n > 0 for n in of_model) > 2


@pytest.mark.parametrize("n_tokens", [15, 16, 17])
def test_the_caches_go_on_where_the_text_is_broken_off(models, n_tokens):
    """They have seen what came out and no more, so the next token is what it would have been."""
    prompt, chosen = mx.arange(3, 33), config(3)
    expected, _ = alone(models[0], make_prompt_cache(models[0], chosen), prompt, 512)
    caches = [make_prompt_cache(m, chosen) for m in models]
    steps = speculative_generate_step(prompt, *models, num_draft_tokens=3, prompt_cache=joined(caches))
    out = [next(steps) for _ in range(n_tokens)]
    steps.close()
    assert [int(token) for token, *_ in out] == expected[:n_tokens]
    # What the model found itself, it has not been given yet.
    own = not out[-1][2]
    for of_model, of_draft in zip(*caches, strict=True):
        assert of_model.tokens_seen == 30 + n_tokens - own
        assert of_draft.tokens_seen in (of_model.tokens_seen, of_model.tokens_seen - 1)
        if not own:
            of_model.trim(1)
    logits = models[0](mx.array([expected[n_tokens - 1 : n_tokens]]), cache=caches[0])
    assert logits[0, -1].argmax().item() == expected[n_tokens]


@pytest.mark.parametrize(
    ("of_model", "of_draft", "n"), [(0, 0, 2), (2, 0, 2), (0, 2, 2), (2, 1, 2), (1, 2, 2), (2, 2, 3)]
)
def test_a_cache_that_takes_back_too_few_is_refused_at_the_start(models, of_model, of_draft, n):
    caches = [c for m, r in zip(models, (of_model, of_draft), strict=True) for c in make_prompt_cache(m, config(r))]
    with pytest.raises(ValueError, match=f"num_draft_tokens={n} and a cache with rewind=.*rewind={n}"):
        speculative_generate_step(mx.arange(9), *models, num_draft_tokens=n, prompt_cache=caches)
    assert all(c.empty() for c in caches)


def test_mlx_lms_own_entry_points_refuse_it_too(models, tiny_folder):
    """Caches that are installed on the model or on the draft, and mlx_lm makes itself."""
    model, draft = models
    tokenizer = load(str(tiny_folder))[1]
    for wrong in (model, draft):
        install(model, config(3))
        install(draft, config(3))
        install(wrong, config(0))
        try:
            with pytest.raises(ValueError, match=r"num_draft_tokens=2 and a cache with rewind=0.*rewind=2"):
                mlx_lm.generate(model, tokenizer, "hello", draft_model=draft, max_tokens=5)
        finally:
            uninstall(model)
            uninstall(draft)


def test_caches_of_others_are_none_of_its_business(models, tiny_folder):
    """mlx_lm's function, with its own caches, as it was: and the check is in its place once."""
    make_prompt_cache(models[0], config(0))
    assert sys.modules["mlx_lm.generate"].speculative_generate_step is speculative_generate_step
    model, draft = models
    tokenizer = load(str(tiny_folder))[1]
    one = mlx_lm.generate(model, tokenizer, "hello", draft_model=draft, max_tokens=9)
    assert one == mlx_lm.generate(model, tokenizer, "hello", max_tokens=9)
    caches = [*make_prompt_cache(model, config(2)), *[KVCache() for _ in draft.layers]]
    assert len(list(speculative_generate_step(mx.arange(9), *models, max_tokens=9, prompt_cache=caches))) == 9


def test_installed_caches_serve_both(models, tiny_folder):
    model, draft = models
    tokenizer = load(str(tiny_folder))[1]
    texts = []
    for m in models:
        install(m, config(3))
    try:
        for extra in ({}, {"draft_model": draft, "num_draft_tokens": 3}):
            texts.append(mlx_lm.generate(model, tokenizer, "hello world " * 9, max_tokens=30, **extra))
    finally:
        for m in models:
            uninstall(m)
    assert texts[0] == texts[1]
