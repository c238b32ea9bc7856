"""`metal_kernel`: mx.fast.metal_kernel's signature, on the CPU."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx

from mslemu import build
from mslemu.launch import Launch, run
from mslemu.settings import current
from mslemu.signature import Definition, TemplateArgument, generate

MAX_THREADS = 1024
Triple = tuple[int, int, int]
_counters: list[list[Launch]] = []


@contextlib.contextmanager
def launches() -> Iterator[list[Launch]]:
    """Collect the kernels that run inside a ``with`` block, in their order.

    A launch that ends with a fault is not among them.
    """
    ran: list[Launch] = []
    _counters.append(ran)
    try:
        yield ran
    finally:
        _counters[:] = [other for other in _counters if other is not ran]


def _math_mode(options: dict[str, str] | None) -> str:
    unknown = set(options or {}) - {"math_mode"}
    mode = (options or {}).get("math_mode", "safe")
    if unknown:
        raise ValueError(f"[metal_kernel] Unknown compile option `{min(unknown)}`.")
    if mode not in ("safe", "relaxed", "fast"):
        raise ValueError("[metal_kernel] Expected math_mode to be 'safe', 'relaxed', or 'fast'.")
    return mode


def _require_sizes(definition: Definition, **given: Sequence[object]) -> None:
    for what, values in given.items():
        expected = len(definition.input_names if what == "inputs" else definition.output_names)
        if len(values) != expected:
            raise ValueError(f"[metal_kernel] Expected `{what}` to have size {expected} but got size {len(values)}.")


def _require_threads(grid: Triple, threadgroup: Triple) -> None:
    if len(grid) != 3 or len(threadgroup) != 3 or min(*grid, *threadgroup) < 1:
        raise ValueError(f"grid and threadgroup are three sizes of at least 1, got {grid} and {threadgroup}")
    threads = threadgroup[0] * threadgroup[1] * threadgroup[2]
    if threads > MAX_THREADS:
        raise ValueError(
            f"Thread group size ({threads}) is greater than the maximum allowed threads per threadgroup "
            f"({MAX_THREADS})."
        )


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: dict[str, str] | None = None,
) -> Callable[..., list[mx.array]]:
    """Make a kernel as mx.fast.metal_kernel does; it runs on the CPU, and at once.

    Args:
        name: of the kernel; reports name the source NAME.metal.
        input_names: parameter names of the inputs.
        output_names: parameter names of the outputs.
        source: the function's body in MSL.
        header: MSL before the function.
        ensure_row_contiguous: copy inputs that are not; otherwise the kernel gets them with their strides.
        atomic_outputs: outputs are ``device atomic<T>*``.
        compile_options: ``{"math_mode": "safe" | "relaxed" | "fast"}``.

    Returns:
        A function with the keyword arguments of MLX's kernels: inputs, output_shapes, output_dtypes, grid,
        threadgroup, template, init_value, verbose, stream. It raises `mslemu.MslError`.

    Raises:
        ValueError: no output, or an unknown compile option.
    """
    if not output_names:
        raise ValueError("[metal_kernel] Must specify at least one output.")
    definition = Definition(
        name,
        tuple(input_names),
        tuple(output_names),
        source,
        header,
        ensure_row_contiguous,
        atomic_outputs,
        _math_mode(compile_options),
    )

    def call(
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: Triple,
        threadgroup: Triple,
        template: Sequence[tuple[str, TemplateArgument]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: object = None,
    ) -> list[mx.array]:
        _require_sizes(definition, inputs=inputs, output_shapes=output_shapes, output_dtypes=output_dtypes)
        _require_threads(grid, threadgroup)
        arrays = [value if isinstance(value, mx.array) else mx.array(value) for value in inputs]
        mx.eval(arrays)
        text = generate(definition, arrays, output_dtypes, template or [])
        if verbose:
            print(f"Generated source code for `{name}`:\n```\n{text.whole()}\n```")
        settings = current()
        library = build.library(name, text, definition.math_mode, settings)
        outputs = list(zip(output_shapes, output_dtypes, strict=True))
        results, launch = run(definition, library, arrays, outputs, grid, threadgroup, init_value, settings)
        for ran in _counters:
            ran.append(launch)
        return results

    return call
