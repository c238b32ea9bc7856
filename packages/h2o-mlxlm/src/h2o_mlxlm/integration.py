"""Bounded caches for a loaded model: composes core, rope, the cache and the attention hook."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models import mla

from h2o_core import H2OConfig
from h2o_mlxlm.adaptive import AdaptiveH2OKVCache, check_adaptive
from h2o_mlxlm.attention import place_hook
from h2o_mlxlm.backend import Backend, backend_of
from h2o_mlxlm.budgets import for_layers
from h2o_mlxlm.cache import H2OKVCache, share
from h2o_mlxlm.checks import Inputs, given_inputs
from h2o_mlxlm.layers import families, layers_of, name_of, rotation_for, scale_of, trained_length
from h2o_mlxlm.speculative import place_check

Heads = Literal["equal", "adaptive"]

# Models that take a row's place in the cache for its position, with any configuration.
PLACE_MATTERS = ("afm7", "phi3small")

# Models whose cached keys are not just keys rotated at the layer's own offset, and what they are instead.
NO_ROLLING = {
    "bailing_moe_linear": "rotates in its linear layers by the same offset",
    "cohere2": "does not rotate the keys of these layers",
    "deepseek_v2": "rotates only the last part of a key",
    "deepseek_v41": "rotates only the last part of a key",
    "gemma3n": "rotates every layer by the first one's offset",
    "gpt2": "has learned positions",
    "gpt_bigcode": "has learned positions",
    "hunyuan": "scales keys after their rotation",
    "hunyuan_v1_dense": "scales keys after their rotation",
    "llama4": "scales queries by their position",
    "ministral3": "scales queries by their position",
    "minicpm3": "rotates only the last part of a key",
    "youtu_llm": "rotates only the last part of a key",
}


def make_prompt_cache(
    model: nn.Module,
    config: H2OConfig | Sequence[H2OConfig],
    partial: bool = False,
    backend: str = "auto",
    heads: Heads = "equal",
    inputs: Inputs | None = None,
) -> list[Any]:
    """Make a fresh cache for each layer, as ``mlx_lm.models.cache.make_prompt_cache`` does.

    Layers that attend to everything get an ``H2OKVCache``; layers with a sliding window keep mlx_lm's
    rotating cache, which is bounded already. The attention hook is placed in the model's modules, once and
    for good; it concerns H2O caches alone.

    Args:
        model: A model that ``mlx_lm.load`` or ``h2o_mlxlm.load`` returned.
        config: What each layer keeps, or a list with one configuration for each layer that gets an H2O cache,
            lowest first; see ``pyramid``.
        partial: True leaves layers that can't have an H2O cache (state-space layers) with their own.
        backend: ``"auto"``, ``"reference"``, ``"metal"`` or ``"cuda"``; see ``backend_of``.
        heads: ``"equal"``: each head keeps ``budget`` tokens. ``"adaptive"``: so many on average, more in heads that
            look at more; see ``AdaptiveH2OKVCache``, which the layers then get.
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
    _check_layers(model, own, ours, partial)
    configs = for_layers(config, sum(ours))
    _check_heads(heads, configs)
    hooked = place_hook(model)
    _check_scorer(model, configs[0], own, hooked)
    if heads == "adaptive" or len({c.budget for c in configs}) > 1:
        _check_ragged(model, own, hooked)
    positions, rewind = configs[0].positions, configs[0].rewind
    if positions != "original":
        _check_moving(model, positions)
    if rewind:
        _check_rewind(model, rewind, own, ours, hooked)
    place_check()
    layers = layers_of(model, own)
    if positions == "auto" and configs[0].trained_length is None:
        configs = [replace(c, trained_length=trained_length(model)) for c in configs]
    if len(own) < len(model.layers):
        # Some layers attend to another's cache, whose call ends only when all of them have.
        chosen = chosen._replace(fused=False)
    given = zip(configs, given_inputs(configs, inputs), strict=True)
    caches = [
        _cache_for(model, layer, *next(given), chosen, heads) if mine else other
        for layer, mine, other in zip(layers, ours, own, strict=True)
    ]
    share(c for c in caches if isinstance(c, H2OKVCache))
    return caches


def bounded_layers(model: nn.Module) -> int:
    """Count the layers of a model that get an H2O cache."""
    return sum(type(c) is mlx_lm_cache.KVCache for c in _own_caches(model))


def install(
    model: nn.Module,
    config: H2OConfig | Sequence[H2OConfig],
    partial: bool = False,
    backend: str = "auto",
    heads: Heads = "equal",
    inputs: Inputs | None = None,
) -> None:
    """Make every generation, chat and server request on this model use fresh H2O caches.

    Sets ``model.make_cache``, which mlx_lm asks for the caches of each generation.

    Args:
        model: The model.
        config: What each layer keeps; see ``make_prompt_cache``.
        partial: See ``make_prompt_cache``.
        backend: See ``make_prompt_cache``.
        heads: See ``make_prompt_cache``. With ``"adaptive"`` mlx_lm's server runs requests one by one, and
            ``batch_generate`` refuses.
        inputs: See ``make_prompt_cache``. Every generation gets the same.

    Raises:
        ValueError: See ``make_prompt_cache``; raised here, not at the first token.
    """
    make = functools.partial(make_prompt_cache, model, config, partial, backend, heads, inputs)
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


def _check_layers(model: nn.Module, own: list[Any], ours: list[bool], partial: bool) -> None:
    # Models with kv_lora_rank that multiply it out before the cache keep whole keys, and work.
    if any(type(m).__module__ == mla.__name__ for _, m in model.named_modules()):
        raise ValueError(
            f"{name_of(model)} keeps latent keys (kv_lora_rank), whose attention an H2O cache can't see: "
            "use mlx_lm's own cache with this model"
        )
    if not families(model).isdisjoint(PLACE_MATTERS):
        raise ValueError(
            f"{name_of(model)} takes a row's place in the cache for its position, which evictions change: "
            "use mlx_lm's own cache with this model"
        )
    if not any(ours):
        raise ValueError(
            f"no layer of {name_of(model)} has a full attention cache to bound, got "
            f"{', '.join(sorted({type(c).__name__ for c in own}))}: use mlx_lm's own cache with this model"
        )
    others = {
        type(c).__name__
        for c, mine in zip(own, ours, strict=True)
        if not mine and not isinstance(c, mlx_lm_cache.RotatingKVCache)
    }
    if others and not partial:
        raise ValueError(
            f"some layers of {name_of(model)} keep {', '.join(sorted(others))}, which H2O can't bound: "
            "pass partial=True to bound the other layers and leave these as they are"
        )


def _check_heads(heads: str, configs: list[H2OConfig]) -> None:
    if heads not in get_args(Heads):
        raise ValueError(f"heads must be one of {', '.join(map(repr, get_args(Heads)))}, got {heads!r}")
    if heads == "adaptive":
        for config in configs:
            check_adaptive(config)


def _check_scorer(model: nn.Module, config: H2OConfig, own: list[Any], hooked: bool) -> None:
    """Refuse models whose attention a scorer would not see, or would see twice in one call."""
    scorer = config.scorer
    if not hooked and config.queries == "true" and scorer.by_attention:
        also = "" if scorer.plain else ", or a scorer that looks at no attention, such as 'streaming_llm'"
        raise ValueError(
            f'the layers of {name_of(model)} attend with code of their own, so queries="true" can\'t see their '
            f'attention: use H2OConfig(queries="key"){also}'
        )
    if not scorer.plain and len(own) != len(model.layers):
        raise ValueError(
            f"scorer {scorer.name!r} takes one attention a call, but {name_of(model)} attends to keys of one layer in "
            "several: use scorer='h2o' with this model"
        )


def _check_rewind(model: nn.Module, rewind: int, own: list[Any], ours: list[bool], hooked: bool) -> None:
    """Refuse models of which some layer could not take a token back, or not the same one as the others."""
    if not hooked:
        raise ValueError(
            f"rewind={rewind} hands a layer's call over in parts, but the layers of {name_of(model)} attend with code "
            "of their own: use rewind=0 with this model"
        )
    if len(own) != len(model.layers):
        raise ValueError(
            f"rewind={rewind} needs a cache for each layer, but {name_of(model)} has {len(own)} caches for "
            f"{len(model.layers)} layers: use rewind=0 with this model"
        )
    if not all(ours):
        others = sorted({type(c).__name__ for c, mine in zip(own, ours, strict=True) if not mine})
        raise ValueError(
            f"rewind={rewind} needs every layer to take tokens back, but some layers of {name_of(model)} keep "
            f"{', '.join(others)}, which can't once it is full: use rewind=0 with this model"
        )


def _check_ragged(model: nn.Module, own: list[Any], hooked: bool) -> None:
    """Refuse models that attend to the rows of one layer under a mask made for another."""
    # Our attention goes by each cache's own rows; without it, or where layers share keys, mlx_lm's mask decides.
    if not hooked or len(own) != len(model.layers):
        why = "attends to keys of one layer in several" if hooked else "attends with code of its own"
        raise ValueError(
            f"all layers and heads of {name_of(model)} must hold equally many tokens, for it {why}, under one mask: "
            'use one configuration for all layers, and heads="equal"'
        )


def _cache_for(
    model: nn.Module,
    layer: nn.Module | None,
    config: H2OConfig,
    inputs: Mapping[str, mx.array],
    backend: Backend,
    heads: Heads,
) -> H2OKVCache | AdaptiveH2OKVCache:
    if heads == "adaptive":
        return AdaptiveH2OKVCache(config, backend)
    rotation = None if config.positions == "original" else rotation_for(model, layer, config.positions)
    return H2OKVCache(config, scale_of(layer), rotation, backend, inputs)


def _check_moving(model: nn.Module, positions: str) -> None:
    """Refuse models whose cached keys are not just keys rotated at one position each."""
    for family in families(model) & NO_ROLLING.keys():
        raise ValueError(
            f'positions="{positions}" can\'t be used with {name_of(model)}, which {NO_ROLLING[family]}: '
            'use positions="original"'
        )
    if "mrope" in repr(vars(getattr(model, "args", None) or model)):
        raise ValueError(
            f'positions="{positions}" can\'t be used with {name_of(model)}, which has several positions a token '
            '(M-RoPE): use positions="original"'
        )
