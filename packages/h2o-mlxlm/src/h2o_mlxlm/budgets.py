"""Budgets that differ from layer to layer, and from head to head. Plain Python: no arrays."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

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


def calibrated_config(budget: int, **fields: Any) -> H2OConfig:
    """Make the configuration that goes best with budgets by need: what was measured, in docs/results.md, was this.

    Args:
        budget: Tokens kept of each head on average.
        fields: Others of ``H2OConfig``. Without them ``grace`` is half of the budget and ``long_share``, with a scorer
            that sums mass, 0.35.

    Raises:
        TypeError: See ``H2OConfig``.
        ValueError: See ``H2OConfig``.

    >>> calibrated_config(64).grace
    32
    """
    config = H2OConfig(budget=budget, **fields)
    if fields.get("grace") is None:
        config = replace(config, grace=budget // 2)
    return replace(config, long_share=0.35) if config.scorer.sums and "long_share" not in fields else config


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


HeadsOfLayer = str | Sequence[int]
"""How a layer's places are divided among its heads: a word for a way that there is, or the budget of each."""


def heads_of_layers(
    heads: str | Sequence[Sequence[int]], config: H2OConfig | Sequence[H2OConfig], n_layers: int
) -> Sequence[HeadsOfLayer]:
    """Read what the user gave as ``heads``: for each layer the word, or the budget of each of its heads.

    Raises:
        TypeError: They are no lists, or a budget is no integer.
        ValueError: There are budgets for more or fewer layers than there are, on average more than the
            configuration's, or for a list of configurations.
    """
    if isinstance(heads, str):
        return [heads] * n_layers
    if not isinstance(heads, Sequence) or any(isinstance(x, str) or not isinstance(x, Sequence) for x in heads):
        raise TypeError(
            "heads must be a word, Needs, or for each layer with an H2O cache the budget of each head in a list, got "
            f"{heads!r:.200}"
        )
    budget = one_budget(config)
    if len(heads) != n_layers:
        raise ValueError(
            f"heads has budgets for each layer with an H2O cache, of which this model has {n_layers}, got {len(heads)}"
        )
    each: list[Any] = [budget for layer in heads for budget in layer]
    if wrong := [budget for budget in each if isinstance(budget, bool) or not isinstance(budget, int)]:
        raise TypeError(f"the budget of a head must be an integer number of tokens, got {wrong[0]!r}")
    if sum(each) > budget * len(each):
        raise ValueError(
            f"heads keep budget={budget} tokens on average at most, got budgets with a mean of "
            f"{sum(each) / len(each):.1f}: lower them, or raise budget"
        )
    return heads


def one_budget(config: H2OConfig | Sequence[H2OConfig]) -> int:
    """Read the budget that heads divide.

    Raises:
        ValueError: There is a list of configurations.
    """
    if not isinstance(config, H2OConfig):
        raise ValueError(
            f"a budget for each head divides the budget of one H2OConfig, got a list of {len(config)}: pass one"
        )
    return config.budget


def groups(config: H2OConfig, budgets: Sequence[int]) -> Iterator[tuple[tuple[int, ...], H2OConfig]]:
    """Put heads of one budget together, in the order of their first, each group with its configuration."""
    check_split(config)
    heads: dict[int, list[int]] = {}
    for head, budget in enumerate(budgets):
        heads.setdefault(budget, []).append(head)
    for budget, alike in heads.items():
        yield tuple(alike), of_budget(config, budget)


def of_budget(config: H2OConfig, budget: int) -> H2OConfig:
    """Give a head another budget, of which its recent window is the same share as before, rounded down.

    Raises:
        ValueError: It leaves no place beside sinks and recent window.
    """
    try:
        return replace(config, budget=budget, grace=config.grace * budget // config.budget)
    except ValueError as error:
        raise ValueError(f"some heads keep {budget} tokens where the mean is {config.budget}: {error}") from None


def check_split(config: H2OConfig) -> None:
    """Refuse settings that heads with budgets of their own can't honour.

    Raises:
        ValueError: There is one.
    """
    if config.positions != "original":
        raise ValueError(
            f"heads with budgets of their own sit at different ranks, got positions={config.positions!r}: use "
            'positions="original", or the same budget for all heads of a layer (heads="equal", or calibrated_layers)'
        )
    if config.scorer.inputs:
        raise ValueError(
            f"heads with budgets of their own take no inputs, and scorer {config.scorer.name!r} needs "
            f'{", ".join(sorted(config.scorer.inputs))}: use another scorer, or heads="equal"'
        )
