"""A safetensors file that may have been written by anyone, and one that is written whole or not at all.

mlx's reader trusts products of lengths that wrap around at 2^64 and cuts lengths to 32 bits, so the header is
read here first.
"""

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from h2o_mlxlm.checks import is_whole

BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "I64": 8, "U8": 1, "BOOL": 1}
"""Of one number, for the dtypes that caches have."""

MOST_HEADER = 2**24
"""Bytes of a header; a cache of 1,000 layers takes less than a tenth."""


def write_arrays(path: Path, arrays: Mapping[str, mx.array], metadata: Mapping[str, str]) -> None:
    """Write a file, whole or not at all.

    Raises:
        OSError: It can't be written.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"can't write {path}: there is no folder {path.parent}")
    # In the same folder, for a file can't be renamed into another file system.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".saving-") as folder:
        part = Path(folder) / "part.safetensors"
        try:
            mx.save_safetensors(str(part), dict(arrays), dict(metadata))
        except RuntimeError as error:
            raise OSError(f"can't write {path}: {error}") from error
        os.replace(part, path)


def read_arrays(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Read a file's arrays and its metadata.

    Raises:
        OSError: There is no such file, or it can't be read.
        ValueError: It is no whole safetensors file.
    """
    header = _header(path)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(x, str) for x in metadata.values()):
        raise ValueError("its metadata are not all text")
    shapes = _shapes(header, path.stat().st_size - _start(path))
    try:
        arrays: dict[str, mx.array] = mx.load(str(path), format="safetensors")  # type: ignore[assignment]
        mx.eval(arrays)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    if {name: x.shape for name, x in arrays.items()} != shapes:
        raise ValueError("its header can be read in two ways")
    return arrays, metadata


def _start(path: Path) -> int:
    """Where a file's numbers begin."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if size < 8 or not 0 < length <= min(size - 8, MOST_HEADER):
        raise ValueError(
            f"a header of {length} bytes does not fit into a file of {size} bytes or is above {MOST_HEADER}"
        )
    return 8 + length


def _header(path: Path) -> dict[str, Any]:
    start = _start(path)
    with path.open("rb") as file:
        text = file.read(start)[8:]
    try:
        header = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    return header


def _shapes(entries: Mapping[str, Any], n_bytes: int) -> dict[str, tuple[int, ...]]:
    """Check that the arrays fill the file without gap or overlap."""
    spans, shapes = [], {}
    for name, entry in entries.items():
        if not isinstance(entry, dict) or sorted(entry) != ["data_offsets", "dtype", "shape"]:
            raise ValueError(f"array {name!r:.80} is not described by dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in BYTES:
            raise ValueError(f"array {name!r:.80} has dtype {dtype!r:.80}, and caches have {', '.join(BYTES)}")
        if not _are_whole(shape, 2**31 - 1) or not _are_whole(offsets, n_bytes) or len(offsets) != 2:
            raise ValueError(f"array {name!r:.80} has shape {shape!r:.80} at {offsets!r:.80}, in {n_bytes} bytes")
        if offsets[1] - offsets[0] != math.prod(shape) * BYTES[dtype]:
            raise ValueError(f"array {name!r:.80} of shape {shape!r:.80} does not take the bytes {offsets}")
        spans.append(offsets)
        shapes[name] = tuple(shape)
    ends = [0, *(end for _, end in sorted(spans))]
    if [begin for begin, _ in sorted(spans)] != ends[:-1] or ends[-1] != n_bytes:
        raise ValueError(f"its arrays take {ends[-1]} bytes with gaps or overlaps, and there are {n_bytes}")
    return shapes


def _are_whole(values: Any, most: int) -> bool:
    return isinstance(values, list) and all(is_whole(x, 0, most) for x in values)
