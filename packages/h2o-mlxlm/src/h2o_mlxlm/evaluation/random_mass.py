"""Heavy hitters drawn by lot: what an H2O cache is worth if its scores mean nothing."""

from typing import Any

import mlx.core as mx

from h2o_core import Evidence, H2OConfig, Mass
from h2o_mlxlm.cache import H2OKVCache
from h2o_rope import Rotation


class RandomKVCache(H2OKVCache):
    """Keep sinks, the newest, and tokens drawn by lot: each has one uniform score, drawn as it comes.

    A score that grew with every call would favour the old. So the mass of a token is its lot in the call that
    brings it and 0 in every other, and there is no decay. Each KV head of each sequence draws for itself.

    Args:
        config: What to keep, with ``decay=1`` and the default scorer.
        scale: See ``H2OKVCache``.
        rotation: See ``H2OKVCache``.
        key: Of the random numbers.

    Raises:
        ValueError: Another scorer.
    """

    def __init__(self, config: H2OConfig, scale: float | None, rotation: Rotation | None, key: mx.array) -> None:
        if not config.scorer.plain:
            raise ValueError(
                f"lots stand in for the mass of scorer='h2o', got scorer={config.scorer.name!r}: leave the scorer out"
            )
        super().__init__(config, scale, rotation)
        self._key = key

    def observe(self, mass: Mass | Evidence) -> None:
        """Put lots in place of the mass, decayed and total [B, H, M]."""
        if isinstance(mass, Evidence) or (self._open and self._mass is not None):
            return  # layers that share a cache attend to it several times a call
        self._key, key = mx.random.split(self._key)
        shape = mass.decayed.shape
        state = self._live().state
        is_new = state.positions[..., : shape[-1]] >= state.seen[:, None, None] - self._open
        lots = mx.where(is_new, mx.random.uniform(shape=shape, key=key), 0.0)
        super().observe(Mass(lots, lots))


def random_caches(caches: list[Any], seed: int) -> list[Any]:
    """Put a random cache in the place of each H2O cache, of the same configuration."""
    keys = mx.random.split(mx.random.key(seed), len(caches))
    return [
        RandomKVCache(c.config, c.scale, c.rotation, key) if isinstance(c, H2OKVCache) else c
        for c, key in zip(caches, keys, strict=True)
    ]
