"""The cache that mlx_lm sees: its contract over core's state and the key and value slots.

No arithmetic of its own: who stays is core's to say, rotation is rope's, attention is attention.py's.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, NoReturn

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import _BaseCache

from h2o_core import H2OConfig, H2OState
from h2o_mlxlm.backend import Backend, backend_of
from h2o_mlxlm.calls import Calls
from h2o_mlxlm.checks import check_positions
from h2o_mlxlm.counts import Count
from h2o_mlxlm.forms import Pair, Stored, forms
from h2o_mlxlm.ledger import Ledger
from h2o_mlxlm.masks import remember
from h2o_mlxlm.ragged import visibility
from h2o_mlxlm.slots import Slots
from h2o_mlxlm.stores import rows_of
from h2o_rope import Rotation


class H2OKVCache(Calls, _BaseCache):  # type: ignore[misc]
    """Keep at most ``budget`` tokens per KV head: one layer's cache.

    Its sequences have equal lengths, until mlx_lm batches it (see ``Batch``). How a call goes, see ``Calls``.

    Args:
        config: What to keep.
        scale: The model's factor on its logits. Needed for ``queries="key"`` alone; None is D^-0.5.
        rotation: The model's rotary embedding. Needed for ``positions="rolling"`` and ``"auto"`` alone.
        backend: Who does the arithmetic, or its name; see ``backend_of``.
        kv_bits: 8 or 4 stores rows quantised, None as they come; a pair is for keys and for values.
        kv_group_size: Numbers that share a scale: 32, 64 or 128, or a pair.
        kv_quantizer: ``"per_token"``, ``"kivi"`` or ``"gear"``; see ``make_prompt_cache``.

    Raises:
        ValueError: ``positions="rolling"`` or ``"auto"`` without a rotation, or ``"auto"`` without a
            ``trained_length``; a back end that can't run here; a way to store rows that there is none of.
    """

    def __init__(
        self,
        config: H2OConfig,
        scale: float | None = None,
        rotation: Rotation | None = None,
        backend: Backend | str = "auto",
        kv_bits: int | Pair | None = None,
        kv_group_size: int | Pair = 64,
        kv_quantizer: str = "per_token",
    ) -> None:
        self.config = config
        self.scale = scale
        self.backend = backend_of(backend) if isinstance(backend, str) else backend
        self.ledger, self.layer = Ledger(), 0  # until caches of one model come to share one
        self.storage = {"kv_bits": kv_bits, "kv_group_size": kv_group_size, "kv_quantizer": kv_quantizer}
        self.forms = forms(kv_bits, kv_group_size, kv_quantizer)
        check_positions(config, rotation, self.forms)
        self.rotation = None if config.positions == "original" else rotation
        holding, rolling = not config.evict_during_prefill, config.positions == "rolling"
        self._begin((Count(holding=holding, rolling=rolling),))

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

    @property
    def keys(self) -> Stored | None:
        """Keys of all slots as they are stored, None while nothing has been seen; some models set them.

        An array [B, H, C, D], or three of them if quantised: words, scales, biases.
        """
        return None if self._slots is None else self._slots.keys.stored

    @keys.setter
    def keys(self, value: Stored) -> None:
        self._slots = self._live()._replace(keys=rows_of(value, self.forms[0]))

    @property
    def values(self) -> Stored | None:
        """Values of all slots [B, H, C, Dv], likewise."""
        return None if self._slots is None else self._slots.values.stored

    @values.setter
    def values(self, value: Stored) -> None:
        self._slots = self._live()._replace(values=rows_of(value, self.forms[1]))

    @property
    def state(self) -> tuple[Any, ...]:
        """Everything that must be evaluated or saved, as arrays, None and one JSON string."""
        self._end_call()
        frequencies = None if self.rotation is None else self.rotation.frequencies
        scalars = {
            "config": asdict(self.config),
            "scale": self.scale,
            "storage": self.storage,
            "rotation": None if self.rotation is None else list(self.rotation[1:]),
            "counts": self._counts,
            "batched": self._batched,
            "to_come": self._to_come,
        }
        arrays = [None] * 6 if self._slots is None else [self.keys, self.values, *self._slots.state]
        return (*arrays, frequencies, json.dumps(scalars))

    @state.setter
    def state(self, value: tuple[Any, ...]) -> None:
        keys, values, *books, frequencies, text = value
        scalars = json.loads(text)
        rotation = None if frequencies is None else Rotation(frequencies, *scalars["rotation"])
        H2OKVCache.__init__(self, H2OConfig(**scalars["config"]), scalars["scale"], rotation, **scalars["storage"])
        if keys is not None:
            as_keys, as_values = self.forms
            self._slots = Slots(rows_of(keys, as_keys), rows_of(values, as_values), H2OState(*books))
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
        """Refuse: a cache stores rows in one form from its first token on."""
        raise ValueError(
            f"an H2O cache is quantised from its first token or not at all (mlx_lm asked for kv_bits={bits}): leave "
            f"kv_bits out of the call and use make_prompt_cache(model, config, kv_bits={bits}), or install likewise"
        )


def share(caches: Iterable[H2OKVCache]) -> None:
    """Let the caches of one model's layers keep their scores in one go; see ``Ledger``."""
    ledger = Ledger()
    for layer, cache in enumerate(caches):
        cache.ledger, cache.layer = ledger, layer
