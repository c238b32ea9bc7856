"""What stands between the kernels and ``mx.fast.cuda_kernel``: the words, the definition, the size of a grid."""

import mlx.core as mx
import pytest

import mslemu
from h2o_core import H2OConfig, init
from h2o_metal import cuda, eviction, kernel
from mslemu import options

# CUDA's shuffles in Metal's words, so that what metal_on_cuda.h makes of them can run on the emulator.
SHUFFLES = """
#define __shfl_xor_sync(all, x, lanes) metal::simd_shuffle_xor(x, ushort(lanes))
#define __shfl_up_sync(all, x, lanes) metal::simd_shuffle_up(x, ushort(lanes))
#define thread_index_in_simdgroup metal::simd_prefix_exclusive_sum(1u)
namespace words {
"""


@pytest.mark.parametrize("backend", ["emulator"], indirect=True)
def test_a_warp_adds_and_compares_as_a_simdgroup(backend):
    functions = cuda._words().split("// All lanes take part")[1].split("\n", 1)[1].split("}  // namespace metal")[0]
    source = """
        const uint i = thread_position_in_grid.x, mine = x[i];
        out[4 * i] = words::simd_sum(mine);
        out[4 * i + 1] = words::simd_min(mine);
        out[4 * i + 2] = words::simd_prefix_exclusive_sum(mine);
        out[4 * i + 3] = words::simd_shuffle_xor(mine, 5);
    """
    run = mslemu.metal_kernel(
        "words", ["x"], ["out"], source, f"{SHUFFLES}{functions.replace('::min', 'metal::min')}}}\n"
    )
    x = mx.random.randint(0, 1000, (64,), key=mx.random.key(3)).astype(mx.uint32)
    with options(strict=False):
        (out,) = run(
            inputs=[x], output_shapes=[(64, 4)], output_dtypes=[mx.uint32], grid=(64, 1, 1), threadgroup=(64, 1, 1)
        )
    numbers = x.tolist()
    for i, row in enumerate(out.tolist()):
        group = numbers[i // 32 * 32 : i // 32 * 32 + 32]
        assert row == [sum(group), min(group), sum(group[: i % 32]), numbers[i ^ 5]]


def test_texts_go_unchanged_behind_the_words(monkeypatch):
    made = []
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **definition: made.append(definition))
    for name in kernel.TEXTS:
        header, body = kernel.text(name)
        cuda.cuda_kernel(name, ["x"], ["out"], body, header, ensure_row_contiguous=False)
        definition = made.pop()
        assert definition["source"] == body
        assert definition["header"].startswith(cuda._words() + header)
        assert definition["name"] == name
        assert definition["input_names"] == ["x"]
        assert definition["output_names"] == ["out"]
        assert definition["ensure_row_contiguous"] is False


def test_more_heads_than_cuda_takes_are_refused_with_the_way_out(monkeypatch):
    ran = []

    def build(**definition):
        return lambda **call: ran.append(call) or list(map(mx.zeros, call["output_shapes"], call["output_dtypes"]))

    monkeypatch.setattr(mx.fast, "cuda_kernel", build)
    monkeypatch.setattr(kernel, "builder", lambda **definition: cuda.cuda_kernel(**definition))
    config = H2OConfig(budget=8, n_sink=1, grace=2)
    eviction.victims(config, init(5, 13107, capacity=1))
    assert ran.pop()["grid"] == (256, 65535, 1)
    with pytest.raises(
        ValueError, match=r"h2o_victims takes at most 65,535 .*, got 65,536,.*fewer sequences at a time"
    ):
        eviction.victims(config, init(2, 32768, capacity=1))
    assert not ran
