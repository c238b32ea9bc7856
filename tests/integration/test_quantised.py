"""Quantised rows in the real models: what they cost beside plain ones, on text, past the budget."""

import mlx.core as mx
import pytest

from h2o_mlxlm import H2OConfig, H2OKVCache, make_prompt_cache

from .conftest import windows

BUDGET, CONTEXT, SCORED = 64, 160, 24


def lost(model, **how):
    """Mean loss of the scored tokens over all texts, one token a call, and bytes held."""
    rows = windows(model, CONTEXT + SCORED + 1)
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


# How far from the loss of the same budget in float32, and the share of its bytes, for heads of 64 and of 32. Scale and
# offset of a group are 1 more bit a number in groups of 64, 2 in groups of 32.
@pytest.mark.parametrize(
    ("how", "more", "share"),
    [
        ({"kv_bits": 8}, 0.04, {64: 0.32, 32: 0.35}),
        ({"kv_bits": 4, "kv_group_size": 32, "kv_quantizer": "kivi"}, 0.1, {64: 1.0, 32: 1.0}),
    ],
    ids=["8 bits", "kivi"],
)
def test_loss_is_close_to_that_of_plain_rows(model, plain, how, more, share):
    group = min(64, model.model.args.head_dim)
    loss, held = lost(model, **{"kv_group_size": group} | how)
    print(how, loss - plain[0], held / plain[1])
    assert abs(loss - plain[0]) < more
    assert held < share[group] * plain[1]
