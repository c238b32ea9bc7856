"""The tables of ``eval loss``: per method and budget, with paired confidence intervals."""

import math
from collections.abc import Iterable
from typing import Any

import mlx.core as mx

from h2o_mlxlm.evaluation.bootstrap import Interval, draws, interval, mean, ratio, resampled
from h2o_mlxlm.evaluation.methods import BASELINE, Variant
from h2o_mlxlm.evaluation.results import table

MEASURES = ("loss", "full_loss", "above_full", "agreement", "kl", "cache_bytes", "tokens_kept")

Cells = dict[str, dict[str, list[float]]]
"""measure to text to one value a window, the mean over seeds."""


def gathered(rows: Iterable[dict[str, str]], runs: dict[str, str], n_windows: int) -> dict[Variant, Cells]:
    """Sort rows by variant (seed 0 stands for all seeds), leaving out those of other runs or other defaults.

    Args:
        rows: All rows of the file.
        runs: text to the identity that its rows must have.
        n_windows: Windows of each text; a variant that lacks some is left out.
    """
    values: dict[Variant, dict[tuple[str, int], list[dict[str, str]]]] = {}
    for row in rows:
        variant = _variant_of(row)
        if variant is not None and runs.get(row["text"]) == row["run"]:
            values.setdefault(variant, {}).setdefault((row["text"], int(row["window"])), []).append(row)
    every = [(text, window) for text in runs for window in range(n_windows)]
    return {v: _cells(found, runs, n_windows) for v, found in values.items() if all(key in found for key in every)}


def _variant_of(row: dict[str, str]) -> Variant | None:
    variant = Variant(row["method"], int(row["budget"]), row["settings"], 0, row["label"])
    try:
        return variant if variant.config == row["config"] else None
    except (TypeError, ValueError):  # a method or field of another version
        return None


def _cells(found: dict[tuple[str, int], list[dict[str, str]]], runs: dict[str, str], n_windows: int) -> Cells:
    return {
        m: {t: [mean([float(row[m]) for row in found[t, w]]) for w in range(n_windows)] for t in runs} for m in MEASURES
    }


def summarise(cells: dict[Variant, Cells], seed: int = 0) -> list[dict[str, Any]]:
    """Make one entry for each variant: means, intervals, and how it compares with recency at its budget.

    ``share`` is the mean over texts of the loss above full, divided by recency's. Windows are drawn again
    within each text, the same for all variants. With one window a text there are no intervals.
    """
    entries = []
    for variant, own in sorted(cells.items(), key=lambda item: item[0].budget):
        other = _baseline(cells, variant)
        drawn = draws([len(v) for v in own["above_full"].values()], seed)
        entries.append(_entry(variant, own, other, drawn))
    return entries


def _baseline(cells: dict[Variant, Cells], variant: Variant) -> Cells | None:
    for label in (variant.label, ""):
        found = cells.get(Variant(BASELINE, variant.budget, label=label))
        if found is not None:
            return found
    return None


def _entry(variant: Variant, own: Cells, other: Cells | None, drawn: list[mx.array]) -> dict[str, Any]:
    above = own["above_full"]
    samples = resampled(list(above.values()), drawn)
    overall = {m: mean([mean(v) for v in own[m].values()]) for m in MEASURES}
    entry: dict[str, Any] = {
        "method": variant.method,
        "budget": variant.budget,
        "settings": variant.settings,
        "label": variant.label,
        "name": variant.name,
        "above_full": _spread(above, samples),
        "mean": {"value": overall["above_full"], "interval": _interval(samples.mean(axis=0), above)},
        "perplexity": math.exp(overall["loss"]),
        "full_perplexity": math.exp(overall["full_loss"]),
        **{m: overall[m] for m in ("agreement", "kl", "cache_bytes", "tokens_kept")},
    }
    if other is not None:
        base = resampled(list(other["above_full"].values()), drawn)
        below = mean([mean(v) for v in other["above_full"].values()])
        shares = ratio(samples.mean(axis=0), base.mean(axis=0))
        difference = {t: [a - b for a, b in zip(above[t], other["above_full"][t], strict=True)] for t in above}
        share = overall["above_full"] / below if below > 0 else None
        entry["share_of_recency"] = {"value": share, "interval": _interval(shares, above)}
        entry["difference_to_recency"] = _spread(difference, resampled(list(difference.values()), drawn))
    return entry


def _spread(values: dict[str, list[float]], samples: mx.array) -> dict[str, Any]:
    return {t: {"value": mean(v), "interval": _interval(samples[i], values)} for i, (t, v) in enumerate(values.items())}


def _interval(samples: mx.array, values: dict[str, list[float]]) -> Interval:
    return interval(samples) if all(len(v) > 1 for v in values.values()) else None


def loss_tables(entries: list[dict[str, Any]]) -> str:
    """Write the summary as two tables."""
    texts = list(entries[0]["above_full"]) if entries else []
    header = ["loss above full, nats", "budget", *texts, "mean", "share of recency", "perplexity", "agree", "KL"]
    lines = [
        [
            entry["name"],
            str(entry["budget"] or "-"),
            *(f"{entry['above_full'][t]['value']:.3f}" for t in texts),
            _cell(entry["mean"], 3),
            _cell(entry.get("share_of_recency"), 2),
            f"{entry['perplexity']:.2f}",
            f"{entry['agreement']:.3f}",
            f"{entry['kl']:.3f}",
        ]
        for entry in entries
    ]
    parts = [table(header, lines)]
    compared = [e for e in entries if "difference_to_recency" in e and e["method"] != BASELINE]
    if compared:
        lines = [
            [e["name"], str(e["budget"]), *(_cell(e["difference_to_recency"][t], 3, "+") for t in texts)]
            for e in compared
        ]
        parts.append(table(["above recency, nats", "budget", *texts], lines))
    return "\n\n".join(parts)


def _cell(found: dict[str, Any] | None, digits: int, sign: str = "") -> str:
    if found is None or found["value"] is None:
        return "-"
    value = f"{found['value']:{sign}.{digits}f}"
    if found["interval"] is None:
        return value
    low, high = found["interval"]
    return f"{value} [{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]"
