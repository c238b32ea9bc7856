"""Rows that survive an interruption, and how they are shown."""

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any


class Rows:
    """A CSV file that grows by whole batches and is taken up again where it ended.

    Args:
        path: The file; a last line that was half written is dropped.
        columns: Its columns.
        key: Those that identify a row.

    Raises:
        ValueError: The file has other columns.
    """

    def __init__(self, path: Path, columns: Sequence[str], key: Sequence[str]) -> None:
        self.path, self.columns, self.key = path, list(columns), list(key)
        self._found = {self._key_of(row): row for row in self._read()}

    def __contains__(self, row: dict[str, Any]) -> bool:
        """Say whether a row with this key is there."""
        return self._key_of(row) in self._found

    def __iter__(self) -> Iterator[dict[str, str]]:
        """Go through all rows."""
        return iter(self._found.values())

    def find(self, row: dict[str, Any]) -> dict[str, str]:
        """Find the row with this key."""
        return self._found[self._key_of(row)]

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Write those that are not there yet, all in one go."""
        new = [{name: _written(row[name]) for name in self.columns} for row in rows if row not in self]
        is_new = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerows(new)
        self._found |= {self._key_of(row): row for row in new}

    def _read(self) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if not whole:
            self.path.unlink()
            return []
        if whole != text:
            self.path.write_text(whole, encoding="utf-8")
        reader = csv.DictReader(whole.splitlines())
        if reader.fieldnames != self.columns:
            raise ValueError(f"{self.path} has other columns than this command writes: name another --out")
        return list(reader)

    def _key_of(self, row: dict[str, Any]) -> tuple[str, ...]:
        return tuple(_written(row[name]) for name in self.key)


def _written(value: Any) -> str:
    # One line a row, or a half-written row could not be told from a whole one.
    return f"{value:.7g}" if isinstance(value, float) else " ".join(str(value).split())


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Set columns as wide as their widest cell, the first to the left and the others to the right."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    lines = []
    for line in (header, *rows):
        cells = [cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
