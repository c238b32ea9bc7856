"""Where kernels run: on Metal or CUDA where mlx has it, and on the emulator everywhere. None is ever skipped.

Everywhere on Linux they are compiled for CUDA as well, to PTX, and not run.
"""

import sys

import mlx.core as mx
import pytest

import h2o_metal.kernel
import mslemu
from h2o_core import H2OState
from h2o_core.conformance import TOLERANCE

# NVIDIA's compiler comes as a wheel for Linux; for macOS there is none.
collect_ignore = [] if sys.platform == "linux" else ["test_ptx.py"]
BACKENDS = [name for name in ("metal", "cuda") if getattr(mx, name).is_available()] + ["emulator"]
BUILDERS = {"metal": None, "cuda": None, "emulator": mslemu.metal_kernel}


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request):
    """Kernels run on each back end in turn, whose name ends the test's id."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(h2o_metal.kernel, "builder", BUILDERS[request.param])
        yield request.param


@pytest.fixture(params=["emulator"])
def emulator(request, monkeypatch):
    """For tests of what a GPU does not report. Call it with a function that changes a kernel's definition."""

    def put(change=lambda definition: definition):
        monkeypatch.setattr(
            h2o_metal.kernel, "builder", lambda **definition: mslemu.metal_kernel(**change(dict(definition)))
        )

    put()
    return put


@pytest.fixture(params=["ptx"])
def ptx(request, monkeypatch):
    """Kernels are taken as on a machine with CUDA, compiled, and give zeros. Collects their PTX."""
    monkeypatch.setattr(h2o_metal.kernel, "builder", None)
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mx.fast, "cuda_kernel", mslemu.cuda_kernel)
    h2o_metal.kernel._built.cache_clear()  # what was built before, and what is built here, is of another mlx
    with mslemu.compiled() as made:
        yield made
    h2o_metal.kernel._built.cache_clear()


def normal(seed, *shape, dtype=mx.float32):
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def random_state(seed, batch, n_heads, n_slots, distinct=0, empty=0.0, strange=0.0, more_seen=0):
    """Slots in random order. ``distinct``: few different scores, so that ties decide. ``empty``, ``strange``: shares
    of slots that hold nothing, or a score or total that is not finite."""
    shape = (batch, n_heads, n_slots)
    keys = mx.random.split(mx.random.key(seed), 8)
    # The newest token is always there.
    chance = lambda i, share: mx.random.uniform(shape=shape, key=keys[i]) < share  # noqa: E731
    positions = mx.argsort(mx.random.normal(shape, key=keys[0]), axis=-1).astype(mx.int32) + more_seen
    scores, totals = (8 * mx.random.uniform(shape=shape, key=keys[i]) for i in (1, 2))
    if distinct:
        scores, totals = (mx.floor(x * distinct / 8) for x in (scores, totals))
    odd = mx.array([mx.nan, mx.inf, -mx.inf])[mx.random.randint(0, 3, shape, key=keys[3])]
    scores, totals = mx.where(chance(4, strange), odd, scores), mx.where(chance(5, strange), odd, totals)
    hole = chance(6, empty) & (positions < n_slots - 1 + more_seen)
    scores, totals = (mx.where(hole, 0.0, x) for x in (scores, totals))
    seen = mx.full((batch,), n_slots + more_seen, mx.int32)
    return H2OState(scores, totals, mx.where(hole, -1, positions), seen)


def largest_difference(ours, theirs):
    """Relative to 1 + the magnitude, as TOLERANCE is; infinite where one is finite and the other is not."""
    ours, theirs = ours.astype(mx.float32), theirs.astype(mx.float32)
    assert ours.shape == theirs.shape
    if not ours.size:
        return 0.0
    both = mx.isfinite(ours) & mx.isfinite(theirs)
    gap = mx.abs(ours - theirs) / (1 + mx.maximum(mx.abs(ours), mx.abs(theirs)))
    neither = ~mx.isfinite(ours) & ~mx.isfinite(theirs)
    return mx.where(both, gap, mx.where(neither, 0.0, mx.inf)).max().item()


def assert_same_step(ours, theirs, victims_too=True):
    """Compare two results of decode_step on one input."""
    (out, state, victim), (other_out, other, other_victim) = ours, theirs
    assert out.dtype == other_out.dtype
    assert largest_difference(out, other_out) <= TOLERANCE[out.dtype]
    if victims_too:
        assert victim.dtype == other_victim.dtype == mx.uint32
        assert mx.array_equal(victim, other_victim)
    assert mx.array_equal(state.positions, other.positions)
    assert largest_difference(state.scores, other.scores) <= TOLERANCE[mx.float32]
    assert largest_difference(state.totals, other.totals) <= TOLERANCE[mx.float32]
    assert mx.array_equal(state.seen, other.seen)


class Helpers:
    normal = staticmethod(normal)
    random_state = staticmethod(random_state)
    largest_difference = staticmethod(largest_difference)
    assert_same_step = staticmethod(assert_same_step)


@pytest.fixture(scope="session")
def helpers():
    return Helpers
