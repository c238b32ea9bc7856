"""Rows in blocks of tokens that are quantised together, once, when they are no longer new.

The place of ``stores.Rows``, with the same methods. Keys vary little from token to token in one channel and much
from channel to channel, so a channel over a block of tokens takes fewer bits than a token over its channels.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import mlx.core as mx

from h2o_mlxlm.forms import BlockForm, Stored


class Blocks(NamedTuple):
    """Rows of C slots per sequence and KV head, in a pool: K blocks of g tokens, then R recent rows as they came.

    A slot says where in the pool its row is. Rows enter at the recent end. When there are 2g of them, the oldest g
    become a block, whose bits never change again: a row that goes leaves a hole, and a head's block goes when no row
    of it is left. K is that of the head that has the most; the others have blocks of no row before theirs. Such blocks
    and holes are bytes that ``arrays`` has.

    Source:
        Liu et al., KIVI (arXiv 2402.02750), section 3.3: keys per channel, values per token, recent rows in full. Its
        rows never go; blocks with holes are ours.
    """

    places: mx.array  # int32 [B, H, C]: the row of each slot in the pool, −1 where there was none
    recent: mx.array  # [B, H, R, D], the oldest first; heads with fewer have rows of no slot before them
    parts: tuple[mx.array, ...]  # each [B, H, K, *, *]
    form: BlockForm

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """All that is held."""
        return self.places, self.recent, *self.parts

    @property
    def stored(self) -> Stored:
        """The same, as ``cache.keys`` gives it."""
        return self.arrays

    @property
    def kind(self) -> tuple[int, int, mx.Dtype]:
        """KV heads, width D and dtype of the rows when they are opened."""
        return self.recent.shape[1], self.recent.shape[3], self.recent.dtype

    @property
    def n_slots(self) -> int:
        """C."""
        return self.places.shape[2]

    @property
    def n_blocks(self) -> int:
        """K."""
        return self.parts[0].shape[2]

    def opened(self, n_slots: int | None = None) -> mx.array:
        """Return the rows of the first ``n_slots`` slots, or of all: [B, H, n, D]."""
        pool = self.recent
        if self.n_blocks:
            blocks = self.form.opened(self.parts).reshape(*pool.shape[:2], -1, pool.shape[3])
            pool = mx.concatenate([blocks, pool], axis=2)
        return rows_of_pool(pool, mx.maximum(self.places[:, :, :n_slots], 0))

    def put(self, where: mx.array, row: mx.array) -> "Blocks":
        """Put one row [B, H, 1, D] for each head into the slot ``where`` [B, H, 1, 1]."""
        places = mx.put_along_axis(self.places, where[..., 0], mx.array(self._pool_size, mx.int32), axis=-1)
        return self._replace(places=places, recent=mx.concatenate([self.recent, row], axis=2))._cut()

    def put_back(self, where: mx.array, row: Sequence[mx.array]) -> NoReturn:
        """Refuse: a block is written once. ``check_storage`` lets no cache with ``rewind`` come here."""
        raise NotImplementedError("rows in blocks are written once, so none is put back")

    def blank(self) -> NoReturn:
        """Refuse; see ``put_back``."""
        raise NotImplementedError("rows in blocks are written once, so none is blanked")

    def appended(self, rows: mx.array) -> "Blocks":
        """Put rows [B, H, N, D] into N new slots on the right. They stay as they are until who goes is known."""
        new = mx.arange(rows.shape[2], dtype=mx.int32) + self._pool_size
        places = mx.concatenate([self.places, mx.broadcast_to(new, rows.shape[:3])], axis=2)
        return self._replace(places=places, recent=mx.concatenate([self.recent, rows], axis=2))

    def replaced(self, rows: mx.array, flags: Sequence[bool]) -> NoReturn:
        """Refuse: a block is written once."""
        raise ValueError(
            'rows in blocks are stored once, and positions="auto" would store them anew when it turns: use '
            'kv_quantizer="per_token", or positions="rolling" from the start'
        )

    def at(self, slots: mx.array) -> "Blocks":
        """Take slots [B, H, M] of each head, in their order; rows of the others go."""
        return self._replace(places=mx.take_along_axis(self.places, slots, axis=2))._tidy()

    def of(self, sequences: mx.array) -> "Blocks":
        """Take sequences out, in the given order."""
        places, recent, *parts = [x[sequences] for x in self.arrays]
        return Blocks(places, recent, tuple(parts), self.form)._tidy()

    def of_heads(self, heads: mx.array) -> "Blocks":
        """Take KV heads out, in the given order."""
        places, recent, *parts = [x[:, heads] for x in self.arrays]
        return Blocks(places, recent, tuple(parts), self.form)._tidy()

    def widened(self, width: int) -> "Blocks":
        """Add slots without a row on the right, where there are fewer than ``width``."""
        more = [(0, 0), (0, 0), (0, width - self.places.shape[2])]
        return self._replace(places=mx.pad(self.places, more, constant_values=mx.array(-1, mx.int32)))

    def none(self, batch: int) -> "Blocks":
        """Make no slots for so many sequences, of the same kind."""
        places, recent, *parts = [mx.zeros((batch, x.shape[1], 0, *x.shape[3:]), x.dtype) for x in self.arrays]
        return Blocks(places, recent, tuple(parts), self.form)

    def joined(self, others: Sequence["Blocks"]) -> "Blocks":
        """Put the sequences of others, of one kind and as many slots, behind these.

        Blocks are cut for all sequences at once from then on, by the one that has the most recent rows.
        """
        batches = [self, *others]
        blocks, recent = max(x.n_blocks for x in batches), max(x.recent.shape[2] for x in batches)
        arrays = zip(*[x._padded(blocks, recent).arrays for x in batches], strict=True)
        places, rows, *parts = [mx.concatenate(list(x)) for x in arrays]
        return Blocks(places, rows, tuple(parts), self.form)

    @property
    def _pool_size(self) -> int:
        return self.n_blocks * self.form.n_tokens + self.recent.shape[2]

    def _padded(self, n_blocks: int, n_recent: int) -> "Blocks":
        """Add blocks and recent rows of no slot in front."""
        more_blocks, more_recent = n_blocks - self.n_blocks, n_recent - self.recent.shape[2]
        moved = self.places + more_blocks * self.form.n_tokens
        moved = mx.where(moved < n_blocks * self.form.n_tokens, moved, moved + more_recent)
        front = [(0, 0), (0, 0), (more_blocks, 0), (0, 0), (0, 0)]
        recent = mx.pad(self.recent, [(0, 0), (0, 0), (more_recent, 0), (0, 0)])
        parts = tuple(mx.pad(x, front) for x in self.parts)
        return Blocks(mx.where(self.places < 0, self.places, moved), recent, parts, self.form)

    def _cut(self) -> "Blocks":
        """Make blocks of the oldest recent rows, where there are enough. Their places in the pool stay the same."""
        g, (batch, heads, n_recent, width) = self.form.n_tokens, self.recent.shape
        n = n_recent // g - 1
        if n < 1:
            return self
        first = self.n_blocks * g
        held = self._held()[:, :, first : first + n * g].reshape(batch, heads, n, g, 1)
        blocks = self.recent[:, :, : n * g].reshape(batch, heads, n, g, width)
        # A row that is gone must not stretch the others' scale: it takes the largest number that stays.
        largest = mx.where(held, blocks, -mx.inf).max(axis=3, keepdims=True)
        blocks = mx.where(held, blocks, mx.where(largest == -mx.inf, 0, largest)).astype(self.recent.dtype)
        new = zip(self.parts, self.form.closed(blocks), strict=True)
        parts = tuple(mx.concatenate(list(pair), axis=2) for pair in new)
        return self._replace(parts=parts, recent=self.recent[:, :, n * g :])._freed()

    def _freed(self) -> "Blocks":
        """Drop blocks of which no row is left. Waits for the count, so it runs once in g tokens."""
        g, n_blocks = self.form.n_tokens, self.n_blocks
        used = self._held()[:, :, : n_blocks * g].reshape(*self.places.shape[:2], n_blocks, g).any(axis=-1)
        most = _most(used)
        if most == n_blocks:
            return self
        order, moved = _last(used, most)
        block, row = self.places // g, self.places % g
        there = mx.take_along_axis(moved, mx.clip(block, 0, n_blocks - 1), axis=2) * g + row
        places = mx.where(block < n_blocks, there, self.places - (n_blocks - most) * g)
        parts = tuple(mx.take_along_axis(x, order[..., None, None], axis=2) for x in self.parts)
        return self._replace(places=mx.where(self.places < 0, self.places, places), parts=parts)

    def _tidy(self) -> "Blocks":
        """Drop recent rows of no slot, as far as every head can, then blocks; cut what has grown old."""
        first = self.n_blocks * self.form.n_tokens
        used = self._held()[:, :, first:]
        order, moved = _last(used, _most(used))
        there = first + mx.take_along_axis(moved, mx.maximum(self.places - first, 0), axis=2)
        places = mx.where(self.places < first, self.places, there)
        return self._replace(places=places, recent=rows_of_pool(self.recent, order))._freed()._cut()

    def _held(self) -> mx.array:
        """Say which rows of the pool a slot has: bool [B, H, K·g + R]."""
        size = self._pool_size
        nothing = mx.zeros((*self.places.shape[:2], size + 1), mx.bool_)
        where = mx.where(self.places < 0, size, self.places)
        return mx.put_along_axis(nothing, where, mx.array(True), axis=-1)[..., :size]


def rows_of_pool(pool: mx.array, places: mx.array) -> mx.array:
    """Gather rows of pool [B, H, P, D] by their places [B, H, M]."""
    return mx.take_along_axis(pool, places[..., None], axis=2)


def _most(used: mx.array) -> int:
    most: Any = used.sum(axis=-1).max().item() if used.size else 0
    return int(most)


def _last(used: mx.array, most: int) -> tuple[mx.array, mx.array]:
    """Order things so that the used ones come last: the last ``most`` of each head, and where each thing went."""
    n = used.shape[-1]
    index = mx.arange(n, dtype=mx.int32)
    order = mx.argsort(mx.where(used, index + n, index), axis=-1)
    return order[..., n - most :], mx.argsort(order, axis=-1).astype(mx.int32) - (n - most)
