"""The file that rows go to."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def append(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append rows to a CSV file. New columns go to the right; earlier rows have none of them.

    Args:
        path: The file; made if there is none.
        rows: Mappings of mappings at most one deep: ``versions`` becomes ``versions.mlx`` and so on.

    Raises:
        OSError: The file can't be written.
    """
    added = [_flat(row) for row in rows]
    columns, earlier = _read(path)
    wanted = list(dict.fromkeys(columns + [key for row in added for key in row]))
    fresh = wanted != columns
    with path.open("w" if fresh else "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, wanted)
        if fresh:
            writer.writeheader()
            writer.writerows(earlier)
        writer.writerows(added)


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    if not path.exists():
        return [], []
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        return list(reader.fieldnames or []), list(reader)


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        flat |= {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {key: value}
    return flat
