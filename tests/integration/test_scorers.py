"""Every scorer of core's on the real models, past the budget."""

import mlx.core as mx
import pytest

from h2o_core.scorer import scorer_from, scorer_names
from h2o_mlxlm import H2OConfig, make_prompt_cache
from h2o_mlxlm.inputs import inputs_from

from .conftest import texts

# As many of its parameters as a short text needs to show them.
SMALL = {"snapkv": "snapkv window=8", "morphkv": "morphkv window=8", "keyformer": "keyformer span=32"}
PROMPT, BUDGET, STEPS = 48, 20, 3


@pytest.fixture(scope="module")
def generated(model):
    """Greedy tokens and the caches after them, by scorer; each once."""
    tokens = model.tokenizer.encode(texts()["prose"][:1000])[:PROMPT]
    made = {}

    def generated(scorer):
        if scorer in made:
            return made[scorer]
        config = H2OConfig(budget=BUDGET, n_sink=2, grace=4, scorer=scorer_from(scorer))
        caches = make_prompt_cache(model.model, config, inputs=inputs_from(model.model, tokens, config))
        model.model(mx.array([tokens[:-1]]), cache=caches)
        out = [tokens[-1]]
        for _ in range(STEPS):
            out.append(mx.argmax(model.model(mx.array([out[-1:]]), cache=caches)[:, -1], axis=-1).item())
        made[scorer] = out, caches
        return made[scorer]

    return generated


def kept(caches):
    return mx.stack([c.kept_positions for c in caches])


@pytest.mark.parametrize("name", scorer_names())
def test_it_generates_past_the_budget(model, name, generated):
    out, caches = generated(SMALL.get(name, name))
    seen = PROMPT + STEPS - 1
    assert {(c.tokens_kept, c.evictions) for c in caches} == {(BUDGET, seen - BUDGET)}
    assert all(0 <= token < model.model.args.vocab_size for token in out)
    positions = kept(caches)
    # Sinks and the newest stay, whatever scores.
    assert mx.array_equal(positions[..., :2], mx.broadcast_to(mx.arange(2), (*positions.shape[:-1], 2)))
    assert (positions[..., -4:] == mx.arange(seen - 4, seen)).all()
    if name not in ("h2o", "cam"):
        assert not mx.array_equal(positions, kept(generated("h2o")[1]))
    if name == "streaming_llm":
        assert (positions[..., 2:] == mx.arange(seen - BUDGET + 2, seen)).all()


def test_merged_values_are_others_in_the_same_rows(generated):
    ours, h2o = generated("cam")[1], generated("h2o")[1]
    assert mx.array_equal(ours[0].kept_positions, h2o[0].kept_positions)
    assert mx.array_equal(ours[0].keys, h2o[0].keys)
    assert not mx.array_equal(ours[0].values, h2o[0].values)


@pytest.mark.parametrize("scorer", ["cam merge=drop", "keyformer tau=0.0"])
def test_two_scorers_have_h2o_in_them_bit_for_bit(scorer, generated):
    (tokens, ours), (expected, h2o) = generated(scorer), generated("h2o")
    assert tokens == expected
    for a, b in zip(ours, h2o, strict=True):
        assert mx.array_equal(a.kept_positions, b.kept_positions)
        assert mx.array_equal(a.scores, b.scores)
        assert mx.array_equal(a.values, b.values)
