"""One layer's cache whose heads hold different numbers of rows, for a total that is fixed."""

import json
from collections.abc import Callable
from dataclasses import asdict, fields
from itertools import chain
from typing import Any, NoReturn

import mlx.core as mx
from mlx_lm.models.cache import _BaseCache

from h2o_core import H2OConfig
from h2o_mlxlm.allotment import allot
from h2o_mlxlm.backend import Backend, backend_of
from h2o_mlxlm.cache import H2OKVCache
from h2o_mlxlm.head import HeadCache
from h2o_mlxlm.ragged import padded

# What heads of their own budgets can honour. What is not here is refused until somebody has seen to it.
SUPPORTED = ("budget", "n_sink", "grace", "decay", "long_share", "evict_during_prefill")


class AdaptiveH2OKVCache(_BaseCache):  # type: ignore[misc]
    """Keep at most H · ``budget`` tokens of a sequence in one layer, more in heads that look at more.

    All heads hold ``budget`` tokens, until a call ends after which more than one row of each has to go: mostly
    a prompt. Then the places of the layer are given out anew, see ``allot``, and each head goes on with as many
    as it got. So the memory is what equal heads take, in the buffers of each head. Sequences have equal lengths,
    and places of their own; several prompts in turn can't be batched.

    Figures that differ from head to head are arrays [B, H].

    Args:
        config: What a head keeps on average.
        backend: Who does the arithmetic, or its name; see ``backend_of``.

    Raises:
        ValueError: The configuration asks for something that such heads can't do; a back end that can't run here.

    Source:
        Feng et al., Ada-KV (arXiv 2407.11550).
    """

    def __init__(self, config: H2OConfig, backend: Backend | str = "auto") -> None:
        check_adaptive(config)
        self.config = config
        self.backend = backend_of(backend) if isinstance(backend, str) else backend
        self.offset = 0
        self.heads: list[list[HeadCache]] = []  # [B][H], none before the first call
        self._roomy = False  # the last call took rows beyond the budget, which are still there

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Give the new rows slots.

        Args:
            keys: New keys [B, H, N, D], rotated at ``offset``.
            values: New values [B, H, N, Dv].

        Returns:
            What came. Heads hold different numbers of rows, so attention takes them from each head.

        Raises:
            ValueError: Batch, heads, width or dtype differ from the calls before.
            RuntimeError: The call before this one was never attended to.
        """
        self._end_call()
        batch, n_heads, n, _ = keys.shape
        if self.empty():
            self.heads = [[HeadCache(self.config, backend=self.backend) for _ in range(n_heads)] for _ in range(batch)]
        else:
            self._check(keys, values)
        self._roomy = any(head.loses_several(n) for head in self._all)
        for i, row in enumerate(self.heads):
            for h, head in enumerate(row):
                if self._roomy:
                    head.make_room(n)
                head.update_and_fetch(keys[i : i + 1, h : h + 1], values[i : i + 1, h : h + 1])
        self.offset += n
        return keys, values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """Make the mask of the next call, as mlx_lm's caches do; see ``H2OKVCache.make_mask``."""
        self._end_call()
        most = max(self._all, key=H2OKVCache.size, default=None)
        return (most or HeadCache(self.config)).make_mask(N, return_array, window_size)

    def size(self) -> int:
        """Return the rows of the head that holds the most."""
        self._end_call()
        return max([head.held for head in self._all], default=0)

    def empty(self) -> bool:
        """Say whether nothing has been seen yet."""
        return not self.heads

    @property
    def nbytes(self) -> int:
        """Bytes of every live buffer of every head."""
        self._end_call()
        return sum(head.nbytes for head in self._all)

    @property
    def full_bytes(self) -> int:
        """Bytes that the keys and values of all tokens seen would take."""
        return sum(head.full_bytes for head in self._all)

    @property
    def tokens_seen(self) -> int:
        """Tokens seen per sequence and head."""
        return self.offset

    @property
    def tokens_kept(self) -> int | mx.array:
        """Tokens held per sequence and head: a number while all agree, else int32 [B, H]."""
        self._end_call()
        held = [[head.held for head in row] for row in self.heads]
        return self.size() if len(set(chain(*held))) < 2 else mx.array(held, mx.int32)

    @property
    def evictions(self) -> int | mx.array:
        """Tokens that went, per sequence and head: seen − kept; see ``tokens_kept``."""
        return self.tokens_seen - self.tokens_kept

    @property
    def compression_ratio(self) -> float:
        """Tokens seen for each one kept, over all sequences and heads."""
        self._end_call()
        kept = sum(head.held for head in self._all)
        return self.tokens_seen * len(self._all) / kept if kept else 1.0

    @property
    def kept_positions(self) -> mx.array:
        """Positions held, int32 [B, H, n], ascending, −1 behind them where another head holds more."""
        return self._figures(lambda head: head.kept_positions, -1)

    @property
    def scores(self) -> mx.array:
        """Mass received, decayed: float32 [B, H, n], in the order of ``kept_positions``, 0 behind them."""
        return self._figures(lambda head: head.scores, 0.0)

    @property
    def totals(self) -> mx.array:
        """Mass received in all: float32 [B, H, n], in the order of ``kept_positions``, 0 behind them."""
        return self._figures(lambda head: head.totals, 0.0)

    @property
    def state(self) -> dict[str, Any]:
        """Everything that must be evaluated, by name: the heads' states, one after the other, and a JSON string."""
        self._end_call()
        about = {"config": asdict(self.config), "shape": self._shape, "offset": self.offset}
        return {"heads": [head.state for head in self._all], "about": json.dumps(about)}

    @state.setter
    def state(self, value: dict[str, Any]) -> None:
        about, made = json.loads(value["about"]), [HeadCache.from_state(state) for state in value["heads"]]
        (batch, n_heads), config = about["shape"], H2OConfig(**about["config"])
        if batch * n_heads != len(made):
            raise ValueError(f"a state of shape {(batch, n_heads)} has {batch * n_heads} heads, got {len(made)}")
        AdaptiveH2OKVCache.__init__(self, config, getattr(self, "backend", "auto"))
        self.heads = [made[i * n_heads : (i + 1) * n_heads] for i in range(batch)]
        self.offset = about["offset"]

    def is_trimmable(self) -> bool:
        """Say no: what has been evicted can't come back."""
        return False

    def trim(self, n: int) -> NoReturn:
        """Refuse: what has been evicted can't come back."""
        raise ValueError(
            f"a cache with heads=\"adaptive\" can't be trimmed (asked for {n} tokens): evicted rows can't come back; "
            "start from a fresh cache, or from a copy made earlier"
        )

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> NoReturn:
        """Refuse: rows are stored as the model makes them."""
        raise ValueError(
            f'a cache with heads="adaptive" can\'t be quantised (asked for kv_bits={bits}): leave kv_bits out, '
            "or lower budget to save memory"
        )

    @property
    def _shape(self) -> tuple[int, int]:
        return len(self.heads), len(self.heads[0]) if self.heads else 0

    @property
    def _all(self) -> list[HeadCache]:
        return list(chain(*self.heads))

    def _check(self, keys: mx.array, values: mx.array) -> None:
        """Refuse a call that contradicts the ones before it, while nothing has changed."""
        was = (*self._shape, *self.heads[0][0].kind)
        now = (*keys.shape[:2], keys.shape[3], values.shape[3], keys.dtype, values.dtype)
        if was != now:
            raise ValueError(
                f"keys and values of one cache keep batch, heads, widths and dtypes: it holds {was}, the call brings "
                f"{now}; make a fresh cache with make_prompt_cache"
            )

    def _end_call(self) -> None:
        """Give out the layer's places, if the last call left more rows than there are."""
        if not self._roomy:
            return
        for row in self.heads:
            rows = [(head.kept_positions[0, 0], head.scores[0, 0]) for head in row]
            for head, places in zip(row, allot(self.config, rows), strict=True):
                head.cut(places)
        self._roomy = False

    def _figures(self, of: Callable[[HeadCache], mx.array], missing: float) -> mx.array:
        """Put a figure [1, 1, n] of each head into one array [B, H, n] as wide as the widest."""
        width = self.size()
        if self.empty():
            return of(HeadCache(self.config))
        rows = [[padded(of(head), width, missing) for head in row] for row in self.heads]
        return mx.concatenate([mx.concatenate(row, axis=1) for row in rows])


def check_adaptive(config: H2OConfig) -> None:
    """Refuse settings that heads with budgets of their own can't honour.

    Raises:
        ValueError: There is one.
    """
    default = H2OConfig()
    for field in fields(config):
        works, value = (getattr(c, field.name) for c in (default, config))
        if field.name not in SUPPORTED and value != works:
            if field.name == "scorer":
                works, value = works.name, dict(asdict(value))
            raise ValueError(
                f'heads="adaptive" works with {field.name}={works!r} alone, got {value!r}: leave it out, or '
                'use heads="equal"'
            )
