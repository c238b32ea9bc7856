"""Rows of keys or values in slots, in the form they are stored in. Knows no scores and no positions.

Pure functions, but ``put`` reuses a buffer that nobody else holds, as mlx does.
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from h2o_mlxlm.blocks import Blocks
from h2o_mlxlm.forms import Form, RowForm, Stored


class Rows(NamedTuple):
    """Rows of C slots per sequence and KV head, each by itself."""

    arrays: tuple[mx.array, ...]  # each [B, H, C, *]; a slot's share of each is its row's alone
    form: RowForm

    @property
    def stored(self) -> Stored:
        """The arrays as mlx_lm's caches have them: one by itself, or several."""
        return self.arrays if len(self.arrays) > 1 else self.arrays[0]

    @property
    def kind(self) -> tuple[int, int, mx.Dtype]:
        """KV heads, width D and dtype of the rows when they are opened."""
        words, bits = self.arrays[0], self.form.bits
        width = words.shape[-1] if bits is None else words.shape[-1] * 32 // bits
        return words.shape[1], width, self.arrays[-1].dtype

    @property
    def n_slots(self) -> int:
        """C."""
        return self.arrays[0].shape[2]

    def opened(self, n_slots: int | None = None) -> mx.array:
        """Return the rows of the first ``n_slots`` slots, or of all: [B, H, n, D]."""
        return self.form.opened(self.arrays if n_slots is None else [x[:, :, :n_slots] for x in self.arrays])

    def put(self, where: mx.array, row: mx.array) -> "Rows":
        """Put one row [B, H, 1, D] for each head into the slot ``where`` [B, H, 1, 1]."""
        return self._of([_put(x, where, new) for x, new in self._beside(row)])

    def put_back(self, where: mx.array, row: Sequence[mx.array]) -> "Rows":
        """Put the arrays of a row for each head, as it was stored, into the slot ``where`` [B, H, 1, 1]."""
        return self._of([_put(x, where, old) for x, old in zip(self.arrays, row, strict=True)])

    def blank(self) -> "Rows":
        """Make one slot of zeros for each head."""
        return self._of([mx.zeros_like(x[:, :, :1]) for x in self.arrays])

    def appended(self, rows: mx.array) -> "Rows":
        """Put rows [B, H, N, D] into N new slots on the right."""
        return self._of([mx.concatenate(list(pair), axis=2) for pair in self._beside(rows)])

    def replaced(self, rows: mx.array, flags: Sequence[bool]) -> "Rows":
        """Store rows [B, H, C, D] in the place of those of the sequences with a flag."""
        return self._of([only(flags, new, x) for x, new in self._beside(rows)])

    def at(self, slots: mx.array) -> "Rows":
        """Take slots [B, H, M] of each head, in their order."""
        return self._of([rows_at(x, slots) for x in self.arrays])

    def of(self, sequences: mx.array) -> "Rows":
        """Take sequences out, in the given order."""
        return self._of([x[sequences] for x in self.arrays])

    def of_heads(self, heads: mx.array) -> "Rows":
        """Take KV heads out, in the given order."""
        return self._of([x[:, heads] for x in self.arrays])

    def widened(self, width: int) -> "Rows":
        """Add slots of zeros on the right, where there are fewer than ``width``."""
        more = [(0, 0), (0, 0), (0, width - self.arrays[0].shape[2]), (0, 0)]
        return self._of([mx.pad(x, more) for x in self.arrays])

    def none(self, batch: int) -> "Rows":
        """Make no slots for so many sequences, of the same kind."""
        return self._of([mx.zeros((batch, x.shape[1], 0, x.shape[3]), x.dtype) for x in self.arrays])

    def joined(self, others: Sequence["Rows"]) -> "Rows":
        """Put the sequences of others, of one kind and as many slots, behind these."""
        arrays = zip(self.arrays, *[rows.arrays for rows in others], strict=True)
        return self._of([mx.concatenate(list(x)) for x in arrays])

    def _beside(self, rows: mx.array) -> list[tuple[mx.array, mx.array]]:
        return list(zip(self.arrays, self.form.closed(rows), strict=True))

    def _of(self, arrays: Sequence[mx.array]) -> "Rows":
        return Rows(tuple(arrays), self.form)


Store = Rows | Blocks


def no_rows(like: mx.array, form: Form) -> Store:
    """Make no slots, for rows like these [B, H, N, D]."""
    if isinstance(form, RowForm):
        return Rows(tuple(x[:, :, :0] for x in form.closed(like[:, :, :1])), form)
    batch, heads, _, width = like.shape
    parts = form.closed(mx.zeros((batch, heads, 1, form.n_tokens, width), like.dtype))
    return Blocks(mx.zeros((batch, heads, 0), mx.int32), like[:, :, :0], tuple(x[:, :, :0] for x in parts), form)


def rows_of(stored: Stored, form: Form) -> Store:
    """Make rows of what ``stored`` gave."""
    arrays = (stored,) if isinstance(stored, mx.array) else tuple(stored)
    return Rows(arrays, form) if isinstance(form, RowForm) else Blocks(arrays[0], arrays[1], arrays[2:], form)


def rows_at(x: mx.array, where: mx.array) -> mx.array:
    """Gather rows of x [B, H, C, D] by slots [B, H, M]."""
    return mx.take_along_axis(x, where[..., None], axis=2)


def only(flags: Sequence[bool], new: mx.array, old: mx.array) -> mx.array:
    """Take x [B, H, C, D] from ``new`` for the sequences with a flag, else from ``old``."""
    return new if all(flags) else mx.where(mx.array(list(flags))[:, None, None, None], new, old)


def _put(x: mx.array, where: mx.array, row: mx.array) -> mx.array:
    return mx.put_along_axis(x, mx.broadcast_to(where, row.shape), row, axis=2)
