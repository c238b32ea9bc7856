"""The caches that are compared on the same work, by name. Adding one is a line of ``VARIANTS``."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from h2o_core import H2OConfig


@dataclass(frozen=True)
class Room:
    """Where caches are wanted: a model, or one attention layer by itself."""

    budget: int
    head_dim: int
    model: Any = None

    @property
    def n_caches(self) -> int:
        """Caches to make, one for each layer."""
        return 1 if self.model is None else len(self.model.layers)


@dataclass(frozen=True)
class Variant:
    """How to make a variant's caches.

    Args:
        make: Makes a fresh cache for each layer of a room.
        grows: It keeps every token, whatever the budget.
        width: What head_dim must be a multiple of.
        whole: It is for a whole model alone, and must be asked for.
    """

    make: Callable[[Room], list[Any]]
    grows: bool = False
    width: int = 1
    whole: bool = False


def _theirs(name: str, *, bounded: bool = False, **settings: Any) -> Callable[[Room], list[Any]]:
    """mlx_lm's unmodified class, with the budget as its first argument if it is ``bounded``."""

    def make(room: Room) -> list[Any]:
        kind = getattr(import_module("mlx_lm.models.cache"), name)
        return [kind(*[room.budget] * bounded, **settings) for _ in range(room.n_caches)]

    return make


def config_for(budget: int, **changes: Any) -> "H2OConfig":
    """Make a configuration whose protection fits any budget; what it protects does not change its cost."""
    from h2o_core import H2OConfig

    return H2OConfig(budget=budget, n_sink=min(4, budget // 8), grace=min(16, budget // 4), **changes)


def _ours(storage: dict[str, Any] | None = None, **changes: Any) -> Callable[[Room], list[Any]]:
    how = storage or {}

    def make(room: Room) -> list[Any]:
        config = config_for(room.budget, **changes)
        if room.model is not None:
            from h2o_mlxlm.integration import make_prompt_cache

            return make_prompt_cache(room.model, config, **how)
        import mlx.nn as nn

        from h2o_mlxlm.cache import H2OKVCache
        from h2o_rope import rotation_of

        rotation = None if config.positions == "original" else rotation_of(nn.RoPE(room.head_dim))
        return [H2OKVCache(config, rotation=rotation, **how)]

    return make


def _by_need(room: Room, method: str) -> list[Any]:
    """The caches that ``eval`` measures under that name."""
    from h2o_mlxlm.evaluation.methods import BY_NEED

    if room.model is None:
        raise ValueError("calibrated caches are for a whole model, which was measured: leave them out of --methods")
    return BY_NEED[method](room.model, room.budget, {}, 0)


VARIANTS = {
    "full": Variant(_theirs("KVCache"), grows=True),
    "recency": Variant(_theirs("RotatingKVCache", bounded=True, keep=4)),
    "quantized": Variant(_theirs("QuantizedKVCache", group_size=64, bits=8), grows=True, width=64),
    "h2o": Variant(_ours()),
    "h2o-books": Variant(_ours(long_share=0.35)),
    "h2o-calibrated": Variant(partial(_by_need, method="calibrated"), whole=True),
    "h2o-calibrated-layers": Variant(partial(_by_need, method="calibrated-layers"), whole=True),
    "h2o-rewind": Variant(_ours(rewind=3)),
    "h2o-key": Variant(_ours(queries="key")),
    "h2o-rolling": Variant(_ours(positions="rolling")),
    "h2o-8bit": Variant(_ours({"kv_bits": 8}), width=64),
    "h2o-4bit": Variant(_ours({"kv_bits": 4}), width=64),
    "h2o-kivi": Variant(_ours({"kv_bits": 4, "kv_group_size": 32, "kv_quantizer": "kivi"}), width=32),
    "h2o-gear": Variant(_ours({"kv_bits": 4, "kv_group_size": 32, "kv_quantizer": "gear"}), width=32),
}


def imported(path: str) -> Variant:
    """Take another library's cache: ``package.module:Class``, a ``callable(budget) -> cache``.

    Called once a layer, as ``Class(budget)`` if it takes an argument, else as ``Class()``. The cache is used as
    mlx_lm uses one: ``update_and_fetch``, ``make_mask``, ``offset``, ``state``, and mlx_lm's attention.

    Raises:
        ValueError: There is no such name.
    """
    module, _, name = path.partition(":")
    try:
        kind = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(f"--against must name package.module:Class, got {path!r} ({error})") from None
    arguments = [0] if _takes_one(kind) else []

    def make(room: Room) -> list[Any]:
        return [kind(*[room.budget for _ in arguments]) for _ in range(room.n_caches)]

    return Variant(make)


def _takes_one(kind: Callable[..., Any]) -> bool:
    try:
        inspect.signature(kind).bind(0)
    except (TypeError, ValueError):
        return False
    return True


def chosen(
    names: Sequence[str] | None, against: Sequence[str], head_dim: int, baseline: str | None = None
) -> dict[str, Variant]:
    """Pick variants by name, and those of other libraries by path.

    Args:
        names: Names of ``VARIANTS``; None takes all that can be used with this width.
        against: Paths, see ``imported``.
        head_dim: Width of keys and values.
        baseline: One of the names, or the last part of a path; None if there is none.

    Raises:
        ValueError: A variant that was asked for can't have this width, a path names nothing, or the baseline is
            not among them.
    """
    wanted = [name for name, variant in VARIANTS.items() if not variant.whole] if names is None else names
    for name in names or ():
        if head_dim % VARIANTS[name].width:
            raise ValueError(
                f"{name} needs a head_dim that is a multiple of {VARIANTS[name].width}, got {head_dim}: "
                "leave it out of --methods"
            )
    fitting = {name: VARIANTS[name] for name in wanted if head_dim % VARIANTS[name].width == 0}
    variants = fitting | {path.rpartition(":")[2]: imported(path) for path in against}
    if baseline is not None and baseline not in variants:
        raise ValueError(
            f"the baseline must be one of the methods, got {baseline!r} and {', '.join(variants)}: "
            "add it to --methods or name another --baseline"
        )
    return variants
