"""The cache that mlx_lm sees: its contract over core's state and the key and value slots.

No arithmetic of its own: who stays is core's to say, rotation is rope's, attention is attention.py's.
"""

import json
from dataclasses import asdict
from typing import Any, Literal, NoReturn

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import _BaseCache

from h2o_core import H2OConfig, H2OState, admit, grow, init, observe, pack, release, take
from h2o_metal import attend, evict, victims
from h2o_mlxlm.masks import remember
from h2o_rope import Rotation, derotate, rotate

STEP = 256
"""Slots added at a time below the budget, as mlx_lm's own cache does."""


class H2OKVCache(_BaseCache):  # type: ignore[misc]
    """Keep at most ``budget`` tokens per KV head: one layer's cache, for sequences of equal length.

    A call is open from ``update_and_fetch`` until something asks for its outcome: the next call, ``state``
    or any property below. Then the mass that the call's attention reported goes into the scores, and the
    lowest rows go. So a layer that attends twice to one cache (shared KV layers) counts in full, and
    nothing goes before it has been attended to.

    Args:
        config: What to keep.
        scale: The model's factor on its logits. Needed for ``queries="key"`` alone; None is D^-0.5.
        rotation: The model's rotary embedding. Needed for ``positions="rolling"`` alone.

    Raises:
        ValueError: ``positions="rolling"`` without a rotation.
    """

    def __init__(self, config: H2OConfig, scale: float | None = None, rotation: Rotation | None = None) -> None:
        if config.positions == "rolling" and rotation is None:
            raise ValueError(
                'positions="rolling" needs the rotation of the model\'s keys, got rotation=None: '
                "make the cache with make_prompt_cache(model, config), or pass rotation_of(rope)"
            )
        self.config = config
        self.scale = scale
        self.rotation = rotation if config.positions == "rolling" else None
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset = 0
        self._state: H2OState | None = None
        self._seen = 0
        self._kept = 0  # rows per head once the open call has ended
        self._shown = 0  # rows per head that the open call attends to
        self._holding = not config.evict_during_prefill
        self._open = 0  # tokens of the open call
        self._mass: mx.array | None = None

    # A call

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Give the new rows slots and return what the call attends to.

        Args:
            keys: New keys [B, H, N, D], rotated at ``offset``.
            values: New values [B, H, N, Dv].

        Returns:
            Keys and values [B, H, M, D], [B, H, M, Dv]; the N new rows are the last if N > 1.

        Raises:
            ValueError: Batch, heads, width or dtype differ from the calls before.
            RuntimeError: The call before this one was never reported to ``observe``.
        """
        self._end_call()
        self._check_call(keys, values)
        n = keys.shape[2]
        if self.rotation is not None:
            keys = derotate(keys, self.offset + mx.arange(n, dtype=mx.int32), self.rotation)
        if self._state is None:
            self._state = init(*keys.shape[:2])
            self.keys, self.values = keys[:, :, :0], values[:, :, :0]
        if n == 1:
            self._write(keys, values)
        else:
            self._append(keys, values)
        self._open, self._seen = n, self._seen + n
        self._shown = self._kept + n
        self._holding = self._holding and n > 1
        self._kept = self._shown if self._holding else min(self._shown, self.config.budget)
        self.offset = self._seen if self.config.positions == "original" else self._kept
        shown = self.keys_and_values()
        if self.config.queries == "key":
            self.observe(self._key_mass(keys, shown[0]))
        return shown

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return what the open call attends to, or without one what the next call will."""
        keys, values, state = self._live()
        shown = self._shown if self._open else self._kept
        if not self._open and state.positions.shape[-1] > shown:
            slots = pack(state, shown)
            state, keys, values = take(state, slots), _rows(keys, slots), _rows(values, slots)
        if self.rotation is not None:
            keys = rotate(keys, _ranks(state, shown), self.rotation)
        keys, values = keys[:, :, :shown], values[:, :, :shown]
        # Decode evaluates logits alone: tie the scores to them, or they pile up as a graph.
        keys, values = mx.depends([keys, values], [state.scores, state.positions])
        return keys, values

    def observe(self, mass: mx.array) -> None:
        """Take the mass that the open call's attention gave to each row it attended to.

        Args:
            mass: float32 [B, H, M], made with the configuration's decay.
        """
        self._mass = mass if self._mass is None else self._mass + mass

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """Make the mask of the next call, as mlx_lm's caches do.

        Raises:
            ValueError: The model asks for a sliding window that is narrower than what is kept.
        """
        width = self._kept + N
        if window_size is not None and width > window_size:
            raise ValueError(
                f"a layer attends in a window of {window_size} tokens, but this cache shows it {width} rows "
                "from anywhere: give such layers mlx_lm's RotatingKVCache, as make_prompt_cache does"
            )
        if return_array:
            return remember(create_causal_mask(N, self._kept))
        return None if N == 1 else "causal"

    def _write(self, keys: mx.array, values: mx.array) -> None:
        """Put one token's rows into an empty slot."""
        _, _, state = self._live()
        if self._kept == state.positions.shape[-1]:
            self._widen()
        old_keys, old_values, state = self._live()
        self._state, slots = admit(state, 1)
        self.keys, self.values = _put(old_keys, slots, keys), _put(old_values, slots, values)

    def _widen(self) -> None:
        """Add empty slots: up to budget + 1, or one step more while the budget does not apply."""
        keys, values, state = self._live()
        capacity = self._kept + STEP
        if self._kept <= self.config.budget:
            capacity = min(capacity, self.config.budget + 1)
        more = capacity - self._kept
        self._state = grow(state, capacity)
        self.keys, self.values = _behind(keys, more), _behind(values, more)

    def _append(self, keys: mx.array, values: mx.array) -> None:
        """Put the rows of several tokens behind the kept ones."""
        old_keys, old_values, state = self._live()
        if state.positions.shape[-1] > self._kept:
            slots = pack(state, self._kept)
            state, old_keys, old_values = take(state, slots), _rows(old_keys, slots), _rows(old_values, slots)
        self._state, _ = admit(state, keys.shape[2])
        self.keys = mx.concatenate([old_keys, keys], axis=2)
        self.values = mx.concatenate([old_values, values], axis=2)

    def _end_call(self) -> None:
        """Score what the open call attended to and let the lowest go."""
        if not self._open:
            return
        if self._mass is None:
            self._raise_unreported()
        keys, values, state = self._live()
        capacity = state.positions.shape[-1]
        mass = mx.pad(self._mass, [(0, 0), (0, 0), (0, capacity - self._shown)])
        state = observe(self.config, state, mass, self._open)
        if self._kept < self._shown:
            if capacity == self.config.budget + 1:
                state = release(self.config, state, victims(self.config, state))
            else:
                state, slots = evict(self.config, state)
                self.keys, self.values = (_behind(_rows(x, slots), 1) for x in (keys, values))
        self._state, self._open, self._mass = state, 0, None

    def _key_mass(self, keys: mx.array, shown: mx.array) -> mx.array:
        """The mass when each incoming key, where the model put it, stands in for its query."""
        n = keys.shape[2]
        if n == 1:
            _, _, state = self._live()
            keys = _rows(shown, mx.argmax(state.positions, axis=-1, keepdims=True))
        else:
            keys = shown[:, :, -n:]
        scale = keys.shape[-1] ** -0.5 if self.scale is None else self.scale
        causal: Literal["causal"] | None = "causal" if n > 1 else None
        return attend(keys, shown, shown[..., :0], scale, self.config.decay, causal)[1]

    def _live(self) -> tuple[mx.array, mx.array, H2OState]:
        if self.keys is None or self.values is None or self._state is None:
            raise ValueError("this cache is empty: it has no rows before its first update_and_fetch")
        return self.keys, self.values, self._state

    def _check_call(self, keys: mx.array, values: mx.array) -> None:
        """Refuse a call that contradicts the ones before it."""
        if self.keys is None or self.values is None:
            return
        for name, new, old in (("keys", keys, self.keys), ("values", values, self.values)):
            was, now = (*old.shape[:2], old.shape[3]), (*new.shape[:2], new.shape[3])
            if was != now or old.dtype != new.dtype:
                raise ValueError(
                    f"{name} of one cache keep batch, heads, width and dtype: it holds {was} {old.dtype}, "
                    f"the call brings {now} {new.dtype}; make a fresh cache with make_prompt_cache"
                )

    def _raise_unreported(self) -> NoReturn:
        raise RuntimeError(
            'an H2O cache with queries="true" never got its attention reported, so it can\'t know what to '
            "evict: make it with h2o_mlxlm.make_prompt_cache(model, config) or install(model, config), which "
            'place the hook, or use H2OConfig(queries="key"), which needs none'
        )

    # What mlx_lm asks of a cache

    @property
    def state(self) -> tuple[Any, ...]:
        """Everything that must be evaluated or saved, as arrays, None and one JSON string."""
        self._end_call()
        frequencies = None if self.rotation is None else self.rotation.frequencies
        scalars = {
            "config": asdict(self.config),
            "scale": self.scale,
            "traditional": None if self.rotation is None else self.rotation.traditional,
            "seen": self._seen,
            "kept": self._kept,
            "holding": self._holding,
        }
        arrays = (None, None, None) if self._state is None else tuple(self._state)
        return (self.keys, self.values, *arrays, frequencies, json.dumps(scalars))

    @state.setter
    def state(self, value: tuple[Any, ...]) -> None:
        keys, values, scores, positions, seen, frequencies, text = value
        scalars = json.loads(text)
        rotation = None if frequencies is None else Rotation(frequencies, scalars["traditional"])
        H2OKVCache.__init__(self, H2OConfig(**scalars["config"]), scalars["scale"], rotation)
        self.keys, self.values = keys, values
        self._state = None if scores is None else H2OState(scores, positions, seen)
        self._seen, self._kept, self._holding = scalars["seen"], scalars["kept"], scalars["holding"]
        self.offset = self._seen if self.config.positions == "original" else self._kept

    def size(self) -> int:
        """Return the rows that each head holds."""
        return self._kept

    def empty(self) -> bool:
        """Say whether nothing has been seen yet."""
        return self.keys is None

    def is_trimmable(self) -> bool:
        """Say no: what has been evicted can't come back."""
        return False

    def trim(self, n: int) -> NoReturn:
        """Refuse: what has been evicted can't come back."""
        raise ValueError(
            f"an H2O cache can't be trimmed (asked for {n} tokens): evicted rows can't come back; "
            "start from a fresh cache, or from a copy made earlier"
        )

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> NoReturn:
        """Refuse: rows are stored as the model makes them."""
        raise ValueError(
            f"an H2O cache can't be quantised (asked for kv_bits={bits}): leave kv_bits out, "
            "or lower budget to save memory"
        )

    # What a user asks of it

    @property
    def nbytes(self) -> int:
        """Bytes of every live buffer: keys, values, empty slots, scores, positions."""
        self._end_call()
        if self._state is None or self.keys is None or self.values is None:
            return 0
        return sum(x.nbytes for x in (self.keys, self.values, *self._state))

    @property
    def full_bytes(self) -> int:
        """Bytes that the keys and values of all tokens seen would take."""
        if self.keys is None or self.values is None:
            return 0
        row = sum(x.shape[0] * x.shape[1] * x.shape[3] * x.itemsize for x in (self.keys, self.values))
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
        """Scores, float32 [B, H, n], in the order of ``kept_positions``."""
        return self._in_order().scores

    def _in_order(self) -> H2OState:
        self._end_call()
        if self._state is None:
            return init(0, 0)
        order = mx.argsort(self._state.positions, axis=-1)
        return take(self._state, order[..., order.shape[-1] - self._kept :])


def _ranks(state: H2OState, shown: int) -> mx.array:
    """Place of each row among its head's rows by position; 0 for an empty slot. int32 [B, H, C]."""
    order = mx.argsort(mx.argsort(state.positions, axis=-1), axis=-1).astype(mx.int32)
    return mx.maximum(order - (order.shape[-1] - shown), 0)


def _rows(x: mx.array, slots: mx.array) -> mx.array:
    return mx.take_along_axis(x, slots[..., None], axis=2)


def _put(x: mx.array, slots: mx.array, row: mx.array) -> mx.array:
    # Done in place by mlx when nobody else holds x.
    return mx.put_along_axis(x, mx.broadcast_to(slots[..., None], row.shape), row, axis=2)


def _behind(x: mx.array, n: int) -> mx.array:
    """Rows of zeros behind: empty slots must be finite, for 0 · nan is nan."""
    return mx.concatenate([x, mx.zeros((*x.shape[:2], n, x.shape[3]), x.dtype)], axis=2)
