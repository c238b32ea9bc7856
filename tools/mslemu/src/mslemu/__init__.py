"""Run kernels written for mx.fast.metal_kernel on a CPU and report their faults; for tests.

`metal_kernel` stands in for ``mx.fast.metal_kernel``. It compiles the unchanged text with g++ or clang++ against a
stand-in for Metal's standard library, runs its threads as fibers in SIMD-groups of 32, and raises `MslError` with the
kernel's line at what Metal leaves undefined. It says nothing about speed, and it is not Apple's compiler.

`cuda_kernel` stands in for ``mx.fast.cuda_kernel``, and only compiles: NVIDIA's compiler makes PTX, nothing runs.
"""

from mslemu.cuda import compiled, cuda_kernel
from mslemu.errors import Fault, MslError
from mslemu.kernel import launches, metal_kernel
from mslemu.launch import Launch
from mslemu.settings import options
from mslemu.signature import mlx_text
from mslemu.text import Barrier, barriers, without_barrier

__all__ = [
    "Barrier",
    "Fault",
    "Launch",
    "MslError",
    "barriers",
    "compiled",
    "cuda_kernel",
    "launches",
    "metal_kernel",
    "mlx_text",
    "options",
    "without_barrier",
]
