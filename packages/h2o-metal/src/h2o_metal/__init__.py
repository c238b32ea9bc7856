"""The steps of h2o-core and h2o-rope that are worth a kernel: a kernel on Metal and on CUDA, else the reference.

Each name here decides at each call, by ``on_metal`` and ``on_cuda``. Whoever wants the kernels or an error takes them
from ``h2o_metal.attention``, ``eviction`` and ``rotation``; whoever wants the reference takes h2o_core's and
h2o_rope's.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import mlx.core as mx

import h2o_core
import h2o_rope
from h2o_metal import attention, eviction, rotation

__all__ = [
    "attend",
    "decode_step",
    "derotate",
    "evict",
    "on_cuda",
    "on_metal",
    "rerotate",
    "rotate",
    "survivors",
    "victims",
]

P = ParamSpec("P")
R = TypeVar("R")


def on_metal() -> bool:
    """Say whether mlx has Metal and puts new work there: it does not under ``mx.set_default_device(mx.cpu)``."""
    return mx.metal.is_available() and bool(mx.default_device() == mx.gpu)


def on_cuda() -> bool:
    """Say whether mlx has CUDA and puts new work there; see ``on_metal``."""
    return mx.cuda.is_available() and bool(mx.default_device() == mx.gpu)


def _either(kernel: Callable[P, R], reference: Callable[P, R]) -> Callable[P, R]:
    @wraps(reference)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return (kernel if on_metal() or on_cuda() else reference)(*args, **kwargs)

    return call


attend = _either(attention.attend, h2o_core.attend)
decode_step = _either(eviction.decode_step, h2o_core.decode_step)
evict = _either(eviction.evict, h2o_core.evict)
survivors = _either(eviction.survivors, h2o_core.survivors)
victims = _either(eviction.victims, h2o_core.victims)
rotate = _either(rotation.rotate, h2o_rope.rotate)
derotate = _either(rotation.derotate, h2o_rope.derotate)
rerotate = _either(rotation.rerotate, h2o_rope.rerotate)
