"""Randomness that depends on a seed, heads and positions alone: the same whatever the calls and the batch."""

import mlx.core as mx

from h2o_core._shapes import Float32

_ODD = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)


def uniform(seed: int, *counters: mx.array) -> Float32[mx.array, "..."]:
    """Numbers evenly in (0, 1), one for each combination of counters that are broadcast against one another.

    Each counter is mixed in by the finalizer of MurmurHash3 (Appleby, public domain), which changes half of the bits
    of a word for any change of it.

    Args:
        seed: At least 0.
        counters: Integers, such as positions.
    """
    word = _mixed(mx.array(seed & 0xFFFFFFFF, mx.uint32))
    for counter, odd in zip(counters, _ODD, strict=False):
        word = _mixed(word ^ (counter.astype(mx.uint32) * mx.array(odd, mx.uint32)))
    # A float32 holds 24 bits: 23, and a half that keeps 0 and 1 out.
    return ((word >> 9).astype(mx.float32) + 0.5) * 2.0**-23


def _mixed(word: mx.array) -> mx.array:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        word = (word ^ (word >> shift)) * mx.array(factor, mx.uint32)
    return word ^ (word >> 16)
