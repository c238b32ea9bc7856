"""One launch: arguments into memory with room around each, the call, and its report read back."""

import ctypes
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mslemu import lower
from mslemu.build import Library
from mslemu.errors import Fault, MslError
from mslemu.settings import SCHEDULES, SIMD_ORDERS, Settings
from mslemu.signature import Definition

_BITS = {mx.bfloat16: np.dtype(np.uint16)}  # numpy has no bfloat16: its bits travel
_GAP = 64 * 1024  # around each buffer, so that an index too far falls into no other
_REPORT = 64 * 1024
_one_at_a_time = threading.Lock()


class Launch(NamedTuple):
    """A kernel that ran: its name, grid and threadgroup as asked for, and what the runtime counted."""

    name: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    threadgroup_bytes: int
    barriers: int
    accesses: int


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("item", ctypes.c_uint64),
        ("writable", ctypes.c_int32),
        ("initialised", ctypes.c_int32),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("arguments", ctypes.c_void_p),
        ("buffers", ctypes.c_void_p),
        ("n_buffers", ctypes.c_uint32),
        ("schedule", ctypes.c_uint32),
        ("simd_order", ctypes.c_uint32),
        ("check", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("report", ctypes.c_void_p),
        ("report_size", ctypes.c_uint64),
        ("threadgroup_bytes", ctypes.c_uint64),
        ("barriers", ctypes.c_uint64),
        ("accesses", ctypes.c_uint64),
    )


@dataclass
class _Argument:
    """One buffer of the kernel: its elements, and where among them the kernel's pointer points."""

    name: str
    elements: np.ndarray[Any, np.dtype[Any]]  # one axis
    origin: int = 0
    output: bool = False
    initialised: bool = True
    memory: np.ndarray[Any, np.dtype[Any]] = field(init=False)


def numpy_dtype(dtype: mx.Dtype) -> np.dtype[Any]:
    """Return numpy's type of the same bits."""
    return _BITS.get(dtype) or np.array(mx.zeros((), dtype)).dtype


def _bits(array: mx.array) -> mx.array:
    return array.view(mx.uint16) if array.dtype == mx.bfloat16 else array


def _strided(array: mx.array) -> tuple[np.ndarray[Any, np.dtype[Any]], int, list[int]]:
    """Return an array's memory as it lies, its origin in it and its strides, in elements."""
    bits: Any = _bits(array)
    values = np.array(bits)
    strides = [stride // values.itemsize for stride in memoryview(bits).strides or ()]
    reach = [(extent - 1) * stride for extent, stride in zip(array.shape, strides, strict=True) if extent]
    origin = -sum(r for r in reach if r < 0)
    memory = np.zeros(origin + sum(r for r in reach if r > 0) + 1, values.dtype)
    in_bytes = [stride * values.itemsize for stride in strides]
    np.lib.stride_tricks.as_strided(memory[origin:], array.shape, in_bytes)[...] = values
    return memory, origin, strides


def _contiguous(array: mx.array) -> tuple[np.ndarray[Any, np.dtype[Any]], int, list[int]]:
    values = np.array(_bits(array), order="C")
    return values.reshape(-1), 0, [stride // values.itemsize for stride in values.strides]


def _inputs(definition: Definition, arrays: Sequence[mx.array]) -> list[_Argument]:
    arguments = []
    for i, (name, array) in enumerate(zip(definition.input_names, arrays, strict=True)):
        layout = _contiguous if definition.ensure_row_contiguous else _strided
        elements, origin, strides = layout(array)
        arguments.append(_Argument(name, elements, origin))
        values: dict[str, np.ndarray[Any, np.dtype[Any]]] = {
            "_shape": np.array(array.shape, np.int32),
            "_strides": np.array(strides, np.int64),
            "_ndim": np.array([array.ndim], np.int32),
        }
        arguments += [_Argument(name + suffix, values[suffix]) for suffix in definition.companions(i, array)]
    return arguments


def _output(name: str, shape: Sequence[int], dtype: mx.Dtype, init_value: float | None) -> _Argument:
    size = int(np.prod(shape, dtype=np.int64))
    if init_value is None:
        # Metal leaves it as it was. NaN in floats; a bool has no such value.
        values = np.full(size * dtype.size, 1 if dtype == mx.bool_ else 0xFF, np.uint8).view(numpy_dtype(dtype))
    else:
        values = np.array(_bits(mx.broadcast_to(mx.array(init_value, dtype), (size,))))
    return _Argument(name, values, output=True, initialised=init_value is not None)


def _lay_out(arguments: list[_Argument]) -> np.ndarray[Any, np.dtype[Any]]:
    """Copy the arguments into one block, far from each other. Untouched pages cost nothing."""
    offsets, end = [], _GAP
    for argument in arguments:
        offsets.append(end)
        end += (argument.elements.nbytes + 2 * _GAP) // 256 * 256
    block = np.empty(end + 256, np.uint8)
    start = -block.ctypes.data % 256
    for argument, offset in zip(arguments, offsets, strict=True):
        nbytes = argument.elements.nbytes
        argument.memory = block[start + offset : start + offset + nbytes].view(argument.elements.dtype)
        argument.memory[...] = argument.elements
    return block


def _address(argument: _Argument) -> int:
    return int(argument.memory.ctypes.data) + argument.origin * argument.elements.itemsize


def _lines(library: Library, addresses: Sequence[str], files: set[str]) -> dict[str, str]:
    """Turn code addresses (from the library's start) into the kernel's file and line, also where calls are inlined."""
    found = {}
    for address in addresses:
        if sys.platform == "darwin":
            base = 1 << 32  # any will do, if the address is moved by the same
            lines = str(library.path.with_suffix(".dwarf"))
            command = ["atos", "-i", "-o", lines, "-l", hex(base), hex(base + int(address, 16))]
        else:
            tool = shutil.which("addr2line") or "llvm-addr2line"
            command = [tool, "-i", "-e", str(library.path), f"0x{address}"]
        frames = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        places = re.findall(r"([^/\s()]+\.metal):(\d+)", frames)
        found[address] = next((f"{file}:{line}" for file, line in places if file in files), "?:0")
    return found


def _faults(report: str, library: Library, name: str) -> list[Fault]:
    lines = _lines(library, sorted(set(re.findall(r"@([0-9a-f]+)\b", report))), set(lower.files(name).values()))
    readable = re.sub(r"@([0-9a-f]+)\b", lambda found: lines[found[1]], report)
    faults = []
    for text in readable.splitlines():
        kind, where, message = text.split("\t", 2)
        file, line = where.rsplit(":", 1)
        faults.append(Fault(kind, file.rsplit("/", 1)[-1], int(line), message))
    # A value that is not there yet is often a race seen from its other side: the race says more.
    return sorted(faults, key=lambda fault: fault.kind == "uninitialised")


def _call(
    library: Library, arguments: list[_Argument], grid: Sequence[int], threadgroup: Sequence[int], settings: Settings
) -> tuple[_Launch, str]:
    addresses = (ctypes.c_void_p * len(arguments))(*map(_address, arguments))
    buffers = (_Buffer * len(arguments))(
        *(
            _Buffer(a.name.encode(), a.memory.ctypes.data, a.memory.nbytes, a.memory.itemsize, a.output, a.initialised)
            for a in arguments
        )
    )
    report = ctypes.create_string_buffer(_REPORT)
    launch = _Launch(
        grid=tuple(grid),
        threadgroup=tuple(threadgroup),
        arguments=ctypes.addressof(addresses),
        buffers=ctypes.addressof(buffers),
        n_buffers=len(arguments),
        schedule=SCHEDULES.index(settings.schedule),
        simd_order=SIMD_ORDERS.index(settings.simd_order),
        check=settings.check,
        seed=settings.seed,
        report=ctypes.addressof(report),
        report_size=_REPORT,
    )
    with _one_at_a_time:  # a library has one runtime, with one launch's state
        library.launch(ctypes.byref(launch))
    return launch, report.value.decode(errors="replace")


def run(
    definition: Definition,
    library: Library,
    inputs: Sequence[mx.array],
    outputs: Sequence[tuple[Sequence[int], mx.Dtype]],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    init_value: float | None,
    settings: Settings,
) -> tuple[list[mx.array], Launch]:
    """Run a kernel's library.

    Raises:
        MslError: it did something that Metal leaves undefined.
    """
    arguments = _inputs(definition, inputs)
    for name, (shape, dtype) in zip(definition.output_names, outputs, strict=True):
        arguments.append(_output(name, shape, dtype, init_value))
    block = _lay_out(arguments)
    launch, report = _call(library, arguments, grid, threadgroup, settings)
    if faults := _faults(report, library, definition.name):
        raise MslError(faults)
    results = []
    for argument, (shape, dtype) in zip(arguments[-len(outputs) :], outputs, strict=True):
        result = mx.array(argument.memory.reshape(tuple(shape)))
        results.append(result.view(mx.bfloat16) if dtype == mx.bfloat16 else result)
    del block  # the arguments' memory, which must live until here
    counted = (launch.threadgroup_bytes, launch.barriers, launch.accesses)
    return results, Launch(definition.name, grid, threadgroup, *counted)
