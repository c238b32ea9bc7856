"""A cache's state as mlx_lm saves it, and back: named arrays and one JSON string.

What comes back may have come from anywhere, and mlx does not check indices: everything is checked before a
cache takes it. Knows no file and no model; see ``persistence``.
"""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, NamedTuple, NoReturn, TypeVar

import mlx.core as mx
from mlx.utils import tree_flatten

from h2o_core import H2OConfig, H2OState
from h2o_core.config import MOST_TOKENS
from h2o_mlxlm.checks import is_whole
from h2o_mlxlm.counts import Count, Counts, outgrown
from h2o_mlxlm.ragged import per_sequence
from h2o_mlxlm.slots import Slots, capacity
from h2o_mlxlm.storage import Expected, expected_of, rows_in, storage_of
from h2o_rope import Rotation

Made = TypeVar("Made")

FORMAT = 1
"""Of what is below. Another number for another meaning."""

ABOUT = "about"
"""The name of the JSON string: mlx_lm's save would turn 0.98 into a float32 and drop empty lists."""

FREQUENCIES = "frequencies"

ARRAYS: Expected = {
    "scores": ((mx.float32,), "BHC"),
    "totals": ((mx.float32,), "BHC"),
    "positions": ((mx.int32,), "BHC"),
    "seen": ((mx.int32,), "B"),
}
"""Arrays of a cache that has seen something, beside its rows; see ``storage``.

What its scorer keeps beside the scores is ``extras.0`` and so on, float32, of the axes B H C and the scorer's own.
"""


class Snapshot(NamedTuple):
    """What a cache is between two calls."""

    config: H2OConfig
    scale: float | None
    storage: dict[str, Any]  # how rows are stored, as ``H2OKVCache`` takes it
    rotation: Rotation | None
    slots: Slots | None
    counts: Counts
    batched: bool
    to_come: tuple[int, ...] | None


def state_of(snapshot: Snapshot) -> dict[str, Any]:
    """Name what must be evaluated or saved: arrays, and a JSON string under ``ABOUT``."""
    slots, rotation = snapshot.slots, snapshot.rotation
    arrays: dict[str, Any] = {} if slots is None else _named(slots)
    if rotation is not None:
        arrays[FREQUENCIES] = rotation.frequencies
    about = {
        "format": FORMAT,
        "config": asdict(snapshot.config),
        "scale": snapshot.scale,
        "storage": snapshot.storage,
        "rotation": None if rotation is None else list(rotation[1:]),
        "counts": snapshot.counts,
        "batched": snapshot.batched,
        "to_come": snapshot.to_come,
    }
    return {**arrays, ABOUT: json.dumps(about)}


def _named(slots: Slots) -> dict[str, Any]:
    names = slots.state._asdict()
    extras = {f"extras.{i}": x for i, x in enumerate(names.pop("extras"))}
    return {"keys": slots.keys.stored, "values": slots.values.stored, **names, **extras}


def snapshot_of(state: Any) -> Snapshot:
    """Read a state back.

    Args:
        state: As ``state_of`` made it, or anything at all.

    Raises:
        ValueError: No cache can have this state.
    """
    arrays: dict[str, Any] = dict(tree_flatten(state))
    about = _about(arrays.pop(ABOUT, None))
    config, scale = config_of(about["config"]), about["scale"]
    if scale is not None and not _is_number(scale):
        _refuse(f"scale={scale!r} is no number")
    storage = _lawful(storage_of, about["storage"])
    rotation = _rotation(config, about["rotation"], arrays.pop(FREQUENCIES, None))
    counts = _counts(config, about["counts"], about["batched"])
    to_come = _to_come(counts, about["to_come"], about["batched"])
    slots = _slots(config, storage, counts, arrays, about["batched"])
    if rotation is not None and slots is not None and 2 * rotation.frequencies.size > slots.keys.kind[1]:
        _refuse(f"{rotation.frequencies.size} frequencies turn more dims than keys have, {slots.keys.kind[1]}")
    return Snapshot(config, scale, storage, rotation, slots, counts, about["batched"], to_come)


def parsed(text: Any, names: Sequence[str]) -> dict[str, Any]:
    """Read a JSON object that has a ``format`` and exactly these names beside it.

    Raises:
        ValueError: It is another, or of another format.
    """
    try:
        found = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        _refuse("its description is no JSON object")
    version = found.pop("format", None)
    if not is_whole(version, FORMAT, FORMAT):
        _refuse(f"format must be {FORMAT}, got {version!r}: it was written by another version")
    if sorted(found) != sorted(names):
        _refuse(f"its description must have {', '.join(sorted(names))}, got {', '.join(sorted(found))}")
    return found


def config_of(values: Any) -> H2OConfig:
    """Make the configuration that ``asdict`` took apart, or raise a ``ValueError``."""
    if not isinstance(values, dict) or sorted(values) != sorted(f.name for f in fields(H2OConfig)):
        _refuse("its configuration has other fields than H2OConfig")
    return _lawful(H2OConfig, **values)


def _lawful(make: Callable[..., Made], *given: Any, **named: Any) -> Made:
    """Make something of what came, whose errors are this state's."""
    try:
        return make(*given, **named)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{_LAW}: {error}") from error


def _about(text: Any) -> dict[str, Any]:
    about = parsed(text, ("config", "scale", "storage", "rotation", "counts", "batched", "to_come"))
    if not isinstance(about["batched"], bool):
        _refuse(f"batched must be true or false, got {about['batched']!r}")
    return about


def _rotation(config: H2OConfig, rest: Any, frequencies: Any) -> Rotation | None:
    if config.positions == "original":
        if rest is not None or frequencies is not None:
            _refuse('it has a rotation, which positions="original" has not')
        return None
    if not isinstance(frequencies, mx.array) or frequencies.ndim != 1 or frequencies.dtype != mx.float32:
        _refuse(f'positions="{config.positions}" needs frequencies, one float32 for each pair of dims')
    is_three = isinstance(rest, list) and len(rest) == 3 and isinstance(rest[0], bool)
    if not is_three or not all(_is_number(x) and x > 0 for x in rest[1:]):
        _refuse(f"rotation must be whether traditional, a factor and a scale above 0, got {rest!r}")
    if not frequencies.size or not mx.isfinite(frequencies).all().item():
        _refuse("frequencies must be finite numbers, at least one")
    return Rotation(frequencies, *rest)


def _counts(config: H2OConfig, entries: Any, batched: bool) -> Counts:
    if not isinstance(entries, list) or not entries or (not batched and len(entries) > 1):
        _refuse(f"counts must be one for each sequence of a batch, or one in all, got {entries!r:.80}")
    return tuple([_count(config, entry) for entry in entries])


def _count(config: H2OConfig, entry: Any) -> Count:
    if not isinstance(entry, list) or [type(x) for x in entry] != [int, int, int, bool, bool]:
        _refuse(f"a count must be three whole numbers and two truth values, got {entry!r:.80}")
    count = Count(*entry)
    seen, kept, largest, holding, rolling = count
    rolls = config.positions == "rolling" or outgrown(config, seen + largest)
    if not (
        # Of a call whose last tokens have been taken back, or could be, fewer are left.
        0 <= largest <= seen + config.rewind
        and seen <= MOST_TOKENS
        and (largest > 0) == (seen > 0)
        and kept == (seen if holding else min(seen, config.budget))
        and not (holding and config.evict_during_prefill)
        and rolling == rolls
    ):
        _refuse(f"no sequence can have {count} with {config}")
    return count


def _to_come(counts: Counts, values: Any, batched: bool) -> tuple[int, ...] | None:
    if values is None:
        return None
    fit = isinstance(values, list) and len(values) == len(counts) and batched
    if not fit or not all(is_whole(n, 0, MOST_TOKENS) for n in values):
        _refuse(f"to_come must be tokens for each of the {len(counts)} sequences of a batch, got {values!r:.80}")
    return tuple(values)


def _slots(
    config: H2OConfig, storage: dict[str, Any], counts: Counts, arrays: Mapping[str, Any], batched: bool
) -> Slots | None:
    if not arrays:
        if any(c.seen for c in counts):
            _refuse(f"tokens were seen, but there are no rows: {counts}")
        return None
    shapes = config.scorer.extras
    extras = [f"extras.{i}" for i in range(len(shapes))]
    expected = expected_of(storage) | ARRAYS
    if sorted(arrays) != sorted([*expected, *extras]):
        _refuse(f"its arrays must be {', '.join(sorted([*expected, *extras]))}, got {', '.join(sorted(arrays))}")
    n = _check_axes(arrays, expected)
    for name, more in zip(extras, shapes, strict=True):
        _check_extra(name, arrays[name], (n["B"], n["H"], n["C"], *more))
    if batched and n["B"] != len(counts):
        _refuse(f"there are {n['B']} sequences and {len(counts)} counts")
    rest = {name: arrays[name] for name in ARRAYS}
    state = H2OState(**rest, extras=tuple(arrays[name] for name in extras))
    slots = Slots(*_lawful(rows_in, arrays, storage), state)
    _check_rows(config, slots, counts if batched else counts * n["B"])
    return slots


def _check_axes(arrays: Mapping[str, Any], expected: Expected) -> dict[str, int]:
    """Check dtypes and shapes, and return the length of each axis."""
    lengths: dict[str, int] = {}
    for name, (dtypes, axes) in expected.items():
        x = arrays[name]
        if not isinstance(x, mx.array) or x.dtype not in dtypes or x.ndim != len(axes):
            got = f"{x.dtype} {list(x.shape)}" if isinstance(x, mx.array) else repr(type(x).__name__)
            _refuse(f"{name} must be {' or '.join(map(str, dtypes))} [{', '.join(axes)}], got {got}")
        _check_bytes(name, x)
        for axis, length in zip(axes, x.shape, strict=True):
            if lengths.setdefault(axis, length) != length or (length == 0 and axis != "C"):
                _refuse(f"{name} has {length} along {axis}, and {lengths[axis]} are expected")
    return lengths


def _check_extra(name: str, x: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(x, mx.array) or x.dtype != mx.float32 or x.shape != shape:
        got = f"{x.dtype} {list(x.shape)}" if isinstance(x, mx.array) else repr(type(x).__name__)
        _refuse(f"{name} must be {mx.float32} {list(shape)}, got {got}")
    _check_bytes(name, x)


def _check_bytes(name: str, x: mx.array) -> None:
    # mlx counts bytes up to 2^64 and goes on at 0, and its reader lets a file have less than it says.
    if x.nbytes != math.prod(x.shape) * x.itemsize:
        _refuse(f"{name} can't have the shape {list(x.shape)}")


def _check_rows(config: H2OConfig, slots: Slots, counts: Counts) -> None:
    """Check that every head holds the rows that its sequence's count says, where they may be."""
    state, width = slots.state, capacity(slots)
    if state.seen.tolist() != [c.seen for c in counts]:
        _refuse(f"seen={state.seen.tolist()!r:.80} is not what was counted")
    most = max(c.kept for c in counts)
    if width < most:
        _refuse(f"{most} rows are counted, but there are {width} slots")
    positions, held = state.positions, state.positions >= 0
    seen, kept = (per_sequence(x) for x in ([c.seen for c in counts], [c.kept for c in counts]))
    first = mx.arange(width) < kept
    safe = held & ((positions < config.n_sink) | (positions >= seen - config.grace))
    in_order = mx.sort(positions, axis=-1) if width else positions
    kept_beside = [x.flatten(3).any(axis=-1) if x.ndim > 3 else x != 0 for x in state.extras]
    marked = sum(kept_beside, (state.scores != 0) | (state.totals != 0))
    laws = {
        "positions are -1 or below the tokens seen": (positions >= -1) & (positions < seen),
        "a head holds a position once": (in_order[..., 1:] != in_order[..., :-1]) | (in_order[..., 1:] < 0),
        "every head holds the rows that were counted": held.sum(axis=-1, keepdims=True) == kept,
        "rows come first, or fill budget + 1 slots but one": (held == first)
        | ((kept == config.budget) & (width == config.budget + 1)),
        "sinks and the newest rows are held": safe.sum(axis=-1, keepdims=True)
        == mx.minimum(seen, config.n_sink + config.grace),
        "scores and totals are not negative": ~((state.scores < 0) & config.scorer.sums | (state.totals < 0)),
        "an empty slot has no score": held | ~marked,
        "an empty slot is finite": _finite(slots.keys.opened(), held) & _finite(slots.values.opened(), held),
    }
    hold = mx.stack([holds.all() for holds in laws.values()]).tolist()
    broken = [law for law, holds in zip(laws, hold, strict=True) if not holds]  # type: ignore[arg-type]
    if broken:
        _refuse(f"the law is that {broken[0]}")


def _finite(rows: mx.array, held: mx.array) -> mx.array:
    return (held[..., None] | mx.isfinite(rows)).all()


def _is_number(x: Any) -> bool:
    # Not isfinite, which makes a float of a whole number first, however large.
    return isinstance(x, (int, float)) and not isinstance(x, bool) and abs(x) <= sys.float_info.max


_LAW = "this is no state that an H2O cache can have"


def _refuse(what: str) -> NoReturn:
    raise ValueError(f"{_LAW}: {what}; take it from a cache, or from a file of save_prompt_cache")
