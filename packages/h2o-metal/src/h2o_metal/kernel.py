"""The kernels: their text, the one place that gives it to mlx, and a count of launches.

A kernel is a list of files of ``kernels/``, joined: some steps are shared by several kernels. Their shapes, bytes and
threads are described there. Nothing here knows what a kernel computes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from importlib.resources import files
from threading import Lock
from typing import Any, NamedTuple

import mlx.core as mx

from h2o_metal.cuda import cuda_kernel

THREADS = 256
"""Threads of every threadgroup, except where a launch says otherwise."""


class Text(NamedTuple):
    """The files of a kernel, without their ending."""

    header: tuple[str, ...]
    body: tuple[str, ...]


_ONE, _RANKED, _CHUNK = ("common",), ("common", "ranking"), ("common", "tile")
_DECODED = ("output", "observe_one", "rank", "victim", "release")
TEXTS = {
    "h2o_decode": Text(_RANKED, ("threads", "attend_one", *_DECODED)),
    "h2o_decode_merge": Text(_RANKED, ("threads", "load_parts", *_DECODED)),
    "h2o_attend_part": Text(_ONE, ("threads", "attend_one", "store_part")),
    "h2o_attend_one": Text(_ONE, ("threads", "attend_one", "output", "mass_of_one")),
    "h2o_attend_merge": Text(_ONE, ("threads", "load_parts", "output", "mass_of_one")),
    "h2o_softmax_rows": Text(_CHUNK, ("chunk", "softmax_rows")),
    "h2o_column_mass": Text(_CHUNK, ("chunk", "column_mass")),
    "h2o_victims": Text(_RANKED, ("threads", "ranked_state", "rank", "victim")),
    "h2o_evict": Text(_RANKED, ("threads", "ranked_state", "rank", "keep")),
    "h2o_rotate": Text((), ("rotate",)),
}
"""Every kernel, by the name that Metal's tools show."""

# These read K and V where they lie: a copy would be read and written as often as the kernel reads.
_STRIDED = {name for name in TEXTS if name not in ("h2o_victims", "h2o_evict", "h2o_rotate")}

builder: Callable[..., Any] | None = None
"""Makes a kernel, with the signature of ``mx.fast.metal_kernel``; None is mlx's own, for Metal or for CUDA, whichever
mlx has. For tests, which put an emulator here."""

_building = Lock()
_counters: list[list[str]] = []


def launch(
    name: str,
    inputs: Mapping[str, mx.array],
    outputs: Mapping[str, tuple[Sequence[int], mx.Dtype]],
    template: Mapping[str, int | bool | mx.Dtype],
    groups: tuple[int, int] = (1, 1),
    threads: int = THREADS,
) -> list[mx.array]:
    """Run a kernel.

    Args:
        name: One of ``TEXTS``.
        inputs: Arrays by the names that the text gives them.
        outputs: Shape and dtype by name, likewise; the buffers are fresh.
        template: Its constants.
        groups: Threadgroups along x and y.
        threads: Threads of a threadgroup, along x.

    Returns:
        The outputs, in their order.

    Raises:
        RuntimeError: There is neither Metal nor CUDA here, and no builder has been put in their place.
    """
    with _building:
        kernel = _built(builder or _builder_here(), name, tuple(inputs), tuple(outputs))
    for counter in _counters:
        counter.append(name)
    made: list[mx.array] = kernel(
        inputs=list(inputs.values()),
        template=list(template.items()),
        grid=(groups[0] * threads, groups[1], 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[shape for shape, _ in outputs.values()],
        output_dtypes=[dtype for _, dtype in outputs.values()],
    )
    return made


def require(backend: str) -> None:
    """Make sure that kernels run on the back end of this name.

    mlx has one of them at most, so that to require one is to choose it. A ``builder`` stands for either.

    Args:
        backend: "metal" or "cuda".

    Raises:
        ValueError: There is no back end of this name.
        RuntimeError: mlx has none of this name on this machine.
    """
    there = {"metal": mx.metal.is_available, "cuda": mx.cuda.is_available}
    if backend not in there:
        raise ValueError(f"kernels run on {' or '.join(map(repr, there))}, got {backend!r}")
    if builder is None and not there[backend]():
        raise RuntimeError(
            f"kernels on {backend!r} were asked for, which mlx does not find on this machine: install mlx for it, or "
            f"call h2o_metal.attend and its kin, which take what there is"
        )


@contextmanager
def launches() -> Iterator[list[str]]:
    """Collect the names of the kernels that are launched inside a ``with`` block, in their order."""
    ran: list[str] = []
    _counters.append(ran)
    try:
        yield ran
    finally:
        _counters[:] = [other for other in _counters if other is not ran]


@cache
def text(name: str) -> tuple[str, str]:
    """Return a kernel's header and body."""
    header, body = TEXTS[name]
    return tuple("\n".join(map(_file, part)) for part in (header, body))  # type: ignore[return-value]


@cache
def _file(name: str) -> str:
    return (files("h2o_metal") / "kernels" / f"{name}.metal").read_text(encoding="utf-8")


@lru_cache(maxsize=256)
def _built(build: Callable[..., Any], name: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Any:
    header, body = text(name)
    return build(
        name=name,
        input_names=list(inputs),
        output_names=list(outputs),
        source=body,
        header=header,
        ensure_row_contiguous=name not in _STRIDED,
    )


def _builder_here() -> Callable[..., Any]:
    if mx.metal.is_available():
        return mx.fast.metal_kernel
    if mx.cuda.is_available():
        return cuda_kernel
    raise RuntimeError(
        "kernels of h2o_metal need Metal or CUDA, and mlx finds neither on this machine: call h2o_metal.attend and its "
        "kin, which take h2o_core's functions where there is none, or h2o_core itself"
    )
