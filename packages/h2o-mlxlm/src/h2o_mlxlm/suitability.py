"""What a model must be to have the caches that are asked for; whatever it can't have is refused with the reason."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import mlx.nn as nn
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models import mla

from h2o_core import H2OConfig
from h2o_mlxlm.adaptive import check_adaptive
from h2o_mlxlm.budgets import HeadsOfLayer, check_split
from h2o_mlxlm.forms import forms
from h2o_mlxlm.layers import families, name_of
from h2o_mlxlm.models import head_dim_of

Heads = Literal["equal", "adaptive", "calibrated"]

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


def check_layers(model: nn.Module, own: list[Any], ours: list[bool], partial: bool) -> None:
    """Refuse models none of whose layers can have an H2O cache, or, unless ``partial``, not all that could use one."""
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


def check_heads(shapes: Sequence[HeadsOfLayer], configs: list[H2OConfig]) -> None:
    """Refuse ways to divide a layer that there are none of, or that the configurations don't suit."""
    for shape, config in zip(shapes, configs, strict=True):
        if not isinstance(shape, str):
            check_split(config)
        elif shape not in get_args(Heads):
            raise ValueError(
                f"heads must be one of {', '.join(map(repr, get_args(Heads)))}, Needs, or the budget of each head of "
                f"each layer, got {shape!r}"
            )
        elif shape == "adaptive":
            check_adaptive(config)


def check_head_counts(model: nn.Module, shapes: Sequence[HeadsOfLayer], counts: Sequence[int | None]) -> None:
    """Refuse budgets for more or fewer heads than a layer has."""
    for layer, (shape, count) in enumerate(zip(shapes, counts, strict=True)):
        if count is not None and len(shape) != count:
            raise ValueError(
                f"heads has budgets for {len(shape)} KV heads of H2O layer {layer}, of which {name_of(model)} has "
                f"{count} here: give each layer a list of as many (a sharded model has its share of the heads)"
            )


def check_storage(model: nn.Module, heads: HeadsOfLayer, storage: dict[str, Any]) -> None:
    """Refuse to store rows as they can't be, for the width of the model's keys where it is known."""
    if heads == "adaptive" and storage["kv_bits"] is not None:
        raise ValueError(
            f'heads="adaptive" stores rows as they come, got kv_bits={storage["kv_bits"]}: use heads="equal"'
        )
    width = head_dim_of(model)
    for name, form in zip(("keys", "values"), forms(**storage), strict=True):
        if width is not None:
            form.check_width(name, width)


def check_scorer(model: nn.Module, config: H2OConfig, own: list[Any], hooked: bool) -> None:
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


def check_rewind(model: nn.Module, rewind: int, own: list[Any], ours: list[bool], hooked: bool) -> None:
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


def check_ragged(model: nn.Module, own: list[Any], hooked: bool) -> None:
    """Refuse models that attend to the rows of one layer under a mask made for another."""
    # Our attention goes by each cache's own rows; without it, or where layers share keys, mlx_lm's mask decides.
    if not hooked or len(own) != len(model.layers):
        why = "attends to keys of one layer in several" if hooked else "attends with code of its own"
        raise ValueError(
            f"all layers and heads of {name_of(model)} must hold equally many tokens, for it {why}, under one mask: "
            'use one configuration for all layers, and heads="equal"'
        )


def check_moving(model: nn.Module, positions: str) -> None:
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
