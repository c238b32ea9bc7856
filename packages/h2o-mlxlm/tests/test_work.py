"""The work of one decode step, counted: operations, big arrays, memory. It fails when a step learns to copy."""

import io
import re
from collections import Counter
from dataclasses import replace

import mlx.core as mx
import pytest

from h2o_core import attention
from h2o_mlxlm.benchmarks import layer, memory
from h2o_mlxlm.benchmarks.layer import Shape
from h2o_mlxlm.benchmarks.variants import VARIANTS, Room
from h2o_mlxlm.cache import H2OKVCache

SHAPE, BUDGET = Shape(kv_heads=2, group=3, head_dim=64), 64
VIEWS = {"Broadcast", "Depends", "ExpandDims", "Flatten", "Slice", "Squeeze", "Transpose", "Unflatten"}

# Operations of a step that do work, views left out and fused ones counted once. None may come in; fewer is
# progress: then lower the number.
MOST = {
    ("h2o", "below"): 25,
    ("h2o", "full"): 24,
    ("h2o-books", "full"): 29,
    ("h2o-rewind", "below"): 25,
    ("h2o-rewind", "full"): 35,
    ("h2o-key", "below"): 27,
    ("h2o-key", "full"): 26,
    # Quantising two rows and opening all are many operations each on a CPU; and four more arrays to write.
    ("h2o-8bit", "below"): 59,
    ("h2o-8bit", "full"): 58,
}

# Of those, the ones that read or write an array as large as the keys: the row's way in, and the products.
TOUCHING = {
    ("h2o", "float32"): {"ScatterAxis": 2, "Matmul": 2},
    # The products are in float32 whatever the dtype, so 16-bit keys and values are widened at each step.
    ("h2o", "float16"): {"ScatterAxis": 2, "Matmul": 2, "AsType": 2},
    # The row that goes is read before it is overwritten.
    ("h2o-rewind", "float32"): {"ScatterAxis": 2, "Matmul": 2, "GatherAxis": 2},
    # A third product makes the mass; its query is gathered from the keys.
    ("h2o-key", "float32"): {"ScatterAxis": 2, "Matmul": 3, "GatherAxis": 1},
}


def steady(variant, phase, shape=SHAPE, budget=BUDGET):
    """A cache in the middle of decoding, its last call still open, as a model leaves it."""
    cache = VARIANTS[variant].make(Room(budget, shape.head_dim))[0]
    layer.fill(cache, shape, budget // 2 if phase == "below" else 2 * budget)
    for _ in range(3):
        layer.call(cache, layer.drawn(shape, 1))
    return cache


def operations(cache, shape=SHAPE):
    """Primitives of the next step's graph, views left out."""
    out, text = layer.called(cache, layer.drawn(shape, 1)), io.StringIO()
    mx.export_to_dot(text, out)
    names = re.findall(r'label ="(\w+)", shape=rectangle', text.getvalue())
    return Counter("Compiled" if n.startswith("Compiled") else n for n in names if n not in VIEWS)


def touching(cache, shape=SHAPE):
    """Primitives of the next step that take or make an array of half the keys' bytes, views left out."""
    half = cache.keys.nbytes // 2
    nodes = []
    mx.disable_compile()  # compiled operations can't be exported; they touch no rows
    try:
        mx.export_function(nodes.append, lambda *given: layer.called(cache, given), *layer.drawn(shape, 1))
    finally:
        mx.enable_compile()
    return Counter(
        node["name"]
        for node in nodes
        if node["type"] == "primitive" and node["name"] not in VIEWS and _largest(node) >= half
    )


def _largest(node):
    sizes = []
    for _, shape, dtype in (*node["inputs"], *node["outputs"]):
        n = dtype.size
        for side in shape:
            n *= side
        sizes.append(n)
    return max(sizes, default=0)


def extra_memory(cache, shape):
    """Bytes in use at the worst moment of the next step, beyond those before it."""
    given = layer.drawn(shape, 1)
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    layer.call(cache, given)
    return mx.get_peak_memory() - before


def check_operations(variant, phase):
    found = operations(steady(variant, phase))
    assert found.total() <= MOST[variant, phase], dict(found)


def check_touching(variant, dtype, phase):
    shape = replace(SHAPE, dtype=dtype)
    found = touching(steady(variant, phase, shape), shape)
    assert found <= Counter(TOUCHING[variant, dtype]), dict(found)


def check_memory(variant, phase):
    """Less than half of the keys: no second copy of them or of the values."""
    shape = Shape(kv_heads=8, group=3, head_dim=64)
    cache = steady(variant, phase, shape, budget=512)
    assert extra_memory(cache, shape) < cache.keys.nbytes // 2


@pytest.mark.parametrize(("variant", "phase"), MOST)
def test_no_operation_is_added(variant, phase):
    check_operations(variant, phase)


@pytest.mark.parametrize("phase", ["below", "full"])
@pytest.mark.parametrize(("variant", "dtype"), TOUCHING)
def test_rows_are_read_by_the_products_and_written_in_place_alone(variant, dtype, phase):
    check_touching(variant, dtype, phase)


@pytest.mark.parametrize("phase", ["below", "full"])
@pytest.mark.parametrize("variant", ["h2o", "h2o-rewind", "h2o-key"])
def test_a_step_needs_no_second_copy(variant, phase):
    check_memory(variant, phase)


@pytest.mark.parametrize("phase", ["below", "full"])
def test_tokens_are_taken_back_into_the_same_buffers(phase):
    shape = Shape(kv_heads=8, group=3, head_dim=64)
    cache = steady("h2o-rewind", phase, shape, budget=512)
    layer.call(cache, layer.drawn(shape, 4))
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    cache.trim(3)
    mx.eval(cache.state)
    assert mx.get_peak_memory() - before < cache.keys.nbytes // 2


@pytest.mark.parametrize("phase", ["below", "full"])
def test_a_copy_is_found(monkeypatch, phase):
    """Each of the three checks fails when the keys are copied on their way out."""
    plain = H2OKVCache.update_and_fetch

    def copying(self, keys, values):
        keys, values = plain(self, keys, values)
        return keys + 0, values

    monkeypatch.setattr(H2OKVCache, "update_and_fetch", copying)
    with pytest.raises(AssertionError, match="'Add': "):
        check_operations("h2o", phase)
    with pytest.raises(AssertionError, match="'Add': 1"):
        check_touching("h2o", "float32", phase)
    with pytest.raises(AssertionError):
        check_memory("h2o", phase)


# Prefill


BOUNDED = [  # shape, budget, chunk, elements of a block
    (Shape(2, 2, 32), 48, 64, 1 << 22),
    (Shape(2, 2, 32), 48, 64, 1 << 12),
    (Shape(2, 2, 32, dtype="float16"), 48, 64, 1 << 12),
    (Shape(2, 3, 64, batch=3), 100, 32, 1 << 14),
    (Shape(1, 1, 128), 128, 16, 1 << 22),
    (Shape(1, 8, 16), 16, 128, 1 << 12),
]


def peak_of_a_long_prompt(shape, budget, chunk):
    """Of a prompt whose keys alone are twice the bound, which knows no length: any that stay would show.

    Peaks of two lengths can't be compared: whether one buffer goes before the next comes is a race between threads.
    """
    bound = memory.prefill_bound(shape, budget, chunk)
    chunks = 4 * bound // (chunk * shape.row_bytes) + 1
    return memory.prefill_peak(shape, budget, chunk, chunks * chunk)


@pytest.mark.parametrize(("shape", "budget", "chunk", "elements"), BOUNDED)
def test_prefill_stays_below_its_bound_whatever_the_prompt(monkeypatch, shape, budget, chunk, elements):
    monkeypatch.setattr(attention, "BLOCK_ELEMENTS", elements)
    bound = memory.prefill_bound(shape, budget, chunk)
    assert bound / 3 < peak_of_a_long_prompt(shape, budget, chunk) <= bound


def test_keys_that_stay_are_found(monkeypatch):
    shape, budget, chunk, _ = BOUNDED[0]
    plain, kept = H2OKVCache.update_and_fetch, []

    def keeping(self, keys, values):
        kept.append(keys)
        return plain(self, keys, values)

    monkeypatch.setattr(H2OKVCache, "update_and_fetch", keeping)
    assert peak_of_a_long_prompt(shape, budget, chunk) > memory.prefill_bound(shape, budget, chunk)


def test_the_bound_counts_one_block():
    """With blocks twice as large, and nothing else changed, it grows by what one block holds."""
    shape, whole = Shape(8, 3, 64), attention.BLOCK_ELEMENTS
    small = memory.prefill_bound(shape, 1024, 2048)
    try:
        attention.BLOCK_ELEMENTS = 2 * whole
        large = memory.prefill_bound(shape, 1024, 2048)
    finally:
        attention.BLOCK_ELEMENTS = whole
    queries = 2 * whole // (24 * 3072) - whole // (24 * 3072)
    assert large - small == queries * 3072 * (3 * 4 * 24 + 3)


# Many steps


@pytest.mark.parametrize("budget", [64, 4096])
def test_memory_is_level_over_many_steps(budget):
    """Above the budget and below it: what is in use beyond the cache's own buffers does not grow."""
    beyond = [b for _, b in memory.level(Shape(1, 2, 16), budget, n_steps=1500, window=250)]
    assert len(beyond) == 6
    assert max(beyond[1:]) - min(beyond[1:]) <= memory.KIB


@pytest.mark.parametrize("variant", ["h2o", "h2o-8bit", "h2o-kivi", "h2o-gear"])
@pytest.mark.parametrize("n_tokens", [32, 64, 300])
def test_the_process_holds_what_nbytes_says(n_tokens, variant):
    in_use, said = memory.held(Shape(2, 2, 64), 64, n_tokens, variant)
    assert said <= in_use <= said + 32 * memory.KIB
