"""Every feature with every other: what one promises holds beside the other, or one error refuses the two together."""

import copy
from itertools import combinations

import mlx.core as mx
import pytest

from h2o_core.scorer import scorer_from
from h2o_mlxlm import (
    H2OConfig,
    load_prompt_cache,
    make_prompt_cache,
    pyramid,
    save_prompt_cache,
)
from h2o_mlxlm.backend import REFERENCE
from h2o_mlxlm.cache import parts_of
from h2o_mlxlm.inputs import inputs_from

BUDGET, R = 12, 3
FUSED = REFERENCE._replace(name="fused", fused=True)

# The kind of feature, of which a cache has one, and what it sets: of the configuration, of make_prompt_cache, or ours.
FEATURES = {
    "8 bits": ("storage", {"kv_bits": 8, "kv_group_size": 32}),
    "8-bit keys": ("storage", {"kv_bits": (8, None), "kv_group_size": 32}),
    "kivi": ("storage", {"kv_bits": 8, "kv_group_size": 32, "kv_quantizer": "kivi"}),
    "rewind": ("rewind", {"rewind": R}),
    "snapkv": ("scorer", {"scorer": "snapkv window=4"}),
    "cam": ("scorer", {"scorer": "cam targets=3"}),
    "keyformer": ("scorer", {"scorer": "keyformer span=16"}),
    "l2norm": ("scorer", {"scorer": "l2norm"}),
    "qfilters": ("scorer", {"scorer": "qfilters"}),
    "pyramid": ("shape", {"ratio": 2.0}),
    "adaptive": ("shape", {"heads": "adaptive"}),
    "split": ("shape", {"heads": [[10, 14], [14, 10]]}),
    "held": ("prefill", {"evict_during_prefill": False}),
    "rolling": ("positions", {"positions": "rolling"}),
    "auto": ("positions", {"positions": "auto", "trained_length": 40}),
    "key": ("queries", {"queries": "key"}),
    "long": ("sums", {"long_share": 0.5}),
    "fused": ("backend", {"backend": FUSED}),
}
REFUSED = {
    ("8 bits", "cam"): "scorer 'cam' changes values that are stored.*leave kv_bits out for values",
    ("kivi", "cam"): "scorer 'cam' changes values that are stored.*leave kv_bits out for values",
    ("kivi", "rewind"): 'rewind=3 writes rows back.*kv_quantizer="per_token"',
    ("kivi", "auto"): 'positions="auto" stores keys anew.*kv_quantizer="per_token"',
    ("rewind", "snapkv"): "scorer 'snapkv' takes a call of one token for the end.*use rewind=0",
    ("rewind", "cam"): "scorer 'cam' merges values.*use rewind=0",
    ("rewind", "key"): 'rewind needs queries="true"',
    **{(name, "long"): "long_share is for scorers that sum mass" for name in ("snapkv", "l2norm", "qfilters")},
    ("snapkv", "key"): "scorer 'snapkv' needs the model's own queries",
    **{(name, "key"): f"scorer '{name}' looks at no query" for name in ("l2norm", "qfilters")},
    **{(name, "adaptive"): 'heads="adaptive" stores rows as they come' for name in ("8 bits", "8-bit keys", "kivi")},
    **{
        (name, "adaptive"): 'heads="adaptive" works with scorer='
        for name in ("snapkv", "cam", "keyformer", "l2norm", "qfilters")
    },
    ("rewind", "adaptive"): 'heads="adaptive" works with rewind=0',
    **{("adaptive", name): 'heads="adaptive" works with positions=' for name in ("rolling", "auto")},
    ("adaptive", "key"): 'heads="adaptive" works with queries=',
    **{("split", name): "heads with budgets of their own sit at different ranks" for name in ("rolling", "auto")},
    ("qfilters", "split"): "heads with budgets of their own take no inputs",
}
UNSAVED = {
    "kivi": "rows in blocks stay in the process; use kv_quantizer",
    "adaptive": 'got AdaptiveH2OKVCache.*other heads than "adaptive"',
}
CALLS, MORE = (20, 7, 1, 1, 1, 5, 1, 1), (1, 1, 6, 1)
N, LENGTHS, STEPS = sum(CALLS), (30, 9), 5
TOKENS = mx.random.randint(3, 260, (200,), key=mx.random.key(1)).tolist()
OF_CACHES = ("heads", "kv_bits", "kv_group_size", "kv_quantizer")


@pytest.fixture(scope="module")
def model(make_model):
    return make_model(head_dim=32)


@pytest.fixture(scope="module")
def make(model):
    """Make caches with some features, and what their scorer was given."""

    def make(names):
        chosen = {key: value for name in names for key, value in FEATURES[name][1].items()}
        how = {name: chosen.pop(name) for name in OF_CACHES if name in chosen}
        backend, ratio = chosen.pop("backend", REFERENCE), chosen.pop("ratio", None)
        chosen["scorer"] = scorer_from(chosen.get("scorer", "h2o"))
        config = H2OConfig(BUDGET, n_sink=1, grace=2, **chosen)
        inputs = inputs_from(model, TOKENS[100:130], config)
        caches = make_prompt_cache(model, pyramid(config, 2, ratio) if ratio else config, inputs=inputs, **how)
        return run_by(backend, caches), inputs

    return make


def run_by(backend, caches):
    for cache in caches:
        for part in parts_of(cache):
            part.backend = backend
    return caches


def fed(model, caches, tokens, calls):
    """The last logits of each call."""
    out, at = [], 0
    for n in calls:
        out.append(model(mx.array([tokens[at : at + n]]), cache=caches)[:, -1])
        at += n
    return mx.concatenate(out)


def figures(caches):
    return [(c.kept_positions.tolist(), c.scores.tolist(), c.totals.tolist()) for c in caches]


def check_laws(caches, seen):
    """Kept is what the budget allows, over all heads where they differ; what is not kept has gone."""
    for cache in caches:
        heads, kept = cache.kept_positions.shape[1], min(seen, cache.config.budget)
        assert (cache.kept_positions >= 0).sum() == heads * kept
        assert (cache.tokens_seen, mx.mean(cache.tokens_kept + mx.zeros(1))) == (seen, kept)
        assert mx.all(cache.evictions + cache.tokens_kept == mx.array(seen))
        assert mx.isfinite(cache.scores).all()


def check_near(caches, others):
    for cache, other in zip(caches, others, strict=True):
        assert cache.kept_positions.tolist() == other.kept_positions.tolist()
        assert mx.allclose(cache.scores, other.scores, atol=1e-4, rtol=1e-3)


def check_goes_on(model, names, caches, inputs, tmp_path):
    """Copies, and what comes back from a file, go on bit for bit as those do that they are of."""
    again = [copy.deepcopy(caches)]
    path = tmp_path / "cache.safetensors"
    unsaved = [UNSAVED[name] for name in names if name in UNSAVED]
    if unsaved:
        with pytest.raises(ValueError, match="|".join(unsaved)):
            save_prompt_cache(path, caches, model)
    else:
        save_prompt_cache(path, caches, model)
        again.append(run_by(caches[0].backend, load_prompt_cache(path, model, inputs=inputs)))
    logits = fed(model, caches, TOKENS[N:], MORE)
    for others in again:
        assert (fed(model, others, TOKENS[N:], MORE) == logits).all()
        assert figures(others) == figures(caches)


def check_trim(model, caches):
    """Tokens that came alone and together are taken back, after evictions."""
    before, twin = figures(caches), copy.deepcopy(caches)
    fed(model, caches, TOKENS[150:], (R,))
    assert [c.trim(R) for c in caches] == [R, R]
    assert figures(caches) == before
    assert mx.allclose(fed(model, caches, TOKENS, MORE), fed(model, twin, TOKENS, MORE), atol=1e-4)
    check_near(caches, twin)


def check_batch(model, make, names):
    """Each sequence of a batch keeps what it keeps alone."""
    alone = [make(names)[0] for _ in LENGTHS]
    for i, (caches, n) in enumerate(zip(alone, LENGTHS, strict=True)):
        fed(model, caches, TOKENS[10 * i :], (n,))
    batch = [type(layer[0]).merge(list(layer)) for layer in zip(*alone, strict=True)]
    for token in TOKENS[50 : 50 + STEPS]:
        logits = model(mx.array([[token]] * len(LENGTHS)), cache=batch)
        assert mx.isfinite(logits).all()
    for i, caches in enumerate(alone):
        out = [c.extract(i) for c in batch]
        check_laws(out, LENGTHS[i] + STEPS)
        own = fed(model, caches, TOKENS[50:], [1] * STEPS)
        # Blocks are cut for all sequences at once.
        if "kivi" not in names:
            assert mx.allclose(logits[i, -1], own[-1], atol=2e-3)
            check_near(out, caches)


PAIRS = [(a, b) for a, b in combinations(FEATURES, 2) if FEATURES[a][0] != FEATURES[b][0]]


@pytest.mark.parametrize("names", PAIRS, ids=" and ".join)
def test_two_features_together_hold_or_are_refused(model, make, names, tmp_path):
    if names in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[names]):
            make(names)
        return
    caches, inputs = make(names)
    assert mx.isfinite(fed(model, caches, TOKENS, CALLS)).all()
    check_laws(caches, N)
    check_goes_on(model, names, caches, inputs, tmp_path)
    if "fused" in names:
        plain = run_by(REFERENCE, make(names)[0])
        fed(model, plain, TOKENS, (*CALLS, *MORE))
        check_near(caches, plain)
    if "rewind" in names:
        check_trim(model, caches)
    if "adaptive" not in names:
        check_batch(model, make, names)
