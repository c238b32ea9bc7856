"""Text far beyond the length a model was trained for: a small model, trained here for 64 positions."""

from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
import pytest
from mlx_lm.models import llama

from h2o_mlxlm import H2OConfig, make_prompt_cache

from .conftest import TEXTS

TRAINED, TOKENS, STEP = 64, 1024, 4


@pytest.fixture(scope="module")
def text():
    # So little that a few hundred steps teach it.
    prose, scripture = ((TEXTS / f"{kind}.txt").read_bytes() for kind in ("prose", "scripture"))
    return mx.array(list(prose[prose.index(b"Sir Walter") :][:9304] + scripture[:8866]))


@pytest.fixture(scope="module")
def model(text):
    mx.random.seed(0)
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=256,
        max_position_embeddings=TRAINED,
        rope_theta=1000.0,
    )
    made = llama.Model(args)
    optimizer = optimizers.AdamW(3e-3)
    step = nn.value_and_grad(made, lambda m, x: nn.losses.cross_entropy(m(x[:, :-1]), x[:, 1:], reduction="mean"))

    @partial(mx.compile, inputs=[made.state, optimizer.state], outputs=[made.state, optimizer.state])
    def train(rows):
        loss, gradient = step(made, rows)
        optimizer.update(made, gradient)
        return loss

    for _ in range(300):
        starts = mx.random.randint(0, text.size - TRAINED - 1, (32, 1))
        mx.eval(train(text[starts + mx.arange(TRAINED + 1)]), made.state)
    return made


def losses(model, text, positions):
    """Loss from the trained length to the middle of the text, and from there; where the caches turned."""
    # A decay that keeps rows from further back than the model was trained for: near ones never fail.
    config = H2OConfig(budget=32, n_sink=2, grace=8, decay=0.98, positions=positions)
    caches = make_prompt_cache(model, config)
    lost, turned = [], None
    for start in range(0, TOKENS, STEP):
        logits = model(text[None, start : start + STEP], cache=caches)[0]
        lost.append(nn.losses.cross_entropy(logits, text[start + 1 : start + STEP + 1]))
        mx.eval(lost[-1], [c.state for c in caches])
        if turned is None and caches[0].offset != caches[0].tokens_seen:
            turned = caches[0].tokens_seen
    assert all(c.tokens_kept == 32 and c.evictions == TOKENS - 32 for c in caches)
    lost = mx.concatenate(lost)
    return lost[TRAINED : TOKENS // 2].mean().item(), lost[TOKENS // 2 :].mean().item(), turned


def test_only_rolling_positions_outlast_the_trained_length(model, text):
    *original, _ = losses(model, text, "original")
    *rolling, _ = losses(model, text, "rolling")
    *auto, turned = losses(model, text, "auto")
    for name, (first, second) in {"original": original, "rolling": rolling, "auto": auto}.items():
        print(f"{name:>9}: loss {first:.2f}, then {second:.2f}")
    # At 64 tokens a call of 4, the largest so far, would go beyond; at 60 it still fits.
    assert turned == TRAINED
    assert original[1] > rolling[1] + 0.7
    # The text gets no harder: what original loses by going on, rolling does not.
    assert original[1] - original[0] > 0.3
    assert rolling[1] - rolling[0] < (original[1] - original[0]) / 2
    assert all(abs(a - r) < 0.05 for a, r in zip(auto, rolling, strict=True))
