"""Bounded caches for a loaded model: composes core, rope, the cache and the attention hook."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import mlx.nn as nn
from mlx_lm.models import base, mla
from mlx_lm.models import cache as mlx_lm_cache

from h2o_core import H2OConfig
from h2o_mlxlm.attention import plain_attention, scaled_dot_product_attention
from h2o_mlxlm.cache import H2OKVCache
from h2o_mlxlm.passes import Passes
from h2o_rope import Rotation, rotation_of

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


def make_prompt_cache(model: nn.Module, config: H2OConfig, partial: bool = False) -> list[Any]:
    """Make a fresh cache for each layer, as ``mlx_lm.models.cache.make_prompt_cache`` does.

    Layers that attend to everything get an ``H2OKVCache``; layers with a sliding window keep mlx_lm's
    rotating cache, which is bounded already. The attention hook is placed in the model's modules, once and
    for good; it concerns H2O caches alone.

    Args:
        model: A model that ``mlx_lm.load`` or ``h2o_mlxlm.load`` returned.
        config: What each layer keeps.
        partial: True leaves layers that can't have an H2O cache (state-space layers) with their own.

    Returns:
        The list that ``prompt_cache=`` takes.

    Raises:
        TypeError: ``config`` is no ``H2OConfig``.
        ValueError: This model, or one of its layers, can't do what the configuration asks; it says why
            and what can.
    """
    if not isinstance(config, H2OConfig):
        raise TypeError(f"config must be an H2OConfig, got {config!r}: H2OConfig(budget=512), for example")
    own = _own_caches(model)
    ours = [type(c) is mlx_lm_cache.KVCache for c in own]
    _check_layers(model, own, ours, partial)
    if not _place_hook(model) and config.queries == "true":
        raise ValueError(
            f'the layers of {_name(model)} attend with code of their own, so queries="true" can\'t see their '
            'attention: use H2OConfig(queries="key")'
        )
    if config.positions != "original":
        _check_moving(model, config.positions)
    layers = _layers_of(model, own)
    if config.positions == "auto" and config.trained_length is None:
        config = replace(config, trained_length=_trained_length(model))
    caches = [
        _cache_for(model, layer, config) if mine else other
        for layer, mine, other in zip(layers, ours, own, strict=True)
    ]
    passes = Passes(others=[c for c in own if isinstance(c, mlx_lm_cache.RotatingKVCache)])
    for cache in [c for c in caches if isinstance(c, H2OKVCache)]:
        cache.passes = passes
    return caches


def install(model: nn.Module, config: H2OConfig, partial: bool = False) -> None:
    """Make every generation, chat and server request on this model use fresh H2O caches.

    Sets ``model.make_cache``, which mlx_lm asks for the caches of each generation.

    Args:
        model: The model.
        config: What each layer keeps.
        partial: See ``make_prompt_cache``.

    Raises:
        ValueError: See ``make_prompt_cache``; raised here, not at the first token.
    """
    make_prompt_cache(model, config, partial)
    uninstall(model)
    model.make_cache = _MakeCache(model, config, partial, vars(model).get("make_cache"))


def uninstall(model: nn.Module) -> None:
    """Give the model its own ``make_cache`` back. Does nothing if none of ours is installed."""
    installed = vars(model).get("make_cache")
    if isinstance(installed, _MakeCache):
        del model.make_cache
        if installed.previous is not None:
            model.make_cache = installed.previous


class _MakeCache:
    """What ``install`` sets: a function of nothing, as mlx_lm calls it."""

    def __init__(self, model: nn.Module, config: H2OConfig, partial: bool, previous: Callable[..., Any] | None) -> None:
        self.model, self.config, self.partial, self.previous = model, config, partial, previous

    def __call__(self) -> list[Any]:
        return make_prompt_cache(self.model, self.config, self.partial)


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
            f"{_name(model)} keeps latent keys (kv_lora_rank), whose attention an H2O cache can't see: "
            "use mlx_lm's own cache with this model"
        )
    if not _families(model).isdisjoint(PLACE_MATTERS):
        raise ValueError(
            f"{_name(model)} takes a row's place in the cache for its position, which evictions change: "
            "use mlx_lm's own cache with this model"
        )
    if not any(ours):
        raise ValueError(
            f"no layer of {_name(model)} has a full attention cache to bound, got "
            f"{', '.join(sorted({type(c).__name__ for c in own}))}: use mlx_lm's own cache with this model"
        )
    others = {
        type(c).__name__
        for c, mine in zip(own, ours, strict=True)
        if not mine and not isinstance(c, mlx_lm_cache.RotatingKVCache)
    }
    if others and not partial:
        raise ValueError(
            f"some layers of {_name(model)} keep {', '.join(sorted(others))}, which H2O can't bound: "
            "pass partial=True to bound the other layers and leave these as they are"
        )


def _layers_of(model: nn.Module, own: list[Any]) -> list[nn.Module | None]:
    """The layer that owns each cache; None where caches and layers don't pair up by place."""
    layers = list(model.layers)
    # Shared KV layers have no cache of their own and come last, so the first ones pair up.
    return layers[: len(own)] if len(own) <= len(layers) else [None] * len(own)


def _cache_for(model: nn.Module, layer: nn.Module | None, config: H2OConfig) -> H2OKVCache:
    rotation = None if config.positions == "original" else _rotation_for(model, layer, config.positions)
    return H2OKVCache(config, _scale_of(layer), rotation)


def _trained_length(model: nn.Module) -> int:
    """The positions that the model's arguments say it was trained for."""
    for args in (getattr(model, "args", None), getattr(getattr(model, "model", None), "args", None)):
        length = getattr(args, "max_position_embeddings", None)
        if isinstance(length, int):
            return length
    raise ValueError(
        f'positions="auto" needs to know how long {_name(model)} was trained for, and its arguments do not say: '
        "set trained_length in the configuration"
    )


def _check_moving(model: nn.Module, positions: str) -> None:
    """Refuse models whose cached keys are not just keys rotated at one position each."""
    for family in _families(model) & NO_ROLLING.keys():
        raise ValueError(
            f'positions="{positions}" can\'t be used with {_name(model)}, which {NO_ROLLING[family]}: '
            'use positions="original"'
        )
    if "mrope" in repr(vars(getattr(model, "args", None) or model)):
        raise ValueError(
            f'positions="{positions}" can\'t be used with {_name(model)}, which has several positions a token '
            '(M-RoPE): use positions="original"'
        )


def _rotation_for(model: nn.Module, layer: nn.Module | None, positions: str) -> Rotation:
    ropes = [] if layer is None else [m for name, m in layer.named_modules() if _is_rope(name, m)]
    if len(ropes) != 1:
        raise ValueError(
            f'positions="{positions}" needs the one rotary embedding of each layer, found {len(ropes)} in a '
            f'layer of {_name(model)}: use positions="original"'
        )
    return rotation_of(ropes[0])


def _is_rope(name: str, module: nn.Module) -> bool:
    last = name.rsplit(".", 1)[-1]
    return last.startswith(("rope", "rotary")) or "rope" in type(module).__name__.lower()


def _scale_of(layer: nn.Module | None) -> float | None:
    """The factor on the logits that a layer's attention uses, where it says so."""
    for _, module in [] if layer is None else layer.named_modules():
        scale = getattr(module, "scale", None)
        if isinstance(scale, float) and not _is_rope("", module):
            return scale
    return None


def _place_hook(model: nn.Module) -> bool:
    """Put our attention where the model's modules hold mlx_lm's, by whatever name they gave it.

    Returns:
        Whether all of the model's attention goes through it.
    """
    placed = False
    for module in _source_modules(model):
        for name, value in list(vars(module).items()):
            if value is plain_attention:
                setattr(module, name, scaled_dot_product_attention)
            placed = placed or value is plain_attention or value is scaled_dot_product_attention
    # Gear's file has mlx_lm's attention too, but capped logits go through another.
    capped = any(getattr(m, "attn_logit_softcapping", None) for _, m in model.named_modules())
    return placed and not capped


def _source_modules(model: nn.Module) -> Iterator[ModuleType]:
    """The Python modules that define the classes of the model's modules, mlx's own left out."""
    names = {cls.__module__ for _, module in model.named_modules() for cls in type(module).__mro__}
    for name in sorted(names - {base.__name__}):
        if not name.startswith("mlx.") and name in sys.modules:
            yield sys.modules[name]


def model_family(model: nn.Module) -> str:
    """Name the file of mlx_lm that defines the model."""
    return type(model).__module__.rsplit(".", 1)[-1]


def _families(model: nn.Module) -> set[str]:
    """Name the files that define the model's modules: a model may wrap that of another file."""
    return {model_family(module) for _, module in model.named_modules()}


def _name(model: nn.Module) -> str:
    return str(getattr(model, "model_type", model_family(model)))
