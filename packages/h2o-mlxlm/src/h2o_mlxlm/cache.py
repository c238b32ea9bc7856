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
from h2o_mlxlm.batch import Batch
from h2o_mlxlm.checks import check_call, raise_ended, raise_unreported
from h2o_mlxlm.counts import Call, Count, Counts, called
from h2o_mlxlm.masks import remember
from h2o_mlxlm.passes import Passes
from h2o_mlxlm.ragged import lengths_of, only, per_sequence, settled, visibility
from h2o_mlxlm.slots import Slots, appended, capacity, none_yet, packed, ranks, rows_at, scored, turned, written
from h2o_rope import Rotation, derotate, rotate


class H2OKVCache(Batch, _BaseCache):  # type: ignore[misc]
    """Keep at most ``budget`` tokens per KV head: one layer's cache.

    Its sequences have equal lengths, until mlx_lm batches it (see ``Batch``).

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
        self.offset: int | mx.array = 0
        self._slots: Slots | None = None
        self._counts: Counts = (Count(holding=not config.evict_during_prefill, rolling=config.positions == "rolling"),)
        self._batched = False  # there is a count for each sequence
        self._to_come: tuple[int, ...] | None = None  # real tokens of a padded prompt
        self._ranks: mx.array | None = None  # of the rows shown last, if they filled all slots
        self._call: Call | None = None  # the last one
        self._open = 0  # tokens of the open call, padding included
        self._mass: Mass | None = None
        self.passes, self._pass = Passes(), 0

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
            RuntimeError: The call before this one was never reported to ``observe``, or never reached other layers.
        """
        n = keys.shape[2]
        call, to_come = called(self.config, self._counts, n, self._to_come)
        mass = self._mass if n == 1 and call.lengths is None and self._in_steady_decode() else None
        if mass is None:
            self._end_call()
        check_call(self.config, call, self._slots, keys, values, self._batched)
        number = self.passes.enter(self._pass, call.before[0].seen, call.after[0].seen)
        if self.rotation is not None and any(c.rolling for c in call.before):
            places = per_sequence([c.place for c in call.before]) + mx.arange(n, dtype=mx.int32)
            keys = only([c.rolling for c in call.before], derotate(keys, places, self.rotation), keys)
        slots = none_yet(keys, values) if self._slots is None else self._slots
        if mass is not None:
            slots = turned(self.config, slots, mass, keys, values)
        elif n == 1:
            slots = written(slots, keys, values, call.most, self.config.budget, lengths_of(call.lengths))
        else:
            slots = appended(slots, keys, values, call.most, lengths_of(call.lengths))
        # All at once: an interrupt comes before it, and nothing has changed, or after it, and the call is open.
        self._slots, self._mass, self._call, self._open, self._to_come = slots, None, call, n, to_come
        self._pass = number
        self._count(call.after)
        shown = self.keys_and_values()
        if self.config.queries == "key":
            mass = self._key_mass(keys, shown[0])
            self.observe(mass)
            # No attention of ours follows to tie the mass to.
            shown = tuple(mx.depends(list(shown), list(mass)))
        return shown

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return what the open call attends to, or without one what the next call will."""
        slots, call = self._live(), self._call if self._open else None
        shown = self.size() if call is None else call.most + call.n_tokens
        if call is None:
            slots = packed(slots, shown)
        keys, values, state = slots
        rolling = [] if self.rotation is None else [c.rolling for c in (self._counts if call is None else call.before)]
        if self.rotation is not None and any(rolling):
            places = self._places(slots, call, shown)
            keys = only(rolling, rotate(keys, places, self.rotation, below=shown), keys)
        keys, values = keys[:, :, :shown], values[:, :, :shown]
        # Decode evaluates logits alone: tie the state to them, or it piles up as a graph.
        keys, values = mx.depends([keys, values], list(state))
        return keys, values

    def view(self) -> tuple[mx.array | Literal["causal"] | None, mx.array | None]:
        """Say what the last call's queries may attend to, as ``attend`` takes it: mask and lengths."""
        call = self._call
        if call is None:
            raise_ended()
        mask = visibility([c.kept for c in call.before], call.n_tokens)
        if mask is None:
            return "causal" if call.n_tokens > 1 else None, lengths_of(call.lengths)
        return mask, lengths_of(call.lengths)

    def observe(self, mass: Mass) -> None:
        """Take the mass that the open call's attention gave to each row it attended to.

        Args:
            mass: Two float32 [B, H, M], made with the configuration's decay.

        Raises:
            RuntimeError: No call is open.
        """
        if not self._open:
            raise_ended()
        self._mass = mass if self._mass is None else Mass(*map(mx.add, self._mass, mass))

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """Make the mask of the next call, as mlx_lm's caches do.

        Raises:
            ValueError: The model asks for a sliding window that is narrower than what is kept.
        """
        width = self.size() + N
        if window_size is not None and width > window_size:
            raise ValueError(
                f"a layer attends in a window of {window_size} tokens, but this cache shows it {width} rows "
                "from anywhere: give such layers mlx_lm's RotatingKVCache, as make_prompt_cache does"
            )
        mask = visibility([c.kept for c in self._counts], N)
        if mask is not None:
            return remember(mask)
        if return_array:
            return remember(create_causal_mask(N, self.size()))
        return None if N == 1 else "causal"

    def _end_call(self) -> None:
        """Score what the open call attended to and let the lowest go."""
        call, mass = self._call, self._mass
        if not self._open or call is None:
            return
        if mass is None:
            raise_unreported()
        slots, over = self._live(), call.over
        # Where sequences differ, a call may leave empty slots between the rows, or rows that stay beyond the budget.
        full = call.n_tokens == 1 and (capacity(slots) == self.config.budget + 1 or not any(over))
        even = full or call.is_even
        slots = scored(self.config, slots, mass, call.n_tokens, even and any(over), lengths_of(call.lengths))
        if not even:
            slots = settled(self.config, slots, over, self.size())
        if self.rotation is not None and any(call.turning):
            keys = derotate(slots.keys, slots.state.positions, self.rotation)
            slots = slots._replace(keys=only(call.turning, keys, slots.keys))
        self._slots, self._open, self._mass = slots, 0, None

    def _in_steady_decode(self) -> bool:
        """Say whether the open call has one token, fills every slot and will leave one empty."""
        call, width = self._call, self.config.budget + 1
        if self._open != 1 or self._mass is None or call is None or call.most + 1 != width:
            return False
        turning = self.rotation is not None and any(call.turning)
        return all(call.over) and not turning and self._live().keys.shape[2] == width

    def _count(self, counts: Counts) -> None:
        self._counts = counts
        self.offset = mx.array([c.place for c in counts], mx.int32) if self._batched else counts[0].place

    def _places(self, slots: Slots, call: Call | None, shown: int) -> mx.array:
        """The place of each row among its head's rows, where keys roll."""
        if call is None or not call.is_even:
            self._ranks = None
            open_rows = (0,) * len(self._counts) if call is None else call.real
            counts = self._counts if call is None else call.before
            return ranks(slots, per_sequence([c.kept + n for c, n in zip(counts, open_rows, strict=True)]))
        places = ranks(slots, shown, self._ranks if call.n_tokens == 1 else None)
        # Only ranks of full slots carry over: the next row must take the place of one that has a rank.
        self._ranks = places if shown == capacity(slots) else None
        return places

    def _key_mass(self, keys: mx.array, shown: mx.array) -> Mass:
        """The mass when each incoming key, where the model put it, stands in for its query."""
        n = keys.shape[2]
        if n > 1:
            keys = shown[:, :, -n:]
        elif self.rotation is not None:
            keys = rows_at(shown, mx.argmax(self._live().state.positions, axis=-1, keepdims=True))
        scale = keys.shape[-1] ** -0.5 if self.scale is None else self.scale
        return attend(keys, shown, shown[..., :0], scale, self.config.decay, *self.view())[1]

    def _live(self) -> Slots:
        if self._slots is None:
            raise ValueError("this cache is empty: it has no rows before its first update_and_fetch")
        return self._slots

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
            "counts": self._counts,
            "batched": self._batched,
            "to_come": self._to_come,
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
        self._batched, to_come = scalars["batched"], scalars["to_come"]
        self._to_come = None if to_come is None else tuple(to_come)
        self._count(tuple(Count(*count) for count in scalars["counts"]))

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
