"""What callers import: the references' signatures, and a choice that is made at each call."""

import importlib
import inspect

import mlx.core as mx
import mlx.nn as nn
import pytest

import h2o_core
import h2o_metal
import h2o_rope
from h2o_metal import kernel

MODULES = {"attend": "attention", "rotate": "rotation", "derotate": "rotation", "rerotate": "rotation"}
NAMES = [name for name in h2o_metal.__all__ if not name.startswith("on_")]


@pytest.mark.parametrize("name", NAMES)
def test_signatures_are_the_references(name):
    reference = getattr(h2o_core if hasattr(h2o_core, name) else h2o_rope, name)
    module = importlib.import_module(f"h2o_metal.{MODULES.get(name, 'eviction')}")
    expected = {k: (p.kind, p.default) for k, p in inspect.signature(reference).parameters.items()}
    for ours in (getattr(h2o_metal, name), getattr(module, name)):
        assert {k: (p.kind, p.default) for k, p in inspect.signature(ours).parameters.items()} == expected


def call_each(helpers):
    state = helpers.random_state(0, 1, 1, 9)
    config = h2o_core.H2OConfig(budget=8, n_sink=1, grace=2)
    q, k = helpers.normal(1, 1, 2, 1, 64), helpers.normal(2, 1, 1, 9, 64)
    at, rope = mx.arange(9), nn.RoPE(64)
    return {
        "attend": (q, k, k, 0.1),
        "decode_step": (config, state, q, k, k, 0.1),
        "evict": (config, state),
        "survivors": (config, state),
        "victims": (config, state),
        "rotate": (k, at, rope),
        "derotate": (k, at, rope),
        "rerotate": (k, at, at, rope),
    }


@pytest.mark.parametrize("name", NAMES)
def test_where_metal_or_cuda_is_the_kernel_is_taken_and_elsewhere_not(backend, helpers, monkeypatch, name):
    args = call_each(helpers)[name]
    for metal, cuda in ((False, False), (True, False), (False, True)):
        monkeypatch.setattr(h2o_metal, "on_metal", lambda there=metal: there)
        monkeypatch.setattr(h2o_metal, "on_cuda", lambda there=cuda: there)
        with kernel.launches() as ran:
            getattr(h2o_metal, name)(*args)
        assert len(ran) == (metal or cuda)


@pytest.mark.parametrize("which", ["metal", "cuda"])
@pytest.mark.parametrize("available", [False, True])
@pytest.mark.parametrize("device", [mx.cpu, mx.gpu])
def test_a_back_end_must_be_there_and_be_where_work_goes(monkeypatch, which, available, device):
    monkeypatch.setattr(getattr(mx, which), "is_available", lambda: available)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(device))
    assert getattr(h2o_metal, f"on_{which}")() is (available and device == mx.gpu)
