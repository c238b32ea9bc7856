"""Confidence intervals: windows drawn again within their texts, the same draws for every method."""

from collections.abc import Sequence

import mlx.core as mx

from h2o_mlxlm.evaluation.passes import numbers

N_RESAMPLES = 10_000

Interval = tuple[float, float] | None


def draws(n_windows: Sequence[int], seed: int = 0, n_resamples: int = N_RESAMPLES) -> list[mx.array]:
    """Draw windows with replacement: for each text int32 [n_resamples, n]."""
    keys = mx.random.split(mx.random.key(seed), len(n_windows))
    return [mx.random.randint(0, n, (n_resamples, n), key=key) for n, key in zip(n_windows, keys, strict=True)]


def resampled(values: Sequence[Sequence[float]], drawn: Sequence[mx.array]) -> mx.array:
    """Find each text's mean in each resample.

    Args:
        values: For each text its windows' values.
        drawn: As ``draws`` returned.

    Returns:
        float32 [texts, n_resamples].
    """
    means = [mx.array(list(v), mx.float32)[where].mean(axis=1) for v, where in zip(values, drawn, strict=True)]
    return mx.stack(means)


def interval(samples: mx.array) -> Interval:
    """Find the middle 95 % of samples [n]; None if one of them is not finite."""
    ordered = sorted(numbers(samples))
    if not mx.isfinite(samples).all().item():
        return None
    return _quantile(ordered, 0.025), _quantile(ordered, 0.975)


def _quantile(ordered: list[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def mean(values: Sequence[float]) -> float:
    """Average."""
    return sum(values) / len(values)


def ratio(numerator: mx.array, denominator: mx.array) -> mx.array:
    """Divide, samples [n] each; not finite where the denominator is no cost."""
    return mx.where(denominator > 0, numerator / denominator, mx.inf)
