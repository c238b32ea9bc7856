"""Each kernel's text, through ``h2o_metal.cuda`` and MLX's CUDA signature, compiled to PTX by NVIDIA's compiler.

Compiled, not executed. ``H2O_PTX=all`` compiles every dtype with every width and group, and with every width, mask and
sinks, instead of some of each.
"""

import os
import re
from itertools import product

import mlx.core as mx
import mlx.nn as nn
import pytest

import mslemu
from h2o_core import H2OConfig, init
from h2o_metal import attention, eviction, kernel, rotation

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
WIDTHS = [64, 80, 96, 128, 192, 256]
GROUPS = [1, 2, 4, 7, 8, 16]
CONFIG = H2OConfig(budget=8, n_sink=1, grace=2)
ONE = ["h2o_decode", "h2o_attend_one", "h2o_attend_part", "h2o_decode_merge", "h2o_attend_part", "h2o_attend_merge"]
CHUNK = ["h2o_softmax_rows", "h2o_column_mass"]
SELECTION = ["h2o_victims", "h2o_evict"]
BLOCK_MEMORY = 49152  # bytes that CUDA gives a block without being asked
ALL = os.environ.get("H2O_PTX") == "all"

# dtype, D, Dv, G, with sink logits: each dtype with each width, each with each G and with sinks and without.
HEADS = [
    (dtype, width, width, GROUPS[(i + 2 * j) % 6], (i + j) % 2 == 0)
    for (i, width), (j, dtype) in product(enumerate(WIDTHS), enumerate(DTYPES))
]
HEADS += [(mx.bfloat16, 192, 128, 16, True), (mx.float16, 64, 0, 4, False)]
CHUNKS = [(dtype, WIDTHS[2 * j + mask % 2], GROUPS[2 * mask + j % 2], mask, (j + mask) % 2 == 0)
          for (j, dtype), mask in product(enumerate(DTYPES), range(3))]  # fmt: skip
if ALL:
    triples = product(enumerate(DTYPES), enumerate(WIDTHS), enumerate(GROUPS))
    HEADS += [(dtype, w, w, g, (i + j + k) % 2 == 0) for (i, dtype), (j, w), (k, g) in triples]
    quadruples = product(DTYPES, enumerate(WIDTHS), range(3), [False, True])
    CHUNKS += [(dtype, w, GROUPS[(i + mask) % 6], mask, s) for dtype, (i, w), mask, s in quadruples]


def arrays(dtype, group, width, value_width, n_queries=1):
    shapes = [(1, group, n_queries, width), (1, 1, 9, width), (1, 1, 9, value_width)]
    return [mx.zeros(shape, dtype) for shape in shapes]


def compiled(ptx, ran):
    """What ran, after a look at its PTX: it is that kernel's, and its memory is within a block's."""
    for name, text in zip(ran, ptx, strict=True):
        assert re.search(rf"\.entry \w*custom_kernel_{name}", text)
        assert sum(map(int, re.findall(r"\.shared \.align \d+ \.b8 \w+\[(\d+)\]", text))) <= BLOCK_MEMORY
    return ran


@pytest.mark.parametrize("head", HEADS, ids=str)
def test_one_query(ptx, monkeypatch, head):
    dtype, width, value_width, group, with_sinks = head
    q, k, v = arrays(dtype, group, width, value_width)
    sinks = mx.zeros((group,), dtype) if with_sinks else None
    with kernel.launches() as ran:
        for whole in (1024, 4):
            monkeypatch.setattr(attention, "WHOLE", whole)
            monkeypatch.setattr(attention, "PART", 4)
            eviction.decode_step(CONFIG, init(1, 1, capacity=9), q, k, v, 0.1, sinks)
            attention.attend(q, k, v, 0.1, sinks=sinks)
    assert compiled(ptx, ran) == ONE


@pytest.mark.parametrize("chunk", CHUNKS, ids=str)
def test_a_chunk(ptx, chunk):
    dtype, width, group, mask, with_sinks = chunk
    q, k, v = arrays(dtype, group, width, 0, n_queries=5)
    shown = [None, "causal", mx.ones((1, 1, 5, 9), mx.bool_)][mask]
    with kernel.launches() as ran:
        attention.attend(q, k, v, 0.1, 0.9, shown, sinks=mx.zeros((group,)) if with_sinks else None)
    assert compiled(ptx, ran) == CHUNK


def test_selection(ptx):
    with kernel.launches() as ran:
        eviction.victims(CONFIG, init(1, 1, capacity=9))
        eviction.evict(CONFIG, init(1, 1, capacity=9))
    assert compiled(ptx, ran) == SELECTION


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("traditional", [False, True])
def test_rotation(ptx, dtype, traditional):
    x, at, rope = mx.zeros((1, 1, 9, 80), dtype), mx.arange(9), nn.RoPE(64, traditional=traditional)
    with kernel.launches() as ran:
        rotation.rotate(x, at, rope)
        rotation.derotate(x, at, rope)
        rotation.rerotate(x, at, at, rope)
    assert compiled(ptx, ran) == ["h2o_rotate"] * 3


def test_no_kernel_is_left_out():
    assert {*ONE, *CHUNK, *SELECTION, "h2o_rotate"} == set(kernel.TEXTS)


@pytest.mark.parametrize(("group", "width"), [(32, 110), (16, 350)])
def test_the_largest_heads_fit_into_a_block(ptx, group, width):
    """What just fits into Metal's 32 KB; `compiled` sums up what CUDA's compiler makes of it."""
    q, k, v = arrays(mx.float32, group, width, 8)
    with kernel.launches() as ran:
        eviction.decode_step(CONFIG, init(1, 1, capacity=9), q, k, v, 0.1)
    assert compiled(ptx, ran) == ["h2o_decode"]


RUNS = {
    "h2o_victims": lambda: eviction.victims(CONFIG, init(1, 1, capacity=9)),
    "h2o_evict": lambda: eviction.evict(CONFIG, init(1, 1, capacity=9)),
    "h2o_rotate": lambda: rotation.rotate(mx.zeros((1, 1, 9, 64)), mx.arange(9), nn.RoPE(64)),
    **{name: lambda: attention.attend(*arrays(mx.float32, 2, 64, 0, 5), 0.1) for name in CHUNK},
    **{name: lambda: attention.attend(*arrays(mx.float32, 2, 64, 64), 0.1) for name in ONE if "attend" in name},
    **{name: lambda: eviction.decode_step(CONFIG, init(1, 1, capacity=9), *arrays(mx.float32, 2, 64, 64), 0.1)
       for name in ONE if "decode" in name},
}  # fmt: skip


@pytest.mark.parametrize("part", ["header", "source"])
@pytest.mark.parametrize("name", kernel.TEXTS)
def test_a_mistake_in_the_text_does_not_compile(ptx, monkeypatch, name, part):
    if name.endswith(("part", "merge")):
        monkeypatch.setattr(attention, "WHOLE", 4)
        monkeypatch.setattr(attention, "PART", 4)

    def broken(**definition):
        if definition["name"] == name:
            definition[part] += "\ninline float wrong() { return half_a_word; }" if part == "header" else "\nout = 1.5;"
            return mslemu.cuda_kernel(**definition)
        return lambda **call: list(map(mx.zeros, call["output_shapes"], call["output_dtypes"]))

    monkeypatch.setattr(mx.fast, "cuda_kernel", broken)
    with pytest.raises(mslemu.MslError, match=rf"compile at {name}\.cu:\d+"):
        RUNS[name]()
    assert not ptx
