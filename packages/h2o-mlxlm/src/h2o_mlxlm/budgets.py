"""Budgets that differ from layer to layer. Plain Python: no arrays."""

from collections.abc import Sequence
from dataclasses import asdict, replace

from h2o_core import H2OConfig

RAGGED = ("budget", "n_sink", "grace", "decay", "long_share")
"""What may differ from layer to layer; everything else is the model's, or of one call."""


def pyramid(config: H2OConfig, n_layers: int, ratio: float = 3.0) -> list[H2OConfig]:
    """Give lower layers more of the heavy hitters and upper layers fewer, on a straight line.

    With h the heavy hitters of ``config`` (``budget − n_sink − grace``) and m layers, layer l has

        h_l = h_0 − (h_0 − h_(m−1)) · l / (m − 1),   h_0 = ratio · h_(m−1),   h_0 + h_(m−1) = 2h

    rounded so that all layers together hold exactly m · ``budget`` tokens. Sinks and recent window are the
    same in all of them.

    Args:
        config: What a layer keeps on average.
        n_layers: m, the layers that have an H2O cache; ``bounded_layers(model)`` counts them.
        ratio: How many times as many heavy hitters the lowest layer has as the highest; at least 1.

    Returns:
        A configuration for each layer, for ``make_prompt_cache`` and ``install``.

    Raises:
        ValueError: There is no layer, the ratio is below 1, or the highest layer would have no heavy hitter.

    Source:
        Cai et al., PyramidKV (arXiv 2406.02069), section 4: there the top layer's share is the total over β · m,
        so that ratio is 2β − 1 (39 at the published β = 20). Departures: the authors' code rounds the step of the
        line, not its places, so that its total is not exact, and shortens the line for short prompts; rows are
        chosen by our scores, not at the end of the prompt alone.

    >>> [c.budget for c in pyramid(H2OConfig(budget=64), 4)]
    [86, 71, 57, 42]
    """
    if isinstance(n_layers, bool) or not isinstance(n_layers, int) or n_layers < 1:
        raise ValueError(f"n_layers must be a whole number, at least 1, got {n_layers!r}")
    fixed = config.n_sink + config.grace
    hitters = config.budget - fixed
    # Also refuses nan.
    if not 1 <= ratio <= 2 * hitters - 1:
        raise ValueError(
            f"ratio must be between 1 and {2 * hitters - 1}, to leave the highest layer a heavy hitter, got {ratio} "
            f"with budget={config.budget}, n_sink={config.n_sink}, grace={config.grace}: lower it, or raise budget"
        )
    top = 2 * hitters / (ratio + 1)
    step = (ratio - 1) * top / max(1, n_layers - 1)
    exact = [top + step * above for above in reversed(range(n_layers))] if n_layers > 1 else [float(hitters)]
    return [replace(config, budget=fixed + n) for n in _rounded(exact, n_layers * hitters)]


def _rounded(exact: Sequence[float], total: int) -> list[int]:
    """Round down, then up where most was lost, lower layers first, until the sum is ``total``."""
    whole = [int(x) for x in exact]
    most_lost = sorted(range(len(exact)), key=lambda i: whole[i] - exact[i])
    for i in most_lost[: total - sum(whole)]:
        whole[i] += 1
    return whole


def for_layers(config: H2OConfig | Sequence[H2OConfig], n_layers: int) -> list[H2OConfig]:
    """Read what the user gave as a configuration for each layer.

    Raises:
        TypeError: Something is no ``H2OConfig``.
        ValueError: There are more or fewer than layers, or they differ in what all layers must share.
    """
    if isinstance(config, H2OConfig):
        return [config] * n_layers
    if not isinstance(config, Sequence) or not all(isinstance(c, H2OConfig) for c in config):
        raise TypeError(
            f"config must be an H2OConfig, got {config!r}: H2OConfig(budget=512), for example, or a list with one for "
            "each layer"
        )
    if len(config) != n_layers:
        raise ValueError(
            f"a list of configurations has one for each layer with an H2O cache, of which this model has {n_layers}, "
            f"got {len(config)}: pyramid(config, {n_layers}) makes such a list"
        )
    for name, value in asdict(config[0]).items():
        found = {getattr(c, name) for c in config}
        if name not in RAGGED and len(found) > 1:
            raise ValueError(
                f"layers differ in {', '.join(RAGGED)} alone, got {name}={', '.join(sorted(map(repr, found)))}: "
                f"give all of them {name}={value!r}"
            )
    return list(config)
