"""How kernels are made: text as package data, built once, counted, with an error where there is no Metal."""

import importlib.resources
import re
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx.nn as nn
import pytest

import mslemu
from h2o_core import H2OConfig, H2OState, init
from h2o_metal import attention, eviction, kernel, rotation
from h2o_rope import Rotation

CONFIG = H2OConfig(budget=8, n_sink=1, grace=2, long_share=0.5)


ROPE = Rotation(mx.array([1.0, 0.1]), False, 1.5)


def run_all(helpers, monkeypatch):
    """Launch every kernel once or more."""
    state = helpers.random_state(0, 1, 1, 9)
    q, k, v = (helpers.normal(i, 1, h, n, 64) for i, (h, n) in enumerate([(2, 9), (1, 9), (1, 9)]))
    sinks = helpers.normal(4, 2)
    for whole in (1024, 4):
        monkeypatch.setattr(attention, "WHOLE", whole)
        monkeypatch.setattr(attention, "PART", 4)
        eviction.decode_step(CONFIG, state, q[:, :, :1], k, v, 0.1, sinks)
        attention.attend(q[:, :, :1], k, v, 0.1, sinks=sinks)
    attention.attend(q, k, v, 0.1, 0.9, "causal", sinks=sinks)
    eviction.victims(CONFIG, state)
    eviction.evict(CONFIG, state)
    rotation.rotate(k, mx.arange(9), nn.RoPE(64))


def test_every_file_is_in_some_kernel_and_each_kernel_is_launched(backend, helpers, monkeypatch):
    there = {path.name for path in (importlib.resources.files("h2o_metal") / "kernels").iterdir()}
    named = {f"{name}.metal" for text in kernel.TEXTS.values() for part in text for name in part}
    assert named == there
    with kernel.launches() as ran:
        run_all(helpers, monkeypatch)
    assert set(ran) == set(kernel.TEXTS)


def test_mlx_writes_the_same_text_and_metal_can_bind_it(emulator, helpers, monkeypatch):
    """MLX generates the function around each text on any machine. Metal binds at most 31 buffers."""
    seen = {}

    def noted(**definition):
        def call(**given):
            seen[definition["name"]] = mslemu.mlx_text(definition, given)
            return mslemu.metal_kernel(**definition)(**given)

        return call

    monkeypatch.setattr(kernel, "builder", noted)
    run_all(helpers, monkeypatch)
    assert set(seen) == set(kernel.TEXTS)
    for name, whole in seen.items():
        assert kernel.text(name)[1] in whole
        assert len(re.findall(r"\[\[buffer\(\d+\)\]\]", whole)) <= 31


def test_mlx_itself_takes_every_call_in_a_trace(helpers, monkeypatch, tmp_path):
    """Under mx.compile nothing may be evaluated on the way. A trace for export needs no Metal."""
    monkeypatch.setattr(kernel, "builder", mx.fast.metal_kernel)

    def step(*arrays):
        state, (q, k, v, sinks) = H2OState(*arrays[:4]), arrays[4:]
        out, after, victim = eviction.decode_step(CONFIG, state, q[:, :, :1], k, v, 0.1, sinks)
        one, mass = attention.attend(q[:, :, :1], k, v, 0.1)
        _, chunk = attention.attend(q, k, v, 0.1, 0.9, "causal", sinks=sinks)
        kept, slots = eviction.evict(CONFIG, state)
        turned = rotation.rerotate(k, state.positions, state.positions, ROPE)
        return [out, *after, victim, one, *mass, *chunk, *kept, slots, eviction.victims(CONFIG, state), turned]

    state = helpers.random_state(0, 1, 1, 9)
    rows = [helpers.normal(i, 1, h, n, 64) for i, (h, n) in enumerate([(2, 9), (1, 9), (1, 9)])]
    for whole in (1024, 4):
        monkeypatch.setattr(attention, "WHOLE", whole)
        monkeypatch.setattr(attention, "PART", 4)
        mx.export_function(str(tmp_path / f"{whole}.mlxfn"), step, *state, *rows, helpers.normal(4, 2))


def test_without_metal_there_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr(kernel, "builder", None)
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"need Metal.*call h2o_metal\.attend and its kin.*or h2o_core itself"):
        eviction.victims(CONFIG, init(1, 1, capacity=2))


def test_with_metal_mlx_builds_the_kernel(monkeypatch):
    made = []

    def build(**definition):
        made.append(definition)
        return mslemu.metal_kernel(**definition)

    monkeypatch.setattr(kernel, "builder", None)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx.fast, "metal_kernel", build)
    eviction.victims(CONFIG, init(1, 1, capacity=2))
    assert [definition["name"] for definition in made] == ["h2o_victims"]


def test_a_kernel_is_built_once_by_any_number_of_threads(monkeypatch):
    made = []

    def build(**definition):
        made.append(definition["name"])
        return mslemu.metal_kernel(**definition)

    monkeypatch.setattr(kernel, "builder", build)

    def run(_):
        return eviction.victims(CONFIG, init(1, 1, capacity=9)).item()

    with kernel.launches() as ran, ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, range(16))) == [0] * 16
    assert made == ["h2o_victims"]
    assert ran == ["h2o_victims"] * 16


def test_counters_nest_and_end(backend):
    state = init(1, 1, capacity=9)
    with kernel.launches() as outer:
        eviction.victims(CONFIG, state)
        with kernel.launches() as inner:
            eviction.evict(CONFIG, state)
    eviction.evict(CONFIG, state)
    assert (outer, inner) == (["h2o_victims", "h2o_evict"], ["h2o_evict"])
