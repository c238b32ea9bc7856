"""The language: types, vectors, SIMD-group functions, atomics, a thread's attributes, forms that kernels use."""

import mlx.core as mx
import numpy as np
import pytest

import mslemu

EPSILON = {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}


def to_numpy(array):
    return np.array(array.astype(mx.float32), np.float64)


def test_half_is_rounded_at_each_step(run):
    # 2048 + 1 is 2048 in half: a sum kept in float would give 2054.
    source = "T s = a[0] + T(1) + T(1); for (int i = 0; i < 4; ++i) s += T(1); out[0] = float(s);"
    for dtype, large in ((mx.float16, 2048), (mx.bfloat16, 256)):
        assert run(source, [mx.array([large], dtype)], template=[("T", dtype)])[0] == large


def test_a_literal_is_a_float_and_a_float_is_no_bfloat(run):
    assert run("out[0] = sizeof(1.0) + sizeof(a[0] * 2.0);", [mx.array([1.0], mx.float16)])[0] == 8
    with pytest.raises(mslemu.MslError, match=r"compile at k\.metal:2: "):
        run("bfloat x;\nx = a[0];\nout[0] = x;", [mx.array([1.0])])


def test_templates_and_kinds_of_arguments(run):
    source = "out[0] = F ? T(N) * a : T(b[1] ? c : -1);"
    inputs = [mx.array(3.0), mx.array([False, True]), 5]
    for flag, want in ((True, 21.0), (False, 5.0)):
        out = run(source, inputs, dtype=mx.float16, template=[("T", mx.float16), ("N", 7), ("F", flag)])
        assert out.dtype == mx.float16
        assert out[0] == want


def test_vectors(run, normal):
    source = """
    const device float4* rows = (const device float4*)a;
    float4 x = rows[0], y = rows[1];
    float2 z = x.xy * 2.0f + y.zw;
    half4 h = half4(x);
    h.xy = h.zw;
    uint4 u = uint4(1, 2, 3, 4) & 3u;
    float3 t = float3(z, 1.0f);
    bool4 small = x < float4(0.0f);
    x = clamp(select(x, y, small), -1.0f, 1.0f);
    out[0] = dot(rows[0], y) + z.x + float(h.x) + float(u.w + u.z) + t[2] + (any(small) ? 0.5f : 0.0f);
    ((device float4*)(out + 4))[0] = fma(x, x, float4(x.xy, y.zw));
    """
    a = normal(2, 4)
    x, y = to_numpy(a)
    kept = np.clip(np.where(x < 0, y, x), -1, 1)
    first = x @ y + x[0] * 2 + y[2] + np.float16(x[2]) + 3 + 1 + 0.5 * (x < 0).any()
    out = run("for (int i = 0; i < 4; ++i) out[i] = 0;" + source, [a], shape=(8,))
    np.testing.assert_allclose(out[0].item(), first, rtol=1e-5)
    np.testing.assert_allclose(to_numpy(out[4:]), kept**2 + np.concatenate([kept[:2], y[2:]]), rtol=1e-5)


def test_atomics_of_two_threadgroups(run):
    source = """
    const uint i = thread_position_in_grid.x;
    threadgroup atomic<uint> count;
    if (thread_index_in_threadgroup == 0) atomic_store_explicit(&count, 0u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    atomic_fetch_add_explicit(&count, 1u, memory_order_relaxed);
    atomic_fetch_add_explicit(&out[0], float(a[i]), memory_order_relaxed);
    atomic_fetch_max_explicit(&out[1], float(a[i]), memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float counted = float(atomic_load_explicit(&count, memory_order_relaxed));
    if (thread_index_in_threadgroup == 0) atomic_fetch_add_explicit(&out[2], counted, memory_order_relaxed);
    """
    kernel = mslemu.metal_kernel("k", ["a"], ["out"], source, atomic_outputs=True)
    call = {"output_shapes": [(3,)], "output_dtypes": [mx.float32], "init_value": 0}
    (out,) = kernel(inputs=[mx.arange(100)], grid=(100, 1, 1), threadgroup=(64, 1, 1), **call)
    assert out.tolist() == [4950, 99, 100]


def test_simd_functions(run):
    source = """
    const uint i = thread_index_in_simdgroup;
    const float x = float(i);
    device float* row = out + i * 12;
    row[0] = simd_shuffle(x, 5);
    row[1] = simd_broadcast(x, ushort(3));
    row[2] = simd_shuffle_xor(x, 16);
    row[3] = simd_shuffle_down(x, 4);
    row[4] = simd_shuffle_up(x, 4);
    row[5] = simd_prefix_inclusive_sum(x);
    row[6] = simd_prefix_exclusive_sum(x);
    row[7] = simd_min(x) + simd_max(x) * 10;
    row[8] = simd_all(x >= 0) + simd_any(x > 31) * 2 + simd_any(x == 31) * 4;
    row[9] = float(popcount(uint(ulong(simd_ballot(i % 3 == 0)))));
    row[10] = simd_broadcast_first(x) + simd_is_first() * 100;
    row[11] = simd_shuffle_and_fill_up(x, -x, 2);
    simdgroup_barrier(mem_flags::mem_none);
    """
    out = np.array(run(source, shape=(32, 12), threads=32))
    i = np.arange(32)
    want = [np.full(32, 5), np.full(32, 3), i ^ 16, np.minimum(i + 4, i + 4 * (i < 28)), i - 4 * (i >= 4)]
    want += [i * (i + 1) / 2, i * (i - 1) / 2, np.full(32, 310), np.full(32, 5), np.full(32, 11), 100 * (i == 0)]
    want += [np.where(i < 2, -(i + 30), i - 2)]
    np.testing.assert_array_equal(out, np.stack(want, 1))


def test_a_threads_attributes(run):
    source = """
    const uint3 p = thread_position_in_grid;
    device float* row = out + ((p.z * threads_per_grid.y + p.y) * threads_per_grid.x + p.x) * 6;
    const uint3 size = threads_per_threadgroup, group = threadgroup_position_in_grid;
    row[0] = size.x * 100 + size.y * 10 + size.z;
    row[1] = group.x * 100 + group.y * 10 + group.z;
    row[2] = thread_index_in_threadgroup;
    row[3] = dispatch_threads_per_threadgroup.x;
    row[4] = simdgroups_per_threadgroup * 10 + threads_per_simdgroup;
    row[5] = threadgroups_per_grid.x * 100 + threadgroups_per_grid.y * 10 + threadgroups_per_grid.z;
    """
    kernel = mslemu.metal_kernel("k", [], ["out"], source)
    call = {"output_shapes": [(2, 3, 5, 6)], "output_dtypes": [mx.float32]}
    (out,) = kernel(inputs=[], grid=(5, 3, 2), threadgroup=(4, 2, 8), **call)
    # The last threadgroup along x has one thread, along y one, and none is deeper than the grid.
    assert out[1, 2, 4].tolist() == [112, 110, 1, 4, 42, 221]
    assert out[0, 0, 3].tolist() == [422, 0, 3, 4, 42, 221]


def test_limits_and_bits(run):
    source = """
    out[0] = metal::numeric_limits<float>::infinity() == INFINITY && isinf(Limits<T>::max) && isnan(NAN);
    out[1] = as_type<float>(0x40490fdbu);
    out[2] = float(as_type<ushort>(half(1)));
    out[3] = float(metal::numeric_limits<int>::min()) + float(metal::numeric_limits<uchar>::max());
    out[4] = isfinite(a[0]) + 2 * isfinite(INFINITY);
    out[5] = max(a[0], NAN) + ceildiv(7, 2) + clz(1u) + abs(-2);
    """
    out = run(source, [mx.array([4.0])], shape=(6,), template=[("T", mx.float16)])
    np.testing.assert_allclose(out.tolist(), [1, np.pi, 15360, 255 - 2.0**31, 1, 4 + 4 + 31 + 2], rtol=1e-6)


def test_forms_that_kernels_use(run):
    header = """
    #include <metal_stdlib>
    #include <metal_simdgroup>
    using namespace metal;
    #define UNROLL _Pragma("clang loop unroll(full)")
    constant constexpr int kLanes = 32;
    static constexpr constant float kTable[3] = {1.0f, 2.0f, 3.0f};
    template <typename T, int N>
    struct Block {
      T v[N];
      METAL_FUNC T sum() const thread { T s = 0; for (int i = 0; i < N; ++i) s += v[i]; return s; }
    };
    template <typename T> inline T summed(T x, threadgroup T* scratch, uint lane, uint group, uint groups) {
      x = simd_sum(x);
      if (lane == 0) scratch[group] = x;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      return simd_sum(lane < groups ? scratch[lane] : T(0));
    }
    """
    source = """
    typedef vec<T, 4> T4;
    const uint2 ij = thread_position_in_grid.xy;
    threadgroup T4 rows[N / 4];
    threadgroup float scratch[kLanes];
    device const T4* quads = (device const T4*)a;
    if (ij.x < uint(N / 4)) rows[ij.x] = quads[ij.x];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Block<float, 4> block;
    UNROLL for (int k = 0; k < 4; ++k) block.v[k] = float(rows[ij.x % (N / 4)][k]);
    const float mine = ij.x < uint(N / 4) ? block.sum() : 0.0f;
    const float total = summed(
        mine, scratch, thread_index_in_simdgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup);
    const float4 moved = simd_shuffle_down(float4(mine), 1);
    [[maybe_unused]] const half2 ones = as_type<half2>(0x3c003c00u);
    const half lanes = simd_sum(1.0h);
    float cosine;
    const float sine = sincos(0.5f, cosine);
    if constexpr (N > 4) {
      if (ij.x == 0) {
        out[0] = T(total);
        out[1] = T(lanes + ones.x) + T(kTable[2]);
        out[2] = T(sine + cosine);
        out[3] = T(fast::divide(moved.z, 4.0f) + precise::pow(2.0f, 3.0f));
        out[4] = a[1] * T(2) + -a[0];
      }
    }
    """
    for dtype in EPSILON:
        a = mx.arange(1, 129).astype(dtype)
        given = {"template": [("T", dtype), ("N", 128)], "threads": 96, "definition": {"header": header}}
        out = run(source, [a], shape=(5,), dtype=dtype, **given)
        want = [128 * 129 / 2, 36, np.sin(0.5) + np.cos(0.5), 26 / 4 + 8, 3]
        np.testing.assert_allclose(to_numpy(out), want, rtol=2 * EPSILON[dtype])
