"""`cuda_kernel`: mx.fast.cuda_kernel's signature, compiled to PTX and not run.

The text is the one that MLX's CUDA back end makes (mlx/backend/cuda/custom_kernel.cpp), and the float types are
NVIDIA's. Two of MLX's headers, which only its CUDA wheel has, are stand-ins.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx

from mslemu import nvrtc
from mslemu.signature import TYPE_NAMES, Definition, TemplateArgument

CUDA_NAMES = {**TYPE_NAMES, mx.float16: "__half", mx.bfloat16: "__nv_bfloat16"}
_COMPANIONS = {"_shape": "Shape", "_strides": "Strides", "_ndim": "int"}
_HEADERS = {
    "mlx/backend/cuda/device/utils.cuh": """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
using int8_t = signed char; using int16_t = short; using int32_t = int; using int64_t = long;
using uint8_t = unsigned char; using uint16_t = unsigned short; using uint32_t = unsigned int;
using uint64_t = unsigned long;
namespace mlx::core::cu {
template <typename T>
struct Sizes {  // cuda::std::array<T, 10>
  T elements[10];
  __device__ constexpr const T& operator[](unsigned long i) const { return elements[i]; }
};
using Shape = Sizes<int32_t>;
using Strides = Sizes<int64_t>;
}
""",
    "cooperative_groups.h": "namespace cooperative_groups {}\n",
}
_collectors: list[list[str]] = []


@contextlib.contextmanager
def compiled() -> Iterator[list[str]]:
    """Collect the PTX of the kernels that are compiled inside a ``with`` block, in their order."""
    made: list[str] = []
    _collectors.append(made)
    try:
        yield made
    finally:
        _collectors[:] = [other for other in _collectors if other is not made]


def _constant(name: str, value: TemplateArgument) -> str:
    if isinstance(value, mx.Dtype):
        return f"  using {name} = {CUDA_NAMES[value]};\n"
    kind = "bool" if isinstance(value, bool) else "int"
    return f"  constexpr {kind} {name} = {str(value).lower()};\n"


def _in_name(value: TemplateArgument) -> str:
    if isinstance(value, mx.Dtype):
        return TYPE_NAMES[value]
    return str(value) if not isinstance(value, bool) else "t" if value else "f"


def generate(
    definition: Definition,
    inputs: Sequence[mx.array],
    output_dtypes: Sequence[mx.Dtype],
    template: Sequence[tuple[str, TemplateArgument]],
) -> str:
    """Write a kernel's text as MLX's CUDA back end does."""
    name = "_".join(["custom_kernel", definition.name, *(_in_name(value) for _, value in template)])
    arguments = []
    for i, (input_name, array) in enumerate(zip(definition.input_names, inputs, strict=True)):
        arguments.append(f"    const {CUDA_NAMES[array.dtype]}* {input_name}")
        for suffix in definition.companions(i, array):
            arguments.append(f"    const __grid_constant__ {_COMPANIONS[suffix]} {input_name}{suffix}")
    outputs = zip(output_dtypes, definition.output_names, strict=True)
    arguments += [f"    {CUDA_NAMES[dtype]}* {output}" for dtype, output in outputs]
    constants = "".join(_constant(*each) for each in template) + ("\n" if template else "")
    return (
        '\n#include "mlx/backend/cuda/device/utils.cuh"\n\n#include <cooperative_groups.h>\n\n'
        f"{definition.header}namespace mlx::core::cu {{\n\nnamespace cg = cooperative_groups;\n\n"
        f"__global__ void {name}(\n" + ",\n".join(arguments) + f") {{\n{constants}{definition.source}\n}}\n\n"
        "} // namespace mlx::core::cu\n"
    )


@functools.lru_cache(maxsize=64)  # MLX compiles a text once, too
def _ptx(name: str, text: str) -> str:
    return nvrtc.to_ptx(name, text, _HEADERS)


def cuda_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    shared_memory: int = 0,
) -> Callable[..., list[mx.array]]:
    """Make a kernel as mx.fast.cuda_kernel does; a call compiles it and runs nothing.

    Args:
        name: of the kernel; errors name the file NAME.cu.
        input_names: parameter names of the inputs.
        output_names: parameter names of the outputs.
        source: the function's body in CUDA C++.
        header: CUDA C++ before the function.
        ensure_row_contiguous: not looked at: nothing is read.
        shared_memory: likewise.

    Returns:
        A function with the keyword arguments of MLX's kernels. It returns zeros of the shapes and dtypes asked for, and
        raises `mslemu.MslError` where the text does not compile.
    """
    definition = Definition(
        name, tuple(input_names), tuple(output_names), source, header, ensure_row_contiguous, atomic_outputs=False
    )

    def call(
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, TemplateArgument]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: object = None,
    ) -> list[mx.array]:
        arrays = [value if isinstance(value, mx.array) else mx.array(value) for value in inputs]
        text = generate(definition, arrays, output_dtypes, template or [])
        if verbose:
            print(f"Generated source code for `{name}`:\n```\n{text}\n```")
        ptx = _ptx(name, text)
        for made in _collectors:
            made.append(ptx)
        return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

    return call
