"""What mlx_lm asks of a cache to run requests together: they join, run at different lengths, and leave."""

import copy
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import mlx.core as mx

from h2o_core import H2OConfig
from h2o_mlxlm.books import Books
from h2o_mlxlm.counts import Call, Count, Counts
from h2o_mlxlm.forms import Form
from h2o_mlxlm.passes import Passes
from h2o_mlxlm.ragged import chosen, joined, of_heads


class Batch(Books):
    """Caches that become one, and one that is divided again, with scores, positions and counts carried along.

    From ``merge`` on there is a count for each sequence and ``offset`` is an array. Prompts are padded on the
    right: ``prepare`` says by how much, and then padding takes no slot, gives no mass and evicts nothing.
    """

    config: H2OConfig
    forms: tuple[Form, Form]
    inputs: Mapping[str, mx.array]
    _batched: bool
    _to_come: tuple[int, ...] | None
    _call: Call | None
    _free: mx.array | None
    _pass: int  # passes begun
    passes: Passes

    @abstractmethod
    def _count(self, counts: Counts) -> None:
        """Take the counts of the sequences, and with them the offset."""

    def size(self) -> int:
        """Return the rows that each head holds, of the sequence that has the most."""
        return max([c.kept for c in self._counts])

    def empty(self) -> bool:
        """Say whether nothing has been seen yet."""
        return self._slots is None

    @classmethod
    def merge(cls, caches: Sequence[Self]) -> Self:
        """Make one cache of the sequences of several, which stay as they are.

        Raises:
            TypeError: Some are no H2O caches.
            ValueError: Their configurations, heads, widths or dtypes differ.
        """
        caches[0]._end_call()
        merged = copy.copy(caches[0])
        merged._join(caches)
        return merged

    def extend(self, other: Self) -> None:
        """Put the sequences of ``other`` behind this cache's own; see ``merge``."""
        self._join([self, other])

    def filter(self, batch_indices: Sequence[int]) -> None:
        """Keep the given sequences, in the given order."""
        self._end_call()
        counts = self._each_count()
        self._become([counts[i] for i in batch_indices])
        if self._to_come is not None:
            self._to_come = tuple(self._to_come[i] for i in batch_indices)
        if self._slots is not None:
            self._slots = chosen(self._slots, batch_indices, self.size())

    def extract(self, idx: int) -> Self:
        """Copy one sequence out, as a cache of its own that was never batched."""
        alone = copy.copy(self)
        alone.filter([idx])
        alone._batched, alone._to_come = False, None
        alone._count(alone._counts)
        if alone._slots is not None:
            # The batch goes on without it: its buffers must not wait for a cache that is put aside.
            mx.eval(alone._slots)
        return alone

    def only_heads(self, heads: Sequence[int], config: H2OConfig) -> Self:
        """Copy some heads out, as a cache of its own under another configuration, which holds from its next call on.

        Args:
            heads: Numbers of the KV heads.
            config: Differs from this cache's in its budget and what goes with it.

        Raises:
            ValueError: Nothing has been seen.
        """
        self._end_call()
        if self._slots is None:
            raise ValueError("this cache is empty: it has no heads before its first update_and_fetch")
        alone = copy.copy(self)
        alone.config, alone._slots = config, of_heads(self._slots, heads)
        alone._become(self._counts)
        alone._batched = self._batched
        alone._count(self._counts)
        return alone

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce a prompt that is padded on the right, to come in one call or several.

        Args:
            left_padding: Must be absent or 0.
            lengths: Real tokens of each sequence.
            right_padding: Padding of each sequence; nothing happens without any.

        Raises:
            ValueError: There is padding on the left, or padding without lengths, or padding at all with ``rewind``.
        """
        if left_padding is not None and any(left_padding):
            raise ValueError(
                f"an H2O cache takes prompts padded on the right, got left_padding={list(left_padding)}: pass lengths "
                "and right_padding"
            )
        if right_padding is None or not any(right_padding):
            return
        if self.config.rewind:
            raise ValueError(
                f"a cache with rewind takes no padding, got rewind={self.config.rewind}, "
                f"right_padding={list(right_padding)}: its last tokens come one by one, in all sequences alike; "
                "batch prompts of different lengths with rewind=0"
            )
        counts = self._each_count(len(right_padding))
        if lengths is None or not len(lengths) == len(right_padding) == len(counts):
            raise ValueError(
                f"prepare needs the real tokens of each sequence, got lengths={lengths} for "
                f"right_padding={list(right_padding)} and {len(counts)} sequences: pass as many of each"
            )
        self._become(counts)
        self._to_come = tuple(lengths)

    def finalize(self) -> None:
        """End a padded prompt: padding left nothing behind, so there is nothing to move."""
        self._to_come = None

    def _each_count(self, batch: int = 1) -> Counts:
        """A count for each sequence; ``batch`` of them, or as many as there are."""
        if self._batched:
            return self._counts
        return self._counts * (batch if self._slots is None else self._slots.state.seen.shape[0])

    def _become(self, counts: Iterable[Count]) -> None:
        """Go on as a batch with these counts."""
        # From one call to the next, but not across a change of the batch.
        self._end_call()
        self._batched, self._ranks, self._call, self._free = True, None, None, None
        self.passes = Passes(self._pass)
        self._count(tuple(counts))

    def _join(self, caches: Sequence[Self]) -> None:
        for cache in caches:
            if not isinstance(cache, Batch):
                raise TypeError(
                    f"a batch of H2O caches takes no others, got {type(cache).__name__}: make all of them with "
                    "make_prompt_cache"
                )
            if cache.config != self.config:
                raise ValueError(
                    f"caches of one batch have one configuration, got {self.config} and {cache.config}: batch the "
                    "requests of each apart"
                )
            if cache.forms != self.forms:
                raise ValueError(
                    f"caches of one batch store rows in one form, got {self.forms} and "
                    f"{cache.forms} for keys and values: batch the requests of each apart"
                )
            if not _alike(cache.inputs, self.inputs):
                raise ValueError(
                    f"caches of one batch have the same inputs, got different {', '.join(sorted(self.inputs))}: "
                    "batch the requests of each context apart"
                )
            cache._end_call()
        counts = [cache._each_count() for cache in caches]
        self._slots = joined([(c._slots, len(n), c.size()) for c, n in zip(caches, counts, strict=True)])
        self._become(sum(counts, ()))


def _alike(a: Mapping[str, mx.array], b: Mapping[str, mx.array]) -> bool:
    """Say whether inputs of the same names are the same numbers; a copy has arrays of its own."""
    return all(a[name] is b[name] or bool(mx.array_equal(a[name], b[name]).item()) for name in a)
