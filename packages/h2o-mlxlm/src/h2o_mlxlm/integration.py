"""Bounded caches for a loaded model: composes core, rope, the cache and the attention hook."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as mlx_lm_cache

from h2o_core import H2OConfig
from h2o_mlxlm.adaptive import AdaptiveH2OKVCache
from h2o_mlxlm.attention import place_hook
from h2o_mlxlm.backend import Backend, backend_of
from h2o_mlxlm.budgets import HeadsOfLayer, for_layers, heads_of_layers, of_budget, one_budget
from h2o_mlxlm.cache import H2OKVCache, share
from h2o_mlxlm.checks import Inputs, given_inputs
from h2o_mlxlm.forms import Pair
from h2o_mlxlm.layers import kv_heads, layers_of, rotation_for, scale_of, trained_length
from h2o_mlxlm.needs import Needs, needs_for
from h2o_mlxlm.speculative import place_check
from h2o_mlxlm.split import SplitH2OKVCache
from h2o_mlxlm.suitability import (
    Heads,
    check_head_counts,
    check_heads,
    check_layers,
    check_moving,
    check_ragged,
    check_rewind,
    check_scorer,
    check_storage,
)


def make_prompt_cache(
    model: nn.Module,
    config: H2OConfig | Sequence[H2OConfig],
    partial: bool = False,
    backend: str = "auto",
    heads: Heads | Needs | Sequence[Sequence[int]] = "equal",
    kv_bits: int | Pair | None = None,
    kv_group_size: int | Pair = 64,
    kv_quantizer: str = "per_token",
    inputs: Inputs | None = None,
) -> list[Any]:
    """Make a fresh cache for each layer, as ``mlx_lm.models.cache.make_prompt_cache`` does.

    Layers that attend to everything get an ``H2OKVCache``; layers with a sliding window keep mlx_lm's
    rotating cache, which is bounded already. The attention hook is placed in the model's modules, once and
    for good; it concerns H2O caches alone.

    Args:
        model: A model that ``mlx_lm.load`` or ``h2o_mlxlm.load`` returned.
        config: What each layer keeps, or a list with one configuration for each layer that gets an H2O cache,
            lowest first; see ``pyramid`` and ``calibrated_layers``.
        partial: True leaves layers that can't have an H2O cache (state-space layers) with their own.
        backend: ``"auto"``, ``"reference"``, ``"metal"`` or ``"cuda"``; see ``backend_of``.
        heads: ``"equal"``: each head keeps ``budget`` tokens. The others keep so many on average. ``"adaptive"``:
            more in those of a layer that look at more in this prompt, see ``AdaptiveH2OKVCache``. ``Needs``: more in
            those of the model that were measured to need more; ``"calibrated"``: by the needs that come with this
            package, if it knows the model. Or the budget of each head, for each layer that gets an H2O cache. See
            ``SplitH2OKVCache``.
        kv_bits: 8 or 4 stores the rows of H2O caches quantised, None as the model makes them. A pair is for keys and
            for values. Sliding windows stay as they are.
        kv_group_size: Numbers that share a scale: 32, 64 or 128, or a pair.
        kv_quantizer: ``"per_token"``: each row by itself, from the first token on. ``"kivi"``: keys by channel over
            blocks of ``kv_group_size`` tokens, once they are old; ``"gear"``: the same, corrected. Blocks are written
            once and go when they are empty; see ``Blocks``.
        inputs: What the scorer needs of the caller, one dict of arrays for each layer that gets an H2O cache; see
            ``h2o_mlxlm.inputs``. None for a scorer that needs nothing.

    Returns:
        The list that ``prompt_cache=`` takes.

    Raises:
        TypeError: ``config`` is no ``H2OConfig`` and no list of them.
        ValueError: This model, or one of its layers, can't do what the configuration asks, or the back end can't run
            here; it says why and what can.
    """
    chosen = backend_of(backend)
    own = _own_caches(model)
    ours = [type(c) is mlx_lm_cache.KVCache for c in own]
    check_layers(model, own, ours, partial)
    configs = for_layers(config, sum(ours))
    if isinstance(heads, Needs) or (isinstance(heads, str) and heads == "calibrated"):
        heads = needs_for(model, None if isinstance(heads, str) else heads).budgets_for(one_budget(config))
    shapes = heads_of_layers(heads, config, sum(ours))
    check_heads(shapes, configs)
    if not isinstance(shapes[0], str):
        counts = kv_heads(model, _own_caches(model))
        check_head_counts(model, shapes, [n for n, mine in zip(counts, ours, strict=True) if mine])
    hooked = place_hook(model)
    check_scorer(model, configs[0], own, hooked)
    if shapes[0] != "equal" or len({c.budget for c in configs}) > 1:
        check_ragged(model, own, hooked)
    storage = {"kv_bits": kv_bits, "kv_group_size": kv_group_size, "kv_quantizer": kv_quantizer}
    check_storage(model, shapes[0], storage)
    positions, rewind = configs[0].positions, configs[0].rewind
    if positions != "original":
        check_moving(model, positions)
    if rewind:
        check_rewind(model, rewind, own, ours, hooked)
    place_check()
    layers = layers_of(model, own)
    if positions == "auto" and configs[0].trained_length is None:
        configs = [replace(c, trained_length=trained_length(model)) for c in configs]
    if len(own) < len(model.layers):
        # Some layers attend to another's cache, whose call ends only when all of them have.
        chosen = chosen._replace(fused=False)
    given = zip(configs, given_inputs(configs, inputs), shapes, strict=True)
    caches = [
        _cache_for(model, layer, *next(given), chosen, storage) if mine else other
        for layer, mine, other in zip(layers, ours, own, strict=True)
    ]
    share(caches)
    return caches


def calibrated_layers(model: nn.Module, config: H2OConfig, needs: Needs | None = None) -> list[H2OConfig]:
    """Give layers more whose heads were measured to need more. A step takes as long as with equal budgets.

    Args:
        model: The model.
        config: What a layer keeps on average; ``calibrated_config`` makes one. A layer's recent window is the same
            share of its budget.
        needs: What was measured; None takes what comes with this package, if it knows the model.

    Returns:
        A configuration for each layer that gets an H2O cache, for ``make_prompt_cache`` and ``install``.

    Raises:
        TypeError: ``config`` is no ``H2OConfig``, or ``needs`` are no ``Needs``.
        ValueError: Nothing was measured of this model, or a budget leaves no place beside sinks and recent window.
    """
    if not isinstance(config, H2OConfig):
        raise TypeError(f"config must be an H2OConfig, got {config!r:.200}: calibrated_config(512), for example")
    found = needs_for(model, needs).budgets_for(config.budget, groups=1)
    if len(found) != (own := bounded_layers(model)):
        raise ValueError(f"needs must be of the {own} layers that get an H2O cache, got {len(found)}: calibrate anew")
    return [of_budget(config, heads[0]) for heads in found]


def bounded_layers(model: nn.Module) -> int:
    """Count the layers of a model that get an H2O cache."""
    return sum(type(c) is mlx_lm_cache.KVCache for c in _own_caches(model))


def install(model: nn.Module, config: H2OConfig | Sequence[H2OConfig], partial: bool = False, **how: Any) -> None:
    """Make every generation, chat and server request on this model use fresh H2O caches.

    Sets ``model.make_cache``, which mlx_lm asks for the caches of each generation.

    Args:
        model: The model.
        config: What each layer keeps; see ``make_prompt_cache``.
        partial: See ``make_prompt_cache``.
        how: What else ``make_prompt_cache`` takes, by name. With ``heads="adaptive"`` mlx_lm's server runs requests
            one by one, and ``batch_generate`` refuses.

    Raises:
        ValueError: See ``make_prompt_cache``; raised here, not at the first token.
    """
    make = functools.partial(make_prompt_cache, model, config, partial, **how)
    make()
    uninstall(model)
    model.make_cache = _MakeCache(make, vars(model).get("make_cache"))


def uninstall(model: nn.Module) -> None:
    """Give the model its own ``make_cache`` back. Does nothing if none of ours is installed."""
    installed = vars(model).get("make_cache")
    if isinstance(installed, _MakeCache):
        del model.make_cache
        if installed.previous is not None:
            model.make_cache = installed.previous


class _MakeCache:
    """What ``install`` sets: a function of nothing, as mlx_lm calls it."""

    def __init__(self, make: Callable[[], list[Any]], previous: Callable[..., Any] | None) -> None:
        self.make, self.previous = make, previous

    def __call__(self) -> list[Any]:
        return self.make()


def _own_caches(model: nn.Module) -> list[Any]:
    """The caches that the model itself asks for, whatever is installed on it."""
    # Never by uninstalling for a moment: another thread may be asking for caches.
    make = vars(model).get("make_cache")
    if isinstance(make, _MakeCache):
        make = make.previous
    if make is not None:
        return list(make())
    of_class = getattr(type(model), "make_cache", None)
    if of_class is not None:
        return list(of_class(model))
    return [mlx_lm_cache.KVCache() for _ in model.layers]


def _cache_for(
    model: nn.Module,
    layer: nn.Module | None,
    config: H2OConfig,
    inputs: Mapping[str, mx.array],
    shape: HeadsOfLayer,
    backend: Backend,
    storage: dict[str, Any],
) -> H2OKVCache | AdaptiveH2OKVCache | SplitH2OKVCache:
    if shape == "adaptive":
        return AdaptiveH2OKVCache(config, backend)
    if not isinstance(shape, str):
        return SplitH2OKVCache(config, shape, scale=scale_of(layer), backend=backend, **storage)
    rotation = None if config.positions == "original" else rotation_for(model, layer, config.positions)
    return H2OKVCache(config, scale_of(layer), rotation, backend, **storage, inputs=inputs)
