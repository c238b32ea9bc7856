"""What a model says of itself: its name, its layers, their rotation, and the factor on their logits."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from h2o_rope import Rotation, rotation_of


def model_family(model: nn.Module) -> str:
    """Name the file of mlx_lm that defines the model."""
    return type(model).__module__.rsplit(".", 1)[-1]


def families(model: nn.Module) -> set[str]:
    """Name the files that define the model's modules: a model may wrap that of another file."""
    return {model_family(module) for _, module in model.named_modules()}


def name_of(model: nn.Module) -> str:
    """Name the model as its arguments do, or as its file."""
    return str(getattr(model, "model_type", model_family(model)))


def layers_of(model: nn.Module, own: list[Any]) -> list[nn.Module | None]:
    """List the layer that owns each cache; None where caches and layers don't pair up by place."""
    layers = list(model.layers)
    # Shared KV layers have no cache of their own and come last, so the first ones pair up.
    return layers[: len(own)] if len(own) <= len(layers) else [None] * len(own)


def trained_length(model: nn.Module) -> int:
    """Find the positions that a model was trained for.

    Raises:
        ValueError: Its arguments don't say.
    """
    for args in (getattr(model, "args", None), getattr(getattr(model, "model", None), "args", None)):
        length = getattr(args, "max_position_embeddings", None)
        if isinstance(length, int):
            return length
    raise ValueError(
        f'positions="auto" needs to know how long {name_of(model)} was trained for, and its arguments do not say: '
        "set trained_length in the configuration"
    )


def kv_heads(model: nn.Module, own: list[Any]) -> list[int | None]:
    """Count the KV heads of each cache, in a model that is sharded those of this rank; None for one that is not used.

    Args:
        model: The model.
        own: Fresh caches as the model itself makes them, which are used up.
    """
    # Never evaluated: shapes are known without.
    model(mx.zeros((1, 1), mx.int32), cache=own)
    rows = [getattr(cache, "keys", None) for cache in own]
    return [None if keys is None else int(keys.shape[1]) for keys in rows]


def rotation_for(model: nn.Module, layer: nn.Module | None, positions: str) -> Rotation:
    """Read the rotation of a layer's keys.

    Raises:
        ValueError: The layer has not exactly one rotary embedding, or one that can't be moved to other positions.
    """
    ropes = ropes_of(layer)
    if len(ropes) != 1:
        raise ValueError(
            f'positions="{positions}" needs the one rotary embedding of each layer, found {len(ropes)} in a '
            f'layer of {name_of(model)}: use positions="original"'
        )
    return rotation_of(ropes[0])


def ropes_of(layer: nn.Module | None) -> list[nn.Module]:
    """List the rotary embeddings of a layer."""
    return [] if layer is None else [m for name, m in layer.named_modules() if _is_rope(name, m)]


def _is_rope(name: str, module: nn.Module) -> bool:
    last = name.rsplit(".", 1)[-1]
    return last.startswith(("rope", "rotary")) or "rope" in type(module).__name__.lower()


def scale_of(layer: nn.Module | None) -> float | None:
    """Find the factor on the logits that a layer's attention uses, where it says so."""
    for _, module in [] if layer is None else layer.named_modules():
        scale = getattr(module, "scale", None)
        if isinstance(scale, float) and not _is_rope("", module):
            return scale
    return None
