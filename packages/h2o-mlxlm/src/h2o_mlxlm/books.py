"""What a user asks of a cache: how much it holds, what went, and which tokens stay."""

from abc import ABC, abstractmethod

import mlx.core as mx

from h2o_core import H2OState, init, take
from h2o_mlxlm.counts import Counts
from h2o_mlxlm.slots import Slots, arrays_of


class Books(ABC):
    """The figures that an H2O cache keeps, per sequence and head where tokens are counted."""

    offset: int | mx.array  # where the next token is rotated to; [B] once batched
    _slots: Slots | None
    _counts: Counts  # once the open call has ended
    _ranks: mx.array | None  # of the rows shown last, with rolling positions

    @abstractmethod
    def _end_call(self) -> None:
        """Bring the figures up to date."""

    @property
    def nbytes(self) -> int:
        """Bytes of every live buffer: keys, values, empty slots, scores, totals, positions, offsets."""
        self._end_call()
        if self._slots is None:
            return 0
        keys, values, state = self._slots
        held = (*keys.arrays, *values.arrays, *arrays_of(state), self._ranks, self.offset)
        return sum(int(x.nbytes) for x in held if isinstance(x, mx.array))

    @property
    def full_bytes(self) -> int:
        """Bytes that the keys and values of all tokens seen would take, as the model makes them."""
        if self._slots is None:
            return 0
        kinds = [rows.kind for rows in self._slots[:2]]
        row = sum(heads * width * dtype.size for heads, width, dtype in kinds)
        repeats = self._slots.state.seen.shape[0] // len(self._counts)
        return sum(c.seen for c in self._counts) * repeats * row

    @property
    def sequences(self) -> int:
        """Sequences held, B; one as long as nothing has been seen."""
        return len(self._counts) if self._slots is None else int(self._slots.state.seen.shape[0])

    @property
    def tokens_seen(self) -> int | mx.array:
        """Tokens seen per sequence and head: a number, or int32 [B] where sequences differ."""
        return _figure([c.seen for c in self._counts])

    @property
    def tokens_kept(self) -> int | mx.array:
        """Tokens held per sequence and head; see ``tokens_seen``."""
        return _figure([c.kept for c in self._counts])

    @property
    def evictions(self) -> int | mx.array:
        """Tokens that went, per sequence and head: seen − kept; see ``tokens_seen``."""
        return _figure([c.seen - c.kept for c in self._counts])

    @property
    def compression_ratio(self) -> float:
        """Tokens seen for each one kept, over all sequences."""
        kept = sum(c.kept for c in self._counts)
        return sum(c.seen for c in self._counts) / kept if kept else 1.0

    @property
    def kept_positions(self) -> mx.array:
        """Positions held, int32 [B, H, n], ascending, −1 behind them where another sequence holds more."""
        return self._in_order().positions

    @property
    def scores(self) -> mx.array:
        """Mass received, decayed: float32 [B, H, n], in the order of ``kept_positions``."""
        return self._in_order().scores

    @property
    def totals(self) -> mx.array:
        """Mass received in all: float32 [B, H, n], in the order of ``kept_positions``."""
        return self._in_order().totals

    def _in_order(self) -> H2OState:
        self._end_call()
        if self._slots is None:
            return init(0, 0)
        state = self._slots.state
        # Read as unsigned, −1 is the largest: empty slots come last.
        order = mx.argsort(state.positions.view(mx.uint32), axis=-1)
        return take(state, order[..., : max(c.kept for c in self._counts)])


def _figure(counts: list[int]) -> int | mx.array:
    return counts[0] if len(set(counts)) == 1 else mx.array(counts, mx.int32)
