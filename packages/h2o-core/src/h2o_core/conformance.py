"""What every implementation must do: a float64 oracle, and how far from it a dtype may be.

The oracle is written from the formulas, one token and one head at a time, in Python floats. It shares no
code with the rest of the package. Back ends and adapters run it beside their own results.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from h2o_core.config import H2OConfig

TOLERANCE: dict[mx.Dtype, float] = {mx.float32: 2e-5, mx.float16: 1e-3, mx.bfloat16: 8e-3}
"""Largest difference in an output or a score, relative to 1 + its magnitude."""

Vector = Sequence[float]


@dataclass
class Row:
    """One kept token of one head."""

    position: int
    key: Vector
    value: Vector
    score: float = 0.0
    total: float = 0.0

    def is_finite(self) -> bool:
        """Say whether the row can be ranked by its numbers."""
        return math.isfinite(self.score) and math.isfinite(self.total)


@dataclass
class Head:
    """One KV head of one sequence, naively: the oracle of state, attention, scoring and eviction."""

    config: H2OConfig
    scale: float
    rows: list[Row] = field(default_factory=list)
    seen: int = 0
    evicted: list[Row] = field(default_factory=list)
    holding: bool = field(init=False)

    def __post_init__(self) -> None:
        self.holding = not self.config.evict_during_prefill

    def call(
        self,
        queries: Sequence[Sequence[Vector]],
        keys: Sequence[Vector],
        values: Sequence[Vector],
        sinks: Vector | None = None,
    ) -> list[list[list[float]]]:
        """Run one call of N tokens: admit, attend, observe, evict.

        Args:
            queries: [G][N][D].
            keys: [N][D].
            values: [N][Dv].
            sinks: A sink logit per query head of the group, [G].

        Returns:
            Outputs, [G][N][Dv].
        """
        first, n_tokens = self.seen, len(keys)
        for i in range(n_tokens):
            self.rows.append(Row(first + i, keys[i], values[i]))
        self.seen += n_tokens
        outputs: list[list[list[float]]] = [[] for _ in queries]
        for i in range(n_tokens):
            shown = [row for row in self.rows if row.position <= first + i]
            for row in self.rows:
                row.score *= self.config.decay
            for g, query in enumerate(queries):
                p = self._probabilities(query[i], shown, None if sinks is None else sinks[g])
                outputs[g].append(
                    [
                        math.fsum(w * row.value[d] for w, row in zip(p, shown, strict=True))
                        for d in range(len(values[0]))
                    ]
                )
                for w, row in zip(p, shown, strict=True):
                    row.score += w / len(queries)
                    row.total += w / len(queries)
        if n_tokens == 1:
            self.holding = False
        while not self.holding and len(self.rows) > self.config.budget:
            self._evict_one()
        return outputs

    def _probabilities(self, query: Vector, rows: list[Row], sink: float | None) -> list[float]:
        logits = [self.scale * math.fsum(a * b for a, b in zip(query, row.key, strict=True)) for row in rows]
        top = max(logits if sink is None else [*logits, sink])
        weights = [math.exp(x - top) for x in logits]
        total = math.fsum(weights) + (0.0 if sink is None else math.exp(sink - top))
        return [w / total for w in weights]

    def _evict_one(self) -> None:
        newest = self.seen - 1
        open_rows = [
            row
            for row in self.rows
            if row.position >= self.config.n_sink and row.position <= newest - self.config.grace
        ]
        # Places for long-term rows are theirs whoever goes, so the rest goes by score among itself.
        by_total = sorted(open_rows, key=lambda row: (row.is_finite(), row.total, row.position), reverse=True)
        long_term = [row for row in by_total[: self.config.n_long] if row.is_finite()]
        others = [row for row in open_rows if row not in long_term]
        victim = min(others, key=lambda row: (row.is_finite(), row.score, row.position))
        self.rows.remove(victim)
        self.evicted.append(victim)

    def kept(self) -> list[int]:
        """Positions held, ascending."""
        return sorted(row.position for row in self.rows)


def close(a: float, b: float, tolerance: float) -> bool:
    """Compare two numbers by the rule of ``TOLERANCE``; two that are not finite are equal."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.isfinite(a) == math.isfinite(b)
    return abs(a - b) <= tolerance * (1 + max(abs(a), abs(b)))


def same_choice(kept: set[int], expected: set[int], rows: dict[int, Row], tolerance: float) -> bool:
    """Compare two kept sets of one head at the first step where they differ.

    Two implementations in float32 sum in different orders, so they may choose either of two rows whose
    scores, or totals, all but tie. After such a step the comparison of that head ends.

    Args:
        kept: Positions that the implementation holds.
        expected: Positions that the oracle holds.
        rows: The oracle's row of every position held before the eviction.
        tolerance: From ``TOLERANCE``.

    Returns:
        True if the sets are equal, or differ by rows whose scores, or whose totals, are within the tolerance.
    """
    ours, theirs = [rows[p] for p in kept - expected], [rows[p] for p in expected - kept]
    return len(ours) == len(theirs) and (
        _all_close([row.score for row in ours], [row.score for row in theirs], tolerance)
        or _all_close([row.total for row in ours], [row.total for row in theirs], tolerance)
    )


def _all_close(a: list[float], b: list[float], tolerance: float) -> bool:
    return all(close(x, y, tolerance) for x, y in zip(sorted(a), sorted(b), strict=True))
