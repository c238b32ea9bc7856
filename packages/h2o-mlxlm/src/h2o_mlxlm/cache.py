"""The cache that mlx_lm sees: its contract over core's state and the key and value slots.

No arithmetic of its own: who stays is core's to say, rotation is rope's, attention is attention.py's.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.base import create_causal_mask

from h2o_core import H2OConfig
from h2o_mlxlm.backend import Backend, backend_of
from h2o_mlxlm.checks import check_given, check_positions, check_storage
from h2o_mlxlm.counts import Count
from h2o_mlxlm.forms import Pair, Stored, forms
from h2o_mlxlm.ledger import Ledger
from h2o_mlxlm.masks import remember
from h2o_mlxlm.passes import Passes
from h2o_mlxlm.ragged import visibility
from h2o_mlxlm.rewind import Rewind
from h2o_mlxlm.snapshot import Snapshot, snapshot_of, state_of
from h2o_mlxlm.stores import rows_of
from h2o_rope import Rotation


class H2OKVCache(Rewind, mlx_lm_cache._BaseCache):  # type: ignore[misc]
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
        inputs: What the scorer needs of the caller, by name; see ``h2o_mlxlm.inputs``. A saved cache has none.

    Raises:
        ValueError: ``positions="rolling"`` or ``"auto"`` without a rotation, or ``"auto"`` without a
            ``trained_length``; a back end that can't run here; a way to store rows that there is none of; an input is
            missing, not known, or no array of finite numbers.
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
        inputs: Mapping[str, mx.array] | None = None,
    ) -> None:
        check_given(config.scorer, inputs)
        self.config = config
        self.inputs = dict(inputs or {})
        mx.eval(self.inputs)  # used by every generation, maybe on other threads
        self.plain = config.scorer.plain
        self.attended = config.queries == "true" and config.scorer.by_attention
        self.scale = scale
        self.backend = backend_of(backend) if isinstance(backend, str) else backend
        self.ledger, self.layer = Ledger(), 0  # until caches of one model come to share one
        storage = {"kv_bits": kv_bits, "kv_group_size": kv_group_size, "kv_quantizer": kv_quantizer}
        self.storage: dict[str, Any] = storage
        self.forms = forms(kv_bits, kv_group_size, kv_quantizer)
        check_positions(config, rotation, self.forms)
        check_storage(config, self.forms)
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
        self._forget()

    @property
    def values(self) -> Stored | None:
        """Values of all slots [B, H, C, Dv], likewise."""
        return None if self._slots is None else self._slots.values.stored

    @values.setter
    def values(self, value: Stored) -> None:
        self._slots = self._live()._replace(values=rows_of(value, self.forms[1]))
        self._forget()

    @property
    def state(self) -> dict[str, Any]:
        """Everything that must be evaluated or saved, by name: arrays, and one JSON string."""
        self._end_call()
        return state_of(
            Snapshot(
                self.config,
                self.scale,
                self.storage,
                self.rotation,
                self._slots,
                self._counts,
                self._batched,
                self._to_come,
            )
        )

    @state.setter
    def state(self, value: dict[str, Any]) -> None:
        made = snapshot_of(value)
        # One that was made for a model keeps its back end and inputs; mlx_lm's ``from_state`` makes one of nothing.
        kept: dict[str, Any] = {"backend": getattr(self, "backend", "auto"), "inputs": getattr(self, "inputs", None)}
        H2OKVCache.__init__(self, made.config, made.scale, made.rotation, **kept, **made.storage)
        self._slots, self._batched, self._to_come = made.slots, made.batched, made.to_come
        self._count(made.counts)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> NoReturn:
        """Refuse: a cache stores rows in one form from its first token on."""
        raise ValueError(
            f"an H2O cache is quantised from its first token or not at all (mlx_lm asked for kv_bits={bits}): leave "
            f"kv_bits out of the call and use make_prompt_cache(model, config, kv_bits={bits}), or install likewise"
        )


def share(caches: Sequence[Any]) -> None:
    """Let those of one model's caches that are ours keep their scores in one go, and notice a pass that does not end.

    See ``Ledger`` and ``Passes``.
    """
    ledger, passes = Ledger(), Passes(others=[c for c in caches if isinstance(c, mlx_lm_cache.RotatingKVCache)])
    for layer, cache in enumerate(chain(*map(parts_of, caches))):
        if isinstance(cache, H2OKVCache):
            cache.ledger, cache.layer, cache.passes = ledger, layer, passes


def parts_of(cache: Any) -> list[Any]:
    """List the caches of a layer: several if its heads are split among them, else the one that it is."""
    return [share.cache for share in getattr(cache, "shares", ())] or [cache]


# mlx_lm's load_prompt_cache finds classes by name in its own module.
mlx_lm_cache.H2OKVCache = H2OKVCache
