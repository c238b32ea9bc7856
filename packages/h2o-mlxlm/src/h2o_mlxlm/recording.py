"""What a model attends to on a text: queries, keys and values of its layers, where they have been rotated."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache

from h2o_core import H2OConfig, Recording
from h2o_mlxlm import attention as hook
from h2o_mlxlm.cache import H2OKVCache
from h2o_mlxlm.integration import make_prompt_cache


def record(
    model: Any, tokens: Sequence[int], layers: Sequence[int] | None = None, step: int = 512
) -> dict[int, Recording]:
    """Record queries, keys and values, where they have been rotated, of layers that attend to everything.

    Args:
        model: A model that ``load`` returned.
        tokens: What it reads, from an empty cache.
        layers: Places among the model's caches; None for every layer that can be recorded.
        step: Tokens a call.

    Returns:
        A ``h2o_core.Recording`` for each layer, by number.

    Raises:
        ValueError: A layer is not there, or its attention is not causal over all tokens.
    """
    caches, full = _caches(model)
    chosen = full if layers is None else list(layers)
    if not set(chosen) <= set(full):
        raise ValueError(
            f"layers {', '.join(map(str, sorted(set(chosen) - set(full))))} can't be recorded: "
            f"those that attend to everything are {', '.join(map(str, full))}"
        )
    taps = {id(caches[n]): _Tap() for n in chosen}
    with _watched(lambda cache, *call: taps[id(cache)].take(*call) if id(cache) in taps else None):
        for start in range(0, len(tokens), step):
            model(mx.array([tokens[start : start + step]]), cache=caches)
            # Not the logits: what comes after the last layer that is recorded is never computed.
            mx.eval([tap.arrays for tap in taps.values()])
    return {n: taps[id(caches[n])].recording() for n in chosen}


class _Tap:
    """What passes the attention of one layer."""

    def __init__(self) -> None:
        self.queries: list[Any] = []
        self.seen = 0
        self.rows: tuple[Any, ...] = ()  # keys and values of all tokens so far
        self.scale = 0.0

    @property
    def arrays(self) -> list[Any]:
        return [*self.queries[-1:], *self.rows]

    def take(self, queries: Any, keys: Any, values: Any, scale: float, mask: Any, sinks: Any) -> None:
        n = queries.shape[2]
        if self.seen + n != keys.shape[2]:
            return  # a later layer that attends to this one's rows
        if sinks is not None:
            raise ValueError("attention with sink logits can't be recorded: its rows do not sum to 1")
        if isinstance(mask, mx.array) and not bool(mx.array_equal(mask, create_causal_mask(n, self.seen))):
            raise ValueError("a layer attends under a mask that is not causal over all tokens: leave it out")
        self.queries.append(queries)
        self.rows, self.scale, self.seen = (keys, values), scale, self.seen + n

    def recording(self) -> Recording:
        if not self.queries:
            raise ValueError("a layer's attention was never seen: its model attends with code of its own")
        keys, values = (x[0] for x in self.rows)
        return Recording(None, mx.concatenate(self.queries, axis=2)[0], keys, values, self.scale, keys.shape[0])


def _caches(model: Any) -> tuple[list[Any], list[int]]:
    """Fresh caches that evict nothing, and the places of those that can be recorded. Puts our hook in place."""
    ours = make_prompt_cache(model, H2OConfig(), partial=True)
    full = [i for i, cache in enumerate(ours) if isinstance(cache, H2OKVCache)]
    return [KVCache() if i in full else cache for i, cache in enumerate(ours)], full


@contextmanager
def _watched(watch: Callable[..., None]) -> Iterator[None]:
    """Show every call that our hook hands on to mlx_lm's attention to ``watch``, for as long as this lasts."""
    plain = hook.plain_attention

    def watched(queries: Any, keys: Any, values: Any, *, cache: Any, scale: float, mask: Any, sinks: Any) -> Any:
        watch(cache, queries, keys, values, scale, mask, sinks)
        return plain(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)

    hook.plain_attention = watched
    try:
        yield
    finally:
        hook.plain_attention = plain
