"""Taking back the newest tokens: what a cache remembers of each, and how it returns to the time before it."""

from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from typing import NamedTuple

import mlx.core as mx

from h2o_core import Evidence, H2OState, Mass
from h2o_mlxlm.calls import Calls
from h2o_mlxlm.checks import check_call, check_unchanged, raise_unreported
from h2o_mlxlm.counts import Count, Counts, Part, called
from h2o_mlxlm.slots import Row, Slots, arrays_of, restored, vacant
from h2o_mlxlm.stores import Store


class Newest(NamedTuple):
    """A token that can be taken back."""

    state: H2OState  # before it came
    counts: Counts  # likewise
    slot: mx.array  # where its rows went, [B, H, 1]
    gone: Row | None  # what had gone from there; None from an empty slot
    # Keys and values of all slots before the end of its call moved rows (the end of a held prompt, keys that begin
    # to roll). None at most times.
    moved: tuple[Store, Store] | None = None


class Rewind(Calls):
    """A cache that remembers its newest tokens, ``rewind`` of them at most; with ``rewind=0`` nothing here happens.

    A call of several tokens waits for its attention, which takes it in parts: all but the last ``rewind`` tokens
    together, if there are more, and then each by itself, as if they were calls of their own. So whatever the calls
    were, the newest tokens came one by one.

    It forgets what came before such a first part, before the cache was loaded, and before it joined or left a batch.
    What one token takes, per layer, with C slots and no moved rows:

        B H (12 C + 4 + (D + Dv) item) + 4 B bytes

    for the scores, totals and positions of all slots, the token's slot, the row that it overwrote, and tokens seen;
    and the row that went last is kept until the next token comes. Moved rows (see ``Newest``) are the layer's keys and
    values once more, until ``rewind`` more tokens have come. A decode step writes in place, as ever; a call of several
    tokens copies the rows once for each of its last ones, since mlx does not write into what is still being read.
    """

    _newest: tuple[Newest, ...]  # the last is the newest
    _vacant: Row | None  # where the next token's rows go and what is there still, if a row has gone from there
    _waiting: tuple[mx.array, mx.array] | None  # keys and values of a call of which parts are to come

    def _begin(self, counts: Counts) -> None:
        super()._begin(counts)
        self._waiting = None
        self._forget()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Give the new rows slots and return what the call attends to.

        Args:
            keys: New keys [B, H, N, D], rotated at ``offset``.
            values: New values [B, H, N, Dv].

        Returns:
            Keys and values [B, H, M, D], [B, H, M, Dv]; the N new rows are the last if N > 1. Where the call waits
            for its attention, the new ones, for ``parts``.

        Raises:
            ValueError: Batch, heads, width or dtype differ from the calls before.
            RuntimeError: The call before this one was never reported to ``observe``.
        """
        if not self.config.rewind or keys.shape[2] == 1:
            return self._take_in(keys, values)
        self._end_call()
        call, _ = called(self.config, self._counts, keys.shape[2])
        check_call(self.config, call, self._slots, keys, values, self._batched)
        number = self._entered(call)
        self._waiting, self._pass = (keys, values), number
        return keys, values

    def parts(
        self, queries: mx.array, keys: mx.array, values: mx.array
    ) -> Iterator[tuple[mx.array, mx.array, mx.array]]:
        """Go through the call: all of it, or the parts of one that waits, each of which is to be attended to.

        Args:
            queries: [B, Hq, N, D].
            keys: What ``update_and_fetch`` returned.
            values: Likewise.

        Yields:
            Queries, keys and values of a part.

        Raises:
            ValueError: Keys or values are not those that wait.
        """
        n, waiting = queries.shape[2], self._waiting
        if waiting is None:
            yield queries, keys, values
            return
        check_unchanged(self.config, (keys, values), waiting)
        places = [c.place for c in self._counts]
        for start, stop in pairwise(sorted({0, *range(max(n - self.config.rewind, 0), n + 1)})):
            self._waiting = None
            if stop - start > 1:
                self._forget()
            part = Part(n, tuple([place + start for place in places]))
            shown = self._take_in(keys[:, :, start:stop], values[:, :, start:stop], part)
            # Whatever interrupts it before the last part, the call has not been attended to.
            self._waiting = waiting if stop < n else None
            yield queries[:, :, start:stop], *shown

    def is_trimmable(self) -> bool:
        """Say whether tokens can be taken back at all: ``trim`` says how many."""
        return self.config.rewind > 0

    def trim(self, n: int) -> int:
        """Take back the newest n tokens: scores, positions, rows and counts as if they had never been seen.

        Returns:
            n.

        Raises:
            TypeError: ``n`` is no integer.
            ValueError: The cache does not remember so many; it stays as it was.
        """
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"trim takes an integer number of tokens, got {n!r}")
        if not self.config.rewind:
            raise ValueError(
                f"an H2O cache with rewind=0 can't be trimmed (asked for {n} tokens): evicted rows can't come back; "
                f"make it with H2OConfig(rewind={max(n, 1)}), or start from a fresh cache or a copy made earlier"
            )
        if not 0 <= n <= len(self._newest):
            raise ValueError(
                f"this cache can take back from 0 to {len(self._newest)} tokens now, got {n}: it remembers the newest "
                f"rewind={self.config.rewind} at most, of those that came since it was made or loaded and since it "
                "joined or left a batch; raise rewind, or start from a fresh cache or a copy made earlier"
            )
        if n:
            self._take_back(n)
        return n

    @property
    def nbytes(self) -> int:
        """Bytes of every live buffer: keys, values, empty slots, scores, totals, positions, offsets, newest tokens."""
        held = super().nbytes
        kept = [
            (
                *arrays_of(token.state),
                token.slot,
                *_vacancy(token.gone)[1:],
                *chain(*[rows.arrays for rows in token.moved or ()]),
            )
            for token in self._newest
        ]
        return held + sum(int(x.nbytes) for x in chain(*kept, _vacancy(self._vacant)))

    def _take_back(self, n: int) -> None:
        self._end_call()
        slots, taken = self._live(), self._newest[-n:]
        for token in reversed(taken):
            slots = slots if token.moved is None else Slots(*token.moved, slots.state)
            gone = token.gone or Row(token.slot, slots.keys.blank(), slots.values.blank())
            slots = restored(slots, token.state, gone)
        self._newest = self._newest[:-n]
        # As long as nothing has been seen, any heads, widths and dtype may come.
        self._slots = slots if any(c.seen for c in taken[0].counts) else None
        self._vacant, self._free = taken[0].gone, None if taken[0].gone is None else taken[0].slot
        self._ranks = None
        self._count(taken[0].counts)
        if self._slots is not None:
            # Or they would be left over for another thread, which can't evaluate them.
            mx.async_eval(self._slots)

    def _remember(self, before: Slots, slot: mx.array, counts: Counts) -> None:
        if not self.config.rewind:
            return
        new = Newest(before.state, counts, slot, self._vacant)
        self._newest = (*self._newest, new)[-self.config.rewind :]
        self._vacant = None

    def observe(self, mass: Mass | Evidence) -> None:
        """See ``Calls``; with ``rewind`` end the call, for nobody attends to it again."""
        super().observe(mass)
        if self.config.rewind:
            self._close()

    def _due(self) -> list[mx.array]:
        due = super()._due()
        if not self.config.rewind:
            return due
        slots = self._live()
        return [*due, *slots.keys.arrays, *slots.values.arrays, *_vacancy(self._vacant)]

    def step(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, sinks: mx.array | None
    ) -> mx.array | None:
        """See ``Calls``."""
        out = super().step(queries, keys, values, scale, sinks)
        if out is None or not self.config.rewind:
            return out
        self._vacate()
        tied: list[mx.array] = mx.depends([out], _vacancy(self._vacant))
        return tied[0]

    def _end_call(self) -> None:
        if self._waiting is not None:
            raise_unreported()
        self._close()

    def _close(self) -> None:
        """End the open call, or the part of one, and keep what leads back."""
        before, was_open = self._slots, self._open
        super()._close()
        if before is None or not was_open or not self._newest:
            return
        if self._live().keys is before.keys:
            self._vacate()
        else:
            # The call's end has moved rows: no slot leads back to them.
            self._newest = (*self._newest[:-1], self._newest[-1]._replace(moved=before[:2]))

    def _vacate(self) -> None:
        """Read the row that has just gone, as long as it is there.

        Now, with the attention that reads it anyway: mlx writes into a buffer in place only if nothing still reads
        it, so reading the row right before the next token's is written would cost a copy of all rows.
        """
        if any(self._last_call().over):
            self._vacant = vacant(self._live())
            self._free = self._vacant.slot

    def _become(self, counts: Iterable[Count]) -> None:
        super()._become(counts)
        self._forget()

    def _forget(self) -> None:
        self._newest, self._vacant = (), None


def _vacancy(row: Row | None) -> list[mx.array]:
    return [] if row is None else [row.slot, *row.arrays]
