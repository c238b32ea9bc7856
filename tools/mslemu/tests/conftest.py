import sys

import mlx.core as mx
import numpy as np
import pytest

import mslemu

# NVIDIA's compiler comes as a wheel for Linux; for macOS there is none to test.
collect_ignore = [] if sys.platform == "linux" else ["test_cuda.py"]


def run_one(source, inputs=(), *, shape=(1,), dtype=mx.float32, threads=1, grid=None, definition=None, **call):
    """Run a kernel whose inputs are a, b, ... and whose output is out, in one threadgroup unless told otherwise."""
    names = [chr(ord("a") + i) for i in range(len(inputs))]
    kernel = mslemu.metal_kernel("k", names, ["out"], source, **(definition or {}))
    (out,) = kernel(
        inputs=list(inputs),
        output_shapes=[shape],
        output_dtypes=[dtype],
        grid=grid or (threads, 1, 1),
        threadgroup=(threads, 1, 1),
        **call,
    )
    return out


@pytest.fixture
def run():
    return run_one


@pytest.fixture
def normal():
    """Random arrays that are the same in each test."""
    generator = np.random.default_rng(7)

    def draw(*shape, dtype=mx.float32):
        return mx.array(generator.standard_normal(shape).astype(np.float32)).astype(dtype)

    return draw
