"""What is made for scorers with a model, against numpy and the model's own modules in its first layer."""

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import pytest

from h2o_core import H2OConfig
from h2o_core.scorer import Scorer
from h2o_mlxlm import inputs
from h2o_mlxlm.inputs import inputs_from, query_filters, query_statistics, reconstruction

TOKENS = [5 + i * i % 90 for i in range(30)]
HEADS, KV_HEADS, WIDTH = 4, 2, 16


@pytest.fixture(scope="module")
def model(make_model):
    return make_model()


def first_layer(model, tokens):
    """Queries and keys of the first layer before their rotation, and the module that rotates them."""
    layer = model.layers[0]
    x = layer.input_layernorm(model.model.embed_tokens(mx.array([tokens])))
    attention = layer.self_attn
    q, k = (
        project(x).reshape(len(tokens), heads, WIDTH).swapaxes(0, 1)[None]
        for project, heads in ((attention.q_proj, HEADS), (attention.k_proj, KV_HEADS))
    )
    return q, k, attention.rope, attention.scale


def test_filters_are_singular_vectors_that_point_where_queries_do(model):
    q, _, rope, _ = first_layer(model, TOKENS)
    each = []
    for head in np.array(rope(q)[0], np.float64):
        first = np.linalg.svd(head)[2][0]
        each.append(first * np.sign((head @ first).mean()))
    expected = np.array(each).reshape(KV_HEADS, HEADS // KV_HEADS, WIDTH).mean(axis=1)
    found = query_filters(model, TOKENS)
    assert [x["filters"].shape for x in found] == [(KV_HEADS, WIDTH)] * 2
    assert np.allclose(found[0]["filters"], expected, atol=1e-4)


@pytest.mark.parametrize("start", [None, 7])
def test_statistics_are_those_of_queries_at_positions_to_come(model, start):
    q, _, rope, scale = first_layer(model, TOKENS)
    rows = np.array(q[0], np.float64)
    places = range(len(TOKENS) if start is None else start, (len(TOKENS) if start is None else start) + 40)
    # What the model's module makes of each unit vector, on average over the positions.
    units = mx.eye(WIDTH)[None, :, None]
    turned = np.mean([np.array(rope(units, offset=p)[0, :, 0], np.float64) for p in places], axis=0)
    (found, _) = query_statistics(model, TOKENS, ahead=40, start=start)
    for h in range(HEADS):
        assert np.allclose(found["query_mean"][h], scale * rows[h].mean(axis=0) @ turned, atol=1e-4)
        cov = np.cov(rows[h], rowvar=False, bias=True)
        assert np.allclose(found["query_cov"][h], scale**2 * turned.T @ cov @ turned, atol=1e-4)


def test_a_token_counts_by_the_most_that_a_repetition_gave_it(model):
    cue = [7, 8]
    q, k, rope, scale = first_layer(model, [*TOKENS, *cue, *TOKENS])
    q, k = (np.array(rope(x)[0], np.float64) for x in (q, k))
    n = len(TOKENS)
    expected = np.zeros((KV_HEADS, n))
    for h in range(HEADS):
        for i in range(n + len(cue), 2 * n + len(cue)):
            logits = scale * k[h // 2, : i + 1] @ q[h, i]
            p = np.exp(logits - logits.max())
            expected[h // 2] = np.maximum(expected[h // 2], (p / p.sum())[:n])
    found = reconstruction(model, TOKENS, cue)
    assert [x["reconstruction"].shape for x in found] == [(KV_HEADS, n)] * 2
    assert np.allclose(found[0]["reconstruction"], expected, atol=1e-5)


def test_a_long_repetition_goes_in_blocks(model, monkeypatch):
    whole = reconstruction(model, TOKENS)[1]["reconstruction"]
    monkeypatch.setattr("h2o_core.rows.BLOCK_ELEMENTS", 1000)
    assert mx.allclose(reconstruction(model, TOKENS)[1]["reconstruction"], whole, atol=1e-6)


def same(made, expected):
    pairs = zip(made, expected, strict=True)
    return all(a.keys() == b.keys() and all(mx.array_equal(a[n], b[n]) for n in a) for a, b in pairs)


def test_a_prompt_makes_what_its_scorer_needs(model):
    assert inputs_from(model, TOKENS, H2OConfig(scorer="tova")) is None
    assert same(inputs_from(model, TOKENS, H2OConfig(scorer="qfilters")), query_filters(model, TOKENS))
    assert same(inputs_from(model, TOKENS, H2OConfig(scorer="kvzip")), reconstruction(model, TOKENS))
    for positions, start in (("original", None), ("rolling", 40)):
        config = H2OConfig(40, positions=positions, scorer="expected_attention")
        assert same(inputs_from(model, TOKENS, config), query_statistics(model, TOKENS, start=start))


@dataclass(frozen=True)
class Told(Scorer):
    name: str = field(default="told", init=False)

    @property
    def needs(self):
        return frozenset({"rumours"})


def test_what_cannot_be_made_says_so(model, monkeypatch):
    with pytest.raises(ValueError, match="made from a text, got no token"):
        query_filters(model, [])
    with pytest.raises(ValueError, match="ahead must be at least 1 and start at least 0, got ahead=0, start=30"):
        query_statistics(model, TOKENS, ahead=0)
    with pytest.raises(ValueError, match="scorer 'told' needs rumours, which can't be made from a prompt here"):
        inputs_from(model, TOKENS, H2OConfig(scorer=Told()))
    with monkeypatch.context() as patch:
        patch.setattr(inputs, "ropes_of", lambda layer: [])
        with pytest.raises(ValueError, match=r"the one rotary embedding of each layer, found \[0, 0\] in llama"):
            query_statistics(model, TOKENS)
    monkeypatch.setitem(inputs.NO_ROLLING, "llama", "scales queries by their position")
    with pytest.raises(ValueError, match="positions to come, but llama scales queries by their position: use another"):
        query_statistics(model, TOKENS)
