"""CUDA text is compiled to PTX: MLX's text around it, the compiler's errors with their line. Nothing runs."""

import mlx.core as mx
import pytest

import mslemu
from mslemu import cuda, nvrtc
from mslemu.signature import Definition

SOURCE = "\n  // x_shape x_strides m_ndim m_strides s_shape\n  y[0] = T(x[0]);\n"
# Printed by the CUDA back end of mlx 0.32.4 (libmlx.so of mlx-cuda-13) for the definition below.
PRINTED = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

// header
namespace mlx::core::cu {

namespace cg = cooperative_groups;

__global__ void custom_kernel_probe_bfloat16_t_64_t(
    const __half* x,
    const __grid_constant__ Shape x_shape,
    const __grid_constant__ Strides x_strides,
    const __nv_bfloat16* s,
    const bool* m,
    const __grid_constant__ Strides m_strides,
    const __grid_constant__ int m_ndim,
    int32_t* y,
    uint32_t* z) {
  using T = __nv_bfloat16;
  constexpr int D = 64;
  constexpr bool SINKS = true;


  // x_shape x_strides m_ndim m_strides s_shape
  y[0] = T(x[0]);

}

} // namespace mlx::core::cu
"""


def probe(source="y[0] = int(x[0]);", header="", **call):
    kernel = mslemu.cuda_kernel("probe", ["x"], ["y"], source, header)
    return kernel(
        inputs=[mx.zeros((3,))],
        output_shapes=[(2,)],
        output_dtypes=[mx.int32],
        grid=(256, 1, 1),
        threadgroup=(256, 1, 1),
        **call,
    )


def test_the_text_is_mlxs():
    definition = Definition("probe", ("x", "s", "m"), ("y", "z"), SOURCE, "// header\n", False, False)
    inputs = [mx.zeros((2, 3), mx.float16), mx.array(0.0, mx.bfloat16), mx.zeros((4,), mx.bool_)]
    template = [("T", mx.bfloat16), ("D", 64), ("SINKS", True)]
    assert cuda.generate(definition, inputs, [mx.int32, mx.uint32], template) == PRINTED


def test_a_kernel_is_compiled_and_gives_zeros(capsys):
    with mslemu.compiled() as made:
        (out,) = probe(template=[("N", 3), ("F", False)], verbose=True)
    assert out.dtype == mx.int32
    assert out.tolist() == [0, 0]
    (ptx,) = made
    assert ".visible .entry" in ptx
    assert f".target sm_{nvrtc.ARCHITECTURE.removeprefix('compute_')}" in ptx
    assert "custom_kernel_probe_3_f(" in capsys.readouterr().out


def test_every_dtype_but_complex_numbers_has_a_name_that_compiles():
    dtypes = [dtype for dtype in cuda.CUDA_NAMES if dtype != mx.complex64]
    sizes = " && ".join(f"sizeof(T{i}) == {dtype.size}" for i, dtype in enumerate(dtypes))
    probe(f"static_assert({sizes});", template=[(f"T{i}", dtype) for i, dtype in enumerate(dtypes)])


def test_an_error_has_its_line():
    with pytest.raises(mslemu.MslError, match=r'compile at probe\.cu:\d+: identifier "nothing" is undefined') as found:
        probe("y[0] = 1;\ny[1] = nothing;\ny[2] = 0 0;")
    assert len(found.value.faults) == 2
    assert found.value.faults[1].line == found.value.line + 1


def test_nothing_is_collected_where_it_does_not_compile():
    with mslemu.compiled() as made, pytest.raises(mslemu.MslError):
        probe(header="#error no")
    assert not made


def test_without_the_compiler_there_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", lambda name: None)
    nvrtc.folder.cache_clear()
    with pytest.raises(FileNotFoundError, match=r'needs NVRTC.*pip install "mslemu\[cuda\]"'):
        probe()
    nvrtc.folder.cache_clear()
