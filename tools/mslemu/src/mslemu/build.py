"""From a kernel's text to a loaded library: compilers, flags, and the cache that all processes share.

A library is found by a hash of all that went into it. It is written under another name and moved into place, so that
two processes that build the same kernel at once do no harm.
"""

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mslemu import lower, strict
from mslemu.errors import Fault, MslError
from mslemu.settings import Settings
from mslemu.signature import Text

SHIM = Path(__file__).parent / "shim"
INCLUDE = [SHIM / "include", Path(str(mx.__file__)).parent / "include"]  # MLX's wheel ships its Metal headers
_UNDEFINED = "bounds,shift,integer-divide-by-zero,signed-integer-overflow,float-cast-overflow,return,unreachable"
_FLAGS = (
    *("-std=c++17", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-math-errno"),
    *("-fno-strict-aliasing", "-Wno-attributes", "-Wno-unknown-pragmas"),
    *("-Werror=uninitialized", "-Werror=return-type", "-Werror=frame-larger-than=65536"),  # a fiber has 128 KB
)
_ERROR = re.compile(r"^(?P<file>[^\s:]+):(?P<line>\d+):(?:\d+:)? (?:fatal )?error: (?P<message>.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: its command, what it says of its version, and whether it is clang."""

    command: tuple[str, ...]
    version: str
    clang: bool

    def flags(self, settings: Settings, math_mode: str) -> list[str]:
        """Return how it compiles a kernel. A literal without suffix is a float, a half stays a half between steps."""
        flags = list(_FLAGS)
        if self.clang:
            flags += ["-Wno-unknown-attributes", "-Xclang", "-cl-single-precision-constant"]
            if platform.machine() == "x86_64":
                flags += ["-Xclang", "-ffloat16-excess-precision=none"]
        else:
            flags += ["-fsingle-precision-constant", "-fexcess-precision=16"]
        flags += ["-ffp-contract=off"] if math_mode == "safe" else ["-ffast-math", "-ffp-contract=fast"]
        if settings.check:
            flags += ["-fsanitize=thread", f"-fsanitize={_UNDEFINED}"]
            flags += ["-mllvm", "-tsan-instrument-read-before-write"] if self.clang else []
        return flags


@functools.cache
def find_compiler(command: str | None = None) -> Compiler:
    """Return the compiler of that command, else of $MSLEMU_CXX, else g++ or clang++, whichever is there.

    Raises:
        FileNotFoundError: there is none.
    """
    wanted = command or os.environ.get("MSLEMU_CXX")
    for candidate in [wanted] if wanted else ["g++", "clang++"]:
        words = candidate.split()
        if path := shutil.which(words[0]):
            full = (path, *words[1:])
            version = subprocess.run([*full, "--version"], capture_output=True, text=True, check=True).stdout
            return Compiler(full, version, "clang" in version)
    raise FileNotFoundError(f"mslemu needs a C++ compiler, and {wanted or 'g++ or clang++'} is not there")


def cache_folder() -> Path:
    """Return where compiled kernels are kept: $MSLEMU_CACHE, else mslemu in the user's cache folder."""
    if folder := os.environ.get("MSLEMU_CACHE"):
        return Path(folder)
    home = Path.home()
    default = home / "Library/Caches" if sys.platform == "darwin" else home / ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or default) / "mslemu"


def _digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:24]


@functools.cache
def _shim_digest() -> str:
    """Hash of the shim and of MLX's part of it: a new version of either builds everything anew."""
    files = sorted(path for path in SHIM.rglob("*") if path.is_file())
    utilities = INCLUDE[1] / "mlx/backend/metal/kernels/utils.h"
    return _digest(*(path.read_text() for path in [*files, utilities]))


def _run(command: Sequence[str | Path]) -> str:
    """Run a compiler; return what it complained of, empty when it succeeded."""
    english = {**os.environ, "LC_ALL": "C"}
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, env=english)
    return (result.stderr or result.stdout or f"exit status {result.returncode}") if result.returncode else ""


def _fault(complaint: str, name: str) -> Fault:
    """Find the kernel's line in what a compiler wrote. An error inside the shim names it before or after."""
    errors = list(_ERROR.finditer(complaint))
    files = set(lower.files(name).values())
    for error in errors:
        if error["file"] in files:
            return Fault("compile", error["file"], int(error["line"]), error["message"])
    named = re.search(rf"({'|'.join(map(re.escape, files))}):(\d+)", complaint)
    file, line = (named[1], int(named[2])) if named else (f"{name}.metal", 0)
    return Fault("compile", file, line, errors[0]["message"] if errors else complaint.strip().splitlines()[-1])


def _placed(path: Path, *commands: Sequence[str | Path]) -> str:
    """Run commands that write ``OUT``, each as it were the path; then move it into place. Return a complaint, or ''."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unique = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        for command in commands:
            if complaint := _run([unique if word == "OUT" else word for word in command]):
                return complaint
        os.replace(unique, path)
    finally:
        unique.unlink(missing_ok=True)
    return ""


def _runtime(compiler: Compiler) -> Path:
    """Return the runtime's object file, compiled once for each compiler."""
    path = cache_folder() / f"runtime-{_digest(compiler, _shim_digest())}.o"
    if not path.exists():
        flags = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden"]
        complaint = _placed(path, [*compiler.command, *flags, "-c", SHIM / "runtime.cpp", "-o", "OUT"])
        if complaint:
            raise RuntimeError(f"mslemu's own runtime does not compile: {complaint}")
    return path


def _compile(path: Path, name: str, cpp: str, compiler: Compiler, flags: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder, "kernel.cpp"), Path(folder, "kernel.o")
        source.write_text(cpp)
        includes = [word for include in INCLUDE for word in ("-isystem", include)]
        compiled = [*compiler.command, *flags, *includes, "-c", source, "-o", built]
        if complaint := _run(compiled):
            raise MslError([_fault(complaint, name)])
        objects = [built, _runtime(compiler)]
        link: list[Sequence[str | Path]] = [[*compiler.command, "-shared", *objects, "-lm", "-o", "OUT"]]
        if sys.platform == "darwin":  # there a library's lines stay in its object files, which go with the folder
            link.append(["dsymutil", "--flat", "OUT", "-o", path.with_suffix(".dwarf")])
        if complaint := _placed(path, *link):
            raise RuntimeError(f"mslemu could not link {name}: {complaint}")


@dataclass(frozen=True)
class Library:
    """A kernel's compiled library."""

    path: Path
    launch: Callable[[object], int]


@functools.lru_cache(maxsize=512)
def library(name: str, text: Text, math_mode: str, settings: Settings) -> Library:
    """Return the kernel's library, from the cache if it is there.

    Raises:
        MslError: the text does not compile, or the strict pass finds a fault.
    """
    compiler = find_compiler(settings.compiler)
    flags = compiler.flags(settings, math_mode)
    cpp = lower.to_cpp(name, text)
    key = _digest(compiler, flags, cpp, _shim_digest(), settings.strict)
    path = cache_folder() / f"{name}-{key}.so"
    if not path.exists():
        if settings.strict:
            strict.check(lower.to_cpp(name, text, strict=True), INCLUDE)
        _compile(path, name, cpp, compiler, flags)
    launch = ctypes.CDLL(str(path)).mslemu_launch
    launch.argtypes, launch.restype = [ctypes.c_void_p], ctypes.c_int
    return Library(path, launch)
