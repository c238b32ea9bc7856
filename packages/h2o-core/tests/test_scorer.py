"""Names, parameters, and what a configuration makes of them."""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, field

import mlx.core as mx
import pytest

from h2o_core import H2OConfig, Recording, scorer, simulate
from h2o_core.scorer import Scorer, register, scorer_kind, scorer_names, scorer_of
from h2o_core.scorers.morphkv import MorphKV
from h2o_core.scoring import scored


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(scorer, "_added", {})


@pytest.mark.parametrize("name", scorer_names())
def test_a_configuration_comes_back_from_json(name):
    config = H2OConfig(64, scorer=name)
    assert isinstance(config.scorer, scorer_kind(name))
    assert config.scorer.name == name
    again = H2OConfig(**json.loads(json.dumps(asdict(config))))
    assert again == config
    assert hash(again) == hash(config)
    assert scorer_kind(name).__doc__


def test_a_name_an_object_and_its_fields_are_one_scorer():
    named, made, read = (
        H2OConfig(scorer=s) for s in ("morphkv", MorphKV(), {"name": "morphkv", "window": 32, "fusion": "sum"})
    )
    assert named == made == read
    assert H2OConfig(scorer=MorphKV(8)) != named
    assert H2OConfig() == H2OConfig(scorer="h2o")


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("best", ValueError, "scorer must be one of 'cam', .*, 'tova', got 'best'"),
        (3, TypeError, "scorer must be a name, a Scorer, or a Scorer's fields, got 3"),
        ({"window": 3}, ValueError, "scorer must be one of .* got None"),
        ({"name": ["h2o"]}, ValueError, r"scorer must be one of .* got \['h2o'\]"),
        ({"name": "morphkv", "size": 3}, ValueError, "'morphkv' has no parameter 'size': there are window, fusion"),
        ({"name": "tova", "size": 3}, ValueError, "'tova' has no parameter 'size': it has none"),
        ({"name": "morphkv", "window": 0}, ValueError, "window of scorer 'morphkv' must be between 1 and 1024, got 0"),
        ({"name": "morphkv", "window": 2.5}, TypeError, "window of scorer 'morphkv' must be an integer, got 2.5"),
        ({"name": "morphkv", "window": True}, TypeError, "window of scorer 'morphkv' must be an integer, got True"),
        ({"name": "morphkv", "fusion": "mean"}, ValueError, "fusion of .* must be one of 'sum', 'max', got 'mean'"),
        ({"name": "scissorhands", "window": 2000}, ValueError, "must be between 1 and 1024, got 2000"),
        ({"name": "snapkv", "window": 0}, ValueError, "window of scorer 'snapkv' must be between 1 and 1024"),
        ({"name": "snapkv", "pool": 4}, ValueError, "pool of scorer 'snapkv' must be odd, got 4"),
        ({"name": "snapkv", "pool": 99}, ValueError, "pool of scorer 'snapkv' must be between 1 and 63"),
        ({"name": "snapkv", "pooling": "sum"}, ValueError, "must be one of 'mean', 'max', got 'sum'"),
        ({"name": "h2o", "by_age": 1}, TypeError, "by_age of scorer 'h2o' must be True or False, got 1"),
        ({"name": "keyformer", "tau": -1.0}, ValueError, "tau of scorer 'keyformer' must be between 0"),
        ({"name": "keyformer", "tau": float("nan")}, ValueError, "tau of scorer 'keyformer' must be between 0"),
        ({"name": "keyformer", "tau": "1"}, TypeError, "tau of scorer 'keyformer' must be a number, got '1'"),
        ({"name": "keyformer", "tau": 3.0}, ValueError, "tau_end of scorer 'keyformer' must be between 3.0 and"),
        ({"name": "keyformer", "span": 0}, ValueError, "span of scorer 'keyformer' must be between 1"),
        ({"name": "keyformer", "seed": -1}, ValueError, "seed of scorer 'keyformer' must be between 0"),
        ({"name": "cam", "merge": "key"}, ValueError, "merge of scorer 'cam' must be one of 'value', 'drop'"),
        ({"name": "cam", "targets": 0}, ValueError, "targets of scorer 'cam' must be between 1 and 1024"),
        ({"name": "cam", "seed": 2**32}, ValueError, "seed of scorer 'cam' must be between 0"),
        ({"name": "curdkv", "rank": -1}, ValueError, "rank of scorer 'curdkv' must be between 0 and 1024"),
        ({"name": "curdkv", "seed": -1}, ValueError, "seed of scorer 'curdkv' must be between 0"),
        ({"name": "curdkv", "combine": "sum"}, ValueError, "combine of scorer 'curdkv' must be one of 'product'"),
        ({"name": "expected_attention", "epsilon": 2.0}, ValueError, "epsilon of .* must be between 0.0 and 1.0"),
    ],
)
def test_a_bad_scorer_is_refused_by_name_at_construction(value, error, message):
    with pytest.raises(error, match=message):
        H2OConfig(scorer=value)


@pytest.mark.parametrize("name", scorer_names())
def test_a_setting_that_a_scorer_does_not_use_is_refused(name):
    sums = name in ("h2o", "cam", "keyformer")
    assert H2OConfig(scorer=name).scorer.sums == sums
    for setting in ({"decay": 0.9}, {"long_share": 0.5}):
        if sums:
            assert H2OConfig(scorer=name, **setting).scorer.name == name
            continue
        with pytest.raises(ValueError, match=f"{next(iter(setting))} is for scorers that sum mass, and '{name}' does"):
            H2OConfig(scorer=name, **setting)
    if sums:
        assert H2OConfig(scorer=name, queries="key").queries == "key"
    else:
        with pytest.raises(ValueError, match=f"scorer '{name}' (needs the model's own queries|looks at no query), got"):
            H2OConfig(scorer=name, queries="key")


def test_only_the_scorer_that_is_chosen_is_loaded():
    script = (
        "import sys; from h2o_core.config import H2OConfig; H2OConfig(); print('mlx.core' in sys.modules); "
        "H2OConfig(scorer='tova'); print([m for m in sys.modules if m.startswith('h2o_core.scorers.')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["False", "['h2o_core.scorers.h2o', 'h2o_core.scorers.tova']"]


def test_one_can_be_added(registry):
    """CONTRIBUTING's recipe, from outside of the package."""

    @register
    @dataclass(frozen=True)
    class Loudest(Scorer):
        """Score a row by its key's largest entry, or its queries' after a call."""

        name: str = field(default="loudest", init=False)
        factor: float = 1.0
        needs = frozenset({"keys", "queries"})
        extras = ((),)

        def observe(self, config, state, evidence, n_tokens, lengths):
            loudest = evidence.keys.max(axis=-1) * self.factor
            counted = state.extras[0] + evidence.queries.shape[2]
            return scored(state, loudest, lengths, (counted,))

    assert "loudest" in scorer_names()
    config = H2OConfig(4, n_sink=0, grace=1, scorer={"name": "loudest", "factor": 2})
    assert H2OConfig(**json.loads(json.dumps(asdict(config)))) == config
    q, k = mx.random.normal((2, 1, 20, 8), key=mx.random.key(1))
    trace = simulate(Recording(queries=q, keys=k, scale=1.0), config, 5, chunk=[2])
    loud, kept, at = k[0].max(axis=-1).tolist(), set(), 0
    for n in [5, 2, *[1] * 13]:
        kept |= set(range(at, at + n))
        at += n
        while len(kept) > 4:
            kept.remove(min(kept - {at - 1}, key=lambda p: (loud[p], p)))
        assert trace.kept[at - 1, 0].tolist() == sorted(kept)
    counted = zip(trace.state.positions[0, 0].tolist(), trace.state.extras[0][0, 0].tolist(), strict=True)
    since = {p: 20 - p if p > 6 else 15 if p > 4 else 20 for p in kept}  # queries since it came, its call's too
    assert {p: n for p, n in counted if p >= 0} == since


@pytest.mark.parametrize("name", ["", "h2o", "twice"])
def test_a_name_is_given_once(registry, name):
    kinds = [dataclass(frozen=True)(type("Own", (Scorer,), {"__annotations__": {"name": str}, "name": name}))] * 2
    if name == "twice":
        register(kinds[0])
        assert register(kinds[0]) is kinds[0]
        kinds[1] = dataclass(frozen=True)(type("Other", (Scorer,), {"__annotations__": {"name": str}, "name": name}))
    with pytest.raises(ValueError, match=f"a scorer is registered under a name of its own, got '{name}'"):
        register(kinds[1])


def test_a_scorer_without_a_rule_says_so():
    bare = Scorer()
    for call in (
        lambda: bare.observe(*[None] * 5),
        lambda: bare.disturbed(*[None] * 3),
        lambda: bare.shares(None, None),
    ):
        with pytest.raises(NotImplementedError, match="scorer '' "):
            call()
    assert scorer_of(bare) is bare
