"""The same kernels on CUDA: ``mx.fast.cuda_kernel`` behind the signature of ``mx.fast.metal_kernel``.

Header and body are Metal's, unchanged. Before them goes ``metal_on_cuda.h``, which gives Metal's words their meaning
there. Compiled to PTX in the tests, not executed yet: ``tools/cuda_check.py`` is what runs them where there is a GPU.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import mlx.core as mx

MAX_GROUPS = 65535
"""Blocks that CUDA takes along y, where the kernels have a sequence's heads."""

# In a header `threadgroup` is a pointer's address space, in a body it declares the threadgroup's memory.
_BODY = "\n#undef threadgroup\n#define threadgroup __shared__\n"


def cuda_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
) -> Callable[..., list[mx.array]]:
    """Make a kernel of Metal's text for CUDA, as ``mx.fast.metal_kernel`` makes one for Metal.

    A kernel of one name takes arrays of any dtype: mlx finds compiled ones by name and text since 0.32.3 (its pull
    request 4273), which is therefore the lowest version that will do.

    Args:
        name: Of the kernel.
        input_names: Names of its inputs, which have one dimension or more: mlx gives CUDA no numbers by value.
        output_names: Names of its outputs.
        source: The function's body in Metal's language.
        header: Metal's text before it; each function is ``inline``.
        ensure_row_contiguous: Copy inputs that are not; otherwise the kernel gets them with their strides.

    Returns:
        A function with the keyword arguments of mlx's kernels. It raises a ValueError for more than ``MAX_GROUPS``
        threadgroups along y.
    """
    kernel = mx.fast.cuda_kernel(
        name=name,
        input_names=list(input_names),
        output_names=list(output_names),
        source=source,
        header=_words() + header + _BODY,
        ensure_row_contiguous=ensure_row_contiguous,
    )

    def call(*, grid: tuple[int, int, int], threadgroup: tuple[int, int, int], **given: Any) -> list[mx.array]:
        groups = grid[1] // threadgroup[1]
        if groups > MAX_GROUPS:
            raise ValueError(
                f"{name} takes at most {MAX_GROUPS:,} threadgroups along y on CUDA, got {groups:,}, one for each head "
                f"of each sequence: give it fewer sequences at a time"
            )
        made: list[mx.array] = kernel(grid=grid, threadgroup=threadgroup, **given)  # type: ignore[operator]
        return made

    return call


@cache
def _words() -> str:
    return (files("h2o_metal") / "metal_on_cuda.h").read_text(encoding="utf-8")
