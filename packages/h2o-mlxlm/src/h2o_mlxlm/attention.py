"""Attention with mlx_lm's signature, which hands the mass of our caches back to them."""

import sys
from collections.abc import Iterator
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base

from h2o_mlxlm.adaptive import AdaptiveH2OKVCache
from h2o_mlxlm.cache import H2OKVCache
from h2o_mlxlm.head import HeadCache
from h2o_mlxlm.masks import is_ours
from h2o_mlxlm.split import SplitH2OKVCache

OURS = (H2OKVCache, AdaptiveH2OKVCache, SplitH2OKVCache)
"""The caches that ``make_prompt_cache`` makes."""

plain_attention = base.scaled_dot_product_attention


def scaled_dot_product_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: object,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend as mlx_lm does; report to a cache of ours with ``queries="true"`` the mass, or what its scorer needs.

    A cache with ``queries="key"``, or a scorer that looks at no attention, has seen what it needs already, with or
    without this function.

    Args:
        queries: [B, Hq, N, D].
        keys: [B, H, M, D], from the cache's ``update_and_fetch``.
        values: [B, H, M, Dv].
        cache: Any mlx_lm cache, or None.
        scale: Factor on the logits.
        mask: For ours, what its ``make_mask`` returned.
        sinks: Sink logits [Hq].

    Returns:
        [B, Hq, N, Dv].

    Raises:
        ValueError: A cache of ours is given a mask that it did not make.
    """
    if isinstance(cache, H2OKVCache) and not (cache.attended or cache.config.rewind or _on_cpu()):
        # The model makes one mask for all layers, but this one may hold another number of rows.
        return _plain(queries, keys, values, cache, scale, cache.view()[0], sinks)
    if not isinstance(cache, OURS):
        return _plain(queries, keys, values, cache, scale, mask, sinks)
    if not _made_by_ours(mask, queries.shape[2]):
        described = f"one of shape {mask.shape}" if isinstance(mask, mx.array) else repr(mask)
        raise ValueError(
            f"an H2O cache can't attend under a mask it did not make, got {described} for {queries.shape[2]} "
            "queries: its rows are not in the order the mask assumes; use mlx_lm's cache with this layer"
        )
    if isinstance(cache, SplitH2OKVCache):
        return _share_by_share(queries, cache, scale, mask, sinks)
    if isinstance(cache, AdaptiveH2OKVCache):
        rows = [_head_by_head(queries[i : i + 1], row, scale, sinks) for i, row in enumerate(cache.heads)]
        return mx.concatenate(rows)
    outs = [_attend(*part, cache, scale, sinks) for part in cache.parts(queries, keys, values)]
    return outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=2)


def place_hook(model: nn.Module) -> bool:
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


def _attend(
    queries: mx.array, keys: mx.array, values: mx.array, cache: H2OKVCache, scale: float, sinks: mx.array | None
) -> mx.array:
    """Attend with the queries of the cache's open call, and report what its scorer needs."""
    stepped = cache.step(queries, keys, values, scale, sinks)
    if stepped is not None:
        return stepped
    # Every mask of ours says the same: a sequence's kept rows, then the chunk's own, causally.
    shown, lengths = cache.view()
    out, mass = cache.backend.attend(queries, keys, values, scale, cache.config.decay, shown, lengths, sinks)
    if not cache.attended:
        return out
    cache.observe(cache.gathered(mass, queries, keys, values, scale, sinks))
    return cache.tied(out)[0]


def _head_by_head(queries: mx.array, heads: list[HeadCache], scale: float, sinks: mx.array | None) -> mx.array:
    """Attend to one sequence whose KV heads have a cache each: queries and output [1, Hq, N, D]."""
    groups = mx.split(queries, len(heads), axis=1)
    of_groups = [None] * len(heads) if sinks is None else mx.split(sinks, len(heads))
    outs = [
        _attend(group, *head.keys_and_values(), head, scale, own)
        for group, head, own in zip(groups, heads, of_groups, strict=True)
    ]
    return mx.concatenate(outs, axis=1)


def _share_by_share(
    queries: mx.array, cache: SplitH2OKVCache, scale: float, mask: mx.array | str | None, sinks: mx.array | None
) -> mx.array:
    """Attend with the heads of each of a layer's caches to its own rows."""
    outs = [
        scaled_dot_product_attention(own, keys, values, part, scale, mask, of_own)
        for part, own, keys, values, of_own in cache.calls(queries, sinks)
    ]
    return cache.in_order(outs)


def _plain(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: object,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    # By its name in this module: ``trace`` puts another one there for a while.
    out: mx.array = plain_attention(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
    return out


def _on_cpu() -> bool:
    """Say whether mlx's own attention has no kernel: ours is faster then (1.4 times, one query, 257 rows)."""
    return mx.default_device().type == mx.DeviceType.cpu


def _made_by_ours(mask: mx.array | str | None, n_queries: int) -> bool:
    """Say whether ``H2OKVCache.make_mask`` can have returned this. None for several queries is no causal mask."""
    if isinstance(mask, mx.array):
        return is_ours(mask)
    return mask == "causal" or (mask is None and n_queries == 1)


def _source_modules(model: nn.Module) -> Iterator[ModuleType]:
    """The Python modules that define the classes of the model's modules, mlx's own left out."""
    names = {cls.__module__ for _, module in model.named_modules() for cls in type(module).__mro__}
    for name in sorted(names - {base.__name__}):
        if not name.startswith("mlx.") and name in sys.modules:
            yield sys.modules[name]
