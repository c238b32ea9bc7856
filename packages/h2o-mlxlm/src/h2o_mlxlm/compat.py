"""The names of the design this project began from, for code that was written against them.

``method`` is the name of a scorer. The README maps each name to ours.
"""

from dataclasses import dataclass
from typing import Any, Literal

import mlx.nn as nn

from h2o_core import H2OConfig
from h2o_core.scorer import Scorer, scorer_names, scorer_of
from h2o_mlxlm.cache import H2OKVCache
from h2o_mlxlm.checks import Inputs
from h2o_mlxlm.integration import make_prompt_cache
from h2o_mlxlm.models import head_dim_of


@dataclass(frozen=True)
class KVCacheConfig:
    """Name a method and its settings.

    Args:
        method: ``H2OConfig.scorer``: the name of a scorer, such as ``"h2o"`` or ``"snapkv"``.
        head_dim: Key width D of the model, checked against it.
        h2o_budget: ``H2OConfig.budget``.
        h2o_n_sink: ``H2OConfig.n_sink``.
        h2o_grace: ``H2OConfig.grace``.
        h2o_decay: ``H2OConfig.decay``, of methods that sum mass; others leave the default aside, and refuse another.
        h2o_queries: ``H2OConfig.queries``; None is ``"true"`` in ``KVCacheBuilder``, which sees the model,
            and ``"key"`` in ``KVCacheFactory``, which does not, where the method looks at attention.
        cam_merge: ``merge`` of scorer ``"cam"``; None is its default.
        keyformer_tau: ``tau`` of scorer ``"keyformer"``, likewise.

    Raises:
        ValueError: A value is outside its range.
    """

    method: str = "h2o"
    head_dim: int = 128
    h2o_budget: int = 512
    h2o_n_sink: int = 4
    h2o_grace: int = 16
    h2o_decay: float = 0.98
    h2o_queries: Literal["true", "key"] | None = None
    cam_merge: str | None = None
    keyformer_tau: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.head_dim, bool) or not isinstance(self.head_dim, int) or self.head_dim < 1:
            raise ValueError(f"head_dim must be a positive integer, got {self.head_dim!r}")
        self.ours("true")

    def ours(self, default: Literal["true", "key"]) -> H2OConfig:
        """Return the same settings as an ``H2OConfig``."""
        scorer = self._scorer()
        # The default is a factor for sums; whoever asks for another where there are none hears of it.
        unasked = not scorer.sums and self.h2o_decay == type(self).h2o_decay
        return H2OConfig(
            budget=self.h2o_budget,
            n_sink=self.h2o_n_sink,
            grace=self.h2o_grace,
            decay=H2OConfig.decay if unasked else self.h2o_decay,
            long_share=0.0,  # that design ranks by one score
            queries=self._queries(scorer, default),
            scorer=scorer,
        )

    def _queries(self, scorer: Scorer, default: Literal["true", "key"]) -> Literal["true", "key"]:
        if self.h2o_queries is not None:
            return self.h2o_queries
        return default if scorer.by_attention else "true"

    def _scorer(self) -> Scorer:
        if self.method not in scorer_names():
            raise ValueError(f"method must be one of {', '.join(map(repr, scorer_names()))}, got {self.method!r}")
        parameters: dict[str, Any] = {}
        for name, value in (("cam_merge", self.cam_merge), ("keyformer_tau", self.keyformer_tau)):
            method, _, parameter = name.partition("_")
            if value is not None and method != self.method:
                raise ValueError(f"{name} is for method={method!r}, got method={self.method!r}: leave it out")
            if value is not None:
                parameters[parameter] = value
        return scorer_of({"name": self.method, **parameters})


class KVCacheFactory:
    """Make one layer's cache without a model."""

    @staticmethod
    def create(config: KVCacheConfig) -> H2OKVCache:
        """Make a cache that scores by its own keys, unless ``h2o_queries="true"`` says otherwise."""
        return H2OKVCache(config.ours("key"), config.head_dim**-0.5)


class KVCacheBuilder:
    """Make every layer's cache for a model."""

    @staticmethod
    def for_model(model: nn.Module, config: KVCacheConfig, inputs: Inputs | None = None) -> list[Any]:
        """Make fresh caches, as ``make_prompt_cache`` does, scored by the model's own queries.

        Raises:
            ValueError: ``head_dim`` is not the model's, or the model can't have the cache.
        """
        width = head_dim_of(model)
        if width is not None and width != config.head_dim:
            raise ValueError(f"head_dim must be the model's own {width}, got {config.head_dim}: set head_dim={width}")
        return make_prompt_cache(model, config.ours("true"), inputs=inputs)
