"""Quantised rows in the real models: what they cost beside plain ones, on text, past the budget."""

import mlx.core as mx
import pytest

from h2o_mlxlm import H2OConfig, H2OKVCache, make_prompt_cache

from .conftest import texts

BUDGET, CONTEXT, SCORED = 64, 160, 24


def lost(model, **how):
    """Mean loss of the scored tokens over all texts, one token a call, and bytes held."""
    rows = mx.array([model.tokenizer.encode(text)[: CONTEXT + SCORED + 1] for text in texts().values()])
    caches = make_prompt_cache(model.model, H2OConfig(budget=BUDGET), **how)
    model.model.model(rows[:, :CONTEXT], cache=caches)
    mx.eval([c.state for c in caches])
    losses = []
    for at in range(CONTEXT, CONTEXT + SCORED):
        logits = model.model(rows[:, at : at + 1], cache=caches)[:, 0]
        losses.append(mx.logsumexp(logits, -1) - mx.take_along_axis(logits, rows[:, at + 1, None], -1)[:, 0])
        mx.eval(losses[-1])
    assert all(type(c) is H2OKVCache and c.tokens_kept == BUDGET for c in caches)
    assert caches[0].evictions == CONTEXT + SCORED - BUDGET
    return mx.stack(losses).mean().item(), sum(c.nbytes for c in caches)


@pytest.fixture(scope="module")
def plain(model):
    return lost(model)


# The loss of the same budget in float32, and bytes beside it.
@pytest.mark.parametrize(
    ("how", "more", "share"),
    [
        ({"kv_bits": 8}, 0.04, 0.32),
        ({"kv_bits": 4, "kv_group_size": 32, "kv_quantizer": "kivi"}, 0.1, 1.0),
    ],
    ids=["8 bits", "kivi"],
)
def test_loss_is_close_to_that_of_plain_rows(model, plain, how, more, share):
    loss, held = lost(model, **how)
    print(how, loss - plain[0], held / plain[1])
    assert abs(loss - plain[0]) < more
    assert held < share * plain[1]
