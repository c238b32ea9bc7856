"""The adapter in a model, against a naive float64 cache in the same model.

The oracle's caches drop tokens themselves and attend token by token in Python floats; the model around them
is mlx_lm's own.
"""

import copy
import math
from dataclasses import replace

import mlx.core as mx
import pytest
from mlx_lm.models import llama

from h2o_core.conformance import TOLERANCE, Head, same_choice
from h2o_mlxlm import H2OConfig, make_prompt_cache, pyramid

HEADS, KV_HEADS, WIDTH, THETA = 4, 2, 8, 100.0
CALLS = {
    "a long prompt": [20, 7, *[1] * 25, 6, *[1] * 10],
    # The budget is reached while decoding, one token at a time.
    "a short prompt": [3, *[1] * 45],
    "one token first": [*[1] * 40, 2, 1, 1],
}


def model():
    mx.random.seed(7)
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=HEADS * WIDTH,
        num_hidden_layers=2,
        intermediate_size=48,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        rms_norm_eps=1e-5,
        vocab_size=64,
        rope_theta=THETA,
    )
    made = llama.Model(args)
    # Larger weights than a fresh model has: attention is uneven, so that masses are no near-ties.
    for layer in made.layers:
        layer.self_attn.q_proj.weight = layer.self_attn.q_proj.weight * 6
    return made


def turned(row, position):
    """A row of a head, rotated: pairs (i, i + D/2), angle position · theta^(−2i/D)."""
    half = WIDTH // 2
    out = list(row)
    for i in range(half):
        angle = position * THETA ** (-2 * i / WIDTH)
        a, b = row[i], row[i + half]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = a * math.sin(angle) + b * math.cos(angle)
    return out


class RollingHead(Head):
    """Keeps unrotated keys and turns each to its rank among the rows shown."""

    def _probabilities(self, query, rows, sink):
        moved = [type(row)(row.position, turned(row.key, rank), row.value) for rank, row in enumerate(rows)]
        return super()._probabilities(query, moved, sink)


class OracleCache:
    def __init__(self, config, scale):
        self.config, self.rolling = config, config.positions == "rolling"
        kind = RollingHead if self.rolling else Head
        self.heads = [kind(config, scale) for _ in range(KV_HEADS)]
        self.by_key, self.offset = config.queries == "key", 0

    def update_and_fetch(self, keys, values):
        self.keys, self.values = keys, values
        self.first = self.offset
        return keys, values

    def attend(self, queries):
        q, k, v = (x[0].tolist() for x in (queries, self.keys, self.values))
        n, group = len(k[0]), HEADS // KV_HEADS
        outs = []
        for h, head in enumerate(self.heads):
            keys = [turned(row, -self.first - i) for i, row in enumerate(k[h])] if self.rolling else k[h]
            # Under queries="key" the model attends as ever, and each key's own attention makes the scores.
            attending = copy.deepcopy(head) if self.by_key else head
            outs += attending.call(q[h * group : (h + 1) * group], keys, v[h])
            if self.by_key:
                head.call([k[h]], keys, v[h])
        self.offset = len(self.heads[0].rows) if self.rolling else self.offset + n
        return mx.array([outs])


class SharingHeads(OracleCache):
    """Heads that divide the layer's places among them whenever several rows of each have to go."""

    def attend(self, queries):
        n, config = self.keys.shape[2], self.config
        waits = self.heads[0].holding and n > 1
        if waits or all(len(head.rows) + n <= head.config.budget + 1 for head in self.heads):
            return super().attend(queries)
        for head in self.heads:
            head.config = replace(config, budget=len(head.rows) + n)
        out = super().attend(queries)
        for head, places in zip(self.heads, self.shares(), strict=True):
            head.config = replace(config, budget=places)
            while len(head.rows) > places:
                head._evict_one()
        return out

    def shares(self):
        """Places of each head: its own sinks, recent rows and half of the others, then the best of all."""
        c, total = self.config, KV_HEADS * self.config.budget
        sure, others = [], []
        for h, head in enumerate(self.heads):
            stays = [row for row in head.rows if row.position < c.n_sink or row.position >= head.seen - c.grace]
            rest = sorted((row for row in head.rows if row not in stays), key=lambda row: -row.score)
            own = math.ceil((c.budget - c.n_sink - c.grace) / 2)
            sure.append(len(stays) + own)
            others += [(row.score, h) for row in rest[own:]]
        best = sorted(others, reverse=True)[: total - sum(sure)]
        return [n + sum(owner == h for _, owner in best) for h, n in enumerate(sure)]


def oracle_attention(queries, keys, values, cache, scale, mask, sinks=None):
    return cache.attend(queries)


CONFIGS = {
    "default": H2OConfig(budget=24),
    "two quotas": H2OConfig(budget=20, n_sink=2, grace=5, decay=0.8, long_share=0.5),
    "no decay": H2OConfig(budget=12, n_sink=2, grace=3, decay=1.0),
    "as published": H2OConfig(budget=10, n_sink=0, grace=0, decay=1.0, evict_during_prefill=False),
    "tight": H2OConfig(budget=5, n_sink=1, grace=3, decay=0.9),
    "one token": H2OConfig(budget=1, n_sink=0, grace=0),
    "key": H2OConfig(budget=12, n_sink=1, grace=2, queries="key"),
    "key, rolling": H2OConfig(budget=12, n_sink=1, grace=2, queries="key", positions="rolling"),
    "rolling": H2OConfig(budget=16, n_sink=1, grace=4, positions="rolling"),
    "rolling, held": H2OConfig(budget=16, n_sink=1, grace=4, positions="rolling", evict_during_prefill=False),
    "layers of their own": [H2OConfig(budget=20, decay=0.9), H2OConfig(budget=9, n_sink=1, grace=2)],
    "layers of their own, key": [H2OConfig(budget=9, queries="key"), H2OConfig(budget=14, queries="key")],
    "layers of their own, rolling": pyramid(H2OConfig(budget=14, n_sink=1, grace=3, positions="rolling"), 2),
    "adaptive": H2OConfig(budget=16, n_sink=2, grace=3, decay=0.9),
    "adaptive, held": H2OConfig(budget=14, n_sink=1, grace=3, long_share=0.5, evict_during_prefill=False),
    "adaptive layers of their own": pyramid(H2OConfig(budget=14, n_sink=1, grace=3), 2),
}


@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("name", CONFIGS)
def test_it_keeps_what_the_oracle_keeps_at_every_step(name, calls, monkeypatch):
    config, the_model, calls = CONFIGS[name], model(), CALLS[calls]
    configs = config if isinstance(config, list) else [config] * 2
    adaptive, scale = "adaptive" in name, the_model.layers[0].self_attn.scale
    caches = make_prompt_cache(the_model, config, heads="adaptive" if adaptive else "equal")
    oracles = [(SharingHeads if adaptive else OracleCache)(c, scale) for c in configs]
    tokens = mx.random.randint(0, 64, (1, sum(calls)), key=mx.random.key(1))
    compared, at, parted, uneven = 0, 0, set(), False
    for n in calls:
        before = [[len(head.evicted) for head in oracle.heads] for oracle in oracles]
        chunk = tokens[:, at : at + n]
        logits = the_model(chunk, cache=caches)
        with monkeypatch.context() as patch:
            patch.setattr(llama, "scaled_dot_product_attention", oracle_attention)
            expected = the_model(chunk, cache=oracles)
        at += n
        for layer, (cache, oracle) in enumerate(zip(caches, oracles, strict=True)):
            assert cache.tokens_seen == at
            assert oracle.heads[0].holding or mx.sum(cache.kept_positions >= 0) <= KV_HEADS * configs[layer].budget
            for h, head in enumerate(oracle.heads):
                recent = {row.position: row for row in head.rows + head.evicted[before[layer][h] :]}
                kept, wanted = {p for p in cache.kept_positions[0, h].tolist() if p >= 0}, set(head.kept())
                # Logits come through two layers, so their rounding is a few times one attention's.
                assert same_choice(kept, wanted, recent, 5 * TOLERANCE[mx.float32])
                if kept != wanted:
                    parted.add((layer, h))
                    continue
                ours = dict(zip(sorted(kept), cache.scores[0, h, : len(kept)].tolist(), strict=True))
                totals = dict(zip(sorted(kept), cache.totals[0, h, : len(kept)].tolist(), strict=True))
                for p in kept:
                    assert math.isclose(ours[p], recent[p].score, rel_tol=1e-3, abs_tol=1e-4)
                    assert math.isclose(totals[p], recent[p].total, rel_tol=1e-3, abs_tol=1e-4)
                compared += 1
        uneven = uneven or any(len({head.config.budget for head in oracle.heads}) > 1 for oracle in oracles)
        if parted:
            break
        assert mx.allclose(logits, expected, atol=1e-3)
    assert compared >= 4 * 20, f"the comparison ended at {parted} after {compared} steps of heads"
    # While rows go one by one, heads stay equal; where many went at once, some have not.
    assert uneven or not adaptive or calls[0] <= 3
    for oracle, cache in zip(oracles, caches, strict=True):
        for h, head in enumerate(oracle.heads):
            gone = sum(row.total for row in head.evicted)
            assert math.isclose(cache.totals[0, h].sum().item() + gone, at, rel_tol=1e-4)
