"""Which code does a cache's arithmetic. The only importer of h2o_metal."""

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx

import h2o_core
import h2o_rope
from h2o_metal import attention, eviction, kernel, on_cuda, on_metal, rotation


class Backend(NamedTuple):
    """The functions of one back end; the signatures are h2o_core's and h2o_rope's."""

    name: str
    attend: Callable[..., tuple[mx.array, h2o_core.Mass]]
    decode_step: Callable[..., tuple[mx.array, h2o_core.H2OState, mx.array]]
    evict: Callable[..., tuple[h2o_core.H2OState, mx.array]]
    survivors: Callable[..., mx.array]
    victims: Callable[..., mx.array]
    rotate: Callable[..., mx.array]
    derotate: Callable[..., mx.array]
    fused: bool  # decode_step is worth calling for a layer: it is one launch, over all slots


def _backend(name: str, attention: Any, eviction: Any, rotation: Any, fused: bool) -> Backend:
    steps = (eviction.decode_step, eviction.evict, eviction.survivors, eviction.victims)
    return Backend(name, attention.attend, *steps, rotation.rotate, rotation.derotate, fused)


REFERENCE = _backend("reference", h2o_core, h2o_core, h2o_rope, fused=False)
METAL = _backend("metal", attention, eviction, rotation, fused=True)
CUDA = METAL._replace(name="cuda")  # the same kernels: what builds them knows where it is
NAMES = ("auto", "reference", "metal", "cuda")


def backend_of(name: str) -> Backend:
    """Find a back end by its name.

    Args:
        name: ``"reference"``: mlx's own operations, on any device. ``"metal"``, ``"cuda"``: kernels. ``"auto"``:
            kernels where mlx has Metal or CUDA and puts new work there, else the reference.

    Raises:
        ValueError: There is none of this name, or it can't run here.
    """
    if name not in NAMES:
        raise ValueError(f"backend must be one of {', '.join(map(repr, NAMES))}, got {name!r}")
    if name == "auto":
        return METAL if on_metal() else CUDA if on_cuda() else REFERENCE
    if name == "reference":
        return REFERENCE
    try:
        kernel.require(name)
    except RuntimeError as error:
        raise ValueError(
            f'backend="{name}" can\'t run here: {error}; "auto" takes what there is, or use "reference"'
        ) from error
    return METAL if name == "metal" else CUDA
