"""NVIDIA's compiler NVRTC, from its wheel: CUDA text to PTX, on a machine without a GPU. Nothing is run."""

import ctypes
import functools
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

from mslemu.errors import Fault, MslError

ARCHITECTURE = "compute_75"  # the oldest that MLX takes, so that no newer instruction slips in
_ERROR = re.compile(r"^(?P<file>[^\s(]+)\((?P<line>\d+)\): (?:catastrophic )?error: (?P<message>.*)$", re.MULTILINE)


@functools.cache
def folder() -> Path:
    """Return where the wheels nvidia-cuda-nvrtc and nvidia-cuda-runtime have put the compiler and its headers.

    Raises:
        FileNotFoundError: they are not installed.
    """
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        for found in sorted(Path(root).glob("cu*")):
            if list(found.glob("lib/libnvrtc.so.*")) and (found / "include/cuda_fp16.h").exists():
                return found
    raise FileNotFoundError('mslemu.cuda_kernel needs NVRTC and its headers: pip install "mslemu[cuda]", on Linux')


@functools.cache
def _library() -> ctypes.CDLL:
    libraries = folder() / "lib"
    # Some versions look for this one by its name alone, and not beside themselves.
    for builtins in libraries.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(next(libraries.glob("libnvrtc.so.*"))))


def _texts(values: list[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(values))(*(value.encode() for value in values))


def _call(function: str, *arguments: object) -> None:
    if status := _library()[function](*arguments):
        raise RuntimeError(f"{function} failed with status {status}")


def _read(what: str, program: ctypes.c_void_p) -> str:
    """Return a program's ``PTX`` or ``ProgramLog``."""
    size = ctypes.c_size_t()
    _call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    _call(f"nvrtcGet{what}", program, text)
    return text.value.decode()


def to_ptx(name: str, text: str, headers: Mapping[str, str]) -> str:
    """Compile CUDA text.

    Args:
        name: what errors call the file, before ``.cu``.
        text: CUDA C++.
        headers: text by the name that ``#include`` gives it; all others come from NVIDIA's wheel.

    Returns:
        PTX for ``ARCHITECTURE``.

    Raises:
        MslError: the text does not compile.
        FileNotFoundError: NVRTC is not installed.
    """
    flags = [f"--gpu-architecture={ARCHITECTURE}", f"--include-path={folder() / 'include'}", "--std=c++17"]
    program = ctypes.c_void_p()
    counted = (len(headers), _texts(list(headers.values())), _texts(list(headers)))
    _call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), f"{name}.cu".encode(), *counted)
    try:
        if _library().nvrtcCompileProgram(program, len(flags), _texts(flags)):
            complaint = _read("ProgramLog", program)
            errors = [Fault("compile", e["file"], int(e["line"]), e["message"]) for e in _ERROR.finditer(complaint)]
            raise MslError(errors or [Fault("compile", f"{name}.cu", 0, complaint.strip())])
        return _read("PTX", program)
    finally:
        _call("nvrtcDestroyProgram", ctypes.byref(program))
