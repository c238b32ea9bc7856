"""How kernels are made: text as package data, built once, counted, an error without Metal and CUDA."""

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


def test_each_text_that_touches_memory_says_how_many_bytes():
    only_names_things = {"threads", "chunk", "ranked_state"}
    for text in kernel.TEXTS.values():
        for name in set(text.body) - only_names_things:
            assert "\n// Bytes" in kernel._file(name) or " Bytes of a head:" in kernel._file(name)


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
        return [out, *after[:4], victim, one, *mass, *chunk, *kept[:4], slots, eviction.victims(CONFIG, state), turned]

    state = helpers.random_state(0, 1, 1, 9)
    rows = [helpers.normal(i, 1, h, n, 64) for i, (h, n) in enumerate([(2, 9), (1, 9), (1, 9)])]
    for whole in (1024, 4):
        monkeypatch.setattr(attention, "WHOLE", whole)
        monkeypatch.setattr(attention, "PART", 4)
        mx.export_function(str(tmp_path / f"{whole}.mlxfn"), step, *state[:4], *rows, helpers.normal(4, 2))


@pytest.fixture
def machine(monkeypatch):
    """Call it with the back ends that mlx has; each builds kernels on the emulator. Returns what they have built."""
    made = []

    def builder(which):
        def build(name, input_names, output_names, source, header, ensure_row_contiguous):
            made.append((which, name))
            metals = kernel.text(name)[0]  # without the words for CUDA, which the emulator needs not
            return mslemu.metal_kernel(name, input_names, output_names, source, metals, ensure_row_contiguous)

        return build

    def put(*there):
        monkeypatch.setattr(kernel, "builder", None)
        for which in ("metal", "cuda"):
            monkeypatch.setattr(getattr(mx, which), "is_available", lambda which=which: which in there)
            monkeypatch.setattr(mx.fast, f"{which}_kernel", builder(which))
        return made

    kernel._built.cache_clear()
    yield put
    kernel._built.cache_clear()


def test_without_metal_and_cuda_there_is_an_error_that_says_so(machine):
    machine()
    with pytest.raises(
        RuntimeError, match=r"need Metal or CUDA.*call h2o_metal\.attend and its kin.*or h2o_core itself"
    ):
        eviction.victims(CONFIG, init(1, 1, capacity=2))


@pytest.mark.parametrize("which", ["metal", "cuda"])
def test_mlx_builds_the_kernel_where_it_has_a_back_end(machine, which):
    made = machine(which)
    eviction.victims(CONFIG, init(1, 1, capacity=2))
    assert made == [(which, "h2o_victims")]


@pytest.mark.parametrize(("which", "other"), [("metal", "cuda"), ("cuda", "metal")])
def test_a_back_end_that_is_required_is_there_or_an_error(machine, monkeypatch, which, other):
    machine(which)
    kernel.require(which)
    with pytest.raises(RuntimeError, match=rf"^kernels on '{other}' were asked for, which mlx does not find on this"):
        kernel.require(other)
    machine()
    with pytest.raises(RuntimeError, match=r"call h2o_metal\.attend and its kin, which take what there is$"):
        kernel.require(which)
    monkeypatch.setattr(kernel, "builder", mslemu.metal_kernel)
    kernel.require(which)


def test_a_back_end_of_no_known_name_is_refused():
    with pytest.raises(ValueError, match=r"kernels run on 'metal' or 'cuda', got 'fast'"):
        kernel.require("fast")


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
