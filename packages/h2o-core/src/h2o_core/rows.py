"""Attention that need not fit in memory: made, or cut, a block of rows at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from h2o_core._shapes import Float, Float32

# Probabilities of one block, over all sequences and heads: 16 MiB of them, whatever T is.
BLOCK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Rows:
    """Recorded attention whose rows are made when they are read, as often as they are.

    Iterating gives blocks of consecutive rows, [*b, Hq, n, W]: W covers at least the tokens up to the block's
    last row, and what lies beyond a row's own token is 0.

    >>> rows = Rows((2, 6, 6), lambda start, stop: mx.broadcast_to(mx.eye(6)[start:stop], (2, stop - start, 6)))
    >>> [block.shape for block in rows], rows.whole().shape
    ([(2, 6, 6)], (2, 6, 6))
    """

    shape: tuple[int, ...]  # [Hq, T, T] or [B, Hq, T, T]
    make: Callable[[int, int], mx.array]  # (start, stop) to rows start … stop − 1

    def __iter__(self) -> Iterator[mx.array]:
        n_steps, block = self.shape[-1], self.block
        return (self.make(start, min(start + block, n_steps)) for start in range(0, n_steps, block))

    @property
    def block(self) -> int:
        """Rows of a block."""
        elements = self.shape[-1]
        for size in self.shape[:-2]:
            elements *= size
        return max(1, BLOCK_ELEMENTS // max(1, elements))

    def whole(self) -> Float[mx.array, "*b Hq T T"]:
        """Make all rows at once."""
        n_steps = self.shape[-1]
        blocks = [_widened(block, n_steps) for block in self]
        return mx.concatenate(blocks, axis=-2) if blocks else mx.zeros(self.shape)


class Recording(NamedTuple):
    """What is known of one layer's attention: either ``attention``, or ``queries``, ``keys`` and ``scale``."""

    attention: mx.array | None = None
    queries: mx.array | None = None
    keys: mx.array | None = None
    values: mx.array | None = None
    scale: float | None = None
    n_kv_heads: int | None = None

    @property
    def heads(self) -> int | None:
        """KV heads, where they are known."""
        return self.n_kv_heads if self.keys is None else self.keys.shape[-3]

    def rows(self) -> Rows:
        """The attention, made row by row where it is not held."""
        if self.attention is not None:
            return rows_of(self.attention)
        if self.queries is None or self.keys is None or self.scale is None:
            raise ValueError("a recording must have attention, or queries, keys and scale")
        return softmax_rows(self.queries, self.keys, self.scale)


def rows_of(attention: "mx.array | Rows | Recording") -> Rows:
    """Read attention that is held in memory, or was recorded, as rows, without a copy of it."""
    if isinstance(attention, Recording):
        return attention.rows()
    if isinstance(attention, Rows):
        return attention
    return Rows(attention.shape, lambda start, stop: attention[..., start:stop, :])


def softmax_rows(queries: Float[mx.array, "*b Hq T D"], keys: Float[mx.array, "*b H T D"], scale: float) -> Rows:
    """Make attention from queries and keys, where they have been rotated, block by block.

    p = softmax(q kᵀ · scale) over the tokens up to the query's own, in float32.

    Args:
        queries: One for each step and query head, Hq a multiple of H.
        keys: One for each step and KV head.
        scale: Factor on the logits.
    """
    n_steps = queries.shape[-2]

    def make(start: int, stop: int) -> Float32[mx.array, "*b Hq n W"]:
        group = queries.shape[-3] // keys.shape[-3]
        shown = mx.repeat(keys[..., :stop, :].astype(mx.float32), group, axis=-3)
        logits = queries[..., start:stop, :].astype(mx.float32) @ shown.swapaxes(-1, -2) * scale
        return mx.softmax(mx.where(causal(start, stop, stop), logits, -mx.inf), axis=-1)

    return Rows((*queries.shape[:-1], n_steps), make)


def causal(start: int, stop: int, width: int) -> mx.array:
    """Say which of ``width`` tokens rows start … stop − 1 may see."""
    return mx.arange(width) <= mx.arange(start, stop)[:, None]


def _widened(block: mx.array, width: int) -> mx.array:
    missing = width - block.shape[-1]
    return mx.pad(block, [(0, 0)] * (block.ndim - 1) + [(0, missing)]) if missing > 0 else block
