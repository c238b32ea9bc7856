"""One layer's cache whose heads have budgets of their own, set beforehand."""

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, NoReturn, Self

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from h2o_core import H2OConfig
from h2o_mlxlm.backend import Backend
from h2o_mlxlm.budgets import groups
from h2o_mlxlm.cache import H2OKVCache
from h2o_mlxlm.ragged import heads_at, padded
from h2o_mlxlm.saved import division_of


class Share(NamedTuple):
    """Heads of one layer that hold equally many tokens, and their cache."""

    heads: tuple[int, ...]
    cache: H2OKVCache


class SplitH2OKVCache(mlx_lm_cache._BaseCache):  # type: ignore[misc]
    """Keep as many tokens of each head as that head was given: a cache for each group of heads that got the same.

    Every part of mlx_lm's contract is handed on to all of them, so sequences are batched, taken back and quantised
    as with one ``H2OKVCache``. Figures that differ from head to head are arrays [B, H].

    Args:
        config: What a head keeps on average over the model, for those who ask.
        budgets: Tokens that each of the layer's H heads keeps. A head's recent window is the same share of its
            budget as that of ``config``.
        how: What ``H2OKVCache`` takes beside the configuration, by name.

    Raises:
        ValueError: A budget leaves no place beside sinks and recent window, or the configuration asks for what
            such heads can't do.
    """

    def __init__(self, config: H2OConfig, budgets: Sequence[int], **how: Any) -> None:
        self._begin(config, [(heads, H2OKVCache(of_heads, **how)) for heads, of_heads in groups(config, budgets)])

    def _begin(self, config: H2OConfig, shares: Sequence[tuple[tuple[int, ...], H2OKVCache]]) -> None:
        self.config = config
        self.shares = [Share(*share) for share in shares]
        self._shown: list[tuple[mx.array, mx.array]] = []  # what the open call attends to, until it does
        places = [head for heads, _ in self.shares for head in heads]
        self._order = [places.index(head) for head in range(len(places))]

    @classmethod
    def of(cls, cache: H2OKVCache, budgets: Sequence[int]) -> Self:
        """Divide a cache among its heads, which keep what they hold until the next call ends.

        Args:
            cache: A cache with rows as the model makes them; it stays as it was.
            budgets: Tokens that each of its heads keeps from then on.

        Raises:
            ValueError: The cache is empty, rows are quantised, there are more or fewer budgets than heads, or see
                the class.
        """
        made = cls.__new__(cls)
        made._begin(cache.config, [(h, cache.only_heads(h, c)) for h, c in groups(cache.config, budgets)])
        return made

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Give the new rows slots.

        Args:
            keys: New keys [B, H, N, D], rotated at ``offset``.
            values: New values [B, H, N, Dv].

        Returns:
            What came. Heads hold different numbers of rows, so attention asks ``calls`` for them.

        Raises:
            ValueError: There are more or fewer heads than budgets; see also ``H2OKVCache``.
        """
        if keys.shape[1] != len(self._order):
            raise ValueError(
                f"the budgets of this layer are for {len(self._order)} KV heads, got keys {keys.shape}: make caches "
                "with a list of as many budgets as the layer has heads"
            )
        self._shown = [c.update_and_fetch(heads_at(keys, heads), heads_at(values, heads)) for heads, c in self.shares]
        return keys, values

    def calls(
        self, queries: mx.array, sinks: mx.array | None
    ) -> Iterator[tuple[H2OKVCache, mx.array, mx.array, mx.array, mx.array | None]]:
        """Go through the caches of the open call with what each attends with and to.

        Args:
            queries: [B, Hq, N, D].
            sinks: Sink logits [Hq].

        Yields:
            Cache, its heads' queries, keys, values and sink logits.
        """
        shown, self._shown = self._shown, []  # not held: the next row is written where it stands
        group = queries.shape[1] // len(self._order)
        for (heads, cache), (keys, values) in zip(self.shares, shown, strict=True):
            mine = [h * group + g for h in heads for g in range(group)]
            yield cache, heads_at(queries, mine), keys, values, None if sinks is None else sinks[mx.array(mine)]

    def in_order(self, parts: Sequence[mx.array]) -> mx.array:
        """Put what came of each cache's heads [B, n, ...] behind one another in the order of the layer's heads."""
        joined = mx.concatenate(list(parts), axis=1)
        each = joined.shape[1] // len(self._order)
        return heads_at(joined, [place * each + i for place in self._order for i in range(each)])

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """Make the mask of the next call, as mlx_lm's caches do; see ``H2OKVCache.make_mask``."""
        most = max((c for _, c in self.shares), key=H2OKVCache.size)
        return most.make_mask(N, return_array, window_size)

    def size(self) -> int:
        """Return the rows of the head that holds the most."""
        return max(c.size() for _, c in self.shares)

    def empty(self) -> bool:
        """Say whether nothing has been seen yet."""
        return self._any.empty()

    @property
    def budgets(self) -> list[int]:
        """Tokens that each head keeps."""
        of_heads = {head: c.config.budget for heads, c in self.shares for head in heads}
        return [of_heads[head] for head in sorted(of_heads)]

    @property
    def offset(self) -> int | mx.array:
        """Where the next token is rotated to: a number, or int32 [B] once batched."""
        return self._any.offset

    @property
    def nbytes(self) -> int:
        """Bytes of every live buffer of every head."""
        return sum(c.nbytes for _, c in self.shares)

    @property
    def full_bytes(self) -> int:
        """Bytes that the keys and values of all tokens seen would take."""
        return sum(c.full_bytes for _, c in self.shares)

    @property
    def sequences(self) -> int:
        """Sequences held, B; one as long as nothing has been seen."""
        return self._any.sequences

    @property
    def tokens_seen(self) -> int | mx.array:
        """Tokens seen per sequence and head: a number, or int32 [B] where sequences differ."""
        return self._any.tokens_seen

    @property
    def tokens_kept(self) -> int | mx.array:
        """Tokens held per sequence and head: a number while all agree, else int32 [B, H]."""
        return self._counted(lambda c: c.tokens_kept)

    @property
    def evictions(self) -> int | mx.array:
        """Tokens that went, per sequence and head: seen − kept; see ``tokens_kept``."""
        return self._counted(lambda c: c.evictions)

    @property
    def compression_ratio(self) -> float:
        """Tokens seen for each one kept, over all sequences and heads."""
        seen = sum(len(heads) * _sum(c.tokens_seen, c) for heads, c in self.shares)
        kept = sum(len(heads) * _sum(c.tokens_kept, c) for heads, c in self.shares)
        return seen / kept if kept else 1.0

    @property
    def kept_positions(self) -> mx.array:
        """Positions held, int32 [B, H, n], ascending, −1 behind them where another head holds more."""
        return self._figures(lambda c: c.kept_positions, -1)

    @property
    def scores(self) -> mx.array:
        """Mass received, decayed: float32 [B, H, n], in the order of ``kept_positions``, 0 behind them."""
        return self._figures(lambda c: c.scores, 0.0)

    @property
    def totals(self) -> mx.array:
        """Mass received in all: float32 [B, H, n], in the order of ``kept_positions``, 0 behind them."""
        return self._figures(lambda c: c.totals, 0.0)

    @property
    def state(self) -> dict[str, Any]:
        """Everything that must be evaluated, by name: the parts' states, one after the other, and a JSON string."""
        about = {"config": asdict(self.config), "heads": [heads for heads, _ in self.shares]}
        return {"shares": [c.state for _, c in self.shares], "about": json.dumps(about)}

    @state.setter
    def state(self, value: dict[str, Any]) -> None:
        self._begin(*division_of(value))

    @classmethod
    def merge(cls, caches: Sequence[Self]) -> Self:
        """Make one cache of the sequences of several, which stay as they are; see ``H2OKVCache.merge``."""
        first = caches[0]
        for other in caches[1:]:
            first._check_alike(other)
        parts = zip(*[cache.shares for cache in caches], strict=True)
        return first.with_caches([H2OKVCache.merge([c for _, c in of]) for of in parts])

    def extend(self, other: Self) -> None:
        """Put the sequences of ``other`` behind this cache's own; see ``merge``."""
        self._check_alike(other)
        for (_, mine), (_, theirs) in zip(self.shares, other.shares, strict=True):
            mine.extend(theirs)

    def filter(self, batch_indices: Sequence[int]) -> None:
        """Keep the given sequences, in the given order."""
        for _, cache in self.shares:
            cache.filter(batch_indices)

    def extract(self, idx: int) -> Self:
        """Copy one sequence out, as a cache of its own that was never batched."""
        return self.with_caches([c.extract(idx) for _, c in self.shares])

    def with_caches(self, caches: Sequence[H2OKVCache]) -> Self:
        """Copy the layer, with other caches for its groups of heads, in their order."""
        made = copy.copy(self)
        made._begin(self.config, [(heads, c) for (heads, _), c in zip(self.shares, caches, strict=True)])
        return made

    def prepare(self, **padding: Any) -> None:
        """Announce a prompt that is padded on the right; see ``H2OKVCache.prepare``."""
        for _, cache in self.shares:
            cache.prepare(**padding)

    def finalize(self) -> None:
        """End a padded prompt."""
        for _, cache in self.shares:
            cache.finalize()

    def is_trimmable(self) -> bool:
        """Say whether tokens can be taken back at all: ``trim`` says how many."""
        return self._any.is_trimmable()

    def trim(self, n: int) -> int:
        """Take back the newest n tokens; see ``H2OKVCache.trim``."""
        # All of them remember the same calls, so the first one refuses for all.
        return max(cache.trim(n) for _, cache in self.shares)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> NoReturn:
        """Refuse: a cache stores rows in one form from its first token on."""
        self._any.to_quantized(group_size, bits)

    @property
    def backend(self) -> Backend:
        """Who does the arithmetic."""
        return self._any.backend

    @property
    def storage(self) -> dict[str, Any]:
        """How rows are stored, as ``make_prompt_cache`` takes it."""
        return self._any.storage

    @property
    def _any(self) -> H2OKVCache:
        """One of the caches, for what is the same in all."""
        return self.shares[0].cache

    def _check_alike(self, other: object) -> None:
        mine, theirs = ([heads for heads, _ in getattr(cache, "shares", ())] for cache in (self, other))
        if mine != theirs:
            raise ValueError(
                f"caches of one batch divide a layer alike, got groups {mine} and {theirs}: batch those of each apart"
            )

    def _counted(self, of: Callable[[H2OKVCache], int | mx.array]) -> int | mx.array:
        counts = [of(c) for _, c in self.shares]
        if all(isinstance(n, int) for n in counts) and len(set(map(str, counts))) == 1:
            return counts[0]
        each = zip(counts, self.shares, strict=True)
        shapes = [(mx.array(n).reshape(-1, 1), (c.sequences, len(heads))) for n, (heads, c) in each]
        return self.in_order([mx.broadcast_to(n, shape) for n, shape in shapes])

    def _figures(self, of: Callable[[H2OKVCache], mx.array], missing: float) -> mx.array:
        """Put a figure [B, h, n] of each cache's heads into one array [B, H, n] as wide as the widest."""
        if self.empty():
            return of(self._any)
        width = self.size()
        return self.in_order([padded(of(c), width, missing) for _, c in self.shares])


def _sum(counts: int | mx.array, cache: H2OKVCache) -> int:
    if isinstance(counts, int):
        return counts * cache.sequences
    each: Any = counts.tolist()
    return sum(each)


# See ``H2OKVCache``.
mlx_lm_cache.SplitH2OKVCache = SplitH2OKVCache
