"""Recorded attention in safetensors files: read with every check, written in the same form.

A file holds layers, each under ``layers.N.`` or, if it is the only one, under no prefix:

- either ``attention`` [Hq, T, T] or [B, Hq, T, T], probabilities: causal, each row summing to 1;
- or ``queries`` [.., Hq, T, D] and ``keys`` [.., H, T, D] where they have been rotated, ``scale``, and optionally
  ``values`` [.., H, T, Dv]: attention is made from them row by row, and the file grows with T, not T².

``n_kv_heads`` may say H where there are no keys. ``scale`` and ``n_kv_heads`` are scalars. All else is refused.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from h2o_core.rows import Recording, causal

FLOATS = (mx.float32, mx.float16, mx.bfloat16)
ROW_SUM = {mx.float32: 1e-3, mx.float16: 1e-2, mx.bfloat16: 5e-2}
"""How far from 1 a row may sum, by what it was stored as."""

_NAME = re.compile(r"(?:layers\.(\d{1,5})\.)?(attention|queries|keys|values|scale|n_kv_heads)")


def read_trace(path: str | Path, layer: int | None = None) -> Recording:
    """Read one layer of a trace, and check it.

    Args:
        path: The file. It is not trusted: nothing in it chooses code.
        layer: Which; None if there is but one.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no trace, or a tensor is not what it must be; one sentence says what and where.
    """
    layers = _load(path)
    if layer is None and len(layers) > 1:
        raise ValueError(f"{path} has the layers {_listed(layers)}: say which")
    chosen = next(iter(layers)) if layer is None else layer
    if chosen not in layers:
        raise ValueError(f"{path} has no layer {layer}: there is {_listed(layers)}")
    try:
        return _recording(layers[chosen])
    except ValueError as error:
        where = f"{path}" if chosen is None else f"{path}, layer {chosen}"
        raise ValueError(f"{where}: {error}") from error


def layers_of(path: str | Path) -> list[int]:
    """List the layers of a trace; none if it has one without a number.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no trace.
    """
    return sorted(number for number in _load(path) if number is not None)


def write_trace(
    path: str | Path, recorded: Recording | Mapping[int, Recording], about: Mapping[str, str] | None = None
) -> None:
    """Write a trace that ``read_trace`` reads.

    Args:
        path: Ends in ``.safetensors``.
        recorded: One layer, or layers by number.
        about: Whatever is to be known of it, for people: the file's metadata.

    Raises:
        ValueError: The name ends otherwise, or a recording is not what it must be.
    """
    if Path(path).suffix != ".safetensors":
        raise ValueError(f"a trace is written to a file that ends in .safetensors, got {path}")
    layers = {"": recorded} if isinstance(recorded, Recording) else {f"layers.{n}.": r for n, r in recorded.items()}
    if not layers:
        raise ValueError("a trace must have at least one layer, got none")
    tensors: dict[str, mx.array] = {}
    for prefix, recording in layers.items():
        held = {name: value for name, value in recording._asdict().items() if value is not None}
        for name, kind in (("scale", mx.float32), ("n_kv_heads", mx.int32)):
            if name in held:
                held[name] = mx.array(held[name], kind)
        _recording(held)
        tensors |= {prefix + name: value for name, value in held.items()}
    try:
        mx.save_safetensors(str(path), tensors, dict(about or {}))
    except RuntimeError as error:
        raise ValueError(f"{path} can't be written: {error}") from error


def _load(path: str | Path) -> dict[int | None, dict[str, mx.array]]:
    """The file's tensors, not yet read, by layer."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no trace at {path}")
    try:
        tensors: Any = mx.load(str(path), format="safetensors")
    except Exception as error:  # whatever the reader of a damaged file comes upon
        raise ValueError(f"{path} is no safetensors file: {error}") from error
    layers: dict[int | None, dict[str, mx.array]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"{path} is no trace: it has a tensor {name[:80]!r}")
        layers.setdefault(None if match[1] is None else int(match[1]), {})[match[2]] = tensor
    if not layers:
        raise ValueError(f"{path} is no trace: it has no tensors")
    return dict(sorted(layers.items(), key=lambda item: (item[0] is not None, item[0])))


def _listed(layers: Mapping[int | None, object]) -> str:
    return ", ".join("one without a number" if n is None else str(n) for n in layers)


def _recording(tensors: Mapping[str, mx.array]) -> Recording:
    """A layer's tensors, checked."""
    scale = _scalar(tensors, "scale", FLOATS)
    n_kv_heads = _scalar(tensors, "n_kv_heads", (mx.int32, mx.int64))
    if n_kv_heads is not None and not 1 <= n_kv_heads <= 2**16:
        raise ValueError(f"n_kv_heads must be a number of heads, got {n_kv_heads}")
    held = {name: x for name, x in tensors.items() if name not in ("scale", "n_kv_heads")}
    for name, x in held.items():
        if x.dtype not in FLOATS:
            raise ValueError(f"{name} must be float32, float16 or bfloat16, got {x.dtype}")
        if x.ndim not in (3, 4) or 0 in x.shape[:-1]:
            raise ValueError(f"{name} must have three axes, or four with a batch, none empty, got shape {x.shape}")
    if "attention" in held:
        _check_attention(held, n_kv_heads)
    else:
        n_kv_heads = _check_queries(held, scale, n_kv_heads)
    recording = Recording(**held, scale=scale, n_kv_heads=None if n_kv_heads is None else int(n_kv_heads))
    _check_numbers(recording)
    return recording


def _scalar(tensors: Mapping[str, mx.array], name: str, dtypes: tuple[mx.Dtype, ...]) -> float | None:
    if name not in tensors:
        return None
    x = tensors[name]
    if x.size != 1 or x.dtype not in dtypes:
        raise ValueError(
            f"{name} must be one number, {' or '.join(map(str, dtypes))}, got {x.dtype} of shape {x.shape}"
        )
    value: Any = x.item()
    return float(value)


def _check_attention(held: Mapping[str, mx.array], n_kv_heads: float | None) -> None:
    shape = held["attention"].shape
    if len(held) > 1:
        raise ValueError(f"it must have attention or queries and keys, not both, got {', '.join(sorted(held))}")
    if shape[-1] != shape[-2]:
        raise ValueError(f"attention must be [Hq, T, T] or [B, Hq, T, T], got shape {shape}")
    if n_kv_heads is not None and shape[-3] % n_kv_heads:
        raise ValueError(f"n_kv_heads must divide the {shape[-3]} query heads, got {n_kv_heads}")


def _check_queries(held: Mapping[str, mx.array], scale: float | None, n_kv_heads: float | None) -> float:
    if not {"queries", "keys"} <= held.keys() or scale is None:
        raise ValueError(
            f"it must have attention, or queries, keys and scale, got {', '.join(sorted(held)) or 'none'}"
            + ("" if scale is None else " and scale")
        )
    if not 0 < scale < float("inf"):
        raise ValueError(f"scale must be above 0 and finite, got {scale}")
    queries, keys = held["queries"].shape, held["keys"].shape
    values = held.get("values", held["keys"]).shape
    one_length = (*queries[:-3], queries[-2]) == (*keys[:-3], keys[-2]) == (*values[:-3], values[-2])
    if not one_length or queries[-1] != keys[-1] or values[-3] != keys[-3] or queries[-3] % keys[-3]:
        raise ValueError(
            f"queries [Hq, T, D], keys [H, T, D] and values [H, T, Dv] must agree, Hq a multiple of H, got "
            f"{queries}, {keys}, {values}"
        )
    if n_kv_heads not in (None, keys[-3]):
        raise ValueError(f"n_kv_heads must be the {keys[-3]} heads of keys, got {n_kv_heads}")
    return keys[-3]


def _check_numbers(recording: Recording) -> None:
    """Check what is in the tensors; attention block by block."""
    for name in ("queries", "keys", "values"):
        x = getattr(recording, name)
        if x is not None and not mx.isfinite(x).all().item():
            raise ValueError(f"{name} must be finite, and not all are")
    if recording.attention is None:
        return
    tolerance, start = ROW_SUM[recording.attention.dtype], 0
    for block in recording.rows():
        p, stop = block.astype(mx.float32), start + block.shape[-2]
        seen = causal(start, stop, p.shape[-1])
        later, wrong = mx.where(seen, 0.0, p).max(), mx.abs(p.sum(axis=-1) - 1).max()
        if not (mx.isfinite(p) & (p >= 0)).all().item():
            raise ValueError(f"attention must be finite and at least 0, and rows {start} to {stop - 1} are not")
        if (later > 0).item():
            raise ValueError(f"attention must be causal, and rows {start} to {stop - 1} see later tokens")
        if (wrong > tolerance).item():
            raise ValueError(
                f"each row of attention must sum to 1, and rows {start} to {stop - 1} are off by {wrong.item():.3g}"
            )
        start = stop
