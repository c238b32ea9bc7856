"""OpenBLAS for mlx's CPU back end on Linux, which by itself multiplies with a reference BLAS."""

import ctypes
import sys
from importlib import metadata


def load_openblas() -> bool:
    """Load an OpenBLAS so that mlx, imported later, multiplies with it.

    Does nothing but on Linux. Looks for the system's library, then for the ``cmeel-openblas`` package.

    Returns:
        True if one is loaded and mlx was not imported before it.
    """
    if sys.platform != "linux" or "mlx.core" in sys.modules:
        return _loaded
    return any(map(_open, _candidates()))


_loaded = False


def _candidates() -> list[str]:
    names = ["libopenblas.so.0", "libopenblas.so"]
    try:
        files = metadata.files("cmeel-openblas") or []
    except metadata.PackageNotFoundError:
        files = []
    return names + [str(f.locate()) for f in files if f.name == "libopenblas.so"]


def _open(path: str) -> bool:
    global _loaded
    try:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    _loaded = True
    return True
