"""The real models in batches: each request gets the tokens that it gets alone, and each head keeps the same."""

import copy
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import batch_generate
from mlx_lm.generate import BatchGenerator, GenerationBatch

from h2o_core.conformance import TOLERANCE, Row, same_choice
from h2o_mlxlm import H2OConfig, H2OKVCache, install, make_prompt_cache, uninstall

STEP = 32
# How far apart the same token's log probability may lie: sums in float32 through 30 layers, in another order.
LOGPROB = 1e-3
REQUESTS = [
    ("Name three rivers.", 40),
    ("Explain how a bill becomes a law in the United States, stage by stage.", 28),
    (
        "A farmer has twelve sheep and nine cows. In spring four lambs are born, and he sells a third of the cows. "
        * 2,
        16,
    ),
    ("Write the first two sentences of a story about a lighthouse keeper and a storm that lasts a week.", 24),
]


class Look(NamedTuple):
    """What a sequence had after a token was fed, and what it expected next."""

    token: int
    logprobs: np.ndarray  # [vocabulary]
    seen: int
    positions: np.ndarray  # [layers, heads, kept]
    scores: np.ndarray
    totals: np.ndarray


def config_for(tokenizer):
    """64 tokens a head; fewer where a tokenizer's requests are so short that one would not go far past that."""
    shortest = min(len(p) + n for p, (_, n) in zip(prompts(tokenizer), REQUESTS, strict=True))
    return H2OConfig(budget=min(64, shortest - 10))


def prompts(tokenizer):
    messages = [[{"role": "user", "content": text}] for text, _ in REQUESTS]
    return [tokenizer.apply_chat_template(m, add_generation_prompt=True) for m in messages]


def looks(caches, tokens, logprobs):
    """A look at each sequence of a batch. Copies end their open call, the caches don't."""
    assert {type(c) for c in caches} == {H2OKVCache}
    copies = [copy.copy(c) for c in caches]
    arrays = [mx.stack([getattr(c, name) for c in copies], axis=1) for name in ("kept_positions", "scores", "totals")]
    mx.eval(arrays)
    arrays = [np.array(x) for x in arrays]
    seen, kept = (np.broadcast_to(np.array(x), len(tokens)) for x in (copies[0].tokens_seen, copies[0].tokens_kept))
    assert kept.max() <= copies[0].config.budget
    return [
        Look(token, np.array(logprobs[i]), int(seen[i]), *(x[i, ..., : kept[i]] for x in arrays))
        for i, token in enumerate(tokens)
    ]


@pytest.fixture(scope="module")
def alone(model):
    """Each request by itself: its looks, from the prompt's last token on."""
    config = config_for(model.tokenizer)
    return [
        run_alone(model.model, prompt, n, config)
        for prompt, (_, n) in zip(prompts(model.tokenizer), REQUESTS, strict=True)
    ]


def run_alone(model, prompt, n, config):
    caches, found = make_prompt_cache(model, config), []
    for at in range(0, len(prompt) - 1, STEP):
        model(mx.array([prompt[at : min(at + STEP, len(prompt) - 1)]]), cache=caches)
        mx.eval([c.state for c in caches])
    token = prompt[-1]
    for _ in range(n + 1):
        logits = model(mx.array([[token]]), cache=caches)[:, -1]
        found += looks(caches, [token], logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        token = int(found[-1].logprobs.argmax())
    return found


@pytest.fixture
def together(model, monkeypatch):
    """The looks at every sequence that runs in a batch, by its number."""
    found, step = {}, GenerationBatch._step

    def watched(batch):
        tokens, logprobs = step(batch)
        for uid, look in zip(batch.uids, looks(batch.prompt_cache, tokens, batch._next_logprobs), strict=True):
            found.setdefault(uid, []).append(look)
        return tokens, logprobs

    monkeypatch.setattr(GenerationBatch, "_step", watched)
    install(model.model, config_for(model.tokenizer))
    yield found
    uninstall(model.model)


def check(ours, theirs, name):
    """Equal until a near-tie, which ends the comparison and is named; looks compared until then."""
    for at, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a.token != b.token:
            gap = abs(theirs[at - 1].logprobs[a.token] - theirs[at - 1].logprobs[b.token])
            print(f"{name}: token {at} is a near-tie of {a.token} and {b.token}, {gap:.1e} apart")
            assert gap < 2 * LOGPROB
            return at
        assert a.seen == b.seen
        parted = [
            (layer, head) for layer, head in np.ndindex(a.positions.shape[:2]) if not same_head(a, b, layer, head)
        ]
        if parted:
            print(f"{name}: near-tie at token {at} in layer and head {parted}")
            return at
        assert np.allclose(a.scores, b.scores, atol=LOGPROB)
        assert np.allclose(a.logprobs, b.logprobs, atol=LOGPROB)
    return min(len(ours), len(theirs))


def same_head(a, b, layer, head):
    """Say whether a head keeps the same; if not, it must be by a near-tie."""
    rows = {}
    for look in (a, b):
        for p, score, total in zip(*(x[layer, head].tolist() for x in look[3:]), strict=True):
            rows[p] = Row(p, None, None, score, total)
    ours, theirs = (set(look.positions[layer, head].tolist()) for look in (a, b))
    assert same_choice(ours, theirs, rows, TOLERANCE[mx.float32])
    return ours == theirs


def check_all(together, alone, many, budget):
    for i, n in enumerate(many):
        # The prompt's last token, and each of the answer.
        assert len(together[i]) == n + 1
        compared = check(together[i], alone[i], f"request {i}")
        # A near-tie on another machine may end it early, but not before anything has gone.
        assert alone[i][compared - 1].seen > budget + 5


def test_batch_generate(model, alone, together):
    many, budget = [n for _, n in REQUESTS], config_for(model.tokenizer).budget
    results = batch_generate(
        model.model,
        model.tokenizer,
        prompts(model.tokenizer),
        max_tokens=many,
        return_token_ids=True,
        return_prompt_caches=True,
        prefill_step_size=STEP,
    )
    check_all(together, alone, many, budget)
    for i, caches in enumerate(results.caches):
        assert results.token_ids[i] == [look.token for look in together[i][1:]]
        last = together[i][-1]
        for layer, cache in enumerate(caches):
            assert (cache.tokens_seen, cache.tokens_kept) == (last.seen, budget)
            assert cache.evictions == last.seen - budget > 0
            assert np.array_equal(cache.kept_positions[0], last.positions[layer])
            assert np.array_equal(cache.scores[0], last.scores[layer])
            # Every query gives each head 1 in all; what has gone took its part along.
            assert ((cache.totals > 0) & (cache.totals.sum(axis=-1, keepdims=True) <= last.seen + 1e-3)).all()


def test_requests_that_join_and_leave(model, alone, together):
    generator = BatchGenerator(model.model, prefill_step_size=STEP, prefill_batch_size=2)
    tokens, many = prompts(model.tokenizer), [n for _, n in REQUESTS]
    generator.insert(tokens[:2], max_tokens=many[:2])
    for step in range(200):
        if step == 8:
            generator.insert(tokens[2:], max_tokens=many[2:])
        if step == 24:
            caches, _ = generator.remove([1], return_prompt_caches=True)[1]
        if not generator.next_generated():
            break
    generator.close()
    # The batch is a token ahead of what it has given out.
    many[1] = len(together[1]) - 1
    assert 20 <= many[1] < REQUESTS[1][1]
    check_all(together, alone, many, config_for(model.tokenizer).budget)
    assert np.array_equal(caches[-1].kept_positions[0], together[1][-1].positions[-1])
