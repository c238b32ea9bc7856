"""What a user asks of a cache: how much it holds, what went, and which tokens stay."""

from abc import ABC, abstractmethod

import mlx.core as mx

from h2o_core import H2OState, init, take
from h2o_mlxlm.slots import Slots


class Books(ABC):
    """The figures that an H2O cache keeps, per sequence and head where tokens are counted."""

    _slots: Slots | None
    _seen: int  # tokens seen
    _kept: int  # rows per head once the open call has ended
    _ranks: mx.array | None  # of the rows shown last, with rolling positions

    @abstractmethod
    def _end_call(self) -> None:
        """Bring the figures up to date."""

    @property
    def nbytes(self) -> int:
        """Bytes of every live buffer: keys, values, empty slots, scores, totals, positions."""
        self._end_call()
        if self._slots is None:
            return 0
        held = (self._slots.keys, self._slots.values, *self._slots.state, self._ranks)
        return sum(int(x.nbytes) for x in held if x is not None)

    @property
    def full_bytes(self) -> int:
        """Bytes that the keys and values of all tokens seen would take."""
        if self._slots is None:
            return 0
        row = sum(x.shape[0] * x.shape[1] * x.shape[3] * x.itemsize for x in self._slots[:2])
        return self._seen * row

    @property
    def tokens_seen(self) -> int:
        """Tokens seen per sequence and head."""
        return self._seen

    @property
    def tokens_kept(self) -> int:
        """Tokens held per sequence and head."""
        return self._kept

    @property
    def evictions(self) -> int:
        """Tokens that went, per sequence and head: seen − kept."""
        return self._seen - self._kept

    @property
    def compression_ratio(self) -> float:
        """Tokens seen for each one kept."""
        return self._seen / self._kept if self._kept else 1.0

    @property
    def kept_positions(self) -> mx.array:
        """Positions held, int32 [B, H, n], ascending."""
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
        order = mx.argsort(state.positions, axis=-1)
        return take(state, order[..., order.shape[-1] - self._kept :])
