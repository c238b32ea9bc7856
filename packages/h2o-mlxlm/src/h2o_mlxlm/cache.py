"""The cache that mlx_lm sees: its contract over core's state and the key and value slots.

No arithmetic of its own: who stays is core's to say, rotation is rope's, attention is attention.py's.
"""

import json
from dataclasses import asdict
from typing import Any, Literal, NoReturn

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import _BaseCache

from h2o_core import H2OConfig, H2OState, Mass
from h2o_metal import attend
from h2o_mlxlm.books import Books
from h2o_mlxlm.masks import remember
from h2o_mlxlm.slots import Slots, appended, none_yet, packed, ranks, rows_at, scored, turned, written
from h2o_rope import Rotation, derotate, rotate


class H2OKVCache(Books, _BaseCache):  # type: ignore[misc]
    """Keep at most ``budget`` tokens per KV head: one layer's cache, for sequences of equal length.

    A call is open from ``update_and_fetch`` until something asks for its outcome: the next call, ``state``,
    ``nbytes``, ``kept_positions`` or ``scores``. Then the mass that the call's attention reported goes into
    the scores, and the lowest rows go. So a layer that attends twice to one cache (shared KV layers) counts
    in full, and nothing goes before it has been attended to.

    Args:
        config: What to keep.
        scale: The model's factor on its logits. Needed for ``queries="key"`` alone; None is D^-0.5.
        rotation: The model's rotary embedding. Needed for ``positions="rolling"`` and ``"auto"`` alone.

    Raises:
        ValueError: ``positions="rolling"`` or ``"auto"`` without a rotation, or ``"auto"`` without a
            ``trained_length``.
    """

    def __init__(self, config: H2OConfig, scale: float | None = None, rotation: Rotation | None = None) -> None:
        if config.positions != "original" and rotation is None:
            raise ValueError(
                f'positions="{config.positions}" needs the rotation of the model\'s keys, got rotation=None: '
                "make the cache with make_prompt_cache(model, config), or pass rotation_of(rope)"
            )
        if config.positions == "auto" and config.trained_length is None:
            raise ValueError(
                'positions="auto" needs trained_length, got None: make the cache with '
                "make_prompt_cache(model, config), which asks the model, or set it"
            )
        self.config = config
        self.scale = scale
        self.rotation = None if config.positions == "original" else rotation
        self.offset = 0
        self._slots: Slots | None = None
        self._seen = 0
        self._kept = 0
        self._shown = 0  # rows per head that the open call attends to
        self._holding = not config.evict_during_prefill
        self._rolling = config.positions == "rolling"  # stored keys are unrotated
        self._turning = False  # they will be, once the open call has ended
        self._largest = 0  # tokens of the largest call
        self._ranks: mx.array | None = None  # of the rows shown last, if they filled all slots
        self._open = 0  # tokens of the open call
        self._mass: Mass | None = None

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
        n = keys.shape[2]
        mass = self._mass if n == 1 and self._in_steady_decode() else None
        if mass is None:
            self._end_call()
        self._check_call(keys, values)
        if self._rolling and self.rotation is not None:
            keys = derotate(keys, self.offset + mx.arange(n, dtype=mx.int32), self.rotation)
        slots = none_yet(keys, values) if self._slots is None else self._slots
        if mass is not None:
            self._slots, self._mass = turned(self.config, slots, mass, keys, values), None
        elif n == 1:
            self._slots = written(slots, keys, values, self._kept, self.config.budget)
        else:
            self._slots = appended(slots, keys, values, self._kept)
        self._open, self._seen = n, self._seen + n
        self._shown = self._kept + n
        self._holding = self._holding and n > 1
        self._kept = self._shown if self._holding else min(self._shown, self.config.budget)
        self._largest = max(self._largest, n)
        self._turning = not self._rolling and self._outgrown(self._seen + self._largest)
        self.offset = self._kept if self._rolling or self._turning else self._seen
        shown = self.keys_and_values()
        if self.config.queries == "key":
            mass = self._key_mass(keys, shown[0])
            self.observe(mass)
            # No attention of ours follows to tie the mass to.
            shown = tuple(mx.depends(list(shown), list(mass)))
        return shown

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return what the open call attends to, or without one what the next call will."""
        slots, shown = self._live(), self._shown
        if not self._open:
            slots, shown = packed(slots, self._kept), self._kept
        keys, values, state = slots
        if self._rolling and self.rotation is not None:
            places = ranks(slots, shown, self._ranks if self._open == 1 else None)
            keys = rotate(keys, places, self.rotation, below=shown)
            # Only ranks of full slots carry over: the next row must take the place of one that has a rank.
            self._ranks = places if shown == keys.shape[2] else None
        keys, values = keys[:, :, :shown], values[:, :, :shown]
        # Decode evaluates logits alone: tie the state to them, or it piles up as a graph.
        keys, values = mx.depends([keys, values], list(state))
        return keys, values

    def observe(self, mass: Mass) -> None:
        """Take the mass that the open call's attention gave to each row it attended to.

        Args:
            mass: Two float32 [B, H, M], made with the configuration's decay.

        Raises:
            RuntimeError: No call is open.
        """
        if not self._open:
            raise RuntimeError(
                "attention was reported to an H2O cache whose call has ended: read its properties before or after "
                "a forward pass of the model, not during one"
            )
        self._mass = mass if self._mass is None else Mass(*map(mx.add, self._mass, mass))

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

    def _end_call(self) -> None:
        """Score what the open call attended to and let the lowest go."""
        if not self._open:
            return
        if self._mass is None:
            self._raise_unreported()
        over = self._kept < self._shown
        slots = scored(self.config, self._live(), self._mass, self._open, over)
        if self._turning and self.rotation is not None:
            slots = slots._replace(keys=derotate(slots.keys, slots.state.positions, self.rotation))
            self._rolling, self._turning = True, False
        self._slots, self._open, self._mass = slots, 0, None

    def _in_steady_decode(self) -> bool:
        """Say whether the open call has one token, fills every slot and will leave one empty."""
        full = self._open == 1 and self._shown == self.config.budget + 1 and self._kept < self._shown
        return full and self._mass is not None and not self._turning and self._live().keys.shape[2] == self._shown

    def _outgrown(self, length: int) -> bool:
        """Say whether positions up to ``length`` are more than the model was trained for."""
        return self.config.trained_length is not None and length > self.config.trained_length

    def _key_mass(self, keys: mx.array, shown: mx.array) -> Mass:
        """The mass when each incoming key, where the model put it, stands in for its query."""
        n = keys.shape[2]
        if n > 1:
            keys = shown[:, :, -n:]
        elif self._rolling:
            keys = rows_at(shown, mx.argmax(self._live().state.positions, axis=-1, keepdims=True))
        scale = keys.shape[-1] ** -0.5 if self.scale is None else self.scale
        causal: Literal["causal"] | None = "causal" if n > 1 else None
        return attend(keys, shown, shown[..., :0], scale, self.config.decay, causal)[1]

    def _live(self) -> Slots:
        if self._slots is None:
            raise ValueError("this cache is empty: it has no rows before its first update_and_fetch")
        return self._slots

    def _check_call(self, keys: mx.array, values: mx.array) -> None:
        """Refuse a call that contradicts the ones before it, or goes past what the model was trained for."""
        n = keys.shape[2]
        if self._outgrown(self.offset + n):
            raise ValueError(
                f'positions="auto" keeps positions below trained_length={self.config.trained_length}, but a call of '
                f"{n} tokens at {self.offset} goes beyond: use smaller calls (prefill_step_size) or a smaller budget"
            )
        if self._slots is None:
            return
        for name, new, old in (("keys", keys, self._slots.keys), ("values", values, self._slots.values)):
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
            'place the hook, or use H2OConfig(queries="key"), which needs none. If the hook was there, a call was '
            "interrupted before its attention: start from a fresh cache"
        )

    # What mlx_lm asks of a cache

    @property
    def keys(self) -> mx.array | None:
        """Keys of all slots [B, H, C, D], None while nothing has been seen; some models set them."""
        return None if self._slots is None else self._slots.keys

    @keys.setter
    def keys(self, value: mx.array) -> None:
        self._slots = self._live()._replace(keys=value)

    @property
    def values(self) -> mx.array | None:
        """Values of all slots [B, H, C, Dv], likewise."""
        return None if self._slots is None else self._slots.values

    @values.setter
    def values(self, value: mx.array) -> None:
        self._slots = self._live()._replace(values=value)

    @property
    def state(self) -> tuple[Any, ...]:
        """Everything that must be evaluated or saved, as arrays, None and one JSON string."""
        self._end_call()
        frequencies = None if self.rotation is None else self.rotation.frequencies
        scalars = {
            "config": asdict(self.config),
            "scale": self.scale,
            "rotation": None if self.rotation is None else list(self.rotation[1:]),
            "seen": self._seen,
            "kept": self._kept,
            "holding": self._holding,
            "rolling": self._rolling,
            "largest": self._largest,
        }
        slots = self._slots
        arrays = [None] * 6 if slots is None else [slots.keys, slots.values, *slots.state]
        return (*arrays, frequencies, json.dumps(scalars))

    @state.setter
    def state(self, value: tuple[Any, ...]) -> None:
        keys, values, *books, frequencies, text = value
        scalars = json.loads(text)
        rotation = None if frequencies is None else Rotation(frequencies, *scalars["rotation"])
        H2OKVCache.__init__(self, H2OConfig(**scalars["config"]), scalars["scale"], rotation)
        self._slots = None if keys is None else Slots(keys, values, H2OState(*books))
        self._seen, self._kept, self._holding = scalars["seen"], scalars["kept"], scalars["holding"]
        self._rolling, self._largest = scalars["rolling"], scalars["largest"]
        self.offset = self._kept if self._rolling else self._seen

    def size(self) -> int:
        """Return the rows that each head holds."""
        return self._kept

    def empty(self) -> bool:
        """Say whether nothing has been seen yet."""
        return self._slots is None

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
