"""Kernels without a fault run, and give what numpy gives in float64."""

import mlx.core as mx
import numpy as np
import pytest

import mslemu

FLOATS = [mx.float32, mx.float16, mx.bfloat16]
EPSILON = {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}
SUM = """
threadgroup float part[32];
const uint i = thread_position_in_threadgroup.x;
float s = 0;
for (uint j = i; j < uint(a_shape[0]); j += threads_per_threadgroup.x) s += float(a[j]);
s = simd_sum(s);
if (thread_index_in_simdgroup == 0) part[simdgroup_index_in_threadgroup] = s;
threadgroup_barrier(mem_flags::mem_threadgroup);
if (i == 0) {
  float t = 0;
  for (uint j = 0; j < simdgroups_per_threadgroup; ++j) t += part[j];
  out[0] = t;
}
"""
SOFTMAX = """
threadgroup float part[32];
const uint i = thread_index_in_threadgroup, n = threads_per_threadgroup.x, size = a_shape[0];
const uint lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
float m = -INFINITY;
for (uint j = i; j < size; j += n) m = max(m, a[j]);
m = simd_max(m);
if (lane == 0) part[group] = m;
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint j = 0; j < simdgroups_per_threadgroup; ++j) m = max(m, part[j]);
threadgroup_barrier(mem_flags::mem_threadgroup);
float s = 0;
for (uint j = i; j < size; j += n) s += metal::exp(a[j] - m);
s = simd_sum(s);
if (lane == 0) part[group] = s;
threadgroup_barrier(mem_flags::mem_threadgroup);
s = 0;
for (uint j = 0; j < simdgroups_per_threadgroup; ++j) s += part[j];
for (uint j = i; j < size; j += n) out[j] = fast::exp(a[j] - m) / s;
"""


def to_numpy(array):
    return np.array(array.astype(mx.float32), np.float64)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_elementwise_over_a_partial_last_threadgroup(run, normal, dtype):
    a = normal(1000, dtype=dtype)
    source = "uint i = thread_position_in_grid.x; out[i] = T(metal::exp(a[i]) * T(2));"
    kernel = mslemu.metal_kernel("k", ["a"], ["out"], source)
    call = {"template": [("T", dtype)], "output_shapes": [(1000,)], "output_dtypes": [dtype]}
    (out,) = kernel(inputs=[a], grid=(1000, 1, 1), threadgroup=(96, 1, 1), **call)
    assert out.dtype == dtype
    np.testing.assert_allclose(to_numpy(out), 2 * np.exp(to_numpy(a)), rtol=2 * EPSILON[dtype])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("threads", [1, 33, 256])
def test_sum_with_a_barrier(run, normal, dtype, threads):
    a = normal(1000, dtype=dtype)
    np.testing.assert_allclose(run(SUM, [a], threads=threads)[0].item(), to_numpy(a).sum(), rtol=1e-4)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 97, 1000])
def test_softmax_in_every_order(run, normal, size):
    a = normal(size)
    want = np.exp(to_numpy(a) - to_numpy(a).max())
    for schedule in ("forward", "reverse", "shuffled"):
        for order in ("tree", "ascending", "descending"):
            with mslemu.options(schedule=schedule, simd_order=order, seed=size):
                out = run(SOFTMAX, [a], shape=(size,), threads=100)
            np.testing.assert_allclose(to_numpy(out), want / want.sum(), rtol=1e-5)


def test_softmax_with_fast_math_and_unchecked(run, normal):
    a = normal(97)
    want = mx.softmax(a)
    fast = run(SOFTMAX, [a], shape=(97,), threads=64, definition={"compile_options": {"math_mode": "fast"}})
    with mslemu.options(check=False):
        unchecked = run(SOFTMAX, [a], shape=(97,), threads=64)
    for out in (fast, unchecked):
        np.testing.assert_allclose(to_numpy(out), to_numpy(want), rtol=1e-5)


def test_a_thread_may_return_early_where_nothing_waits_for_it(run):
    source = """
    const uint i = thread_position_in_grid.x;
    if (i >= uint(a_shape[0])) return;
    out[i] = simd_sum(a[i]);
    """
    out = run(source, [mx.ones((40,))], shape=(40,), threads=64)
    assert out.tolist() == [32.0] * 32 + [8.0] * 8


def test_strided_inputs_keep_their_layout(run):
    a = mx.arange(24.0).reshape(4, 6)
    source = """
    const uint i = thread_position_in_grid.x;
    out[i] = a[elem_to_loc<int64_t>(i, a_shape, a_strides, a_ndim)];
    """
    for view in (a.T, a[:, ::2], a[::-1], mx.broadcast_to(a[:1], (3, 6)), a[1:, 3:].astype(mx.bfloat16)):
        n = view.size
        given = {"shape": view.shape, "dtype": view.dtype, "threads": n}
        assert mx.array_equal(run(source, [view], definition={"ensure_row_contiguous": False}, **given), view)
        # The copy that MLX makes otherwise has plain strides.
        assert mx.array_equal(run("uint i = thread_position_in_grid.x; out[i] = a[i];", [view], **given), view)


@pytest.mark.parametrize("contiguous", [True, False])
def test_strides_are_the_arrays_own_or_the_copys(run, contiguous):
    a = mx.arange(24.0).reshape(4, 6)
    source = "const uint i = thread_position_in_grid.x; out[i] = a_strides[i];"
    for view, strides in (
        (a.T, [1, 6]),
        (a[:, ::2], [6, 2]),
        (a[::-1], [-6, 1]),
        (mx.broadcast_to(a[:1], (3, 6)), [0, 1]),
    ):
        given = {"threads": 2, "shape": (2,), "dtype": mx.int64, "definition": {"ensure_row_contiguous": contiguous}}
        assert run(source, [view], **given).tolist() == ([view.shape[1], 1] if contiguous else strides)


@pytest.mark.parametrize("dtype", [mx.bool_, mx.uint8, mx.int8, mx.uint16, mx.int64, mx.uint64], ids=str)
def test_every_integer_type_and_initial_values(run, dtype):
    out = run("out[0] = a[1];", [mx.array([0, 1], dtype)], shape=(2,), dtype=dtype, init_value=1)
    assert out.dtype == dtype
    assert out.tolist() == [1, 1]
