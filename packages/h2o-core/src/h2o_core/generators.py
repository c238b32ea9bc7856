"""Attention made up, with a truth to compare a cache with: which tokens are worth keeping, and when.

Seeded, and made row by row: no row depends on how the rows are cut into blocks.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from h2o_core._shapes import Float32
from h2o_core.rows import Rows, causal


class Heavy(NamedTuple):
    """A token that receives more than its share, in every head."""

    position: int
    start: int  # first step at which it does
    stop: int  # step before which it stops
    share: float  # of each of these rows, when all that are heavy at that step have arrived


class Planted(NamedTuple):
    """Attention, and what was planted in it."""

    attention: Rows  # [Hq, T, T]
    truth: tuple[Heavy, ...]  # by position; empty where no token is better than its neighbours


def zipf(
    n_steps: int = 512,
    n_heads: int = 4,
    n_heavy: int = 16,
    share: float = 0.6,
    exponent: float = 1.0,
    noise: float = 1.0,
    seed: int = 0,
) -> Planted:
    """Plant heavy hitters whose shares fall as rank^−exponent.

    Args:
        n_steps: T.
        n_heads: Hq.
        n_heavy: Tokens planted, anywhere in the first half.
        share: What they have in all of a row, once they have arrived; the rest goes to all tokens.
        exponent: Of Zipf's law.
        noise: Standard deviation of the logarithm of a token's weight in the rest, drawn for each row.
        seed: Of positions and noise.

    >>> made = zipf(64, n_heads=1, n_heavy=3)
    >>> made.attention.whole().shape, [round(heavy.share, 2) for heavy in sorted(made.truth, key=lambda h: h.share)]
    ((1, 64, 64), [0.11, 0.16, 0.33])
    """
    places = _places(0, max(n_heavy, n_steps // 2), n_heavy, seed)
    shares = _zipf_shares(n_heavy, share, exponent)
    return _planted(
        n_steps, n_heads, [Heavy(p, p, n_steps, s) for p, s in zip(places, shares, strict=True)], noise, seed
    )


def shift(
    n_steps: int = 512,
    n_heads: int = 4,
    n_heavy: int = 16,
    share: float = 0.6,
    exponent: float = 1.0,
    noise: float = 1.0,
    seed: int = 0,
) -> Planted:
    """Plant a change of topic: half-way, heavy hitters that arrived before give way to ones that arrive then.

    Args:
        n_steps: T.
        n_heads: Hq.
        n_heavy: Tokens of each topic, in the first quarter, and in the quarter after the change.
        share: What the topic has in all of a row.
        exponent: Of Zipf's law, within a topic.
        noise: See ``zipf``.
        seed: Of positions and noise.
    """
    half, length = n_steps // 2, max(n_heavy, n_steps // 4)
    shares = _zipf_shares(n_heavy, share, exponent)
    old, new = (_places(at, at + length, n_heavy, seed + i) for i, at in enumerate((0, half)))
    heavies = [Heavy(p, p, half, s) for p, s in zip(old, shares, strict=True)]
    return _planted(
        n_steps, n_heads, heavies + [Heavy(p, p, n_steps, s) for p, s in zip(new, shares, strict=True)], noise, seed
    )


def needles(
    n_steps: int = 512,
    n_heads: int = 4,
    n_needles: int = 8,
    share: float = 0.8,
    noise: float = 1.0,
    seed: int = 0,
) -> Planted:
    """Plant needles: tokens of the first half that one step of the second half asks for, and no other.

    Args:
        n_steps: T.
        n_heads: Hq.
        n_needles: Tokens planted; each has a step of its own.
        share: What a needle has of the row that asks for it.
        noise: See ``zipf``.
        seed: Of positions, steps and noise.
    """
    half = n_steps // 2
    places, asked = _places(0, half, n_needles, seed), _places(half, n_steps, n_needles, seed + 1)
    return _planted(
        n_steps, n_heads, [Heavy(p, t, t + 1, share) for p, t in zip(places, asked, strict=True)], noise, seed
    )


def recency(
    n_steps: int = 512, n_heads: int = 4, length: float = 16.0, floor: float = 0.0, noise: float = 0.0, seed: int = 0
) -> Planted:
    """Attend to what is near: weights e^(−age / length) + floor, over their sum.

    Args:
        n_steps: T.
        n_heads: Hq.
        length: Steps in which a weight falls to 1/e.
        floor: Weight of every token however old, where the newest has 1.
        noise: See ``zipf``.
        seed: Of the noise.
    """

    def weights(start: int, stop: int) -> Float32[mx.array, "n T"]:
        age = mx.arange(start, stop)[:, None] - mx.arange(n_steps)
        return mx.exp(-mx.maximum(age, 0) / length) + floor

    return Planted(_rows(n_steps, n_heads, weights, (), noise, seed), ())


def uniform(n_steps: int = 512, n_heads: int = 4, noise: float = 0.0, seed: int = 0) -> Planted:
    """Attend to all tokens alike: 1 / (t + 1) each, without noise.

    Args:
        n_steps: T.
        n_heads: Hq.
        noise: See ``zipf``.
        seed: Of the noise.
    """
    return Planted(_rows(n_steps, n_heads, None, (), noise, seed), ())


GENERATORS: dict[str, Callable[..., Planted]] = {
    "zipf": zipf,
    "shift": shift,
    "needles": needles,
    "recency": recency,
    "uniform": uniform,
}


def _planted(n_steps: int, n_heads: int, heavies: list[Heavy], noise: float, seed: int) -> Planted:
    truth = tuple(sorted(heavies))
    return Planted(_rows(n_steps, n_heads, None, truth, noise, seed), truth)


def _rows(
    n_steps: int,
    n_heads: int,
    weights: Callable[[int, int], mx.array] | None,
    truth: Sequence[Heavy],
    noise: float,
    seed: int,
) -> Rows:
    """Rows of planted shares over a background: weights, uniform if None, times noise."""
    if n_steps < 1 or n_heads < 1:
        raise ValueError(f"n_steps and n_heads must be at least 1, got {n_steps} and {n_heads}")

    def make(start: int, stop: int) -> Float32[mx.array, "Hq n T"]:
        seen = causal(start, stop, n_steps)
        base = mx.ones(seen.shape) if weights is None else weights(start, stop)
        grain = _noise(n_steps, n_heads, range(start, stop), seed) * noise if noise else mx.zeros((n_heads, 1, 1))
        background = mx.where(seen, base * mx.exp(grain), 0.0)
        background = background / background.sum(axis=-1, keepdims=True)
        planted = mx.where(seen, _shares(n_steps, start, stop, truth), 0.0)
        return background * (1 - planted.sum(axis=-1, keepdims=True)) + planted

    return Rows((n_heads, n_steps, n_steps), make)


def _shares(n_steps: int, start: int, stop: int, truth: Sequence[Heavy]) -> Float32[mx.array, "n T"]:
    """What each planted token has of each row."""
    shares = mx.zeros((stop - start, n_steps))
    for heavy in truth:
        first, last = max(heavy.start, start), min(heavy.stop, stop)
        if first < last:
            shares[first - start : last - start, heavy.position] = heavy.share
    return shares


def _noise(n_steps: int, n_heads: int, steps: range, seed: int) -> Float32[mx.array, "Hq n T"]:
    keys = mx.random.split(mx.random.key(seed), n_steps)
    return mx.stack([mx.random.normal((n_heads, n_steps), key=keys[t]) for t in steps], axis=1)


def _places(start: int, stop: int, n: int, seed: int) -> list[int]:
    """Different positions, in random order."""
    if not 1 <= n <= stop - start:
        raise ValueError(f"from 1 to {stop - start} tokens can be planted in {stop - start} steps, got {n}")
    chosen: Any = mx.random.permutation(stop - start, key=mx.random.key(seed))[:n].tolist()
    return [start + p for p in chosen]


def _zipf_shares(n: int, share: float, exponent: float) -> list[float]:
    if not 0 < share < 1:
        raise ValueError(f"share must be between 0 and 1, got {share}: what the planted tokens have in all of a row")
    weights = [(rank + 1) ** -exponent for rank in range(n)]
    return [share * w / sum(weights) for w in weights]
