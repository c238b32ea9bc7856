"""How a saved cache stores its rows: what is said of it, and which arrays there must be.

What comes may come from anywhere.
"""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from h2o_mlxlm.forms import Form, RowForm, forms
from h2o_mlxlm.stores import Store, rows_of

Expected = dict[str, tuple[tuple[mx.Dtype, ...], str]]
"""By name: dtypes, and axes, of which equal letters have equal lengths."""

FLOATS = (mx.float32, mx.float16, mx.bfloat16)

_FIELDS = ("kv_bits", "kv_group_size", "kv_quantizer")
# The last axis of rows as they come, or of their words if they are quantised; and of scales and biases.
_AXES = {"keys": ("D", "E"), "values": ("V", "W")}


def storage_of(values: Any) -> dict[str, Any]:
    """Read how rows are stored, as ``H2OKVCache`` takes it.

    Raises:
        ValueError: It is not how rows can be stored and come back.
    """
    if not isinstance(values, dict) or sorted(values) != sorted(_FIELDS):
        raise ValueError(f"storage must say {', '.join(_FIELDS)}, got {values!r:.80}")
    read: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in values.items()}
    if not all(isinstance(form, RowForm) for form in forms(**read)):
        raise ValueError(
            f"kv_quantizer={read['kv_quantizer']!r} can't be saved: rows in blocks stay in the process; use "
            'kv_quantizer="per_token"'
        )
    return read


def expected_of(storage: Mapping[str, Any]) -> Expected:
    """Say which arrays keys and values are in."""
    found: Expected = {}
    for (name, (rows, groups)), form in zip(_AXES.items(), forms(**storage), strict=True):
        if form.bits is None:
            found[name] = (FLOATS, f"BHC{rows}")
        else:
            found |= {f"{name}.0": ((mx.uint32,), f"BHC{rows}")}
            found |= {f"{name}.{i}": (FLOATS, f"BHC{groups}") for i in (1, 2)}
    return found


def rows_in(arrays: Mapping[str, mx.array], storage: Mapping[str, Any]) -> tuple[Store, Store]:
    """Make keys and values of their arrays, whose dtypes and axes have been checked.

    Raises:
        ValueError: Words and scales are for rows of different widths, or scales and biases of different dtypes.
    """
    keys, values = (_rows(name, arrays, form) for name, form in zip(_AXES, forms(**storage), strict=True))
    return keys, values


def _rows(name: str, arrays: Mapping[str, mx.array], form: Form) -> Store:
    if name in arrays:
        return rows_of(arrays[name], form)
    words, scales, biases = parts = [arrays[f"{name}.{i}"] for i in range(3)]
    width = words.shape[-1] * 32 // form.bits  # type: ignore[operator]  # quantised, or it would be one array
    if width != scales.shape[-1] * form.group_size or scales.dtype != biases.dtype:  # type: ignore[union-attr]
        raise ValueError(
            f"{name} of {width} numbers have {scales.shape[-1]} scales of {scales.dtype} and biases of {biases.dtype}, "
            "which do not go together"
        )
    return rows_of(parts, form)
