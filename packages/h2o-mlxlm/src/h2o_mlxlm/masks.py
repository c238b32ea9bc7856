"""Which mask arrays our caches made. Attention accepts those and no other."""

from weakref import WeakValueDictionary

import mlx.core as mx

# By identity, and only while the array lives, so that an id that is used again can't be mistaken.
_made: WeakValueDictionary[int, mx.array] = WeakValueDictionary()


def remember(mask: mx.array) -> mx.array:
    """Note that a cache of ours made this mask."""
    _made[id(mask)] = mask
    return mask


def is_ours(mask: mx.array) -> bool:
    """Say whether a cache of ours made exactly this array."""
    return _made.get(id(mask)) is mask
