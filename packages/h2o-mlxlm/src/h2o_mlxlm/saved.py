"""Whether what a file of caches holds is what this model's caches can be."""

import json
from collections.abc import Sequence
from itertools import chain
from typing import Any, NoReturn

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from h2o_core import H2OConfig
from h2o_mlxlm.budgets import of_budget
from h2o_mlxlm.cache import H2OKVCache, parts_of
from h2o_mlxlm.snapshot import config_of
from h2o_rope import Rotation


def check_leaf(name: str, leaf: Any, like: Any, free: tuple[int, ...]) -> None:
    """Check that a leaf is of the kind of this model's own; its first axis and the ``free`` ones may be longer."""
    if type(leaf) is not type(like):
        refuse(f"{name} is {type(leaf).__name__}, and this model has {type(like).__name__}")
    if not isinstance(leaf, mx.array):
        return
    same = leaf.ndim == like.ndim and leaf.dtype == like.dtype
    axes = [i for i in range(1, like.ndim) if i not in free]
    if not same or any(leaf.shape[i] != like.shape[i] for i in axes):
        refuse(f"{name} is {leaf.dtype} {leaf.shape}, and this model has {like.dtype} {like.shape}")


def check_layers(made: Sequence[Any], fresh: Sequence[Any]) -> None:
    """Check that the layers have seen the same tokens, under this model's settings."""
    ours = [c for c in chain(*map(parts_of, made)) if isinstance(c, H2OKVCache)]
    # Some models have layers that they don't use.
    seen = _seen([c for c in ours if not c.empty()] or ours)
    if len(seen) > 1:
        refuse("its layers have not seen the same tokens")
    batch, (count, *_), batched, _ = seen.pop()
    for i, (cache, new) in enumerate(zip(made, fresh, strict=True)):
        if ours := [c for c in parts_of(cache) if isinstance(c, H2OKVCache)]:
            fits = all(_fits(*pair) for pair in zip(ours, parts_of(new), strict=True))
        elif isinstance(cache, ArraysCache):
            fits = all(x.shape[0] == batch for x in cache.cache if x is not None)
        else:
            # In a batch, mlx_lm has other classes for these.
            fits = not batched and _has_rows(cache, new, batch, count.seen)
        if not fits:
            refuse(f"layer {i} is no {type(new).__name__} that this model can have after {count.seen} tokens")


def _seen(caches: Sequence[H2OKVCache]) -> set[Any]:
    """What caches have seen; how many rows each keeps of it, its own state has been checked for."""
    return {(c.sequences, tuple(n._replace(kept=0) for n in c._counts), c._batched, c._to_come) for c in caches}


def division_of(state: Any) -> tuple[H2OConfig, list[tuple[tuple[int, ...], H2OKVCache]]]:
    """Read the state of a layer whose heads are divided, which may come from anywhere.

    Returns:
        What a head keeps on average, and for each group its heads and their cache.

    Raises:
        ValueError: No such layer can have this state.
    """
    try:
        about = json.loads(state["about"])
        config, groups = config_of(about["config"]), [tuple(heads) for heads in about["heads"]]
        caches = [H2OKVCache.from_state(part) for part in state["shares"]]
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"this is no state of a layer with divided heads: {error!r:.80}") from error
    heads = [head for group in groups for head in group]
    if not heads or any(type(head) is not int for head in heads) or sorted(heads) != list(range(len(heads))):
        refuse(f"its groups must hold each of the layer's heads once, got {groups!r:.80}")
    if len(caches) != len(groups) or len(_seen(caches)) > 1:
        refuse(f"its {len(groups)} groups of heads need a cache each, and the same tokens in all of them")
    for group, cache in zip(groups, caches, strict=True):
        n_heads = len(group) if cache._slots is None else cache._slots.keys.kind[0]
        if n_heads != len(group) or cache.config != of_budget(config, cache.config.budget):
            refuse(f"the cache of heads {group!r:.80} is of {n_heads} heads, or under settings of its own")
    return config, list(zip(groups, caches, strict=True))


def _fits(cache: H2OKVCache, new: H2OKVCache) -> bool:
    """Say whether a cache has this model's settings."""
    same = (cache.config, cache.storage, cache.scale) == (new.config, new.storage, new.scale)
    return same and _same(cache.rotation, new.rotation)


def _has_rows(cache: KVCache | RotatingKVCache, new: KVCache | RotatingKVCache, batch: int, seen: int) -> bool:
    """Say whether one of mlx_lm's caches is as it can be after so many tokens of so many sequences."""
    if cache.keys is None:
        # A layer that the model does not use.
        return bool(list(cache.state) == list(new.state))
    width = cache.keys.shape[2]
    if cache.values.shape[:3] != cache.keys.shape[:3] or cache.keys.shape[0] != batch or cache.offset != seen:
        return False
    if isinstance(cache, KVCache):
        return bool(seen <= width)
    if (cache.keep, cache.max_size) != (new.keep, new.max_size):
        return False
    if seen <= width:
        return bool(cache._idx == seen)
    if width == cache.max_size:
        return bool(cache.keep < cache._idx <= width)
    # Longer than that, it ends with a call of several tokens.
    return bool(width > cache.max_size and cache._idx == width)


def _same(a: Rotation | None, b: Rotation | None) -> bool:
    if a is None or b is None:
        return a is b
    return a[1:] == b[1:] and bool(mx.array_equal(a.frequencies, b.frequencies).item())


def refuse(what: str) -> NoReturn:
    """Say what is wrong; whoever reads the file says which file it is."""
    raise ValueError(what)
