"""The text that MLX makes of a kernel's header and source: the function around them.

Written as mlx/backend/common/metal_kernel.cpp writes it, its oddities included; `mlx_text` has MLX's own, to compare.
"""

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

TYPE_NAMES = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.float16: "float16_t",
    mx.float32: "float",
    mx.bfloat16: "bfloat16_t",
    mx.complex64: "complex64_t",
}
_TRIPLES = (
    "dispatch_threads_per_threadgroup",
    "grid_origin",
    "grid_size",
    "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "threadgroup_position_in_grid",
    "threadgroups_per_grid",
    "threads_per_grid",
    "threads_per_threadgroup",
)
_COUNTS = (
    "dispatch_quadgroups_per_threadgroup",
    "dispatch_simdgroups_per_threadgroup",
    "quadgroup_index_in_threadgroup",
    "quadgroups_per_threadgroup",
    "simdgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup",
    "thread_execution_width",
    "thread_index_in_quadgroup",
    "thread_index_in_simdgroup",
    "thread_index_in_threadgroup",
    "threads_per_simdgroup",
)
ATTRIBUTES = dict(sorted([*((name, "uint3") for name in _TRIPLES), *((name, "uint") for name in _COUNTS)]))
# What MLX passes beside an input whose source names it.
COMPANIONS = {"_shape": "int*", "_strides": "int64_t*", "_ndim": "int&"}
_SMALL = 8  # inputs with fewer elements are in the constant address space
TemplateArgument = bool | int | mx.Dtype


@dataclass(frozen=True)
class Definition:
    """What `mslemu.metal_kernel` was given."""

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str
    ensure_row_contiguous: bool
    atomic_outputs: bool
    math_mode: str = "safe"

    def companions(self, i: int, array: mx.array) -> list[str]:
        """Which of input ``i``'s shape, strides and ndim are passed: a matter of substrings of the source."""
        name = self.input_names[i]
        return [suffix for suffix in COMPANIONS if array.ndim > 0 and name + suffix in self.source]


@dataclass(frozen=True)
class Text:
    """A kernel's generated text in its parts, and what is needed to call it from C++."""

    function: str
    header: str
    declaration: str
    source: str
    instantiation: str
    instance: str  # the function with its template's arguments
    buffers: tuple[str, ...]  # types of the arguments that are memory, in order
    attributes: tuple[str, ...]

    def whole(self) -> str:
        """Return what MLX would hand to Metal, after its own utilities."""
        return f"{self.header}{self.declaration}{self.source}\n}}\n{self.instantiation}"


def template_text(value: TemplateArgument) -> str:
    """Return a template argument as MLX writes it.

    Raises:
        ValueError: it is neither a bool, an int nor a dtype.
    """
    if isinstance(value, bool | int):
        return str(int(value))
    if isinstance(value, mx.Dtype):
        return TYPE_NAMES[value]
    raise ValueError(f"[metal_kernel] Invalid template argument {value!r}. Must be `mlx.core.Dtype`, `int` or `bool`.")


def _kind(value: TemplateArgument) -> str:
    return "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "typename"


def _function_name(
    name: str, inputs: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype], arguments: Sequence[str]
) -> str:
    parts = ["custom_kernel_" + name]
    if arguments:
        parts.append("_" + "_".join(arguments).replace("-", "_"))  # mlx 0.32.3 left the minus, which is no name
    for array in inputs:
        parts.append(TYPE_NAMES[array.dtype] + ("s" if array.ndim == 0 else "c" if array.size < _SMALL else ""))
    return "_".join([*parts, *(TYPE_NAMES[dtype] for dtype in output_dtypes)])


def _memory(
    definition: Definition, inputs: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype]
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Types and names of the input side's buffers, and of the outputs."""
    read: list[tuple[str, str]] = []
    for i, (name, array) in enumerate(zip(definition.input_names, inputs, strict=True)):
        space = "constant" if array.size < _SMALL else "device"
        read.append((f"const {space} {TYPE_NAMES[array.dtype]}{'&' if array.ndim == 0 else '*'}", name))
        read += [(f"const constant {COMPANIONS[s]}", name + s) for s in definition.companions(i, array)]
    form = "device atomic<{}>*" if definition.atomic_outputs else "device {}*"
    return read, [(form.format(TYPE_NAMES[d]), n) for n, d in zip(definition.output_names, output_dtypes, strict=True)]


def generate(
    definition: Definition,
    inputs: Sequence[mx.array],
    output_dtypes: Sequence[mx.Dtype],
    template: Sequence[tuple[str, TemplateArgument]],
) -> Text:
    """Write a kernel's text as MLX does."""
    arguments = [template_text(value) for _, value in template]
    function = _function_name(definition.name, inputs, output_dtypes, arguments)
    read, written = _memory(definition, inputs, output_dtypes)
    attributes = tuple(name for name in ATTRIBUTES if name in definition.source)
    out = f"template <{', '.join(f'{_kind(value)} {name}' for name, value in template)}>\n" if template else ""
    out += f"[[kernel]] void {function}(\n"
    for i, (type_, name) in enumerate([*read, *written]):
        # MLX counts arrays here, and a shape shifts the count: without attributes the list may end too early.
        ends = i >= len(read) and i >= len(inputs) + len(written) - 1 and not attributes
        out += f"  {type_} {name} [[buffer({i})]]" + (") {\n" if ends else ",\n")
    out += ",\n".join(f"  {ATTRIBUTES[name]} {name} [[{name}]]" for name in attributes)
    out += ") {\n" if attributes else ""
    instance = f"{function}<{', '.join(arguments)}>" if template else function
    host = f'\ntemplate [[host_name("{function}")]] [[kernel]] decltype({instance}) {instance};\n' if template else ""
    types = tuple(type_ for type_, _ in [*read, *written])
    return Text(function, definition.header, out, definition.source, host, instance, types, attributes)


_mlx_kernel: Any = mx.fast.metal_kernel  # now, before a test puts `mslemu.metal_kernel` in its place
_stdout = threading.Lock()


@contextlib.contextmanager
def _standard_output() -> Iterator[Path]:
    """Send what C++ prints to a file, whose path is given."""
    with _stdout, tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "printed")
        saved = os.dup(1)
        try:
            with path.open("wb") as file:
                os.dup2(file.fileno(), 1)
            yield path
        finally:
            os.dup2(saved, 1)
            os.close(saved)


def mlx_text(definition: dict[str, Any], call: dict[str, Any]) -> str:
    """Return the text that MLX itself generates, on any machine.

    While a function is traced for export MLX builds the kernel without a Metal back end, and ``verbose`` prints it.

    Args:
        definition: arguments of mx.fast.metal_kernel.
        call: arguments of the kernel it returns.
    """
    kernel = _mlx_kernel(**definition)
    rest = {**call, "verbose": True}
    inputs = [value if isinstance(value, mx.array) else mx.array(value) for value in rest.pop("inputs")]
    with _standard_output() as path:
        mx.export_function(str(path.with_name("k.mlxfn")), lambda *arrays: kernel(inputs=list(arrays), **rest), *inputs)
        printed = path.read_text()
    return printed.split("```\n", 1)[1].rsplit("\n```", 1)[0]
